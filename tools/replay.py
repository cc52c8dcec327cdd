"""Trains on saved batches, without a server: for example, with another loss, learning rate or number of epochs on the
rollouts of a run.

    python tools/replay.py config.toml outputs/run/batches trainer.loss=grpo run_name=other

It ends after the last batch or at max_steps, and leaves <run_name>-replay-<loss>, the directory of a run without
rollouts. The same command resumes it. With torchrun, it has several ranks."""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rolemodel import checkpoints, speed
from rolemodel.config import load_config, to_toml
from rolemodel.lookup import check_function
from rolemodel.role import ConfigError, run_main, say
from rolemodel.run_directory import by_step, is_saved, lock, run_directory, write_config


def main(argv: list[str]):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", metavar="config.toml")
    parser.add_argument("batches", type=Path, metavar="DIR")
    parser.add_argument("overrides", nargs="*", metavar="table.key=value")
    args = parser.parse_args(argv)
    cfg = load_config(args.config, args.overrides)
    check_function("trainer.loss", cfg.trainer.loss, cfg.trainer.script, "LOSSES", cfg.trainer.loss_args, 3)
    paths = [*by_step(args.batches).values()][: cfg.run.max_steps]
    if not paths:
        raise ConfigError(f"{args.batches}: there is no batch of a step below max_steps")
    cfg.flat["max_steps"] = len(paths)  # where the learning rate's schedule ends
    cfg.run = cfg.run._replace(max_steps=len(paths))
    run_dir = run_directory(cfg, f"-replay-{cfg.trainer.loss}")
    if paths[0].stem != "step_000000":
        say(f"replay: begins with {paths[0]}, since earlier batches are gone (checkpoint.keep_batches)")
    text = f"{to_toml(cfg)}# batches = {paths[0].resolve()}\n"
    write_config(run_dir, text)
    import trainer  # the copy that trainer.script names

    trainer.start_distributed(cfg)
    message = f"{run_dir} belongs to another replay: choose another run_name"
    _held = trainer.dist.get_rank() or lock(run_dir / ".lock", message)  # until the end
    policy = trainer.build_policy(cfg)
    optimizer = trainer.make_optimizer(policy, cfg.trainer)
    for step in range(checkpoints.resume(run_dir, policy, optimizer), len(paths)):
        began = time.perf_counter()
        batch = trainer.load_batch(paths[step])
        with speed.profiled(run_dir, step, cfg.trainer):
            numbers, table = trainer.train_step(policy, optimizer, batch, step, cfg)
        metrics = batch.info["metrics"] | numbers | {"time/step_s": time.perf_counter() - began}
        if trainer.dist.get_rank() == 0:
            checkpoints.log_step(run_dir, step, metrics, table["policy/logp"])
        if is_saved(step + 1, cfg) or step + 1 == len(paths):
            checkpoints.save_checkpoint(run_dir, step + 1, policy, optimizer, cfg)
    blocks = trainer.stream_weights(policy.model, trainer.PRECISIONS[cfg.trainer.dtype], cfg.trainer.use_lora)
    checkpoints.write_final(run_dir / "final", policy.model, blocks, cfg)
    trainer.dist.destroy_process_group()


if __name__ == "__main__":
    run_main("replay", main)
