"""Shows the rollouts of a run as text, the newest first. Steps count from 0, as in all files of a run.

    python tools/show.py outputs/run                            # the last ten
    python tools/show.py outputs/run --groups --step 3          # the groups of a step: their rewards, what was dropped
    python tools/show.py outputs/run --evals --max-reward 0     # those of evaluations that earned nothing

tools/page.py shows them in a browser, with the numbers of each token."""

import json
import math
import os
import pydoc
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections import deque
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
from scipy.special import stdtrit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

# --- what other tools use as well -------------------------------------------------------------------------------------


def half_width(values: list[float]) -> float | None:
    """Half the width of the 95 % interval of a mean, by Student's t. None for fewer than two values, and if all are
    equal, since they do not tell how far others would be from them."""
    if len(values) < 2 or np.ptp(values) < 1e-9 * max(1.0, np.abs(values).max()):
        return None
    return float(stdtrit(len(values) - 1, 0.975) * np.std(values, ddof=1) / math.sqrt(len(values)))


def eval_statistics(rows: list[float | None], first: list[float | None]) -> dict:
    """Statistics over the examples of an evaluation. rows: the mean reward of each example, or None for a lost one, as
    in eval.jsonl; first: those of an earlier version.

    ci95 is half the width of the reward's interval. gain is the mean difference from `first`. It is paired by example,
    since examples differ from each other far more than versions do."""
    differences = [b - a for a, b in zip(first, rows) if None not in (a, b)]
    gain = float(np.mean(differences)) if len(differences) > 1 else None
    half = half_width([x for x in rows if x is not None])
    return {"ci95": half, "gain": gain, "gain_ci95": half_width(differences)}


def whole_rounds(evals: list[dict], num_envs: int) -> dict[int, list[dict]]:
    """{step: its lines of eval.jsonl} of evaluations that have all environments, in the order of steps. While a run
    goes on, or where it ended, an environment may be missing, and a mean over the others would be that of another
    task."""
    by_step = {}
    for line in evals:
        by_step.setdefault(line["step"], {})[line["env"]] = line
    return {step: [*by_step[step].values()] for step in sorted(by_step) if len(by_step[step]) >= num_envs}


def restrict(evals: list[dict]):
    """Restricts evaluations (lines of eval.jsonl) to the examples that all of them have scored, and the mean reward to
    these: examples that are lost, or do not fit, are rarely like the others. Only the means of successes are known, so
    they are removed from evaluations that have scored fewer examples than another one."""
    for env in {line["env"] for line in evals}:
        lines = [line for line in evals if line["env"] == env]
        table = [scores for scores in zip(*(line["rows"] for line in lines)) if None not in scores]
        most = max(len(line["rows"]) - line["rows"].count(None) for line in lines)
        for i, line in enumerate(lines):
            if len(line["rows"]) - line["rows"].count(None) < most:
                line.pop("pass@1", None)
            line["rows"] = [scores[i] for scores in table]
            line["reward/mean"] = float(np.mean(line["rows"])) if table else math.nan


def parts_of(line: dict) -> dict[str, float]:
    """Where the seconds of a step went, according to its line of metrics.jsonl. The trainer waits until the batch
    arrives. Going back from there, its wait is first for the evaluation that held the batch back, then for replacements
    of dropped groups, then for rollouts."""
    wait = line["time/wait_batch_s"]
    evaluation = min(wait, line.get("time/eval_s", 0.0))
    dropped = min(wait - evaluation, line.get("time/dropped_s", 0.0))
    parts = {"training": line["time/train_s"], "sync": line["time/sync_s"], "rollouts": wait - evaluation - dropped}
    return parts | {"dropped groups": dropped, "evaluation": evaluation}


def with_interval(value: float, half: float | None) -> str:
    return f"{value:.3f}" if half is None else f"{value:.3f} +- {half:.3f}"


def run_with(*files: str) -> Callable[[str], Path]:
    """Returns a type for argparse: a run directory that has one of these files."""

    def find(text):
        run = Path(text).resolve()
        if not any((run / name).exists() for name in files):
            raise ArgumentTypeError(f"{run} is not a run directory: it has no {' or '.join(files)}")
        return run

    return find


class Lines:
    """Yields whole lines of a JSON Lines file as they appear. If a resumed run has cut the file, it is read from its
    beginning again."""

    def __init__(self, path: Path):
        self.path = path
        self.position = 0

    def new(self) -> Iterator[dict]:
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            if os.fstat(file.fileno()).st_size < self.position:
                self.position = 0
            file.seek(self.position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self.position += len(line)
                yield json.loads(line)


def as_messages(text: str | list) -> list[dict]:
    """Messages as they are. Whatever else an environment put in their place becomes text."""
    parts = text if isinstance(text, list) else [text]
    return [part if isinstance(part, dict) else {"role": "text", "content": str(part)} for part in parts]


def text_of(message: dict) -> str:
    """The content and the tool calls of a message as text, whatever they are."""
    text = message.get("content") or ""
    if not isinstance(text, str):
        text = json.dumps(text, default=str)
    for call in message.get("tool_calls") or ():
        text += f" -> {json.dumps(dict(call).get('function'), default=str)}"
    return text


def printable(text: str) -> str:
    """Text with everything unprintable escaped: what a model wrote must not control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def summary(line: dict) -> str:
    """The reward of a rollout and its parts, or the error that lost it."""
    if line["reward"] is None:
        return line["error"]
    parts = [f"{name} {value:.3g}" for name, value in line["metrics"].items()]
    return f"reward {line['reward']:.3f} ({', '.join(parts)})"


def group_key(line: dict) -> tuple:
    return line["step"], line["env"], line["slot"], line["attempt"]


# --- the command ------------------------------------------------------------------------------------------------------


def chosen(args: Namespace) -> Iterator[dict]:
    """The lines of rollouts.jsonl, or of eval_rollouts.jsonl, that were asked for. With --max-reward, a rollout must
    have a reward."""
    for line in Lines(args.run / ("eval_rollouts.jsonl" if args.evals else "rollouts.jsonl")).new():
        reward = line["reward"]
        if args.step is not None and line["step"] != args.step:
            continue
        if args.max_reward is not None and (reward is None or reward > args.max_reward):
            continue
        yield line


def group_table(lines: Iterator[dict], num: int) -> str:
    """A line for each of the last `num` groups."""
    table = deque(maxlen=num)
    for (step, env, _, _), group in groupby(lines, key=group_key):
        group = list(group)
        rewards = [r["reward"] for r in group if r["reward"] is not None]
        mean = f"{np.mean(rewards):.3f}" if rewards else "-"
        shown = " ".join("lost" if r["reward"] is None else f"{r['reward']:.3g}" for r in group)
        version = min(r["version"] for r in group)
        row = f"{step:5} {group[0]['example']:7} {version:7} {mean:>6} {group[0]['dropped'] or '-':8} {env:16} {shown}"
        table.append(row)
    head = f"{'step':>5} {'example':>7} {'version':>7} {'mean':>6} {'dropped':8} {'environment':16} rewards"
    return "\n".join([head, *table, ""])


def as_text(line: dict, most: int = 0) -> str:
    """A rollout with its heading. most: how many characters of a message are shown, without its middle; 0: all."""
    text = (
        f"=== step {line['step']}, {line['env']}, example {line['example']}, rollout {line['member']}: {summary(line)}"
    )
    text += ", cut off" if line["truncated"] else ""
    text += f", dropped: {line['dropped']}" if line["dropped"] else ""
    for message in as_messages(line["prompt"]) + as_messages(line["completion"]):
        content = text_of(message)
        if most and len(content) > most:
            content = f"{content[: most // 2]} [...] {content[-most // 2 :]}"
        text += f"\n[{message['role']}] {printable(content)}"
    return f"{text}\n[expected answer] {printable(str(line['answer']))}\n"


def main(argv: list[str]):
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("run", type=run_with("rollouts.jsonl"))
    parser.add_argument("--step", type=int)
    parser.add_argument("--max-reward", type=float)
    parser.add_argument("--n", type=int, default=10, help="rollouts, or groups, to show: 10")
    parser.add_argument("--groups", action="store_true")
    parser.add_argument("--evals", action="store_true")
    args = parser.parse_args(argv)
    if args.groups:
        text = group_table(chosen(args), args.n)
    else:
        text = "\n".join(map(as_text, reversed(deque(chosen(args), maxlen=args.n))))
    pydoc.pager(text or "no such rollout")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `head` closes the pipe when it has seen enough
    main(sys.argv[1:])
