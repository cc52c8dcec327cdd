"""The toys of configs/: their warm-up fits their TOML and their environment, and no split has rows of another."""

import importlib
import os
import re
import subprocess
import sys
import types
from collections import Counter

import pytest
import torch
import transformers
from conftest import ROOT

from configs import DEFAULTS, load_config
from configs.environments.scoring import score
from configs.models import toy as tiny_model
from configs.runtime.role import CONFIG, RunError
from env import load_environment

TOYS = ["alphabet_sort", "gsm8k", "judge_style", "math_python", "reasoning_gym", "reverse_text", "reverse_vf",
        "wiki_search", "wordle"]  # fmt: skip


@pytest.mark.parametrize("name", TOYS)
def test_toy(name):
    more = ["env.args.allow_unsandboxed_python=true"] if name == "math_python" else []
    cfg = load_config(ROOT / "configs" / f"{name}.toml", more)
    assert cfg.flat["model"].startswith(".cache/") and cfg.run.prepare == "configs/models/toy.py"
    assert cfg.run.max_steps == 5 or name in ("alphabet_sort", "reverse_text", "wiki_search")  # these learn
    env = load_environment(cfg.env[0].id, cfg.env[0].args)
    train, held_out = ({str(row) for row in rows} for rows in (env.dataset, env.eval_dataset))
    assert train and held_out and not train & held_out

    task = importlib.import_module(f"configs.tasks.{cfg.env[0].id}")
    tokenizer = tiny_model.make_tokenizer(getattr(task, "TOKENS", ()))
    talks = task.demonstrations(128)
    assert len(talks) == 128 and talks == task.demonstrations(128)
    for talk in talks:
        assert name == "judge_style" or talk[: len(env.head)] == env.head
        (sample,) = tiny_model.tokenize_conversation(tokenizer, talk)  # one: canonical text does not fork
        assert len(sample["tokens"]) < cfg.run.max_seq_len and tokenizer.unk_token_id not in sample["tokens"]
        lens = Counter(turn for turn, is_said in zip(sample["turn"], sample["mask"]) if is_said)
        assert max(lens.values()) <= cfg.sampling.max_tokens
    prompts = [env.start(row)["prompt"] for row in env.dataset[:256] + env.eval_dataset[:256]]
    longest = max(len(tokenizer.apply_chat_template(prompt, return_dict=False)) for prompt in prompts)
    assert longest + 16 <= cfg.run.max_seq_len


SPLITS = {  # what makes the rows, how many of each split
    "alphabet_sort": ("rows", {"warmup": 4000, "train": 1000, "eval": 128}),
    "math_python": ("rows", {"warmup": 3000, "train": 4096, "eval": 128}),
    "reverse_text": ("rows", {"warmup": 95 * 64, "train": 8192, "eval": 256}),
    "wiki_search": ("people", {"warmup": 9000, "pages": 200}),  # of a (name, home) the name counts
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits_share_nothing(name):
    """Rows are made up from a seed; a checksum of each names its split."""
    function, nums = SPLITS[name]
    make = getattr(importlib.import_module(f"configs.tasks.{name}"), function)
    found = [{str(row if isinstance(row, dict) else row[0]) for row in make(split, num)} for split, num in nums.items()]
    assert [len(rows) for rows in found] == list(nums.values())
    assert len(set.union(*found)) == sum(nums.values())


TASK = """
from configs.tasks import reverse_text
from env import Rubric, SingleTurnEnv

WARM_UP_STEPS = 2
demonstrations = reverse_text.demonstrations


def load_environment(rows=()):
    return SingleTurnEnv(rows or reverse_text.rows("train", 8), rubric=Rubric([reverse_text.exact]))
"""


# Settings of the reinforcement learning, which the warm-up does not use.
RL = """
loss = "grpo"
loss_args = { epsilon = 0.1 }
importance = "importance:token_mask"
importance_args = { high = 2.0 }
minibatches = 2
gamma = 0.9
beta = 0.3
ref_sync_steps = 5
"""


def test_the_warm_up_uses_no_setting_of_the_reinforcement_learning(tmp_path, monkeypatch):
    commands = []
    popen = subprocess.Popen

    def start(command, **options):
        commands.append(command)
        return popen(["true"], **options)

    monkeypatch.setattr(tiny_model.subprocess, "Popen", start)
    (tmp_path / "quick.toml").write_text(f"model = 'm'\nmax_seq_len = 600\n[env]\nid = 'quick'\n[trainer]\n{RL}\n")
    final = tiny_model.warm_up(tmp_path / "quick.toml", tmp_path, 7, ["trainer.learning_rate=2e-4"])
    assert final == tmp_path / "warmup-replay-cispo" / "final"
    (command,) = commands
    assert command[1] == str(ROOT / "trainer.py") and command[-2:] == ["--replay", str(tmp_path / "batches")]
    cfg = load_config(command[2], command[3:-2])
    for name in tiny_model.RL_KEYS:
        assert getattr(cfg.trainer, name) == DEFAULTS[f"trainer.{name}"], name
    assert cfg.run.max_steps == 7 and cfg.run.max_seq_len == 600 and cfg.trainer.learning_rate == 2e-4
    assert cfg.run.origin == str(tmp_path / "quick.toml")


def test_progress_on_the_console_and_all_of_it_in_the_log(capsys):
    steps = [f"step {i:5d} | loss {10 - i / 10:.3g} | kl 0 | seconds 0.1\n" for i in range(95)]
    tiny_model.show_progress(["[trainer] ready\n", *steps], 95)
    rows = capsys.readouterr().out.splitlines()
    told = [row for row in rows if row.startswith("time: ")]
    assert len(told) == 10 and told[0] == "time: warm-up: 10 of 95 steps are done, loss 9.1"
    assert [row for row in rows if row not in told] == ["    [trainer] ready", *("    " + s[:-1] for s in steps)]


def test_what_the_model_says_of_unseen_demonstrations(tmp_path, capsys):
    """All tokens are equally likely to a model whose head is 0."""
    tokenizer = tiny_model.make_tokenizer()
    tiny_model.make_model(tmp_path, tokenizer, layers=1, hidden=64)
    policy = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.nn.init.zeros_(policy.lm_head.weight)
    policy.save_pretrained(tmp_path)
    talks = [[{"role": "user", "content": "ab"}, {"role": "assistant", "content": text}] for text in ("", "b")]
    whole, tokens = tiny_model.rates(tmp_path, talks)
    size = len(tokenizer)
    assert tokens == pytest.approx(1 / size) and whole == pytest.approx((1 / size + 1 / size**2) / 2)
    task = types.SimpleNamespace(demonstrations=lambda num: talks)
    tiny_model.report_rates(tmp_path, task, talks[:1])
    said = "result: warm-up: 0.000 of 1 unseen demonstrations are answered exactly as shown, and 0.010 of their tokens"
    assert said in capsys.readouterr().out
    tiny_model.report_rates(tmp_path, task, talks)
    assert "has none that was not trained on" in capsys.readouterr().out


def test_demonstrations_are_imitated_and_nothing_of_them_is_left_to_the_policy_gradient(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(tiny_model, "save_batch", lambda *batch: saved.append(batch))
    talk = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    tiny_model.write_demonstrations(tmp_path / "batches", tiny_model.make_tokenizer(), [talk] * 4, batch_size=2)
    assert len(saved) == 2
    for step, (path, sequences, info) in enumerate(saved):
        assert path.name == f"step_00000{step}.safetensors" and info == {"step": step, "offline": True}
        assert [(s["ce"], s["mask"]) for s in sequences] == [([0.0] * 5 + [1.0] * 3, [0] * 8)] * 2


@pytest.fixture
def prepare(tmp_path):
    """prepare("table.key=value", ...) -> CompletedProcess of models/toy.py for TASK, the model's directory."""
    (tmp_path / "quick.py").write_text(TASK)
    text = f'model = "{tmp_path}/models/quick"\noutput_dir = "{tmp_path}"\n[env]\nid = "quick"\n'
    (tmp_path / "quick.toml").write_text(f"{text}[trainer]\nmicro_batch_size = 1\n{RL}\n")

    def go(*overrides):
        toy = ROOT / "configs" / "models" / "toy.py"
        command = [sys.executable, str(toy), str(tmp_path / "quick.toml"), *overrides]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        return done, tmp_path / "models" / "quick"

    return go


@pytest.mark.parametrize("override, code, cause", [
    ("env.args.rows=nowhere.jsonl", 4, "env.id = 'quick': DataError: dataset: no file nowhere.jsonl"),
    ("env.id=nowhere", 2, "env.id = 'nowhere': ModuleNotFoundError"),
    ("env.id=think_env", 2, "think_env has no demonstrations"),
])  # fmt: skip
def test_prepare_tells_what_is_wrong_with_the_task_and_makes_nothing(prepare, override, code, cause):
    done, model = prepare(override)
    assert done.returncode == code and cause in done.stderr.splitlines()[-1], done.stderr
    assert not model.parent.exists()


def test_the_readmes_own_toy(tmp_path):
    """The module of configs/models/README.md."""
    text = (ROOT / "configs" / "models" / "README.md").read_text()
    task = types.ModuleType("doubled")
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], vars(task))
    talks = task.demonstrations(task.WARM_UP_STEPS * 64 + 256)
    env = task.load_environment()
    questions = [talk[0]["content"] for talk in talks] + [row["question"] for row in env.dataset + env.eval_dataset]
    assert len(set(questions)) == len(questions) > len(talks)
    tokenizer = tiny_model.make_tokenizer(task.TOKENS)
    for talk in talks[:100]:
        (s,) = tiny_model.tokenize_conversation(tokenizer, talk)
        assert tokenizer.unk_token_id not in s["tokens"] and sum(s["mask"]) <= 24
        assert score(env, [env.dataset[0]["question"]], [env.dataset[0]["answer"]]) == [1.0]


def test_a_model_is_made_again_if_its_task_has_changed(prepare, tmp_path, monkeypatch, capsys):
    """Or a module that the task imports, or the script. launch.py finds that out with sha256sum alone."""
    monkeypatch.delitem(sys.modules, "quick", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "quick_words.py").write_text("")
    (tmp_path / "quick.py").write_text("import quick_words\n" + TASK)
    model = tmp_path / "models" / "quick"
    made = []

    def warm_up(config, work, steps, more):
        made.append(steps)
        (work / "final").mkdir()
        return work / "final"

    monkeypatch.setattr(tiny_model, "warm_up", warm_up)
    monkeypatch.setattr(tiny_model, "report_rates", lambda *_: None)

    def is_stale():
        tiny_model.main([str(tmp_path / "quick.toml")])
        found = subprocess.getoutput(f"cd {ROOT} && LC_ALL=C sha256sum -c {str(model)!r}/made_from")
        assert ": OK" in found and len(list(model.parent.iterdir())) == 1
        return "FAILED" in found

    for file in (None, "quick.py", "quick_words.py"):
        if file:
            with open(tmp_path / file, "a") as f:
                f.write("# changed\n")
            found = subprocess.getoutput(f"cd {ROOT} && LC_ALL=C sha256sum -c {str(model)!r}/made_from")
            assert f"{tmp_path / file}: FAILED" in found and "configs/models/toy.py: OK" in found
        num = len(made)
        assert not is_stale() and not is_stale()
        assert len(made) == num + 1 and "is up to date" in capsys.readouterr().out
    assert "configs/tasks/reverse_text.py" in (model / "made_from").read_text()  # which the task imports
    (model / "made_from").unlink()  # a model of the user's
    with pytest.raises(RunError, match="exists and has no file made_from") as e:
        tiny_model.main([str(tmp_path / "quick.toml")])
    assert e.value.code == CONFIG and model.exists()


@pytest.mark.slow
@pytest.mark.long
def test_prepare_makes_the_model_and_leaves_nothing_else(prepare):
    done, model = prepare()
    assert done.returncode == 0, done.stderr
    told = " of 64 unseen demonstrations are answered exactly as shown"
    assert "time: warm-up: 2 of 2 steps are done" in done.stdout and told in done.stdout
    assert [path.name for path in model.parent.iterdir()] == ["quick"]
    assert transformers.AutoModelForCausalLM.from_pretrained(model).dtype == torch.float32
    assert transformers.AutoTokenizer.from_pretrained(model).chat_template == tiny_model.TEMPLATE


@pytest.mark.long
def test_a_model_of_another_shape(tmp_path):
    """configs/models/shaped.py at toy size: each id has a text, and the warm-up has taught the model something."""
    env = os.environ | {"SHAPE": "toy", "PYTHONPATH": str(ROOT)}
    more = [f"model={tmp_path / 'shaped'}", f"output_dir={tmp_path}"]
    command = [sys.executable, "configs/models/shaped.py", "configs/qwen3_shape.toml", *more]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "shaped")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "shaped", dtype=torch.float32)
    assert model.config.vocab_size == len(tokenizer) == 1000 and all(map(tokenizer.decode, range(8, 1000)))
    talk = [{"role": "user", "content": "bado"}, {"role": "assistant", "content": "odab"}]
    ids = tokenizer.apply_chat_template(talk, return_tensors="pt", return_dict=False)
    assert model(ids, labels=ids).loss < 5  # log(1000) is 6.9


def test_reverse_text_as_prime_rl_does_it(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "abcd"}\n{"prompt": "xyz"}\n')
    env = load_environment("reverse_text_qwen3", {"path": str(tmp_path / "rows.jsonl"), "num_eval": 1})
    said = ["<reversed_text>\nzyx\n</reversed_text>", "<reversed_text>zy</reversed_text>", "zyx"]
    assert score(env, ["xyz"] * 3, said) == [1.0, 0.8, 0.0]  # of 5 characters 4 are shared; no tag is no answer
