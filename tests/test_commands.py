"""Code that a model wrote: commands as agents, and Python in the sandbox. What they get, leave behind, cannot reach."""

import asyncio
import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest
from conftest import ROOT, having, needs_namespaces, wait_until
from scripted import Policy

from env import Rubric
from rolemodel.environments import endpoint, sandbox
from rolemodel.environments.agents import AgentEnv
from rolemodel.environments.commands import Command, CommandFailed
from rolemodel.environments.sandbox import Sandbox
from rolemodel.role import ConfigError

SOURCE = Path(__file__).with_name("command_agent.py").read_text()
PYTHON = [sandbox.find_python()[0], "-I", "-S", "-c", SOURCE]
# What a shell does after it has asked the policy. $0 is a mark.
FAILS = "echo a first line >&2; echo the reason >&2; exit 7"
DAEMON = "trap '' TERM; setsid sh -c 'sleep 3600; exit' $0 &"
HANGS = f"{DAEMON} sleep 3600"
FLOODS = f"{DAEMON} head -c 300000000 /dev/zero | tr '\\0' a; echo the end"
ASKED = [{"role": "user", "content": "x"}]
ROW = {"question": "4 {mode}?", "answer": "the right answer", "mode": "environment", "level": 3, "info": {"a": 1}}


pytestmark = needs_namespaces
both = pytest.mark.parametrize("how", [{"allow_code": True}, {"sandbox": True}], ids=str)


def play(words, *, num=1, row=ROW, **options):
    """Rollouts of a command, at once, with a policy that says "a". Returns their states."""
    env = AgentEnv(words, [row], rubric=Rubric(), **options)

    async def go():
        return await asyncio.gather(*(Policy("a").rollout(env, row) for _ in range(num)))

    return asyncio.run(go())


def after_asking(script, mark="x"):
    return ["sh", "-c", f"{shlex.join([*PYTHON, 'ask'])} && {script}", mark]


@pytest.fixture
def mark():
    """A word with which processes are found. What a failing test leaves is killed."""
    word = f"mark-{uuid.uuid4()}"
    yield word
    for process in having(word):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.fixture
def outside():
    """A directory not in /tmp, which a sandbox replaces."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        os.chmod(path, 0o755)
        yield path


# --- commands ---------------------------------------------------------------------------------------------------------


@both
def test_a_command_gets_its_row_and_the_endpoint_and_no_secret(how, monkeypatch, tmp_path):
    private = "MY_API_KEY HF_TOKEN aws_secret_access DB_PASSWORD APP_CREDENTIALS ROLEMODEL_PIPE PYTHONPATH"
    for name in private.split():
        monkeypatch.setenv(name, "private-value")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    os.chmod(tmp_path, 0o755)
    row = ROW | {"prompt": [{"role": "user", "content": text} for text in ("first", "last\nof two")]}
    words = "{question}|{level}|{prompt}|{answer}|{info}|{no such}|{}|{{level}}|{base_url}"
    states = play([*PYTHON, "environment", words], num=3, row=row, **how)
    for state in states:
        given = json.loads(state["result"])
        env = given["environment"]
        url = env["OPENAI_BASE_URL"]
        assert given["arguments"] == [f"4 {{mode}}?|3|last\nof two|{{answer}}|{{info}}|{{no such}}|{{}}|{{3}}|{url}"]
        assert given["said"] == "a" and given["stdin"] == "" and given["found"] == [[]] * 3 + [["mine"]] * 3
        assert url == env["OPENAI_API_BASE"] == env["ANTHROPIC_BASE_URL"] + "/v1" and "127.0.0.1" in url
        assert json.loads(env["TASK"]) == {key: value for key, value in row.items() if key != "answer"}
        assert "private-value" not in state["result"] and "the right answer" not in state["result"]
        assert env["OPENAI_API_KEY"] and env["ANTHROPIC_API_KEY"] and env["NO_PROXY"] == env["no_proxy"]
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("agent_")]


@both
def test_an_exit_code_loses_the_rollout_unless_it_is_forgiven(how):
    with pytest.raises(CommandFailed, match="(?s)sh ended with exit code 7: .*a first line\nthe reason"):
        play(after_asking(FAILS), forgive=[8, LookupError], **how)
    (state,) = play(after_asking(FAILS), forgive=[LookupError, 7], **how)
    assert state["agent"]["forgiven"] == 1 and state["agent"]["requests"] == 1


@both
def test_nothing_survives_a_time_limit_a_cancellation_or_the_end(how, mark):
    """Also while the namespaces are being made."""
    for state in play(after_asking(HANGS, mark), num=2, time_limit=3.0, **how):
        assert state["agent"]["requests"] == 1 and state["result"] is None
    (state,) = play(after_asking(FLOODS, mark), **how)
    assert len(state["result"]) == 2**16 and state["result"].endswith("aaathe end\n") and not having(mark)
    command = Command(["sh", "-c", HANGS, mark], **how)

    async def go():
        address = await endpoint.endpoint()
        tasks = []
        for i in range(10):
            tasks.append(asyncio.create_task(command({"row": ROW, "prompt": ASKED}, f"{address}/secret/v1")))
            await asyncio.sleep(i / 50)
            tasks[-1].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(e) for e in done} == {asyncio.CancelledError} and not having(mark)

    asyncio.run(go())


ORPHAN = """
import asyncio, sys
from rolemodel.environments.commands import Command
from rolemodel.environments.sandbox import Sandbox
mark = sys.argv[-1]
if sys.argv[1] == "sandbox":
    Sandbox(timeout_s=60).run(f"# {mark}\\nwhile 1: pass")
command = Command(sys.argv[2:], allow_code=True)
asyncio.run(command({"row": {}, "prompt": [{"role": "user", "content": "x"}]}, "http://127.0.0.1:1/x/v1"))
"""


@pytest.mark.parametrize("kind", ["command", "sandbox"])
def test_they_end_with_an_orchestrator_that_is_killed(kind, mark):
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, kind, "sh", "-c", HANGS, mark], cwd=ROOT)
    wait_until(lambda: len(having(mark)) > 3)
    parent.kill()
    parent.wait()
    wait_until(lambda: not having(mark))


@pytest.mark.parametrize("kind", ["command", "python"])
def test_a_sandbox_has_no_way_out(kind, outside, tmp_path, monkeypatch):
    """But for a command's to the endpoint. What is written outside would be seen."""
    os.chmod(outside, 0o777)
    (tmp_path / "file").write_text("outside")
    monkeypatch.setattr(Command, "memory", 256 << 20)
    monkeypatch.setattr(Command, "processes", 30)
    read = [f"{ROOT}/env.py", f"{ROOT}/", "/root/", f"{tmp_path}/file", "/etc/shadow", f"/proc/{os.getpid()}/environ"]
    read += ["/proc/1/environ", "/proc/1/root/", "/proc/1/root/etc/shadow"]
    write = ["/", "/usr", "/etc", "/dev", "/dev/shm", str(ROOT), outside]
    with socket.create_server(("127.0.0.1", 0)) as server:
        case = json.dumps({"read": read, "write": write, "port": server.getsockname()[1], "pid": os.getpid()})
        if kind == "command":
            (state,) = play(Command([*PYTHON, "tries", case], sandbox=True, show=[outside]))
            said = state["result"]
        else:
            said = Sandbox([Path.home(), ROOT]).run(f"import sys\nsys.argv = ['', 'tries', {case!r}]\n{SOURCE}", 30)
    possible, root = json.loads(said.splitlines()[0])
    assert not possible
    assert set(root) <= set("bin dev endpoint etc lib lib32 lib64 proc sbin tmp usr var".split())
    assert not any(Path(path, "written").exists() for path in write)


# --- Python -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def box():
    return Sandbox([Path.home(), ROOT], timeout_s=2)


def test_what_the_model_sees(box):
    assert box.run("open('x', 'x').write('6')\nprint(6 * 7)") == "42" == box.run("open('x', 'x')\nprint(42)")
    assert box.run("") == "[nothing printed]" and box.run("import sys; sys.exit(3)") == "[exit code 3]"
    said = box.run("print(1)\n1 / 0")
    assert said.startswith("1\nTraceback") and said.endswith("\nZeroDivisionError: division by zero")
    assert box.run("print(1, flush=True)\nwhile 1: pass", 1) == "1\n[stopped after 1 s]"
    for code in ("", "# \u00e4" * 10**6):  # NeMo-Gym #2804: an argument ends at 128 KiB
        said = box.run(f"import sys\nprint([sys.stdin.read()], __name__)\ninput(){code}", 60)
        assert said.startswith("[''] __main__\n") and said.endswith("EOFError: EOF when reading a line")
    said = box.run("print('x' * 10**5)\n1 / 0")
    assert said.startswith("xxx") and "[cut: 100001 bytes printed]" in said and "division" in said


ATTACKS = [
    "import os\nos.write(1, b'\\xff\\x00' * 10**5)\nfor _ in range(1000): print('x' * 10**6)",
    "bytearray(3 << 30)\nprint('LEAK')",
    "import os\nwhile 1:\n  try: os.fork()\n  except OSError: pass",
    "import os, ctypes, time\nos.setsid()\nif os.fork(): print(1)\nelse: ctypes.CDLL(None).prctl(1, 0); time.sleep(60)",
    "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)\nos.setsid()\nwhile 1: pass",
    "import os\nos.kill(-1, 9)",
    "for i in range(1000): open(str(i), 'wb').write(bytes(10**6))\nprint('LEAK')",
    "import subprocess\nif subprocess.run('mount -o remount,bind,rw /'.split()).returncode == 0: print('LEAK')",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_end_small_and_leave_nothing(box, attack, mark, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said = box.run(f"# {mark}\n{attack}", 1)
    assert len(said.encode()) <= 8192 and "LEAK" not in said and not having(mark) and not os.listdir(tmp_path)


@pytest.mark.parametrize("name, old, why", [
    ("NAMESPACES", "--net", "the network is reachable"),
    ("NAMESPACES", "--pid", "processes outside can be seen"),
    ("NO_CAPABILITIES", "--inh-caps=-all --bounding-set=-all", "there are capabilities"),
    ("LIMITS", "--as=1073741824", "there are no limits"),
    ("LIMITS", "", "files outside can be read"),  # they lie in a directory that is shown
])  # fmt: skip
def test_a_hole_is_found_at_once(outside, monkeypatch, name, old, why):
    """Each is what a machine that lacks something would do."""
    monkeypatch.setattr(sandbox, name, getattr(sandbox, name).replace(old, ""))
    if "files" in why:
        monkeypatch.setattr(tempfile, "tempdir", outside)
        monkeypatch.setattr(sandbox, "SYSTEM", [*sandbox.SYSTEM, outside])
    with pytest.raises(ConfigError, match=why):
        Sandbox()


def test_without_a_sandbox_it_warns_and_keeps_the_limits(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("API_KEY", "secret")
    box = Sandbox(timeout_s=2, allow_unsandboxed=True)
    assert "WITHOUT a sandbox" in capsys.readouterr().err
    assert box.run("import os\nprint(sorted(os.environ), os.listdir('.'))") == "['HOME', 'LANG', 'PATH'] []"
    assert box.run("while 1: pass", 1) == "[stopped after 1 s]" and "MemoryError" in box.run("bytearray(3 << 30)")
    assert len(box.run(ATTACKS[0], 1)) <= 8192 and not os.listdir(tmp_path)
