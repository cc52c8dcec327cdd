"""A command as an agent. Each rollout starts a process from a list of words, and the process asks the rollout's
endpoint.

    AgentEnv(["my-agent", "--ask", "{question}"], rows, allow_code=True)
    AgentEnv(Command(["node", "/opt/agent/cli.js", "{prompt}"], sandbox=True, show=["/opt/agent"]), rows)

Words may contain {base_url}, {prompt} (the text of the user's last message) and {key} (a column of the example that has
a text or a number). What the command prints becomes state["result"]. If the command fails, the rollout is lost, unless
`forgive` has its exit code.

It gets the environment variables of the run, without those that look like secrets, and these:
    OPENAI_BASE_URL, OPENAI_API_BASE, ANTHROPIC_BASE_URL, and keys that mean nothing
    TASK                the example as JSON without its answer; keep solutions out of its other columns. It is not set
                        if it is longer than 100 kB, since Linux allows 128 KiB for a variable. The same holds for a
                        word: with a longer {prompt}, the rollout is lost
    HOME, TMPDIR        its working directory, which is new and empty, and is removed afterwards

A command runs what the model writes. Without a sandbox, this code can read and change whatever this user can. But all
its processes end with the rollout, since they live in a pid namespace. In the sandbox (sandbox.py; it is no defense
against attacks on the kernel) there is no network, and nothing but the system's programs. A relay connects it to the
endpoint.
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
# A shell is pid 1, not the command: a signal does not end a pid 1 that has no handler for it. The `exit` makes the
# shell wait.
WAIT = '"$@"\nexit $?'
ETC = ["/etc/passwd", "/etc/group", "/etc/hosts", "/etc/nsswitch.conf"]  # Node and others look up their user
MAX_OUTPUT = 1 << 16  # bytes of a file that are read
PRIVATE = re.compile("key|token|secret|passw|credential|auth|^rolemodel_|^pythonpath$", re.IGNORECASE)
REFUSAL = "a command runs what the model writes. Allow it: allow_code = true (on this machine, as this user), "
REFUSAL += "or sandbox = true (without a network, and with nothing but the system's programs)"

# Brings up the loopback of a network namespace: SIOCSIFFLAGS, IFF_UP. Many containers have no program `ip`.
LOOPBACK = 'import fcntl, socket, struct; fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sH22x", b"lo", 1))'

# Runs a command, and meanwhile forwards connections from a port of the loopback to the endpoint's socket.
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
    """What AgentEnv calls for each rollout. The constructor raises ConfigError if this machine cannot contain it.

    words: the program and its arguments. A relative path in them would start in the new working directory.
    sandbox: no network, and no files but the system's, those in the program's directory or venv, and those in `show`,
    all read-only."""

    # The limits of a sandbox.
    memory = 4 << 30  # bytes, for each process; /tmp has a quarter of that
    processes = 256  # including threads

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
        # The folder is in the run's directory, so that the next start removes it if this process is killed.
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
        """The command line that starts these words in namespaces of their own."""
        if not self.script:
            return [*f"{PLAIN} {LIMITS}".split(), "sh", "-c", WAIT, "sh", *words]
        user = sandbox.NOBODY if os.getuid() == 0 else SAME_USER  # for root there is no limit of processes
        return [*f"{user} {sandbox.NAMESPACES}".split(), "sh", "-c", self.script, "sh", str(port), *words]

    def sandbox_script(self, show: Sequence[str]) -> str:
        """Shell lines that build the sandbox and run a command in it. Their arguments are the endpoint's port and the
        command."""
        shown = [*map(os.path.realpath, show), *folders_of(self.program)]
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
            # The path is relative, and -c keeps it so: NEW_ROOT may be mounted over the absolute one.
            f"mount -n -c --bind ./socket {NEW_ROOT}/endpoint",
            f"mount -n -t tmpfs -o size={self.memory // 4},nr_inodes=100000,mode=700 tmpfs {NEW_ROOT}/tmp",
            f"mount -n -o remount,bind,ro {NEW_ROOT}",
            f"{python} -I -S -c {shlex.quote(LOOPBACK)}",
            f'unshare --root={NEW_ROOT} --wd=/tmp {sandbox.NO_CAPABILITIES} {limits} {relay} "$@"',
            "exit $?",
        ]
        return "\n".join(lines)

    def try_out(self) -> str:
        """Tries whether the command would be contained. Returns what is wrong, or ""."""
        words = ["sh", "-c", TRIAL, "sh", self.program] if self.script else ["true"]
        with tempfile.TemporaryDirectory() as place:
            os.chmod(place, 0o755)
            Path(place, "socket").touch()
            options = {"cwd": place, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
            done = subprocess.run(self.command(words, 8000), timeout=sandbox.START_TIMEOUT, **options)
        errors = done.stderr or f"exit code {done.returncode}"  # with code 0, a shell's warning about its locale
        return (done.stdout + (errors if done.returncode else "")).strip().replace("\n", "; ")


@contextlib.asynccontextmanager
async def served(folder: str):
    """Inside the `with`, the endpoint is also served on a Unix socket in the folder, for the sandbox's user. The socket
    is addressed through a descriptor, because its address may have at most 107 bytes."""
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
    """Runs a command to its end, or ends it if this is cancelled. Returns what it printed, or raises CommandFailed."""
    options = {"cwd": folder, "env": env, "stdin": subprocess.DEVNULL, "start_new_session": True}
    # Files, not pipes: a flood of output would keep the reader of a pipe busy.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, stdout=out, stderr=err, **options))
        try:
            process = await asyncio.shield(started)
            code = await process.wait()
        finally:
            await end(await started)  # even if it was cancelled while the process started
        if code:
            errors = "\n".join(sandbox.tail(err, MAX_OUTPUT).splitlines()[-10:])
            raise CommandFailed(f"{name} ended with exit code {code}: {errors}", code)
        return sandbox.tail(out, MAX_OUTPUT)


def folders_of(program: str) -> list[str]:
    """The directories that a program needs in addition to the system's: its own, or its venv. If the program is a link,
    its target's directories as well."""
    folders = []
    for path in (program, os.path.realpath(program)):
        folder = Path(path).parent
        if (folder.parent / "pyvenv.cfg").exists():
            folder = folder.parent
        if not sandbox.is_inside(folder, sandbox.SYSTEM):
            folders.append(str(folder))
    return folders


def filled(words: list[str], state: dict, base_url: str) -> list[str]:
    """The words, with their placeholders filled in. Other braces are left as they are."""
    values = {key: x for key, x in state["row"].items() if key != "answer" and isinstance(x, str | int | float)}
    prompt = [endpoint.text_of(message["content"]) for message in state["prompt"] if message["role"] == "user"][-1]
    values |= {"base_url": base_url, "prompt": prompt}
    return [re.sub(r"\{([^{}]+)\}", lambda match: str(values.get(match[1], match[0])), word) for word in words]


def environment(state: dict, base_url: str, home: str) -> dict[str, str]:
    env = {key: value for key, value in os.environ.items() if not PRIVATE.search(key)}
    env |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_BASE": base_url, "OPENAI_API_KEY": "none"}
    env |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": "none"}
    env |= dict.fromkeys(["NO_PROXY", "no_proxy"], "127.0.0.1,localhost")  # else requests would go to a proxy
    env |= {"HOME": home, "TMPDIR": home}
    task = to_json({key: x for key, x in state["row"].items() if key != "answer"})
    if len(task) < LONGEST_TASK:
        env["TASK"] = task
    return env


async def end(process: asyncio.subprocess.Process):
    """Kills what is left of a process, and waits until all of it is gone.

    Its child is killed first. This is pid 1 of the namespace, which only ends after all the other processes in it; then
    `unshare` ends as well. A process that has just begun has no child yet, so this is repeated."""
    file = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for _ in range(200):  # 50 ms each: on a busy machine the namespaces take their time
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
