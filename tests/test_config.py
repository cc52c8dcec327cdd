"""rolemodel/config.py and rolemodel/run_directory.py: what a TOML and overrides mean, and what is refused."""

import io
import json
import re
from contextlib import nullcontext
from datetime import datetime
from decimal import Decimal

import numpy as np
import pandas as pd
import pytest
import smollm2
from conftest import BASE, ROOT
from PIL import Image

import orchestrator
import trainer
from env import SingleTurnEnv
from rolemodel import config, launch
from rolemodel.config import load_config, to_toml
from rolemodel.examples import fingerprint
from rolemodel.lookup import check_names, find_function
from rolemodel.role import ConfigError
from rolemodel.run_directory import cut_lines, keep_examples, write_config


@pytest.mark.parametrize("override, named", [
    ("trainer.lerning_rate=1", "'trainer.lerning_rate': unknown; did you mean 'trainer.learning_rate'"),
    ("max_steps=1.5", "'max_steps' = 1.5: must be of type int"),
    ("trainer.beta=-1", "must be at least 0"),
    ("env.ratio=0", "must be above 0"),
    ("orchestrator.rollouts_per_example=1", "rollouts_per_example: at least 2"),
    ("orchestrator.batch_size=18", "orchestrator.batch_size: a multiple"),
    ("orchestrator.generation_timeout=900", "generation_timeout: below watchdog"),
    ("orchestrator.sampling.repetition_penalty=0.9", "allow_biased_sampling"),
    ("orchestrator.sampling.top_p=0.9", "top_k: above 0 with top_p or min_p"),
    ("orchestrator.sampling.min_p=0.1", "top_k: above 0 with top_p or min_p"),
    ("orchestrator.sampling.top_k=65", "top_k: at most 64"),
    ("orchestrator.order_args.share=0.5", "without orchestrator.order"),
    ("trainer.lr_scheduler_type=step", "'trainer.lr_scheduler_type' = 'step': must be one of 'constant'"),
    ('inference.urls=["http://127.0.0.1.evil.org"]', "allow_remote"),
    ("trainer.sync_host=10.0.0.1", "allow_remote"),
    ("run_name=../there", "run_name"),
    ("max_steps=None", "max_steps=None"),
    ("tracker", "tracker: Expected"),
    ("trainer.max_grad_norm=inf", "'trainer.max_grad_norm' = inf"),
    ("env.args.day=2026-11-28", "'env.args' = .*date"),
    ("trainer.lr=1", "'trainer.lr': unknown; did you mean 'trainer.learning_rate'"),
    ("trainer.dtype=fp16", "'trainer.dtype' = 'fp16': must be one of 'bf16', 'fp32'"),
    ("trainer.use_lora=True", "TOML writes true"),
    ("trainer.lora_target_modules=[q_proj]", "not a TOML value: strings in lists and tables need quotes"),
    ("trainer.loss=cipso", "'trainer.loss' = 'cipso': .* did you mean 'cispo'"),
    ("trainer.loss=losses:gsppo", "losses.py has no 'gsppo'; did you mean 'gspo'"),
    ("trainer.loss=loses:gspo", "no module 'loses' .* did you mean 'losses'"),
    ("trainer.loss_args.epsilon=1", "'trainer.loss_args.epsilon': is not an argument; there is 'ratio_cap'"),
    ("trainer.script=trianer.py", "'trainer.script' = 'trianer.py': not in .*; did you mean 'trainer.py'"),
    ("orchestrator.advantage=maen", "'orchestrator.advantage' = 'maen': .* did you mean 'mean'"),
    ("orchestrator.order=orders:Dificulty", "orders.py has no 'Dificulty'; did you mean 'Difficulty'"),
    ("env.id=revers_text", "'env.id' = 'revers_text': there is no module .* did you mean 'reverse_text'"),
    ("env.id=foo.bar", "'env.id' = 'foo.bar': there is no module"),
    ("env.id=json", "'env.id' = 'json': .*json/__init__.py has no 'load_environment'"),
    ("env.args.num_evl=3", "'env.args.num_evl': is not an argument; did you mean 'num_eval'"),
    ("model=./nowhere", "'model' = './nowhere': there is no .*nowhere; there is 'LICENSE'"),
    ("prepare=configs/models/toi.py", "'prepare' = .*; did you mean 'toy.py'"),
    ("tracker=trackio", "'tracker' = 'trackio': .* pip install trackio"),
])  # fmt: skip
def test_what_is_refused(override, named, make_cfg):
    """Before anything is imported or started."""
    with pytest.raises(ConfigError, match=named):
        check_names(make_cfg(override))


def test_overrides(make_cfg):
    """A bare word is a string; open tables are merged at every depth, and {} clears them."""
    cfg = make_cfg("trainer.loss=grpo", "trainer.beta=1", "env.args.a.b=1", "env.args.a.c=x y", "run_name='7'")
    assert (cfg.trainer.loss, cfg.trainer.beta, cfg.env[0].args) == ("grpo", 1.0, {"a": {"b": 1, "c": "x y"}})
    assert type(cfg.trainer.beta) is float and cfg.run.run_name == "7" and make_cfg().run.run_name == "test"
    assert make_cfg("inference.args.port_x=1").inference.args["tensor_parallel_size"] == 1
    assert make_cfg("env.args.a=1", "env.args={}", "env.args.b=2").env[0].args == {"b": 2}
    assert [env.id for env in make_cfg('env=[{id = "a"}, {id = "b"}]', "env.ratio=2.0").env] == ["a", "b"]
    assert make_cfg("inference.allow_remote=true", "trainer.sync_host=10.0.0.1").trainer.sync_host == "10.0.0.1"


def test_several_environments(tmp_path):
    path = tmp_path / "two.toml"
    tables = '[[env]]\nid = "a"\nratio = 3\n[[env]]\nid = "a"\nname = "b"\nargs = {x = 1}\n'
    path.write_text(BASE.format(model="m").replace('[env]\nid = "reverse_text"\n', tables))
    cfg = load_config(path, ["env.args.y=2"])
    found = [(env.id, env.name, env.ratio, env.args) for env in cfg.env]
    assert found == [("a", "a", 3.0, {"y": 2}), ("a", "b", 1.0, {"x": 1, "y": 2})]
    path.write_text(path.read_text().replace('name = "b"', ""))
    with pytest.raises(ConfigError, match="a name of its own"):
        load_config(path)


def test_a_script_makes_no_other_model_than_its_own(make_cfg, tmp_path):
    hub = "Qwen/Qwen3-0.6B"
    with pytest.raises(ConfigError, match="key prepare: model must begin with . or /"):
        make_cfg("prepare=x.py", model=hub)
    assert make_cfg("prepare=x.py", model=f"./{hub}").run.prepare == "x.py"
    path = tmp_path / "test.toml"
    path.write_text('prepare = "x.py"\n' + BASE.format(model=tmp_path / "other"))
    for override in (f"model={hub}", f'model = "{hub}"'):
        cfg = load_config(path, [override])
        assert cfg.run.model == hub and not cfg.run.prepare
    with pytest.raises(ConfigError, match="/other': this script makes SmolLM2-135M-Instruct"):
        smollm2.main([str(path)])
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_config.json").touch()
    with pytest.raises(ConfigError, match="model: an adapter; tools/export.py --merge"):
        load_config(path)


def test_what_is_resolved_is_the_same_configuration(make_cfg, tmp_path, monkeypatch):
    """The config.toml of a run stands for the file that it was made from: modules next to that one are found."""
    cfg = make_cfg("env.args.keys=[1]", "env.args.n.a=b", 'chat_template=ä "b"')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(to_toml(cfg))
    assert vars(load_config(tmp_path / "run" / "config.toml")) == vars(cfg)
    monkeypatch.setattr(config.sys, "path", [])
    assert load_config(tmp_path / "run" / "config.toml").run.origin == str(tmp_path / "test.toml")
    assert config.sys.path == [str(tmp_path), str(ROOT / "configs")]
    monkeypatch.setenv("ROLEMODEL_OVERRIDES", "trainer.sync_backend = 'gloo'")  # of this machine, not of the run
    found = make_cfg()
    assert found.trainer.sync_backend == "gloo" and 'sync_backend = ""' in to_toml(found)


def test_what_a_key_names(tmp_path, own_modules):
    (tmp_path / "mine.py").write_text("def loss(): return 1")
    assert find_function("mine:loss")() == 1 and find_function("losses:gspo") and find_function("a", {"a": 2}) == 2
    (tmp_path / "orders").mkdir()
    assert find_function("orders:Difficulty")  # a mere folder replaces nothing
    (tmp_path / "losses.py").write_text("def gspo(): return 2\ndef mine(): return 3")
    assert find_function("losses:dppo") and find_function("losses:mine")() == 3
    with pytest.raises(ConfigError, match="losses.py and rolemodel/losses.py have it: rename yours"):
        find_function("losses:gspo")


SERVER = ['inference.urls=["http://127.0.0.1:9"]']


def test_a_directory_that_is_not_a_runs_is_left_alone(tmp_path, models):
    """A user's folder of experiments, whose names are those of a run's own files."""
    files = "config.toml adapters/mine.safetensors tmp/notes.txt draft.tmp metrics.jsonl final/mine.txt".split()
    for name in files:
        (tmp_path / "foo" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "foo" / name).write_text(BASE.format(model=models["untied"]))
    for role in (launch, orchestrator, trainer):
        with pytest.raises(ConfigError, match="foo has files and is not a run's directory"):
            role.main([f"{tmp_path}/foo/config.toml", f"output_dir={tmp_path}", "run_name=foo", *SERVER])
    found = {path: path.read_text() for path in tmp_path.glob("foo/**/*") if path.is_file()}
    assert found == {tmp_path / "foo" / name: BASE.format(model=models["untied"]) for name in files}


def test_a_directory_belongs_to_one_run(make_cfg, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    write_config(tmp_path, to_toml(make_cfg("seed=1")))
    write_config(tmp_path, to_toml(make_cfg("env.args={ a = 1, b = 2 }")))  # it has not begun
    (tmp_path / "checkpoints" / "step_000001").mkdir()
    free = ("max_steps=7", "eval.every=3", "inference.gpus=2", "trainer.sync_timeout_s=9", "prepare=x.py")
    same = ("env.args.b=2", "env.args.a=1", *free)
    write_config(tmp_path, to_toml(make_cfg(*same)))
    others = ("seed=1", "env.args.a=2", "trainer.loss=grpo", "trainer.learning_rate=2e-3", "max_seq_len=32")
    for other in (*others, "eval.temperature=0.5", "eval.max_tokens=9"):  # instructor #2586
        key = other.partition("=")[0].removesuffix(".args.a")
        with pytest.raises(ConfigError, match=f"{key} was .*, now .* choose another run_name, or --from"):
            write_config(tmp_path, to_toml(make_cfg(*same, other)))


def test_a_schedule_that_max_steps_is_a_part_of_stays(make_cfg, tmp_path):
    """speculators #900, composer #1384."""
    (tmp_path / "checkpoints" / "step_000006").mkdir(parents=True)
    by_ratio, by_steps = "trainer.warmup_ratio=0.1", "trainer.warmup_steps=10"
    kinds = {"linear": 0, "cosine": 0, "constant": 1, "constant_with_warmup": 1}
    cases = [(f"trainer.lr_scheduler_type={kind}", stays) for kind, stays in kinds.items()]
    for own, may_change in [*cases, (by_ratio, 0), (by_steps, 0)]:
        (tmp_path / "config.toml").write_text(to_toml(make_cfg("max_steps=7", own)))
        refused = pytest.raises(ConfigError, match="max_steps was 7, now 20, .*trainer.lr_scheduler_type, warm")
        with nullcontext() if may_change else refused:
            write_config(tmp_path, to_toml(make_cfg("max_steps=20", own)))


def test_a_run_has_the_rows_that_it_began_with(tmp_path):
    """verl #7816, NeMo-RL #2519: other rows in the same file, and a gain between two evaluation sets. Objects count,
    too, but for their addresses."""
    objects = [np.zeros(2000), np.float32(1), datetime(2026, 1, 1), Decimal(2), {3}, None]
    for start, text in ((0, "b"), (0, "c"), (3, "c"), (3, "b")):
        env = SingleTurnEnv([{"question": "a", "info": {"x": objects, "y": lambda: 0}}], [{"question": text}])
        other = pytest.raises(ConfigError, match="rows.json: not what the run has begun with")
        with other if (start, text) == (3, "b") else nullcontext():
            keep_examples(tmp_path, {"task": env}, start)
    for i, new in enumerate((np.eye(1, 2000, 1000)[0], np.float32(2), datetime(2026, 1, 2), Decimal(3), {4})):
        rows = [{"question": "a", "info": {"x": [*objects[:i], new, *objects[i + 1 :]], "y": lambda: 0}}]
        with pytest.raises(ConfigError, match="rows.json: not what the run has begun with"):
            keep_examples(tmp_path, {"task": SingleTurnEnv(rows, [{"question": "c"}])}, 3)


class Case:
    def __init__(self, x):
        self.x = x


def test_a_fingerprint_is_of_the_content():
    """lm-evaluation-harness #3331. What is made twice is equal, also images from files of different names."""

    def image(color, path):
        Image.new("RGB", (2, 2), color).save(path := io.BytesIO(), "PNG")
        return Image.open(path)

    makers = [lambda x: image(x, 0), Case, lambda x: {Case(x)}, lambda x: {(x, x): 1}, lambda x: np.array([Case(x)])]
    for make in [*makers, lambda x: pd.DataFrame({"a": [*range(99), x, *range(99)]})]:
        one, same, other = (fingerprint([{"question": "a", "x": make(x)}]) for x in (1, 1, 2))
        assert one == same != other


def test_logs_are_cut_where_a_run_goes_on(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": step, "x": "\u2028\x85"}, ensure_ascii=False) + "\n" for step in (0, 0, 1, 2, 10)]
    path.write_text("".join(lines) + '{"step": 1, "ha')
    cut_lines(path, 10)
    assert path.read_text() == "".join(lines[:4])


def test_every_key_is_read_somewhere():
    files = [*ROOT.glob("*.py"), *ROOT.glob("rolemodel/**/*.py"), *ROOT.glob("tools/*.py")]
    code = "\n".join(path.read_text() for path in files)
    sampling = "orchestrator.sampling."  # sent to vLLM as a whole
    for key in config.DEFAULTS:
        assert key.startswith(sampling) or re.search(rf"\.{key.split('.')[-1]}\b", code), key
