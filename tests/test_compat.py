"""rolemodel/compat.py: TOMLs that were written for another trainer load here, and mean the same or are refused."""

import json

import pytest
from conftest import ROOT

from rolemodel import compat
from rolemodel.config import DEFAULTS, load_config
from rolemodel.role import ConfigError

MODEL = "Qwen/Qwen3-4B-Instruct-2507"
FLAGS = DEFAULTS["inference.args"] | {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
ARGS = 'model = "m"\nenv.id = "x"\n[trainer.args]\n'


def changed(path):
    """What differs from the defaults."""
    flat = load_config(path).flat
    return {key: value for key, value in flat.items() if key != "origin" and value != DEFAULTS.get(key)}


def environment(**args):
    return [{"id": "primeintellect/wiki-search", "args": args, "ratio": 1.0, "name": "primeintellect/wiki-search"}]


def test_the_documents_file_of_vf_rl():
    expected = {"model": MODEL, "env": environment(max_turns=10), "inference.args": FLAGS, "run_name": "wiki-search"}
    # What else the file has is the default here: 16 rollouts of 512 tokens a turn and 4,096 in all, micro-batches of 4.
    assert changed(ROOT / "tests/assets/vf_rl.toml") == expected | {"orchestrator.batch_size": 1024, "max_steps": 500}


def test_the_documents_file_of_prime_rl(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    path = ROOT / "tests/assets/prime_rl.toml"
    expected = {"model": MODEL, "env": environment(), "inference.args": FLAGS, "run_name": "wiki-search-4b"}
    expected |= {"tracker": "wandb", "max_steps": 500, "orchestrator.order": "orders:Difficulty"}
    expected |= {"orchestrator.zero_truncated_completions": True}
    assert changed(path) == expected and compat.os.environ["WANDB_PROJECT"] == "wiki-search"
    head, _, rest = path.read_text().partition("[trainer.model.experimental.lora]")
    (tmp_path / "full.toml").write_text(head.replace("[1]", "[1, 2]") + rest[rest.index("[orchestrator]") :])
    assert changed(tmp_path / "full.toml") == expected | {"trainer.use_lora": False, "trainer.gpus": 2}


BOTH = {"epsilon": 0.2, "epsilon_high": 0.2}
REF = {"trainer.beta": 0.1}
MEANS = {  # lines under [trainer.args] -> our keys
    "num_generations = 32\nlora_rank = 4": {"orchestrator.rollouts_per_example": 32, "trainer.lora_rank": 4},
    "max_new_tokens = 9\nkl_coef = 0.1": {"orchestrator.sampling.max_tokens": 9} | REF,
    "bf16 = false\nfp16 = false\ngamma = 1.0\nlogging_steps = 10\nmask_env_responses = true": {"trainer.dtype": "fp32"},
    'report_to = "wandb"\nscale_rewards = true': {"tracker": "wandb", "orchestrator.advantage": "std"},
    'eval_strategy = "steps"\nsave_steps = 500': {"checkpoint.every": 500, "eval.every": 50},
    'eval_steps = 7\neval_strategy = "no"\nsave_strategy = "no"': {"checkpoint.every": 0},
    "sync_ref_model = true\nbeta = 0.1": REF | {"trainer.ref_sync_steps": 512, "trainer.ref_sync_alpha": 0.6},
    "ref_model_sync_steps = 9\nsync_ref_model = false\nbeta = 0.1": REF,
    "ref_model_mixup_alpha = 0.2\nref_model_sync_steps = 9\nsync_ref_model = true\nbeta = 0.1":
        REF | {"trainer.ref_sync_steps": 9, "trainer.ref_sync_alpha": 0.2},
    "vllm_gpu_memory_utilization = 0.5":
        {"inference.args": DEFAULTS["inference.args"] | {"gpu_memory_utilization": 0.5}},
    "warmup_steps = 5\nwarmup_ratio = 0.5": {"trainer.warmup_steps": 5},
    "epsilon = 0.2": {"trainer.loss": "grpo", "trainer.loss_args": BOTH},  # TRL's default is dapo
    'epsilon_high = 0.3\nloss_type = "dr_grpo"':
        {"trainer.loss": "losses:dr_grpo", "trainer.loss_args": BOTH | {"epsilon_high": 0.3}},
    'epsilon = 0.1\nepsilon_high = 5.5\nloss_type = "cispo"': {"trainer.loss_args": {"ratio_cap": 5.5}},
    'loss = "losses:gspo"\nepsilon = 0.2': {"trainer.loss": "losses:gspo", "trainer.loss_args": BOTH},
}  # fmt: skip


@pytest.mark.parametrize("lines", MEANS)
def test_names_keep_their_meaning(lines, tmp_path):
    (tmp_path / "x.toml").write_text(ARGS + lines)
    found = changed(tmp_path / "x.toml")
    assert {key: value for key, value in found.items() if key not in ("model", "env", "run_name")} == MEANS[lines]


REFUSED = [*compat.REFUSED, ("max_prompt_length", 9), ("loss_type", "sapo"), ("loss_type", "cispo"), ("fp16", True)]


@pytest.mark.parametrize("refused", REFUSED, ids=str)
def test_what_has_another_meaning_is_refused(refused, tmp_path):
    name, value = (refused, 1) if isinstance(refused, str) else refused
    (tmp_path / "x.toml").write_text(f"{ARGS}{name} = {json.dumps(value)}\n")
    with pytest.raises(ConfigError, match=f"trainer.args.{name}'? = .*: .{{9}}"):
        load_config(tmp_path / "x.toml")


def test_our_names_count(tmp_path):
    (tmp_path / "x.toml").write_text(f'{ARGS}max_steps = 500\nloss_type = "dapo"\n[trainer]\nloss = "cispo"\n')
    cfg = load_config(tmp_path / "x.toml", ["max_steps=5", "trainer.loss_args={}"])
    assert (cfg.run.max_steps, cfg.trainer.loss, cfg.trainer.loss_args) == (5, "cispo", {})
