"""Credit by turn: where the rubric gives a reward per turn (rubrics.TurnRubric), or trainer.gamma is below 1. Each turn
then has an advantage of its own, from its discounted return-to-go; with neither, a rollout has one.

The baseline of turn k is over the whole group, where a rollout that ended before k counts 0. So it does not depend on
when the rollout itself stops; a mean over those still going would be a bonus for going on (verl RFC 7244)."""

from argparse import Namespace
from itertools import accumulate

import torch

from configs import require


def returns(sample, gamma):
    """-> what each turn of its rollout earns, and what comes later, by gamma less per turn. What is of no turn, e.g. by
    a function that sees the whole group, is the last one's."""
    turns, num = sample.get("turn_rewards") or [0.0] * sample["num_turns"], sample["num_turns"]
    require(len(turns) == num, 4, f"a rollout has {len(turns)} rewards by turn, but the policy said {num} messages")
    turns = [*turns[:-1], turns[-1] + sample["reward"] - sum(turns)]
    return list(accumulate(reversed(turns), lambda later, now: now + gamma * later))[::-1]


def add_advantages(batch, t, add):
    """-> the batch with a column adv. add: trainer.add_advantages, which is asked turn by turn with the turn's returns.
    A group without rewards by turn, with gamma = 1, keeps one advantage per rollout. "batch_std" is over the rollouts'
    whole rewards: over a late turn's, of which most are 0, the few others would be far too large."""
    keys = [(s.get("env"), s.get("group")) for s in batch.samples]
    by_turn = {key for key, s in zip(keys, batch.samples) if t.gamma < 1 or s.get("turn_rewards")}
    table = [returns(s, t.gamma) if key in by_turn else None for key, s in zip(keys, batch.samples)]
    is_over_batch = t.advantage == "batch_std"
    whole = Namespace(advantage="mean" if is_over_batch else t.advantage, loss=t.loss, gamma=1.0)
    turn_T = batch.columns["turn"]
    adv_T = torch.zeros(len(turn_T))
    for k in range(int(turn_T.max()) + 1):
        samples = [s | {"turn_rewards": None} for s in batch.samples]
        for s, to_go in zip(samples, table):
            if to_go:
                s["reward"] = to_go[k] if k < len(to_go) else 0.0
        adv_T = torch.where(turn_T == k, add(batch._replace(samples=samples), whole).columns["adv"], adv_T)
    if is_over_batch:
        rewards = {(*key, s.get("rollout")): s["reward"] for key, s in zip(keys, batch.samples)}  # of a fork: any
        adv_T = adv_T / (torch.tensor([*rewards.values()], dtype=torch.float64).std(correction=0).item() + 1e-4)
    return batch._replace(columns=batch.columns | {"adv": adv_T})
