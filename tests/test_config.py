"""The configuration: the documents' TOMLs move over, every key is read somewhere, nothing wrong starts."""

import json
import re
import subprocess
import sys
import time

import pytest
from conftest import BASE, ROOT, launch

import configs
from configs import load_config
from configs.compat import vf_rl
from configs.runtime.directory import identity, refuse_other, run_directory
from configs.runtime.role import CONFIG, RunError

VF_RL = """
model = "Qwen/Qwen3-4B-Instruct-2507"

[env]
id = "primeintellect/wiki-search"

[env.args]
max_turns = 10

[inference]
gpus = 1

[inference.args]
enable_auto_tool_choice = true
tool_call_parser = "hermes"

[trainer]
gpus = 1

[trainer.args]
run_name = "wiki-search"
micro_batch_size = 4
rollouts_per_example = 16
batch_size = 1024
max_steps = 500
max_tokens = 512
max_seq_len = 4096
"""


ONE_DEVICE = {"tensor_parallel_size": 1, "generation_config": "vllm"}  # by default


def load(tmp_path, text, *overrides):
    path = tmp_path / "some.toml"
    path.write_text(text)
    return load_config(path, overrides)


def test_the_documents_vf_rl_file(tmp_path):
    cfg = load(tmp_path, VF_RL)
    assert cfg.run.model == "Qwen/Qwen3-4B-Instruct-2507" and cfg.run.run_name == "wiki-search"
    assert cfg.env[0].id == "primeintellect/wiki-search" and cfg.env[0].args == {"max_turns": 10}
    assert cfg.inference.gpus == 1 and cfg.trainer.gpus == 1
    assert cfg.inference.args == {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"} | ONE_DEVICE
    assert cfg.trainer.micro_batch_size == 4 and cfg.orchestrator.rollouts_per_example == 16
    assert cfg.orchestrator.batch_size == 1024 and cfg.run.max_steps == 500
    assert cfg.sampling.max_tokens == 512 and cfg.run.max_seq_len == 4096
    # vf-rl's recipe
    assert cfg.trainer.use_lora and cfg.trainer.loss == "cispo" and cfg.orchestrator.max_staleness == 1


# Names that vf-rl's and TRL's documents use under [trainer.args] -> what they become.
OLD_NAMES = {
    "num_generations = 32": ("orchestrator", "rollouts_per_example", 32),
    "max_completion_length = 9": ("sampling", "max_tokens", 9),
    "max_seq_len = 5000": ("run", "max_seq_len", 5000),
    "max_prompt_len = 77": ("orchestrator", "max_prompt_len", 77),
    "temperature = 0.8": ("sampling", "temperature", 0.8),
    "top_p = 1.0": ("sampling", "top_p", 1.0),
    "learning_rate = 1e-6": ("trainer", "learning_rate", 1e-6),
    "bf16 = true": ("trainer", "dtype", "bf16"),
    "bf16 = false": ("trainer", "dtype", "fp32"),
    "fp16 = true": ("trainer", "dtype", "fp16"),
    "max_concurrent = 99": ("orchestrator", "max_concurrent", 99),
    'eval_strategy = "steps"': ("eval", "every", 500),
    'eval_steps = 7\neval_strategy = "steps"': ("eval", "every", 7),
    'eval_steps = 7\neval_strategy = "no"': ("eval", "every", 0),
    'eval_strategy = "no"': ("eval", "every", 0),
    "eval_steps = 100": ("eval", "every", 100),
    'save_strategy = "steps"': ("checkpoint", "every", 50),
    "save_steps = 500": ("checkpoint", "every", 500),
    "num_iterations = 2": ("trainer", "updates_per_batch", 2),
    "sync_ref_model = false": ("trainer", "ref_sync_steps", 0),
    "sync_ref_model = true\nbeta = 0.1": ("trainer", "ref_sync_steps", 512),
    "ref_model_sync_steps = 9\nsync_ref_model = true\nbeta = 0.1": ("trainer", "ref_sync_steps", 9),
    "ref_model_sync_steps = 100\nbeta = 0.1": ("trainer", "ref_sync_steps", 100),
    "ref_model_mixup_alpha = 0.25": ("trainer", "ref_sync_alpha", 0.25),
    "ref_model_mixup_alpha = 0.25\nsync_ref_model = true\nbeta = 0.1": ("trainer", "ref_sync_alpha", 0.25),
    "sync_ref_model = true\nbeta = 0.2": ("trainer", "ref_sync_alpha", 0.6),
    "fp16 = true\nbf16 = false": ("trainer", "dtype", "fp16"),
    "bf16 = false\nfp16 = false": ("trainer", "dtype", "fp32"),
    'vllm_importance_sampling_correction = false\nvllm_importance_sampling_mode = "sequence_mask"\n'
    "vllm_importance_sampling_clip_max = 2.0": ("trainer", "importance", ""),
    'loss = "grpo"': ("trainer", "loss", "grpo"),  # a name of ours
    'importance_sampling_level = "token"': ("trainer", "loss", "cispo"),
    "num_batches_ahead = 0": ("orchestrator", "max_staleness", 0),
    "mask_truncated_completions = true": ("orchestrator", "mask_truncated_completions", True),
    "logging_steps = 1": ("run", "max_steps", 100),
    'report_to = "none"': ("run", "max_steps", 100),
    'report_to = "wandb"': ("run", "tracker", "wandb"),
    "vllm_server_timeout = 9.0": ("inference", "startup_timeout", 9.0),
    'vllm_importance_sampling_mode = "sequence_mask"': ("trainer", "importance", "importance:sequence_mask"),
    'vllm_importance_sampling_clip_max = 2.0\nvllm_importance_sampling_mode = "token_truncate"':
        ("trainer", "importance_args", {"high": 2.0}),
    "vllm_importance_sampling_correction = false": ("trainer", "importance", ""),
    "cast_lm_head_to_fp32 = true": ("trainer", "head_dtype", "fp32"),
}  # fmt: skip
# Refused with what to write instead.
REFUSED_VALUES = [("loss_type", "sapo"), ("loss_type", "cispo"), ("logging_steps", 10), ("report_to", "mlflow")]
VF_RL_ARGS = 'model = "m"\n[env]\nid = "reverse_text"\n[trainer.args]\n'


@pytest.mark.parametrize("item", ["env.args.shuffle=False", "env.args.x=None", "env.args.names=[easy,hard]"])
def test_words_that_look_like_pythons_values_are_no_text(make_cfg, item):
    with pytest.raises(RunError, match="is no value of TOML: write true, false") as e:
        make_cfg(item)
    assert e.value.code == 2
    assert make_cfg("env.args.x=Falsehood").env[0].args == {"x": "Falsehood"}


@pytest.mark.parametrize("lines", OLD_NAMES)
def test_old_names_are_accepted(lines, tmp_path):
    table, name, value = OLD_NAMES[lines]
    assert getattr(getattr(load(tmp_path, f"{VF_RL_ARGS}{lines}\n"), table), name) == value


@pytest.mark.parametrize("refused", [*vf_rl.REFUSED, *REFUSED_VALUES])
def test_old_names_are_refused_with_the_new_one(refused, tmp_path):
    name, value = (refused, 1) if isinstance(refused, str) else refused
    value = {"True": "true"}.get(value, json.dumps(value))
    with pytest.raises(RunError, match=f"key 'trainer.args.{name}' = .*: .{{12}}") as e:
        load(tmp_path, f"{VF_RL_ARGS}{name} = {value}\n")
    assert e.value.code == 2


LOSSES = {  # TRL's names of a loss and its clip range -> trainer.loss and trainer.loss_args here
    "": ("cispo", {}),
    'loss_type = "dapo"': ("grpo", {"epsilon": 0.2, "epsilon_high": 0.2}),
    'loss_type = "dr_grpo"': ("dr_grpo", {"epsilon": 0.2, "epsilon_high": 0.2}),
    'loss_type = "dapo"\nepsilon = 0.1': ("grpo", {"epsilon": 0.1, "epsilon_high": 0.1}),
    'epsilon_high = 0.28\nloss_type = "dapo"': ("grpo", {"epsilon": 0.2, "epsilon_high": 0.28}),
    'epsilon_high = 0.28\nepsilon = 0.1\nloss_type = "dr_grpo"': ("dr_grpo", {"epsilon": 0.1, "epsilon_high": 0.28}),
    'loss_type = "cispo"\nepsilon_high = 2.0': ("cispo", {"ratio_cap": 2.0}),
    "epsilon = 0.1": ("grpo", {"epsilon": 0.1, "epsilon_high": 0.1}),  # TRL's default is dapo
    "delta = 4.0": ("grpo", {"epsilon": 0.2, "epsilon_high": 0.2, "delta": 4.0}),
    'loss = "cispo"\nepsilon_high = 2': ("cispo", {"ratio_cap": 2}),
    'loss = "losses:gspo"\nepsilon = 1e-3': ("losses:gspo", {"epsilon": 1e-3, "epsilon_high": 1e-3}),
}


@pytest.mark.parametrize("lines", LOSSES)
def test_losses_of_trl_keep_their_meaning(lines, tmp_path):
    trainer = load(tmp_path, f"{VF_RL_ARGS}seed = 0\n{lines}\n").trainer
    assert (trainer.loss, trainer.loss_args) == LOSSES[lines]


FORMER = {  # lines of [trainer] as this project's former versions had them -> loss_args, importance, importance_args
    'loss = "grpo"\nepsilon = 0.1\nepsilon_high = 0.0\ndelta = 0.0': ({"epsilon": 0.1}, "", {}),
    "ratio_cap = 5.0\nicepop_low = 0.5\ndppo_mask = 0.2\ndppo_kl = 0.001": ({}, "", {}),  # as in an old config.toml
    'loss = "losses:icepop"\nicepop_low = 0.4\nratio_cap = 3.0': ({"icepop_low": 0.4, "ratio_cap": 3.0}, "", {}),
    'loss = "losses:dppo"\ndppo_mask = 0.1\ndppo_kl = 0.0': ({"dppo_mask": 0.1, "dppo_kl": 0.0}, "", {}),
    'loss = "grpo"\nratio_cap = 3.0': ({"ratio_cap": 3.0}, "", {}),  # kept, so that the loss refuses it
    'importance = "losses:token_mask"\nimportance_high = 2.0': ({}, "importance:token_mask", {"high": 2.0}),
    "importance_low = 0.0\nimportance_high = 0.0": ({}, "", {}),
    'importance = "importance:sequence_mask"\nimportance_low = 0.5\nimportance_args = { low = 0.6 }': (
        {}, "importance:sequence_mask", {"low": 0.6},
    ),
}  # fmt: skip


@pytest.mark.parametrize("lines", FORMER)
def test_former_keys_of_ours_keep_their_meaning(lines, tmp_path):
    old = 'keep = ""\nextra_groups = ""'  # as in a former run's config.toml
    text = f'model = "m"\n[env]\nid = "x"\n[orchestrator]\n{old}\n[trainer]\n{lines}\n'
    trainer = load(tmp_path, text).trainer
    assert (trainer.loss_args, trainer.importance, trainer.importance_args) == FORMER[lines]


def test_an_override_of_a_loss_argument_leaves_the_others(tmp_path):
    text = 'model = "m"\n[env]\nid = "x"\n[trainer]\nloss = "grpo"\nepsilon = 0.1\nloss_args = { delta = 4.0 }\n'
    assert load(tmp_path, text).trainer.loss_args == {"epsilon": 0.1, "delta": 4.0}
    both = load(tmp_path, text, "trainer.loss_args.delta=3.0")
    assert both.trainer.loss_args == {"epsilon": 0.1, "delta": 3.0}
    assert load(tmp_path, configs.to_toml(both)).trainer == both.trainer
    with pytest.raises(RunError, match="'trainer.loss_args' = 3: must be a table"):
        load(tmp_path, text, "trainer.loss_args=3")


def test_what_is_given_by_our_name_holds(tmp_path):
    text = 'model = "m"\n[env]\nid = "reverse_text"\n[trainer.args]\nloss_type = "cispo"\neval_strategy = "steps"\n'
    cfg = load(tmp_path, text, "trainer.loss_args.ratio_cap=3.0", "eval.every=9")
    assert cfg.trainer.loss_args == {"ratio_cap": 3.0} and cfg.eval.every == 9
    assert load(tmp_path, text, "trainer.loss=grpo").trainer.loss == "grpo"
    # an override also holds against an old name that comes after its own place in the file
    both = f"max_steps = 9\n{text}max_steps = 500\nlearning_rate = 1e-6\n[trainer]\nlearning_rate = 3e-5\n"
    cfg = load(tmp_path, both, "trainer.loss=grpo", "max_steps=5", "trainer.learning_rate=5e-5")
    assert (cfg.run.max_steps, cfg.trainer.learning_rate) == (5, 5e-5)


def test_an_override_by_an_old_name_holds_against_ours_in_the_file(tmp_path):
    text = 'model = "m"\nmax_steps = 9\n[env]\nid = "reverse_text"\n[trainer]\nloss = "grpo"\ndtype = "fp32"\n'
    text += "loss_args = { epsilon = 0.1, delta = 2.0 }\n"
    cfg = load(tmp_path, text, "trainer.args.max_steps=5", "trainer.args.bf16=true", "trainer.args.epsilon_high=0.3")
    assert (cfg.run.max_steps, cfg.trainer.dtype) == (5, "bf16")
    assert cfg.trainer.loss_args == {"epsilon": 0.1, "delta": 2.0, "epsilon_high": 0.3}
    assert load(tmp_path, text, "trainer.epsilon=0.4").trainer.loss_args == {"epsilon": 0.4, "delta": 2.0}
    assert load(tmp_path, text, "trainer.args.epsilon=0.4").trainer.loss_args["epsilon"] == 0.4
    assert load(tmp_path, text, "trainer.loss_args.epsilon=0.4").trainer.loss_args == {"epsilon": 0.4, "delta": 2.0}


def test_old_names_lead_to_keys_that_there_are():
    known = set(configs.DEFAULTS)
    meant = {key for values in vf_rl.VALUES.values() for keys in values.values() for key in keys}
    former = {f"trainer.{name}" for name in (*vf_rl.FORMER, "importance_low", "importance_high")}
    assert not former & known and {*vf_rl.RENAMED.values(), *meant} <= known | former


def test_flags_of_vllm_that_launch_sets_are_refused(tmp_path):
    text = 'model = "m"\n[env]\nid = "reverse_text"\n[inference]\ngpus = 2\nargs = { tensor_parallel_size = 2 }\n'
    assert load(tmp_path, text).inference.args == ONE_DEVICE | {"tensor_parallel_size": 2}
    with pytest.raises(RunError, match="multiple of inference.args.tensor_parallel_size = 2"):
        load(tmp_path, text.replace("gpus = 2", "gpus = 3"))
    with pytest.raises(RunError, match="inference.args.max_model_len': .*not set by launch.sh"):
        load(tmp_path, text.replace("tensor_parallel_size", "max_model_len"))
    with pytest.raises(RunError, match="trainer.head_dtype' = 'fp32': must be left out with inference.args.hf_over"):
        load(tmp_path, text, "trainer.head_dtype=fp32", "inference.args.hf_overrides={a = 1}")


def test_files_of_prime_rl_are_refused(tmp_path):
    for lines in ("inference_gpu_ids = [0]\n", "[trainer.optim]\nlr = 1e-5\n", "[wandb]\nproject = 'p'\n"):
        with pytest.raises(RunError, match="unknown; the nearest") as e:
            load(tmp_path, f'{lines}[model]\nname = "m"\n[[orchestrator.env]]\nid = "wiki-search"\n')
        assert e.value.code == 2


MUTANTS = {  # override -> what the error must name
    "trainer.lora_rnk=4": "'trainer.lora_rnk'.*'trainer.lora_rank'",
    "orchestrator.max_error_share=20": "'orchestrator.max_error_share' = 20.0: must be at most 1",
    "orchestrator.buffer=shuffle": "'orchestrator.buffer'.*'orchestrator.order'",
    "orchestrator.retire_after=3": "retire_after' = 3.*orchestrator.order = ''",
    "orchestrator.curriculum={easy=[0, 9]}": "curriculum.*orchestrator.order",
    "trainer.loss=gspo": "'trainer.loss' = 'gspo': must be one of .'cispo', 'grpo', 'dr_grpo', 'module:function'.",
    "trainer.loss=sft": "'trainer.loss' = 'sft': leave it out: demonstrations .*ce = 1.0",
    "orchestrator.keep=mine:keep": "'orchestrator.keep' = 'mine:keep': .*a method of orchestrator.order's class",
    "orchestrator.extra_groups=mine:replay": "'orchestrator.extra_groups'.*a method of orchestrator.order's class",
    "trainer.importance_args.high=2.0": "importance_args' = {'high': 2.0}: must be left out without trainer.importance",
    "orchestrator.generation_timeout=900": "generation_timeout' = 900.0: must be below watchdog = 900.0",
    "evl.every=3": "'evl.every'.*'.*every'",
    "trainer.learning_rate=fast": "'trainer.learning_rate'.*must be a finite number",
    "trainer.learning_rate=0": "'trainer.learning_rate'.*above 0",
    "trainer.learning_rate=nan": "'trainer.learning_rate'",
    "trainer.lora_rank=8.5": "'trainer.lora_rank'.*must be an int",
    "trainer.use_lora=1": "'trainer.use_lora'.*must be true or false",
    "trainer.lora_dropout=1.5": "'trainer.lora_dropout'.*below 1",
    "trainer.lora_target_modules=q_proj": "'trainer.lora_target_modules'.*must be a list of strings",
    "trainer.advantage=gae": "'trainer.advantage'.*leave_one_out",
    "trainer.warmup_ratio=2": "'trainer.warmup_ratio'.*at most 1",
    "trainer.ref_sync_steps=5": "trainer.ref_sync_steps.*trainer.beta",
    "trainer.sync_host=10.0.0.1": "sync_host.*inference.allow_remote",
    "max_seq_len=16": "max_tokens' = 16.*max_seq_len = 16",
    "model=3": "'model'.*must be a string",
    "model=": "'model' = '': must be given",
    "env.id=": "'env.id' = '': must be given",
    "env.args=3": "'env.args' = 3.*must be a table",
    "orchestrator.rollouts_per_example=1": "'orchestrator.rollouts_per_example' = 1.*at least 2",
    "orchestrator.batch_size=18": "'orchestrator.batch_size' = 18.*a multiple of orchestrator.rollouts_per_example = 4",
    "orchestrator.max_concurrent=3": "'orchestrator.max_concurrent' = 3.*rollouts_per_example = 4",
    "orchestrator.max_prompt_len=64": "max_prompt_len' = 64.*max_seq_len = 64",
    "orchestrator.sampling.top_p=0.9": "top_p.*allow_biased_sampling",
    "inference.args.port=9": "inference.args.*port",
    "inference.args.data_parallel_size=2": "inference.args.*data_parallel_size",
    "inference.args.tensor_parallel_size=2": "'inference.gpus' = 1.*tensor_parallel_size = 2",
    'inference.urls=["http://10.0.0.1:8000"]': "inference.urls.*10.0.0.1.*inference.allow_remote",
    'inference.urls=["http://10.0.0.1:8000//127.0.0.1"]': "inference.urls.*10.0.0.1.*inference.allow_remote",
    'inference.urls=["http://127.0.0.1:x@10.0.0.1:8000"]': "inference.urls.*10.0.0.1.*inference.allow_remote",
    "trainer": "^trainer: Expected '='",
    "trainer..loss=sft": "^trainer..loss=sft: Invalid",
    "trainer.adam_beta2=1": "trainer.adam_beta2' = 1.0: must be below 1",
    "trainer.importance=mask": "'trainer.importance'.*module:function",
    'inference.urls=["localhost:8000"]': "inference.urls.*localhost:8000.*http://host:port",
    "watchdog=1e17": "'watchdog'.*at most 1000000000",
    "seed=4294967296": "'seed'.*at most 4294967295",
    "trainer.minibatches=0": "'trainer.minibatches' = 0: must be above 0",
    "max_steps=1000000": "'max_steps'.*at most 999999",
    "inference.args.max-model-len=9": "inference.args.*max-model-len.*must be a flag of vLLM, written with _",
    "inference.startup_timeout=0.00001": "'inference.startup_timeout'.*at least 1",  # bash does not know 1e-05
    "inference.sleep=true": "'inference.sleep' = True.*left out with orchestrator.max_staleness = 1",
    "orchestrator.order=shuffled": "'orchestrator.order'.*module:class",
    "env=3": "'env' = 3: unknown",
    "run_name=/tmp/elsewhere": "run_name' = '/tmp/elsewhere'.*directory",
    "eval.max_tokens=64": "eval.max_tokens' = 64: must be below max_seq_len = 64",
    'orchestrator.sampling.stop=["a", "b", "c", "d", "e"]': "sampling.stop'.*at most four strings",
    'orchestrator.sampling.stop=[""]': "sampling.stop'.*none of them empty",
    "orchestrator.sampling.top_p=0": "sampling.top_p' = 0.0: must be above 0",
    "trainer.use_lora=true\ninference.args.api_server_count=2": "use_lora' = True: must be false with .*api_serve",
    "trainer.loss=no_such:f": "trainer.loss' = 'no_such:f': there is no module 'no_such'",
    "trainer.loss=losses:gsp": "trainer.loss' = 'losses:gsp': .*losses.py does not define 'gsp'",
    "orchestrator.order=orders:Difficult": "order' = 'orders:Difficult': .*orders.py does not define 'Difficult'",
}


@pytest.mark.parametrize("override", MUTANTS)
def test_mutated_configurations_are_refused_by_key(override, tmp_path):
    with pytest.raises(RunError) as e:
        load(tmp_path, BASE.format(model="m"), override)
    assert e.value.code == 2 and re.search(MUTANTS[override], str(e.value)), str(e.value)


@pytest.mark.parametrize("override", ["trainer.lora_rnk=4", "orchestrator.batch_size=18"])
def test_launch_refuses_within_seconds(override, tmp_path):
    (tmp_path / "some.toml").write_text(BASE.format(model="m"))
    started = time.monotonic()
    done = launch(tmp_path / "some.toml", override, f"output_dir={tmp_path}/out", check=False)
    seconds = time.monotonic() - started
    assert done.returncode == 2 and override.split("=")[0].split(".")[-1] in done.stderr.splitlines()[-1]
    assert seconds < 6 and not (tmp_path / "out").exists()


def test_names_are_found_without_importing_a_module(tmp_path):
    """A module may be slow to import, need a GPU, or make its names as it is imported."""
    for code, problem in {
        "import no_such_module\ndef f(): pass": "",
        "def g(): pass": "mine.*does not define 'f'",
        "def f(:": "mine.*line 1: invalid syntax",
        "from somewhere import *": "",
        "globals()['f'] = 3": "",
        "f = 3": "",
        "from os import getcwd as f": "",
        "exec('def f(): pass')": "",
    }.items():
        name = f"mine_{abs(hash(code))}"
        (tmp_path / f"{name}.py").write_text(code)
        if problem:
            with pytest.raises(RunError, match=problem) as e:
                load(tmp_path, BASE.format(model="m"), f"trainer.loss={name}:f")
            assert e.value.code == 2
        else:
            load(tmp_path, BASE.format(model="m"), f"trainer.loss={name}:f")


def test_paths_are_absolute_once_and_a_mark_is_no_key(tmp_path, monkeypatch):
    """User code may change the working directory; some editors begin a file with a byte order mark."""
    (tmp_path / "m").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "some.toml").write_bytes(b"\xef\xbb\xbf" + BASE.format(model="m").encode())
    cfg = configs.load_config("some.toml", ["output_dir=~/runs"])
    assert cfg.run.output_dir == f"{tmp_path}/runs" and cfg.run.model == f"{tmp_path}/m"
    assert cfg.flat["output_dir"] == "~/runs" and cfg.flat["model"] == "m"
    assert configs.load_config("some.toml", ["model=org/name"]).run.model == "org/name"


def test_overrides_add_to_open_tables(tmp_path):
    cfg = load(tmp_path, VF_RL, "env.args.num=3", "env.args.name=word", "inference.args.enforce_eager=true")
    assert cfg.env[0].args == {"max_turns": 10, "num": 3, "name": "word"}
    with pytest.raises(RunError, match="api_key': 'REDACTED'"):  # nor does an error show it
        load(tmp_path, VF_RL, "env.args.api_key=sk-1", "env.args.since=2024-05-01")
    mine = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "enforce_eager": True}
    assert cfg.inference.args == mine | ONE_DEVICE
    emptied = load(tmp_path, VF_RL, "env.args={}", "inference.args={}", "env.args.num=3")
    assert emptied.env[0].args == {"num": 3} and emptied.inference.args == ONE_DEVICE


def test_no_file_and_no_toml(tmp_path):
    for text in (None, "model = ", "\xff"):
        if text:
            (tmp_path / "some.toml").write_bytes(text.encode("latin-1"))
        with pytest.raises(RunError, match="some.toml") as e:
            load_config(tmp_path / "some.toml")
        assert e.value.code == 2


def test_every_key_is_read_somewhere():
    """A key that nothing reads is a promise that nothing keeps."""
    patterns = ("*.py", "configs/*.py", "configs/runtime/*.py", "configs/algorithms/*.py", "tools/*.py")
    code = "".join(path.read_text() for pattern in patterns for path in ROOT.glob(pattern))
    for key in configs.DEFAULTS:
        table, _, name = f"run.{key}".rpartition(".")
        table = table.removeprefix("run.")
        is_read = re.search(rf"\.{name}\b|\"{name}\"|\b{table}_{name}\b", code)
        assert is_read or table == "orchestrator.sampling", f"{key} is never read"  # requests have all of that table


def test_several_environments_are_told_apart(tmp_path):
    mix = 'model = "m"\n[[env]]\nid = "x"\nargs = { n = 1 }\n[[env]]\nid = "x"\nname = "y"\nratio = 3\n'
    assert [(e.name, e.ratio, e.args) for e in load(tmp_path, mix).env] == [("x", 1.0, {"n": 1}), ("y", 3.0, {})]
    both = load(tmp_path, mix, "env.args.more=2")  # an override is for each
    assert [e.args for e in both.env] == [{"n": 1, "more": 2}, {"more": 2}]
    assert [e.args for e in load(tmp_path, mix, "env.args={}").env] == [{}, {}]
    for override in ("env.name=z", "env.id="):
        with pytest.raises(RunError, match="needs a name of its own|'env.id' = ''") as e:
            load(tmp_path, mix, override)
        assert e.value.code == 2
    again = load(tmp_path, configs.to_toml(both))  # as a run's config.toml
    assert again.env == both.env and configs.to_toml(again) == configs.to_toml(both)


@pytest.mark.parametrize("key", [key for key, value in configs.DEFAULTS.items() if type(value) in (int, float)])
def test_no_number_may_be_negative(key, tmp_path):
    with pytest.raises(RunError, match=f"key '{key}' = -1(.0)?: must be (above|at least) [012]") as e:
        load(tmp_path, BASE.format(model="m"), f"{key}=-1")
    assert e.value.code == CONFIG


def test_every_open_table_and_every_fixed_key_is_known():
    assert configs.OPEN <= set(configs.DEFAULTS)
    assert set(configs.runtime.directory.FIXED.split()) <= {*configs.DEFAULTS, "env"}


def test_every_shipped_configuration_loads():
    files = [path for path in (ROOT / "configs").glob("*.toml") if path.name != "defaults.toml"]
    assert len(files) >= 10
    for path in files:
        load_config(path)


def test_what_is_resolved_is_the_same_configuration_without_secrets(tmp_path):
    first = load(
        tmp_path,
        VF_RL,
        "trainer.beta=0.5",
        "env.args.api_key=sk-1",
        "env.args.judge={hf_token='hf-2', max_tokens=5, end_token=7}",
        "env.args.judges=[{name='a', api_key='sk-3'}]",
        "env.args.prompt='Reply \"so\" \U0001f600'",
        'env.args."\u00fc"=[1, true]',
    )
    text = configs.to_toml(first)
    with pytest.raises(RunError, match="env.args holds REDACTED, which stands for a secret: give it again"):
        load(tmp_path, text)
    again = load(tmp_path, text.replace("REDACTED", "sk-4"))
    judge = {"hf_token": "sk-4", "max_tokens": 5, "end_token": 7}
    kept = {"api_key": "sk-4", "judge": judge, "judges": [{"name": "a", "api_key": "sk-4"}]}
    assert again.env == [first.env[0]._replace(args=first.env[0].args | kept)]
    assert not re.search("sk-1|hf-2|sk-3", text)
    for table in ("run", "inference", "orchestrator", "sampling", "eval", "trainer", "checkpoint"):
        assert getattr(again, table) == getattr(first, table)


@pytest.mark.parametrize("body", ["def f(:", "raise SystemExit(1)", "1 / 0", "import nowhere"])
def test_a_module_that_cannot_be_imported_is_an_error_of_the_configuration(body, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    name = f"broken{abs(hash(body))}"
    (tmp_path / f"{name}.py").write_text(body)
    with pytest.raises(RunError, match=f"'{name}:f' cannot be used as module:function: ") as e:
        configs.find(f"{name}:f")
    assert e.value.code == 2


@pytest.mark.parametrize("value", ["2024-05-01", "inf", "[1.0, nan]", "{ since = 12:00:00 }"])
def test_what_json_has_not_is_refused_before_a_server_starts(value, tmp_path):
    """Else the first batch, whose file says of which run it is, could not be written."""
    with pytest.raises(RunError, match="key 'env.args' = .*since.*without dates, inf and nan") as e:
        load(tmp_path, VF_RL, f"env.args.since={value}")
    assert e.value.code == 2


def test_the_saved_configuration_runs_again(tmp_path, monkeypatch):
    """Without what launch.sh added for that run alone, and with the modules beside the file that it is from."""
    first = load(tmp_path, VF_RL)
    own = 'inference.urls = ["http://127.0.0.1:27503",]\ntrainer.sync_backend = "gloo"'
    monkeypatch.setenv("ROLEMODEL_OVERRIDES", own)
    launched = load(tmp_path, VF_RL)
    assert launched.inference.urls == ["http://127.0.0.1:27503"] and launched.trainer.sync_backend == "gloo"
    monkeypatch.delenv("ROLEMODEL_OVERRIDES")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(configs.to_toml(launched))
    monkeypatch.setattr(sys, "path", [])
    again = load_config(tmp_path / "run" / "config.toml")
    assert again.inference == first.inference and again.trainer == first.trainer
    assert again.run.origin == str(tmp_path / "some.toml") and again.run == first.run
    assert sys.path[0] == str(tmp_path) and configs.to_toml(again) == configs.to_toml(first)
    changed = load_config(tmp_path / "run" / "config.toml", ["env.args.more=1"])  # its [[env]] is the only one
    assert changed.env[0].args == first.env[0].args | {"more": 1}


def test_another_run_of_that_name_is_refused_where_the_run_is_complete(tmp_path):
    (tmp_path / "run.toml").write_text("model = 'm'\nenv.id = 'x'\nmax_steps = 2\n")
    cfg = load_config(tmp_path / "run.toml", place := [f"output_dir={tmp_path}"])
    (run_directory(cfg) / "done").write_text("2")
    (run_directory(cfg) / "identity").write_text(json.dumps(identity(cfg)) + "\n")
    assert "already complete" in launch(tmp_path / "run.toml", *place).stdout
    assert "already complete" in launch(tmp_path / "run.toml", *place, "max_steps=1").stdout  # of two
    other = launch(tmp_path / "run.toml", *place, "seed=3", check=False)
    assert other.returncode == 2 and "another run_name" in other.stderr.splitlines()[-1]


def test_a_replay_of_other_batches_is_another_run(tmp_path):
    (tmp_path / "run.toml").write_text("model = 'm'\nenv.id = 'x'\n")
    none, first, other = [load_config(tmp_path / "run.toml", (), replay) for replay in (None, tmp_path, tmp_path / "x")]
    assert len({json.dumps(identity(cfg)) for cfg in (none, first, other)}) == 3
    refuse_other(identity(first), first, "it")
    with pytest.raises(RunError, match="it belongs to another run: replay was .*, now ") as e:
        refuse_other(identity(first), other, "it")
    assert e.value.code == 2


def test_a_cause_that_is_no_text_is_told(tmp_path):
    """A lone surrogate, as json.loads gives it of a model's tool call."""
    (tmp_path / "lossy.py").write_text(
        "from configs.runtime.role import DATA, RunError\ndef main(argv):\n    raise RunError(DATA, 'lost \\ud800')\n"
    )
    code = "from configs.runtime.role import run_role; run_role('x', 'lossy')"
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.returncode == 4 and "[x] exit=4 lost \\ud800" in done.stderr, done.stderr


def test_an_override_leaves_what_is_beside_it_and_holds_any_text(tmp_path):
    more = "[env]\nid = 'x'\nargs = {task = ['a'], config = {gcd = {most = 500, least = 2}, lcm = {most = 9}}}\n"
    cfg = load(tmp_path, f"model = 'm'\n{more}", "env.args.config.gcd.most=7")
    assert cfg.env[0].args == {"task": ["a"], "config": {"gcd": {"most": 7, "least": 2}, "lcm": {"most": 9}}}
    text = 'a\U0001f600 \x7f \\ " é'
    assert load(tmp_path, VF_RL, f"env.args.text={text}").env[0].args["text"] == text


@pytest.mark.parametrize("wrong", ["--rep=x", "--chec", "--chec=x"])
def test_options_that_are_no_options_are_refused(wrong, tmp_path, capsys):
    (tmp_path / "some.toml").write_text(VF_RL)
    with pytest.raises(SystemExit) as e:
        configs.arguments("doc", [str(tmp_path / "some.toml"), wrong])
    assert e.value.code == CONFIG and wrong.split("=")[0] in capsys.readouterr().err.splitlines()[-1]


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


FIXED = ["trainer.use_lora=true", "trainer.lora_rank=4", "trainer.lora_alpha=9", 'trainer.lora_target_modules=["a"]',
         "model=n", "seed=1", "env.id=wordle", "run_name=other"]  # fmt: skip


@pytest.mark.parametrize("override", FIXED)
def test_a_run_of_another_shape_is_another_run(override, make_cfg, tmp_path):
    found = identity(make_cfg())
    refuse_other(found, make_cfg("trainer.learning_rate=0.5"), tmp_path)
    with pytest.raises(
        RunError, match=f"belongs to another run: {override.partition('=')[0].partition('.id')[0]} was "
    ):
        refuse_other(found, make_cfg(override), tmp_path)


@pytest.mark.parametrize(
    "override",
    [
        "eval.hold_s=0",
        "trainer.micro_batch_size=0",
        "checkpoint.keep=0",
        "orchestrator.max_concurrent=0",
        "orchestrator.sampling.temperature=0",
    ],
)
def test_what_must_be_above_0(override, tmp_path):
    key, _, _ = override.partition("=")
    with pytest.raises(RunError, match=f"key '{key}' = 0.*: must be above 0"):
        load(tmp_path, BASE.format(model="m"), override)


SAME = {  # a name of vf-rl's or TRL's -> our key, and a value
    "max_new_tokens": ("orchestrator.sampling.max_tokens", 9),
    "group_size": ("orchestrator.rollouts_per_example", 32),
    "max_prompt_length": ("orchestrator.max_prompt_len", 77),
    "zero_truncated_completions": ("orchestrator.zero_truncated_completions", True),
    "async_generation_timeout": ("orchestrator.generation_timeout", 99.0),
    "top_k": ("orchestrator.sampling.top_k", 5),
    "min_p": ("orchestrator.sampling.min_p", 0.25),
    "repetition_penalty": ("orchestrator.sampling.repetition_penalty", 1.25),
    "save_total_limit": ("checkpoint.keep", 3),
    "kl_coef": ("trainer.beta", 0.125),
    "vllm_importance_sampling_clip_min": ("trainer.importance_args", {"low": 0.5}),
}


def test_every_old_name_stands_for_the_key_that_means_the_same(tmp_path):
    lines = [f"{name} = {json.dumps(value if name[:4] != 'vllm' else 0.5)}" for name, (_, value) in SAME.items()]
    lines.append(
        'vllm_importance_sampling_mode = "sequence_mask"\n[orchestrator.sampling]\nallow_biased_sampling = true'
    )
    flat = load(tmp_path, VF_RL_ARGS + "\n".join(lines)).flat
    assert {key: flat[key] for key, _ in SAME.values()} == dict(SAME.values())
