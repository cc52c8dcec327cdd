"""Evaluation: rows of the eval split at one version of the policy -> a line of eval.jsonl."""

import asyncio
import json
import time

from configs.lib.metrics import eval_metrics
from configs.lib.runtime import RunError


async def evaluate(run_group, env, client, run_dir, cfg):
    """The first eval.num_examples rows. run_group is orchestrator.run_group.

    The file eval_hold asks the trainer to wait with its next broadcast, at most eval.hold_s; if that was too short, the
    line's version_last tells. Adapters serve the first version to the end."""
    e, started, version = cfg.eval, time.time(), client.version
    sampling = {"temperature": e.temperature, "max_tokens": e.max_tokens or cfg.sampling.max_tokens, "version": version}
    hold = run_dir / "eval_hold"
    hold.write_text(str(started + e.hold_s))
    slots = asyncio.Semaphore(max(1, cfg.orchestrator.max_concurrent // e.rollouts_per_example))

    async def one(i, row):
        async with slots:
            return await run_group(env, row, client, e.rollouts_per_example, i, cfg, **sampling)

    rows = env.eval_dataset[: e.num_examples or None]
    groups = await asyncio.gather(*(one(i, row) for i, row in enumerate(rows)))
    hold.unlink()
    if not any(r.reward is not None for group in groups for r in group):
        raise RunError(4, f"evaluation at version {version}: every rollout failed, e.g. {groups[0][0].error}")
    line = {
        "step": version,
        "version_first": version,
        "version_last": version if cfg.sends_adapters else client.version,
    }
    line |= {"env": cfg.env.id} | eval_metrics(groups) | {"seconds": time.time() - started}
    with open(run_dir / "eval.jsonl", "a") as f:
        f.write(json.dumps(line) + "\n")
    shown = ", ".join(f"{k} {v:.3f}" for k, v in line.items() if type(v) is float)
    print(f"eval at version {version}: {shown}", flush=True)


async def evaluate_when_due(run_group, env, client, run_dir, cfg):
    """At version 0, every eval.every versions and at the last one; each once, also over restarts."""
    path = run_dir / "eval.jsonl"
    done = {json.loads(line)["step"] for line in path.read_text().splitlines()}
    while cfg.eval.every and cfg.run.max_steps not in done:
        version = client.version
        if version >= 0 and version not in done and (version % cfg.eval.every == 0 or version == cfg.run.max_steps):
            await evaluate(run_group, env, client, run_dir, cfg)
            done.add(version)
        await asyncio.sleep(0.02)
