"""Runs Python code that a model wrote. It contains accidents and casual abuse, not a kernel-grade sandbox: for hostile
models put the whole orchestrator into a container or virtual machine of its own.

Each call gets user, mount, network, pid and ipc namespaces of its own (unshare) and a root directory of its own, made
of nothing but the system's programs and libraries, read-only, and an empty /tmp of 32 MB. There is no network, no
/proc, no home, no repository, no other mount and no socket of the machine. pid 1 is a shell that waits for the code:
as it ends, so does every process left, daemons too. Capabilities are dropped, and the code has no way to get new ones.
Limits are per process (prlimit); memory in all is bounded by 64 processes only.
"""

import contextlib
import json
import math
import os
import re
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SYSTEM = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache"]
DEVICES = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
NEW_ROOT = "/tmp"  # the new root is mounted over it, in a mount namespace that nobody else sees
SAME_USER = "setpriv --pdeathsig=KILL --no-new-privs"  # its caller's death is its own
NOBODY = f"{SAME_USER} --reuid=65534 --regid=65534 --clear-groups"
NAMESPACES = "unshare --user --map-root-user --mount --net --pid --ipc --fork --kill-child"
NO_CAPABILITIES = "setpriv --no-new-privs --inh-caps=-all --bounding-set=-all"
LIMITS = "prlimit --as=1073741824 --fsize=10485760 --nproc=64 --nofile=64 --core=0"
TOOLS = ["sh", "mount", "mkdir", "touch", "ln", "env", "timeout", "setpriv", "unshare", "prlimit"]
MAX_OUTPUT, MAX_ERRORS = 8192, 1024  # bytes
START_TIMEOUT = 30.0  # s, while the run's other roles start on the same cores

WARNING = """WARNING: Python code that the model writes runs here WITHOUT a sandbox (allow_unsandboxed_python).
It can read files, reach the network and this run's own servers, and leave processes behind."""

# What must not be possible. CASE is the dict that probe() puts before it; it prints a list of what was possible.
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


class CannotContain(Exception):
    code = 2  # the run's exit code


class Sandbox:
    """run(code) -> text. Raises CannotContain where it does not hold; allow_unsandboxed: warns and goes without.

    hide: directories that must not be seen, wherever they are."""

    def __init__(self, hide=(), timeout_s=5.0, allow_unsandboxed=False):
        self.timeout_s, self.script, self.user = timeout_s, None, NOBODY if os.getuid() == 0 else SAME_USER
        self.slots = threading.BoundedSemaphore(max(4, os.cpu_count()))  # so that waiting is not on the code's clock
        missing = [tool for tool in TOOLS if not shutil.which(tool, path=PATH)]
        if missing:
            raise CannotContain(f"Python code cannot be contained here: no {', '.join(missing)} in {PATH}")
        self.python, prefix = find_python()
        if allow_unsandboxed:
            print(WARNING, file=sys.stderr, flush=True)
            problem = self.run("print([])", START_TIMEOUT).removeprefix("[]")
            if problem and self.user == NOBODY:  # root of a user namespace without other users
                self.user = SAME_USER
                problem = self.run("print([])", START_TIMEOUT).removeprefix("[]")
        else:
            visible = [path for path in [*SYSTEM, prefix] if os.path.lexists(path)]
            hide = {os.path.realpath(path) for path in hide} - {"/", *visible}
            self.script = setup_script(visible, hide)
            problem = self.probe(visible, hide)
        if problem:
            raise CannotContain(
                f"Python code cannot be contained here: {problem}. It takes user namespaces, which many containers bar "
                "(try another container runtime, or a virtual machine), and a python3 in /usr. To run the code without "
                "a sandbox, on a machine with nothing to lose: allow_unsandboxed_python = true"
            )

    def run(self, code, timeout_s=None):
        """-> what it printed and the last lines of its errors, 8 KiB at most. Once begun it ends in timeout_s + 3 s."""
        timeout_s = timeout_s or self.timeout_s
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.slots)
            out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))  # a pipe could be kept open
            place = "/" if self.script else stack.enter_context(work_directory(self.user))
            env = {"PATH": PATH, "HOME": place, "LANG": "C.UTF-8"}
            began = time.monotonic()
            process = subprocess.Popen(
                self.command(code, timeout_s), cwd=place, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip
            try:
                wait(process, timeout_s + 2)  # `timeout` is done before, unless the code stopped it
            finally:
                end(process)
            late = time.monotonic() - began >= timeout_s
            return report(out, err, process.returncode, f"[stopped after {timeout_s:g} s]" if late else "")

    def command(self, code, timeout_s):
        python = f"{self.python} -I -c".split()
        clock = f"timeout --foreground --signal=KILL {timeout_s:g}"
        limits = f"{LIMITS} --cpu={math.ceil(timeout_s)}"
        if not self.script:
            return [*f"{self.user} {clock} {limits}".split(), *python, code]
        env = "env -i PATH=/usr/bin:/bin HOME=/tmp LANG=C.UTF-8"
        inside = f"{clock} unshare --root={NEW_ROOT} --wd=/tmp {NO_CAPABILITIES} {limits} {env}"
        # "exit": without a command after it, some shells replace themselves by the code instead of waiting for it
        script = f'{self.script}\n{inside} {shlex.join(python)} "$1"\nexit $?'
        return [*self.user.split(), *NAMESPACES.split(), "sh", "-c", script, "sh", code]

    def probe(self, visible, hide):
        """-> what is wrong, or "". Tries the network, files and processes for real."""
        between = {path: [p for p in visible if Path(p).is_relative_to(path)] for path in hide}
        hidden = {path: [Path(p).relative_to(path).parts[0] for p in found] for path, found in between.items()}
        with socket.create_server(("127.0.0.1", 0)) as server, tempfile.NamedTemporaryFile() as file:
            os.chmod(file.name, 0o644)
            case = {"port": server.getsockname()[1], "hidden": hidden, "path": file.name}
            case["file"] = f"sandbox_probe_{os.getpid()}"
            said = self.run(f"CASE = {json.dumps(case)}\n{PROBE}", START_TIMEOUT)
        if said == "[]":
            return ""
        return "; ".join(json.loads(said)) if said.startswith('["') and said.endswith('"]') else said


def find_python():
    """-> interpreter, the directory it lives in. The system's: it is there for every user; so are its packages."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if os.path.exists(path):
            return path, "/usr"
    return os.path.realpath(sys._base_executable), os.path.realpath(sys.base_prefix)


def setup_script(visible, hide):
    """Shell lines, for root of a new user and mount namespace: builds NEW_ROOT.

    Shown are the paths in `visible`, read-only, save what lies in `hide`."""
    quote, links, folders, files = shlex.quote, [], [f"{NEW_ROOT}/tmp", f"{NEW_ROOT}/dev", f"{NEW_ROOT}/etc"], []
    binds, mounts = [], mount_points()
    for path in dict.fromkeys(visible):
        inside = NEW_ROOT + path
        if os.path.islink(path):
            links.append(f"ln -s {quote(os.readlink(path))} {quote(inside)}")
            continue
        if any(Path(path).is_relative_to(p) for p in visible if p != path):
            continue
        (folders if os.path.isdir(path) else files).append(inside)
        binds.append(f"mount -n --rbind {quote(path)} {quote(inside)}")
        for point in [path] + [p for p, options in mounts if p != path and Path(p).is_relative_to(path)]:
            options = max((m for m in mounts if Path(point).is_relative_to(m[0])), key=lambda m: len(m[0]))[1]
            if "ro" not in options:  # the kernel demands that the other flags stay
                keep = ",".join(["remount,bind,ro", *{"nosuid", "nodev", "noexec"}.intersection(options)])
                binds.append(f"mount -n -o {keep} {quote(NEW_ROOT + point)}")
    for path in hide:
        if os.path.isdir(path) and any(Path(path).is_relative_to(p) for p in visible):
            binds.append(f"mount -n -t tmpfs -o ro tmpfs {quote(NEW_ROOT + path)}")
    for device in DEVICES:
        files.append(NEW_ROOT + device)
        binds.append(f"mount -n --bind {device} {NEW_ROOT}{device}")
    return "\n".join([
        "set -e", f"mount -n -t tmpfs -o size=1m,mode=755 tmpfs {NEW_ROOT}", f"mkdir -p {shlex.join(folders)}",
        f"touch {shlex.join(files)}", *links, *binds,
        f"mount -n -t tmpfs -o size=32m,nr_inodes=4096,mode=700 tmpfs {NEW_ROOT}/tmp",
        f"mount -n -o remount,bind,ro {NEW_ROOT}",
    ])  # fmt: skip


def mount_points():
    """-> [(path, options)] of this machine's mounts."""
    fields = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [(re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), f[4]), f[5].split(",")) for f in fields]


@contextlib.contextmanager
def work_directory(user):
    """A fresh one, 0700, for code without a sandbox."""
    path = tempfile.mkdtemp(prefix="python_tool_")
    try:
        if user == NOBODY:
            with contextlib.suppress(OSError):  # there may be no such user
                os.chown(path, 65534, 65534)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def wait(process, timeout_s):
    """Until it has ended, at most so long. Leaves it unreaped: its number cannot become another process's."""
    handle = os.pidfd_open(process.pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        poll.poll(timeout_s * 1000)
    finally:
        os.close(handle)


def end(process):
    """Kills what is left of it, and reaps it.

    Its child goes first: pid 1 of the sandbox is dead when all it takes along are, and `unshare` ends after that."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for child in children.read_text().split() if children.exists() else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
        wait(process, 1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def report(out, err, returncode, stopped):
    """What the model gets to see: what was printed, errors, how it ended. Reads no more of the files than that."""
    size = os.fstat(out.fileno()).st_size
    printed = text(os.pread(out.fileno(), MAX_OUTPUT, 0), MAX_OUTPUT - 2 * MAX_ERRORS)
    start = max(0, os.fstat(err.fileno()).st_size - MAX_ERRORS)
    errors = "\n".join(text(os.pread(err.fileno(), MAX_ERRORS, start), MAX_ERRORS).splitlines()[-10:])
    parts = [printed.rstrip("\n")]
    if size > MAX_OUTPUT - 2 * MAX_ERRORS:
        parts.append(f"[cut: {size} bytes printed]")
    parts.append(errors)
    if returncode and (stopped or not errors):
        parts.append(stopped or f"[exit code {returncode}]")
    return "\n".join(part for part in parts if part) or "[nothing printed]"


def text(data, limit):
    """Bytes -> text of at most `limit` bytes."""
    return data.decode(errors="replace").encode()[:limit].decode(errors="ignore")
