"""Begins a run where another one was:

    bash launch.sh config.toml --from outputs/run@73 run_name=other [table.key=value ...]

The new run has what the other one had after step 73, and goes on from there with config.toml and the overrides: another
loss, advantage, rate, order, reward. Where there is no checkpoint of that step, the batches since the one before are
trained again, by the other run's own configuration and without a server. parent.json says where it came from. The same
command resumes it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from configs import load_config
from configs.runtime.directory import cut_lines, identity, refuse_other, run_directory
from configs.runtime.role import ConfigError, run_role, say


def reachable(run: Path) -> dict[int, int]:
    """{version: the newest checkpoint before it from which batches lead to it}; 0 is the model itself."""
    batches = {int(path.stem[5:]) for path in run.glob("batches/step_*.safetensors")}
    found = {}
    for start in sorted({0, *(int(path.name[5:]) for path in run.glob("checkpoints/step_??????"))}):
        version = found[start] = start
        while version in batches:
            version += 1
            found[version] = start
    return found


def begin(parent: Path, step: int, run_dir: Path, cfg):
    """Copies what the parent had after a step, but for the lines of its JSON files."""
    found = reachable(parent)
    if step + 1 not in found:
        known = ", ".join(str(version - 1) for version in found if version)
        raise ConfigError(f"{parent}: batches and checkpoints lead to no state after step {step}, only after: {known}")
    own = identity(cfg)
    of_parent = identity(load_config(parent / "config.toml"))
    refuse_other(of_parent | {key: own[key] for key in ("run_name", "seed")}, cfg, parent)
    if any(run_dir.glob("batches/*")):
        raise ConfigError(f"{run_dir} has begun without --from: choose another run_name")
    start = found[step + 1]
    if start:
        path = run_dir / "checkpoints" / f"step_{start:06d}"
        shutil.copytree(parent / "checkpoints" / path.name, path.with_suffix(".tmp"))
        (path.with_suffix(".tmp") / "state.json").write_text(json.dumps(own))
        os.rename(path.with_suffix(".tmp"), path)
    for path in parent.glob("batches/*.safetensors"):
        if int(path.stem[-6:]) <= step:
            shutil.copy(path, run_dir / "batches")
    shutil.copy(parent / "rows.json", run_dir)


def train(parent: Path, version: int, run_dir: Path, cfg):
    """Takes the parent's steps again, from the newest checkpoint. Runs under torchrun."""
    import trainer

    parents = load_config(parent / "config.toml")
    trainer.start_distributed(cfg)
    policy = trainer.build_policy(parents)
    optimizer = trainer.make_optimizer(policy, parents.trainer)
    for step in range(trainer.resume(run_dir, policy, optimizer, cfg), version):
        batch = trainer.load_batch(run_dir / "batches" / f"step_{step:06d}.safetensors")
        trainer.train_step(policy, optimizer, batch, step, parents)
        say(f"fork: step {step} again")
    trainer.save_checkpoint(run_dir, version, policy, optimizer, cfg)
    trainer.dist.destroy_process_group()


def main(argv: list[str]):
    at = argv.index("--from")
    place, _, step = argv[at + 1].rpartition("@")
    rest = argv[:at] + argv[at + 2 :]
    parent = Path(place).resolve()
    if not (step.isdigit() and (parent / "config.toml").exists()):
        raise ConfigError(f"--from {argv[at + 1]}: must be the directory of a run, @ and a step")
    cfg = load_config(rest[0], rest[1:])
    run_dir = run_directory(cfg)
    version = int(step) + 1
    if "RANK" in os.environ:
        return train(parent, version, run_dir, cfg)
    about = {"run": str(parent), "step": int(step)}
    mark = run_dir / "parent.json"  # written last
    if not mark.exists():
        begin(parent, int(step), run_dir, cfg)
        if not (run_dir / "checkpoints" / f"step_{version:06d}").exists():
            from launch import COMMON

            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1"]
            command += ["--nproc-per-node", str(cfg.trainer.gpus), __file__, *argv]
            threads = str(max(1, len(os.sched_getaffinity(0)) // cfg.trainer.gpus))  # as launch.py has it
            subprocess.run(command, env=COMMON | {"OMP_NUM_THREADS": threads} | os.environ, check=True)
        for path in parent.glob("*.jsonl"):
            shutil.copy(path, run_dir)
            cut_lines(run_dir / path.name, version)
        mark.write_text(json.dumps(about))
    elif json.loads(mark.read_text()) != about:
        raise ConfigError(f"{run_dir} began at {mark.read_text()}: choose another run_name")
    os.execv(sys.executable, [sys.executable, "launch.py", *rest])


if __name__ == "__main__":
    run_role("fork", "tools.fork")
