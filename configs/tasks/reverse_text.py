"""Reverse a word, letter by letter. The words are made up, from syllables; one seed makes them all."""

import difflib
import random

from env import Rubric, SingleTurnEnv

CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"


def words(split, num):
    """`num` distinct words of 2 to 4 syllables. The three splits share none: a word's checksum names its split."""
    rng, seen = random.Random(f"reverse_text {split}"), {}
    owner = {"eval": (0,), "warmup": (1, 2, 3), "train": range(4, 10)}[split]
    while len(seen) < num:
        word = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(2, 4)))
        if sum(ord(c) * 31**i for i, c in enumerate(word)) % 10 in owner:
            seen[word] = True
    return list(seen)


def rows(split, num):
    return [{"question": word, "answer": word[::-1]} for word in words(split, num)]


def demonstrations(num):
    """For the supervised warm-up of the tiny model."""
    pairs = [(row["question"], row["answer"]) for row in rows("warmup", num)]
    return [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]


def similarity(completion, answer):
    return difflib.SequenceMatcher(None, completion[-1]["content"], answer).ratio()


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


def load_environment(num_train=8192, num_eval=256, system_prompt=""):
    """system_prompt: for models that were not warmed up on the bare word."""
    rubric = Rubric([similarity, exact], [0.5, 0.5])
    return SingleTurnEnv(rows("train", num_train), rows("eval", num_eval), system_prompt=system_prompt, rubric=rubric)
