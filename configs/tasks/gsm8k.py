"""Grade-school word problems (GSM8K, arXiv 2110.14168): reason in <reasoning>, then give a number in <answer>."""

import itertools
import re
from decimal import Decimal
from pathlib import Path

from configs.environments.hub import download
from configs.environments.parsers import XMLParser
from env import Rubric, SingleTurnEnv, ensure, load_rows

PARSER = XMLParser(["reasoning", "answer"])
SYSTEM_PROMPT = f"Solve the problem. Answer in this form, with a bare number as the answer:\n{PARSER.get_format_str()}"
SAMPLE = Path(__file__).with_name("gsm8k_sample.jsonl")
SAMPLE_EVAL = 8  # rows at its end that are held out
# Frequent strings are tokens of the toy model, as in a trained tokenizer. It spells out everything else.
TOKENS = ["<reasoning>\n", "\n</reasoning>\n", "<answer>\n", "\n</answer>"]


def number(text):
    """Returns a text such as "$1,200.50" as a Decimal, or None if it is not a single number. Decimals are equal with or
    without zeros at the end; as floats, different long numbers could be equal."""
    plain = (text or "").replace("\u2212", "-").replace("{,}", ",")
    plain = re.sub(r"\\?\$\s*", "", plain).strip().rstrip(".,")
    is_number = re.fullmatch(r"[-+]?(([0-9]+|[0-9]{1,3}(,[0-9]{3})+)(\.[0-9]*)?|\.[0-9]+)", plain)
    return Decimal(plain.replace(",", "")) if is_number else None


def correct(completion, answer, parser):
    found = number(parser.parse_answer(completion))
    return float(found is not None and found == number(answer))


def split_solution(row, i):
    """Splits the row's answer column into answer (the number as text) and solution (the text before it)."""
    solution, mark, answer = str(row.get("answer")).rpartition("####")
    is_right = row.get("question") and mark and number(answer) is not None
    ensure(is_right, f"gsm8k: row {i} has no question or no '#### number' after its answer: {str(row)[:200]}")
    solution = re.sub(r"<<.*?>>", "", solution).strip()  # notes for a calculator, such as <<6*7=42>>
    return {"question": row["question"], "answer": answer.strip(), "solution": solution}


def read_rows(source):
    return [split_solution(row, i) for i, row in enumerate(load_rows(source, "gsm8k"))]


def demonstrations(num):
    """Conversations for the toy model's supervised warm-up: the sample's training rows, over and over."""
    talks = []
    for row in itertools.islice(itertools.cycle(read_rows(SAMPLE)[:-SAMPLE_EVAL]), num):
        answer = PARSER.format(reasoning=row["solution"], answer=row["answer"])
        talks.append([{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}])
    return talks


def load_environment(path="", num_train=0, num_eval=0, system_prompt=SYSTEM_PROMPT):
    """path: JSON Lines with the dataset's columns, whose last num_eval rows (0 means 8) are for evaluation; "" is the
    dataset on Hugging Face with its own splits. num_train, num_eval: how many rows to use; 0 means all."""
    if path:
        rows = read_rows(path)
        num_eval = num_eval or SAMPLE_EVAL
        problem = f"gsm8k: {path} has {len(rows)} rows; with num_eval = {num_eval} none is left for training"
        ensure(len(rows) > num_eval, problem)
        train = rows[:-num_eval]
        held_out = rows[-num_eval:]
    else:
        train = read_rows(download("openai/gsm8k", "train", "main"))
        held_out = read_rows(download("openai/gsm8k", "test", "main"))
    rubric = Rubric([correct, PARSER.get_format_reward_func()], [1.0, 0.2], parser=PARSER)
    return SingleTurnEnv(
        train[: num_train or None], held_out[: num_eval or None], system_prompt, rubric=rubric, parser=PARSER
    )
