"""Losses that train on a fifth of the tokens: those with the highest entropy, or any."""

import torch

from trainer import cispo


def highest(micro, logp_N, entropy_N, share=0.2):
    """The claim of 2506.01939: the tokens with the highest entropy suffice."""
    return keep(micro, logp_N, entropy_N, entropy_N, share)


def random(micro, logp_N, entropy_N, share=0.2):
    """The control: as many tokens, drawn by chance."""
    return keep(micro, logp_N, entropy_N, torch.rand_like(entropy_N), share)


def keep(micro, logp_N, entropy_N, score_N, share):
    """The default loss at the tokens with the largest scores. With this configuration a batch is one micro-batch."""
    loss_N, metrics = cispo(micro, logp_N, entropy_N)
    chosen_N = score_N.detach() >= score_N.detach().quantile(1 - share)
    return loss_N * chosen_N / share, metrics
