"""Prefix trees: what sequences of a batch have in common (the prompt of a group, the turns before a fork) is computed
once. The sequences of a tree are put into one line of a micro-batch, and a mask lets each token see only its own
sequence.

cut_into_trees decides which sequences share a line, places says where in the line their tokens are, and tree_masks
makes the mask. The algorithm is the same without this file; training would only take longer."""

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ALL = 1 << 30  # the window of a layer that has none
BLOCK = 256  # tokens of a tree that attend together, on CPUs
# The time that attention takes for a pair of tokens, relative to the same amount of arithmetic in a layer's matrices:
# in a line with one sequence, and in a tree. The numbers for CPUs were measured (SmolLM2, two threads). Those for CUDA,
# where a mask rules out the fastest kernel, are a guess.
PAIR_COSTS = {"cpu": (1.4, 1.4), "cuda": (1.0, 8.0)}


class Costs(NamedTuple):
    """What attention costs, in units of what a token costs without attention."""

    pair: float  # a token that another one sees, in a line with one sequence
    tree_pair: float  # the same in a tree, where even tokens that do not see each other are compared
    block: float  # tokens that attend together: each is compared with all tokens that any of them sees
    widest: float  # the largest number of tokens of a tree

    def of_line(self, num: int, num_pairs: int, is_tree: bool) -> float:
        """The cost of a line with num tokens, which see num_pairs tokens altogether."""
        if not is_tree:
            return num + self.pair * num_pairs
        return num + self.tree_pair * min(num**2, num_pairs + self.block * num)


def costs_of(model: nn.Module, device: torch.device) -> Costs | None:
    """None if the model cannot compute trees: its attention accepts no custom masks, or it keeps state between tokens
    (Mamba, linear attention, convolutions).

    With a hidden size d, a token takes about 24 d^2 flops in a layer's matrices, and 4 d for each token that it is
    compared with. A mask that is not cut into blocks may have as many elements as four hidden states of its line, which
    limits the width."""
    if not windows_of(model):
        return None
    implementation = model.config._attn_implementation
    if implementation == "flex_attention":  # it skips pairs that the mask forbids, and stores no mask
        return Costs(0.0, 0.0, 0.0, math.inf)
    hidden = model.config.get_text_config().hidden_size
    pair, tree_pair = (cost / (6 * hidden) for cost in PAIR_COSTS[device.type])
    if device.type == "cpu" and implementation == "sdpa":
        return Costs(pair, tree_pair, BLOCK, math.inf)
    return Costs(pair, tree_pair, math.inf, 4 * hidden)


def num_shared(a_L: Tensor, b_L: Tensor) -> int:
    """How many tokens two sequences have in common at their beginning."""
    num = min(len(a_L), len(b_L))
    differs = (a_L[:num] != b_L[:num]).nonzero()
    return int(differs[0]) if len(differs) else num


def cut_into_trees(ids: list[Tensor], sequences: list[int], limit: int, costs: Costs | None) -> list[tuple]:
    """Divides sequences (numbers in the list `ids`) into trees of at most `limit` tokens; only a tree of a single
    sequence may be larger. Returns (tokens, sequences in depth-first order) for each tree, the smallest first. Without
    costs, every sequence is a tree.

    If the sequences are sorted by their tokens, those that share most are neighbors. Of all ways to cut this row of
    sequences into trees, the cheapest is found by dynamic programming: best[n] is the best way for the first n."""
    if not costs:
        return sorted((len(ids[s]), [s]) for s in sequences)
    limit = min(limit, costs.widest)
    row = sorted(sequences, key=lambda s: ids[s].numpy().tobytes())
    shared = [num_shared(ids[a], ids[b]) for a, b in zip(row, row[1:])]
    best = [(0.0, [])]  # its cost, and its trees
    for end in range(1, len(row) + 1):
        options = []
        width = num_pairs = 0
        for start in reversed(range(end)):  # of the last tree, which grows to the left
            is_tree = start < end - 1
            size, old = len(ids[row[start]]), shared[start] if is_tree else 0
            width += size - old
            num_pairs += (size**2 - old**2) // 2  # a token sees those before it in its sequence
            if is_tree and (width > limit or not old):
                break
            options.append((best[start][0] + costs.of_line(width, num_pairs, is_tree), start, width))
        cost, start, width = min(options)
        best.append((cost, [*best[start][1], (width, row[start:end])]))
    return sorted(best[-1][1])


def places(sequences: list[Tensor]) -> list[Tensor]:
    """The places that the tokens of each sequence of a tree have in their line. Tokens that a sequence shares with the
    one before it have the same places: [a b c] and [a b d e] are at [0 1 2] and [0 1 3 4]."""
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
    """Computes from the places of each line's sequences: position_BW, a token's position in its own sequence, and
    end_BW: from this place on, no token shares a sequence with it. In the example above, with a width of 6:

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
    """{kind of layer: how many tokens it looks back}. If the model has only one kind, it is "". Empty if the model
    cannot compute trees."""
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or [""])}
    window = getattr(config, "sliding_window", None)
    takes_masks = model._supports_attention_backend and not model._is_stateful
    takes_masks = takes_masks and model.config._attn_implementation in ("sdpa", "eager", "flex_attention")
    if not takes_masks or kinds - {"", "full_attention", "sliding_attention"}:
        return {}
    return {kind: ALL if kind == "full_attention" or window is None else window for kind in kinds}  # 0 sees nothing


sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]


def tree_attention(module, query, key, value, attention_mask, **kwargs):
    """Transformers' sdpa. For a tree, it is called for one block of queries after the other, and with only those keys
    that at least one query of the block sees: what they have in common, and their own sequences, instead of the whole
    tree."""
    lines = getattr(attention_mask, "lines", None)
    if lines is None:
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    outputs = []
    for (seen, sizes, masks), *line in zip(lines, query.split(1), key.split(1), value.split(1), strict=True):
        # One index_select for all blocks: with one for each, backward would add up a tensor of all keys for each block.
        keys, values = (x.index_select(2, seen).split(sizes, 2) for x in line[1:])
        blocks = zip(line[0].split(BLOCK, 2), keys, values, masks, strict=True)
        outputs.append(torch.cat([sdpa(module, *block, **kwargs)[0] for block in blocks], 1))
    return torch.cat(outputs), None


ALL_ATTENTION_FUNCTIONS.register("sdpa", tree_attention)


def tree_masks(model: nn.Module, end_BW: Tensor, position_BW: Tensor):
    """Makes the mask of which tokens see which in trees, or one for each kind of layer, in the form that Transformers'
    models take. A window counts positions in a sequence, not places in the line."""

    def sees(window, b, head, at, other):  # index tensors
        is_near = position_BW[b, at] - position_BW[b, other] < window
        return (other <= at) & (at < end_BW[b, other]) & is_near

    def in_blocks(window):
        """A mask without elements, which models pass on to tree_attention. No other function can use it."""
        mask = end_BW.new_empty(num, 1, width, 0, dtype=torch.bool)
        mask.lines = []  # for each line: the keys of all blocks, how many each block has, and each block's mask
        at_W = torch.arange(width)
        for b in range(num):
            blocks = [sees(window, b, 0, at[:, None], at_W) for at in at_W.split(BLOCK)]
            keys = [block.any(0).nonzero()[:, 0] for block in blocks]
            masks = [block[None, None, :, seen] for block, seen in zip(blocks, keys)]
            mask.lines.append((torch.cat(keys), [*map(len, keys)], masks))
        return mask

    implementation = model.config._attn_implementation
    make = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
    num, width = end_BW.shape
    how = {"device": end_BW.device, "dtype": model.dtype, "allow_is_causal_skip": False}
    is_cut = implementation == "sdpa" and end_BW.device.type == "cpu" and width > 2 * BLOCK
    masks = {}
    for kind, window in windows_of(model).items():
        whole = partial(make, num, width, width, mask_function=partial(sees, window), **how)
        masks[kind] = in_blocks(window) if is_cut else whole()
    return masks.get("", masks)
