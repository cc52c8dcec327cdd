"""trainer.py owns the policy: packs batches, computes losses, steps AdamW, broadcasts weights, writes checkpoints.

    env.py --rows, rewards--> orchestrator.py --batches/step_N.safetensors--> trainer.py (torchrun, FSDP2)
                               ^   | messages                                     |
        token ids, logprobs    |   v                                              |  torch.distributed broadcast
                             vLLM server(s)  <------------------------------------+  into WeightReceiver (below)
                               ^                                                  |
                               +--------- version file: "policy N is live" -------+

    torchrun --nproc-per-node 2 trainer.py config.toml                                # launch.sh does this
    torchrun trainer.py config.toml --replay outputs/run/batches trainer.loss=grpo    # saved batches, no server

Left out: a critic and GAE, tensor and pipeline parallelism, mixture-of-experts models.
Shapes: N loss tokens, T packed tokens, S samples, G rollouts of a group, D hidden, V vocabulary, B H attention's.
logp: the policy being trained; old_logp: the policy that sampled (vLLM's number); ref_logp: the KL reference.
"""

import argparse
import importlib
import json
import math
import os
import resource
import shutil
import socket
import time
import traceback
from collections import Counter, namedtuple
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta
from pathlib import Path
from threading import Timer
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as dcp
import torch.nn.functional as F
from safetensors.torch import load as load_tensors
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from configs.runtime import RunError, commit_directory, cut_lines, latest_checkpoint, load_config, read_directory
from configs.runtime import run_directory, run_role

# --- model: LoRA, packed attention, log-probabilities -----------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LoRALinear(nn.Linear):
    """y = W x + alpha/r B A x (2106.09685) with W frozen, never changed. Made from nn.Linear in place by add_lora."""

    adapter = "policy"  # switch for all layers: "policy", "off" (W alone) or "ref" (the frozen copy)

    def forward(self, x):
        y, adapter = F.linear(x, self.weight, self.bias), LoRALinear.adapter
        if adapter == "off":
            return y
        a, b = (self.lora_A, self.lora_B) if adapter == "policy" else (self.ref_A.to(x), self.ref_B.to(x))
        x = F.dropout(x, self.dropout, self.training and adapter == "policy")
        return y + self.scale * F.linear(F.linear(x, a), b)


def add_lora(model, cfg):
    """Freezes the model; each linear layer whose name ends in a target gets fp32 factors A [r, in] and B [out, r]."""
    model.requires_grad_(False)
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for target in cfg.lora_target_modules:
        matched = [m for name, m in linear.items() if f".{name}".endswith(f".{target}")]
        if not matched:
            there = sorted({name.split(".")[-1] for name in linear})
            raise RunError(2, f"trainer.lora_target_modules: {target!r} matches no linear layer; there are {there}")
        for m in matched:
            m.__class__, m.scale, m.dropout = LoRALinear, cfg.lora_alpha / cfg.lora_rank, cfg.lora_dropout
            m.lora_A = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(cfg.lora_rank, m.in_features), a=math.sqrt(5)))
            m.lora_B = nn.Parameter(torch.zeros(m.out_features, cfg.lora_rank))
            if cfg.ref_sync_steps:  # ref_B = 0: the reference starts as the base model
                m.register_buffer("ref_A", m.lora_A.detach().clone())
                m.register_buffer("ref_B", m.lora_B.detach().clone())


def packed_attention(module, q_BHTD, k_BHTD, v_BHTD, attention_mask, packing, scaling, dropout=0.0, **kwargs):
    """Transformers calls this: causal attention confined to each sample of one packed row (B = 1) -> [1, T, H, D].

    packing = (lens, cu_lens): lengths of the samples in order, and int32 [S + 1] starts. CUDA in 16 bits: varlen flash
    attention. Else one SDPA per run of equal lengths, which pack() lays side by side. Refuses what it does not do."""
    (lens, cu_lens), window = packing, kwargs.pop("sliding_window", None)
    lacking = [k for k, v in kwargs.items() if v is not None and k not in ("position_ids", "use_cache", "is_causal")]
    if lacking or dropout or attention_mask is not None or not module.is_causal:
        raise RunError(
            2, f"model: {type(module).__name__} needs {lacking or 'a mask or dropout'}: not in packed attention"
        )
    if q_BHTD.is_cuda and q_BHTD.dtype != torch.float32:
        from torch.nn.attention.varlen import varlen_attn

        q_THD, k_THD, v_THD = (x[0].transpose(0, 1) for x in (q_BHTD, k_BHTD, v_BHTD))
        span = {
            "window_size": (-1 if window is None else window - 1, 0),
            "enable_gqa": q_THD.shape[1] != k_THD.shape[1],
        }
        longest = max(lens)
        return varlen_attn(q_THD, k_THD, v_THD, cu_lens, cu_lens, longest, longest, scale=scaling, **span)[None], None
    out, start = [], 0
    for length, num in Counter(lens).items():  # in order of first appearance
        part = slice(start, start := start + num * length)
        q, k, v = (x[0, :, part].unflatten(1, (num, length)).transpose(0, 1) for x in (q_BHTD, k_BHTD, v_BHTD))
        mask = None
        if window is not None and window < length:
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - window)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=scaling, enable_gqa=True)
        out.append(y.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)[None], None


class Policy(nn.Module):
    """A Hugging Face causal LM that returns log-probabilities of given tokens instead of logits.

    The head runs inside this forward over CHUNK tokens at a time and again in backward, so that a full [N, V] tensor
    never exists and FSDP2 has the head's weight gathered."""

    CHUNK = 1024

    def __init__(self, model):
        super().__init__()
        self.model, c = model, model.config
        self.scale = getattr(c, "logit_scale", None) or 1 / (getattr(c, "logits_scaling", None) or 1)
        self.softcap = getattr(c, "final_logit_softcapping", None)

    def head(self, hidden_ND, target_N, temperature_N):
        logits_NV = self.model.get_output_embeddings()(hidden_ND).float() * self.scale
        if self.softcap:
            logits_NV = self.softcap * torch.tanh(logits_NV / self.softcap)
        log_p_NV = (logits_NV / temperature_N[:, None]).log_softmax(-1)
        return log_p_NV.gather(-1, target_N[:, None]).squeeze(-1), -(log_p_NV.exp() * log_p_NV).sum(-1)

    def forward(self, ids_T, position_T, packing, index_N, target_N, temperature_N):
        """index_N: the position before each loss token, target_N: the token -> logp_N, entropy_N (fp32, nats)."""
        rows = {"input_ids": ids_T[None], "position_ids": position_T[None], "packing": packing, "use_cache": False}
        hidden_ND = self.model.base_model(**rows).last_hidden_state[0][index_N]
        chunks = zip(*(x.split(self.CHUNK) for x in (hidden_ND, target_N, temperature_N)))
        logp, entropy = zip(*(checkpoint(self.head, *chunk, use_reentrant=False) for chunk in chunks))
        return torch.cat(logp), torch.cat(entropy)


def build_policy(cfg, device, world):
    """Loads, adds LoRA, shards -> (policy, ref). ref: a frozen Policy; None without beta, or where adapters serve."""
    import transformers

    t = cfg.trainer
    transformers.AttentionInterface.register("packed", packed_attention)
    torch.manual_seed(cfg.run.seed)  # every rank draws the same adapters
    dtype = DTYPES[t.dtype] if t.use_lora else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(cfg.run.model, dtype=dtype, attn_implementation="packed")
    if not model._supports_attention_backend or getattr(model.config, "num_experts", 0):
        raise RunError(2, f"model: {type(model).__name__} is no dense decoder on Transformers' AttentionInterface")
    if t.use_lora:
        add_lora(model, t)
    if t.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ref = deepcopy(model).requires_grad_(False) if t.beta and not t.use_lora else None
    return shard(Policy(model).train(), t, device, world), ref and shard(Policy(ref).eval(), t, device, world)


def shard(policy, cfg, device, world):
    """FSDP2: one group per block, one for the rest. It also casts fp32 masters to 16 bits, so one rank may need it."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    offload = cfg.offload_optimizer and device.type == "cuda"
    if world == 1 and cfg.dtype == "fp32" and not offload:
        return policy.to(device)
    policy.to("cpu" if offload else device)
    how = {
        "mesh": dist.init_device_mesh(device.type, (world,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=DTYPES[cfg.dtype], reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for module in (*policy.model.base_model.layers, policy):
        fully_shard(module, **how)
        module.set_gradient_divide_factor(1.0)  # the loss is already divided by the count over all ranks
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    return policy


# --- losses and advantages --------------------------------------------------------------------------------------------
# Policy losses share r = exp(logp - old_logp). sg is stop-gradient, A the advantage. The step divides the sum of loss_N
# by a count over all ranks and micro-batches (dr_grpo: rollouts x max_tokens; gspo: samples; else loss tokens).

EPSILON = {"grpo": (0.2, 0.28), "dr_grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}  # DAPO 2503.14476, 2503.20783, 2507.18071


def compute_loss(logp_N, old_logp_N, adv_N, mask_N, sample_N, entropy_N, ref_logp_N, cfg):
    """HACK HERE: per-token loss and values to log -> (loss_N, {metric: value_N}), averaged over the step's loss tokens.

    mask_N is False on filler, sample_N the index of a token's sample, ref_logp_N None without beta, cfg is [trainer];
    "module:function" in trainer.loss names a function with this signature. Raises KeyError for an unknown loss."""
    log_r_N = (logp_N - old_logp_N).clamp(-20, 20)  # before exp: inf would meet zero advantages
    low, high = EPSILON.get(cfg.loss, (0, 0))
    low, high = 1 - (cfg.epsilon or low), 1 + (cfg.epsilon_high or high)
    r_N = log_r_N.exp()
    match cfg.loss:
        case "cispo":  # -sg(min(r, cap)) A logp: capped weight, no token dropped (MiniMax-M1, 2506.13585)
            out_N = r_N > cfg.ratio_cap
            loss_N = -r_N.detach().clamp(max=cfg.ratio_cap) * adv_N * logp_N
        case "grpo" | "dr_grpo":  # -min(min(r, delta) A, clip(r) A): PPO without a critic (2402.03300)
            clipped_N = r_N.clamp(low, high) * adv_N
            out_N = clipped_N < r_N * adv_N
            loss_N = -torch.minimum(r_N.clamp(max=cfg.delta or math.inf) * adv_N, clipped_N)
        case "dppo":  # -M r A + kl (log r)^2: M = 0 where the probability has moved far along A (2602.04879)
            moved_N = (logp_N.exp() - old_logp_N.exp()).detach()
            out_N = (adv_N * moved_N > 0) & (moved_N.abs() > cfg.dppo_mask)
            loss_N = cfg.dppo_kl * log_r_N**2 - torch.where(out_N, 0, r_N * adv_N)
        case "icepop":  # -sg(r) A logp inside [low, cap], else 0 (2510.18855)
            out_N = (r_N < cfg.icepop_low) | (r_N > cfg.ratio_cap)
            loss_N = -torch.where(out_N, 0, r_N.detach() * adv_N * logp_N)
        case (
            "gspo"
        ):  # s = exp(mean of log r over the sample), -min(s A, clip(s) A), spread over the sample (2507.18071)
            zero_S = logp_N.new_zeros(int(sample_N.max()) + 1)
            len_N = zero_S.index_add(0, sample_N, mask_N.float()).clamp(min=1)[sample_N]
            s_N = (zero_S.index_add(0, sample_N, log_r_N * mask_N)[sample_N] / len_N).exp()
            out_N = s_N.clamp(low, high) * adv_N < s_N * adv_N
            loss_N = -torch.minimum(s_N * adv_N, s_N.clamp(low, high) * adv_N) / len_N
        case "sft":  # cross-entropy on demonstrations
            out_N, loss_N = torch.zeros_like(mask_N), -logp_N
    return loss_N, {"policy/clip_frac": out_N}


# HACK HERE: an advantage maps the rewards of one group to one number per rollout; `group` holds their metadata.
ADVANTAGES = {
    "mean": lambda r_G, group: r_G - r_G.mean(),  # Dr. GRPO, 2503.20783
    "std": lambda r_G, group: (r_G - r_G.mean()) / (r_G.std() + 1e-4),  # GRPO, 2402.03300
    "batch_std": lambda r_G, group: r_G - r_G.mean(),  # and over the batch's std, below (LitePPO, 2508.08221)
    "leave_one_out": lambda r_G, group: (r_G - r_G.mean()) * len(r_G) / (len(r_G) - 1),  # RLOO, 2402.14740
}


def named(name, table):
    """An entry of the table, or the function that "module:function" names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute) if attribute else table[name]


def compute_advantages(groups, name):
    """[[{"reward": float, ...}, ...], ...] -> [[advantage, ...], ...]."""
    rewards = [torch.tensor([member["reward"] for member in group], dtype=torch.float64) for group in groups]
    scale = torch.cat(rewards).std(correction=0).item() + 1e-4 if name == "batch_std" else 1.0
    return [(named(name, ADVANTAGES)(r_G, group) / scale).tolist() for r_G, group in zip(rewards, groups)]


# --- batches: the file between orchestrator and trainer ---------------------------------------------------------------

Batch = namedtuple(
    "Batch", "tokens_T mask_T old_logp_T adv_T lens samples info"
)  # lens: list[int], samples: list[dict]


def save_batch(path, samples, info):
    """samples: dicts with tokens, mask, logp (lists of equal length), advantage and metadata. One rename commits it."""
    data = {
        "tokens": torch.tensor([t for s in samples for t in s["tokens"]], dtype=torch.int32),
        "loss_mask": torch.tensor([m for s in samples for m in s["mask"]], dtype=torch.bool),
        "old_logp": torch.tensor([x for s in samples for x in s["logp"]], dtype=torch.float32),
        "advantages": torch.tensor([s["advantage"] for s in samples for _ in s["tokens"]], dtype=torch.float32),
        "sample_lens": torch.tensor([len(s["tokens"]) for s in samples], dtype=torch.int32),
    }
    meta = [{k: v for k, v in s.items() if k not in ("tokens", "mask", "logp")} for s in samples]
    save_file(data, tmp := path.with_suffix(".tmp"), {"samples": json.dumps(meta), "info": json.dumps(info)})
    os.replace(tmp, path)


def load_batch(blob, path):
    """The bytes of a batch file -> Batch. Raises RunError 4 naming what is wrong with it."""
    meta = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])["__metadata__"]
    data = load_tensors(blob)
    lens, flat = data["sample_lens"], [data[k] for k in ("tokens", "loss_mask", "old_logp", "advantages")]
    batch = Batch(*flat, lens.tolist(), json.loads(meta["samples"]), json.loads(meta["info"]))
    rules = [
        (any(len(x) != lens.sum() for x in flat), f"lengths {[len(x) for x in flat]}, sample_lens sum to {lens.sum()}"),
        (len(lens) != len(batch.samples), f"{len(lens)} samples with metadata for {len(batch.samples)}"),
        (not (flat[2] + flat[3]).isfinite().all(), "non-finite old_logp or advantages"),
        (flat[1][(lens.cumsum(0) - lens).long()].any(), "loss_mask on a sample's first token, which nothing precedes"),
    ]
    for broken, message in rules:
        if broken:
            raise RunError(4, f"{path}: {message}")
    return batch


def receive_batch(path, rank, device, timeout_s):
    """Rank 0 waits for the file and reads it; the others, maybe on other machines, get its bytes from rank 0."""
    if rank == 0:
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise RunError(3, f"waited {timeout_s:.0f} s (trainer.batch_timeout_s) for the orchestrator's {path}")
            time.sleep(0.01)
    blob = path.read_bytes() if rank == 0 else b""
    if dist.get_world_size() > 1:
        dist.broadcast(size := torch.tensor([len(blob)], device=device), 0)
        data = torch.frombuffer(bytearray(blob or size.item()), dtype=torch.uint8).to(device)
        dist.broadcast(data, 0)
        blob = data.cpu().numpy().tobytes()
    return load_batch(blob, path)


def pack(lens, budget, ranks, hidden):
    """Sample lengths -> lists of indices, at most `budget` tokens each; list i goes to rank i % ranks, some are empty.

    Longest first into the cheapest list with room. A sample costs its linear layers, about 12 D per token, and its
    attention, about T per token. Within a list lengths ascend, so that equal ones lie side by side."""
    count = ranks * math.ceil(sum(lens) / (budget * ranks))
    while True:
        bins, cost, room = [[] for _ in range(count)], [0] * count, [budget] * count
        for i in sorted(range(len(lens)), key=lambda i: -lens[i]):
            fits = [b for b in range(count) if room[b] >= lens[i] or not bins[b]]
            if not fits:
                break
            b = min(fits, key=cost.__getitem__)
            bins[b].insert(0, i)
            cost[b] += lens[i] * (12 * hidden + lens[i])
            room[b] -= lens[i]
        else:
            return bins
        count += ranks


def collate(batch, indices, device):
    """One micro-batch on the device. An empty one gets a filler, so that every rank makes the same number of passes."""
    lens = [batch.lens[i] for i in indices] or [1]
    starts = torch.tensor([0, *batch.lens]).cumsum(0)
    position_T = torch.cat([torch.arange(n) for n in lens])
    at_T = position_T + torch.repeat_interleave(starts[indices or [0]], torch.tensor(lens))
    mask_T = batch.mask_T[at_T] & bool(indices)
    index_N = mask_T.nonzero()[:, 0] - 1 if mask_T.any() else torch.zeros(1, dtype=torch.long)
    next_N = at_T[index_N + 1] if mask_T.any() else at_T[:1]
    sample_N = torch.repeat_interleave(torch.tensor(lens))[index_N]
    meta = [(s.get("temperature", 1.0), s.get("age", 1)) for s in (batch.samples[i] for i in indices or [0])]
    micro = {
        "ids_T": batch.tokens_T[at_T].long(), "position_T": position_T, "index_N": index_N,
        "target_N": batch.tokens_T[next_N].long(), "old_logp_N": batch.old_logp_T[next_N], "adv_N": batch.adv_T[next_N],
        "mask_N": mask_T.any().expand(len(index_N)), "sample_N": sample_N,
        "temperature_N": torch.tensor([m[0] for m in meta])[sample_N],
        "age0_N": torch.tensor([m[1] == 0 for m in meta])[sample_N],
        "cu_lens": torch.tensor([0, *lens]).cumsum(0, dtype=torch.int32),
    }  # fmt: skip
    return SimpleNamespace(lens=lens, **{k: v.to(device, non_blocking=True) for k, v in micro.items()})


def score(policy, micro):
    """-> logp_N, entropy_N of a micro-batch's loss tokens."""
    packing = (micro.lens, micro.cu_lens)
    return policy(micro.ids_T, micro.position_T, packing, micro.index_N, micro.target_N, micro.temperature_N)


# --- weight broadcast: rank 0 sends, every vLLM worker receives -------------------------------------------------------


def full(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def sampler_weights(model, dtype, adapters):
    """Yields (checkpoint name, full tensor) of the policy as a sampler wants it. Collective: every rank exhausts it.

    LoRA is merged out of place in fp32; with `adapters`, only A and B go, under PEFT's names."""
    seen = set()
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            is_lora = key.startswith("lora_")
            if is_lora != adapters or p in seen:
                continue
            seen.add(p)  # tied weights go once
            w = full(p)
            if isinstance(module, LoRALinear) and key == "weight":
                w = w.float() + module.scale * full(module.lora_B) @ full(module.lora_A)
            yield f"base_model.model.{name}.{key}.weight" if is_lora else f"{name}.{key}", w.to(dtype).contiguous()


def write_adapter(path, tensors, cfg, model):
    """A PEFT adapter directory, read by peft and by vLLM."""
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": model, "bias": "none"}
    about |= {"r": cfg["lora_rank"], "lora_alpha": cfg["lora_alpha"], "target_modules": cfg["lora_target_modules"]}
    (path / "adapter_config.json").write_text(json.dumps(about | {"lora_dropout": cfg["lora_dropout"]}))


def make_group(store, rank, size, backend, timeout):
    """A process group beside torch's default one, which vLLM has for itself."""
    store = dist.PrefixStore("weights", store)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


def checksum(tensor):
    """Of the bytes and their order."""
    data = tensor.reshape(-1).view(torch.uint8)
    weight = torch.arange(1 << 22, device=data.device) % 65521 + 1
    parts = data.split(1 << 22)  # bounds the int64 copies
    return sum((i + 1) * int((part.long() * weight[: len(part)]).sum()) for i, part in enumerate(parts)) % (1 << 61)


def buckets(named_sizes, limit=256 << 20):
    """[(name, bytes)] -> lists of names of at most `limit` bytes together, or of one larger tensor."""
    out, room = [[]], limit
    for name, size in named_sizes:
        if out[-1] and size > room:
            out, room = [*out, []], limit
        out[-1].append(name)
        room -= size
    return out


def sends_adapters(t):
    """Merging LoRA into 16-bit weights rounds early updates away; in fp32 merging is exact, and faster to sample."""
    return t.use_lora and t.dtype != "fp32"


class WeightSender:
    """On rank 0. Its store listens on sync_host alone; every wait ends after sync_timeout_s."""

    def __init__(self, cfg, run_dir, device):
        import httpx

        t, self.cfg, self.run_dir, self.urls, self.loaded = cfg.trainer, cfg, run_dir, list(cfg.inference.urls), []
        self.http, self.pool = httpx.Client(timeout=t.sync_timeout_s, trust_env=False), ThreadPoolExecutor(64)
        self.run_id = os.environ.get("ROLEMODEL_RUN_ID", cfg.run.run_name)
        self.wait_ready(cfg.inference.startup_timeout)
        (run_dir / "version").unlink(missing_ok=True)
        backend = t.sync_backend if t.sync_backend != "auto" else "nccl" if device.type == "cuda" else "gloo"
        self.device = device if backend == "nccl" else torch.device("cpu")
        listener, timeout = socket.create_server((t.sync_host, 0)), timedelta(seconds=t.sync_timeout_s)
        host, port = listener.getsockname()
        self.store = dist.TCPStore(host, port, None, True, timeout, False, False, listener.detach())
        workers = math.prod(cfg.inference.args.get(f"{k}_parallel_size", 1) for k in ("tensor", "pipeline"))
        size = 1 + workers * len(self.urls)
        spec = {"host": host, "port": port, "size": size, "backend": backend, "timeout_s": t.sync_timeout_s}
        specs = [spec | {"offset": 1 + workers * i} for i in range(len(self.urls))]
        replies = self.rpc("join_weight_group", specs)
        self.group = make_group(self.store, 0, size, backend, timeout)
        about = [worker for reply in replies for worker in reply.result()]
        if wrong := [w for w in about if w["dtype"] != str(DTYPES[t.dtype])]:
            raise RunError(2, f"trainer.dtype = {t.dtype!r}, but a server runs {wrong[0]['dtype']}")
        if any(w["lora"] != sends_adapters(t) for w in about):
            raise RunError(2, f"servers need --enable-lora for LoRA in 16 bits, and only then; they run {about[0]}")

    def wait_ready(self, timeout_s):
        """Until every server answers under this run's name, so that a foreign one is never trained against."""
        import httpx

        deadline, names = time.monotonic() + timeout_s, {}
        while len(names) < len(self.urls):
            for url in self.urls:
                try:
                    names[url] = self.http.get(f"{url}/v1/models").json()["data"][0]["id"]
                except httpx.TransportError as e:
                    if time.monotonic() > deadline:
                        raise RunError(
                            3, f"{url} is not up after {timeout_s:.0f} s (inference.startup_timeout): {e}"
                        ) from e
                    time.sleep(0.2)
        if foreign := {url: name for url, name in names.items() if name != self.run_id}:
            raise RunError(2, f"{foreign}: a server of another run, this one is {self.run_id!r}")

    def post(self, url, path, body=None):
        reply = self.http.post(url + path, json=body)
        if reply.status_code != 200:
            raise RunError(3, f"{url}{path} answered {reply.status_code}: {reply.text[-2000:]}")
        return reply.json() if reply.text.startswith("{") else {}

    def post_all(self, path, body=None):
        return [call.result() for call in [self.pool.submit(self.post, url, path, body) for url in self.urls]]

    def rpc(self, method, specs):
        """Starts a WeightReceiver method in every worker of every server -> futures of lists of its replies."""

        def call(url, spec):
            replies = self.post(url, "/collective_rpc", {"method": method, "args": [json.dumps(spec)]})["results"]
            if errors := [reply["error"] for reply in replies if "error" in reply]:
                raise RunError(3, f"{url}: {method} failed in a worker: {errors[0]}")
            return replies

        return [self.pool.submit(call, url, spec) for url, spec in zip(self.urls, specs)]

    def send(self, version, tensors, canary, canary_logp, staleness):
        """Broadcast, verify, resume, score the canary, declare `version` live -> metrics. Any failure raises: servers
        that got a byte stay paused or die, they never generate from half-loaded weights."""
        adapter = sends_adapters(self.cfg.trainer) and {
            "name": f"{self.run_id}-v{version}",
            "trainer": self.cfg.trainer._asdict(),
        }
        spec = {"version": version, "adapter": adapter, "model": self.cfg.run.model}
        spec |= {"dir": str(self.run_dir.absolute() / "adapters" / f"v{version}")}
        spec |= {"tensors": [(k, list(v.shape), str(v.dtype)[6:], checksum(v)) for k, v in tensors.items()]}
        hold = self.run_dir / "eval_hold"  # the orchestrator's: until when an evaluation wants these weights
        while not adapter and hold.exists() and time.time() < float(hold.read_text() or 0):
            time.sleep(0.02)
        if not adapter:
            self.post_all("/pause?mode=keep")
        replies = self.rpc("receive_weights", [spec] * len(self.urls))
        try:
            for names in buckets([(k, v.nbytes) for k, v in tensors.items()]):
                flat = torch.cat([tensors[name].reshape(-1).view(torch.uint8) for name in names]).to(self.device)
                self.group.broadcast(flat, 0).wait(timedelta(seconds=self.cfg.trainer.sync_timeout_s))
        except RuntimeError as e:  # a peer is gone or silent; its own words say why
            for reply in replies:
                reply.result()
            raise RunError(3, f"broadcast of version {version} failed: {e}") from e
        for url, reply in zip(self.urls, replies):
            for worker in reply.result():
                self.verify(url, version, tensors, spec, worker)
        if adapter:
            self.post_all("/v1/load_lora_adapter", {"lora_name": adapter["name"], "lora_path": spec["dir"]})
            self.loaded.append(version)
            while self.loaded[0] < version - staleness - 1 and not hold.exists():  # no request can still use it
                self.post_all("/v1/unload_lora_adapter", {"lora_name": f"{self.run_id}-v{self.loaded[0]}"})
                shutil.rmtree(self.run_dir / "adapters" / f"v{self.loaded.pop(0)}", ignore_errors=True)
        else:
            self.post_all("/resume")
        dlogp = self.compare(canary, canary_logp, adapter["name"] if adapter else self.run_id, version)
        (tmp := self.run_dir / "version.tmp").write_text(str(version))
        os.replace(tmp, self.run_dir / "version")
        return dlogp

    def verify(self, url, version, tensors, spec, worker):
        wrong = [k for (k, *_, mine), theirs in zip(spec["tensors"], worker["checksums"]) if mine != theirs]
        missing = sorted(set(tensors) - set(worker["names"]))
        if worker["version"] != version or wrong or missing:
            what = f"version {worker['version']}, missing {missing[:3]}, wrong checksum {wrong[:3]}"
            raise RunError(3, f"{url}: sync of version {version} did not arrive as sent: {what}")

    def compare(self, canary, logp_N, name, version):
        """Every server scores the canary's tokens -> metrics; they must agree with the trainer's logp_N."""
        body = {"model": name, "prompt": canary.tolist(), "prompt_logprobs": 0, "max_tokens": 1}
        diffs, t = [], self.cfg.trainer
        for reply in self.post_all("/v1/completions", body | {"cache_salt": f"canary{version}.{time.time()}"}):
            rows = [choice["prompt_logprobs"] for choice in sorted(reply["choices"], key=lambda c: c["index"])]
            pairs = zip(canary.flatten().tolist(), (at for row in rows for at in row))
            theirs = [at[str(token)]["logprob"] for token, at in pairs if at]
            diffs += [abs(a - b) for a, b in zip(theirs, logp_N, strict=True)]
        largest, mean = max(diffs), sum(diffs) / len(diffs)
        value, limit = (largest, 1e-3) if t.dtype == "fp32" else (mean, 0.05)
        if not value <= (t.max_sync_dlogp or limit):
            raise RunError(
                3,
                f"canary after sync of version {version}: trainer and server differ by |dlogp| {largest:.2g} "
                f"at most, {mean:.2g} in the mean: the server does not hold the trainer's weights",
            )
        return {"sync/dlogp_max": largest, "sync/dlogp_mean": mean}


class WeightReceiver:
    """In every vLLM worker: --worker-extension-cls trainer.WeightReceiver. Called by collective_rpc with one JSON."""

    def join_weight_group(self, spec):
        spec, config = json.loads(spec), self.vllm_config
        timeout = timedelta(seconds=spec["timeout_s"])
        self.sync_store = dist.TCPStore(spec["host"], spec["port"], None, False, timeout, False)
        rank = spec["offset"] + self.rank
        self.sync_group = make_group(self.sync_store, rank, spec["size"], spec["backend"], timeout)
        self.sync_device, self.sync_timeout = self.device if spec["backend"] == "nccl" else "cpu", timeout
        return {"dtype": str(config.model_config.dtype), "lora": config.lora_config is not None}

    def receive_weights(self, spec):
        spec = json.loads(spec)
        got = {}

        def stream():
            info = {name: (shape, getattr(torch, dtype)) for name, shape, dtype, _ in spec["tensors"]}
            sizes = {name: math.prod(shape) * dtype.itemsize for name, (shape, dtype) in info.items()}
            for names in buckets(sizes.items()):
                flat = torch.empty(sum(sizes[name] for name in names), dtype=torch.uint8, device=self.sync_device)
                self.sync_group.broadcast(flat, 0).wait(self.sync_timeout)
                for name, part in zip(names, flat.split([sizes[name] for name in names])):
                    tensor = part.clone().view(info[name][1]).view(info[name][0])  # clone: aligned for its dtype
                    got[name] = checksum(tensor)
                    yield name, tensor

        try:
            if spec["adapter"]:
                tensors = dict(stream())
                if self.rank == 0:
                    write_adapter(Path(spec["dir"]), tensors, spec["adapter"]["trainer"], spec["model"])
            else:
                self.model_runner.reload_weights(weights_iterator=stream())
                head = getattr(self.model_runner.model, "lm_head", None)
                if self.device.type == "cpu" and head is not None:  # vLLM 0.32 leaves a tied head's packed copy stale
                    head.quant_method.process_weights_after_loading(head)
        except Exception:  # half-loaded: the text goes to the trainer, then this server dies rather than generate
            Timer(2, os._exit, [3]).start()
            return {"error": traceback.format_exc()[-1500:]}
        return {"version": spec["version"], "names": list(got), "checksums": list(got.values())}


def publish(sender, policy, version, staleness, cfg, rank, device):
    """Makes `version` live on all servers -> metrics on rank 0. Collective: gathers first, then rank 0 sends alone."""
    started, length = time.perf_counter(), min(256, cfg.run.max_seq_len - 1)  # the canary: about 256 tokens
    vocab, draw = policy.model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)
    canary = torch.randint(vocab, (256 // length, length), generator=draw, dtype=torch.int32)
    mask_T, zero_T = (torch.arange(length) > 0).repeat(len(canary)), torch.zeros(canary.numel())
    rows = Batch(canary.flatten(), mask_T, zero_T, zero_T, [length] * len(canary), [{}] * len(canary), {})
    policy.eval()
    with torch.no_grad():
        logp_N = score(policy, collate(rows, range(len(canary)), device))[0].tolist()
    policy.train()
    weights = sampler_weights(policy.model, DTYPES[cfg.trainer.dtype], sends_adapters(cfg.trainer))
    tensors = {name: w for name, w in weights if rank == 0}
    metrics = sender.send(version, tensors, canary, logp_N, staleness) if rank == 0 else {}
    return metrics | {"time/sync_s": time.perf_counter() - started}


# --- checkpoints ------------------------------------------------------------------------------------------------------


def state_options(**more):
    return dcp.StateDictOptions(full_state_dict=True, ignore_frozen_params=True, **more)


def save_checkpoint(run_dir, step, policy, ref, optimizer, cfg, info, rank):
    """Full tensors on rank 0, so that any world size loads them; committed by one rename, then old ones go."""
    model, optim = dcp.get_state_dict(policy, optimizer, options=state_options(cpu_offload=True))
    files = {
        "policy": model,
        "ref": dcp.get_model_state_dict(ref, options=state_options(cpu_offload=True)) if ref else {},
    }
    files["adam"] = {f"{k}/{kind}": v for k, kinds in optim["state"].items() for kind, v in kinds.items()}
    if rank == 0:
        state = {"step": step, "orchestrator": info, "param_groups": optim["param_groups"], "config": identity(cfg)}
        commit_directory(run_dir / "checkpoints" / f"step_{step:06d}", files, state)
        for old in sorted((run_dir / "checkpoints").glob("step_??????"))[: -cfg.checkpoint.keep]:
            shutil.rmtree(old)


def identity(cfg):
    """What must not change between a run and its resumption."""
    t = cfg.trainer
    lora = [t.lora_rank, t.lora_alpha, list(t.lora_target_modules)] if t.use_lora else None
    return {"model": cfg.run.model, "seed": cfg.run.seed, "lora": lora, "env": [cfg.env.id, cfg.env.args]}


def load_checkpoint(path, policy, ref, optimizer, cfg, rank):
    """Rank 0 reads and verifies; the others get their shards from it."""
    files, state = read_directory(path) if rank == 0 else ({}, {})
    if rank == 0 and state["config"] != identity(cfg):
        raise RunError(2, f"{path} was written by another configuration: {state['config']}, now {identity(cfg)}")
    adam = {}
    for key, tensor in files.get("adam", {}).items():
        name, _, kind = key.rpartition("/")
        adam.setdefault(name, {})[kind] = tensor
    optim = {"state": adam, "param_groups": state.get("param_groups", [])}
    how = state_options(broadcast_from_rank0=dist.get_world_size() > 1, strict=False)
    dcp.set_state_dict(policy, optimizer, model_state_dict=files.get("policy", {}), optim_state_dict=optim, options=how)
    if ref:
        dcp.set_model_state_dict(ref, files.get("ref", {}), options=how)


def save_final(run_dir, policy, cfg, rank):
    """final/: a directory that transformers (LoRA: peft) and vLLM load."""
    import transformers

    tensors = dict(sampler_weights(policy.model, DTYPES[cfg.trainer.dtype], cfg.trainer.use_lora))
    if rank:
        return
    final = run_dir / "final"
    shutil.rmtree(final, ignore_errors=True)
    if cfg.trainer.use_lora:
        write_adapter(final, tensors, cfg.trainer._asdict(), cfg.run.model)
    else:
        policy.model.save_pretrained(final, state_dict=tensors)
    transformers.AutoTokenizer.from_pretrained(cfg.run.model).save_pretrained(final)


# --- the loop ---------------------------------------------------------------------------------------------------------


def learning_rate(step, t, total):
    """Linear warm-up, then constant or a linear or cosine decay to 0 after `total` steps."""
    warmup = 0 if t.lr_scheduler_type == "constant" else max(t.warmup_steps, math.ceil(t.warmup_ratio * total))
    left = (total - step) / max(total - warmup, 1)
    decay = {"linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}.get(t.lr_scheduler_type, 1.0)
    return t.learning_rate * ((step + 1) / (warmup + 1) if step < warmup else decay)


def reference_logp(policy, ref, micro, t):
    """The frozen copy, or with LoRA the same model with its adapters off, or as they were at the last ref_sync."""
    LoRALinear.adapter = "ref" if t.ref_sync_steps else "off"
    with torch.no_grad():
        logp_N, _ = score(ref or policy, micro)
    LoRALinear.adapter = "policy"
    return logp_N


def sync_reference(policy, ref, alpha):
    """ref <- alpha policy + (1 - alpha) ref (TR-DPO, 2404.09656)."""
    local = [[x.to_local() if isinstance(x, DTensor) else x for x in m.parameters()] for m in (policy, ref) if m]
    for now, frozen in zip(*local) if ref else ():
        frozen.data.lerp_(now.data, alpha)
    for m in policy.modules() if not ref else ():
        if isinstance(m, LoRALinear):
            m.ref_A.copy_(full(m.lora_A)), m.ref_B.copy_(full(m.lora_B))


def replace_advantages(batch, name):
    """The same rollouts under another advantage, for --replay."""
    groups = {}
    for s in batch.samples:
        groups.setdefault(s["group"], {})[s["rollout"]] = s
    table = compute_advantages([list(group.values()) for group in groups.values()], name)
    new = {key: dict(zip(group, row)) for (key, group), row in zip(groups.items(), table)}
    adv_S = torch.tensor([new[s["group"]][s["rollout"]] for s in batch.samples], dtype=torch.float32)
    return batch._replace(adv_T=adv_S.repeat_interleave(torch.tensor(batch.lens)))


def train_step(policy, ref, optimizer, batch, step, cfg, rank, world, device):
    """updates_per_batch optimizer steps on one batch -> metrics. A non-finite gradient changes nothing, on any rank."""
    t, started, sums, skipped = cfg.trainer, time.perf_counter(), Counter(), 0
    torch.manual_seed((cfg.run.seed << 32) + step * world + rank)  # dropout is a function of seed, step and rank
    num_tokens = max(int(batch.mask_T.sum()), 1)
    count = num_tokens
    if t.loss == "dr_grpo":
        count = batch.info["rollouts"] * batch.info["max_tokens"]
    elif t.loss == "gspo":
        count = sum(bool(mask.any()) for mask in batch.mask_T.split(batch.lens))
    loss_function = named(t.loss, {t.loss: compute_loss})
    bins = pack(batch.lens, t.micro_batch_size * cfg.run.max_seq_len, world, policy.model.config.hidden_size)
    scale = 4096.0 if t.dtype == "fp16" else 1.0  # keeps small gradients out of fp16's subnormals
    params = [p for p in policy.parameters() if p.requires_grad]
    for update in range(t.updates_per_batch):
        for indices in bins[rank::world]:
            micro = collate(batch, indices, device)
            ref_logp_N = reference_logp(policy, ref, micro, t) if t.beta else None
            logp_N, entropy_N = score(policy, micro)
            given = {k: getattr(micro, k) for k in ("old_logp_N", "adv_N", "mask_N", "sample_N")}
            loss_N, logs = loss_function(logp_N=logp_N, entropy_N=entropy_N, ref_logp_N=ref_logp_N, cfg=t, **given)
            if t.beta:  # k3 (joschu.net/blog/kl-approx.html)
                logs["policy/kl_ref"] = (ref_logp_N - logp_N).exp() - (ref_logp_N - logp_N) - 1
                loss_N = loss_N + t.beta * logs["policy/kl_ref"]
            loss = torch.where(micro.mask_N, loss_N, 0).sum() / count
            (loss * scale).backward()
            if update == 0:
                log_r_N = logp_N - micro.old_logp_N
                logs |= {"policy/entropy": entropy_N, "policy/kl_sampler": log_r_N.exp() - 1 - log_r_N}
                logs |= {"age0_kl": logs["policy/kl_sampler"] * micro.age0_N, "age0": micro.age0_N}
                sums.update({k: (v.detach() * micro.mask_N).sum().float() for k, v in logs.items()})
                sums["loss"] += loss.detach() * num_tokens
        if scale != 1:
            torch._foreach_div_([p.grad for p in params], scale)
        grad_norm = full(nn.utils.clip_grad_norm_(params, t.max_grad_norm))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, t, cfg.run.max_steps)
        if grad_norm.isfinite():
            optimizer.step()
        skipped += int(not grad_norm.isfinite())
        optimizer.zero_grad()
    dist.all_reduce(total := torch.stack([sums[k] for k in sorted(sums)]))
    metrics = dict(zip(sorted(sums), (total / num_tokens).tolist()))
    age0, kl = metrics.pop("age0"), metrics.pop("age0_kl")
    seconds, size = time.perf_counter() - started, sum(batch.lens) * t.updates_per_batch
    metrics |= {"policy/kl_sampler_age0": kl / age0 if age0 else None, "policy/age0_tokens": round(age0 * num_tokens)}
    metrics |= {
        "optim/grad_norm": grad_norm.item(),
        "optim/lr": optimizer.param_groups[0]["lr"],
        "optim/skipped": skipped,
    }
    return metrics | {
        "time/train_s": seconds,
        "perf/tokens_per_s": size / seconds,
        "perf/mfu": mfu(policy, batch, t, seconds),
    }


def mfu(policy, batch, t, seconds):
    """Share of the GPU's dense bf16 peak: 6 FLOPs per parameter and token (4 with LoRA), and causal attention."""
    peaks = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40": 181e12, "4090": 165e12}
    peak = [v for k, v in peaks.items() if torch.cuda.is_available() and k in torch.cuda.get_device_name()]
    c, num = policy.model.config.get_text_config(), sum(p.numel() for p in policy.parameters())
    attention = 6 * c.num_hidden_layers * c.hidden_size * sum(n * n for n in batch.lens)
    flops = t.updates_per_batch * ((4 if t.use_lora else 6) * num * sum(batch.lens) + attention)
    return flops / seconds / peak[0] / dist.get_world_size() if peak else None


def start_distributed():
    """torchrun's variables, or one rank without it -> rank, world size, device."""
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(hours=2))  # ranks wait here while rank 0 waits for a batch
    return dist.get_rank(), dist.get_world_size(), device


def check_batch(batch, path, step, cfg):
    """A file of another run or step, or older rollouts than allowed, never reach the optimizer."""
    info, oldest = batch.info, max(s["age"] for s in batch.samples)
    if (info["run"], info["step"]) != (cfg.run.run_name, step) or oldest > info["max_staleness"]:
        raise RunError(
            4, f"{path} is step {info['step']} of {info['run']!r} with age {oldest} of {info['max_staleness']}"
        )


def log_step(run_dir, step, last, metrics, device):
    """One line on the console, every key in metrics.jsonl. `step` counts from 0; it made version step + 1."""
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    metrics = {"step": step - 1, "time": time.time(), "version": step} | metrics | {"perf/peak_gib": peak or rss}
    with open(run_dir / "metrics.jsonl", "a") as f:
        f.write(json.dumps(metrics) + "\n")
    show = [("reward", "reward/mean", "{:.3f}"), ("loss", "loss", "{:+.4f}"), ("ent", "policy/entropy", "{:.3f} nats")]
    show += [
        ("kl", "policy/kl_sampler", "{:.1e}"),
        ("grad", "optim/grad_norm", "{:.2f}"),
        ("age", "staleness/mean", "{:.1f}"),
    ]
    show += [
        ("wait", "time/wait_batch_s", "{:.2f}s"),
        ("train", "time/train_s", "{:.2f}s"),
        ("sync", "time/sync_s", "{:.2f}s"),
    ]
    show += [("", "perf/tokens_per_s", "{:,.0f} tok/s"), ("peak", "perf/peak_gib", "{:.1f} GiB")]
    parts = [f"{name} {form.format(metrics[key])}" for name, key, form in show if metrics.get(key) is not None]
    print(f"step {step:5d}/{last} |", " | ".join(part.strip() for part in parts), flush=True)


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*", metavar="table.key=value")
    parser.add_argument("--replay", type=Path, metavar="DIR", help="train on saved batches, without a server")
    args = parser.parse_args(argv)
    cfg = load_config(args.config, args.overrides)
    t, files = cfg.trainer, sorted(args.replay.glob("step_*.safetensors")) if args.replay else []
    if args.replay and not files:
        raise RunError(2, f"--replay {args.replay}: no step_*.safetensors there")
    run_dir = run_directory(cfg, f"-replay-{t.loss}" if files else "")
    rank, world, device = start_distributed()
    policy, ref = build_policy(cfg, device, world)
    params = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, t.learning_rate, (0.9, t.adam_beta2), weight_decay=t.weight_decay, fused=True)
    step, last, streak = 0, min(cfg.run.max_steps, len(files) or cfg.run.max_steps), 0
    if found := latest_checkpoint(run_dir):
        load_checkpoint(found, policy, ref, optimizer, cfg, rank)
        step = int(found.name[5:])
    if rank == 0:
        cut_lines(run_dir / "metrics.jsonl", lambda line: line["step"] < step)
    sender = WeightSender(cfg, run_dir, device) if rank == 0 and not files else None
    if not files:
        publish(sender, policy, step, 0, cfg, rank, device)
    while step < last:
        started = time.perf_counter()
        path = files[step] if files else run_dir / "batches" / f"step_{step:06d}.safetensors"
        batch = receive_batch(path, rank, device, t.batch_timeout_s)
        waited = time.perf_counter() - started
        if not files:
            check_batch(batch, path, step, cfg)
        elif t.advantage != batch.info.get("advantage", t.advantage):
            batch = replace_advantages(batch, t.advantage)
        metrics = train_step(policy, ref, optimizer, batch, step, cfg, rank, world, device)
        streak = streak + 1 if metrics["optim/skipped"] else 0
        if streak == 3:
            raise RunError(5, f"non-finite gradients in steps {step - 2} to {step}; loss {metrics['loss']}")
        step += 1
        if t.ref_sync_steps and step % t.ref_sync_steps == 0:
            sync_reference(policy, ref, t.ref_sync_alpha)
        sync = {"sync/dlogp_max": None, "sync/dlogp_mean": None, "time/sync_s": None}
        if not files:
            sync = publish(sender, policy, step, batch.info["max_staleness"], cfg, rank, device)
        if rank == 0:
            seconds = {"time/wait_batch_s": waited, "time/step_s": time.perf_counter() - started}
            log_step(run_dir, step, last, batch.info.get("metrics", {}) | metrics | sync | seconds, device)
        if step == last or (cfg.checkpoint.every and step % cfg.checkpoint.every == 0):
            save_checkpoint(run_dir, step, policy, ref, optimizer, cfg, batch.info, rank)
    save_final(run_dir, policy, cfg, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_role("trainer", main)
