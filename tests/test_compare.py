"""tools/compare.py: a study that is killed and goes on, a run that ends by itself, what may be claimed, mistakes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import BASE, ROOT, lines

from configs import to_toml
from configs.runtime.role import CONFIG, RunError
from launch import descendants
from tools import compare, comparison

BROKEN = "def loss(micro, logp_N, entropy_N):\n    return logp_N * float('nan'), {}\n"
ARMS = ["--arm", "plain: trainer.loss=grpo", "--arm", "broken: trainer.loss=broken:loss"]
STUDY = [*ARMS, "max_steps=4", "eval.every=2", "eval.num_examples=16", "checkpoint.every=3"]
STUDY += ["orchestrator.max_staleness=0", "orchestrator.sampling.max_tokens=6"]
ENDED = "exit code 5: no finite gradient, or a KL above 1, in three consecutive steps"


@pytest.fixture
def toml(tmp_path, models):
    (tmp_path / "study.toml").write_text(BASE.format(model=models["untied"]))
    (tmp_path / "broken.py").write_text(BROKEN)
    return tmp_path / "study.toml"


def start(*args):
    """Starts compare.py with the fake server, in a process group of its own. Returns its Popen."""
    env = os.environ | {"SERVER": f"{sys.executable} {ROOT / 'tests' / 'fake_vllm.py'}"}
    env |= {"PATH": f"{Path(sys.executable).parent}:{env['PATH']}"}
    command = [sys.executable, str(ROOT / "tools" / "compare.py"), *map(str, args)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, **pipes, env=env, start_new_session=True)


def finish(process, code=0, timeout=400):
    said, _ = process.communicate(timeout=timeout)
    assert process.returncode == code, said
    return said


def files(out):
    """The table and the lines, without what is a time."""
    table = (out / "compare.md").read_text()
    found = lines(out / "compare.jsonl")
    for line in found:
        assert line.pop("time")["seconds"] > 0
    return table, found


def wait_for_version(run, version):
    deadline = time.monotonic() + 180
    file = run / "version"
    while not file.exists() or int(file.read_text() or -1) < version:
        assert time.monotonic() < deadline
        time.sleep(0.05)


# --- whole studies ----------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("num_seeds", [1, 3])
def test_a_study_that_is_killed_gives_the_same_table(tmp_path, toml, num_seeds):
    command = [toml, *STUDY, "--seeds", num_seeds, "--jobs", 2, "--threshold", 2]
    whole = tmp_path / "whole"
    said = finish(start(*command, "--out", whole))
    table, found = files(whole)
    assert table in said and "trying once more" not in said
    # 1. One arm ended by itself, which is a row of the table and no crash.
    ended = [line for line in found if line["arm"] == "broken"]
    assert [line["exit"] for line in found] == [0] * num_seeds + [5] * num_seeds
    assert all(line["steps"] == 2 and line["cause"] in f"{ENDED}; step 2" for line in ended)
    assert f"broken, seed 0 ended at step 2 of 4, {ENDED}" in table and f"| broken | {num_seeds} | " in table
    # 2. All arms begin with the same evaluation, each seed with its own.
    firsts = {}
    for line in found:
        first = lines(whole / f"{line['arm']}-seed{line['seed']}" / "eval.jsonl")[0]
        firsts.setdefault(line["seed"], []).append(first["rows"])
    assert all(one == other for one, other in firsts.values())
    assert len({str(rows) for rows, _ in firsts.values()}) == num_seeds
    # 3. Killed again and again, it goes on to the same table.
    parts = [*command, "--out", tmp_path / "parts"]
    process = start(*parts)
    wait_for_version(tmp_path / "parts" / "plain-seed0", 2)
    process.kill()  # its runs end with it
    if num_seeds > 1:
        process = start(*parts)
        wait_for_version(tmp_path / "parts" / "plain-seed0", 3)
        for pid in [*descendants(process.pid), process.pid]:
            os.kill(pid, signal.SIGKILL)
        process = start(*parts)
        wait_for_version(tmp_path / "parts" / "plain-seed1", 1)
        children = descendants(process.pid)
        process.terminate()
        assert "interrupted: give the same command again" in finish(process, 143)
        assert children and not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    finish(start(*parts))
    assert files(tmp_path / "parts") == (table, found)
    # 4. What is finished is not run again, and a changed study is refused.
    assert f"{2 * num_seeds} runs, {2 * num_seeds} of them finished" in finish(start(*parts))
    assert [line["time"]["starts"] > 1 for line in lines(tmp_path / "parts" / "compare.jsonl")][0]
    said = finish(start(*parts, "trainer.learning_rate=1e-9"), CONFIG)
    assert "belongs to another study: trainer.learning_rate was 0.001, now 1e-09" in said


@pytest.mark.slow
@pytest.mark.long
def test_the_training_side_alone(tmp_path, toml, batches):
    command = [toml, "--arm", "trainer.loss=grpo", "--arm", "trainer.loss=cispo", "--seeds", 1]
    command += ["--out", tmp_path / "out"]
    said = finish(start(*command, "--replay", batches(2)))
    assert re.search(r"\| grpo \| 1 \| -?\d\.\d+ \| \d\.\d+ \| \d\.\d+ \|", said) and "done" in said
    record = tmp_path / "out" / "grpo-seed0-replay-grpo" / "compare.json"
    record.write_text(record.read_text().replace('"exit": 0', '"exit": null'))  # killed before it was written
    finish(start(*command, "--replay", tmp_path / "saved"))
    shutil.copytree(tmp_path / "saved", tmp_path / "others")
    said = finish(start(*command, "--replay", tmp_path / "others"), CONFIG)
    assert f"--replay was {tmp_path}/saved, 2 batches, now {tmp_path}/others, 2 batches" in said


# --- mistakes, in words -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, message", [
    (["--arm", "trainer.los=grpo"], "arm 'grpo': key 'trainer.los' = 'grpo': unknown; the nearest .*trainer.loss"),
    (["--arm", "trainer.loss=nowhere:f"], "arm 'f': key 'trainer.loss' = 'nowhere:f': there is no module"),
    (["--arm", "", "--arm", "trainer.loss=cispo"], "arms 'unchanged' and 'cispo' are equal: if one is a control"),
    (["--arm", "a: trainer.loss=grpo", "--arm", "a:"], "two arms are called 'a'"),
    (["--arm", "a/b:"], "arm 'a/b': use letters"),
    (["--arm", "a: trainer.loss=grpo trainer.loss_args.cap=1"], "arm 'a': trainer.loss_args = {'cap': 1}: got an un"),
    (["--arm", "model='x"], "No closing quotation"),
    (["--arm", "seed=3"], "arm 'seed=3': seed=3: every run has its own seed"),
    (["--arm", "", "--seeds", "0"], "--seeds 0: must be at least 1"),
    ([], "--arm once or more"),
    (["--runs", "a=b"], "give no config.toml, --arm or --replay"),
    (["--arm", "", "--replay", "nowhere"], "nowhere: no step_"),
])  # fmt: skip
def test_a_mistake_is_named_before_anything_starts(tmp_path, toml, args, message):
    with pytest.raises(RunError, match=message) as error:
        compare.main([str(toml), *args, "--out", str(tmp_path / "out")])
    assert error.value.code == CONFIG and not (tmp_path / "out").exists()


def one_run(toml, out):
    """The run of a study with one arm and one seed, and the study's command."""
    (run,) = compare.make_runs(str(toml), compare.make_arms(str(toml), [""], []), [], 1, out, None)
    return run, [str(toml), "--arm", "", "--seeds", "1", "--out", str(out)]


def test_a_changed_file_and_other_commits(tmp_path, toml, monkeypatch):
    """A run is started as the study was when it began, or not at all; what computed it is recorded at every start."""
    run, _ = one_run(toml, tmp_path / "out")
    for i in range(2):
        monkeypatch.setattr(compare, "provenance", lambda: {"commit": f"c{i}", "versions": {"torch": f"2.{i}"}})
        compare.begin(run, str(toml), None)
    record = compare.read_record(run)
    assert (record["commit"], record["versions"], record["starts"]) == ("c0, c1", {"torch": "2.0, 2.1"}, 2)
    toml.write_text(toml.read_text() + "[trainer]\nlearning_rate = 0.05\n" if "[trainer]" not in toml.read_text() else
                    toml.read_text().replace("[trainer]", "[trainer]\nweight_decay = 0.05"))  # fmt: skip
    with pytest.raises(RunError, match="has changed since this study began, in trainer"):
        compare.begin(run, str(toml), None)


def test_a_run_that_is_killed_twice_ends_the_study(tmp_path, toml, monkeypatch, capsys):
    """It is no result. A run that trained nothing leaves no record, so that its arm may be mended."""
    run, command = one_run(toml, tmp_path / "out")

    def start(run, *args):
        (run.path / "logs" / "launch.log").write_text("[launch] step 12\n")
        return subprocess.Popen(["bash", "-c", "kill -9 $$"])

    monkeypatch.setattr(compare, "start", start)
    with pytest.raises(SystemExit) as error:
        compare.main(command)
    assert error.value.code == 137 and not compare.read_record(run)
    assert "trying once more" in capsys.readouterr().out


def test_a_table_is_not_written_over_by_a_smaller_study(tmp_path, toml):
    run, command = one_run(toml, tmp_path / "out")
    compare.begin(run._replace(path=tmp_path / "out" / "other-seed0"), str(toml), None)
    with pytest.raises(RunError, match="out has other runs, other-seed0, which the table would lose"):
        compare.main(command)


def test_two_at_once_on_one_directory(tmp_path, toml):
    compare.lock(tmp_path / "out")
    said = finish(start(toml, "--arm", "", "--out", tmp_path / "out"), CONFIG)
    assert "out is in use by another compare.py: wait until it ends" in said


@pytest.mark.parametrize("text, name", [
    ("trainer.loss=losses:dppo", "dppo"), ("trainer.learning_rate=1e-4", "learning_rate=1e-4"), ("", "unchanged"),
    ("trainer.loss=grpo trainer.use_lora=true", "grpo-use_lora=true"), ("A: trainer.loss=losses:dppo", "A"),
    ("control:", "control"), ("'trainer.loss_args={ ratio_cap = 4.0 }'", "loss_args=_ratio_cap_=_4.0_"),
])  # fmt: skip
def test_names_of_arms(toml, text, name):
    (arm,) = compare.make_arms(str(toml), [text], [])
    assert arm.name == name


# --- statistics -------------------------------------------------------------------------------------------------------


def test_intervals_by_hand():
    mean, half = comparison.interval([0.1, 0.2, 0.4, 0.5])
    assert mean == pytest.approx(0.3) and half == pytest.approx(3.182 * 0.18257 / 2, abs=1e-4)  # t(0.975, 3) = 3.182
    assert comparison.interval([0.5]) == (0.5, None)
    assert comparison.p_value([1.0, 2.0, 3.0]) == pytest.approx(0.0742, abs=1e-4)  # t = 2 / 0.577, 2 degrees of freedom
    assert comparison.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_an_interval_covers_the_mean_as_often_as_it_says():
    draws = np.random.default_rng(0).normal(0.5, 0.1, (1000, 5))
    covered = [abs(mean - 0.5) <= half for mean, half in map(comparison.interval, draws)]
    assert 0.93 <= np.mean(covered) <= 0.97
    claimed = [comparison.p_value(draw - 0.5) < 0.05 for draw in draws]
    assert claimed == [not is_in for is_in in covered]


def test_what_is_claimed():
    base = {seed: 0.5 + seed / 10 for seed in range(5)}  # seeds differ more than arms do
    better = {seed: score + 0.05 + seed / 1000 for seed, score in base.items()}
    (said,) = comparison.compare_pairs({"a": base, "b": better})
    assert re.fullmatch(r"\*\*b is better than a\*\* by 0.052 \+- 0.002 \(5 seeds, p = .*\)", said)
    (said,) = comparison.compare_pairs({"a": base, "same": base})
    assert said == "a and same: no difference can be claimed (0.000 +- 0.000; 5 seeds, p = 1)"
    (said,) = comparison.compare_pairs({"a": {0: 0.0, 1: 0.0}, "b": {0: 1.0, 1: 1.0}})
    assert said == "a and b: all 2 differences are -1.000, which gives no interval"
    (said,) = comparison.compare_pairs({"a": {0: 0.5}, "b": {0: 1.0, 1: 1.0}})
    assert said == "a and b: one run shows nothing (-0.500)"
    assert comparison.compare_pairs({"a": {0: 0.5}, "b": {1: 1.0}}) == ["a and b: no seed has a score in both"]
    assert len(comparison.compare_pairs(dict.fromkeys("abcd", base))) == 6
    assert len(comparison.compare_pairs(dict.fromkeys("abcde", base))) == 4
    # What could be claimed of one pair is not claimed of six.
    uneven = {seed: score + 0.01 * seed for seed, score in base.items()}
    (said,) = comparison.compare_pairs({"a": base, "d": uneven})
    assert "**d is better than a** by 0.020 +- 0.020" in said
    assert "better" not in str(comparison.compare_pairs(dict.fromkeys("abc", base) | {"d": uneven}))


def test_nothing_is_claimed_of_the_runs_that_are_left():
    """Those that failed may have been the worse ones."""
    base = {seed: 0.5 + seed / 10 for seed in range(5)}
    left = {seed: None if seed < 2 else score + 0.1 + seed / 1000 for seed, score in base.items()}
    (said,) = comparison.compare_pairs({"a": base, "b": left})
    assert said.startswith("a and b: nothing can be claimed, 2 more seeds lack a score (-0.103 +- 0.002; 3 seeds")
    (said,) = comparison.compare_pairs({"a": base, "b": {seed: score for seed, score in left.items() if score}})
    assert "**b is better than a**" in said  # they were not asked for
    (said,) = comparison.compare_pairs({"a": {0: 0.1 + 0.2, 1: 0.5}, "b": {0: 0.3, 1: 0.5}})
    assert "no difference can be claimed" in said  # 4e-17


def test_what_chance_does_is_no_collapse():
    rows = np.random.default_rng(0).normal(0.55, 0.3, (200, 2, 100))  # two evaluations of the same policy
    num = 0
    for pair in rows:
        evals = [{"env": "a", "step": i, "rows": list(x), "reward/mean": x.mean()} for i, x in enumerate(pair)]
        num += compare.figures([], evals, 1, 1, 2)[0]["collapsed"]
    assert num <= 12  # of 200: 1 in 40 is expected
    assert not compare.is_collapsed([-1.0, 0.0, -0.01], -0.01, 0.0)  # half of a best score of 0
    assert compare.is_collapsed([0.5, 0.9, 0.44], 0.44, 0.1) and compare.is_collapsed([0.5, 0.6, 0.39], 0.39, 0.1)


def test_evaluations_of_several_environments():
    """They may be at different versions, and the last round may lack one. One that came too late, at 57 instead of 40,
    is made up for when the run is resumed."""
    steps = {"a": (0, 20, 40, 60), "b": (0, 21, 57, 41)}
    evals = []
    for env, found in steps.items():
        for due, step in zip((0, 20, 40, 60 if env == "a" else 40), found):
            evals.append({"env": env, "step": step, "due": due, "reward/mean": step / 100, "rows": [0.0]})
    _, points = compare.figures([], evals, 2, 60, 2)
    assert points == [(0, 0.0), (21, pytest.approx(0.205)), (41, pytest.approx(0.405))]
    assert compare.figures([], evals[:4], 2, 60, 2)[1] == []  # b was never evaluated
    assert comparison.small_cell([9.5e-5, 9.5e-5]) == "9.5e-05, equal in all runs"
    assert comparison.small_cell([1e-4, 3e-4]) == "0.0002 +- 0.0013"


# --- runs that are there already --------------------------------------------------------------------------------------


def write_finished(path, cfg, scores, is_done=True):
    """Writes the directory of a run of 20 steps of one second each, with an evaluation every ten."""
    path.mkdir()
    (path / "config.toml").write_text(to_toml(cfg))
    evals = [{"step": 10 * i, "env": "reverse_text", "reward/mean": x, "rows": [x] * 3} for i, x in enumerate(scores)]
    steps = [{"version": i + 1, "time/step_s": 1.0, "policy/kl_sampler": 1e-3} for i in range(20)]
    metrics = [line | {"policy/entropy": 2.0 - i / 40} for i, line in enumerate(steps)]
    for name, found in (("eval", evals), ("metrics", metrics)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    if is_done:
        (path / "done").write_text("20\n")


def test_runs_that_are_there_already(tmp_path, make_cfg, capsys):
    for seed in range(3):
        good = make_cfg("max_steps=20", f"seed={seed}", "trainer.loss=grpo")
        write_finished(tmp_path / f"good-{seed}", good, [0.3, 0.8 + seed / 100, 0.9 + seed / 100])
        bad = make_cfg("max_steps=20", f"seed={seed}", f"trainer.learning_rate={'1e-5' if seed else '2e-5'}")
        write_finished(tmp_path / f"bad-{seed}", bad, [0.3, 0.7, 0.2 + seed / 100], is_done=seed < 2)
    bad_runs = [str(tmp_path / f"bad-{seed}") for seed in range(3)] + [f"{tmp_path}/bad-*"]  # each counts once
    compare.main(
        ["--runs", f"good={tmp_path}/good-*", f"bad={bad_runs[0]}", *bad_runs[1:], "--out", str(tmp_path / "out")]
    )
    table = (tmp_path / "out" / "compare.md").read_text()
    assert table in capsys.readouterr().out and (tmp_path / "out" / "compare.png").stat().st_size > 10_000
    assert "| good | 3 | 0.910 +- 0.025 | 10 (3 of 3) | 10 (3 of 3) | 0.708 | 0.001 | 0.762 | 0 | 0 |" in table
    assert "| bad | 2 | 0.205 +- 0.064 | - (0 of 2) | - (0 of 2) | 0.476 | 0.001 | 0.762 | 2 | 0 |" in table
    assert "- good and bad: nothing can be claimed, 1 more seeds lack a score (0.700 +- 0.000; 2 seeds, p = 1)" in table
    assert "Keys in which runs differ: trainer.learning_rate, trainer.loss." in table
    assert "Warning: runs of bad differ among themselves in trainer.learning_rate." in table
    assert "bad, seed 2 is not finished: it has 20 of 20 steps, and is in nothing above." in table
    assert [line["exit"] for line in lines(tmp_path / "out" / "compare.jsonl")] == [0, 0, 0, 0, 0, None]
    with pytest.raises(RunError, match="--runs a=.*: no run directory"):
        compare.main(["--runs", f"a={tmp_path}/none-*"])
    with pytest.raises(RunError, match="a: both .*good-0 and .*bad-0 have seed 0"):
        compare.main(["--runs", f"a={tmp_path}/good-0", f"{tmp_path}/bad-0"])


def test_training_rewards_where_there_are_no_evaluations():
    metrics = [{"version": i + 1, "reward/mean": i / 20, "time/step_s": 0.5} for i in range(20)]
    found, points = compare.figures(metrics, [], 1, 20, 0.5)
    assert found["score"] == pytest.approx(0.925) and points[0] == (1, 0.0) and not found["has_evaluations"]
    assert found["steps_to_threshold"] == 11 and found["time"]["seconds_to_threshold"] == 5.5
    nothing, points = compare.figures([], [], 1, 20, 0.5)
    assert nothing["score"] is None and points == [] and nothing["kl"] is None


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def test_of_five_arms_the_first_is_compared_with_each():
    said = comparison.compare_pairs({arm: {0: 0.5} for arm in "abcde"})
    assert [text[:7] for text in said] == ["a and b", "a and c", "a and d", "a and e"]


def test_a_run_that_never_gets_there_is_later_than_all_others():
    cells = [comparison.time_cell(values) for values in ([4, None, None], [4, 6, None])]
    assert cells == ["- (1 of 3)", "6 (2 of 3)"]


def test_a_run_that_ended_keeps_its_last_score():
    points = [(0, 0.2), (10, 0.6)]
    assert compare.area(points, 20) == pytest.approx(0.5)  # 0.4 on average to step 10, then 0.6
    assert [comparison.held(points, step) for step in (0, 9, 10, 20)] == [0.2, 0.2, 0.6, 0.6]


def test_a_runs_margin_is_over_the_rows_of_all_environments_and_its_lost_rollouts_are_the_last_evaluations():
    about = {"reward/mean": 0.5, "step": 0, "rows": [0.0, 0.0]}
    rounds = [[about | {"env": env, "errors": errors} for env in "ab"] for errors in (0, 1)]
    rounds[1][0] |= {"rows": [0.0, 1.0]}
    assert compare.row_margin(rounds) == pytest.approx(1.96 * 0.5 / 2)  # deviation 1/2, of 4 rows
    steps = [{"version": i, "policy/kl_sampler": kl} for i, kl in enumerate((0.01, 0.02, 0.9))]
    evals = [line | {"due": i} for i, pair in enumerate(rounds) for line in pair]
    found, _ = compare.figures(steps, evals, 2, 3, 2)
    assert found["lost"] == 2 and found["kl"] == 0.02  # the median: one step may be far off
