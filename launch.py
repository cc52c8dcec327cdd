"""The role that starts the others: vLLM's servers, the orchestrator and the trainer. If one fails, it ends all of them.

    bash launch.sh config.toml [table.key=value ...] [--check]     # finds the interpreter and runs this file with it

`plan` says what runs: commands, devices, ports and variables. `supervise` starts it and watches it, `end_all` ends it.
A process whose parent has died comes to this one (a "subreaper"), so all that a role has started can be found."""

import ctypes
import fcntl
import glob
import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from configs import load_config, to_toml
from configs.runtime.directory import identity, refuse_other, report_changes, run_directory
from configs.runtime.machine import check_machine, free_gb, look_around
from configs.runtime.role import CONFIG, DIED, STORAGE, RunError, end_with_parent, exit_code, require, run_role
from configs.serving.flags import server_flags

ROOT = Path(__file__).parent
AFTER_PORTS = """
echo "run: vLLM and the trainer share a GPU"
for port in $0; do until (: </dev/tcp/127.0.0.1/$port) 2>/dev/null; do sleep 0.5; done; done
exec "$@"
"""
COMMON = {  # of all roles, unless the launcher's own environment has another value
    "PYTHONUNBUFFERED": "1",
    "PYTHONFAULTHANDLER": "1",  # prints all stacks on SIGABRT
    "TOKENIZERS_PARALLELISM": "false",
    "TRITON_F32_DEFAULT": "ieee",  # no TF32
    "OMP_WAIT_POLICY": "passive",  # idle threads sleep
    "THP_MEM_ALLOC_ENABLE": "1",  # huge pages
    "DO_NOT_TRACK": "1",
    "TORCHINDUCTOR_CACHE_DIR": os.path.expanduser("~/.cache/rolemodel/inductor"),
}
ON_CPU = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "4000000000"}  # freed memory is kept: a tenth faster

FIRST = {"prepare", "estimate"}  # roles that end before the next one starts

# The lines of the logs that the console has as well.
CONSOLE = rb"(?m)^(?:step|eval|batch|rollout|(?:run|check|warning|time|result):).*"
REPORT = r"(?m)^\[(prepare|estimate|orchestrator|trainer)\] exit=(\d+) pid=(\d+ rank=\d+) (.*)"
KILLED_RANK = r"exitcode *: -(?!15 )\d+ \(.*\)"  # -15: torchrun ends the other ranks
# An error that begins a line of vLLM's log, but not what the server says of its engine's.
ERROR = r"(?m)^(?:\(.*?\] )?((?:\w+\.)*\w+(?:Error|Exception): (?!Engine ?(?:core|Core) (?:init|enc)).+)"
SECRET = r"""(?i)((key|token|secret|password)\W+)[^]",}]+"""
PR_SET_CHILD_SUBREAPER = 36


# --- what runs --------------------------------------------------------------------------------------------------------


class Role(NamedTuple):
    name: str  # also of its log
    argv: list
    env: dict  # beside COMMON and the launcher's own


def plan(cfg, machine):
    """The roles of a run, in the order of their start: [prepare, estimate,] orchestrator, inference ..., trainer."""
    python = sys.executable
    gpus = machine.gpus
    ports = machine.ports
    args = machine.args
    size = cfg.inference.args["tensor_parallel_size"]
    num_served = size * len(ports)
    num = cfg.trainer.gpus
    text = f"inference.gpus = {num_served} and trainer.gpus = {num}, but there are {len(gpus)} GPUs"
    require(not gpus or max(num_served, num) <= len(gpus), CONFIG, text)
    shares = 0 < len(gpus) < num_served + num
    used = 0 if cfg.inference.sleep else float(cfg.inference.args.get("gpu_memory_utilization", 0))
    text = f"inference.args.gpu_memory_utilization = {used}: at most 0.5, since the trainer shares the GPU"
    require(not shares or used <= 0.5, CONFIG, text)
    env = environment(cfg, machine, shares)
    roles = []

    has_model = machine.model_size >= 0
    is_other = any(arg.startswith("model=") for arg in args)  # than the one that the TOML's script makes
    if cfg.run.prepare and not has_model and not is_other:
        roles.append(Role("prepare", [python, cfg.run.prepare, *args], dict(env)))
        has_model = True
    if not cfg.run.max_steps:  # --check
        roles.append(Role("estimate", [python, "tools/memory.py", *args], env))
    own = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    roles.append(Role("orchestrator", [python, "orchestrator.py", *args], env | own))
    if has_model:  # the orchestrator stays online, since its rows may not be here
        env["HF_HUB_OFFLINE"] = "1"

    command = machine.environ.get("SERVER", "").split() or [python, "-m", "configs.serving.server"]
    command += server_flags(cfg, machine.environ["ROLEMODEL_RUN_ID"], bool(gpus), shares)
    for i, port in enumerate(ports):
        own = {
            "CUDA_VISIBLE_DEVICES": ",".join(gpus[i * size : (i + 1) * size]),
            "VLLM_ENGINE_READY_TIMEOUT_S": f"{cfg.inference.startup_timeout:.0f}",
            "TMPDIR": machine.tmp,
        }
        if not gpus:
            own["OMP_NUM_THREADS"] = num_threads(machine, 2 * len(ports))
        roles.append(Role(f"inference{i or ''}", [*command, "--port", str(port)], env | own))

    first = min(num_served, len(gpus) - num)  # those after vLLM's; it shares the last ones if there are too few
    is_small = machine.model_size < 32 << 20
    own = {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + num]),
        "OMP_NUM_THREADS": num_threads(machine, 2 * num if is_small else num),  # half the threads are then faster
        "PYTORCH_ALLOC_CONF": allocator(machine),
    }
    script = "trainer.py" if cfg.run.max_steps else "tools/check.py"
    argv = [python, "-m", "torch.distributed.run", "--log-dir", machine.tmp, "--nproc-per-node", str(num)]
    argv += rendezvous(machine.environ)
    # With setpriv a rank ends with its parent even while it imports torch.
    argv += ["--no-python", "setpriv", "--pdeathsig", "KILL", python, script, *args]
    if shares:  # vLLM first: it counts the free memory while it starts
        argv = ["bash", "-c", AFTER_PORTS, " ".join(map(str, ports)), *argv]
    roles.append(Role("trainer", argv, env | own))
    return roles


def allocator(machine):
    """torch's options for the trainer's memory. Parts of a GPU (MIG) have no segments that expand."""
    given = machine.environ.get("PYTORCH_ALLOC_CONF") or machine.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    is_part = any(gpu.startswith("MIG") for gpu in machine.gpus)
    return given or f"expandable_segments:{not is_part}"


def num_threads(machine, num_shares):
    return machine.environ.get("OMP_NUM_THREADS") or str(max(1, machine.cpus // num_shares))


def rendezvous(environ):
    """torchrun's flags for one node, or for the first of several."""
    if not environ.get("NNODES"):
        return ["--standalone"]
    require("MASTER_ADDR" in environ, CONFIG, "NNODES needs MASTER_ADDR, the address of this node")
    endpoint = f"{environ['MASTER_ADDR']}:{environ.get('MASTER_PORT') or 29500}"
    return ["--nnodes", environ["NNODES"], "--node-rank", "0", "--rdzv-endpoint", endpoint]


def environment(cfg, machine, shares):
    """The variables that all roles have in common."""
    urls = cfg.inference.urls or [f"http://127.0.0.1:{port}" for port in machine.ports]
    overrides = f"inference.urls = {json.dumps(urls)}"
    if shares:
        overrides += '\ntrainer.sync_backend = "gloo"'  # NCCL refuses two ranks on one GPU
    env = {
        "ROLEMODEL_OVERRIDES": overrides,
        "ROLEMODEL_POLICY_URL": f"{urls[0]}/v1",
        "ROLEMODEL_SHARES": f"{shares:d}",
        "PYTHONPATH": f"{ROOT}:{machine.environ.get('PYTHONPATH', '')}".rstrip(":"),
    }
    if machine.ports and not machine.environ.get("NNODES"):
        env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    return env if machine.gpus else env | ON_CPU


# --- processes --------------------------------------------------------------------------------------------------------


def children(pid):
    found = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        with suppress(OSError):  # it has just ended
            found += map(int, Path(path).read_text().split())
    return found


def descendants(pid="self"):
    """The numbers of all processes that descend from one, parents before their children."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def send(number, pids):
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or is another user's
            os.kill(pid, number)


def say(text, fd=1):
    with suppress(OSError):  # the console may be gone
        os.write(fd, f"{text}\n".encode(errors="replace"))


def read_int(path):
    try:
        return int(path.read_text())
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
    """Removes what a run leaves half done, and the files that are given."""
    for pattern in ("tmp", "adapters", "*.tmp", "*/*.tmp", *more):
        subprocess.run(["rm", "-rf", *run_dir.glob(pattern)])


def start(role, path):
    """Starts a role in a session of its own; the kernel kills it when the launcher dies.

    The log begins with the command, without the secrets in it."""
    words = [*map("=".join, role.env.items()), *role.argv]
    command = shlex.join([re.sub(SECRET, r"\1REDACTED", word) for word in words])
    with open(path, "ab", buffering=0) as log:
        log.write(f"=== {time.strftime('%FT%T%z')} {command}\n".encode())
        return subprocess.Popen(
            role.argv,
            env=COMMON | os.environ | role.env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def supervise(cfg, run_dir, waiting, logs):
    """Starts the roles that wait and watches them until the run is done. Returns {name: process} of those still there.
    RunError if one ends too early, whatever its exit code, or if none makes progress."""
    processes = {}
    watched = {}  # {pidfd: (role, pid)} of roles and engines
    statuses = {}  # {pid: exit code} of children that have ended
    pipe = listen(run_dir)
    heard = ""  # what the roles have reported
    signs = None  # of progress
    looked = 0.0
    while waiting or processes.keys() & {"orchestrator", "trainer"}:
        # 1. Start what may start. What can be wrong with a task is found before a server starts.
        while waiting and ("[orchestrator] ready" in heard or not processes):  # FIRST: one after the other
            role = waiting.pop(0)
            path = f"{run_dir}/logs/{role.name}.log"
            logs.append(open(path, "a+b"))  # at its end
            process = start(role, path)
            processes[role.name] = process
            watched[os.pidfd_open(process.pid)] = (role.name, process.pid)

        # 2. Wait for half a second. Only processes and reports end it early, not logs and heartbeats.
        ready = what_happened([pipe, *watched])
        with suppress(BlockingIOError):
            heard += os.read(pipe, 1 << 16).decode(errors="replace")
        show(logs)
        version = read_int(run_dir / "version")

        # 3. Take the exit codes, also of orphans, which would stay zombies.
        statuses |= exit_codes()

        # 4. Look at what has ended: servers first, since others fail for want of them.
        ended = [watched.pop(fd) for fd in ready if fd in watched]
        for name, pid in sorted(ended):  # inference < orchestrator < trainer
            if pid != processes[name].pid:
                raise failure(run_dir, heard, name, pid, 1, f"its engine, process {pid}, died; its log may say how")
            is_done = version >= cfg.run.max_steps and not name.startswith("inference")
            if name != "watch" and (statuses[pid] or not (is_done or name in FIRST)):
                raise failure(run_dir, heard, name, pid, statuses[pid])
            del processes[name]

        # 5. See that it goes on, by a clock that does not jump.
        limit = cfg.run.watchdog
        if version < 0:
            limit += cfg.inference.startup_timeout
            watch_engines(processes, watched)
        if processes.keys() & FIRST:
            limit = cfg.run.prepare_timeout
        found = [version, *processes, *signs_of_progress(run_dir)]
        now = time.monotonic()
        if found != signs or now > looked + 60:  # the whole run was suspended, this process as well
            moved = now
        signs = found
        looked = now
        if now > moved + limit:
            name = "trainer" if "trainer" in processes else next(iter(processes))
            text = f"no role made progress for {limit:.0f} s (watchdog): the stacks are in {run_dir}/logs"
            raise failure(run_dir, heard, name, processes[name].pid, 1, text)
    return processes


def exit_codes():
    """{pid: exit code} of the children that have ended since."""
    ended = {}
    with suppress(ChildProcessError):  # there is no child left
        while (child := os.waitpid(-1, os.WNOHANG)) != (0, 0):
            ended[child[0]] = os.waitstatus_to_exitcode(child[1])
    return ended


def signs_of_progress(run_dir):
    """When each process last showed that it goes on (`role.heartbeat`), and the files of a checkpoint or of final/ that
    are being written: those of a large model on a slow disk may take longer than the watchdog."""
    beats = [entry.stat().st_mtime for entry in os.scandir(f"{run_dir}/tmp/progress")]
    return [*beats, *glob.glob("checkpoints/*.tmp/*", root_dir=run_dir), *glob.glob("final/*", root_dir=run_dir)]


def what_happened(files):
    """Those of the files that have something to read within half a second. What ends together is seen together, since a
    server that ends takes its engine along, and either may be the first."""
    if select.select(files, [], [], 0.5)[0]:
        time.sleep(0.1)
    return select.select(files, [], [], 0)[0]


def listen(run_dir):
    """Opens the pipe for the roles' reports. They open it by its path, which is gone as soon as the launcher has died,
    even if it stays a zombie."""
    pipe, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.environ["ROLEMODEL_PIPE"] = f"/proc/{os.getpid()}/fd/{writer}"
    os.environ["ROLEMODEL_PROGRESS"] = f"{run_dir}/tmp/progress"
    os.makedirs(f"{run_dir}/tmp/progress")
    return pipe


def show(logs):
    """Prints the lines for the console that have come into the logs."""
    for log in logs:
        lines, _, rest = log.read().rpartition(b"\n")
        log.seek(-len(rest), os.SEEK_CUR)  # half a line
        for line in re.findall(CONSOLE, lines):
            say(line.decode(errors="replace"))


def watch_engines(processes, watched):
    """vLLM's server answers for 96 s after its engine has died, so the engines are watched as well."""
    for name, process in processes.items():
        for pid in engines_below(process.pid):
            with suppress(OSError):  # it has just ended
                if (name, pid) not in watched.values():
                    watched[os.pidfd_open(pid)] = (name, pid)


def engines_below(pid):
    """Not their children: what an engine has forked, e.g. for a compiler, has its name until it begins to run."""
    found = []
    for child in children(pid):
        name = ""
        with suppress(OSError):  # it has just ended
            name = Path(f"/proc/{child}/comm").read_text()
        found += [child] if name.startswith("VLLM::Engine") else engines_below(child)
    return found


def failure(run_dir, heard, name, pid, status, cause=""):
    """RunError with what ended the run: what killed this process, or what the first role that failed reported."""
    reports = re.findall(REPORT, heard)
    code = CONFIG if status == CONFIG else DIED
    if status < 0:
        cause = f"killed by {signal.Signals(-status).name}"
    elif reports and not cause:
        name, code, pid, cause = reports[0]
    cause = cause or f"ended with status {status} before the run was done"
    log = run_dir / "logs" / f"{name}.log"
    end = log.read_text(errors="replace").rpartition("\n=== ")[2]
    errors = re.findall(ERROR, end) if name.startswith("inference") and status >= 0 else []
    if errors:  # while it starts, the first is the cause of the others
        is_starting = read_int(run_dir / "version") < 0
        cause = f"{cause}: {errors[0 if is_starting else -1][:500]}"
    killed = re.findall(KILLED_RANK, end)
    if killed:
        cause = f"a rank was killed, {killed[-1]}; {cause}"
    if int(code) == STORAGE:
        cause = f"{cause} ({free_gb(run_dir):.2f} GB are left for {run_dir})"
    if not reports:
        say(f"\n{end[-3000:]}\n", fd=2)
    return RunError(int(code), f"{cause} (role={name} pid={pid} exit={code} log={log})")


def dump_stacks():
    """All stacks into the logs. Everything is stopped first, so that nobody reacts to another's end; then children are
    aborted before their parents, with whom the kernel would kill them."""
    family = descendants()
    send(signal.SIGSTOP, family)
    for pid in reversed(family):
        send(signal.SIGABRT, [pid])
        send(signal.SIGCONT, [pid])
        with suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            poll = select.poll()  # select() takes no number above 1023
            poll.register(fd, select.POLLIN)
            poll.poll(1200)
            os.close(fd)


def on_signal(number, frame):
    """Interrupts the launcher wherever it is, also while it waits, as Ctrl-C does."""
    raise RunError(143, "terminated (exit=143)")


def end_all():
    """Ends all processes; the children of what has ended come to this one. A second Ctrl-C leaves them no time."""
    signal.signal(signal.SIGALRM, on_signal)
    for number, seconds in ((signal.SIGTERM, 5), (signal.SIGKILL, 10)):
        with suppress(RunError, KeyboardInterrupt, ChildProcessError):
            signal.alarm(seconds)
            while True:
                send(number, descendants())
                os.waitpid(-1, 0)
    signal.alarm(0)


def main(argv):
    began = time.monotonic()
    if "--check" in argv:
        argv.remove("--check")
        argv += ["max_steps=0", "eval.every=0"]
    cfg = load_config(argv[0], argv[1:])
    steps = cfg.run.max_steps
    run_dir = run_directory(cfg)
    if read_int(run_dir / "done") >= steps:
        refuse_other(json.loads((run_dir / "identity").read_text()), cfg, run_dir)
        report_changes(run_dir, to_toml(cfg))
        return say(f"[launch] already complete: {run_dir} has its {steps} steps; set max_steps higher, or run_name")
    claim(run_dir)
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    os.environ.setdefault("ROLEMODEL_RUN_ID", f"{run_dir.name}-{os.getpid()}-{began:.0f}")
    folder = os.open(run_dir, os.O_RDONLY)
    machine = look_around(cfg, argv, f"/proc/{os.getpid()}/fd/{folder}/tmp")
    check_machine(run_dir, cfg, machine)
    roles = plan(cfg, machine)
    watch = os.getenv("WATCH", "tools/watch.py")  # optional
    if steps and os.path.exists(watch):
        roles.append(Role("watch", [sys.executable, watch, str(run_dir)], roles[0].env))
    if roles[0].name == "prepare":
        say(f"[launch] preparing {cfg.run.model} with {cfg.run.prepare} (log: {run_dir}/logs/prepare.log)")

    code = 0
    logs = []  # open, as far as the console has shown them
    try:
        signal.signal(signal.SIGTERM, on_signal)
        if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # not with nohup
            signal.signal(signal.SIGHUP, on_signal)
        clear_up(run_dir, "version", "done")
        left = supervise(cfg, run_dir, roles, logs)
        if steps:
            (run_dir / "identity").write_text(json.dumps(identity(cfg)))
            (run_dir / "done").write_text(f"{steps}\n")
        with suppress(KeyError, subprocess.TimeoutExpired):  # it draws a last picture
            left["watch"].wait(60)
        passed = "" if steps else "all checks passed, "
        last = f"{passed}done in {time.monotonic() - began:.0f} s: {run_dir}"
    except KeyboardInterrupt:
        code = 130
        last = "interrupted (exit=130)"
    except RunError as error:
        code = error.code
        last = str(error)
    except OSError as error:  # a full disk, or a program that is not there
        code = exit_code(error, str(error))
        last = f"{error} (exit={code})"
    with suppress(RunError, KeyboardInterrupt, OSError):
        if code == DIED:
            dump_stacks()
    end_all()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    show(logs)
    clear_up(run_dir)
    say(f"[launch] {last}", fd=2 if code else 1)
    sys.exit(code)


if __name__ == "__main__":
    run_role("launch")
