"""Arithmetic with a Python tool: write code, read what it prints, answer. The code runs in configs/environments/sandbox.py."""

import json
import random
import re
from pathlib import Path

from configs.environments.parsers import extract_boxed_answer
from configs.environments.sandbox import Sandbox
from configs.environments.tools import ToolEnv
from configs.tasks.gsm8k import number
from env import DataError, Rubric, load_rows

FORMS = ["{a}*{b}+{c}", "{a}*{b}-{c}", "{a}+{b}*{c}", "{a}-{b}*{c}", "({a}+{b})*{c}", "({a}-{b})*{c}"]
# Of the toy model's vocabulary: frequent strings, as a trained tokenizer has them. The rest is spelled out.
TOKENS = ['<tool_call>\n{"name": "python", "arguments": {"code": "print(', ')"}}\n</tool_call>']
WARM_UP_STEPS = 150


def value(form, a, b, c):
    """The form's value, without running it as code."""
    return [a * b + c, a * b - c, a + b * c, a - b * c, (a + b) * c, (a - b) * c][FORMS.index(form)]


def problems(split, num):
    """`num` distinct (expression, value) pairs. The three splits share none: a checksum names an expression's split."""
    rng, found = random.Random(f"math_python {split}"), {}
    owner = {"eval": (0,), "warmup": (1, 2, 3), "train": range(4, 10)}[split]
    while len(found) < num:
        form, numbers = rng.choice(FORMS), [rng.randint(2, 99) for _ in range(3)]
        text = form.format(**dict(zip("abc", numbers)))
        if sum(ord(c) * 31**i for i, c in enumerate(text)) % 10 in owner:
            found[text] = value(form, *numbers)
    return list(found.items())


def rows(split, num):
    return [{"question": f"{text}?", "answer": str(result)} for text, result in problems(split, num)]


def demonstrations(num):
    """For the supervised warm-up of the toy model: one call, then what it printed."""
    talks = []
    for text, result in problems("warmup", num):
        function = {"name": "python", "arguments": json.dumps({"code": f"print({text})"})}
        call = {"id": "0", "type": "function", "function": function}
        talks.append(
            [
                {"role": "user", "content": f"{text}?"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "0", "content": str(result)},
                {"role": "assistant", "content": str(result)},
            ]
        )
    return talks


def final_answer(completion):
    r"""What is in the last message's last \boxed{}, else its last number; None where it is a tool's or has neither."""
    last = completion[-1]
    text = (last.get("content") or "") if last["role"] == "assistant" else ""
    if "\\boxed{" in text:
        return extract_boxed_answer(text)
    # of 1/2, 10^3 and 1e5 all of it, which is no number of ours; U+2212 is a minus sign
    numbers = re.findall(r"(?:(?<![\w.])[-\u2212])?[0-9][0-9,]*(?:\.[0-9]+)?(?:[/^eE][-+]?[0-9]+(?:\.[0-9]+)?)*", text)
    return numbers[-1] if numbers else None


def correct(completion, answer):
    found, wanted = (final_answer(completion) or "").strip(), str(answer).strip()
    same_number = number(found) is not None and number(found) == number(wanted)
    return float(bool(found) and (same_number or found == wanted))


def tool_calls(completion):
    return sum(len(message.get("tool_calls") or []) for message in completion)


def load_environment(
    path="", num_train=0, num_eval=128, max_turns=4, timeout_s=5.0, allow_unsandboxed_python=False, system_prompt=""
):
    """path: JSON Lines with question and answer, the last num_eval rows for evaluation; "": made-up expressions.
    num_train: the first so many rows; 0: all of the file, 4,096 that are made up.

    Raises CannotContain where the sandbox does not hold. timeout_s: for one call, on the wall clock."""
    if path:
        have = load_rows(path)
        if len(have) <= num_eval:
            raise DataError(f"math_python: {path} has {len(have)} rows, none left to train on; set env.args.num_eval")
        cut = len(have) - num_eval
        train, held_out = have[:cut][: num_train or None], have[cut:] or None
    else:
        train, held_out = rows("train", num_train or 4096), rows("eval", num_eval) or None
    hide = [Path("~").expanduser(), Path(__file__).parents[2], Path.cwd()]
    sandbox = Sandbox(hide, timeout_s, allow_unsandboxed_python)

    def python(code: str) -> str:
        """Run Python code in a fresh interpreter; returns what it prints and the last lines of errors.

        Args:
            code: a program that prints what you want to know
        """
        return sandbox.run(code)

    rubric = Rubric([correct, tool_calls], [1.0, 0.0])
    return ToolEnv(train, [python], max_turns, eval_dataset=held_out, rubric=rubric, system_prompt=system_prompt)
