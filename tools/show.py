"""python tools/show.py outputs/run [--color advantage|diff] [--step N] ...: rollouts for reading, newest first.

Through a pager where there is a terminal. With --color only what was trained on, each sampled token colored by its
advantage (green: made likelier, red: unlikelier) or by trainer's - sampler's logp, in three shades: the stronger ones
over a third and two thirds of the batch's largest advantage, or from 0.001, 0.01 and 0.1 nats on. Without colors
(NO_COLOR, no terminal) there is a [++] or [-] behind a token instead. What was not sampled is dim.
Steps are counted from 0, as in all files of a run."""

import argparse
import functools
import heapq
import json
import math
import os
import pydoc
import signal
import sys
import tomllib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

GREEN = (194, 120, 40)  # backgrounds among the 256 colors, pale to strong
RED = (224, 210, 196)

# --- what other tools use, too ----------------------------------------------------------------------------------------


def eval_statistics(rows, first=None):
    """rows: mean reward of each row, None of a lost one, as in eval.jsonl. ci95: half width, over rows; None of a
    single one. gain: over `first`, those of an earlier version; paired, as rows differ from each other far more than
    versions do."""

    def half(values):
        return float(1.96 * np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None

    found = {"ci95": half([x for x in rows if x is not None])}
    if first:
        diffs = [b - a for a, b in zip(first, rows) if None not in (a, b)]
        found |= {"gain": float(np.mean(diffs)) if len(diffs) > 1 else None, "gain_ci95": half(diffs)}
    return found


def with_interval(value, half):
    return f"{value:.3f}" + (f" +- {half:.3f}" if half is not None else "")


def run_with(*files):
    """For argparse: -> a function from text to the run directory, which has one of these files; else exit code 2."""

    def find(text):
        run = Path(text)
        if not any((run / name).exists() for name in files):
            print(f"{run} is no run directory: there is no {' or '.join(files)}", file=sys.stderr)
            sys.exit(2)
        return run

    return find


class Lines:
    """The whole lines of a JSONL file as they come. A resumed run makes a new file: then from its beginning."""

    def __init__(self, path):
        self.path, self.file, self.at = path, None, 0

    def new(self):
        if not self.path.exists():
            return
        with open(self.path, "rb") as f:
            about = os.fstat(f.fileno())
            if about.st_ino != self.file or about.st_size < self.at:
                self.file, self.at = about.st_ino, 0
            f.seek(self.at)
            for line in f:
                if not line.endswith(b"\n"):
                    return
                try:
                    found = json.loads(line)
                except ValueError as e:
                    raise ValueError(f"{self.path}: what begins at byte {self.at} is damaged: {e}") from None
                self.at += len(line)
                yield found


def as_messages(text):
    """Messages as they are; texts of a base model as messages."""
    parts = text if isinstance(text, list) else [text]
    return [part if isinstance(part, dict) else {"role": "text", "content": str(part)} for part in parts]


def said(message):
    """Content and tool calls of a message as text, whatever they are."""
    text = message.get("content") or ""
    if not isinstance(text, str):
        text = json.dumps(text, default=str)
    for call in message.get("tool_calls") or ():
        text += f" -> {json.dumps(dict(call).get('function'), default=str)}"
    return text


def printable(text):
    """What a model wrote must not steer a terminal: what is not printable is escaped."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


# --- colors ----------------------------------------------------------------------------------------------------------


def paint(text, value, limits, is_plain):
    level = sum(abs(value) > limit for limit in limits)
    if not level:
        return text
    if is_plain:
        return f"{text}[{('+' if value > 0 else '-') * level}]"
    return f"\x1b[30;48;5;{(GREEN if value > 0 else RED)[level - 1]}m{text}\x1b[0m"


@functools.cache
def values_of(run, step, color):
    """-> batch, its value per token, the limits of the three shades; None where the step has not been trained yet."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    from configs import load_config
    from trainer import Batch, add_advantages  # slow to import, and only for colors

    with safe_open(run / "batches" / f"step_{step:06d}.safetensors", "pt") as f:
        columns = {name: f.get_tensor(name) for name in f.keys()}
        samples, info = (json.loads(f.metadata()[name]) for name in ("samples", "info"))
    batch = Batch(columns, columns.pop("lens").long(), samples, info)
    if color == "advantage":
        cfg = load_config(run / "config.toml")  # which also finds a module that an advantage is in
        values = add_advantages(batch, cfg.trainer).columns["adv"]
        return batch, values, [x * values.abs().max().item() for x in (0, 1 / 3, 2 / 3)]
    own = run / "batches" / f"logp_{step:06d}.safetensors"
    if not own.exists():
        return None
    return batch, load_file(own)["logp"] - columns["old_logp"], [1e-3, 1e-2, 1e-1]


def tokens_of(run, line, tokenizer, color, is_plain):
    """The samples of a rollout as text with colored tokens; "" where it was not trained on."""
    found = values_of(run, line["step"], color)
    if not found:
        return ""
    batch, values, limits = found
    out, dim = "", ("", "") if is_plain else ("\x1b[2m", "\x1b[0m")
    key, lens = {k: line[k] for k in ("env", "group", "rollout")}, batch.lens.tolist()
    columns = [x.split(lens) for x in (batch.columns["tokens"], batch.columns["mask"], values)]
    for sample, *parts in zip(batch.samples, *columns):
        if not key.items() <= sample.items():
            continue
        for token, is_trained, x in zip(*(part.tolist() for part in parts)):
            text = printable(tokenizer.decode([token]))
            out += paint(text, x, limits, is_plain) if is_trained else f"{dim[0]}{text}{dim[1]}"
        out += "\n"
    return out


# --- the command ------------------------------------------------------------------------------------------------------


def chosen(run, args):
    """Lines of rollouts.jsonl as asked; where bounds are given only what has a reward, with colors what was trained
    on."""
    wanted = {"step": args.step, "env": args.env, "example": args.row}
    low = -math.inf if args.min_reward is None else args.min_reward
    high = math.inf if args.max_reward is None else args.max_reward
    needs_reward = args.min_reward is not None or args.max_reward is not None or args.color
    for line in Lines(run / "rollouts.jsonl").new():
        if any(value not in (None, line[key]) for key, value in wanted.items()):
            continue
        if needs_reward and (line["reward"] is None or not low <= line["reward"] <= high):
            continue
        if args.color and line["dropped"]:
            continue
        yield line


def as_text(line, colored):
    """A rollout with its heading; colored: its tokens, instead of its messages."""
    parts = ", ".join(f"{name} {value:.3g}" for name, value in line["metrics"].items())
    reward = line["error"] if line["reward"] is None else f"reward {line['reward']:.3f} ({parts})"
    text = f"=== step {line['step']}, {line['env']}, row {line['example']}, rollout {line['rollout']}: {reward}"
    text += ", cut off" if line["truncated"] else ""
    text += f", dropped: {line['dropped']}" if line["dropped"] else ""
    if colored:
        return f"{text}\n{colored}\n"
    for message in as_messages(line["prompt"]) + as_messages(line["completion"]):
        text += f"\n[{message['role']}] {printable(said(message))}"
    return f"{text}\n[answer wanted] {printable(str(line['answer']))}\n\n"


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=run_with("rollouts.jsonl"))
    for name, kind in {"step": int, "env": str, "row": int, "min-reward": float, "max-reward": float}.items():
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--sort", choices=("step", "reward"), default="step", help="largest first")
    parser.add_argument("--n", type=int, default=10)
    parser.add_argument("--color", choices=("advantage", "diff"))
    args = parser.parse_args(argv)
    is_terminal, tokenizer = sys.stdout.isatty(), None
    is_plain = bool(os.environ.get("NO_COLOR")) or not is_terminal
    if args.color:
        import transformers

        model = tomllib.loads((args.run / "config.toml").read_text())["model"]
        local = ROOT / model  # a relative path is launch.sh's, which runs there
        tokenizer = transformers.AutoTokenizer.from_pretrained(local if local.is_dir() else model)

    def height(line):
        return -math.inf if line[args.sort] is None else line[args.sort]

    text = ""
    for line in heapq.nlargest(args.n, chosen(args.run, args), key=height):
        text += as_text(line, args.color and tokens_of(args.run, line, tokenizer, args.color, is_plain))
    os.environ.setdefault("LESS", "-R")
    if is_terminal:
        pydoc.pager(text or "no such rollout")
    else:
        print(text or "no such rollout")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # of head, which has seen enough
    main(sys.argv[1:])
