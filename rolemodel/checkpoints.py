"""What the trainer leaves on the disk: metrics, checkpoints, and final/."""

import hashlib
import json
import math
import os
import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers.core_model_loading import revert_weight_conversion

from rolemodel.role import heartbeat, say
from rolemodel.run_directory import by_step, cut_lines, keep, next_batch
from rolemodel.serving import adapters


def log_step(run_dir: Path, step: int, metrics: dict, logp_T: torch.Tensor):
    """Writes every finite number to metrics.jsonl, logp_T to a file next to the batch, for tools, and a line to the
    console."""
    save_file({"logp": logp_T.cpu()}, run_dir / "batches" / f"logp_{step:06d}.safetensors")
    line = {"step": step, "time": time.time(), "version": step + 1}
    line |= {key: value for key, value in metrics.items() if math.isfinite(value)}
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    text = f"step {step:5d} | reward {metrics.get('reward/mean', math.nan):.3g} | loss {metrics['loss']:.3g}"
    text += f" | kl {metrics['policy/kl_sampler']:.3g} | entropy {metrics['policy/entropy']:.3g}"
    say(f"{text} | seconds {metrics['time/step_s']:.3g}")


def state_of(policy, optimizer):
    """Everything that training changes. These are the live tensors, not copies, and each rank has its part of them."""
    weights = policy.trained()
    moments = {name: optimizer.state[p] for name, p in weights.items() if p in optimizer.state}
    return {"policy": weights, "optimizer": moments, "extra": policy.extra}


def save_checkpoint(run_dir: Path, step: int, policy, optimizer, cfg):
    """Every rank writes its part; any number of ranks can read the whole back. The rename at the end makes it visible.
    Collective."""
    path = run_dir / "checkpoints" / f"step_{step:06d}"
    tmp = path.with_suffix(".tmp")
    # One file for each tensor: with a single file, torch keeps all of them in pinned host memory (pytorch #195982).
    dcp.save(state_of(policy, optimizer), storage_writer=dcp.FileSystemWriter(tmp, single_file_per_rank=False))
    if dist.get_rank() > 0:
        return
    os.sync()  # torch 2.13 calls fsync on .metadata before it is flushed: a power cut would leave it empty
    os.rename(tmp, path)
    for old in [*by_step(path.parent).values()][: -cfg.checkpoint.keep]:
        shutil.rmtree(old)
    first = step - (cfg.checkpoint.keep_batches or step)
    for kind in ("step", "logp"):  # the newest batch stays: it has what the orders remember
        for number, file in by_step(run_dir / "batches", kind).items():
            if number < first:
                file.unlink()


def keep_model(run_dir: Path, name: str):
    """Writes a fingerprint of the beginning of each of the model's files. Raises ConfigError if the run has begun with
    other files, for example with another revision: the run's adapters and batches would not fit the new one."""
    folder = Path(transformers.utils.cached_file(name, "config.json")).parent
    files = [file for file in sorted(folder.iterdir()) if file.suffix in (".safetensors", ".bin", ".json", ".jinja")]
    new = {file.name: hashlib.sha256(np.memmap(file, mode="r")[: 1 << 20]).hexdigest() for file in files}
    path = run_dir / "model.json"
    keep(path, new, path.exists() and next_batch(run_dir))  # a replay's batches, or the first one, may exist before it


def load_checkpoint(path: Path, policy, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Loads a directory of checkpoints/ into the policy and the optimizer, and returns its step. Without an optimizer,
    it loads only the weights. Collective."""
    state = {"policy": policy.trained()}
    if optimizer:
        get_optimizer_state_dict(policy, optimizer)  # takes a step with rate 0, to create the tensors to load into
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata  # optimizer.<name>.exp_avg, ...
        parts = {key.rpartition(".")[0] for key in saved}
        for name, p in policy.trained().items():
            if f"optimizer.{name}" not in parts:
                optimizer.state.pop(p, None)  # no gradient had reached it
        state = state_of(policy, optimizer)
    dcp.load(state, checkpoint_id=path)
    return int(path.name.removeprefix("step_"))


def resume(run_dir: Path, policy, optimizer) -> int:
    """Loads the last checkpoint, if there is one, and returns its step. Removes the lines of metrics.jsonl from there
    on, which will be written again. Collective."""
    found = by_step(run_dir / "checkpoints")
    step = load_checkpoint(found[max(found)], policy, optimizer) if found else 0
    if dist.get_rank() == 0:
        keep_model(run_dir, policy.model.config.name_or_path)
        cut_lines(run_dir / "metrics.jsonl", step)
    return step


def write_final(final: Path, model, blocks, cfg):
    """Writes a directory that transformers (LoRA: peft) and vLLM can load. blocks: from trainer.stream_weights.
    Collective."""
    tensors = {}
    for block in blocks:
        heartbeat()
        if dist.get_rank() == 0:
            tensors |= {name: tensor.cpu().contiguous() for name, tensor in block.items()}
    if dist.get_rank() > 0:
        return
    if cfg.trainer.use_lora:
        # A composite checkpoint has other names for its modules than the class that was trained. PEFT takes either, so
        # both are written.
        for name, _ in model.named_parameters():
            if name.endswith((".lora_A", ".lora_B")):
                (saved,) = revert_weight_conversion(model, {f"{name}.weight": torch.empty(0)})
                tensors[f"{name}.weight"] = tensors[saved].clone()
        adapters.write(final, tensors, cfg.run.model, cfg.trainer._asdict())
    else:
        final.mkdir(parents=True, exist_ok=True)
        save_file(tensors, final / "model.safetensors", {"format": "pt"})
        source = Path(transformers.utils.cached_file(cfg.run.model, "config.json")).parent
        for file in source.glob("*_config.json"):  # for generation, and for a composite model's images
            shutil.copy(file, final)
        model.config.dtype = next(iter(tensors.values())).dtype
        model.config.save_pretrained(final)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.run.model)
    if cfg.run.chat_template:
        tokenizer.chat_template = Path(cfg.run.chat_template).read_text("utf-8")
    tokenizer.save_pretrained(final)
