"""tools/watch.py on files as a run writes them."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from conftest import ROOT, append
from test_show import rollout_line

from rolemodel.config import to_toml
from tools import plot, watch

FINE = {"loss": -0.01, "reward/mean": 0.5, "rollout/truncated": 0.1, "rollout/num": 100, "rollout/errors": 5}
FINE |= {"group/kept": 8, "group/flat": 2, "group/failed": 0, "group/long": 0}
FINE |= {"time/step_s": 1.0, "time/wait_batch_s": 0.1, "time/train_s": 0.7, "time/sync_s": 0.2}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Without pictures and handlers of signals."""
    monkeypatch.setattr(plot, "draw", MagicMock())
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)


def rollout_lines(step, rewards=(0.0, 1.0), **more):
    """A group of rollouts.jsonl."""
    about = {"example": 1, "metrics": {"exact": 0.5}} | more
    return [rollout_line(step, step, i, reward, "so\nmany", **about) for i, reward in enumerate(rewards)]


@pytest.fixture
def write(tmp_path, make_cfg):
    """write(steps, *overrides, **numbers) -> a run directory, to which these steps have been added."""

    def go(steps, *overrides, **numbers):
        run = tmp_path / "some run"
        (run / "batches").mkdir(parents=True, exist_ok=True)
        (run / "config.toml").write_text(to_toml(make_cfg("max_steps=60", *overrides)))
        for step in steps:
            append(run / "rollouts.jsonl", rollout_lines(step))
            append(run / "metrics.jsonl", [{"step": step, "version": step + 1, "time": 1e9 + step} | FINE | numbers])
        for step in (0, 10):
            if step in steps:
                about = {"step": step, "env": "task", "errors": 0, "reward/lost_as_0": 0.5}
                about |= {"success": "right", "pass@1": step / 20}
                rows = [step / 100, 0.1 + step / 50]
                append(run / "eval.jsonl", [about | {"rows": rows, "reward/mean": sum(rows) / 2}])
        return run

    return go


def printed(capfd, start):
    return [row for row in capfd.readouterr().out.splitlines() if row.startswith(start)]


# --- what it says -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers, warning", [
    ({}, ""),
    ({"group/flat": 40}, "83% of the groups have no gradient"),
    ({"rollout/truncated": 0.6}, "60% of the rollouts are cut off: raise orchestrator.sampling.max_tokens"),
    ({"rollout/errors": 10}, "10% of the rollouts are lost"),
    ({"policy/kl_sampler": 0.09}, ""),
    ({"policy/kl_sampler": 0.2}, "KL(sampler || policy) is 0.20 nats per token: lower trainer.learning_rate"),
    ({"time/wait_batch_s": 0.6, "time/dropped_s": 0.4, "time/eval_s": 0.1},
     "the trainer waits 60% of the time, mostly for replacements of groups without a gradient"),
    ({"time/wait_batch_s": 0.6}, "the trainer waits 60% of the time, mostly for rollouts: raise inference.gpus"),
])  # fmt: skip
def test_a_warning_names_the_key_to_change(numbers, warning, write, capfd):
    watch.main([str(write(range(10), **numbers)), "--once"])
    found = printed(capfd, "warning: ")
    assert (len(found) == 1 and f"steps 0 to 9: {warning}" in found[0]) if warning else not found


def test_a_warning_comes_again_only_if_its_cause_had_gone_and_not_for_a_single_step(write, capfd):
    for ten, share in ((range(20), 0.9), (range(20, 30), 0.1), (range(30, 40), 0.9)):
        run = write(ten, **{"rollout/truncated": share})
    write([40], **{"policy/kl_sampler": 5.0})
    write(range(41, 50), **{"rollout/truncated": 0.9, "policy/kl_sampler": 0.001})
    watch.main([str(run), "--once"])
    assert [row.split(":")[1] for row in printed(capfd, "warning: ")] == [" steps 0 to 9", " steps 30 to 39"]


def test_an_evaluation_that_loses_rollouts_is_no_better_one(write, capfd):
    """Lost rollouts count in no mean, so a policy that fails on hard rows would look better."""
    run = write([0], "eval.rollouts_per_example=2")
    about = {"env": "task", "rows": [0.5] * 50, "reward/mean": 0.5, "reward/lost_as_0": 0.4}
    about |= {"success": "right", "pass@1": 0.5}
    append(run / "eval.jsonl", [about | {"step": 10, "errors": 5}, about | {"step": 20, "errors": 6}])
    watch.main([str(run), "--once"])
    (row,) = printed(capfd, "warning: ")
    assert "evaluation 20 of task lost 6 of 100 rollouts" in row and "would be 0.400 if they counted as 0" in row


def test_a_live_run_says_how_much_is_left(write, capfd):
    following = watch.Watch(write([]), "", True)
    write(range(10))
    following.look()
    assert "time: 10 of 60 steps are done, 0:00:50 left" in capfd.readouterr().out  # of a second each


def test_a_run_that_is_done(write, capfd):
    """The gain is paired: rows 0.0 and 0.1 became 0.1 and 0.3, a mean difference of 0.15 with a
    deviation of 0.0707, so by Student 12.7 * 0.0707 / sqrt(2) to both sides."""
    run = write(range(12), "show_every=5")
    (run / "rollouts.jsonl").write_text((run / "rollouts.jsonl").read_text().replace("so", r"\u001b[2Jso"))
    (run / "done").write_text("60")
    watch.main([str(run)])
    out = capfd.readouterr().out
    assert "=== step 5, task, example 1, rollout 1: reward 1.000 (exact 0.5)\n" in out and "\x1b" not in out
    assert (
        "time: 12 s, 70% training, 20% syncing, 10% waiting (10% for rollouts)\ntime: bound by training: raise" in out
    )
    assert "result: task: right 0.500 (0.000 before), reward 0.200 +- 1.271, gain 0.150 +- 0.635 in 10 steps\n" in out


def test_to_wait_in_spite_of_staleness_means_that_sampling_takes_longer(write, capfd):
    watch.main([str(write(range(3), **{"time/wait_batch_s": 0.3})), "--once"])
    assert printed(capfd, "time: ")[-1].startswith("time: bound by rollouts: ")


def test_an_adapter_is_served_as_the_run_served_it(write, capfd):
    """vLLM refuses one whose rank is above --max-lora-rank, and takes only some values for that."""
    overrides = ["inference.args.enable_prefix_caching=false", "model=a/base"]
    run = write([], *overrides, "trainer.use_lora=true", "trainer.lora_rank=20")
    (run / "done").touch()
    watch.main([str(run)])
    serve, evaluate = [row.partition("python ")[2] for row in printed(capfd, "result: ")[1:]]
    how = "--host 127.0.0.1 --dtype float32 --max-model-len 64 "
    how += "--tensor-parallel-size 1 --generation-config vllm --no-enable-prefix-caching "
    run = os.path.relpath(run, ROOT)
    how += f"--lora-modules 'final={run}/final' --enable-lora --max-lora-rank 32"
    assert serve == f"-m rolemodel.serving.server --model a/base --served-model-name base {how}"
    assert evaluate.endswith(f"'{run}/config.toml' --eval --base-url http://127.0.0.1:8000/v1 --model final")


# --- what it writes ---------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_followed_from_where_it_was(write, monkeypatch):
    """The trainer goes back to its checkpoint, and repeats the last step: its rollouts are not written again. A line
    may be written in two parts."""
    run = write(range(6))
    reported = []
    report = lambda self, line, rollouts: reported.append((line["step"], [r["step"] for r in rollouts]))
    monkeypatch.setattr(watch.Watch, "report_step", report)
    following = watch.Watch(run, "", True)
    metrics = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    for there in (metrics, metrics[:4], [*metrics[:4], metrics[4][:9]], metrics[:5]):
        (run / "metrics.jsonl").write_text("".join(there))
        following.look()
    append(run / "rollouts.jsonl", rollout_lines(6) + rollout_lines(7))
    for step in (5, 6, 7):  # the rollouts of step 7 are there before it has been trained
        append(run / "metrics.jsonl", [{"step": step, "version": step + 1, "time": 1e9 + 100 * step} | FINE])
        following.look()
    assert reported == [(6, [6, 6]), (7, [7, 7])]


# --- wandb ------------------------------------------------------------------------------------------------------------


def test_wandb_gets_everything_once_and_later_if_it_fails(write, capfd, monkeypatch):
    sent = []
    wandb = MagicMock(log=sent.append)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for steps in (range(3), range(3, 12)):
        run = write(steps, "tracker=wandb")
        with monkeypatch.context() as patch:
            patch.setattr(wandb, "log", lambda values: 1 / 0)
            watch.main([str(run), "--once"])
        assert printed(capfd, "warning: the tracker failed: ZeroDivisionError")
        watch.main([str(run), "--once"])
    found = {key: [x["version"] for x in sent if key in x] for key in ("reward/mean", "eval/task/gain")}
    assert found == {"reward/mean": [*range(1, 13)], "eval/task/gain": [0, 10]}


def test_other_trackers_get_the_same(write, monkeypatch):
    """trackio has wandb's names, but not all of its arguments."""
    sent = []
    init = lambda project, name, group, resume, config: sent.append(name)
    trackio = SimpleNamespace(init=init, log=sent.append, Table=MagicMock(), finish=MagicMock())
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", board := MagicMock())
    run = write(range(3))
    for name in ("trackio", "tensorboard"):
        watch.main([str(run), "--once", "--tracker", name])
    add = board.SummaryWriter.return_value.add_scalar
    assert [x["reward/mean"] for x in sent[1:] if "reward/mean" in x] == [0.5] * 3
    assert [call.args[2] for call in add.call_args_list if call.args[0] == "reward/mean"] == [1, 2, 3]


def test_wandb_writes_numbers_and_tables(write):
    run = write(range(12))
    run = run.rename(run.with_name(100 * "d" + "a: b? #c"))  # Metta #2490
    command = [sys.executable, str(ROOT / "tools" / "watch.py"), str(run), "--once", "--tracker", "wandb"]
    env = os.environ | {"WANDB_MODE": "offline", "HOME": str(run)}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "warning: the tracker" not in done.stdout, done.stdout + done.stderr
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    assert b"reward/mean" in file.read_bytes()
    assert len(list(run.glob("wandb/offline-run-*/files/media/table/rollouts*.json"))) == 2
