"""env.py, and the words of the default task."""

import asyncio
import re
import subprocess
import sys
import threading

import pytest
import reverse_text
from conftest import ROOT

from env import MultiTurnEnv, Rubric, SingleTurnEnv, call, load_environment

ROWS = [{"question": "2 + 2?", "answer": "4", "info": {"hard": True}}]


def rollout(env, replies, row=0):
    async def generate(prompt, tools=None):
        seen.append(prompt)
        return {"role": "assistant", "content": replies.pop(0)}

    async def go():
        state = env.start(env.dataset[row])
        await env.rollout(state, generate)
        return state, await env.rubric.score(state)

    seen = []
    state, score = asyncio.run(go())
    return state, score, seen


def test_single_turn_and_rubric():
    async def slow(answer, info):
        await asyncio.sleep(0)
        return len(answer) + info["hard"]

    def exact(completion, answer):
        return completion[-1]["content"] == answer  # a bool is a number

    env = SingleTurnEnv(ROWS, system_prompt="Short.", rubric=Rubric([exact, slow], [1.0, 0.0]))
    state, (reward, metrics), seen = rollout(env, ["4"])
    assert seen[0] == [{"role": "system", "content": "Short."}, {"role": "user", "content": "2 + 2?"}]
    assert reward == 1.0 and metrics == {"exact": 1.0, "slow": 2.0} and state["turn"] == 1


def test_multi_turn():
    class Guess(MultiTurnEnv):
        def setup_state(self, state):
            state["tries"] = 0

        async def env_response(self, messages, state):
            state["tries"] += 1
            return [{"role": "user", "content": "no"}], state  # verifiers' older signature

        def is_completed(self, messages, state):
            return messages[-1]["content"] == "4"

    env = Guess(ROWS, max_turns=5, rubric=Rubric([lambda tries: float(tries)]))
    state, (reward, _), seen = rollout(env, ["3", "5", "4"])
    assert reward == 2 and state["turn"] == 3 and len(state["completion"]) == 5 and len(seen[-1]) == 5
    state, _, _ = rollout(env, list("12356789"))
    assert state["turn"] == 5


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "1", [1.0, float("inf")], 1e30])
def test_what_is_no_number_is_no_reward(value):
    with pytest.raises(ValueError, match="no finite number"):
        rollout(SingleTurnEnv(ROWS, rubric=Rubric([lambda: value])), ["x"])


def test_functions_get_the_arguments_they_name_and_run_in_threads():
    here = threading.get_ident()
    assert asyncio.run(call(lambda b: b, a=1, b=2)) == 2
    assert asyncio.run(call(lambda **all: sorted(all), a=1, b=2)) == ["a", "b"]
    assert asyncio.run(call(lambda: threading.get_ident())) != here


def test_bad_rows_are_named():
    with pytest.raises(ValueError, match=r"dataset\[1\] has neither"):
        SingleTurnEnv([*ROWS, {"answer": "x"}])
    with pytest.raises(ValueError, match=r"eval_dataset\[0\] is no dict"):
        SingleTurnEnv(ROWS, ["text"])
    with pytest.raises(ValueError, match="dataset is empty"):
        SingleTurnEnv([])
    with pytest.raises(ValueError, match="2 weights for 1 func"):
        Rubric([len], [1, 2])
    with pytest.raises(ValueError, match="two functions are called '<lambda>'"):
        Rubric([lambda: 1, lambda: 0])


def test_environments_load_by_name(tmp_path):
    assert len(load_environment("reverse_text", {"num_train": 9, "num_eval": 3}, ROOT / "configs").dataset) == 9
    (tmp_path / "my_task.py").write_text((ROOT / "configs" / "reverse_text.py").read_text())
    assert load_environment("someone/my-task", {"num_train": 5}, tmp_path).dataset[0]["answer"]
    with pytest.raises(ModuleNotFoundError, match="no_such_task"):
        load_environment("no-such-task", {}, tmp_path)


def test_the_words_of_warm_up_training_and_evaluation_are_disjoint():
    sets = [
        set(reverse_text.words(split, num)) for split, num in {"warmup": 95 * 64, "train": 8192, "eval": 256}.items()
    ]
    assert [len(s) for s in sets] == [95 * 64, 8192, 256]
    assert not sets[0] & sets[1] and not sets[0] & sets[2] and not sets[1] & sets[2]
    env = reverse_text.load_environment()
    assert {r["question"] for r in env.dataset} == sets[1] and {r["question"] for r in env.eval_dataset} == sets[2]


def test_env_needs_no_torch_and_no_side_effects():
    code = "import sys; import env; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    code = "import trainer, orchestrator, torch; assert not torch.distributed.is_initialized()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not done.stdout and not re.search("Error|Traceback", done.stderr)
