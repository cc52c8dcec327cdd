"""Importance weights for any loss: trainer.importance = "importance:sequence_mask", ...

pi / mu, the ratio of policy and sampler, is pi / prox times prox / mu, where prox is the policy before the batch's
first update. With trainer.importance the loss gets pi / prox as its ratio, and each of its tokens is weighted by
prox / mu, truncated or masked as below; the last two give 0 or 1 instead. So the distance between trainer and sampler,
and the age of the rollouts, do not use up the clip range (decoupled PPO, 2505.24298; TRL does the same). Without
trainer.importance the ratio is pi / mu.

A weight is a function of micro (fields as for a loss; old_logp_N is the sampler's, prox_logp_N that of prox) and of
logp_N, without gradient; trainer.importance_args are its keyword arguments. It returns a weight per token."""

import torch

from configs.algorithms.losses import over_sequences
from trainer import log_ratio


def prox_log_ratio(micro):
    """log(prox / mu)"""
    return log_ratio(micro, micro["prox_logp_N"])


def sequence_ratio(micro):
    """The product of prox / mu over each token's sequence."""
    sum_N, _ = over_sequences(micro, prox_log_ratio(micro))
    return sum_N.clamp(-20, 20).exp()


def mask_outside(weight_N, low, high):
    """The weight, and 0 outside of low and high."""
    return torch.where((weight_N >= low) & (weight_N <= high), weight_N, 0)


def token_truncate(micro, logp_N, low=0.0, high=2.0):
    """min(prox / mu, high) (TIS, fengyao.notion.site/off-policy-rl)."""
    return prox_log_ratio(micro).exp().clamp(low, high)


def token_mask(micro, logp_N, low=0.0, high=3.0):
    """prox / mu from low to high, otherwise 0 (TRL's token_mask)."""
    return mask_outside(prox_log_ratio(micro).exp(), low, high)


def sequence_truncate(micro, logp_N, low=0.0, high=3.0):
    """min(product of prox / mu over the sequence, high) (TRL's sequence_truncate)."""
    return sequence_ratio(micro).clamp(low, high)


def sequence_mask(micro, logp_N, low=0.0, high=3.0):
    """The product of prox / mu over the sequence if it is from low to high, otherwise 0 (TRL's default,
    sequence_mask). The longer a sequence, the further a product is from 1; see geometric_mask."""
    return mask_outside(sequence_ratio(micro), low, high)


def geometric_mask(micro, logp_N, low=0.99, high=1.01):
    """1 if the geometric mean of prox / mu over the sequence is from low to high, otherwise 0: a sequence is kept or
    dropped as a whole, whatever its length (SkyRL, verl)."""
    sum_N, len_N = over_sequences(micro, prox_log_ratio(micro))
    mean_N = (sum_N / len_N).exp()
    return ((mean_N >= low) & (mean_N <= high)).to(logp_N)


def off_policy_mask(micro, logp_N, high=0.5):
    """0 if A < 0 and the mean of log(mu / pi) over the sequence is above high, otherwise 1: a bad sequence that the
    policy would hardly draw any more is left alone (DeepSeek-V3.2, 2512.02556; 0.5 is TRL's example)."""
    sum_N, len_N = over_sequences(micro, -log_ratio(micro, logp_N))
    return ((micro["adv_N"] >= 0) | (sum_N / len_N <= high)).to(logp_N)
