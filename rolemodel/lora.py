"""Chooses the layers that LoRA adapts (trainer.add_lora gives them their factors)."""

import re
from collections import defaultdict

import torch.distributed as dist
from torch import nn

from rolemodel.config import DEFAULTS
from rolemodel.role import ConfigError, say


def target_layers(model: nn.Module, targets: list[str]) -> list[nn.Linear]:
    """The linear layers of the text part whose names end in a target. As in PEFT, ["all-linear"] means all of them
    except the head. Prints which ones were found, by kind of layer. Raises ConfigError if a target matches no layer, or
    if the default targets miss a whole kind of layer, such as the linear attention of a hybrid model."""
    tied = model.get_input_embeddings().weight  # a head that shares this weight cannot be merged
    layers = {}  # the dot makes a target match whole parts of names
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad and module.weight is not tied:
            layers[f".{name}"] = module  # load_model has made only the text part trainable
    if targets == ["all-linear"]:
        head = model.get_output_embeddings()
        targets = {name.rpartition(".")[2] for name, module in layers.items() if module is not head}
    for target in targets:
        if not any(name.endswith(f".{target}") for name in layers):
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            text = f"no untied linear layer's name ends in {target!r}, only in {known} (experts are not linear layers)"
            raise ConfigError(f"trainer.lora_target_modules: {text}")
    found = []
    kinds = defaultdict(dict)  # {kind, such as .model.layers.N.mlp: {layer: whether it is adapted}}
    for name, module in layers.items():
        kind, _, last = re.sub(r"\.\d+\.", ".N.", name).rpartition(".")
        kinds[kind][last] = any(name.endswith(f".{target}") for target in targets)
        found += [module] if kinds[kind][last] else []
    for kind, parts in kinds.items():
        adapted = [part for part in parts if parts[part]]
        if dist.get_rank() == 0:
            say(f"LoRA: {kind[1:] or 'the head'}: {', '.join(adapted) or 'nothing'}")
        # A kind that has only one layer is a router, which does not count.
        if not adapted and len(parts) > 1 and targets == DEFAULTS["trainer.lora_target_modules"]:
            text = f"the default adapts none of {', '.join(parts)} in {kind[1:]}"
            raise ConfigError(f"""trainer.lora_target_modules: {text}: set it, for example to ["all-linear"]""")
    return found
