"""What is known about the machine before anything starts, and what a run asks of it."""

import os
import random
import re
import shlex
import shutil
import socket
import subprocess
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from configs.runtime.role import CONFIG, STORAGE, RunError, require


class Machine(NamedTuple):
    """What launch.py's plan must know about the place and the command line."""

    gpus: list  # as in CUDA_VISIBLE_DEVICES; empty if there are none
    cpus: int
    ports: list  # one for each server to start
    tmp: str  # a short path, as vLLM's sockets need it
    model_size: int  # bytes of the largest file in the model's directory; -1 if it is not there
    environ: dict
    args: list  # config.toml table.key=value ...


def look_around(cfg, args, tmp):
    """The Machine."""
    listed = subprocess.getoutput("nvidia-smi -L || ls /dev")
    numbers = re.findall("(?m)^(?:GPU |nvidia)([0-9]+)", listed)
    parts = re.findall(r"\(UUID: (MIG-[^)]+)\)", listed)  # without its name a part of a GPU is not seen to be one
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(parts or numbers))
    named = re.findall("[^,]+", visible) if numbers else []
    gpus = list(takewhile(lambda name: name not in ("-1", "NoDevFiles"), named))  # as CUDA reads them
    cpus = len(os.sched_getaffinity(0))
    sizes = [path.stat().st_size for path in Path(cfg.run.model).glob("*")]
    # Sums of the code that `prepare` made the model from.
    is_stale = "FAILED" in subprocess.getoutput(f"LC_ALL=C sha256sum -c {shlex.quote(cfg.run.model)}/made_from")
    size = -1 if is_stale else max(sizes, default=-1)
    return Machine(gpus, cpus, choose_ports(cfg.inference), tmp, size, dict(os.environ), args)


def choose_ports(inference):
    """One for each server to start: those asked for, or free ones below those that the kernel hands out."""
    num = 0 if inference.urls else inference.gpus // inference.args["tensor_parallel_size"]
    port = inference.port or random.randrange(20000, 31000)
    ports = []
    while len(ports) < num:
        with socket.socket() as s:
            is_taken = s.connect_ex(("127.0.0.1", port)) == 0
        if not is_taken:
            ports.append(port)
        elif inference.port:
            raise RunError(CONFIG, f"port {port} is in use: leave inference.port out, or set another")
        port += 1
    return ports


def check_machine(run_dir, cfg, machine):
    """Raises RunError for what would end the run minutes later."""
    check_space(run_dir, cfg, checkpoint_size(cfg.run.model))
    if machine.gpus:
        check_driver(subprocess.getoutput("nvidia-smi"), cuda_of_torch())
        check_shared_memory(cfg, shutil.disk_usage("/dev/shm").free)


def cuda_of_torch():
    """The major version of CUDA that torch was built with, without importing it; 0 if it is not known."""
    try:
        return int(version("nvidia-cuda-runtime").split(".")[0])
    except PackageNotFoundError:  # the packages of CUDA 12 have it in their names
        return 0


def check_driver(table, needed):
    """table: nvidia-smi's, which says up to which version of CUDA the driver goes."""
    found = re.search(r"CUDA (?:UMD )?Version: *((\d+)\.\d+)", table)
    text = f"the NVIDIA driver goes up to CUDA {found and found[1]}, and torch is built for CUDA {needed}"
    remedy = "install driver 580 or newer (CUDA 13)"
    require(not found or int(found[2]) >= needed, CONFIG, f"{text}: {remedy}")


def check_shared_memory(cfg, free):
    """NCCL and vLLM's workers exchange messages in /dev/shm, of which Docker gives a container 64 MB."""
    args = cfg.inference.args
    has_several = cfg.trainer.gpus > 1 or args["tensor_parallel_size"] > 1 or args.get("pipeline_parallel_size", 1) > 1
    text = f"/dev/shm has {free >> 20} MiB left, and several GPUs need 1,024: docker run --shm-size=16g, or --ipc=host"
    require(not has_several or free >= 1 << 30, CONFIG, text)


def checkpoint_size(model):
    """Bytes of a checkpoint of full training, 12 for each parameter: weights and two moments in fp32. 0 if the model is
    not here yet. Models are saved in the dtype that their configuration names."""
    total = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    config = Path(model, "config.json")
    is_fp32 = config.exists() and re.search(r'"(torch_)?dtype": *"float32"', config.read_text(errors="replace"))
    return total * 12 // (4 if is_fp32 else 2)


def check_space(run_dir, cfg, size):
    """size: bytes of a checkpoint of full training."""
    num = 1  # at the end
    if 0 < cfg.checkpoint.every < cfg.run.max_steps:
        num = cfg.checkpoint.keep + 1
    existing = len(list(run_dir.glob("checkpoints/step_??????")))
    need = 0.1
    if cfg.run.max_steps and not cfg.trainer.use_lora:
        need += max(1, num - existing) * size / 1e9
    free = free_gb(run_dir)
    text = f"{run_dir}: its disk has {free:.1f} GB left, and checkpoints will need {need:.1f} GB more"
    require(free > need, STORAGE, text)


def free_gb(path):
    return shutil.disk_usage(path).free / 1e9
