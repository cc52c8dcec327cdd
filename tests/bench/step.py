"""Times trainer.train_step on ragged random rollouts, here and in another checkout, in turns, so that a busy machine
slows both alike: python tests/bench/step.py OTHER [layers hidden rollouts steps]"""

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE, Popen

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # a child's PYTHONPATH comes before it

import numpy as np

import trainer
from configs import load_config
from configs.models import toy
from orchestrator import Sequence, save_batch

TOML = """model = "{}"
env.id = "reverse_text"
trainer = {{ dtype = "fp32", use_lora = false, gradient_checkpointing = false }}
"""


def child(toml, batch):
    """Makes a step for each line on standard input, and prints its seconds."""
    cfg = load_config(toml)
    trainer.start_distributed(cfg)
    policy = trainer.build_policy(cfg)
    optimizer = trainer.make_optimizer(policy, cfg.trainer)
    batch = trainer.load_batch(Path(batch))
    for step, _ in enumerate(sys.stdin):
        began = time.perf_counter()
        trainer.train_step(policy, optimizer, batch, step, cfg)
        print(time.perf_counter() - began, flush=True)


def write_batch(path, num):
    """Prompts of 20 tokens; lengths of answers are log-normal, 27 in the middle, 256 at most."""
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(num):
        size = 20 + int(min(256, max(1, rng.lognormal(3.3, 0.9))))
        mask = np.arange(size) >= 20
        old_logp = np.where(mask, -4.6, np.nan)
        fields = (rng.integers(8, 102, size), mask, old_logp, np.zeros(size), rng.normal() * mask)
        sequences.append(Sequence(*fields, info={"temperature": 1.0}))
    save_batch(path, sequences, {"max_tokens": 256, "metrics": {}})


def main(folder, other, layers=8, hidden=512, rollouts=64, steps=5):
    toy.make_model(folder / "model", toy.make_tokenizer(), layers, hidden)
    (folder / "bench.toml").write_text(TOML.format(folder / "model"))
    write_batch(folder / "batch", rollouts)
    command = [sys.executable, __file__, "--child", folder / "bench.toml", folder / "batch"]
    children = {}
    for root in (ROOT, other.resolve()):
        env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": str(root)}
        children[root] = Popen(command, env=env, text=True, bufsize=1, stdin=PIPE, stdout=PIPE)
    seconds = {root: [] for root in children}
    for _ in range(steps + 1):
        for root, process in children.items():
            process.stdin.write("go\n")
            seconds[root].append(float(process.stdout.readline()))
    for root, found in seconds.items():
        print(f"{root}: {statistics.median(found[1:]):.3f} s a step")
    ratio = statistics.median(here / there for here, there in list(zip(*seconds.values()))[1:])
    print(f"here / there: {ratio:.3f} (median of pairs)")


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(*sys.argv[2:])
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name), Path(sys.argv[1]), *map(int, sys.argv[2:]))
