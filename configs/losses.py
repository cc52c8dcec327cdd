"""Losses beyond those of trainer.py: trainer.loss = "losses:gspo", "losses:dppo" or "losses:icepop".

Copy one to write your own. A loss gets `micro`, a micro-batch of named columns with one value per loss token (adv_N,
old_logp_N, mask_N, which is False on filler, sample_N, the row of ids_BW that the token's sample is in, ...) and counts
of the whole step (tokens, samples, rollouts, max_tokens); logp_N and entropy_N of the policy; cfg, the [trainer]
table. It returns the loss per token and metrics per token. The step divides the sum of loss_N by micro["tokens"]: a
loss with another divisor scales itself.

Below r = exp(logp - old_logp) is the ratio, A the advantage, sg(x) is x without its gradient."""

import torch

MAX_LOG_RATIO = 20.0  # exp of more would be inf, and inf times an advantage of 0 is nan


def log_ratio(micro, logp_N):
    return (logp_N - micro["old_logp_N"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def gspo(micro, logp_N, entropy_N, cfg):
    """-min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A), a mean over samples, where s = exp(mean of log r over the
    sample): one ratio for a whole sample (GSPO, 2507.18071, whose 3e-4 and 4e-4 are the edges here by default)."""
    mask_N = micro["mask_N"]
    sample_N = micro["sample_N"]
    log_r_N = torch.where(mask_N, log_ratio(micro, logp_N), 0)
    zero_B = logp_N.new_zeros(len(micro["ids_BW"]))
    len_N = zero_B.index_add(0, sample_N, mask_N.to(logp_N))[sample_N].clamp(min=1)
    s_N = (zero_B.index_add(0, sample_N, log_r_N)[sample_N] / len_N).exp()
    low, high = 1 - (cfg.epsilon or 3e-4), 1 + (cfg.epsilon_high or 4e-4)
    clipped_N = s_N.clamp(low, high) * micro["adv_N"]
    out_N = clipped_N < s_N * micro["adv_N"]
    loss_N = -torch.minimum(s_N * micro["adv_N"], clipped_N) / len_N  # each token has its share of its sample's
    loss_N = loss_N * (micro["tokens"] / max(micro["samples"], 1))
    return loss_N, {"policy/clip_frac": out_N}


def dppo(micro, logp_N, entropy_N, cfg):
    """-M r A + dppo_kl (log r)^2, where M = 0 for a token whose probability has moved along A by more than dppo_mask
    (DPPO with binary total variation, 2602.04879; the quadratic term as in prime-rl)."""
    adv_N = micro["adv_N"]
    log_r_N = log_ratio(micro, logp_N)
    moved_N = (logp_N.exp() - micro["old_logp_N"].exp()).detach()
    out_N = (adv_N * moved_N > 0) & (moved_N.abs() > cfg.dppo_mask)
    policy_N = torch.where(out_N, 0, log_r_N.exp() * adv_N)
    return cfg.dppo_kl * log_r_N**2 - policy_N, {"policy/clip_frac": out_N}


def icepop(micro, logp_N, entropy_N, cfg):
    """-sg(r) A logp for icepop_low <= r <= ratio_cap, else 0: tokens on which trainer and sampler disagree are left out
    (IcePop, 2510.18855)."""
    r_N = log_ratio(micro, logp_N).exp().detach()
    out_N = (r_N < cfg.icepop_low) | (r_N > cfg.ratio_cap)
    loss_N = -torch.where(out_N, 0, r_N * micro["adv_N"] * logp_N)
    return loss_N, {"policy/clip_frac": out_N}


LOSSES = {"gspo": gspo, "dppo": dppo, "icepop": icepop}
