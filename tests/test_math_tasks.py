"""configs/tasks/gsm8k.py, configs/tasks/math_python.py and the sandbox that runs its code."""

import inspect
import json
import operator
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT
from scripted import play

from configs.environments import sandbox
from configs.environments.sandbox import CannotContain, Sandbox
from configs.tasks import gsm8k, math_python
from env import DataError

# Name, then the code. What it prints must not have a line "LEAK".
ATTACKS = """
--- prints 1 GB
import sys
for _ in range(1000): sys.stdout.write("x" * 10**6)
--- prints 1 GB of errors
import sys
for _ in range(1000): sys.stderr.write("x" * 10**6)
--- prints bytes that are no text
import os
os.write(1, b"\\xff\\x00" * 10**5)
--- allocates 3 GiB
x = bytearray(3 << 30)
print("LEAK")
--- loops
while 1: pass
--- sleeps
import time
time.sleep(60)
--- fork bomb
import os
while 1:
    try: os.fork()
    except OSError: pass
--- daemon that keeps stdout
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(60)
print("parent ends")
--- daemon that hides
import os, ctypes, time
os.setsid()
ctypes.CDLL(None).prctl(1, 0)
if os.fork(): time.sleep(60)
ctypes.CDLL(None).prctl(1, 0)
os.setsid()
time.sleep(60)
--- stops the clock
import os, signal
os.kill(os.getppid(), signal.SIGSTOP)
os.setsid()
while 1: pass
--- kills everybody
import os
os.kill(-1, 9)
--- 50 MB file
import os
with open("big", "wb") as f: f.write(bytes(50 * 10**6))
print("LEAK")
--- 1000 files
for i in range(1000): open(str(i), "wb").write(bytes(10**6))
print("LEAK")
--- namespaces
import ctypes
if ctypes.CDLL(None).unshare(0x10000000) == 0: print("LEAK")
--- mounts
import subprocess
if subprocess.run(["mount", "-o", "remount,bind,rw", "/"]).returncode == 0: print("LEAK")
"""
ATTACKS = dict(part.split("\n", 1) for part in ATTACKS.split("--- ")[1:])


def survivors(marker):
    """Processes whose command line has the marker: forks keep it, whatever group, session or parent they have."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker in path.read_bytes().decode(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            pass  # it has ended
    return found


@pytest.fixture(scope="module")
def contained():
    """A sandbox with a short clock, or None where this machine cannot contain code."""
    try:
        return Sandbox([Path.home(), ROOT], timeout_s=2)
    except CannotContain:
        return None


@pytest.fixture
def box(contained, tmp_path, monkeypatch):
    """The sandbox; what it leaves would lie in tmp_path. Where there can be none, the test is that it refuses."""
    if contained is None:
        with pytest.raises(CannotContain, match="allow_unsandboxed_python = true"):
            math_python.load_environment()
        pytest.skip("it cannot contain code here, and refuses to")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return contained


@pytest.fixture
def outside():
    """A directory not in /tmp, which the sandbox has anew in any case."""
    path = Path(tempfile.mkdtemp(dir="/var/tmp"))
    os.chmod(path, 0o755)
    yield path
    shutil.rmtree(path)


def run_marked(box, code):
    """-> what it says; nothing may be left of it."""
    marker = uuid.uuid4().hex
    said = box.run(f"# {marker}\n{code}")
    assert not survivors(marker) and not os.listdir(tempfile.gettempdir())
    return said


def load_math_python(contained, **args):
    return math_python.load_environment(allow_unsandboxed_python=contained is None, **args)


# --- the sandbox ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_end_small_and_leave_nothing(box, attack, monkeypatch):
    monkeypatch.setattr(box, "timeout_s", 1)
    began, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = run_marked(box, ATTACKS[attack])
    assert time.monotonic() - began < 20 and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 100_000
    assert len(said.encode()) <= 8192 and "LEAK" not in said.splitlines()


def test_what_the_model_sees(box):
    assert run_marked(box, "print(6 * 7)") == "42"
    assert run_marked(box, "") == "[nothing printed]"
    assert run_marked(box, "print(1)\n1 / 0").splitlines()[::3] == ["1", "ZeroDivisionError: division by zero"]
    assert run_marked(box, "import sys; sys.exit(3)") == "[exit code 3]"
    assert run_marked(box, "print(1, flush=True)\nwhile 1: pass") == "1\n[stopped after 2 s]"
    assert run_marked(box, "print('\\ud800')").endswith("surrogates not allowed")
    assert "SyntaxError" in run_marked(box, "print(")
    said = run_marked(box, "print('x' * 10**5)\n1 / 0")
    assert said.startswith("xxx") and "[cut: 100001 bytes printed]" in said and "division" in said


def test_calls_share_nothing_and_run_at_once(box):
    codes = [f"open('x', 'x').write('{i}')\nprint(open('x').read())" for i in range(12)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(box.run, codes)) == [str(i) for i in range(12)]


def test_the_wall_clock_is_the_environments(contained):
    env = load_math_python(contained, num_train=1, num_eval=1, timeout_s=1.0)
    began = time.monotonic()
    assert env.functions["python"]("while 1: pass") == "[stopped after 1 s]"
    assert 1 <= time.monotonic() - began < 5
    assert inspect.signature(math_python.load_environment).parameters["timeout_s"].default == 5.0


def test_no_network(box):
    code = """
import socket
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
    for address in [("127.0.0.1", PORT), ("127.0.0.1", 8000), ("1.1.1.1", 53), ("169.254.169.254", 80)]:
        with socket.socket(socket.AF_INET, kind) as s:
            try:
                s.settimeout(1)
                s.connect(address)
                s.send(b"x")
            except OSError as e:
                print(e.errno)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        said = run_marked(box, code.replace("PORT", str(server.getsockname()[1])))
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert said.split() == ["101"] * 8  # ENETUNREACH


# CASE: the paths. It prints what it could do.
FILES = """
import os, glob
def tries(what, function):
    try:
        print(what, function())
    except OSError:
        pass
for path in CASE["read"]:
    tries("read", open(path).read if os.path.exists(path) else lambda: open(path))
for path in CASE["write"]:
    tries("wrote", lambda: open(os.path.join(path, "sandbox_was_here"), "w"))
tries("kill", lambda: os.kill(CASE["parent"], 0) if CASE["parent"] > 100 else os.kill(10**6, 0))
print(sorted(os.environ), os.environ["HOME"], os.listdir("."), oct(os.stat(".").st_mode), glob.glob("/home/*"))
open("own", "w").write("ok")
print(open("own").read())
"""


def files_case(home):
    parent = os.getpid()
    read = [f"{home}/secret", str(ROOT / "env.py"), f"/proc/{parent}/environ", "/proc/self/environ", "/etc/passwd"]
    return {"read": read, "write": [str(home), "/etc", str(ROOT), "/usr", "/", "/dev", "/dev/shm"], "parent": parent}


CLEAN = "['HOME', 'LANG', 'PATH'] /tmp [] 0o40700 []\nok"


def test_no_files_no_processes_no_environment(box, outside, monkeypatch):
    os.chmod(outside, 0o777)
    (outside / "secret").write_text("hf_token")
    monkeypatch.setenv("HOME", str(outside))
    monkeypatch.setenv("API_KEY", "secret")
    case = files_case(outside)
    assert run_marked(Sandbox([Path.home(), ROOT]), f"CASE = {case}\n{FILES}") == CLEAN
    assert os.listdir(outside) == ["secret"]
    assert not any((Path(path) / "sandbox_was_here").exists() for path in case["write"])


def test_hidden_directories_in_visible_ones_and_an_interpreter_in_a_hidden_one(box, outside, monkeypatch):
    for name in ("open", "open/hidden", "hidden", "hidden/open"):
        (outside / name).mkdir()
        (outside / name / "file").write_text("x")
    monkeypatch.setattr(sandbox, "SYSTEM", [*sandbox.SYSTEM, f"{outside}/open", f"{outside}/hidden/open"])
    code = f"import os\nfor f in sorted(os.walk('{outside}')): print(f[0][{len(str(outside))}:], sorted(f[2]))"
    seen = run_marked(Sandbox([outside / "open/hidden", outside / "hidden"]), code).splitlines()
    assert seen == [" []", "/hidden []", "/hidden/open ['file']", "/open ['file']", "/open/hidden []"]


def test_another_user_gets_the_same(box, outside):
    """As root: again for a user without rights, whose own files the code could otherwise read."""
    (outside / "secret").write_text("hf_token")
    user = []
    python = sys.executable
    if os.getuid() == 0:
        user = "setpriv --reuid=12345 --regid=12345 --clear-groups".split()
        python = sandbox.find_python()[0]
        for path in (outside, outside / "secret"):
            os.chown(path, 12345, 12345)
    marker = uuid.uuid4().hex
    codes = (f"CASE = {files_case(outside)}\n{FILES}", ATTACKS["daemon that hides"])
    codes = [f"# {marker}\n{code}" for code in codes]
    program = (ROOT / "configs" / "environments" / "sandbox.py").read_text()
    program += f"\nbox = Sandbox({[str(outside)]!r}, timeout_s=2)\n"
    program += f"print(json.dumps([box.run(code) for code in {codes!r}]))"
    command = [*user, python, "-I", "-"]
    env = {"HOME": str(outside)}
    done = subprocess.run(command, input=program, text=True, capture_output=True, cwd="/", env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [CLEAN, "[stopped after 2 s]"]
    assert not survivors(marker) and os.listdir(outside) == ["secret"]


def test_it_dies_with_its_caller(box):
    marker = uuid.uuid4().hex
    program = "from configs.environments.sandbox import Sandbox; "
    program += f"Sandbox(timeout_s=60).run('#' + '{marker[:16]}' + '{marker[16:]}' + '\\nwhile 1: pass')"
    caller = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True)

    def runs():
        names = [Path(f"/proc/{pid}/comm") for pid in survivors(marker)]
        return any(name.exists() and name.read_text().startswith("python") for name in names)

    try:
        wait_until(runs)  # before, setpriv may not have asked for its parent's death yet
    finally:
        os.kill(caller.pid, signal.SIGKILL)
        caller.wait()
    wait_until(lambda: not survivors(marker))


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("name, old, new, why", [
    ("NAMESPACES", "--net", "", "the network is reachable"),
    ("NAMESPACES", "--pid", "", "processes outside can be seen"),
    ("NAMESPACES", "--mount", "", "permission denied"),
    ("NAMESPACES", "unshare", "false", "exit code 1"),
    ("NO_CAPABILITIES", "--inh-caps=-all --bounding-set=-all", "", "there are capabilities"),
    ("LIMITS", "--as=1073741824", "", "there are no limits"),
    ("PATH", sandbox.PATH, "/nowhere", "no sh, mount"),
])  # fmt: skip
def test_a_hole_is_found_at_load_time(contained, monkeypatch, name, old, new, why):
    """Each is what a machine that lacks something would do."""
    monkeypatch.setattr(sandbox, name, getattr(sandbox, name).replace(old, new))
    with pytest.raises(CannotContain, match=why if contained else "cannot be contained here") as caught:
        math_python.load_environment(num_train=1, num_eval=1)
    assert caught.value.code == 2


def test_visible_files_are_found_at_load_time(box, outside, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(outside))
    monkeypatch.setattr(sandbox, "SYSTEM", [*sandbox.SYSTEM, str(outside)])
    with pytest.raises(CannotContain, match="files outside can be read"):
        Sandbox()


def test_without_a_sandbox_it_warns_every_time_and_keeps_the_limits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    os.chmod(tmp_path, 0o700)
    monkeypatch.setenv("API_KEY", "secret")
    for _ in range(2):
        box = Sandbox(timeout_s=2, allow_unsandboxed=True)
        assert "WITHOUT a sandbox" in capsys.readouterr().err
    assert run_marked(box, "import os\nprint(sorted(os.environ), os.listdir('.'))") == "['HOME', 'LANG', 'PATH'] []"
    assert run_marked(box, "while 1: pass") == "[stopped after 2 s]"
    assert "MemoryError" in run_marked(box, "bytearray(3 << 30)")
    marker = uuid.uuid4().hex
    assert box.run(f"# {marker}\nimport os, time\nif os.fork() == 0: time.sleep(60)\nelse: print(1)") == "1"
    wait_until(lambda: not survivors(marker))
    assert len(run_marked(box, ATTACKS["prints 1 GB"])) <= 8192


# --- math_python ------------------------------------------------------------------------------------------------------


def call(code, text=""):
    function = {"name": "python", "arguments": json.dumps({"code": code})}
    calls = [{"id": "1", "type": "function", "function": function}]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def test_math_python_calls_the_tool_and_scores_the_last_message(contained):
    env = load_math_python(contained, num_train=4, num_eval=2)
    row = env.dataset[0]
    question, answer = row["question"], row["answer"]
    state, reward, metrics = play(env, row, call(f"print({question[:-1]})"), f"It is {answer}.")
    assert [m["role"] for m in state["completion"]] == ["assistant", "tool", "assistant"]
    assert state["completion"][1]["content"] == answer and reward == 1 and metrics == {"correct": 1, "tool_calls": 1}
    _, reward, metrics = play(env, row, call("print(1)"), call("1 / 0"), "I give up")
    assert reward == 0 and metrics["tool_calls"] == 2
    state, reward, _ = play(env, row, *[call("print(1)", answer)] * 4)
    assert state["turn"] == 4 and len(state["completion"]) == 7
    schema = env.tools[0]["function"]
    assert schema["name"] == "python" and schema["parameters"]["required"] == ["code"]
    bad = call("") | {"tool_calls": [{"id": "1", "function": {"name": "python", "arguments": '{"code": 1'}}]}
    state, _, _ = play(env, row, bad, answer)
    assert state["completion"][1]["content"].startswith("error: ")


@pytest.mark.parametrize("text, answer, right", [
    ("89", "89", 1), ("so 12*7+5 = 89.", "89", 1), ("it is -5", "-5", 1), ("12-7", "7", 1), ("12 - 7", "-7", 0),
    (r"\boxed{89} of 3", "89", 1), (r"\boxed{3} then \boxed{ 1,089 }", "1089", 1), (r"\boxed{} 89", "89", 0),
    ("1,089.0", "1089", 1), ("$1,200", "1200", 1), ("8 9", "89", 0), ("", "0", 0), ("none", "1", 0), (None, "1", 0),
    (r"\boxed{x^{2}}", "x^{2}", 1), ("9" * 5000, "1", 0), (r"\boxed{1, 2}", "12", 0), (r"\boxed{3 4}", "34", 0),
    ("x = \u22125", "-5", 1), ("x = \u22125", "5", 0), ("1/2", "2", 0), ("so 1/2.", "1/2", 1), ("1e5", "5", 0),
    ("10^3", "3", 0), (r"\boxed{1{,}200}", "1200", 1), ("5, I think", "5", 1),
    ("is .5", "5", 0), ("is .5", "0.5", 1), ("-.25", "-0.25", 1), ("-.25", "25", 0),
])  # fmt: skip
def test_final_answers(text, answer, right):
    assert math_python.correct([{"role": "assistant", "content": text}], answer) == right
    assert math_python.correct([{"role": "tool", "content": text}], answer) == 0


def test_expressions_are_right():
    for text, value in math_python.problems("train", 2000):
        assert eval(text) == value  # our own expression
    assert math_python.rows("train", 1)[0]["answer"] == str(math_python.problems("train", 1)[0][1])


def test_rows_from_a_file(contained, tmp_path):
    path = tmp_path / "rows.jsonl"

    def load(num, **args):
        path.write_text("".join(json.dumps({"question": f"{i}+1?", "answer": i + 1}) + "\n" for i in range(num)))
        return load_math_python(contained, path=str(path), **args)

    env = load(10, num_eval=3)
    assert [len(env.dataset), len(env.eval_dataset)] == [7, 3] and env.eval_dataset[0]["question"] == "7+1?"
    assert play(env, env.dataset[0], "1")[1] == 1  # the answer may be a number
    assert len(load(10, num_eval=3, num_train=2).dataset) == 2 and len(load(5000, num_eval=3).dataset) == 4997
    with pytest.raises(DataError, match="10 rows, none left to train on"):
        load(10)


# --- gsm8k ------------------------------------------------------------------------------------------------------------


def test_gsm8k_scores_answer_and_format():
    env = gsm8k.load_environment(path=str(ROOT / "configs" / "tasks" / "gsm8k_sample.jsonl"))
    assert [len(env.dataset), len(env.eval_dataset)] == [32, 8] and env.dataset[0]["answer"] == "53"
    good = "<reasoning>\n4*12+5\n</reasoning>\n<answer>\n$53.00\n</answer>"
    row = env.dataset[0]
    state, reward, metrics = play(env, row, good)
    assert reward == pytest.approx(1.2) and metrics == {"correct": 1, "format_reward": 1}
    assert state["prompt"][0] == {"role": "system", "content": gsm8k.SYSTEM_PROMPT}
    _, reward, metrics = play(env, row, "The answer is 53")
    assert reward == 0 and metrics["correct"] == 0
    _, reward, metrics = play(env, row, "<answer>53</answer>")
    assert metrics["correct"] == 1 and 1 < reward < 1.2
    assert play(env, row, good.replace("53", "54"))[1] == pytest.approx(0.2)


@pytest.mark.parametrize("text, other, same", [
    ("1,200", "$1200.00", True), ("0.50", ".5", True), ("7.", "7", True), ("3", "-3", False), ("\u22125", "-5", True),
    (r"\$ 1{,}200", "1200", True), ("10", "1", False), ("1" * 40, "1" * 39 + "2", False),
    *[(text, None, True) for text in ("", "1 or 2x", "nan", "inf", "1e5", "1.2.3", "\u0663", ".", "1 2", "1,2,3")],
])  # fmt: skip
def test_numbers_compare_and_what_is_none(text, other, same):
    assert (gsm8k.number(text) == gsm8k.number(other)) == same


def test_gsm8k_reads_its_own_columns(tmp_path):
    path = tmp_path / "rows.jsonl"
    answers = [f"He has 6*{i}=<<6*{i}={6 * i}>>{6 * i}.\n#### 1,00{i}" for i in range(9)]
    rows = [json.dumps({"question": "How many?", "answer": answer}) for answer in answers]
    path.write_text("\n".join(rows))
    env = gsm8k.load_environment(path=str(path), num_eval=2, num_train=5, system_prompt="")
    assert [len(env.dataset), len(env.eval_dataset), env.head] == [5, 2, []]
    assert env.dataset[3] == {"question": "How many?", "answer": "1,003", "solution": "He has 6*3=18."}
    unmarked = json.dumps({"question": "How many?", "answer": "42"})
    for text, problem in ((unmarked, "row 0 has no"), ("\n".join(rows[:8]), "has 8 rows")):
        path.write_text(text)
        with pytest.raises(DataError, match=problem):
            gsm8k.load_environment(path=str(path))


def test_gsm8k_without_a_path_is_the_dataset(monkeypatch):
    def load_dataset(name, config, split):
        assert (name, config) == ("openai/gsm8k", "main")
        return [{"question": split, "answer": f"#### {i}"} for i in range({"train": 30, "test": 20}[split])]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    env = gsm8k.load_environment(num_eval=5)
    assert len(env.dataset) == 30 and [row["question"] for row in env.eval_dataset] == ["test"] * 5

    def offline(*args, **kwargs):
        raise ConnectionError("no route")

    for module in (types.SimpleNamespace(load_dataset=offline), None):  # None: not installed
        monkeypatch.setitem(sys.modules, "datasets", module)
        with pytest.raises(DataError, match="name a JSON Lines file"):
            gsm8k.load_environment()


def test_the_sample_is_right():
    lines = [json.loads(line) for line in (ROOT / "configs" / "tasks" / "gsm8k_sample.jsonl").read_text().splitlines()]
    assert len({row["question"] for row in lines}) == 40
    for row in lines:
        assert row["question"].isascii() and len(row["question"]) <= 120
        assert row["answer"].isascii() and len(row["answer"]) <= 80
        steps = re.findall(r"(\d+)([-+*/])(\d+)=(\d+)|(\d+)([-+*/])(\d+)\+(\d+)=(\d+)", row["answer"])
        does = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
        assert steps and all(does[op](int(a), int(b)) == int(c) for a, op, b, c, *_ in steps if op), row
        assert re.search(rf"={row['answer'].split()[-1]}\b", row["answer"]), row
