"""Reverse a sentence or two, as in prime-rl's example: the same data set, prompt and reward."""

import difflib

from datasets import load_dataset

from env import Messages, Rubric, SingleTurnEnv, load_rows
from rolemodel.environments.parsers import XMLParser

PARSER = XMLParser(["reversed_text"], answer_field="reversed_text")
SYSTEM_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."


def similarity(completion: Messages, answer: str) -> float:
    """Returns 2 M / T, where M is the number of characters that both texts have in common, in the same order, and T the
    number of characters of both together. For texts of 200 characters or more it is lower, because difflib ignores
    frequent characters. prime-rl does the same."""
    found = PARSER.parse_answer(completion) or ""
    return difflib.SequenceMatcher(None, found, answer).ratio()


def load_environment(path="", num_eval=128) -> SingleTurnEnv:
    """path: JSON Lines with a column `prompt`; "": the data set on Hugging Face. The first examples are held out."""
    found = load_rows(path) if path else load_dataset("PrimeIntellect/Reverse-Text-RL", split="train")
    rows = [{"question": row["prompt"], "answer": row["prompt"][::-1]} for row in found]
    return SingleTurnEnv(rows[num_eval:], rows[:num_eval], SYSTEM_PROMPT, Rubric([similarity]))
