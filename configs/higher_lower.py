"""Find a number: after each guess, the model is told whether the number is higher or lower. It trains on odd numbers,
and is evaluated on even ones."""

import re

from env import MultiTurnEnv, Rubric
from rolemodel.environments.parsers import without_thoughts


def guess(messages):
    """Returns the first number in the last message, or 0 if there is none."""
    numbers = re.findall("-?[0-9]+", without_thoughts(messages[-1]["content"]))
    return int((numbers or ["0"])[0][:9])  # Python refuses to read thousands of digits


class HigherLower(MultiTurnEnv):
    def is_completed(self, messages, state):
        return guess(messages) == state["answer"]

    def env_response(self, messages, state):
        return [{"role": "user", "content": "Lower." if guess(messages) > state["answer"] else "Higher."}]


def found(completion, answer):
    return float(guess(completion) == answer)


def quick(completion, answer, turn):
    return found(completion, answer) / turn


def load_environment(most=30, max_turns=6):
    question = f"Guess my number from 1 to {most}. Answer with one number."
    game = [question, "15", "Lower.", "7", "Higher.", "11", "Higher.", "13", question]  # a sample game
    prompt = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(game)]
    rows = [{"prompt": prompt, "answer": number} for number in range(1, most + 1)]
    return HigherLower(rows[::2], max_turns, eval_dataset=rows[1::2], rubric=Rubric([found, quick], [0.8, 0.2]))
