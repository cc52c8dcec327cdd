"""What a stranger does first: the README's commands and changes, a run in a terminal, more machines."""

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest
import torch
from conftest import ROOT, all_batches, free_port, launch, lines, start, stop, wait_for, write_run
from safetensors.torch import load_file

from configs import load_config
from tools.show import eval_statistics

FOLDERS = ("configs", "tools", "tests")
README = (ROOT / "README.md").read_text()
READMES = {name: (ROOT / name).read_text() for name in ("README.md", *(f"{d}/README.md" for d in FOLDERS))}


def blocks(kind, text=README):
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def commands(text=README):
    """Every line of a README's shell blocks, with its continuations, without its comment."""
    joined = "\n".join(blocks("bash", text)).replace("\\\n", " ")
    return [shlex.join(parts) for line in joined.splitlines() if (parts := shlex.split(line, comments=True))]


def copy_of_the_repository(to):
    """What git tracks, or would."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


# --- the README -------------------------------------------------------------------------------------------------------


def test_the_readmes_five_changes_apply_and_run(models, tmp_path):
    """Each by itself, as the README says; then a run with all of them, of which each left a trace."""
    diffs, root = [], copy_of_the_repository(tmp_path / "copy")
    for text in READMES.values():
        diffs += blocks("diff", text)
    added = [
        [row for row in diff.splitlines() if row.startswith("+") and row[1:].strip() and row[:3] != "+++"]
        for diff in diffs
    ]
    assert len(diffs) == 5 and all(len(rows) <= 5 for rows in added)
    for i, diff in enumerate(diffs):
        (tmp_path / f"{i}.diff").write_text(diff)
        checks = [f"git apply --check {tmp_path / f'{i}.diff'}"]
        checks += [f"patch -p1 --dry-run --fuzz=0 < {tmp_path / f'{i}.diff'}"] if shutil.which("patch") else []
        for check in checks:
            done = subprocess.run(check, shell=True, cwd=root, capture_output=True, text=True)
            assert done.returncode == 0, diff + done.stdout + done.stderr
    for i in range(5):  # -C0: they change each other's surroundings
        subprocess.run(["git", "apply", "-C0", str(tmp_path / f"{i}.diff")], cwd=root, check=True)
    shutil.rmtree(root / "tools")  # the loop runs without
    toml = root / "configs" / "reverse_text.toml"
    more = [f"model={models['untied']}", "prepare=", "max_steps=2", "orchestrator.batch_size=16", "eval.every=0"]
    more += ["orchestrator.rollouts_per_example=4", "trainer.advantage=best", f"output_dir={tmp_path}"]
    env = os.environ | {
        "SERVER": f"{sys.executable} tests/fake_vllm.py",
        "PYTHONPATH": "",
        "FAKE": json.dumps({"log": str(tmp_path / "asked")}),
    }
    env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "launch.sh", str(toml), *more], cwd=root, env=env,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "reverse_text"
    for line in lines(run / "metrics.jsonl"):
        assert line["policy/bonus"] == pytest.approx(0.01 * line["policy/entropy"], rel=1e-4)  # the loss
    config = tomllib.loads((run / "config.toml").read_text())
    assert config["trainer"]["advantage"] == "best"  # which the advantage's change has made known
    for rollout in lines(run / "rollouts.jsonl"):
        short = 1 - min(len(rollout["completion"][-1]["content"]) / 16, 1)
        assert rollout["metrics"]["short"] == pytest.approx(short)  # the reward
        assert rollout["num_turns"] == 2 and rollout["completion"][1] == rollout["prompt"][0]  # the environment
    asked = [json.loads(x) for x in (tmp_path / "asked").read_text().splitlines()]
    assert asked and all("seed" in body and body["presence_penalty"] == 0 for body in asked)


@pytest.mark.parametrize("name", READMES)
def test_the_readmes_commands_name_what_is_there(name):
    text = READMES[name]
    for command in commands(text):
        words = [w for w in shlex.split(command) if "=" not in w.split("/")[0] or w.startswith("--")]
        for word in words:
            if re.fullmatch(r"[\w/.-]+\.(py|sh|toml)", word) and word not in ("config.toml", "out.jsonl"):
                assert (ROOT / word).exists(), command
    known = (ROOT / "configs" / "defaults.toml").read_text()
    code = (ROOT / "trainer.py").read_text() + (ROOT / "orchestrator.py").read_text()
    for table, key in re.findall(r"(trainer|orchestrator|inference|eval|checkpoint)\.([a-z]\w*)", text):
        is_file = key in ("py", "log", "sampling", "args", "jsonl")
        assert is_file or f"\ndef {key}(" in code or re.search(rf"^{key} = ", known, re.MULTILINE), f"{table}.{key}"


@pytest.mark.parametrize("name", READMES)
def test_the_readmes_links_lead_somewhere(name):
    """A link whose text is code leads to the file that defines it."""
    for text, target in re.findall(r"\[([^]]*)\]\(([^)#]+)\)", READMES[name]):
        path = (ROOT / name).parent / target
        assert path.is_file(), f"{name}: {target}"
        if (found := re.fullmatch(r"`(?:\w+\.)?(\w+)`", text)) and path.suffix == ".py":
            assert re.search(rf"^ *(?:async )?(?:def|class) {found[1]}\b", path.read_text(), re.MULTILINE), text


def test_nothing_is_misspelled():
    """American English, in code as in prose: pyproject.toml has codespell's settings."""
    listed = ["git", "ls-files", "*.py", "*.md", "*.toml", "*.sh"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    files = [name for name in names if (ROOT / name).is_file()]
    done = subprocess.run([sys.executable, "-m", "codespell_lib", *files], cwd=ROOT, capture_output=True, text=True)
    assert files and done.returncode == 0, done.stdout + done.stderr


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 220 and len(README.split()) <= 2200


@pytest.mark.long
@pytest.mark.real
def test_the_readmes_transcript_runs_verbatim(tmp_path):
    """The first two commands but the tests', then "The first hour", in a fresh clone with an empty HOME."""
    root = copy_of_the_repository(tmp_path / "clone")
    (root / ".venv").symlink_to(Path(sys.executable).parent.parent)
    (tmp_path / "home").mkdir()
    hour = [c for c in commands() if c != "bash tests/run.sh"][: len(blocks("bash")[1].splitlines()) + 1]
    script = "\n".join(["set -e", *(f"echo '$' {shlex.quote(c)}\n{c}" for c in hour)])
    env = {"HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"], "TMPDIR": "/tmp"}
    done = subprocess.run(["bash", "-c", script], cwd=root, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    evals = lines(root / "outputs" / "reverse_text" / "eval.jsonl")
    found = eval_statistics(evals[-1]["rows"], evals[0]["rows"])
    assert found["gain"] > 0.2 and found["gain"] - found["gain_ci95"] > 0.1
    assert "all checks passed" in done.stdout and (root / "outputs" / "reverse_text" / "curves.png").exists()
    assert (root / "outputs" / "reverse_text-replay-grpo" / "metrics.jsonl").exists()
    assert re.search(r"\[(\+|-)+\]", done.stdout)  # rollouts, with a mark for each advantage
    (other,) = [c for c in commands(READMES["configs/README.md"]) if c.startswith("bash launch.sh configs/reverse")]
    done = subprocess.run(["bash", "-c", f"{other} max_steps=2"], cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and len(lines(root / "outputs" / "faster" / "metrics.jsonl")) == 2, done.stderr


def test_every_value_of_a_recipe_says_what_it_is():
    for recipe in sorted((ROOT / "configs").glob("qwen3_*gpu.toml")):
        cfg = load_config(recipe)
        assert cfg.run.model.startswith("Qwen/Qwen3-") and cfg.trainer.gpus + cfg.inference.gpus <= max(
            int(recipe.stem[-4]), 2
        )
        for row in recipe.read_text().splitlines():
            assert (
                not re.match(r"\w+ = ", row) or len(row.partition("  # ")[2]) > 3 or "} # " in row or '" # ' in row
            ), row
    assert len(list((ROOT / "configs").glob("qwen3_*gpu.toml"))) == 3


# --- a whole run in a terminal ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def small_run(models, tmp_path_factory):
    """A run of 4 steps on the fake server in a terminal: its directory, what the terminal showed."""
    path = tmp_path_factory.mktemp("small")
    toml = write_run(path, models["untied"], 4, '{ kind = "turns", num_turns = 2 }')
    env = os.environ | {
        "SERVER": f"{sys.executable} {ROOT / 'tests' / 'fake_vllm.py'}",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    mine, theirs = pty.openpty()
    more = ["show_every=2", "eval.every=2", "tracker=tensorboard"]
    process = subprocess.Popen(
        ["bash", "launch.sh", str(toml), *more], cwd=ROOT, env=env, stdout=theirs, stderr=theirs, stdin=theirs
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(mine, 65536)
        except OSError:  # the other end is closed
            break
    os.close(mine)
    assert process.wait(60) == 0, shown.decode()
    return path / "run", shown.decode()


def test_the_console(small_run):
    """A step has one number everywhere."""
    run, shown = small_run
    shown = shown.replace("\r", "\n").replace("\x1b[K", "")
    assert (
        re.findall(r"^rollout of step (\d+): ", shown, re.MULTILINE) == ["0", "2"] and "rollout | assistant:" in shown
    )
    assert re.findall(r"^step +(\d+) \| reward", shown, re.MULTILINE) == ["0", "1", "2", "3"]
    assert max(len(row) for row in shown.splitlines() if row.startswith("step ")) <= 100
    assert shown.index("run: ") < shown.index("check: ") and f"files in {run}" in shown
    assert re.search(r"^result: think_env: reward [\d.]+, gain [+-][\d.]+ \+- [\d.]+ in 4 steps$", shown, re.MULTILINE)
    assert (
        f"result: vllm serve {run}/final --generation-config vllm" in shown
        and f"evaluate.py {run}/config.toml --eval" in shown
    )
    assert "check: " in shown and "eval " in shown and "gain" in shown
    assert shown.index("time: the trainer trained") < shown.index("[launch] done in")
    assert "warning:" not in shown


def test_what_watches_the_run_leaves(small_run):
    run, _ = small_run
    assert (run / "curves.png").exists() and list((run / "tensorboard").iterdir())
    assert json.loads((run / "tracker.json").read_text())["metrics"] == 4
    added = lines(run / "watch.jsonl")
    assert [line["step"] for line in added] == [0, 1, 2, 3]
    assert all(any(key.startswith("policy/kl_age") for key in line) for line in added)


def test_the_trainers_own_logp_is_kept(small_run):
    for step, batch in enumerate(all_batches(small_run[0])):
        logp = load_file(small_run[0] / "batches" / f"logp_{step:06d}.safetensors")["logp"]
        mask, old_logp = batch.columns["mask"], batch.columns["old_logp"]
        fresh = torch.tensor([s["age"] == 0 for s in batch.samples]).repeat_interleave(batch.lens)
        torch.testing.assert_close(logp[mask & fresh], old_logp[mask & fresh], atol=1e-5, rtol=0)  # the same weights
        assert (logp[~mask] == 0).all() and (step > 0 or fresh.all())


def test_a_local_model_leaves_the_rows_online(small_run):
    for role, is_offline in {"inference": True, "trainer": True, "orchestrator": False}.items():
        begun = (small_run[0] / "logs" / f"{role}.log").read_text().splitlines()[0]
        assert begun.startswith("=== ") and ("HF_HUB_OFFLINE=1" in begun) == is_offline


def test_the_readme_quotes_what_is_printed():
    """The beginnings of its table."""
    source = " ".join(
        (ROOT / name).read_text() for name in ("tools/check.py", "tools/watch.py", "trainer.py", "launch.py")
    )
    table = re.findall(r"^\| `(?:check: FAIL|warning:|(?=no finite))(.*?)`", READMES["tools/README.md"], re.MULTILINE)
    assert len(table) == 7
    for quoted in table:
        for part in re.split(r"\.\.\.|;", quoted.replace("\\|", "|")):
            assert part.strip() in source, part


# --- more machines ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
def test_two_nodes_and_two_servers(models, tmp_path):
    """Two torchrun agents, as on two machines, of which launch.sh starts one; two servers that it did not start."""
    toml, urls, servers = write_run(tmp_path, models["untied"], 3, '{ kind = "noise" }'), [], []
    try:
        for i in range(2):
            port, log = free_port(), tmp_path / f"server{i}"
            command = [sys.executable, "tests/fake_vllm.py", "--model", str(models["untied"]), "--port", str(port)]
            servers.append(
                start([*command, "--served-model-name", "big", "--dtype", "float32", "--max-model-len", "64"], log)
            )
            urls.append(f"http://127.0.0.1:{port}")
            wait_for(urls[-1], servers[-1], log)
        port = str(free_port())
        more = ["trainer.replicas=2", f"inference.urls={json.dumps(urls)}", "trainer.micro_batch_size=2"]
        agent = [sys.executable, *"-m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 1".split()]
        agent += ["--master-addr", "127.0.0.1", "--master-port", port, "trainer.py", str(toml), *more]
        second = start(agent, tmp_path / "second", ROLEMODEL_RUN_ID="big", OMP_NUM_THREADS="1")
        nodes = {"ROLEMODEL_RUN_ID": "big", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = launch(toml, *more, **nodes)
        assert second.wait(60) == 0, (tmp_path / "second").read_text()
        assert "done in" in done.stdout and lines(tmp_path / "run" / "metrics.jsonl")[-1]["version"] == 3
        asked = [httpx.get(f"{url}/health").json() for url in urls]
        assert all(x["requests"] > 5 and x["syncs"] == 4 for x in asked)  # versions 0 to 3
    finally:
        for server in servers:
            stop(server)


@pytest.fixture
def four_gpus(models, tmp_path):
    """-> a configuration, variables for launch(): a stand-in for nvidia-smi."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/sh\nfor i in 0 1 2 3; do echo GPU $i: some; done\n")
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    more = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "KIND": "cpu", "CUDA_VISIBLE_DEVICES": "7,5,3,1"}
    return write_run(tmp_path, models["untied"], 1, '{ kind = "noise" }'), more


def test_too_few_devices_are_refused(four_gpus):
    toml, more = four_gpus
    done = launch(toml, "inference.gpus=5", check=False, **more)
    assert done.returncode == 2 and "inference.gpus = 5 and trainer.gpus = 1, but there are 4 GPUs" in done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_devices_are_shared_out(four_gpus, tmp_path):
    """The first for servers, the next for ranks; where there are too few for both, the same, and the trainer takes
    memory only once the servers answer."""
    toml, more = four_gpus
    server = f'env >{tmp_path}/env-$BASHPID\nexec {sys.executable} {ROOT}/tests/fake_vllm.py "$@"\n'
    (tmp_path / "server.sh").write_text(server)
    for gpus, ranks, expected in ((2, 1, ["7", "5", "3"]), (4, 1, ["7", "5", "7"])):
        name = f"{gpus}-{ranks}"
        sizes = [f"inference.gpus={gpus}", f"trainer.gpus={ranks}", f"run_name={name}", "inference.startup_timeout=999"]
        done = launch(toml, *sizes, SERVER=f"bash {tmp_path}/server.sh", **more)
        logs = [(tmp_path / name / "logs" / f"{x}.log").read_text() for x in ("inference", "inference1", "trainer")]
        assert [re.findall(r"CUDA_VISIBLE_DEVICES=(\S*)", text)[-1] for text in logs] == expected
        assert ("[launch] vLLM and the trainer share 4 GPU(s)" in done.stdout) == (gpus == 4)
        assert ("/dev/tcp/127.0.0.1/" in logs[2].splitlines()[0]) == (gpus == 4)
    assert all("VLLM_ENGINE_READY_TIMEOUT_S=999\n" in path.read_text() for path in tmp_path.glob("env-*"))


@pytest.mark.long
@pytest.mark.real
def test_two_nodes_and_two_real_servers(tmp_path):
    """Both servers are on the first node, and unknown to the second, as under Slurm."""
    port, http, seen = str(free_port()), free_port(), tmp_path / "run"
    more = ["max_steps=4", "run_name=run", f"output_dir={tmp_path}", "eval.every=2", "env.args.num_eval=32"]
    more += ["orchestrator.batch_size=64", "trainer.replicas=2", "inference.gpus=2", f"inference.port={http}"]
    agent = f"{sys.executable} -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 1"
    agent += f" --master-addr 127.0.0.1 --master-port {port} trainer.py configs/reverse_text.toml"
    second = start([*agent.split(), *more], tmp_path / "second", ROLEMODEL_RUN_ID="two", OMP_NUM_THREADS="1")
    nodes = {"ROLEMODEL_RUN_ID": "two", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SERVER": ""}
    try:
        done = launch("configs/reverse_text.toml", *more, timeout=300, TMPDIR="/tmp", **nodes)
        assert second.wait(60) == 0, (tmp_path / "second").read_text()
    finally:
        second.kill()
    assert "done in" in done.stdout
    assert lines(seen / "metrics.jsonl")[-1]["version"] == 4 and len(lines(seen / "eval.jsonl")) == 3
    assert all(line["sync/dlogp_max"] < 1e-3 for line in lines(seen / "metrics.jsonl"))  # over both servers
