"""Rubrics for more than a number per rollout.

def rare(completions):                               # of a whole group, the rollouts of one row
    texts = [completion[-1]["content"] for completion in completions]
    return [1 / texts.count(text) for text in texts]

rubric = GroupRubric([correct, rare], [1.0, 0.2])    # rubrics=[JudgeRubric()]: and the functions of others

def shorter(completion):                             # of each turn of a rollout
    return [1 / len(message["content"]) for message in completion if message["role"] == "assistant"]

rubric = TurnRubric([correct, shorter])              # a number is the last turn's
"""

import copy

from env import Rubric, call, ensure, finite, parameters

PLURALS = {"prompts", "completions", "answers", "infos", "tasks", "states"}


def sees_group(func):
    return not PLURALS.isdisjoint(parameters(func))


class GroupRubric(Rubric):
    """A function that names a plural (completions, states, ...) gets a list of it, of the other names what the first
    rollout has, and returns a number for each rollout. The others are as in env.Rubric. Only rollouts that have a
    reward by then are seen; where such a function fails, none of them has one."""

    async def score(self, state):
        alone = copy.copy(self)
        alone.parts = [part for part in self.parts if not sees_group(part[0])]
        return await super(GroupRubric, alone).score(state)

    async def score_group(self, states):
        parts = [part for part in self.parts if states and sees_group(part[0])]
        scores = [(0.0, {}) for _ in states if parts]
        have = {plural: [state.get(plural[:-1]) for state in states] for plural in PLURALS} | {"states": states}
        have |= {"state": states[0]} if states else {}
        for func, weight, objects in parts:
            value = await call(func, **states[0] | objects | have)
            values = list(value) if hasattr(value, "__iter__") else [value]
            what = f"reward function {func.__name__} returned {value}, no number for each of {len(states)}"
            ensure(len(values) == len(states), what)
            w = float(weight(states[0]["step"]) if callable(weight) else weight)
            named = [{func.__name__: finite(func, value)} for value in values]
            scores = [(a + w * new[func.__name__], old | new) for (a, old), new in zip(scores, named)]
        return scores


class TurnRubric(Rubric):
    """A function that returns a list rewards each turn of the policy; what is a number is the last turn's. Each turn
    then has an advantage of its own (configs/algorithms/turns.py)."""

    async def score(self, state):
        """-> the sum, {function: value}; the turns' rewards are state["turn_rewards"]."""
        turns, metrics = [0.0] * state["turn"], {}
        for func, weight, objects in self.parts:
            value = await call(func, **state | objects | {"state": state})
            values = value if isinstance(value, list) else [0.0] * (len(turns) - 1) + [value]
            ensure(len(values) == len(turns), f"{func.__name__} has {len(values)} rewards for {len(turns)} turns")
            values = [finite(func, value) for value in values]
            w = float(weight(state["step"]) if callable(weight) else weight)
            turns = [a + w * b for a, b in zip(turns, values)]
            metrics[func.__name__] = sum(values)
        state["turn_rewards"] = turns
        return sum(turns), metrics
