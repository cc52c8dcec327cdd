"""tools/certify.py: published mistakes are named, and no right function is accused."""

import numpy as np
import pytest
import torch

import trainer
from rolemodel import losses
from tools import certify

RIGHT = ["cispo", "grpo", "mean", "std", "turns:by_turn"]
RIGHT += [f"losses:{name}" for name in "dr_grpo gspo dppo icepop sapo truncated sequence_masked distill".split()]
RIGHT += [f"losses:{name}" for name in "reinforce ipo m2po centered".split()]
RIGHT += [f"advantages:{name}" for name in "zero permuted leave_one_out maxrl gdpo brief".split()]
RIGHT += [f"test_certify:{name}" for name in "token_mask with_kl of_torch".split()]


def token_mask(micro, logp_N, entropy_N):  # TRL's
    r_N = trainer.log_ratio(micro, logp_N).exp().detach()
    return -(r_N * (r_N <= 2)) * micro["adv_N"] * logp_N, {}


def with_kl(micro, logp_N, entropy_N, sign=1):
    loss_N, logs = trainer.cispo(micro, logp_N, entropy_N)
    return loss_N + sign * (0.1 * trainer.k3(micro["ref_logp_N"] - logp_N) - 0.01 * entropy_N), logs


def of_torch(rewards_G, group):
    return torch.tensor(rewards_G - rewards_G.mean())


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


def upside_down(micro, logp_N, entropy_N):
    weight_N = (micro["old_logp_N"] - logp_N).detach().clamp(-20, 20).exp().clamp(max=2)
    return -weight_N * micro["adv_N"] * logp_N, {}


def counts_imitated(micro, logp_N, entropy_N):  # in gspo's mean
    sum_N, len_N = losses.over_sequences(micro, trainer.log_ratio(micro, logp_N))
    num_N = torch.bincount(micro["sequence_N"])[micro["sequence_N"]]
    s_N = (sum_N / num_N).exp()
    policy_N = (s_N * micro["adv_N"]).minimum(s_N.clamp(0.9997, 1.0004) * micro["adv_N"])
    return -policy_N * micro["share_N"] / len_N * micro["num_tokens"] / micro["num_sequences"], {}


def away(micro, logp_N, entropy_N):
    return with_kl(micro, logp_N, entropy_N, -1)


def masked(micro, logp_N, entropy_N):
    is_used_N = (micro["turn_N"] == 0) & (micro["temperature_N"] == 1) & (micro["truncated_N"] == 0)
    return -micro["adv_N"] * logp_N * is_used_N * (1 + micro["staleness_N"]), {}


def without_epsilon(rewards_G, group):
    return (rewards_G - rewards_G.mean()) / rewards_G.std()


def for_later_turns(rewards_G, group):
    earned_GK = [np.cumsum(r.state.get("turn_rewards", [r.reward, 0, 0])) for r in group]
    return earned_GK - np.mean(earned_GK, 0)


PLANTED = [
    ("divided_twice", "FAIL where logp = old_logp it is REINFORCE"),
    ("mean_of_means", "FAIL does not depend on micro-batches"),
    ("mean_of_sequences", "FAIL a rollout that forked"),
    ("without_advantage", "FAIL no gradient where A = 0"),
    ("normalized_twice", "FAIL does not depend on the numbers of turns"),
    ("once_per_fork", "FAIL does not depend on how often a rollout forked"),
    ("wrong_clip", "FAIL A > 0: clipped, if at all, where"),
    ("upside_down", "FAIL the weight at a ratio of 0.5"),
    ("counts_imitated", "FAIL imitated tokens"),
    ("away", "FAIL gradient where A = 0 and logp is not old_logp: away from old_logp"),
    ("away", " gradient through the entropy, where A = 0: lowers it"),
    ("with_kl", " gradient where A = 0 and logp is not old_logp: toward old_logp, at a log-ratio of 1 by 0.63 of"),
    ("masked", " the weight depends on turn: 0 on average where it is 3"),
    ("masked", " the weight depends on temperature: 0 on average where it is 0.5"),
    ("masked", " the weight depends on truncated: 0 on average where it is 1"),
    ("masked", " the weight depends on staleness: 21 on average where it is 20"),
    ("without_epsilon", "FAIL finite: not for [0.0, 0.0"),
    ("for_later_turns", "FAIL what the second turn earns is"),
]


@pytest.mark.parametrize("name, line", PLANTED)
def test_published_mistakes_are_named(name, line):
    report = [f"{verdict} {what}: {details}" for verdict, what, details in certify.certify(f"test_certify:{name}", {})]
    assert any(found.startswith(line) for found in report), report


@pytest.mark.parametrize("name", RIGHT)
def test_no_right_function_is_accused(name):
    report = certify.certify(name, {})
    assert [line for line in report if line[0] == "FAIL"] == [] and len(report) > 2
