"""The numbers of metrics.jsonl and eval.jsonl, and the console's line. null: not measured."""

import json
import math
import resource
import time
from collections import Counter

import numpy as np


def rollout_metrics(groups, samples):
    """Of one batch: everything, and where several environments are mixed, env/<name>/ and the most of it for each.

    Rewards are over every scored rollout, also of dropped groups: without the flat ones the mean would mislead."""
    ages, names = [s["age"] for s in samples], sorted({g.env for g in groups})
    metrics = of_groups(groups)
    metrics |= {"staleness/mean": float(np.mean(ages)), "staleness/max": max(ages)}  # versions, per sample
    for name in names if len(names) > 1 else ():
        metrics |= {f"env/{name}/{k}": v for k, v in of_groups([g for g in groups if g.env == name]).items()}
    return metrics


def of_groups(groups):
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = np.array([r.reward for r in rollouts if r.reward is not None])
    lens = [sum(sum(s["mask"]) for s in r.samples) for r in rollouts]
    reasons = Counter(g.dropped.split()[0].rstrip(":") if g.dropped else "kept" for g in groups)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **{f"reward/p{q}": float(np.percentile(rewards, q)) for q in (10, 50, 90)},
        **{f"reward/{name}": value for name, value in function_means(rollouts).items()},
        "rollout/num": len(rollouts),
        "rollout/tokens": float(np.mean(lens)),  # sampled, per rollout
        "rollout/turns": float(np.mean([r.num_turns for r in rollouts])),
        "rollout/truncated": float(np.mean([r.truncated for r in rollouts])),  # share
        "rollout/errors": sum(bool(r.error) for r in rollouts),
        **{f"error/{name}": num for name, num in Counter(r.error for r in rollouts if r.error).items()},
        "rollout/forks": sum(r.forks for r in rollouts),
        **{f"group/{name}": reasons[name] for name in ("kept", "flat", "failed", "long", "empty")},
    }


def eval_metrics(groups):
    """Of one evaluation; groups: rollouts per row. A reward of 1 or more passes. ci95: half width, over rows."""
    rollouts = [r for group in groups for r in group]
    scored = [rewards for group in groups if (rewards := [r.reward for r in group if r.reward is not None])]
    means = np.array([np.mean(rewards) for rewards in scored])
    return {
        "reward/mean": float(means.mean()),
        "ci95": float(1.96 * means.std() / math.sqrt(len(means))),
        "pass@1": float(np.mean([np.mean([x >= 1 for x in rewards]) for rewards in scored])),
        "pass@k": float(np.mean([max(rewards) >= 1 for rewards in scored])),
        "k": max(map(len, groups)),
        "n": len(means),
        "tokens": float(np.mean([sum(sum(s["mask"]) for s in r.samples) for r in rollouts])),
        "truncated": float(np.mean([r.truncated for r in rollouts])),
        "errors": sum(bool(r.error) for r in rollouts),
        **function_means(rollouts),
    }


def function_means(rollouts):
    names = sorted({name for r in rollouts for name in r.metrics})
    return {name: float(np.mean([r.metrics[name] for r in rollouts if name in r.metrics])) for name in names}


PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}  # bf16


def speed(policy, lens, t, seconds, world):
    """-> perf/*. Model FLOPs: 6 per parameter and token (4 where most are frozen), and causal attention."""
    import torch

    is_cuda = torch.cuda.is_available()
    peak = [v for k, v in PEAK_FLOPS.items() if is_cuda and k in torch.cuda.get_device_name()]
    c, num = policy.model.config.get_text_config(), sum(p.numel() for p in policy.parameters())
    if not c.tie_word_embeddings:
        num -= c.vocab_size * c.hidden_size  # a look-up is no arithmetic
    width = c.num_attention_heads * (getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
    flops = (4 if t.use_lora else 6) * num * sum(lens) + 6 * c.num_hidden_layers * width * sum(n * n for n in lens)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {
        "perf/tokens_per_s": t.updates_per_batch * sum(lens) / seconds,
        "perf/mfu": t.updates_per_batch * flops / seconds / peak[0] / world if peak else None,
        "perf/peak_gib": torch.cuda.max_memory_allocated() / 2**30 if is_cuda else rss,
    }


SHOWN = {
    "reward": ("reward/mean", "{:.3f}"), "loss": ("loss", "{:+.4f}"), "ent": ("policy/entropy", "{:.3f} nats"),
    "kl": ("policy/kl_sampler", "{:.1e}"), "grad": ("optim/grad_norm", "{:.2f}"), "age": ("staleness/mean", "{:.1f}"),
    "wait": ("time/wait_batch_s", "{:.2f} s"), "train": ("time/train_s", "{:.2f} s"),
    "sync": ("time/sync_s", "{:.2f} s"), "speed": ("perf/tokens_per_s", "{:,.0f} tok/s"),
    "peak": ("perf/peak_gib", "{:.1f} GiB"),
}  # fmt: skip

LIMIT = 0.15  # of the time: what takes more than this and is no training has a remedy


def where_time_goes(run_dir, first, before, pages):
    """One sentence on the steps from `first` on, and what to change. before, pages: the text of each server's /metrics
    at the start and now, "" where it has none."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [m for m in lines if m["step"] >= first]
    parts = {k: sum(m.get(f"time/{k}_s") or 0 for m in lines) for k in ("step", "train", "wait_batch", "sync")}
    if not (whole := parts.pop("step")):
        return ""
    train, wait, sync = (seconds / whole for seconds in parts.values())

    def counted(name):
        def total(pages):
            found = [line.split() for page in pages for line in page.splitlines() if line.startswith(f"vllm:{name}")]
            return sum(float(words[-1]) for words in found if words[0].partition("{")[0] == f"vllm:{name}")

        return total(pages) - total(before)

    latency, asked = counted("e2e_request_latency_seconds_sum"), counted("prefix_cache_queries_total")
    queue = counted("request_queue_time_seconds_sum") / latency if latency else 0.0
    server = ""
    if latency:
        server = (
            f"; servers: {counted('generation_tokens_total') / whole:,.0f} tokens/s, {queue:.0%} of a request's time "
        )
        server += f"in their queue, {counted('prefix_cache_hits_total') / max(asked, 1):.0%} of prompt tokens cached, "
        server += f"{counted('num_preemptions_total'):.0f} preemptions"
    if wait > LIMIT:
        remedy = "raise inference.gpus" if queue > LIMIT else "raise orchestrator.max_concurrent or max_staleness"
    elif sync > LIMIT:
        remedy = "make steps longer (orchestrator.batch_size, trainer.updates_per_batch), or train adapters in 16 bits"
    else:
        remedy = "training is the limit: raise trainer.gpus or micro_batch_size, or do without gradient_checkpointing"
    shares = f"the trainer trained {train:.0%}, waited {wait:.0%} for rollouts and synced {sync:.0%} of {whole:.0f} s"
    return f"time: {shares}{server}; {remedy}"


KL_WARNING = 0.05  # nats; on one set of weights the two engines agree far better, and a version or two adds little


def log_step(run_dir, step, last, metrics, started, waited):
    """Every key into metrics.jsonl, some on the console. step: the batch's number, from 0; it made version step + 1."""
    not_here = {"sync/dlogp_max": None, "sync/dlogp_mean": None, "time/sync_s": None}  # in a replay
    metrics = {"step": step, "time": time.time(), "version": step + 1} | not_here | metrics
    metrics |= {"time/step_s": time.perf_counter() - started, "time/wait_batch_s": waited}
    with open(run_dir / "metrics.jsonl", "a") as f:
        f.write(json.dumps(metrics) + "\n")
    parts = [
        f"{name} {form.format(metrics[key])}" for name, (key, form) in SHOWN.items() if metrics.get(key) is not None
    ]
    print(f"step {step + 1:5d}/{last} |", " | ".join(parts), flush=True)
    if (kl := metrics.get("policy/kl_sampler") or 0) > KL_WARNING:
        own = metrics.get("policy/kl_sampler_age0")
        of = f"{own:.2f} on rollouts of the very same weights: the engines disagree" if own else "of stale rollouts"
        remedy = (
            "look at sync/dlogp_mean and trainer.dtype" if own and own > kl / 2 else "lower max_staleness or the lr"
        )
        print(f"warning: step {step + 1}: KL(sampler || policy) is {kl:.2f} nats, {of}; {remedy}", flush=True)
