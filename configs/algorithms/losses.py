"""Losses beyond those of trainer.py: trainer.loss = "losses:gspo", "losses:dppo" or "losses:icepop"; and importance
weights for any loss: trainer.importance = "losses:sequence_mask", "losses:off_policy_mask", ... (below).

Copy one to write your own. A loss gets `micro`, a micro-batch of named columns with one value per loss token (adv_N,
old_logp_N, mask_N, which is False on filler, sample_N, the row of ids_BW that the token's sample is in, ...) and counts
of the whole step (tokens, samples, rollouts, max_tokens); logp_N and entropy_N of the policy; cfg, the [trainer]
table. It returns the loss per token and metrics per token. The step divides the sum of loss_N by micro["tokens"]: a
loss with another divisor scales itself.

Below r = exp(logp - old_logp) is the ratio, A the advantage, sg(x) is x without its gradient."""

import zlib

import torch

MAX_LOG_RATIO = 20.0  # exp of more would be inf, and inf times an advantage of 0 is nan


def log_ratio(micro, logp_N):
    return (logp_N - micro["old_logp_N"]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def over_samples(micro, x_N):
    """-> at each token, the sum of x_N over its sample, and the sample's number of loss tokens (1 or more)."""
    zero_B, sample_N, mask_N = x_N.new_zeros(len(micro["ids_BW"])), micro["sample_N"], micro["mask_N"]
    total_B = zero_B.index_add(0, sample_N, torch.where(mask_N, x_N, 0))
    return total_B[sample_N], zero_B.index_add(0, sample_N, mask_N.to(x_N))[sample_N].clamp(min=1)


def gspo(micro, logp_N, entropy_N, cfg):
    """-min(s A, clip(s, 1 - epsilon, 1 + epsilon_high) A), a mean over samples, where s = exp(mean of log r over the
    sample): one ratio for a whole sample (GSPO, 2507.18071, whose 3e-4 and 4e-4 are the edges here by default)."""
    sum_N, len_N = over_samples(micro, log_ratio(micro, logp_N))
    s_N = (sum_N / len_N).exp()
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


def permuted(rewards_G, group):
    """trainer.advantage = "losses:permuted", for a control run: a group's rewards go to any of its rollouts, the same
    on all ranks, so what is learned is not by them."""
    seed = zlib.crc32(repr([(member.get("env"), member.get("group")) for member in group]).encode())
    return (rewards_G - rewards_G.mean())[torch.randperm(len(rewards_G), generator=torch.Generator().manual_seed(seed))]


# --- importance weights: trainer.importance ---------------------------------------------------------------------------
#
# pi / mu, of the policy and of the sampler, is pi / pi_old times pi_old / mu, where pi_old is the policy before the
# batch's first update. With trainer.importance the loss gets pi / pi_old as its ratio, and each token of it is weighed
# by pi_old / mu, truncated or masked as below: how far trainer and sampler differ, and how stale the rollouts are, then
# no longer uses up the clip range (decoupled PPO, 2505.24298; so does TRL). The last two only keep or drop, and weigh
# nothing by pi_old / mu. Without trainer.importance the ratio is pi / mu.


def importance(weigh):
    """A function (micro, logp_N, cfg) -> weight_N, as what trainer.importance names: a loss in, the weighed loss out.
    micro["old_logp_N"] is the sampler's, micro["prox_logp_N"] pi_old's."""

    def wrap(loss):
        def weighed(micro, logp_N, entropy_N, cfg):
            prox_logp_N = micro.setdefault("prox_logp_N", logp_N.detach())  # before the first update
            weight_N = weigh(micro, logp_N.detach(), cfg)
            loss_N, logs = loss(micro | {"old_logp_N": prox_logp_N}, logp_N, entropy_N, cfg)
            return loss_N * weight_N, logs | {"policy/importance": weight_N}

        return weighed

    return wrap


def between(weight_N, low, high):
    """The weight, and 0 outside of low and high."""
    return torch.where((weight_N >= low) & (weight_N <= high), weight_N, 0)


@importance
def token_truncate(micro, logp_N, cfg):
    """min(pi_old / mu, importance_high), 2 by default (TIS, fengyao.notion.site/off-policy-rl)."""
    return log_ratio(micro, micro["prox_logp_N"]).exp().clamp(cfg.importance_low, cfg.importance_high or 2)


@importance
def token_mask(micro, logp_N, cfg):
    """pi_old / mu from importance_low (0) to importance_high (3), else 0 (TRL's token_mask)."""
    return between(log_ratio(micro, micro["prox_logp_N"]).exp(), cfg.importance_low, cfg.importance_high or 3)


@importance
def sequence_truncate(micro, logp_N, cfg):
    """min(product of pi_old / mu over the sample, importance_high), 3 by default (TRL's sequence_truncate)."""
    sum_N, _ = over_samples(micro, log_ratio(micro, micro["prox_logp_N"]))
    return sum_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(cfg.importance_low, cfg.importance_high or 3)


@importance
def sequence_mask(micro, logp_N, cfg):
    """The product of pi_old / mu over the sample where it is from importance_low (0) to importance_high (3), else 0
    (TRL's default, sequence_mask). A product: the longer a sample, the further it is from 1; see geometric_mask."""
    sum_N, _ = over_samples(micro, log_ratio(micro, micro["prox_logp_N"]))
    weight_N = sum_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return between(weight_N, cfg.importance_low, cfg.importance_high or 3)


@importance
def geometric_mask(micro, logp_N, cfg):
    """1 where the geometric mean of pi_old / mu over the sample is from importance_low (0.99) to importance_high
    (1.01), else 0: whatever its length, a sample is kept or dropped as a whole (SkyRL, verl)."""
    sum_N, len_N = over_samples(micro, log_ratio(micro, micro["prox_logp_N"]))
    mean_N = (sum_N / len_N).exp()
    return ((mean_N >= (cfg.importance_low or 0.99)) & (mean_N <= (cfg.importance_high or 1.01))).to(logp_N)


@importance
def off_policy_mask(micro, logp_N, cfg):
    """0 where A < 0 and the mean of log(mu / pi) over the sample is above importance_high (0.5), else 1: a bad sample
    that the policy would hardly draw any more is left alone (DeepSeek-V3.2, 2512.02556; the default is TRL's)."""
    sum_N, len_N = over_samples(micro, -log_ratio(micro, logp_N))
    return ((micro["adv_N"] >= 0) | (sum_N / len_N <= (cfg.importance_high or 0.5))).to(logp_N)


LOSSES = {"gspo": gspo, "dppo": dppo, "icepop": icepop}
