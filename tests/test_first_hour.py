"""What a stranger does first: the README's commands and changes, the pre-flight, the console, pictures, trackers."""

import asyncio
import contextlib
import io
import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
import transformers
from conftest import ROOT, all_batches, free_port, launch, lines, make_samples, some, start, stop, wait_for, write_run

import tools.show
import trainer
from configs.lib import evaluate, metrics, preflight, track
from configs.lib.batch import load_batch, save_batch
from configs.lib.runtime import load_config

README = (ROOT / "README.md").read_text()
CPU = torch.device("cpu")


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)


def commands():
    """Every line of the README's shell blocks, with its continuations, without its comment."""
    joined = "\n".join(blocks("bash")).replace("\\\n", " ")
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


def apply(diff, root):
    """Each hunk's old lines are in the file once, and become its new ones."""
    for part in re.split(r"^--- a/", diff, flags=re.MULTILINE)[1:]:
        path, text = root / part.split("\n")[0], None
        text = path.read_text()
        for hunk in re.split(r"^@@.*@@\n", part, flags=re.MULTILINE)[1:]:
            rows = hunk.rstrip("\n").split("\n")
            old, new = ("\n".join(r[1:] for r in rows if r[:1] in (" ", sign)) for sign in "-+")
            assert text.count(f"{old}\n") == 1, f"{path.name}: {old}"
            text = text.replace(f"{old}\n", f"{new}\n")
        path.write_text(text)


def test_the_readmes_five_changes_apply_and_run(models, tmp_path):
    """Each by itself with patch, as the README says; then a run with all of them, of which each left a trace."""
    diffs, root = blocks("diff"), copy_of_the_repository(tmp_path / "copy")
    added = [
        [row for row in diff.splitlines() if row.startswith("+") and row[1:].strip() and row[:3] != "+++"]
        for diff in diffs
    ]
    assert len(diffs) == 5 and all(len(rows) <= 5 for rows in added)
    for i, diff in enumerate(diffs if shutil.which("patch") else ()):
        (tmp_path / f"{i}.diff").write_text(diff)
        check = f"patch -p1 --dry-run --fuzz=0 < {tmp_path / f'{i}.diff'}"
        done = subprocess.run(check, shell=True, cwd=root, capture_output=True, text=True)
        assert done.returncode == 0, diff + done.stdout
    for diff in diffs:
        apply(diff, root)
    shutil.rmtree(root / "tools")  # the loop runs without
    toml = root / "configs" / "reverse_text.toml"
    more = [f"model={models['untied']}", "prepare=", "max_steps=2", "orchestrator.batch_size=16", "eval.every=0"]
    more += [
        "orchestrator.rollouts_per_example=4",
        "trainer.advantage=best",
        f"output_dir={tmp_path}",
        "preflight=false",
    ]
    port = free_port()
    env = os.environ | {
        "SERVER": f"{sys.executable} tests/fake_vllm.py",
        "PYTHONPATH": "",
        "FAKE": json.dumps({"log": str(tmp_path / "asked")}),
    }
    env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "launch.sh", str(toml), *more, f"inference.port={port}"], cwd=root, env=env,
                          capture_output=True, text=True, timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "reverse_text"
    for line in lines(run / "metrics.jsonl"):
        assert line["policy/bonus"] == pytest.approx(0.01 * line["policy/entropy"], rel=1e-4)  # the loss
    for batch in all_batches(run):  # the advantage
        for group in {s["group"] for s in batch.samples}:
            of = [s for s in batch.samples if s["group"] == group]
            best = max(s["reward"] for s in of)
            share = sum(s["reward"] == best for s in of) / len(of)
            assert [s["advantage"] for s in of] == pytest.approx([(s["reward"] == best) - share for s in of])
    for rollout in lines(run / "rollouts.jsonl"):
        short = 1 - min(len(rollout["completion"][-1]["content"]) / 16, 1)
        assert rollout["metrics"]["short"] == pytest.approx(short)  # the reward
        assert rollout["num_turns"] == 2 and rollout["completion"][1] == rollout["prompt"][0]  # the environment
    asked = [json.loads(x) for x in (tmp_path / "asked").read_text().splitlines()]
    assert asked and all("seed" in body and body["presence_penalty"] == 0 for body in asked)


def test_the_readmes_commands_name_what_is_there():
    for command in commands():
        words = [w for w in shlex.split(command) if "=" not in w.split("/")[0] or w.startswith("--")]
        for word in words:
            if re.fullmatch(r"[\w/.-]+\.(py|sh|toml)", word) and word not in ("config.toml", "out.jsonl"):
                assert (ROOT / word).exists(), command
    for override in re.findall(r"(?:trainer|orchestrator|inference|eval|checkpoint)\.\w+", README):
        table, key = override.split(".")
        known = (ROOT / "configs" / "defaults.toml").read_text()
        assert re.search(rf"^{key} = ", known, re.MULTILINE) or key in ("py", "log", "sampling", "args", "jsonl"), (
            override
        )


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
    assert evals[-1]["gain"] > 0.2 and evals[-1]["gain"] - evals[-1]["gain_ci95"] > 0.1
    assert "all checks passed" in done.stdout and (root / "outputs" / "reverse_text" / "curves.png").exists()
    assert (root / "outputs" / "reverse_text-replay-grpo" / "metrics.jsonl").exists()
    assert re.search(r"\[(\+|-)+\]", done.stdout)  # rollouts, coloured


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


# --- the pre-flight ---------------------------------------------------------------------------------------------------


def check_run(models, tmp_path, env, *overrides, **variables):
    toml = write_run(tmp_path, models["untied"], 5, env)
    return launch(toml, "--check", *overrides, check=False, **variables)


def test_check_alone_passes_and_leaves_the_run_untouched(models, tmp_path):
    done = check_run(models, tmp_path, '{ kind = "turns", num_turns = 2 }', FAKE='{"stop": true}')
    assert done.returncode == 0 and "all checks passed" in done.stdout, done.stdout + done.stderr
    passed = [x for x in done.stdout.splitlines() if x.startswith("check: ")]
    assert len(passed) >= 7 and all(x.startswith("check: PASS") for x in passed)
    assert "fits in memory" in passed[0] and not (tmp_path / "run").exists()
    assert not list((tmp_path / "run-check" / "batches").iterdir())


@pytest.mark.parametrize("case", some([
    ("zero", "some of it is solved; too hard: take easier rows"),
    ("constant", "less than 80 % is solved; too easy: take harder rows"),
], 1))  # fmt: skip
def test_check_says_what_is_wrong_with_a_task(case, models, tmp_path):
    kind, told = case
    done = check_run(models, tmp_path, f'{{ kind = "{kind}" }}')
    failed = [x for x in done.stdout.splitlines() if x.startswith("check: FAIL")]
    assert done.returncode == 4 and any(told in x for x in failed), done.stdout + done.stderr
    assert any("rewards differ within 0 of 8 groups; raise orchestrator.rollouts_per_example" in x for x in failed)


def test_check_says_that_a_broadcast_does_not_arrive(models, tmp_path):
    """A server that takes weights and goes on with its own would pass at version 0, which it loaded by itself."""
    done = check_run(models, tmp_path, '{ kind = "turns" }', FAKE=json.dumps({"discard": True}))
    assert done.returncode == 3 and "check: FAIL a broadcast moves the servers as predicted" in done.stdout, done.stdout
    assert "trainer and server differ" in done.stderr and "requirements-*.txt" in done.stderr


def rollout(reward, truncated=False):
    return SimpleNamespace(reward=reward, truncated=truncated, error="" if reward is not None else "KeyError")


@pytest.mark.parametrize("groups, failing", [
    ([[0.0, 1.0], [1.0, 0.0]], []),
    ([[0.0] * 4] * 3, ["too hard", "rewards differ"]),
    ([[1.0, 0.9]] * 3, ["too easy"]),
    ([[-2.0, -3.0], [-2.5, -2.0]], []),
    ([[7.0, 7.0], [7.0, 7.0], [7.0, 7.0, 7.0, 3.0]], ["too easy"]),
    ([[-1.0, -1.0]] * 3, ["too hard", "rewards differ"]),
    ([[0.5] * 4] * 3, ["raise orchestrator.rollouts_per_example"]),
    ([[None, None]], ["none of 2 rollouts was scored: ['KeyError']"]),
])  # fmt: skip
def test_the_baseline_names_the_key_to_change(groups, failing, capsys):
    ok = preflight.check_baseline("task", [[rollout(x) for x in group] for group in groups])
    failed = [x for x in capsys.readouterr().out.splitlines() if "FAIL" in x]
    assert ok == (not failing) and len(failed) == len(failing)
    assert all(any(text in x for x in failed) for text in failing)


def test_the_baseline_sees_what_is_cut_off(capsys):
    group = [rollout(0.0, True), rollout(1.0, True), rollout(1.0, True), rollout(0.0)]
    assert not preflight.check_baseline("task", [group])
    assert (
        "FAIL task: 75% of the rollouts are cut off; raise orchestrator.sampling.max_tokens" in capsys.readouterr().out
    )


def test_the_template_that_drops_history_is_named(models, capsys):
    from think_env import DROPS

    from env import MultiTurnEnv, SingleTurnEnv

    tokenizer = transformers.AutoTokenizer.from_pretrained(models["untied"])
    client = SimpleNamespace(
        tokenizer=tokenizer, cfg=SimpleNamespace(sampling=SimpleNamespace(chat_template_kwargs={}))
    )
    several = {"task": MultiTurnEnv([{"question": "a"}])}
    assert preflight.check_template(client, several)
    tokenizer.chat_template = DROPS
    assert not preflight.check_template(client, several)
    assert "set chat_template to one that keeps" in capsys.readouterr().out
    assert preflight.check_template(client, {"task": SingleTurnEnv([{"question": "a"}])})


def test_a_strict_template_gets_the_ids_that_it_wants(models):
    """As Mistral's: a tool's answer needs the id of a call before it."""
    from think_env import KEEPS

    from env import ToolEnv

    def look(word: str) -> str:
        """Look a word up."""

    strict = "{% for m in messages %}{% if m.role == 'tool' and m.tool_call_id | length != 9 %}"
    strict += "{{ raise_exception('ids should have 9 characters') }}{% endif %}{% endfor %}"
    tokenizer = transformers.AutoTokenizer.from_pretrained(models["untied"])
    tokenizer.chat_template = strict + KEEPS
    client = SimpleNamespace(
        tokenizer=tokenizer, cfg=SimpleNamespace(sampling=SimpleNamespace(chat_template_kwargs={}))
    )
    assert preflight.check_template(client, {"task": ToolEnv([{"question": "a"}], [look])})


OOM = """
import resource, sys, torch, trainer
from configs.lib.process import start_distributed
from configs.lib.runtime import load_config
cfg = load_config(sys.argv[1], ["trainer.micro_batch_size=8000"])
rank, world, device = start_distributed(cfg)
policy = trainer.build_policy(cfg, device, world)
optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, fused=True)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (600 << 20), used + (600 << 20)))
trainer.check_memory(trainer.train_step, policy, None, optimizer, cfg, rank, world, device)
print("it fits")
"""


def test_a_micro_batch_that_does_not_fit_is_told_before_step_1(make_cfg, tmp_path):
    """512,000 tokens in 600 MiB."""
    make_cfg()
    done = subprocess.run(
        [sys.executable, "-c", OOM, str(tmp_path / "test.toml")], cwd=ROOT, capture_output=True, text=True
    )
    assert "check: FAIL a micro-batch of 512,000 tokens" in done.stdout, done.stdout + done.stderr
    assert "lower trainer.micro_batch_size or max_seq_len" in done.stdout and "RunError" in done.stderr


def test_the_memory_check_changes_nothing(make_cfg):
    cfg = make_cfg("trainer.weight_decay=0.1")
    policy = trainer.build_policy(cfg, CPU, 1)
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3, weight_decay=0.1, fused=True)
    preflight.check_memory(trainer.train_step, policy, None, optimizer, cfg, 0, 1, CPU)
    assert all(torch.equal(v, before[k]) for k, v in policy.state_dict().items())
    assert all("exp_avg" in optimizer.state[p] for p in policy.parameters())  # it was there for the second step
    assert all(p.grad is None for p in policy.parameters())


NCCL = """
import os, sys
asked = sys.orig_argv
if any(a.endswith("trainer.py") for a in asked) and "torch.distributed.run" not in asked:
    if os.environ["NCCL_P2P_DISABLE"] != "1" or os.environ.get("ALWAYS"):
        from configs.lib import broadcast
        class Broken:
            def broadcast(self, flat, root):
                raise RuntimeError("NCCL error: unhandled system error")
        made = broadcast.make_group
        broadcast.make_group = lambda *args: (made(*args), Broken())[1]
"""


@pytest.mark.slow
@pytest.mark.parametrize("always", some(["", "1"], 1))
def test_nccl_is_tried_again_without_peer_to_peer(always, models, tmp_path):
    """There is no NCCL here: the trainer's end of the group fails at its first broadcast, while the server waits."""
    (tmp_path / "sitecustomize.py").write_text(NCCL)
    toml = write_run(tmp_path, models["untied"], 2, '{ kind = "noise" }')
    toml.write_text(toml.read_text() + "sync_timeout_s = 5\n")
    more = {"ALWAYS": always, "PYTHONPATH": f"{ROOT / 'tests'}:{tmp_path}", "NCCL_P2P_DISABLE": "0"}
    done = launch(toml, check=False, **more)
    assert "[launch] again, with NCCL_P2P_DISABLE=1" in done.stderr, done.stdout + done.stderr
    if always:
        assert (
            done.returncode == 3
            and 'check: FAIL NCCL works neither with NCCL_P2P_DISABLE=0 nor 1: trainer.sync_backend = "gloo"'
            in done.stderr
        )
    else:
        assert done.returncode == 0 and "works with NCCL_P2P_DISABLE=1, not with 0: export it" in done.stdout


# --- console, pictures, trackers, reading -----------------------------------------------------------------------------


def step_line(i, **more):
    """A line of metrics.jsonl where all is well."""
    fine = {"step": i, "version": i + 1, "reward/mean": 0.5, "reward/std": 0.3, "reward/p10": 0.1, "reward/p90": 0.9}
    fine |= {"group/kept": 8, "group/flat": 2, "group/failed": 0, "group/long": 0, "group/empty": 0, "loss": -0.01}
    fine |= {
        "rollout/truncated": 0.1,
        "policy/kl_age0": 1e-4,
        "policy/kl_age2": 2e-4,
        "time/step_s": 1.0,
        "time": 1e9 + i,
    }
    fine |= {"time/wait_batch_s": 0.1, "time/train_s": 0.7, "time/sync_s": 0.2, "policy/entropy": 0.4}
    return fine | {"policy/kl_sampler": 2e-4, "sync/dlogp_max": 1e-5} | more


@pytest.mark.parametrize("more, told", [
    ({}, None),
    ({"group/flat": 40}, "reward variance vanishes: 40 of 48 groups are flat"),
    ({"reward/std": 0.0}, "reward variance vanishes"),
    ({"rollout/truncated": 0.6}, "60% of the rollouts are cut off: raise orchestrator.sampling.max_tokens"),
    ({"policy/kl_age2": 0.02}, "age: 1.0e-04 nats at 0, 2.0e-02 at 2 versions; lower orchestrator.max_staleness"),
    ({"time/wait_batch_s": 0.8}, "the trainer is starved: it waits 80% of the time"),
])  # fmt: skip
def test_warnings_name_the_key_to_turn(more, told):
    found = metrics.warnings([step_line(i, **more) for i in range(10)])
    assert (len(found) == 1 and told in found[0]) if told else not found


def test_what_a_model_wrote_cannot_steer_the_terminal(capsys):
    line = {"env": "e", "example": 1, "reward": 0.5, "metrics": {"exact": 0.0}, "advantage": -0.25, "dropped": "",
            "prompt": [{"role": "user", "content": "hi"}],
            "completion": [{"role": "assistant", "content": "a\x1b[2J\nb" + "x" * 2000}]}  # fmt: skip
    metrics.show_rollout(9, [line])
    out = capsys.readouterr().out
    assert (
        "\x1b" not in out
        and "\\x1b[2J" in out
        and len(out) < 1000
        and "reward 0.500 (exact 0), advantage -0.250" in out
    )
    assert all(row.startswith("rollout") for row in out.splitlines())


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
    more = ["show_every=2", "eval.every=2", f"inference.port={free_port()}", "tracker=tensorboard"]
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
    run, shown = small_run
    assert re.search(r"\[#+ *\] \d/4  \d+ s, \d+:\d\d left", shown)
    shown = shown.replace("\r", "\n").replace("\x1b[K", "")
    assert len(re.findall(r"^rollout of step [13]: ", shown, re.MULTILINE)) == 2 and "rollout | assistant:" in shown
    assert len(re.findall(r"^step +\d/4 \| reward", shown, re.MULTILINE)) == 4
    assert "check: PASS a micro-batch of" in shown and "gain" in shown


def test_a_local_model_leaves_the_rows_online(small_run):
    for role, is_offline in {"inference": True, "trainer": True, "orchestrator": False}.items():
        begun = (small_run[0] / "logs" / f"{role}.log").read_text().splitlines()[0]
        assert begun.startswith("=== ") and ("HF_HUB_OFFLINE=1" in begun) == is_offline


def test_the_readme_quotes_what_is_printed(small_run, capsys):
    """Its sample of check: lines, numbers aside, and the beginnings of its table."""
    preflight.check_baseline("reverse_text", [[rollout(0.0), rollout(1.0)]])
    printed = small_run[1] + capsys.readouterr().out
    shape = lambda text: re.sub(r"[\d.,]+(e-\d+)?", "N", text.strip())  # noqa: E731
    sample = [x for block in blocks("") for x in block.splitlines() if x.startswith("check:")]
    known = {shape(x) for x in printed.replace("think_env", "reverse_text").replace("\x1b[K", "").splitlines()}
    for line in sample:
        assert shape(line) in known or "not needed, one turn" in line, line
    source = " ".join((ROOT / "configs" / "lib" / f"{name}.py").read_text() for name in ("preflight", "metrics"))
    source += (ROOT / "configs" / "lib" / "roles.sh").read_text() + (ROOT / "trainer.py").read_text()
    for quoted in re.findall(r"^\| `(?:check: FAIL|warning:|exit=5)(.*?)`", README, re.MULTILINE):
        for part in re.split(r"\.\.\.|;", quoted.replace("\\|", "|")):
            assert part.strip() in source, part


def test_a_replay_draws_its_curve_beside_the_run(small_run, tmp_path):
    import matplotlib.image

    from tools.plot import plot

    run = small_run[0]
    assert (run / "curves.png").exists()
    other = tmp_path / "run-replay-grpo"
    other.mkdir()
    (other / "metrics.jsonl").write_text(
        "".join(json.dumps(step_line(i) | {"reward/mean": None}) + "\n" for i in range(4))
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    for runs in ([run], [run, other], [other, run], [other], [empty]):
        plot(runs, tmp_path / "out.png")
        pixels = matplotlib.image.imread(tmp_path / "out.png")[..., :3]
        assert np.ptp(pixels, axis=-1).max() < 0.02 and pixels.std() > 0.01  # grey, and not blank


def test_reading_rollouts(small_run):
    from safetensors.torch import load_file

    run = small_run[0]

    def show(*args):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            tools.show.main([str(run), *args])
        return out.getvalue()

    assert show("--n", "3").count("=== step 3, ") == 3
    best = max(x["reward"] for x in lines(run / "rollouts.jsonl"))
    assert f"reward {best:.3f}" in show("--sort", "reward", "--n", "1")
    assert show("--min-reward", str(best + 1)).strip() == "no such rollout"
    for step in range(4):
        text = show("--step", str(step), "--color", "advantage", "--n", "99")
        batch = load_batch(run / "batches" / f"step_{step:06d}.safetensors")
        limit = batch.advantages.abs().max() * 2 / 3
        strong = int(((batch.advantages > limit) & batch.loss_mask).sum())
        assert text.count("[+++]") == strong, "each sampled token of a rollout has its advantage's shade"
        own = load_file(run / "batches" / f"logp_{step:06d}.safetensors")["logp"]
        far = ((own - batch.old_logp).abs() > 1e-3) & batch.loss_mask
        marks = re.findall(r"\[(?:\++|-+)\]", show("--step", str(step), "--color", "diff", "--n", "99"))
        assert len(marks) == int(far.sum()) and (step == 0) <= (not marks)  # the same weights in step 0


@pytest.mark.parametrize("low, high, rewards", [(None, None, [-1, 0, 1, None]), (0, None, [0, 1]), (None, 0, [-1, 0])])
def test_rollouts_are_chosen_by_reward(low, high, rewards, tmp_path):
    about = {"step": 0, "env": "a", "example": 1, "advantage": None}
    rows = [json.dumps(about | {"reward": x}) + "\n" for x in (-1, 0, 1, None)]
    (tmp_path / "rollouts.jsonl").write_text("".join(rows) + '{"step": 1, "rew')  # and half of one
    args = SimpleNamespace(step=None, env="a", row=None, min_reward=low, max_reward=high, color=None)
    assert [line["reward"] for line in tools.show.chosen(tmp_path, args)] == rewards
    args.color = "advantage"
    assert not list(tools.show.chosen(tmp_path, args))  # none was trained on


def test_the_trainers_own_logp_is_kept(small_run):
    from safetensors.torch import load_file

    for step in range(4):
        batch = load_batch(small_run[0] / "batches" / f"step_{step:06d}.safetensors")
        logp = load_file(small_run[0] / "batches" / f"logp_{step:06d}.safetensors")["logp"]
        fresh = torch.tensor([s["age"] == 0 for s in batch.samples]).repeat_interleave(batch.sample_lens)
        of = batch.loss_mask & fresh
        torch.testing.assert_close(logp[of], batch.old_logp[of], atol=1e-5, rtol=0)  # the same weights
        assert (logp[~batch.loss_mask] == 0).all() and (step == 0) == bool(of.all() or fresh.all())


def tracked(tmp_path, name, monkeypatch):
    """configs/lib/track.py on a finished run of 12 steps."""
    run = tmp_path / "some run"
    run.mkdir()
    (run / "config.toml").write_text('model = "m"\n[inference]\nargs = { api_key = "geheim" }\n')
    (run / "metrics.jsonl").write_text("".join(json.dumps(step_line(i)) + "\n" for i in range(12)))
    evals = [{"step": v, "env": "task", "reward/mean": v / 10, "ci95": 0.1, "rows": [0.5]} for v in (0, 10)]
    (run / "eval.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evals))
    talk = {
        "prompt": [{"role": "user", "content": "how | many"}],
        "completion": [{"role": "assistant", "content": "so\nmany"}],
    }
    about = {"env": "task", "example": 1, "reward": 0.5, "advantage": 0.1, "truncated": False}
    rows = [about | talk | {"step": s, "rollout": r} for s in range(12) for r in range(2)]
    (run / "rollouts.jsonl").write_text("".join(json.dumps(x) + "\n" for x in rows))
    (run / "done").write_text("12")
    track.main(run, name)
    sent = json.loads((run / "tracker.json").read_text())
    assert (sent["metrics"], sent["eval"], sent["rollouts"]) == (12, 10, 10)
    return run


def test_tensorboard_gets_it_all(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracked(tmp_path, "tensorboard", monkeypatch)
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    assert [(e.step, round(e.value, 3)) for e in found.Scalars("reward/mean")] == [(v, 0.5) for v in range(1, 13)]
    assert [(e.step, round(e.value, 3)) for e in found.Scalars("eval/task/reward/mean")] == [(0, 0.0), (10, 1.0)]
    table = [e.tensor_proto.string_val[0].decode() for e in found.Tensors("rollouts/text_summary")]
    assert (
        len(table) == 2
        and "how \\| many" in table[0]
        and "so<br>many" in table[0]
        and "geheim" not in str(found.Tensors("config/text_summary"))
    )


def wandb_records(path):
    """The protobuf records of an offline run: 7 bytes of header, then LevelDB's log format in blocks of 32 KiB."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_gets_it_all_offline(tmp_path, monkeypatch):
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run, history, text = tracked(tmp_path, "wandb", monkeypatch), [], b""
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    for data in wandb_records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        text += data
        if record.WhichOneof("record_type") == "history":
            history.append({(i.key or "/".join(i.nested_key)): i.value_json for i in record.history.item})
    rewards = [(json.loads(h["version"]), json.loads(h["reward/mean"])) for h in history if "reward/mean" in h]
    assert rewards == [(v, 0.5) for v in range(1, 13)]
    assert sum("eval/task/reward/mean" in h for h in history) == 2 and b"geheim" not in text
    assert len(list(run.glob("wandb/offline-run-*/files/media/table/rollouts*.json"))) == 2


def test_trackio_gets_it_all_offline(tmp_path):
    """In its own process: trackio reads its place when it is imported."""
    code = "import sys, pathlib, test_first_hour as t; t.tracked(pathlib.Path(sys.argv[1]), 'trackio', None)"
    env = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    import sqlite3

    (file,) = [f for f in (tmp_path / "trackio").glob("*.db")]
    found = [json.loads(x) for (x,) in sqlite3.connect(file).execute("select metrics from metrics")]
    assert sum("reward/mean" in x for x in found) == 12 and sum("eval/task/reward/mean" in x for x in found) == 2
    assert sum("rollouts" in x for x in found) == 2


def test_gains_are_paired():
    first, now = [0.0, 0.5, 1.0, None, 0.25], [0.5, 0.75, 1.0, 1.0, None]
    found = evaluate.paired(first, now)  # differences 0.5, 0.25, 0: sd 0.25
    assert found == pytest.approx({"gain": 0.25, "gain_ci95": 1.96 * 0.25 / 3**0.5})
    assert evaluate.paired([0.5], [1.0]) == {"gain": None, "gain_ci95": None}


def test_an_evaluation_that_was_missed_is_made_up_for(tmp_path, monkeypatch):
    """Every 3 versions; that of version 0 takes until version 7."""
    client, seen = SimpleNamespace(version=0), []

    async def evaluate_at(*args):
        seen.append(client.version)
        client.version = {0: 7, 7: 8, 9: 10, 10: 10}[client.version]

    async def run():
        task = asyncio.ensure_future(evaluate.evaluate_when_due(None, None, {}, client, tmp_path, cfg))
        while not task.done():
            await asyncio.sleep(0.1)
            client.version += client.version == 8
        await task

    cfg = SimpleNamespace(eval=SimpleNamespace(every=3), run=SimpleNamespace(max_steps=10))
    monkeypatch.setattr(evaluate, "evaluate", evaluate_at)
    asyncio.run(run())
    assert seen == [0, 7, 9, 10]


def test_shadow_metrics_are_what_the_other_losses_would_say(make_cfg, tmp_path):
    names = ["cispo", "grpo", "dr_grpo", "dppo", "icepop", "gspo"]
    samples = [s | {"logp": [x * 1.4 for x in s["logp"]]} for s in make_samples(24)]
    save_batch(tmp_path / "step_000000.safetensors", samples, {"rollouts": 24, "max_tokens": 16})
    batch = load_batch(tmp_path / "step_000000.safetensors")

    def found(loss, shadow):
        cfg = make_cfg(f"trainer.loss={loss}", f"trainer.shadow_losses={json.dumps(shadow)}")
        policy = trainer.build_policy(cfg, CPU, 1)
        return trainer.train_step(policy, None, torch.optim.SGD(policy.parameters(), 0.0), batch, 0, cfg, 0, 1, CPU)[0]

    shadows = found("sft", names)
    own = {name: found(name, [])["policy/clip_frac"] for name in names}
    assert {name: shadows[f"shadow/{name}/clip_frac"] for name in names} == pytest.approx(own, abs=1e-6)
    assert len({round(x, 3) for x in own.values()}) > 2 and "shadow/sft/clip_frac" not in shadows


def test_kl_by_age_is_of_the_samples_of_that_age(make_cfg, tmp_path):
    samples = [
        s | {"age": i % 3, "logp": [x - 0.1 * (i % 3) for x in s["logp"]]} for i, s in enumerate(make_samples(24))
    ]
    cfg = make_cfg("trainer.micro_batch_size=2", "trainer.learning_rate=1e-30")
    policy = trainer.build_policy(cfg, CPU, 1)
    for age in (None, 0, 1, 2):
        of = [s for s in samples if age in (None, s["age"])]
        save_batch(tmp_path / f"step_{age or 0:06d}.safetensors", of, {"rollouts": len(of), "max_tokens": 16})
        batch = load_batch(tmp_path / f"step_{age or 0:06d}.safetensors")
        found, _ = trainer.train_step(policy, None, torch.optim.SGD(policy.parameters(), 0.0), batch, 0, cfg, 0, 1, CPU)
        if age is None:
            whole = found
        else:
            assert whole[f"policy/kl_age{age}"] == pytest.approx(found["policy/kl_sampler"], rel=1e-3)
            assert whole[f"policy/tokens_age{age}"] == pytest.approx(int(batch.loss_mask.sum()))


# --- more machines ----------------------------------------------------------------------------------------------------


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
        agent = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes",
            "2",
            "--node-rank",
            "1",
            "--nproc-per-node",
            "1",
        ]
        agent += ["--master-addr", "127.0.0.1", "--master-port", port, "trainer.py", str(toml), *more]
        second = start(agent, tmp_path / "second", ROLEMODEL_RUN_ID="big", OMP_NUM_THREADS="1")
        nodes = {"ROLEMODEL_RUN_ID": "big", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        done = launch(toml, *more, **nodes)
        assert second.wait(60) == 0, (tmp_path / "second").read_text()
        assert "done in" in done.stdout and lines(tmp_path / "run" / "metrics.jsonl")[-1]["version"] == 3
        asked = [httpx.get(f"{url}/health").json() for url in urls]
        assert all(x["requests"] > 5 and x["syncs"] == 5 for x in asked)  # the pre-flight's, and versions 0 to 3
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
    """The first for servers, the next for ranks; where there are too few for both, the same."""
    toml, more = four_gpus
    for gpus, ranks, expected in ((2, 1, ["7", "5", "3"]), (4, 1, ["7", "5", "7"])):
        name = f"{gpus}-{ranks}"
        sizes = [f"inference.gpus={gpus}", f"trainer.gpus={ranks}", "preflight=false", f"run_name={name}"]
        done = launch(toml, *sizes, **more)
        logs = [(tmp_path / name / "logs" / f"{x}.log").read_text() for x in ("inference", "inference1", "trainer")]
        assert [re.findall(r"CUDA_VISIBLE_DEVICES=(\S*)", text)[-1] for text in logs] == expected
        assert ("[launch] vLLM and the trainer share 4 GPU(s)" in done.stdout) == (gpus == 4)


@pytest.mark.long
@pytest.mark.real
def test_two_nodes_and_two_real_servers(tmp_path):
    """The README's way on bare machines, with both servers on the first node."""
    port, http, seen = str(free_port()), free_port(), tmp_path / "run"
    more = ["max_steps=4", "run_name=run", f"output_dir={tmp_path}", "eval.every=2", "env.args.num_eval=32"]
    more += ["orchestrator.batch_size=64", "trainer.replicas=2", "inference.gpus=2", f"inference.port={http}"]
    urls = json.dumps([f"http://127.0.0.1:{http + i}" for i in range(2)])
    agent = f"{sys.executable} -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 1"
    agent += f" --master-addr 127.0.0.1 --master-port {port} trainer.py configs/reverse_text.toml"
    command = [*agent.split(), *more, f"inference.urls={urls}"]
    second = start(command, tmp_path / "second", ROLEMODEL_RUN_ID="two", OMP_NUM_THREADS="1")
    nodes = {"ROLEMODEL_RUN_ID": "two", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "SERVER": ""}
    try:
        done = launch("configs/reverse_text.toml", *more, timeout=300, TMPDIR="/tmp", **nodes)
        assert second.wait(60) == 0, (tmp_path / "second").read_text()
    finally:
        second.kill()
    assert done.stdout.count("check: PASS a broadcast moves the servers") == 1 and "done in" in done.stdout
    assert lines(seen / "metrics.jsonl")[-1]["version"] == 4 and len(lines(seen / "eval.jsonl")) == 3
    assert all(line["sync/dlogp_max"] < 1e-3 for line in lines(seen / "metrics.jsonl"))  # over both servers


def test_tmux_opens_a_pane_per_role(models, tmp_path):
    """What tmux is asked for; a stand-in notes it."""
    toml = write_run(tmp_path, models["untied"], 1, '{ kind = "noise" }')
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tmux").write_text(f'#!/bin/sh\necho "$TMUX|$*" >> {tmp_path}/asked\n')
    (tmp_path / "bin" / "tmux").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    command, env = ["bash", "launch.sh", str(toml), "trainer.loss=grpo"], os.environ | {"TMUX": "1", "PATH": path}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert done.returncode == 0 and "attach" in done.stdout, done.stderr
    assert all(x.startswith("|-L rolemodel-run-") for x in asked)  # TMUX is not handed on
    assert "new-session" in asked[0] and "trainer.loss=grpo" in asked[0]
    for role in ("trainer", "orchestrator", "inference"):
        assert sum("split-window" in x and f"logs/{role}.log" in x for x in asked) == 1
    assert not list((tmp_path / "run" / "batches").iterdir())
