"""Reward functions that see a whole group, the rollouts of one row: what is best among them, or said by no other.

    def rare(completions):
        texts = [completion[-1]["content"] for completion in completions]
        return [1 / texts.count(text) for text in texts]

    rubric = GroupRubric([correct, rare], [1.0, 0.2])    # rubrics=[JudgeRubric()]: and the functions of others

Only rollouts that have a reward by then are seen. Where such a function fails, none of them has one."""

from env import Rubric, call, finite, parameters

PLURALS = {"prompts", "completions", "answers", "infos", "tasks", "states"}


def sees_group(func):
    return not PLURALS.isdisjoint(parameters(func))


class GroupRubric(Rubric):
    """A function that names a plural (completions, states, ...) gets a list of it, of the other names what the first
    rollout has, and returns a number for each rollout. The others are as in env.Rubric."""

    async def score(self, state):
        alone = Rubric()
        alone.parts = [part for part in self.parts if not sees_group(part[0])]
        return await alone.score(state)

    async def score_group(self, states):
        parts = [part for part in self.parts if states and sees_group(part[0])]
        scores = [(0.0, {}) for _ in states if parts]
        have = {plural: [state.get(plural[:-1]) for state in states] for plural in PLURALS} | {"states": states}
        for func, weight, objects in parts:
            value = await call(func, **states[0] | objects | have)
            values = finite(func, list(value) if hasattr(value, "__iter__") else value)
            if not isinstance(values, list) or len(values) != len(states):
                raise ValueError(
                    f"reward function {func.__name__} returned {value}, no number for each of {len(states)}"
                )
            w = float(weight(states[0]["step"]) if callable(weight) else weight)
            named = [{func.__name__: value} for value in values]
            scores = [(a + w * value, old | new) for (a, old), value, new in zip(scores, values, named)]
        return scores
