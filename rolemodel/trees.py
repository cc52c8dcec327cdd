"""Prefix trees: what sequences of a batch have in common (the prompt of a group, the turns before a fork) is computed
once. The sequences of a tree stand in one line of a micro-batch, and a mask lets each token see its own sequence only.

cut_into_trees decides which sequences share a line, places says where their tokens stand in it, and tree_masks makes
the mask. The algorithm is the same without this file; training would only take longer."""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

ALL = 1 << 30  # the window of a layer that has none
# The time of a pair of positions in masked attention, relative to as much arithmetic in a layer's matrices. On CPUs it
# was measured (SmolLM2, two threads); on CUDA, where a mask also rules out the fastest kernel, it is a guess.
PAIR_COST = {"cpu": 1.4, "cuda": 8.0}


class Costs(NamedTuple):
    """What a tree costs a model, where a token without attention costs 1: tree of n tokens, n + pair * n^2."""

    pair: float  # of a token that another one sees
    widest: float  # tokens of a tree, at most


def costs_of(model: nn.Module, device: torch.device) -> Costs | None:
    """None if the model cannot compute trees: its attention accepts no custom masks, or it keeps state between tokens
    (Mamba, linear attention, convolutions).

    With a hidden size d, a token takes about 24 d^2 flops in a layer's matrices, and 4 d for each token that it sees,
    which in a tree are all of them. A mask has no more elements than four hidden states of its micro-batch."""
    if not windows_of(model):
        return None
    if model.config._attn_implementation == "flex_attention":  # it skips pairs that a mask forbids, and stores none
        return Costs(0.0, math.inf)
    hidden = model.config.get_text_config().hidden_size
    return Costs(PAIR_COST[device.type] / (6 * hidden), 4 * hidden)


def num_shared(a_L: Tensor, b_L: Tensor) -> int:
    """The number of first tokens that two sequences have in common."""
    num = min(len(a_L), len(b_L))
    differs = (a_L[:num] != b_L[:num]).nonzero()
    return int(differs[0]) if len(differs) else num


def cut_into_trees(ids: list[Tensor], sequences: list[int], limit: int, costs: Costs | None) -> list[tuple]:
    """Divides sequences, numbers of `ids`, into trees of at most `limit` tokens, or of one sequence. Returns (tokens,
    sequences in depth-first order) of each, the smallest tree first; without costs, a tree of each sequence.

    Sorted by their tokens, sequences that share most are neighbors. Of all ways to cut this row of sequences into
    trees, it takes the cheapest, by a recursion over where the row ends: best[n] is the best way for the first n."""
    if not costs:
        return sorted((len(ids[s]), [s]) for s in sequences)
    limit = min(limit, costs.widest)
    row = sorted(sequences, key=lambda s: ids[s].numpy().tobytes())
    shared = [num_shared(ids[a], ids[b]) for a, b in zip(row, row[1:])]
    best = [(0.0, [])]  # its cost, and its trees
    for end in range(1, len(row) + 1):
        options = []
        width = len(ids[row[end - 1]])
        for start in reversed(range(end)):  # of the last tree, which grows to the left
            if start < end - 1:
                width += len(ids[row[start]]) - shared[start]
                if width > limit or not shared[start]:
                    break
            options.append((best[start][0] + width + costs.pair * width**2, start, width))
        cost, start, width = min(options)
        best.append((cost, [*best[start][1], (width, row[start:end])]))
    return sorted(best[-1][1])


def places(sequences: list[Tensor]) -> list[Tensor]:
    """Where the tokens of each of a tree's sequences stand in their line. What a sequence shares with the one before it
    has the same places: [a b c] and [a b d e] stand at [0 1 2] and [0 1 3 4]."""
    found = []
    used = 0
    before_L = place_L = torch.arange(0)
    for ids_L in sequences:
        shared = num_shared(before_L, ids_L)
        place_L = torch.cat((place_L[:shared], torch.arange(used, used + len(ids_L) - shared)))
        used += len(ids_L) - shared
        before_L = ids_L
        found.append(place_L)
    return found


def positions_and_ends(lines: list[list[Tensor]], width: int) -> dict[str, Tensor]:
    """From the places of each line's sequences: position_BW, a token's position in its own sequence, and end_BW, the
    place from which on no token belongs to a sequence with it. In the example above, with a width of 6:

    position_BW  [[0 1 2 2 3 0]]
    end_BW       [[5 5 3 5 5 6]]"""
    position_BW = torch.zeros(len(lines), width, dtype=torch.long)
    end_BW = torch.full_like(position_BW, width)
    for b, line in enumerate(lines):
        used = 0
        for place_L in line:
            used = max(used, int(place_L[-1]) + 1)
            position_BW[b, place_L] = torch.arange(len(place_L))
            end_BW[b, place_L] = used
    return {"position_BW": position_BW, "end_BW": end_BW}


def windows_of(model: nn.Module) -> dict[str, int]:
    """{kind of layer: tokens that it looks back}; "" if the model knows no kinds. Empty if it can compute no trees."""
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or [""])}
    window = getattr(config, "sliding_window", None) or ALL
    takes_masks = model._supports_attention_backend and not model._is_stateful
    takes_masks = takes_masks and model.config._attn_implementation in ("sdpa", "eager", "flex_attention")
    if not takes_masks or kinds - {"", "full_attention", "sliding_attention"}:
        return {}
    return {kind: ALL if kind == "full_attention" else window for kind in kinds}


def tree_masks(model: nn.Module, end_BW: Tensor, position_BW: Tensor):
    """What each token of trees sees: a mask, or one for each kind of layer, in the form that Transformers' models take.
    A window counts the positions of a sequence, not places in the line."""

    def sees(window, b, head, at, other):  # index tensors
        is_near = position_BW[b, at] - position_BW[b, other] < window
        return (other <= at) & (at < end_BW[b, other]) & is_near

    make = ALL_MASK_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    num, width = end_BW.shape
    how = {"device": end_BW.device, "dtype": model.dtype, "allow_is_causal_skip": False}
    windows = windows_of(model).items()
    masks = {kind: make(num, width, width, mask_function=partial(sees, size), **how) for kind, size in windows}
    return masks.get("", masks)
