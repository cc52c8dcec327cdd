"""trainer.py owns the policy: log-probabilities, advantages, losses, AdamW, checkpoints, and weights to vLLM.

    env.py --rows, rewards--> orchestrator.py --batches/step_N.safetensors--> trainer.py (torchrun, FSDP2)
                               ^   | messages                                     |
        token ids, logprobs    |   v                                              |  torch.distributed broadcast
                             vLLM server(s)  <------------------------------------+  into WeightReceiver (below)
                               ^                                                  |
                               +--------- version file: "policy N is live" -------+

    torchrun --nproc-per-node 2 trainer.py config.toml                              # launch.sh does this
    python trainer.py config.toml --replay outputs/run/batches trainer.loss=grpo    # saved batches, no server, one rank

The algorithm is GRPO's: a reward minus the mean of its group weighs the log-probability of each token that earned it.
Left out of it: the division by the group's deviation, the KL to a reference (trainer.advantage and trainer.beta bring
them back), and PPO's clip: the default loss, CISPO, caps the importance weight, so no token loses its gradient.

Shapes: N loss tokens, B rows, W places in a row, T tokens of a batch, G rollouts of a group, D hidden, V vocabulary.
logp: the policy being trained; old_logp: the policy that sampled (vLLM's number); ref_logp: the KL reference
(configs/algorithms/reference.py).
"""

import json
import math
import os
import shutil
import socket
import time
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
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
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.utils.checkpoint import checkpoint

import configs
from configs import RunError, beat, named, refuse_other, require, served_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# --- model: LoRA, log-probabilities, FSDP2 ----------------------------------------------------------------------------


class LoRALinear(nn.Linear):
    """y = W x + alpha/r B A x (2106.09685). W is frozen and never changed. add_lora turns nn.Linear into it."""

    def forward(self, x):
        low = F.linear(F.dropout(x, self.dropout, self.training), self.lora_A)
        return F.linear(x, self.weight, self.bias) + F.linear(self.scale * low, self.lora_B)


def add_lora(model, t):
    """Freezes the model; each linear layer whose name ends in a target gets fp32 factors A [r, in] and B [out, r]."""
    tied = model.get_input_embeddings().weight  # a head that shares it cannot be merged
    fits = lambda m: isinstance(m, nn.Linear) and m.weight.requires_grad and m.weight is not tied
    linear = {f".{name}": m for name, m in model.named_modules() if fits(m)}
    names = sorted({name.split(".")[-1] for name in linear})
    model.requires_grad_(False)
    for target in t.lora_target_modules:
        matched = [m for name, m in linear.items() if name.endswith(f".{target}")]
        require(matched, 2, f"trainer.lora_target_modules: {target!r} is none of the untied linear layers, {names}")
        for m in matched:
            m.__class__, m.scale, m.dropout = LoRALinear, t.lora_alpha / t.lora_rank, t.lora_dropout
            m.lora_A = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(t.lora_rank, m.in_features), a=math.sqrt(5)))
            m.lora_B = nn.Parameter(torch.zeros(m.out_features, t.lora_rank))


class Policy(nn.Module):
    """A Hugging Face causal LM that returns log-probabilities of given tokens. The head runs inside this forward, where
    FSDP2 holds its weight; in parts of CHUNK logits, and again in backward: no full [N, V] tensor exists."""

    # 256 MiB in fp32, of which there are about four at a time; of a GPU's memory a thirtieth
    CHUNK = 1 << 26

    def __init__(self, model, device, head_dtype=None):
        super().__init__()
        self.model, self.device, self.head_dtype, c = model, device, head_dtype, model.config.get_text_config()
        self.scale = getattr(c, "logit_scale", None) or 1 / (getattr(c, "logits_scaling", None) or 1)
        self.softcap, self.vocab = getattr(c, "final_logit_softcapping", None), c.vocab_size
        self.CHUNK = torch.cuda.get_device_properties(device).total_memory >> 9 if device.type == "cuda" else self.CHUNK
        self.extra = {}  # HACK HERE: tensors and numbers of yours, which checkpoints keep

    def head(self, weights, hidden_ND, target_N, temperature_N):
        """-> logp_N and entropy_N, stacked, in nats, of fp32 logits over the temperature. One tensor: of two, of which
        a loss uses one, backward would keep what it has recomputed for the other, of every chunk.

        weights: the head's parameters. Those that are trained are in fp32: in it the chunks' gradients add up."""
        head = self.model.get_output_embeddings()
        dtype = self.head_dtype or head.weight.dtype
        weights = {name: w.to(dtype) for name, w in weights.items()}
        logits_NV = torch.func.functional_call(head, weights, hidden_ND.to(dtype)).float() * self.scale
        if self.softcap:
            logits_NV = torch.tanh(logits_NV / self.softcap) * self.softcap
        log_p_NV = (logits_NV / temperature_N[:, None]).log_softmax(-1)
        return -torch.stack((F.nll_loss(log_p_NV, target_N, reduction="none"), (log_p_NV.exp() * log_p_NV).sum(-1)))

    def forward(self, micro):
        """-> logp_N, entropy_N of the micro-batch's loss tokens; fp32, nats, at the sampling temperature.

        No attention mask: filler stands at the end of a row, where no causal model looks."""
        hidden_BWD = self.model.base_model(input_ids=micro["ids_BW"], use_cache=False).last_hidden_state
        parts = hidden_BWD.flatten(0, 1)[micro["index_N"]], micro["target_N"], micro["temperature_N"]
        params = self.model.get_output_embeddings().named_parameters()
        weights = {name: p.float() if p.requires_grad or self.head_dtype else p for name, p in params}
        chunks = zip(*(x.split(self.CHUNK // self.vocab or 1) for x in parts))
        logp, entropy = zip(*(checkpoint(self.head, weights, *chunk, use_reentrant=False) for chunk in chunks))
        return torch.cat(logp), torch.cat(entropy)  # no views: FSDP2's hooks would be lost with them

    def plain(self, row):
        """-> logp of a row's tokens but the first, by the model's own forward: what check_policy compares with."""
        ids_W = torch.tensor(row, device=self.device)
        logits_WV = self.model(input_ids=ids_W[None], use_cache=False).logits[0].float()
        return -F.cross_entropy(logits_WV[:-1], ids_W[1:], reduction="none")


def load_model(cfg):
    """The model without dropout of its own: else old and new log-probabilities are of two networks. For full training
    in 16 bits as its files are, which all ranks of a node map into memory once."""
    path, t, config = cfg.run.model, cfg.trainer, transformers.AutoConfig.from_pretrained(cfg.run.model)
    text, is_whole = config.get_text_config(), t.dtype == "fp32" or t.use_lora
    how = {"dtype": DTYPES[t.dtype] if is_whole else "auto"}
    text.update({key: 0.0 for key, value in text.to_dict().items() if "drop" in key and isinstance(value, float)})
    how |= {"config": config, "attn_implementation": t.attn_implementation or None}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, **how).requires_grad_(False)
    require(model.base_model is not model, 2, f"model = {path!r}: {type(model).__name__} has no base model of its own")
    for part in (model.get_decoder(), model.get_output_embeddings()):  # not what a composite model has for images
        part.requires_grad_(True)
    return model


def compiled(forward):
    """The compiled forward of a block. FSDP2 hands the block views of its inputs in the first pass and none when it is
    recomputed. Dynamo would compile two graphs, which save different tensors, so here it sees views both times."""
    run = torch.compile(forward, dynamic=True)
    return lambda hidden_BWD, *args, **kwargs: run(hidden_BWD.view_as(hidden_BWD), *args, **kwargs)


def build_policy(cfg):
    """Load, add LoRA, shard with FSDP2: a group per block, one for the rest. FSDP2 also casts fp32 masters down."""
    from torch.distributed import fsdp

    t, world, kind = cfg.trainer, dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(cfg.run.seed)  # every rank draws the same adapters
    model = load_model(cfg)
    if t.use_lora:
        add_lora(model, t)
    if t.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.disable_input_require_grads()  # only reentrant ones need it; the first block would be another graph
    blocks = [m for m in model.modules() if type(m).__name__ in (model._no_split_modules or ())]
    for block in blocks if t.compile else ():  # not the module: FSDP2's hooks stay outside
        block.forward = compiled(block.forward)
    policy = Policy(model, torch.device(kind), DTYPES.get(t.head_dtype))
    if t.compile:
        policy.head = torch.compile(policy.head, dynamic=True)
        torch._dynamo.config.recompile_limit = 64  # of all blocks, which share their code
    is_plain = t.replicas == 1 and not t.offload_optimizer
    if world == 1 and t.dtype == "fp32" and is_plain:
        policy.to(policy.device)  # nothing to shard or cast
    else:
        how = {"mesh": dist.init_device_mesh(kind, (world,))} if is_plain else named("sharding:placement", {})(kind, t)
        for module in (*blocks, policy):  # the root's inputs hold temperatures: not to be rounded
            if not t.use_lora:
                module.float()  # the masters
            mixed = fsdp.MixedPrecisionPolicy(DTYPES[t.dtype], torch.float32, cast_forward_inputs=module is not policy)
            fsdp.fully_shard(module, mp_policy=mixed, reshard_after_forward=True, **how)
            module.set_gradient_divide_factor(1.0)  # the loss is divided already
            module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        fsdp.register_fsdp_forward_method(policy, "plain")
    if t.beta:
        named("reference:remember", {})(policy)
    return policy.train()


def trained(policy):
    return {name: p for name, p in policy.named_parameters() if p.requires_grad}


def local(tensor):
    """A rank's own part of a parameter."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def full(tensor):
    """The whole of a parameter, on every rank. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# --- a batch: from the orchestrator's file to rectangles --------------------------------------------------------------

# columns: {name: [T]}, a value per token; of `samples`, which is the metadata, the numbers are columns, too
Batch = namedtuple("Batch", "columns lens samples info")
SHAPES = {"cpu": (4, 128), "cuda": (64, 1024)}  # widths are multiples of; a pass costs as much as so many tokens


def load_batch(path, cfg=None, step=None):
    """Waits for the file, whose format is orchestrator.save_batch's, and reads it -> Batch. cfg and step, where it is
    not a replay: this run's. Raises RunError for what is damaged, or of another run or step."""
    while not path.exists():
        time.sleep(0.01)
    try:
        with safe_open(path, "pt") as f:
            columns = {name: f.get_tensor(name) for name in f.keys()}
            samples, info = (json.loads(f.metadata()[name]) for name in ("samples", "info"))
        lens = columns.pop("lens").long()
    except Exception as e:  # of safetensors, JSON, or the file system
        raise RunError(6, f"{path} is damaged ({e}). Remove it and the batches after it") from e
    info = {"rollouts": len(lens), "max_tokens": int(lens.max())} | info
    if cfg:
        refuse_other(info["run"], cfg, path)
        require(info["step"] == step, 4, f"{path} holds batch {info['step']}")
    names = {k for s in samples for k, v in s.items() if isinstance(v, int | float)}
    columns |= {k: torch.tensor(np.array([s.get(k) for s in samples], "f4")).repeat_interleave(lens) for k in names}
    return Batch(columns, lens, samples, info)


def cut(lens, budget, ranks, multiple, overhead):
    """Sample lengths -> rectangles: lists of indices, lengths ascending. A rank computes every ranks-th row of each, at
    most `budget` tokens (or one row), so a pass costs all ranks alike.

    Dynamic programming over the sorted lengths: the least area per rank, plus `overhead` tokens a pass. Widths are
    rounded up to a multiple, for few shapes."""
    order = np.argsort(lens, kind="stable")
    widths = -(-np.asarray(lens)[order] // multiple) * multiple
    best, start = np.zeros(len(lens) + 1), np.zeros(len(lens) + 1, dtype=int)
    for end, width in enumerate(widths, 1):
        rows = np.arange(min(end, ranks * max(1, budget // width)), 0, -1)  # of a rectangle that ends here
        cost = best[end - rows] + -(-rows // ranks) * width + overhead
        best[end], start[end] = cost.min(), end - rows[cost.argmin()]
    rectangles, end = [], len(lens)
    while end:
        rectangles.insert(0, order[start[end] : end].tolist())
        end = start[end]
    return rectangles


def collate(batch, indices, device):
    """Samples -> a right-padded rectangle and, at its N loss tokens, every column as <name>_N. Without a loss token
    there is one filler with mask_N = False, so that every rank makes the same number of passes."""
    index_B, tokens_T, multiple = torch.tensor(indices or [0]), batch.columns["tokens"], SHAPES[device.type][0]
    lens_B = batch.lens[index_B] * bool(indices)
    place_W = torch.arange(-(-max(2, int(lens_B.max())) // multiple) * multiple)
    at_BW = (batch.lens.cumsum(0) - batch.lens)[index_B][:, None] + place_W
    is_real_BW, at_BW = place_W < lens_B[:, None], at_BW.clamp(max=len(tokens_T) - 1)
    is_loss_BW = batch.columns["mask"][at_BW] & is_real_BW
    is_empty = not is_loss_BW.any()
    is_loss_BW[0, 1] |= is_empty
    row_N, place_N = is_loss_BW.nonzero(as_tuple=True)
    at_N = at_BW[row_N, place_N]
    micro = {"temperature_N": torch.ones(len(row_N))} | {f"{name}_N": x[at_N] for name, x in batch.columns.items()}
    micro |= {"ids_BW": torch.where(is_real_BW, tokens_T[at_BW], 0).long(), "target_N": tokens_T[at_N].long()}
    micro["index_N"] = row_N * len(place_W) + place_N - 1  # the place before each, in the flat rectangle
    micro |= {"at_N": at_N, "sample_N": row_N, "mask_N": torch.full_like(row_N, not is_empty, dtype=torch.bool)}
    return {name: x.to(device, non_blocking=True) for name, x in micro.items()}


# --- advantages and losses --------------------------------------------------------------------------------------------

# HACK HERE: an advantage maps the rewards of one group to one number per rollout; `group` holds their metadata.
ADVANTAGES = {
    "mean": lambda r_G, group: r_G - r_G.mean(),  # Dr. GRPO, 2503.20783
    "std": lambda r_G, group: (r_G - r_G.mean()) / (r_G.std() + 1e-4),  # GRPO, 2402.03300
    "batch_std": lambda r_G, group: r_G - r_G.mean(),  # and over the batch's std, below (LitePPO, 2508.08221)
    "leave_one_out": lambda r_G, group: (r_G - r_G.mean()) * len(r_G) / (len(r_G) - 1),  # RLOO, 2402.14740
}


def compute_advantages(groups, name):
    """[[a rollout's metadata, with its reward, ...], ...] -> [[its advantage, ...], ...]"""
    rewards = [torch.tensor([member["reward"] for member in group], dtype=torch.float64) for group in groups]
    scale = torch.cat(rewards).std(correction=0) + 1e-4 if name == "batch_std" else 1.0
    return [(named(name, ADVANTAGES)(r_G, group) / scale).tolist() for r_G, group in zip(rewards, groups)]


def add_advantages(batch, t):
    """-> the batch with a column adv: each token has its rollout's advantage, or its turn's; demonstrations have 1."""
    if t.loss != "sft" and (t.gamma < 1 or any(s.get("turn_rewards") for s in batch.samples)):
        return named("turns:add_advantages", {})(batch, t, add_advantages)
    groups, keys = {}, [(s.get("env"), s.get("group"), s.get("rollout")) for s in batch.samples]
    for key, s in zip(keys, batch.samples):
        groups.setdefault(key[:2], {})[key] = s  # of a fork: any
    adv_of = dict.fromkeys(keys, 1.0)
    if t.loss != "sft":
        table = compute_advantages([list(group.values()) for group in groups.values()], t.advantage)
        adv_of = {key: adv for group, row in zip(groups.values(), table) for key, adv in zip(group, row)}
    adv_T = torch.tensor([adv_of[key] for key in keys]).repeat_interleave(batch.lens)
    require(adv_T.isfinite().all(), 4, f"trainer.advantage = {t.advantage!r}: not finite for some tokens")
    return batch._replace(columns=batch.columns | {"adv": adv_T})


EPSILON = {"grpo": (0.2, 0.28), "dr_grpo": (0.2, 0.2)}  # DAPO 2503.14476; 2503.20783


def compute_loss(micro, logp_N, entropy_N, cfg):
    """HACK HERE: loss per token and values to log -> (loss_N, {metric: value_N}); "module:function" in trainer.loss
    names another one (configs/algorithms/losses.py has some). micro holds every column at the loss tokens: adv_N, old_logp_N,
    reward_N, age_N, sample_N (the row), ..., mask_N (False on filler), and of the whole step, over all ranks, the
    numbers tokens, samples, rollouts and max_tokens. cfg is the [trainer] table.

    The step divides the sum of loss_N by `tokens`; a loss with another divisor multiplies by its share. So a bonus or
    a KL is a token mean whatever the loss divides by. Below, r = pi / pi_old, A the advantage, sg no gradient."""
    log_r_N = (logp_N - micro["old_logp_N"]).clamp(-20, 20)  # before exp: inf would meet zero advantages
    r_N, adv_N = log_r_N.exp(), micro["adv_N"]
    if cfg.loss == "sft":  # cross-entropy on demonstrations
        loss_N, is_clipped_N = -logp_N, torch.zeros_like(micro["mask_N"])
    elif cfg.loss == "cispo":  # -sg(min(r, cap)) A logp: capped weight, no token dropped (MiniMax-M1, 2506.13585)
        is_clipped_N = r_N > cfg.ratio_cap
        loss_N = -r_N.detach().clamp(max=cfg.ratio_cap) * adv_N * logp_N
    else:  # -min(min(r, delta) A, clip(r) A): PPO without a critic (2402.03300)
        low, high = EPSILON[cfg.loss]
        clipped_N = r_N.clamp(1 - (cfg.epsilon or low), 1 + (cfg.epsilon_high or high)) * adv_N
        is_clipped_N = clipped_N < r_N * adv_N
        loss_N = -torch.minimum(r_N.clamp(max=cfg.delta or math.inf) * adv_N, clipped_N)
    if cfg.loss == "dr_grpo":  # over a constant, not the tokens there are: no bias by length
        loss_N = loss_N * (micro["tokens"] / (micro["rollouts"] * micro["max_tokens"]))
    return loss_N, {"policy/clip_frac": is_clipped_N}


def add_columns(policy, micros, cfg):
    """HACK HERE: columns that need a pass, or all of a step's micro-batches, before the first update -> micros. The KL
    reference of configs/algorithms/reference.py is one."""
    return named("reference:add_columns", {})(policy, micros, cfg) if cfg.trainer.beta else micros


# --- the step ---------------------------------------------------------------------------------------------------------


def schedule(step, t, total):
    """-> the share of the learning rate: linear warm-up, then constant or a linear or cosine decay to 0 at `total`."""
    warmup = 0 if t.lr_scheduler_type == "constant" else max(t.warmup_steps, math.ceil(t.warmup_ratio * total))
    left = (total - step) / max(total - warmup, 1)
    decay = {"linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}.get(t.lr_scheduler_type, 1.0)
    return (step + 1) / (warmup + 1) if step < warmup else decay


def make_optimizer(policy, t):
    """AdamW, or what trainer.optimizer names: a function of the parameters and the [trainer] table."""
    how = {"lr": t.learning_rate, "betas": (0.9, t.adam_beta2), "weight_decay": t.weight_decay, "fused": True}
    make = named(t.optimizer, {"": lambda params, t: torch.optim.AdamW(params, **how)})
    return make(list(trained(policy).values()), t)


def make_micros(policy, batch, cfg):
    """-> this rank's micro-batches, as many as every other rank has."""
    rank, world, lens, tokens_T = dist.get_rank(), dist.get_world_size(), batch.lens.tolist(), batch.columns["tokens"]
    low, high, vocab = int(tokens_T.min()), int(tokens_T.max()), policy.vocab
    what = f"a sample of {min(lens)} tokens, ids from {low} to {high}; the vocabulary has {vocab}"
    require(min(lens) > 0 and 0 <= low and high < vocab, 4, f"not to be trained on: {what}")
    rectangles = cut(lens, cfg.trainer.micro_batch_size * cfg.run.max_seq_len, world, *SHAPES[policy.device.type])
    mask_T, counts = batch.columns["mask"], {key: batch.info[key] for key in ("rollouts", "max_tokens")}
    counts |= {"tokens": max(int(mask_T.sum()), 1), "samples": max(sum(bool(m.any()) for m in mask_T.split(lens)), 1)}
    return [collate(batch, indices[rank::world], policy.device) | counts for indices in rectangles]


def train_step(policy, optimizer, batch, step, cfg):
    """updates_per_batch optimizer steps on one batch -> metrics (of the loss: in the first of them), and logp_T before
    them (0 where nothing is trained). A non-finite gradient changes nothing, on any rank."""
    t, started, sums, skipped = cfg.trainer, time.perf_counter(), Counter(), 0
    weigh, params = named(t.importance, {"": lambda loss: loss}), list(trained(policy).values())
    penalize = named("reference:penalized" if t.beta else "", {"": lambda loss: loss})
    loss_function = penalize(weigh(named(t.loss, {t.loss: compute_loss})))
    share = schedule(step, t, cfg.run.max_steps)
    for group in optimizer.param_groups:
        group["lr"] = share * group.setdefault("initial_lr", group["lr"])
    scale = 4096.0 if t.dtype == "fp16" else 1.0  # keeps gradients out of fp16's subnormals
    logp_T = torch.zeros(int(batch.lens.sum()), device=policy.device)
    # 1. Rectangles, and what must be known before the first update. Dropout is a function of seed, step and rank.
    torch.manual_seed((cfg.run.seed << 32) + step * dist.get_world_size() + dist.get_rank())
    micros = add_columns(policy, make_micros(policy, add_advantages(batch, t), cfg), cfg)
    for update in range(t.updates_per_batch):
        for micro in micros:
            # 2. Log-probabilities of the loss tokens.
            beat()
            logp_N, entropy_N = policy(micro)
            # nan: text of unknown origin, whose ratio is 1 at first
            micro["old_logp_N"] = torch.where(micro["old_logp_N"].isnan(), logp_N.detach(), micro["old_logp_N"])
            # 3. The loss: a sum over this micro-batch, divided by the number of tokens in all of them on all ranks.
            loss_N, logs = loss_function(micro, logp_N, entropy_N, t)
            # where there are replicas: they exchange gradients once, after the last
            getattr(policy, "set_requires_all_reduce", lambda is_last: None)(micro is micros[-1])
            (scale / micro["tokens"] * torch.where(micro["mask_N"], loss_N, 0).sum()).backward()
            if update == 0:
                log_r_N = logp_N.detach() - micro["old_logp_N"]
                kl_N = log_r_N.clamp(-20, 20).exp() - 1 - log_r_N  # as in the loss: exp(100) is inf
                logs |= {"loss": loss_N, "policy/entropy": entropy_N, "policy/kl_sampler": kl_N}
                sums.update({k: torch.where(micro["mask_N"], v.detach(), 0).sum().float() for k, v in logs.items()})
                logp_T[micro["at_N"]] += torch.where(micro["mask_N"], logp_N.detach(), 0)
        # 4. One optimizer step, unless the gradient is not finite.
        torch._foreach_div_([p.grad for p in params if p.grad is not None], scale)
        grad_norm = full(nn.utils.clip_grad_norm_(params, t.max_grad_norm)).item()
        skipped += not math.isfinite(grad_norm)
        if math.isfinite(grad_norm):
            optimizer.step()
        optimizer.zero_grad()
    # 5. Metrics: token means over all ranks.
    dist.all_reduce(total := torch.stack([sums[k] for k in sorted(sums)]))
    dist.all_reduce(logp_T)  # 0 on all ranks but one
    metrics = dict(zip(sorted(sums), (total / micros[0]["tokens"]).tolist()))
    seconds, lr = time.perf_counter() - started, optimizer.param_groups[0]["lr"]
    metrics |= {"optim/lr": lr, "optim/grad_norm": grad_norm, "optim/skipped": skipped, "time/train_s": seconds}
    metrics["perf/peak_gib"] = torch.cuda.max_memory_allocated() / 2**30  # 0 without CUDA
    return metrics | {"perf/tokens_per_s": t.updates_per_batch * len(logp_T) / seconds}, logp_T


# --- weights to vLLM: the sender, and below it the receiver in vLLM's workers -----------------------------------------

CANARY = (96, 80, 64, 56, 48, 40, 32, 24)  # token ids in its rows, of different lengths: none may leak into another
SAID = 4  # tokens that the policy says after each; every one is a step of the engine, among all rollouts under way


def sampler_weights(model, dtype, adapters, device):
    """Yields (the module's name, full tensor), as a sampler wants them; small ones side by side, for few messages.
    Collective: every rank exhausts it, those that send nothing with device = "meta". LoRA is merged in fp32; with
    `adapters` only A and B go. Buffers keep their dtype: a router's bias in 16 bits would be another router."""
    room, kept = torch.empty(0), {} if adapters else model.state_dict()
    for name, p in model.named_parameters():  # tied weights go once
        place, _, key = name.rpartition(".")
        module, is_lora = model.get_submodule(place), key.startswith("lora_")
        if is_lora == adapters:
            w = full(p.detach().to(p.dtype if p.is_cpu and dist.get_world_size() == 1 else dtype))
            if isinstance(module, LoRALinear) and key == "weight":
                w = (w + module.scale * full(module.lora_B.detach()) @ full(module.lora_A.detach())).to(dtype)
            if (num := w.numel()) <= 1 << 22:
                room = room if num <= len(room) else torch.empty(1 << 25, dtype=dtype, device=device)
                w, room = room[:num].view(w.shape).copy_(w), room[num:]
            yield f"{name}.weight" if is_lora else name, w.to(device, dtype)
    yield from ((name, b.to(device)) for name, b in model.named_buffers() if name in kept)


def make_group(store, rank, spec):
    """A process group beside torch's default one, which vLLM has for itself. Its own limit is twice that of the waits
    on it: NCCL would else end the process before the error is told."""
    kind = dist.ProcessGroupGloo if spec["backend"] == "gloo" else dist.ProcessGroupNCCL
    return kind(store, rank, spec["size"], timedelta(seconds=2 * spec["timeout_s"]))


def messages(tensors):
    """{name: tensor} -> [[(name, shape, dtype), ...], ...], dtypes without "torch.". Neighbors in memory are a message:
    each costs 0.3 ms over gloo, and there may be 18,000. By layer, of which vLLM keeps what it has until it has all."""
    found, end, place = [], None, {name: i for i, name in enumerate(tensors)}
    for name, w in sorted(tensors.items(), key=lambda item: item[1].data_ptr()):
        if w.data_ptr() != end or w.storage_offset() == 0:
            found.append([])
        found[-1].append((name, [*w.shape], str(w.dtype)[6:]))
        end = w.data_ptr() + w.nbytes
    return sorted(found, key=lambda part: place[part[0][0]])


def stream(group, device, spec, tensors=None):
    """Both ends of a broadcast: yields (name, tensor). spec["messages"]: of `tensors`, which the sender gives, too."""
    for part in spec["messages"]:
        (name, _, dtype), sizes = part[0], [math.prod(shape) for _, shape, _ in part]
        first = tensors[name] if tensors else torch.empty(sum(sizes), dtype=getattr(torch, dtype), device=device)
        data = first.as_strided((sum(sizes),), (1,))
        # as bytes: every backend has those
        group.broadcast(data.view(torch.uint8), 0).wait(timedelta(seconds=spec["timeout_s"]))
        yield from ((name, x.view(shape)) for (name, shape, _), x in zip(part, data.split(sizes)))


class WeightSender:
    """On rank 0: the way to all servers. Weights go through torch.distributed, control through vLLM's routes: /pause,
    /collective_rpc -> WeightReceiver, /resume. Every wait ends after sync_timeout_s."""

    def __init__(self, cfg, run_dir, device):
        t, self.cfg, self.run_dir, self.urls = cfg.trainer, cfg, run_dir, cfg.inference.urls
        # a server closes idle connections, maybe just as one is used; trust_env: no proxy between the roles
        self.http = httpx.Client(timeout=t.sync_timeout_s, headers={"Connection": "close"}, trust_env=False)
        self.pool = ThreadPoolExecutor(64)
        # 1. Servers of this run, and of no other: a stale one is never trained against.
        others = {url: name for url in self.urls if (name := self.wait_ready(url)) != served_name(cfg)}
        require(not others, 2, f"a server of another run answers: {others}; this run is {served_name(cfg)!r}")
        # 2. A group of rank 0 and all workers, which join it as they are asked to.
        backend = {"auto": "nccl" if device.type == "cuda" else "gloo"}.get(t.sync_backend, t.sync_backend)
        self.device, limit = device if backend == "nccl" else torch.device("cpu"), timedelta(seconds=t.sync_timeout_s)
        listener = socket.create_server((t.sync_host, 0))  # a TCPStore's own listens on every address
        host, port = listener.getsockname()
        self.store = dist.TCPStore(host, port, None, True, limit, False, False, listener.detach())
        workers = math.prod(cfg.inference.args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
        self.spec = {"host": host, "port": port, "backend": backend, "timeout_s": t.sync_timeout_s}
        self.spec["size"] = 1 + workers * len(self.urls)
        joining = self.rpc("join_weight_group", [{"first": 1 + workers * i} for i in range(len(self.urls))])
        self.group, *_ = self.finish("weight group", [self.pool.submit(make_group, self.store, 0, self.spec), *joining])

    def wait_ready(self, url):
        """Until the server answers -> the name under which it serves."""
        deadline = time.monotonic() + (limit := self.cfg.inference.startup_timeout)
        while True:
            try:
                return self.http.get(f"{url}/v1/models").json()["data"][0]["id"]
            except httpx.TransportError as e:
                require(time.monotonic() < deadline, 3, f"{url}: {e!r}, for inference.startup_timeout = {limit:g} s")
                time.sleep(0.2)

    def post(self, url, path, body=None):
        reply = self.http.post(url + path, json=body)
        require(reply.status_code == 200, 3, f"{url}{path} answered {reply.status_code}: {reply.text[-2000:]}")
        return reply.json() if reply.text.startswith("{") else {}

    def post_all(self, path, body=None):
        return self.finish(path, [self.pool.submit(self.post, url, path, body) for url in self.urls])

    def rpc(self, method, specs):
        """Starts method in every worker of every server, with one spec each -> a future for each server."""
        bodies = [{"method": method, "args": [self.spec | spec]} for spec in specs]
        return [self.pool.submit(self.post, url, "/collective_rpc", body) for url, body in zip(self.urls, bodies)]

    def finish(self, what, calls):
        """-> the futures' results. RunError 3 with the first error of any, not what comes of it elsewhere."""
        for call in as_completed(calls, timeout=2 * self.spec["timeout_s"]):
            if error := call.exception():
                kind, limit = getattr(error, "request", type(error).__name__), self.spec["timeout_s"]  # httpx: of what
                raise RunError(3, f"{what}: {kind}: {error} (trainer.sync_timeout_s = {limit:g})") from error
        return [call.result() for call in calls]

    def send(self, version, tensors):
        """Broadcasts, and makes the servers use it. tensors: {checkpoint name: tensor}. A failure raises; a server that
        got a byte by then stays paused, or without the adapter: it never samples from a mixture."""
        what, path = f"sync of version {version}", self.run_dir.absolute() / "adapters" / served_name(self.cfg, version)
        refuse_non_finite(tensors := {name: w.contiguous() for name, w in tensors.items()}, what)
        about = [str(path), self.cfg.trainer._asdict(), self.cfg.run.model] if self.cfg.sends_adapters else None
        spec = {"adapter": about, "messages": messages(tensors)}
        if not about:
            self.post_all("/pause?mode=keep&clear_cache=false")  # else it reads again what they have said
        sent = self.pool.submit(list, stream(self.group, self.device, self.spec | spec, tensors))
        self.finish(what, [sent, *self.rpc("receive_weights", [spec] * len(self.urls))])
        if not about:
            return self.post_all("/resume")
        old = path.with_name(served_name(self.cfg, version - self.cfg.orchestrator.max_staleness - 2))
        for url in self.urls:
            # One that no request can name any more, and one of this name, of a trainer before this. 404: there is none.
            for name in (old.name, path.name):
                self.http.post(f"{url}/v1/unload_lora_adapter", json={"lora_name": name})
        # not "load_inplace", with which vLLM 0.32 reads the file again at each of its steps
        self.post_all("/v1/load_lora_adapter", {"lora_name": path.name, "lora_path": str(path)})
        shutil.rmtree(old, ignore_errors=True)

    def say(self, version, rows):
        """-> by server and row: SAID token ids that the policy goes on with, and their logprobs."""
        body = {"model": served_name(self.cfg, version), "prompt": rows, "max_tokens": SAID, "ignore_eos": True}
        # priority: before all rollouts
        body |= {"logprobs": 0, "return_token_ids": True, "cache_salt": str(time.time()), "priority": -1}
        replies = self.post_all("/v1/completions", body)
        return [(c["token_ids"], c["logprobs"]["token_logprobs"]) for reply in replies for c in reply["choices"]]


class WeightReceiver:
    """In every vLLM worker by --worker-extension-cls trainer.WeightReceiver (configs/serving/cpu_receiver.py has one for CPUs)."""

    def join_weight_group(self, spec):
        store = dist.TCPStore(spec["host"], spec["port"], None, False, timedelta(seconds=spec["timeout_s"]), False)
        self.sync_group = make_group(store, spec["first"] + self.rank, spec)

    def receive_weights(self, spec):
        weights = stream(self.sync_group, self.device if spec["backend"] == "nccl" else "cpu", spec)
        if spec["adapter"]:
            (path, *about), tensors = spec["adapter"], dict(weights)
            return write_adapter(Path(path), tensors, *about) if self.rank == 0 else None
        self.reload_weights(weights_iterator=weights)


def score(policy, rows, firsts=()):
    """-> logp, in one rectangle, of each row's tokens from number `first` on, or all but the first."""
    mask_T = torch.cat([torch.arange(len(row)) >= first for row, first in zip(rows, firsts or [1] * len(rows))])
    columns, lens = {"tokens": torch.tensor(sum(rows, [])), "mask": mask_T}, torch.tensor([len(row) for row in rows])
    return policy(collate(Batch(columns, lens, [], {}), list(range(len(rows))), policy.device))[0]


def compare(logp_N, other_N, t, most, code, what):
    """-> the largest and the mean |dlogp|, in nats. RunError where in fp32 the largest is above 1e-3, or in 16 bits the
    mean above `most`."""
    diff_N = (logp_N[: len(other_N)] - other_N).abs()
    numbers = {"sync/dlogp_max": diff_N.max().item(), "sync/dlogp_mean": diff_N.mean().item()}
    key, usual = ("sync/dlogp_max", 1e-3) if t.dtype == "fp32" else ("sync/dlogp_mean", most)
    require(numbers[key] <= (limit := t.max_sync_dlogp or usual), code, f"{what}: {numbers}; {key} may be {limit:g}")
    return numbers


def random_rows(policy, cfg):
    """Token ids in rows of different lengths: nothing may leak from row to row."""
    draw, vocab = torch.Generator().manual_seed(0), policy.vocab
    return [torch.randint(vocab, [max(2, min(n, cfg.run.max_seq_len - SAID))], generator=draw).tolist() for n in CANARY]


@torch.no_grad()
def check_policy(policy, cfg):
    """Is the policy, in training mode, the network of the model's own forward, a row at a time? RunError 2 says what
    differs. Before a checkpoint is loaded, since LoRA's dropout does nothing as long as B = 0. Collective."""
    rows = random_rows(policy, cfg)
    own, longest = [policy.plain(row) for row in rows], (rows[-1] * cfg.run.max_seq_len)[: cfg.run.max_seq_len]
    pairs = {"dropout or noise is on in training": (own[0], policy.eval().plain(rows[0]))}
    pairs["its logits are not head(base model)"] = score(policy.train(), rows[:1]), own[0]
    pairs["a row's length changes its first tokens (RoPE, or no causal model)"] = score(policy, [longest]), own[-1]
    pairs["rows of a rectangle mix"] = score(policy, rows), torch.cat(own)
    for what, (logp_N, other_N) in pairs.items():  # of tokens that no policy would say
        compare(logp_N, other_N, cfg.trainer, 0.2, 2, f"model = {cfg.run.model!r}: {what}")


@torch.no_grad()
def canary(sender, policy, version, cfg, batch=None):
    """Every server goes on with the same rows: prompts of the batch, or random ones before there is one. The trainer
    scores what they said, in one rectangle, as rollouts are -> sync/*, |dlogp| in nats. RunError 3 where they differ.
    Collective."""
    servers, rows = max(1, len(cfg.inference.urls)), [] if batch else random_rows(policy, cfg)
    # What all servers say is one rectangle, no larger than a micro-batch.
    most = min(cfg.trainer.micro_batch_size, 8) * cfg.run.max_seq_len // (len(CANARY) * servers) - SAID
    for i in range(0, len(batch.lens), -(-len(batch.lens) // len(CANARY))) if batch else ():
        tokens, mask = (batch.columns[name][batch.lens[:i].sum() :] for name in ("tokens", "mask"))
        rows.append(tokens[: max(1, min(int(mask.int().argmax()), most))].tolist())
    said = sender.say(version, rows) if sender else [([0], [])]  # others only take part in the forward
    pairs = list(zip(rows * servers, said))
    logp_N = score(policy.eval(), [row + ids for row, (ids, _) in pairs], [len(row) for row, _ in pairs])
    policy.train()
    if not sender:
        return {}
    other_N = torch.tensor([x for _, logps in said for x in logps], device=policy.device)
    what, most = f"canary after sync of version {version}: trainer and server differ", 0.05 if batch else 0.2
    return compare(logp_N, other_N, cfg.trainer, most, 3, what)  # 0.2: after rows that nobody would write


def publish(sender, policy, version, cfg, batch=None):
    """Makes `version` live -> metrics. Collective: gathers first, then rank 0 alone talks to the servers, under the
    names of the checkpoint: experts one by one, and the prefix that a composite model has there."""
    started, dtype = time.perf_counter(), DTYPES[cfg.trainer.dtype]
    tensors = dict(sampler_weights(policy.model, dtype, cfg.sends_adapters, sender.device if sender else "meta"))
    if sender:
        sender.send(version, transformers.core_model_loading.revert_weight_conversion(policy.model, tensors))
    metrics = canary(sender, policy, version, cfg, batch)
    if sender:
        (tmp := sender.run_dir / "version.tmp").write_text(str(version))
        os.replace(tmp, sender.run_dir / "version")
    return metrics | {"time/sync_s": time.perf_counter() - started}


# --- what outlives the process ----------------------------------------------------------------------------------------


def refuse_non_finite(tensors, what):
    """Weights that are not finite are neither written nor sent: RunError 5."""
    if bad := [name for name, x in tensors.items() if not (local(x).sum().isfinite() or local(x).isfinite().all())]:
        raise RunError(5, f"{what}: {len(bad)} of {len(tensors)} tensors are not finite, the first is {bad[0]}")


def state_of(policy, optimizer):
    """{name: tensor, or a rank's part} of what training changes: parameters, optimizer, extra."""
    found = {f"extra/{name}": x for name, x in policy.extra.items() if isinstance(x, torch.Tensor)}
    for name, p in trained(policy).items():
        found[f"policy/{name}"], state = p.detach(), {k: x for k, x in optimizer.state[p].items() if x is not None}
        require(all(map(torch.is_tensor, state.values())), 2, f"trainer.optimizer: not all of {[*state]} are tensors")
        found |= {f"optimizer/{name}/{k}": x for k, x in state.items()}
    return found


def shards(path):
    """{file: bytes} of a checkpoint's tensors: of a file that is missing DCP says no more than that a size differs."""
    return {file.name: file.stat().st_size for file in path.glob("*.safetensors")}


def save_checkpoint(run_dir, step, policy, optimizer, cfg, info):
    """Every rank writes its part, whatever number of ranks reads it again; rank 0 adds state.json with the shards'
    sizes and the orchestrator's ledger. One rename makes it exist; then the oldest go. Collective."""
    path, tensors = run_dir / "checkpoints" / f"step_{step:06d}", state_of(policy, optimizer)
    tmp = path.with_suffix(".tmp")
    refuse_non_finite(tensors, path)
    shutil.rmtree(tmp, ignore_errors=True)  # whichever rank is first
    dist.barrier()
    dcp.save(tensors, storage_writer=dcp.HuggingFaceStorageWriter(str(tmp), save_distributed=True))
    if dist.get_rank() == 0:
        state = {"step": step, "run": configs.identity(cfg), "ledger": info.get("ledger"), "shards": shards(tmp)}
        state["extra"] = {name: x for name, x in policy.extra.items() if not isinstance(x, torch.Tensor)}
        (tmp / "state.json").write_text(json.dumps(state))
        os.rename(tmp, path)
        for old in sorted((run_dir / "checkpoints").glob("step_??????"))[: -cfg.checkpoint.keep]:
            shutil.rmtree(old)


def load_checkpoint(path, policy, optimizer, cfg):
    """In place -> step. Raises RunError 2 where it is of another run, 6 for damaged files. Collective."""
    state, there = json.loads((path / "state.json").read_text()), shards(path)
    wrong = sorted(name for name, _ in state["shards"].items() - there.items())
    require(not wrong, 6, f"{path}/{', '.join(wrong)} is damaged. Remove {path}, then the one before it is used")
    refuse_other(state["run"], cfg, path)
    policy.extra |= state["extra"]
    reader = dcp.HuggingFaceStorageReader(str(path))
    saved, like = reader.read_metadata().state_dict_metadata, {"device": policy.device}
    if any(name.startswith("optimizer/") for name in saved):  # not where every step was skipped
        get_optimizer_state_dict(policy, optimizer)  # called for its step at rate 0: makes what to load into
    # A recipe may make its tensors later than this, or be new in this run; what never has a gradient has no state.
    for name in [name for name in saved if name.startswith("extra/") and name[6:] not in policy.extra]:
        policy.extra[name[6:]] = torch.zeros(saved[name].size, dtype=saved[name].properties.dtype, **like)
    tensors = state_of(policy, optimizer)
    dcp.load({k: x for k, x in tensors.items() if k in saved or k.startswith("policy/")}, storage_reader=reader)
    return state["step"]


def write_adapter(path, tensors, t, model):
    """A PEFT adapter directory, which peft and vLLM load. t: the [trainer] table as a dict. tensors: under the names of
    the checkpoint, by which vLLM finds its modules; it says nothing where it finds none."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({f"base_model.model.{k}": w for k, w in tensors.items()}, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "bias": "none"}
    about |= {"r": t["lora_rank"], "lora_alpha": t["lora_alpha"], "lora_dropout": t["lora_dropout"]}
    (path / "adapter_config.json").write_text(json.dumps(about | {"target_modules": t["lora_target_modules"]}))


def write_final(run_dir, policy, cfg):
    """final/: what transformers (LoRA: peft) and vLLM load. Collective."""
    t, final, rank = cfg.trainer, run_dir / "final", dist.get_rank()
    tensors = dict(sampler_weights(policy.model, DTYPES[t.dtype], t.use_lora, "meta" if rank else "cpu"))
    if rank:
        return
    if t.use_lora:
        names = transformers.core_model_loading.revert_weight_conversion(policy.model, tensors)
        write_adapter(final, names, t._asdict(), cfg.run.model)
    else:
        # Transformers reads any generation_config.json, but does not write every one: it is copied.
        policy.model.can_generate = lambda: False
        policy.model.save_pretrained(final, state_dict=tensors)
        policy.model.config.dtype = DTYPES[t.dtype]  # the file's, which save_pretrained does not see
        policy.model.config.save_pretrained(final)
        source = Path(transformers.utils.cached_file(cfg.run.model, "config.json")).parent
        for file in source.glob("*_config.json"):  # of generation, or of a composite model's images
            shutil.copy(file, final)
    template = {"chat_template": Path(cfg.run.chat_template).read_text()} if cfg.run.chat_template else {}
    transformers.AutoTokenizer.from_pretrained(cfg.run.model, **template).save_pretrained(final)


def log_step(run_dir, step, metrics, logp_T):
    """Every number into metrics.jsonl, what people watch on the console, and logp beside the batch for tools."""
    save_file({"logp": logp_T.cpu()}, tmp := run_dir / "batches" / f"logp_{step:06d}.tmp")
    os.replace(tmp, tmp.with_suffix(".safetensors"))
    line = {k: None if x is not None and not math.isfinite(x) else x for k, x in metrics.items()}  # JSON has no nan
    with open(run_dir / "metrics.jsonl", "a") as f:
        f.write(json.dumps({"step": step, "time": time.time(), "version": step + 1} | line) + "\n")
    shown = {"reward": "reward/mean", "loss": "loss", "kl": "policy/kl_sampler", "entropy": "policy/entropy"}
    text = [f"{name} {metrics[key]:.3g}" for name, key in shown.items() if metrics.get(key) is not None]
    print(" | ".join([f"step {step:5d}", *text, f"seconds {metrics['time/step_s']:.3g}"]), flush=True)


# --- the loop ---------------------------------------------------------------------------------------------------------


def start_distributed(cfg):
    """torchrun's variables, or one rank without it. No rank waits longer for another than the watchdog for all."""
    limit, is_cuda = 2 * (cfg.run.watchdog + cfg.inference.startup_timeout), torch.cuda.is_available()
    how = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    what = f"torch {torch.__version__} finds no GPU, but CUDA_VISIBLE_DEVICES is set: is the driver too old?"
    require(is_cuda or not (os.environ.get("CUDA_VISIBLE_DEVICES") and torch.version.cuda), 2, what)
    if is_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if is_cuda else "gloo", timeout=timedelta(seconds=limit), **how)


def main(argv):
    """A run of one rank, from the last checkpoint to max_steps. RunError ends it; argv: see --help."""
    cfg = configs.arguments(__doc__, argv)
    replay, t, last = cfg.replay, cfg.trainer, cfg.run.max_steps
    files = sorted(replay.glob("step_*.safetensors")) if replay else []
    require(files or not replay, 2, f"--replay {replay}: no step_*.safetensors there")
    run_dir = configs.run_directory(cfg, f"-replay-{t.loss}" if replay else "")
    for name in (t.loss, t.importance, t.optimizer, t.advantage):  # a misspelled one is told now
        named(name, {name: None})
    start_distributed(cfg)
    is_first, policy, step, streak = dist.get_rank() == 0, build_policy(cfg), 0, 0
    check_policy(policy, cfg)
    optimizer, last = make_optimizer(policy, t), min(last, len(files)) if replay else last
    if found := max((run_dir / "checkpoints").glob("step_??????"), default=None):
        step = load_checkpoint(found, policy, optimizer, cfg)
    require(not replay or step < last, 2, f"{run_dir} has all {last} steps: choose another run_name, or remove it")
    if is_first:
        configs.cut_lines(run_dir / "metrics.jsonl", lambda line, first=step: line["step"] < first)
    sender = WeightSender(cfg, run_dir, policy.device) if is_first and not replay else None
    take_step = named("sleep:asleep" * cfg.inference.sleep, {"": lambda sender: lambda f: f})(sender)(train_step)
    metrics, mark = {} if replay else publish(sender, policy, step, cfg), time.perf_counter()
    while step < last:
        # 1. The orchestrator's batch, or a saved one.
        started, mark = mark, time.perf_counter()  # between: the last step's checkpoint
        path = run_dir / "batches" / f"step_{step:06d}.safetensors"
        batch = load_batch(files[step]) if replay else load_batch(path, cfg, step)
        times = {"time/checkpoint_s": mark - started, "time/wait_batch_s": time.perf_counter() - mark}
        # 2. An optimizer step, unless three in a row were of no use.
        numbers, logp_T = take_step(policy, optimizer, batch, step, cfg)
        state_of(policy, optimizer)  # one that cannot be saved is told now
        is_broken = numbers["optim/skipped"] or (not replay and numbers["policy/kl_sampler"] > 1)
        streak, metrics = streak + 1 if is_broken else 0, batch.info.get("metrics", {}) | numbers | times
        require(streak < 3, 5, f"no finite gradient, or a KL above 1, in three steps in a row; step {step}: {numbers}")
        step += 1
        # 3. The new weights go to the servers, whose rollouts of the next batches go on.
        metrics |= {} if replay else publish(sender, policy, step, cfg, batch)
        if is_first:
            log_step(run_dir, step - 1, metrics | {"time/step_s": time.perf_counter() - started}, logp_T)
        mark = time.perf_counter()
        if step == last or (cfg.checkpoint.every and step % cfg.checkpoint.every == 0):
            save_checkpoint(run_dir, step, policy, optimizer, cfg, batch.info)
    write_final(run_dir, policy, cfg)
    dist.destroy_process_group()


if __name__ == "__main__":
    configs.run_role("trainer", main)
