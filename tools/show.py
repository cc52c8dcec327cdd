"""python tools/show.py outputs/run [--color advantage|diff] [--step N] ...: rollouts for reading, newest first.

Through a pager where there is a terminal. With --color only what was trained on, each sampled token coloured by its
advantage (green: made likelier, red: unlikelier) or by trainer's - sampler's logp, in three shades: the stronger ones
over a third and two thirds of the batch's largest advantage, or from 0.001, 0.01 and 0.1 nats on. Without colours
(NO_COLOR, no terminal) there is a [++] or [-] behind a token instead. What was not sampled is dim."""

import argparse
import functools
import heapq
import json
import math
import os
import pydoc
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from configs.lib.metrics import as_messages, printable

GREEN, RED = (194, 120, 40), (224, 210, 196)  # backgrounds among the 256 colours, pale to strong


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
    from safetensors.torch import load_file

    from configs.lib.batch import load_batch

    batch = load_batch(run / "batches" / f"step_{step:06d}.safetensors")
    own = run / "batches" / f"logp_{step:06d}.safetensors"
    if color == "advantage":
        return batch, batch.advantages, [x * batch.advantages.abs().max().item() for x in (0, 1 / 3, 2 / 3)]
    return (batch, load_file(own)["logp"] - batch.old_logp, [1e-3, 1e-2, 1e-1]) if own.exists() else None


def tokens_of(run, line, tokenizer, color, is_plain):
    """The samples of a rollout as text with coloured tokens; "" where it was not trained on."""
    if line["advantage"] is None or not (found := values_of(run, line["step"], color)):
        return ""
    (batch, values, limits), out, dim = found, "", ("", "") if is_plain else ("\x1b[2m", "\x1b[0m")
    key, lens = {k: line[k] for k in ("env", "group", "rollout")}, batch.sample_lens.tolist()
    for sample, *parts in zip(batch.samples, *(x.split(lens) for x in (batch.tokens, batch.loss_mask, values))):
        if key.items() <= sample.items():
            for token, is_trained, x in zip(*(part.tolist() for part in parts)):
                text = printable(tokenizer.decode([token]))
                out += paint(text, x, limits, is_plain) if is_trained else f"{dim[0]}{text}{dim[1]}"
            out += "\n"
    return out


def chosen(run, args):
    """Lines of rollouts.jsonl as asked; where bounds are given only what has a reward, with colours an advantage."""
    wanted = {"step": args.step, "env": args.env, "example": args.row}
    low, high = (-math.inf if args.min_reward is None else args.min_reward), args.max_reward
    high = math.inf if high is None else high
    is_bounded = args.min_reward is not None or args.max_reward is not None
    for text in open(run / "rollouts.jsonl"):
        if not text.endswith("\n"):
            return  # it is being written
        line = json.loads(text)
        is_within = line["reward"] is not None and low <= line["reward"] <= high
        has_color = not args.color or line["advantage"] is not None
        if all(v in (None, line[k]) for k, v in wanted.items()) and (is_within or not is_bounded) and has_color:
            yield line


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    for name, kind in {"step": int, "env": str, "row": int, "min-reward": float, "max-reward": float}.items():
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--sort", choices=("step", "reward", "advantage"), default="step", help="largest first")
    parser.add_argument("--n", type=int, default=10)
    parser.add_argument("--color", choices=("advantage", "diff"))
    args = parser.parse_args(argv)
    is_terminal, tokenizer = sys.stdout.isatty(), None
    is_plain = bool(os.environ.get("NO_COLOR")) or not is_terminal
    if args.color:
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(
            tomllib.loads((args.run / "config.toml").read_text())["model"]
        )

    def height(line):
        value = line[args.sort]
        return float(max(value) if isinstance(value, list) else -1e300 if value is None else value)

    text = ""
    for line in heapq.nlargest(args.n, chosen(args.run, args), key=height):
        parts = ", ".join(f"{name} {value:.3g}" for name, value in line["metrics"].items())
        reward = line["error"] if line["reward"] is None else f"reward {line['reward']:.3f} ({parts})"
        end = ", cut off" * line["truncated"] + (f", dropped: {line['dropped']}" if line["dropped"] else "")
        text += f"=== step {line['step']}, {line['env']}, row {line['example']}, rollout {line['rollout']}: "
        text += f"{reward}, advantage {line['advantage']}{end}\n"
        colored = args.color and tokens_of(args.run, line, tokenizer, args.color, is_plain)
        for message in [] if colored else as_messages(line["prompt"]) + as_messages(line["completion"]):
            calls = "".join(f"\n  -> {json.dumps(call['function'])}" for call in message.get("tool_calls") or ())
            text += f"[{message['role']}] {printable(str(message.get('content') or ''))}{printable(calls)}\n"
        text += (colored or f"[answer wanted] {printable(str(line['answer']))}\n") + "\n"
    os.environ.setdefault("LESS", "-R")
    pydoc.pager(text) if is_terminal else print(text or "no such rollout")


if __name__ == "__main__":
    main(sys.argv[1:])
