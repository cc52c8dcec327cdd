"""The file between orchestrator and trainer, batches/step_000012.safetensors: both ends, and what --replay does to it.

Flat columns, independent of ranks and packing; JSON metadata per sample and per batch. The trainer never tokenises."""

import hashlib
import json
import os
import time
from collections import namedtuple
from itertools import chain

import numpy as np
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from configs.lib.checkpoint import latest_checkpoint, read_state
from configs.lib.process import fault
from configs.lib.runtime import RunError, cut_lines, difference, identity

# tokens to turns: [T]; sample_lens: [S]; samples, info: metadata
Batch = namedtuple("Batch", "tokens loss_mask old_logp advantages turns sample_lens samples info")


def save_batch(path, samples, info):
    """samples: dicts with tokens, mask, logp, turns (equally long lists), advantage (a number, or a list with one per
    turn) and metadata. One rename commits it."""

    def column(lists, dtype):  # the orchestrator's event loop waits for this: torch.tensor takes three times as long
        return torch.from_numpy(np.fromiter(chain.from_iterable(lists), dtype))

    data = {
        "tokens": column((s["tokens"] for s in samples), np.int32),
        "loss_mask": column((s["mask"] for s in samples), np.bool_),
        "old_logp": column((s["logp"] for s in samples), np.float32),
        "advantages": column((by_token(s["advantage"], s["turns"]) for s in samples), np.float32),
        "turns": column((s["turns"] for s in samples), np.int32),
        "sample_lens": torch.tensor([len(s["tokens"]) for s in samples], dtype=torch.int32),
    }
    meta = [{k: v for k, v in s.items() if k not in ("tokens", "mask", "logp", "turns")} for s in samples]
    about = {"samples": json.dumps(meta), "info": json.dumps(info)}
    save_file(data, tmp := path.with_suffix(".tmp"), about | {"sha256": digest(data, about)})
    fault("batch_write", info.get("step", 0))
    os.replace(tmp, path)


def save_logp(run_dir, step, logp_T):
    """The trainer's own logp of a batch's tokens, before its step, for tools/show.py; 0 where nothing is trained."""
    path = run_dir / "batches" / f"logp_{step:06d}.safetensors"
    save_file({"logp": logp_T.cpu()}, tmp := path.with_suffix(".tmp"))
    os.replace(tmp, path)


def digest(data, about):
    whole = hashlib.sha256(about["samples"].encode() + about["info"].encode())
    for name in sorted(data):
        whole.update(data[name].numpy().tobytes())
    return whole.hexdigest()


def by_token(advantage, turns):
    return [advantage[turn] for turn in turns] if isinstance(advantage, list) else [advantage] * len(turns)


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
    try:
        meta, data = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"], load(blob)
        is_whole = meta.pop("sha256", None) in (None, digest(data, meta))  # None: other people's scripts
    except (ValueError, KeyError, SafetensorError):
        is_whole = False
    if not is_whole:
        raise RunError(6, f"{path} is damaged: it is not what was written. Remove it and the batches after it")
    batch = Batch(**data, samples=json.loads(meta["samples"]), info=json.loads(meta["info"]))
    lens, sizes = batch.sample_lens, [len(x) for x in batch[:5]]
    if set(sizes) != {int(lens.sum())} or len(lens) != len(batch.samples):
        raise RunError(4, f"{path}: columns of {sizes} tokens, {len(batch.samples)} samples of {lens.sum()} tokens")
    old_logp = batch.old_logp.nan_to_num(0) if batch.info.get("offline") else batch.old_logp  # nan: unknown
    on_first = batch.loss_mask[lens.cumsum(0) - lens].any()
    if not (old_logp + batch.advantages).isfinite().all() or on_first:
        raise RunError(4, f"{path}: old_logp or advantages not finite, or loss_mask on a sample's first token")
    if expected and (differs := difference(batch.info["run"], expected[0])):
        raise RunError(2, f"{path} is of another configuration: {differs}. Choose another run_name, or remove it")
    oldest = max((s.get("age", 0) for s in batch.samples), default=0)
    if expected and (batch.info["step"] != expected[1] or oldest > batch.info["max_staleness"]):
        raise RunError(4, f"{path} holds batch {batch.info['step']}, {oldest} versions old")
    return batch


def replace_advantages(batch, compute_advantages, name, gamma):
    """The same rollouts under another advantage, for --replay."""
    groups = {}
    for s in batch.samples:
        groups.setdefault((s["env"], s["group"]), {})[s["rollout"]] = s  # of a fork: any
    table = compute_advantages([list(group.values()) for group in groups.values()], name, gamma)
    new = {key: dict(zip(group, row)) for (key, group), row in zip(groups.items(), table)}
    turns = [x.tolist() for x in batch.turns.split(batch.sample_lens.tolist())]
    adv = [by_token(new[s["env"], s["group"]][s["rollout"]], t) for s, t in zip(batch.samples, turns)]
    return batch._replace(advantages=torch.tensor(sum(adv, [])).float())


def resume(run_dir, cfg):
    """-> number of the next batch, ledgers by environment. Batches since the checkpoint are trained again."""
    found, ledger = latest_checkpoint(run_dir), {}
    n = step = int(found.name[5:]) if found else 0
    if found:
        ledger = read_state(found)["ledger"]
    while (path := run_dir / "batches" / f"step_{n:06d}.safetensors").exists():
        ledger, n = load_batch(path, expected=(identity(cfg), n)).info["ledger"], n + 1
    cut_lines(run_dir / "rollouts.jsonl", lambda line: line["step"] < n)
    cut_lines(run_dir / "eval.jsonl", lambda line: line["step"] <= step)
    return n, ledger
