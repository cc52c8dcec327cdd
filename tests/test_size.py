"""How much there is to read: lines and tokens of code without comments and docstrings, and words of documents.

python tests/test_size.py prints every file. Whoever passes a limit takes something out."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
PRODUCT = [*ROOT.glob("*.py"), *ROOT.glob("configs/**/*.py"), *ROOT.glob("tools/**/*.py")]
ROLES = [ROOT / "trainer.py", ROOT / "orchestrator.py", ROOT / "env.py"]
# What a default run executes; serving/formats.py is for agents.
RUN = [*ROLES, ROOT / "launch.py", ROOT / "configs/__init__.py", ROOT / "configs/algorithms/evaluation.py"]
RUN += [*ROOT.glob("configs/runtime/*.py"), *(ROOT.glob("configs/serving/[!f]*.py")), ROOT / "configs/serving/flags.py"]
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


def test_code():
    lines, tokens = total(ROLES)
    assert lines <= 1000 and tokens <= 12_000, (lines, tokens)
    assert total(RUN)[0] <= 1830
    assert total(PRODUCT)[0] <= 6810
    assert total(ROOT.glob("tests/**/*.py"))[0] <= 0.71 * total(PRODUCT)[0]


def test_words():
    words = {path.relative_to(ROOT).as_posix(): len(path.read_text().split()) for path in DOCUMENTS}
    assert words.pop("README.md") <= 1100 and words.pop("configs/README.md") <= 2800
    assert sum(words.values()) <= 2000, words


if __name__ == "__main__":
    for path in [*PRODUCT, *ROOT.glob("tests/**/*.py")]:
        print(*(f"{number:6}" for number in size(path)), path.relative_to(ROOT))
