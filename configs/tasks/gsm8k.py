"""Grade-school word problems (GSM8K, 2110.14168): think in <reasoning>, answer with a number in <answer>."""

import itertools
import re
from decimal import Decimal
from pathlib import Path

from configs.environments.hub import download
from configs.environments.parsers import XMLParser
from env import DataError, Rubric, SingleTurnEnv, load_rows

PARSER = XMLParser(["reasoning", "answer"])
SYSTEM_PROMPT = f"Solve the problem. Answer in this form, with a bare number as the answer:\n{PARSER.get_format_str()}"
SAMPLE, SAMPLE_EVAL = Path(__file__).with_name("gsm8k_sample.jsonl"), 8
# Of the toy model's vocabulary: frequent strings, as a trained tokenizer has them. The rest is spelled out.
TOKENS = ["<reasoning>\n", "\n</reasoning>\n", "<answer>\n", "\n</answer>"]


def number(text):
    """ "$1,200.50" -> Decimal; None for what is no single number. Decimals compare equal with or without zeros at the
    end; floats would call long numbers equal that are not."""
    plain = re.sub(r"\\?\$\s*", "", (text or "").replace("\u2212", "-").replace("{,}", ",")).strip().rstrip(".,")
    is_number = re.fullmatch(r"[-+]?(([0-9]+|[0-9]{1,3}(,[0-9]{3})+)(\.[0-9]*)?|\.[0-9]+)", plain)
    return Decimal(plain.replace(",", "")) if is_number else None


def correct(completion, answer, parser):
    found = number(parser.parse_answer(completion))
    return float(found is not None and found == number(answer))


def split_solution(row, i):
    """The dataset's answer column -> row with question, answer (the number as text), solution (the text before it)."""
    solution, mark, answer = str(row.get("answer")).rpartition("####")
    if not row.get("question") or not mark or number(answer) is None:
        raise DataError(f"gsm8k: row {i} has no question or no '#### number' after its answer: {str(row)[:200]}")
    solution = re.sub(r"<<.*?>>", "", solution).strip()  # <<6*7=42>>: notes for a calculator
    return {"question": row["question"], "answer": answer.strip(), "solution": solution}


def read_rows(source):
    return [split_solution(row, i) for i, row in enumerate(load_rows(source, "gsm8k"))]


def demonstrations(num):
    """For the supervised warm-up of the toy model: the sample's training rows, over and over."""
    rows = itertools.islice(itertools.cycle(read_rows(SAMPLE)[:-SAMPLE_EVAL]), num)
    return [
        [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": PARSER.format(reasoning=row["solution"], answer=row["answer"])},
        ]
        for row in rows
    ]


def load_environment(path="", num_train=0, num_eval=0, system_prompt=SYSTEM_PROMPT):
    """path: JSON Lines with the dataset's columns, its last num_eval rows (0: 8) for evaluation; "": the dataset from
    Hugging Face with its own splits. num_train, num_eval: the first so many rows; 0: all."""
    if path:
        rows, num_eval = read_rows(path), num_eval or SAMPLE_EVAL
        if len(rows) <= num_eval:
            raise DataError(f"gsm8k: {path} has {len(rows)} rows; with num_eval = {num_eval} none is left for training")
        train, held_out = rows[:-num_eval], rows[-num_eval:]
    else:
        train, held_out = (read_rows(download("openai/gsm8k", split, "main")) for split in ("train", "test"))
    rubric = Rubric([correct, PARSER.get_format_reward_func()], [1.0, 0.2], parser=PARSER)
    return SingleTurnEnv(
        train[: num_train or None], held_out[: num_eval or None], system_prompt, rubric=rubric, parser=PARSER
    )
