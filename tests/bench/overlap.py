"""Whole runs by launch.sh with a fake server, in which generation and training each take as long as they are told.

python overlap.py [--quick]"""

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from common import PATHS, ROOT, make_model, row, tell

conftest = importlib.import_module("conftest")  # beside tests; common has put them on the path

TOML = """
model = "{model}"
output_dir = "{place}"
max_seq_len = 64
env = {{ id = "bench_env" }}
[orchestrator.sampling]
max_tokens = 4
[trainer]
dtype = "fp32"
use_lora = false
gradient_checkpointing = false
loss = "bench_env:slow_loss"
micro_batch_size = 1000
[checkpoint]
every = 0
"""


def run(place, model, name, seconds, steps, fake, *overrides):
    """Returns the lines of metrics.jsonl. `seconds` for training, and for every request."""
    toml = place / f"{name}.toml"
    toml.write_text(TOML.format(model=model, place=place))
    env = os.environ | {"TRAIN_S": str(seconds), "FAKE": json.dumps({"total_s": seconds} | fake)}
    env |= {"SERVER": f"{sys.executable} {ROOT / 'tests' / 'fake_vllm.py'}"}
    env |= {"PYTHONPATH": PATHS, "PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    command = ["bash", str(ROOT / "launch.sh"), str(toml), f"max_steps={steps}"]
    done = subprocess.run([*command, *overrides], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return conftest.lines(place / name / "metrics.jsonl")


def main(quick):
    rows, seconds = [], 1.0 if quick else 2.0
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        model = make_model(place / "model", "0.8M")
        size = ("orchestrator.batch_size=16", "orchestrator.rollouts_per_example=4")
        found = run(place, model, "even", seconds, 6 if quick else 14, {}, *size, "orchestrator.max_staleness=1")[2:]
        step = statistics.median(m["time/step_s"] for m in found)
        wait = sum(m["time/wait_batch_s"] for m in found) / sum(m["time/step_s"] for m in found)
        about = f"generation and training {seconds:.0f} s each"
        rows.append(row(f"step / max(generate, train), {about}, max_staleness 1", step / seconds, "x", "<= 1.1"))
        rows.append(row("  share of it that the trainer waits for rollouts", 100 * wait, "%", "<= 10"))
        size = ("orchestrator.batch_size=50", "orchestrator.rollouts_per_example=2")
        steps, fake = (20, 34)[not quick], {"slow": [50, 9 * seconds]}
        found = run(place, model, "uneven", seconds, steps, fake, *size, "orchestrator.max_staleness=12")
        found = found[13:]  # the first 13 batches are all asked for at once, at the start
        step = statistics.mean(m["time/step_s"] for m in found)
        rows.append(row("  one rollout in 50 takes 10 times as long, max_staleness 12", step / seconds, "x", "<= 1.25"))
    tell(rows)


if __name__ == "__main__":
    main("--quick" in sys.argv)
