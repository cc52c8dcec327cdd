"""Peculiarities of model families: noise in training, and output stages that trainer.Policy does not have."""

from types import MethodType

import torch
from torch.distributed import fsdp
from transformers.modeling_layers import GradientCheckpointingLayer

from rolemodel.role import ConfigError


def without_dropout(config):
    """A model's configuration with all dropout of its text part set to 0. Otherwise, blocks in training mode would
    apply some."""
    text = config.get_text_config()
    text.update({key: 0.0 for key, value in text.to_dict().items() if "drop" in key and isinstance(value, float)})
    return config


def train(policy, mode=True):
    """Replaces nn.Module.train. Only LoRA's dropout and the recomputation of blocks are told of the training mode,
    since they need it. Everything else computes as it does in sampling: with the noise that some families add in
    training (dropout, jitter or sampling in routers, layers that are skipped), old and new log-probabilities would come
    from two different networks."""
    for module in policy.modules():
        module.training = mode and (hasattr(module, "lora_A") or isinstance(module, GradientCheckpointingLayer))
    return policy


def logp_by_model(policy, ids_L):
    """The log-probabilities of all tokens but the first, computed by the model's own forward."""
    logits_NV = policy.model(input_ids=ids_L[None], use_cache=False).logits[0, :-1].float()
    return logits_NV.log_softmax(-1).gather(-1, ids_L[1:, None])


@torch.no_grad()
def check_head(policy, dtype: str):
    """Raises ConfigError unless policy and model agree on the log-probabilities of a few tokens. They disagree if the
    family has a stage between base model and output embedding that the policy does not know. Collective."""
    ids_L = torch.arange(1, 9, device=policy.device)
    micro = {"ids_BW": ids_L[None], "tokens_N": ids_L[1:], "index_N": ids_L[1:] - 2}
    logp_N = policy(micro | {"temperature_N": torch.ones(7, device=policy.device)})[0]
    policy.logp_by_model = MethodType(logp_by_model, policy)
    fsdp.register_fsdp_forward_method(policy, "logp_by_model")  # it needs whole weights, as forward does
    difference = (logp_N - policy.logp_by_model(ids_L)[:, 0]).abs().mean().item()
    if not difference < (1e-3 if dtype == "fp32" else 0.2):  # a model may round logits to 16 bits; `not`: for nan
        text = f"{type(policy.model).__name__} cannot be trained: its log-probabilities are not those of its output"
        raise ConfigError(f"key 'model': {text} embedding, applied to its base model ({difference:.3g} nats apart)")
