"""A command as an agent: a list of words, of which each rollout starts a process that asks the rollout's endpoint.

    AgentEnv(["my-agent", "--ask", "{question}"], rows, allow_code=True)
    AgentEnv(Command(["node", "/opt/agent/cli.js", "{prompt}"], sandbox=True, show=["/opt/agent"]), rows)

Words may hold {base_url}, {prompt} (the text of the user's last message) and {key}, a text or number of the row. What
the command prints is state["result"]. If it fails the rollout is discarded, unless `forgive` has its exit code.

Its environment is the run's, without what looks like a secret, and with:
    OPENAI_BASE_URL, OPENAI_API_BASE, ANTHROPIC_BASE_URL, and keys that mean nothing
    TASK                the row as JSON without its answer; keep solutions out of its other columns. Not set above
                        100 kB: Linux allows 128 KiB for a variable, and for a word: with a longer {prompt} the
                        rollout is discarded
    HOME, TMPDIR        its working directory, which is new and empty, and is removed afterwards

A command runs what the model writes. Without a sandbox that can read and change whatever this user can, but all its
processes end with the rollout: they live in a pid namespace. In the sandbox (sandbox.py; it is no defense against
attacks on the kernel) there is no network, and nothing but the system's programs. A relay leads to the endpoint.
"""

import asyncio
import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from rolemodel.environments import endpoint, sandbox
from rolemodel.environments.sandbox import NEW_ROOT, SAME_USER
from rolemodel.role import ConfigError
from rolemodel.run_directory import to_json

PLAIN = f"{SAME_USER} unshare --user --map-current-user --pid --fork --kill-child"
LONGEST_TASK = 100_000
LIMITS = "prlimit --core=0 --fsize=4294967296"  # also without a sandbox: endless output must not fill the disk
# pid 1 is a shell, since a signal does not end a pid 1 that has no handler for it. The `exit` makes the shell wait.
WAIT = '"$@"\nexit $?'
ETC = ["/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf"]  # Node and others look themselves up
MAX_OUTPUT = 1 << 16  # bytes of a file that are read
PRIVATE = re.compile("key|token|secret|passw|credential|auth|^rolemodel_|^pythonpath$", re.IGNORECASE)
REFUSAL = "a command runs what the model writes. Allow it: allow_code = true (on this machine, as this user), "
REFUSAL += "or sandbox = true (without a network, and with nothing but the system's programs)"

# Brings up the loopback of a network namespace: SIOCSIFFLAGS, IFF_UP. Many containers have no program `ip`.
LOOPBACK = 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH22x", b"lo", 1))'

# Runs a command, and meanwhile leads connections to a port of the loopback to the endpoint's socket.
RELAY = """
import contextlib, socket, subprocess, sys, threading

def copy(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)

def serve(server):
    while True:
        inside, _ = server.accept()
        outside = socket.socket(socket.AF_UNIX)
        outside.connect("/endpoint")
        for pair in [(inside, outside), (outside, inside)]:
            threading.Thread(target=copy, args=pair, daemon=True).start()

server = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=128)
threading.Thread(target=serve, args=[server], daemon=True).start()
code = subprocess.call(sys.argv[2:])
sys.exit(code if code >= 0 else 128 - code)
"""

# Prints what is wrong inside, or nothing.
TRIAL = """
test -x "$1" || echo "$1 is not there: inside are the system's directories, and those in show"
for path in / /usr; do touch $path/trial 2> /dev/null && echo "$path can be written"; done
exit 0
"""


class CommandFailed(Exception):
    """The command has ended with an exit code other than 0."""

    def __init__(self, text: str, exit_code: int):
        super().__init__(text)
        self.exit_code = exit_code


class Command:
    """What AgentEnv calls for each rollout. The constructor raises ConfigError if this machine cannot do it.

    words: the program and its arguments; a relative path in them would lead to the new working directory.
    sandbox: no network, and no files but the system's, the directory or venv of the program, and `show`, read-only."""

    # What a sandbox allows.
    memory = 4 << 30  # bytes, for each process; its /tmp has a quarter of it
    processes = 256  # with threads

    def __init__(self, words: list[str], allow_code: bool = False, sandbox: bool = False, show: Sequence[str] = ()):
        if not (allow_code or sandbox):
            raise ConfigError(REFUSAL)
        program, *self.arguments = map(str, words)
        found = shutil.which(program)
        if not found:
            raise ConfigError(f"no such command: {program}")
        self.program = os.path.abspath(found)
        self.script = ""
        if sandbox:
            self.script = self.sandbox_script(show)
        problem = self.try_out()
        if problem:
            raise ConfigError(f"{program} cannot be contained here (many containers forbid namespaces): {problem}")

    async def __call__(self, state: dict, base_url: str) -> str:
        port = urlsplit(base_url).port
        command = self.command([self.program, *filled(self.arguments, state, base_url)], port)
        # In the run's directory, where the next start removes it if this process is killed.
        progress = os.environ.get("ROLEMODEL_PROGRESS")
        parent = Path(progress).parent.absolute() if progress else None
        folder = tempfile.TemporaryDirectory(prefix="agent_", dir=parent, ignore_cleanup_errors=True)
        try:
            if not self.script:
                return await run(self.program, command, environment(state, base_url, folder.name), folder.name)
            async with served(folder.name):
                return await run(self.program, command, environment(state, base_url, "/tmp"), folder.name)
        finally:
            await asyncio.to_thread(folder.cleanup)  # it may be large

    def command(self, words: list[str], port: int) -> list[str]:
        """The words that start these words in their namespaces."""
        if not self.script:
            return [*f"{PLAIN} {LIMITS}".split(), "sh", "-c", WAIT, "sh", *words]
        user = sandbox.NOBODY if os.getuid() == 0 else SAME_USER  # root has no limit of processes
        return [*f"{user} {sandbox.NAMESPACES}".split(), "sh", "-c", self.script, "sh", str(port), *words]

    def sandbox_script(self, show: Sequence[str]) -> str:
        """Shell lines that build the sandbox, and run in it what they are given: the endpoint's port and a command."""
        shown = [*map(os.path.realpath, show), *folders_of(self.program)]
        for path in shown:
            if not os.path.isdir(path) or Path(path).is_relative_to(NEW_ROOT):
                raise ConfigError(f"{path} cannot be shown in the sandbox: it is not a directory, or in {NEW_ROOT}")
        python, prefix = sandbox.find_python()
        visible = [path for path in [*sandbox.SYSTEM, *ETC, prefix, *shown] if os.path.lexists(path)]
        # Not --as: Node reserves addresses that it never uses.
        limits = f"{LIMITS} --data={self.memory} --nproc={self.processes}"
        relay = f"{python} -I -S -c {shlex.quote(RELAY)}"
        lines = [
            sandbox.setup_script(visible, hide=()),
            f"mount -n -o remount,bind,rw {NEW_ROOT}",
            f"mkdir {NEW_ROOT}/proc",
            f"touch {NEW_ROOT}/endpoint",
            f"ln -s /proc/self/fd {NEW_ROOT}/dev/fd",
            f"mount -n -t proc proc {NEW_ROOT}/proc 2> /dev/null || true",  # many containers refuse it
            # By a relative path, taken as it is: NEW_ROOT may lie over the absolute one.
            f"mount -n -c --bind ./socket {NEW_ROOT}/endpoint",
            f"mount -n -t tmpfs -o size={self.memory // 4},nr_inodes=100000,mode=700 tmpfs {NEW_ROOT}/tmp",
            f"mount -n -o remount,bind,ro {NEW_ROOT}",
            f"{python} -I -S -c {shlex.quote(LOOPBACK)}",
            f'unshare --root={NEW_ROOT} --wd=/tmp {sandbox.NO_CAPABILITIES} {limits} {relay} "$@"',
            "exit $?",
        ]
        return "\n".join(lines)

    def try_out(self) -> str:
        """Tries whether it would be contained. Returns what is wrong, or ""."""
        words = ["sh", "-c", TRIAL, "sh", self.program] if self.script else ["true"]
        with tempfile.TemporaryDirectory() as place:
            os.chmod(place, 0o755)
            Path(place, "socket").touch()
            options = {"cwd": place, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
            done = subprocess.run(self.command(words, 8000), timeout=sandbox.START_TIMEOUT, **options)
        errors = done.stderr or f"exit code {done.returncode}"  # without a code, a shell's warning about its locale
        return (done.stdout + (errors if done.returncode else "")).strip().replace("\n", "; ")


@contextlib.asynccontextmanager
async def served(folder: str):
    """Meanwhile the endpoint is served on a Unix socket in the folder, for the sandbox's user. The way by a descriptor
    is short enough for a socket's address, which has 107 bytes at most."""
    descriptor = os.open(folder, os.O_RDONLY)
    runner = endpoint.SERVERS[asyncio.get_running_loop()].result()
    site = web.UnixSite(runner, f"/proc/self/fd/{descriptor}/socket")
    try:
        await site.start()
        for path in (folder, f"{folder}/socket"):
            os.chmod(path, 0o777)
        yield
    finally:
        await site.stop()
        os.close(descriptor)


async def run(name: str, command: list[str], env: dict[str, str], folder: str) -> str:
    """Runs a command to its end, also if it is cancelled. Returns what it printed, or raises CommandFailed."""
    options = {"cwd": folder, "env": env, "stdin": subprocess.DEVNULL, "start_new_session": True}
    # Files, not pipes, whose reader a flood would keep busy.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, stdout=out, stderr=err, **options))
        try:
            process = await asyncio.shield(started)
            code = await process.wait()
        finally:
            await end(await started)  # also if it was cancelled while it began
        if code:
            errors = "\n".join(sandbox.tail(err, MAX_OUTPUT).splitlines()[-10:])
            raise CommandFailed(f"{name} ended with exit code {code}: {errors}", code)
        return sandbox.tail(out, MAX_OUTPUT)


def folders_of(program: str) -> list[str]:
    """The directories that a program needs in addition to the system's: its own, or its venv. If it is a link, those of
    the target as well."""
    folders = []
    for path in (program, os.path.realpath(program)):
        folder = Path(path).parent
        if (folder.parent / "pyvenv.cfg").exists():
            folder = folder.parent
        if not sandbox.is_inside(folder, sandbox.SYSTEM):
            folders.append(str(folder))
    return folders


def filled(words: list[str], state: dict, base_url: str) -> list[str]:
    """The words with what their placeholders stand for. Other braces are left as they are."""
    values = {key: x for key, x in state["row"].items() if key != "answer" and isinstance(x, str | int | float)}
    prompt = [endpoint.text_of(message["content"]) for message in state["prompt"] if message["role"] == "user"][-1]
    values |= {"base_url": base_url, "prompt": prompt}
    return [re.sub(r"\{([^{}]+)\}", lambda match: str(values.get(match[1], match[0])), word) for word in words]


def environment(state: dict, base_url: str, home: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not PRIVATE.search(key)}
    env |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": "none"}
    env |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": "none"}
    env |= dict.fromkeys(["NO_PROXY", "no_proxy"], "127.0.0.1,localhost")  # else a proxy is asked for the endpoint
    env |= {"HOME": home, "TMPDIR": home}
    task = to_json({key: x for key, x in state["row"].items() if key != "answer"})
    if len(task) < LONGEST_TASK:
        env["TASK"] = task
    return env


async def end(process: asyncio.subprocess.Process):
    """Kills what is left of a process, and waits until all of it is gone.

    Its child goes first: it is pid 1 of the namespace, which is dead once all its processes are, and only then does
    `unshare` end. A process that has just begun has no child yet."""
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for _ in range(200):  # of 50 ms: on a busy machine the namespaces take their time
        if process.returncode is not None:
            return
        with contextlib.suppress(OSError):  # it has gone in the meantime
            for child in file.read_text().split():
                os.kill(int(child), signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
