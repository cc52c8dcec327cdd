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
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ALL = 1 << 30  # the window of a layer that has none
BLOCK = 256  # tokens of a tree that attend together, on CPUs
# The time of a pair of tokens in attention, relative to as much arithmetic in a layer's matrices: in a line of one
# sequence, and in a tree. On CPUs it was measured (SmolLM2, two threads); on CUDA, where a mask rules out the fastest
# kernel, it is a guess.
PAIR_COSTS = {"cpu": (1.4, 1.4), "cuda": (1.0, 8.0)}


class Costs(NamedTuple):
    """What attention costs a model, where a token without attention costs 1."""

    pair: float  # a token that another one sees, in a line of one sequence
    tree_pair: float  # the same in a tree, where tokens are compared that do not see each other
    block: float  # tokens that attend together: each is compared with all that one of them sees
    widest: float  # tokens of a tree, at most

    def of_line(self, num: int, num_pairs: int, is_tree: bool) -> float:
        """The cost of a line with num tokens, which see num_pairs tokens altogether."""
        if not is_tree:
            return num + self.pair * num_pairs
        return num + self.tree_pair * min(num**2, num_pairs + self.block * num)


def costs_of(model: nn.Module, device: torch.device) -> Costs | None:
    """None if the model cannot compute trees: its attention accepts no custom masks, or it keeps state between tokens
    (Mamba, linear attention, convolutions).

    With a hidden size d, a token takes about 24 d^2 flops in a layer's matrices, and 4 d for each token that it is
    compared with. Unless it is cut into blocks, a mask has no more elements than four hidden states of its line."""
    if not windows_of(model):
        return None
    implementation = model.config._attn_implementation
    if implementation == "flex_attention":  # it skips pairs that a mask forbids, and stores none
        return Costs(0.0, 0.0, 0.0, math.inf)
    hidden = model.config.get_text_config().hidden_size
    pair, tree_pair = (cost / (6 * hidden) for cost in PAIR_COSTS[device.type])
    if device.type == "cpu" and implementation == "sdpa":
        return Costs(pair, tree_pair, BLOCK, math.inf)
    return Costs(pair, tree_pair, math.inf, 4 * hidden)


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
    window = getattr(config, "sliding_window", None)
    takes_masks = model._supports_attention_backend and not model._is_stateful
    takes_masks = takes_masks and model.config._attn_implementation in ("sdpa", "eager", "flex_attention")
    if not takes_masks or kinds - {"", "full_attention", "sliding_attention"}:
        return {}
    return {kind: ALL if kind == "full_attention" or window is None else window for kind in kinds}  # 0 sees nothing


sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]


def tree_attention(module, query, key, value, attention_mask, **kwargs):
    """Transformers' sdpa; in a tree by blocks of queries, each with those keys alone that one of its queries sees: what
    they have in common, and their own sequences, in place of the whole tree."""
    lines = getattr(attention_mask, "lines", None)
    if lines is None:
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    outputs = []
    for (seen, sizes, masks), *line in zip(lines, query.split(1), key.split(1), value.split(1), strict=True):
        # All keys at once: backward would add up a tensor of all keys for each block.
        keys, values = (x.index_select(2, seen).split(sizes, 2) for x in line[1:])
        blocks = zip(line[0].split(BLOCK, 2), keys, values, masks, strict=True)
        outputs.append(torch.cat([sdpa(module, *block, **kwargs)[0] for block in blocks], 1))
    return torch.cat(outputs), None


ALL_ATTENTION_FUNCTIONS.register("sdpa", tree_attention)


def tree_masks(model: nn.Module, end_BW: Tensor, position_BW: Tensor):
    """What each token of trees sees: a mask, or one for each kind of layer, in the form that Transformers' models take.
    A window counts the positions of a sequence, not places in the line."""

    def sees(window, b, head, at, other):  # index tensors
        is_near = position_BW[b, at] - position_BW[b, other] < window
        return (other <= at) & (at < end_BW[b, other]) & is_near

    def in_blocks(window):
        """A mask without elements, which models hand on to tree_attention: no other function can use it."""
        mask = end_BW.new_empty(num, 1, width, 0, dtype=torch.bool)
        mask.lines = []  # of each: the keys of all blocks, their numbers, and a mask of each block
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
