"""Credit by turn, if the rubric gives a reward per turn (rubrics.TurnRubric) or trainer.gamma is below 1. Each turn then
has an advantage of its own, from its discounted return-to-go; with neither, a rollout has one.

The baseline of turn k is over the whole group, in which a rollout that ended before k counts 0. So it does not depend on
when the rollout itself stops; a mean over those still going would be a bonus for going on (verl RFC 7244)."""

import torch

from configs.runtime.role import DATA, require


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


def add_advantages(groups, rollouts, t, compute_advantages):
    """Fills in the field adv of every sequence, by turn. groups: {key: {rollout: its sequences}}; rollouts: one list of
    metadata for each group; compute_advantages: the trainer's.

    A group without rewards by turn, at gamma = 1, keeps one advantage per rollout. "batch_std" is over the rollouts' whole
    rewards: over a late turn's, of which most are 0, the few others would be far too large."""
    table = []  # by group and rollout: the return of each turn; a single number for a rollout without turns
    for group in rollouts:
        by_turn = t.gamma < 1 or any(r.get("turn_rewards") for r in group)
        table.append([returns(r, t.gamma) if by_turn else r["reward"] for r in group])
    is_over_batch = t.advantage == "batch_std"
    name = "mean" if is_over_batch else t.advantage
    scale = 1.0
    if is_over_batch:
        rewards = torch.tensor([r["reward"] for group in rollouts for r in group], dtype=torch.float64)
        scale = rewards.std(correction=0).item() + 1e-4
    adv_of = {rollout: [] for group in groups.values() for rollout in group}
    for k in range(max(r["num_turns"] for group in rollouts for r in group)):
        # The group as it is at turn k, with each rollout's return as its reward.
        at_turn = []
        for group, row in zip(rollouts, table):
            at_turn.append([r | {"reward": reward_at(to_go, k), "turn_rewards": None} for r, to_go in zip(group, row)])
        for group, advantages in zip(groups.values(), compute_advantages(at_turn, name)):
            for rollout, adv in zip(group, advantages):
                adv_of[rollout].append(adv / scale)
    for group in groups.values():
        for rollout, forks in group.items():
            for s in forks:
                s["adv"] = torch.tensor(adv_of[rollout])[s["turn"].long()]


def reward_at(to_go, k):
    """The return of turn k: 0 after the rollout's end, and the whole reward of one without turns."""
    if not isinstance(to_go, list):
        return to_go
    return to_go[k] if k < len(to_go) else 0.0
