"""Roles without the launcher: prints their commands, so that you can paste them into shells, and starts servers for a
tool."""

import os
import shlex
import subprocess
from contextlib import contextmanager

from rolemodel.launch import COMMON, FIRST, KILLED_WITH_PARENT, plan
from rolemodel.lookup import ROOT
from rolemodel.role import say


def print_commands(roles, run_dir):
    """Prints a block of commands for each role, to be pasted into a shell of its own. The export line is the same in
    every block. The parentheses make a subshell, so that the variables are gone when the role has ended: otherwise the
    next launch.sh in this terminal would use the servers of this run."""
    shared = {key: os.environ.get(key, value) for key, value in COMMON.items()}
    shared |= {key: x for key, x in roles[0].env.items() if all(role.env.get(key) == x for role in roles)}
    exported = ("ROLEMODEL_RUN_ID", "PYTHONUTF8", "HF_HUB_OFFLINE")  # set by the launcher and launch.sh
    shared |= {key: os.environ[key] for key in exported if key in os.environ}
    before = ""
    for role in roles:
        when = f", when {before} has ended" if before in FIRST else ""
        if any(isinstance(thing, int) for thing in role.after):
            when = ", when the servers answer"
        own = {key: value for key, value in role.env.items() if key not in shared}
        print(f"# {role.name}{when}\n(\ncd {shlex.quote(str(ROOT))}")
        print("export", shlex.join(f"{key}={value}" for key, value in shared.items()))
        if role.name == "orchestrator":  # the new servers have no version of this run yet
            print("rm -f", shlex.join(str(run_dir / name) for name in ("version", "done", "solved")))
        print("env", shlex.join([*(f"{key}={value}" for key, value in own.items()), *role.argv]), end="\n)\n\n")
        before = role.name


@contextmanager
def servers(cfg, args, run_dir):
    """Prepares or downloads the model of a configuration, then runs its servers until the `with` ends. Inside it,
    load_config knows their addresses. args and run_dir: see launch.plan."""
    roles = {role.name: role for role in plan(cfg, args, run_dir)}
    os.environ |= COMMON | os.environ | roles["trainer"].env
    running = []
    try:
        for name, role in roles.items():
            how = {"env": os.environ | role.env, "cwd": ROOT}
            if name in FIRST:
                subprocess.run(role.argv, check=True, **how)
            elif name.startswith("inference"):
                say(f"starting {name} (log: {run_dir}/logs/{name}.log)")
                with open(run_dir / "logs" / f"{name}.log", "ab") as log:
                    running.append(subprocess.Popen([*KILLED_WITH_PARENT, *role.argv], stdout=log, stderr=log, **how))
        yield
    finally:
        for process in running:
            process.terminate()
            process.wait()
