"""Plain stochastic gradient descent in place of AdamW."""

import torch


def SGD(params, t):
    return torch.optim.SGD(params.values(), t.learning_rate)
