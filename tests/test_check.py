"""tools/check.py, which `bash launch.sh config.toml --check` runs."""

import subprocess
import sys

import httpx
import pytest
import torch
import transformers
from conftest import ROOT, launch, write_run

import trainer
from configs import RunError, load_config, run_directory
from configs.environments.tools import ToolEnv
from env import MultiTurnEnv, SingleTurnEnv
from tools import check


@pytest.mark.slow
@pytest.mark.long
def test_check_passes_on_two_ranks_and_leaves_the_run_untouched(models, tmp_path):
    toml = write_run(tmp_path, models["untied"], 5, '{ kind = "turns", num_turns = 2 }')
    done = launch(toml, "--check", "trainer.gpus=2", "max_steps=5", "eval.every=1", FAKE='{"stop": true}')
    told = [x for x in done.stdout.splitlines() if x.startswith("check: ")]
    assert len(told) == 7 and all(x.startswith("check: PASS") for x in told), told
    wanted = ["own forward", "fits in memory", "moves the servers", "chat template keeps its prefix", "neither too"]
    assert all(part in line for part, line in zip(wanted, told))
    assert not (tmp_path / "run").exists() and not list((tmp_path / "run-check" / "batches").iterdir())


@pytest.fixture
def beside_a_server(models, tmp_path, fake_servers, monkeypatch):
    """-> a configuration for a running fake server, which behaves as `fake` says."""

    def make(kind, **fake):
        url = fake_servers()
        httpx.post(f"{url}/fake", json=fake)
        monkeypatch.setenv("ROLEMODEL_RUN_ID", "run")
        toml = write_run(tmp_path, models["untied"], 5, f'{{ kind = "{kind}" }}')
        return load_config(toml, [f'inference.urls=["{url}"]'])

    return make


def failures(capsys):
    return [x for x in capsys.readouterr().out.splitlines() if x.startswith("check: FAIL ")]


@pytest.mark.parametrize("kind, problem", [
    ("zero", "too hard: nothing is solved, reward 0.000 (0 to 0) of 32 rollouts; take easier rows"),
    ("constant", "too easy: 100 % is solved (limit 80 %), reward 1.000 (1 to 1) of 32 rollouts; take harder rows"),
])  # fmt: skip
def test_check_says_what_is_wrong_with_a_task(kind, problem, beside_a_server, capsys):
    with pytest.raises(RunError, match="a check failed") as e:
        check.check_task(beside_a_server(kind, stop=True))
    failed = failures(capsys)
    assert e.value.code == 4 and len(failed) == 2 and problem in failed[0]
    assert "all rewards are equal in 8 of 8 groups; raise orchestrator.rollouts_per_example" in failed[1]


def test_check_names_the_reward_function_that_loses_rollouts(beside_a_server, capsys):
    """It returns None where the answer is wrong: what is left is all right, and not too easy."""
    with pytest.raises(RunError, match="a check failed"):
        check.check_task(beside_a_server("none_if_wrong", stop=True))
    (failed,) = failures(capsys)
    assert "of 32 rollouts were lost: " in failed and "reward function none_if_wrong returned None" in failed


@pytest.mark.parametrize("discard", [False, True])
def test_check_says_that_a_broadcast_does_not_arrive(discard, beside_a_server, capsys):
    """A server that takes weights and goes on with its own would pass at version 0, which it loaded by itself."""
    cfg = beside_a_server("turns", discard=discard)
    policy = trainer.build_policy(cfg)
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    sender = trainer.WeightSender(cfg, run_directory(cfg), policy.device)
    if discard:
        with pytest.raises(RunError, match="trainer and server differ.*requirements-") as e:
            check.check_sync(sender, policy, cfg)
        (failed,) = failures(capsys)
        assert e.value.code == 3 and "a broadcast moves the servers as predicted" in failed
    else:
        check.check_sync(sender, policy, cfg)
        assert not failures(capsys) and (run_directory(cfg) / "version").read_text() == "2"
        assert all(torch.equal(v, before[k]) for k, v in policy.state_dict().items())


@pytest.mark.long
@pytest.mark.real
def test_check_of_adapters_in_16_bits(tmp_path):
    """What GPU recipes have by default, on the real vLLM."""
    more = ["trainer.dtype=bf16", "trainer.use_lora=true", f"output_dir={tmp_path}", "orchestrator.batch_size=64"]
    done = launch("configs/reverse_text.toml", *more, "--check", timeout=400, check=False, SERVER="", TMPDIR="/tmp")
    assert done.returncode == 0 and "check: PASS a broadcast moves the servers" in done.stdout, (
        done.stdout + done.stderr
    )


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


def test_a_micro_batch_that_does_not_fit_is_told_before_step_1(make_cfg, tmp_path):
    """512,000 tokens in 600 MiB."""
    make_cfg()
    command = [sys.executable, "-c", OOM, str(tmp_path / "test.toml")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert "check: FAIL a micro-batch of 512,000 tokens" in done.stdout, done.stdout + done.stderr
    assert "lower trainer.micro_batch_size or max_seq_len" in done.stdout and "RunError" in done.stderr


def test_the_memory_check_changes_nothing(make_cfg, capsys):
    cfg = make_cfg("trainer.weight_decay=0.1")
    policy = trainer.build_policy(cfg)
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    check.check_memory(policy, cfg)
    assert "check: PASS a micro-batch of 512 tokens" in capsys.readouterr().out
    assert all(torch.equal(v, before[k]) for k, v in policy.state_dict().items())
    assert all(p.grad is None for p in policy.parameters())


def wants_columns(micro, logp_N, entropy_N, cfg):
    """A loss with columns that every batch has."""
    _ = micro["reward_N"], micro["age_N"], micro["temperature_N"], micro["num_turns_N"]
    return -logp_N * micro["adv_N"], {}


def wants_another(micro, logp_N, entropy_N, cfg):
    return micro["teacher_N"], {}


@pytest.mark.parametrize("loss, told", [("wants_columns", "PASS"), ("wants_another", "SKIP")])
def test_the_memory_check_has_the_columns_of_a_batch(loss, told, make_cfg, capsys):
    cfg = make_cfg(f"trainer.loss=test_check:{loss}")
    check.check_memory(trainer.build_policy(cfg), cfg)
    (row,) = capsys.readouterr().out.splitlines()
    assert row.startswith(f"check: {told} a micro-batch of 512 tokens") and ("'teacher_N'" in row) == (told == "SKIP")


# --- chat templates ---------------------------------------------------------------------------------------------------


def test_the_template_that_drops_history_is_named(models, make_cfg, capsys):
    from think_env import DROPS

    cfg = make_cfg()
    tokenizer = transformers.AutoTokenizer.from_pretrained(models["untied"])
    several = {"task": MultiTurnEnv([{"question": "a"}])}
    assert check.check_template(tokenizer, several, cfg)
    tokenizer.chat_template = DROPS
    assert not check.check_template(tokenizer, several, cfg)
    assert "set chat_template to one that keeps" in capsys.readouterr().out
    assert check.check_template(tokenizer, {"task": SingleTurnEnv([{"question": "a"}])}, cfg)


def test_a_strict_template_gets_the_ids_that_it_wants(models, make_cfg):
    """As Mistral's: a tool's answer needs the id of a call before it."""
    from think_env import KEEPS

    def look(word: str) -> str:
        """Look a word up.

        Args:
            word: the word
        """

    strict = "{% for m in messages %}{% if m.role == 'tool' and m.tool_call_id | length != 9 %}"
    strict += "{{ raise_exception('ids should have 9 characters') }}{% endif %}{% endfor %}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(models["untied"])
    tokenizer.chat_template = strict + KEEPS
    assert check.check_template(tokenizer, {"task": ToolEnv([{"question": "a"}], [look])}, make_cfg())
