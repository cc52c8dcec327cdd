"""Reverse a word, letter by letter. The words are made up from syllables, and are the same in every run."""

import difflib
import random

from env import Messages, Rubric, SingleTurnEnv
from rolemodel.environments.parsers import without_thoughts

CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"
SPLITS = {"eval": range(1), "warmup": range(1, 4), "train": range(4, 10)}  # {split: checksums of its words}


def checksum(text: str) -> int:
    """Returns a number from 0 to 9. Tasks that make up their examples use it to choose the split of each example, so
    that no two splits share one."""
    return sum(ord(c) * 31**i for i, c in enumerate(text)) % 10


def word(rng: random.Random, least: int, most: int) -> str:
    """Makes up a word of `least` to `most` syllables."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(least, most)))


def rows(split: str, num: int) -> list[dict]:
    """Returns `num` examples, whose questions are different words of 2 to 4 syllables."""
    rng = random.Random(f"reverse_text {split}")
    found = {}
    while len(found) < num:
        text = word(rng, 2, 4)
        if checksum(text) in SPLITS[split]:
            found[text] = {"question": text, "answer": text[::-1]}
    return list(found.values())


def demonstrations(num: int) -> list[Messages]:
    """Returns conversations for the toy model's supervised warm-up."""
    talks = []
    for row in rows("warmup", num):
        question = {"role": "user", "content": row["question"]}
        talks.append([question, {"role": "assistant", "content": row["answer"]}])
    return talks


def similarity(completion: Messages, answer: str) -> float:
    return difflib.SequenceMatcher(None, without_thoughts(completion[-1]["content"]), answer).ratio()


def exact(completion: Messages, answer: str) -> float:
    return float(without_thoughts(completion[-1]["content"]) == answer)


def load_environment(num_train=8192, num_eval=256, system_prompt="") -> SingleTurnEnv:
    """system_prompt: an explanation of the task, for models that were not warmed up on bare words."""
    rubric = Rubric([exact, similarity], [0.5, 0.5])
    return SingleTurnEnv(rows("train", num_train), rows("eval", num_eval), system_prompt, rubric)
