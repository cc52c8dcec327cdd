"""Process groups, and what FSDP2 asks for: master weights of 16-bit training, torch.compile."""

import math
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


def compiled(forward, config):
    """The compiled forward of a block. FSDP2 hands a block views of its inputs in the first pass and none when it is
    recomputed. Dynamo would compile two graphs, which save different tensors, so here it sees views both times.

    dynamic=True would make even the size of a head a symbol, where flex_attention needs a number. With None only what
    has changed becomes one, after a second compilation."""
    run = torch.compile(forward, dynamic=None if config._attn_implementation == "flex_attention" else True)

    def with_view(hidden_BWD, *args, **kwargs):
        return run(hidden_BWD.view_as(hidden_BWD), *args, **kwargs)

    return with_view


@torch.no_grad()
def dither(parameters, dtype: torch.dtype):
    """Puts each master weight anywhere in the cell of numbers that round, in `dtype`, to what it rounds to.

    A file's weights lie on the grid of their dtype. From there, updates smaller than half its step would change nothing
    that is computed or sampled: in RL 99% of all elements stay as they are in a step (2605.07330). From a uniform place
    in the cell, as many weights cross its border as the updates' size demands, so that the rounded weights move by the
    updates' mean, as with stochastic rounding (2010.06192), but the sampler's are the trainer's."""
    for p in parameters:
        master = p.to_local()
        rounded = master.to(dtype)
        # The cell ends halfway to each neighbor. Next to a power of two these are not equally far: below it the grid is
        # finer. What lies just between two numbers rounds to the even one, which may be the neighbor.
        neighbors = [rounded.nextafter(torch.full_like(rounded, x)).float() for x in (-math.inf, math.inf)]
        low, high = ((rounded.float() + neighbor) / 2 for neighbor in neighbors)
        moved = low + torch.rand_like(master) * (high - low)
        master.copy_(torch.where(moved.to(dtype) == rounded, moved, rounded.float()))
