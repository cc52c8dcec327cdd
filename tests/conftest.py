"""Fixtures: tiny models made on the spot, configurations, batches, and one real vLLM per test session."""

import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "bench")]
os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "DO_NOT_TRACK": "1"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}

import httpx
import pytest
import torch

import orchestrator
from configs import load_config
from configs.models import toy
from configs.runtime.directory import run_directory
from orchestrator import save_batch
from trainer import load_batch, start_distributed

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

GIT = ["git", "rev-parse", "HEAD"] if shutil.which("git") else ["true"]
COMMIT = subprocess.run(GIT, cwd=ROOT, capture_output=True, text=True).stdout


def some(cases, num):
    """All with --all; otherwise `num` of them, chosen by the commit."""
    chosen = set(map(str, random.Random(COMMIT).sample(list(cases), num)))
    return [case if str(case) in chosen else pytest.param(case, marks=pytest.mark.long) for case in cases]


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also what takes long: learning runs")


# They begin first, so that none is left to one worker at the end.
SLOWEST = ("test_crash.py", "test_trainer.py", "test_vllm.py", "test_proof.py", "test_first_hour.py")


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: SLOWEST.index(item.path.name) if item.path.name in SLOWEST else len(SLOWEST))
    if not config.getoption("--all"):
        keep = [item for item in items if not item.get_closest_marker("long")]
        config.hook.pytest_deselected(items=[item for item in items if item not in keep])
        items[:] = keep


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


@pytest.fixture(scope="session", autouse=True)
def distributed():
    start_distributed(load_config(ROOT / "configs" / "reverse_text.toml"))


def make_sequences(num=12, seed=0, vocab=102, longest=24, group=4):
    """Random sequences in groups; old_logp around -log(vocab), where a random model is. Some prompts have one token."""
    rng = random.Random(seed)
    sequences = []
    for i in range(num):
        prompt = rng.randint(1, 6)
        answer = rng.randint(1, longest - 6)
        sequences.append({
            "tokens": [rng.randrange(vocab) for _ in range(prompt + answer)], "mask": [0] * prompt + [1] * answer,
            "old_logp": [0.0] * prompt + [-4.6 + rng.uniform(-0.5, 0.5) for _ in range(answer)],
            "turn": [0] * (prompt + answer), "reward": rng.random(), "group": i // group, "rollout": i % group,
            "temperature": 1.0, "staleness": 0, "versions": [0, 0], "env": "test", "num_turns": 1,
        })  # fmt: skip
    return sequences


@pytest.fixture
def batches(tmp_path):
    """batches(3) -> a directory of 3 random batch files."""

    def make(num, **kwargs):
        path = tmp_path / "saved"
        path.mkdir(exist_ok=True)
        for n in range(num):
            info = {"run": {"run": "test"}, "step": n, "max_tokens": 16}
            save_batch(path / f"step_{n:06d}.safetensors", make_sequences(seed=n, **kwargs), info)
        return path

    return make


def run_trainer(toml, *args, ranks=1, timeout=120, check=True):
    """Runs trainer.py in its own process or by torchrun. Returns the CompletedProcess."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command = [*(launch if ranks > 1 else [sys.executable]), str(ROOT / "trainer.py"), str(toml), *map(str, args)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, cwd=ROOT)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


WATCHED = {"WATCH": "tools/watch.py"}


def launch(toml, *overrides, timeout=90, check=True, **env):
    """Runs launch.sh with the fake server, and without tools/watch.py, whose curves and page take half of a short run's
    processor time; WATCHED brings it back. Returns the CompletedProcess."""
    env = os.environ | {"SERVER": f"{sys.executable} {ROOT / 'tests' / 'fake_vllm.py'}", "WATCH": ""} | env
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    command = ["bash", str(ROOT / "launch.sh"), str(toml), *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def start(command, log, **env):
    """Starts a command in a process group of its own. Returns its Popen."""
    with open(log, "w") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | env, cwd=ROOT, start_new_session=True)


def wait_for(url, process, log, timeout_s=240):
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        assert process.poll() is None and time.monotonic() < deadline, Path(log).read_text()[-3000:]
        time.sleep(0.2)


def stop(process):
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(20)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


@pytest.fixture(scope="session")
def fake_servers(models, tmp_path_factory):
    """fake_servers(template) -> url of a fake server with that chat template; one process for each."""
    urls, processes = {}, []

    def get(template=""):
        if template not in urls:
            port = free_port()
            log = tmp_path_factory.mktemp("fake") / "log"
            command = [sys.executable, "tests/fake_vllm.py", "--model", str(models["untied"]), "--port", str(port)]
            command += ["--served-model-name", "run", "--dtype", "float32", "--max-model-len", "64"]
            command += ["--enable-auto-tool-choice", *(["--chat-template", template] if template else [])]
            processes.append(start(command, log))
            urls[template] = f"http://127.0.0.1:{port}"
            wait_for(urls[template], processes[-1], log)
        return urls[template]

    yield get
    for process in processes:
        stop(process)


# --- whole runs -------------------------------------------------------------------------------------------------------

RUN_TOML = """
model = "{model}"
run_name = "run"
output_dir = "{out}"
max_steps = {steps}
max_seq_len = 64
{env}
[orchestrator]
batch_size = 16
rollouts_per_example = 4
max_error_share = 1.0
[orchestrator.sampling]
max_tokens = 6
[trainer]
dtype = "fp32"
use_lora = false
learning_rate = 1e-3
gradient_checkpointing = false
"""


def write_run(path, model, steps, env):
    """env: the arguments of think_env, or [env] tables."""
    env = env if env.lstrip().startswith("[") else f'[env]\nid = "think_env"\nargs = {env}'
    (path / "run.toml").write_text(RUN_TOML.format(model=model, out=path, steps=steps, env=env))
    return path / "run.toml"


@pytest.fixture
def launched(tmp_path, models):
    """launched(steps, env, *overrides, **environment) -> CompletedProcess and run directory of a whole launch.sh."""

    def go(steps, env, *overrides, check=True, **variables):
        toml = write_run(tmp_path, models["untied"], steps, env)
        return launch(toml, *overrides, check=check, **variables), tmp_path / "run"

    return go


def orchestrate(cfg, train_s=0.0):
    """Runs orchestrator.run in this process, beside a stand-in for the trainer that declares version n + 1 live once
    batch n exists. Returns the run's directory."""
    run_dir = run_directory(cfg)
    over = threading.Event()

    def train():
        for n in range(cfg.run.max_steps + 1):
            while n and not (run_dir / "batches" / f"step_{n - 1:06d}.safetensors").exists():
                if over.wait(0.01):
                    return
            time.sleep(train_s if n else 0)
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
    """run(steps, env, *overrides, fake={...}) -> run directory: orchestrate() with a fake server."""

    def go(steps, env, *overrides, fake=None, template="", train_s=0.0):
        write_run(tmp_path, models["untied"], steps, env)
        url = fake_servers(template)
        httpx.post(f"{url}/fake", json=fake or {})
        cfg = load_config(tmp_path / "run.toml", [f'inference.urls=["{url}"]', *overrides])
        monkeypatch.setenv("ROLEMODEL_RUN_ID", "run")
        return orchestrate(cfg, train_s)

    from transformers import AutoTokenizer

    go.run_dir = tmp_path / "run"
    go.tokenizer = AutoTokenizer.from_pretrained(models["untied"])
    return go


def all_batches(run_dir):
    return [load_batch(path) for path in sorted((run_dir / "batches").glob("step_*"))]


class VLLM:
    """A real vLLM server. Stops only what it started."""

    def __init__(self, model, log, *flags, max_len=256, dtype="float32", receiver="receivers.StaleHead"):
        self.port = free_port()
        self.name = "real"
        self.log = log
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", self.name]
        command += ["--dtype", dtype, "--enforce-eager", "--no-enable-chunked-prefill"]
        command += ["--max-model-len", str(max_len)]
        command += ["--logprobs-mode", "processed_logprobs", "--scheduling-policy", "priority", *flags]
        command += ["--worker-extension-cls", receiver]
        if "--tensor-parallel-size" not in flags:  # as launch.sh does
            command += ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"]
        env = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        env |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        env["TORCH_COMPILE_DISABLE"] = "1"
        self.scratch = tempfile.mkdtemp(prefix="t", dir="/tmp")  # short: vLLM's sockets go there
        self.process = start(command, log, **env, TMPDIR=self.scratch)

    def stop(self):
        stop(self.process)
        shutil.rmtree(self.scratch)

    def wait(self):
        wait_for(self.url, self.process, self.log)
        return self
