"""How much there is to read: lines and tokens of code without comments and docstrings, and words of documents.

python tests/size.py prints every file, --check ends with 1 if a limit of the whole is passed. Whoever passes one takes
something out. By Python 3.11: later versions count an f-string as several tokens."""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = [*ROOT.glob("tests/**/*.py")]
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
PRODUCT = [*ROOT.glob("*.py"), *ROOT.glob("configs/**/*.py"), *ROOT.glob("tools/**/*.py")]
ROLES = [ROOT / "trainer.py", ROOT / "orchestrator.py", ROOT / "env.py"]
# What a default run executes; serving/formats.py is for agents.
RUN = [*ROLES, ROOT / "rolemodel/launch.py", ROOT / "rolemodel/config.py", ROOT / "rolemodel/evaluation.py"]
RUN += [*ROOT.glob("rolemodel/*.py"), *(ROOT.glob("rolemodel/serving/[!f]*.py")), ROOT / "rolemodel/serving/flags.py"]
DOCUMENTS = [path for path in ROOT.rglob("*.md") if not path.relative_to(ROOT).parts[0].startswith((".", "outputs"))]


def size(path):
    text = path.read_text()
    docs = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                docs |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in NO_CODE]
    tokens = [t for t in tokens if t.start[0] not in docs]
    return len({line for t in tokens for line in range(t.start[0], t.end[0] + 1)}), len(tokens)


def total(paths):
    return [sum(numbers) for numbers in zip(*map(size, paths))]


def limits():
    """[(what is limited, how much there is, the most there may be)]"""
    lines, tokens = total(ROLES)
    code = total(PRODUCT)[0]
    words = {path.relative_to(ROOT).as_posix(): len(path.read_text().split()) for path in DOCUMENTS}
    return [
        ("lines of the roles", lines, 1050),
        ("tokens of the roles", tokens, 12_500),
        ("tokens a line of the roles", tokens / lines, 12.1),
        ("lines that a default run executes", total(RUN)[0], 1955),
        ("lines of all but tests", code, 6992),
        ("lines of tests for each of the rest", total(TESTS)[0] / code, 0.7),
        ("words of README.md", words.pop("README.md"), 1100),
        ("words of docs/manual.md", words.pop("docs/manual.md"), 2800),
        ("words of the other documents", sum(words.values()), 2000),
    ]


if __name__ == "__main__":
    if "--check" in sys.argv:
        passed = [f"{what}: {num:.6g}, at most {most}" for what, num, most in limits() if num > most]
        sys.exit("\n".join(passed) or None)
    for path in [*PRODUCT, *TESTS]:
        print(*(f"{number:6}" for number in size(path)), path.relative_to(ROOT))
