"""Runs Python code that a model wrote. The sandbox contains accidents and casual abuse, but it is no defense against
attacks on the kernel. For hostile models, put the whole orchestrator into its own container or virtual machine.

Each call gets its own user, mount, network, pid and ipc namespaces (unshare) and its own root directory, which holds
only the system's programs and libraries, read-only, and an empty /tmp of 32 MB. There is no network, no /proc, no home,
no repository, no other mount and none of the machine's sockets. pid 1 is a shell that waits for the code; when it ends,
the kernel ends every process that is left, daemons included. Capabilities are dropped, and the code cannot regain them.
Limits are per process (prlimit); only the limit of 64 processes bounds the memory of all of them together.
"""

import contextlib
import json
import math
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

from rolemodel.role import ConfigError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache"]
DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
NEW_ROOT = "/tmp"  # the new root is mounted over this path, in a mount namespace that no other process sees
SAME_USER = "setpriv --pdeathsig=KILL --no-new-privs"  # it dies with its caller
NOBODY = f"{SAME_USER} --reuid=65534 --regid=65534 --clear-groups"
NAMESPACES = "unshare --user --map-root-user --mount --net --pid --ipc --fork --kill-child"
NO_CAPABILITIES = "setpriv --no-new-privs --inh-caps=-all --bounding-set=-all"
LIMITS = "prlimit --as=1073741824 --fsize=10485760 --nproc=64 --nofile=64 --core=0"
MAX_OUTPUT = 8192  # bytes in all
MAX_ERRORS = 1024  # bytes of them for errors
START_TIMEOUT = 30.0  # s for a trial, since the run's other roles start on the same cores

WARNING = """WARNING: Python code that the model writes runs here WITHOUT a sandbox (allow_unsandboxed_python).
It can read files, reach the network and this run's own servers, and leave processes behind."""

REFUSAL = "Python code cannot be contained here: {problem}. The sandbox needs user namespaces, which many containers "
REFUSAL += (
    "forbid (try another container runtime, or a virtual machine), and a python3 in /usr. To run the code without a "
)
REFUSAL += "sandbox, on a machine with nothing to lose: allow_unsandboxed_python = true"

# Tries what must not be possible, and prints a list of what was. CASE is a dict that probe() writes in front of it.
PROBE = """
import json, os, resource, socket
leaks = []
def must_fail(leak, function, *args):
    try:
        function(*args)
    except OSError:
        return
    leaks.append(leak)
must_fail("the network is reachable", socket.create_connection, ("127.0.0.1", CASE["port"]), 1)
for path in ["/", "/etc", "/usr", *CASE["hidden"]]:
    must_fail(f"{path} can be written", open, os.path.join(path, CASE["file"]), "x")
for path, allowed in CASE["hidden"].items():
    if os.path.isdir(path) and set(os.listdir(path)) - set(allowed):
        leaks.append(f"{path} can be read")
must_fail("files outside can be read", open, CASE["path"])
must_fail("there are capabilities", os.chroot, ".")
if os.getsid(0):
    leaks.append("processes outside can be seen")
if set(os.environ) != {"PATH", "HOME", "LANG"}:
    leaks.append(f"environment variables {sorted(os.environ)}")
for limit, most in [(resource.RLIMIT_AS, 2**30), (resource.RLIMIT_NPROC, 64), (resource.RLIMIT_FSIZE, 10 * 2**20)]:
    if not 0 <= resource.getrlimit(limit)[1] <= most:  # -1: none
        leaks.append("there are no limits")
open("scratch", "w").close()
print(json.dumps(leaks))
"""


class Sandbox:
    """run(code) returns text. The constructor raises ConfigError if this machine cannot contain code.

    hide: directories that the code must not see, wherever they are.
    allow_unsandboxed: print a warning and run the code without a sandbox."""

    def __init__(self, hide: Iterable[str | Path] = (), timeout_s: float = 5.0, allow_unsandboxed: bool = False):
        self.timeout_s = timeout_s
        self.script = None
        self.user = NOBODY if os.getuid() == 0 else SAME_USER
        self.slots = threading.BoundedSemaphore(max(4, os.cpu_count()))  # waiting for a core must not use up the time
        self.python, prefix = find_python()
        if allow_unsandboxed:
            print(WARNING, file=sys.stderr, flush=True)
            problem = self.run("print([])", START_TIMEOUT).removeprefix("[]")
            if problem and self.user == NOBODY:  # we may be root of a user namespace that has no other users
                self.user = SAME_USER
                problem = self.run("print([])", START_TIMEOUT).removeprefix("[]")
        else:
            visible = [path for path in [*SYSTEM, prefix] if os.path.lexists(path)]
            hide = {os.path.realpath(path) for path in hide} - {"/", *visible}
            self.script = setup_script(visible, hide)
            problem = self.probe(visible, hide)
        if problem:
            raise ConfigError(REFUSAL.format(problem=problem))

    def run(self, code: str, timeout_s: float | None = None) -> str:
        """Returns what the code printed and the last lines of its errors, at most 8 KiB. It ends within timeout_s + 3 s
        from the code's start."""
        timeout_s = timeout_s or self.timeout_s
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.slots)
            out = stack.enter_context(tempfile.TemporaryFile())  # not a pipe, which the code could keep open
            err = stack.enter_context(tempfile.TemporaryFile())
            given = stack.enter_context(tempfile.TemporaryFile())
            if len(code) > 30_000:  # characters of up to 4 bytes: Linux allows 128 KiB for an argument
                os.pwrite(given.fileno(), code.encode(errors="surrogatepass"), 0)
                code = "exec(__import__('sys').stdin.read())"
            place = "/"
            if not self.script:
                folder = tempfile.TemporaryDirectory(prefix="python_tool_", ignore_cleanup_errors=True)
                place = stack.enter_context(folder)
                if self.user == NOBODY:
                    with contextlib.suppress(OSError):  # this user may not exist
                        os.chown(place, 65534, 65534)
            began = time.monotonic()
            env = {"PATH": PATH, "HOME": place, "LANG": "C.UTF-8"}
            options = {"stdin": given, "stdout": out, "stderr": err, "start_new_session": True}
            process = subprocess.Popen(self.command(code, timeout_s), cwd=place, env=env, **options)
            try:
                wait(process, timeout_s + 2)  # `timeout` has ended it by then, unless the code stopped `timeout`
            finally:
                end(process)
            is_late = time.monotonic() - began >= timeout_s
            stopped = f"[stopped after {timeout_s:g} s]" if is_late else ""
            return report(out, err, process.returncode, stopped)

    def command(self, code: str, timeout_s: float) -> list[str]:
        python = f"{self.python} -I -c".split()
        clock = f"timeout --foreground --signal=KILL {timeout_s:g}"
        limits = f"{LIMITS} --cpu={math.ceil(timeout_s) + 1}"  # so that the clock ends it first
        if not self.script:
            return [*f"{self.user} {clock} {limits}".split(), *python, code]
        env = "env -i PATH=/usr/bin:/bin HOME=/tmp LANG=C.UTF-8"
        inside = f"{clock} unshare --root={NEW_ROOT} --wd=/tmp {NO_CAPABILITIES} {limits} {env}"
        # The `exit` matters: without a command after the code, some shells replace themselves by it and do not wait.
        script = f'{self.script}\n{inside} {shlex.join(python)} "$1"\nexit $?'
        return [*self.user.split(), *NAMESPACES.split(), "sh", "-c", script, "sh", code]

    def probe(self, visible: list[str], hide: set[str]) -> str:
        """Returns what is wrong, or "". It really tries the network, files and processes."""
        # {hidden directory: the entries in it that lead to something visible}
        hidden = {}
        for path in hide:
            inside = [Path(p).relative_to(path) for p in visible if Path(p).is_relative_to(path)]
            hidden[path] = [p.parts[0] for p in inside]
        with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile() as file:
            os.chmod(file.name, 0o644)
            case = {"port": server.getsockname()[1], "path": file.name, "file": f"sandbox_probe_{os.getpid()}"}
            case["hidden"] = hidden
            printed = self.run(f"CASE = {json.dumps(case)}\n{PROBE}", START_TIMEOUT)
        return "" if printed == "[]" else printed


def find_python() -> tuple[str, str]:
    """Returns an interpreter and the directory it lives in. The system's comes first: every user can run it, with its
    packages."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.path.exists(path):
            return path, "/usr"
    return os.path.realpath(sys._base_executable), os.path.realpath(sys.base_prefix)


def setup_script(visible: list[str], hide: Iterable[str]) -> str:
    """Returns shell lines that build NEW_ROOT, to be run by root of a new user and mount namespace.

    They show the paths in `visible`, read-only, except for what lies in `hide`."""
    folders = [f"{NEW_ROOT}/tmp", f"{NEW_ROOT}/dev", f"{NEW_ROOT}/etc"]
    files = [NEW_ROOT + device for device in DEVICES]
    links = []
    mounts = []
    for path in dict.fromkeys(visible):
        others = [other for other in visible if other != path]
        if os.path.islink(path):
            links.append(f"ln -s {shlex.quote(os.readlink(path))} {shlex.quote(NEW_ROOT + path)}")
        elif not is_inside(path, others):
            kind = folders if os.path.isdir(path) else files
            kind.append(NEW_ROOT + path)
            mounts += bind_read_only(path)
    for path in hide:
        if os.path.isdir(path) and is_inside(path, visible):
            mounts.append(f"mount -n -t tmpfs -o ro tmpfs {shlex.quote(NEW_ROOT + path)}")
    mounts += [f"mount -n --bind {device} {NEW_ROOT}{device}" for device in DEVICES]
    lines = [
        "set -e",
        f"mount -n -t tmpfs -o size=1m,mode=755 tmpfs {NEW_ROOT}",
        f"mkdir -p {shlex.join(folders)}",
        f"touch {shlex.join(files)}",
        *links,
        *mounts,
        f"mount -n -t tmpfs -o size=32m,nr_inodes=4096,mode=700 tmpfs {NEW_ROOT}/tmp",
        f"mount -n -o remount,bind,ro {NEW_ROOT}",
    ]
    return "\n".join(lines)


def is_inside(path: str | Path, folders: Iterable[str]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def bind_read_only(path: str) -> list[str]:
    """Returns shell lines that show a path in NEW_ROOT. Each mount point below it must be made read-only on its own."""
    lines = [f"mount -n --rbind {shlex.quote(path)} {shlex.quote(NEW_ROOT + path)}"]
    mounts = [(mount.mountpoint, mount.opts.split(",")) for mount in psutil.disk_partitions(all=True)]
    below = [point for point, _ in mounts if point != path and is_inside(point, [path])]
    for point in [path, *below]:
        # It belongs to the longest mount point above it.
        above = [mount for mount in mounts if is_inside(point, [mount[0]])]
        _, options = max(above, key=lambda mount: len(mount[0]))
        if "ro" not in options:
            kept = {"nosuid", "nodev", "noexec"}.intersection(options)  # the kernel demands that these flags stay
            flags = ",".join(["remount,bind,ro", *kept])
            lines.append(f"mount -n -o {flags} {shlex.quote(NEW_ROOT + point)}")
    return lines


def wait(process: subprocess.Popen, timeout_s: float):
    """Waits until a process has ended, but no longer than timeout_s. The process stays a zombie, so that no other
    process can get its number."""
    handle = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll(timeout_s * 1000)
    finally:
        os.close(handle)


def end(process: subprocess.Popen):
    """Kills what is left of a process, and reaps it.

    Its child is killed first. This is pid 1 of the sandbox, which only ends after all the other processes in it; then
    `unshare` ends as well."""
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    children = file.read_text().split() if file.exists() else []
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
        wait(process, 1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report(out, err, returncode: int, stopped: str) -> str:
    """The text that the model gets to see: what was printed, the errors, and how it ended. Only the part that is shown
    is read from large files."""
    limit = MAX_OUTPUT - 2 * MAX_ERRORS
    size = os.fstat(out.fileno()).st_size
    printed = os.pread(out.fileno(), MAX_OUTPUT, 0).decode(errors="replace").encode()
    errors = "\n".join(tail(err, MAX_ERRORS).splitlines()[-10:])
    parts = [printed[:limit].decode(errors="ignore").rstrip("\n")]
    if size > limit:
        parts.append(f"[cut: {size} bytes printed]")
    parts.append(errors)
    if returncode and (stopped or not errors):
        parts.append(stopped or f"[exit code {returncode}]")
    return "\n".join(part for part in parts if part) or "[nothing printed]"


def tail(file, limit: int) -> str:
    """The end of what was written to a file, as text of at most `limit` bytes."""
    start = max(0, os.fstat(file.fileno()).st_size - limit)
    data = os.pread(file.fileno(), limit, start).decode(errors="replace").encode()
    return data[-limit:].decode(errors="ignore")
