"""Attention over packed rows, registered with Transformers as "packed"; trainer.py passes packing = (lens, cu_lens)."""

from itertools import groupby

import torch
import torch.nn.functional as F

from configs.lib.runtime import RunError

HARMLESS = ("position_ids", "use_cache", "is_causal")  # passed along by some models, without meaning here


def packed_attention(module, q_BHTD, k_BHTD, v_BHTD, attention_mask, packing, scaling, dropout=0.0, **kwargs):
    """Causal attention confined to each sample of one packed row (B = 1) -> [1, T, H, D], None.

    packing: lengths of the samples in order, and int32 [S + 1] starts. On CUDA in 16 bits: varlen flash attention. Else
    one SDPA for each run of equal lengths, which trainer.pack lays side by side. A sliding window becomes a window.
    Raises RunError 2 for anything a model asks that is not done here (soft-caps, sinks, dropout, masks)."""
    (lens, cu_lens), window = packing, kwargs.pop("sliding_window", None)
    lacking = [k for k, v in kwargs.items() if v is not None and k not in HARMLESS]
    if lacking or dropout or attention_mask is not None or not module.is_causal:
        what = lacking or "dropout, a mask or two-way attention"
        raise RunError(2, f"model: {type(module).__name__} needs {what}, which the packed attention does not have")
    if q_BHTD.is_cuda and q_BHTD.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q_BHTD, k_BHTD, v_BHTD))
        left, gqa, longest = -1 if window is None else window - 1, q_THD.shape[1] != k_THD.shape[1], max(lens)
        rows = (q_THD, k_THD, v_THD, cu_lens, cu_lens, longest, longest)
        return varlen_attn(*rows, scale=scaling, window_size=(left, 0), enable_gqa=gqa)[None], None
    out, start = [], 0
    for length, run in groupby(lens):
        num = len(list(run))
        part = slice(start, start := start + num * length)
        q, k, v = (x[0, :, part].unflatten(1, (num, length)).transpose(0, 1) for x in (q_BHTD, k_BHTD, v_BHTD))
        mask = None
        if window is not None and window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True)
        out.append(y.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)[None], None
