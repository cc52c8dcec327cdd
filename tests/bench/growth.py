"""How a training step grows: ranks of one thread each over gloo, and the length of a sequence.

python growth.py [--quick]"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import config, make_batch, make_model, reset_peak, resident, rollouts, row, tell


def steps(place, lens, num_steps, *overrides):
    """Returns seconds per training step, and the MiB that they take at most beyond what was there before."""
    import torch

    import trainer

    torch.set_num_threads(1)
    place, own = Path(place), tempfile.mkdtemp(dir=place)  # each rank its files
    cfg = config(Path(own), place / "model", "trainer.micro_batch_size=16", *overrides)
    trainer.start_distributed(cfg)
    policy = trainer.build_policy(cfg)
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-4, fused=True)
    batch, small = (make_batch(Path(own), x, 102) for x in (lens, lens[: len(lens) // 8] or [(1, 7)]))
    found = []
    for i, data in enumerate([small] + [batch] * num_steps):
        if i == 1:
            reset_peak()
            before = resident()
        began = time.perf_counter()
        trainer.train_step(policy, optimizer, data, i, cfg)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:]), resident(peak=True) - before


def child(ranks, *args):
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port=0", "--standalone"]
    command = [sys.executable, *(launch if ranks > 1 else []), __file__, *map(str, args)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=env)
    return json.loads(next(x for x in reversed(done.stdout.splitlines()) if x.startswith(b"[")))


def main(quick):
    rows, rates = [], {1: [], 2: [], 4: []}
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place) / "model", "0.8M")
        per_rank, num, rounds = (32, 3, 1) if quick else (128, 5, 3)
        for _ in range(rounds):  # in turns: a noisy machine is noisy for all
            for ranks in rates:  # as much for every rank
                seconds, _ = child(ranks, "ranks", place, per_rank * ranks, num)
                rates[ranks].append(sum(map(sum, rollouts(per_rank * ranks))) / seconds)
        one, two, four = (statistics.median(x) for x in rates.values())
        rows.append(row("training on 1 rank of one thread", one, "tokens/s"))
        rows.append(row("on 2 ranks: tokens/s per rank, of 1 rank's", two / 2 / one, "x", ">= 0.9"))
        rows.append(row(f"on 4 ranks ({os.cpu_count()} cores): tokens/s, of 2 ranks'", four / two, "x", ">= 0.9"))
        memory = {
            n: child(1, "length", place, n)[1]
            for n in ([1024, 2048, 4096] if quick else [2**i * 1024 for i in range(6)])
        }
        for n, more in memory.items():
            rows.append(row(f"memory of a step on one sequence of {n:,} tokens", more, "MiB"))
        last = max(memory)
        rows.append(row(f"  {last:,} tokens / {last // 2:,}", memory[last] / memory[last // 2], "x", "<= 2.1"))
    tell(rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["ranks"]:
        found = steps(sys.argv[2], rollouts(int(sys.argv[3])), int(sys.argv[4]))
        if os.environ.get("RANK", "0") == "0":
            tell(found)
        os._exit(0)
    elif sys.argv[1:2] == ["length"]:
        n = int(sys.argv[3])
        tell(steps(sys.argv[2], [(1, n - 1)], 1, f"max_seq_len={n}", "trainer.gradient_checkpointing=true"))
    else:
        main("--quick" in sys.argv)
