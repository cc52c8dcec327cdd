"""An environment whose rewards always differ within a group, and a loss that takes a while; for the other parts."""

import itertools
import os
import time

import trainer
from env import Rubric, SingleTurnEnv

COUNT = itertools.count()


def alternating(completion):
    return float(next(COUNT) % 2)


def load_environment(num=1024, distinct=False):
    rows = [{"question": f"abcdefgh{i if distinct else ''}"} for i in range(num)]
    return SingleTurnEnv(rows, rubric=Rubric([alternating]))


def slow_loss(micro, logp_N, entropy_N):
    """grpo, and TRAIN_S seconds for a step, however many micro-batches it has."""
    time.sleep(float(os.environ["TRAIN_S"]) * int(micro["mask_N"].sum()) / micro["num_mask"])
    return trainer.grpo(micro, logp_N, entropy_N)
