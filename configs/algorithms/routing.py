"""Routing replay (R3, 2510.11370): a mixture of experts learns with the experts that the sampler chose.

Two engines round differently. Where two experts are nearly as good, vLLM's router then takes one and the trainer's the
other, and the log-probabilities of a token differ by whole nats. With trainer.replay_routing = true, vLLM says which
experts it took at each token and layer, the batch carries them as the field `routes`, and in training the routers
weigh these experts, by logits of their own, so that they still learn.

It needs vLLM's second model runner, which exists on GPUs only, and a model whose routers return logits, weights and
indices, as those of Qwen3-MoE and Mixtral do. A token takes 2 bytes per layer and expert in the batch file."""

import base64
import io
import re

import numpy as np
import torch
import torch.nn.functional as F

from configs.runtime.role import CONFIG, require
from env import ensure

UNKNOWN = -1  # the last token of a sequence was sampled, but never went through the model


def add_fields(r):
    """Gives each sequence of a rollout the field `routes` [tokens, layers, experts per token], int16."""
    for sequence in r.sequences:
        turn_T = np.asarray(sequence["turn"])
        parts = []
        num = 0
        for turn in np.unique(turn_T):
            routes_TLK = routes_of(r.state["replies"][turn])
            end = int((turn_T <= turn).sum()) - 1
            ensure(len(routes_TLK) == end, f"the server returned the experts of {len(routes_TLK)} tokens, not of {end}")
            parts.append(routes_TLK[num:])  # those before are known from the turns in which they were sampled
            num = end
        parts.append(np.full_like(parts[0], UNKNOWN, shape=(1, *parts[0].shape[1:])))
        sequence["routes"] = np.concatenate(parts)


def routes_of(reply):
    """The experts of all tokens of a reply but its last, prompt included."""
    text = reply["choices"][0].get("routed_experts")
    ensure(text, "the server returned no routed_experts, which trainer.replay_routing needs")
    return np.lib.format.read_array(io.BytesIO(base64.b64decode(text))).astype(np.int16)  # never a pickle


def install(policy):
    """Makes the routers take the experts of a micro-batch's routes, [B, W, layers, k], if it has any."""
    now = {"routes": None}

    def remember(policy, args):
        """Before a forward pass. Recomputation in its backward pass takes the same experts."""
        micro = args[0]
        routes = micro.get("routes")
        if routes is None:
            now["routes"] = None
            return
        padding = micro["ids_BW"].shape[1] - routes.shape[1]
        routes = F.pad(routes.long(), (0, 0, 0, 0, 0, padding), value=UNKNOWN)
        now["routes"] = routes.flatten(0, 1)

    def replay(layer):
        def hook(router, args, output):
            """After a router: its logits, and weights and indices of the experts it would take."""
            logits_NE, weight_NK, own_NK = output
            if now["routes"] is None:
                return output
            routes_NK = now["routes"][:, layer]
            routes_NK = torch.where(routes_NK == UNKNOWN, own_NK, routes_NK)
            replayed_NK = logits_NE.float().softmax(-1).gather(1, routes_NK)
            if getattr(router, "norm_topk_prob", True):
                replayed_NK = replayed_NK / replayed_NK.sum(-1, keepdim=True)
            return logits_NE, replayed_NK.to(weight_NK.dtype), routes_NK

        return hook

    names = []
    for name, module in policy.model.named_modules():
        if type(module).__name__ in ("Qwen3MoeTopKRouter", "MixtralTopKRouter"):
            layer = int(re.search(r"layers\.(\d+)\.", name)[1])
            module.register_forward_hook(replay(layer))
            names.append(name)
    what = "trainer.replay_routing is for mixtures of experts with the routers of Qwen3-MoE or Mixtral"
    require(names, CONFIG, what)
    policy.register_forward_pre_hook(remember)
