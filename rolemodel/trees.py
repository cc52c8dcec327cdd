"""Attention masks of prefix trees (trainer.plant, trainer.collate), in the forms that Transformers' models take."""

from functools import partial

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

ALL = 1 << 30  # the window of a layer that has none


def windows_of(model: nn.Module) -> dict[str, int]:
    """{kind of layer: tokens that it looks back}; "" if the model knows no kinds. Empty if it can compute no trees: its
    attention takes no masks of others, or it has a state between tokens (Mamba, linear attention, convolutions)."""
    config = model.config.get_text_config()
    kinds = {*(getattr(config, "layer_types", None) or [""])}
    window = getattr(config, "sliding_window", None) or ALL
    takes_masks = model._supports_attention_backend and not model._is_stateful
    takes_masks = takes_masks and model.config._attn_implementation in ("sdpa", "eager", "flex_attention")
    if not takes_masks or kinds - {"", "full_attention", "sliding_attention"}:
        return {}
    return {kind: ALL if kind == "full_attention" else window for kind in kinds}


def tree_masks(model: nn.Module, end_BW: Tensor, position_BW: Tensor):
    """What each position of trees sees: a mask, or one for each kind of layer. A window counts the positions of a row,
    not places in the tree."""

    def sees(window, b, head, at, other):  # index tensors
        is_near = position_BW[b, at] - position_BW[b, other] < window
        return (other <= at) & (at < end_BW[b, other]) & is_near

    make = ALL_MASK_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    num, width = end_BW.shape
    how = {"device": end_BW.device, "dtype": model.dtype, "allow_is_causal_skip": False}
    windows = windows_of(model).items()
    masks = {kind: make(num, width, width, mask_function=partial(sees, size), **how) for kind, size in windows}
    return masks.get("", masks)
