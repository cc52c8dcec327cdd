"""inference.sleep: on a GPU that both share, vLLM's memory is the trainer's for the length of a step."""

import contextlib

import torch
import torch.distributed as dist


@contextlib.contextmanager
def asleep(sender):
    """Collective; also a decorator, of trainer.train_step. sender: a WeightSender, None on the other ranks. The servers
    keep the requests under way. Where the body raises they stay asleep: the run is over."""
    if sender:
        sender.post_all("/sleep?level=1&mode=keep")
    dist.barrier()
    yield
    torch.cuda.empty_cache()
    dist.barrier()
    if sender:
        sender.post_all("/wake_up")
