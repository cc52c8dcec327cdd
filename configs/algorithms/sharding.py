"""Where FSDP2 keeps the model, other than in parts on all ranks: trainer.replicas copies of it, e.g. one for each node,
so that only gradients cross the network; trainer.offload_optimizer, in host memory but for what is computed with."""

import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

from configs import require


def placement(kind, t):
    """-> arguments of fully_shard, for ranks on devices of that kind. t: the [trainer] table. RunError 2 where the
    copies cannot be of the same size."""
    world, how = dist.get_world_size(), {}
    require(world % t.replicas == 0, 2, f"trainer.replicas = {t.replicas} does not divide {world} ranks")
    mesh = dist.init_device_mesh(kind, (t.replicas, world // t.replicas), mesh_dim_names=("replicate", "shard"))
    how["mesh"] = mesh if t.replicas > 1 else mesh["shard"]
    if t.offload_optimizer and kind == "cuda":
        how["offload_policy"] = CPUOffloadPolicy()
    return how
