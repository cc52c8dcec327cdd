"""Runs tasksets of `verifiers` 0.4 unchanged: their tasks, turns, tools and rewards, our token ids and logprobs.

    [env]
    id = "verifiers_v1"     # configs/tasks/verifiers_v1.py
    args = { taskset = "my-tasks", packages = ["my-tasks==1.2"], num_eval = 64, difficulty = "hard" }

verifiers 0.1 is in .venv under the same name. So a worker (verifiers_v1_worker.py) runs in a venv of its own, made on
first use, and answers JSON lines. Its harnesses are agents (agents.py): what they ask of the policy goes to the
rollout's own address. A reward function that fails loses the rollout; it never counts as 0."""

import asyncio
import concurrent.futures
import fcntl
import itertools
import json
import os
import shlex
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from statistics import fmean as mean

from configs.environments.agents import AgentEnv
from configs.runtime.role import CONFIG, require, say
from env import TAKEN, Rubric

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ROOT / "requirements-verifiers-v1.txt"
VENV = ROOT / ".venv-verifiers-v1"
LOCK = ROOT / ".setup.lock"  # launch.sh's: one installation at a time
WORKER = Path(__file__).with_name("verifiers_v1_worker.py")
NOT_INHERITED = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")  # our modules would hide a taskset's


class TasksetFailed(Exception):
    """The rollout is lost: the taskset's code, its tools or the harness failed."""


# --- the venv ---------------------------------------------------------------------------------------------------------


def make_venv(packages):
    """Makes the venv, or adds to it what it lacks. Returns its python. Raises RunError."""
    python = VENV / "bin" / "python"
    required = REQUIREMENTS.read_text().splitlines()
    marker = VENV / "installed.txt"  # lines of the requirements, then packages
    with open(LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        installed = marker.read_text().splitlines() if marker.exists() else []
        if installed[: len(required)] != required:
            say(f"[setup] installing verifiers 0.4 into {VENV.name} (about a minute, log in {VENV.name}/setup.log)")
            run_logged(sys.executable, "-m", "venv", "--clear", VENV)
            (VENV / ".gitignore").write_text("*\n")
            run_logged(python, "-m", "pip", "install", "-r", REQUIREMENTS)
            installed = required
        packages = [packages] if isinstance(packages, str) else packages
        missing = [package for package in packages if package not in installed]
        for package in missing:
            say(f"[setup] installing {package} into {VENV.name}")
            run_logged(python, "-m", "pip", "install", "-c", REQUIREMENTS, *shlex.split(package))
        marker.write_text("\n".join([*installed, *missing]))
    return python


def run_logged(*command):
    VENV.mkdir(exist_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    log = VENV / "setup.log"
    with open(log, "a") as file:
        file.write(done.stdout + done.stderr)
    what = f"{shlex.join(map(str, command))} failed, see {log}: {done.stderr.strip()[-300:]}"
    require(done.returncode == 0, CONFIG, what)


def environment():
    """Environment variables of the venv's processes."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    hosts = f"127.0.0.1,localhost,{os.environ.get('NO_PROXY', '')}"  # httpx would send these requests to a proxy
    return kept | {"NO_PROXY": hosts, "no_proxy": hosts, "PATH": f"{VENV / 'bin'}:{os.environ['PATH']}"}


# --- the worker -------------------------------------------------------------------------------------------------------


class Worker:
    """A process that answers questions, many at once and in any order."""

    def __init__(self, python):
        # -P: the worker's directory has modules of ours. It lives as long as this thread.
        command = ["setpriv", "--pdeathsig", "KILL", python, "-P", WORKER]
        more = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment()}
        self.process = subprocess.Popen(command, **more)
        self.numbers = itertools.count()
        self.waiting = {}  # number of a question: its future
        self.has_ended = False
        threading.Thread(target=self.read, daemon=True).start()

    def send(self, number, question):
        with suppress(OSError):  # read() learns that it has ended
            print(json.dumps({"id": number} | question), file=self.process.stdin, flush=True)

    def ask(self, **question):
        """Returns the concurrent future of the answer."""
        number = next(self.numbers)
        future = self.waiting[number] = concurrent.futures.Future()
        self.send(number, question)
        future.add_done_callback(lambda future: self.forget(number, future))
        if self.has_ended:
            self.give_up()
        return future

    def forget(self, number, future):
        if future.cancelled():  # e.g. by generation_timeout
            self.waiting.pop(number, None)
            self.send(number, {})

    def read(self):
        try:
            for line in self.process.stdout:
                answer = json.loads(line)
                future = self.waiting.pop(answer["id"], None)
                if future and future.set_running_or_notify_cancel():
                    future.set_result(answer)
        finally:  # also after half a line, if it was killed
            self.has_ended = True
            self.give_up()

    def give_up(self):
        answer = {"error": f"the worker has ended with exit code {self.process.wait()}, see the log"}
        while self.waiting:
            _, future = self.waiting.popitem()
            if future.set_running_or_notify_cancel():
                future.set_result(answer)


# --- the environment --------------------------------------------------------------------------------------------------


class WorkersRubric(Rubric):
    async def score(self, state):
        """Means over traces: of an agent, and of all agents that are trained. Raises TasksetFailed."""
        answer = state.get("answer_of_worker", {"error": "verifiers 0.4 scores its own rollouts only"})
        if "error" in answer:
            raise TasksetFailed(answer["error"])
        agents = {trace["agent"] for trace in answer["traces"]}
        values = {}  # name: of each trace
        rewards = {}  # agent: of each trace
        trained = []
        for trace in answer["traces"]:
            agent = trace["agent"]
            for name, value in (trace["metrics"] | trace["rewards"]).items():
                if value is None:
                    raise TasksetFailed(f"{name} gave nothing: it was not called, or its time was over")
                needs_agent = len(agents) > 1 or name in TAKEN
                values.setdefault(f"{agent}_{name}" if needs_agent else name, []).append(value)
            if trace["rewards"]:
                rewards.setdefault(agent, []).append(trace["reward"])
                if trace["trainable"]:
                    trained.append(trace["reward"])
        if not trained:
            raise TasksetFailed("no agent that is trained got a reward")
        if len(rewards) > 1:
            state["agent_rewards"] = {agent: mean(found) for agent, found in rewards.items()}
        return mean(trained), {name: mean(found) for name, found in values.items()}


class VerifiersV1Env(AgentEnv):
    """A taskset by its id, the name of its module. Raises RunError if it cannot be had.

    packages: what pip installs into the worker's venv, e.g. ["my-tasks==1.2"], a directory, or "-e DIR".
    harness: what asks the policy: "": the worker itself; "null", "bash", ...: verifiers' own, a process for each turn
    of the user. env_args: keys of verifiers' configuration of the environment, e.g. { id = "user-sim" }.
    num_rows: tasks to take; 0: all. num_eval: as many of them are held out, the last ones. eval_args: arguments by
    which the taskset loads its eval split, e.g. { dataset_split = "test" }.
    max_requests, restore: see AgentEnv. time_limit (s): of an agent. args: the taskset's own."""

    def __init__(
        self, taskset, packages=(), harness="", env_args=None, num_rows=0, num_eval=0, eval_args=None, max_requests=64,
        time_limit=0.0, restore=True, **args
    ):  # fmt: skip
        self.worker = Worker(make_venv(packages))
        configs = [{"taskset": args | {"id": taskset}}]
        if eval_args is not None:
            configs.append({"taskset": args | eval_args | {"id": taskset}})
        configs = [(env_args or {}) | config for config in configs]
        answer = self.worker.ask(configs=configs, harness=harness, num_rows=num_rows, time_limit=time_limit).result()
        require("error" not in answer, CONFIG, f"taskset {taskset!r}: {answer.get('error')}")
        rows, *others = answer["rows"]
        num_train = len(rows) if others else len(rows) - num_eval
        what = f"taskset {taskset!r}: num_eval = {num_eval} of {len(rows)} tasks leaves none to train on"
        require(num_train > 0 or not num_eval, CONFIG, what)
        held_out = others[0] if others else rows[num_train:]
        own = {"max_requests": max_requests, "restore": restore, "rubric": WorkersRubric()}
        super().__init__(self.play, rows[:num_train], held_out or None, **own)

    async def play(self, base_url, info, state):
        future = self.worker.ask(task=info["task"], base_url=base_url)
        state["answer_of_worker"] = answer = await asyncio.wrap_future(future)
        if "error" in answer:
            raise TasksetFailed(answer["error"])
        return answer
