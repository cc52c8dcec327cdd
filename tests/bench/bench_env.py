"""An environment whose rewards always differ within a group, and a loss that takes a while; for the other parts."""

import itertools
import os
import time

import trainer
from env import Rubric, SingleTurnEnv

COUNT = itertools.count()


def alternating(completion):
    return float(next(COUNT) % 2)


class OneEach(SingleTurnEnv):
    """Writes a prompt of its own, so that every rollout is a request."""

    async def rollout(self, state, generate):
        state["prompt"] = state["prompt"] + [{"role": "user", "content": "x"}]
        await super().rollout(state, generate)


def load_environment(one_each=False, num=1024, distinct=False):
    rows = [{"question": f"abcdefgh{i if distinct else ''}"} for i in range(num)]
    return (OneEach if one_each else SingleTurnEnv)(rows, rubric=Rubric([alternating]))


def slow_loss(micro, logp_N, entropy_N, cfg):
    """grpo, and TRAIN_S seconds for a step, however many micro-batches it has."""
    time.sleep(float(os.environ["TRAIN_S"]) * int(micro["mask_N"].sum()) / micro["tokens"])
    return trainer.compute_loss(micro, logp_N, entropy_N, cfg._replace(loss="grpo"))
