"""A batch's samples -> micro-batches: which samples go together, and their tensors. No padding, no row dimension."""

import math

import torch
import torch.nn.functional as F

from configs.lib.batch import Batch


def pack(lens, budget, ranks, hidden):
    """Sample lengths -> lists of indices of at most `budget` tokens; list i goes to rank i % ranks, some may be empty.

    Longest first into the cheapest list with room. A sample costs 12 D per token for its linear layers and T per token
    for attention. Within a list lengths ascend, so that equal ones lie side by side."""
    count = ranks * max(1, math.ceil(sum(lens) / (budget * ranks)))
    bins, cost, room = [[] for _ in range(count)], [0] * count, [budget] * count
    for i in sorted(range(len(lens)), key=lambda i: -lens[i]):
        fits = [b for b in range(count) if room[b] >= lens[i] or not bins[b]]
        if not fits:
            return pack(lens, budget * count // (count + ranks), ranks, hidden)  # fragmented: one more list per rank
        b = min(fits, key=cost.__getitem__)
        bins[b].insert(0, i)
        cost[b] += lens[i] * (12 * hidden + lens[i])
        room[b] -= lens[i]
    return bins


def collate(batch, indices, device):
    """One micro-batch as tensors. An empty one gets a filler, so that every rank makes the same number of passes."""
    lens = batch.sample_lens[indices].long() if indices else torch.ones(1, dtype=torch.long)
    starts = (batch.sample_lens.cumsum(0) - batch.sample_lens)[indices or [0]]
    position_T = torch.cat([torch.arange(n) for n in lens.tolist()])
    at_T = position_T + starts.repeat_interleave(lens)
    is_real = bool(indices) and bool(batch.loss_mask[at_T].any())
    index_N = batch.loss_mask[at_T].nonzero()[:, 0] - 1 if is_real else torch.zeros(1, dtype=torch.long)
    next_N = at_T[index_N] + is_real
    sample_N = torch.arange(len(lens)).repeat_interleave(lens)[index_N]
    meta = [batch.samples[i] for i in indices or [0]]
    micro = {
        "ids_T": batch.tokens[at_T].long(),
        "position_T": position_T,
        "cu_lens": F.pad(lens.cumsum(0), (1, 0)).int(),
        "index_N": index_N,  # the position before each loss token
        "target_N": batch.tokens[next_N].long(),
        "temperature_N": torch.tensor([float(s.get("temperature", 1)) for s in meta])[sample_N],
        "old_logp_N": batch.old_logp[next_N],
        "adv_N": batch.advantages[next_N],
        "mask_N": torch.full_like(next_N, is_real, dtype=torch.bool),
        "sample_N": sample_N.unique(return_inverse=True)[1],  # from 0 on, also where a sample has no loss token
        "age_N": torch.tensor([s.get("age", -1) for s in meta])[sample_N],
        "at_N": next_N,  # in the batch
    }
    return {"lens": lens.tolist()} | {k: v.to(device, non_blocking=True) for k, v in micro.items()}


def canary(vocab_size, longest):
    """256 tokens, always the same, that trainer and servers both score after a sync -> ids [rows, length], batch."""
    length, draw = min(256, longest), torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (256 // length, length), generator=draw, dtype=torch.int32)
    zero, lens = torch.zeros(ids.numel()), torch.full((len(ids),), length)
    mask = (torch.arange(length) > 0).repeat(len(ids))
    return ids, Batch(ids.flatten(), mask, zero, zero, zero, lens, [{}] * len(ids), {})
