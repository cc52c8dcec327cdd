"""What launch.py would start, on machines that are not here, and parts of the launcher. test_crash.py has the rest."""

import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib

import pytest
import torch
import transformers
from conftest import BASE, ROOT, launch, lines, write_run

import launch as launcher
from configs import load_config
from configs.runtime import machine as machines
from configs.runtime.machine import Machine
from configs.runtime.role import RunError, exit_code
from launch import plan

GIVEN = ["some.toml", "seed=0"]


@pytest.fixture
def planned(tmp_path):
    """planned("inference.gpus=2", gpus=[...], environ={...}, ...) -> {name: role}."""

    def make(*overrides, gpus=(), cpus=8, size=1 << 30, environ=None):
        (tmp_path / "some.toml").write_text(BASE.format(model="m"))
        cfg = load_config(tmp_path / "some.toml", [f"output_dir={tmp_path}", *overrides])
        num = 0 if cfg.inference.urls else cfg.inference.gpus // cfg.inference.args["tensor_parallel_size"]
        ports = [20001 + i for i in range(num)]
        environ = {"ROLEMODEL_RUN_ID": "name"} | (environ or {})
        machine = Machine(list(gpus), cpus, ports, "/proc/1/fd/2/tmp", size, environ, GIVEN)
        return {role.name: role for role in plan(cfg, machine)}

    return make


def flags(role):
    """{flag: its words}."""
    found, name = {}, None
    for word in role.argv[3:]:
        if word.startswith("--"):
            name = word
        found.setdefault(name, []).extend([word] * (not word.startswith("--")))
    return found


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus, overrides, expected", [
    ("", [], {"inference": "", "trainer": ""}),
    ("0", [], {"inference": "0", "trainer": "0"}),  # shared
    ("0 1", [], {"inference": "0", "trainer": "1"}),
    ("0 1 2", ["inference.gpus=2"], {"inference": "0", "inference1": "1", "trainer": "2"}),
    ("0 1 2 3 4 5 6 7", ["inference.gpus=4", "trainer.gpus=4", "inference.args.tensor_parallel_size=2"],
     {"inference": "0,1", "inference1": "2,3", "trainer": "4,5,6,7"}),
    ("7 5 3 1", ["inference.gpus=2"], {"inference": "7", "inference1": "5", "trainer": "3"}),
    ("7 5 3 1", ["inference.gpus=4"], {"inference": "7", "inference1": "5", "inference2": "3", "inference3": "1",
                                       "trainer": "1"}),
    ("GPU-8932f937 GPU-01234567", [], {"inference": "GPU-8932f937", "trainer": "GPU-01234567"}),
    ("0 1", ['inference.urls=["http://127.0.0.1:8000"]', "trainer.gpus=2"], {"trainer": "0,1"}),
    ("0 1 2", ["inference.gpus=2", "trainer.gpus=2"], {"inference": "0", "inference1": "1", "trainer": "1,2"}),
])  # fmt: skip
def test_devices(gpus, overrides, expected, planned):
    """The first for servers, the next for ranks; the orchestrator has none."""
    roles = planned(*overrides, gpus=gpus.split())
    found = {name: role.env["CUDA_VISIBLE_DEVICES"] for name, role in roles.items()}
    assert found == {"orchestrator": ""} | expected


def test_too_few_devices_are_refused(planned):
    text = "inference.gpus = 5 and trainer.gpus = 1, but there are 4 GPUs"
    with pytest.raises(RunError, match=text) as e:
        planned("inference.gpus=5", gpus="0123")
    assert e.value.code == 2


def test_a_shared_gpu_is_not_taken_whole(planned):
    with pytest.raises(RunError, match="gpu_memory_utilization = 0.9: at most 0.5, since the trainer shares") as e:
        planned("inference.args.gpu_memory_utilization=0.9", gpus="0")
    assert e.value.code == 2 and planned("inference.args.gpu_memory_utilization=0.9", gpus="01")


def test_a_disk_without_room_is_told_at_once(tmp_path, make_cfg):
    cfg = make_cfg("checkpoint.keep=3")
    machines.check_space(tmp_path, cfg, 1 << 20)
    with pytest.raises(RunError, match="its disk has .* GB left, and checkpoints will need 4503599.7 GB more") as e:
        machines.check_space(tmp_path, cfg, 1 << 50)
    assert e.value.code == 6
    machines.check_space(tmp_path, make_cfg("trainer.use_lora=true"), 1 << 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_has_twelve_bytes_for_each_parameter(dtype, models, tmp_path):
    """Whatever the dtype of the model's files, of which there may be several."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models["untied"], dtype=dtype)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    num = sum(p.numel() for p in model.parameters())
    assert machines.checkpoint_size(tmp_path) == pytest.approx(12 * num, rel=0.1)
    assert machines.checkpoint_size(tmp_path / "none") == 0


# What nvidia-smi says above its table.
SMI = "| NVIDIA-SMI {0}.65.06    Driver Version: {0}.65.06    {1}: {2}     |"


def test_a_driver_that_is_too_old_is_told_at_once():
    for name in ("CUDA Version", "CUDA UMD Version"):
        machines.check_driver(SMI.format(580, name, "13.0"), 13)
        machines.check_driver(SMI.format(570, name, "12.8"), 12)
        with pytest.raises(RunError, match="the NVIDIA driver goes up to CUDA 12.8, and torch is built for .* 13") as e:
            machines.check_driver(SMI.format(570, name, "12.8"), 13)
        assert e.value.code == 2
    machines.check_driver("sh: 1: nvidia-smi: not found", 13)
    assert machines.cuda_of_torch() in (0, int((torch.version.cuda or "0").split(".")[0]))


@pytest.mark.parametrize("several", ["trainer.gpus=2", "inference.args.tensor_parallel_size=2"])
def test_little_shared_memory_is_told_at_once(several, make_cfg):
    machines.check_shared_memory(make_cfg(), 64 << 20)
    machines.check_shared_memory(make_cfg(several, "inference.gpus=2"), 1 << 30)
    with pytest.raises(RunError, match="/dev/shm has 64 MiB left, .*--shm-size=16g") as e:
        machines.check_shared_memory(make_cfg(several, "inference.gpus=2"), 64 << 20)
    assert e.value.code == 2


@pytest.mark.parametrize("table, code", [("CUDA Version: 12.4", 2), ("CUDA Version: 13.0", 0)])
def test_the_driver_is_looked_at_before_anything_starts(table, code, tmp_path, make_cfg, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f'#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: NVIDIA H100" || echo "{table}"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(machines, "cuda_of_torch", lambda: 13)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    cfg = make_cfg()
    machine = machines.look_around(cfg, GIVEN, "tmp")
    try:
        machines.check_machine(tmp_path, cfg, machine)
        assert code == 0
    except RunError as e:
        assert e.code == code
    machines.check_machine(tmp_path, cfg, machine._replace(gpus=[]))


@pytest.mark.parametrize("visible, expected", [
    ("-1", []), ("NoDevFiles", []), ("1,-1,0", ["1"]), (None, ["MIG-1f"]),
])  # fmt: skip
def test_hidden_gpus_are_none_and_parts_are_named(visible, expected, tmp_path, make_cfg, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\necho 'GPU 0: NVIDIA A100 (UUID: GPU-2a)'\necho '  MIG 1g.10gb Device 0: (UUID: MIG-1f)'\n"
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machines.look_around(make_cfg(), GIVEN, "tmp").gpus == expected


def test_the_allocators_options_are_the_users(planned):
    """Parts of a GPU have no segments that expand."""

    def allocator(environ=None, gpus=("0", "1")):
        return planned(gpus=gpus, environ=environ)["trainer"].env["PYTORCH_ALLOC_CONF"]

    assert allocator() == "expandable_segments:True"
    assert allocator(gpus=["MIG-1", "MIG-2"]) == "expandable_segments:False"
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        assert allocator({name: "backend:cudaMallocAsync"}) == "backend:cudaMallocAsync"


FAILED_START = """=== 2026 python -m configs.serving.server
(APIServer pid=11) WARNING 11-25 [a.py:2] Found ulimit of 20. This can cause errors like `OSError: [Errno 24] Too many.
(EngineCore pid=12) ERROR 11-25 [core.py:1] Traceback (most recent call last):
(EngineCore pid=12) ERROR 11-25 [core.py:1] torch.AcceleratorError: CUDA error: an illegal instruction
(EngineCore pid=12) ERROR 11-25 [core.py:1] RuntimeError: Engine core initialization failed. See root cause above.
ValueError: the last one
"""
ENDED = """=== 2026 python -m configs.serving.server
(EngineCore pid=12) ERROR 11-26 [core.py:1] RuntimeError: CPU Generator does not use offset
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.
"""


PARENT = """
import ctypes, os, time
if os.fork() == 0:
    ctypes.CDLL(None).prctl(15, b"VLLM::EngineCor")
    os.fork()
time.sleep(60)
"""


def test_what_an_engine_forks_is_no_engine():
    """It has its name until it runs a compiler, and its end is not the engine's."""

    def names(pid):
        return [open(f"/proc/{child}/comm").read().strip() for child in launcher.descendants(pid)]

    with subprocess.Popen([sys.executable, "-c", PARENT]) as process:
        try:
            while names(process.pid) != ["VLLM::EngineCor"] * 2:
                time.sleep(0.05)
            engine, _ = launcher.descendants(process.pid)
            watched = {}
            launcher.watch_engines({"inference": process}, watched)
            launcher.watch_engines({"inference": process}, watched)
            assert list(watched.values()) == [("inference", engine)]
        finally:
            launcher.send(signal.SIGKILL, [*launcher.descendants(process.pid), process.pid])


@pytest.mark.parametrize("version, log, cause", [
    ("", FAILED_START, "torch.AcceleratorError: CUDA error: an illegal"),
    ("3", FAILED_START, "ValueError: the"),
    ("3", ENDED, "RuntimeError: CPU Generator does not"),
])  # fmt: skip
def test_why_a_server_failed_is_in_the_last_line(version, log, cause, tmp_path):
    """vLLM's own last lines are that its engine has not started, or has ended. Later on, what comes last counts."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "inference.log").write_text(f"=== 2025 an earlier start\nKeyError: old\n{log}")
    (tmp_path / "version").write_text(version)
    text = str(launcher.failure(tmp_path, "", "inference", 12, 1, "its engine, process 12, died"))
    assert text.startswith(f"its engine, process 12, died: {cause}") and "old" not in text
    killed = str(launcher.failure(tmp_path, "", "inference", 12, -9))
    assert killed.startswith("killed by SIGKILL (role=inference")


def test_check_begins_with_the_estimate(planned):
    roles = planned("max_steps=0")
    assert list(roles) == ["estimate", "orchestrator", "inference", "trainer"] and "estimate" not in planned()
    assert roles["estimate"].argv[1:] == ["tools/memory.py", *GIVEN]


def test_a_model_is_downloaded_before_servers_start(tmp_path, monkeypatch):
    """Each bit of it counts as progress; a directory is left alone."""
    from configs.serving import download

    found = []

    def snapshot_download(model, allow_patterns, tqdm_class):
        bar = tqdm_class(total=3, disable=True)
        bar.update(2)
        found.append((model, "*.safetensors" in allow_patterns))

    monkeypatch.setattr(download, "snapshot_download", snapshot_download)
    monkeypatch.setenv("ROLEMODEL_PROGRESS", str(tmp_path))
    monkeypatch.setattr(download.constants, "HF_HUB_OFFLINE", False)
    download.download(str(tmp_path))
    assert not found and not list(tmp_path.iterdir())
    download.download("org/model")
    assert found == [("org/model", True)] and list(tmp_path.iterdir())
    monkeypatch.setattr(download.constants, "HF_HUB_OFFLINE", True)
    download.download("org/model")
    assert len(found) == 1


def test_a_shared_gpu(planned):
    """The trainer waits for all servers' ports, and weights go by gloo."""
    roles = planned("inference.gpus=2", gpus="01")
    assert flags(roles["inference"])["--gpu-memory-utilization"] == ["0.4"]
    argv = roles["trainer"].argv
    assert "run: vLLM and the trainer share a GPU" in argv[2] and argv[3] == "20001 20002"
    with socket.create_server(("127.0.0.1", 0)) as first, socket.socket() as last:
        last.bind(("127.0.0.1", 0))
        ports = " ".join(str(s.getsockname()[1]) for s in (last, first))
        with subprocess.Popen([*argv[:3], ports, "echo", "a b"], stdout=subprocess.PIPE, text=True) as waiting:
            time.sleep(0.7)
            assert waiting.poll() is None
            last.listen()
            assert waiting.communicate(timeout=20)[0].splitlines()[1:] == ["a b"]
    overrides = tomllib.loads(roles["trainer"].env["ROLEMODEL_OVERRIDES"])
    assert overrides["trainer"] == {"sync_backend": "gloo"}
    assert overrides["inference"]["urls"] == ["http://127.0.0.1:20001", "http://127.0.0.1:20002"]
    own = planned(gpus="01")
    assert "--gpu-memory-utilization" not in flags(own["inference"]) and own["trainer"].argv[0] == sys.executable
    assert set(tomllib.loads(own["trainer"].env["ROLEMODEL_OVERRIDES"])) == {"inference"}


@pytest.mark.parametrize("visible, listed, expected", [
    (None, 3, ["0", "1", "2"]), ("2,0", 3, ["2", "0"]), ("", 3, []), ("0", 0, []), (None, 0, []),
    ("GPU-a,GPU-b", 2, ["GPU-a", "GPU-b"]),
])  # fmt: skip
def test_gpus_are_found(visible, listed, expected, make_cfg, tmp_path, monkeypatch):
    """By nvidia-smi and CUDA_VISIBLE_DEVICES, which may hide all of them."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\nfor i in {' '.join(map(str, range(listed)))}; do echo GPU $i: NVIDIA H100; done\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = machines.look_around(make_cfg("inference.gpus=2"), GIVEN, "tmp")
    assert machine.gpus == expected
    assert len(set(machine.ports)) == 2 and all(20000 <= port < 32000 for port in machine.ports)
    assert 0 < machine.model_size < 1 << 22


# --- servers ----------------------------------------------------------------------------------------------------------


def test_vllms_flags(planned):
    found = flags(planned(gpus="01")["inference"])
    assert found["--model"] == ["m"] and found["--dtype"] == ["float32"] and found["--seed"] == ["0"]
    assert found["--served-model-name"] == ["name"] and found["--port"] == ["20001"]
    assert found["--max-model-len"] == ["64"] and found["--host"] == ["127.0.0.1"]
    assert found["--worker-extension-cls"] == ["trainer.WeightReceiver"]
    assert found["--tensor-parallel-size"] == ["1"] and found["--generation-config"] == ["vllm"]
    absent = {"--enable-lora", "--chat-template", "--enforce-eager", "--hf-overrides", "--enable-sleep-mode"}
    assert not absent & set(found) and not any(flag.startswith("--no-") for flag in found)


def test_vllms_flags_without_a_gpu(planned):
    role = planned("inference.gpus=2")["inference1"]
    found = flags(role)
    assert role.argv[:3] == [sys.executable, "-m", "configs.serving.server"]
    assert "--enforce-eager" in found
    assert found["--worker-extension-cls"] == ["configs.serving.cpu_receiver.WeightReceiver"]
    assert found["--distributed-executor-backend"][0].endswith("UniProcExecutor")
    two = planned("inference.gpus=2", "inference.args.tensor_parallel_size=2")
    assert "--distributed-executor-backend" not in flags(two["inference"]) and "inference1" not in two


@pytest.mark.parametrize("rank, most", [(1, "8"), (8, "8"), (9, "16"), (300, "512"), (512, "512")])
def test_vllms_flags_for_adapters(rank, most, planned):
    """Sent in 16 bits alone: in fp32 they are merged."""
    lora = ("trainer.use_lora=true", f"trainer.lora_rank={rank}", "orchestrator.max_staleness=2")
    found = flags(planned(*lora, "trainer.dtype=bf16")["inference"])
    assert found["--max-lora-rank"] == [most] and found["--max-loras"] == ["5"] and found["--dtype"] == ["bfloat16"]
    assert "--enable-lora" in found and "--enable-lora" not in flags(planned(*lora)["inference"])


def test_vllms_flags_of_the_user(planned):
    """They replace ours."""
    more = ["inference.args.enforce_eager=false", "inference.args.hf_overrides={a = 1}"]
    more += ["inference.args.cudagraph_capture_sizes=[1, 2]", "inference.args.enable_auto_tool_choice=true"]
    found = flags(planned(*more, "inference.args.gpu_memory_utilization=0.3", gpus="0")["inference"])
    assert found["--no-enforce-eager"] == [] and "--enforce-eager" not in found
    assert json.loads(found["--hf-overrides"][0]) == {"a": 1} and found["--cudagraph-capture-sizes"] == ["1", "2"]
    assert found["--enable-auto-tool-choice"] == [] and found["--gpu-memory-utilization"] == ["0.3"]
    head = flags(planned("trainer.head_dtype=fp32", "chat_template=t.jinja")["inference"])
    assert json.loads(head["--hf-overrides"][0]) == {"head_dtype": "float32"} and head["--chat-template"] == ["t.jinja"]


def test_servers_elsewhere(planned):
    urls = '["http://127.0.0.1:8000","http://127.0.0.1:8001"]'
    roles = planned(f"inference.urls={urls}", gpus="0")
    assert list(roles) == ["orchestrator", "trainer"]
    env = roles["orchestrator"].env
    assert tomllib.loads(env["ROLEMODEL_OVERRIDES"])["inference"]["urls"] == json.loads(urls)
    assert env["ROLEMODEL_POLICY_URL"] == "http://127.0.0.1:8000/v1" and "GLOO_SOCKET_IFNAME" not in env


def test_a_stand_in_for_vllm(planned):
    role = planned(environ={"SERVER": "python fake.py --slow"})["inference"]
    assert role.argv[:5] == ["python", "fake.py", "--slow", "--model", "m"] and role.argv[-2:] == ["--port", "20001"]


def test_ports(make_cfg, monkeypatch):
    """A port that is taken ends the run if it was asked for, and is passed over if not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        with pytest.raises(RunError, match=f"port {taken} is in use: leave inference.port out, or set another"):
            machines.choose_ports(make_cfg(f"inference.port={taken - 1}", "inference.gpus=2").inference)
        monkeypatch.setattr("random.randrange", lambda *limits: taken)
        found = machines.choose_ports(make_cfg("inference.gpus=2").inference)
        assert len(set(found)) == 2 and min(found) > taken
    assert machines.choose_ports(make_cfg(f"inference.port={taken}").inference) == [taken]


# --- the trainer, and what all have in common -------------------------------------------------------------------------


def test_the_trainers_command(planned):
    argv = planned("trainer.gpus=2")["trainer"].argv
    assert argv[1:3] == ["-m", "torch.distributed.run"] and "--standalone" in argv
    assert argv[argv.index("--nproc-per-node") + 1] == "2"
    assert argv[-7:] == ["setpriv", "--pdeathsig", "KILL", sys.executable, "trainer.py", *GIVEN]
    assert planned("max_steps=0")["trainer"].argv[-3] == "tools/check.py"


def test_several_nodes(planned):
    nodes = {"NNODES": "2", "MASTER_ADDR": "10.0.0.1"}
    role = planned(environ=nodes)["trainer"]
    assert {"--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "10.0.0.1:29500"} <= set(role.argv)
    assert "--standalone" not in role.argv and "GLOO_SOCKET_IFNAME" not in role.env
    assert "10.0.0.1:7000" in planned(environ=nodes | {"MASTER_PORT": "7000"})["trainer"].argv
    assert planned()["trainer"].env["NCCL_SOCKET_IFNAME"] == "lo"
    with pytest.raises(RunError, match="NNODES needs MASTER_ADDR"):
        planned(environ={"NNODES": "2"})


def test_threads(planned):
    def threads(*args, **kwargs):
        return {name: role.env.get("OMP_NUM_THREADS") for name, role in planned(*args, **kwargs).items()}

    assert threads() == {"orchestrator": "1", "inference": "4", "trainer": "8"}
    assert threads("trainer.gpus=2", "inference.gpus=2")["trainer"] == "4"
    assert threads(size=1 << 20)["trainer"] == "4"  # a small model
    assert threads(cpus=1, size=1 << 20) == {"orchestrator": "1", "inference": "1", "trainer": "1"}
    assert threads(environ={"OMP_NUM_THREADS": "3"}) == {"orchestrator": "1", "inference": "3", "trainer": "3"}
    assert threads(gpus="01")["inference"] is None


def test_variables(planned):
    roles = planned("inference.startup_timeout=999", environ={"PYTHONPATH": "/a"})
    env = roles["inference"].env
    assert env["PYTHONPATH"] == f"{ROOT}:/a" and planned()["trainer"].env["PYTHONPATH"] == str(ROOT)
    assert env["VLLM_ENGINE_READY_TIMEOUT_S"] == "999"
    assert env["TMPDIR"] == "/proc/1/fd/2/tmp" and "TMPDIR" not in roles["trainer"].env
    assert "MALLOC_MMAP_MAX_" in env and "MALLOC_MMAP_MAX_" not in planned(gpus="01")["inference"].env


def test_stacks_of_many_processes_are_written_however_many_files_are_open(monkeypatch):
    """select() takes no number above 1023, and everything would be left stopped."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    monkeypatch.setattr(launcher, "descendants", lambda: [child.pid for child in children])
    before = len(os.listdir("/proc/self/fd"))
    launcher.dump_stacks()
    assert [child.wait() for child in children] == [-signal.SIGABRT] * 3
    assert len(os.listdir("/proc/self/fd")) == before
    for fd in files:
        os.close(fd)


def test_another_users_process_does_not_end_the_clean_up(monkeypatch):
    reached = []

    def kill(pid, number):
        if pid == 1:
            raise PermissionError
        reached.append(pid)

    monkeypatch.setattr(os, "kill", kill)
    launcher.send(signal.SIGTERM, [1, 2])
    assert reached == [2]


def test_a_local_model_and_one_to_be_prepared(planned):
    """The script makes the TOML's model, no other; the rows may be on the hub even if the model is local."""
    online = planned(size=-1)
    assert "prepare" not in online and all("HF_HUB_OFFLINE" not in role.env for role in online.values())
    for roles in (planned(), planned("prepare=make.py", size=-1)):
        assert ["HF_HUB_OFFLINE" in roles[name].env for name in ("orchestrator", "inference", "trainer")] == [0, 1, 1]
    assert roles["prepare"].argv == [sys.executable, "make.py", *GIVEN] and list(roles)[0] == "prepare"
    assert "HF_HUB_OFFLINE" not in roles["prepare"].env
    assert "prepare" not in planned("prepare=make.py")


# --- the supervisor ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word, logged", [
    ("env.args.api_key=sk-1", "env.args.api_key=REDACTED"),
    ('env.args={ api_key = "sk 1", n = 5 }', 'env.args={ api_key = "REDACTED", n = 5 }'),
    ('env.args={"judge_token" = "sk-1"}', 'env.args={"judge_token" = "REDACTED"}'),
    ("sampling.max_tokens=5 tokenizer=x", "sampling.max_tokens=5 tokenizer=x"),
])  # fmt: skip
def test_a_log_begins_with_the_command_without_secrets(word, logged, tmp_path, monkeypatch):
    """The role itself gets them, and variables: our defaults, those of the launcher, its own."""
    role = launcher.Role("x", ["sh", "-c", 'echo "$1 $A $TRITON_F32_DEFAULT $DO_NOT_TRACK"', "-", word], {"A": "1"})
    monkeypatch.setenv("DO_NOT_TRACK", "mine")
    launcher.start(role, tmp_path / "x.log").wait()
    header, printed = (tmp_path / "x.log").read_text().splitlines()
    assert header.startswith("=== 2") and header.endswith(f" A=1 {shlex.join([*role.argv[:-1], logged])}")
    assert printed == f"{word} 1 ieee mine"


@pytest.mark.parametrize("place", ["checkpoints/step_000002.tmp", "final"])
def test_the_files_of_a_checkpoint_that_is_being_written_are_progress(place, tmp_path):
    run_dir = tmp_path / "[1]"
    written = run_dir / place
    written.mkdir(parents=True)
    (run_dir / "tmp" / "progress").mkdir(parents=True)
    signs = [launcher.signs_of_progress(run_dir)]
    for name in ("a.safetensors", "b.safetensors"):
        (written / name).touch()
        signs.append(launcher.signs_of_progress(run_dir))
    assert [len(seen) for seen in signs] == [0, 1, 2]


def test_descendants_are_found_parents_first():
    nested = "import subprocess, sys, time; subprocess.Popen(['sleep', '60']); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", nested], start_new_session=True)
    deadline = time.monotonic() + 20
    while len(found := launcher.descendants(os.getpid())) < 2 or "sleep" not in open(f"/proc/{found[-1]}/comm").read():
        assert time.monotonic() < deadline
    assert found[found.index(process.pid) + 1] in launcher.descendants(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize("script, logged, shown", [
    ("import time; time.sleep(60)", "Fatal Python error: Aborted",
     r"\[launch\] no role made progress for 5 s .watchdog.*\(role=prepare pid=\d+ exit=3 log="),
    ("print('step 1 | loss 2'); raise SystemExit('no model today')", "no model today",
     r"no model today\s+\[launch\] ended with status 1 before the run was done \(role=prepare pid=\d+ exit=3 log="),
])  # fmt: skip
def test_a_script_that_hangs_or_fails_to_prepare(script, logged, shown, models, tmp_path):
    (tmp_path / "bad.py").write_text(script)
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "noise" }')
    toml.write_text(toml.read_text().replace(str(models["untied"]), f"{tmp_path}/none"))
    done = launch(toml, f"prepare={tmp_path}/bad.py", "prepare_timeout=5", check=False)
    assert done.returncode == 3 and "[launch] preparing" in done.stdout and re.search(shown, done.stderr)
    assert logged in (tmp_path / "run" / "logs" / "prepare.log").read_text()


def test_a_program_that_is_not_there(models, tmp_path):
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "noise" }')
    done = launch(toml, check=False, SERVER="no-such-program")
    text = "[launch] [Errno 2] No such file or directory: 'no-such-program' (exit=3)"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (3, text)
    assert not (tmp_path / "run" / "tmp").exists()


@pytest.mark.slow
def test_orphans_are_reaped_while_the_run_goes_on_and_nothing_is_left(models, tmp_path):
    """A task that starts processes and forgets them; the last one outlives the orchestrator."""
    forgotten = f"sleep 300.{os.getpid()}"
    task = f"""
import random
import subprocess
from env import Rubric, SingleTurnEnv

def reward():
    subprocess.run(["sh", "-c", "sleep 0.1 & sleep 0.2 & {forgotten} & :"])
    return random.random()

def load_environment():
    return SingleTurnEnv([{{"question": "hello"}}], rubric=Rubric([reward]))
"""
    (tmp_path / "forgets.py").write_text(task)
    toml = write_run(tmp_path, models["untied"], 2, '[env]\nid = "forgets"')
    launch(toml)
    assert lines(tmp_path / "run" / "metrics.jsonl")
    left = subprocess.run(["pgrep", "-fx", forgotten], capture_output=True, text=True).stdout
    assert not left, left


# --- launch.sh --------------------------------------------------------------------------------------------------------


def sh(*args, **env):
    return subprocess.run(
        ["bash", str(ROOT / "launch.sh"), *args], capture_output=True, text=True, env=os.environ | env
    )


def test_help_is_printed():
    for args, code in ((("x.toml", "-h"), 0), (("x.toml", "--help"), 0), ((), 2)):
        done = sh(*args)
        assert done.returncode == code and done.stdout.startswith("bash launch.sh config.toml [table.key=value ...]")
        assert "--check: look for" in done.stdout


def link(folder, *tools):
    folder.mkdir()
    for tool in tools:
        (folder / tool).symlink_to(shutil.which(tool))


def test_tools_that_are_missing_are_named(tmp_path):
    link(tmp_path / "bin", "bash", "realpath", "dirname")
    done = sh("x.toml", PATH=str(tmp_path / "bin"))
    assert (done.returncode, done.stderr) == (2, "[launch] flock is missing: install util-linux (exit=2)\n")


def test_an_old_python_is_named(tmp_path):
    """And a .venv that it made is not taken for one of ours."""
    root, tools = tmp_path / "copy", tmp_path / "bin"
    link(tools, "bash", "realpath", "dirname", "flock", "setpriv", "grep", "sed", "cmp", "cp", "cat")
    (root / ".venv" / "bin").mkdir(parents=True)
    for name in ("launch.sh", "requirements-cpu.txt"):
        shutil.copy(ROOT / name, root)
    shutil.copy(ROOT / "requirements-cpu.txt", root / ".venv" / "requirements.txt")
    for old in (tools / "python3", root / ".venv" / "bin" / "python"):
        old.write_text("#!/bin/sh\nexit 1\n")  # no tomllib
        old.chmod(0o755)
    command = ["bash", str(root / "launch.sh"), "x.toml"]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": str(tools), "KIND": "cpu"})
    text = "[launch] no Python of 3.11 or later is here: install one, or name it by PYTHON (exit=2)\n"
    assert (done.returncode, done.stderr) == (2, text)


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def test_the_code_of_a_failure_is_the_first_reports_or_the_configurations(tmp_path):
    (tmp_path / "logs").mkdir()
    for name in ("inference", "trainer", "orchestrator"):
        (tmp_path / "logs" / f"{name}.log").write_text("=== 2026 a start\n")
    assert launcher.failure(tmp_path, "", "inference", 12, 2).code == 2
    assert launcher.failure(tmp_path, "", "inference", 12, 1).code == 3
    heard = "[orchestrator] exit=4 pid=7 rank=0 bad rows\n[trainer] exit=3 pid=8 rank=0 no batch\n"
    error = launcher.failure(tmp_path, heard, "trainer", 8, 3)
    assert error.code == 4 and str(error).startswith("bad rows (role=orchestrator pid=7 rank=0 exit=4")


def test_half_of_a_shared_gpu_may_be_vllms(planned):  # noqa
    assert planned("inference.args.gpu_memory_utilization=0.5", gpus="0")


def test_another_model_than_the_tomls_is_not_prepared(tmp_path):
    (tmp_path / "some.toml").write_text(BASE.format(model="m"))
    cfg = load_config(tmp_path / "some.toml", [f"output_dir={tmp_path}", "prepare=make.py", "model=other"])
    machine = machines.Machine([], 8, [20001], "tmp", -1, {"ROLEMODEL_RUN_ID": "name"}, [*GIVEN, "model=other"])
    assert [role.name for role in plan(cfg, machine)] == ["orchestrator", "inference", "trainer"]


def test_checkpoints_that_are_there_need_no_more_room(tmp_path, make_cfg):
    """Three are kept while a fourth is written."""
    for step in (100, 200, 300):
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
    with pytest.raises(RunError, match="checkpoints will need 1125900.0 GB more"):
        machines.check_space(tmp_path, make_cfg("checkpoint.keep=3"), 1 << 50)


def test_a_model_made_by_other_code_counts_as_none(tmp_path, make_cfg):
    model, code = tmp_path / "made", tmp_path / "make.py"
    model.mkdir()
    code.write_text("one")
    (model / "made_from").write_text(subprocess.check_output(["sha256sum", code], text=True))
    cfg = make_cfg(model=model)
    assert machines.look_around(cfg, GIVEN, "tmp").model_size > 0
    code.write_text("another")
    assert machines.look_around(cfg, GIVEN, "tmp").model_size == -1


def test_a_lost_connection_is_no_mistake_of_the_users_code():
    for error, code in ((ConnectionResetError("gone"), 3), (KeyError("x"), 4)):
        try:
            raise error
        except Exception as e:
            assert exit_code(e, str(e)) == code


def test_a_server_gives_the_probabilities_it_samples_by_the_experts_it_took_and_the_canary_before_rollouts(planned):
    found = flags(planned("trainer.replay_routing=true", gpus="01")["inference"])
    assert found["--logprobs-mode"] == ["processed_logprobs"] and found["--scheduling-policy"] == ["priority"]
    assert "--enable-return-routed-experts" in found
