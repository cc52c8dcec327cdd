"""The role that starts the others: vLLM's servers, the orchestrator and the trainer. If one fails, it ends all of them.

    bash launch.sh config.toml [table.key=value ...] [--check]     # finds the interpreter and runs this file with it

`plan` says what runs: commands, devices, ports, flags and variables. `Supervisor` starts it, watches it and ends it.
A process whose parent has died comes to this one (a "subreaper"), so all that a role has started can be found."""

import ctypes
import fcntl
import glob
import json
import os
import random
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from configs import load_config
from configs.runtime.directory import identity, run_directory
from configs.runtime.role import CONFIG, DIED, RunError, end_with_parent, require, run_role
from configs.serving.flags import server_flags

SERVER = "configs.serving.server"

ROOT = Path(__file__).resolve().parent
WATCH = "tools/watch.py"  # optional
AFTER_PORT = 'until (: <"$0") 2>/dev/null; do sleep 0.5; done; exec "$@"'
DEFAULTS = {  # variables that the user's own replace
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "TORCHINDUCTOR_CACHE_DIR": os.path.expanduser("~/.cache/rolemodel/inductor"),
}
FIXED = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # prints all stacks on SIGABRT
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_F32_DEFAULT": "ieee",  # no TF32
    "OMP_WAIT_POLICY": "passive",  # idle threads sleep
    "THP_MEM_ALLOC_ENABLE": "1",  # huge pages
    "VLLM_SERVER_DEV_MODE": "1",  # routes for new weights
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "DO_NOT_TRACK": "1",
}
ON_CPU = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4000000000"}  # freed memory is kept: a tenth faster

LEFT_OVER = ("tmp", "adapters", "*.tmp", "batches/*.tmp", "checkpoints/*.tmp")
CONSOLE = re.compile(rb"(step|eval|batch|rollout|(run|check|warning|time|result):)")
READY = "[orchestrator] ready"
REPORT = re.compile(r"\[([a-z]+)\] exit=(\d+) pid=(\d+ rank=\d+) (.*)")
KILLED_RANK = re.compile(r"exitcode *: -(?!15 )\d+ \(.*\)")  # -15: torchrun ends the other ranks
SECRET = re.compile(r"""(?i)((key|token|secret|password)\W+)[^]",}]+""")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# --- what runs --------------------------------------------------------------------------------------------------------


class Role(NamedTuple):
    name: str  # also of its log
    argv: list
    env: dict


class Machine(NamedTuple):
    """What `plan` must know about the place and the command line."""

    gpus: list  # as in CUDA_VISIBLE_DEVICES; empty if there are none
    cpus: int
    ports: list  # one for each server to start
    tmp: str  # a short path, as vLLM's sockets need it
    model_size: int  # bytes of the largest file in the model's directory; -1 if it is not there
    environ: dict
    args: list  # config.toml table.key=value ...
    script: str = "trainer.py"


def plan(cfg, machine):
    """The roles of a run, in the order of their start: [prepare,] orchestrator, inference ..., trainer, watch."""
    python = sys.executable
    gpus = machine.gpus
    ports = machine.ports
    env = environment(cfg, machine)
    roles = []

    # The script makes the model of the TOML, no other.
    has_model = machine.model_size >= 0
    if cfg.run.prepare and not has_model and not any(arg.startswith("model=") for arg in machine.args):
        roles.append(Role("prepare", [python, cfg.run.prepare, *machine.args], env))
        has_model = True
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    roles.append(Role("orchestrator", [python, "orchestrator.py", *machine.args], env | own))
    if has_model:  # the orchestrator stays online, since its rows may not be here
        env["HF_HUB_OFFLINE"] = "1"

    size = cfg.inference.args["tensor_parallel_size"]
    shares = is_shared(cfg, machine)
    command = machine.environ.get("SERVER", "").split() or [python, "-m", SERVER]
    command += server_flags(cfg, machine.environ["ROLEMODEL_RUN_ID"], bool(gpus), shares)
    for i, port in enumerate(ports):
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * size : (i + 1) * size]), "TMPDIR": machine.tmp}
        if not gpus:
            own["TORCH_COMPILE_DISABLE"] = "1"  # it would call g++ for a minute
            own["OMP_NUM_THREADS"] = num_threads(machine, 2 * len(ports))
        roles.append(Role(f"inference{i or ''}", [*command, "--port", str(port)], env | own))

    num = cfg.trainer.gpus
    first = 0 if shares else size * len(ports)
    is_small = machine.model_size < 32 << 20
    own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + num])}
    own["OMP_NUM_THREADS"] = num_threads(machine, 2 * num if is_small else num)  # half the threads are then faster
    own["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    argv = [python, "-m", "torch.distributed.run", "--log-dir", machine.tmp, "--nproc-per-node", str(num)]
    argv += rendezvous(machine.environ)
    # With setpriv a rank ends with its parent even while it imports torch.
    argv += ["--no-python", "setpriv", "--pdeathsig", "KILL", python, machine.script, *machine.args]
    if shares:  # vLLM first: it counts the free memory while it starts
        argv = ["bash", "-c", AFTER_PORT, f"/dev/tcp/127.0.0.1/{ports[-1]}", *argv]
    roles.append(Role("trainer", argv, env | own))
    if machine.script == "trainer.py":
        roles.append(Role("watch", [python, WATCH, str(run_directory(cfg))], env))
    return roles


def is_shared(cfg, machine):
    """Whether servers and trainer must share GPUs. RunError if there are too few even for one of them."""
    num = len(machine.gpus)
    served = cfg.inference.args["tensor_parallel_size"] * len(machine.ports)
    trained = cfg.trainer.gpus
    text = f"inference.gpus = {served} and trainer.gpus = {trained}, but there are {num} GPUs"
    require(not num or max(served, trained) <= num, CONFIG, text)
    return 0 < num < served + trained


def num_threads(machine, num_shares):
    return machine.environ.get("OMP_NUM_THREADS") or str(max(1, machine.cpus // num_shares))


def rendezvous(environ):
    """torchrun's flags for one node, or for the first of several."""
    if not environ.get("NNODES"):
        return ["--standalone"]
    require("MASTER_ADDR" in environ, CONFIG, "NNODES needs MASTER_ADDR, the address of this node")
    endpoint = f"{environ['MASTER_ADDR']}:{environ.get('MASTER_PORT') or 29500}"
    return ["--nnodes", environ["NNODES"], "--node-rank", "0", "--rdzv-endpoint", endpoint]


def environment(cfg, machine):
    """The variables that all roles have in common."""
    urls = cfg.inference.urls or [f"http://127.0.0.1:{port}" for port in machine.ports]
    env = DEFAULTS | machine.environ | FIXED
    env["PYTHONPATH"] = f"{ROOT}:{env.get('PYTHONPATH', '')}".rstrip(":")
    env["VLLM_ENGINE_READY_TIMEOUT_S"] = f"{cfg.inference.startup_timeout:.0f}"
    env["ROLEMODEL_POLICY_URL"] = f"{urls[0]}/v1"
    env["ROLEMODEL_OVERRIDES"] = f"inference.urls = {json.dumps(urls)}\n"
    if is_shared(cfg, machine):
        env["ROLEMODEL_OVERRIDES"] += 'trainer.sync_backend = "gloo"\n'  # NCCL refuses two ranks on one GPU
    if not env.get("NNODES") and not cfg.inference.urls:
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return env if machine.gpus else env | ON_CPU


def look_around(cfg, args, script, tmp):
    """The Machine for `plan`."""
    num = len(re.findall("(?m)^GPU", subprocess.getoutput("nvidia-smi -L"))) or len(glob.glob("/dev/nvidia[0-9]*"))
    gpus = [str(i) for i in range(num)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpus and visible is not None:
        gpus = [name for name in visible.split(",") if name not in ("", "-1")]
    sizes = [path.stat().st_size for path in Path(cfg.run.model).glob("*")]
    cpus = len(os.sched_getaffinity(0))
    return Machine(gpus, cpus, choose_ports(cfg.inference), tmp, max(sizes, default=-1), dict(os.environ), args, script)


def choose_ports(inference):
    """One for each server to start: those asked for, or free ones below those that the kernel hands out."""
    num = 0 if inference.urls else inference.gpus // inference.args["tensor_parallel_size"]
    if not inference.port:
        free = (port for port in random.sample(range(20000, 32000), 12000) if not is_taken(port))
        return [next(free) for _ in range(num)]
    ports = list(range(inference.port, inference.port + num))
    for port in ports:
        require(not is_taken(port), CONFIG, f"port {port} is in use: leave inference.port out, or set another")
    return ports


def is_taken(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


# --- processes --------------------------------------------------------------------------------------------------------


def descendants(pid):
    """The numbers of all processes that descend from this one, parents before their children."""
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError):  # it has just ended
            for child in map(int, Path(path).read_text().split()):
                yield child
                yield from descendants(child)


def send(number, pids):
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def say(text, fd=1):
    with suppress(OSError):  # the console may be gone
        os.write(fd, f"{text}\n".encode(errors="replace"))


def redacted(words):
    """A command line in one line, without secrets."""
    return shlex.join(SECRET.sub(r"\1REDACTED", word) for word in words).replace("\n", " ")


def read_int(path):
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def clear_up(run_dir, *more):
    for pattern in (*LEFT_OVER, *more):
        subprocess.run(["rm", "-rf", *run_dir.glob(pattern)], stderr=subprocess.DEVNULL)


class Supervisor:
    """Starts the roles, watches them and ends them."""

    def __init__(self, cfg, run_dir):
        self.cfg = cfg
        self.run_dir = run_dir
        self.roles = {}  # {name: process} of those that run
        self.watched = {}  # {pidfd: (role, pid)} of roles and engines
        self.consoles = {}  # {log: the part of a line that it ends with}
        self.is_ready = False  # whether the orchestrator has found the task in order
        self.reported = ""  # by the first role that failed
        self.heartbeats = None
        self.moved = 0.0  # when they changed
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
        # Roles open the pipe by its path, which is gone as soon as the launcher has died, even if it stays a zombie.
        self.pipe, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.environ["ROLEMODEL_PIPE"] = f"/proc/{os.getpid()}/fd/{writer}"
        os.environ["ROLEMODEL_PROGRESS"] = f"{run_dir}/tmp/progress"

    def log(self, name):
        return self.run_dir / "logs" / f"{name}.log"

    def start(self, role):
        """Starts a role in a session of its own; the kernel kills it when the launcher dies."""
        changed = [f"{name}={value}" for name, value in role.env.items() if os.environ.get(name) != value]
        header = f"=== {time.strftime('%FT%T%z')} {redacted([*changed, *role.argv])}\n"
        with open(self.log(role.name), "ab", buffering=0) as log:
            log.write(header.encode())
            process = subprocess.Popen(
                role.argv,
                env=role.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.roles[role.name] = process
        self.watch(role.name, process.pid)
        reader = open(self.log(role.name), "rb")
        reader.seek(0, os.SEEK_END)
        self.consoles[reader] = b""

    def watch(self, name, pid):
        self.watched[os.pidfd_open(pid)] = (name, pid)

    def run(self, roles):
        """Until the run is done. What can be wrong with a task is found before a server starts."""
        for role in roles:
            if role.name == "prepare":
                say(f"[launch] preparing {self.cfg.run.model} with {role.argv[1]} (log: {self.log(role.name)})")
            while "prepare" in self.roles or not (self.is_ready or role.name in ("prepare", "orchestrator")):
                self.wait()
            if role.name != "watch" or os.path.exists(WATCH):
                self.start(role)
        while self.roles.keys() & {"orchestrator", "trainer"}:
            self.wait()
        text = f"stopped at version {self.version()} of {self.cfg.run.max_steps} (exit=3 log={self.log('trainer')})"
        require(self.is_done(), DIED, text)

    def version(self):
        return read_int(self.run_dir / "version")

    def is_done(self):
        return self.version() >= self.cfg.run.max_steps

    def wait_for_watch(self):
        """For its last lines and picture."""
        if "watch" in self.roles:
            select.select([os.pidfd_open(self.roles["watch"].pid)], [], [], 60)

    def wait(self):
        """Handles what happens within half a second. Only processes wake it, not their logs and heartbeats."""
        ready, _, _ = select.select([self.pipe, *self.watched], [], [], 0.5)
        self.hear()
        self.show()
        ended = [self.watched.pop(fd) for fd in ready if fd in self.watched]
        for name, pid in sorted(ended):  # inference first: others fail for want of it
            self.check_end(name, pid)
        self.check_progress()
        orphan = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if orphan and orphan.si_pid not in [process.pid for process in self.roles.values()]:
            os.waitpid(orphan.si_pid, 0)

    def check_end(self, name, pid):
        """RunError if a process has ended too early, whatever its exit code."""
        process = self.roles[name]
        if pid != process.pid:
            raise self.failure(name, pid, 1, f"its engine, process {pid}, died; the end of its log may say how")
        is_over = name == "prepare" or name in ("orchestrator", "trainer") and self.is_done()
        if name != "watch" and (process.wait() or not is_over):
            raise self.failure(name, pid, process.returncode)
        del self.roles[name]

    def hear(self):
        """Reads what roles have reported. The first failure is kept: the others follow from it."""
        with suppress(BlockingIOError):
            for line in os.read(self.pipe, 1 << 16).decode(errors="replace").splitlines():
                self.is_ready = self.is_ready or line == READY
                if line != READY:
                    self.reported = self.reported or line

    def show(self):
        """Prints the lines for the console that have come into the logs."""
        for file, part in self.consoles.items():
            *lines, rest = (part + file.read()).split(b"\n")
            self.consoles[file] = rest[-1000:]
            for line in filter(CONSOLE.match, lines):
                say(line.decode(errors="replace"))

    def find_engines(self):
        """vLLM's server answers for 96 s after its engine has died, so the engines are watched as well."""
        known = [pid for _, pid in self.watched.values()]
        for name, server in self.roles.items():
            for pid in descendants(server.pid):
                with suppress(OSError):  # it has just ended
                    if pid not in known and Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::Engine"):
                        self.watch(name, pid)

    def check_progress(self):
        """RunError if neither a version nor a heartbeat has come for too long, by a clock that does not jump."""
        version = self.version()
        limit = self.cfg.run.watchdog
        if version < 0:
            limit += self.cfg.inference.startup_timeout
            self.find_engines()
        if "prepare" in self.roles:
            limit = self.cfg.run.prepare_timeout
        times = [entry.stat().st_mtime for entry in os.scandir(self.run_dir / "tmp" / "progress")]
        heartbeats = (version, sorted(times), len(self.roles))
        if heartbeats != self.heartbeats:
            self.heartbeats = heartbeats
            self.moved = time.monotonic()
        if time.monotonic() > self.moved + limit:
            name = "trainer" if "trainer" in self.roles else next(iter(self.roles))
            text = f"no role made progress for {limit:.0f} s (watchdog): the stacks are in {self.run_dir}/logs"
            raise self.failure(name, self.roles[name].pid, 1, text)

    def failure(self, name, pid, status, cause=""):
        """RunError with what ended the run: what killed this process, or what the first role that failed reported."""
        if not self.reported:
            select.select([self.pipe], [], [], 0.5)
            self.hear()
        code = CONFIG if status == CONFIG else DIED
        report = REPORT.match(self.reported)
        if status < 0:
            cause = f"killed by {signal.Signals(-status).name}"
        elif report and not cause:
            role, code, pid, cause = report.groups()
            name = role if role in self.roles else name  # otherwise it is a part of this one
        with open(self.log(name), errors="replace") as file:
            end = "".join(deque(file, 200)).rpartition("\n=== ")[2]
        killed = KILLED_RANK.findall(end)
        if killed:
            cause = f"a rank was killed, {killed[-1]}; {cause}"
        if not self.reported:
            say("\n".join(["", *end.splitlines()[-30:], ""]), fd=2)
        cause = cause or f"ended with status {status} before the run was done"
        return RunError(int(code), f"{cause} (role={name} pid={pid} exit={code} log={self.log(name)})")


def dump_stacks():
    """All stacks into the logs. Everything is stopped first, so that nobody reacts to another's end; then children are
    aborted before their parents, with whom the kernel would kill them."""
    family = list(descendants(os.getpid()))
    send(signal.SIGSTOP, family)
    for pid in reversed(family):
        with suppress(ProcessLookupError):
            process = os.pidfd_open(pid)
            send(signal.SIGABRT, [pid])
            send(signal.SIGCONT, [pid])
            select.select([process], [], [], 1.2)


def on_signal(number, frame):
    """Interrupts the launcher wherever it is, also while it waits."""
    if number == signal.SIGINT:
        raise RunError(130, "interrupted (exit=130)")
    raise RunError(143, "terminated (exit=143)")


def end_all():
    """Ends all processes; the children of what has ended come to this one. A second Ctrl-C leaves them no time."""
    signal.signal(signal.SIGALRM, on_signal)
    for number, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 10)):
        with suppress(RunError, ChildProcessError):
            signal.alarm(seconds)
            while True:
                send(number, list(descendants(os.getpid())))
                os.waitpid(-1, 0)
    signal.alarm(0)


def main(argv):
    began = time.monotonic()
    args = [arg for arg in argv if arg != "--check"]
    script = "trainer.py"
    if args != argv:
        args += ["max_steps=0", "eval.every=0"]
        script = "tools/check.py"
    os.chdir(ROOT)
    cfg = load_config(args[0], args[1:])
    steps = cfg.run.max_steps
    run_dir = run_directory(cfg)
    mine = f"{json.dumps(identity(cfg))}\n"
    if read_int(run_dir / "done") >= steps:
        is_mine = (run_dir / "identity").read_text() == mine
        require(is_mine, CONFIG, f"{run_dir} is of another run: choose another run_name")
        return say(f"[launch] already complete: {run_dir} has its {steps} steps; set max_steps higher, or run_name")
    lock = open(run_dir / ".lock", "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(CONFIG, f"{run_dir} belongs to a run under way: choose another run_name") from None

    supervisor = Supervisor(cfg, run_dir)
    os.environ.setdefault("ROLEMODEL_RUN_ID", f"{run_dir.name}-{os.getpid()}-{random.randrange(32768)}")
    folder = os.open(run_dir, os.O_RDONLY)
    machine = look_around(cfg, args, script, f"/proc/{os.getpid()}/fd/{folder}/tmp")
    roles = plan(cfg, machine)
    if is_shared(cfg, machine):
        say(f"[launch] vLLM and the trainer share {len(machine.gpus)} GPU(s)")
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, on_signal)
    clear_up(run_dir, "version", "done")
    (run_dir / "tmp" / "progress").mkdir(parents=True)

    code = 0
    try:
        supervisor.run(roles)
        if steps:
            (run_dir / "identity").write_text(mine)
            (run_dir / "done.tmp").write_text(f"{steps}\n")
            os.replace(run_dir / "done.tmp", run_dir / "done")
            supervisor.wait_for_watch()
        passed = "all checks passed, " if args != argv else ""
        last = f"{passed}done in {time.monotonic() - began:.0f} s: {run_dir}"
    except RunError as error:
        code = error.code
        last = str(error)
    with suppress(RunError):
        if code == DIED:
            dump_stacks()
    end_all()
    supervisor.show()
    clear_up(run_dir)
    say(f"[launch] {last}", fd=2 if code else 1)
    sys.exit(code)


if __name__ == "__main__":
    run_role("launch")
