"""Tasksets of verifiers 0.4: the protocol against a stub of the worker, and with --all the real package in its venv.
Its tasksets are not on the package index; those in tests/v1_tasksets/ have the same interfaces."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
from conftest import ROOT, all_batches, lines
from test_agents import CALL, Policy, sequences_of

from configs.environments import verifiers_v1
from configs.environments.verifiers_v0 import VerifiersEnv
from configs.environments.verifiers_v1 import TasksetFailed, VerifiersV1Env, WorkersRubric, make_venv
from configs.runtime.role import RunError
from env import Truncated, load_environment

TASK = '[env]\nid = "verifiers_v1"\nargs = {{ taskset = "{}"{} }}'
TOOLS = "inference.args.enable_auto_tool_choice=true"
ALL_MAY_FAIL = "orchestrator.max_error_share=1.0"


@pytest.fixture
def workers(monkeypatch):
    """The workers that a test has started; they end with it."""
    started = []

    class Kept(verifiers_v1.Worker):
        def __init__(self, python):
            super().__init__(python)
            started.append(self)

    monkeypatch.setattr(verifiers_v1, "Worker", Kept)
    yield started
    for worker in started:
        with suppress(BrokenPipeError):
            worker.process.stdin.close()
        worker.process.wait(10)


@pytest.fixture
def stub(workers, monkeypatch):
    monkeypatch.setattr(verifiers_v1, "make_venv", lambda packages: sys.executable)
    monkeypatch.setattr(verifiers_v1, "WORKER", ROOT / "tests" / "v1_stub.py")
    return workers


@pytest.fixture(scope="session")
def venv(tmp_path_factory):
    """A venv with verifiers 0.4 and the tests' tasksets: a minute."""
    ours = verifiers_v1.VENV
    verifiers_v1.VENV = tmp_path_factory.mktemp("v1") / "venv"
    tasksets = shutil.copytree(ROOT / "tests" / "v1_tasksets", tmp_path_factory.mktemp("tasksets") / "tasksets")
    make_venv([str(tasksets)])  # pip builds there
    yield verifiers_v1.VENV
    verifiers_v1.VENV = ours


async def rollout(env, row, policy):
    state = env.start(row) | {"replies": [], "step": 0}
    try:
        await env.rollout(state, policy)
    except Truncated:
        state["is_truncated"] = True
    return state, *await env.rubric.score(state)


# --- the protocol -----------------------------------------------------------------------------------------------------


def test_a_run_with_a_worker(run, stub):
    run_dir = run(2, TASK.format("plain", ", num_eval = 2"))
    found = lines(run_dir / "rollouts.jsonl")
    assert found and not any(r["error"] for r in found)
    for r in found:
        assert r["reward"] == len(r["completion"][-1]["content"]) == r["metrics"]["length"]
        assert r["metrics"]["agent_requests"] == 1 and r["metrics"]["agent_tokens"] == 3.0  # "tokens" is the run's
        assert r["prompt"][0]["content"] == f"stub {r['info']['task']}"
    for sequences in sequences_of(all_batches(run_dir)).values():
        assert [s["agent"] for s in sequences] == ["agent"]
    assert len(stub) == 1  # for all rollouts


@pytest.mark.parametrize("kind, error", [("fails", "ValueError: user code"), ("unscored", "length gave nothing")])
def test_what_has_no_reward_is_lost_and_never_zero(run, stub, kind, error):
    found = lines(run(2, TASK.format(kind, ""), ALL_MAY_FAIL) / "rollouts.jsonl")
    for r in found:
        is_lost = r["info"]["task"] % 3 == 0
        assert (r["reward"] is None) == is_lost and r["error"].startswith(f"TasksetFailed: {error}") == is_lost


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", ["dies", "half"])  # in the middle of a line
def test_a_worker_that_dies_says_so(kind, run, stub):
    message = "the last was failed.*TasksetFailed: the worker has ended with exit code 7, see the log"
    with pytest.raises(RunError, match=message):
        run(1, TASK.format(kind, ""))


def test_one_package_is_not_a_list_of_letters(tmp_path, monkeypatch):
    monkeypatch.setattr(verifiers_v1, "VENV", tmp_path)
    monkeypatch.setattr(verifiers_v1, "LOCK", tmp_path / "lock")
    installed = []
    monkeypatch.setattr(verifiers_v1, "run_logged", lambda *words: installed.append(words[-1]))
    make_venv("my-tasks==1.2")
    assert installed[-1] == "my-tasks==1.2" and len(installed) == 3


def test_a_cancelled_rollout_ends_in_the_worker(stub, capfd):
    env = VerifiersV1Env("waits")

    async def go():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(rollout(env, env.dataset[1], Policy({"content": "a"})), 1.0)
        while "cancelled 1" not in capfd.readouterr().err:
            await asyncio.sleep(0.05)
        assert not env.worker.waiting

    asyncio.run(asyncio.wait_for(go(), 20))
    with pytest.raises(TimeoutError):  # and its late answer does no harm
        asyncio.run(asyncio.wait_for(rollout(env, env.dataset[1], Policy({"content": "a"})), 1.0))


def test_a_taskset_that_is_not_there_ends_the_run_before_a_server_starts(run, stub):
    with pytest.raises(RunError, match="taskset 'missing': ModuleNotFoundError") as e:
        run(1, TASK.format("missing", ""), "inference.urls=[]")
    assert e.value.code == 2


def test_rows_are_held_out_or_loaded_with_other_arguments(stub):
    env = VerifiersV1Env("plain", num_eval=5)
    assert len(env.dataset) == 7 and env.eval_dataset[0]["info"] == {"task": 7}
    assert VerifiersV1Env("plain").eval_dataset is None
    assert len(VerifiersV1Env("plain", eval_args={"split": "test"}).eval_dataset) == 12


def test_an_id_finds_v1_by_the_task_and_v0_by_its_module(stub):
    assert isinstance(load_environment("verifiers_v1", {"taskset": "plain"}), VerifiersV1Env)
    assert isinstance(load_environment("vf_envs", {"kind": "single"}), VerifiersEnv)


def test_rewards_of_agents_are_means_over_their_traces():
    def trace(agent, reward, trainable=True):
        rewards = {} if reward is None else {"won": reward}
        return {"agent": agent, "trainable": trainable, "reward": reward, "rewards": rewards, "metrics": {}}

    def score(*traces):
        state = {"answer_of_worker": {"traces": traces}}
        return *asyncio.run(WorkersRubric().score(state)), state.get("agent_rewards")

    assert score(trace("a", 1.0), trace("a", 0.0)) == (0.5, {"won": 0.5}, None)
    both = score(trace("a", 1.0), trace("b", -2.0, trainable=False))
    assert both == (1.0, {"a_won": 1.0, "b_won": -2.0}, {"a": 1.0, "b": -2.0})
    with pytest.raises(TasksetFailed, match="no agent that is trained got a reward"):
        score(trace("a", None), trace("b", 1.0, trainable=False))


def test_the_venv_is_made_once_and_again_for_other_requirements(tmp_path, monkeypatch):
    commands = []
    monkeypatch.setattr(verifiers_v1, "VENV", tmp_path / "venv")
    monkeypatch.setattr(verifiers_v1, "LOCK", tmp_path / "lock")
    monkeypatch.setattr(verifiers_v1, "REQUIREMENTS", tmp_path / "requirements.txt")

    def run_logged(*command):
        verifiers_v1.VENV.mkdir(exist_ok=True)
        commands.append(list(map(str, command[1:])))

    monkeypatch.setattr(verifiers_v1, "run_logged", run_logged)
    (tmp_path / "requirements.txt").write_text("one==1\n")
    for packages in ([], ["two"], ["two"], ["-e three"]):
        make_venv(packages)
    requirements = str(tmp_path / "requirements.txt")
    install = ["-m", "pip", "install"]
    made = [["-m", "venv", "--clear", str(tmp_path / "venv")], [*install, "-r", requirements]]
    added = [[*install, "-c", requirements, "two"], [*install, "-c", requirements, "-e", "three"]]
    assert commands == made + added
    (tmp_path / "requirements.txt").write_text("one==2\n")
    commands.clear()
    make_venv(["two"])
    assert commands == made + added[:1]


def test_a_failed_installation_says_where_its_log_is(tmp_path, monkeypatch):
    monkeypatch.setattr(verifiers_v1, "VENV", tmp_path / "venv")
    with pytest.raises(RunError, match="failed, see .*setup.log: no such thing") as e:
        verifiers_v1.run_logged(sys.executable, "-c", "raise SystemExit('no such thing')")
    assert e.value.code == 2 and "no such thing" in (tmp_path / "venv" / "setup.log").read_text()


# --- verifiers 0.4 ----------------------------------------------------------------------------------------------------

DIRECT = """
import asyncio, importlib, json, sys
from types import SimpleNamespace

module, taskset, function, replies = json.loads(sys.argv[1])
module = importlib.import_module(module)
config = next(base.__args__[1] for base in getattr(module, taskset).__orig_bases__)
taken = getattr(module, taskset)(config()).take(60)
tasks = list(taken)
rewards = []
for task, said in replies:
    messages = [SimpleNamespace(content=text) for text in said]
    trace = SimpleNamespace(assistant_messages=messages, last_reply=said[-1].strip(), num_turns=len(said))
    rewards.append(asyncio.run(getattr(tasks[task], function)(trace)))
print("rewards", json.dumps(rewards))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "module, taskset, function, weight, args",
    [
        ("reverse_v1", "Reverse", "similarity", 2.0, ""),
        ("sort_v1", "Sort", "share", 1.0, ", num_rows = 60"),
        ("glossary_v1", "Glossary", "looked_up", 1.0, ""),
    ],
)
def test_rewards_are_the_tasksets_and_tokens_the_servers(run, venv, workers, module, taskset, function, weight, args):
    run_dir = run(3, TASK.format(module, args), TOOLS, "orchestrator.sampling.max_tokens=5")
    found = lines(run_dir / "rollouts.jsonl")
    assert len(found) >= 3 and not any(r["error"] for r in found)
    replies = []
    for r in found:
        said = [m["content"] for m in r["completion"] if m["role"] == "assistant"]
        assert len(said) == r["num_turns"] == r["metrics"]["agent_requests"]
        replies.append([r["info"]["task"], said])
    question = json.dumps([module, taskset, function, replies])
    python = [venv / "bin" / "python", "-P", "-c", DIRECT, question]
    env = verifiers_v1.environment()
    done = subprocess.run(python, capture_output=True, text=True, env=env, check=True)
    rewards = json.loads(done.stdout.rpartition("rewards ")[2])
    for r, reward in zip(found, rewards, strict=True):
        assert r["metrics"][function] == reward and r["reward"] == weight * reward
    assert len({r["reward"] for r in found}) > 1
    if module == "sort_v1":
        assert {r["num_turns"] for r in found} == {1, 2, 3}
    num_compared = 0
    texts = {(r["step"], r["rollout"], r["prompt"][-1]["content"]): r for r in found}
    for step, batch in enumerate(all_batches(run_dir)):
        for s in batch.sequences:
            mask = s["mask"].bool()
            asked = run.tokenizer.decode(s["tokens"])
            for (at, number, prompt), r in texts.items():
                if at == step and number == s["rollout"] and f"<|user|>{prompt}<|end|>" in asked:
                    said = "".join(m["content"] for m in r["completion"] if m["role"] == "assistant")
                    sampled = run.tokenizer.decode(s["tokens"][mask]).replace(run.tokenizer.eos_token, "")
                    assert sampled == said and int(mask.sum()) == s["num_tokens"]
                    num_compared += 1
    assert num_compared >= sum(not r["dropped"] for r in found)


def call(arguments, name="facts_lookup"):
    return {"content": "", "tool_calls": [CALL | {"function": {"name": name, "arguments": arguments}}]}


@pytest.mark.long
def test_tools_are_called_and_what_is_wrong_with_a_call_goes_back(venv, workers):
    env = VerifiersV1Env("glossary_v1")
    policy = Policy(call('{"name": "alan"}'), call('{"na'), call("[1]"), call("{}", "no"), {"content": "machine"})
    state, reward, metrics = asyncio.run(rollout(env, env.dataset[1], policy))
    tools = [m["content"] for m in state["completion"] if m["role"] == "tool"]
    assert tools[0] == "machine" and reward == 1.07 and metrics["agent_requests"] == 5
    assert "no JSON object" in tools[1] and "no JSON object" in tools[2] and "unknown tool 'no'" in tools[3]


@pytest.mark.long
def test_the_policys_fault_is_scored_and_the_tasksets_loses_the_rollout(venv, workers):
    env = VerifiersV1Env("glossary_v1", max_requests=2)
    again = [call('{"name": "ada"}')] * 2
    _, reward, _ = asyncio.run(rollout(env, env.dataset[0], Policy(*again)))
    assert reward == 0.0
    state, reward, _ = asyncio.run(rollout(env, env.dataset[0], Policy(again[0], Truncated())))
    assert reward == 0.0 and state["is_truncated"]
    with pytest.raises(Exception, match="OSError: no server"):
        asyncio.run(rollout(env, env.dataset[0], Policy(OSError("no server"))))
    env = VerifiersV1Env("reverse_v1", kind="raises")
    with pytest.raises(TasksetFailed, match="the reward function fails"):
        asyncio.run(rollout(env, env.dataset[3], Policy({"content": "a"})))
    asyncio.run(rollout(env, env.dataset[1], Policy({"content": "a"})))
    env = VerifiersV1Env("reverse_v1", kind="hangs")
    with pytest.raises(TasksetFailed, match="similarity gave nothing"):
        asyncio.run(rollout(env, env.dataset[1], Policy({"content": "a"})))


@pytest.mark.long
def test_agents_are_named_have_rewards_and_are_trained_or_not(run, venv, workers):
    run_dir = run(2, TASK.format("two_v1", ""))
    for r in lines(run_dir / "rollouts.jsonl"):
        rewards = r["agent_rewards"]
        assert not r["error"] and rewards["proposer"] < 0 < rewards["solver"] and len(rewards) == 2
        assert r["reward"] == sum(rewards.values()) / 2 and r["metrics"]["solver_game"] == rewards["solver"]
    for sequences in sequences_of(all_batches(run_dir)).values():
        assert {s["agent"]: bool(s["trainable"]) for s in sequences} == {
            "proposer": True,
            "solver": True,
            "user": False,
        }


@pytest.mark.long
def test_what_cannot_be_loaded_ends_the_run(run, venv, workers):
    for taskset, args, message in [
        ("no_such_taskset", "", "taskset 'no_such_taskset' not found"),
        ("sort_v1", "", "the taskset never ends"),
        ("reverse_v1", ", no_such_key = 1", "no_such_key"),
        ("reverse_v1", ', kind = "empty"', "dataset is empty"),
    ]:
        with pytest.raises(RunError, match=message) as e:
            run(1, TASK.format(taskset, args), "inference.urls=[]")
        assert e.value.code in (2, 4)
    env = VerifiersV1Env("reverse_v1", eval_args={"split": "test"})
    assert [len(env.dataset), len(env.eval_dataset)] == [13, 2]
    assert env.eval_dataset[0]["prompt"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "test 0"},
    ]


ORPHAN = """
import asyncio, sys
sys.path[:0] = [{root!r}, {root!r} + "/tests"]
from pathlib import Path
from test_agents import Policy
from configs.environments import verifiers_v1
verifiers_v1.VENV = Path({venv!r})
env = verifiers_v1.VerifiersV1Env("glossary_v1")

class Slow(Policy):
    async def __call__(self, *args, **kwargs):
        print("asked", flush=True)
        await asyncio.sleep(60)

asyncio.run(env.rollout(env.start(env.dataset[0]) | {{"replies": []}}, Slow()))
"""


@pytest.mark.long
def test_worker_and_tool_servers_end_with_the_process_that_started_them(venv):
    command = [sys.executable, "-c", ORPHAN.format(root=str(ROOT), venv=str(venv))]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "asked\n"
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) >= 2
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while any(process.is_running() and process.status() != "zombie" for process in family):
        assert time.monotonic() < deadline
        time.sleep(0.1)
