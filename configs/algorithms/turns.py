"""Credit by turn, if the rubric gives a reward per turn (rubrics.TurnRubric) or trainer.gamma is below 1. Each turn
then has an advantage of its own, from its discounted return-to-go; with neither, a rollout has one.

The baseline of turn k is over the whole group, in which a rollout that ended before k counts 0. So it does not depend
on when the rollout itself stops; a mean over those still going would be a bonus for going on (verl RFC 7244)."""

import torch

from configs import find
from configs.runtime.role import CONFIG, DATA, require


def returns(rollout, gamma):
    """What each turn of a rollout earns, and what comes later, which counts less by gamma per turn. What belongs to no
    turn, e.g. a reward that sees the whole group, is the last one's."""
    num = rollout["num_turns"]
    rewards = list(rollout.get("turn_rewards") or [0.0] * num)
    require(
        len(rewards) == num, DATA, f"a rollout has {len(rewards)} rewards by turn, but the policy said {num} messages"
    )
    rewards[-1] += rollout["reward"] - sum(rewards)
    to_go = 0.0
    found = []
    for reward in reversed(rewards):
        to_go = reward + gamma * to_go
        found.insert(0, to_go)
    return found


def compute_advantages(rollouts, t, compute):
    """[[metadata of a rollout, ...], ...] -> [[its advantages, a list by turn or one number, ...], ...]. compute: the
    trainer's compute_advantages, which is asked turn by turn, with each rollout's return as its reward.

    A group without rewards by turn, at gamma = 1, keeps one advantage per rollout. "batch_std" is over the rollouts'
    whole rewards: over a late turn's, of which most are 0, the few others would be far too large."""
    name = t.advantage
    is_over_batch = ":" in name and getattr(find(name), "over_batch", False)
    require(not is_over_batch, CONFIG, f"trainer.advantage = {name!r} knows no turns: no trainer.gamma, no TurnRubric")
    scale = 1.0
    if name == "batch_std":
        name = "mean"
        rewards = [r["reward"] for group in rollouts for r in group]
        scale = torch.tensor(rewards, dtype=torch.float64).std(correction=0).item() + 1e-4
    table = []
    for group in rollouts:
        if t.gamma == 1 and not any(r.get("turn_rewards") for r in group):
            table.append([adv / scale for adv in compute([group], name)[0]])
            continue
        to_go = [returns(r, t.gamma) for r in group]
        advantages = [[] for _ in group]
        for k in range(max(r["num_turns"] for r in group)):
            at_turn = []
            for r, row in zip(group, to_go):
                reward = row[k] if k < len(row) else 0.0  # the rollout has ended before
                at_turn.append(r | {"reward": reward, "turn_rewards": None})
            for found, adv in zip(advantages, compute([at_turn], name)[0]):
                found.append(adv / scale)
        table.append(advantages)
    return table
