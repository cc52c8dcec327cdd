"""tools/certify.py: published mistakes are named, and no shipped function is accused."""

import numpy as np
import pytest

import trainer
from configs.algorithms import losses
from tools import certify

LOSSES = ["cispo", "grpo", *(f"losses:{x}" for x in "dr_grpo gspo dppo icepop sapo truncated sequence_masked".split())]
ADVANTAGES = ["mean", "std", "turns:by_turn"]
ADVANTAGES += [f"advantages:{name}" for name in "zero permuted leave_one_out maxrl gdpo brief".split()]


def divided_twice(micro, logp_N, entropy_N):  # by the accumulation steps too (ms-swift #10117)
    loss_N, logs = losses.grpo(micro, logp_N, entropy_N)
    return loss_N / 2, logs


def mean_of_means(micro, logp_N, entropy_N):  # of the micro-batches (ms-swift #10165)
    loss_N, logs = losses.grpo(micro, logp_N, entropy_N)
    return loss_N * micro["num_tokens"] / max(1, len(logp_N)), logs


def mean_of_sequences(micro, logp_N, entropy_N):  # where one over tokens was meant (open-instruct #1137)
    loss_N, logs = losses.grpo(micro, logp_N, entropy_N)
    _, len_N = losses.over_sequences(micro, loss_N)
    return loss_N / len_N * micro["num_tokens"] / micro["num_sequences"], logs


def without_advantage(micro, logp_N, entropy_N):  # unsloth-zoo #869
    return losses.sapo(micro, logp_N, entropy_N)[1]["policy/gate"], {}


def normalized_twice(rewards_G, group):  # the second time by turns (gem #113)
    adv_G = (rewards_G - rewards_G.mean()) / (rewards_G.std() + 1e-9)
    turns_G = [r.num_turns for r in group]
    mean = np.average(adv_G, weights=turns_G)
    return (adv_G - mean) / (np.sqrt(np.average(adv_G**2, weights=turns_G) - mean**2) + 1e-9)


def once_per_fork(rewards_G, group):  # miles #2378
    return rewards_G - np.repeat(rewards_G, [len(r.sequences) for r in group]).mean()


def wrong_clip(micro, logp_N, entropy_N):
    r_N = trainer.log_ratio(micro, logp_N).exp()
    return -(r_N * micro["adv_N"]).maximum(r_N.clamp(0.8, 1.2) * micro["adv_N"]), {}


PLANTED = {
    "divided_twice": "where logp = old_logp it is REINFORCE",
    "mean_of_means": "does not depend on micro-batches",
    "mean_of_sequences": "a rollout that forked",
    "without_advantage": "no gradient where A = 0",
    "normalized_twice": "does not depend on the numbers of turns",
    "once_per_fork": "does not depend on how often a rollout forked",
    "wrong_clip": "A > 0: clipped, if at all, where",
}


@pytest.mark.parametrize("name", PLANTED)
def test_published_mistakes_are_named(name):
    failed = [what for verdict, what, _ in certify.certify(f"test_certify:{name}", {}) if verdict == "FAIL"]
    assert any(what.startswith(PLANTED[name]) for what in failed), failed


@pytest.mark.parametrize("name", [*LOSSES, *ADVANTAGES])
def test_no_shipped_function_is_accused(name):
    report = certify.certify(name, {})
    assert [line for line in report if line[0] == "FAIL"] == [] and len(report) > 2
