"""The quickstart's task from the start of training to a mean reward of 0.90, by launch.sh and by TRL; and the start.

    python whole.py [--quick]

Same model, order of words, groups of 16, reward, constant learning rate 4e-4, clip 0.2, loss scale and Adam. Ours asks
a vLLM server, verifies every broadcast and replaces groups that teach nothing, so it uses more words; TRL samples with
Transformers and keeps such groups. Rewards are means over all rollouts, replaced or not. Beside it, the time of a step
of a random model of 25M parameters: 64 rollouts of up to 64 tokens. Its rate is next to nothing, so that its answers
stay as long on both sides: within ten steps it would learn to end them, in TRL's run after half the tokens."""

import functools
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import PATHS, ROOT, row, tell

toy = importlib.import_module("configs.models.toy")

LR, NO_LR, GOAL = "4e-4", "1e-9", 0.90


def ours(place, model, steps, seed, batch, tokens, rate=LR):
    """Mean rewards, the second at which each batch was trained, s per step, s to the first step, rollouts a step, and
    tokens a rollout."""
    overrides = [
        f"max_steps={steps}", f"seed={seed}", f"output_dir={place}", f"run_name=seed{seed}", f"model={model}",
        f"orchestrator.batch_size={batch}", "orchestrator.rollouts_per_example=16",
        f"orchestrator.sampling.max_tokens={tokens}", f"max_seq_len={48 + tokens}",
        "trainer.lr_scheduler_type=constant", f"trainer.learning_rate={rate}",
        "trainer.loss=grpo", "trainer.loss_args={epsilon_high=0.2}", "eval.every=0", "checkpoint.every=0",
    ]  # fmt: skip
    env, began = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}, time.time()
    command = ["bash", str(ROOT / "launch.sh"), str(ROOT / "configs" / "reverse_text.toml"), *overrides]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, env=env, stdout=said, stderr=said)
        file, lines = place / f"seed{seed}" / "metrics.jsonl", []
        while process.poll() is None:
            time.sleep(0.5)
            text = file.read_text() if file.exists() else ""
            lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
            if until([m["reward/mean"] for m in lines], [m["time"] for m in lines]):
                process.terminate()  # it is there; launch.sh ends what it started
                process.wait(60)
        said.seek(0)
        assert process.returncode in (0, 143), said.read().decode()[-3000:]
    zero = lines[0]["time"] - lines[0]["time/step_s"]  # training begins: the wait for the first batch counts
    times = [m["time"] for m in lines]
    step_s = statistics.median(b - a for a, b in zip(times[5:], times[6:]))
    num, length = (statistics.mean(m[key] for m in lines) for key in ("rollout/num", "rollout/tokens"))
    return [m["reward/mean"] for m in lines], [t - zero for t in times], step_s, times[0] - began, num, length


def peer(model, steps, seed, batch, tokens, rate=LR):
    """Mean rewards, their seconds, s per step, tokens a rollout."""
    numbers = (steps, seed, rate, GOAL, batch, tokens)
    command = [sys.executable, "trl_peer.py", "run", str(model), *map(str, numbers)]
    env = os.environ | {"PYTHONPATH": f"{ROOT / '.cache' / 'peers'}:{PATHS}", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, cwd=ROOT / "tests" / "bench", env=env, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return found["reward"], found["at"], statistics.median(found["step_s"][5:]), statistics.mean(found["tokens"])


def until(rewards, at):
    """Seconds until three batches in a row have a mean of GOAL; None if it is never reached."""
    for i in range(2, len(rewards)):
        if sum(rewards[i - 2 : i + 1]) / 3 >= GOAL:
            return at[i]
    return None


def main(quick):
    if shutil.which("nvidia-smi"):  # launch.sh would take the GPU, TRL is told not to
        return tell([])
    model, steps, rows, table = ROOT / ".cache" / "reverse_text", 12 if quick else 120, [], []
    with tempfile.TemporaryDirectory(dir="/tmp") as place:
        if not model.is_dir():
            command = [sys.executable, "configs/models/toy.py", "configs/reverse_text.toml"]
            subprocess.run(command, cwd=ROOT, check=True, stdout=sys.stderr)
        for seed in range(1 if quick else 3):
            rewards, at, step_s, start_s, num, _ = ours(Path(place), model, steps, seed, 256, 16)
            table.append([step_s, until(rewards, at), start_s, *peer(model, steps, seed, 256, 16)[:3], num])
        large, few = Path(place) / "large", 8 if quick else 16
        toy.make_model(large, toy.make_tokenizer(), layers=8, hidden=512)
        mine, theirs = (side(large, few, 9, 64, 64, NO_LR) for side in (functools.partial(ours, Path(place)), peer))
    ours_s, theirs_s = (statistics.median(line[i] for line in table) for i in (0, 5))
    about = "start: bash launch.sh to the first optimizer step"
    rows.append(row(about, statistics.median(t[2] for t in table), "s", "<= 45"))
    rows.append(row("whole run: a step, ours", ours_s, "s"))
    rows.append(row("whole run: a step, TRL", theirs_s, "s"))
    rows.append(row("whole run: TRL's step / ours", theirs_s / ours_s, "x", ">= 2"))
    for name, (_, _, large_s, *_, length) in (("ours", mine), ("TRL", theirs)):
        rows.append(row(f"25M parameters, 64 rollouts of {length:.1f} tokens: a step, {name}", large_s, "s"))
    rows.append(row("25M parameters: TRL's step / ours", theirs[2] / mine[2], "x", ">= 1.2"))
    ratios = []
    for seed, (_, mine, _, rewards, at, *_) in enumerate(table):
        theirs = until(rewards, at)
        for name, value in ((f"seed {seed}: to a reward of 0.90, ours", mine), (f"seed {seed}: TRL", theirs)):
            rows.append(row(name if value else f"{name} (not in {steps} steps)", value, "s"))
        ratios.append((theirs or at[-1]) / mine if mine else 0.0)  # if TRL does not get there: at least so much
    rows.append(row("to a reward of 0.90: TRL's time / ours, median", statistics.median(ratios), "x", ">= 2"))
    rows.append(row("whole run: rollouts a step, ours (TRL: 256)", statistics.mean(t[-1] for t in table), ""))
    tell(rows)


if __name__ == "__main__":
    main("--quick" in sys.argv)
