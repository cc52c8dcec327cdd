"""Losses beyond those of trainer.py: trainer.loss = "losses:gspo", "losses:dppo", "losses:icepop" or "losses:sapo"; and
an advantage for control runs.

Copy one to write your own. A loss gets `micro`, a micro-batch of named fields with one value per loss token (adv_N,
old_logp_N, mask_N, which is False if the policy did not say it, row_N, the row of ids_BW with its sequence, ...) and
numbers of the whole step (num_mask, num_sequences, max_tokens); logp_N and entropy_N of the policy; and
trainer.loss_args as keyword arguments. It returns the loss per token and metrics per token. compute_loss divides the
sum of loss_N by micro["num_mask"]: a loss with another divisor scales itself.

Below r = exp(logp - old_logp) is the ratio, A the advantage, sg(x) is x without its gradient."""

import zlib

import torch

from trainer import log_ratio


def over_sequences(micro, x_N):
    """At each token: the sum of x_N over its sequence, and the sequence's number of loss tokens (1 or more)."""
    zero_B = x_N.new_zeros(len(micro["ids_BW"]))
    row_N = micro["row_N"]
    total_B = zero_B.index_add(0, row_N, torch.where(micro["mask_N"], x_N, 0))
    count_B = zero_B.index_add(0, row_N, micro["mask_N"].to(x_N))
    return total_B[row_N], count_B[row_N].clamp(min=1)


def gspo(micro, logp_N, entropy_N, epsilon=3e-4, epsilon_high=4e-4):
    """-min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A), a mean over sequences, with one ratio for a whole sequence:
    s = exp(mean of log r over it) (GSPO, 2507.18071)."""
    sum_N, len_N = over_sequences(micro, log_ratio(micro, logp_N))
    s_N = (sum_N / len_N).exp()
    clipped_N = s_N.clamp(1 - epsilon, 1 + epsilon_high) * micro["adv_N"]
    is_clipped_N = clipped_N < s_N * micro["adv_N"]
    loss_N = -torch.minimum(s_N * micro["adv_N"], clipped_N) / len_N  # each token has its share of its sequence's
    return loss_N * (micro["num_mask"] / micro["num_sequences"]), {"policy/clip_frac": is_clipped_N}


def dppo(micro, logp_N, entropy_N, dppo_mask=0.2, dppo_kl=1e-3):
    """-M r A + dppo_kl (log r)^2, with M = 0 for a token whose probability has moved along A by more than dppo_mask
    (DPPO with binary total variation, 2602.04879; the quadratic term as in prime-rl)."""
    adv_N = micro["adv_N"]
    log_r_N = log_ratio(micro, logp_N)
    moved_N = (logp_N.exp() - micro["old_logp_N"].exp()).detach()
    is_masked_N = (adv_N * moved_N > 0) & (moved_N.abs() > dppo_mask)
    policy_N = torch.where(is_masked_N, 0, log_r_N.exp() * adv_N)
    return dppo_kl * log_r_N**2 - policy_N, {"policy/clip_frac": is_masked_N}


def icepop(micro, logp_N, entropy_N, icepop_low=0.5, ratio_cap=5.0):
    """-sg(r) A logp for icepop_low <= r <= ratio_cap, otherwise 0: tokens on which trainer and sampler disagree are
    left out (IcePop, 2510.18855)."""
    r_N = log_ratio(micro, logp_N).exp().detach()
    is_masked_N = (r_N < icepop_low) | (r_N > ratio_cap)
    loss_N = -torch.where(is_masked_N, 0, r_N * micro["adv_N"] * logp_N)
    return loss_N, {"policy/clip_frac": is_masked_N}


def sapo(micro, logp_N, entropy_N, tau_pos=1.0, tau_neg=1.05):
    """-4 / tau sigmoid(tau (r - 1)) A: a soft clip in place of a hard one, tighter where A < 0 (2511.20347)."""
    r_N = log_ratio(micro, logp_N).exp()
    tau_N = torch.where(micro["adv_N"] > 0, tau_pos, tau_neg)
    gate_N = torch.sigmoid(tau_N * (r_N - 1)) * 4 / tau_N
    return -gate_N * micro["adv_N"], {"policy/gate": gate_N}


def permuted(rewards_G, group):
    """trainer.advantage = "losses:permuted", for a control run: the rewards of a group are shuffled among its
    rollouts, in the same way on all ranks, so that nothing can be learned from them."""
    seed = zlib.crc32(repr([(member.get("env"), member.get("group")) for member in group]).encode())
    shuffled = torch.randperm(len(rewards_G), generator=torch.Generator().manual_seed(seed))
    return (rewards_G - rewards_G.mean())[shuffled]
