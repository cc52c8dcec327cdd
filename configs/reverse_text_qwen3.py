"""Reverse a sentence or two, as in prime-rl's example: the same data set, prompt and reward."""

import difflib

from datasets import load_dataset

from env import Messages, Rubric, SingleTurnEnv, load_rows
from rolemodel.environments.parsers import XMLParser

PARSER = XMLParser(["reversed_text"], answer_field="reversed_text")
SYSTEM_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."


def similarity(completion: Messages, answer: str) -> float:
    """2 M / T, where M characters are common to both texts, in order, and T is the number of characters in both. From
    200 characters on it is lower, since difflib ignores frequent characters; so it is in prime-rl."""
    found = PARSER.parse_answer(completion) or ""
    return difflib.SequenceMatcher(None, found, answer).ratio()


def load_environment(path="", num_eval=128) -> SingleTurnEnv:
    """path: JSON Lines with a column `prompt`; "" is the data set on Hugging Face. Its first rows are held out."""
    found = load_rows(path) if path else load_dataset("PrimeIntellect/Reverse-Text-RL", split="train")
    rows = [{"question": row["prompt"], "answer": row["prompt"][::-1]} for row in found]
    return SingleTurnEnv(rows[num_eval:], rows[:num_eval], SYSTEM_PROMPT, Rubric([similarity]))
