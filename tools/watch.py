"""Follows a run, live or done, and says how it is going: python tools/watch.py outputs/run [--once] [--tracker NAME]

launch.sh starts it next to a run; the run does not depend on it. It reads metrics.jsonl, rollouts.jsonl and
eval.jsonl, and prints what is new in a live run, or everything in one that is done:
    check:      whether anything can be learned from the rollouts of the first batch
    === step    a rollout, every show_every steps
    eval        the gain of an evaluation over the first one, with 95 % intervals
    warning:    what to change, and how; repeated only if its cause had disappeared in between
    time:       how much is left; in the end, where it went and what limits the run
    result:     what was learned, and how to serve and evaluate it
It draws curves.png after evaluations. The tracker gets metrics, evaluations and a table of rollouts from every tenth
batch. The numbers of batch n are filed under n + 1, the version that it made."""

import argparse
import math
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from datetime import timedelta
from itertools import chain, groupby
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rolemodel.config import load_config
from rolemodel.role import say
from rolemodel.serving.flags import as_flags, server_options
from tools import show

WINDOW = 10  # steps that a warning looks at
PAUSE = 30  # seconds, at least, between two pictures of a live run
FLAT = 0.8  # of the groups: if more have no gradient, most of the sampling is wasted
LOST = 0.05  # of the rollouts: if more are lost to errors, the others are not a fair sample of the task
CUT = 0.5  # of the rollouts: if more are cut off, rewards say little about what the policy can do
KL = 0.1  # nats per token: importance weights are then typically off by half

# --- can anything be learned? -----------------------------------------------------------------------------------------

REMEDY = "take easier examples or a finer reward if the mean reward is low, harder ones if it is high, or larger groups"
REMEDY += ' (orchestrator.order = "orders:Difficulty" prefers examples that are solved half of the time)'
LONGER = "raise orchestrator.sampling.max_tokens or max_seq_len, or reward brevity"


def report(is_ok: bool, what: str, remedy: str) -> bool:
    """Prints the outcome of a check, and returns it."""
    say(f"check: PASS {what}" if is_ok else f"check: FAIL {what}: {remedy}")
    return is_ok


def judge(name: str, groups: list[list[dict]]) -> bool:
    """Reports what groups of rollouts (lines of rollouts.jsonl) show about an environment. Returns whether all is
    well."""
    rollouts = sum(groups, [])
    num = len(rollouts)
    rewards = [r["reward"] for r in rollouts if r["reward"] is not None] or [math.nan]
    dropped = Counter(group[0]["dropped"] for group in groups if group[0]["dropped"])
    errors = Counter(r["error"] for r in rollouts if r["error"])
    num_cut = sum(r["truncated"] for r in rollouts)
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "none dropped"
    spread = f"mean reward {np.mean(rewards):.3f} ({min(rewards):.3g} to {max(rewards):.3g})"
    what = f"{name}: {len(groups)} groups, {reasons}; {spread}"
    remedy = REMEDY if dropped["flat"] >= dropped["long"] else "raise max_seq_len or orchestrator.max_prompt_len"
    has_signal = report(dropped["flat"] + dropped["long"] <= FLAT * len(groups), what, remedy)
    cause = f", mostly: {errors.most_common(1)[0][0]}" if errors else ""
    what = f"{name}: {errors.total()} of {num} rollouts were lost{cause}"
    is_fair = report(errors.total() <= LOST * num, what, "the rest is not a fair sample of the task")
    is_whole = report(num_cut <= CUT * num, f"{name}: {num_cut} of {num} rollouts were cut off", LONGER)
    return has_signal and is_fair and is_whole


# --- warnings ---------------------------------------------------------------------------------------------------------


def mean(lines: list[dict], key: str) -> float:
    return float(np.mean([line[key] for line in lines if key in line] or [0.0]))


def flat(lines: list[dict]) -> str:
    num = sum(mean(lines, f"group/{reason}") for reason in ("kept", "flat", "failed", "long"))
    share = mean(lines, "group/flat") / num
    text = f"{share:.0%} of the groups have no gradient, since their rewards are equal (the mean is "
    return f"{text}{mean(lines, 'reward/mean'):.3f}): {REMEDY}" if share > FLAT else ""


def truncated(lines: list[dict]) -> str:
    share = mean(lines, "rollout/truncated")
    return f"{share:.0%} of the rollouts are cut off: {LONGER}" if share > CUT else ""


def lost(lines: list[dict]) -> str:
    share = mean(lines, "rollout/errors") / mean(lines, "rollout/num")
    return f"{share:.0%} of the rollouts are lost: see `error` in rollouts.jsonl" if share > LOST else ""


def mismatch(lines: list[dict]) -> str:
    """The median, since a single step may be far off."""
    kl = float(np.median([line.get("policy/kl_sampler", 0.0) for line in lines]))
    remedy = "lower trainer.learning_rate or orchestrator.max_staleness, or see whether sync/dlogp_max has grown"
    return f"KL(sampler || policy) is {kl:.2f} nats per token: {remedy}" if kl > KL else ""


# What to change, for each part of a step that may take longest, or that the trainer may wait for longest.
BOUNDS = {
    "training": "training: raise trainer.gpus, or set trainer.compile; perf/mfu and trainer.profile_step tell more",
    "sync": "syncing: give the servers GPUs that the trainer does not use, or send adapters (use_lora with bf16)",
    "rollouts": "rollouts: raise inference.gpus, orchestrator.max_concurrent or max_staleness",
    "dropped groups": f"replacements of groups without a gradient: {REMEDY}, or stop here if the mean is high enough",
    "evaluation": "evaluations: raise eval.every, or lower eval.num_examples",
}


def waits(seconds: Counter) -> dict[str, float]:
    """What the trainer waited for, the longest first."""
    found = {part: seconds[part] for part in ("rollouts", "dropped groups", "evaluation")}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def starved(lines: list[dict]) -> str:
    seconds = sum((Counter(show.parts_of(line)) for line in lines), Counter())
    share = sum(waits(seconds).values()) / sum(line["time/step_s"] for line in lines)
    text = f"the trainer waits {share:.0%} of the time, mostly for {BOUNDS[next(iter(waits(seconds)))]}"
    return text if share > 0.5 else ""


# Each gets the last WINDOW lines of metrics.jsonl, and returns what is wrong and which setting to change, or "".
WARNINGS = (flat, truncated, lost, mismatch, starved)

# --- what it prints ---------------------------------------------------------------------------------------------------


def commands(run: Path, cfg) -> list[str]:
    """Two lines for a shell in the repository's directory: one serves final/ as the run's own servers served the
    policy, the other evaluates what the first serves."""
    python = os.path.relpath(sys.executable, show.ROOT)
    final = os.path.relpath(run / "final", show.ROOT)
    served = server_options(cfg, "final", True, False)
    keys = ["host", "dtype", "max_model_len", "chat_template", *cfg.inference.args]
    options = {"model": final, "served_model_name": "final"}
    options |= {key: served[key] for key in keys if key in served}
    if cfg.trainer.use_lora:
        options |= {"model": cfg.run.model, "served_model_name": "base", "lora_modules": f"final={final}"}
        options |= {"enable_lora": True, "max_lora_rank": max(8, 1 << (cfg.trainer.lora_rank - 1).bit_length())}
    evaluate = [python, "tools/evaluate.py", os.path.relpath(run / "config.toml", show.ROOT), "--eval"]
    evaluate += ["--base-url", "http://127.0.0.1:8000/v1", "--model", "final"]
    return [shlex.join([python, "-m", "rolemodel.serving.server", *as_flags(options)]), shlex.join(evaluate)]


# --- a run ------------------------------------------------------------------------------------------------------------


class Watch:
    """What has been seen of a run, and reported."""

    def __init__(self, run: Path, tracker: str, is_live: bool):
        self.run = run
        self.cfg = load_config(run / "config.toml")
        self.metrics = show.Lines(run / "metrics.jsonl")
        self.evals = show.Lines(run / "eval.jsonl")
        self.rollouts = show.Lines(run / "rollouts.jsonl")
        self.pending = []  # a line that was read, but belongs to a later batch
        # What a live run had done before it was resumed is not reported again, nor are steps after its checkpoint,
        # which it repeats.
        before = [line["step"] for line in show.Lines(run / "metrics.jsonl").new()] if is_live else []
        self.first = max(before, default=-1) + 1
        self.first_evals = {}  # {environment: the line of its first evaluation}
        self.results = {}  # {environment: its last evaluation, in words}
        self.window = deque(maxlen=WINDOW)
        self.warned = set()
        self.seconds = Counter()
        self.is_live = is_live
        self.is_drawn = True
        self.drawn = time.monotonic()  # when curves.png was drawn
        self.tracker = None
        self.tracker_name = tracker or self.cfg.run.tracker

    def attempt(self, what: str, work, *args) -> bool:
        """Calls something that must not end everything else if it fails: pictures and trackers, which are other
        people's code, and perhaps need a network. Returns whether it succeeded."""
        try:
            work(*args)
        except Exception as e:
            traceback.print_exc()
            say(f"warning: {what} failed: {type(e).__name__}: {e}")
            return False
        return True

    def track(self, method: str, *args):
        def call():
            from tools.tracker import Tracker

            self.tracker = self.tracker or Tracker(self.tracker_name, self.run, self.cfg)
            getattr(self.tracker, method)(*args)

        if self.tracker_name and not self.attempt("the tracker", call):
            self.tracker_name = ""  # going on would leave a gap; --once sends what is missing

    def rollouts_of(self, step: int) -> list[dict]:
        """The lines of a batch that has been trained on, so that all of them have been written."""
        found = []
        read, self.pending = self.pending, []
        for line in chain(read, self.rollouts.new()):
            if line["step"] > step:
                self.pending = [line]
                break
            if line["step"] == step:
                found.append(line)
        return found

    def look(self):
        """Takes in what is new."""
        for line in self.metrics.new():
            rollouts = self.rollouts_of(line["step"])
            self.track("add_step", line, rollouts)
            if line["step"] >= self.first and rollouts:  # a replay has none, and must move away from the sampler
                self.report_step(line, rollouts)
        for line in self.evals.new():
            self.is_drawn = False
            self.report_evaluation(line)
        if not self.is_drawn and time.monotonic() > self.drawn + PAUSE:
            self.attempt("curves.png", self.draw)

    def report_step(self, line: dict, rollouts: list[dict]):
        step = line["step"]
        if step == 0:
            groups = [list(group) for _, group in groupby(rollouts, show.group_key)]
            for env in dict.fromkeys(group[0]["env"] for group in groups):
                judge(env, [group for group in groups if group[0]["env"] == env])
        if self.cfg.run.show_every and step % self.cfg.run.show_every == 0:
            say(show.as_text(rollouts[step * 7919 % len(rollouts)], most=600))
        self.seconds.update(show.parts_of(line) | {"step": line["time/step_s"]})
        self.window.append(line)
        if (step + 1) % WINDOW == 0 and len(self.window) == WINDOW:
            for warning in WARNINGS:
                text = warning(self.window)
                self.warn(warning.__name__, text and f"steps {step + 1 - WINDOW} to {step}: {text}")
            if self.is_live:
                num = self.cfg.run.max_steps
                seconds = (line["time"] - self.window[0]["time"]) / (WINDOW - 1)  # of a step
                left = timedelta(seconds=round((num - step - 1) * seconds))
                say(f"time: {step + 1} of {num} steps are done, {left} left")

    def warn(self, name: str, text: str):
        """Prints a warning, unless it was printed the last time as well. text: "" if all is well."""
        if text and name not in self.warned:
            say(f"warning: {text}")
        self.warned.discard(name)
        if text:
            self.warned.add(name)

    def report_evaluation(self, line: dict):
        env = line["env"]
        first = self.first_evals.setdefault(env, line)
        statistics = show.eval_statistics(line["rows"], first["rows"])
        self.track("add_evaluation", line | statistics)
        steps = line["step"] - first["step"]
        lost = [[x is None for x in rows] for rows in (line["rows"], first["rows"])]  # other examples: no comparison
        before = f" ({first['pass@1']:.3f} before)" if steps and lost[0] == lost[1] and "pass@1" in first else ""
        success = f"{line['success']} {line['pass@1']:.3f}{before}, " if "pass@1" in line else ""
        self.results[env] = f"{env}: {success}"
        self.results[env] += f"reward {show.with_interval(line['reward/mean'], statistics['ci95'])}"
        if steps and statistics["gain"] is not None:  # there are two examples or more
            gain = show.with_interval(statistics["gain"], statistics["gain_ci95"])
            self.results[env] += f", gain {gain} in {steps} steps"
        if line["step"] < self.first:
            return
        say(f"eval {line['step']} | {self.results[env]}")
        num = len(line["rows"]) * self.cfg.eval.rollouts_per_example
        text = f"evaluation {line['step']} of {env} lost {line['errors']} of {num} rollouts, which count in no mean: "
        text += f"its reward would be {line['reward/lost_as_0']:.3f} if they counted as 0"
        self.warn(f"evaluation of {env}", text if line["errors"] > LOST * num else "")

    def draw(self):
        from tools import plot

        self.is_drawn = True
        self.drawn = time.monotonic()
        plot.draw([self.run]).savefig(self.run / "curves.png", dpi=90)

    def end(self):
        whole = self.seconds["step"]
        if whole:
            waited = waits(self.seconds)
            wait = sum(waited.values())
            parts = ", ".join(f"{seconds / whole:.0%} for {part}" for part, seconds in waited.items() if seconds)
            text = f"{self.seconds['training'] / whole:.0%} training, {self.seconds['sync'] / whole:.0%} syncing"
            say(f"time: {whole:.0f} s, {text}, {wait / whole:.0%} waiting{f' ({parts})' if parts else ''}")
            # Sampling goes on during training, unless max_staleness is 0. So if the trainer waits at all, sampling
            # takes longer.
            is_late = wait > 0.1 * whole and self.cfg.orchestrator.max_staleness
            among = waited if is_late else BOUNDS
            say(f"time: bound by {BOUNDS[max(among, key=lambda part: self.seconds[part])]}")
        if (self.run / "done").exists():
            say(f"result: {'; '.join(self.results.values()) or 'no evaluation (eval.every)'}")
            for command in commands(self.run, self.cfg):
                say(f"result: {command}")
        self.attempt("curves.png", self.draw)
        self.track("finish")  # last: it may wait for a network


def main(argv: list[str]):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=show.run_with("config.toml"))
    parser.add_argument("--once", action="store_true", help="read what exists, and do not wait for more")
    parser.add_argument("--tracker", choices=["wandb", "trackio", "tensorboard"], help="default: the configuration's")
    args = parser.parse_args(argv)
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT):  # the launcher aborts roles of a run that hangs
        signal.signal(number, lambda *_: stopped.set())
    done = args.run / "done"
    watch = Watch(args.run, args.tracker, is_live=not (args.once or done.exists()))
    is_last = False
    while not is_last:
        is_last = args.once or stopped.is_set() or done.exists()
        watch.look()
        stopped.wait(0 if is_last else 1)
    watch.end()


if __name__ == "__main__":
    os.nice(10)  # the run comes first
    main(sys.argv[1:])
