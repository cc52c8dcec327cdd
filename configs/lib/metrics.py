"""The numbers of metrics.jsonl and eval.jsonl, and the console's line. null: not measured."""

import json
import math
import resource
import time
from collections import Counter

import numpy as np

from configs.lib.runtime import read_lines


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
    answers = [[tuple(tuple(s["tokens"]) for s in r.samples) for r in g.rollouts if r.samples] for g in groups]
    distinct = [len(set(a)) / len(a) for a in answers if a]  # share within a group: 1 / G is collapse
    reasons = Counter(g.dropped.split()[0].rstrip(":") if g.dropped else "kept" for g in groups)
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        **{f"reward/p{q}": float(np.percentile(rewards, q)) for q in (10, 50, 90)},
        **{f"reward/{name}": value for name, value in function_means(rollouts).items()},
        "rollout/num": len(rollouts),
        "rollout/tokens": float(np.mean(lens)),  # sampled, per rollout
        "rollout/turns": float(np.mean([r.num_turns for r in rollouts])),
        "rollout/distinct": float(np.mean(distinct)) if distinct else None,
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


def wilson(p, n, z=1.96):
    """95 % interval of a share p of n."""
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return (middle - half) / (1 + z * z / n), (middle + half) / (1 + z * z / n)


def pass_at(k, groups):
    """Unbiased: the chance that k of an example's n rollouts, drawn without replacement, hold one with reward >= 1
    (2107.03374)."""
    chances = []
    for rewards in groups:
        n, c = len(rewards), sum(r >= 1 for r in rewards)
        if n >= k:
            chances.append(1 - math.comb(n - c, k) / math.comb(n, k))
    return sum(chances) / len(chances) if chances else math.nan, len(chances)


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


SHOWN = {  # widths keep a column a column
    "reward": ("reward/mean", "{:6.3f}"), "loss": ("loss", "{:+8.4f}"), "ent": ("policy/entropy", "{:6.3f} nats"),
    "kl": ("policy/kl_sampler", "{:7.1e}"), "grad": ("optim/grad_norm", "{:6.2f}"), "age": ("staleness/mean", "{:.1f}"),
    "wait": ("time/wait_batch_s", "{:6.2f} s"), "train": ("time/train_s", "{:6.2f} s"),
    "sync": ("time/sync_s", "{:5.2f} s"), "speed": ("perf/tokens_per_s", "{:7,.0f} tok/s"),
    "peak": ("perf/peak_gib", "{:5.1f} GiB"),
}  # fmt: skip

LIMIT = 0.15  # of the time: what takes more than this and is no training has a remedy


def where_time_goes(run_dir, first, before, pages):
    """One sentence on the steps from `first` on, and what to change. before, pages: the text of each server's /metrics
    at the start and now, "" where it has none."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [m for m in lines if m["step"] >= first]
    parts = {
        k: sum(m.get(f"time/{k}_s") or 0 for m in lines) for k in ("step", "train", "wait_batch", "sync", "checkpoint")
    }
    if not (whole := parts.pop("step")):
        return ""
    train, wait, sync, saved = (seconds / whole for seconds in parts.values())

    def counted(name):
        def total(pages):
            found = [line.split() for page in pages for line in page.splitlines() if line.startswith(f"vllm:{name}")]
            return sum(float(words[-1]) for words in found if words[0].partition("{")[0] == f"vllm:{name}")

        return total(pages) - total(before)

    latency, asked = counted("e2e_request_latency_seconds_sum"), counted("prefix_cache_queries_total")
    queue = counted("request_queue_time_seconds_sum") / latency if latency else 0.0
    server = ""
    if latency:
        server = f"; servers: {counted('generation_tokens_total') / whole:,.0f} tokens/s, {queue:.0%} of a request's "
        server += f"time in their queue, {counted('prefix_cache_hits_total') / max(asked, 1):.0%} of prompts cached, "
        server += f"{counted('num_preemptions_total'):.0f} preemptions"
    if wait > LIMIT:
        remedy = "raise inference.gpus" if queue > LIMIT else "raise orchestrator.max_concurrent or max_staleness"
    elif saved > LIMIT:
        remedy = "raise checkpoint.every"
    elif sync > LIMIT:
        remedy = "make steps longer (orchestrator.batch_size, trainer.updates_per_batch), or train adapters in 16 bits"
    else:
        remedy = "training is the limit: raise trainer.gpus or micro_batch_size, or do without gradient_checkpointing"
    shares = f"the trainer trained {train:.0%}, waited {wait:.0%} for rollouts, synced {sync:.0%} and saved {saved:.0%}"
    shares += f" of {whole:.0f} s"
    return f"time: {shares}{server}; {remedy}"


KL_WARNING = 0.05  # nats; on one set of weights the two engines agree far better, and a version or two adds little
WINDOW = 10  # steps that the other warnings look at, and after which they come again


def warnings(lines):
    """What the means of the last lines of metrics.jsonl say about how it goes, and which key to turn -> [text]."""

    def mean(key):
        values = [line[key] for line in lines if line.get(key) is not None]
        return sum(values) / len(values) if values else 0.0

    found, groups = [], sum(mean(f"group/{name}") for name in ("kept", "flat", "failed", "long", "empty"))
    if groups and mean("group/flat") > 0.8 * groups or mean("reward/std") < 1e-3:
        found.append(
            f"reward variance vanishes: {mean('group/flat'):.0f} of {groups:.0f} groups are flat, reward "
            f"{mean('reward/mean'):.3f} +- {mean('reward/std'):.3f}; harder rows where they are solved "
            "(orchestrator.buffer, retire_after), easier ones, a finer reward or demonstrations where they are not; "
            "larger groups, more temperature"
        )
    if (share := mean("rollout/truncated")) > 0.5:
        found.append(
            f"{share:.0%} of the rollouts are cut off: raise orchestrator.sampling.max_tokens or max_seq_len, reward "
            "brevity, or set orchestrator.mask_truncated_completions"
        )
    ages = sorted(int(key[13:]) for key in set().union(*lines) if key.startswith("policy/kl_age"))
    if len(ages) > 1:
        young, old = mean(f"policy/kl_age{ages[0]}"), mean(f"policy/kl_age{ages[-1]}")
        if old > max(3 * young, KL_WARNING / 5):
            found.append(
                f"KL(sampler || policy) grows with age: {young:.1e} nats at {ages[0]}, {old:.1e} at {ages[-1]} "
                "versions; lower orchestrator.max_staleness or trainer.learning_rate"
            )
    wait = mean("time/wait_batch_s") / max(mean("time/step_s"), 1e-9)
    if wait > 0.5:
        found.append(
            f"the trainer is starved: it waits {wait:.0%} of the time for rollouts; raise inference.gpus, "
            "orchestrator.max_concurrent or max_staleness, or oversampling_factor where groups are flat"
        )
    return found


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
    if metrics["time/sync_s"] is None:  # a replay leaves the sampler behind, and waits for nobody
        return
    if (kl := metrics.get("policy/kl_sampler") or 0) > KL_WARNING:
        own = metrics.get("policy/kl_age0")
        of = f"{own:.2f} on rollouts of the very same weights: the engines disagree" if own else "of stale rollouts"
        is_same = own and own > kl / 2
        remedy = "look at sync/dlogp_mean and trainer.dtype" if is_same else "lower max_staleness or the lr"
        print(f"warning: step {step + 1}: KL(sampler || policy) is {kl:.2f} nats, {of}; {remedy}", flush=True)
    if (step + 1) % WINDOW == 0:
        lines = [json.loads(line) for line in read_lines(run_dir / "metrics.jsonl")[-WINDOW:]]
        for text in warnings([line for line in lines if line["step"] > step - WINDOW]):
            print(f"warning: steps {step + 2 - WINDOW} to {step + 1}: {text}", flush=True)


def show_rollout(step, lines, cut=600):
    """One rollout of a batch on the console, another one each time, with the parts of its reward. What a model wrote
    must not steer a terminal: what is not printable is escaped."""
    scored = [line for line in lines if line["reward"] is not None]
    if not scored:
        return
    line = scored[step * 7919 % len(scored)]
    parts = ", ".join(f"{name} {value:.3g}" for name, value in line["metrics"].items())
    out = f"rollout of step {step + 1}: {line['env']}, row {line['example']}: reward {line['reward']:.3f} ({parts}), "
    turns = line["advantage"] if isinstance(line["advantage"], list) else [line["advantage"]]
    is_trained = None not in turns
    out += "advantage " + ", ".join(f"{a:+.3f}" for a in turns) if is_trained else f"not trained on: {line['dropped']}"
    for message in as_messages(line["prompt"]) + as_messages(line["completion"]):
        text, who = said(message), f"{message.get('role', 'text')}:"
        text = text if len(text) <= cut else f"{text[: cut // 2]} [...] {text[-cut // 2 :]}"
        for row in printable(text).split("\n"):
            out, who = out + f"\nrollout | {who:>10} {row}", ""
    print(out, flush=True)  # at once: other roles write to the console, too


def said(message):
    """Content and tool calls of a message as text, whatever they are."""
    text, calls = message.get("content") or "", message.get("tool_calls") or ()
    text = text if isinstance(text, str) else json.dumps(text, default=str)
    return text + "".join(f" -> {json.dumps(dict(call).get('function'), default=str)}" for call in calls)


def as_messages(text):
    """Messages as they are; texts of a base model as messages."""
    parts = text if isinstance(text, list) else [text]
    return [part if isinstance(part, dict) else {"role": "text", "content": str(part)} for part in parts]


def printable(text):
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
