"""trainer.beta above 0: beta times KL(policy || reference), a token mean, is added to whatever the loss is.

k3 estimates that KL's value without bias, but its gradient, which is what trains, is that of KL(reference || policy) at
the policy's tokens, and these are up to max_staleness versions old without a ratio (DeepSeek-V3.2, 2512.02556, weighs
them with one). Both matter little as long as the policy stays near.

The reference is the policy as it starts; LoRA's starts at B = 0, the base model. With trainer.ref_sync_steps it moves
toward the policy (TR-DPO, 2404.09656). policy.extra holds it, each rank its own part, so checkpoints keep it."""

import contextlib

import torch

from trainer import local


def remember(policy):
    """Called by build_policy: the reference is the policy before a checkpoint is loaded."""
    for name, p in policy.trained().items():
        policy.extra[f"ref/{name}"] = p.detach().clone()
    policy.extra["ref_steps"] = torch.tensor(0)


def swap(policy):
    """Exchanges trained and reference parameters in place: the policy module then computes the reference."""
    if policy.device.type == "cuda":  # with offload copies to the GPU may still read them
        torch.cuda.synchronize()
    for name, p in policy.trained().items():
        mine = local(p.data)
        other = local(policy.extra[f"ref/{name}"])
        kept = mine.clone()
        mine.copy_(other)
        other.copy_(kept)


@contextlib.contextmanager
@torch.no_grad()
def swapped_in(policy, t):
    """Within it the policy module computes the reference that is due at this step."""
    extra = policy.extra
    num_steps = int(extra["ref_steps"])
    if t.ref_sync_steps and num_steps and num_steps % t.ref_sync_steps == 0:
        for name, p in policy.trained().items():
            extra[f"ref/{name}"].lerp_(p.detach(), t.ref_sync_alpha)
    extra["ref_steps"] += 1
    swap(policy)
    yield
    swap(policy)
