"""What tests run on several ranks, since torchrun takes longer to start than most of it takes.

torchrun ranks.py RUNS.json                [[argument of trainer.py, ...], ...]: replays in one process group
torchrun ranks.py --memory config.toml     prints for each rank how much memory a sync takes, in MiB
torchrun ranks.py --syncs config.toml      makes 200 versions live, each after a random sleep"""

import contextlib
import json
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from bench.common import reset_peak, resident

import trainer
from configs import load_config
from configs.runtime.directory import run_directory


def replays(runs):
    """Does what trainer.py does for each of them, except that the process group outlives them."""
    start, end = trainer.start_distributed, dist.destroy_process_group
    trainer.start_distributed, dist.destroy_process_group = lambda cfg: None, lambda: None
    try:
        for argv in runs:
            trainer.main([str(word) for word in argv])
    finally:
        trainer.start_distributed, dist.destroy_process_group = start, end


def sender_to_nobody():
    """A WeightSender whose group is rank 0 alone."""
    sender = SimpleNamespace(urls=[], device=torch.device("cpu"), store=dist.HashStore())
    sender.process_group = trainer.make_process_group(sender.store, 0, {"backend": "gloo", "size": 1, "timeout_s": 60})
    sender.post_all = lambda path: []
    sender.workers_do = lambda method, specs: contextlib.nullcontext()
    return sender


def measure_memory(cfg):
    """Peaks of a sync beyond what is there before it: as it is, and if it kept all groups."""
    policy = trainer.build_policy(cfg)
    sender = sender_to_nobody() if dist.get_rank() == 0 else None
    sizes = []
    for group in trainer.stream_weights(policy.model, torch.float32, False):
        sizes.append(sum(tensor.nbytes for tensor in group.values()) / 2**20)
    found = {"largest_mib": max(sizes), "all_mib": sum(sizes)}
    honest = trainer.stream_weights
    for name, stream in {"streamed_mib": honest, "kept_mib": lambda *given: keep_all(honest(*given))}.items():
        trainer.stream_weights = stream
        reset_peak()
        before = resident()
        trainer.send_weights(sender, policy, 0, cfg)
        found[name] = resident(peak=True) - before
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, found)
    if sender:
        print(json.dumps(every), flush=True)


def keep_all(groups):
    kept = [dict(group) for group in groups]
    yield from map(dict, kept)


def sync_often(cfg):
    run_dir = run_directory(cfg)
    policy = trainer.build_policy(cfg)
    sender = None
    if dist.get_rank() == 0:
        sender = trainer.WeightSender(cfg, run_dir, policy.device)
        sender.connect()
    draw = random.Random(dist.get_rank())
    for version in range(200):
        time.sleep(draw.uniform(0, 0.03))
        trainer.sync_weights(sender, policy, version, cfg)


if __name__ == "__main__":
    modes = {"--memory": measure_memory, "--syncs": sync_often}
    if sys.argv[1] in modes:
        cfg = load_config(sys.argv[2])
        trainer.start_distributed(cfg)
        modes[sys.argv[1]](cfg)
    else:
        runs = json.loads(Path(sys.argv[1]).read_text())
        trainer.start_distributed(load_config(runs[0][0]))
        replays(runs)
    dist.destroy_process_group()
