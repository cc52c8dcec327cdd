"""Rubrics for more than one number per rollout.

def rare(completions):                               # sees a whole group: all rollouts of one row
    texts = [completion[-1]["content"] for completion in completions]
    return [1 / texts.count(text) for text in texts]

rubric = GroupRubric([correct, rare], [1.0, 0.2])    # rubrics=[JudgeRubric()] adds the functions of other rubrics

def shorter(completion):                             # rewards each turn of a rollout
    return [1 / (1 + len(message["content"])) for message in completion if message["role"] == "assistant"]

rubric = TurnRubric([correct, shorter])              # a single number belongs to the last turn

def solved(result):                                  # rewards each agent
    return {"solver": float(result), "proposer": 1 - float(result)}

rubric = AgentRubric([solved, polite])               # a single number belongs to all agents
"""

import copy
from itertools import islice

from env import Rubric, call, ensure, finite, name_of, parameters, weight_at

PLURALS = {"prompts", "completions", "answers", "infos", "tasks", "states"}


def sees_group(func):
    return not PLURALS.isdisjoint(parameters(func))


class GroupRubric(Rubric):
    """A function that names a plural (completions, states, ...) gets a list of it with an entry for each rollout of the
    group, and the first rollout's value of any other name. It returns a number for each rollout. Other functions work
    as in env.Rubric. Only rollouts that have a reward by then are in the lists; if such a function fails, none of them
    keeps its reward."""

    async def score(self, state):
        alone = copy.copy(self)
        alone.parts = [part for part in self.parts if not sees_group(part[0])]
        result = await super(GroupRubric, alone).score(state)
        weights = state.get("reward_weights", {})  # a TurnRubric sets none
        for func, weight, _ in self.parts:
            weights[name_of(func)] = weight_at(weight, state["step"])
        return result

    async def score_group(self, states):
        """Returns (number to add, {function: value}) for each rollout, or [] if no function sees groups."""
        parts = [part for part in self.parts if sees_group(part[0])]
        if not states or not parts:
            return []
        have = {"states": states, "state": states[0]}
        for plural in PLURALS - {"states"}:
            singular = plural.removesuffix("s")
            have[plural] = [state.get(singular) for state in states]
        rewards = [0.0 for _ in states]
        metrics = [{} for _ in states]
        for func, weight, objects in parts:
            values = await call(func, **states[0] | objects | have)
            is_number = getattr(values, "ndim", 1) == 0 or not hasattr(values, "__iter__")
            values = [values] if is_number else list(islice(values, len(states) + 1))  # it may be endless
            what = f"reward function {name_of(func)} returned {values}, not a number for each of {len(states)} rollouts"
            ensure(len(values) == len(states), what)
            scale = weight_at(weight, states[0]["step"])
            for i, value in enumerate(values):
                metrics[i][name_of(func)] = finite(func, value)
                rewards[i] += scale * metrics[i][name_of(func)]
        return list(zip(rewards, metrics))


class TurnRubric(Rubric):
    """A function that returns a list rewards each turn of the policy; a single number rewards the last turn. Each turn
    then has its own advantage (configs/algorithms/turns.py)."""

    async def score(self, state):
        """Returns the sum and {function: value}, and puts the turns' rewards into state["turn_rewards"]."""
        rewards = [0.0] * state["turn"]
        metrics = {}
        for func, weight, objects in self.parts:
            values = await call(func, **state | objects | {"state": state})
            if not isinstance(values, list):
                values = [0.0] * (len(rewards) - 1) + [values]
            problem = f"{name_of(func)} returned {len(values)} rewards for {len(rewards)} turns"
            ensure(len(values) == len(rewards), problem)
            values = [finite(func, value) for value in values]
            scale = weight_at(weight, state["step"])
            for i, value in enumerate(values):
                rewards[i] += scale * value
            metrics[name_of(func)] = sum(values)
        state["turn_rewards"] = rewards
        return sum(rewards), metrics


class AgentRubric(Rubric):
    """A function that returns {agent: number} rewards each agent by itself; a single number rewards all of them. The
    rollout's own reward, which is logged and which agents in no such dict have, is the mean of the agents'."""

    async def score(self, state):
        common = 0.0
        by_agent = {}
        metrics = {}
        for func, weight, objects in self.parts:
            value = await call(func, **state | objects | {"state": state})
            scale = weight_at(weight, state["step"])
            if not isinstance(value, dict):
                metrics[name_of(func)] = finite(func, value)
                common += scale * metrics[name_of(func)]
                continue
            for agent, number in value.items():
                metrics[f"{name_of(func)}_{agent}"] = finite(func, number)
                by_agent[agent] = by_agent.get(agent, 0.0) + scale * finite(func, number)
        if by_agent:
            state["agent_rewards"] = {agent: common + own for agent, own in by_agent.items()}
            common += sum(by_agent.values()) / len(by_agent)
        return common, metrics
