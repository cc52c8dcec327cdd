"""The limits that keep it readable."""

import ast
import subprocess
import sys

from conftest import ROOT

FILES = [ROOT / name for name in ("trainer.py", "orchestrator.py", "env.py")]


def test_the_three_files_stay_small():
    assert sum(len(path.read_text().splitlines()) for path in FILES) <= 1000
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "tools").glob("*.py")) <= 500
    assert len((ROOT / "launch.sh").read_text().splitlines()) <= 200


def test_no_function_is_over_60_lines():
    for path in [*FILES, *(ROOT / "configs").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"


def test_format_and_lint():
    for command in ("format --check", "check"):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command.split(), "."], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
