"""reverse_text, in which training flips rewards with a probability, r to 1 - r. Evaluations get the true ones."""

import random

import reverse_text
from reverse_text import exact, similarity

from env import Rubric, SingleTurnEnv


def load_environment(share: float = 0.0) -> SingleTurnEnv:
    """share: the probability."""

    def reward(completion, answer, info):
        true = (exact(completion, answer) + similarity(completion, answer)) / 2
        return 1 - true if info["is_noisy"] and random.random() < share else true

    train = [row | {"info": {"is_noisy": True}} for row in reverse_text.rows("train", 8192)]
    test = [row | {"info": {"is_noisy": False}} for row in reverse_text.rows("eval", 256)]
    return SingleTurnEnv(train, test, rubric=Rubric([exact, reward], [0.0, 1.0]))
