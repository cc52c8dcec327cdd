"""Environments of verifiers 0.1; tasksets of 0.4, with --all, by the real package in its venv. Tasksets are not on the
package index; those in v1_tasksets/ are written as users of verifiers write them."""

import asyncio
import shutil
import signal

import pytest
import verifiers as vf
from conftest import ROOT, all_batches, lines
from datasets import Dataset
from scripted import Policy, play

from env import Truncated
from env import load_environment as load
from rolemodel.environments import verifiers_v1
from rolemodel.environments.verifiers_v0 import VerifiersEnv
from rolemodel.environments.verifiers_v1 import TasksetFailed, VerifiersV1Env

ROWS = [{"question": f"row {i}", "answer": str(i), "info": {"number": i}} for i in range(13)]
DATA = {"dataset": Dataset.from_list(ROWS), "eval_dataset": Dataset.from_list(ROWS[:1]), "system_prompt": "S"}


def letters(completion):
    last = completion[-1]
    return float(sum(map(ord, last["content"] if isinstance(last, dict) else last.content)) % 7)


def call(name, arguments):
    return {"tool_calls": [{"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}]}


# --- 0.1 --------------------------------------------------------------------------------------------------------------


class Turns(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]


def test_turns_and_settings_come_through():
    settings = {"max_tokens": 3, "stop": ["e"], "temperature": 0.3}
    env = VerifiersEnv(Turns(**DATA, max_turns=2, rubric=vf.Rubric([letters], [0.5]), sampling_args=settings))
    policy = Policy("a", "be", stop_reason="e")
    state = asyncio.run(policy.rollout(env, env.dataset[3]))
    assert [asked.settings for asked in policy.asked] == [{"max_tokens": 3, "stop": ["e"]}] * 2
    assert [m["content"] for m in policy.asked[1].messages] == ["S", "row 3", "a", "turn 1"] and state["turn"] == 2
    assert [m["content"] for m in state["completion"]] == ["a", "turn 1", "be"] and state["agent"]["dropped"] == 2
    reward, metrics = asyncio.run(env.rubric.score(state))
    assert reward == 0.5 * metrics["letters"] == 0.5 * (ord("b") % 7) and len(env.eval_dataset) == 1


def load_environment(weight):
    """Of this module, as if it had been installed."""
    return vf.SingleTurnEnv(**DATA, rubric=vf.Rubric([letters], [weight]))


def test_an_installed_environment_is_named_by_its_id():
    env = load("someone/test-verifiers", {"weight": 0.5})
    assert play(env, env.dataset[0], "b")[1] == 0.5 * (ord("b") % 7)


def double(a: int) -> str:
    """Double a number.

    Args:
        a: the number
    """
    return str(2 * a)


def test_tools_are_called_and_errors_go_back_as_text():
    env = VerifiersEnv(vf.ToolEnv(**DATA, rubric=vf.Rubric([letters]), tools=[double], max_turns=4))
    said = call("double", '{"a": 21}')
    state, reward, metrics = play(env, env.dataset[3], said, call("double", '{"a": '), "")  # the policy may say nothing
    tools = [m["content"] for m in state["completion"] if m["role"] == "tool"]
    assert tools[0] == "42" and "Expecting value" in tools[1] and state["asked"][1][-2] == Policy.message(said)
    assert metrics["total_tool_calls"] == 2 and reward == metrics["letters"] == 0.0


def limited(answer):
    """A time limit by a signal works in the main thread alone. Whoever sets one may take an error for an answer."""
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return 1.0
    except Exception:
        return 0.0


def step(answer):
    """A name that metrics.jsonl has."""
    return {"3": None, "4": float("nan"), "5": "x"}.get(answer, 2.0)


def test_a_reward_that_is_none_loses_the_rollout_and_never_counts_as_0():
    env = VerifiersEnv(vf.SingleTurnEnv(**DATA, rubric=vf.RubricGroup([vf.Rubric([limited]), vf.Rubric([step])])))
    _, reward, metrics = play(env, env.dataset[0], "a")
    assert reward == 3.0 and metrics["reward_step"] == 2.0 and metrics["limited"] == 1.0
    for i in (3, 4, 5):
        with pytest.raises(ValueError):
            play(env, env.dataset[i], "a")
    with pytest.raises(Truncated):
        play(env, env.dataset[7], Truncated())


def spread(completions):
    return [float(i) for i in range(len(completions))]


def test_functions_of_groups_and_groups_of_environments():
    parts = [vf.SingleTurnEnv(**DATA, rubric=vf.Rubric([letters, spread], [w, 1.0])) for w in (-1.0, 0.5)]
    env = VerifiersEnv(vf.EnvGroup(parts, ["a", "b"]))
    for i, weight in ((0, -1.0), (13, 0.5)):
        states = [play(env, env.dataset[i], "e")[0] for _ in range(2)]  # letters gives it 3
        scores = asyncio.run(env.rubric.score_group(states))
        assert [reward for reward, _ in scores] == [3 * weight, 3 * weight + 1] and scores[1][1]["spread"] == 1.0


# --- 0.4 --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def venv(tmp_path_factory):
    """A venv with verifiers 0.4 and the tests' tasksets: a minute."""
    folder = tmp_path_factory.mktemp("v1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifiers_v1, "VENV", folder / "venv")
        patch.setattr(verifiers_v1, "LOCK", folder / "lock")
        tasksets = shutil.copytree(ROOT / "tests" / "v1_tasksets", folder / "tasksets")  # pip builds there
        verifiers_v1.make_venv([str(tasksets)])
        yield


@pytest.mark.long
def test_tools_rewards_and_whose_fault_it_is(venv):
    env = load("verifiers_v1", {"taskset": "glossary_v1", "max_requests": 5, "num_eval": 1})
    assert [len(env.dataset), len(env.eval_dataset)] == [2, 1] and env.eval_dataset[0]["info"] == {"task": 2}
    said = [call("facts_lookup", arguments) for arguments in ('{"name": "alan"}', '{"na', "[1]")]
    state, reward, metrics = play(env, env.dataset[1], *said, call("no", "{}"), "a machine")
    tools = [m["content"] for m in state["completion"] if m["role"] == "tool"]
    assert tools[0] == "machine" and "not a JSON object" in tools[1] and "not a JSON object" in tools[2]
    assert "unknown tool 'no'" in tools[3] and [m["content"] for m in state["prompt"]] == ["S", "alan"]
    assert reward == 2.0 and metrics["agent_tokens"] == 1.0 and metrics["agent_requests"] == 5
    assert play(env, env.dataset[1], *[said[0]] * 5)[1] == 0.0  # no more requests
    policy = Policy(said[0], Truncated())
    with pytest.raises(Truncated):
        asyncio.run(policy.rollout(env, env.dataset[0]))
    assert asyncio.run(env.rubric.score(policy.state))[0] == 0.0
    with pytest.raises(Exception, match="OSError: no server"):
        play(env, env.dataset[0], OSError("no server"))
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(Policy(None).rollout(env, env.dataset[0]), 2))
    assert not env.worker.waiting and play(env, env.dataset[0], "first")[1] == 2.0
    for kind, error in {"raises": "the reward function fails", "hangs": "tokens returned None"}.items():
        other = VerifiersV1Env("glossary_v1", kind=kind)
        with pytest.raises((TasksetFailed, ValueError), match=error):
            play(other, other.dataset[0], "a")
    with pytest.raises(TasksetFailed, match="the taskset never ends"):
        VerifiersV1Env("two_v1")
    env.worker.process.kill()
    with pytest.raises((TasksetFailed, OSError)):
        play(env, env.dataset[0], "a")


@pytest.mark.long
def test_agents_are_named_have_rewards_and_are_trained_or_not(run, venv):
    run_dir = run(2, VerifiersV1Env("two_v1", num_rows=60))
    for r in lines(run_dir / "rollouts.jsonl"):
        rewards = r["agent_rewards"]
        assert not r["error"] and rewards["proposer"] < 0 < rewards["solver"] and len(rewards) == 2
        assert r["reward"] == sum(rewards.values()) / 2 and r["metrics"]["solver_game"] == rewards["solver"]
        assert r["num_turns"] == r["metrics"]["agent_requests"] == 4
    for s in all_batches(run_dir)[1].sequences:
        assert len({*s["turn"][s["mask"]].tolist()}) == {"proposer": 2, "solver": 1}[s["agent"]]
