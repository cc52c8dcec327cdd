"""Commands as agents: what they are given, what they leave behind, and what a sandbox refuses."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pytest
from command_tasks import CURL, MODES, PYTHON, SLEEP
from conftest import ROOT, all_batches, lines
from test_agents import Policy

from configs.environments import endpoint
from configs.environments.agents import AgentEnv
from configs.environments.commands import CannotRun, Command, CommandFailed
from configs.runtime.role import RunError
from env import Rubric

TASK = '[env]\nid = "command_tasks"\nargs = {{ kind = "{}"{} }}'
PLAIN = "allow_code = true"
BOXED = "sandbox = true"
FRESH = ("orchestrator.max_staleness=0", "orchestrator.sampling.max_tokens=3", "orchestrator.max_error_share=1.0")
ROW = {"question": "4 {mode}?", "answer": "the right answer", "mode": "environment", "level": 3, "info": {"a": 1}}


def namespaces(*flags):
    """Marks a test that needs what many containers forbid. It asks the kernel, not the code under test."""
    trial = ["unshare", "--user", "--map-root-user", "--pid", "--fork", *flags, "true"]
    done = subprocess.run(trial, capture_output=True, text=True) if shutil.which("unshare") else None
    problem = "" if done and done.returncode == 0 else f"no namespaces here: {done.stderr if done else 'no unshare'}"
    return pytest.mark.skipif(bool(problem), reason=problem or "there are namespaces")


contained = namespaces("--mount", "--net", "--ipc")
pytestmark = namespaces()
both = pytest.mark.parametrize("how", [{"allow_code": True}, pytest.param({"sandbox": True}, marks=contained)], ids=str)


def play(words, *, num=1, turns=1, row=ROW, **options):
    """Rollouts of a command, at once, with a policy that says "a". Returns their states."""
    env = AgentEnv(words, [row], rubric=Rubric(), **options)

    async def go():
        states = [env.start(env.dataset[0]) | {"replies": []} for _ in range(num)]
        policies = [Policy(*[{"content": "a"}] * turns) for _ in range(num)]
        await asyncio.gather(*(env.rollout(state, policy) for state, policy in zip(states, policies)))
        return states

    return asyncio.run(go())


def having(mark):
    """Numbers of the processes that have this among their words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_one = mark.encode() in path.read_bytes()
        except OSError:  # it has ended
            continue
        if is_one and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


@pytest.fixture
def mark():
    """A word by which processes are found. What a failing test leaves is killed."""
    word = f"mark-{uuid.uuid4()}"
    yield word
    for pid in having(word):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def shown():
    """A directory outside of /tmp, which the sandbox replaces."""
    path = tempfile.mkdtemp(dir="/var/tmp")
    os.chmod(path, 0o755)
    Path(path, "tool").write_text("#!/bin/sh\necho used\n")
    os.chmod(Path(path, "tool"), 0o755)
    yield path
    shutil.rmtree(path)


# --- what is trained --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, how, same",
    [
        ("curl", PLAIN, 'id = "command_tasks"\nargs = { kind = "single" }'),
        ("python", PLAIN, 'id = "agent_tasks"\nargs = { kind = "same_turns" }'),
        pytest.param("python", BOXED, 'id = "agent_tasks"\nargs = { kind = "same_turns" }', marks=contained),
    ],
)
def test_a_command_is_trained_on_the_same_tokens_as_an_environment_of_the_same_turns(run, kind, how, same):
    if kind == "curl" and not shutil.which("curl"):
        pytest.skip("no curl here")
    run_dir = run(2, TASK.format(kind, f", {how}"), *FRESH)
    agents = lines(run_dir / "rollouts.jsonl")
    batches = all_batches(run_dir)
    for r in agents:
        assert not r["error"] and r["metrics"]["result"] > 0 and r["num_turns"] == (1 if kind == "curl" else 3)
    for path in [*(run_dir / "batches").iterdir(), run_dir / "rollouts.jsonl"]:
        path.unlink()
    ours = run(2, f"[env]\n{same}", *FRESH)
    for a, b in zip(batches, all_batches(ours), strict=True):
        for s, other in zip(a.sequences, b.sequences, strict=True):
            for name in ("tokens", "mask", "old_logp", "turn"):
                assert s[name].tolist() == other[name].tolist(), name
    for a, b in zip(agents, lines(ours / "rollouts.jsonl"), strict=True):
        assert a["completion"] == b["completion"] and a["prompt"] == b["prompt"]


def test_faults_touch_only_their_own_rollout(run, mark):
    """Five at once: a signal, a hang, a daemon, a flood of 300 MB, and an agent without a fault."""
    args = f', {PLAIN}, mark = "{mark}", time_limit = 5.0, forgive = [137], num_rows = 5'
    found = lines(run(1, TASK.format("mode", args), *FRESH, "orchestrator.batch_size=20") / "rollouts.jsonl")
    results = {}
    for r in found:
        mode = MODES[int(r["answer"]) % len(MODES)]
        results.setdefault(mode, set()).add(r["metrics"]["result"])
        assert not r["error"] and r["num_turns"] == 1
        assert r["metrics"]["agent_forgiven"] == (mode == "killed")
    assert min(results.pop("environment")) > 100
    assert results == {"killed": {0}, "hangs": {0}, "leaves_a_daemon": {5}, "floods": {2**16}}
    assert not having(mark)


def test_an_exit_code_loses_a_rollout_of_a_run(run):
    found = lines(run(1, TASK.format("mode", f', {PLAIN}, modes = ["wavers"]'), *FRESH) / "rollouts.jsonl")
    lost = [r for r in found if r["error"]]
    assert 0 < len(lost) < len(found) and all(r["reward"] is None for r in lost)
    assert all("ended with exit code 7: a first line" in r["error"] for r in lost)


# --- what a command is given ------------------------------------------------------------------------------------------


@both
def test_its_words_and_its_environment(how, monkeypatch):
    private = (
        "MY_API_KEY HF_TOKEN aws_secret_access DB_PASSWORD GOOGLE_APPLICATION_CREDENTIALS ROLEMODEL_PIPE PYTHONPATH"
    )
    for name in private.split():
        monkeypatch.setenv(name, "private-value")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.com")
    placeholders = "{question}|{level}|{prompt}|{answer}|{info}|{no such}|{}|{{level}}|{base_url}"
    (state,) = play([*PYTHON, "environment", placeholders], row=ROW | {"prompt": CONVERSATION}, **how)
    given = json.loads(state["result"])
    env = given["environment"]
    url = env["OPENAI_BASE_URL"]
    assert given["arguments"] == [
        "environment",
        f"4 {{mode}}?|3|last\nof two|{{answer}}|{{info}}|{{no such}}|{{}}|{{3}}|{url}",
    ]
    assert given["stdin"] == ""
    assert url.startswith("http://127.0.0.1:") and url.endswith("/v1") and env["OPENAI_API_BASE"] == url
    assert env["ANTHROPIC_BASE_URL"] + "/v1" == url and env["OPENAI_API_KEY"] and env["ANTHROPIC_API_KEY"]
    assert env["NO_PROXY"] == env["no_proxy"] == "127.0.0.1,localhost"
    row = json.loads(env["TASK"])
    assert row == {key: value for key, value in (ROW | {"prompt": CONVERSATION}).items() if key != "answer"}
    assert "private-value" not in state["result"] and "the right answer" not in state["result"]
    assert not set(private.split()) & set(env) and env["HTTP_PROXY"]


CONVERSATION = [
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": [{"type": "text", "text": "last"}, {"type": "text", "text": "of two"}]},
]


@both
def test_rollouts_do_not_see_each_others_files(how, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "notes").write_text("of somebody else")
    os.chmod(tmp_path, 0o755)
    for state in play([*PYTHON, "files", "mine"], num=4, **how):
        seen = json.loads(state["result"])
        assert seen["found"] == [[]] * 3 + [["mine"]] * 3 and len(set(seen["places"])) == 1
    left = [path.name for path in tmp_path.iterdir()]
    assert not [name for name in left if name.startswith("agent_")], left


# --- how it ends ------------------------------------------------------------------------------------------------------


@both
def test_an_exit_code_loses_the_rollout_unless_it_is_forgiven(how):
    for mode, code, reason in (("fails", 7, "a first line\nthe reason"), ("killed", 137, "")):
        with pytest.raises(CommandFailed) as e:
            play([*PYTHON, mode, "x"], **how)
        assert e.value.exit_code == code and f"python3 ended with exit code {code}: {reason}" in str(e.value)
        with pytest.raises(CommandFailed):
            play([*PYTHON, mode, "x"], forgive=[8, LookupError], **how)
        (state,) = play([*PYTHON, mode, "x"], forgive=[LookupError, code], **how)
        assert state["agent"]["forgiven"] == 1 and state["agent"]["requests"] == 1


@both
def test_a_hang_is_scored_at_its_time_limit_and_nothing_survives(how, mark):
    began = time.monotonic()
    for state in play([*PYTHON, "hangs", mark], num=3, time_limit=6.0, **how):
        assert state["agent"]["requests"] == 1 and state["result"] is None
    assert not having(mark)
    assert 6 <= time.monotonic() - began < 60


@both
def test_nothing_survives_a_cancellation_at_any_time(how, mark):
    """Also while the namespaces are being made."""
    command = Command([*SLEEP, mark], **how)
    state = {"task": ROW, "prompt": "x"}

    async def go():
        address = await endpoint.endpoint()
        tasks = []
        for i in range(20):
            tasks.append(asyncio.create_task(command(state, f"{address}/secret/v1")))
            await asyncio.sleep(i / 100)
            tasks[-1].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(e) for e in done} == {asyncio.CancelledError}
        assert not having(mark)

    asyncio.run(go())


@both
def test_a_daemon_does_not_survive(how, mark):
    (state,) = play([*PYTHON, "leaves_a_daemon", mark], **how)
    assert state["result"] == "left\n"
    assert not having(mark)


def test_it_ends_with_the_orchestrator(mark, tmp_path):
    """Even if that is killed."""
    code = "import asyncio, sys\nfrom configs.environments.commands import Command\n"
    code += "state = {'task': {}, 'prompt': 'x'}\n"
    code += "command = Command([*sys.argv[1:]], allow_code=True)\n"
    code += "asyncio.run(command(state, 'http://127.0.0.1:1/x/v1'))\n"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *SLEEP, mark], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    for _ in range(300):
        if len(having(mark)) > 3:
            break
        time.sleep(0.1)
    assert len(having(mark)) > 3
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while having(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not having(mark)


def test_a_flood_is_cut_to_its_end():
    (state,) = play([*PYTHON, "floods", "x"], allow_code=True)
    assert len(state["result"]) == 2**16 and state["result"].endswith("aaa" + "the end\n")


# --- what cannot be run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, args, reason",
    [
        ("curl", "", "allow_code = true .*sandbox = true"),
        ("missing", f", {PLAIN}", "no such command: no-such-agent"),
        ("missing", f", {BOXED}", "no such command: no-such-agent"),
    ],
)
def test_it_is_found_before_a_server_starts(run, kind, args, reason):
    with pytest.raises(RunError, match=reason) as e:
        run(1, TASK.format(kind, args))
    assert e.value.code == 2 and "\n" not in str(e.value)


@pytest.mark.parametrize("how", [{"allow_code": True}, {"sandbox": True}], ids=str)
def test_a_machine_without_namespaces_is_found_at_once(shown, monkeypatch, how):
    unshare = Path(shown, "unshare")
    unshare.write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2\nexit 1\n")
    os.chmod(unshare, 0o755)
    monkeypatch.setenv("PATH", f"{shown}:{os.environ['PATH']}")
    with pytest.raises(CannotRun, match="many containers forbid namespaces.: .*Operation not permitted") as e:
        Command(["true"], **how)
    assert e.value.code == 2


# --- the sandbox ------------------------------------------------------------------------------------------------------


@contained
def test_a_sandbox_reaches_the_endpoint_and_nothing_else(shown, tmp_path):
    (tmp_path / "file").write_text("outside")
    with socket.create_server(("127.0.0.1", 0)) as server:
        paths = [
            f"{ROOT}/env.py",
            f"{ROOT}/",
            "/root/",
            str(tmp_path / "file"),
            "/etc/shadow",
            "/proc/1/root/etc/shadow",
        ]
        paths += ["/proc/1/environ", "/proc/1/root/"]
        outside = {"paths": paths, "port": server.getsockname()[1], "shown": [shown]}
        options = {"sandbox": True, "show": [shown], "memory_gb": 0.25, "processes": 30}
        command = Command([*PYTHON, "tries", json.dumps(outside)], **options)
        (state,) = play(command)
    found = json.loads(state["result"])
    refused = found["refused"]
    assert len(refused) == len(paths) + 8 and all(refused.values()), refused
    assert refused["memory"] == "MemoryError" and refused["port"] == "ConnectionRefusedError"
    assert refused["internet"] == "OSError" and refused["chroot"] == "PermissionError"
    allowed = found["allowed"]
    assert allowed["shown"] == [["tool"]] and not allowed["write"] and not allowed["little memory"]
    assert 5 < allowed["children"] < 30 and allowed["namespace"] and allowed["file"] == 2**32
    assert set(allowed["root"]) <= set("bin dev endpoint etc lib lib32 lib64 proc sbin tmp usr var".split())


@contained
def test_the_programs_own_directory_or_venv_is_there(shown):
    words = [f"{shown}/tool"]
    script = ["sh", "-c", f"{CURL} > reply && {shown}/tool"]
    with pytest.raises(CommandFailed, match="exit code 127"):
        play(script, sandbox=True)
    (state,) = play(Command([*script], sandbox=True, show=[shown]))
    assert state["result"] == "used\n"
    Command(words, sandbox=True)  # which tries whether it is there
    Path(shown, "bin").mkdir()
    Path(shown, "pyvenv.cfg").touch()
    Path(shown, "bin", "tool").symlink_to("../tool")
    assert shown in Command([f"{shown}/bin/tool"], sandbox=True).script


@contained
def test_what_cannot_be_shown_is_found_at_once(tmp_path, shown):
    for path in (str(tmp_path), f"{shown}/tool", f"{shown}/nothing"):
        with pytest.raises(CannotRun, match="cannot be shown"):
            Command(["true"], sandbox=True, show=[path])
    os.chmod(shown, 0o700)
    Path(shown, "deeper").mkdir()
    if os.getuid() == 0:  # the sandbox's user is another one
        with pytest.raises(CannotRun, match="mount: .*deeper"):
            Command(["true"], sandbox=True, show=[f"{shown}/deeper"])
