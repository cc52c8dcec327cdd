"""Attention over packed rows, registered with Transformers as "packed"; trainer.py passes it a Packing."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
import torch.nn.functional as F

from configs.lib.runtime import RunError

HARMLESS = ("position_ids", "use_cache", "is_causal")  # passed along by some models, without meaning here
STEP = 32  # samples whose lengths round up to the same multiple of it are padded to the longest, for one call of SDPA


@dataclass(frozen=True, eq=False)
class Packing:
    """A row: lengths of its samples in order, int32 [S + 1] starts. An object, which torch.compile does not open."""

    lens: list[int]
    cu_lens: torch.Tensor


@lru_cache(maxsize=64)
def padded(lens, device):
    """Lengths in order -> [(samples, length) of each rectangle], for each place in the rectangles its token, for each
    token its place, and which places are filler. Filler comes last in a rectangle's rows, where causal attention of
    the tokens before never looks."""
    shapes, token_P, place_T, filler_P, start, at = [], [], [], [], 0, 0
    for _, run in groupby(lens, lambda n: -(-n // STEP)):
        run = list(run)
        longest = max(run)
        for n in run:
            token_P += [*range(start, start + n), *[start] * (longest - n)]
            place_T += range(at, at + n)
            filler_P += [False] * n + [True] * (longest - n)
            start, at = start + n, at + longest
        shapes.append((len(run), longest))
    return shapes, *(torch.tensor(x, device=device) for x in (token_P, place_T, filler_P))


class Move(torch.autograd.Function):
    """x[to], where the gradient is g[back] and 0 in `filler`: no scatter, as each token has one place."""

    @staticmethod
    def forward(ctx, x, to, back, filler):
        ctx.save_for_backward(back, filler)
        return x.index_select(0, to)

    @staticmethod
    def backward(ctx, grad):
        back, filler = ctx.saved_tensors
        grad = grad.index_select(0, back)
        return grad if filler is None else grad.masked_fill_(filler[:, None, None], 0), None, None, None


@torch.compiler.disable
def packed_attention(module, q_BHTD, k_BHTD, v_BHTD, attention_mask, packing, scaling, dropout=0.0, **kwargs):
    """Causal attention confined to each sample of one packed row (B = 1) -> [1, T, H, D], None.

    On CUDA in 16 bits: varlen flash attention. Else one SDPA for each run of like lengths, which trainer.pack lays side
    by side. A sliding window becomes a window.
    Raises RunError 2 for anything a model asks that is not done here (soft-caps, sinks, dropout, masks)."""
    lens, cu_lens, window = packing.lens, packing.cu_lens, kwargs.pop("sliding_window", None)
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
    shapes, token_P, place_T, filler_P = padded(tuple(lens), q_BHTD.device)
    is_plain = len(token_P) == len(place_T)  # nothing to pad, as in a row of one sample
    q_P, k_P, v_P = (x[0].transpose(0, 1) for x in (q_BHTD, k_BHTD, v_BHTD))
    if not is_plain:
        q_P, k_P, v_P = (Move.apply(x, token_P, place_T, None) for x in (q_P, k_P, v_P))
    out, sizes = [], [num * length for num, length in shapes]
    for (num, length), *rows in zip(shapes, *(x.split(sizes) for x in (q_P, k_P, v_P))):
        q, k, v = (x.unflatten(0, (num, length)).transpose(1, 2) for x in rows)
        mask = None
        if window is not None and window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        if q.is_cuda:  # in fp32 only the math kernel, which keeps the scores, takes fewer heads of k and v
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        y = F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=not q.is_cuda
        )
        out.append(y.transpose(1, 2).flatten(0, 1))
    out = torch.cat(out)
    return (out if is_plain else Move.apply(out, place_T, token_P, filler_P))[None], None
