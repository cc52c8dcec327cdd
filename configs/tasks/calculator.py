"""Use a calculator: the model writes <calc>415 + 489</calc>, reads the result as the next message, and says
<answer>904</answer>. Evaluations have wordings (calculator.txt), names and things of their own."""

import random
import re
from pathlib import Path

from configs.environments.parsers import XMLParser
from env import Messages, MultiTurnEnv, Rubric

PARSER = XMLParser(["calc", "answer"])
WITH_TOOL = (
    "You have a calculator. Write <calc>12 + 34</calc> to use it. Then read its result and write <answer>46</answer>."
)
ALONE = "Calculate, and write <answer>46</answer>."
NAMES = {
    "example": ["Max"],
    "train": ["Ann", "Tom", "Sue", "Max", "Lily", "Paul"],
    "dev": ["Eva", "Leo"],
    "test": ["Ben", "Mia"],
}
THINGS = {
    "example": ["cards"],
    "train": ["apples", "books", "pens", "coins", "cards", "balls", "eggs", "shells"],
    "dev": ["stamps", "cups"],
    "test": ["keys", "toys"],
}


def value(call: str | None) -> int | None:
    """What the calculator says; None if it does not understand the call."""
    found = re.fullmatch(r"(\d{1,6}) *([-+*]) *(\d{1,6})", call or "")
    if not found:
        return None
    a, b = int(found[1]), int(found[3])
    return {"+": a + b, "-": a - b, "*": a * b}[found[2]]


class Calculator(MultiTurnEnv):
    error = 0  # what its results are off by

    def is_completed(self, messages: Messages, state: dict) -> bool:
        return PARSER.parse(messages[-1]["content"]).calc is None

    def env_response(self, messages: Messages, state: dict) -> Messages:
        result = value(PARSER.parse(messages[-1]["content"]).calc)
        return [{"role": "user", "content": "error" if result is None else str(result + self.error)}]


def correct(completion: Messages, answer: str) -> float:
    return float(PARSER.parse(completion[-1]["content"]).answer == answer)


def called(completion: Messages) -> float:
    """Whether the calculator understood the first message."""
    return float(value(PARSER.parse(completion[0]["content"]).calc) is not None)


def repeated(completion: Messages) -> float:
    """Whether the answer is what the calculator said, be it right or wrong."""
    return float(len(completion) == 3 and PARSER.parse(completion[2]["content"]).answer == completion[1]["content"])


def make_rows(split: str, num: int, with_tool: bool, head: Messages = ()) -> list[dict]:
    """Rows whose prompt is head and a question; with `solution`, the messages of who solves it."""
    wordings = [line.split(maxsplit=2) for line in Path(__file__).with_suffix(".txt").read_text().splitlines()]
    draw = random.Random(f"{split} {num}")
    rows = []
    for number in range(num):
        operation = "+-*"[number % 3]
        _, _, question = draw.choice([wording for wording in wordings if wording[:2] == [split, operation]])
        a, b = draw.randint(100, 999), draw.randint(100, 999)
        if operation == "-":
            a, b = max(a, b), min(a, b)
        call = f"{a} {operation} {b}"
        answer = str(value(call))
        texts = [f"<calc>{call}</calc>", answer] * with_tool + [f"<answer>{answer}</answer>"]
        solution = [{"role": role, "content": text} for role, text in zip(["assistant", "user"] * 2, texts)]
        question = question.format(a=a, b=b, name=draw.choice(NAMES[split]), things=draw.choice(THINGS[split]))
        prompt = [*head, {"role": "user", "content": question}]
        rows.append({"prompt": prompt, "answer": answer, "solution": solution})
    return rows


def load_environment(split="test", shots=3, tool=True, error=0) -> Calculator:
    """split: of the evaluation, dev or test. shots: examples in each prompt. tool=False: without a calculator."""
    head = []
    for row in make_rows("example", shots, tool):
        head += row["prompt"] + row["solution"]
    rubric = Rubric([correct, called, repeated], [0.8, 0.2, 0.0] if tool else [1.0, 0.0, 0.0])
    env = Calculator(
        make_rows("train", 4096, tool, head),
        max_turns=2,
        eval_dataset=make_rows(split, 128, tool, head),
        system_prompt=WITH_TOOL if tool else ALONE,
        rubric=rubric,
    )
    env.error = error
    return env
