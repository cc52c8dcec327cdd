"""Process groups, and torch.compile under FSDP2."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def start_distributed(cfg):
    """Joins torchrun's ranks, or is the only rank without it. Ranks wait for one another twice as long as run.watchdog
    waits for all of them, so that the watchdog fires first."""
    limit = timedelta(seconds=2 * (cfg.run.watchdog + cfg.inference.startup_timeout))
    # Not by RANK alone, which schedulers set as well.
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(0 if alone else int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=limit, **alone)


def make_process_group(store, rank, spec):
    """A process group apart from the default one, which FSDP and vLLM use. NCCL's watchdog kills the process when its
    limit has passed, so that is twice ours: our waits for HTTP and for the store end first, and are reported."""
    limit = timedelta(seconds=spec["timeout_s"])
    group = dist.ProcessGroup(store, rank, spec["size"])
    if spec["backend"] == "gloo":
        backend = dist.ProcessGroupGloo(store, rank, spec["size"], limit)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    else:
        backend = dist.ProcessGroupNCCL(store, rank, spec["size"], 2 * limit)
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    return group


def compiled(forward):
    """The compiled forward of a block. FSDP2 hands a block views of its inputs in the first pass and none when it is
    recomputed. Dynamo would compile two graphs, which save different tensors, so here it sees views both times."""
    run = torch.compile(forward, dynamic=True)

    def with_view(hidden_BWD, *args, **kwargs):
        return run(hidden_BWD.view_as(hidden_BWD), *args, **kwargs)

    return with_view
