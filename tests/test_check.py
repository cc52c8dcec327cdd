"""tools/check.py, which `bash launch.sh config.toml --check` runs."""

import asyncio
import json
import re
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
import transformers
from conftest import BASE, ROOT, launch, write_run
from think_env import DROPS, Turns, letters

import trainer
from env import Rubric, SingleTurnEnv
from rolemodel.role import RunError
from rolemodel.run_directory import run_directory
from tools import check

ROWS = [{"question": "a"}] * 3


def reports(capfd, start="check: "):
    return [row for row in capfd.readouterr().out.splitlines() if row.startswith(start)]


@pytest.mark.long
def test_check_passes_on_two_ranks_and_leaves_the_run_untouched(models, tmp_path):
    toml = write_run(tmp_path, models["untied"], 5, '{ kind = "turns", num_turns = 2 }')
    done = launch(toml, "--check", "trainer.gpus=2", "eval.every=1", FAKE='{"stop": true}')
    rows = [row for row in done.stdout.splitlines() if row.startswith("check: ")]
    assert rows[0].startswith("check: estimate for GPUs of 16 GiB: the trainer needs 0.")
    assert len(rows) == 7 and all(row.startswith("check: PASS") for row in rows[1:]), rows
    assert not (tmp_path / "run").exists() and not list((tmp_path / "run-check" / "batches").iterdir())


# --- with a server ----------------------------------------------------------------------------------------------------


@pytest.fixture
def beside_a_server(make_cfg, fake_servers, monkeypatch):
    def make(*overrides, **fake):
        monkeypatch.setenv("ROLEMODEL_RUN_ID", "run")
        return make_cfg(f'inference.urls=["{fake_servers(**fake)}"]', *overrides)

    return make


@pytest.mark.parametrize("dtype, discard", [("fp32", False), ("fp32", True), ("bf16", True)])
def test_a_server_that_does_not_follow_a_sync_is_noticed(dtype, discard, beside_a_server, capfd):
    """One that throws weights away would pass at version 0, whose files it has loaded itself."""
    cfg = beside_a_server(f"trainer.dtype={dtype}", discard=discard)
    policy = trainer.build_policy(cfg)
    before = {name: trainer.full(x).clone() for name, x in policy.state_dict().items()}
    sender = trainer.WeightSender(cfg, run_directory(cfg), policy.device)
    with pytest.raises(RunError, match="canary of version 1") if discard else nullcontext():
        check.check_sync(policy, sender, cfg)
    assert reports(capfd)[0].startswith(f"check: {'FAIL' if discard else 'PASS'} the servers follow a sync")
    assert (run_directory(cfg) / "version").read_text() == ("0" if discard else "2")
    assert discard or all(torch.equal(x, before[name]) for name, x in policy.state_dict().items())


@pytest.mark.parametrize("env, problem", [
    (SingleTurnEnv(ROWS, rubric=Rubric([letters])), ""),
    (Turns(ROWS, max_turns=2, rubric=Rubric([letters])), "of 12 rollouts of several turns fork"),  # which ones: chance
    (SingleTurnEnv(ROWS, rubric=Rubric()), "3 groups, 3 flat; mean reward 0.000 (0 to 0): take easier examples"),
    (SingleTurnEnv(ROWS, rubric=Rubric([len])), "12 of 12 rollouts were lost, mostly: TypeError: len() takes"),
])  # fmt: skip
def test_a_task_from_which_nothing_can_be_learned_is_named(env, problem, beside_a_server, capfd, monkeypatch, tmp_path):
    monkeypatch.setattr(check, "load_environment", lambda id, args: env)
    (tmp_path / "drops.jinja").write_text(DROPS)
    cfg = beside_a_server(uniform=True, stop=True, template=str(tmp_path / "drops.jinja"))
    assert asyncio.run(check.check_tasks(cfg)) == (not problem)
    failed = reports(capfd, "check: FAIL reverse_text: ")
    assert len(failed) == bool(problem) and all(problem in row for row in failed)


# --- memory -----------------------------------------------------------------------------------------------------------


# One process for all: afterwards torch cannot compute.
ESTIMATES = """
import json, sys
from rolemodel.config import load_config
from tools import check
cfgs = [load_config(sys.argv[1], overrides) for overrides in json.loads(sys.argv[2])]
servers = [check.server_need(cfgs[0], gib << 30, False) for gib in (8, 16)]
check.without_content()
print(json.dumps([servers, [check.trainer_need(cfg) for cfg in cfgs]]))
"""


def test_the_estimate_of_memory_by_hand(models, tmp_path):
    """Weights, gradients and AdamW's moments in fp32 are 16 bytes for each parameter, of which a rank of two has half.
    Each of two layers keeps 32 keys and 32 values of a token in bf16."""
    (tmp_path / "a.toml").write_text(BASE.format(model=models["untied"]))
    base = ["trainer.dtype=bf16", "trainer.gradient_checkpointing=true"]
    offload = ["trainer.offload_optimizer=false", "trainer.offload_optimizer=true"]
    cases = [[*base, f"trainer.gpus={num}", x] for num in (1, 2) for x in offload]
    command = [sys.executable, "-c", ESTIMATES, str(tmp_path / "a.toml"), json.dumps(cases)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    ((small, fewer), (large, more)), needs = json.loads(re.search(r"^\[\[.*", done.stdout, re.MULTILINE)[0])
    need, offloaded, half, half_offloaded = needs
    model = transformers.AutoModelForCausalLM.from_pretrained(models["untied"])
    resident = 16 * sum(p.numel() for p in model.parameters())
    assert [need - offloaded, half - half_offloaded] == pytest.approx([resident, resident / 2], rel=0.01)
    assert [large - small, (more - fewer) * 2 * (32 + 32) * 2] == pytest.approx([0.92 * 8 * 2**30] * 2, rel=1e-5)
