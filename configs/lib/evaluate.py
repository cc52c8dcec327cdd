"""Evaluation: rows of the eval splits at one version of the policy -> a line of eval.jsonl per environment."""

import asyncio
import functools
import json
import math
import time

import numpy as np

from configs.lib.metrics import eval_metrics
from configs.lib.runtime import RunError, read_lines


def check_environments(envs, cfg):
    """What an environment needs of the configuration."""
    known = {str(row.get("difficulty")) for env in envs.values() for row in env.dataset}
    if unknown := set(cfg.orchestrator.curriculum) - known:
        raise RunError(
            2, f"orchestrator.curriculum names {sorted(unknown)}; the rows' difficulties are {sorted(known)}"
        )
    for name, env in envs.items():
        if cfg.eval.every and not env.eval_dataset:
            raise RunError(2, f"eval.every = {cfg.eval.every}, but the environment {name!r} has no eval_dataset")
        if env.tools and not cfg.inference.args.get("enable_auto_tool_choice"):
            wanted = 'enable_auto_tool_choice = true and tool_call_parser, e.g. "hermes" for Qwen'
            raise RunError(2, f"the environment {name!r} has tools: inference.args needs {wanted}")


async def evaluate(run_group, sample, envs, client, run_dir, cfg):
    """The first eval.num_examples rows of each environment. run_group and sample are orchestrator.py's.

    The file eval_hold asks the trainer to wait with its next broadcast, at most eval.hold_s; if that was too short, the
    line's version_last tells. Adapters serve the first version to the end."""
    e, started, version = cfg.eval, time.time(), client.version
    sampling = {"temperature": e.temperature, "max_tokens": e.max_tokens or cfg.sampling.max_tokens, "version": version}
    hold = run_dir / "eval_hold"
    hold.write_text(str(started + e.hold_s))
    slots = asyncio.Semaphore(max(1, cfg.orchestrator.max_concurrent // e.rollouts_per_example))

    async def one(env, i, row):
        async with slots:
            ask = functools.partial(sample, client, i, **sampling)
            return await run_group(env, row, e.rollouts_per_example, ask, version, cfg)

    async def whole(env):
        rows = env.eval_dataset[: e.num_examples or None]
        groups = await asyncio.gather(*(one(env, i, row) for i, row in enumerate(rows)))
        return groups, time.time() - started

    results = await asyncio.gather(*(whole(env) for env in envs.values()))
    hold.write_text("0")
    before = [json.loads(line) for line in read_lines(run_dir / "eval.jsonl")]
    last = version if cfg.sends_adapters else client.version
    written = ""
    for name, (groups, seconds) in zip(envs, results):
        if not any(r.reward is not None for group in groups for r in group):
            raise RunError(4, f"evaluation of {name} at version {version}: every rollout failed: {groups[0][0].error}")
        line = {"step": version, "version_first": version, "version_last": last, "env": name}
        line |= eval_metrics(groups) | {"seconds": seconds}
        scored = [[r.reward for r in group if r.reward is not None] for group in groups]
        line["rows"] = [sum(rewards) / len(rewards) if rewards else None for rewards in scored]
        start = line if version == 0 else next((e for e in before if e["step"] == 0 and e["env"] == name), {})
        line |= paired(start.get("rows", ()), line["rows"])
        written += json.dumps(line) + "\n"
        shown = ", ".join(f"{k} {v:.3f}" for k, v in line.items() if type(v) is float)
        print(f"eval at version {version}: {f'{name}: ' if len(envs) > 1 else ''}{shown}", flush=True)
    with open(run_dir / "eval.jsonl", "a") as f:  # at once: a version's lines are there, or none
        f.write(written)


def paired(first, now):
    """Mean rewards of the same rows at version 0 and now -> their mean difference and its 95 % half width. Paired: rows
    differ from each other far more than versions do."""
    diffs = np.array([b - a for a, b in zip(first, now) if None not in (a, b)])
    if len(diffs) < 2:
        return {"gain": None, "gain_ci95": None}
    return {"gain": float(diffs.mean()), "gain_ci95": float(1.96 * diffs.std(ddof=1) / math.sqrt(len(diffs)))}


async def evaluate_when_due(run_group, sample, envs, client, run_dir, cfg):
    """At version 0, every eval.every versions and at the last one; each once, also over restarts. Where one took until
    after the next was due, that is made up for at the version then live."""
    every, last = cfg.eval.every, -1
    for line in read_lines(run_dir / "eval.jsonl"):
        last = max(last, json.loads(line)["step"])
    while every and last < cfg.run.max_steps:
        version = client.version
        if version // every > last // every or version == cfg.run.max_steps:
            await evaluate(run_group, sample, envs, client, run_dir, cfg)
            last = version
        await asyncio.sleep(0.02)
