"""Shows the rollouts of a run, newest first: python tools/show.py outputs/run [--color advantage|diff] [--step N] ...

On a terminal they go through a pager. --color shows only what was trained on and colors each sampled token: by its
advantage (green is reinforced, red is discouraged), or by how far the trainer's logp is above the sampler's. There are
three shades. For advantages the stronger ones begin at a third and two thirds of the largest in the batch, for
differences they begin at 0.001, 0.01 and 0.1 nats. Without colors (NO_COLOR, no terminal) a token is followed by [++]
or [-] instead. Tokens that were not sampled are dim. Steps count from 0, as in all files of a run.

--trace STEP ROW ROLLOUT lists the tokens of one rollout with their numbers, and says which function each number comes
from; --token N does so for one of them. tools/page.py shows the same in a browser."""

import argparse
import functools
import heapq
import itertools
import json
import math
import os
import pydoc
import shutil
import signal
import sys
import tomllib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SOURCES = {  # of a token's numbers; other fields are the environment's
    "id": "batches/step_N.safetensors, tokens",
    "turn": "orchestrator.extend_or_fork, the turn in which it came",
    "mask": "orchestrator.extend_or_fork, 1 if the policy said it",
    "old_logp": "orchestrator.sample, the sampler's log-probability",
    "logp": "trainer.train_step, the trainer's log-probability in its first pass (batches/logp_N.safetensors)",
    "ratio": "trainer.log_ratio, exp(logp - old_logp)",
    "kl": "trainer.k3, exp(x) - 1 - x of x = logp - old_logp; a metric (there x is at most 5), no part of the loss",
    "adv": "trainer.add_advantages",
    "clipped": "the loss",
    "push": "trainer.compute_loss, the weight of logp's gradient (above 0 it rises), before the mean over loss tokens",
    "ce": "the environment's add_fields, the weight of its imitation",
    "teacher": "configs.algorithms.distill.teach, the weight of the teacher's term",
    "teacher_logp": "configs.algorithms.distill.teach, the teacher's log-probability",
}
FIELD = "the environment's add_fields"
WEIGHTS = ("mask", "ce", "teacher")  # of a token in the terms of the loss

GREEN = (194, 120, 40)  # backgrounds among the 256 colors, from pale to strong
RED = (224, 210, 196)
DIM = "\x1b[2m"
PLAIN = "\x1b[0m"

# --- what other tools use as well -------------------------------------------------------------------------------------


def half_width(values):
    """Half the width of the 95 % interval of a mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return float(1.96 * np.std(values, ddof=1) / math.sqrt(len(values)))


def eval_statistics(rows, first=None):
    """Statistics over the rows of an evaluation. rows: the mean reward of each row, or None for a lost one, as in
    eval.jsonl; first: those of an earlier version.

    ci95 is half the width of the reward's interval. gain is the mean difference from `first`. It is paired by row,
    since rows differ from each other far more than versions do."""
    found = {"ci95": half_width([x for x in rows if x is not None])}
    if first:
        differences = [b - a for a, b in zip(first, rows) if None not in (a, b)]
        found["gain"] = float(np.mean(differences)) if len(differences) > 1 else None
        found["gain_ci95"] = half_width(differences)
    return found


def with_interval(value, half):
    return f"{value:.3f}" if half is None else f"{value:.3f} +- {half:.3f}"


def run_with(*files):
    """Returns a type for argparse: a run directory that has one of these files. For any other it exits with code 2."""

    def find(text):
        run = Path(text)
        if not any((run / name).exists() for name in files):
            print(f"{run} is no run directory: there is no {' or '.join(files)}", file=sys.stderr)
            sys.exit(2)
        return run

    return find


def is_replay(run):
    """Whether trainer.py --replay has made a run's directory."""
    return "-replay-" in run.name and not (run / "rollouts.jsonl").exists()  # the orchestrator's


def is_finished(run):
    """Whether a run has all of its steps. The launcher writes `done`; replays have none."""
    return (run / ("final" if is_replay(run) else "done")).exists()


def from_root(path):
    """A path as one types it in the repository's directory: relative if it lies below. The last part may be a link, as
    a virtual environment's interpreter is."""
    path = Path(path)
    path = path.parent.resolve() / path.name
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


class Lines:
    """The whole lines of a JSON Lines file as they appear. A resumed run cuts it, and it is then read from its
    beginning."""

    def __init__(self, path):
        self.path = path
        self.file = None  # its inode
        self.position = 0

    def new(self):
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self.file or status.st_size < self.position:
                self.file = status.st_ino
                self.position = 0
            file.seek(self.position)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                try:
                    found = json.loads(line)
                except ValueError as e:
                    raise ValueError(f"{self.path}: the line at byte {self.position} is damaged: {e}") from None
                self.position += len(line)
                yield found


def as_messages(text):
    """Messages as they are; a base model's texts as messages."""
    parts = text if isinstance(text, list) else [text]
    return [part if isinstance(part, dict) else {"role": "text", "content": str(part)} for part in parts]


def text_of(message):
    """The content and the tool calls of a message as text, whatever they are."""
    text = message.get("content") or ""
    if not isinstance(text, str):
        text = json.dumps(text, default=str)
    for call in message.get("tool_calls") or ():
        function = dict(call).get("function")
        text += f" -> {json.dumps(function, default=str)}"
    return text


def printable(text):
    """Text with everything unprintable escaped: what a model wrote must not control the terminal."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def summary(line):
    """The reward of a rollout and its parts, or the error by which it was lost."""
    if line["reward"] is None:
        return line["error"]
    parts = [f"{name} {value:.3g}" for name, value in line["metrics"].items()]
    return f"reward {line['reward']:.3f} ({', '.join(parts)})"


# --- a rollout and its tokens -----------------------------------------------------------------------------------------


def rollout_key(about):
    """What a line of rollouts.jsonl and the sequences of a batch file have in common."""
    return about.get("env"), about.get("group"), about.get("rollout")


def read_batch(run, step):
    """Returns {rollout_key: its training sequences} of a batch, or {} if it has not been written.

    Beside the fields of the file a sequence that is trained on has what trainer.py makes of it: adv, and after the step
    logp and, if they can be told, clipped and push. `sources` says what SOURCES does not know of them."""
    from safetensors.torch import load_file

    import trainer  # slow to import, and only needed for tokens
    from configs import load_config

    path = run / "batches" / f"step_{step:06d}.safetensors"
    own = run / "batches" / f"logp_{step:06d}.safetensors"
    if not path.exists():
        return {}
    t = load_config(run / "config.toml").trainer  # it also finds the module of the user's own advantage
    rollouts = {}
    batch = trainer.load_batch(path)
    for s in batch.sequences:
        s["sources"] = {}
        rollouts.setdefault(rollout_key(s), []).append(s)
    sequences = [s for s in batch.sequences if s["trainable"]]
    trainer.add_advantages(sequences, t)
    explain_advantages(sequences, t)
    if own.exists():
        logp_T = load_file(own)["logp"]
        for s in sequences:
            s["logp"] = logp_T[s["at"]]
        add_effects(sequences, batch.info, t)
    return rollouts


def explain_advantages(sequences, t):
    """Says of each sequence with a reward how its advantage came about."""
    rewarded = [s for s in sequences if s.get("reward") is not None]
    rewards = {}
    for s in rewarded:
        rewards.setdefault(s["baseline_key"], {})[s["rollout"]] = s["reward"]
    by_turn = t.gamma < 1 or any(s.get("turn_rewards") for s in rewarded)
    function = "configs.algorithms.turns.compute_advantages" if by_turn else "trainer.compute_advantages"
    sign = "- " if t.advantage == "mean" and not by_turn else f"({t.advantage}), "
    for s in rewarded:
        mean = np.mean(list(rewards[s["baseline_key"]].values()))
        s["sources"]["adv"] = f"{function}, reward {s['reward']:.8g} {sign}mean {mean:.8g} of the group"


def add_effects(sequences, info, t):
    """Adds the fields `clipped`, which tokens the loss clips, and `push`, where its gradient takes a token's logp: the
    loss is called on the saved log-probabilities. There are none if it needs what is not saved, as prox_logp, entropies
    and, for push, the reference's, and no `clipped` if the loss does not say what it clips."""
    import torch

    import trainer

    micro = trainer.collate(sequences, torch.device("cpu"))
    if t.importance or micro["old_logp_N"].isnan().any():
        return
    micro |= trainer.count_all(sequences, info)
    logp_N = micro["logp_N"].requires_grad_()
    try:
        terms, logs = trainer.compute_loss(micro, logp_N, None, t._replace(beta=0.0))
        sum(terms.values()).sum().backward()
    except Exception:  # the loss may be anyone's, and ask for what exists only during a step
        return
    effects = {}
    if "policy/clip_frac" in logs:
        effects["clipped"] = logs["policy/clip_frac"].float()
    if not t.beta:
        effects["push"] = -logp_N.grad * micro["num_mask"]
    loss = f"trainer.{t.loss}" if t.loss in trainer.LOSSES else t.loss
    for name, x_N in effects.items():
        x_T = torch.full((info["num_tokens"],), math.nan)
        x_T[micro["at_N"]] = x_N
        for s in sequences:
            s[name] = x_T[s["at"]]
    for s in sequences:
        s["sources"]["clipped"] = f"{loss}, called on the saved log-probabilities"


def token_columns(s):
    """Returns {name: a number per token} of a sequence. It is None where there is none: files have 0 or nan for tokens
    that the policy did not say, or that have no weight in the loss."""
    import torch

    import trainer

    table = {"id": s["tokens"]}
    table |= {name: x for name, x in s.items() if torch.is_tensor(x) and x.dim() == 1}  # not the experts of a token
    del table["tokens"], table["at"]
    is_said = s["mask"] != 0
    known = {"adv": is_said, "clipped": is_said, "teacher_logp": s["teacher"] != 0}
    known |= {"old_logp": is_said | (s["old_logp"] != 0), "logp": trainer.has_weight(s), "push": trainer.has_weight(s)}
    if "logp" in s:
        log_r = trainer.log_ratio({"old_logp_N": s["old_logp"]}, s["logp"])
        table |= {"ratio": log_r.exp(), "kl": trainer.k3(log_r)}
        known |= dict.fromkeys(("ratio", "kl"), known["logp"] & known["old_logp"])
    columns = dict.fromkeys(SOURCES, [None] * len(is_said))  # in this order
    for name, values in table.items():
        is_known = known.get(name, is_said | True) & values.isfinite()
        numbers = (values + 0).tolist()  # also of what is true or false
        columns[name] = [x if there else None for x, there in zip(numbers, is_known.tolist())]
    return columns


def fate(columns, at, is_trained):
    """What the step does with a token, in words."""
    push = columns["push"][at]
    if not is_trained:
        return "not trained" if columns["mask"][at] else "not the policy's, not trained"
    if push is None:
        return "trained; its gradient is not saved"
    if push == 0:
        return "clipped: no gradient" if columns["clipped"][at] else "no gradient"
    return "pushed up" if push > 0 else "pushed down"


def trace(run, line, tokenizer, token):
    """The tokens of a rollout, or the one with this number. For those that are trained: what is known of each, and
    where that comes from."""
    rollouts = read_batch(run, line["step"])
    key = rollout_key(line)
    rewards = {}  # {agent: of each rollout of the group}
    for other, sequences in sorted(rollouts.items()):
        if other[:2] == key[:2]:
            for agent, reward in {s["agent"]: s["reward"] for s in sequences}.items():
                if reward is not None:
                    rewards.setdefault(agent, []).append(f"{reward:.4g}")
    group = "; ".join(" ".join([agent, *found]).strip() for agent, found in rewards.items())
    tokens = ""
    numbers = itertools.count()
    for s in rollouts.get(key, ()):
        columns = token_columns(s)
        for at, number in zip(range(len(s["tokens"])), numbers):
            if token in (None, number):
                is_trained = s["trainable"] and any(columns[name][at] for name in WEIGHTS)
                word = json.dumps(tokenizer.decode([columns["id"][at]]))
                tokens += f"token {number}: {word}, {fate(columns, at, is_trained)}\n"
                if is_trained or token == number:
                    tokens += explained(s, columns, at)
    if not tokens:
        return "no such token is saved: batch files have the groups that were trained on\n"
    return f"{run}, sampled by version {line['version']}, rewards of its group: {group}\n{tokens}"


def explained(s, columns, at):
    """A line for each number of a token. Those of a term of the loss in which it has no weight are left out."""
    text = ""
    for name, values in columns.items():
        term = "teacher" if name == "teacher_logp" else name
        if term in ("ce", "teacher") and not columns[term][at]:
            continue
        value = "not saved" if values[at] is None else f"{values[at]:.8g}"
        text += f"    {name} {value}: {s['sources'].get(name, SOURCES.get(name, FIELD))}\n"
    return text


# --- colors -----------------------------------------------------------------------------------------------------------


def paint(text, value, limits, is_plain):
    level = sum(abs(value) > limit for limit in limits)
    if not level:
        return text
    if is_plain:
        mark = "+" if value > 0 else "-"
        return f"{text}[{mark * level}]"
    shades = GREEN if value > 0 else RED
    return f"\x1b[30;48;5;{shades[level - 1]}m{text}{PLAIN}"


@functools.cache
def values_of(run, step, color):
    """Returns the sequences of a batch by rollout, each trained one with a field `value`, and the limits of the three
    shades. Returns None if the batch has not been written or trained on yet."""
    rollouts = read_batch(run, step)
    sequences = [s for s in itertools.chain(*rollouts.values()) if s["trainable"]]
    if not sequences or (color == "diff" and "logp" not in sequences[0]):
        return None
    for s in sequences:
        s["value"] = s["logp"] - s["old_logp"] if color == "diff" else s["adv"]
    if color == "diff":
        return rollouts, [1e-3, 1e-2, 1e-1]
    largest = max(s["adv"].abs().max().item() for s in sequences)
    return rollouts, [0, largest / 3, largest * 2 / 3]


def colored(run, line, tokenizer, color, is_plain):
    """The training sequences of a rollout as text with colored tokens, or "" if it was not trained on."""
    found = values_of(run, line["step"], color)
    if not found:
        return ""
    rollouts, limits = found
    text = ""
    for s in rollouts.get(rollout_key(line), ()):
        if not s["trainable"]:
            continue
        words = [printable(tokenizer.decode([token])) for token in s["tokens"].tolist()]
        for word, is_sampled, value in zip(words, s["mask"], s["value"]):
            if is_sampled:
                text += paint(word, value, limits, is_plain)
            else:
                text += word if is_plain else f"{DIM}{word}{PLAIN}"
        text += "\n"
    return text


# --- the command ------------------------------------------------------------------------------------------------------


def chosen(run, args):
    """Yields the lines of rollouts.jsonl, or of eval_rollouts.jsonl, that were asked for. With bounds a rollout must
    have a reward, with colors it must have been trained on."""
    wanted = {"step": args.step, "env": args.env, "example": args.row, "rollout": args.rollout}
    wanted = {key: value for key, value in wanted.items() if value is not None}
    low = -math.inf if args.min_reward is None else args.min_reward
    high = math.inf if args.max_reward is None else args.max_reward
    has_bounds = args.min_reward is not None or args.max_reward is not None
    name = "eval_rollouts.jsonl" if args.evals else "rollouts.jsonl"
    for line in Lines(run / name).new():
        reward = line["reward"]
        is_wanted = all(line[key] == value for key, value in wanted.items())
        is_trained = reward is not None and not line["dropped"]
        is_within = not has_bounds or (reward is not None and low <= reward <= high)
        if is_wanted and is_within and (is_trained or not args.color):
            yield line


def as_text(line, tokens):
    """A rollout with its heading: its colored tokens if there are any, otherwise its messages."""
    text = f"=== step {line['step']}, {line['env']}, row {line['example']}, rollout {line['rollout']}: {summary(line)}"
    text += ", cut off" if line["truncated"] else ""
    text += f", dropped: {line['dropped']}" if line["dropped"] else ""
    if tokens:
        return f"{text}\n{tokens}\n"
    for message in as_messages(line["prompt"]) + as_messages(line["completion"]):
        text += f"\n[{message['role']}] {printable(text_of(message))}"
    return f"{text}\n[expected answer] {printable(str(line['answer']))}\n\n"


def open_in_tui(run, lines):
    """Opens vf-tui of verifiers with these rollouts, a run of its own for each environment and step. Never returns."""
    program = shutil.which("vf-tui") or shutil.which("vf-tui", path=Path(sys.executable).parent)
    if not program:
        sys.exit("vf-tui is not installed: pip install verifiers")
    records = {}
    for line in lines:
        folder = run / "tui" / "evals" / f"{line['env']}--{run.name}" / f"step_{line['step']:06d}"
        records.setdefault(folder, []).append(json.dumps(line | {"example_id": line["example"], "task": line["env"]}))
    shutil.rmtree(run / "tui", ignore_errors=True)
    for folder, found in records.items():
        folder.mkdir(parents=True)
        (folder / "results.jsonl").write_text("\n".join(found) + "\n")
        (folder / "metadata.json").write_text(json.dumps({"num_examples": len(found), "rollouts_per_example": 1}))
    os.environ["VF_OUTPUTS_DIR"] = str(run / "tui")
    os.execv(program, [program])


def load_tokenizer(run):
    import transformers

    model = os.path.expanduser(tomllib.loads((run / "config.toml").read_text())["model"])
    local = ROOT / model  # launch.sh runs in ROOT, so a relative path begins there
    return transformers.AutoTokenizer.from_pretrained(local if local.is_dir() else model)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=run_with("rollouts.jsonl"))
    parser.add_argument("--step", type=int)
    parser.add_argument("--env")
    parser.add_argument("--row", type=int)
    parser.add_argument("--min-reward", type=float)
    parser.add_argument("--max-reward", type=float)
    parser.add_argument("--sort", choices=("step", "reward"), default="step", help="largest first")
    parser.add_argument("--n", type=int, default=10)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--color", choices=("advantage", "diff"))
    kinds.add_argument("--trace", type=int, nargs=3, metavar=("STEP", "ROW", "ROLLOUT"), help="the tokens of a rollout")
    parser.add_argument(
        "--tui", action="store_true", help="opens vf-tui, if it is installed, with all that were asked for"
    )
    kinds.add_argument("--evals", action="store_true", help="those of evaluations, of which no tokens are kept")
    parser.add_argument("--token", type=int, metavar="N", help="with --trace: this token alone")
    parser.set_defaults(rollout=None)  # --trace names one
    args = parser.parse_args(argv)
    if args.trace:
        args.step, args.row, args.rollout = args.trace
    if args.tui:
        open_in_tui(args.run, chosen(args.run, args))
    is_terminal = sys.stdout.isatty()
    is_plain = bool(os.environ.get("NO_COLOR")) or not is_terminal
    tokenizer = load_tokenizer(args.run) if args.color or args.trace else None

    def height(line):
        return -math.inf if line[args.sort] is None else line[args.sort]

    text = ""
    for line in heapq.nlargest(args.n, chosen(args.run, args), key=height):
        tokens = ""
        if args.color:
            tokens = colored(args.run, line, tokenizer, args.color, is_plain)
        elif args.trace:
            tokens = trace(args.run, line, tokenizer, args.token)
        text += as_text(line, tokens)
    text = text or "no such rollout"
    os.environ.setdefault("LESS", "-R")
    if is_terminal:
        pydoc.pager(text)
    else:
        print(text)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `head` closes the pipe when it has seen enough
    main(sys.argv[1:])
