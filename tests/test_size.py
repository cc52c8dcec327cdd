"""The limits that keep it readable."""

import ast
import functools
import io
import re
import subprocess
import sys
import tokenize
import tomllib

import pytest
from conftest import ROOT

MOST = {"core": 1000, "lines": 1500, "configs": 160, "launch.sh": 180}
CORE = [ROOT / name for name in ("trainer.py", "orchestrator.py", "env.py")]
TREE = [path for folder in (ROOT, ROOT / "configs", ROOT / "tools") for path in sorted(folder.glob("*.py"))]
NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER
)  # fmt: skip


@functools.cache
def parse(path):
    return ast.parse(path.read_text())


def code_lines(path):
    """Lines with code: no blank ones, comments or docstrings."""
    docs, text = set(), path.read_text()
    for node in ast.walk(parse(path)):
        has_doc = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_doc and ast.get_docstring(node) is not None:
            docs |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in NO_CODE]
    numbers = {n for t in tokens for n in range(t.start[0], t.end[0] + 1)} - docs
    return [text.splitlines()[n - 1] for n in sorted(numbers)]


def num_lines(path):
    return len(path.read_text().splitlines())


def test_code_lines_are_counted():
    assert code_lines(ROOT / "tests" / "receivers.py")[0] == "from configs.serving.cpu_receiver import WeightReceiver"
    assert len(code_lines(ROOT / "tests" / "receivers.py")) < num_lines(ROOT / "tests" / "receivers.py") - 3


def test_the_three_files_are_small_and_not_golfed():
    code = [line for path in CORE for line in code_lines(path)]
    assert len(code) <= MOST["core"] and sum(map(num_lines, CORE)) <= MOST["lines"]
    assert sum(map(len, code)) / len(code) <= 66


def test_configuration_and_launcher_are_small():
    assert len(code_lines(ROOT / "configs" / "__init__.py")) <= MOST["configs"]
    text = (ROOT / "launch.sh").read_text()
    assert len(text.splitlines()) <= MOST["launch.sh"]
    assert max(map(len, text.splitlines())) <= 120
    assert not re.search(r"(^|[;&|({]|\b(then|do|else))[ \t]*(source|\.)[ \t]+\S", text, re.MULTILINE)


def test_no_line_is_over_120_and_no_function_over_60():
    for path in ROOT.rglob("*.py"):
        if not {part for part in path.relative_to(ROOT).parts if part.startswith(".")}:
            assert max(map(len, path.read_text().splitlines()), default=0) <= 120, path
    for path in TREE:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path.name}: {node.name}"


def module_name(path):
    """As others import it: trainer, configs, configs.environments.parsers, tools.watch."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


NAMES = {module_name(path) for path in TREE}


def imports(path):
    """-> our modules that this one imports, anywhere in it."""
    asked, folder = set(), module_name(path).rpartition(".")[0]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            asked |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            asked |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    # a script's own folder, and configs/, are on Python's path
    near = {f"{place}.{name}" for name in asked - NAMES for place in (folder, "configs")}
    return ((asked | near) & NAMES) - {module_name(path)}


def test_imports_are_as_designed():
    found = {module_name(path): imports(path) for path in TREE}
    assert (found["trainer"], found["orchestrator"]) == ({"configs"}, {"configs", "env"})
    assert found["env"] == found["configs"] == set()
    for name, others in found.items():
        assert name.startswith("tools.") or not any(other.startswith("tools") for other in others), name


def test_no_imports_run_in_a_circle():
    left = {module_name(path): imports(path) for path in TREE}
    while done := {name for name, others in left.items() if not others & set(left)}:
        left = {name: others for name, others in left.items() if name not in done}
    assert not left


def test_what_runs_by_default_is_in_the_core():
    def values(table):
        for value in table.values():
            yield from values(value) if isinstance(value, dict) else value if isinstance(value, list) else [value]

    defaults = tomllib.loads((ROOT / "configs" / "defaults.toml").read_text())
    del defaults["limits"]
    assert not [value for value in values(defaults) if re.fullmatch(r"[\w./-]+:\w+", str(value))]
    assert not (ROOT / "configs" / "lib").exists()


@pytest.mark.parametrize("path", [*CORE, ROOT / "configs" / "__init__.py"], ids=module_name)
def test_the_readme_counts_right(path):
    """A row of its table: code lines, and all lines. And the two sums: of the three files, and of everything."""
    readme = (ROOT / "README.md").read_text()
    row = re.search(rf"^\| `{path.relative_to(ROOT)}` \|.*\| ([\d,]+) \| ([\d,]+) \|$", readme, re.MULTILINE)
    assert row, f"no row for {path.name}"
    assert [int(x.replace(",", "")) for x in row.groups()] == [len(code_lines(path)), num_lines(path)]
    for files in (CORE, TREE):
        assert f"{sum(len(code_lines(file)) for file in files):,}" in readme


def test_format_and_lint():
    for command in ("format --check", "check"):
        ruff = [sys.executable, "-m", "ruff", *command.split(), "."]
        done = subprocess.run(ruff, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
