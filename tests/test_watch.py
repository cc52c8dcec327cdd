"""tools/watch.py, advice.py, plot.py and track.py on files as a run writes them."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, free_port, lines, make_sequences, some, start, stop, wait_for, write_run
from safetensors.numpy import load_file, save_file

from configs import load_config, to_toml
from configs.serving import adapters
from orchestrator import save_batch
from tools import advice, plot, show, track, watch
from tools.show import eval_statistics

TALK = {
    "prompt": [{"role": "user", "content": "how | many"}],
    "completion": [{"role": "assistant", "content": "so\nmany"}],
    "answer": "2",
}
DRAW = plot.plot


@pytest.fixture(autouse=True)
def quick_pictures(monkeypatch):
    monkeypatch.setattr(plot, "plot", lambda runs, out: out.touch())


def step_line(i, **more):
    """A line of metrics.jsonl where all is well."""
    fine = {"step": i, "version": i + 1, "time": 1e9 + i, "loss": -0.01, "policy/entropy": 0.4}
    fine |= {"reward/mean": 0.5, "reward/std": 0.3, "rollout/truncated": 0.1}
    fine |= {"group/kept": 8, "group/flat": 2, "group/failed": 0, "group/long": 0, "group/empty": 0}
    fine |= {"time/step_s": 1.0, "time/wait_batch_s": 0.1, "time/train_s": 0.7, "time/sync_s": 0.2}
    return fine | {"policy/kl_sampler": 2e-4, "sync/dlogp_max": 1e-5} | more


def rollout_lines(step, env="task", rewards=(0.0, 1.0), **more):
    """A group of rollouts.jsonl."""
    about = {"step": step, "env": env, "example": 1, "group": step, "truncated": False, "error": "", "dropped": ""}
    about |= {"num_turns": 1, "metrics": {"exact": 0.5}} | TALK
    return [about | {"rollout": i, "reward": reward} | more for i, reward in enumerate(rewards)]


def append(path, rows):
    with open(path, "a") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


def write_steps(run, steps, is_done=True, config=""):
    """A run of one environment -> its directory."""
    (run / "batches").mkdir(parents=True, exist_ok=True)
    config = f'model = "m"\nmax_steps = {len(steps)}\nshow_every = 5\n{config}'
    (run / "config.toml").write_text(config + '[inference]\nargs = { api_key = "geheim" }\n')
    append(run / "metrics.jsonl", [step_line(i) for i in steps])
    append(run / "rollouts.jsonl", [line for i in steps for line in rollout_lines(i)])
    evals = [i for i in steps if i % 10 == 0]
    about = {"env": "task", "n": 20, "exact": 0.5, "rows": [0.5]}
    append(run / "eval.jsonl", [about | {"step": v, "reward/mean": v / 10} for v in evals])
    if is_done:
        (run / "done").write_text(str(len(steps)))
    return run


def printed(capsys, start):
    return [row for row in capsys.readouterr().out.splitlines() if row.startswith(start)]


# --- what the first rollouts say --------------------------------------------------------------------------------------


def rollout(reward, truncated=False, error="KeyError"):
    return {"reward": reward, "truncated": truncated, "error": "" if reward is not None else error}


@pytest.mark.parametrize("groups, failing", [
    ([[0.0, 1.0], [1.0, 0.0]], []),
    ([[0.0] * 4] * 3, ["too hard: nothing is solved", "all rewards are equal in 3 of 3 groups; raise"]),
    ([[1.0, 0.9]] * 3, ["too easy: 95 % is solved (limit 80 %), reward 0.950"]),
    ([[-2.0, -3.0], [-2.5, -2.0]], []),
    ([[0.0, 0.05], [0.01, 0.004]], ["too hard: nothing is solved, and rewards hardly differ within groups (by 0.014)"]),
    ([[0.0, 0.0], [0.0, 1.0], [0.0, 0.0], [1.0, 0.0]], []),  # a quarter is solved
    ([[0.1, 0.3], [0.2, 0.4]], []),  # nothing is, but which answers are better is clear
    ([[0.5] * 4] * 3, ["raise orchestrator.rollouts_per_example"]),
    ([[None, None]], ["2 of 2 rollouts were lost: KeyError"]),
    ([[1.0, None], [1.0, 1.0]], ["1 of 4 rollouts were lost: KeyError"]),  # and not: too easy
    ([[]], ["every prompt is too long"]),
])  # fmt: skip
def test_the_judgment_names_the_key_to_change(groups, failing, capsys):
    is_ok = advice.judge("task", [[rollout(x) for x in group] for group in groups])
    failed = printed(capsys, "check: FAIL task: ")
    assert is_ok == (not failing) and len(failed) == len(failing)
    assert all(any(text in row for row in failed) for text in failing)


def test_a_task_of_which_nothing_is_solved_is_not_called_just_right(capsys):
    assert advice.judge("task", [[rollout(0.1), rollout(0.3)]])
    (row, _, _) = printed(capsys, "check: PASS task: ")
    assert "nothing is solved, but rewards differ within groups: reward 0.200" in row


def test_the_judgment_sees_what_is_cut_off_and_tolerates_a_few_lost(capsys):
    group = [rollout(0.0, True), rollout(1.0, True), rollout(1.0, True), rollout(0.0)]
    assert not advice.judge("task", [group])
    (row,) = printed(capsys, "check: FAIL")
    assert "task: 75 % of the rollouts are cut off (limit 50 %); raise orchestrator.sampling.max_tokens" in row
    groups = [[rollout(i % 2) for i in range(40)], [rollout(None, error="reward function exact returned None")]]
    advice.judge("task", groups)
    told = "1 of 41 rollouts were lost: reward function exact returned None"
    assert any(told in row for row in printed(capsys, "check: PASS"))


# --- warnings ---------------------------------------------------------------------------------------------------------

KL = {"policy/kl_staleness0": 1e-4, "policy/kl_staleness2": 2e-4}


@pytest.mark.parametrize("more, warning", [
    ({}, None),
    (KL, None),
    ({"group/flat": 40}, "reward variance vanishes: 40 of 48 groups are flat"),
    ({"reward/std": 0.0}, "reward variance vanishes"),
    ({"rollout/truncated": 0.6}, "60 % of the rollouts are cut off: raise orchestrator.sampling.max_tokens"),
    (KL | {"policy/kl_staleness2": 0.02}, None),  # it grows with staleness, as it must, and is small
    (KL | {"policy/kl_staleness2": 0.2}, "1.0e-04 nats at 0, 2.0e-01 at 2 versions; lower orchestrator.max_staleness"),
    (KL | {"policy/kl_staleness0": 0.1}, "0.10 nats on rollouts of the very same weights: the engines disagree"),
    ({"rollout/num": 50, "rollout/errors": 10, "error/KeyError": 9}, "20 % of the rollouts are lost to errors (Key"),
    ({"policy/kl_sampler": 0.2}, "KL(sampler || policy) is 0.20 nats; lower"),
    ({"time/wait_batch_s": 0.8}, "the trainer is starved: it waits 80 % of the time"),
])  # fmt: skip
def test_warnings_name_the_key_to_turn(more, warning):
    found = list(advice.warnings([step_line(i, **more) for i in range(10)]).values())
    assert (len(found) == 1 and warning in found[0]) if warning else not found


def test_a_warning_comes_once_until_it_is_over_and_not_for_one_bad_step(tmp_path, capsys):
    run = write_steps(tmp_path, [])
    cut = [step_line(i, **{"rollout/truncated": 0.9 if i < 30 or i >= 40 else 0.0}) for i in range(60)]
    append(run / "metrics.jsonl", cut)
    watch.main([str(run)])
    assert [row.split(":")[1] for row in printed(capsys, "warning: ")] == [" steps 0 to 9", " steps 40 to 49"]
    far = dict.fromkeys([*KL, "policy/kl_sampler"], 5.0)
    assert not advice.warnings([step_line(i, **(far if i == 4 else KL)) for i in range(10)])


def test_an_evaluation_that_lost_rollouts_warns_once_until_it_is_over(tmp_path, capsys):
    """Five in a hundred may be. A policy that fails on hard rows would look better: they count in no mean."""
    run = write_steps(tmp_path, [])
    about = {"env": "task", "rows": [0.5] * 50, "k": 2, "reward/mean": 0.5, "reward/lost_as_0": 0.4}
    lost = enumerate([5, 6, 7, 0, 6])
    append(run / "eval.jsonl", [about | {"step": 10 * i, "errors": errors} for i, errors in lost])
    watch.main([str(run)])
    rows = printed(capsys, "warning: ")
    assert re.findall(r"evaluation (\d+) of task: . % of", " ".join(rows)) == ["10", "40"]
    assert all("mean 0.500, but 0.400 with lost ones as 0" in row for row in rows)


# --- following --------------------------------------------------------------------------------------------------------


def test_a_healthy_run_in_a_few_lines(tmp_path, capsys):
    run = write_steps(tmp_path, range(12))
    watch.main([str(run)])
    rows = capsys.readouterr().out.splitlines()
    kinds = [row.split(" ")[0] for row in rows if not row.startswith("rollout |")]
    assert kinds == ["check:"] * 3 + ["rollout"] * 3 + ["time:"]
    assert rows[0].startswith("check: PASS task: neither too hard nor too easy: reward 0.500 (0 to 1) of 2 rollouts")
    assert re.findall(r"rollout of step (\d+):", "\n".join(rows)) == ["0", "5", "10"]
    shares = "trained 70 %, waited 10 % for rollouts, synced 20 % and saved 0 % of 12 s; make"
    assert f"time: the trainer {shares}" in rows[-1]
    assert (run / "curves.png").exists() and not (run / "tracker.json").exists()


def test_the_result_is_served_as_the_run_served_it(tmp_path):
    """vLLM refuses a rank above --max-lora-rank, by default 16, and takes only some values for it."""
    run = write_steps(tmp_path / "my run", [])
    (run / "final").mkdir()
    args = {"enable_auto_tool_choice": True, "enable_prefix_caching": False, "tool_call_parser": "hermes"}
    config = {"model": "base/model", "max_seq_len": 64, "chat_template": "templates/my own.jinja"}
    config["trainer"] = {"dtype": "bf16", "head_dtype": "fp32"}
    config["inference"] = {"args": args | {"api_key": "REDACTED", "tensor_parallel_size": 1}}
    flags = '--host 127.0.0.1 --dtype bfloat16 --max-model-len 64 --chat-template "templates/my own.jinja"'
    flags += """ --hf-overrides '{"head_dtype": "float32"}' --enable-auto-tool-choice --no-enable-prefix-caching"""
    flags = shlex.split(f"{flags} --tool-call-parser hermes")
    serve, evaluate = map(shlex.split, watch.commands(run, config))
    python = watch.from_root(sys.executable)
    assert serve == [python, "-m", "configs.serving.server", "--model", f"{run}/final", *flags]
    evaluation = [python, "tools/evaluate.py", f"{run}/config.toml", "--eval", "--base-url", "http://127.0.0.1:8000/v1"]
    assert evaluate == [*evaluation, "--model", f"{run}/final"]
    (run / "final" / "adapter_config.json").write_text('{"r": 20}')
    serve, evaluate = map(shlex.split, watch.commands(run, config))
    lora = ["--lora-modules", f"final={run}/final", "--enable-lora", "--max-lora-rank", "32"]
    assert serve == [python, "-m", "configs.serving.server", "--model", "base/model", *flags, *lora]
    assert evaluate == [*evaluation, "--model", "final"]
    # Below the repository's directory they are relative to it, but links are not followed.
    assert watch.from_root(ROOT / "outputs" / "run") == "outputs/run"
    assert watch.from_root(ROOT / ".venv" / "bin" / "python").endswith("bin/python")


@pytest.mark.real
@pytest.mark.parametrize("rank", some([0, 12], 0))
def test_the_printed_commands_run(rank, models, tmp_path, capsys):
    """Both as they are, by a shell in the repository's directory, but on a port of their own. The run made a model, or
    an adapter, for a task with tools."""
    model = models["tools"]
    served = ["inference.args.enable_auto_tool_choice=true", "inference.args.tool_call_parser=hermes"]
    cfg = load_config(write_run(tmp_path, model, 1, '{ kind = "tools" }'), ["eval.num_examples=4", *served])
    run = tmp_path / "run"
    if rank:
        shapes = {"A": (rank, 64), "B": (64, rank)}
        name = "model.layers.0.self_attn.q_proj.lora"
        zeros = {f"{name}_{end}.weight": torch.zeros(shape) for end, shape in shapes.items()}
        t = cfg.trainer._asdict() | {"lora_rank": rank, "lora_target_modules": ["q_proj"]}
        adapters.write(run / "final", zeros, t, str(model))
    else:
        shutil.copytree(model, run / "final")
    (run / "config.toml").write_text(to_toml(cfg))
    (run / "done").write_text("1")
    watch.main([str(run), "--once"])
    serve, evaluate = [row.removeprefix("result: ") for row in printed(capsys, "result: ")[1:]]
    port = free_port()
    server = start(["bash", "-c", f"exec {serve} --port {port}"], tmp_path / "log", TMPDIR="/tmp")
    try:
        wait_for(f"http://127.0.0.1:{port}", server, tmp_path / "log")
        command = evaluate.replace(":8000/", f":{port}/")
        done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=120)
    finally:
        stop(server)
    assert done.returncode == 0 and "lost to errors 0" in done.stdout, done.stdout + done.stderr


def test_the_steps_that_a_run_will_do_are_those_after_its_checkpoint(tmp_path, capsys):
    config = "[orchestrator]\nbatch_size = 4\nrollouts_per_example = 2\n[eval]\nevery = 0\n"
    run = write_steps(tmp_path / "run", range(8), config=config)
    (run / "checkpoints" / "step_000005").mkdir(parents=True)
    (run / "checkpoints" / "step_000008.tmp").mkdir()
    watch.Watch(run, "", True).begin()
    assert "steps 5 to 7, 4 rollouts each, in groups of 2, never evaluated; " in capsys.readouterr().out
    (run / "checkpoints" / "step_000008").mkdir()
    watch.Watch(run, "", False).begin()
    assert "m, all 8 steps are done, " in capsys.readouterr().out


def test_a_run_that_is_done_has_no_steps_to_do(tmp_path, capsys):
    """Also without a checkpoint, or with the last one before its end."""
    config = "[orchestrator]\nbatch_size = 4\nrollouts_per_example = 2\n[eval]\nevery = 0\n"
    run = write_steps(tmp_path, range(8), config=config)
    watch.main([str(run), "--once"])
    assert "all 8 steps are done, " in capsys.readouterr().out


@pytest.mark.parametrize("seconds, is_live, steps", [
    (4, True, [9, 17, 25, 33]),  # not more often than every 30 s
    (60, True, [4, 8, 12, 16, 20, 24, 28, 32, 36]),  # nor than at each tenth
    (60, False, []),  # nothing is left of it
    (0.1, True, []),
])  # fmt: skip
def test_the_time_left_is_told_now_and_then(seconds, is_live, steps, tmp_path, capsys):
    run = write_steps(tmp_path, [])
    (run / "config.toml").write_text("max_steps = 40\n")
    following = watch.Watch(run, "", is_live)
    append(run / "metrics.jsonl", [step_line(i, time=1e9 + i * seconds) for i in range(40)])
    following.look(False)
    rows = printed(capsys, "time: ")
    assert [int(re.match(r"time: (\d+) of 40 steps are done, ", row)[1]) for row in rows] == steps
    assert seconds != 60 or not steps or rows[0].endswith(" 36:00 left")
    assert watch.clock(3599.7) == "1:00:00" and watch.clock(59.2) == "0:59"


def test_half_a_line_of_its_own_is_cut_off_and_a_damaged_one_is_named(tmp_path):
    run = write_steps(tmp_path, range(3))
    watch.main([str(run), "--once"])
    whole = (run / "watch.jsonl").read_bytes()
    (run / "watch.jsonl").write_bytes(whole[:-9])
    watch.main([str(run), "--once"])
    assert (run / "watch.jsonl").read_bytes() == whole
    (run / "metrics.jsonl").write_text('{"step": 3, "vers\n')
    with pytest.raises(ValueError, match="metrics.jsonl: the line at byte 0 is damaged"):
        watch.main([str(run), "--once"])


def test_half_lines_wait_and_a_new_file_is_read_from_its_beginning(tmp_path):
    path = tmp_path / "some.jsonl"
    following = show.Lines(path)
    assert list(following.new()) == []
    path.write_text('{"a": 1}\n{"a": 2')
    assert list(following.new()) == [{"a": 1}]
    with open(path, "a") as f:
        f.write("2}\n")
    assert list(following.new()) == [{"a": 22}] and list(following.new()) == []
    (tmp_path / "new").write_text('{"a": 3}\n{"a": 4}\n{"a": 5}\n')  # longer than before
    os.replace(tmp_path / "new", path)
    assert [x["a"] for x in following.new()] == [3, 4, 5]


def test_a_batch_is_reported_when_it_is_complete(tmp_path):
    batches = watch.Batches(tmp_path)
    file = tmp_path / "rollouts.jsonl"
    (tmp_path / "batches").mkdir()
    for line in rollout_lines(0):
        append(file, [line])
        assert not list(batches.new(False))
    (tmp_path / "batches" / "step_000000.safetensors").touch()
    assert [(step, len(of)) for step, of in batches.new(False)] == [(0, 2)]
    append(file, rollout_lines(1) + rollout_lines(2))
    assert [(step, len(of)) for step, of in batches.new(False)] == [(1, 2)]
    assert [(step, len(of)) for step, of in batches.new(True)] == [(2, 2)]


def test_a_step_that_is_trained_again_keeps_what_its_rollouts_say(tmp_path):
    """Watch may look before the trainer has cut metrics.jsonl; rollouts.jsonl is not written again."""
    run = write_steps(tmp_path, range(3))
    watching = watch.Watch(run, "", True)
    watching.look(True)
    known = [line for line in lines(run / "watch.jsonl") if line["step"] == 2][-1]
    assert "rollout/distinct" in known
    again = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][2]
    watching.add_step(again | {"time": again["time"] + 100})
    assert lines(run / "watch.jsonl")[-1] == known | {"time": again["time"] + 100}


def test_a_gain_counts_from_the_first_evaluation(tmp_path, capsys):
    """eval.every may be set when a run is resumed."""
    watching = watch.Watch(write_steps(tmp_path, range(3)), "", True)
    for step, reward in ((50, 0.2), (60, 0.3)):
        watching.add_evaluation({"step": step, "env": "e", "reward/mean": reward, "rows": [reward, reward + 0.1]})
    assert watching.gains == {"e": "e: reward 0.300, gain +0.100 +- 0.000 in 10 steps"}
    assert capsys.readouterr().out.count("eval ") == 1


@pytest.mark.parametrize("name, file", [("run", "done"), ("run-replay-cispo", "final")])
def test_when_a_run_is_finished(name, file, tmp_path):
    """The launcher writes `done`, and a replay has none."""
    (tmp_path / name).mkdir()
    assert not show.is_finished(tmp_path / name)
    (tmp_path / name / file).touch()
    assert show.is_finished(tmp_path / name)


def test_a_run_may_have_replay_in_its_name(tmp_path):
    run = tmp_path / "math-replay-buffer"
    run.mkdir()
    (run / "rollouts.jsonl").touch()  # as the orchestrator does before the first step
    (run / "final").mkdir()
    assert not show.is_replay(run) and not show.is_finished(run)


def start_watch(run):
    command = [sys.executable, str(ROOT / "tools" / "watch.py"), str(run)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def num_watched(run):
    return len(list(show.Lines(run / "watch.jsonl").new()))


def wait_until(condition, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("is_done", some([True, False], 1))
def test_a_live_run_is_followed_until_it_is_done_or_sigterm(is_done, tmp_path):
    """What happened before a resumed run began is not reported again."""
    run = write_steps(tmp_path, range(6), is_done=False, config='tracker = "tensorboard"\n')
    process = start_watch(run)
    file = run / "tracker.json"
    wait_until(lambda: file.exists() and "metrics" in file.read_text())
    write_steps(run, range(6, 21), is_done)
    if not is_done:
        process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(file.read_text())["metrics"] == 21
    if is_done:
        assert re.findall(r"rollout of step (\d+):", out) == ["10", "15", "20"] and "check:" not in out
        assert [line["step"] for line in lines(run / "watch.jsonl")] == list(range(21))
        assert out.splitlines()[-1].startswith("time: ") and " of 15 s;" in out


def test_another_tracker_gets_all_of_a_run(tmp_path):
    run = write_steps(tmp_path, range(2))
    for name, sent in (("tensorboard", -1), ("tensorboard", 2), ("trackio", -1)):
        tracker = track.Tracker.__new__(track.Tracker)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(track.KINDS, name, lambda *_: None)
            tracker.__init__(name, run, {})
        assert tracker.sent.get("metrics", -1) == sent
        tracker.sent["metrics"] = 2
        tracker.write()


@pytest.mark.parametrize("tool", ["watch", "plot", "show"])
def test_a_wrong_directory_is_one_line_and_2(tool, tmp_path):
    command = [sys.executable, str(ROOT / "tools" / f"{tool}.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert f"{tmp_path} is no run directory" in done.stderr


# --- numbers that the run does not write ------------------------------------------------------------------------------


def test_kl_by_staleness_is_of_the_sequences_of_that_staleness(tmp_path):
    batch = tmp_path / "batches" / "step_000000.safetensors"
    batch.parent.mkdir()
    sequences = [s | {"staleness": i % 3, "trainable": i > 3} for i, s in enumerate(make_sequences(24))]
    save_batch(batch, sequences, {})
    rng = np.random.default_rng(0)
    parts = []
    expected = {0: [], 1: [], 2: []}
    for s in sequences:
        mask = np.array(s["mask"], bool)
        old_logp = np.array(s["old_logp"])
        log_r = rng.normal(0, 0.1 * (1 + s["staleness"]), len(mask))
        parts.append(np.where(mask, old_logp + log_r, 0))
        if s["trainable"]:
            expected[s["staleness"]] += [math.exp(x) - 1 - x for x in log_r[mask]]
    save_file({"logp": np.concatenate(parts).astype(np.float32)}, batch.with_stem("logp_000000"))
    found = watch.kl_by_staleness(tmp_path, 0)
    assert found.keys() == {f"policy/{kind}_staleness{n}" for kind in ("kl", "tokens") for n in range(3)}
    for staleness, kl in expected.items():
        assert found[f"policy/kl_staleness{staleness}"] == pytest.approx(np.mean(kl), rel=1e-3)
        assert found[f"policy/tokens_staleness{staleness}"] == len(kl)
    assert watch.kl_by_staleness(tmp_path, 1) == {}
    # A file of the former version.
    old = [{"env": "test", "age": s["staleness"], "trainable": s["trainable"]} for s in sequences]
    save_file(load_file(batch), batch, {"samples": json.dumps(old), "info": "{}"})
    assert watch.kl_by_staleness(tmp_path, 0) == found


@pytest.mark.parametrize("dropped", ["flat", "flat at reward 1"])  # the second is the former version's
def test_numbers_of_a_batch_and_of_each_environment_of_a_mix(dropped, tmp_path):
    """A batch of one environment has no numbers of each: they would be those of all."""
    run = write_steps(tmp_path, range(2))
    append(run / "rollouts.jsonl", rollout_lines(1, "other", (1.0, 1.0, None), dropped=dropped))
    watch.main([str(run), "--once"])
    first, second = lines(run / "watch.jsonl")
    assert not any(key.startswith("env/") for key in first)
    assert [first[f"reward/p{q}"] for q in (10, 50, 90)] == [pytest.approx(q / 100) for q in (10, 50, 90)]
    assert first["rollout/distinct"] == 0.5 and second["rollout/distinct"] == 0.4  # all say the same in groups of 2, 3
    expected = {"reward/mean": 1.0, "reward/std": 0.0, "reward/exact": 0.5, "rollout/num": 3, "group/flat": 1}
    for key, value in (expected | {"group/kept": 0, "rollout/turns": 1.0, "reward/p10": 1.0}).items():
        assert second[f"env/other/{key}"] == value, key
    assert second["env/task/reward/mean"] == 0.5 and second["env/task/group/kept"] == 1


def test_what_a_model_wrote_cannot_steer_the_terminal(capsys):
    (line,) = rollout_lines(9, rewards=(0.5,))
    line["completion"] = [{"role": "assistant", "content": "a\x1b[2J\nb" + "x" * 2000}]
    watch.show_rollout(9, [line])
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\\x1b[2J" in out and len(out) < 1000
    assert "reward 0.500 (exact 0.5), +0.000 against its group" in out
    assert all(row.startswith("rollout") for row in out.splitlines())


PAGE = """# HELP vllm:generation_tokens_total of something
vllm:generation_tokens_total{engine="0"} 1000.0
vllm:prefix_cache_queries_total{engine="0"} 400.0
vllm:prefix_cache_hits_total{engine="0"} 300.0
vllm:request_queue_time_seconds_sum{engine="0"} 5.0
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3"} 77.0
vllm:e2e_request_latency_seconds_sum{engine="0"} 50.0
vllm:num_preemptions_total{engine="0"} 2.0
"""


@pytest.mark.parametrize("train, wait, sync, queue, remedy", [
    (10, 8, 2, 5, "raise orchestrator.max_concurrent or max_staleness"),
    (10, 8, 2, 40, "raise inference.gpus"),
    (10, 2, 8, 5, "make steps longer"),
    (10, 2, 2, 5, "raise checkpoint.every"),
    (18, 1, 1, 40, "training is the limit"),
])  # fmt: skip
def test_where_the_time_goes(train, wait, sync, queue, remedy):
    seconds = {"step": 20.0, "train": train, "wait_batch": wait, "sync": sync, "checkpoint": 20 - train - wait - sync}
    page = PAGE.replace('seconds_sum{engine="0"} 5.0', f'seconds_sum{{engine="0"}} {queue}')
    text = advice.where_time_goes(seconds, [page], [page, page, page])
    assert text.startswith(f"time: the trainer trained {5 * train} %, waited {5 * wait} % for rollouts")
    assert f"of 20 s; servers: 100 tokens/s, {2 * queue} % of" in text
    assert "4 preemptions, 75 % of prompts cached; " in text and remedy in text
    assert remedy in advice.where_time_goes(seconds, [""], [""]) or queue == 40


# --- pictures ---------------------------------------------------------------------------------------------------------


def test_curves_of_runs_and_replays(tmp_path):
    import matplotlib.image

    run = write_steps(tmp_path / "run", range(12))
    other = tmp_path / "run-replay-grpo"
    empty = tmp_path / "empty"
    for name in ("staleness", "age"):  # the second is the former version's
        kl = {f"policy/kl_{name}0": 1e-3, f"policy/kl_{name}1": 1e-2}
        assert plot.by_staleness(kl) == {0: 1e-3, 1: 1e-2}
    append(run / "watch.jsonl", [kl | {"step": i, "reward/p10": 0.1, "reward/p90": 0.9} for i in range(12)])
    other.mkdir()
    empty.mkdir()
    append(other / "metrics.jsonl", [step_line(i, **{"reward/mean": None, "time/sync_s": None}) for i in range(4)])
    for runs, only_evaluation in (([run, other], False), ([other, run], True), ([empty], False)):
        DRAW(runs, tmp_path / "out.png", only_evaluation)
        pixels = matplotlib.image.imread(tmp_path / "out.png")[..., :3]
        assert pixels.std() > 0.01  # not blank
    assert len({(str(s["linestyle"]), s["marker"]) for s in plot.STYLES}) == len(plot.STYLES)  # without color, too


def test_each_curve_has_its_own_interval():
    line = {"reward/mean": 0.5, "rows": [0.0, 1.0, None, 0.5, 0.5], "exact": 0.5, "n": 10}
    half = pytest.approx(1.96 * math.sqrt(0.5 / 3 / 4))
    assert plot.interval(line, "reward/mean") == (0.5, half, half)
    value, low, high = plot.interval(line, "exact")
    assert (round(value - low, 4), round(value + high, 4)) == (0.2366, 0.7634)  # the textbook's 5 of 10
    for n in (12, 100, 128, 160, 500):
        for value in (0.0, 1.0):  # the ends of the scale
            assert min(plot.interval({"exact": value, "n": n}, "exact")[1:]) >= 0


def test_the_gain_is_paired_and_over_the_rows_that_both_have():
    found = eval_statistics([1.0, 0.5, 0.5, 1.0], [0.0, 0.0, 0.5, None])
    assert found["gain"] == pytest.approx(0.5) and found["gain_ci95"] == pytest.approx(1.96 * 0.5 / math.sqrt(3))
    assert eval_statistics([1.0], [0.0])["gain"] is None and eval_statistics([0.5, 0.5], [0.5, 0.5])["gain_ci95"] == 0
    assert eval_statistics([0.5, 0.7]) == {"ci95": pytest.approx(1.96 * 0.1)}  # deviation 0.1 * sqrt(2), of 2 rows
    assert eval_statistics([0.5, None]) == {"ci95": None}  # of one row nothing is known
    assert show.with_interval(0.5, None) == "0.500" and show.with_interval(0.5, 0.1) == "0.500 +- 0.100"


# --- trackers ---------------------------------------------------------------------------------------------------------


def tracked(tmp_path, name):
    """watch.py on a finished run of 12 steps."""
    run = write_steps(tmp_path / "some run", range(12), config=f'tracker = "{name}"\n')
    watch.main([str(run)])
    sent = json.loads((run / "tracker.json").read_text())
    assert (sent["metrics"], sent["eval/task"], sent["rollouts"]) == (12, 10, 10)
    return run


def test_tensorboard_gets_it_all(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tracked(tmp_path, "tensorboard")
    append(run / "metrics.jsonl", [step_line(12)])
    watch.main([str(run)])  # sends what is new, and no more
    found = EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    assert [(e.step, round(e.value, 3)) for e in found.Scalars("reward/mean")] == [(v, 0.5) for v in range(1, 14)]
    assert [(e.step, round(e.value, 3)) for e in found.Scalars("eval/task/reward/mean")] == [(0, 0.0), (10, 1.0)]
    table = [e.tensor_proto.string_val[0].decode() for e in found.Tensors("rollouts/text_summary")]
    assert [e.step for e in found.Tensors("rollouts/text_summary")] == [1, 11]  # as the metrics of batches 0 and 10
    assert len(table) == 2 and "how \\| many" in table[0] and "so<br>many" in table[0]
    assert "geheim" not in str(found.Tensors("config/text_summary"))


def test_wandb_gets_it_all_offline(tmp_path, monkeypatch):
    import wandb

    logged = []
    send = wandb.Run.log

    def log(self, values):
        logged.append(values)
        send(self, values)

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(wandb.Run, "log", log)
    run = tracked(tmp_path, "wandb")
    rewards = [(values["version"], values["reward/mean"]) for values in logged if "reward/mean" in values]
    assert rewards == [(v, 0.5) for v in range(1, 13)]
    assert sum("eval/task/reward/mean" in values for values in logged) == 2
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    assert b"reward/mean" in file.read_bytes() and b"geheim" not in file.read_bytes()
    assert len(list(run.glob("wandb/offline-run-*/files/media/table/rollouts*.json"))) == 2


def test_what_wandb_may_have_lost_is_sent_again(tmp_path, monkeypatch):
    """Killed before it could finish; the next one has its name."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = write_steps(tmp_path / "run", range(6), is_done=False, config='tracker = "wandb"\n')
    process = start_watch(run)
    wait_until(lambda: num_watched(run) == 6)
    process.kill()
    process.communicate()
    sent = json.loads((run / "tracker.json").read_text())
    assert sent.keys() == {"id", "tracker"}
    watch.main([str(run), "--once"])
    assert json.loads((run / "tracker.json").read_text()) == sent | {"metrics": 6, "eval/task": 0, "rollouts": 0}


def test_trackio_gets_it_all_offline(tmp_path):
    """In its own process: trackio reads its place when it is imported."""
    run = write_steps(tmp_path / "some run", range(12))
    env = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, str(ROOT / "tools" / "watch.py"), str(run), "--once", "--tracker", "trackio"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "warning:" not in done.stdout, done.stdout + done.stderr
    (file,) = (tmp_path / "trackio").glob("*.db")
    found = [json.loads(x) for (x,) in sqlite3.connect(file).execute("select metrics from metrics")]
    assert sum("reward/mean" in x for x in found) == 12 and sum("eval/task/reward/mean" in x for x in found) == 2
    traces = sqlite3.connect(file).execute("select count(*) from traces").fetchone()[0]
    assert traces >= 2


def test_a_tracker_that_fails_leaves_the_rest(tmp_path, capsys, monkeypatch):
    from tools import track

    class Broken:
        def __init__(self, *_):
            raise ConnectionError("no route")

    monkeypatch.setitem(track.KINDS, "wandb", Broken)
    run = write_steps(tmp_path, range(12), config='tracker = "wandb"\n')
    watch.main([str(run)])
    out = capsys.readouterr().out
    (row,) = [row for row in out.splitlines() if row.startswith("warning: ")]
    assert "the tracker failed (ConnectionError: no route)" in row and row.endswith("--once --tracker wandb")
    assert "time: " in out and (run / "curves.png").exists()


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def test_an_advantage_that_is_shown_is_against_the_group_of_its_own_environment(capsys):
    """Indices of two environments are alike."""
    watch.show_rollout(0, rollout_lines(0) + rollout_lines(0, "other", (5.0, 5.0)))
    assert "reward 0.000 (exact 0.5), -0.500 against its group" in capsys.readouterr().out


def test_of_an_environment_all_rollouts_are_counted_and_a_prompt_too_long_is_no_error():
    lines = rollout_lines(0) + rollout_lines(1, rewards=(1.0,), dropped="flat", truncated=True)
    lines += rollout_lines(2, rewards=(None,), dropped="long", truncated=True)
    numbers = watch.numbers_of_environment(lines)
    assert numbers["rollout/truncated"] == 0.5 and numbers["rollout/errors"] == 0 and numbers["group/long"] == 1


def test_curves_are_drawn_at_their_versions(tmp_path):
    run = write_steps(tmp_path / "run", range(3))
    (run / "eval.jsonl").write_text((run / "eval.jsonl").read_text().replace("exact", "correct"))
    append(run / "watch.jsonl", [{"step": i, "reward/p10": i / 10, "reward/p90": 0.9} for i in range(3)])
    metrics, _ = plot.read(run)
    assert [line["reward/p10"] for line in metrics] == [0.0, 0.1, 0.2]
    evaluation, reward, _, entropy, _, seconds = plot.draw_all([run]).axes
    for axis, height in ((reward, 0.5), (entropy, 0.4)):
        (line,) = axis.lines
        assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([1, 2, 3], [height] * 3)
    assert evaluation.get_legend_handles_labels()[1] == ["run: correct"]
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in seconds.collections]
    assert tops == pytest.approx([0.1, 0.8, 1.0, 1.0])  # waiting, training, syncing, saving: one above the other
