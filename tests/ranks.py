"""torchrun ranks.py RUNS.json [[argument of tools/replay.py, ...], ...]: replays in one process group, since torchrun
takes longer to start than a tiny run takes."""

import json
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import trainer
from rolemodel.config import load_config
from tools import replay


def replays(runs, main=replay.main):
    """Does what tools/replay.py, or another main, does for each, except that the process group outlives them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["trainer"], "start_distributed", lambda cfg: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        for argv in runs:
            main([str(word) for word in argv])


if __name__ == "__main__":
    runs = json.loads(Path(sys.argv[1]).read_text())
    trainer.start_distributed(load_config(runs[0][0]))
    replays(runs)
    dist.destroy_process_group()
