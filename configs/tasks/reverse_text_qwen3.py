"""Reverse a sentence or two, as prime-rl's example does it: the same data set, prompt and reward."""

import difflib

from configs.environments.hub import download
from configs.environments.parsers import XMLParser
from env import Rubric, SingleTurnEnv, load_rows

PARSER = XMLParser(["reversed_text"], answer_field="reversed_text")
SYSTEM_PROMPT = "Reverse the text character-by-character. Put your answer in <reversed_text> tags."


def similarity(completion, answer):
    """2 M / T: M characters in common, in order, of T in both. From 200 characters on it is less, since difflib leaves
    out the frequent ones; prime-rl has it so."""
    return difflib.SequenceMatcher(None, PARSER.parse_answer(completion) or "", answer).ratio()


def load_environment(path="", num_eval=128):
    """path: JSON Lines with a column `prompt`; "": the data set from Hugging Face. Its first rows are held out."""
    found = load_rows(path) if path else download("PrimeIntellect/Reverse-Text-RL", "train")
    rows = [{"question": row["prompt"], "answer": row["prompt"][::-1]} for row in found]
    return SingleTurnEnv(rows[num_eval:], rows[:num_eval], SYSTEM_PROMPT, rubric=Rubric([similarity]))
