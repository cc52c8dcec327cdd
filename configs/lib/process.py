"""A role as a process: how it begins, how it ends and says why, how its waits are bounded, how tests break it."""

import contextlib
import errno
import faulthandler
import json
import os
import shutil
import signal
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from configs.lib.runtime import RunError


class UserThreads(ThreadPoolExecutor):
    """For blocking user code: nobody waits for a thread that never comes back."""

    def shutdown(self, wait=True, *, cancel_futures=False):
        super().shutdown(wait=False, cancel_futures=True)


def run_role(role, main):
    """main(sys.argv[1:]), then the exit code of what it raised; the first role to fail says why in exit.json.

    torchrun answers 1 whatever its workers exit with, so the code has to travel by a file."""
    faulthandler.enable()  # SIGABRT, which launch.sh sends when a run hangs, prints every thread's stack
    if role == "trainer":  # SIGTERM, too: torchrun's to a rank that hangs while another gave up
        faulthandler.register(signal.SIGTERM, chain=True)
    try:
        fault(f"start_{role}")
        main(sys.argv[1:])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    except BaseException as e:
        cause = e
        while isinstance(cause, BaseExceptionGroup):  # from asyncio.TaskGroup
            cause = cause.exceptions[0]
        if isinstance(cause, SystemExit):
            raise
        code, text = explain(cause)
        with contextlib.suppress(OSError):  # the disk may be full, which must not change the code
            tell(role, code, text)
            if not isinstance(cause, RunError):
                traceback.print_exception(cause)
            print(f"[{role}] exit {code}: {text}", file=sys.stderr, flush=True)
            sys.stdout.flush()
        os._exit(code)  # not sys.exit: threads that wait for a dead peer must not hold the process


def explain(cause):
    """-> exit code, one line."""
    if isinstance(cause, RunError):
        return cause.code, " ".join(str(cause).split())
    text = " ".join(f"{type(cause).__name__}: {cause}".split())
    # safetensors raises an error of its own, with the system's number in its text
    number = getattr(cause, "errno", None) or next((n for n in STORAGE if f"os error {n})" in text), None)
    if number in STORAGE:
        place = os.path.dirname(os.environ.get("ROLEMODEL_EXIT_FILE", "")) or "."
        return 6, f"{text}; {shutil.disk_usage(place).free:,} bytes are free in {place}"
    code = 130 if isinstance(cause, KeyboardInterrupt) else getattr(cause, "code", 3)
    return code if code in (2, 3, 4, 5, 6, 130) else 3, text  # other people's errors have codes, too


STORAGE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)


def tell(role, code, text):
    """exit.json, by the first to rename its reserve: 4 KiB that are on the disk already, should it be full now."""
    file = os.environ.get("ROLEMODEL_EXIT_FILE")
    if not file or not os.path.exists(reserve := f"{file}.reserve"):
        return
    with contextlib.suppress(FileNotFoundError):  # another role was first
        os.rename(reserve, file)
        rank = int(os.environ.get("RANK", 0))
        if len(text) > 1500:  # a worker's traceback ends in its cause
            text = f"{text[:300]} ... {text[-1200:]}"
        about = {"role": role, "rank": rank, "pid": os.getpid(), "code": code, "cause": text, "time": time.time()}
        with open(file, "r+") as f:
            f.write(json.dumps(about))


def fault(point, step=0):
    """For tests: FAULT=point:action[@rank,step] breaks this process at exactly this point; without it, nothing.

    Actions: kill9, stop (SIGSTOP), raise, enospc, sleep:SECONDS."""
    if not (wanted := os.environ.get("FAULT")):
        return
    where, _, at = wanted.partition("@")
    name, _, action = where.partition(":")
    if name != point or (at and at != f"{os.environ.get('RANK', 0)},{step}"):
        return
    print(f"[fault] {wanted} in process {os.getpid()}", file=sys.stderr, flush=True)
    match action.partition(":"):
        case "kill9", _, _:
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop", _, _:
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(5)  # continued to take SIGABRT, which another thread may be the one to handle
        case "sleep", _, seconds:
            time.sleep(float(seconds))
        case "enospc", _, _:
            raise OSError(errno.ENOSPC, "No space left on device")
        case _:
            raise RuntimeError(f"fault asked for: {wanted}")


def start_distributed(cfg=None):
    """torchrun's variables, or one rank without it -> rank, number of ranks, device.

    No rank waits longer for another than rank 0 may wait for the servers' start, a batch and a broadcast."""
    import torch
    import torch.distributed as dist

    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone if "RANK" not in os.environ else {})
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    longest = 600.0
    if cfg:
        t = cfg.trainer
        longest = max(cfg.inference.startup_timeout, t.batch_timeout_s) + t.sync_timeout_s + cfg.eval.hold_s
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=longest))
    return dist.get_rank(), dist.get_world_size(), device


def free_port(taken=()):
    """A port of the loopback that nobody has. Raises RunError 2 if one of `taken`, which the run wants, is in use."""
    import socket

    for port in taken:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection that lingers is no listener
            try:
                s.bind(("127.0.0.1", port))
            except OSError as e:
                raise RunError(2, f"port {port} is in use: set inference.port ({e})") from None
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
