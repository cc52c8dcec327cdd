"""Follows a run, live or done, and says how it goes: python tools/watch.py outputs/run [--once] [--tracker NAME]

It reads metrics.jsonl, rollouts.jsonl, eval.jsonl and batches/, and the run does not need it; the launcher starts it.
On stdout it reports what is new in a live run, and everything in one that is done:
    run:        what will happen, and where the files go
    check:      what the rollouts of the first batch say about the task
    rollout     one from every show_every steps
    eval:       how much an evaluation gained on the first one, with 95 % intervals
    warning:    what someone should change, and how; again only if its cause had disappeared in between
    time:       now and then how much is left, and at the end where the time went
    result:     at the end, what was learned, and how to serve and evaluate it
and a progress bar on a terminal. Into the run directory it writes watch.jsonl (percentiles of the reward, KL by
staleness, and the numbers of each environment of a mix), curves.png and page.html after each evaluation, and what a
tracker makes. It ends when the run is done, or on SIGTERM."""

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import traceback
from collections import Counter, deque
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from configs.runtime.directory import redacted
from configs.runtime.role import end_with_parent
from configs.serving.flags import as_flags
from tools.advice import WINDOW, judge, lost_in_evaluation, say, server_pages, warnings, where_time_goes
from tools.show import (
    ROOT,
    Lines,
    as_messages,
    eval_statistics,
    from_root,
    is_finished,
    is_replay,
    printable,
    run_with,
    summary,
    text_of,
    with_interval,
)

PAUSE = 30  # s between two lines that report the time left
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}  # as vLLM names them

# --- following files --------------------------------------------------------------------------------------------------


class Batches:
    """The lines of rollouts.jsonl, batch by batch."""

    def __init__(self, run):
        self.run = run
        self.lines = Lines(run / "rollouts.jsonl")
        self.open = []  # lines of the batch that is still being written

    def new(self, is_last):
        """Yields the step and the lines of each batch that is complete. It is if the next one has begun, or if its file
        exists: that comes after its last line, so one more look finds them all."""
        complete = -1
        while True:
            for line in self.lines.new():
                if self.open and line["step"] != self.open[0]["step"]:
                    yield self.open[0]["step"], self.open
                    self.open = []
                self.open.append(line)
            if not self.open:
                return
            step = self.open[0]["step"]
            if step == complete:
                yield step, self.open
                self.open = []
                return
            if not (is_last or (self.run / "batches" / f"step_{step:06d}.safetensors").exists()):
                return
            complete = step


# --- numbers that the run does not write ------------------------------------------------------------------------------


def kl_by_staleness(run, step):
    """KL(sampler || policy) as k3, in nats, and the number of loss tokens, by the staleness of their sequences."""
    from safetensors import safe_open

    batch = run / "batches" / f"step_{step:06d}.safetensors"
    own = run / "batches" / f"logp_{step:06d}.safetensors"
    if not (batch.exists() and own.exists()):  # a replay has its batches elsewhere
        return {}
    with safe_open(batch, "numpy") as file:
        mask_T = file.get_tensor("mask")
        old_logp_T = file.get_tensor("old_logp")
        lens = file.get_tensor("lens")
        metadata = file.metadata()
    with safe_open(own, "numpy") as file:
        logp_T = file.get_tensor("logp")
    # Files of the former version say samples and age.
    sequences = json.loads(metadata.get("sequences") or metadata["samples"])
    staleness = [s.get("staleness", s.get("age", 0)) for s in sequences]
    is_trained = [s.get("trainable", True) for s in sequences]
    mask_T = mask_T & np.repeat(is_trained, lens)
    staleness_N = np.repeat(staleness, lens)[mask_T]
    log_r_N = (logp_T - old_logp_T)[mask_T].astype(np.float64).clip(-20, 5)  # as trainer.distance_from_sampler
    kl_N = np.exp(log_r_N) - 1 - log_r_N
    numbers = {}
    for versions in sorted(set(staleness_N.tolist())):
        these = staleness_N == versions
        numbers[f"policy/kl_staleness{versions}"] = float(kl_N[these].mean())
        numbers[f"policy/tokens_staleness{versions}"] = int(these.sum())
    return numbers


def percentiles(lines):
    rewards = [line["reward"] for line in lines if line["reward"] is not None]
    if not rewards:
        return {}
    return {f"reward/p{q}": float(np.percentile(rewards, q)) for q in (10, 50, 90)}


def share_distinct(lines):
    """Different answers in a group over its size, on average; 1 / G means that all G rollouts say the same."""
    groups = {}
    for line in lines:
        answers = groups.setdefault((line["env"], line["group"]), set())
        answers.add(json.dumps(line["completion"], sort_keys=True))
    return sum(map(len, groups.values())) / len(lines)


def numbers_of_batch(lines):
    """What watch.jsonl has about a batch's rollouts. If it mixes environments, env/<name>/ has most of what
    metrics.jsonl has, for each of them."""
    numbers = percentiles(lines) | {"rollout/distinct": share_distinct(lines)}
    names = sorted({line["env"] for line in lines})
    if len(names) > 1:
        for name in names:
            found = numbers_of_environment([line for line in lines if line["env"] == name])
            numbers |= {f"env/{name}/{key}": value for key, value in found.items()}
    return numbers


def numbers_of_environment(lines):
    values = {
        "reward/mean": [line["reward"] for line in lines if line["reward"] is not None],
        "rollout/truncated": [line["truncated"] for line in lines],
        "rollout/turns": [line["num_turns"] for line in lines],
    }
    for line in lines:
        for function, value in line["metrics"].items():
            values.setdefault(f"reward/{function}", []).append(value)
    numbers = {key: float(np.mean(found)) for key, found in values.items() if found}
    if values["reward/mean"]:
        numbers["reward/std"] = float(np.std(values["reward/mean"]))
    numbers |= percentiles(lines) | {"rollout/distinct": share_distinct(lines)}
    numbers["rollout/num"] = len(lines)
    numbers["rollout/errors"] = sum(bool(line["error"]) for line in lines)
    numbers |= dict.fromkeys(("group/kept", "group/flat", "group/failed", "group/long", "group/empty"), 0)
    dropped = {line["group"]: line["dropped"] for line in lines}
    for why in dropped.values():
        word = re.split(r"\W", why)[0] or "kept"  # files of the former version say "flat at reward 1"
        numbers[f"group/{word}"] = numbers.get(f"group/{word}", 0) + 1
    return numbers


# --- what it prints ---------------------------------------------------------------------------------------------------


def show_rollout(step, lines, most=600):
    """Prints one rollout of a batch, a different one at each step, with the parts of its reward."""
    scored = [line for line in lines if line["reward"] is not None]
    if not scored:
        return
    line = scored[step * 7919 % len(scored)]
    same = [x for x in scored if x["env"] == line["env"] and x["group"] == line["group"]]
    group = [x["reward"] for x in same]
    advantage = line["reward"] - sum(group) / len(group)
    why = f"not trained on: {line['dropped']}" if line["dropped"] else f"{advantage:+.3f} against its group"
    text = f"rollout of step {step}: {line['env']}, row {line['example']}: {summary(line)}, {why}"
    for message in as_messages(line["prompt"]) + as_messages(line["completion"]):
        content = text_of(message)
        if len(content) > most:
            content = f"{content[: most // 2]} [...] {content[-most // 2 :]}"
        speaker = f"{message.get('role', 'text')}:"
        for row in printable(content).split("\n"):
            text += f"\nrollout | {speaker:>10} {row}"
            speaker = ""
    say(text)


def serving_flags(final, config):
    """The flags with which vLLM serves a run's final/ as the run's own servers served the policy, and the name of the
    model that requests must ask for."""
    trainer = config.get("trainer", {})
    options = {"model": from_root(final), "host": "127.0.0.1"}
    options["dtype"] = DTYPES.get(trainer.get("dtype"))
    options["max_model_len"] = config.get("max_seq_len")
    options["chat_template"] = config.get("chat_template")
    if trainer.get("head_dtype"):
        options["hf_overrides"] = {"head_dtype": "float32"}
    given = redacted(config.get("inference", {}).get("args", {}))
    options |= {key: value for key, value in given.items() if value != "REDACTED"}
    if options.get("tensor_parallel_size") == 1:  # as without it
        del options["tensor_parallel_size"]
    name = options["model"]
    adapter = final / "adapter_config.json"
    if adapter.exists():
        rank = json.loads(adapter.read_text())["r"]
        options["lora_modules"] = f"final={name}"
        options["model"] = os.path.expanduser(config["model"])
        options["enable_lora"] = True
        options["max_lora_rank"] = max(8, 1 << (rank - 1).bit_length())  # vLLM takes powers of two up to 512
        name = "final"
    return as_flags({key: value for key, value in options.items() if value not in (None, "")}), name


def commands(run, config):
    """Two lines for a shell in the repository's directory: one serves the result of a run, the other evaluates it."""
    python = from_root(sys.executable)
    flags, name = serving_flags(run / "final", config)
    serve = [python, "-m", "configs.serving.server", *flags]
    evaluate = [python, "tools/evaluate.py", from_root(run / "config.toml"), "--eval"]
    evaluate += ["--base-url", "http://127.0.0.1:8000/v1", "--model", name]
    return shlex.join(serve), shlex.join(evaluate)


def clock(seconds):
    """Seconds as minutes:seconds, or hours:minutes:seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


# --- a run ------------------------------------------------------------------------------------------------------------


class Watch:
    """What has been seen of a run and reported. Steps that a live run had done before are not reported again."""

    def __init__(self, run, tracker, is_live):
        self.run = run
        file = run / "config.toml"
        self.config = tomllib.loads(file.read_text()) if file.exists() else {}  # replays of former versions have none
        self.metrics = Lines(run / "metrics.jsonl")
        self.evals = Lines(run / "eval.jsonl")
        self.batches = Batches(run)
        self.numbers = {}  # {step: numbers_of_batch} until its line in metrics.jsonl comes
        self.added = self.read_own()  # {step: its line in watch.jsonl}
        before = [line["step"] for line in Lines(run / "metrics.jsonl").new()] if is_live else []
        self.first = max(before, default=-1) + 1
        self.first_rows = {}  # {environment: step and rows of its first evaluation}
        self.gains = {}  # {environment: what its last evaluation gained on its first, in words}
        self.window = deque(maxlen=WINDOW)
        self.warned = {}
        self.losing = set()  # environments whose last evaluation lost many rollouts
        self.seconds = Counter()
        self.is_live = is_live
        self.start = None  # the first step reported
        self.tenths = 0  # of the run, when the time left was last reported
        self.told = 0.0  # when that was
        self.is_drawn = True
        self.drawn = time.monotonic()  # when curves.png was
        self.began = time.monotonic()
        self.page = None  # the process that writes page.html
        overrides = os.environ.get("ROLEMODEL_OVERRIDES", "")  # the launcher's: the servers of this run
        self.urls = re.findall(r'http[^"]+', overrides) if is_live else []
        self.before = server_pages(self.urls)  # a server may have run before
        self.tracker_name = tracker or self.config.get("tracker", "")
        self.tracker = None

    def read_own(self):
        """The lines of watch.jsonl. The half line of a killed process is cut off."""
        own = Lines(self.run / "watch.jsonl")
        added = {line["step"]: line for line in own.new()}
        if own.path.exists() and own.path.stat().st_size > own.position:
            os.truncate(own.path, own.position)
        return added

    def look(self, is_last):
        """Takes in what is new."""
        steps = list(self.metrics.new())  # before the batches, which are complete once a step has its line
        for step, lines in self.batches.new(is_last):
            if step >= self.first:
                self.report_batch(step, lines)
            self.track("add_rollouts", step, lines)
            self.numbers[step] = numbers_of_batch(lines)
        for line in steps:
            self.add_step(line)
        for line in self.evals.new():
            self.is_drawn = False
            self.add_evaluation(line)
        if not (self.is_drawn or is_last) and time.monotonic() - self.drawn > 20:  # it takes a second
            self.draw()
            if self.has_time_for_page():
                self.write_page()
        self.track("save")

    def report_batch(self, step, lines):
        if step == 0:
            groups = {}
            for line in lines:
                mine = groups.setdefault(line["env"], {})
                mine.setdefault(line["group"], []).append(line)
            for name in sorted(groups):
                judge(name, list(groups[name].values()))
        every = self.config.get("show_every", 0)
        if every and step % every == 0:
            show_rollout(step, lines)

    def add_step(self, line):
        step = line["step"]
        numbers = self.numbers.pop(step, {})
        if self.added.get(step, {}).get("time") != line["time"]:  # new, or trained again
            known = self.added.get(step, {})  # rollouts.jsonl is not written again for a step that is trained again
            added = known | {"step": step, "time": line["time"]} | kl_by_staleness(self.run, step) | numbers
            self.added[step] = added
            with open(self.run / "watch.jsonl", "a") as file:
                file.write(json.dumps(added) + "\n")
        line = self.added[step] | line
        self.track("add_metrics", line)
        if step < self.first or is_replay(self.run):  # which moves away from the sampler, and waits for nobody
            return
        for part in ("step", "train", "wait_batch", "sync", "checkpoint"):
            self.seconds[part] += line.get(f"time/{part}_s") or 0
        self.window.append(line)
        if (step + 1) % WINDOW == 0 and len(self.window) == WINDOW:
            found = warnings(self.window)
            for kind in found.keys() - self.warned.keys():
                say(f"warning: steps {step + 1 - WINDOW} to {step}: {found[kind]}")
            self.warned = found
        self.report_progress(line)

    def add_evaluation(self, line):
        """Adds to an evaluation what its rows say: the reward's interval, and the gain over the first evaluation."""
        env = line["env"]
        step = line["step"]
        first_step, first_rows = self.first_rows.setdefault(env, (step, line["rows"]))
        found = eval_statistics(line["rows"], first_rows)
        self.track("add_evaluation", line | found)
        if step >= self.first:
            self.warn_of_lost(line)
        if step == first_step:
            return
        reward = line["reward/mean"]
        gain = ""
        if found["gain"] is not None:  # there are two rows or more
            gain = f", gain {found['gain']:+.3f} +- {found['gain_ci95']:.3f}"
        self.gains[env] = f"{env}: reward {reward:.3f}{gain} in {step - first_step} steps"
        if step > self.first and gain:
            say(f"eval {step} | {env}: reward {with_interval(reward, found['ci95'])}{gain}")

    def warn_of_lost(self, line):
        """Warns if an evaluation lost many rollouts, unless the environment's last one did as well."""
        what = f"evaluation {line['step']} of {line['env']}"
        num = len(line["rows"]) * line.get("k", 1)
        as_zero = line.get("reward/lost_as_0")
        text = lost_in_evaluation(what, line.get("errors", 0), num, line["reward/mean"], as_zero)
        if text and line["env"] not in self.losing:
            say(f"warning: {text}")
        self.losing.discard(line["env"])
        if text:
            self.losing.add(line["env"])

    def report_progress(self, line):
        """Shows a bar on a terminal, and reports the time left: at most at each tenth of the run and every PAUSE."""
        num = self.config.get("max_steps")
        self.start = self.start or line
        began = max(self.told, self.start["time"])
        steps = line["step"] - self.start["step"]
        done = line["step"] + 1
        if not (num and self.is_live and 0 < steps and done < num):
            return
        left = clock((num - done) * (line["time"] - self.start["time"]) / steps)
        if sys.stderr.isatty():
            bar = "#" * (done * 30 // num)
            sys.stderr.write(f"\r[{bar:<30}] {done}/{num}  {left} left \r")
            sys.stderr.flush()
        tenths = 10 * done // num
        if tenths > self.tenths and line["time"] - began >= PAUSE:
            say(f"time: {done} of {num} steps are done, {left} left")
            self.tenths = tenths
            self.told = line["time"]

    def draw(self):
        from tools.plot import plot

        self.is_drawn = True
        self.drawn = time.monotonic()
        try:
            plot([self.run], self.run / "curves.png")
        except Exception:  # a picture is not worth the rest
            traceback.print_exc()

    def has_time_for_page(self):
        """Whether none is being written, and those before took at most a twentieth of the time."""
        if self.page is None:
            return True
        is_done = self.page.poll() is not None
        return is_done and os.times().children_user < (time.monotonic() - self.began) / 20

    def write_page(self):
        """Has page.html written by a process of its own, since that takes torch and some seconds, for which the run
        shall not wait."""
        command = ["nice", "-n", "9", sys.executable, str(ROOT / "tools" / "page.py"), str(self.run)]
        self.page = subprocess.Popen(command, stdout=subprocess.DEVNULL, preexec_fn=end_with_parent)

    def write_last_page(self):
        """Writes page.html once more, if there was an evaluation, and waits for it. The page is not worth the rest,
        either: if it fails, that is said."""
        if not self.first_rows:
            return
        if self.page:
            self.page.wait()
        self.write_page()
        if self.page.wait():
            again = shlex.join([from_root(sys.executable), "tools/page.py", from_root(self.run)])
            say(f"warning: page.html lacks the last steps (exit={self.page.returncode}, see watch.log): {again}")

    def track(self, method, *args):
        """Calls the tracker, which is other people's code and perhaps a network. If it fails, the rest goes on."""
        if not self.tracker_name:
            return
        try:
            if self.tracker is None:
                from tools.track import Tracker

                self.tracker = Tracker(self.tracker_name, self.run, self.config)
            getattr(self.tracker, method)(*args)
        except Exception as e:
            traceback.print_exc()
            again = ["tools/watch.py", from_root(self.run), "--once", "--tracker", self.tracker_name]
            later = shlex.join([from_root(sys.executable), *again])
            say(f"warning: the tracker failed ({type(e).__name__}: {e}), see the log; to send it later: {later}")
            self.tracker_name = ""

    def begin(self):
        config = self.config
        if "orchestrator" not in config or is_replay(self.run):
            return
        every = config["eval"]["every"]
        evaluated = f"evaluated every {every} steps" if every else "never evaluated"
        o = config["orchestrator"]
        size = f"{o['batch_size']} rollouts each, in groups of {o['rollouts_per_example']}"
        # Steps after the last checkpoint are trained again.
        done = max((int(path.name[5:]) for path in self.run.glob("checkpoints/step_??????")), default=0)
        if not self.is_live and (self.run / "done").exists():
            done = int((self.run / "done").read_text())
        num = config["max_steps"]
        steps = f"steps {done} to {num - 1}" if done < num else f"all {num} steps are done"
        say(f"run: {config['model']}, {steps}, {size}, {evaluated}; files in {self.run}")

    def end(self):
        if self.seconds["step"]:
            say(where_time_goes(self.seconds, self.before, server_pages(self.urls)))
        self.track("finish")
        self.draw()
        if not (self.run / "done").exists() or not (self.run / "final").exists():
            return
        learned = "; ".join(self.gains.values()) or "no evaluation (eval.every)"
        say(f"result: {learned}")
        for command in commands(self.run, self.config):
            say(f"result: {command}")
        self.write_last_page()


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=run_with("config.toml", "metrics.jsonl"))
    parser.add_argument("--once", action="store_true", help="read what exists, and do not wait for more")
    parser.add_argument("--tracker", choices=("wandb", "trackio", "tensorboard"), help="default: the configuration's")
    args = parser.parse_args(argv)
    stop = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGABRT):  # the launcher aborts roles of a run that hangs
        signal.signal(number, lambda *_: stop.append(True))
    is_live = not (args.once or is_finished(args.run))
    watch = Watch(args.run, args.tracker, is_live)
    watch.begin()
    is_last = False
    while not is_last:
        is_last = args.once or bool(stop) or is_finished(args.run)
        watch.look(is_last)
        time.sleep(0 if is_last else 1)
    watch.end()


if __name__ == "__main__":
    os.nice(10)  # the run comes first
    main(sys.argv[1:])
