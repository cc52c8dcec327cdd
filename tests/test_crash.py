"""The promises of tests/README.md: processes killed at exact points, hung, out of disk; and the same command again."""

import ast
import atexit
import contextlib
import glob
import importlib.util
import inspect
import itertools
import json
import operator
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import COMMIT, ROOT, WATCHED, all_batches, free_port, lines, some, write_run
from safetensors.torch import load_file

import orchestrator
import trainer
from trainer import load_batch

STEPS = 4
ONE_TURN = "{ num_turns = 1, num_rows = 10 }"  # 16 groups: an epoch ends on the way
OVERRIDES = (
    f"max_steps={STEPS}", "checkpoint.every=2", "checkpoint.keep=9", "trainer.gpus=2", "orchestrator.max_staleness=0",
    "eval.every=2",
)  # fmt: skip
ONE = ("trainer.gpus=1",)
FAULTS = ROOT / "tests" / "faults"  # on Python's path it breaks what FAULT names
PLACES = (trainer, orchestrator, torch.nn.utils, trainer.dcp)  # where it waits for functions


class Run:
    """launch.sh with the fake server or the real vLLM, in a process group of its own, and all that descends from it.
    tools/watch.py is among that only with WATCHED."""

    def __init__(self, path, model, *overrides, real=False, toml=None, **variables):
        self.dir, self.known, self.sessions, self.ports = path / (toml.stem if toml else "run"), set(), set(), set()
        self.scratch = Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
        atexit.register(shutil.rmtree, self.scratch, True)
        self.log = path / f"launch{len(list(path.glob('launch*')))}.log"
        toml = toml or write_run(path, model, STEPS, ONE_TURN)
        server = {} if real else {"SERVER": f"{sys.executable} {ROOT / 'tests' / 'fake_vllm.py'}"}
        path_to = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = ["bash", str(ROOT / "launch.sh"), str(toml), *overrides]
        env = os.environ | {"PATH": path_to, "TMPDIR": str(self.scratch), "WATCH": ""} | server | variables
        env |= {"PYTHONPATH": f"{FAULTS}:{env['PYTHONPATH']}"} if "FAULT" in variables else {}
        with open(self.log, "w") as out:
            deaf = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored, and
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=env, start_new_session=True)
            signal.signal(signal.SIGINT, deaf)  # bash cannot trap what was ignored when it began

    def text(self, name=""):
        file = self.dir / "logs" / f"{name}.log" if name else self.log
        return file.read_text(errors="replace") if file.exists() else ""

    def wait_for(self, found, timeout_s=90):
        """Until found() is true -> what it gave."""
        deadline = time.monotonic() + timeout_s
        while not (value := found()):
            assert self.process.poll() is None and time.monotonic() < deadline, self.text() + self.text("trainer")
            time.sleep(0.05)
        return value

    def fault(self, timeout_s=90):
        self.wait_for(lambda: "[fault]" in self.text("trainer") + self.text("orchestrator"), timeout_s)

    def processes(self):
        """{role: pid} of what is alive and descends from launch.sh, did so when it was last looked for, has a session
        with what did, or is about the run's directory."""
        table = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                stat, command = (place / "stat").read_text(), (place / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            (_, _, name), fields = stat.rpartition(")")[0].partition("("), stat.rpartition(")")[2].split()
            table[int(place.name)] = name, command, *fields[:2], fields[3], fields[19]
        ours = {pid for pid, (*_, began) in table.items() if (pid, began) in self.known} | {self.process.pid}
        ours |= {pid for pid, row in table.items() if row[4] in self.sessions or str(self.dir.parent) in row[1]}
        ours -= {os.getpid()}
        while more := {pid for pid, row in table.items() if int(row[3]) in ours} - ours:
            ours |= more
        found = {"launch.sh": self.process.pid}
        for pid in sorted(ours & set(table)):
            name, command, state, _, session, began = table[pid]
            if state == "Z":
                continue
            self.known.add((pid, began))
            self.sessions.add(session)
            try:
                role = self.role(pid, name, command)
            except OSError:  # it has just ended
                continue
            if role == "server":
                self.ports.add(int(command.split("\0--port\0")[1].split("\0")[0]))
            if pid != self.process.pid:
                found[role or f"{name} {pid} {command[:200]}"] = pid
        return found

    def role(self, pid, name, command):
        words = command.split("\0")
        if name.startswith("VLLM::Engine"):
            return "engine"
        if "torch.distributed.run" in words:
            return "agent"
        if any(word.endswith("trainer.py") for word in words):
            rank = re.search(r"\0RANK=(\d)", environ_of(pid))
            return f"rank{rank[1]}" if rank else ""
        if "orchestrator.py" in words:
            return "orchestrator"
        is_server = any(word.endswith(("fake_vllm.py", "configs.serving.server")) for word in words)
        return "server" if is_server and "--port" in words else ""

    def kill(self, role, signal_number=signal.SIGKILL):
        """-> its pid."""
        pid = self.wait_for(lambda: self.processes().get(role))
        os.kill(pid, signal_number)
        return pid

    def end(self, code, timeout_s=120):
        """Waits for the end -> the last line on standard error."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None and time.monotonic() < deadline:
            self.processes()  # learns who descends from it
            time.sleep(0.2)
        assert self.process.wait(0.1) == code, f"{self.process.returncode}\n{self.text()}{self.text('trainer')[-3000:]}"
        return (self.text().strip().splitlines() or [""])[-1]

    def assert_clean(self, within_s=15):
        """No process, port or temporary file of the run is left. Where launch.sh itself was killed, temporary files
        are, in the run's directory, until the next start."""
        deadline = time.monotonic() + within_s
        while left := self.left():
            assert time.monotonic() < deadline, left
            time.sleep(0.1)
        self.scratch.rmdir()
        self.scratch.mkdir()

    def left(self):
        processes = {role: pid for role, pid in self.processes().items() if role != "launch.sh"}
        files = list(self.scratch.iterdir())
        if self.process.poll() != -signal.SIGKILL:
            names = ("*.tmp", "tmp", "adapters")  # pathlib's rglob raises where a folder goes meanwhile
            files += [path for name in names for path in glob.glob(f"{self.dir}/**/{name}", recursive=True)]
        busy = [port for port in self.ports if is_taken(port)]
        return [x for x in (processes, files, busy) if x]


def environ_of(pid):
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:  # it has just ended
        return ""


def is_taken(port):
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def committed(run_dir):
    """[(step, environment, index, row)] of all groups in rollouts.jsonl, which holds committed batches alone."""
    return sorted({(x["step"], x["env"], x["group"], x["example"]) for x in lines(run_dir / "rollouts.jsonl")})


def assert_history(run_dir, steps):
    """Every index up to the last was issued once in the committed history, and is trained or dropped with a reason."""
    history = committed(run_dir)
    last = load_batch(run_dir / "batches" / f"step_{steps - 1:06d}.safetensors")
    for name, ledger in last.info["sampler"].items():
        indices = sorted(index for _, env, index, _ in history if env == name)
        assert sorted(indices + ledger["open"]) == list(range(ledger["next"])), (indices, ledger)
    dropped = {(x["env"], x["group"]) for x in lines(run_dir / "rollouts.jsonl") if x["dropped"]}
    trained = set()
    for path in sorted((run_dir / "batches").glob("step_*.safetensors")):
        batch = load_batch(path)
        trained |= {(s["env"], s["group"]) for s in batch.sequences}
    assert trained | dropped == {(env, index) for _, env, index, _ in history} and not trained & dropped
    assert [m["step"] for m in lines(run_dir / "metrics.jsonl")] == list(range(steps))


@pytest.fixture(scope="session")
def undisturbed(models, tmp_path_factory):
    """The run directory of the same run without a fault, and with two servers: who answers makes no difference."""
    path = tmp_path_factory.mktemp("undisturbed")
    run = Run(path, models["untied"], *OVERRIDES, "inference.gpus=2")
    run.end(0)
    run.assert_clean()
    assert (run.dir / "logs" / "inference1.log").is_file()
    assert_history(run.dir, STEPS)
    return run.dir


KEYS = """step time version reward/mean reward/std rollout/tokens rollout/truncated rollout/errors rollout/forks
  group/kept group/flat staleness/mean staleness/max loss policy/entropy policy/kl_sampler policy/clip_frac
  sync/dlogp_max sync/dlogp_mean optim/lr optim/grad_norm time/step_s
  time/wait_batch_s time/train_s time/sync_s perf/tokens_per_s perf/peak_gib""".split()
EVAL_KEYS = (
    """step version_first version_last env reward/mean pass@1 pass@k n errors tokens truncated seconds rows""".split()
)
ROLLOUT_KEYS = "step version env example group rollout reward metrics truncated prompt completion error dropped".split()


@pytest.mark.slow
def test_the_undisturbed_run_is_strictly_on_policy_and_tells_all(undisturbed):
    """max_staleness = 0: the version that sampled is the one that is trained, on two ranks, by two servers."""
    done, metrics, evals = undisturbed / "done", lines(undisturbed / "metrics.jsonl"), lines(undisturbed / "eval.jsonl")
    shown = (undisturbed.parent / "launch0.log").read_text()
    assert "[launch] done" in shown and len(re.findall(r"^step ", shown, re.MULTILINE)) == STEPS
    for n, batch in enumerate(all_batches(undisturbed)):
        assert all(set(s["versions"]) == {n} and s["staleness"] == 0 for s in batch.sequences)
    assert [m["version"] for m in metrics] == [1, 2, 3, 4]
    for m in metrics:
        assert not set(KEYS) - set(m), set(KEYS) - set(m)
        assert m["policy/kl_sampler"] < 1e-6 and m["sync/dlogp_max"] < 1e-4
    assert [e["step"] for e in evals] == [0, 2, 4] and all(e["version_first"] == e["version_last"] for e in evals)
    assert not set(EVAL_KEYS) - set(evals[0]) and not set(ROLLOUT_KEYS) - set(lines(undisturbed / "rollouts.jsonl")[0])
    assert (undisturbed / "final" / "model.safetensors").is_file() and not list(undisturbed.glob("**/*.tmp"))
    assert not (undisturbed / "tmp").exists() and done.read_text() == "4\n"


def assert_resumes(path, model, undisturbed, *overrides):
    """The same command again: the end, the data and, bit for bit, the parameters of the undisturbed run."""
    run = Run(path, model, *OVERRIDES, *overrides)
    run.end(0)
    run.assert_clean()
    assert_history(run.dir, STEPS)
    assert committed(run.dir) == committed(undisturbed)
    for name, keys in {"metrics.jsonl": ("step", "loss", "reward/mean"), "eval.jsonl": ("step", "reward/mean"),
                       "rollouts.jsonl": ("step", "group", "rollout", "reward", "dropped")}.items():  # fmt: skip
        a, b = ([[line[k] for k in keys] for line in lines(d / name)] for d in (run.dir, undisturbed))
        assert a == b, name
    mine, theirs = (load_file(d / "final" / "model.safetensors") for d in (run.dir, undisturbed))
    assert all(mine[key].equal(theirs[key]) for key in theirs)


# --- kill anything, anywhere, and the same command carries on ---------------------------------------------------------

PHASES = {"startup": "start_trainer@0,0:0", "gen": "gen@0,2:0", "fwd": "fwd@0,3:0", "bcast": "bcast@0,3:0",
          "ckpt": "ckpt_before_rename@0,2:0"}  # fmt: skip
ROLES = ("server", "engine", "orchestrator", "rank0", "rank1", "agent", "launch.sh")
NAMES = {"server": "inference", "engine": "inference", "rank0": "trainer", "rank1": "trainer", "agent": "trainer"}


def test_what_faults_wait_for_is_in_the_code():
    """A point whose function has another name now would never come."""
    spec = importlib.util.spec_from_file_location("faults", FAULTS / "sitecustomize.py")
    spec.loader.exec_module(faults := importlib.util.module_from_spec(spec))

    def body(name):
        found = [operator.attrgetter(name)(place) for place in PLACES if hasattr(place, name.split(".")[0])]
        return inspect.unwrap(found[0]).__code__

    for point, (event, called, inside, step) in faults.POINTS.items():
        assert event.startswith("c_") or body(called).co_qualname == called, point
        name = "policy" if "forward" in str(called) else getattr(called, "__name__", str(called).split(".")[0])
        assert inside == called or name in {*body(inside).co_names, *body(inside).co_varnames}, point
        locals_of = {"step": 7, "version": 7, "client": SimpleNamespace(version=7), "info": {"step": 7}}
        assert step({name: locals_of[name] for name in body(inside).co_varnames if name in locals_of}) == 7, point
    points = {fault.partition("@")[0] for fault in (*PHASES.values(), *POINTS, *STOPS)}
    assert {point for point in points if not point.startswith("start_")} == set(faults.POINTS)


@pytest.mark.slow
@pytest.mark.parametrize("cell", some(list(itertools.product(ROLES, PHASES)), 1), ids="-".join)
def test_kill_matrix(cell, models, undisturbed, tmp_path):
    """A server is killed whose engine outlives it."""
    role, phase = cell
    fake = {"FAKE": '{"orphan": true}'} if role == "server" else {}
    run = Run(tmp_path, models["untied"], *OVERRIDES, FAULT=PHASES[phase], **fake, **WATCHED)
    run.fault()
    if phase == "startup":
        run.wait_for(lambda: "engine" in run.processes())
        time.sleep(1.2)  # launch.sh looks for engines twice a second
    pid, killed = run.kill(role), time.monotonic()
    if role == "launch.sh":
        run.end(-signal.SIGKILL)
    else:
        last = run.end(3)
        name = NAMES.get(role, role)
        assert re.match(rf"\[launch\] .+ \(role={name} pid=\d+( rank=\d)? exit=3 log=.*/{name}.log\)$", last), last
        if role.startswith("rank"):
            assert re.search(rf"a rank was killed, exitcode *: -9 \(pid: {pid}\)", last), (pid, last)
    assert time.monotonic() - killed < 30
    run.assert_clean()
    assert_resumes(tmp_path, models["untied"], undisturbed)


@pytest.mark.parametrize("role", some(["launch.sh", "agent"], 1))
def test_a_rank_that_still_imports_torch_ends_with_its_parents(role, models, tmp_path):
    """launch.sh stays a zombie, which a signal still reaches: whoever started it does not ask for its status."""
    run = Run(tmp_path, models["untied"], *OVERRIDES)
    run.wait_for(lambda: "rank1" in run.processes())
    os.kill(run.processes()[role], signal.SIGKILL)
    time.sleep(8)
    assert role == "agent" or not {"agent", "rank0", "rank1"} & set(run.processes())
    run.end(-signal.SIGKILL if role == "launch.sh" else 3)
    run.assert_clean()


POINTS = ("ckpt_write@0,2", "ckpt_write@1,2", "ckpt_before_rename@0,2", "ckpt_after_rename@0,2")


@pytest.mark.slow
@pytest.mark.parametrize("point", some(POINTS, 0))
def test_a_kill_while_a_checkpoint_is_written_leaves_an_old_or_a_new_one(point, models, undisturbed, tmp_path):
    """Twice at the same step: the second save meets what the first one left."""
    for _ in range(1 if "after" in point else 2):
        run = Run(tmp_path, models["untied"], *OVERRIDES, FAULT=f"{point}:9")
        assert re.search(r"a rank was killed, exitcode *: -9 \(pid: \d+\).*role=trainer ", run.end(3))
        run.assert_clean()
        names = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
        assert names == (["step_000002"] if "after" in point else [])
    assert_resumes(tmp_path, models["untied"], undisturbed)


# --- the watchdog, and servers that fail ------------------------------------------------------------------------------

SHORT = ("watchdog=8", "orchestrator.generation_timeout=6", "inference.startup_timeout=60", "eval.hold_s=1")
BLOCKS = '{ kind = "blocks" }'  # its method never lets the event loop go on, while a thread prints without end
HANGS = {
    "a rank": ("fwd@1,2:19", ONE_TURN, "trainer", "in fault"),
    "a server": ("", ONE_TURN, "inference", "run_app"),
    "the event loop": ("", BLOCKS, "orchestrator", "in env_response"),
}
STOPS = ["bwd@0,2", "opt@1,2", "gather@1,2", "bcast@0,2", "ckpt_write@0,2", "ckpt_after_rename@0,2", "gen@0,2"]
STOPS += ["batch_write@0,2", "start_trainer@1,0", "start_orchestrator@0,0"]
OF_ORCHESTRATOR = ("gen@0,2", "batch_write@0,2", "start_orchestrator@0,0")
for point in STOPS:
    HANGS[point] = (f"{point}:19", ONE_TURN, "orchestrator" if point in OF_ORCHESTRATOR else "trainer", "")


@pytest.mark.slow
@pytest.mark.parametrize("who", some(list(HANGS), 0))
def test_the_watchdog_ends_what_hangs_with_all_stacks(who, models, tmp_path):
    fault, env, log, stack = HANGS[who]
    more = ONE if who in ("a server", "the event loop") else ()
    stops = {}
    if who == "a server":  # in a sync, with no rollout under way, whose end would be progress
        more = (*ONE, "orchestrator.max_staleness=0")
        stops = {"FAKE": json.dumps({"sync 3": "stop"})}
    toml = write_run(tmp_path, models["untied"], 9, env)
    run = Run(tmp_path, None, *OVERRIDES, *SHORT, *more, toml=toml, FAULT=fault, **stops, **WATCHED)
    if who == "a server":
        run.wait_for(lambda: "[fault]" in run.text("inference"))
    elif who == "the event loop":
        run.wait_for(lambda: "still here" in run.text("orchestrator"))
    else:
        run.fault()
    began = time.monotonic()
    last = run.end(3)
    seconds = time.monotonic() - began
    limit, before = (68, 40) if who.startswith("start") else (8, 3)  # counts from the start; first come imports
    assert limit - before <= seconds < limit + 25, seconds
    message = rf"no role made progress for {limit} s \(watchdog\): the stacks .*/logs \(role=\w+ pid=\d+ exit=3 "
    assert re.search(message, last), last
    dumps = re.findall(r'Fatal Python error: Aborted\n\n(?:.|\n)*?hread 0x(?:.|\n)*?File "', run.text(log))
    assert dumps and stack in run.text(log), run.text(log)[-3000:]
    run.assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize("case", some([
    ({"bias": 5.0}, "a KL above 1, in three consecutive steps.* exit=5 "),
    ({"generate 6": "exit"}, "ended with status 0 before the run was done .role=inference "),
    # If all requests of a batch have come before the sixth's answer, the next sync is what waits.
    ({"generate 6": "silent"}, r"(/collective_rpc: ReadTimeout|no role made progress for 15 s).*role=trainer "),
    ({"sync 3": "raise"}, "fault asked for: sync raises after its first tensor"),
    ({"sync 3": "hang"}, r"receive_weights: .*/collective_rpc: ReadTimeout.*imed out.* .trainer.sync_timeout_s = 5."),
    ({"sync 3": "500"}, "no weights today"),
    ({"join": "404"}, "/collective_rpc answered 404: .*no such route"),
], 0))  # fmt: skip
def test_a_server_that_fails_ends_the_run(case, models, tmp_path):
    fault, cause = case
    limits = (
        "watchdog=15",
        "orchestrator.generation_timeout=12",
        "trainer.sync_timeout_s=5",
        "inference.startup_timeout=30",
        "eval.hold_s=1",
    )
    run = Run(tmp_path, models["untied"], *OVERRIDES, *limits, *ONE, FAKE=json.dumps(fault), **WATCHED)
    last = run.end(5 if "bias" in fault else 3)
    assert re.search(cause, last), last
    assert len(run.text()) < 20000 and not list((run.dir / "checkpoints").glob("step_000004"))
    run.assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize("when", some(["at once", "at work", "twice", "group", "hangup"], 0))
def test_signals_end_the_run_in_order(when, models, tmp_path):
    """SIGTERM ends the run of test_every_listener_is_on_the_loopback."""
    run = Run(tmp_path, models["untied"], *OVERRIDES, "max_steps=1000", *ONE, **WATCHED)
    if when == "at once":
        run.wait_for(lambda: (run.dir / "tmp" / "progress").exists())
        time.sleep(0.3)
    else:
        run.wait_for(lambda: "step     2" in run.text())
    began = time.monotonic()
    number = signal.SIGHUP if when == "hangup" else signal.SIGINT  # the terminal has gone
    (os.killpg if when == "group" else os.kill)(run.process.pid, number)
    if when == "twice":
        time.sleep(0.2)
        os.kill(run.process.pid, signal.SIGINT)
    last = run.end(143 if when == "hangup" else 130)
    assert time.monotonic() - began < 30
    assert when == "twice" or "exit=" in last
    run.assert_clean()


@pytest.mark.long
def test_a_run_that_was_suspended_goes_on(models, tmp_path):
    """As by SLURM or `docker pause`, and for longer than the watchdog waits. The launcher is the first to go on."""
    run = Run(tmp_path, models["untied"], *OVERRIDES, *SHORT, *ONE, **WATCHED)
    run.wait_for(lambda: "step     2" in run.text())
    pids = list(run.processes().values())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(65)
    os.kill(run.process.pid, signal.SIGCONT)
    time.sleep(2)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    run.end(0)
    run.assert_clean()


# --- mistakes are found before a server starts ------------------------------------------------------------------------

MISTAKES = {
    "task": ("env.id=mine", 4, "env.id = 'mine': KeyError: 'size' in <module>, mine.py:1"),
    "output_dir": ("output_dir={toml}", 6, "exit=6 .*Not a directory"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found_before_a_server_starts(mistake, models, tmp_path):
    """The cause is in the last line. test_config.py and test_orchestrator.py have more mistakes."""
    override, code, cause = MISTAKES[mistake]
    (tmp_path / "mine.py").write_text("settings = {}['size']")
    toml = write_run(tmp_path, models["untied"], 2, ONE_TURN)
    run = Run(tmp_path, None, override.format(toml=toml), toml=toml)
    last = run.end(code)
    assert re.search(cause, last), last
    assert not list(tmp_path.rglob("inference.log")) and len(run.text().splitlines()) <= 3
    run.assert_clean()


# --- storage and the run directory ------------------------------------------------------------------------------------


def assert_loads(path):
    """A checkpoint's files are what state.json says."""
    state = json.loads((path / "state.json").read_text())
    assert state["step"] == int(path.name[5:]) and trainer.shard_sizes(path) == state["shards"] != {}
    return state["step"]


@pytest.mark.slow
@pytest.mark.long
def test_a_full_disk_ends_the_run_with_6_and_the_last_checkpoint_loads(models, tmp_path):
    run = Run(tmp_path, models["untied"], *OVERRIDES, "checkpoint.every=1", *ONE, FAULT="ckpt_write@0,3:enospc")
    last = run.end(6)
    assert re.search("No space left.*exit=6", last), last
    run.assert_clean()
    assert assert_loads(max((run.dir / "checkpoints").glob("step_??????"))) == 2


def test_a_checkpoint_that_does_not_fit_ends_the_trainer_with_6(make_cfg, batches, tmp_path):
    """On a real file system of half a MB: what torch.distributed.checkpoint meets while it writes."""
    make_cfg()
    small = tmp_path / "small"
    small.mkdir()
    command = [sys.executable, ROOT / "trainer.py", tmp_path / "test.toml"]
    command += ["--replay", batches(1), f"output_dir={small}"]
    mount = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=500k none {small} || exit 77; "$@"', "sh"]
    done = subprocess.run([*mount, *map(str, command)], capture_output=True, text=True, cwd=ROOT, timeout=120)
    if done.returncode == 77:
        pytest.skip("namespaces are barred")
    assert done.returncode == 6 and "step     0" in done.stdout, done.stderr[-3000:]
    assert "[trainer] exit=6 OSError: [Errno 28] No space left on device" in done.stderr.splitlines()[-1]


def test_every_instant_of_a_save_leaves_a_checkpoint_that_loads(make_cfg, tmp_path):
    """The directory as it was before each operation on files is what a kill at that moment leaves: the old or the new
    checkpoint loads, whole, never a mixture; and the next save goes through, on top of what the kill left."""
    folder, images, watching = tmp_path / "checkpoints", tmp_path / "images", False
    folder.mkdir()
    images.mkdir()
    cfg = make_cfg("checkpoint.keep=1")
    policy = trainer.build_policy(cfg)
    optimizer = trainer.make_optimizer(policy, cfg.trainer)

    def hook(event, args):
        nonlocal watching
        if watching and event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"):
            watching = False  # its own work is not watched
            shutil.copytree(folder, images / f"{len(list(images.iterdir())):03d} {event}" / "checkpoints")
            watching = True

    def save(place, step):
        trainer.save_checkpoint(place, step, policy, optimizer, cfg)

    sys.addaudithook(hook)  # for the life of the process, but idle unless watching
    save(tmp_path, 1)
    watching = True
    save(tmp_path, 2)
    watching = False
    found = []
    for place in sorted(images.iterdir()):
        path = max(place.glob("checkpoints/step_??????"))
        found.append(assert_loads(path))
        assert trainer.load_checkpoint(path, policy, optimizer, cfg) == found[-1]
        for killed in place.glob("checkpoints/*.tmp"):
            (killed / "model-00009-of-00009.safetensors").write_bytes(b"half" * 5000)
        save(place, found[-1] + 1)
        (path,) = place.glob("checkpoints/step_??????")
        assert assert_loads(path) == found[-1] + 1 and not list(path.glob("*00009*"))
    assert len(found) > 5 and found == sorted(found) and set(found) == {1, 2}, found


def finished(path, undisturbed):
    """A copy of the undisturbed run that has steps to do."""
    shutil.copytree(undisturbed, path / "run")
    (path / "run" / "done").unlink()
    return path / "run"


@pytest.mark.slow
def test_a_damaged_checkpoint_ends_the_run_with_6_and_is_named(models, undisturbed, tmp_path):
    """Never one checkpoint silently for another. test_trainer.py has other files and damages."""
    path = finished(tmp_path, undisturbed) / "checkpoints" / "step_000004" / "state.json"
    path.write_bytes(path.read_bytes()[:-7])
    run = Run(tmp_path, models["untied"], *OVERRIDES, "max_steps=5", *ONE)
    last = run.end(6)
    assert str(path) in last and "is damaged" in last and "Remove" in last, last
    run.assert_clean()


@pytest.mark.slow
@pytest.mark.long
def test_a_run_directory_belongs_to_one_run(models, undisturbed, tmp_path):
    run_dir = finished(tmp_path, undisturbed)
    other = Run(tmp_path, models["untied"], *OVERRIDES, "seed=5")
    assert "seed was 0, now 5" in other.end(2) and "another run_name" in other.text()
    first = Run(tmp_path, models["untied"], *OVERRIDES, "max_steps=1000", *ONE, FAULT="gen@0,5:0")
    first.fault()
    second = Run(tmp_path, models["untied"], *OVERRIDES, "max_steps=1000")
    began = time.monotonic()
    assert "belongs to a run under way" in second.end(2) and time.monotonic() - began < 12
    first.kill("launch.sh", signal.SIGTERM)
    first.end(143)
    first.assert_clean()
    # one rank went on from a checkpoint of two; a learning rate may change, and a run that has its steps is complete
    (run_dir / "done").write_text(str(STEPS))
    began = time.monotonic()
    again = Run(tmp_path, models["untied"], *OVERRIDES, "trainer.learning_rate=1e-4")
    assert "already complete" in again.end(0) and time.monotonic() - began < 12
    again.assert_clean()


@pytest.mark.slow
def test_a_port_in_use_is_refused_where_it_is_set(models, tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        run = Run(tmp_path, models["untied"], *OVERRIDES, f"inference.port={port}")
        assert f"port {port} is in use: leave inference.port out, or set another" in run.end(2)


# --- local, no pickle -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_listener_is_on_the_loopback(models, tmp_path):
    """But torchrun's own store, which PyTorch opens on every address."""
    run = Run(
        tmp_path, models["untied"], *OVERRIDES, *ONE, f"inference.port={(port := free_port())}", FAULT="fwd@0,1:0"
    )
    run.fault()
    sockets = {}
    for role, pid in run.processes().items():
        for fd in glob.glob(f"/proc/{pid}/fd/*"):  # none, where a process has just ended, such as a sleep of launch.sh
            with contextlib.suppress(OSError):
                if found := re.match(r"socket:\[(\d+)\]", os.readlink(fd)):
                    sockets[found[1]] = role
    listening = []
    for family in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{family}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = row.split()
            if state == "0A" and rest[5] in sockets:
                listening.append((sockets[rest[5]], local.split(":")[0]))
    loopback = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
    assert {role for role, _ in listening} >= {"server", "rank0"} and run.ports == {port}
    assert {role for role, address in listening if address not in loopback} <= {"agent"}, listening
    run.kill("launch.sh", signal.SIGTERM)
    began = time.monotonic()
    assert "exit=" in run.end(143) and time.monotonic() - began < 30
    run.assert_clean()


OURS = [*ROOT.glob("*.py"), *(ROOT / "configs").rglob("*.py"), *(ROOT / "tools").glob("*.py")]


def test_no_pickle_and_no_shell():
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "marshal", "shelve", "dill"} & {n.split(".")[0] for n in names}, path
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", "")
                assert name not in ("eval", "exec"), (path, node.lineno)
                attribute = ast.unparse(node.func)
                assert attribute not in ("torch.load", "torch.save", "os.system", "np.load"), (path, node.lineno)
                for keyword in node.keywords:
                    pair = keyword.arg, getattr(keyword.value, "value", None)
                    assert pair not in (("shell", True), ("trust_remote_code", True), ("weights_only", False))


# --- the same with the real vLLM --------------------------------------------------------------------------------------

REAL = [(role, phase) for role, phases in {"server": ("startup", "gen", "bcast"), "engine": ("gen", "fwd", "bcast"),
                                           "launch.sh": ("startup", "ckpt")}.items() for phase in phases]  # fmt: skip


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize("cell", REAL, ids="-".join)
def test_kill_matrix_on_the_real_server(cell, models, tmp_path):
    role, phase = cell
    run = Run(tmp_path, models["untied"], *OVERRIDES, real=True, FAULT=PHASES[phase], **WATCHED)
    run.fault(180)
    run.kill(role)
    killed = time.monotonic()
    last = run.end(-signal.SIGKILL if role == "launch.sh" else 3)
    assert role == "launch.sh" or "(role=inference pid=" in last, last
    assert time.monotonic() - killed < 30
    run.assert_clean()
    again = Run(tmp_path, models["untied"], *OVERRIDES, real=True)
    again.end(0, 300)
    again.assert_clean()
    assert_history(again.dir, STEPS)


@pytest.mark.real
@pytest.mark.parametrize("role", some(["launch.sh", "server"], 0))
def test_an_engine_that_still_imports_vllm_ends_with_its_server(role, models, tmp_path):
    """It would else wait for a word from the server, for five minutes, before it imports the receiver of weights."""
    run = Run(tmp_path, models["untied"], *OVERRIDES, real=True)
    run.wait_for(lambda: any("spawn_main" in name for name in run.processes()), 180)
    run.kill(role)
    last = run.end(-signal.SIGKILL if role == "launch.sh" else 3)
    assert role == "launch.sh" or "killed by SIGKILL (role=inference pid=" in last, last
    run.assert_clean()


@pytest.mark.long
@pytest.mark.real
@pytest.mark.parametrize("role", ["launch.sh", "server", "engine"])
def test_nothing_is_left_with_tensor_parallelism(role, models, tmp_path):
    """The engine has workers of its own then, and never imports the receiver of weights."""
    two = ("inference.gpus=2", "inference.args.tensor_parallel_size=2", "max_steps=4000")
    run = Run(tmp_path, models["untied"], *OVERRIDES, *two, real=True, VLLM_CPU_OMP_THREADS_BIND="nobind", **WATCHED)
    run.wait_for(lambda: (run.dir / "version").exists(), 240)
    assert sum("VLLM::Worker" in name for name in run.processes()) == 2
    run.kill(role)
    run.end(-signal.SIGKILL if role == "launch.sh" else 3)
    run.assert_clean()


@pytest.mark.long
@pytest.mark.real
def test_soak(tmp_path):
    """150 steps of the quickstart; 20 to 60 s after the first new step of each attempt something is killed or hangs."""
    rng, attempts, best = random.Random(COMMIT), 0, -1
    limits = ("watchdog=50", "trainer.sync_timeout_s=30", "orchestrator.generation_timeout=40", "checkpoint.every=5")
    start = lambda: Run(tmp_path, None, *limits, f"output_dir={tmp_path}", real=True, **WATCHED,  # noqa: E731
                        toml=ROOT / "configs" / "reverse_text.toml")  # fmt: skip
    run, began = start(), time.monotonic()

    def version():
        try:
            return int((run.dir / "version").read_text())
        except (OSError, ValueError):
            return -1

    def num_attempts():
        return run.text("trainer").count("\n=== ") + run.text("trainer").startswith("=== ")

    while run.process.poll() in (None, 3, -signal.SIGKILL):
        assert time.monotonic() - began < 3000, run.text()[-3000:]
        if run.process.poll() is not None:  # a role, or the launcher itself, was killed
            run.assert_clean()
            run = start()
        if version() > best:
            due, attempt, first = time.monotonic() + rng.uniform(20, 60), num_attempts(), version()
            while time.monotonic() < due and run.process.poll() is None:
                time.sleep(0.5)
            if run.process.poll() is not None or not version() < 150:
                break
            attempts += 1
            for pid in run.processes().values():  # a leak is a descriptor a request, of which there were thousands
                with contextlib.suppress(OSError):
                    assert len(os.listdir(f"/proc/{pid}/fd")) < 800
            roles = ("server", "engine", "orchestrator", "rank0", "agent", "launch.sh")
            role, number = rng.choice(roles), rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
            number = signal.SIGKILL if role in ("launch.sh", "agent", "server") else number
            print(
                f"{time.monotonic() - began:.0f} s: versions {first} to {version()}, {role}, {number.name}", flush=True
            )
            best = version()
            run.kill(role, number)
            while num_attempts() == attempt and run.process.poll() is None:  # until the next attempt
                time.sleep(0.2)
                best = max(best, version())
        time.sleep(0.2)
    assert run.process.wait(120) == 0, run.text()[-3000:]
    run.assert_clean()
    assert_history(run.dir, 150)
    assert attempts >= 2 and int((run.dir / "version").read_text()) == 150
