"""How a role (trainer, orchestrator, ...) begins, shows that it is alive, reports to the launcher and ends."""

import ctypes
import importlib
import os
import re
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path

# Exit codes.
CONFIG = 2  # the configuration is wrong
DIED = 3  # a role died or hung
DATA = 4  # the task or its data are wrong
NUMERICS = 5  # gradients or weights are not finite, or the KL is above 1
STORAGE = 6  # the disk is full or fails
STORAGE_ERRORS = r"(Errno|os error) (5|13|17|20|28|30|122)\b"  # EIO, EACCES, EEXIST, ENOTDIR, ENOSPC, EROFS, EDQUOT
PR_SET_PDEATHSIG = 1
ROOT = re.escape(str(Path(__file__).parents[2]))
# Files in which no user's code is: ours, apart from tasks, and those of libraries.
OURS = rf"{ROOT}/((env|orchestrator|trainer|launch).py|tools/|configs/(__init__|(?!tasks/)\w+/))"
OURS += "|<|.*/(lib(64)?/python|site-packages)"
STDOUT = []  # a copy of the file descriptor


class RunError(Exception):
    """Ends the run with an exit code: CONFIG, DIED, DATA, ... Its text is the last line that a user sees."""

    def __init__(self, code, cause):
        super().__init__(cause)
        self.code = code


def require(condition, code, cause):
    """Raises RunError unless the condition holds."""
    if not condition:
        raise RunError(code, cause)


def heartbeat():
    """Tells the launcher's watchdog that this process makes progress. Costs microseconds: it touches a file."""
    folder = os.environ.get("ROLEMODEL_PROGRESS")
    if folder:
        Path(folder, str(os.getpid())).touch()


def report(line):
    """Sends one line to the launcher. A pipe works on a full disk, and torchrun turns every exit code into 1."""
    pipe = os.environ.get("ROLEMODEL_PIPE")
    if not pipe:
        return
    with suppress(OSError), open(pipe, "w", errors="replace") as launcher:
        # The end of a long message is kept as well: a worker's traceback ends with its cause.
        launcher.write(f"{line[:300]}{line[300:][-1200:]}\n")


def say(line):
    """Writes a line that the launcher shows on the console. sys.stdout belongs to user code, which may have replaced or
    closed it, or left it in the middle of a line."""
    fd = STDOUT[0] if STDOUT else 1
    start = "" if os.isatty(fd) else "\n"
    os.write(fd, f"{start}{line}\n".encode(errors="replace"))


def end_with_parent():
    """Asks the kernel to kill this process when its parent dies, and ends it if the launcher has died already."""
    pipe = os.environ.get("ROLEMODEL_PIPE")
    if not pipe:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.stat(pipe)  # raises if the launcher is gone or a zombie


def first_cause(error):
    """The error inside torch's CheckpointException, which has one per rank, or inside asyncio's exception groups."""
    if hasattr(error, "failures"):
        return first_cause(next(iter(error.failures.values()))[0])
    if isinstance(error, BaseExceptionGroup):
        return first_cause(error.exceptions[0])
    return error


def place_of(error):
    """' in function, file:line', where the user's code was last on the way of an error; "" if it was not on it."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not re.match(OURS, frame.filename):
            place = f" in {frame.name}, {Path(frame.filename).name}:{frame.lineno}"
    return place


def exit_code(error, text):
    """The code that an error carries if it is one of ours; STORAGE for a failing disk; DATA for a mistake in the user's
    code; otherwise DIED."""
    code = getattr(error, "code", None)
    if code in (CONFIG, DATA, NUMERICS, STORAGE):
        return code
    if re.search(STORAGE_ERRORS, text):  # safetensors has the system's error number in the text alone
        return STORAGE
    is_mistake = isinstance(error, Exception) and not isinstance(error, OSError)  # a lost connection is one
    return DATA if is_mistake and place_of(error) else DIED


def fail(role, e):
    """Reports how a role failed, and ends the process with the exit code for that, from any thread."""
    error = first_cause(e)
    text = f"{type(error).__name__}: {' '.join(str(error).split())}".removeprefix("RunError: ")
    code = exit_code(error, text)
    if not isinstance(error, RunError):
        text += place_of(error)
    report(f"[{role}] exit={code} pid={os.getpid()} rank={os.environ.get('RANK', 0)} {text}")
    with suppress(OSError):  # a full disk must not change the code
        if code == DIED or (code == DATA and not hasattr(error, "code")):
            sys.__excepthook__(type(error), error, error.__traceback__)
        print(f"[{role}] exit={code} {text}", file=sys.stderr, flush=True)
    os._exit(code)  # not sys.exit: threads that wait for a dead peer would hold the process


def run_role(role, module=None):
    """Runs `main(sys.argv[1:])` of a module, reports how it failed, and exits with the code for that.

    The module is imported even where its file is the script: a hook that imports it gets the module that runs, not a
    second copy. With PYTHONFAULTHANDLER, which the launcher sets, SIGABRT prints every thread's stack."""
    end_with_parent()
    STDOUT.append(os.dup(1))
    try:
        importlib.import_module(module or role).main(sys.argv[1:])
        with suppress(OSError, ValueError):  # user code may have closed it
            sys.stdout.flush()
    except BaseException as e:  # not sys.excepthook, which torch.distributed wraps
        if isinstance(e, SystemExit | KeyboardInterrupt) and not place_of(e):
            raise  # argparse's, or a signal's; user code's is an error
        fail(role, e)
    os._exit(0)
