"""tools/check.py, which `bash launch.sh config.toml --check` runs."""

import gc
import subprocess
import sys

import httpx
import pytest
import torch
import transformers
from conftest import ROOT, launch, write_run
from think_env import DROPS, KEEPS, double

import trainer
from configs import load_config
from configs.environments.tools import ToolEnv
from configs.runtime.directory import run_directory
from configs.runtime.role import DATA, DIED, RunError
from env import MultiTurnEnv, SingleTurnEnv
from tools import check

ROWS = [{"question": "a"}]


def printed(capsys, start="check: "):
    return [row for row in capsys.readouterr().out.splitlines() if row.startswith(start)]


@pytest.mark.slow
@pytest.mark.long
def test_check_passes_on_two_ranks_and_leaves_the_run_untouched(models, tmp_path):
    toml = write_run(tmp_path, models["untied"], 5, '{ kind = "turns", num_turns = 2 }')
    done = launch(toml, "--check", "trainer.gpus=2", "max_steps=5", "eval.every=1", FAKE='{"stop": true}')
    estimate, *reports = [row for row in done.stdout.splitlines() if row.startswith("check: ")]
    assert estimate.startswith("check: estimate for a GPU of 16 GiB: ")
    wanted = ["own forward", "fits in memory", "moves the servers", "chat template keeps its prefix", "neither too"]
    assert len(reports) == 7 and all(row.startswith("check: PASS") for row in reports), reports
    assert all(part in row for part, row in zip(wanted, reports))
    assert not (tmp_path / "run").exists() and not list((tmp_path / "run-check" / "batches").iterdir())


@pytest.fixture
def beside_a_server(models, tmp_path, fake_servers, monkeypatch):
    """Returns a function that makes a configuration for a running fake server, which behaves as `fake` says."""

    def make(kind, **fake):
        url = fake_servers()
        httpx.post(f"{url}/fake", json=fake)
        monkeypatch.setenv("ROLEMODEL_RUN_ID", "run")
        toml = write_run(tmp_path, models["untied"], 5, f'{{ kind = "{kind}" }}')
        return load_config(toml, [f'inference.urls=["{url}"]'])

    return make


EQUAL = "all rewards are equal in 8 of 8 groups; raise orchestrator.rollouts_per_example"


@pytest.mark.parametrize("kind, problems", [
    ("constant", ["too easy: 100 % is solved (limit 80 %), reward 1.000 (1 to 1) of 32 rollouts; take harder", EQUAL]),
    # It returns None if the answer is wrong: the others are all right, and not too easy.
    ("none_if_wrong", ["of 32 rollouts were lost: ValueError: reward function none_if_wrong returned None"]),
])  # fmt: skip
def test_check_says_what_is_wrong_with_a_task(kind, problems, beside_a_server, capsys):
    with pytest.raises(RunError, match="a check failed") as e:
        check.check_task(beside_a_server(kind, stop=True))
    failures = printed(capsys, "check: FAIL ")
    assert e.value.code == DATA and len(failures) == len(problems)
    assert all(problem in row for problem, row in zip(problems, failures))


@pytest.mark.parametrize("discard", [False, True])
def test_check_says_that_a_sync_does_not_arrive(discard, beside_a_server, capsys, monkeypatch):
    """A server that takes weights and goes on with its own would pass at version 0, which it loaded by itself. The
    optimizer of the memory check is alive meanwhile, as in a run."""
    cfg = beside_a_server("turns", discard=discard)
    policy = trainer.build_policy(cfg)
    before = {name: x.clone() for name, x in policy.state_dict().items()}
    alive = []

    def sync_weights(*args):
        optimizers = [x for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer)]
        alive.append(any(len(x.state) == len(before) for x in optimizers))
        return sync(*args)

    sync = trainer.sync_weights
    monkeypatch.setattr(trainer, "sync_weights", sync_weights)
    monkeypatch.setattr(trainer, "build_policy", lambda cfg: policy)
    monkeypatch.setattr(trainer, "start_distributed", lambda cfg: None)
    monkeypatch.setattr(check.dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(check, "check_task", lambda cfg: None)
    monkeypatch.setattr(check.configs, "arguments", lambda doc, argv: cfg)
    if discard:
        with pytest.raises(RunError, match="trainer and server differ.*requirements-") as e:
            check.main([])
        (failure,) = printed(capsys, "check: FAIL ")
        assert e.value.code == DIED and "a sync moves the servers as predicted" in failure
    else:
        check.main([])
        assert not printed(capsys, "check: FAIL ") and (run_directory(cfg) / "version").read_text() == "2"
        assert all(torch.equal(x, before[name]) for name, x in policy.state_dict().items())
    assert len(alive) == (2 if discard else 3) and all(alive)


@pytest.mark.long
@pytest.mark.real
def test_check_of_adapters_in_16_bits(tmp_path):
    """The default of GPU recipes, on the real vLLM."""
    more = ["trainer.dtype=bf16", "trainer.use_lora=true", f"output_dir={tmp_path}", "orchestrator.batch_size=64"]
    done = launch("configs/reverse_text.toml", *more, "--check", timeout=400, check=False, SERVER="", TMPDIR="/tmp")
    is_ok = done.returncode == 0 and "check: PASS a sync moves the servers" in done.stdout
    assert is_ok, done.stdout + done.stderr


# --- memory -----------------------------------------------------------------------------------------------------------

OOM = """
import resource, sys, trainer
from configs import load_config
from tools import check
cfg = load_config(sys.argv[1], ["trainer.micro_batch_size=8000"])
trainer.start_distributed(cfg)
policy = trainer.build_policy(cfg)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20), used + (600 << 20)))
check.check_memory(policy, cfg)
print("it fits")
"""


@pytest.mark.long
def test_a_micro_batch_that_does_not_fit_is_reported_before_step_1(make_cfg, tmp_path):
    """512,000 tokens in 600 MiB."""
    make_cfg()
    command = [sys.executable, "-c", OOM, str(tmp_path / "test.toml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "check: FAIL a micro-batch of 512,000 tokens" in done.stdout, done.stdout + done.stderr
    assert "lower trainer.micro_batch_size or max_seq_len" in done.stdout and "RunError" in done.stderr


def needs_fields(micro, logp_N, entropy_N):
    """A loss with the fields and numbers that every batch has."""
    for name in ("reward", "staleness", "temperature", "num_turns", "ce", "truncated"):
        assert len(micro[f"{name}_N"]) == len(logp_N)
    return -logp_N * micro["adv_N"], {}


def needs_another(micro, logp_N, entropy_N):
    return micro["hint_N"], {}


@pytest.mark.parametrize("loss, verdict", [("needs_fields", "PASS"), ("needs_another", "SKIP")])
def test_the_memory_check_has_the_fields_of_a_batch_and_changes_nothing(loss, verdict, make_cfg, capsys):
    cfg = make_cfg(f"trainer.loss=test_check:{loss}", "trainer.weight_decay=0.1", "trainer.minibatches=3")
    policy = trainer.build_policy(cfg)
    before = {name: x.clone() for name, x in policy.state_dict().items()}
    check.check_memory(policy, cfg)
    (row,) = printed(capsys)
    assert row.startswith(f"check: {verdict} a micro-batch of 512 tokens")
    assert ("'hint_N'" in row) == (verdict == "SKIP")
    assert all(torch.equal(x, before[name]) for name, x in policy.state_dict().items())
    assert all(p.grad is None for p in policy.parameters())


# --- chat templates ---------------------------------------------------------------------------------------------------

STRICT = (  # as Mistral's: a tool's answer needs the id of a call before it
    "{% for m in messages %}{% if m.role == 'tool' and m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids should have 9 characters') }}{% endif %}{% endfor %}" + KEEPS
)


@pytest.mark.parametrize("env, template, is_kept", [
    (MultiTurnEnv(ROWS), "", True),
    (MultiTurnEnv(ROWS), DROPS, False),
    (SingleTurnEnv(ROWS), DROPS, True),
    (ToolEnv(ROWS, [double]), STRICT, True),
])  # fmt: skip
def test_the_template_that_drops_history_is_named(env, template, is_kept, models, make_cfg, capsys):
    tokenizer = transformers.AutoTokenizer.from_pretrained(models["untied"])
    tokenizer.chat_template = template or tokenizer.chat_template
    assert check.check_template(tokenizer, {"task": env}, make_cfg()) == is_kept
    assert ("set chat_template to one that keeps" in capsys.readouterr().out) == (not is_kept)
