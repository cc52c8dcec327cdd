"""Advantages beyond those of trainer.py: trainer.advantage = "advantages:maxrl" and so on. Each maps the rewards of a
group (float64, one for each rollout) to as many numbers; `group` is the rollouts' metadata, with metrics (what each
reward function gave), num_tokens and num_turns. Copy one to write your own."""

import torch

from configs.runtime.role import CONFIG, require
from trainer import std


def zero(rewards_G, group):
    """Rewards that only measure: what is learned comes from other weights, e.g. a teacher's."""
    return torch.zeros_like(rewards_G)


def maxrl(rewards_G, group):
    """(r - mean) / mean: the rarer a success, the more it counts (2602.02710). For rewards of 0 and 1."""
    mean = rewards_G.mean()
    return (rewards_G - mean) / mean if mean > 0 else torch.zeros_like(rewards_G)


def gdpo(rewards_G, group):
    """The weighted sum of (r - mean) / std over the reward functions, each normalized by itself, so that one with a
    wide range does not drown another; then normalized over the batch (GDPO, 2601.05242). The weights are those that the
    rubric puts into state["reward_weights"], as env.Rubric does. Raises RunError if there are none. With
    orchestrator.order = "orders:ByParts", which keeps groups of equal sums."""
    weights = group[0].get("reward_weights")
    what = "trainer.advantage = 'advantages:gdpo' needs state['reward_weights'] = {function: weight}, from the rubric"
    require(weights, CONFIG, what)
    total_G = torch.zeros_like(rewards_G)
    for name, weight in weights.items():
        r_G = torch.tensor([rollout["metrics"][name] for rollout in group], dtype=torch.float64)
        total_G += weight * (r_G - r_G.mean()) / (std(r_G) + 1e-4)
    return total_G


gdpo.over_batch = True  # compute_advantages divides by the batch's standard deviation


def brief(rewards_G, group):
    """r - mean, after rewards above 0 have lost up to a quarter, in proportion to their tokens and to the group's
    share of successes: a length penalty only where the task is solved (prime-rl's length_penalty = "linear"). For
    rewards of 0 and 1, with orchestrator.order = "orders:ByParts", which keeps groups that are solved throughout."""
    tokens_G = torch.tensor([rollout["num_tokens"] for rollout in group], dtype=torch.float64)
    is_success_G = rewards_G > 0
    share = is_success_G.double().mean()
    shorter_G = rewards_G - 0.25 * share * is_success_G * tokens_G / tokens_G.max()
    return shorter_G - shorter_G.mean()


def running(rewards_G, group):
    """r - b, where b is a running mean of the agent's rewards in all groups (RAE, 2506.24119), which
    orchestrator.order = "orders:RunningBaseline" keeps: for agents whose groups all end alike."""
    name = f"baseline_{group[0]['agent']}"
    what = "trainer.advantage = 'advantages:running' needs orchestrator.order = 'orders:RunningBaseline'"
    require(name in group[0]["metrics"], CONFIG, what)
    baseline_G = torch.tensor([rollout["metrics"][name] for rollout in group], dtype=torch.float64)
    return rewards_G - baseline_G
