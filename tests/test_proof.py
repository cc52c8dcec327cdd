"""What the README says that a run needs is enough: it trains in an empty directory. tools/ changes no run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, lines, write_run
from safetensors.torch import load_file

README = (ROOT / "README.md").read_text()
TASK = ["configs/reverse_text.toml", "configs/tasks/reverse_text.py", "configs/models/toy.py"]
TASK.append("configs/models/demonstrations.py")


def core():
    """Returns what README.md says that a run needs: the names of files and folders in the block of that section."""
    section = README.partition("## What a run needs")[2]
    names = section.split("```")[1].split()
    assert {"trainer.py", "orchestrator.py", "env.py", "launch.sh"} <= set(names)
    return names


def copy(names, to):
    for name in names:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to / name)


def run(place, *command, **variables):
    """Runs a command in a directory, with nothing of this one on Python's path."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | variables
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    done = subprocess.run(list(map(str, command)), cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.mark.real
def test_the_core_alone_trains(tmp_path):
    """Exactly the files that the README names, and a task. On the real vLLM, with what every recipe for a GPU has, LoRA
    by adapters in bf16: six steps on two ranks, with evaluation; then a replay."""
    copy(core() + TASK, tmp_path)
    with open(tmp_path / "configs" / "tasks" / "reverse_text.py", "a") as file:
        file.write("\n\nWARM_UP_STEPS = 10\n")  # the toy need not know much
    toml = "configs/reverse_text.toml"
    lora = ["trainer.dtype=bf16", "trainer.use_lora=true", "max_steps=6"]
    launch = ["bash", "launch.sh", toml, *lora, "trainer.gpus=2", "eval.every=3", "checkpoint.every=3"]
    launch += ["orchestrator.batch_size=16", "eval.num_examples=32"]

    run(tmp_path, *launch)
    first = tmp_path / "outputs" / "reverse_text"
    assert "disabling chunked prefill" in (first / "logs" / "inference.log").read_text()  # server.py
    metrics = lines(first / "metrics.jsonl")
    evals = lines(first / "eval.jsonl")
    assert [m["step"] for m in metrics] == list(range(6))
    assert max(m["sync/dlogp_mean"] for m in metrics) < 0.02
    assert [(e["step"], e["n"]) for e in evals] == [(0, 32), (3, 32), (6, 32)]
    assert (first / "done").read_text().strip() == "6"

    # On one rank, without a server, the run's batches lead to the same adapters.
    run(tmp_path, sys.executable, "trainer.py", toml, *lora, "--replay", first / "batches", OMP_NUM_THREADS="2")
    again = tmp_path / "outputs" / "reverse_text-replay-cispo"
    replayed = lines(again / "metrics.jsonl")
    assert [m["loss"] for m in replayed[:2]] == pytest.approx([m["loss"] for m in metrics[:2]], abs=2e-3)
    assert len(replayed) == 6
    learned = []
    for path in (first, again):
        adapters = load_file(path / "final" / "adapter_model.safetensors")
        parts = [adapters[name].flatten().float() for name in sorted(adapters) if "lora_B" in name]
        learned.append(torch.cat(parts))
    assert torch.cosine_similarity(*learned, 0) > 0.99


@pytest.mark.long
def test_tools_change_no_run(models, tmp_path):
    """The same run in a copy of the repository with and without tools/, with the fake server: the same batches."""
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    names = files.stdout.split() or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*.*")]
    logp = []
    for place in (tmp_path / "with", tmp_path / "without"):
        for name in names:
            if (ROOT / name).is_file() and not (place.name == "without" and name.startswith("tools/")):
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, place / name)
        toml = write_run(place, models["untied"], 2, '[env]\nid = "reverse_text"')
        server = f"{sys.executable} {place / 'tests' / 'fake_vllm.py'}"
        run(place, "bash", "launch.sh", toml, "orchestrator.max_staleness=0", "eval.every=1", SERVER=server)
        assert (place / "tools").exists() == (place.name == "with")
        files = sorted((place / "run" / "batches").glob("logp*"))
        logp.append([load_file(path)["logp"] for path in files] + [lines(place / "run" / "eval.jsonl")[-1]["rows"]])
    assert len(logp[0]) == 3
    assert all(a.equal(b) for a, b in zip(logp[0][:2], logp[1][:2], strict=True))
    assert logp[0][2] == logp[1][2]
