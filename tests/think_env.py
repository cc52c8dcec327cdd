"""Environments for tests: turns whose template keeps, or drops, earlier thoughts; fields, agents and reward functions
that misbehave."""

import random
import threading
import time
from collections import Counter

from configs.environments.tools import ToolEnv
from env import MultiTurnEnv, Rubric, SingleTurnEnv

KEEPS = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As Qwen3 and DeepSeek-R1 do it: only the last half of earlier answers is kept (a random model has no </think>).
DROPS = KEEPS.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{{ m.content[(m.content|length + 1) // 2:] }}{% else %}{{ m.content }}{% endif %}",
)


class Turns(MultiTurnEnv):
    def env_response(self, messages, state):
        return [{"role": "user", "content": f"turn {state['turn']}"}]


class OwnPrompt(MultiTurnEnv):
    def setup_state(self, state):
        state["prompt"][0]["content"] = f"changed {random.random():.3f}"


class BadRow(SingleTurnEnv):
    """Cannot begin one of its rows."""

    def start(self, row):
        if row["answer"] == "3":
            raise LookupError("no such table")
        return super().start(row)


class Fields(SingleTurnEnv):
    """Adds the place of each token as a field."""

    async def add_fields(self, sequences):
        for sequence in sequences:
            sequence["place"] = list(range(len(sequence["tokens"])))


class Agents(SingleTurnEnv):
    """A writer is asked twice, between which a critic is asked twice, who is not trained."""

    async def rollout(self, state, generate):
        for agent, is_trained in (("writer", True), ("critic", False)) * 2:
            messages = state.setdefault(agent, [{"role": "user", "content": agent}])
            messages.append(await generate(messages, agent=agent, trainable=is_trained))
            messages.append({"role": "user", "content": "more"})
        state["completion"] = state["writer"][1:-1]
        state["agent_rewards"] = {"writer": random.random()}


class Blocks(MultiTurnEnv):
    """From batch 2 on its method blocks the event loop for ever, while a thread prints without end."""

    async def env_response(self, messages, state):
        if state["step"] == 2:
            threading.Thread(target=print_on, daemon=True).start()
            time.sleep(3600)
        return [{"role": "user", "content": "and then?"}]


def print_on():
    while True:
        print("still here", flush=True)
        time.sleep(0.1)


def letters(completion):
    """Equal for two random answers one time in five."""
    return letters_sum(completion) % 5


def letters_sum(completion):
    return sum(map(ord, completion[-1]["content"]))


CALLS = Counter()  # of misbehaves, by row


def misbehaves(completion, state):
    """By the number of its call: raises, returns no number, or is fine."""
    CALLS[state["answer"]] += 1
    calls = CALLS[state["answer"]]
    if calls % 4 == 1:
        raise RuntimeError("user code fails")
    if calls % 4 == 2:
        return [None, float("nan"), "1", float("inf")][calls // 4 % 4]
    return float(calls)


def noise(answer):
    """Two rollouts never get the same."""
    return float(answer) + random.random()


def text_letters(completion):
    return float(sum(map(ord, completion[0])))


def long_answer(completion):
    return float(len(completion[-1]["content"]) > 4)


def zero():
    return 0.0


def constant():
    return 1.0


def raises():
    raise ValueError("never scores")


def none_if_wrong(completion):
    """Forgets to return 0.0: an answer in four gets a reward, the others none."""
    if letters_sum(completion) % 4 == 0:
        return 1.0


def sleeps():
    time.sleep(random.choice([0, 2]))
    return random.random()


def first_batch_is_slow(state):
    time.sleep(1 if state["step"] == 0 else 0)
    return random.random()


def stuck(answer):
    time.sleep(3600 if random.random() < 0.2 else 0)
    return random.random()


def double(a: int) -> int:
    """Twice a.

    Args:
        a: a number
    """
    return 2 * a


def load_environment(kind="turns", num_turns=4, prompt="hello", num_rows=37):
    CALLS.clear()
    rows = [{"question": f"{prompt} {i}", "answer": str(i)} for i in range(num_rows)]
    match kind:
        case "turns":
            return Turns(rows, eval_dataset=rows[:3], max_turns=num_turns, rubric=Rubric([letters]))
        case "own prompt":
            return OwnPrompt(rows, max_turns=1, rubric=Rubric([letters]))
        case "blocks":
            return Blocks(rows, eval_dataset=rows[:1], max_turns=2, rubric=Rubric([noise]))
        case "tools":
            return ToolEnv(rows, [double], rubric=Rubric([noise]))
        case "text":
            texts = [{"prompt": row["question"]} for row in rows]
            return SingleTurnEnv(texts, texts[:3], rubric=Rubric([text_letters]))
        case "letter":
            return SingleTurnEnv(rows, rows[:8], rubric=Rubric([long_answer]))
        case "constant":
            return SingleTurnEnv(rows, rubric=Rubric([constant]))
    for kind_of_env in (BadRow, Fields, Agents):
        if kind_of_env.__name__ == kind:
            return kind_of_env(rows, rubric=Rubric([noise]))
    functions = (zero, misbehaves, raises, sleeps, first_batch_is_slow, stuck, none_if_wrong, noise)
    return SingleTurnEnv(rows, rows[:3], rubric=Rubric([next(f for f in functions if f.__name__ == kind)]))
