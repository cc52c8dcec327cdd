"""Writes a page about a run: python tools/page.py outputs/run [--out FILE.html] [--mb 5]

It has the curves, the examples that were learned or unlearned between the first evaluation and the last, a table of
groups, and the answers of a group side by side, with every token's numbers. The page is one file that needs no server
and no network, and can be sent by mail. If a run does not fit into about --mb megabytes, the page shows a sample: some
groups of the first and the last step, then of steps in between.

Whatever a model wrote is stored as compressed JSON, and page.js puts it into the page as text, never as markup."""

import base64
import gzip
import hashlib
import html
import io
import json
import math
import random
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from string import Template

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rolemodel.run_directory import to_json
from tools import plot, show, tokens

FOLDER = Path(__file__).resolve().parent / "page"  # the template, the style and the script
FILES = {"evaluation": "eval_rollouts.jsonl", "training": "rollouts.jsonl"}
MOST_TEXT = 20_000  # characters of a message; longer ones are cut in the middle
MOST_TOKENS = 4_000  # of a training sequence
KEPT = ("member", "reward", "metrics", "error", "truncated", "version", "num_turns", "turn_rewards", "agent_rewards")


def pack(value) -> str:
    """A value as compressed JSON, in base64, so that no text can end an element of the page."""
    return base64.b64encode(gzip.compress(to_json(value).encode(), 6)).decode()


# --- what a group becomes ---------------------------------------------------------------------------------------------


def cut(value) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters are cut ...] {text[-half:]}"


def conversation(text: str | list) -> list[dict]:
    messages = show.as_messages(text)
    thoughts = [message.get("reasoning_content") or message.get("reasoning") or "" for message in messages]
    return [
        {"role": cut(message.get("role", "text")), "text": cut(show.text_of(message)), "thoughts": cut(thought)}
        for message, thought in zip(messages, thoughts)
    ]


def sequence_parts(s: dict) -> dict:
    """A training sequence with the numbers of its tokens, to six digits; null where there is none."""
    columns = {"id": s["tokens"][:MOST_TOKENS].tolist()}
    for name, x_L in s.items():
        if torch.is_tensor(x_L) and x_L.ndim == 1 and name != "tokens":
            numbers = x_L[:MOST_TOKENS].float().tolist()
            columns[name] = [float(f"{x:.6g}") if math.isfinite(x) else None for x in numbers]
    return {"agent": s["agent"], "num": len(s["tokens"]), "columns": columns}


def group_parts(kind: str, lines: list[dict], rollouts: dict[tuple, list[dict]]) -> dict:
    """A group as page.js shows it. rollouts: the sequences of its step."""
    first = lines[0]
    parts = {"kind": kind, "row": first["example"]}
    parts |= {name: first[name] for name in ("step", "env", "slot", "attempt", "dropped")}
    parts |= {"answer": cut(first["answer"]), "prompt": conversation(first["prompt"]), "rollouts": []}
    for line in lines:
        rollout = {name: line[name] for name in KEPT}
        rollout["messages"] = conversation(line["completion"])
        if line["prompt"] != first["prompt"]:
            rollout["messages"] = conversation(line["prompt"]) + rollout["messages"]
        rollout["sequences"] = [sequence_parts(s) for s in rollouts.get(tokens.rollout_key(line), ())]
        parts["rollouts"].append(rollout)
    return parts


# --- which groups are shown -------------------------------------------------------------------------------------------


def find_steps(path: Path) -> tuple[dict[int, list[int]], int]:
    """Returns {step: where its lines begin and end} and the number of groups. The lines themselves, which are gigabytes
    in a long run, are read again when they are needed."""
    places = {}
    keys = set()
    begin = 0
    lines = show.Lines(path)
    for line in lines.new():
        places.setdefault(line["step"], [begin, 0])[1] = begin = lines.position
        keys.add(show.group_key(line))
    return places, len(keys)


def read_groups(run: Path, kind: str, step: int, begin: int, end: int) -> Iterator[dict]:
    rollouts = tokens.read_batch(run, step) if kind == "training" else {}
    with open(run / FILES[kind], "rb") as file:
        file.seek(begin)
        lines = [json.loads(line) for line in file.read(end - begin).splitlines()]
    for _, group in groupby(lines, key=show.group_key):
        yield group_parts(kind, list(group), rollouts)


def choose(run: Path, most: float) -> tuple[list[dict], int]:
    """Groups that take about `most` bytes, and the number of all groups. The first and the last step come first, then
    others at random. Of each step, the first groups are taken: in evaluations, these are the same examples."""
    groups = []
    num_all = 0
    for kind, share in (("evaluation", 0.3), ("training", 0.7)):
        places, num = find_steps(run / FILES[kind])
        num_all += num
        steps = list(places)
        middle = steps[1:-1]
        random.Random(0).shuffle(middle)
        left = share * most
        most_of_step = left / min(20, len(steps) + 1)
        for step in dict.fromkeys(steps[:1] + steps[-1:] + middle):
            size = 0
            for group in read_groups(run, kind, step, *places[step]):
                groups.append(group)
                size += len(pack(group))
                if size > most_of_step:
                    break
            left -= size
            if left < 0:
                break
    return groups, num_all


# --- the page ---------------------------------------------------------------------------------------------------------


def make_page(run: Path, most: float) -> str:
    groups, num_all = choose(run, most)
    sequences = [s for group in groups for rollout in group["rollouts"] for s in rollout["sequences"]]
    ids = sorted({token for s in sequences for token in s["columns"]["id"]})
    words = tokens.load_tokenizer(run).batch_decode([[token] for token in ids]) if ids else []
    picture = io.BytesIO()
    plot.draw([run]).savefig(picture, dpi=110, format="png")
    script = (FOLDER / "page.js").read_text("utf-8")
    return Template((FOLDER / "page.html").read_text("utf-8")).substitute(
        name=html.escape(run.name),
        style=(FOLDER / "page.css").read_text("utf-8"),
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        curves=base64.b64encode(picture.getvalue()).decode(),
        data=pack({"groups": groups, "num_all": num_all, "words": dict(zip(ids, words))}),
    )


def main(argv: list[str]):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=show.run_with("rollouts.jsonl", "metrics.jsonl"))
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="default: page.html in the run")
    parser.add_argument("--mb", type=float, default=5, help="about the size of the page: 5")
    args = parser.parse_args(argv)
    out = args.out or args.run / "page.html"
    out.write_text(make_page(args.run, args.mb * 1e6), "utf-8")
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main(sys.argv[1:])
