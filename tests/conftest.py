"""Fixtures: tiny models made on the spot, configurations, one fake server per session."""

import asyncio
import importlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "configs"), str(ROOT / "configs/models")]
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "DO_NOT_TRACK": "1"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
os.environ |= dict.fromkeys(["NO_PROXY", "no_proxy"], "127.0.0.1")  # or a proxy is asked for the tests' servers
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
FAKE_SERVER = f"{Path(sys.executable).name} tests/fake_vllm.py"  # SERVER is split at spaces, which a path may have

import httpx
import numpy as np
import psutil
import pytest
import torch
import toy
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer

import orchestrator
import trainer
from orchestrator import Sequence, save_batch
from rolemodel import lookup
from rolemodel.config import load_config
from rolemodel.machine import choose_ports
from rolemodel.run_directory import run_directory

torch.set_num_threads(1)
TOKENS = ['<tool_call>\n{"name": "double", "arguments": {"a": ', "}}\n</tool_call>"]
BASE = """
model = "{model}"
max_seq_len = 64
[env]
id = "reverse_text"
[orchestrator]
batch_size = 16
rollouts_per_example = 4
[orchestrator.sampling]
max_tokens = 16
[trainer]
dtype = "fp32"
use_lora = false
learning_rate = 1e-3
warmup_steps = 0
gradient_checkpointing = false
micro_batch_size = 8
"""


CASES = os.environ.setdefault("CASES", time.strftime("%G-W%V"))  # a variable, so that pytest's workers have the same


def pytest_report_header():
    return f"parametrized cases of CASES={CASES}: others next week, all with --all"


def some(cases, num):
    """All cases with --all; otherwise `num` of them, others every week."""
    chosen = set(map(str, random.Random(CASES).sample(list(cases), num)))
    return [case if str(case) in chosen else pytest.param(case, marks=pytest.mark.long) for case in cases]


# Many containers forbid them. This asks the kernel, not the code under test.
trial = "unshare --user --map-root-user --mount --net --pid --ipc --fork mount -t tmpfs none /tmp"
needs_namespaces = pytest.mark.skipif(os.system(f"{trial} 2> /dev/null") != 0, reason="no namespaces here")


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also what takes long: learning runs, the whole kill matrix")


SLOWEST = "test_launch.py test_vllm.py test_models.py test_trainer.py test_orchestrator.py".split()  # they begin first


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: SLOWEST.index(item.path.name) if item.path.name in SLOWEST else len(SLOWEST))
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("long")])
        items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Paths of random two-layer character models: "untied", "tied", and "tools", which is tied and knows TOKENS."""
    paths = {name: tmp_path_factory.mktemp("models") / name for name in ("untied", "tied", "tools")}
    for name, path in paths.items():
        tokenizer = toy.make_tokenizer(TOKENS if name == "tools" else ())
        toy.make_model(path, tokenizer, layers=2, hidden=64, tied=name != "untied")
    return paths


@pytest.fixture
def make_cfg(tmp_path, models):
    """make_cfg("trainer.loss=grpo", ..., model=path) -> a checked configuration; its file is tmp_path / "test.toml"."""

    def make(*overrides, model=None):
        path = tmp_path / "test.toml"
        path.write_text(BASE.format(model=model or models["untied"]))
        return load_config(path, [f"output_dir={tmp_path}", *overrides])

    return make


@pytest.fixture
def own_modules(tmp_path, monkeypatch):
    """Modules in tmp_path are found, and forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setattr(lookup, "BESIDE", [tmp_path])
    importlib.invalidate_caches()
    yield
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def distributed():
    trainer.start_distributed(load_config(ROOT / "configs" / "reverse_text.toml"))


# --- batches ----------------------------------------------------------------------------------------------------------


def make_sequences(num=12, seed=0, vocab=100, longest=24, group=4):
    """Random sequences, with old_logp around -log(vocab), where a random model is. Those of a group share a prompt; the
    second begins as the first one whole or is its beginning, and the third has a token more than the prompt in common
    with the second."""
    rng = np.random.default_rng(seed)
    sequences = []
    prompt = 0  # its length
    for i in range(num):
        prompt = prompt if i % group else rng.integers(1, 7)
        size = prompt + rng.integers(1, longest - 5)
        mask = np.arange(size) >= prompt
        s = Sequence(rng.integers(0, vocab, size), mask, turn=np.zeros(size, np.int32))
        if i % group:
            before = sequences[-1].tokens[: {1: None, 2: prompt + 1}.get(i % group, prompt)]
            s.tokens[: len(before)] = before[:size]
        s.old_logp = np.where(mask, -4.6 + rng.uniform(-0.5, 0.5, size), np.nan).astype(np.float32)
        s.adv = np.float32(rng.normal()) * mask
        s.info = {"env": "test", "example": i // group, "slot": i // group, "attempt": 0, "member": i % group}
        s.info |= {"reward": float(rng.random()), "temperature": 1.0, "staleness": 0, "version": 0, "num_turns": 1}
        sequences.append(s)
    return sequences


def write_batches(folder, steps=1, change=lambda sequences: None, **shape):
    """`steps` files of random batches, changed by a function of their sequences."""
    folder.mkdir(parents=True, exist_ok=True)
    for step in range(steps):
        sequences = make_sequences(seed=step, **shape)
        change(sequences)
        info = {"max_tokens": 16, "order": {}, "metrics": {}}
        save_batch(folder / f"step_{step:06d}.safetensors", sequences, info)
    return folder


class Read(NamedTuple):
    info: dict
    sequences: list[dict]  # numbers and words of each, and arrays of its fields


def all_batches(run_dir):
    """The contents of a run's batch files."""
    found = []
    for path in sorted(Path(run_dir, "batches").glob("step_*.safetensors")):
        with safe_open(path, "np") as file:
            fields = {name: file.get_tensor(name) for name in file.keys()}
            about = {name: json.loads(text) for name, text in file.metadata().items()}
        ends = np.cumsum(fields.pop("lens"))[:-1]
        for name, values in fields.items():
            for s, part in zip(about["sequences"], np.split(values, ends), strict=True):
                s[name] = part
        found.append(Read(about["info"], about["sequences"]))
    return found


def sent(policy, dtype, only_lora=False):
    """{name: tensor} of all that a sync broadcasts."""
    blocks = trainer.stream_weights(policy.model, dtype, only_lora)
    return {name: w.clone() for block in blocks for name, w in block.items()}


def final(run_dir):
    """{name: tensor} of what a run has learned."""
    return load_file(next(run_dir.glob("final/*model.safetensors")))


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def append(path, rows):
    with open(path, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


# --- processes --------------------------------------------------------------------------------------------------------


def launch(toml, *overrides, timeout=300, **env):
    """Runs launch.sh with the fake server, and without tools/watch.py, whose pictures take half of a short run's time
    (WATCH="tools/watch.py" brings it back). Returns the CompletedProcess."""
    env = os.environ | {"SERVER": FAKE_SERVER, "WATCH": "", "PET_NNODES": "2"} | env  # schedulers set the last
    command = ["bash", str(ROOT / "launch.sh"), str(toml), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def free_port():
    """Not one that the kernel hands out, which another process may have by the time it is used."""
    return choose_ports(load_config(ROOT / "configs" / "reverse_text.toml").inference)[0]


def start(command, log, **env):
    """Starts a command in a process group of its own. Returns its Popen."""
    with open(log, "w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | env, cwd=ROOT, start_new_session=True)


def wait_until(condition, process=None, said=lambda: ""):
    """Fails when the process ends, or is given up; said() is what it said."""
    deadline = time.monotonic() + 600
    while not condition():
        has_ended = process and process.poll() is not None
        assert not has_ended and time.monotonic() < deadline, said()
        time.sleep(0.05)


def having(word):
    """The processes that have this among their words: forks keep them."""
    others = psutil.process_iter(["cmdline"])
    return [p for p in others if word in " ".join(p.info["cmdline"] or ()) and p.pid != os.getpid()]


@contextmanager
def serving(command, port, log, **env):
    """The address of a server, while it runs."""
    process = start([*command, "--port", str(port)], log, **env)
    url = f"http://127.0.0.1:{port}"

    def is_up():
        with suppress(httpx.TransportError):
            return httpx.get(f"{url}/health").is_success

    try:
        wait_until(is_up, process, lambda: Path(log).read_text()[-3000:])
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="session")
def fake_servers(models, tmp_path_factory):
    """fake_servers(**FAKE) -> the address of the session's fake server, which from now on has these options."""
    command = [sys.executable, "tests/fake_vllm.py", "--model", str(models["untied"]), "--served-model-name", "run"]
    command += ["--dtype", "float32", "--max-model-len", "64"]
    with serving(command, free_port(), tmp_path_factory.mktemp("fake") / "log") as url:

        def get(**fake):
            httpx.post(f"{url}/fake", json=fake)
            return url

        yield get


# --- whole runs -------------------------------------------------------------------------------------------------------

RUN_TOML = """
model = "{model}"
run_name = "run"
output_dir = "{out}"
max_steps = {steps}
max_seq_len = 64
orchestrator = {{ batch_size = 16, rollouts_per_example = 4, max_error_share = 1.0, sampling = {{ max_tokens = 6 }} }}
trainer = {{ dtype = "fp32", use_lora = false, learning_rate = 1e-3, gradient_checkpointing = false }}
{env}
"""


def write_run(path, model, steps, env):
    """env: the arguments of think_env, or [env] tables."""
    env = env if env.lstrip().startswith("[") else f'[env]\nid = "think_env"\nargs = {env}'
    (path / "run.toml").write_text(RUN_TOML.format(model=model, out=path, steps=steps, env=env))
    return path / "run.toml"


def orchestrate(cfg, train_s=0.0):
    """Runs orchestrator.run in this process, next to a stand-in for the trainer that declares version n + 1 live once
    batch n exists. Returns the run's directory."""
    run_dir = run_directory(cfg)
    over = threading.Event()

    def train():
        for n in range(cfg.run.max_steps + 1):
            while n and not (run_dir / "batches" / f"step_{n - 1:06d}.safetensors").exists():
                if over.wait(0.01):
                    return
            over.wait(train_s if n else 0)
            (run_dir / "version.new").write_text(str(n))
            os.replace(run_dir / "version.new", run_dir / "version")

    thread = threading.Thread(target=train)
    thread.start()
    try:
        asyncio.run(orchestrator.run(cfg))
    except BaseExceptionGroup as e:
        while isinstance(e, BaseExceptionGroup):
            e = e.exceptions[0]
        raise e from None
    finally:
        over.set()
        thread.join()
    return run_dir


@pytest.fixture
def run(tmp_path, models, fake_servers, monkeypatch):
    """run(steps, env, *overrides, fake={...}) -> run directory: orchestrate() with the fake server, whose answers are
    chance unless fake has uniform = False. env: as in write_run, or an environment."""

    def go(steps, env, *overrides, fake=None, template="", train_s=0.0):
        if not isinstance(env, str):
            monkeypatch.setattr(orchestrator, "load_environment", lambda id, args, found=env: found)
            env = "{}"
        toml = write_run(tmp_path, models["untied"], steps, env)
        url = fake_servers(**{"uniform": True, "template": template} | (fake or {}))
        monkeypatch.setenv("ROLEMODEL_RUN_ID", "run")
        return orchestrate(load_config(toml, [f'inference.urls=["{url}"]', *overrides]), train_s)

    go.tokenizer = AutoTokenizer.from_pretrained(models["untied"])
    return go
