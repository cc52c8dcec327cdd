"""The role that starts the others: vLLM's servers, the orchestrator and the trainer. If one fails, it ends all of them.

    bash launch.sh config.toml [table.key=value ...] [--check]     # finds the interpreter and runs this file with it

`plan` says what runs: commands, devices, ports and variables. `Supervisor` starts it and watches it, `end_all` ends it.
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
from configs.runtime.role import CONFIG, DIED, RunError, end_with_parent, exit_code, require, run_role
from configs.serving.flags import server_flags

SERVER = "configs.serving.server"

ROOT = Path(__file__).resolve().parent
WATCH = "tools/watch.py"  # optional
CACHE = "~/.cache/rolemodel/inductor"
AFTER_PORT = 'until (: <"$0") 2>/dev/null; do sleep 0.5; done; exec "$@"'
COMMON = {
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # prints all stacks on SIGABRT
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_F32_DEFAULT": "ieee",  # no TF32
    "OMP_WAIT_POLICY": "passive",  # idle threads sleep
    "THP_MEM_ALLOC_ENABLE": "1",  # huge pages
    "DO_NOT_TRACK": "1",
}
ON_CPU = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4000000000"}  # freed memory is kept: a tenth faster

LEFT_OVER = ("tmp", "adapters", "*.tmp", "batches/*.tmp", "checkpoints/*.tmp")
SHOWN = ("trainer", "orchestrator", "watch")  # roles of whose logs the console has these lines
CONSOLE = rb"(step|eval|batch|rollout|(run|check|warning|time|result):)"
READY = "[orchestrator] ready"
REPORT = r"\[([a-z]+)\] exit=(\d+) pid=(\d+ rank=\d+) (.*)"
KILLED_RANK = r"exitcode *: -(?!15 )\d+ \(.*\)"  # -15: torchrun ends the other ranks
SECRET = r"""(?i)((key|token|secret|password)\W+)[^]",}]+"""
PR_SET_CHILD_SUBREAPER = 36
IF_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT


# --- what runs --------------------------------------------------------------------------------------------------------


class Role(NamedTuple):
    name: str  # also of its log
    argv: list
    env: dict  # beside the launcher's own


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
    """The roles of a run, in the order of their start: [prepare,] orchestrator, inference ..., trainer."""
    python = sys.executable
    gpus = machine.gpus
    ports = machine.ports
    args = machine.args
    env = environment(cfg, machine)
    roles = []

    has_model = machine.model_size >= 0
    is_other = any(arg.startswith("model=") for arg in args)  # than the one that the TOML's script makes
    if cfg.run.prepare and not has_model and not is_other:
        roles.append(Role("prepare", [python, cfg.run.prepare, *args], env))
        has_model = True
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    roles.append(Role("orchestrator", [python, "orchestrator.py", *args], env | own))
    if has_model:  # the orchestrator stays online, since its rows may not be here
        env["HF_HUB_OFFLINE"] = "1"

    size = cfg.inference.args["tensor_parallel_size"]
    shares = is_shared(cfg, machine)
    command = machine.environ.get("SERVER", "").split() or [python, "-m", SERVER]
    command += server_flags(cfg, machine.environ["ROLEMODEL_RUN_ID"], bool(gpus), shares)
    for i, port in enumerate(ports):
        own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i * size : (i + 1) * size])}
        own["VLLM_ENGINE_READY_TIMEOUT_S"] = f"{cfg.inference.startup_timeout:.0f}"
        own["TMPDIR"] = machine.tmp
        if not gpus:
            own["OMP_NUM_THREADS"] = num_threads(machine, 2 * len(ports))
        argv = [*command, "--port", str(port)]
        roles.append(Role(f"inference{i or ''}", argv, env | own))

    num = cfg.trainer.gpus
    first = 0 if shares else size * len(ports)
    is_small = machine.model_size < 32 << 20
    own = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + num])}
    own["OMP_NUM_THREADS"] = num_threads(machine, 2 * num if is_small else num)  # half the threads are then faster
    own["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    argv = [python, "-m", "torch.distributed.run", "--log-dir", machine.tmp, "--nproc-per-node", str(num)]
    argv += rendezvous(machine.environ)
    # With setpriv a rank ends with its parent even while it imports torch.
    argv += ["--no-python", "setpriv", "--pdeathsig", "KILL", python, machine.script, *args]
    if shares:  # vLLM first: it counts the free memory while it starts
        argv = ["bash", "-c", AFTER_PORT, f"/dev/tcp/127.0.0.1/{ports[-1]}", *argv]
    roles.append(Role("trainer", argv, env | own))
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
    given = machine.environ.get
    env = COMMON | {"TORCHINDUCTOR_CACHE_DIR": given("TORCHINDUCTOR_CACHE_DIR") or os.path.expanduser(CACHE)}
    env["PYTHONPATH"] = f"{ROOT}:{given('PYTHONPATH', '')}".rstrip(":")
    env["ROLEMODEL_POLICY_URL"] = f"{urls[0]}/v1"
    env["ROLEMODEL_OVERRIDES"] = f"inference.urls = {json.dumps(urls)}\n"
    if is_shared(cfg, machine):
        env["ROLEMODEL_OVERRIDES"] += 'trainer.sync_backend = "gloo"\n'  # NCCL refuses two ranks on one GPU
    if not given("NNODES") and not cfg.inference.urls:
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return env if machine.gpus else env | ON_CPU


def look_around(cfg, args, script, tmp):
    """The Machine for `plan`."""
    listed = re.findall("(?m)^GPU", subprocess.getoutput("nvidia-smi -L"))
    num = len(listed) or len(glob.glob("/dev/nvidia[0-9]*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num))))
    gpus = re.findall("[^,]+", visible) if num else []
    cpus = len(os.sched_getaffinity(0))
    ports = choose_ports(cfg.inference)
    sizes = [path.stat().st_size for path in Path(cfg.run.model).glob("*")]
    size = max(sizes, default=-1)
    return Machine(gpus, cpus, ports, tmp, size, dict(os.environ), args, script)


def choose_ports(inference):
    """One for each server to start: those asked for, or free ones below those that the kernel hands out."""
    num = 0 if inference.urls else inference.gpus // inference.args["tensor_parallel_size"]
    ports = random.sample(range(20000, 32000), 1000)
    if inference.port:
        ports = range(inference.port, inference.port + num)
    free = [port for port in ports if not is_taken(port)]
    taken = min({*ports} - {*free}, default=0)
    require(len(free) >= num, CONFIG, f"port {taken} is in use: leave inference.port out, or set another")
    return free[:num]


def is_taken(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


# --- processes --------------------------------------------------------------------------------------------------------


def descendants(pid):
    """The numbers of all processes that descend from this one, parents before their children."""
    found = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError):  # it has just ended
            for child in Path(path).read_text().split():
                found += [int(child), *descendants(child)]
    return found


def send(number, pids):
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def say(text, fd=1):
    with suppress(OSError):  # the console may be gone
        os.write(fd, f"{text}\n".encode(errors="replace"))


def redacted(words):
    """A command in one line, without secrets."""
    shown = [re.sub(SECRET, r"\1REDACTED", word) for word in words]
    return shlex.join(shown).replace("\n", " ")


def read_int(path):
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return -1


def claim(run_dir):
    """Locks the directory until this process ends."""
    lock = os.open(run_dir / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(CONFIG, f"{run_dir} belongs to a run under way: choose another run_name") from None


def clear_up(run_dir, *more):
    for pattern in (*LEFT_OVER, *more):
        subprocess.run(["rm", "-rf", *run_dir.glob(pattern)], stderr=subprocess.DEVNULL)


class Supervisor:
    """Starts the roles and watches them."""

    def __init__(self, cfg, run_dir):
        self.cfg = cfg
        self.run_dir = run_dir
        self.logs = run_dir / "logs"
        self.roles = {}  # {name: process} of those that run
        self.watched = {}  # {pidfd: (role, pid)} of roles and engines
        self.consoles = {}  # {log: the part of a line that it ends with}
        self.reports = []  # lines of the roles
        self.progress = ()
        self.moved = 0.0  # when it changed
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
        # Roles open the pipe by its path, which is gone as soon as the launcher has died, even if it stays a zombie.
        self.pipe, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.environ["ROLEMODEL_PIPE"] = f"/proc/{os.getpid()}/fd/{writer}"
        os.environ["ROLEMODEL_PROGRESS"] = f"{run_dir}/tmp/progress"

    def start(self, role):
        """Starts a role in a session of its own; the kernel kills it when the launcher dies."""
        path = f"{self.logs}/{role.name}.log"
        variables = [f"{name}={value}" for name, value in role.env.items()]
        header = f"=== {time.strftime('%FT%T%z')} {redacted([*variables, *role.argv])}\n"
        with open(path, "ab", buffering=0) as log:
            log.write(header.encode())
            process = subprocess.Popen(
                role.argv,
                env=os.environ | role.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        self.roles[role.name] = process
        self.watch(role.name, process.pid)
        if role.name in SHOWN:
            reader = open(path, "rb")
            reader.seek(0, os.SEEK_END)
            self.consoles[reader] = b""

    def watch(self, name, pid):
        self.watched[os.pidfd_open(pid)] = (name, pid)

    def version(self):
        return read_int(f"{self.run_dir}/version")

    def run(self, roles):
        """Until the run is done. What can be wrong with a task is found before a server starts."""
        for role in roles:
            is_early = role.name in ("prepare", "orchestrator")
            while "prepare" in self.roles or not (is_early or READY in self.reports):
                self.wait()
            self.start(role)
        while self.roles.keys() & {"orchestrator", "trainer"}:
            self.wait()
        text = f"stopped at version {self.version()} of {self.cfg.run.max_steps} (exit=3 log={self.logs})"
        require(self.version() >= self.cfg.run.max_steps, DIED, text)

    def wait(self):
        """Handles what happens within half a second. Only processes wake it, not their logs and heartbeats."""
        own = [process.pid for process in self.roles.values()]
        while (child := os.waitid(os.P_ALL, 0, IF_ENDED)) and child.si_pid not in own:
            os.waitpid(child.si_pid, 0)  # an orphan, which would stay a zombie
        ready = select.select([self.pipe, *self.watched], [], [], 0.5)[0]
        self.hear()
        self.show()
        ended = [self.watched.pop(fd) for fd in ready if fd in self.watched]
        for name, pid in sorted(ended):  # inference first: others fail for want of it
            self.check_end(name, pid)
        self.check_progress()

    def check_end(self, name, pid):
        """RunError if a process has ended too early, whatever its exit code."""
        process = self.roles[name]
        if pid != process.pid:
            raise self.failure(name, pid, 1, f"its engine, process {pid}, died; the end of its log may say how")
        is_done = self.version() >= self.cfg.run.max_steps and not name.startswith("inference")
        if name != "watch" and (process.wait() or not (is_done or name == "prepare")):
            raise self.failure(name, pid, process.returncode)
        del self.roles[name]

    def hear(self):
        with suppress(BlockingIOError):
            text = os.read(self.pipe, 1 << 16).decode(errors="replace")
            self.reports += text.splitlines()

    def show(self):
        """Prints the lines for the console that have come into the logs."""
        for file, part in self.consoles.items():
            *lines, rest = (part + file.read()).split(b"\n")
            self.consoles[file] = rest[-1000:]
            for line in lines:
                if re.match(CONSOLE, line):
                    say(line.decode(errors="replace"))

    def find_engines(self):
        """vLLM's server answers for 96 s after its engine has died, so the engines are watched as well."""
        servers = {name: process for name, process in self.roles.items() if name.startswith("inference")}
        for name, server in servers.items():
            for pid in descendants(server.pid):
                with suppress(OSError):  # it has just ended
                    is_engine = Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::Engine")
                    if is_engine and (name, pid) not in self.watched.values():
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
        beats = [entry.stat().st_mtime for entry in os.scandir(f"{self.run_dir}/tmp/progress")]
        progress = (version, beats, list(self.roles))
        if progress != self.progress:
            self.progress = progress
            self.moved = time.monotonic()
        if time.monotonic() > self.moved + limit:
            name = "trainer" if "trainer" in self.roles else next(iter(self.roles))
            text = f"no role made progress for {limit:.0f} s (watchdog): the stacks are in {self.logs}"
            raise self.failure(name, self.roles[name].pid, 1, text)

    def failure(self, name, pid, status, cause=""):
        """RunError with what ended the run: what killed this process, or what the first role that failed reported."""
        select.select([self.pipe], [], [], 0.5)
        self.hear()
        reports = [found for line in self.reports if (found := re.match(REPORT, line))]
        code = CONFIG if status == CONFIG else DIED
        if status < 0:
            cause = f"killed by {signal.Signals(-status).name}"
        elif reports and not cause:
            role, code, pid, cause = reports[0].groups()
            name = role if role in self.roles else name  # otherwise it is a part of this one
        cause = cause or f"ended with status {status} before the run was done"
        log = f"{self.logs}/{name}.log"
        with open(log, errors="replace") as file:
            end = "".join(deque(file, 200)).rpartition("\n=== ")[2]
        killed = re.findall(KILLED_RANK, end)
        if killed:
            cause = f"a rank was killed, {killed[-1]}; {cause}"
        if not reports:
            lines = "\n".join(end.splitlines()[-30:])
            say(f"\n{lines}\n", fd=2)
        return RunError(int(code), f"{cause} (role={name} pid={pid} exit={code} log={log})")


def dump_stacks():
    """All stacks into the logs. Everything is stopped first, so that nobody reacts to another's end; then children are
    aborted before their parents, with whom the kernel would kill them."""
    family = descendants(os.getpid())
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
                send(number, descendants(os.getpid()))
                os.waitpid(-1, 0)
    signal.alarm(0)


def is_complete(run_dir, steps, mine):
    """Whether the run has been done. Raises RunError with CONFIG if it was another run."""
    if read_int(run_dir / "done") < steps:
        return False
    is_mine = (run_dir / "identity").read_text() == f"{mine}\n"
    require(is_mine, CONFIG, f"{run_dir} belongs to another run: choose another run_name")
    return True


def main(argv):
    began = time.monotonic()
    args = [arg for arg in argv if arg != "--check"]
    script = "trainer.py"
    is_check = args != argv
    if is_check:
        args += ["max_steps=0", "eval.every=0"]
        script = "tools/check.py"
    os.chdir(ROOT)
    cfg = load_config(args[0], args[1:])
    steps = cfg.run.max_steps
    run_dir = run_directory(cfg)
    mine = json.dumps(identity(cfg))
    if is_complete(run_dir, steps, mine):
        return say(f"[launch] already complete: {run_dir} has its {steps} steps; set max_steps higher, or run_name")
    claim(run_dir)

    supervisor = Supervisor(cfg, run_dir)
    name = os.environ.get("ROLEMODEL_RUN_ID") or f"{run_dir.name}-{os.getpid()}-{began:.0f}"
    os.environ["ROLEMODEL_RUN_ID"] = name
    folder = os.open(run_dir, os.O_RDONLY)
    machine = look_around(cfg, args, script, f"/proc/{os.getpid()}/fd/{folder}/tmp")
    roles = plan(cfg, machine)
    if os.path.exists(WATCH) and not is_check:
        command = [sys.executable, WATCH, str(run_dir)]
        roles.append(Role("watch", command, roles[0].env))
    if is_shared(cfg, machine):
        say(f"[launch] vLLM and the trainer share {len(machine.gpus)} GPU(s)")
    if roles[0].name == "prepare":
        say(f"[launch] preparing {cfg.run.model} with {cfg.run.prepare} (log: {run_dir}/logs/prepare.log)")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, on_signal)
    clear_up(run_dir, "version", "done")
    (run_dir / "tmp" / "progress").mkdir(parents=True)

    code = 0
    try:
        supervisor.run(roles)
        if steps:
            (run_dir / "identity").write_text(f"{mine}\n")
            (run_dir / "done").write_text(f"{steps}\n")
        with suppress(KeyError, subprocess.TimeoutExpired):  # it draws a last picture
            supervisor.roles["watch"].wait(60)
        passed = "all checks passed, " if is_check else ""
        last = f"{passed}done in {time.monotonic() - began:.0f} s: {run_dir}"
    except RunError as error:
        code = error.code
        last = str(error)
    except OSError as error:  # a full disk, or a program that is not there
        code = exit_code(error, str(error))
        last = f"{error} (exit={code})"
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
