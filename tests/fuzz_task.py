"""A random task, by FUZZ_SEED, whose functions misbehave now and then: they raise, return what they should not, print,
sleep, and change what belongs to others. Whatever they do, `control` and `rows_seen` must not notice."""

import asyncio
import io
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import torch

from configs.environments.rubrics import GroupRubric
from env import MultiTurnEnv, Rubric
from orchestrator import Order

SEED = int(os.environ.get("FUZZ_SEED", 0))
ROWS = [{"question": f"row {i}", "answer": str(i), "info": {"i": i, "list": [i]}} for i in range(37)]


class Odd(BaseException):
    """No Exception at all."""


def endless():
    while True:
        yield 1.0


ERRORS = [ValueError("bad"), KeyError(("a", 1)), StopIteration(), SystemExit(3), Odd(), GeneratorExit()]
ERRORS += [MemoryError(), RecursionError(), asyncio.CancelledError(), AttributeError(), OSError(28, "No space left")]
VALUES = [None, "1", float("nan"), float("-inf"), 1e30, [1.0], {}, np.float32(0.5), np.array([1.0, 2.0]), 1j, b"x"]
VALUES += [np.bool_(True), torch.tensor(0.5), torch.ones(3), endless(), object(), Order, (0.5, {}), {"role": "user"}]


def take_a_signal(state):
    try:
        signal.signal(signal.SIGALRM, print)
    except ValueError:
        pass


def spoil(state):
    for key in ("info", "task", "answer", "prompt", "completion"):
        value = state.get(key) if isinstance(state, dict) else None
        if isinstance(value, dict):
            value.clear()
        elif isinstance(value, list) and key == "prompt":
            value.append({"role": "user", "content": "spoiled"})


DEEDS = {
    "raise": None, "value": None,
    "sleep": lambda state: time.sleep(0.2),
    "print": lambda state: print("x" * 3000, end=""),
    "stdout": lambda state: setattr(sys, "stdout", io.StringIO()),
    "close": lambda state: sys.stdout.close(),
    "chdir": lambda state: os.chdir("/"),
    "process": lambda state: subprocess.Popen(["sleep", f"777.{os.environ['FUZZ_SEED']}"], start_new_session=True),
    "signal": take_a_signal,
    "spoil": spoil,
}  # fmt: skip


class Fault:
    """What a function does wrong, and how often."""

    def __init__(self, name):
        rng = random.Random(f"{SEED}:{name}")
        self.kind = rng.choice(list(DEEDS)) if rng.random() < 0.4 else ""
        self.share = rng.choice([0.05, 0.3, 1.0])
        self.error = rng.choice(ERRORS)
        self.value = rng.choice(VALUES)

    def __call__(self, value, state=None):
        if not self.kind or random.random() > self.share:
            return value
        if self.kind == "raise":
            raise self.error
        if self.kind == "value":
            return self.value
        DEEDS[self.kind](state)
        return value


NAMES = (
    "reward slow_reward group_reward start env_response is_completed setup_state add_fields score keep loss advantage"
)
FAULTS = {name: Fault(name) for name in NAMES.split()}


def control(prompt, answer):
    """What must be seen by whoever is left: this rollout's own row."""
    return float(answer)


def reward(state):
    return FAULTS["reward"](random.random(), state)


async def slow_reward(state):
    await asyncio.sleep(0.01)
    return FAULTS["slow_reward"](random.random(), state)


def group_reward(states):
    return FAULTS["group_reward"]([random.random() for _ in states], states[0])


class Scoring(GroupRubric):
    async def score(self, state):
        return FAULTS["score"](await super().score(state), state)


class Fuzz(MultiTurnEnv):
    def start(self, row):
        return FAULTS["start"](super().start(row), row)

    def setup_state(self, state):
        return FAULTS["setup_state"](None, state)

    def is_completed(self, messages, state):
        return FAULTS["is_completed"](False, state)

    def env_response(self, messages, state):
        return FAULTS["env_response"]([{"role": "user", "content": "more"}], state)

    def add_fields(self, state, sequences):
        for s in sequences:
            s["mine"] = FAULTS["add_fields"]([0.5] * len(s["tokens"]), state)


class Keeps(Order):
    def keep(self, rollouts):
        return FAULTS["keep"](super().keep(rollouts))


def loss(micro, logp_N, entropy_N):
    return FAULTS["loss"](-micro["adv_N"] * logp_N), {"policy/mine": micro["mine_N"]}


def advantage(rewards_G, group):
    return FAULTS["advantage"](rewards_G - rewards_G.mean())


def load_environment():
    rubric = Scoring([reward, slow_reward, group_reward], [1.0, 1.0, 0.5], rubrics=[Rubric([control], [0.0])])
    return Fuzz(ROWS, eval_dataset=ROWS[:3], max_turns=2, rubric=rubric)
