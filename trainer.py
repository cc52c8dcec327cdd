"""trainer.py owns the policy: log-probabilities, advantages, losses, AdamW, checkpoints, and weights to vLLM.

    env.py --rows, rewards--> orchestrator.py --batches/step_N.safetensors--> trainer.py (torchrun, FSDP2)
                               ^   | messages                                     |
        token ids, logprobs    |   v                                              |  torch.distributed broadcast
                             vLLM server(s)  <------------------------------------+  into WeightReceiver (below)
                               ^                                                  |
                               +--------- version file: "policy N is live" -------+

    torchrun --nproc-per-node 2 trainer.py config.toml                              # launch.sh does this
    python trainer.py config.toml --replay outputs/run/batches trainer.loss=grpo    # saved batches, no server, one rank

The algorithm is GRPO's: the log-probability of every token that earned a reward is weighted by that reward minus the
mean of its group. Every token of an optimizer step counts the same, whatever the length of its answer. The division by
the group's standard deviation and the KL to a reference are left out (trainer.advantage and trainer.beta bring them
back). In place of PPO's clip the default loss, CISPO, caps the importance weight, so that no token loses its gradient.

Shapes: L tokens of a sequence, T of all sequences in a list, N loss tokens, B rows of W positions, G rollouts in a
group, D hidden, V vocabulary. logp: the policy being trained; old_logp: the policy that sampled (vLLM's number);
prox_logp: the policy before the batch's first update; ref_logp: the KL reference (configs/algorithms/reference.py).
"""

import contextlib
import inspect
import json
import math
import os
import re
import shutil
import socket
import time
from collections import Counter, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import chain, count
from pathlib import Path

import httpx
import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import transformers
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed import fsdp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from transformers.core_model_loading import revert_weight_conversion

import configs
from configs.runtime.directory import cut_lines, identity, refuse_other, report_changes, run_directory, write_config
from configs.runtime.role import CONFIG, DATA, DIED, NUMERICS, STORAGE, RunError, heartbeat, require, run_role, say

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# --- model: LoRA, log-probabilities, FSDP2 ----------------------------------------------------------------------------


class LoRALinear(nn.Linear):
    """y = W x + (alpha / r) B A x (2106.09685), with W frozen. add_lora turns an nn.Linear into one."""

    def forward(self, x):
        x_dropped = F.dropout(x, self.dropout, self.training)
        low_rank = self.scale * F.linear(x_dropped, self.lora_A)
        return super().forward(x) + F.linear(low_rank, self.lora_B)


def add_lora(model, t):
    """Freezes the model and gives each linear layer whose name ends in a target fp32 factors A [r, in], B [out, r]."""
    tied = model.get_input_embeddings().weight  # a head that shares it cannot be merged
    linear = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad and module.weight is not tied:
            linear[f".{name}"] = module
    model.requires_grad_(False)
    for target in t.lora_target_modules:
        matched = [module for name, module in linear.items() if name.endswith(f".{target}")]
        known = sorted({name.split(".")[-1] for name in linear})
        what = f"trainer.lora_target_modules: {target!r} is none of the untied linear layers, {known}"
        require(matched, CONFIG, what)
        for module in matched:
            A = torch.empty(t.lora_rank, module.in_features)
            nn.init.kaiming_uniform_(A, a=math.sqrt(5))
            module.__class__ = LoRALinear
            module.scale = t.lora_alpha / t.lora_rank
            module.dropout = t.lora_dropout
            module.lora_A = nn.Parameter(A)
            module.lora_B = nn.Parameter(torch.zeros(module.out_features, t.lora_rank))


class Policy(nn.Module):
    """A Hugging Face causal LM that returns the log-probabilities of given tokens.

    The head runs inside this forward, where FSDP2 holds its weight. It works in chunks, which backward recomputes, so
    that no full [N, V] tensor ever exists."""

    CHUNK = 1 << 26  # logits of a chunk: 256 MiB in fp32, and about four such tensors exist at a time

    def __init__(self, model, device, head_dtype=None):
        super().__init__()
        self.model = model
        self.device = device
        self.head_dtype = head_dtype
        config = model.config.get_text_config()
        self.vocab = config.vocab_size
        self.softcap = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies its logits, Granite divides them, Gemma 2 caps them.
        divisor = getattr(config, "logits_scaling", None) or 1
        self.scale = getattr(config, "logit_scale", None) or 1 / divisor
        if device.type == "cuda":  # a chunk may then take a thirtieth of the GPU's memory
            self.CHUNK = torch.cuda.get_device_properties(device).total_memory >> 9
        self.extra = {}  # HACK HERE: tensors of yours, which checkpoints keep

    def trained(self):
        """{name: parameter} of what is trained."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def head(self, weights, hidden_ND, target_N, temperature_N):
        """Returns logp_N and entropy_N, stacked, in nats, from fp32 logits divided by the temperature.

        Stacked into one tensor: if a loss used only one of two, autograd would keep the recomputed chunk of the other
        alive. `weights` are the head's parameters."""
        head = self.model.get_output_embeddings()
        dtype = self.head_dtype or head.weight.dtype
        weights = {name: w.to(dtype) for name, w in weights.items()}
        logits_NV = torch.func.functional_call(head, weights, hidden_ND.to(dtype))
        logits_NV = logits_NV.float() * self.scale
        if self.softcap:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        log_p_NV = (logits_NV / temperature_N[:, None]).log_softmax(-1)
        nll_N = F.nll_loss(log_p_NV, target_N, reduction="none")
        entropy_N = -(log_p_NV.exp() * log_p_NV).sum(-1)
        return torch.stack((-nll_N, entropy_N))

    def forward(self, micro):
        """Returns logp_N and entropy_N of the micro-batch's loss tokens: fp32, nats, at the sampling temperature.

        There is no attention mask: padding stands at the end of a row, where a causal model never looks."""
        hidden_BWD = self.model.base_model(input_ids=micro["ids_BW"], use_cache=False).last_hidden_state
        hidden_ND = hidden_BWD.flatten(0, 1)[micro["index_N"]]
        weights = {}
        for name, p in self.model.get_output_embeddings().named_parameters():
            # Trained weights stay in fp32, so that the chunks' gradients accumulate in fp32.
            weights[name] = p.float() if p.requires_grad or self.head_dtype else p
        size = max(1, self.CHUNK // self.vocab)
        target_N = micro["tokens_N"].long()
        temperature_N = micro["temperature_N"]
        outputs = []
        for chunk in zip(hidden_ND.split(size), target_N.split(size), temperature_N.split(size)):
            outputs.append(checkpoint(self.head, weights, *chunk, use_reentrant=False))
        logp, entropy = zip(*outputs)
        return torch.cat(logp), torch.cat(entropy)  # no views: FSDP2's hooks would be lost with them

    def plain(self, row):
        """Log-probabilities of all tokens of a row but the first, by the model's own forward, for check_policy."""
        ids_W = torch.tensor(row, device=self.device)
        logits_WV = self.model(input_ids=ids_W[None], use_cache=False).logits[0]
        return -F.cross_entropy(logits_WV[:-1].float(), ids_W[1:], reduction="none")


def load_model(cfg):
    """The model with gradients for its text part. Its own dropout is off: otherwise old and new log-probabilities would
    come from two different networks. Raises RunError if it has no base model below its head."""
    t = cfg.trainer
    config = transformers.AutoConfig.from_pretrained(cfg.run.model)
    text = config.get_text_config()
    for key, value in text.to_dict().items():
        if "drop" in key and isinstance(value, float):
            text.update({key: 0.0})
    # For full training in 16 bits the files keep their dtype: all ranks of a node map them into memory once.
    dtype = DTYPES[t.dtype] if t.dtype == "fp32" or t.use_lora else "auto"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        cfg.run.model, config=config, dtype=dtype, attn_implementation=t.attn_implementation or None
    )
    what = f"model = {cfg.run.model!r}: {type(model).__name__} has no base model of its own"
    require(model.base_model is not model, CONFIG, what)
    model.requires_grad_(False)  # a composite model's tower for images stays frozen
    model.get_decoder().requires_grad_(True)
    model.get_output_embeddings().requires_grad_(True)
    return model


def compiled(forward):
    """The compiled forward of a block. FSDP2 hands a block views of its inputs in the first pass and none when it is
    recomputed. Dynamo would compile two graphs, which save different tensors, so here it sees views both times."""
    run = torch.compile(forward, dynamic=True)

    def with_view(hidden_BWD, *args, **kwargs):
        return run(hidden_BWD.view_as(hidden_BWD), *args, **kwargs)

    return with_view


def shard(policy, blocks, t):
    """Shards with FSDP2, one group per block and one for the rest. It also casts the fp32 master weights for compute.

    With trainer.replicas there are several copies of the sharded model, e.g. one per node, so that only gradients cross
    the network. With trainer.offload_optimizer parameters and optimizer rest in host memory."""
    world = dist.get_world_size()
    kind = policy.device.type
    require(world % t.replicas == 0, CONFIG, f"trainer.replicas = {t.replicas} does not divide {world} ranks")
    shape = (t.replicas, world // t.replicas)
    mesh = dist.init_device_mesh(kind, shape, mesh_dim_names=("replicate", "shard"))
    options = {"mesh": mesh if t.replicas > 1 else mesh["shard"]}
    if t.offload_optimizer and kind == "cuda":
        options["offload_policy"] = fsdp.CPUOffloadPolicy()
    for module in (*blocks, policy):
        if not t.use_lora:
            module.float()  # the master weights
        # The policy's own inputs hold temperatures, which must not be rounded.
        casts_inputs = module is not policy
        mixed = fsdp.MixedPrecisionPolicy(DTYPES[t.dtype], torch.float32, cast_forward_inputs=casts_inputs)
        fsdp.fully_shard(module, mp_policy=mixed, reshard_after_forward=True, **options)
        module.set_gradient_divide_factor(1.0)  # the loss is divided already
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    fsdp.register_fsdp_forward_method(policy, "plain")


def build_policy(cfg):
    """Loads the model, adds LoRA, compiles and shards it. Collective."""
    t = cfg.trainer
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(cfg.run.seed)  # every rank draws the same adapters
    model = load_model(cfg)
    if t.use_lora:
        add_lora(model, t)
    if t.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        # Only reentrant checkpoints need gradients of the inputs, and they would give the first block another graph.
        model.disable_input_require_grads()
    policy = Policy(model, device, DTYPES.get(t.head_dtype))
    if t.replay_routing:
        from configs.algorithms import routing

        routing.install(policy)
    names = model._no_split_modules or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if t.compile:
        torch._dynamo.config.recompile_limit = 64  # all blocks share their code
        policy.head = torch.compile(policy.head, dynamic=True)
        for block in blocks:
            block.forward = compiled(block.forward)  # not the module: FSDP2's hooks stay outside
    is_whole = dist.get_world_size() == 1 and t.replicas == 1 and not t.offload_optimizer
    if is_whole and t.dtype == "fp32":
        policy.to(device)  # nothing to shard or cast
    else:
        shard(policy, blocks, t)
    if t.dtype == "fp16":
        policy.extra["fp16_scale"] = torch.tensor(8.0)
    if t.beta:
        from configs.algorithms import reference

        reference.remember(policy)
    return policy.train()


def local(tensor):
    """A rank's own part of a parameter."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor):
    """The whole of a parameter, on every rank. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# --- a batch: from the orchestrator's file to padded micro-batches ----------------------------------------------------

# A training sequence is a dict of metadata (env, group, rollout, agent, reward, ...) and per-token fields, tensors [L]
# (routes: [L, layers, k]). Every rank reads the whole batch, and picks its part of each micro-batch by itself.
Batch = namedtuple("Batch", "sequences info")
# How much a token counts in each term of the loss (compute_loss). mask is True or False.
WEIGHTS = ("mask", "ce", "teacher")
# Widths of micro-batches are multiples of the first number; the second is the fixed cost of a pass, in tokens.
PADDING = {"cpu": (4, 128), "cuda": (64, 1024)}


def load_batch(path, cfg=None, step=None):
    """Waits for a file that orchestrator.save_batch writes and returns its Batch. Raises RunError if it is damaged, or
    belongs to another run or step; a replay gives no cfg and no step, and takes any."""
    while not path.exists():
        time.sleep(0.01)
    try:
        with safe_open(path, "pt") as file:
            fields = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata()
        sequences = json.loads(metadata.get("sequences") or metadata["samples"])  # as older files call them
        info = json.loads(metadata["info"])
        lens = fields.pop("lens").tolist()
        fields["at"] = torch.arange(sum(lens))  # each token's index in the whole batch
        for name in WEIGHTS:
            weight_T = fields.get(name, torch.zeros(sum(lens)))
            fields[name] = weight_T.nan_to_num()  # nan: its sequence lacks a field that others have
        for name, values_T in fields.items():
            for sequence, values in zip(sequences, values_T.split(lens)):
                sequence[name] = values
    except Exception as e:  # from safetensors, JSON or the file system
        raise RunError(STORAGE, f"{path} is damaged ({e}). Remove it and the batches after it") from e
    if cfg:
        refuse_other(info["run"], cfg, path)
        require(info["step"] == step, DATA, f"{path} holds batch {info['step']}")
    for i, s in enumerate(sequences):
        s.setdefault("trainable", True)
        s.setdefault("temperature", 1.0)  # demonstrations were not sampled
        s.setdefault("rollout", f"sequence {i}")  # demonstrations may have none
        # Sequences with the same key share a baseline.
        s["baseline_key"] = (s.get("env"), s.get("group"), s.get("agent", ""))
    return Batch(sequences, {"max_tokens": max(lens)} | info | {"num_tokens": sum(lens)})  # info's max_tokens, if any


def partition_by_length(lens, budget, ranks, multiple, overhead):
    """Lengths of sequences -> passes: lists of indices, shortest sequences first. A pass is one padded micro-batch on
    every rank.

    A rank gets every ranks-th row of a pass, at most `budget` padded tokens or a single row, so that it costs all ranks
    about the same. Widths are rounded up to a multiple, so that few differ. Dynamic programming over the sorted lengths
    finds the least padded area of the rank that has most, plus `overhead` tokens for each pass."""
    order = np.argsort(lens, kind="stable")
    widths = -(-np.asarray(lens)[order] // multiple) * multiple
    cost = np.zeros(len(lens) + 1)  # [n]: of the best partition of the n shortest
    start = np.zeros(len(lens) + 1, dtype=int)  # where its last pass begins
    for end, width in enumerate(widths, 1):
        most = ranks * max(1, budget // width)
        sizes = np.arange(min(end, most), 0, -1)  # of the last pass
        costs = cost[end - sizes] + -(-sizes // ranks) * width + overhead
        cost[end] = costs.min()
        start[end] = end - sizes[costs.argmin()]
    parts = []
    end = len(lens)
    while end:
        parts.insert(0, order[start[end] : end].tolist())
        end = start[end]
    return parts


def pad(rows, multiple):
    """Tensors [L] -> [B, W], padded with 0 on the right. W is a multiple of `multiple`."""
    padded_BW = pad_sequence(rows, batch_first=True)
    missing = -padded_BW.shape[1] % multiple
    return F.pad(padded_BW, (0, missing))


def collate(sequences, device):
    """Sequences -> one padded micro-batch, with, for each of its N loss tokens, as <name>_N, every per-token field and
    every number that its sequences have (nan where one has none). Loss tokens are those whose mask, ce or teacher is
    not 0.

    Two sequences, a b c and d e, whose mask is 0 1 1 and 0 1, at a width of 4:

        ids_BW    [[a b c 0], [d e 0 0]]    padding stands on the right
        tokens_N  [b c e]                   the loss tokens
        row_N     [0 0 1]                   the row of each
        index_N   [0 1 4]                   each is predicted one position before, in the flattened ids_BW

    If no token has a weight, the last one stands in, with weights of 0, since no rank may skip a pass. A sequence's
    first token, which nothing predicts, has no weight: orchestrator.save_batch checks it."""
    # 1. Token ids, padded to a common width, and which of them are loss tokens.
    tokens = [s["tokens"] for s in sequences]
    lens = [len(ids) for ids in tokens]
    weights = {}
    for name in WEIGHTS:
        weights[name] = torch.cat([s[name] for s in sequences])
    is_loss_T = has_weight(weights)
    if not is_loss_T.any():
        is_loss_T[-1] = True
    multiple, _ = PADDING[device.type]
    ids_BW = pad(tokens, multiple)
    are_loss = is_loss_T.split(lens)
    is_loss_BW = pad(are_loss, multiple)
    # 2. Where the loss tokens are, in the order of the rows.
    row_N, position_N = is_loss_BW.nonzero(as_tuple=True)
    micro = {"ids_BW": ids_BW.long()}
    micro["row_N"] = row_N
    micro["index_N"] = row_N * ids_BW.shape[1] + position_N - 1
    if "routes" in sequences[0]:  # [B, longest, layers, k] of all tokens, since each goes through the routers
        routes = [s["routes"] for s in sequences]
        micro["routes"] = pad_sequence(routes, batch_first=True)
    # 3. Fields have a value for each loss token; a number is the same for a whole sequence.
    for name in dict.fromkeys(chain(*sequences)):
        values = [s.get(name) for s in sequences]
        if any(map(torch.is_tensor, values)):
            x_T = torch.cat(values)
            micro[f"{name}_N"] = x_T[is_loss_T]
            continue
        x_B = torch.tensor([number(x) for x in values])
        if name == "reward" or not x_B.isnan().all():  # demonstrations have none, and may be alone here
            micro[f"{name}_N"] = x_B[row_N]
    for name, x in micro.items():
        micro[name] = x.to(device)
    return micro


def has_weight(values, suffix=""):
    """Which tokens of sequences, or of a micro-batch (suffix "_N"), have a weight in a term of the loss."""
    return torch.stack([values[name + suffix] != 0 for name in WEIGHTS]).any(0)


def number(x):
    """x as a float; nan if it is no number."""
    return float(x) if isinstance(x, int | float) else math.nan


def count_weights(sequences, weight):
    """The number of tokens with a weight that is not 0."""
    return int(torch.cat([s[weight] for s in sequences]).count_nonzero())


def count_all(sequences, info):
    """The denominators that losses have: of a whole optimizer step, the tokens with a weight in each term and the
    sequences with a reward; and max_tokens, the run's limit on an answer."""
    numbers = {f"num_{name}": count_weights(sequences, name) for name in WEIGHTS}
    numbers["num_mask"] = max(1, numbers["num_mask"])
    num_rewarded = sum(s.get("reward") is not None for s in sequences)  # not demonstrations
    return numbers | {"num_sequences": max(1, num_rewarded), "max_tokens": info["max_tokens"]}


def make_micros(policy, sequences, info, cfg):
    """This rank's padded micro-batches, as many as every other rank has. Each carries the counts (count_all) over all
    micro-batches and ranks; no rank needs to ask for them, since each has all sequences."""
    world = dist.get_world_size()
    numbers = count_all(sequences, info)
    lens = [len(s["tokens"]) for s in sequences]
    budget = cfg.trainer.micro_batch_size * cfg.run.max_seq_len
    micros = []
    for part in partition_by_length(lens, budget, world, *PADDING[policy.device.type]):
        rows = [sequences[i] for i in part[dist.get_rank() :: world]]
        if not rows:  # every rank takes part in every pass, this rank without a weight
            shortest = sequences[np.argmin(lens)]
            rows = [shortest | {name: torch.zeros_like(shortest[name]) for name in WEIGHTS}]
        micros.append(collate(rows, policy.device) | numbers)
    return micros


def check_tokens(policy, sequences):
    """Raises RunError with DATA if there is an empty sequence, or a token that the model does not know."""
    lens = [len(s["tokens"]) for s in sequences]
    tokens_T = torch.cat([s["tokens"] for s in sequences])
    is_unknown_T = (tokens_T < 0) | (tokens_T >= policy.vocab)
    unknown = tokens_T[is_unknown_T].tolist()
    what = f"a sequence of {min(lens)} tokens, ids {unknown[:9]} in a vocabulary of {policy.vocab}"
    require(min(lens) > 0 and not unknown, DATA, f"cannot be trained on: {what}")


# --- advantages and losses --------------------------------------------------------------------------------------------

# HACK HERE: an advantage maps the rewards of one group to one number per rollout; `group` holds their metadata.
ADVANTAGES = {
    "mean": lambda r_G, group: r_G - r_G.mean(),  # Dr. GRPO, 2503.20783
    "std": lambda r_G, group: (r_G - r_G.mean()) / (std(r_G) + 1e-4),  # GRPO, 2402.03300
    # compute_advantages then divides by the standard deviation of the batch's rewards (LitePPO, 2508.08221).
    "batch_std": lambda r_G, group: r_G - r_G.mean(),
    "leave_one_out": lambda r_G, group: (r_G - r_G.mean()) * len(r_G) / max(1, len(r_G) - 1),  # RLOO, 2402.14740
}


def std(r_G):
    """The standard deviation of a group; 0 if there is one rollout alone."""
    return r_G.std(correction=min(1, len(r_G) - 1))


def compute_advantages(groups, name):
    """[[metadata of a rollout, with its reward, ...], ...] -> [[its advantage, ...], ...], one list per group."""
    advantage = configs.find(name, ADVANTAGES)
    rewards = []
    advantages = []
    for group in groups:
        rewards_G = torch.tensor([rollout["reward"] for rollout in group], dtype=torch.float64)
        adv_G = advantage(rewards_G, group)
        ensure_shape(f"trainer.advantage = {name!r}", adv_G, rewards_G.shape)
        rewards.append(rewards_G)
        advantages.append(adv_G)
    # Over the whole batch: of rewards, or of the advantages themselves if the function says so.
    spread = []
    if name == "batch_std":
        spread = rewards
    if getattr(advantage, "over_batch", False):
        spread = advantages
    scale = torch.cat(spread).std(correction=0) + 1e-4 if spread else 1.0
    return [(adv_G / scale).tolist() for adv_G in advantages]


def ensure_shape(function, x, shape):
    """Raises RunError with DATA unless a function returned a tensor of this shape: another would be broadcast."""
    found = tuple(x.shape) if torch.is_tensor(x) else x
    require(found == tuple(shape), DATA, f"{function} returned {found!r}, not a tensor of shape {tuple(shape)}")


def add_advantages(sequences, t):
    """Gives each sequence a field adv: the advantage of its rollout, or of each turn if there are rewards by turn or
    trainer.gamma is below 1; 0 without a reward. A baseline is over (env, group, agent). Raises RunError with DATA if
    an advantage is not finite."""
    groups = {}
    for s in sequences:
        if s.get("reward") is not None:
            group = groups.setdefault(s["baseline_key"], {})
            group[s["rollout"]] = s  # if a rollout has several sequences (it forked), each carries its reward
    members = [list(group.values()) for group in groups.values()]
    by_turn = t.gamma < 1 or any(s.get("turn_rewards") for s in sequences)
    if by_turn:
        from configs.algorithms import turns

        table = turns.compute_advantages(members, t, compute_advantages)
    else:
        table = compute_advantages(members, t.advantage)
    adv_of = {}
    for key, group, advantages in zip(groups, groups.values(), table):
        for rollout, adv in zip(group, advantages):
            adv = torch.tensor(adv)
            what = f"trainer.advantage = {t.advantage!r}: not finite in group {key}, rollout {rollout!r}"
            require(adv.isfinite().all(), DATA, what)
            adv_of[key, rollout] = adv
    for s in sequences:
        adv = adv_of.get((s["baseline_key"], s["rollout"]), torch.tensor(0.0))
        if adv.dim():  # one for each turn
            s["adv"] = adv[s["turn"].long()]
        else:
            s["adv"] = adv.expand(len(s["tokens"]))


# HACK HERE: a loss maps a micro-batch to a loss per token and values to log: (loss_N, {metric: value_N}). Its keyword
# arguments are trainer.loss_args. micro holds every field at the loss tokens: adv_N, old_logp_N, reward_N, staleness_N,
# row_N (its row), ..., mask_N (False if the policy did not say it), and the step's counts from count_all. Below,
# r = exp(logp - old_logp), A is the advantage and sg() stops the gradient.
# configs/algorithms/losses.py has more of them.


def log_ratio(micro, logp_N):
    """log r, clamped so that exp cannot overflow: inf times an advantage of 0 would be nan."""
    return (logp_N - micro["old_logp_N"]).clamp(-20, 20)


def cispo(micro, logp_N, entropy_N, ratio_cap=5.0):
    """-sg(min(r, cap)) A logp: the weight is capped and no token dropped (MiniMax-M1, 2506.13585; the cap is ScaleRL's,
    2510.13786)."""
    r_N = log_ratio(micro, logp_N).exp().detach()
    loss_N = -r_N.clamp(max=ratio_cap) * micro["adv_N"] * logp_N
    return loss_N, {"policy/clip_frac": r_N > ratio_cap}


def grpo(micro, logp_N, entropy_N, epsilon=0.2, epsilon_high=0.28, delta=math.inf):
    """-min(min(r, delta) A, clip(r) A): PPO without a critic (2402.03300), with DAPO's range (2503.14476). delta caps
    the ratio where the advantage is negative as well (2505.07291 has 4)."""
    r_N = log_ratio(micro, logp_N).exp()
    adv_N = micro["adv_N"]
    clipped_N = r_N.clamp(1 - epsilon, 1 + epsilon_high) * adv_N
    capped_N = r_N.clamp(max=delta) * adv_N
    loss_N = -torch.minimum(capped_N, clipped_N)
    return loss_N, {"policy/clip_frac": (clipped_N < capped_N) | (capped_N != r_N * adv_N)}


def dr_grpo(micro, logp_N, entropy_N, epsilon=0.2, epsilon_high=0.2):
    """grpo over a constant, sequences x max_tokens, instead of the tokens there are: no bias by length (2503.20783)."""
    loss_N, logs = grpo(micro, logp_N, entropy_N, epsilon, epsilon_high)
    return loss_N * (micro["num_mask"] / (micro["num_sequences"] * micro["max_tokens"])), logs


LOSSES = {"cispo": cispo, "grpo": grpo, "dr_grpo": dr_grpo}


def k3(x_N):
    """KL(p || q) at tokens drawn from p, from x = log(q / p): exp(x) - 1 - x (joschu.net/blog/kl-approx.html)."""
    x_N = x_N.clamp(-20, 20)
    return torch.expm1(x_N) - x_N


def compute_loss(micro, logp_N, entropy_N, t):
    """HACK HERE: the micro-batch's share of the step's loss, and values to log: ({term: loss_N}, {metric: value_N}).

    The loss is the sum of the terms. Each has a weight per token, and is divided by the number of tokens in the whole
    optimizer step whose weight is not 0, so that neither micro-batches nor ranks change the result."""
    # 1. Policy gradient, on what the policy said. With trainer.importance the ratio is to prox_logp, and a factor
    # corrects for the distance of prox_logp from the sampler.
    is_own_N = micro["mask_N"]
    own_logp_N = torch.where(is_own_N, logp_N, logp_N.detach())  # elsewhere fields may be nan: no gradient, not 0 * nan
    anchored = micro
    if t.importance:
        prox_N = micro.setdefault("prox_logp_N", logp_N.detach())  # a single update has no other
        anchored = micro | {"old_logp_N": prox_N}
    returned = configs.find(t.loss, LOSSES)(anchored, own_logp_N, entropy_N, **t.loss_args)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    require(is_pair, DATA, f"trainer.loss = {t.loss!r} returned no pair: loss_N and {{metric: value_N}}")
    policy_N, logs = returned
    for name, x_N in {"loss": policy_N, **logs}.items():
        ensure_shape(f"trainer.loss = {t.loss!r}, {name}", x_N, logp_N.shape)
    if t.importance:
        importance = configs.find(t.importance)
        factor_N = importance(micro, logp_N.detach(), **t.importance_args)
        ensure_shape(f"trainer.importance = {t.importance!r}", factor_N, logp_N.shape)
        policy_N = policy_N * factor_N
        logs["policy/importance"] = factor_N
    # 2. KL to the reference, a part of the same term.
    if t.beta:
        kl_N = k3(micro["ref_logp_N"] - logp_N)
        policy_N = policy_N + t.beta * kl_N
        logs["policy/kl_ref"] = kl_N
    policy_N = torch.where(is_own_N, policy_N, 0)
    terms = {"policy": policy_N / micro["num_mask"]}
    # 3. Imitation: the cross-entropy of tokens, whoever said them.
    if micro["num_ce"]:
        ce_N = -micro["ce_N"] * logp_N
        terms["ce"] = ce_N / micro["num_ce"]
    # 4. Distillation: what a teacher thinks of the policy's words.
    if micro["num_teacher"]:
        teacher_N, logs["policy/kl_teacher"] = distillation(micro, logp_N)
        terms["teacher"] = teacher_N / micro["num_teacher"]
    return terms, logs


def distillation(micro, logp_N):
    """KL(policy || teacher) on what the policy said, by its score-function gradient: log p_teacher - logp, or -k1, is a
    token's reward (MiniLLM, 2306.08543; thinkingmachines.ai/blog/on-policy-distillation). Returns loss_N and k1_N,
    an estimate of the KL, which is 0 where there is no teacher."""
    is_taught_N = micro["teacher_N"] != 0
    k1_N = torch.where(is_taught_N, logp_N.detach() - micro["teacher_logp_N"], 0)
    r_N = log_ratio(micro, logp_N.detach()).exp().clamp(max=5.0)
    return micro["teacher_N"] * r_N * k1_N * logp_N, k1_N


def add_fields(policy, sequences, info, cfg):
    """HACK HERE: per-token fields that need a forward pass before the first update. Collective."""
    t = cfg.trainer
    if t.beta:
        from configs.algorithms import reference

        with reference.swapped_in(policy, t):
            add_logp("ref_logp", policy, sequences, info, cfg)
    # prox_logp, if something asks for it. With a single update, the log-probabilities of the step itself are that.
    if t.updates_per_batch * t.minibatches > 1:
        old_logps = [s["old_logp"][s["mask"]] for s in sequences]
        if t.importance or torch.cat(old_logps).isnan().any():
            add_logp("prox_logp", policy, sequences, info, cfg)


@torch.no_grad()
def add_logp(name, policy, sequences, info, cfg):
    """Adds the policy's log-probabilities of the loss tokens, without dropout, as a field; 0 elsewhere. Collective."""
    logp_T = torch.zeros(info["num_tokens"], device=policy.device)
    policy.eval()
    for micro in make_micros(policy, sequences, info, cfg):
        heartbeat()
        logp_N, _ = policy(micro)
        logp_T[micro["at_N"]] += where_trained(micro, logp_N)
    policy.train()
    dist.all_reduce(logp_T)  # each token is on one rank, 0 on the others
    for s in sequences:
        s[name] = logp_T[s["at"]].cpu()


def where_trained(micro, x_N):
    """x_N, and 0 on the token that stands in if a micro-batch has no loss token."""
    return torch.where(has_weight(micro, "_N"), x_N, 0)


# --- the step ---------------------------------------------------------------------------------------------------------


def schedule(step, t, total):
    """The factor on the learning rate: linear warm-up for at most half of the `total` steps, then constant, or a linear
    or cosine decay to 0. As in Transformers, "constant" has no warm-up; "constant_with_warmup" has."""
    warmup = max(t.warmup_steps, math.ceil(t.warmup_ratio * total))
    warmup = min(warmup, total // 2)
    if t.lr_scheduler_type == "constant":
        warmup = 0
    if step < warmup:
        return (step + 1) / (warmup + 1)
    left = (total - step) / max(total - warmup, 1)
    cosine = (1 - math.cos(math.pi * left)) / 2
    return {"linear": left, "cosine": cosine}.get(t.lr_scheduler_type, 1.0)


def begin_step(optimizer, step, cfg):
    """Sets the learning rate and each rank's seed for dropout from the step, so that a resumed run repeats them. Resets
    the peak of memory."""
    factor = schedule(step, cfg.trainer, cfg.run.max_steps)
    for group in optimizer.param_groups:
        initial_lr = group.setdefault("initial_lr", group["lr"])
        group["lr"] = factor * initial_lr
    torch.manual_seed(hash((cfg.run.seed, step, dist.get_rank())))  # on CPUs only 32 bits of it count
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def make_optimizer(policy, t):
    """AdamW, or what trainer.optimizer names: a function of the parameters, the [trainer] table and, if it has that
    argument, `names`, the parameters' names."""
    trained = policy.trained()
    params = list(trained.values())
    if t.optimizer:
        make = configs.find(t.optimizer)
        args = {}
        if "names" in inspect.signature(make).parameters:
            args["names"] = list(trained)
        optimizer = make(params, t, **args)
        takes_closure = "closure" in inspect.signature(optimizer.step).parameters
        what = f"trainer.optimizer = {t.optimizer!r}: its step() takes no closure, and could not be resumed"
        require(takes_closure, CONFIG, what)
        return optimizer
    betas = (0.9, t.adam_beta2)
    return torch.optim.AdamW(params, t.learning_rate, betas, weight_decay=t.weight_decay, fused=True)


def draw_minibatches(sequences, seed, num):
    """Divides the sequences at random into at most `num` parts, one for each optimizer step: the same parts on every
    rank, and after a resume."""
    order = np.random.default_rng(seed).permutation(len(sequences))
    minibatches = []
    for part in np.array_split(order, min(num, len(order))):
        minibatches.append([sequences[i] for i in sorted(part)])  # in the batch's order
    return minibatches


def apply_gradients(policy, optimizer, scale, max_norm):
    """Divides the gradients by `scale`, clips them and takes an optimizer step. Returns their norm; if it is not
    finite, every rank skips the step."""
    params = list(policy.trained().values())
    torch._foreach_div_([p.grad for p in params if p.grad is not None], scale)
    grad_norm = full(nn.utils.clip_grad_norm_(params, max_norm)).item()
    if math.isfinite(grad_norm):
        optimizer.step()
    policy.zero_grad()  # also of parameters that a user's optimizer leaves out
    adapt_loss_scale(policy, grad_norm)
    return grad_norm


def fill_in_old_logp(micro, logp_N):
    """Where the sampler's log-probability is unknown (nan), takes the policy's before the batch's first update, so that
    the ratio starts at 1: prox_logp_N from add_fields or, with a single update, logp_N itself."""
    prox_N = micro.get("prox_logp_N", logp_N)
    is_unknown_N = micro["old_logp_N"].isnan()
    micro["old_logp_N"] = torch.where(is_unknown_N, prox_N, micro["old_logp_N"])


def loss_scale(policy, micro, t):
    """The factor on a loss in fp16, by which apply_gradients divides. It takes back the division by the step's tokens,
    which leaves gradients too small for fp16."""
    if t.dtype != "fp16":
        return 1.0
    return policy.extra["fp16_scale"].item() * max(micro[f"num_{name}"] for name in WEIGHTS)


def adapt_loss_scale(policy, grad_norm):
    """Gradients that overflow halve fp16's scale four times; each step that goes well raises it a little, up to 8."""
    if "fp16_scale" in policy.extra:
        factor = 1.02 if math.isfinite(grad_norm) else 1 / 16
        policy.extra["fp16_scale"].mul_(factor).clamp_(max=8.0)


def distance_from_sampler(log_r_N):
    """Metrics per token. log r is cut at 5 in the KL: exp(12) at one token of 100,000 would dominate the mean."""
    return {"policy/kl_sampler": k3(log_r_N.clamp(max=5)), "policy/beyond_2_nats": log_r_N.abs() > 2}


def add_up(sums, logs, mask_N):
    """Adds what a micro-batch logs per token, where mask_N is True, to the sums of the step."""
    for name, value_N in logs.items():
        counted_N = torch.where(mask_N, value_N.detach(), 0)
        sums[name] += counted_N.sum().float()


def add_terms(sums, terms, num):
    """Adds the terms of a micro-batch's loss, and their sum, times `num`: they are means already, and token_means
    divides once more."""
    for name, term_N in terms.items():
        total = term_N.detach().sum() * num
        sums[f"loss/{name}"] += total
        sums["loss"] += total


def token_means(sums, num):
    """{name: sum on this rank} -> {name: sum on all ranks / num}. Collective."""
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, list(sums))
    names = sorted(set().union(*everyones))  # a loss may log something on one rank alone
    total = torch.tensor([float(sums[name]) for name in names])
    dist.all_reduce(total)
    means = total / num
    return dict(zip(names, means.tolist()))


def norm_metrics(grad_norms):
    """The mean norm of a batch's gradients; steps whose gradient was not finite are counted as skipped."""
    finite = list(filter(math.isfinite, grad_norms))
    mean = np.mean(finite or math.nan)  # nan if all were skipped
    return {"optim/grad_norm": mean, "optim/skipped": len(grad_norms) - len(finite)}


def train_step(policy, optimizer, batch, step, cfg):
    """Trains on one batch: updates_per_batch epochs of at most `minibatches` optimizer steps each. Collective.

    Returns the metrics (losses: means over epochs; what is logged per token: over the tokens that the policy said as
    well) and logp_T, the log-probability of each token in the first epoch, 0 if it is not trained. A gradient that is
    not finite changes no weight."""
    t = cfg.trainer
    started = time.perf_counter()
    sequences = [s for s in batch.sequences if s["trainable"]]
    require(sequences, DATA, f"step {step}: no sequence of the batch is trainable")
    num_said = max(1, count_weights(sequences, "mask"))
    num_tokens = batch.info["num_tokens"]  # in the whole file, prompts as well
    logp_T = torch.zeros(num_tokens, device=policy.device)
    # 1. The learning rate and the seed of dropout.
    begin_step(optimizer, step, cfg)
    # 2. What must be known before the first update.
    check_tokens(policy, sequences)
    add_advantages(sequences, t)
    add_fields(policy, sequences, batch.info, cfg)
    sums = Counter()
    grad_norms = []
    for epoch in range(t.updates_per_batch):
        seed = (cfg.run.seed, step, epoch)
        for part in draw_minibatches(sequences, seed, t.minibatches):
            micros = make_micros(policy, part, batch.info, cfg)
            share = len(part) / len(sequences)  # of the logged loss
            for micro in micros:
                # 3. Log-probabilities of the loss tokens.
                heartbeat()
                logp_N, entropy_N = policy(micro)
                fill_in_old_logp(micro, logp_N.detach())
                # 4. The loss and its gradient, summed over ranks (`shard`); over replicas after the last micro-batch.
                terms, logs = compute_loss(micro, logp_N, entropy_N, t)
                loss_N = sum(terms.values())
                if t.replicas > 1:
                    policy.set_requires_all_reduce(micro is micros[-1])
                scale = loss_scale(policy, micro, t)
                (scale * loss_N.sum()).backward()
                # 5. What is logged.
                logs["policy/entropy"] = entropy_N
                logs |= distance_from_sampler(logp_N - micro["old_logp_N"])
                add_up(sums, logs, micro["mask_N"])
                add_terms(sums, terms, share * num_said)
                if epoch == 0:
                    logp_T[micro["at_N"]] += where_trained(micro, logp_N.detach())
            # 6. The optimizer step.
            grad_norms.append(apply_gradients(policy, optimizer, scale, t.max_grad_norm))
    # 7. From all ranks, the log-probabilities and the means.
    dist.all_reduce(logp_T)  # each token is on one rank, 0 on the others
    metrics = token_means(sums, num_said * t.updates_per_batch)
    metrics |= norm_metrics(grad_norms)
    metrics["optim/lr"] = float(optimizer.param_groups[0]["lr"])
    seconds = time.perf_counter() - started
    metrics["time/train_s"] = seconds
    metrics["perf/tokens_per_s"] = t.updates_per_batch * num_tokens / seconds
    metrics["perf/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30  # 0 without CUDA
    return metrics, logp_T


# --- weights to vLLM: blocks, the sender, the receiver in vLLM's workers, a sync --------------------------------------


def stream_weights(model, dtype, only_lora):
    """Yields {name in the checkpoint: tensor}, block by block, as a sampler wants them: in dtype, with LoRA merged, or
    with only_lora A and B alone. A block is a transformer block (fused experts are converted as a whole) or one tensor
    outside of them. One exists at a time if the caller clears it. Collective: every rank goes through all of them."""
    params = dict(model.named_parameters())  # tied weights are in it once
    saved = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    blocks = {}
    for name in [*params, *buffers]:
        is_lora = "lora_" in name
        if is_lora == only_lora:
            prefix = re.match(r".+?\.\d+\.", name)  # model.layers.3.
            blocks.setdefault(prefix[0] if prefix else name, []).append(name)
    for names in blocks.values():
        block = {}
        for name in names:
            if name in buffers:
                block[name] = buffers[name]  # in its own dtype: 16 bits would change how a router's bias routes
            else:
                block[f"{name}.weight" if only_lora else name] = gather(model, name, dtype)
        block = revert_weight_conversion(model, block)
        if block:  # the conversion may leave nothing, and an empty block would end the stream
            yield block


def gather(model, name, dtype):
    """The whole of one parameter. A weight that has LoRA gets it merged in. Collective."""
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    weight = full(getattr(module, key).detach().to(dtype))
    if isinstance(module, LoRALinear) and key == "weight":
        B = full(module.lora_B.detach())
        A = full(module.lora_A.detach())
        merged = torch.addmm(weight.float(), B, A, alpha=module.scale)
        weight = merged.to(dtype)
    return weight


def make_process_group(store, rank, spec):
    """A process group apart from the default one, which FSDP and vLLM use. NCCL's watchdog kills the process when its
    limit has passed, so that is twice ours: our waits for HTTP and for the store end first, and are reported."""
    limit = timedelta(seconds=spec["timeout_s"])
    process_group = dist.ProcessGroup(store, rank, spec["size"])
    if spec["backend"] == "gloo":
        backend = dist.ProcessGroupGloo(store, rank, spec["size"], limit)
        process_group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    else:
        backend = dist.ProcessGroupNCCL(store, rank, spec["size"], 2 * limit)
        process_group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, backend)
    return process_group


# Small tensors share a message of this many bytes: a message costs 0.3 ms over gloo. DDP broadcasts in this way, too.
MESSAGE = 1 << 20


def send_block(sender, number, tensors):
    """Broadcasts {name: tensor}, block `number` of a sync, from rank 0. Names, shapes, dtypes go through the store."""
    header = []
    for name, w in tensors.items():
        dtype = str(w.dtype).removeprefix("torch.")
        header.append((name, list(w.shape), dtype))
    sender.store.set(f"block {number}", json.dumps(header))
    if tensors:
        sent = [w.to(sender.device).contiguous() for w in tensors.values()]
        dist._broadcast_coalesced(sender.process_group, sent, MESSAGE)


def receive_blocks(receiver, device):
    """The other end of send_block: yields (name, tensor) until an empty block comes."""
    for number in count():
        header = json.loads(receiver.store.get(f"block {number}"))
        if not header:
            return
        tensors = {}
        for name, shape, dtype in header:
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        dist._broadcast_coalesced(receiver.process_group, list(tensors.values()), MESSAGE)
        yield from tensors.items()
        del tensors  # frees them before the next block comes


class WeightSender:
    """Lives on rank 0 and talks to all servers. Weights go through torch.distributed, control through vLLM's routes:
    /pause, /collective_rpc -> WeightReceiver, /resume. A request, and so a whole stream, may take sync_timeout_s."""

    def __init__(self, cfg, run_dir, device):
        t = cfg.trainer
        self.cfg = cfg
        self.run_dir = run_dir
        self.urls = cfg.inference.urls
        require(self.urls, CONFIG, "inference.urls is empty: launch.sh starts servers and sets it")
        backend = t.sync_backend
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "gloo"
        self.device = device if backend == "nccl" else torch.device("cpu")
        self.spec = {"backend": backend, "timeout_s": t.sync_timeout_s}
        # A server may close an idle connection just as it is used. No proxy of the environment's is used.
        no_keep_alive = {"Connection": "close"}
        self.http = httpx.Client(timeout=t.sync_timeout_s, headers=no_keep_alive, trust_env=False)
        self.pool = ThreadPoolExecutor(len(self.urls))

    def connect(self):
        """Waits for the servers and forms a process group of rank 0 and all of their workers."""
        # 1. Servers of this run, and of no other: a stale one is never trained against.
        for url in self.urls:
            found = self.wait_ready(url)
            name = configs.served_name(self.cfg)
            require(found == name, CONFIG, f"a server of another run answers: {url} serves {found!r}, not {name!r}")
        # 2. A store that listens on one address only; with a socket of torch's own it would listen on all of them.
        listener = socket.create_server((self.cfg.trainer.sync_host, 0))
        host, port = listener.getsockname()
        limit = timedelta(seconds=self.spec["timeout_s"])
        self.store = dist.TCPStore(host, port, is_master=True, timeout=limit, master_listen_fd=listener.detach())
        # 3. The workers join when they are asked to.
        args = self.cfg.inference.args
        workers = args.get("tensor_parallel_size", 1) * args.get("pipeline_parallel_size", 1)
        self.spec |= {"host": host, "port": port, "size": 1 + workers * len(self.urls)}
        first_ranks = range(1, self.spec["size"], workers)
        with self.workers_do("join_weight_group", [{"first_rank": rank} for rank in first_ranks]):
            self.process_group = make_process_group(self.store, 0, self.spec)

    def wait_ready(self, url):
        """Waits until the server answers, and returns the name of the model that it serves."""
        limit = self.cfg.inference.startup_timeout
        deadline = time.monotonic() + limit
        while True:
            try:
                reply = self.http.get(f"{url}/v1/models")
                if reply.status_code == 200:
                    return reply.json()["data"][0]["id"]
                found = f"{reply.status_code} {reply.text[:200]}"  # a gateway's, until the server is up
            except httpx.TransportError as e:
                found = repr(e)
            what = f"{url}: {found}, for inference.startup_timeout = {limit:g} s"
            require(time.monotonic() < deadline, DIED, what)
            time.sleep(0.2)

    def post(self, url, path, body):
        try:
            reply = self.http.post(url + path, json=body)
        except httpx.TransportError as e:
            raise RunError(DIED, f"{url}{path}: {e!r} (trainer.sync_timeout_s = {self.spec['timeout_s']:g})") from e
        require(reply.status_code == 200, DIED, f"{url}{path} answered {reply.status_code}: {reply.text[-2000:]}")
        return reply

    def post_all(self, path, body=None):
        calls = [self.pool.submit(self.post, url, path, body) for url in self.urls]
        return [call.result() for call in calls]

    @contextlib.contextmanager
    def workers_do(self, method, specs):
        """Every worker of every server runs a method of WeightReceiver while rank 0 does the body of the `with`."""
        errors = []  # the first may be why the others happened

        def call(url, spec):
            try:
                self.post(url, "/collective_rpc", {"method": method, "args": [self.spec | spec]})
            except RunError as e:
                errors.append(str(e))
                if self.spec["backend"] == "nccl":  # rank 0 may be waiting for NCCL, where no error reaches it
                    configs.runtime.role.fail("trainer", e)

        calls = [self.pool.submit(call, url, spec) for url, spec in zip(self.urls, specs)]
        try:
            yield
        except RuntimeError as e:  # torch.distributed's as a rule: a worker died, or did not join in time
            hint = f"trainer.sync_timeout_s = {self.spec['timeout_s']:g}"
            if self.spec["backend"] == "nccl":
                hint += "; between GPUs without NVLink try NCCL_P2P_DISABLE=1, or trainer.sync_backend = gloo"
            errors.append(f"rank 0: {e} ({hint})")
        for done in calls:
            done.result()
        require(not errors, DIED, f"{method}: {'; '.join(errors)}")

    def ask(self, version, rows, num):
        """Has every server continue the rows. Returns [(num token ids, their logprobs), ...] by server and row."""
        body = {"model": configs.served_name(self.cfg, version), "prompt": rows, "max_tokens": num}
        body |= {"ignore_eos": True, "logprobs": 0, "return_token_ids": True}
        # A server that was started by hand may have other defaults than the plain distribution.
        body |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        body |= {"cache_salt": str(time.time()), "priority": -1}  # no keys of old weights, and before all rollouts
        choices = []
        for reply in self.post_all("/v1/completions", body):
            choices += reply.json()["choices"]
        return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices]


class WeightReceiver:
    """Mixed into every vLLM worker, by --worker-extension-cls. On CPUs it is configs/serving/cpu_receiver.py's."""

    def join_weight_group(self, spec):
        limit = timedelta(seconds=spec["timeout_s"])
        self.process_group = None  # drops an earlier trainer's
        self.store = dist.TCPStore(spec["host"], spec["port"], timeout=limit)
        self.process_group = make_process_group(self.store, spec["first_rank"] + self.rank, spec)

    def receive_weights(self, spec):
        device = self.device if spec["backend"] == "nccl" else "cpu"
        weights = receive_blocks(self, device)
        if not spec["adapter"]:
            return self.reload_weights(weights_iterator=weights)
        from configs.serving import adapters

        tensors = dict(weights)
        if self.rank == 0:  # once on each server
            adapters.write(tensors=tensors, **spec["adapter"])


def send_weights(sender, policy, version, cfg):
    """Streams the weights, or the adapter, to the servers. If the stream breaks off, paused servers stay paused and the
    adapter is not loaded: no server samples from weights of two versions. Collective; other ranks have no sender."""
    blocks = stream_weights(policy.model, DTYPES[cfg.trainer.dtype], cfg.sends_adapters)
    if not sender:
        deque(blocks, maxlen=0)  # takes part in gathering, and keeps nothing
        return
    adapter = None
    if cfg.sends_adapters:
        from configs.serving import adapters

        path = str(adapters.directory(sender.run_dir, version, cfg))
        old = str(adapters.no_longer_named(sender.run_dir, version, cfg))
        adapter = {"path": path, "old": old, "model": cfg.run.model}
        adapter["t"] = cfg.trainer._asdict()
    else:
        # Requests wait and then go on; with a cleared cache they would read their prompts again.
        sender.post_all("/pause?mode=keep&clear_cache=false")
    with sender.workers_do("receive_weights", [{"adapter": adapter}] * len(sender.urls)):
        for number, tensors in enumerate(chain(blocks, [{}])):  # an empty block is the end
            refuse_non_finite(tensors, f"sync of version {version}")
            send_block(sender, number, tensors)
            tensors.clear()  # it is the generator's `block` as well, which gathers the next one now
    for sent in range(number + 1):
        sender.store.delete_key(f"block {sent}")  # the next sync uses the same keys
    if cfg.sends_adapters:
        adapters.load(sender, version, cfg)
    else:
        sender.post_all("/resume")


def sync_weights(sender, policy, version, cfg, batch=None):
    """Sends `version` to all servers, checks it, announces it as live, and returns metrics. Collective: rank 0 alone
    talks to the servers."""
    started = time.perf_counter()
    send_weights(sender, policy, version, cfg)
    metrics = canary(sender, policy, version, cfg, batch)
    if sender:
        tmp = sender.run_dir / "version.tmp"
        tmp.write_text(str(version))
        os.replace(tmp, sender.run_dir / "version")
    return metrics | {"time/sync_s": time.perf_counter() - started}


@contextlib.contextmanager
def servers_asleep(sender, cfg):
    """inference.sleep: on a GPU that both share, the trainer uses vLLM's memory during a step. The servers keep the
    requests under way. If the step raises they stay asleep: the run is over. Collective."""
    if not cfg.inference.sleep:
        yield
        return
    if sender:
        sender.post_all("/sleep?level=1&mode=keep")
    dist.barrier()
    yield
    torch.cuda.empty_cache()
    dist.barrier()
    if sender:
        sender.post_all("/wake_up")


# --- does everybody compute the same? ---------------------------------------------------------------------------------

# Lengths of random rows, and how many rows there are. They differ, so that padding shows if it leaks into another row.
CANARY = (96, 80, 64, 56, 48, 40, 32, 24)
SAID = 4  # tokens sampled after each row; each costs a step of the engine, which it shares with the rollouts


def score(policy, rows, most):
    """Log-probabilities, in one padded micro-batch, of the last `most` tokens of each row, but never of its first."""
    sequences = []
    for row in rows:
        tokens = torch.tensor(row)
        mask = torch.arange(len(row)) >= max(1, len(row) - most)
        zeros = torch.zeros(len(row))
        sequences.append({"tokens": tokens, "mask": mask, "ce": zeros, "teacher": zeros, "temperature": 1.0})
    return policy(collate(sequences, policy.device))[0]


def compare(logp_N, other_N, t, mean_limit, what):
    """The largest and the mean difference, in nats, and what is wrong with them, or "": in fp32 the largest may be at
    most 1e-3, in 16 bits the mean at most mean_limit; trainer.max_sync_dlogp replaces either limit."""
    diff_N = (logp_N - other_N).abs()
    numbers = {"sync/dlogp_max": diff_N.max().item()}
    numbers["sync/dlogp_mean"] = diff_N.mean().item()
    key = "sync/dlogp_mean"
    if t.dtype == "fp32":
        key = "sync/dlogp_max"
        mean_limit = 1e-3
    limit = t.max_sync_dlogp or mean_limit
    # nan is not within it
    return numbers, "" if numbers[key] <= limit else f"{what}: {numbers}; {key} may be at most {limit:g}"


def random_rows(policy, cfg):
    """Token ids in rows of different lengths: nothing may leak from row to row."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for length in CANARY:
        size = min(length, cfg.run.max_seq_len // 2)
        row = torch.randint(policy.vocab, [size], generator=draw)
        rows.append(row.tolist())
    return rows


@torch.no_grad()
def check_policy(policy, cfg):
    """Checks that the policy in training mode, in a padded micro-batch, is the network of the model's own forward in
    evaluation mode, one row at a time. Raises RunError with CONFIG. It runs before a checkpoint is loaded: as long as
    B = 0, LoRA's dropout does nothing. Collective."""
    rows = random_rows(policy, cfg)
    policy.eval()
    own_N = torch.cat([policy.plain(row) for row in rows])
    policy.train()
    most = cfg.run.max_seq_len
    longest = (rows[0] * most)[:most]
    together_N = score(policy, rows, most)
    # Far from its end: a row's padding must not matter, nor the length by which some families choose their RoPE.
    beside_longest_N = score(policy, [rows[0], longest], most)[: len(rows[0]) - 1]
    logp_N = torch.cat((together_N, beside_longest_N))
    own_N = torch.cat((own_N, own_N[: len(rows[0]) - 1]))
    what = f"model = {cfg.run.model!r} cannot be trained: padded rows in training mode differ from its own forward"
    why = "dropout or noise of its own, logits that are not head(base model), rows that mix, or RoPE by length"
    # 0.2: random tokens are improbable, and in 16 bits their log-probabilities differ more.
    _, problem = compare(logp_N, own_N, cfg.trainer, 0.2, f"{what} ({why})")
    require(not problem, CONFIG, problem)


def canary_rows(batch, cfg):
    """Prompts of the batch for the servers to continue, so long that what all say fits into one micro-batch."""
    budget = min(cfg.trainer.micro_batch_size, 8) * cfg.run.max_seq_len
    num_servers = max(1, len(cfg.inference.urls))  # 0 on a second node, which knows of none
    room = budget // (len(CANARY) * num_servers) - SAID
    longest = min(room, cfg.run.max_seq_len // 2)
    stride = -(-len(batch.sequences) // len(CANARY))
    rows = []
    for s in batch.sequences[::stride]:
        prompt = int(s["mask"].int().argmax())  # tokens before the first that the policy said
        row = s["tokens"][: max(1, min(prompt, longest))]
        rows.append(row.tolist())
    return rows


def continuations(sender, policy, version, rows, num):
    """Log-probabilities of what all servers say after the rows, `num` tokens each: the trainer's and the servers'."""
    whole = []
    others = []
    answers = sender.ask(version, rows, num)
    for row, (ids, logps) in zip(rows * len(sender.urls), answers):
        whole.append(row + ids)
        others += logps
    return score(policy, whole, num), torch.tensor(others, device=policy.device)


@torch.no_grad()
def canary(sender, policy, version, cfg, batch):
    """Compares trainer and servers after a sync: metrics, in nats. Each server continues the same rows, and the trainer
    scores what they said in one padded micro-batch, as rollouts are. Rank 0 raises RunError with DIED. Collective."""
    rows = canary_rows(batch, cfg) if batch else random_rows(policy, cfg)
    what = f"canary after sync of version {version}: trainer and server differ"
    mean_limit = 0.05 if batch else 0.2  # after random rows every token is improbable, so less exact in 16 bits
    metrics = {}
    problem = ""
    policy.eval()
    # In 16 bits a mean over few tokens may be above the limit by chance: then eight times as many decide.
    for num in (SAID, 8 * SAID):
        num = min(num, cfg.run.max_seq_len // 2)
        if sender:
            logp_N, other_N = continuations(sender, policy, version, rows, num)
            metrics, problem = compare(logp_N, other_N, cfg.trainer, mean_limit, what)
        else:
            score(policy, rows[:1], SAID)  # takes part in the forward
        is_wrong = torch.tensor(float(bool(problem)), device=policy.device)
        dist.broadcast(is_wrong, 0)
        if not is_wrong or cfg.trainer.dtype == "fp32":
            break
    policy.train()
    require(not problem, DIED, problem)
    if sender and num > SAID:  # the second time they agreed
        say(f"warning: {what} at {SAID} tokens a row; at {num} they do not")
    return metrics


# --- what outlives the process ----------------------------------------------------------------------------------------


def refuse_non_finite(tensors, what):
    """Raises RunError with NUMERICS: weights that are not finite are neither written nor sent."""
    bad = []
    for name, tensor in tensors.items():
        part = local(tensor)
        if not part.sum().isfinite() and not part.isfinite().all():  # the sum is quick, but may overflow
            bad.append(name)
    require(not bad, NUMERICS, f"{what}: {len(bad)} of {len(tensors)} tensors are not finite: {', '.join(bad[:3])}")


def state_of(policy, optimizer):
    """{name: tensor, or a rank's part of it} of what training changes: parameters, optimizer, extra."""
    state = {f"extra/{name}": x for name, x in policy.extra.items()}
    for name, p in policy.trained().items():
        state[f"policy/{name}"] = p.detach()
        for key, value in optimizer.state[p].items():
            if value is not None:
                what = f"trainer.optimizer: {key} in its state is no tensor, and checkpoints keep tensors"
                require(torch.is_tensor(value), CONFIG, what)
                state[f"optimizer/{name}/{key}"] = value
    return state


FILE = 1 << 30  # bytes of a file in a checkpoint: a whole file is in host memory, twice


def divide_into_files(tensors):
    """{name: number of the file, from 1}: each rank's part of a file has about FILE bytes, or is a single tensor."""
    files = {}
    size = 0
    for name, tensor in tensors.items():
        files[name] = 1 + size // FILE
        size += tensor.nbytes // dist.get_world_size()
    return files


def shard_sizes(path):
    """{file: bytes} of a checkpoint's tensors. Of a missing file DCP says no more than that a size differs."""
    return {file.name: file.stat().st_size for file in path.glob("*.safetensors")}


def save_checkpoint(run_dir, step, policy, optimizer, cfg):
    """Every rank writes its part; any number of ranks can read it back. Rank 0 adds state.json with the files' sizes;
    one rename makes it exist, and then old checkpoints and batches go. Collective."""
    path = run_dir / "checkpoints" / f"step_{step:06d}"
    tmp = path.with_suffix(".tmp")
    tensors = state_of(policy, optimizer)
    refuse_non_finite(tensors, path)
    shutil.rmtree(tmp, ignore_errors=True)  # every rank tries
    dist.barrier()
    files = divide_into_files(tensors)
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp), files, save_distributed=True))
    if dist.get_rank() > 0:
        return
    state = {"step": step, "run": identity(cfg), "shards": shard_sizes(tmp)}
    (tmp / "state.json").write_text(json.dumps(state))
    os.rename(tmp, path)
    found = sorted(path.parent.glob("step_??????"))
    for old in found[: -cfg.checkpoint.keep]:
        shutil.rmtree(old)
    # No run is resumed from before the oldest one. The orchestrator resumes from the sampler state in the batch before.
    oldest = int(found[-cfg.checkpoint.keep :][0].name[5:])
    for file in (run_dir / "batches").glob("*_??????.safetensors"):
        number = int(file.stem[-6:])
        if cfg.checkpoint.keep_batches and number < oldest - cfg.checkpoint.keep_batches:
            file.unlink()


def load_checkpoint(path, policy, optimizer, cfg):
    """Loads in place and returns the step. Raises RunError with CONFIG if it belongs to another run or optimizer, with
    STORAGE if a file is missing or has another size. Collective."""
    remedy = f"Remove {path}, then the one before it, if any, is used"
    try:
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as e:
        raise RunError(STORAGE, f"{path}/state.json is damaged ({e!r}). {remedy}") from e
    sizes = shard_sizes(path)
    for name, size in state["shards"].items():
        require(sizes.get(name) == size, STORAGE, f"{path}/{name} is damaged. {remedy}")
    refuse_other(state["run"], cfg, path)
    reader = dcp.HuggingFaceStorageReader(str(path))
    saved = reader.read_metadata().state_dict_metadata
    if any(name.startswith("optimizer/") for name in saved):  # there is none if every step was skipped
        # For its side effect: torch takes a step at rate 0, which makes the tensors to load into.
        get_optimizer_state_dict(policy, optimizer)
    # Tensors in `extra` may be from a recipe that makes them later than this. <any>/<parameter> is sharded like the
    # parameter.
    for key, meta in saved.items():
        name = key.removeprefix("extra/")
        if key.startswith("extra/") and name not in policy.extra:
            like = {"dtype": meta.properties.dtype, "device": policy.device}
            p = policy.trained().get(name.partition("/")[2])
            if p is not None and p.shape == meta.size:
                policy.extra[name] = torch.zeros_like(p.detach(), **like)
            else:
                policy.extra[name] = torch.zeros(meta.size, **like)
    # A parameter that never had a gradient has no state there; all parameters must be there.
    wanted = {}
    for name, tensor in state_of(policy, optimizer).items():
        if name in saved or name.startswith("policy/"):
            wanted[name] = tensor
    lost = [name for name in saved if name.startswith("optimizer/") and name not in wanted]
    what = f"{path} has {len(lost)} tensors that this optimizer does not make in its first step: {lost[:3]}"
    require(not lost, CONFIG, f"{what}. Choose another run_name, whose model is this run's final/")
    dcp.load(wanted, storage_reader=reader)
    return state["step"]


def write_final(run_dir, policy, cfg):
    """Writes final/, which transformers (LoRA: peft) and vLLM load. Collective."""
    t = cfg.trainer
    final = run_dir / "final"
    tensors = {}
    for block in stream_weights(policy.model, DTYPES[t.dtype], t.use_lora):
        heartbeat()
        if dist.get_rank() == 0:
            for name, tensor in block.items():
                tensors[name] = tensor.cpu().contiguous()
    if dist.get_rank() > 0:
        return
    if t.use_lora:
        from configs.serving import adapters

        adapters.write(final, tensors, t._asdict(), cfg.run.model)
    else:
        final.mkdir(exist_ok=True)
        save_file(tensors, final / "model.safetensors", {"format": "pt"})
        source = Path(transformers.utils.cached_file(cfg.run.model, "config.json")).parent
        for file in source.glob("*_config.json"):  # of generation, and of a composite model's images
            shutil.copy(file, final)
        policy.model.config.dtype = DTYPES[t.dtype]
        policy.model.config.save_pretrained(final)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.run.model)
    if cfg.run.chat_template:
        tokenizer.chat_template = Path(cfg.run.chat_template).read_text()
    tokenizer.save_pretrained(final)


def log_step(run_dir, step, metrics, logp_T):
    """Writes every finite number to metrics.jsonl, logp beside the batch for tools, and a line to the console."""
    tmp = run_dir / "batches" / f"logp_{step:06d}.tmp"
    save_file({"logp": logp_T.cpu()}, tmp)
    os.replace(tmp, tmp.with_suffix(".safetensors"))
    line = {"step": step, "time": time.time(), "version": step + 1}
    for key, value in metrics.items():
        if value is not None and math.isfinite(value):
            line[key] = value
    with open(run_dir / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    shown = {"reward": "reward/mean", "loss": "loss", "kl": "policy/kl_sampler", "entropy": "policy/entropy"}
    text = [f"{name} {line[key]:.3g}" for name, key in shown.items() if key in line]
    say(" | ".join([f"step {step:5d}", *text, f"seconds {metrics['time/step_s']:.3g}"]))


# --- the loop ---------------------------------------------------------------------------------------------------------


def start_distributed(cfg):
    """Joins torchrun's ranks, or is the only rank without it. A rank waits twice as long for another as run.watchdog
    does for all of them: that is to act first."""
    limit = timedelta(seconds=2 * (cfg.run.watchdog + cfg.inference.startup_timeout))
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if "RANK" in os.environ:
        alone = {}
    is_hidden = not os.environ.get("CUDA_VISIBLE_DEVICES") or not torch.version.cuda
    is_cuda = torch.cuda.is_available()
    require(is_cuda or is_hidden, CONFIG, f"torch {torch.__version__} finds no GPU: is the driver too old?")
    if is_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo", timeout=limit, **alone)


def check_hooks(t):
    """Raises RunError with CONFIG if a function that trainer.* names does not exist, or does not take its arguments."""
    configs.find(t.optimizer, {"": None})
    check_call("trainer.advantage", configs.find(t.advantage, ADVANTAGES), 2)
    check_call("trainer.loss_args", configs.find(t.loss, LOSSES), 3, **t.loss_args)
    if t.importance:
        check_call("trainer.importance_args", configs.find(t.importance), 2, **t.importance_args)


def check_call(key, function, num, **args):
    """Raises RunError with CONFIG unless a function takes `num` arguments of ours, and `args`."""
    signature = inspect.signature(function)
    try:
        signature.bind(*range(num), **args)
    except TypeError as e:
        raise RunError(CONFIG, f"{key} = {args}: {e}; the function takes {signature}") from e


def resume(run_dir, policy, optimizer, cfg):
    """Loads the last checkpoint, if there is one, and returns its step. Collective."""
    found = max((run_dir / "checkpoints").glob("step_??????"), default=None)
    step = load_checkpoint(found, policy, optimizer, cfg) if found else 0
    if dist.get_rank() == 0:
        cut_lines(run_dir / "metrics.jsonl", step)
    return step


def saved_batches(cfg):
    """The batch files of --replay. max_steps, with which the schedule ends, becomes their number if they are fewer."""
    files = sorted(cfg.replay.glob("step_*.safetensors"))
    require(files, CONFIG, f"--replay {cfg.replay}: no step_*.safetensors there")
    last = min(cfg.run.max_steps, len(files))
    if last < len(files):
        say(f"warning: max_steps = {last} leaves out {len(files) - last} of the {len(files)} batches")
    cfg.run = cfg.run._replace(max_steps=last)
    return files


def count_useless(streak, numbers, step, is_replay):
    """The number of consecutive useless steps. Raises RunError with NUMERICS at three."""
    is_skipped = not math.isfinite(numbers["optim/grad_norm"])  # as a whole
    is_useless = is_skipped or (numbers["policy/kl_sampler"] > 1 and not is_replay)
    streak = streak + 1 if is_useless else 0
    what = f"no finite gradient, or a KL above 1, in three consecutive steps; step {step}: {numbers}"
    require(streak < 3, NUMERICS, what)
    return streak


def main(argv):
    """A rank's run, from the last checkpoint to max_steps. argv: see --help. RunError ends it."""
    cfg = configs.arguments(__doc__, argv, replay=True)
    check_hooks(cfg.trainer)
    is_replay = cfg.replay is not None
    run_dir = run_directory(cfg, f"-replay-{cfg.trainer.loss}" if is_replay else "")
    files = []
    if is_replay:
        report_changes(run_dir, configs.to_toml(cfg))
        files = saved_batches(cfg)
    last = cfg.run.max_steps
    # 1. The policy, its optimizer, and where the last run ended.
    start_distributed(cfg)
    is_first = dist.get_rank() == 0
    policy = build_policy(cfg)
    check_policy(policy, cfg)
    optimizer = make_optimizer(policy, cfg.trainer)
    step = resume(run_dir, policy, optimizer, cfg)
    if is_replay:
        require(step < last, CONFIG, f"{run_dir} has all {last} steps: choose another run_name, or remove it")
        if is_first:
            write_config(run_dir, configs.to_toml(cfg))
    # 2. The servers get the weights: that makes version `step` live.
    sender = None
    if not is_replay:
        if is_first:
            sender = WeightSender(cfg, run_dir, policy.device)
            sender.connect()
        sync_weights(sender, policy, step, cfg)
    streak = 0
    logged = time.perf_counter()
    while step < last:
        # 3. The orchestrator's batch, or a saved one. The time of the last step's checkpoint counts for this one.
        began = logged
        asked = time.perf_counter()
        if is_replay:
            batch = load_batch(files[step])
        else:
            batch = load_batch(run_dir / "batches" / f"step_{step:06d}.safetensors", cfg, step)
        metrics = batch.info.get("metrics", {}) | {"time/checkpoint_s": asked - began}
        metrics["time/wait_batch_s"] = time.perf_counter() - asked
        # 4. The optimizer steps.
        with servers_asleep(sender, cfg):
            numbers, logp_T = train_step(policy, optimizer, batch, step, cfg)
        state_of(policy, optimizer)  # fail now if the optimizer cannot be saved
        streak = count_useless(streak, numbers, step, is_replay)
        metrics |= numbers
        step += 1
        # 5. The new weights go to the servers, whose rollouts of the next batches go on.
        if not is_replay:
            metrics |= sync_weights(sender, policy, step, cfg, batch)
        if is_first:
            metrics["time/step_s"] = time.perf_counter() - began
            log_step(run_dir, step - 1, metrics, logp_T)
        logged = time.perf_counter()
        is_due = cfg.checkpoint.every and step % cfg.checkpoint.every == 0
        if is_due or step == last:
            save_checkpoint(run_dir, step, policy, optimizer, cfg)
    write_final(run_dir, policy, cfg)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_role("trainer")
