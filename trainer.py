"""trainer.py owns the policy: packs batches, computes losses, steps AdamW, broadcasts weights to vLLM.

    env.py --rows, rewards--> orchestrator.py --batches/step_N.safetensors--> trainer.py (torchrun, FSDP2)
                               ^   | messages                                     |
        token ids, logprobs    |   v                                              |  torch.distributed broadcast
                             vLLM server(s)  <------------------------------------+  into WeightReceiver (below)
                               ^                                                  |
                               +--------- version file: "policy N is live" -------+

    torchrun --nproc-per-node 2 trainer.py config.toml                                # launch.sh does this
    torchrun trainer.py config.toml --replay outputs/run/batches trainer.loss=grpo    # saved batches, no server

Shapes: N loss tokens, T packed tokens, S samples, G rollouts of a group, D hidden, V vocabulary.
logp: the policy being trained; old_logp: the policy that sampled (vLLM's number); ref_logp: the KL reference.
"""

import importlib
import math
import time
from collections import Counter
from itertools import accumulate, zip_longest

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from configs.lib.attention import Packing, packed_attention
from configs.lib.batch import load_batch, replace_advantages, save_logp
from configs.lib.broadcast import WeightSender
from configs.lib.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint, write_final
from configs.lib.metrics import log_step, speed, where_time_goes
from configs.lib.pack import canary, collate, pack
from configs.lib.preflight import check_memory, check_sync
from configs.lib.process import fault, run_role, start_distributed
from configs.lib.runtime import RunError, arguments, cut_lines, identity, run_directory

# --- model: LoRA, log-probabilities, FSDP2 ----------------------------------------------------------------------------

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class LoRALinear(nn.Linear):
    """y = W x + alpha/r B A x (2106.09685). W is frozen and never changed. add_lora turns nn.Linear into it."""

    def forward(self, x):
        low = F.linear(F.dropout(x, self.dropout, self.training), self.lora_A)
        return F.linear(x, self.weight, self.bias) + self.scale * F.linear(low, self.lora_B)


def add_lora(model, cfg):
    """Freezes the model; each linear layer whose name ends in a target gets fp32 factors A [r, in] and B [out, r]."""
    model.requires_grad_(False)
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    for target in cfg.lora_target_modules:
        matched = [m for name, m in linear.items() if f".{name}".endswith(f".{target}")]
        if not matched:
            there = sorted({name.split(".")[-1] for name in linear})
            raise RunError(2, f"trainer.lora_target_modules: {target!r} matches no linear layer; there are {there}")
        if any(m.weight is model.get_input_embeddings().weight for m in matched):
            raise RunError(2, f"trainer.lora_target_modules: {target!r} is tied to the embedding: it cannot be merged")
        for m in matched:
            m.__class__, m.scale, m.dropout = LoRALinear, cfg.lora_alpha / cfg.lora_rank, cfg.lora_dropout
            m.lora_A = nn.Parameter(nn.init.kaiming_uniform_(torch.empty(cfg.lora_rank, m.in_features), a=math.sqrt(5)))
            m.lora_B = nn.Parameter(torch.zeros(m.out_features, cfg.lora_rank))


class TokenLogp(torch.autograd.Function):
    """logits_NV, target_N -> logp_N of the targets, entropy_N. One node for both, which keeps the logits alone, where
    autograd's own graph keeps four [N, V] tensors, those of an unused entropy until long after the backward."""

    @staticmethod
    def forward(ctx, logits_NV, target_N):
        highest_N1 = logits_NV.amax(-1, keepdim=True)
        below_NV = logits_NV - highest_N1
        exp_NV = below_NV.exp()
        sum_N = exp_NV.sum(-1)
        entropy_N = sum_N.log() - exp_NV.mul_(below_NV).sum(-1) / sum_N
        logp_N = below_NV.gather(-1, target_N[:, None])[:, 0] - sum_N.log()
        ctx.save_for_backward(logits_NV, target_N, highest_N1, sum_N, entropy_N)
        ctx.set_materialize_grads(False)
        return logp_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dlogp_N, dentropy_N):
        """d logp = onehot - p; d entropy = -p (log p + entropy), for a loss that has a use for it."""
        logits_NV, target_N, highest_N1, sum_N, entropy_N = ctx.saved_tensors
        log_p_NV = (logits_NV - highest_N1).sub_(sum_N.log()[:, None])
        weight_NV = torch.zeros_like(sum_N)[:, None] if dlogp_N is None else -dlogp_N[:, None]
        if dentropy_N is not None:
            weight_NV = weight_NV - dentropy_N[:, None] * (log_p_NV + entropy_N[:, None])
        grad_NV = log_p_NV.exp_().mul_(weight_NV)
        if dlogp_N is not None:
            grad_NV.scatter_add_(-1, target_N[:, None], dlogp_N[:, None])
        return grad_NV, None


class Policy(nn.Module):
    """A Hugging Face causal LM that returns log-probabilities of given tokens. The head runs inside this forward, where
    FSDP2 holds its weight; above CHUNK logits in parts, and again in backward: no full [N, V] tensor exists."""

    CHUNK = 1 << 26  # 256 MiB in fp32, of which there are a few at a time

    def __init__(self, model):
        super().__init__()
        self.model, c = model, model.config.get_text_config()
        self.scale = getattr(c, "logit_scale", None) or 1 / (getattr(c, "logits_scaling", None) or 1)
        self.softcap = getattr(c, "final_logit_softcapping", None)

    def head(self, hidden_ND, target_N, temperature_N):
        """-> logp_N, entropy_N in nats, of fp32 logits over the temperature."""
        logits_NV, by_N = self.model.get_output_embeddings()(hidden_ND).float(), self.scale / temperature_N
        if self.softcap:
            logits_NV, by_N = torch.tanh(logits_NV * (self.scale / self.softcap)), self.softcap / temperature_N
        return TokenLogp.apply(logits_NV * by_N[:, None], target_N)

    def forward(self, micro):
        """-> logp_N, entropy_N of the micro-batch's loss tokens; fp32, nats, at the sampling temperature."""
        row = {"input_ids": micro["ids_T"][None], "position_ids": micro["position_T"][None], "use_cache": False}
        hidden_TD = self.model.base_model(**row, packing=Packing(micro["lens"], micro["cu_lens"])).last_hidden_state[0]
        parts = (hidden_TD[micro["index_N"]], micro["target_N"], micro["temperature_N"])
        size = max(1, self.CHUNK // self.model.config.get_text_config().vocab_size)
        if len(parts[0]) <= size:
            return self.head(*parts)
        chunks = zip(*(x.split(size) for x in parts))
        logp, entropy = zip(*(checkpoint(self.head, *chunk, use_reentrant=False) for chunk in chunks))
        return torch.cat(logp), torch.cat(entropy)


def build_policy(cfg, device, world):
    """Load, add LoRA, shard with FSDP2: a group per block, one for the rest. FSDP2 also casts fp32 masters down."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from transformers import AttentionInterface, AutoModelForCausalLM

    t, offload = cfg.trainer, cfg.trainer.offload_optimizer and device.type == "cuda"
    AttentionInterface.register("packed", packed_attention)
    torch.manual_seed(cfg.run.seed)  # every rank draws the same adapters
    dtype = DTYPES[t.dtype] if t.use_lora else torch.float32
    model = AutoModelForCausalLM.from_pretrained(cfg.run.model, dtype=dtype, attn_implementation="packed")
    if not model._supports_attention_backend or getattr(model.config, "num_experts", 0):
        raise RunError(2, f"model: {type(model).__name__} is no dense decoder on Transformers' AttentionInterface")
    if t.use_lora:
        add_lora(model, t)
    if t.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if t.compile:
        for layer in model.base_model.layers:  # not the module: FSDP2's hooks stay outside of the graph
            layer.forward = torch.compile(layer.forward, dynamic=True)
    policy = Policy(model).train()  # on the CPU: fully_shard moves a block at a time
    if world % t.replicas:
        raise RunError(2, f"trainer.replicas = {t.replicas} does not divide {world} ranks")
    if world == 1 and t.dtype == "fp32" and not offload:
        return policy.to(device)  # nothing to shard, nothing to cast
    shape, names = (t.replicas, world // t.replicas), ("replicate", "shard")  # sharded within a node, copied across
    mesh = dist.init_device_mesh(device.type, shape, mesh_dim_names=names)
    how = {"mesh": mesh if t.replicas > 1 else mesh["shard"], "reshard_after_forward": True}
    how["offload_policy"] = CPUOffloadPolicy() if offload else OffloadPolicy()
    for module in (*model.base_model.layers, policy):  # the root's own inputs hold temperatures: not to be rounded
        precision = MixedPrecisionPolicy(DTYPES[t.dtype], torch.float32, cast_forward_inputs=module is not policy)
        fully_shard(module, mp_policy=precision, **how)
        module.set_gradient_divide_factor(1.0)  # the loss is divided by the count over all ranks already
        module.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    return policy


def local(tensor):
    """A rank's own part of a parameter."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor):
    """The whole of a parameter, on every rank. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# --- losses and advantages --------------------------------------------------------------------------------------------

EPSILON = {"grpo": (0.2, 0.28), "dr_grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}  # DAPO 2503.14476, 2503.20783, 2507.18071


def compute_loss(logp_N, old_logp_N, adv_N, mask_N, sample_N, entropy_N, ref_logp_N, cfg):
    """HACK HERE: loss per token and values to log -> (loss_N, {metric: value_N}); "module:function" in trainer.loss
    names another one. mask_N is False on filler, sample_N counts a token's sample from 0, ref_logp_N None without beta,
    cfg the [trainer] table. The step divides the sum of loss_N by a count over all ranks and micro-batches (dr_grpo:
    rollouts x max_tokens, gspo: samples, else loss tokens). Below, r = pi / pi_old, A the advantage, sg no gradient."""
    log_r_N = (logp_N - old_logp_N).clamp(-20, 20)  # before exp: inf would meet zero advantages
    r_N = log_r_N.exp()
    low, high = EPSILON.get(cfg.loss, (0, 0))
    low, high = 1 - (cfg.epsilon or low), 1 + (cfg.epsilon_high or high)
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
        case "icepop":  # -sg(r) A logp for low <= r <= cap, else 0 (2510.18855)
            out_N = (r_N < cfg.icepop_low) | (r_N > cfg.ratio_cap)
            loss_N = -torch.where(out_N, 0, r_N.detach() * adv_N * logp_N)
        case "gspo":  # s = exp(mean of log r over the sample): -min(s A, clip(s) A), over its tokens (2507.18071)
            zero_S = torch.zeros_like(logp_N)  # long enough, and no wait for the GPU to know how long
            len_N = zero_S.index_add(0, sample_N, mask_N.to(logp_N)).clamp(min=1)[sample_N]
            s_N = (zero_S.index_add(0, sample_N, log_r_N * mask_N)[sample_N] / len_N).exp()
            out_N = s_N.clamp(low, high) * adv_N < s_N * adv_N
            loss_N = -torch.minimum(s_N * adv_N, s_N.clamp(low, high) * adv_N) / len_N
        case "sft":  # cross-entropy on demonstrations
            loss_N, out_N = -logp_N, torch.zeros_like(mask_N)
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


def compute_advantages(groups, name, gamma=1.0):
    """[[{"reward": float, "turn_rewards": list or None, "num_turns": int}, ...], ...] -> [[advantage, ...], ...]; with
    turn rewards, or gamma < 1, an advantage is a list of one number per turn, from its discounted return-to-go.

    The baseline of turn t is over the whole group, where a rollout that ended before t counts 0. So it does not depend
    on when the rollout itself stops; a mean over those still going would be a bonus for going on (verl RFC 7244)."""

    def returns(member):
        last = [0.0] * (member["num_turns"] - 1) + [member["reward"]]
        turns = member.get("turn_rewards") or last
        return list(accumulate(reversed(turns), lambda later, now: now + gamma * later))[::-1]

    rewards = torch.tensor([m["reward"] for group in groups for m in group], dtype=torch.float64)
    scale = rewards.std(correction=0).item() + 1e-4 if name == "batch_std" else 1.0
    function, table = named(name, ADVANTAGES), []
    for group in groups:
        by_turn = gamma < 1 or any(m.get("turn_rewards") for m in group)
        rows = [returns(m) if by_turn else [m["reward"]] for m in group]
        columns = zip_longest(*rows, fillvalue=0.0)
        adv_TG = [(function(torch.tensor(r_G, dtype=torch.float64), group) / scale).tolist() for r_G in columns]
        table.append([[a[i] for a in adv_TG[: len(row)]] if by_turn else adv_TG[0][i] for i, row in enumerate(rows)])
    return table


# --- weights for the sampler; configs/lib/broadcast.py carries them ---------------------------------------------------


def sampler_weights(model, dtype, adapters):
    """Yields (checkpoint name, full tensor) as a sampler wants them. Collective: every rank exhausts it. LoRA is merged
    out of place in fp32; with `adapters` only A and B go, under PEFT's names."""
    seen = set()
    for name, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            is_lora = key.startswith("lora_")
            if is_lora == adapters and p not in seen:
                seen.add(p)  # tied weights go once
                w = full(p.detach())
                if isinstance(module, LoRALinear) and key == "weight":
                    w = w + module.scale * full(module.lora_B.detach()) @ full(module.lora_A.detach())
                yield f"base_model.model.{name}.{key}.weight" if is_lora else f"{name}.{key}", w.to(dtype).contiguous()


@torch.no_grad()
def canary_logp(policy, cfg, device):
    """-> 256 fixed ids in rows, and logp_N of all but the first of each row. Collective."""
    ids, batch = canary(policy.model.config.get_text_config().vocab_size, cfg.run.max_seq_len - 1)
    policy.eval()
    logp_N = policy(collate(batch, list(range(len(ids))), device))[0]
    policy.train()
    return ids.tolist(), logp_N.tolist()


def publish(sender, policy, version, staleness, cfg, rank, device):
    """Makes `version` live -> metrics. Collective: gathers first, then rank 0 alone talks to the servers."""
    started = time.perf_counter()
    rows, logp_N = canary_logp(policy, cfg, device)
    fault("gather", version)
    weights = sampler_weights(policy.model, DTYPES[cfg.trainer.dtype], cfg.sends_adapters)
    tensors = {name: w for name, w in weights if rank == 0}
    metrics = sender.send(version, tensors, rows, logp_N, staleness) if rank == 0 else {}
    return metrics | {"time/sync_s": time.perf_counter() - started}


# --- the loop ---------------------------------------------------------------------------------------------------------


def learning_rate(step, t, total):
    """Linear warm-up, then constant or a linear or cosine decay to 0 after `total` steps."""
    warmup = 0 if t.lr_scheduler_type == "constant" else max(t.warmup_steps, math.ceil(t.warmup_ratio * total))
    left = (total - step) / max(total - warmup, 1)
    decay = {"linear": left, "cosine": (1 - math.cos(math.pi * left)) / 2}.get(t.lr_scheduler_type, 1.0)
    return t.learning_rate * ((step + 1) / (warmup + 1) if step < warmup else decay)


def swap(params, ref):
    """Exchanges trained and reference parameters in place: the policy module then computes the reference."""
    if torch.cuda.is_available():  # with offload copies to the GPU may still read them
        torch.cuda.synchronize()
    for p, r in zip(params, ref):
        kept = local(p.data).clone()
        local(p.data).copy_(r), r.copy_(kept)


@torch.no_grad()
def with_reference(policy, ref, params, micros):
    """-> micros with ref_logp_N, of the reference and without dropout."""
    swap(params, ref)
    policy.eval()
    micros = [micro | {"ref_logp_N": policy(micro)[0]} for micro in micros]
    policy.train()
    swap(params, ref)
    return micros


@torch.no_grad()
def observed(micro, logp_N, entropy_N, logs, ages, given, t):
    """-> {name: sum over the micro-batch's tokens} of logs, KL(sampler || policy) as k3, also by age in versions, and
    shadow metrics: what other losses would have clipped of these very tokens. given: compute_loss's other arguments."""
    log_r_N = logp_N - given["old_logp_N"]
    kl_N = log_r_N.exp() - 1 - log_r_N
    logs = logs | {"policy/entropy": entropy_N, "policy/kl_sampler": kl_N}
    for age in ages:
        logs |= {f"kl_age{age}": kl_N * (micro["age_N"] == age), f"age{age}": micro["age_N"] == age}
    for name in t.shadow_losses:
        other = t if name == t.loss else t._replace(loss=name, epsilon=0.0, epsilon_high=0.0)  # at its own edges
        shadow = compute_loss(logp_N=logp_N, entropy_N=entropy_N, cfg=other, **given)[1]
        logs[f"shadow/{name}/clip_frac"] = shadow["policy/clip_frac"]
    return {k: (v * micro["mask_N"]).sum().float() for k, v in logs.items()}


def train_step(policy, ref, optimizer, batch, step, cfg, rank, world, device):
    """updates_per_batch optimizer steps on one batch -> metrics, and logp_T before them (0 where nothing is trained). A
    non-finite gradient changes nothing, on any rank."""
    t, started, sums, skipped = cfg.trainer, time.perf_counter(), Counter(), 0
    lr = learning_rate(step, t, cfg.run.max_steps)
    torch.manual_seed((cfg.run.seed << 32) + step * world + rank)  # dropout is a function of seed, step and rank
    num_tokens = max(int(batch.loss_mask.sum()), 1)
    with_tokens = sum(bool(mask.any()) for mask in batch.loss_mask.split(batch.sample_lens.tolist()))
    rollouts, max_tokens = batch.info.get("rollouts", 0), batch.info.get("max_tokens", 0)
    count = {"dr_grpo": rollouts * max_tokens, "gspo": with_tokens}.get(t.loss, num_tokens)
    loss_function, params = named(t.loss, {t.loss: compute_loss}), optimizer.param_groups[0]["params"]
    ages, logp_T = {s.get("age", -1) for s in batch.samples} - {-1}, torch.zeros(len(batch.tokens), device=device)
    lens, budget = batch.sample_lens.tolist(), t.micro_batch_size * cfg.run.max_seq_len
    bins = pack(lens, budget, world, policy.model.config.get_text_config().hidden_size)[rank::world]
    micros = [collate(batch, indices, device) for indices in bins]
    if ref:
        micros = with_reference(policy, ref, params, micros)
    scale = 4096.0 if t.dtype == "fp16" else 1.0  # keeps small gradients out of fp16's subnormals
    for update in range(t.updates_per_batch):
        for micro in micros:
            fault("fwd", step)
            logp_N, entropy_N = policy(micro)
            fault("bwd", step)
            old_logp_N = micro["old_logp_N"]  # nan: text of unknown origin (--offline); its ratio is 1 at first
            micro["old_logp_N"] = torch.where(old_logp_N.isnan(), logp_N.detach(), old_logp_N)
            given = {k: micro.get(k) for k in ("old_logp_N", "adv_N", "mask_N", "sample_N", "ref_logp_N")}
            loss_N, logs = loss_function(logp_N=logp_N, entropy_N=entropy_N, cfg=t, **given)
            if ref:  # k3 (joschu.net/blog/kl-approx.html)
                log_r_N = micro["ref_logp_N"] - logp_N
                logs["policy/kl_ref"] = log_r_N.exp() - log_r_N - 1
                loss_N = loss_N + t.beta * logs["policy/kl_ref"]
            loss = torch.where(micro["mask_N"], loss_N, 0).sum() / count
            if t.replicas > 1:  # between nodes once per step
                policy.set_requires_all_reduce(micro is micros[-1])
            (loss * scale).backward()
            if update == 0:
                sums.update(observed(micro, logp_N, entropy_N, logs, ages, given, t))
                sums["loss"] += loss.detach() * num_tokens
                logp_T[micro["at_N"]] = torch.where(micro["mask_N"], logp_N.detach(), 0)
        if scale != 1:
            torch._foreach_div_([p.grad for p in params], scale)
        grad_norm = full(nn.utils.clip_grad_norm_(params, t.max_grad_norm))
        optimizer.param_groups[0]["lr"] = lr
        is_finite = bool(grad_norm.isfinite())
        skipped += not is_finite
        fault("opt", step)
        if is_finite:
            optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(total := torch.stack([sums[k] for k in sorted(sums)]))
    dist.all_reduce(logp_T)  # a token is trained on one rank, and 0 on the others
    metrics = dict(zip(sorted(sums), (total / num_tokens).tolist()))
    for age in ages:
        share, kl = metrics.pop(f"age{age}"), metrics.pop(f"kl_age{age}")
        metrics |= {f"policy/kl_age{age}": kl / share if share else None, f"policy/tokens_age{age}": share * num_tokens}
    seconds = time.perf_counter() - started
    metrics |= {"optim/lr": lr, "optim/grad_norm": grad_norm.item(), "optim/skipped": skipped, "time/train_s": seconds}
    return metrics | speed(policy, lens, t, seconds, world), logp_T


def main(argv):
    """A run of one rank, from the last checkpoint to max_steps. RunError ends it; argv: see --help."""
    cfg, replay = arguments(__doc__, argv)  # replay: the files of saved batches, or []
    t, run_dir = cfg.trainer, run_directory(cfg, f"-replay-{cfg.trainer.loss}" if replay else "")
    rank, world, device = start_distributed(cfg)
    policy = build_policy(cfg, device, world)
    params = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, t.learning_rate, (0.9, t.adam_beta2), weight_decay=t.weight_decay, fused=True)
    ref = [local(p.detach()).clone() for p in params] if t.beta else None  # LoRA's starts at B = 0: the base model
    step, last, streak = 0, min(cfg.run.max_steps, len(replay) or cfg.run.max_steps), 0
    if found := latest_checkpoint(run_dir):
        step = load_checkpoint(found, policy, ref, optimizer, cfg, rank)
    if replay and step == last:
        raise RunError(2, f"{run_dir} has its {last} steps already: choose another run_name, or remove it")
    first = step
    cut_lines(run_dir / "metrics.jsonl", lambda line: line["step"] < first, rank)
    sender = WeightSender(cfg, run_dir, device) if rank == 0 and not replay else None
    if not replay:
        if cfg.run.preflight and step == 0:
            check_memory(train_step, policy, ref, optimizer, cfg, rank, world, device)
            check_sync(publish, canary_logp, sender, policy, cfg, rank, device)
            optimizer.state.clear()  # of the checks, which go beside Adam's tensors as all broadcasts do
        publish(sender, policy, step, 0, cfg, rank, device)
    mark = time.perf_counter()
    while step < last:
        started, mark = mark, time.perf_counter()  # between them: the checkpoint of the step before
        path = replay[step] if replay else run_dir / "batches" / f"step_{step:06d}.safetensors"
        batch = load_batch(path, rank, device, t.batch_timeout_s, None if replay else (identity(cfg), step))
        waited, info = time.perf_counter() - mark, batch.info
        if replay and [t.advantage, t.gamma] != [info.get("advantage", t.advantage), info.get("gamma", t.gamma)]:
            batch = replace_advantages(batch, compute_advantages, t.advantage, t.gamma)
        trained, logp_T = train_step(policy, ref, optimizer, batch, step, cfg, rank, world, device)
        metrics = info.get("metrics", {}) | trained | {"time/checkpoint_s": mark - started}
        is_broken = metrics["optim/skipped"] or (not replay and metrics["policy/kl_sampler"] > 1)
        streak = streak + 1 if is_broken else 0
        if streak == 3:
            what = f"loss {metrics['loss']}, KL(sampler || policy) {metrics['policy/kl_sampler']} nats"
            raise RunError(5, f"no finite gradient, or a KL above 1, in steps {step - 2} to {step}: at last {what}")
        step += 1
        if ref and t.ref_sync_steps and step % t.ref_sync_steps == 0:  # TR-DPO, 2404.09656
            torch._foreach_lerp_(ref, [local(p.detach()) for p in params], t.ref_sync_alpha)
        if not replay:
            metrics |= publish(sender, policy, step, info["max_staleness"], cfg, rank, device)
        if rank == 0:
            save_logp(run_dir, step - 1, logp_T)
            log_step(run_dir, step - 1, last, metrics, started, waited)
        mark = time.perf_counter()
        if step == last or (cfg.checkpoint.every and step % cfg.checkpoint.every == 0):
            save_checkpoint(run_dir, step, policy, ref, optimizer, cfg, info, rank)
    if not cfg.run.max_steps:  # --check
        return
    write_final(run_dir, dict(sampler_weights(policy.model, DTYPES[t.dtype], t.use_lora)), policy.model, cfg, rank)
    if sender:
        print(where_time_goes(run_dir, first, sender.pages, sender.servers.metrics()), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run_role("trainer", main)
