"""Writes the model that a run had after some step, in the form of its final/:

    python tools/export.py outputs/run@40 DIR        # from checkpoints/step_000040
    python tools/export.py outputs/run@best DIR      # from the checkpoint that was evaluated best, of those still there
    python tools/export.py outputs/run DIR --merge   # from the newest; with LoRA, the merged model, not the adapter

It only reads the run, which may still be going on. CUDA_VISIBLE_DEVICES= keeps it off the run's GPUs. A merged model
has trainer.dtype, as the base model had in training. In 16 bits, rounding hides the smallest updates."""

import argparse
import math
import os
import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rolemodel import checkpoints
from rolemodel.config import load_config
from rolemodel.lookup import ROOT
from rolemodel.role import ConfigError, run_main, say
from rolemodel.run_directory import by_step
from tools.show import Lines, restrict, whole_rounds


def find_checkpoint(run: Path, which: str | None) -> Path:
    """The checkpoint after `which` steps. "best": the one with the highest mean reward over all environments, on the
    examples that all evaluations have scored; the earliest if several are equal. None: the newest. Raises ConfigError
    if there is no such checkpoint."""
    found = by_step(run / "checkpoints")
    num_envs = len(tomllib.loads((run / "config.toml").read_text("utf-8"))["env"])
    rounds = whole_rounds(list(Lines(run / "eval.jsonl").new()), num_envs)
    restrict(list(chain(*rounds.values())))
    rewards = {step: np.mean([line["reward/mean"] for line in lines]) for step, lines in rounds.items()}
    steps = [step for step in found if which in (None, "best") or int(which) == step]
    if which == "best":  # a mean is nan if no example of an environment was scored by all
        steps = sorted((s for s in steps if rewards.get(s, math.nan) > -math.inf), key=lambda s: -rewards[s])[:1]
    if not steps:
        raise ConfigError(f"{run}@{which or ''}: there are checkpoints of {[*found]}, and evaluations of {[*rewards]}")
    return found[steps[-1]]


def main(argv: list[str]):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", metavar="RUN[@STEP]")
    parser.add_argument("out", type=Path, metavar="DIR")
    parser.add_argument("--merge", action="store_true")
    args = parser.parse_args(argv)
    place, which = re.fullmatch(r"(.+?)(?:@(\d+|best))?", args.run).groups()
    run, out = Path(place).resolve(), args.out.resolve()
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} has files: choose another directory")
    cfg = load_config(run / "config.toml")
    path = find_checkpoint(run, which)
    os.chdir(ROOT)  # as in launch.sh: relative paths to models start there
    checkpoints.keep_model(run, cfg.run.model)  # raises if the base has changed since
    import trainer  # the copy that the run was trained with

    trainer.start_distributed(cfg)
    policy = trainer.build_policy(cfg)
    step = checkpoints.load_checkpoint(path, policy)
    cfg.trainer = cfg.trainer._replace(use_lora=cfg.trainer.use_lora and not args.merge)  # what write_final writes
    blocks = trainer.stream_weights(policy.model, trainer.PRECISIONS[cfg.trainer.dtype], cfg.trainer.use_lora)
    checkpoints.write_final(out, policy.model, blocks, cfg)
    say(f"{out}: {'an adapter' if cfg.trainer.use_lora else 'a model'} after {step} steps of {run}")
    trainer.dist.destroy_process_group()


if __name__ == "__main__":
    run_main("export", main)
