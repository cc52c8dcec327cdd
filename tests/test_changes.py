"""The examples of README.md and docs/ are taken out of the documents: patches apply to files that have
moved, and with each example two batches are sampled, trained on, and resumed after the first."""

import os
import re
import subprocess
import sys
import types

import conftest
import pytest
import torch
from conftest import ROOT, all_batches, lines, write_batches
from plain_server import PlainServer
from ranks import replays
from safetensors.torch import load_file

BASE = """
import itertools
from env import Rubric, SingleTurnEnv

def load_environment():
    solved = itertools.cycle((1.0, 0.0, 0.0, 0.0))
    return SingleTurnEnv([{"question": str(i)} for i in range(20)], rubric=Rubric([lambda: next(solved)]))
"""
EXAMPLES = {}  # {title: its blocks [(kind, text), ...]}
LOOP = "".join((ROOT / "tools/loop.py").read_text().split())  # the README quotes it
for name in ("README.md", "docs/changes.md", "docs/tasks.md"):
    for section in re.split(r"^## ", (ROOT / name).read_text(), flags=re.MULTILINE)[1:]:
        found = re.findall(r"```(diff|python)\n(.*?)```", section, re.DOTALL)
        if found := [(kind, text) for kind, text in found if "".join(text.split()) not in LOOP]:
            EXAMPLES[section.partition("\n")[0]] = found
(NOTEBOOK,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)


def judges(body):
    """Answers as a teacher and as a classifier."""
    tables = [None, *({str(token): {"logprob": -2.0}} for token in body.get("prompt", [])[1:])]
    return {"choices": [{"prompt_logprobs": tables}], "data": [{"probs": [0.5]}]}


@pytest.fixture
def model_url():
    with PlainServer(judges, also=["prompt_logprobs"]) as server:
        yield server.url.removesuffix("/v1")


def as_role(path, monkeypatch):
    """The role of this name is from now on what this file says."""
    module = types.ModuleType(path.stem)
    monkeypatch.setitem(sys.modules, path.stem, module)
    exec(compile(path.read_text(), path, "exec"), vars(module))
    return module


@pytest.mark.parametrize("title", EXAMPLES)
def test_an_example(title, run, model_url, own_modules, monkeypatch, tmp_path):
    (tmp_path / "base.py").write_text(BASE)
    settings = {"env.id": "base", "orchestrator.advantage": "think_env:chance"}
    patched = tmp_path / "patched"
    patched.mkdir()
    for name in ("trainer.py", "orchestrator.py"):
        (patched / name).write_text("\n" * 30 + (ROOT / name).read_text())  # a patch finds its place by its context
    for kind, text in EXAMPLES[title]:
        if kind == "diff":
            how = {"env": os.environ | {"LC_ALL": "C"}, "capture_output": True, "text": True}
            done = subprocess.run(["git", "apply", "-v"], input=text, cwd=patched, **how)
            assert "Applied patch" in done.stderr, done.stderr
            continue
        name, keys = re.match(r"# (\w+)\.py: (.*)", text).groups()
        (tmp_path / f"{name}.py").write_text(text.replace("http://127.0.0.1:9000", model_url))
        settings |= re.findall(r'([\w.]+) = "?([\w.:]+)', keys)
    monkeypatch.setattr(conftest, "orchestrator", as_role(patched / "orchestrator.py", monkeypatch))
    as_role(patched / "trainer.py", monkeypatch)
    # 1. Three batches, which have what the example adds.
    keys = [f"{key}={value}" for key, value in settings.items() if key != "env.id"]
    agent = ("max_seq_len=256", "inference.args.enable_auto_tool_choice=true", "orchestrator.max_staleness=0")
    run_dir = run(3, f'[env]\nid = "{settings["env.id"]}"', *agent, *keys, fake={"stop": True, "max_model_len": 256})
    batches = all_batches(run_dir)
    assert len(batches) == 3
    if "Replay" in title:
        assert max(s["staleness"] for s in batches[2].sequences) > 0
    if "temperature" in title:
        assert [{s["temperature"] for s in sequences} for _, sequences in batches] == [{1.0}, {0.99}, {0.98}]
    # 2. They are trained on, and resumed bit for bit.
    found = []
    for name, steps in (("whole", (3,)), ("half", (2, 3))):
        for num in steps:
            replays([[tmp_path / "run.toml", run_dir / "batches", f"run_name={name}", f"max_steps={num}", *keys]])
        (folder,) = tmp_path.glob(f"{name}-replay-*")
        found.append([load_file(folder / "final" / "model.safetensors"), lines(folder / "metrics.jsonl")])
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    assert [line["loss"] for line in found[0][1]] == [line["loss"] for line in found[1][1]]


def test_from_python(make_cfg, tmp_path):
    make_cfg()
    replays([[tmp_path / "test.toml", write_batches(tmp_path / "saved", 2), f"output_dir={tmp_path}"]])
    run_dir = tmp_path / "test-replay-cispo"
    write_batches(run_dir / "batches", 2)
    space = {}
    with PlainServer(lambda body: "served") as server:
        code = NOTEBOOK.replace("outputs/reverse_text", str(run_dir)).replace("http://127.0.0.1:8000/v1", server.url)
        replays([[code]], lambda argv: exec(argv[0], space))
    assert space["step"] == 2 and space["reply"].choices[0].text == "served" and len(space["text"]) > 1
    assert space["metrics"]["policy/logp"] != lines(run_dir / "metrics.jsonl")[1]["policy/logp"]  # once more
