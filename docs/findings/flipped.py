"""reverse_text, where each reward of training is flipped with a probability. Evaluations get the true one."""

import random

import reverse_text
from reverse_text import exact

from env import Rubric, SingleTurnEnv


def load_environment(share: float = 0.0) -> SingleTurnEnv:
    """share: the probability. The reward is 1 for the whole word reversed, otherwise 0."""

    def flipped(completion, answer, info):
        right = exact(completion, answer)
        return 1 - right if info["is_noisy"] and random.random() < share else right

    train = [row | {"info": {"is_noisy": True}} for row in reverse_text.rows("train", 8192)]
    test = [row | {"info": {"is_noisy": False}} for row in reverse_text.rows("eval", 256)]
    return SingleTurnEnv(train, test, rubric=Rubric([exact, flipped], [0.0, 1.0]))
