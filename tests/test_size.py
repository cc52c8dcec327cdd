"""The limits that keep it readable."""

import ast
import re
import subprocess
import sys

from conftest import ROOT

FILES = [ROOT / name for name in ("trainer.py", "orchestrator.py", "env.py")]


def test_the_three_files_stay_small():
    assert sum(len(path.read_text().splitlines()) for path in FILES) <= 1000
    assert sum(len(path.read_text().splitlines()) for path in (ROOT / "tools").glob("*.py")) <= 500
    assert len((ROOT / "launch.sh").read_text().splitlines()) <= 200


def test_the_readme_counts_right():
    def count(where):
        path = ROOT / where
        files = [path] if path.is_file() else [f for f in path.iterdir() if f.suffix in (".py", ".sh")]
        return sum(len(file.read_text().splitlines()) for file in files)

    readme, whole = (ROOT / "README.md").read_text(), sum(count(path) for path in FILES)
    for where in ("trainer.py", "orchestrator.py", "env.py", "configs/lib/", "launch.sh", "tools/"):
        row = re.search(rf"^\| `{where}` \|.*\| ([\d,]+) \|$", readme, re.MULTILINE)
        assert int(row[1].replace(",", "")) == count(where), where
    assert f"one file per role, {whole} lines" in readme and f"| {whole} + {count('configs/lib'):,} |" in readme


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
