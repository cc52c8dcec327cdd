"""Everything on disk that outlives a process: committed directories, checkpoints, final models, adapters."""

import hashlib
import json
import os
import shutil

import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from configs.lib.process import fault
from configs.lib.runtime import RunError, difference, identity


def commit_directory(path, files, state):
    """files: {name: {key: tensor}} -> name.safetensors; state -> state.json; sha256 of each in manifest.json.

    All is written and synced under another name; one rename makes it exist. A committed directory is never changed."""
    refuse_non_finite({f"{name}: {k}": v for name, tensors in files.items() for k, v in tensors.items()}, path)
    tmp = path.with_name(path.name + ".tmp")
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    for name, tensors in files.items():
        owner = {}  # tied tensors share memory, which safetensors refuses
        tensors = {k: v if owner.setdefault(v.data_ptr(), k) == k else v.clone() for k, v in tensors.items()}
        save_file({k: v.contiguous() for k, v in tensors.items()}, tmp / f"{name}.safetensors")
        fault("ckpt_write", state["step"])
    (tmp / "state.json").write_text(json.dumps(state))
    (tmp / "manifest.json").write_text(json.dumps({file.name: sha256(file) for file in tmp.iterdir()}))
    for file in (*tmp.iterdir(), tmp):
        sync(file)
    fault("ckpt_before_rename", state["step"])
    os.rename(tmp, path)
    sync(path.parent)
    fault("ckpt_after_rename", state["step"])


def sync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def refuse_non_finite(tensors, what):
    """Weights that are not finite are neither written nor sent: RunError 5."""
    is_finite = lambda x: x.sum().isfinite() or x.isfinite().all()  # noqa: E731  one pass, mostly
    if bad := [name for name, tensor in tensors.items() if not is_finite(tensor)]:
        raise RunError(5, f"{what}: {len(bad)} of {len(tensors)} tensors are not finite, the first is {bad[0]}")


def read_directory(path):
    """-> files, state, as given to commit_directory. Raises RunError 6 for a file that is not as it was written."""
    state = read_state(path, "")
    return {f.stem: load_file(f) for f in path.glob("*.safetensors")}, state


def read_state(path, only="state.json"):
    """-> state.json, after its sha256, or with only="" that of every file, was compared with the manifest's."""
    text = (path / "manifest.json").read_text(errors="replace") if (path / "manifest.json").is_file() else ""
    try:
        sums = dict(json.loads(text))
    except ValueError:
        sums = {"manifest.json": "not what it says"}
    for name in [only] if only in sums else sums:
        if not (path / name).is_file() or sha256(path / name) != sums[name]:
            older = [p.name for p in sorted(path.parent.glob("step_??????")) if p.name < path.name]
            then = f"then {older[-1]} is resumed from" if older else "then the run begins anew"
            raise RunError(6, f"{path / name} is damaged: it is not what was written. Remove {path}, {then}")
    return json.loads((path / "state.json").read_text())


def sha256(path):
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def latest_checkpoint(run_dir):
    return max((run_dir / "checkpoints").glob("step_??????"), default=None)


def options(**more):
    return dcp.StateDictOptions(full_state_dict=True, ignore_frozen_params=True, **more)


def save_checkpoint(run_dir, step, policy, ref, optimizer, cfg, info, rank):
    """Full tensors of the trained parameters, of Adam and of the reference (a list, or None) on rank 0, so that any
    world size loads them, and the orchestrator's ledger after the last batch. Then the oldest go. Collective."""
    model, optim = dcp.get_state_dict(policy, optimizer, options=options(cpu_offload=True))
    frozen = [full_like(r, p) for r, p in zip(ref or (), trained(policy).values())]
    if rank == 0:
        adam = {f"{k}/{kind}": v for k, kinds in optim["state"].items() for kind, v in kinds.items()}
        files = {"policy": model, "adam": adam, "ref": {str(i): t.cpu() for i, t in enumerate(frozen)}}
        state = {"step": step, "ledger": info.get("ledger"), "param_groups": optim["param_groups"]}
        commit_directory(run_dir / "checkpoints" / f"step_{step:06d}", files, state | {"config": identity(cfg)})
        for old in sorted((run_dir / "checkpoints").glob("step_??????"))[: -cfg.checkpoint.keep]:
            shutil.rmtree(old)


def load_checkpoint(path, policy, ref, optimizer, cfg, rank):
    """In place -> step. Rank 0 reads and verifies, the others get their shards from it. Raises RunError 2 where the
    configuration differs in what the tensors depend on, 6 for damaged files."""
    files, state = read_directory(path) if rank == 0 else ({}, {})
    if rank == 0 and state["config"] != identity(cfg):
        raise RunError(2, f"{path} is of another configuration: {difference(state['config'], identity(cfg))}")
    adam = {}
    for key, tensor in files.get("adam", {}).items():
        name, _, kind = key.rpartition("/")
        adam.setdefault(name, {})[kind] = tensor
    optim = {"state": adam, "param_groups": state.get("param_groups", [])}
    how = options(broadcast_from_rank0=dist.get_world_size() > 1, strict=False)
    if ref:  # through the parameters, which know how to shard
        load_parameters(policy, ref, files.get("ref", {}), how)
    # one by one: set_state_dict would take a rank with an empty dict for one that has no part in it
    dcp.set_model_state_dict(policy, files.get("policy", {}), options=how)
    dcp.set_optimizer_state_dict(policy, optimizer, optim, options=how)
    return int(path.name.removeprefix("step_"))


def load_parameters(policy, ref, tensors, how):
    values = {name: tensors[str(i)] for i, name in enumerate(trained(policy))} if tensors else {}
    dcp.set_model_state_dict(policy, values, options=how)
    for frozen, p in zip(ref, trained(policy).values()):
        frozen.copy_(p.detach().to_local() if isinstance(p, DTensor) else p.detach())


def trained(policy):
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


def full_like(shard, p):
    """A rank's part of a tensor that is sharded like p -> the whole. Collective."""
    if not isinstance(p, DTensor):
        return shard
    return DTensor.from_local(shard, p.device_mesh, p.placements, shape=p.shape, stride=p.stride()).full_tensor()


def write_adapter(path, tensors, cfg, model):
    """A PEFT adapter directory, which peft and vLLM load. cfg: the [trainer] table as a dict."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "bias": "none"}
    about |= {"r": cfg["lora_rank"], "lora_alpha": cfg["lora_alpha"], "lora_dropout": cfg["lora_dropout"]}
    (path / "adapter_config.json").write_text(json.dumps(about | {"target_modules": cfg["lora_target_modules"]}))


def write_final(run_dir, tensors, model, cfg, rank):
    """final/: what transformers (LoRA: peft) and vLLM load. tensors: from trainer.sampler_weights."""
    import transformers

    if rank:
        return
    final, tmp = run_dir / "final", run_dir / "final.tmp"
    shutil.rmtree(tmp, ignore_errors=True)
    if cfg.trainer.use_lora:
        write_adapter(tmp, tensors, cfg.trainer._asdict(), cfg.run.model)
    else:
        model.save_pretrained(tmp, state_dict=tensors)
    transformers.AutoTokenizer.from_pretrained(cfg.run.model).save_pretrained(tmp)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(tmp, final)
