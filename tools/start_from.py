"""Begins a run from a state of another one:

    bash launch.sh config.toml --from outputs/run@73 run_name=other [table.key=value ...]

The new run has what the other one had after step 73, and goes on from there with config.toml and the overrides, for
example with another loss, advantage, learning rate or order. If there is no checkpoint of that step, the batches since
the checkpoint before it are trained on again, with the other run's own configuration and without a server. parent.json
says where the run came from. The same command resumes it."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rolemodel import checkpoints
from rolemodel.config import load_config
from rolemodel.launch import COMMON
from rolemodel.role import ConfigError, RunError, run_main, say
from rolemodel.run_directory import by_step, cut_lines, lock
from tools.show import Lines

# Keys that must be the same in both runs. Weights only fit their own model, batches and orders only know examples by
# their numbers, and batch n begins with slot n times a batch's groups. Gains are over the parent's evaluations as well.
SHARED = "model env trainer.use_lora trainer.lora_rank trainer.lora_alpha trainer.lora_target_modules".split()
SHARED += ["orchestrator.batch_size", "orchestrator.rollouts_per_example", "eval.temperature", "eval.max_tokens"]


def reachable(run: Path) -> dict[int, int]:
    """{version: the newest checkpoint before it from which steps that can be repeated lead to it}; 0 is the model
    itself. If the run began from another one, its first batches do not count, since the other run's configuration
    trained on them. A checkpoint needs the batch before it, which has what the orders remember."""

    def has(part, step):
        return (run / "batches" / f"{part}_{step:06d}.safetensors").exists()

    mark = run / "parent.json"
    first = json.loads(mark.read_text())["step"] + 1 if mark.exists() else 0
    starts = {0, *by_step(run / "checkpoints")}
    found = {}
    for version in sorted(start for start in starts if start >= first and (not start or has("step", start - 1))):
        start = found[version] = version
        while has("step", version) and has("logp", version):
            version += 1
            found[version] = start
    return found


def copy(parent: Path, start: int, version: int, run_dir: Path):
    """Copies the parent's batches before a version, and its checkpoint of `start`, into a directory that does not exist
    yet."""
    for part in ("batches", "checkpoints", "logs"):
        (run_dir / part).mkdir(parents=True)
    for kind in ("step", "logp"):
        for number, path in by_step(parent / "batches", kind).items():
            if number < version:
                shutil.copy(path, run_dir / "batches")
    for name in ("rows.json", "model.json"):
        shutil.copy(parent / name, run_dir)
    if start:
        name = f"checkpoints/step_{start:06d}"
        shutil.copytree(parent / name, run_dir / name)


def repeat_step(policy, optimizer, run: Path, step: int, cfg):
    """Repeats a step of a run. Raises ConfigError if it comes out differently now."""
    import trainer

    batch = trainer.load_batch(run / "batches" / f"step_{step:06d}.safetensors")
    metrics, _ = trainer.train_step(policy, optimizer, batch, step, cfg)
    tolerance = 0.01 if cfg.trainer.dtype == "fp32" else 0.1
    for line in Lines(run / "metrics.jsonl").new():
        for key in {"optim/lr", "optim/grad_norm"} & line.keys():
            if line["step"] == step and not math.isclose(metrics[key], line[key], rel_tol=tolerance):
                text = f"step {step} of {run} had {key} = {line[key]:.4g}, and has {metrics[key]:.4g} now"
                raise ConfigError(f"{text}: did its configuration change on the way, or its code since?")


def train(parent: Path, parents, version: int, run_dir: Path, cfg):
    """Repeats the parent's steps, from the newest checkpoint on. Runs under torchrun."""
    import trainer

    trainer.start_distributed(cfg)
    policy = trainer.build_policy(parents)
    optimizer = trainer.make_optimizer(policy, parents.trainer)
    for step in range(checkpoints.resume(run_dir, policy, optimizer), version):
        repeat_step(policy, optimizer, parent, step, parents)
        say(f"step {step} again")
    checkpoints.save_checkpoint(run_dir, version, policy, optimizer, cfg)
    trainer.dist.destroy_process_group()


def main(argv: list[str]):
    at = argv.index("--from")
    place, _, step = argv[at + 1].rpartition("@")
    parent = Path(place).resolve()
    rest = argv[:at] + argv[at + 2 :]
    cfg = load_config(rest[0], rest[1:])
    parents = load_config(parent / "config.toml")  # last, so that its modules and scripts count: its steps are repeated
    run_dir = Path(cfg.run.output_dir, cfg.run.run_name)
    making = run_dir.with_name(f".{run_dir.name}.fork")  # becomes run_dir when it is complete
    version = int(step) + 1
    if dist.is_torchelastic_launched():
        return train(parent, parents, version, making, cfg)
    about = {"run": str(parent), "step": int(step)}
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    message = f"{run_dir} is being made by another --from: choose another run_name"
    _held = lock(run_dir.with_name(f".{run_dir.name}.lock"), message)  # until rolemodel/launch.py takes its own lock
    if not run_dir.exists():
        found = reachable(parent)
        if version not in found:
            known = ", ".join(str(version - 1) for version in found if version)
            raise ConfigError(f"{parent}: its files lead to no state after step {step}, only after: {known}")
        for key in SHARED:
            if cfg.flat[key] != parents.flat[key]:
                raise ConfigError(f"{parent} has {key} = {parents.flat[key]!r}, not {cfg.flat[key]!r}")
        shutil.rmtree(making, ignore_errors=True)  # left by a start that was killed
        copy(parent, found[version], version, making)
        if found[version] < version:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1"]
            command += ["--nproc-per-node", str(cfg.trainer.gpus), __file__, *argv]
            threads = str(max(1, len(os.sched_getaffinity(0)) // cfg.trainer.gpus))  # as in rolemodel/launch.py
            if subprocess.run(command, env=COMMON | {"OMP_NUM_THREADS": threads} | os.environ).returncode:
                raise RunError("the other run's steps could not be repeated, see above")
        for path in parent.glob("*.jsonl"):
            shutil.copy(path, making)
            cut_lines(making / path.name, version)
        (making / "parent.json").write_text(json.dumps(about))
        making.rename(run_dir)
    mark = run_dir / "parent.json"
    if not mark.exists() or json.loads(mark.read_text()) != about:
        raise ConfigError(f"{run_dir} is a different run: choose another run_name")
    os.execv(sys.executable, [sys.executable, "-m", "rolemodel.launch", *rest])


if __name__ == "__main__":
    run_main("start_from", main)
