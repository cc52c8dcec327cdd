"""rolemodel/launch.py: what it would start, and what becomes of a run whose processes are killed or stopped."""

import fcntl
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest
import torch
from conftest import BASE, FAKE_SERVER, ROOT, all_batches, final, lines, needs_namespaces, start, wait_until, write_run

from rolemodel import launch as launcher
from rolemodel import machine as machines
from rolemodel import role as roles
from rolemodel.config import load_config, to_toml
from rolemodel.launch import plan
from rolemodel.role import ConfigError, NumericsError
from tools import start_from

# --- what it would start, on machines that are not here ---------------------------------------------------------------


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """planned("inference.gpus=2", gpus=[...]) -> {name: role}."""
    monkeypatch.setenv("ROLEMODEL_RUN_ID", "name")

    def make(*overrides, gpus=()):
        (tmp_path / "some.toml").write_text(BASE.format(model=tmp_path))
        monkeypatch.setattr(launcher, "visible_gpus", lambda: list(gpus))
        return {
            role.name: role
            for role in plan(load_config(tmp_path / "some.toml", overrides), ["some.toml"], tmp_path, "/tmp")
        }

    return make


@pytest.mark.parametrize("gpus, overrides, expected", [
    ("", [], {"inference": "", "trainer": ""}),
    ("0", [], {"inference": "0", "trainer": "0"}),  # shared
    ("7 5 3", ["inference.gpus=2"], {"inference": "7", "inference1": "5", "trainer": "3"}),
    ("0 1 2", ["inference.gpus=2", "trainer.gpus=2"], {"inference": "0", "inference1": "1", "trainer": "1,2"}),
    ("0 1 2 3", ["inference.gpus=2", "trainer.gpus=2", "inference.args.tensor_parallel_size=2"],
     {"inference": "0,1", "trainer": "2,3"}),
    ("0 1", ['inference.urls=["http://127.0.0.1:8000"]', "trainer.gpus=2"], {"trainer": "0,1"}),
])  # fmt: skip
def test_devices(gpus, overrides, expected, planned):
    """The first for servers, the next for ranks; the orchestrator has none."""
    roles = planned(*overrides, gpus=gpus.split())
    assert {name: role.env["CUDA_VISIBLE_DEVICES"] for name, role in roles.items()} == {"orchestrator": ""} | expected
    with pytest.raises(ConfigError, match="GPUs for vLLM"):
        planned("inference.gpus=5", gpus="0123")


def test_a_shared_gpu_and_flags(planned):
    """The trainer waits for vLLM, which counts free memory; NCCL refuses two ranks on a GPU."""
    roles = planned(gpus="0")
    assert roles["trainer"].after[1:] == [int(roles["inference"].argv[-1])]
    assert 'sync_backend = "gloo"' in roles["trainer"].env["ROLEMODEL_OVERRIDES"]
    assert not planned(gpus="01")["trainer"].after[1:]
    argv = " ".join(planned("trainer.use_lora=true", "trainer.dtype=bf16", "inference.args.x_y=1")["inference"].argv)
    known = "--host 127.0.0.1, --max-model-len 64, --dtype bfloat16, --enable-lora, --x-y 1"
    known += ", --max-loras 4, --served-model-name name, --logprobs-mode processed_logprobs, --generation-config vllm"
    known += ", --worker-extension-cls rolemodel.serving.receiver.CpuWeightReceiver"
    for flag in known.split(", "):
        assert f"{flag} " in f"{argv} "
    with pytest.raises(ConfigError, match="'max_model_len'.* set by the launcher"):
        planned("inference.args.max_model_len=9")
    assert list(planned("prepare=x.py"))[0] == "prepare" and list(planned("model=a/b"))[0] == "download"


def test_variables_that_are_for_others(planned, monkeypatch):
    """ms-swift #8413: a cluster's NNODES without MASTER_ADDR; vllm #22407: the key of a user's other server."""
    monkeypatch.setenv("NNODES", "2")
    roles = planned()
    assert "--standalone" in roles["trainer"].argv and roles["trainer"].env["GLOO_SOCKET_IFNAME"] == "lo"
    assert roles["inference"].env["VLLM_API_KEY"] == ""
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    trainer = planned()["trainer"]
    assert {"2", "10.0.0.1:29500"} <= set(trainer.argv) and "GLOO_SOCKET_IFNAME" not in trainer.env


def test_a_home_that_cannot_be_written(monkeypatch):
    """llm-d-kv-cache #83: torch makes its folder while it is imported."""
    monkeypatch.setenv("HOME", "/dev/null")
    script = "import os; from rolemodel.launch import COMMON; os.environ |= COMMON; import torch._inductor.config"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_what_the_machine_has(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: H100 (UUID: GPU-2a)'\necho 'GPU 1: H100 (UUID: GPU-2b)'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for visible, expected in (("", []), ("1,0", ["1", "0"]), ("-1", [])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert machines.visible_gpus() == expected
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert machines.visible_gpus() == ["0", "1"]
    limits = tmp_path / "cpu.max"
    assert machines.num_cpus(limits) == len(os.sched_getaffinity(0))
    for quota, expected in (("max", len(os.sched_getaffinity(0))), ("150000", 1), ("50000", 1)):
        limits.write_text(f"{quota} 100000\n")
        assert machines.num_cpus(limits) == expected


@pytest.mark.parametrize("script, word, said", [
    ("launch.sh", "none.toml", "none.toml: "),
    ("tests/run.sh", "--version", "pytest "),
])  # fmt: skip
def test_a_script_runs_its_own_clone(script, word, said, tmp_path):
    """Not one of the same name in CDPATH, where cd looks first."""
    (tmp_path / ROOT.name / script).parent.mkdir(parents=True)
    env = os.environ | {"CDPATH": str(tmp_path)}
    command = ["bash", f"{ROOT.name}/{script}", word]
    done = subprocess.run(command, cwd=ROOT.parent, env=env, capture_output=True, text=True)
    assert said in done.stdout + done.stderr


def test_exit_codes_and_causes(tmp_path, capfd, monkeypatch):
    codes = []
    monkeypatch.setattr(roles.os, "_exit", codes.append)
    for error in (OSError(28, "full"), ValueError(), NumericsError()):
        roles.fail("trainer", error)
    assert codes == [6, 3, 5]
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "inference.log").write_text("=== earlier\nKeyError: old\n=== now\nKeyError: new\n")
    found = launcher.failure(tmp_path, "inference", "its engine died")
    assert found.code == 3 and str(found).startswith("its engine died (role=inference exit=3 log=")
    console = capfd.readouterr().out
    assert "KeyError: new" in console and "KeyError: old" not in console
    reports = [("trainer", "5", "no finite gradient"), ("orchestrator", "3", "later")]
    found = launcher.failure(tmp_path, "inference", "its engine died", reports)
    assert found.code == 5 and str(found).startswith("no finite gradient (role=trainer exit=5 log=")


# --- whole runs -------------------------------------------------------------------------------------------------------

STEPS = 4
HOW = (f"max_steps={STEPS}", "checkpoint.every=2", "eval.every=2", "orchestrator.max_staleness=0")
HOW += ("trainer.loss=faults:loss",)  # which may hold the run
PATTERNS = {"agent": "distributed.run", "server": "fake_vllm", "rank": "trainer.py", "orchestrator": "orchestrator.py"}
NAMES = {"server": "inference", "engine": "inference", "agent": "trainer", "rank": "trainer"}


def role_of(process):
    if process.name().startswith("VLLM::"):
        return "engine"
    words = " ".join(process.cmdline())
    return next((role for role, pattern in PATTERNS.items() if pattern in words), words)


class Run:
    """launch.sh in the background, and all that descends from it."""

    def __init__(self, path, model, *overrides, before=(), **env):
        self.dir = path / "run"
        self.log = path / f"launch{len(list(path.glob('launch*')))}.log"
        for log in self.dir.glob("logs/*"):
            log.unlink()
        toml = write_run(path, model, STEPS, "{ num_turns = 1 }")
        env = {"SERVER": FAKE_SERVER, "WATCH": "", "RANK": "0"} | env  # schedulers set the last
        self.process = start([*before, "bash", "launch.sh", str(toml), *HOW, *overrides], self.log, **env)
        self.known = {}  # {pid: process} of all that it has been seen to start

    def text(self):
        return "".join(path.read_text(errors="replace") for path in [self.log, *self.dir.glob("logs/*")])

    def processes(self):
        """{role: process} of what is alive."""
        found = {}
        with suppress(psutil.Error):
            self.known |= {p.pid: p for p in psutil.Process(self.process.pid).children(recursive=True)}
        for p in self.known.values():
            with suppress(psutil.Error):
                if p.status() != psutil.STATUS_ZOMBIE:
                    found[role_of(p)] = p
        return found

    def wait_until(self, condition):
        wait_until(condition, self.process, self.text)

    def kill(self, role, number=signal.SIGKILL):
        self.wait_until(lambda: role == "launch.sh" or role in self.processes())
        process = self.process if role == "launch.sh" else self.processes()[role]
        process.send_signal(number)

    def end(self, code):
        """Waits for the end, after which nothing is left. Returns the last line of the console that is the launcher's,
        where libraries may write as well."""
        while self.process.poll() is None:
            self.processes()
            time.sleep(0.1)
        assert self.process.returncode == code, self.text()
        psutil.wait_procs(self.known.values(), timeout=15)
        assert not self.processes()
        assert code in (-9, 2) or not [*self.dir.glob("**/*.tmp"), *self.dir.glob("tmp")]
        return "".join(re.findall(r"\[(?:launch|start_from)\] .*", self.log.read_text())[-1:])


@pytest.fixture(scope="module")
def undisturbed(models, tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed")
    (path / "watch.py").write_text("1 / 0")
    run = Run(path, models["untied"], "inference.gpus=2", WATCH=str(path / "watch.py"))
    run.end(0)
    return run


@pytest.mark.slow
def test_an_undisturbed_run(undisturbed, models):
    """Strictly on-policy, by two servers. The same command has nothing to do; another seed would be another run."""
    console = undisturbed.log.read_text()
    assert "[launch] done in" in console and "[launch] warning: no results" in console
    assert (undisturbed.dir / "done").read_text() == "4\n"
    metrics = lines(undisturbed.dir / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(STEPS))
    assert all(line["policy/kl_sampler"] < 1e-6 and line["sync/dlogp_max"] < 1e-4 for line in metrics)
    assert all(s["version"] == n for n, batch in enumerate(all_batches(undisturbed.dir)) for s in batch.sequences)
    assert all(len(list(undisturbed.dir.glob(name))) == 2 for name in ("logs/inference*", "checkpoints/*"))
    path = undisturbed.dir.parent
    assert "already complete" in Run(path, models["untied"]).end(0)
    config = (undisturbed.dir / "config.toml").read_text()
    assert "4 steps or batches: max_steps = 3 is less" in Run(path, models["untied"], "max_steps=3").end(2)
    assert "seed was 0, now 1" in Run(path, models["untied"], "seed=1").end(2)
    assert (undisturbed.dir / "config.toml").read_text() == config


MISSPELLED = """
from env import SingleTurnEnv
def load_environment():
    return SingleTurnEnv([{"questoin": "a"}])
"""
# Takes longer than the watchdog would wait for it.
MAKE = """
import sys, time
from rolemodel.role import heartbeat
for _ in range(20):
    heartbeat()
    time.sleep(0.3)
sys.exit("no recipe")
"""


@pytest.mark.slow
def test_what_ends_at_once(models, tmp_path):
    """Before anything has started, or by the first that is killed."""
    assert "key 'max_stepps': unknown" in Run(tmp_path, models["untied"], "max_stepps=1").end(2)
    (tmp_path / "misspelled.py").write_text(MISSPELLED)
    run = Run(tmp_path, models["untied"], "env.id=misspelled", "env.args={}")
    assert "line 1: an example needs 'prompt' or 'question', but has only 'questoin' (role=orch" in run.end(2)
    assert not (run.dir / "logs" / "inference.log").exists()  # no server had been started
    (tmp_path / "a [b]").mkdir()
    (tmp_path / "make.py").write_text(MAKE)
    last = Run(tmp_path / "a [b]", "none", f"prepare={tmp_path / 'make.py'}", "prepare_timeout=4").end(3)
    assert "ended with status 1 before the run was done (role=prepare exit=3" in last
    for role in ("server", "orchestrator", "agent", "launch.sh"):
        run = Run(tmp_path, models["untied"])
        run.wait_until(lambda: "starting" in run.log.read_text())
        run.kill(role)
        last = run.end(-9 if role == "launch.sh" else 3)
        assert role == "launch.sh" or f"killed by SIGKILL (role={NAMES.get(role, role)} exit=3 log=" in last
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        run = Run(tmp_path, models["untied"])
        run.wait_until(lambda: "starting" in run.log.read_text())
        assert "belongs to a run under way" in Run(tmp_path, models["untied"]).end(2)
        run.kill("launch.sh", number)
        assert f"stopped by {number.name}" in run.end(code)


# "canary 2": version 1 has arrived, but is not live; "rename 2": the second checkpoint is written, but not renamed.
ON_THE_WAY = [("engine", ""), ("rank", "rename 2"), ("launch.sh", "stream_weights 2")]
ROLES = ("server", "engine", "orchestrator", "rank", "agent", "launch.sh")
POINTS = ("", "train_step 1", "stream_weights 2", "canary 2", "rename 1", "write_final 1")
CELLS = set(itertools.product(ROLES, POINTS)) - {("orchestrator", "write_final 1")}  # it has ended by then
MATRIX = [pytest.param([cell], marks=pytest.mark.long) for cell in sorted(CELLS)]


@pytest.mark.slow
@pytest.mark.parametrize("cells", [ON_THE_WAY, *MATRIX])
def test_killed_on_the_way(cells, undisturbed, fake_servers, models, tmp_path):
    """Each time all is over within 30 s, with code and cause; in the end the same command has the same data and, bit
    for bit, the same parameters as if nothing had been. Without a point, the run waits for an answer of its server."""
    for role, point in cells:
        faults = {"orphan": role == "server"} | ({} if point else {"generate 20": "hang"})
        env = {"HOLD": point, "FAKE": json.dumps(faults), "ROLEMODEL_RUN_ID": "run"}
        shared = [f'inference.urls=["{fake_servers()}"]'] if point and role not in ("server", "engine") else []
        run = Run(tmp_path, models["untied"], *shared, **env)
        batch = run.dir / "batches" / "step_000000.safetensors"
        run.wait_until(lambda: "[hold]" in run.text() or not point and batch.exists())
        run.kill(role)
        began = time.monotonic()
        last = run.end(-9 if role == "launch.sh" else 3)
        name = NAMES.get(role, role)
        assert role == "launch.sh" or last.endswith(f"(role={name} exit=3 log={run.dir}/logs/{name}.log)"), last
        assert time.monotonic() - began < 30
    run = Run(tmp_path, models["untied"])
    run.end(0)
    for name, keys in {"metrics": "step loss reward/mean version", "eval": "step reward/mean rows",
                       "rollouts": "step example slot member reward dropped"}.items():  # fmt: skip
        paths = (run.dir / f"{name}.jsonl", undisturbed.dir / f"{name}.jsonl")
        one, other = ([[line[key] for key in keys.split()] for line in lines(path)] for path in paths)
        assert sorted(one) == sorted(other), name
    torch.testing.assert_close(final(run.dir), final(undisturbed.dir), rtol=0, atol=0)


@pytest.mark.slow
def test_a_run_from_the_middle_of_another(undisturbed, models, tmp_path):
    """After a step that has no checkpoint: the steps that follow are the other run's, bit for bit."""
    run = Run(tmp_path, models["untied"], "--from", f"{undisturbed.dir}@2")
    run.end(0)
    assert "step 2 again" in run.text() and "step 1 again" not in run.text()
    torch.testing.assert_close(final(run.dir), final(undisturbed.dir), rtol=0, atol=0)
    assert [line["step"] for line in lines(run.dir / "metrics.jsonl")] == list(range(STEPS))
    assert json.loads((run.dir / "parent.json").read_text()) == {"run": str(undisturbed.dir), "step": 2}
    shutil.copytree(undisturbed.dir, tmp_path / "other")
    text = (undisturbed.dir / "config.toml").read_text()
    (tmp_path / "other" / "config.toml").write_text(text.replace("learning_rate = 0.001", "learning_rate = 0.002"))
    run = Run(tmp_path, models["untied"], "--from", f"{tmp_path}/other@2", "run_name=third")
    run.end(3)
    assert "had optim/lr = 0.001, and has 0.002 now" in run.text()


def test_a_run_begins_after_a_step_that_was_taken_and_with_as_many_groups(make_cfg, tmp_path):
    """Batch 1 is there, but it has not been trained on."""
    text = to_toml(make_cfg("run_name=parent"))
    (tmp_path / "parent" / "batches").mkdir(parents=True)
    (tmp_path / "parent" / "config.toml").write_text(text)
    for name in ("step_000000", "logp_000000", "step_000001"):
        (tmp_path / "parent" / "batches" / f"{name}.safetensors").touch()
    for step, more, message in ((1, "seed=1", "only after: 0$"), (0, "orchestrator.batch_size=32", "= 16, not 32")):
        with pytest.raises(ConfigError, match=message):
            start_from.main(
                [f"{tmp_path}/test.toml", "--from", f"{tmp_path}/parent@{step}", f"output_dir={tmp_path}", more]
            )


def test_two_forks_into_one_directory_at_once(make_cfg, tmp_path):
    """DeepTab #411: the second would remove what the first is making, which then begins with half of the second's."""
    (tmp_path / "parent").mkdir()
    (tmp_path / "parent" / "config.toml").write_text(to_toml(make_cfg("run_name=parent")))
    with open(tmp_path / ".test.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="test is being made by another --from: choose another run_name"):
            start_from.main([f"{tmp_path}/test.toml", "--from", f"{tmp_path}/parent@0", f"output_dir={tmp_path}"])


@pytest.mark.slow
def test_one_step_under_the_microscope(undisturbed, tmp_path):
    out = tmp_path / "found"
    arms = ("a: trainer.loss=cispo", "b: trainer.loss=cispo", "c: orchestrator.advantage=advantages:permuted")
    words = [word for arm in arms for word in ("--arm", arm)]
    command = [sys.executable, "tools/microscope.py", str(undisturbed.dir), *words, "--states", "2", "--out", str(out)]
    start(command, tmp_path / "log", SERVER=FAKE_SERVER).wait()
    found = {(line["state"], line.pop("arm")): line for line in lines(out / "states.jsonl")}
    assert found.keys() == {(state, arm) for state in (0, 2) for arm in "abc"}, (tmp_path / "log").read_text()
    assert all(found[state, "a"] == found[state, "b"] and found[state, "c"]["kl"] > 0 for state in (0, 2))
    assert found[2, "a"]["agreement"] != found[2, "c"]["agreement"]
    assert "a - b: agreement 0.000, p = 1\n" in (out / "microscope.md").read_text()


@pytest.mark.slow
def test_hung(models, tmp_path):
    """It sends adapters, which each version's requests name, to a server of its own: another one may have another run's
    weights below them."""
    hasty = ("watchdog=12", "orchestrator.generation_timeout=5", "trainer.use_lora=true", "trainer.dtype=bf16")
    run = Run(tmp_path, models["untied"], *hasty, ROLEMODEL_RUN_ID="run")
    run.wait_until((run.dir / "adapters" / "run-v1").exists)
    run.kill("orchestrator", signal.SIGSTOP)
    assert "no role made progress for 12 s (watchdog)" in run.end(3)
    for log in ("orchestrator", "trainer"):
        assert "most recent call first" in (run.dir / "logs" / f"{log}.log").read_text()


@needs_namespaces
@pytest.mark.slow
def test_out_of_disk(models, fake_servers, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    before = ["unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m none "$0" && exec "$@"', str(disk)]
    how = (models["untied"], f'inference.urls=["{fake_servers()}"]', f"output_dir={disk}")
    run = Run(tmp_path, *how, before=before, ROLEMODEL_RUN_ID="run")
    assert "(role=trainer exit=6 log=" in run.end(6)
