"""Process groups, and what FSDP2 needs: blocks that are compiled for it, and master weights for 16-bit training."""

import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist


def start_distributed(cfg):
    """Joins torchrun's ranks; without torchrun, this process is the only rank. Ranks wait for each other twice as long
    as the watchdog (run.watchdog) waits for all of them, so that the watchdog fires first."""
    limit = timedelta(seconds=2 * (cfg.run.watchdog + cfg.inference.startup_timeout))
    # RANK alone does not show this, since schedulers set it as well.
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(0 if alone else int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo", timeout=limit, **alone)


def make_process_group(store, rank, spec):
    """A process group of its own, since the default one belongs to FSDP and to vLLM. NCCL's watchdog kills the process
    when the limit of a group has passed. So NCCL gets twice our limit: our own waits, for HTTP and for the store, end
    first and are reported."""
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
    """The compiled forward of a block. Dynamo must see views of the inputs every time: FSDP2 passes views to a block in
    the first forward pass, but none when the block is recomputed, and Dynamo would compile two graphs, which save
    different tensors.

    With dynamic=True, even the size of an attention head would become a symbol, but flex_attention needs a number. With
    None, only sizes that have changed become symbols, in a second compilation."""
    run = torch.compile(forward, dynamic=None if config._attn_implementation == "flex_attention" else True)

    def with_view(hidden_BWD, *args, **kwargs):
        return run(hidden_BWD.view_as(hidden_BWD), *args, **kwargs)

    return with_view


@torch.no_grad()
def dither(parameters, dtype: torch.dtype):
    """Moves each master weight to a random place in its cell, the interval of numbers that round to the same number in
    `dtype`.

    Weights that were loaded from a file lie on the grid of its dtype, in the middle of their cells. An update smaller
    than half a step of the grid would then change nothing that is computed or sampled: in RL, 99% of all elements do
    not change in a step (2605.07330). If the places in the cells are uniform, the share of weights that leave their
    cells is in proportion to the size of the updates. So the rounded weights move by the mean of the updates, as with
    stochastic rounding (2010.06192), except that here sampler and trainer have the same weights."""
    for p in parameters:
        master = p.to_local()
        rounded = master.to(dtype)
        # The cell ends halfway to each neighbor. Next to a power of two, the neighbors are not equally far: the grid is
        # finer below it. A number exactly halfway between two rounds to the even one, which may be the neighbor.
        neighbors = [rounded.nextafter(torch.full_like(rounded, x)).float() for x in (-math.inf, math.inf)]
        low, high = ((rounded.float() + neighbor) / 2 for neighbor in neighbors)
        moved = low + torch.rand_like(master) * (high - low)
        master.copy_(torch.where(moved.to(dtype) == rounded, moved, rounded.float()))
