"""How much there is to read: lines and tokens of code, without comments and docstrings.

    python tests/size.py             every file
    python tests/size.py --check     a small run of configs/calculator.toml, whose processes say what they import; ends
                                     with 1 if a limit is passed

A maintainer's program: no test depends on it. Whoever passes a limit takes something out; a limit that is met by worse
writing is missed. By Python 3.11: later versions count an f-string as several tokens."""

import ast
import io
import os
import subprocess
import sys
import tempfile
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = [*ROOT.glob("tests/**/*.py")]
NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
PRODUCT = [
    path
    for folder in ("", "configs/**/", "docs/**/", "rolemodel/**/", "tools/**/")
    for path in ROOT.glob(f"{folder}*.py")
]
# The task of configs/calculator.toml, and what it imports.
TASK = [
    ROOT / "configs/calculator.py",
    *(ROOT / "rolemodel/environments" / name for name in ("parsers.py", "tools.py")),
]
ROLES = [ROOT / "trainer.py", ROOT / "orchestrator.py", ROOT / "env.py"]

# Python imports this at its start, in each process of the run: it notes every file of ours that is executed.
HOOK = """
import sys
def note(event, args, root={root!r}, out={out!r}):
    name = getattr(args[0], "co_filename", "") if event == "exec" else ""
    if event == "cpython.run_file":
        name = str(args[0])
    if name:
        import os
        name = os.path.realpath(name)
        if name.startswith(root) and ".venv" not in name and name.endswith(".py"):
            with open(out, "a") as file:
                file.write(name + "\\n")
sys.addaudithook(note)
"""


def executed():
    """The files that the processes of `bash launch.sh configs/calculator.toml` execute, but for the task's own: one
    step with a toy in place of the model, and the real vLLM where it is installed."""
    with tempfile.TemporaryDirectory() as tmp:
        out = f"{tmp}/executed"
        Path(tmp, "sitecustomize.py").write_text(HOOK.format(root=f"{ROOT}/", out=out))
        toy = f"import toy; toy.make_model({tmp!r} + '/model', toy.make_tokenizer(), 2, 64)"
        paths = f"{ROOT}:{ROOT}/configs/models"
        subprocess.run([sys.executable, "-c", toy], env=os.environ | {"PYTHONPATH": paths}, check=True)
        # The toy solves nothing: by think_env's advantages each group has a gradient nevertheless.
        how = f"model={tmp}/model output_dir={tmp}/out max_steps=1 eval.num_examples=2 orchestrator.batch_size=8"
        how += " orchestrator.advantage=think_env:chance max_seq_len=512 eval.every=1"
        command = ["bash", "launch.sh", "configs/calculator.toml", *how.split()]
        env = os.environ | {"PYTHONPATH": f"{tmp}:{ROOT}/tests"}
        subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=sys.stderr)
        found = {path for path in map(Path, Path(out).read_text().splitlines()) if path.exists()}
    return sorted(path for path in found if path not in (*TESTS, *TASK))


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


def limits(run):
    """[(what is limited, how much there is, the most there may be)]. run: the files that a run executes."""
    lines, tokens = total(ROLES)
    code = total(PRODUCT)[0]
    return [
        ("lines of the roles", lines, 1015),
        ("tokens of the roles", tokens, 12_080),
        ("lines that a run executes", total(run)[0], 3000),
        ("lines of all but tests", code, 8040),
        ("lines of tests for each of the rest", total(TESTS)[0] / code, 0.73),
    ]


if __name__ == "__main__":
    run = executed() if "--check" in sys.argv else []
    for path in run or [*PRODUCT, *TESTS]:
        print(*(f"{number:6}" for number in size(path)), path.relative_to(ROOT))
    if run:
        found = limits(run)
        for what, number, most in found:
            print(f"{number:10.6g} of at most {most:6}  {what}")
        sys.exit(int(any(number > most for _, number, most in found)))
