"""What other people's functions return and do: taken, or refused by name, and no run is spoiled by one of them."""

import asyncio
import contextlib
import decimal
import functools
import json
import os
import shutil
import signal
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, all_batches, launch, lines, write_run
from scripted import play

import orchestrator
from configs.environments.scoring import score
from configs.runtime.directory import cut_lines
from configs.runtime.role import RunError
from env import DataError, MultiTurnEnv, Rubric, SingleTurnEnv, call, in_thread, load_environment, load_rows
from tools import show

ROWS = [{"question": f"row {i}", "answer": str(i)} for i in range(9)]
HEAD = """
import contextlib, os, random, signal, subprocess, sys, time
import numpy as np
from env import Rubric, SingleTurnEnv, MultiTurnEnv

ROWS = [{"question": f"row {i}", "answer": str(i), "info": {"i": i}} for i in range(37)]

def noise():
    return random.random()
"""


@pytest.fixture
def task(tmp_path, request):
    """task(code) -> the [env] table of a module with that code; it may use ROWS and noise, and defines `env`."""

    def make(code, more=""):
        name = f"task_{abs(hash(request.node.name + code))}"
        body = "\n    ".join(["return env" if not more else more])
        (tmp_path / f"{name}.py").write_text(f"{HEAD}\n{code}\n\ndef load_environment():\n    {body}\n")
        return f'[env]\nid = "{name}"'

    return make


# --- numbers ----------------------------------------------------------------------------------------------------------

HALVES = [0.5, np.float32(0.5), np.array(0.5), np.array([0.5])[0], torch.tensor(0.5), decimal.Decimal("0.5")]


@pytest.mark.parametrize("value", HALVES, ids=lambda value: type(value).__name__)
def test_numbers_of_any_kind_are_rewards(value):
    (_, reward, metrics) = play(SingleTurnEnv(ROWS, rubric=Rubric([lambda: value])), ROWS[0], "x")
    assert reward == 0.5 and json.dumps(metrics) == '{"<lambda>": 0.5}'


@pytest.mark.parametrize("value", [np.bool_(True), True, torch.tensor(True), np.int64(1)])
def test_so_are_truth_values(value):
    assert play(SingleTurnEnv(ROWS, rubric=Rubric([lambda: value])), ROWS[0], "x")[1] == 1.0


@pytest.mark.parametrize("value", [b"1", 1j, torch.ones(2), {}, decimal.Decimal("nan"), 10**400])
def test_what_is_none_says_its_type(value):
    with pytest.raises(ValueError, match=f"no finite number within 1e6, but .*{type(value).__name__}"):
        play(SingleTurnEnv(ROWS, rubric=Rubric([lambda: value])), ROWS[0], "x")


def test_scores_without_a_server_are_floats_whatever_a_rubric_returns():
    class Own(Rubric):
        async def score(self, state):
            return decimal.Decimal("0.5"), {}

        async def score_group(self, states):
            return [(np.float32(0.25), {}) for _ in states]

    env = SingleTurnEnv([{"question": "a", "answer": {(1, 2): 3}}], rubric=Own([]))
    (value,) = score(env, ["a"], ["b"])
    assert value == 0.75 and type(value) is float


class Length:
    def __call__(self, completion, factor=1.0):
        return factor * len(completion[-1]["content"])


def test_partials_and_objects_are_functions_with_the_names_they_have():
    named = functools.partial(call_me, factor=2.0, answer="mine")
    named.__name__ = "named"
    env = SingleTurnEnv(ROWS, rubric=Rubric([Length(), functools.partial(call_me, factor=2.0), named]))
    assert play(env, ROWS[0], "abc")[2] == {"Length": 3.0, "call_me": 7.0, "named": 10.0}


def call_me(completion, factor, answer):
    """A partial's own answer is not the row's."""
    return factor * len(completion[-1]["content"]) + len(answer)


@pytest.mark.parametrize("code, error", {
    "async def score(self, state): return np.float32(noise()), {'f': np.int64(1), 2: 1.0}": "",
    "async def score(self, state): return noise()": "DataError: score returned 0.*, not .reward, {name: value}.",
    "async def score(self, state): return noise(), {'f': 'x'}": "ValueError: reward function score returned x",
    "async def score(self, state): return float('nan'), {}": "ValueError: reward function score returned nan",
    "async def score(self, state): state['turn_rewards'] = np.ones(1); return noise(), {'f': 1, '2': True}": "",
    "async def score_group(self, states): return 3": "DataError: score_group returned 3, not a list",
    "async def score_group(self, states): return [(1.0, {})]": "DataError: 1 scores from score_group for 4 rollouts",
    "async def score_group(self, states): return [(None, {})] * 4": "ValueError: reward function score_group returned",
    "async def score(self, state): state['turn_rewards'] = [1, 2]; return noise(), {}": "DataError: turn_rewards has 2",
    "async def score(self, state): state['turn_rewards'] = ['x']; return 1.0, {}": "ValueError: reward function score",
    "async def score(self, state): state['agent_rewards'] = {'a': None}; return 1.0, {}": "ValueError: reward function",
}.items())  # fmt: skip
def test_a_rubrics_own_scores_are_checked_as_its_functions_are(code, error, task, run):
    env = task(f"class Own(Rubric):\n    {code}\n\nenv = SingleTurnEnv(ROWS, rubric=Own([noise]))")
    ends = pytest.raises(RunError, match=error) if error else contextlib.nullcontext()
    with ends as e:
        run_dir = run(2, env, *(["orchestrator.max_error_share=0.2"] if error else []))
    if error:
        assert e.value.code == 4
    else:
        assert lines(run_dir / "rollouts.jsonl")[0]["metrics"] == {"f": 1.0, "2": 1.0}


@pytest.mark.parametrize("name, value, problem", [
    ("mask", [1, 1, 1], "0 at a sequence's first token"), ("ce", [0, float("nan"), 0], "must be finite"),
    ("agent", 5, "must be text"), ("trainable", np.bool_(True), "a bool"), ("mine", ["a"] * 3, "could not convert"),
])  # fmt: skip
def test_a_field_that_would_end_the_run_loses_its_rollout(name, value, problem):
    s = {"tokens": [1, 2, 3], "mask": [0, 1, 1], "old_logp": [0.0, -1.0, -1.0], "turn": [0] * 3}
    with pytest.raises(ValueError, match=problem):
        orchestrator.check_fields(s | {"agent": "", "trainable": True, name: value})


def test_an_order_says_why_it_drops_a_group(task, run, tmp_path):
    (tmp_path / "forgets.py").write_text("from orchestrator import Order\n\nclass Mine(Order):\n"
                                         "    def keep(self, rollouts):\n        pass\n")  # fmt: skip
    with pytest.raises(RunError, match=r"orchestrator.order: keep\(\) returned None, not text") as e:
        run(1, task("env = SingleTurnEnv(ROWS, rubric=Rubric([noise]))"), "orchestrator.order=forgets:Mine")
    assert e.value.code == 4


# --- rows and messages ------------------------------------------------------------------------------------------------


def test_keys_that_arrow_fills_in_are_dropped():
    message = {"role": "user", "content": "a", "name": None, "tool_calls": None}
    (row,) = load_rows([{"prompt": [message], "answer": None}])
    assert row == {"prompt": [{"role": "user", "content": "a"}], "answer": None}


def test_endless_rows_are_refused_at_once():
    def endless():
        while True:
            yield ROWS[0]

    for source in (endless, endless(), iter(ROWS)):
        with pytest.raises(DataError, match="dataset: a .* has no length and may be endless"):
            load_rows(source)


@pytest.mark.parametrize("reply", ["text", [{"content": "no role"}], None, {"role": "user"}])
def test_a_reply_that_is_no_list_of_messages_is_named(reply):
    class Mine(MultiTurnEnv):
        def env_response(self, messages, state):
            return reply

    with pytest.raises(DataError, match="env_response returned .*, not a list of messages"):
        play(Mine(ROWS), ROWS[0], "a", "b")


@pytest.mark.parametrize("name", ["env", "trainer", "org/orchestrator"])
def test_a_task_may_not_have_the_name_of_a_role(name):
    with pytest.raises(DataError, match="is a module of this project: give yours another name"):
        load_environment(name, {})


def test_answers_that_json_cannot_hold_are_text_in_the_log(task, run):
    env = task("ROWS = [row | {'answer': {(1, 2): 3}} for row in ROWS]\n"
               "env = SingleTurnEnv(ROWS, rubric=Rubric([noise]))")  # fmt: skip
    assert lines(run(1, env) / "rollouts.jsonl")[0]["answer"] == "{(1, 2): 3}"


@pytest.mark.parametrize("answer, text", [("Mute()", "<Mute>"), ("lock", "<unlocked _thread.lock")])
def test_answers_without_a_text_and_rows_that_cannot_be_copied_are_no_reason_to_end(answer, text, task, run):
    env = task(f"""
import threading
lock = threading.Lock()

class Mute:
    def __repr__(self):
        raise RuntimeError("closed connection")

def reward(state):
    state["answer"] = {answer}
    return noise()

env = SingleTurnEnv([row | {{"lock": lock}} for row in ROWS], rubric=Rubric([reward]))""")
    assert lines(run(1, env) / "rollouts.jsonl")[0]["answer"].startswith(text)


@pytest.mark.parametrize("code, error", [
    ("def start(self, row): return super().start(row) | {'replies': {}}", "not a dict without 'replies'"),
    ("def start(self, row): return True", "start returned True, not a dict"),
    ("def setup_state(self, state): return 3", "setup_state returned 3, not a dict"),
    ("def is_completed(self, messages, state): return np.ones(2)", "is_completed returned <class 'numpy.ndarray'>"),
    ("def add_fields(self, sequences): sequences[0]['mine'] = {}", "field 'mine': float"),
])  # fmt: skip
def test_what_a_method_returned_is_named(code, error, task, run):
    env = task(f"class Own(MultiTurnEnv):\n    {code}\n\nenv = Own(ROWS, max_turns=1, rubric=Rubric([noise]))")
    with pytest.raises(RunError, match=f"mostly by DataError: .*{error}") as e:
        run(1, env, "orchestrator.max_error_share=0.2")
    assert e.value.code == 4


def test_an_endless_group_reward_is_no_endless_list(task, run):
    env = task("""
from configs.environments.rubrics import GroupRubric

def endless(completions):
    while True:
        yield 1.0

env = SingleTurnEnv(ROWS, rubric=GroupRubric([endless]))""")
    with pytest.raises(RunError, match="reward function endless returned .*not a number for each of 4 rollouts"):
        run(1, env, "orchestrator.max_error_share=0.2")


def test_rewards_see_how_the_server_ended_each_turn(task, run):
    env = task("""
def ended(replies, completion):
    assert len(replies) == sum(m["role"] == "assistant" for m in completion)
    usage = replies[-1]["usage"]["completion_tokens"]
    return {"stop": 0, "length": 100}[replies[-1]["choices"][0]["finish_reason"]] + usage

class Two(MultiTurnEnv):
    def env_response(self, messages, state):
        return [{"role": "user", "content": "more"}]

env = Two(ROWS, max_turns=2, rubric=Rubric([ended, noise], [0.0, 1.0]))""")
    found = lines(run(2, env, "orchestrator.sampling.max_tokens=20") / "rollouts.jsonl")
    assert {r["metrics"]["ended"] >= 100 for r in found} == {True, False}  # by the last turn
    assert all(r["metrics"]["ended"] % 100 <= 20 and r["info"]["i"] >= 0 for r in found)
    assert all(r["truncated"] for r in found if r["metrics"]["ended"] >= 100)


# --- one process ------------------------------------------------------------------------------------------------------

ALARM = """
def on_alarm(*_):
    raise TimeoutError

def limited(completion):
    try:
        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 5)
        value = random.random()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return value
    except Exception:
        return 0.0
"""


def test_a_time_limit_that_cannot_work_is_no_reward_of_zero(task, run):
    env = task(f"{ALARM}\nenv = SingleTurnEnv(ROWS, rubric=Rubric([limited]))")
    with pytest.raises(RunError, match="mostly by NeedsMainThread: limited sets a signal handler .*in a thread") as e:
        run(1, env, "orchestrator.max_error_share=0.2")
    assert e.value.code == 4


def test_handlers_may_be_set_by_name_in_the_main_thread():
    asyncio.run(in_thread(abs, 1))
    assert signal.signal(signalnum=signal.SIGUSR1, handler=signal.SIG_DFL) is signal.SIG_DFL


@pytest.mark.parametrize("how", ["hidden", "raised", "by name"])
def test_it_works_in_an_environment_of_verifiers_as_it_does_there(how, task, run):
    """Whether the function hides the error or not, and however it came by signal.signal."""
    code = {
        "hidden": ALARM,
        "raised": ALARM.replace("except Exception", "except TimeoutError"),
        "by name": f"from signal import signal as set_handler\n{ALARM.replace('signal.signal', 'set_handler')}",
    }[how]
    env = task(f"""{code}
import verifiers as vf
from datasets import Dataset

env = vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric([limited]))""")
    found = lines(run(1, env) / "rollouts.jsonl")
    assert found and all(r["reward"] > 0 and not r["error"] for r in found)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


@pytest.mark.slow
@pytest.mark.long
def test_output_directory_and_processes_of_a_task_spoil_nothing(task, tmp_path, models):
    """A reward function takes the standard output, leaves half lines, changes directory and starts processes."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    env = task(f"""
import io
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
POOL = ProcessPoolExecutor(2, get_context("forkserver"))

def rude():
    print("half a line", end="")
    os.chdir({str(elsewhere)!r})
    sys.stdout = io.StringIO()
    subprocess.Popen(["sleep", "1234"], start_new_session=True)
    POOL.submit(abs, 1).result()
    return random.random()

env = SingleTurnEnv(ROWS, ROWS[:3], rubric=Rubric([rude]))""")
    toml = write_run(tmp_path, models["untied"], 3, env)
    relative = os.path.relpath(tmp_path / "out", ROOT)
    done = launch(toml, f"output_dir={relative}", "eval.every=1")
    run_dir = tmp_path / "out" / "run"
    assert len(lines(run_dir / "metrics.jsonl")) == 3 and (run_dir / "final").exists() and not any(elsewhere.iterdir())
    shown = done.stdout.splitlines()
    assert sum(line.startswith("step ") for line in shown) == 3 and sum(line.startswith("eval ") for line in shown) >= 4
    deadline = time.monotonic() + 15
    while left_over():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def left_over():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                found += [pid] * (file.read() == b"sleep\x001234\x00")
        except OSError:
            pass
    return found


def test_our_lines_do_not_go_through_sys_stdout(task, run, capfd, monkeypatch):
    env = task("env = SingleTurnEnv(ROWS, ROWS[:3], rubric=Rubric([noise]))")
    monkeypatch.setattr("sys.stdout", None)
    run(1, env, "eval.every=1")
    assert "\neval 0 | task_" in capfd.readouterr().out


# --- a run that goes on -----------------------------------------------------------------------------------------------


def test_changed_keys_are_named_and_another_loss_is_refused(task, run, capfd):
    env = task("env = SingleTurnEnv(ROWS, rubric=Rubric([noise]))")
    run(1, env)
    run(2, env, "trainer.learning_rate=0.5")
    assert "run: trainer.learning_rate was 0.001, now 0.5\n" in capfd.readouterr().out
    with pytest.raises(RunError, match=r"began with another \['trainer.loss'\].*allow_changes") as e:
        run(3, env, "trainer.loss=grpo")
    assert e.value.code == 2
    with pytest.raises(RunError, match=r"began with another \['trainer.optimizer'\]"):
        run(3, env, "trainer.optimizer=json:loads")
    assert [line["step"] for line in lines(run.run_dir / "rollouts.jsonl")][-1] == 1  # nothing was cut
    run(3, env, "trainer.loss=grpo", "allow_changes=true")
    assert len(all_batches(run.run_dir)) == 3


def test_what_an_evaluation_says_is_kept_and_lost_rows_count(task, run, capsys):
    env = task("""
def fails_on_some(answer):
    return float(answer) / (0 if answer == "1" else 1)

env = SingleTurnEnv(ROWS, ROWS[:3], rubric=Rubric([noise, fails_on_some], [1.0, 0.0]))""")
    run_dir = run(1, env, "eval.every=1", "eval.rollouts_per_example=2", "eval.temperature=0")
    first = lines(run_dir / "eval.jsonl")[0]
    found = [r for r in lines(run_dir / "eval_rollouts.jsonl") if r["step"] == 0]
    assert len(found) == 6 and [r["example"] for r in found] == [0, 0, 1, 1, 2, 2] and first["errors"] == 2
    rewards = [r["reward"] for r in found if r["reward"] is not None]
    assert first["reward/mean"] == pytest.approx(sum(rewards) / 4)
    assert first["reward/lost_as_0"] == pytest.approx(sum(rewards) / 6)
    show.main([str(run_dir), "--evals", "--step", "0"])
    assert capsys.readouterr().out.count("=== step 0, ") == 6


def test_a_value_with_any_line_break_is_one_value(task, run, capfd):
    env = task("env = SingleTurnEnv(ROWS, rubric=Rubric([noise]))")
    for steps, name in ((1, "a\u2028b\u0085c = d\u2029"), (2, "a\u2028b\u0085c = e\u2029")):
        run(steps, f'{env}\n[inference.args]\nmine = "{name}"')
    assert "run: inference.args was " in capfd.readouterr().out


def test_replayed_groups_are_in_no_mean(task, run, tmp_path):
    (tmp_path / "again.py").write_text("""
from orchestrator import Order

class Again(Order):
    kept = []

    def commit(self, group):
        super().commit(group)
        self.kept.append(group)

    def extra(self, step):
        return self.kept[:2]
""")
    run_dir = run(2, task("env = SingleTurnEnv(ROWS, rubric=Rubric([noise]))"), "orchestrator.order=again:Again")
    rollouts = [r for r in lines(run_dir / "rollouts.jsonl") if r["step"] == 1]
    batch = all_batches(run_dir)[1]
    assert len(batch.sequences) == 24 and len(rollouts) == batch.info["metrics"]["rollout/num"] == 16
    assert batch.info["metrics"]["reward/mean"] == pytest.approx(np.mean([r["reward"] for r in rollouts]))
    assert oct((run_dir / "batches" / "step_000000.safetensors").stat().st_mode)[-3:] == "644"


def test_a_log_is_cut_at_a_step_and_at_half_a_line(tmp_path):
    path = tmp_path / "log.jsonl"
    for text, end, left in (
        ('{"step": 0, "a": 1}\n{"step": 0}\n{"step": 10}\n{"step": 11}\n', 10, 2),
        ('{"step": 0}\n{"step": 1', 5, 1), ("", 1, 0), ('{"step": 3}\n', 0, 0),
    ):  # fmt: skip
        path.write_text(text)
        cut_lines(path, end)
        assert len(lines(path)) == left
    path.unlink()
    cut_lines(path, 3)
    assert path.read_text() == ""


def test_a_function_may_be_called_by_any_name_it_has():
    assert asyncio.run(call(functools.partial(pow, 2), exp=3)) == 8 and shutil.which("sleep")


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def test_rewards_are_told_the_step_that_trains_on_them(task, run):
    """Not the version that answers: a weight may be a function of it."""
    code = "def at(step):\n    return float(step)\n\nenv = SingleTurnEnv(ROWS, rubric=Rubric([noise, at], [1.0, 0.0]))"
    found = lines(run(3, task(code), "orchestrator.max_staleness=2") / "rollouts.jsonl")
    assert all(r["metrics"]["at"] == r["step"] for r in found) and {r["step"] for r in found} == {0, 1, 2}
