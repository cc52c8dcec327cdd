"""Evaluations at some versions of the policy, if eval.every is above 0: lines of eval.jsonl and, with
eval.keep_rollouts, of eval_rollouts.jsonl as rollouts.jsonl has them. tools/evaluate.py has the same metrics."""

import asyncio
import functools
import itertools
import json
import time
import zlib
from collections import Counter

import numpy as np

from configs.runtime.directory import run_directory
from configs.runtime.role import DATA, require, say
from orchestrator import Group, append_rollouts, means, run_group, sample


async def evaluate(due, envs, client):
    """Evaluates the first eval.num_examples rows of each environment at version `due`.

    Batch `due` is not committed meanwhile, for at most eval.hold_s. If that is too short the weights change on the way,
    and version_last says so."""
    cfg = client.cfg
    path = run_directory(cfg) / "eval.jsonl"
    async with client.evaluating:  # after one that took longer than eval.every, at the version that is live then
        await client.until(due)
        for name, env in envs.items():
            version = client.version
            done = [line["step"] for line in map(json.loads, path.open()) if line["env"] == name]
            if due in done or version in done:
                continue
            began = time.time()
            groups = await roll_out(env, client)
            numbered = [Group(name, i, i, rollouts, "") for i, rollouts in enumerate(groups)]
            metrics = eval_metrics(groups) | {"seconds": time.time() - began}
            errors = [r.error for r in itertools.chain(*groups) if r.error]
            reason = errors[0] if errors else "the prompts are too long"
            require(metrics["n"], DATA, f"evaluation of {name} at version {version}, all is lost: {reason}")
            line = {"step": version, "due": due, "version_first": version, "version_last": client.version}
            line |= {"env": name} | metrics
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")
            if cfg.eval.keep_rollouts:
                append_rollouts(run_directory(cfg) / "eval_rollouts.jsonl", version, numbered)
            shown = [f"{key} {value:.4g}" for key, value in metrics.items() if key != "rows"]
            say(f"eval {version} | {name}: {' '.join(shown)}")


async def roll_out(env, client):
    """Returns the rollouts of each row."""
    cfg = client.cfg
    e = cfg.eval
    options = {"temperature": e.temperature, "max_tokens": e.max_tokens or cfg.sampling.max_tokens}
    running = asyncio.Semaphore(cfg.orchestrator.max_concurrent)
    groups = []
    for i, row in enumerate(env.eval_dataset[: e.num_examples or None]):
        ask = functools.partial(sample_with_seed, client, i, Counter(), options)
        groups.append(run_group(env, row, e.rollouts_per_example, ask, client.version, cfg, running))
    groups = await asyncio.gather(*groups)
    for r in itertools.chain(*groups):
        r.temperature = e.temperature
    return groups


async def sample_with_seed(client, row, asked, options, prompt, tools=None, user="", own=()):
    """Asks as sample() does, with a seed for each request: two runs with the same seed, or two versions of a run, draw
    the same random numbers for a row, so that less of their difference is chance. asked: the number of requests of each
    rollout so far. It is in the seed as well, or every turn of a conversation would draw the numbers of the first."""
    seed = zlib.crc32(f"{client.cfg.run.seed} {row} {user} {asked[user]}".encode())
    asked[user] += 1
    return await sample(client, row, prompt, tools, user, own, seed=seed, **options)


def eval_metrics(groups):
    """Metrics of one evaluation; groups: the rollouts of each row. A reward of 1 or more passes. rows: their mean
    rewards, or None if all are lost; tools/watch.py compares them with those at version 0."""
    rows = []
    for group in groups:
        row = {}
        rewards = [r.reward for r in group if r.reward is not None]
        if rewards:
            is_passed = np.greater(rewards, 1 - 1e-6)  # in floats 0.7 + 0.2 + 0.1 is below 1
            row = {"reward/mean": np.mean(rewards), "pass@1": is_passed.mean(), "pass@k": is_passed.max()}
        rows.append(row)
    rollouts = sum(groups, [])
    metrics = means(rows) | means([r.metrics for r in rollouts])
    metrics |= means([{"tokens": r.num_tokens, "truncated": r.truncated} for r in rollouts])
    # A policy that is lost on hard rows would seem better without them.
    metrics["reward/lost_as_0"] = np.mean([r.reward or 0.0 for r in rollouts])
    metrics |= {"n": sum(map(bool, rows)), "errors": sum(bool(r.error) for r in rollouts), "k": max(map(len, groups))}
    return metrics | {"rows": [row.get("reward/mean") for row in rows]}
