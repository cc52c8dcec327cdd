"""Arithmetic with a Python tool: write code, read what it prints, answer. The code runs in environments/sandbox.py."""

import json
import random
import re
from pathlib import Path

from configs.environments.parsers import extract_boxed_answer
from configs.environments.sandbox import Sandbox
from configs.environments.tools import ToolEnv
from configs.tasks.gsm8k import number
from env import Rubric, ensure, load_rows

FORMS = {
    "{a}*{b}+{c}": lambda a, b, c: a * b + c,
    "{a}*{b}-{c}": lambda a, b, c: a * b - c,
    "{a}+{b}*{c}": lambda a, b, c: a + b * c,
    "{a}-{b}*{c}": lambda a, b, c: a - b * c,
    "({a}+{b})*{c}": lambda a, b, c: (a + b) * c,
    "({a}-{b})*{c}": lambda a, b, c: (a - b) * c,
}
SPLITS = {"eval": (0,), "warmup": (1, 2, 3), "train": range(4, 10)}  # {split: checksums of its rows}
# Frequent strings are tokens of the toy model, as in a trained tokenizer. It spells out everything else.
TOKENS = ['<tool_call>\n{"name": "python", "arguments": {"code": "print(', ')"}}\n</tool_call>']
WARM_UP_STEPS = 150
# Finds 1/2, 10^3 and 1e5 whole, which then count as no number: half of one could be right by chance. U+2212 is a minus.
NUMBER = r"(?:(?<![\w.])[-\u2212])?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?:[/^eE][-+]?[0-9]+(?:\.[0-9]+)?)*"


def problems(split, num):
    """Returns `num` distinct (expression, value) pairs. A checksum of the expression decides on its split, so that the
    splits share none."""
    rng = random.Random(f"math_python {split}")
    found = {}
    while len(found) < num:
        form = rng.choice(list(FORMS))
        numbers = {name: rng.randint(2, 99) for name in "abc"}
        text = form.format(**numbers)
        checksum = sum(ord(c) * 31**i for i, c in enumerate(text)) % 10
        if checksum in SPLITS[split]:
            found[text] = FORMS[form](**numbers)
    return list(found.items())


def rows(split, num):
    return [{"question": f"{text}?", "answer": str(result)} for text, result in problems(split, num)]


def demonstrations(num):
    """Conversations for the toy model's supervised warm-up: one call, then the number that it printed."""
    talks = []
    for text, result in problems("warmup", num):
        function = {"name": "python", "arguments": json.dumps({"code": f"print({text})"})}
        call = {"id": "0", "type": "function", "function": function}
        talk = [
            {"role": "user", "content": f"{text}?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "0", "content": str(result)},
            {"role": "assistant", "content": str(result)},
        ]
        talks.append(talk)
    return talks


def final_answer(completion):
    r"""Returns the content of the last message's last \boxed{}, or otherwise its last number. None means that it has
    neither, or that the last message is a tool's."""
    last = completion[-1]
    if last["role"] != "assistant":
        return None
    text = last.get("content") or ""
    if "\\boxed{" in text:
        return extract_boxed_answer(text)
    numbers = re.findall(NUMBER, text)
    return numbers[-1] if numbers else None


def correct(completion, answer):
    found = (final_answer(completion) or "").strip()
    wanted = str(answer).strip()
    is_number = number(found) is not None and number(found) == number(wanted)
    is_text = found != "" and found == wanted
    return float(is_number or is_text)


def tool_calls(completion):
    return sum(len(message.get("tool_calls") or []) for message in completion)


def load_environment(
    path="", num_train=0, num_eval=128, max_turns=4, timeout_s=5.0, allow_unsandboxed_python=False, system_prompt=""
):
    """path: JSON Lines with question and answer, whose last num_eval rows are for evaluation; "" makes up expressions.
    num_train: how many rows to train on; 0 means all of a file, or 4,096 made-up ones. timeout_s: seconds for one call.

    Raises CannotContain if the sandbox does not hold."""
    if path:
        given = load_rows(path)
        problem = f"math_python: {path} has {len(given)} rows, none left to train on; set env.args.num_eval"
        ensure(len(given) > num_eval, problem)
        cut = len(given) - num_eval
        train = given[:cut][: num_train or None]
        held_out = given[cut:]
    else:
        train = rows("train", num_train or 4096)
        held_out = rows("eval", num_eval)
    hide = [Path("~").expanduser(), Path(__file__).parents[2], Path.cwd()]
    sandbox = Sandbox(hide, timeout_s, allow_unsandboxed_python)

    def python(code: str) -> str:
        """Run Python code in a fresh interpreter; returns what it prints and the last lines of errors.

        Args:
            code: a program that prints what you want to know
        """
        return sandbox.run(code)

    rubric = Rubric([correct, tool_calls], [1.0, 0.0])
    return ToolEnv(
        train, [python], max_turns, eval_dataset=held_out or None, rubric=rubric, system_prompt=system_prompt
    )
