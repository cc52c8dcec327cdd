"""The trainer's peak memory on one rank, by torch's own allocator: a line of JSON, GiB by phase.

    python tests/nullgpu/memory.py config.toml [table.key=value ...]     # in rehearse.py's environment

Of several ranks only the first exists; the collectives of the others return at once."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import configs
import trainer
from tools.check import longest_batch


def take_peak():
    peak = torch.cuda.max_memory_reserved() / 2**30
    torch.cuda.reset_peak_memory_stats()
    return round(peak, 2)


def main(argv):
    os.environ["ROLEMODEL_RUN_ID"] = "memory"
    cfg = configs.arguments(__doc__, argv)
    torch.cuda.set_device(0)
    if cfg.trainer.gpus > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=cfg.trainer.gpus)
    else:
        trainer.start_distributed(cfg)
    policy = trainer.build_policy(cfg)
    optimizer = trainer.make_optimizer(policy, cfg.trainer)
    batch = longest_batch(cfg, policy.vocab)
    peaks = {"build": take_peak()}
    for _ in range(2):  # Adam's moments are there in the second
        trainer.train_step(policy, optimizer, batch, 0, cfg)
        peaks["step"] = take_peak()
    for block in trainer.stream_weights(policy.model, trainer.DTYPES[cfg.trainer.dtype], cfg.sends_adapters):
        block.clear()
    peaks["gather"] = take_peak()
    print(json.dumps(peaks))


if __name__ == "__main__":
    main(sys.argv[1:])
