"""Several replays one after the other in one process group, since torchrun takes longer to start than they do.

torchrun ranks.py RUNS.json      [[argument of trainer.py, ...], ...]"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

import trainer
from configs import load_config


def replays(runs):
    """Each as trainer.py does it, but that the process group outlives them."""
    start, end = trainer.start_distributed, dist.destroy_process_group
    trainer.start_distributed, dist.destroy_process_group = lambda cfg: None, lambda: None
    try:
        for argv in runs:
            trainer.main([str(word) for word in argv])
    finally:
        trainer.start_distributed, dist.destroy_process_group = start, end


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text())
    trainer.start_distributed(load_config(runs[0][0]))
    replays(runs)
    dist.destroy_process_group()
