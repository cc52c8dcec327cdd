"""What a stranger does first: the README's commands and patches, a run in a terminal, more machines."""

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from conftest import ROOT, all_batches, free_port, launch, lines, start, stop, wait_for, write_run
from safetensors.torch import load_file

from configs import load_config
from tools.show import eval_statistics

FOLDERS = ("configs", "configs/models", "tools", "tests")
README = (ROOT / "README.md").read_text()
READMES = {name: (ROOT / name).read_text() for name in ("README.md", *(f"{d}/README.md" for d in FOLDERS))}


def blocks(kind, text=README):
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)


def commands(text=README):
    """Every line of a README's shell blocks, with its continuations, without its comment."""
    joined = "\n".join(blocks("bash", text)).replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in joined.splitlines()]
    return [shlex.join(words) for words in lines if words]


def copy_of_the_repository(to):
    """What git tracks, or would."""
    names = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in names.stdout.splitlines():
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


# --- the README -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_readmes_patches_run(models, tmp_path):
    """A run with both of them, without tools/; each leaves a trace. test_changes.py has those of configs/README.md."""
    root = copy_of_the_repository(tmp_path / "copy")
    shutil.rmtree(root / "tools")
    patches = blocks("diff")
    assert len(patches) == 2
    for patch in patches:
        (tmp_path / "patch").write_text(patch)
        subprocess.run(["git", "apply", str(tmp_path / "patch")], cwd=root, check=True)
    more = [f"model={models['untied']}", "prepare=", "max_steps=2", "orchestrator.batch_size=16", "eval.every=0"]
    more += ["orchestrator.rollouts_per_example=4", f"output_dir={tmp_path}"]
    env = os.environ | {"SERVER": f"{sys.executable} tests/fake_vllm.py", "PYTHONPATH": ""}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = ["bash", "launch.sh", "configs/reverse_text.toml", *more]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "reverse_text"
    for line in lines(run / "metrics.jsonl"):
        assert line["policy/bonus"] == pytest.approx(0.01 * line["policy/entropy"], rel=1e-4)  # the loss
    for rollout in lines(run / "rollouts.jsonl"):
        short = 1 - min(len(rollout["completion"][-1]["content"]) / 16, 1)
        assert rollout["metrics"]["short"] == pytest.approx(short)  # the reward


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
        name_in_code = re.fullmatch(r"`(?:\w+\.)*(\w+)`", text)
        if name_in_code and path.suffix == ".py":
            definition = rf"^ *(?:async )?(?:def|class) {name_in_code[1]}\b"
            assert re.search(definition, path.read_text(), re.MULTILINE), text


def test_nothing_is_misspelled():
    """American English, in code as in prose: pyproject.toml has codespell's settings."""
    listed = ["git", "ls-files", "*.py", "*.md", "*.toml", "*.sh"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    files = [name for name in names if (ROOT / name).is_file()]
    done = subprocess.run([sys.executable, "-m", "codespell_lib", *files], cwd=ROOT, capture_output=True, text=True)
    assert files and done.returncode == 0, done.stdout + done.stderr


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 270 and len(README.split()) <= 2300


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
    recipes = sorted((ROOT / "configs").glob("qwen3_*gpu.toml"))
    assert len(recipes) == 3
    for recipe in recipes:
        cfg = load_config(recipe)
        num_gpus = int(recipe.stem[-4])
        assert cfg.run.model.startswith("Qwen/Qwen3-") and cfg.trainer.gpus + cfg.inference.gpus <= max(num_gpus, 2)
        before = ""
        for row in recipe.read_text().splitlines():
            is_explained = len(row.partition("  # ")[2]) > 3 or before.startswith("# ")
            assert is_explained or not re.match(r"\w+ = ", row), row
            before = row


# --- a whole run in a terminal ----------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def small_run(models, tmp_path_factory):
    """A run of 4 steps on the fake server in a terminal: its directory, what the terminal showed."""
    path = tmp_path_factory.mktemp("small")
    toml = write_run(path, models["untied"], 4, '{ kind = "turns", num_turns = 2 }')
    env = os.environ | {"SERVER": f"{sys.executable} {ROOT / 'tests' / 'fake_vllm.py'}"}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    mine, theirs = pty.openpty()
    command = ["bash", "launch.sh", str(toml), "show_every=2", "eval.every=2", "tracker=tensorboard"]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=theirs, stderr=theirs, stdin=theirs)
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

    def found(pattern):
        return re.findall(f"^{pattern}", shown, re.MULTILINE)

    assert found(r"rollout of step (\d+): ") == ["0", "2"] and found(r"rollout \| assistant:")
    assert found(r"step +(\d+) \| reward") == ["0", "1", "2", "3"]
    assert max(len(row) for row in shown.splitlines() if row.startswith("step ")) <= 100
    assert shown.index("run: ") < shown.index("check: ") and f"files in {run}" in shown
    assert found(r"result: think_env: reward [\d.]+, gain [+-][\d.]+ \+- [\d.]+ in 4 steps$")
    assert found(rf"result: \S*python\S* -m configs.serving.server --model {run}/final --host 127.0.0.1 ")
    assert found(rf"result: \S*python\S* tools/evaluate.py {run}/config.toml --eval ")
    assert found("check: ") and found("eval .* gain") and not found("warning:")
    assert shown.index("time: the trainer trained") < shown.index("[launch] done in")


def test_what_watches_the_run_leaves(small_run):
    run, _ = small_run
    assert (run / "curves.png").exists() and list((run / "tensorboard").iterdir())
    assert json.loads((run / "tracker.json").read_text())["metrics"] == 4
    added = lines(run / "watch.jsonl")
    assert [line["step"] for line in added] == [0, 1, 2, 3]
    assert all(any(key.startswith("policy/kl_staleness") for key in line) for line in added)


def test_the_trainers_own_logp_is_kept(small_run):
    for step, batch in enumerate(all_batches(small_run[0])):
        logp_T = load_file(small_run[0] / "batches" / f"logp_{step:06d}.safetensors")["logp"]
        for s in batch.sequences:
            logp = logp_T[s["at"]]
            assert (logp[~s["mask"]] == 0).all() and (step > 0 or s["staleness"] == 0)
            if s["staleness"] == 0:  # the same weights
                torch.testing.assert_close(logp[s["mask"]], s["old_logp"][s["mask"]], atol=1e-5, rtol=0)


def test_the_readme_quotes_what_is_printed():
    """The beginnings of its table."""
    files = ("tools/advice.py", "tools/check.py", "trainer.py", "orchestrator.py", "launch.py")
    source = " ".join((ROOT / name).read_text() for name in files)
    table = re.findall(r"^\| `(?:check: FAIL|warning:|(?=no finite))(.*?)`", READMES["tools/README.md"], re.MULTILINE)
    assert len(table) == 10
    for quoted in table:
        for part in re.split(r"\.\.\.|;", quoted.replace("\\|", "|")):
            assert part.strip() in source, part


# --- more machines ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.slow
def test_two_nodes_and_two_servers(models, tmp_path):
    """Two torchrun agents, as on two machines; launch.sh starts one of them, and neither of the two servers,
    which only rank 0 knows."""
    toml = write_run(tmp_path, models["untied"], 3, '{ kind = "noise" }')
    urls = []
    servers = []
    try:
        for i in range(2):
            port = free_port()
            log = tmp_path / f"server{i}"
            command = [sys.executable, "tests/fake_vllm.py", "--model", str(models["untied"]), "--port", str(port)]
            command += ["--served-model-name", "big", "--dtype", "float32", "--max-model-len", "64"]
            servers.append(start(command, log))
            urls.append(f"http://127.0.0.1:{port}")
            wait_for(urls[-1], servers[-1], log)
        port = str(free_port())
        more = ["trainer.replicas=2", "trainer.micro_batch_size=2"]
        agent = [sys.executable, *"-m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 1".split()]
        agent += ["--master-addr", "127.0.0.1", "--master-port", port, "trainer.py", str(toml), *more]
        second = start(agent, tmp_path / "second", ROLEMODEL_RUN_ID="big", OMP_NUM_THREADS="1")
        nodes = {"ROLEMODEL_RUN_ID": "big", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = launch(toml, *more, f"inference.urls={json.dumps(urls)}", **nodes)
        assert second.wait(60) == 0, (tmp_path / "second").read_text()
        assert "done in" in done.stdout and lines(tmp_path / "run" / "metrics.jsonl")[-1]["version"] == 3
        asked = [httpx.get(f"{url}/health").json() for url in urls]
        assert all(x["requests"] > 5 and x["syncs"] == 4 for x in asked)  # versions 0 to 3
    finally:
        for server in servers:
            stop(server)


@pytest.mark.long
@pytest.mark.real
def test_two_nodes_and_two_real_servers(tmp_path):
    """Both servers are on the first node, and unknown to the second, as under Slurm."""
    port = str(free_port())
    http = free_port()
    run = tmp_path / "run"
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
    assert lines(run / "metrics.jsonl")[-1]["version"] == 4 and len(lines(run / "eval.jsonl")) == 3
    assert all(line["sync/dlogp_max"] < 1e-3 for line in lines(run / "metrics.jsonl"))  # over both servers
