"""Find a number in a range: after each guess, the model is told whether the number is higher or lower. It trains on
numbers from 1 to 44, and is evaluated on numbers from 51 to 72."""

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


def load_environment(size=15, max_turns=6):
    def example(low, number):
        question = f"Guess my number from {low} to {low + size - 1}. Answer with one number."
        # The prompt shows a sample game, and then asks the question again.
        texts = [question, low + 7, "Lower.", low + 3, "Higher.", low + 5, question]
        prompt = [{"role": ("user", "assistant")[i % 2], "content": f"{text}"} for i, text in enumerate(texts)]
        return {"prompt": prompt, "answer": number}

    train = [example(low, number) for low in range(1, 31) for number in range(low, low + size)]
    test = [example(low, number) for low in range(51, 61) for number in range(low, low + size, 4)]
    return HigherLower(train, max_turns, eval_dataset=test, rubric=Rubric([found, quick], [0.8, 0.2]))
