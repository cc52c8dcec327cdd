"""python tools/watch.py outputs/run [--once] [--tracker NAME]: follows a run, live or done, and says how it goes.

It reads metrics.jsonl, rollouts.jsonl, eval.jsonl and batches/, and the run does not need it; launch.sh starts it. On
stdout, of a live run what is new, of one that is done all of it:
    run:        what will happen, and where the files go
    check:      what the rollouts of the first batch say of the task
    rollout     one of every show_every steps
    eval:       how much an evaluation gained on the first one, with 95 % intervals
    warning:    what someone should change, and how; once, until it is over
    time:       at the end, where the time went
    result:     at the end, what was learned, and how to serve and evaluate it
and a progress bar on a terminal. In the run directory: watch.jsonl (KL by age in versions; of several environments,
numbers of each), curves.png after each evaluation, and what a tracker makes. It ends when the run is done, or with
SIGTERM."""

import argparse
import json
import os
import re
import shlex
import signal
import statistics
import sys
import time
import tomllib
import traceback
import urllib.request
from collections import Counter, deque
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tools.show import Lines, as_messages, eval_statistics, printable, run_with, said, with_interval

WINDOW = 10  # steps that warnings look at
LIMIT = 0.15  # of the time: what takes more than this and is no training has a remedy
SAME_KL = 0.05  # nats between two engines with the same weights, which agree far better
STALE_KL = 0.1  # nats between versions
LOST = 0.05  # of the rollouts: if more are lost to errors, the others say little of the task

# --- following files --------------------------------------------------------------------------------------------------


class Batches:
    """The lines of rollouts.jsonl, step by step."""

    def __init__(self, run):
        self.run, self.lines, self.open = run, Lines(run / "rollouts.jsonl"), []

    def new(self, is_last):
        """Yields step, lines of each batch that is there as a whole: the next one has begun, or its file is there,
        which comes after its last line, so that one more look finds them all."""
        whole = -1
        while True:
            for line in self.lines.new():
                if self.open and line["step"] != self.open[0]["step"]:
                    yield self.open[0]["step"], self.open
                    self.open = []
                self.open.append(line)
            if not self.open:
                return
            step = self.open[0]["step"]
            if step == whole:
                yield step, self.open
                self.open = []
                return
            if not (is_last or (self.run / "batches" / f"step_{step:06d}.safetensors").exists()):
                return
            whole = step


# --- numbers that the run does not write ------------------------------------------------------------------------------


def kl_by_age(run, step):
    """KL(sampler || policy) as k3, in nats, and the number of loss tokens, by the samples' age in versions."""
    from safetensors import safe_open

    batch, own = (run / "batches" / f"{name}_{step:06d}.safetensors" for name in ("step", "logp"))
    if not (batch.exists() and own.exists()):  # a replay's batches are elsewhere
        return {}
    with safe_open(batch, "numpy") as f:
        mask, old_logp, lens = (f.get_tensor(name) for name in ("mask", "old_logp", "lens"))
        samples = json.loads(f.metadata()["samples"])
    with safe_open(own, "numpy") as f:
        log_r = (f.get_tensor("logp") - old_logp)[mask].astype(np.float64)
    age = np.repeat([sample.get("age", 0) for sample in samples], lens)[mask]
    kl = np.exp(log_r) - 1 - log_r
    numbers = {}
    for a in sorted(set(age.tolist())):
        numbers |= {f"policy/kl_age{a}": float(kl[age == a].mean()), f"policy/tokens_age{a}": int((age == a).sum())}
    return numbers


def by_environment(lines):
    """Of a batch's rollouts, where several environments are mixed: env/<name>/ and what metrics.jsonl has of all."""
    numbers, names = {}, sorted({line["env"] for line in lines})
    for name in names if len(names) > 1 else ():
        mine = [line for line in lines if line["env"] == name]
        values = {
            "reward/mean": [line["reward"] for line in mine if line["reward"] is not None],
            "rollout/truncated": [line["truncated"] for line in mine],
            "rollout/turns": [line["num_turns"] for line in mine],
        }
        for function in {function for line in mine for function in line["metrics"]}:
            values[f"reward/{function}"] = [line["metrics"][function] for line in mine if function in line["metrics"]]
        found = {key: float(np.mean(x)) for key, x in values.items() if x}
        if rewards := values["reward/mean"]:
            found["reward/std"] = float(np.std(rewards))
            found |= {f"reward/p{q}": float(np.percentile(rewards, q)) for q in (10, 50, 90)}
        found |= {"rollout/num": len(mine), "rollout/errors": sum(bool(line["error"]) for line in mine)}
        found |= dict.fromkeys(("group/kept", "group/flat", "group/failed", "group/long", "group/empty"), 0)
        for why in {line["group"]: line["dropped"] or "kept" for line in mine}.values():
            kind = f"group/{why.split()[0].rstrip(':')}"
            found[kind] = found.get(kind, 0) + 1
        numbers |= {f"env/{name}/{key}": value for key, value in found.items()}
    return numbers


# --- what it means ----------------------------------------------------------------------------------------------------


def say(text):
    print(("\033[K" if sys.stdout.isatty() else "") + text, flush=True)  # over what is left of the progress bar


def tell(is_ok, what, remedy=""):
    say(f"check: {'PASS' if is_ok else 'FAIL'} {what}" + (f"; {remedy}" if remedy and not is_ok else ""))
    return is_ok


def percent(share):
    return f"{100 * share:.0f} %"


def judge(name, groups):
    """Can anything be learned from these rollouts? groups: the rollouts of each row, as dicts with reward, truncated,
    error. Tells, and returns whether all is well."""
    rollouts = [r for group in groups for r in group if r["reward"] is not None or r["error"]]
    if not rollouts:
        return tell(False, f"{name}: every prompt is too long", "raise max_seq_len, or orchestrator.max_prompt_len")
    rewards = [[r["reward"] for r in group if r["reward"] is not None] for group in groups]
    scored = [x for group in rewards for x in group]
    lost = Counter(r["error"] for r in rollouts if r["reward"] is None)
    causes = f"{lost.total()} of {len(rollouts)} rollouts were lost{', mostly' * (len(lost) > 1)}: "
    causes += "".join(cause for cause, _ in lost.most_common(1))
    if lost.total() > LOST * len(rollouts):
        return tell(False, f"{name}: {causes}", "what is lost teaches nothing")
    mean, low, high = sum(scored) / len(scored), min(scored), max(scored)
    if 0 <= low and high <= 1:
        solved = mean
    else:  # another scale: how many reach the highest; where all are equal, one of 1 or more counts as solved
        solved = scored.count(high) / len(scored) if low < high else float(high >= 1)
    about = f"reward {mean:.3f} ({low:.3g} to {high:.3g}) of {len(scored)} rollouts{f', {causes}' if lost else ''}"
    if solved <= 0:
        remedy = "take easier rows (env.args), a stronger model, a finer reward, or demonstrations first"
        is_ok = tell(False, f"{name}: too hard: nothing is solved, {about}", remedy)
    elif solved >= 0.8:
        remedy = 'take harder rows (env.args), or orchestrator.order = "orders:Difficulty" and retire_after'
        is_ok = tell(False, f"{name}: too easy: {percent(solved)} is solved (limit 80 %), {about}", remedy)
    else:
        is_ok = tell(True, f"{name}: neither too hard nor too easy: {about}")
    varied = sum(len(set(group)) > 1 for group in rewards)
    remedy = "raise orchestrator.rollouts_per_example or sampling.temperature, or make the reward finer"
    if varied > len(groups) / 10:
        is_ok &= tell(True, f"{name}: rewards differ within {varied} of {len(groups)} groups")
    else:
        is_ok &= tell(False, f"{name}: all rewards are equal in {len(groups) - varied} of {len(groups)} groups", remedy)
    cut = sum(r["truncated"] for r in rollouts) / len(rollouts)
    remedy = "raise orchestrator.sampling.max_tokens or max_seq_len, or reward brevity"
    return is_ok & tell(cut <= 0.5, f"{name}: {percent(cut)} of the rollouts are cut off (limit 50 %)", remedy)


def warnings(lines):
    """Of the last lines of metrics.jsonl, with what is added here -> {kind: what is wrong, and which key to turn}."""

    def mean(key):
        values = [line[key] for line in lines if line.get(key) is not None]
        return sum(values) / len(values) if values else 0.0

    def middle(key):
        """Of half of the steps at least: a single step says little, and one of them may be far off."""
        values = [line[key] for line in lines if line.get(key) is not None]
        return statistics.median(values) if 2 * len(values) >= len(lines) else None

    found, groups = {}, sum(mean(f"group/{name}") for name in ("kept", "flat", "failed", "long", "empty"))
    if groups and (mean("group/flat") > 0.8 * groups or mean("reward/std") < 1e-3):
        found["flat"] = (
            f"reward variance vanishes: {mean('group/flat'):.0f} of {groups:.0f} groups are flat, reward "
            f"{mean('reward/mean'):.3f} +- {mean('reward/std'):.3f}; harder rows where they are solved "
            '(orchestrator.order = "orders:Difficulty", retire_after), easier ones, a finer reward or demonstrations '
            "where they are not; larger groups, more temperature"
        )
    if (share := mean("rollout/truncated")) > 0.5:
        found["truncated"] = (
            f"{percent(share)} of the rollouts are cut off: raise orchestrator.sampling.max_tokens or max_seq_len, "
            "reward brevity, or set orchestrator.mask_truncated_completions"
        )
    if (share := mean("rollout/errors") / max(mean("rollout/num"), 1)) > LOST:
        kinds = sorted(key[6:] for key in set().union(*lines) if key.startswith("error/"))
        found["lost"] = (
            f"{percent(share)} of the rollouts are lost to errors ({', '.join(kinds)}): see error in rollouts.jsonl"
        )
    ages = sorted(int(key[13:]) for key in set().union(*lines) if key.startswith("policy/kl_age"))
    ages = [age for age in ages if middle(f"policy/kl_age{age}") is not None]
    same, old = (middle(f"policy/kl_age{age}") for age in (ages[0], ages[-1])) if ages else (0.0, 0.0)
    kl = middle("policy/kl_sampler") or 0.0
    if ages and ages[0] == 0 and same > SAME_KL:
        found["engines"] = (
            f"KL(sampler || policy) is {same:.2f} nats on rollouts of the very same weights: the engines disagree; "
            "look at sync/dlogp_mean and trainer.dtype"
        )
    elif len(ages) > 1 and old > max(3 * same, STALE_KL):
        found["stale"] = (
            f"KL(sampler || policy) grows with age: {same:.1e} nats at {ages[0]}, {old:.1e} at {ages[-1]} versions; "
            "lower orchestrator.max_staleness or trainer.learning_rate"
        )
    elif kl > STALE_KL:
        found["stale"] = (
            f"KL(sampler || policy) is {kl:.2f} nats; lower orchestrator.max_staleness or trainer.learning_rate"
        )
    wait = mean("time/wait_batch_s") / max(mean("time/step_s"), 1e-9)
    if wait > 0.5:
        found["starved"] = (
            f"the trainer is starved: it waits {percent(wait)} of the time for rollouts; raise inference.gpus, "
            "orchestrator.max_concurrent or max_staleness, or oversampling_factor where groups are flat"
        )
    return found


def server_pages(urls):
    """The text of each server's /metrics, "" where there is none."""
    pages, opener = [], urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for url in urls:
        try:
            pages.append(opener.open(f"{url}/metrics", timeout=5).read().decode())
        except OSError:
            pages.append("")
    return pages


def counted(name, pages):
    """The sum of one of vLLM's counters over servers and engines."""
    rows = [row.split() for page in pages for row in page.splitlines() if row.startswith(f"vllm:{name}")]
    return sum(float(row[-1]) for row in rows if row[0].partition("{")[0] == f"vllm:{name}")


def where_time_goes(seconds, before=(), after=()):
    """seconds: {part of a step: total}. before, after: server_pages() -> one sentence, with what to change."""
    whole = seconds["step"]
    train, wait, sync, saved = (seconds[part] / whole for part in ("train", "wait_batch", "sync", "checkpoint"))

    def since(name):
        return counted(name, after) - counted(name, before)

    latency, asked = since("e2e_request_latency_seconds_sum"), since("prefix_cache_queries_total")
    queue, servers = since("request_queue_time_seconds_sum") / latency if latency else 0.0, ""
    if latency:
        servers = f"; servers: {since('generation_tokens_total') / whole:,.0f} tokens/s, {percent(queue)} of a "
        servers += f"request's time in their queue, {since('num_preemptions_total'):.0f} preemptions, "
        servers += f"{percent(since('prefix_cache_hits_total') / max(asked, 1))} of prompts cached"
    if wait > LIMIT:
        remedy = "raise inference.gpus" if queue > LIMIT else "raise orchestrator.max_concurrent or max_staleness"
    elif saved > LIMIT:
        remedy = "raise checkpoint.every"
    elif sync > LIMIT:
        remedy = "make steps longer (orchestrator.batch_size, trainer.updates_per_batch), or train adapters in 16 bits"
    else:
        remedy = "training is the limit: raise trainer.gpus or micro_batch_size, or do without gradient_checkpointing"
    shares = f"trained {percent(train)}, waited {percent(wait)} for rollouts, synced {percent(sync)} and saved "
    return f"time: the trainer {shares}{percent(saved)} of {whole:.0f} s{servers}; {remedy}"


def show_rollout(step, lines, cut=600):
    """One rollout of a batch, another one each time, with the parts of its reward."""
    scored = [line for line in lines if line["reward"] is not None]
    if not scored:
        return
    line = scored[step * 7919 % len(scored)]
    group = [x["reward"] for x in scored if (x["env"], x["group"]) == (line["env"], line["group"])]
    parts = ", ".join(f"{name} {value:.3g}" for name, value in line["metrics"].items())
    out = f"rollout of step {step}: {line['env']}, row {line['example']}: reward {line['reward']:.3f} ({parts}), "
    above = line["reward"] - sum(group) / len(group)
    out += f"not trained on: {line['dropped']}" if line["dropped"] else f"{above:+.3f} against its group"
    for message in as_messages(line["prompt"]) + as_messages(line["completion"]):
        text, who = said(message), f"{message.get('role', 'text')}:"
        text = text if len(text) <= cut else f"{text[: cut // 2]} [...] {text[-cut // 2 :]}"
        for row in printable(text).split("\n"):
            out += f"\nrollout | {who:>10} {row}"
            who = ""
    say(out)


# --- a run ------------------------------------------------------------------------------------------------------------


class Watch:
    """What has been seen of a run, and told of it. Of a live run no step is told of that was there before."""

    def __init__(self, run, tracker, is_live):
        file = run / "config.toml"  # a replay may have none
        self.run, self.config = run, tomllib.loads(file.read_text()) if file.exists() else {}
        self.metrics, self.evals, self.batches = Lines(run / "metrics.jsonl"), Lines(run / "eval.jsonl"), Batches(run)
        self.mixes, own = {}, Lines(run / "watch.jsonl")  # by_environment of the steps that have no line yet
        self.added = {line["step"]: line for line in own.new()}
        if own.path.exists() and own.path.stat().st_size > own.at:  # half a line of one that was killed
            os.truncate(own.path, own.at)
        before = [line["step"] for line in Lines(run / "metrics.jsonl").new()] if is_live else []
        self.first = max(before, default=-1) + 1
        self.first_rows = {}  # of each environment's first evaluation
        self.window, self.told, self.seconds = deque(maxlen=WINDOW), {}, Counter()
        self.since, self.is_drawn, self.drawn = None, True, time.monotonic()  # the first step told of; curves.png
        given = os.environ.get("ROLEMODEL_OVERRIDES", "")  # launch.sh's: the servers of this run
        self.urls = re.findall(r'http[^"]+', given) if is_live else []
        self.before = server_pages(self.urls)  # of servers that run for longer than this
        self.gains = {}  # {environment: what its last evaluation gained on its first, in words}
        self.tracker_name, self.tracker = tracker or self.config.get("tracker", ""), None

    def look(self, is_last):
        """What is new."""
        steps = list(self.metrics.new())  # before the batches, which are there when a step's line is
        for step, lines in self.batches.new(is_last):
            if step >= self.first:
                self.tell_of_batch(step, lines)
            self.track("add_rollouts", step, lines)
            self.mixes[step] = by_environment(lines)
        for line in steps:
            self.add_step(line)
        for line in self.evals.new():
            self.is_drawn = False
            self.add_evaluation(line)
        if not (self.is_drawn or is_last) and time.monotonic() - self.drawn > 20:  # it costs a second
            self.draw()
        self.track("save")

    def tell_of_batch(self, step, lines):
        if step == 0:
            for name in sorted({line["env"] for line in lines}):
                groups = {}
                for line in lines:
                    if line["env"] == name:
                        groups.setdefault(line["group"], []).append(line)
                judge(name, list(groups.values()))
        every = self.config.get("show_every", 0)
        if every and step % every == 0:
            show_rollout(step, lines)

    def add_step(self, line):
        step, mix = line["step"], self.mixes.pop(line["step"], {})
        if self.added.get(step, {}).get("time") != line["time"]:  # new, or trained again
            self.added[step] = {"step": step, "time": line["time"]} | kl_by_age(self.run, step) | mix
            with open(self.run / "watch.jsonl", "a") as f:
                f.write(json.dumps(self.added[step]) + "\n")
        line = self.added[step] | line
        self.track("add_metrics", line)
        is_replay = line.get("time/sync_s") is None  # it leaves the sampler behind, and waits for nobody
        if step < self.first or is_replay:
            return
        for part in ("step", "train", "wait_batch", "sync", "checkpoint"):
            self.seconds[part] += line.get(f"time/{part}_s") or 0
        self.window.append(line)
        if (step + 1) % WINDOW == 0 and len(self.window) == WINDOW:
            found = warnings(self.window)
            for kind in found.keys() - self.told.keys():
                say(f"warning: steps {step + 1 - WINDOW} to {step}: {found[kind]}")
            self.told = found
        self.show_bar(line)

    def add_evaluation(self, line):
        """With what its rows say of it: the reward's interval, and the gain over the first evaluation."""
        first = self.first_rows.setdefault(line["env"], line["rows"])
        found = eval_statistics(line["rows"], first)
        self.track("add_evaluation", line | found)
        if line["step"] == 0:
            return
        reward, gain = with_interval(line["reward/mean"], found["ci95"]), ""
        if found["gain"] is not None:  # of two rows or more
            gain = f", gain {found['gain']:+.3f} +- {found['gain_ci95']:.3f}"
        self.gains[line["env"]] = f"{line['env']}: reward {line['reward/mean']:.3f}{gain} in {line['step']} steps"
        if line["step"] > self.first and gain:
            say(f"eval {line['step']} | {line['env']}: reward {reward}{gain}")

    def show_bar(self, line):
        num = self.config.get("max_steps")
        self.since = self.since or line
        if not (num and sys.stderr.isatty() and line["step"] > self.since["step"]):
            return
        done = line["step"] + 1
        left = (num - done) * (line["time"] - self.since["time"]) / (line["step"] - self.since["step"])
        bar = "#" * (done * 30 // num)
        sys.stderr.write(f"\r[{bar:<30}] {done}/{num}  {left // 60:.0f}:{left % 60:02.0f} left \r")
        sys.stderr.flush()

    def draw(self):
        from tools.plot import plot

        self.is_drawn, self.drawn = True, time.monotonic()
        try:
            plot([self.run], self.run / "curves.png")
        except Exception:  # a picture is not worth the rest
            traceback.print_exc()

    def track(self, method, *args):
        """A tracker is other people's code, and maybe a network: the rest goes on without it."""
        if not self.tracker_name:
            return
        try:
            if self.tracker is None:
                from tools.track import Tracker

                self.tracker = Tracker(self.tracker_name, self.run, self.config)
            getattr(self.tracker, method)(*args)
        except Exception as e:
            traceback.print_exc()
            later = f"python tools/watch.py {shlex.quote(str(self.run))} --once --tracker {self.tracker_name}"
            say(f"warning: the tracker failed ({type(e).__name__}: {e}), see the log; later: {later}")
            self.tracker_name = ""

    def begin(self):
        c = self.config
        if "orchestrator" not in c:  # a replay
            return
        o, e = c["orchestrator"], c["eval"]
        evaluated = f"evaluated every {e['every']} steps" if e["every"] else "never evaluated"
        size = f"{o['batch_size']} rollouts each, in groups of {o['rollouts_per_example']}"
        done = (int(path.name[5:]) for path in self.run.glob("checkpoints/step_??????"))  # others are trained again
        steps = f"steps {max(done, default=0)} to {c['max_steps'] - 1}"
        say(f"run: {c['model']}, {steps}, {size}, {evaluated}; files in {self.run}")

    def end(self):
        if self.seconds["step"]:
            say(where_time_goes(self.seconds, self.before, server_pages(self.urls)))
        self.track("finish")
        self.draw()
        final = self.run / "final"
        if not (self.run / "done").exists() or not final.exists():
            return
        learned = "; ".join(self.gains.values()) or "no evaluation (eval.every)"
        serve = [str(final), "--generation-config", "vllm"]  # else it samples as generation_config.json says
        name, url = str(final), "http://127.0.0.1:8000/v1"
        if (about := final / "adapter_config.json").exists():
            rank = json.loads(about.read_text())["r"]
            rank = min(r for r in (1, 8, 16, 32, 64, 128, 256, 320, 512) if r >= rank)  # those that vLLM takes
            name, serve[0] = "final", self.config["model"]
            serve += ["--enable-lora", "--max-lora-rank", str(rank), "--lora-modules", f"final={final}"]
        evaluate = ["tools/evaluate.py", f"{self.run}/config.toml", "--eval", "--base-url", url, "--model", name]
        say(f"result: {learned}")
        say(f"result: vllm serve {shlex.join(serve)}")
        say(f"result: python {shlex.join(evaluate)}")


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=run_with("config.toml", "metrics.jsonl"))
    parser.add_argument("--once", action="store_true", help="all that is there, and no waiting for more")
    parser.add_argument("--tracker", choices=("wandb", "trackio", "tensorboard"), help="default: the configuration's")
    args = parser.parse_args(argv)
    stop = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT):  # the last is launch.sh's to a run that failed
        signal.signal(number, lambda *_: stop.append(True))
    is_live = not (args.once or (args.run / "done").exists())
    watch, is_last = Watch(args.run, args.tracker, is_live), False
    watch.begin()
    while not is_last:
        is_last = args.once or bool(stop) or (args.run / "done").exists()
        watch.look(is_last)
        time.sleep(0 if is_last else 1)
    watch.end()


if __name__ == "__main__":
    os.nice(10)  # the run comes first
    main(sys.argv[1:])
