"""The whole algorithm on one page. Read it first, or begin an experiment or a notebook with it:

    python tools/loop.py config.toml [table.key=value ...]

It samples, scores, trains and syncs, one after the other, in one process, with the functions of the roles themselves.
So it computes the same as `bash launch.sh` with orchestrator.max_staleness = 0. It lacks what makes a run fast and
safe: sampling while it trains, several ranks, checkpoints, and a launcher that watches all processes. It starts the
servers that the configuration asks for, unless inference.urls names servers that are already running."""

import asyncio
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from env import load_environment
from rolemodel.by_hand import servers
from rolemodel.config import load_config, to_toml
from rolemodel.evaluation import is_due
from rolemodel.limits import Limits, Solved
from rolemodel.lookup import ROOT, check_names, find_function
from rolemodel.role import ConfigError, run_main, say
from rolemodel.run_directory import next_batch, run_directory, write_config


async def train(cfg, run_dir: Path):
    import orchestrator  # after load_config: these are the copies that the configuration names, if it names any
    import trainer
    from rolemodel.checkpoints import log_step, write_final  # with torch, which reads the variables that servers() sets

    # The task, the policy, and a server that has the policy's weights.
    (task,) = cfg.env
    env = load_environment(task.id, task.args)
    make_order = find_function(cfg.orchestrator.order, {"": orchestrator.Order})
    order = make_order(task.name, env.dataset, cfg, {}, **cfg.orchestrator.order_args)
    advantage = find_function(cfg.orchestrator.advantage, orchestrator.ADVANTAGES)
    trainer.start_distributed(cfg)
    policy = trainer.build_policy(cfg)
    optimizer = trainer.make_optimizer(policy, cfg.trainer)
    client = orchestrator.Client(cfg)
    sender = trainer.WeightSender(cfg, run_dir, policy.device)
    trainer.sync_weights(sender, policy, 0, cfg)
    size = cfg.orchestrator.rollouts_per_example
    num_groups = cfg.orchestrator.batch_size // size
    limits = Limits(cfg.orchestrator.max_error_share, num_groups)

    async def sample_groups(step: int, slot: int) -> list[list]:
        """Samples groups, each from one example, until one has differing rewards; the ones before it are dropped."""
        groups = []
        while not groups or groups[-1][0].dropped:
            example = order.pick(step, slot, len(groups))
            group = [orchestrator.Rollout(task.name, example, slot, len(groups), member) for member in range(size)]
            await orchestrator.run_group(client, env, env.dataset[example], group, step, {})  # samples and scores them
            orchestrator.add_advantages(group, advantage)  # by default: reward - mean of the group
            limits.see(task.name, group)  # raises if no group will ever have a gradient
            groups.append(group)
        return groups

    try:
        for step in range(cfg.run.max_steps + 1):
            began = time.perf_counter()
            await client.until(step)  # the servers have version `step` of the policy
            if is_due(step, cfg):
                await orchestrator.evaluate(step, {task.name: env}, client)
            if step == cfg.run.max_steps:
                break
            # Sample a batch of groups, with rewards and advantages.
            slots = range(step * num_groups, (step + 1) * num_groups)
            groups = sum(await asyncio.gather(*(sample_groups(step, slot) for slot in slots)), [])
            memory = {task.name: order.memory}
            orchestrator.commit_batch(step, groups, order.commit(step, groups), memory, run_dir, cfg)
            # Train on it: loss, gradient, AdamW.
            batch = trainer.load_batch(run_dir / "batches" / f"step_{step:06d}.safetensors")
            metrics, table = trainer.train_step(policy, optimizer, batch, step, cfg)
            # Give the servers the new weights.
            metrics = batch.info["metrics"] | metrics | trainer.sync_weights(sender, policy, step + 1, cfg)
            log_step(run_dir, step, metrics | {"time/step_s": time.perf_counter() - began}, table["policy/logp"])
    except Solved as solved:
        say(str(solved))
    blocks = trainer.stream_weights(policy.model, trainer.PRECISIONS[cfg.trainer.dtype], cfg.trainer.use_lora)
    write_final(run_dir / "final", policy.model, blocks, cfg)
    await client.http.close()


def main(argv: list[str]):
    path, *overrides = [os.path.abspath(argv[0]), *argv[1:], "orchestrator.max_staleness=0", "trainer.gpus=1"]
    os.chdir(ROOT)  # where relative paths start
    cfg = load_config(path, overrides)
    check_names(cfg)
    run_dir = run_directory(cfg)
    if len(cfg.env) > 1 or next_batch(run_dir):
        raise ConfigError(f"loop.py takes one environment and cannot resume: {run_dir} must have no batches")
    write_config(run_dir, to_toml(cfg))
    os.environ.setdefault("ROLEMODEL_RUN_ID", f"{run_dir.name}-{os.getpid()}")
    with servers(cfg, [path, *overrides], run_dir):
        asyncio.run(train(load_config(path, overrides), run_dir))


if __name__ == "__main__":
    run_main("loop", main)
