"""Changed copies of the roles, the commands that --print shows, and tools/loop.py: by files and command lines alone."""

import asyncio
import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import FAKE_SERVER, ROOT, all_batches, final, launch, lines, write_run

import trainer
from rolemodel.config import load_config
from rolemodel.run_directory import run_directory
from tools import loop

pytestmark = pytest.mark.slow
LOG = 'return loss_N, {"policy/clip_frac": r_N > ratio_cap'
RECEIVE = "def receive_weights(self, spec):"
COPIES = {  # {copy: (original, [(what stands there, what is to stand there)])}
    "my_trainer.py": ("trainer.py", [
        (LOG, LOG + ', "policy/mine": 0 * r_N + 1'),
        (RECEIVE, f"{RECEIVE}\n        print('my receiver', flush=True)"),
    ]),
    "my_orchestrator.py": ("orchestrator.py", [
        ('info["metrics"] = evaluation.', 'info["metrics"] = {"mine/batch": step} | evaluation.'),
    ]),
    "my_env.py": ("env.py", [("return reward, metrics", 'return reward, metrics | {"mine": 1.0}')]),
}  # fmt: skip
TASK = """
import random
from my_env import Rubric, SingleTurnEnv

def noise():
    return random.random()

def load_environment():
    rows = [{"question": f"hello {i}"} for i in range(37)]
    return SingleTurnEnv(rows, rows[:3], rubric=Rubric([noise]))
"""
LOSS = """
from trainer import cispo

def loss(micro, logp_N, entropy_N):
    loss_N, logs = cispo(micro, logp_N, entropy_N)
    return loss_N, logs | {"policy/twice": 2 * logs["policy/mine"]}
"""
KEYS = ["trainer.script=my_trainer.py", "orchestrator.script=my_orchestrator.py", "trainer.loss=my_loss:loss"]


def write_copies(folder):
    for name, (original, changes) in COPIES.items():
        text = (ROOT / original).read_text()
        for old, new in changes:
            assert text.count(old) == 1, old
            text = text.replace(old, new)
        (folder / name).write_text(text)
    (folder / "my_task.py").write_text(TASK)
    (folder / "my_loss.py").write_text(LOSS)


def paste(toml, *overrides):
    """Gives each block of --print to a shell of its own, which has nothing of the launcher's, and afterwards has no
    variable of the run's. Returns {role: (what it said, exit code)} of those that end by themselves."""
    bare = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    command = ["bash", "launch.sh", "--print", str(toml), *overrides]
    printed = subprocess.run(command, cwd=ROOT, env=bare | {"SERVER": FAKE_SERVER}, capture_output=True, text=True)
    assert printed.returncode == 0, printed.stderr
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    shells = {}
    for block in printed.stdout.strip().split("\n\n"):
        role = re.match(r"# (\w+)", block)[1]
        shells[role] = subprocess.Popen(["bash"], cwd="/", env=bare, start_new_session=True, **pipes)
        shells[role].stdin.write(f"{block}\ncode=$?; env | grep ^ROLEMODEL && exit 99; exit $code\n")
        shells[role].stdin.close()
        shells[role].stdin = None
    server = shells.pop("inference")
    try:
        return {role: (shell.communicate(timeout=120)[0], shell.returncode) for role, shell in shells.items()}
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.communicate()


def test_copies_by_hand_by_launch_and_in_a_replay(models, tmp_path):
    """Three steps by pasted commands. Then the copy changes, and the same run goes on under launch.sh."""
    write_copies(tmp_path)
    toml = write_run(tmp_path, models["untied"], 3, '[env]\nid = "my_task"')
    ended = paste(toml, *KEYS)
    assert {role: code for role, (_, code) in ended.items()} == {"orchestrator": 0, "trainer": 0}, ended
    run_dir = tmp_path / "run"
    metrics = lines(run_dir / "metrics.jsonl")
    mine = ("policy/mine", "policy/twice", "mine/batch", "reward/mine")
    assert [[line[key] for key in mine] for line in metrics] == [[1.0, 2.0, step, 1.0] for step in range(3)]
    config = (run_dir / "config.toml").read_text()
    assert 'trainer.script = "my_trainer.py"' in config and 'orchestrator.script = "my_orchestrator.py"' in config
    assert final(run_dir)
    copy = tmp_path / "my_trainer.py"
    copy.write_text(copy.read_text().replace('"policy/mine": 0 * r_N + 1', '"policy/mine": 0 * r_N + 5'))
    said = launch(toml, *KEYS, "max_steps=4").stdout
    assert f"warning: {copy} has changed since this run last started" in said and "orchestrator.py has" not in said
    assert lines(run_dir / "metrics.jsonl")[-1]["policy/twice"] == 10.0
    assert (run_dir / "logs" / "inference.log").read_text().count("my receiver") == 2  # versions 3 and 4
    command = [sys.executable, "tools/replay.py", str(toml), str(run_dir / "batches"), *KEYS, "max_steps=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rollouts = run_dir / "rollouts.jsonl"  # reading them needs the copy of orchestrator.py
    command = [sys.executable, "tools/evaluate.py", str(toml), "--offline", str(rollouts), *KEYS, "run_name=again"]
    assert "batches; left out" in subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    (line,) = lines(tmp_path / "run-replay-my_loss.loss" / "metrics.jsonl")
    assert line["policy/mine"] == 5.0 and line["loss"] == pytest.approx(metrics[0]["loss"])


@pytest.mark.parametrize("script", ["trainer.py", "orchestrator.py"])
def test_a_role_that_is_started_alone_says_what_it_lacks(script, models, tmp_path):
    toml = write_run(tmp_path, models["untied"], 3, "{}")
    done = subprocess.run([sys.executable, script, str(toml)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "inference.urls is empty, and this role needs a server" in done.stderr


def test_the_loop_sets_variables_before_torch_reads_them():
    """OMP_NUM_THREADS, for example, which a container's quota decides (torchtitan #4031, optimum-benchmark #27)."""
    command = [sys.executable, "-c", "import sys; import tools.loop; sys.exit('torch' in sys.modules)"]
    subprocess.run(command, cwd=ROOT, check=True)


def test_the_loop_computes_what_a_run_computes(models, tmp_path):
    """All batches of a strictly on-policy run, and its weights. The loop tries a slot's groups in a row, the run side
    by side: the first by its number counts, and what was cancelled is nowhere."""
    toml = write_run(tmp_path, models["untied"], 2, "{ num_turns = 1 }")
    how = ["orchestrator.max_staleness=0", "orchestrator.rollouts_per_example=2", "orchestrator.batch_size=8"]
    launch(toml, *how)
    env = os.environ | {"SERVER": FAKE_SERVER, "PYTHONHASHSEED": "0"}
    command = [sys.executable, "tools/loop.py", str(toml), *how, "run_name=loop"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for one, other in zip(all_batches(tmp_path / "loop"), all_batches(tmp_path / "run"), strict=True):
        assert str(one.sequences) == str(other.sequences) and len(one.sequences) == 8
    tried, expected = (sorted(map(str, lines(tmp_path / name / "rollouts.jsonl"))) for name in ("loop", "run"))
    assert tried == expected and "'dropped': 'flat'" in "".join(tried)
    found, expected = final(tmp_path / "loop"), final(tmp_path / "run")
    assert max((found[name] - w).abs().max() for name, w in expected.items()) < 1e-6


def test_the_loop_writes_the_model_of_a_task_that_is_solved(models, tmp_path, fake_servers, monkeypatch):
    """Here in its second step. Runs that ended early left no model (NeMo-RL #3429)."""
    metrics = tmp_path / "run" / "metrics.jsonl"

    def see(self, name, group):
        if metrics.exists():
            raise loop.Solved

    monkeypatch.setattr(loop.Limits, "see", see)
    monkeypatch.setattr(trainer, "start_distributed", lambda cfg: None)  # the tests have done it
    monkeypatch.setenv("ROLEMODEL_RUN_ID", "run")
    toml = write_run(tmp_path, models["untied"], 3, '{ kind = "noise" }')
    cfg = load_config(toml, [f'inference.urls=["{fake_servers()}"]', "orchestrator.max_staleness=0"])
    asyncio.run(loop.train(cfg, run_directory(cfg)))
    assert len(lines(metrics)) == 1 and final(tmp_path / "run")
