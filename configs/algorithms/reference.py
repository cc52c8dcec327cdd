"""trainer.beta above 0: beta times KL(policy || reference), a token mean, is added to whatever the loss is.

The reference is the policy as it starts; LoRA's starts at B = 0, the base model. With trainer.ref_sync_steps it moves
toward the policy (TR-DPO, 2404.09656). policy.extra holds it, in each rank's own parts, so checkpoints keep it."""

import torch

from trainer import local, trained


def remember(policy):
    """Of build_policy: the reference, before a checkpoint is loaded."""
    policy.extra |= {f"ref/{name}": p.detach().clone() for name, p in trained(policy).items()} | {"ref_steps": 0}


def swap(policy):
    """Exchanges trained and reference parameters in place: the policy module then computes the reference."""
    if policy.device.type == "cuda":  # with offload copies to the GPU may still read them
        torch.cuda.synchronize()
    for name, p in trained(policy).items():
        mine, other = local(p.data), local(policy.extra[f"ref/{name}"])
        kept = mine.clone()
        mine.copy_(other)
        other.copy_(kept)


@torch.no_grad()
def add_columns(policy, micros, cfg):
    """-> the micro-batches with ref_logp_N, without dropout, of the reference that is due at this step."""
    t, extra = cfg.trainer, policy.extra
    if t.ref_sync_steps and extra["ref_steps"] and extra["ref_steps"] % t.ref_sync_steps == 0:
        for name, p in trained(policy).items():
            extra[f"ref/{name}"].lerp_(p.detach(), t.ref_sync_alpha)
    extra["ref_steps"] += 1
    swap(policy)
    micros = [micro | {"ref_logp_N": policy.eval()(micro)[0]} for micro in micros]
    swap(policy.train())
    return micros


def penalized(loss):
    """The loss with the KL as k3 (joschu.net/blog/kl-approx.html): never negative, and unbiased."""

    def with_kl(micro, logp_N, entropy_N, t):
        loss_N, logs = loss(micro, logp_N, entropy_N, t)
        log_r_N = (micro["ref_logp_N"] - logp_N).clamp(-20, 20)  # before exp: inf
        kl_N = log_r_N.exp() - log_r_N - 1
        return loss_N + t.beta * kl_N, logs | {"policy/kl_ref": kl_N}

    return with_kl
