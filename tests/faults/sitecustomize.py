"""Breaks a role of ours at an exact point, without a line for it in the product.

    PYTHONPATH=tests/faults FAULT=fwd@1,3:9 bash launch.sh config.toml     # rank 1, step 3, SIGKILL

FAULT=point[@rank,step]:action. The points are start_<role> and those of POINTS; without a rank and a step the first
call on any rank counts. The action is a signal's number (9: killed, 19: stopped, 0: held for a minute), or enospc for
an OSError as of a full disk. What happens is told on standard error: "[fault] fwd@1,3 in process 123".

Python imports a module of this name at its start wherever it finds one on its path. This one waits for
`configs.runtime.role` to be imported and wraps its run_role, so that main runs under sys.setprofile, which is told of
every call and return. Imports are not slowed down, and processes without a role (vLLM, torchrun's agent) are left
alone."""

import importlib
import os
import sys
import threading
import time
from importlib.machinery import PathFinder


def step(local):
    return local["step"]


def version(local):
    return local["version"]


# point: the event, what is called or returns (a Python function by its name, a C function itself), the function in
# whose body, however deep, that counts, and the step, from the local variables there
POINTS = {
    "gen": ("call", "sample", "sample", lambda local: local["client"].version),
    "batch_write": ("c_call", os.replace, "save_batch", lambda local: local["info"].get("step", 0)),
    "fwd": ("call", "Policy.forward", "train_step", step),
    "bwd": ("return", "Policy.forward", "train_step", step),
    "opt": ("call", "apply_gradients", "train_step", step),
    "gather": ("call", "stream_weights", "send_weights", version),
    "bcast": ("call", "send_block", "send_weights", version),
    "ckpt_write": ("return", "HuggingFaceStorageWriter.write_data", "save_checkpoint", step),
    "ckpt_before_rename": ("c_call", os.rename, "save_checkpoint", step),
    "ckpt_after_rename": ("c_return", os.rename, "save_checkpoint", step),
}
WHERE, _, ACTION = os.environ.get("FAULT", "").partition(":")


def fault(point, now):
    """Breaks this process if FAULT means this point, at this step, on this rank."""
    if WHERE in (point, f"{point}@{os.environ.get('RANK', 0)},{now}"):
        print(f"[fault] {WHERE} in process {os.getpid()}", file=sys.stderr, flush=True)
        if ACTION == "enospc":
            raise OSError(28, os.strerror(28))
        os.kill(os.getpid(), int(ACTION))
        time.sleep(60)


def watch(point):
    """-> a profile function for this point; what it raises comes out of the call."""
    wanted, called, inside, when = POINTS[point]

    def profile(frame, event, arg):
        if event != wanted:
            return
        if not (arg is called if event.startswith("c_") else frame.f_code.co_qualname == called):
            return
        if event == "call" and frame.f_lineno != frame.f_code.co_firstlineno:
            return  # a generator or coroutine that goes on, which is told as a call, too
        for around in (frame, *sys._current_frames().values()):  # a broadcast runs in a thread of its own
            while around and around.f_code.co_qualname != inside:
                around = around.f_back
            if around:
                return fault(point, when(around.f_locals))

    return profile


def wrap(run_role):
    def wrapped(role, module=None):
        importlib.import_module(module or role)  # before anything is watched, since that slows it down
        fault(f"start_{role}", 0)
        point = WHERE.partition("@")[0]
        if point in POINTS:
            threading.setprofile(watch(point))
            sys.setprofile(watch(point))
        run_role(role, module)

    return wrapped


class Finder:
    """Finds configs.runtime.role alone and leaves all other modules to the finders behind it."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name == "configs.runtime.role" else None
        if not spec:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            module.run_role = wrap(module.run_role)

        spec.loader.exec_module = exec_module
        return spec


if WHERE:
    sys.meta_path.insert(0, Finder)
