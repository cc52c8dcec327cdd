"""The file between orchestrator and trainer, batches/step_000012.safetensors: both ends, and what --replay does to it.

Flat columns, independent of ranks and packing; JSON metadata per sample and per batch. The trainer never tokenises."""

import json
import os
import time
from collections import namedtuple

import torch
import torch.distributed as dist
from safetensors.torch import load, save_file

from configs.lib.checkpoint import identity, latest_checkpoint
from configs.lib.runtime import RunError, cut_lines

Batch = namedtuple("Batch", "tokens loss_mask old_logp advantages sample_lens samples info")  # [T] x 4, [S], metadata


def save_batch(path, samples, info):
    """samples: dicts with tokens, mask, logp (equally long lists), advantage and metadata. One rename commits it."""
    data = {
        "tokens": torch.tensor([x for s in samples for x in s["tokens"]], dtype=torch.int32),
        "loss_mask": torch.tensor([x for s in samples for x in s["mask"]], dtype=torch.bool),
        "old_logp": torch.tensor([x for s in samples for x in s["logp"]], dtype=torch.float32),
        "advantages": torch.tensor([s["advantage"] for s in samples for _ in s["tokens"]], dtype=torch.float32),
        "sample_lens": torch.tensor([len(s["tokens"]) for s in samples], dtype=torch.int32),
    }
    meta = [{k: v for k, v in s.items() if k not in ("tokens", "mask", "logp")} for s in samples]
    save_file(data, tmp := path.with_suffix(".tmp"), {"samples": json.dumps(meta), "info": json.dumps(info)})
    os.replace(tmp, path)


def load_batch(path, rank=0, device="cpu", timeout_s=0, expected=None):
    """Rank 0 waits for the file and reads it; other ranks, maybe on other machines, get its bytes from rank 0.

    expected: (identity(cfg), step) of this run's own batch. Raises RunError for what must never be trained on."""
    blob, deadline = b"", time.monotonic() + timeout_s
    while rank == 0 and not path.exists():
        if time.monotonic() > deadline:
            raise RunError(3, f"waited {timeout_s:.0f} s (trainer.batch_timeout_s) for {path} from the orchestrator")
        time.sleep(0.01)
    if rank == 0:
        blob = path.read_bytes()
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast(size := torch.tensor([len(blob)], device=device), 0)
        data = torch.frombuffer(bytearray(blob or size.item()), dtype=torch.uint8).to(device)
        dist.broadcast(data, 0)
        blob = data.cpu().numpy().tobytes()
    meta, data = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"], load(blob)
    batch = Batch(**data, samples=json.loads(meta["samples"]), info=json.loads(meta["info"]))
    lens, sizes = batch.sample_lens, [len(x) for x in batch[:4]]
    if set(sizes) != {int(lens.sum())} or len(lens) != len(batch.samples):
        raise RunError(4, f"{path}: columns of {sizes} tokens, {len(batch.samples)} samples of {lens.sum()} tokens")
    if not (batch.old_logp + batch.advantages).isfinite().all() or batch.loss_mask[lens.cumsum(0) - lens].any():
        raise RunError(4, f"{path}: old_logp or advantages not finite, or loss_mask on a sample's first token")
    if expected and batch.info["run"] != expected[0]:
        other = {key: value for key, value in batch.info["run"].items() if value != expected[0].get(key)}
        raise RunError(2, f"{path} was made with {other}: choose another run_name, or remove {path.parent}")
    oldest = max((s.get("age", 0) for s in batch.samples), default=0)
    if expected and (batch.info["step"] != expected[1] or oldest > batch.info["max_staleness"]):
        raise RunError(4, f"{path} holds batch {batch.info['step']}, {oldest} versions old")
    return batch


def replace_advantages(batch, compute_advantages, name):
    """The same rollouts under another advantage, for --replay."""
    groups = {}
    for s in batch.samples:
        groups.setdefault(s["group"], {})[s["rollout"]] = s  # the samples of a forked rollout share its reward
    table = compute_advantages([list(group.values()) for group in groups.values()], name)
    new = {(key, i): a for (key, group), row in zip(groups.items(), table) for i, a in zip(group, row)}
    adv_S = torch.tensor([new[s["group"], s["rollout"]] for s in batch.samples], dtype=torch.float32)
    return batch._replace(advantages=adv_S.repeat_interleave(batch.sample_lens))


def resume(run_dir, cfg):
    """-> number of the next batch, ledger. Batches committed since the checkpoint are trained again as they are."""
    found, ledger = latest_checkpoint(run_dir), {"next": 0, "open": []}
    n = step = int(found.name[5:]) if found else 0
    if found:
        ledger = json.loads((found / "state.json").read_text())["ledger"]
    while (path := run_dir / "batches" / f"step_{n:06d}.safetensors").exists():
        ledger, n = load_batch(path, expected=(identity(cfg), n)).info["ledger"], n + 1
    cut_lines(run_dir / "rollouts.jsonl", lambda line: line["step"] < n)
    cut_lines(run_dir / "eval.jsonl", lambda line: line["step"] <= step)
    return n, ledger
