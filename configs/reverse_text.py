"""Reverse a word, letter by letter. The words are made up from syllables, and are always the same ones."""

import difflib
import random

from env import Messages, Rubric, SingleTurnEnv
from rolemodel.environments.parsers import without_thoughts

CONSONANTS = "bcdfghjklmnprstvwz"
VOWELS = "aeiou"
SPLITS = {"eval": range(1), "warmup": range(1, 4), "train": range(4, 10)}  # {split: checksums of its words}


def checksum(text: str) -> int:
    """From 0 to 9. Tasks that make up rows use it to decide on a row's split, so that no two splits share a row."""
    return sum(ord(c) * 31**i for i, c in enumerate(text)) % 10


def word(rng: random.Random, least: int, most: int) -> str:
    """A word of that many syllables."""
    return "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.randint(least, most)))


def rows(split: str, num: int) -> list[dict]:
    """`num` different words of 2 to 4 syllables, as questions."""
    rng = random.Random(f"reverse_text {split}")
    found = {}
    while len(found) < num:
        text = word(rng, 2, 4)
        if checksum(text) in SPLITS[split]:
            found[text] = {"question": text, "answer": text[::-1]}
    return list(found.values())


def demonstrations(num: int) -> list[Messages]:
    """Conversations for the toy model's supervised warm-up."""
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
    """system_prompt: explains the task to models that were not warmed up on bare words."""
    rubric = Rubric([exact, similarity], [0.5, 0.5])
    return SingleTurnEnv(rows("train", num_train), rows("eval", num_eval), system_prompt, rubric)
