"""Reverse a word, letter by letter. The words are made up from syllables, always the same ones."""

import difflib
import random

from env import Rubric, SingleTurnEnv

CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"
SPLITS = {"eval": (0,), "warmup": (1, 2, 3), "train": range(4, 10)}  # {split: checksums of its words}


def words(split, num):
    """Returns `num` distinct words of 2 to 4 syllables. Its checksum decides on a word's split: splits share none."""
    rng = random.Random(f"reverse_text {split}")
    found = {}  # a dict keeps the order
    while len(found) < num:
        syllables = [rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(2, 4))]
        word = "".join(syllables)
        checksum = sum(ord(c) * 31**i for i, c in enumerate(word)) % 10
        if checksum in SPLITS[split]:
            found[word] = True
    return list(found)


def rows(split, num):
    return [{"question": word, "answer": word[::-1]} for word in words(split, num)]


def demonstrations(num):
    """Conversations for the toy model's supervised warm-up."""
    talks = []
    for row in rows("warmup", num):
        question = {"role": "user", "content": row["question"]}
        talks.append([question, {"role": "assistant", "content": row["answer"]}])
    return talks


def similarity(completion, answer):
    return difflib.SequenceMatcher(None, completion[-1]["content"], answer).ratio()


def exact(completion, answer):
    return float(completion[-1]["content"] == answer)


def load_environment(num_train=8192, num_eval=256, system_prompt=""):
    """system_prompt: explains the task to models that were not warmed up on bare words."""
    rubric = Rubric([similarity, exact], [0.5, 0.5])
    train = rows("train", num_train)
    held_out = rows("eval", num_eval)
    return SingleTurnEnv(train, held_out, system_prompt=system_prompt, rubric=rubric)
