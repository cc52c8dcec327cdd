"""Use a calculator: the model writes <calc>415 + 489</calc>, or calls a function, reads the result as the next message,
and writes <answer>904</answer>. Evaluations use wordings (calculator.txt), names and things that do not occur in
training. The only exception is eggs."""

import random
import re
from functools import partial
from pathlib import Path

from env import Messages, MultiTurnEnv, Rubric
from orchestrator import Order, Rollout, Sequence
from rolemodel.environments.parsers import XMLParser, number
from rolemodel.environments.tools import ToolEnv
from rolemodel.role import ConfigError

PARSER = XMLParser(["calc", "answer"])
WITH_TOOL = (
    "You have a calculator. Write <calc>12 + 34</calc> to use it. Then read its result and write <answer>46</answer>."
)
ALONE = "Calculate, and write <answer>46</answer>."
CALL = '<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{}"}}}}\n</tool_call>'
TOOL_CALLS = {"tags": "<calc>{}</calc>", "function": CALL, False: ""}
NAMES_AND_THINGS = {
    "example": ("Max", "cards"),
    "train": ("Ann Tom Sue Max Lily Paul", "apples books pens coins cards balls eggs shells"),
    "dev": ("Eva Leo", "stamps cups"),
    "test": ("Ben Mia", "keys toys"),
}


def value(call: str | None) -> int | None:
    """Returns what the calculator says, or None if it does not understand the call."""
    found = re.fullmatch(r"(\d{1,6}) *([-+*]) *(\d{1,6})", call or "")
    if not found:
        return None
    a, b = int(found[1]), int(found[3])
    return {"+": a + b, "-": a - b, "*": a * b}[found[2]]


class Calculator(MultiTurnEnv):
    error = 0  # how far its results are off

    def is_completed(self, messages: Messages, state: dict) -> bool:
        return PARSER.parse(messages[-1]["content"]).calc is None

    def env_response(self, messages: Messages, state: dict) -> Messages:
        result = value(PARSER.parse(messages[-1]["content"]).calc)
        return [{"role": "user", "content": "error" if result is None else str(result + self.error)}]


class HardWordings(Order):
    """Sums, differences and products take turns, since after a batch of mostly sums, the model would add whatever it is
    asked. A dropped group is replaced twice by one of the same operation, and then by one of any operation.

    A wording is skipped with the probability with which the model has solved it lately (Kimi k1.5, 2501.12599)."""

    def pick(self, step: int, slot: int, attempt: int) -> int:
        draw = random.Random(f"{self.cfg.run.seed} {step} {slot} {attempt}")
        for num in range(100):
            row = super().pick(step, slot, attempt + 100 * num)
            if attempt < 3:
                row = row // 3 * 3 + slot % 3
            if draw.random() >= self.memory.get(self.examples[row]["wording"], 0):
                break
        return row

    def commit(self, step: int, groups: list[list[Rollout]]) -> list[Sequence]:
        for group in (group for group in groups if group[0].env == self.env):
            wording = self.examples[group[0].example]["wording"]
            share = sum(rollout.reward == 1 for rollout in group) / len(group)
            self.memory[wording] = (self.memory.get(wording, 0) + share) / 2
        return []


def correct(completion: Messages, answer: str) -> float:
    return float(number(PARSER.parse_answer(completion[-1:])) == number(answer))


def called(completion: Messages) -> float:
    """Returns 1 if the calculator understood the first message, and 0 otherwise."""
    return float(len(completion) > 1 and completion[1]["content"].lstrip("-").isdigit())


def repeated(completion: Messages) -> float:
    """Returns 1 if the answer is what the calculator said, be it right or wrong, and 0 otherwise."""
    return float(len(completion) > 2 and PARSER.parse_answer(completion[-1:]) == completion[-2]["content"])


def make_rows(split: str, num: int, tool_call: str, head: Messages = ()) -> list[dict]:
    """Makes examples whose prompt is `head` and a question, with its `wording`, and a `solution`: the messages that
    would solve it. tool_call: how the tool is called, with {} for the calculation; "": there is no tool."""
    names, things = map(str.split, NAMES_AND_THINGS[split])
    wordings = [line.split(maxsplit=2) for line in Path(__file__).with_suffix(".txt").read_text().splitlines()]
    draw = random.Random(f"{split} {num}")
    rows = []
    for i in range(num):
        operation = "+-*"[i % 3]
        _, _, wording = draw.choice([line for line in wordings if line[:2] == [split, operation]])
        a, b = draw.randint(100, 999), draw.randint(100, 999)
        if operation == "-":
            a, b = max(a, b), min(a, b)
        call = f"{a} {operation} {b}"
        answer = str(value(call))
        solution = [{"role": "assistant", "content": f"<answer>{answer}</answer>"}]
        if tool_call:
            result = {"role": "tool" if tool_call == CALL else "user", "content": answer}
            solution = [{"role": "assistant", "content": tool_call.format(call)}, result, *solution]
        question = wording.format(a=a, b=b, name=draw.choice(names), things=draw.choice(things))
        prompt = [*head, {"role": "user", "content": question}]
        rows.append({"prompt": prompt, "answer": answer, "solution": solution, "wording": wording})
    return rows


def load_environment(split="test", shots=3, tool="tags", error=0) -> MultiTurnEnv:
    """split: the split for evaluations, dev or test. shots: number of worked examples in each prompt. tool: "tags";
    "function", where vLLM parses the calls, and only the worked examples show the model how to write them; or False.
    error: how far the calculator's results are off."""

    def calculate(expression: str) -> int:
        """Calculate.

        Args:
            expression: two numbers and +, - or * between them
        """
        result = value(expression)
        if result is None:
            raise ValueError("two whole numbers with +, - or * between them, such as 12 + 34")
        return result + error

    if tool not in TOOL_CALLS or split not in ("dev", "test"):
        text = "tool must be tags, function or false, and split must be dev or test"
        raise ConfigError(f"env.args: tool = {tool!r}, split = {split!r}: {text}")
    tool_call = TOOL_CALLS[tool]
    head = []
    for row in make_rows("example", shots, tool_call):
        head += row["prompt"] + row["solution"]
    kind = partial(ToolEnv, tools=[calculate]) if tool == "function" else Calculator
    env = kind(
        make_rows("train", 4095, tool_call, head),
        max_turns=2,
        eval_dataset=make_rows(split, 128, tool_call, head),
        system_prompt=WITH_TOOL if tool == "tags" else ALONE,
        rubric=Rubric([correct, called, repeated], [1.0, 0.0, 0.0]),
    )
    env.error = error
    return env
