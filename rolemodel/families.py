"""What families of models have of their own: noise in training, and stages of the head that trainer.Policy lacks."""

from types import MethodType

import torch
from torch.distributed import fsdp
from transformers.modeling_layers import GradientCheckpointingLayer

from rolemodel.role import ConfigError


def without_dropout(config):
    """A model's configuration without the dropout of its text part, of which blocks in training mode have some."""
    text = config.get_text_config()
    text.update({key: 0.0 for key, value in text.to_dict().items() if "drop" in key and isinstance(value, float)})
    return config


def train(policy, mode=True):
    """In the place of nn.Module.train: only LoRA's dropout and the recomputation of blocks learn of the training mode,
    and need it. Everything else computes as it samples. The noise that families have in training (dropout, jitter or
    sampling of routers, layers that are left out) would give old and new log-probabilities two different networks."""
    for module in policy.modules():
        module.training = mode and (hasattr(module, "lora_A") or isinstance(module, GradientCheckpointingLayer))
    return policy


def logp_by_model(policy, ids_L):
    """The log-probabilities of all tokens but the first, by the model's own forward."""
    logits_NV = policy.model(input_ids=ids_L[None], use_cache=False).logits[0, :-1].float()
    return logits_NV.log_softmax(-1).gather(-1, ids_L[1:, None])


@torch.no_grad()
def check_head(policy, dtype: str):
    """Raises ConfigError unless the policy gives a few tokens the log-probabilities that its model gives them: a family
    may have a stage between the base model and the output embedding. Collective."""
    ids_L = torch.arange(1, 9, device=policy.device)
    micro = {"ids_BW": ids_L[None], "tokens_N": ids_L[1:], "index_N": ids_L[1:] - 2}
    logp_N = policy(micro | {"temperature_N": torch.ones(7, device=policy.device)})[0]
    policy.logp_by_model = MethodType(logp_by_model, policy)
    fsdp.register_fsdp_forward_method(policy, "logp_by_model")  # it needs whole weights, as forward does
    difference = (logp_N - policy.logp_by_model(ids_L)[:, 0]).abs().mean().item()
    if not difference < (1e-3 if dtype == "fp32" else 0.2):  # a model may round its logits to 16 bits; nan is not below
        text = f"{type(policy.model).__name__} cannot be trained: its log-probabilities are not those of its output"
        raise ConfigError(f"key 'model': {text} embedding, applied to its base model ({difference:.3g} nats apart)")
