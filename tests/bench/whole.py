"""The quickstart's task from the start of training to a mean reward of 0.90, by launch.sh and by TRL; and the start.

    python whole.py [--quick]

Same model, words in the same order, 16 x 16 rollouts a step, reward, constant learning rate 4e-4, clip 0.2, Adam."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import conftest
from common import ROOT, row, tell

LR, GOAL = "4e-4", 0.90


def ours(place, steps, seed):
    """-> mean rewards, the second at which each batch was trained, s per step, s to the first step."""
    overrides = [
        f"max_steps={steps}", f"seed={seed}", f"output_dir={place}", f"run_name=seed{seed}",
        "orchestrator.batch_size=256", "orchestrator.rollouts_per_example=16",
        "trainer.lr_scheduler_type=constant", f"trainer.learning_rate={LR}",
        "trainer.loss=grpo", "trainer.epsilon=0.2", "trainer.epsilon_high=0.2", "eval.every=0", "checkpoint.every=0",
        f"inference.port={conftest.free_port()}",
    ]  # fmt: skip
    env, began = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}, time.time()
    command = ["bash", str(ROOT / "launch.sh"), str(ROOT / "configs" / "reverse_text.toml"), *overrides]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = conftest.lines(place / f"seed{seed}" / "metrics.jsonl")
    zero = lines[0]["time"] - lines[0]["time/step_s"]  # training begins: the wait for the first batch counts
    times = [m["time"] for m in lines]
    step_s = statistics.median(b - a for a, b in zip(times[5:], times[6:]))
    return [m["reward/mean"] for m in lines], [t - zero for t in times], step_s, times[0] - began


def peer(model, steps, seed):
    command = [sys.executable, "trl_peer.py", "run", str(model), str(steps), str(seed), LR]
    env = os.environ | {"PYTHONPATH": f"{ROOT / '.cache' / 'peers'}:{os.environ['PYTHONPATH']}", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=ROOT / "tests" / "bench", env=env, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["reward"], found["at"], statistics.median(found["step_s"][5:])


def until(rewards, at):
    """Seconds until three batches in a row have a mean of GOAL; None where it is never reached."""
    for i in range(2, len(rewards)):
        if sum(rewards[i - 2 : i + 1]) / 3 >= GOAL:
            return at[i]
    return None


def main(quick):
    model, steps, rows, table = ROOT / ".cache" / "reverse_text", 12 if quick else 75, [], []
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        if not model.is_dir():
            command = [
                sys.executable,
                str(ROOT / "configs" / "tiny_model.py"),
                str(ROOT / "configs" / "reverse_text.toml"),
            ]
            subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        for seed in range(1 if quick else 3):
            rewards, at, step_s, start_s = ours(Path(place), steps, seed)
            table.append([step_s, until(rewards, at), start_s, *peer(model, steps, seed)])
    ours_s, theirs_s = (statistics.median(line[i] for line in table) for i in (0, 5))
    rows.append(
        row("start: bash launch.sh to the first optimizer step", statistics.median(t[2] for t in table), "s", "<= 45")
    )
    rows.append(row("whole run: a step, ours", ours_s, "s"))
    rows.append(row("whole run: a step, TRL", theirs_s, "s"))
    rows.append(row("whole run: TRL's step / ours", theirs_s / ours_s, "x", ">= 2"))
    for seed, (_, mine, _, rewards, at, _) in enumerate(table):
        theirs = until(rewards, at)
        for name, value in ((f"seed {seed}: to a reward of 0.90, ours", mine), (f"seed {seed}: TRL", theirs)):
            rows.append(row(name if value else f"{name} (not in {steps} steps)", value or float("nan"), "s"))
    both = [(until(t[3], t[4]), t[1]) for t in table if until(t[3], t[4]) and t[1]]
    if both:
        ratio = statistics.median(theirs / mine for theirs, mine in both)
        rows.append(row("to a reward of 0.90: TRL's time / ours", ratio, "x", ">= 2"))
    tell(rows)


if __name__ == "__main__":
    main("--quick" in sys.argv)
