"""Begins a run where another one was:

    bash launch.sh config.toml --from outputs/run@73 run_name=other [table.key=value ...]

The new run has what the other one had after step 73, and goes on from there with config.toml and the overrides: another
loss, advantage, rate or order. Where there is no checkpoint of that step, the batches since the one before are trained
again, by the other run's own configuration and without a server. parent.json says where the run came from. The same
command resumes it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from configs import load_config
from configs.runtime.directory import cut_lines, identity, refuse_other
from configs.runtime.role import ConfigError, run_role, say


def reachable(run: Path) -> dict[int, int]:
    """{version: the newest checkpoint before it from which batches lead to it}; 0 is the model itself. A run that began
    in another one has batches which that one's configuration trained on."""
    mark = run / "parent.json"
    first = json.loads(mark.read_text())["step"] + 1 if mark.exists() else 0
    starts = {0, *(int(path.name[5:]) for path in run.glob("checkpoints/step_??????"))}
    found = {}
    for version in sorted(start for start in starts if start >= first):
        start = found[version] = version
        while (run / "batches" / f"step_{version:06d}.safetensors").exists():
            version += 1
            found[version] = start
    return found


def copy(parent: Path, version: int, run_dir: Path, cfg):
    """Copies what the parent had at a version, into a directory that is not there yet."""
    start = reachable(parent)[version]
    for part in ("batches", "checkpoints", "logs"):
        (run_dir / part).mkdir(parents=True)
    for path in parent.glob("batches/*.safetensors"):
        if int(path.stem[-6:]) < version:
            shutil.copy(path, run_dir / "batches")
    for path in parent.glob("*.jsonl"):
        shutil.copy(path, run_dir)
        cut_lines(run_dir / path.name, version)
    shutil.copy(parent / "rows.json", run_dir)
    if start:
        name = f"checkpoints/step_{start:06d}"
        shutil.copytree(parent / name, run_dir / name)
        (run_dir / name / "state.json").write_text(json.dumps(identity(cfg)))


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
    parent = Path(place).resolve()
    if not (step.isdigit() and (parent / "config.toml").exists()):
        raise ConfigError(f"--from {argv[at + 1]}: must be the directory of a run, @ and a step")
    rest = argv[:at] + argv[at + 2 :]
    cfg = load_config(rest[0], rest[1:])
    run_dir = Path(cfg.run.output_dir, cfg.run.run_name)
    making = run_dir.with_name(f".{run_dir.name}.fork")  # becomes run_dir when all is there
    version = int(step) + 1
    if "RANK" in os.environ:
        return train(parent, version, making, cfg)
    about = {"run": str(parent), "step": int(step)}
    if not run_dir.exists():
        found = reachable(parent)
        if version not in found:
            known = ", ".join(str(version - 1) for version in found if version)
            raise ConfigError(f"{parent}: what is there leads to no state after step {step}, only after: {known}")
        own = identity(cfg)
        parents = identity(load_config(parent / "config.toml"))
        refuse_other(parents | {key: own[key] for key in ("run_name", "seed")}, cfg, parent)
        shutil.rmtree(making, ignore_errors=True)  # of a start that was killed
        copy(parent, version, making, cfg)
        if found[version] < version:
            from launch import COMMON

            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nnodes", "1"]
            command += ["--nproc-per-node", str(cfg.trainer.gpus), __file__, *argv]
            threads = str(max(1, len(os.sched_getaffinity(0)) // cfg.trainer.gpus))  # as launch.py has it
            metrics = (making / "metrics.jsonl").rename(making / "metrics")  # trainer.resume would cut it
            subprocess.run(command, env=COMMON | {"OMP_NUM_THREADS": threads} | os.environ, check=True)
            metrics.rename(making / "metrics.jsonl")
        (making / "parent.json").write_text(json.dumps(about))
        making.rename(run_dir)
    mark = run_dir / "parent.json"
    if not mark.exists() or json.loads(mark.read_text()) != about:
        raise ConfigError(f"{run_dir} is another run: choose another run_name")
    os.execv(sys.executable, [sys.executable, "launch.py", *rest])


if __name__ == "__main__":
    run_role("fork", "tools.fork")
