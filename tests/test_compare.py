"""tools/compare.py: studies that are killed and go on, runs that end early, numbers of runs, what may be claimed."""

import glob
import itertools
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import BASE, ROOT, append, having, lines, wait_until

from rolemodel.role import ConfigError
from tools import compare, microscope

# In the place of launch.sh: a run of 20 steps whose last score is 0.5 + learning_rate + seed / 10. With a weight decay
# it ends with that exit code, with a beta it dies at its first start, with max_steps = 7 it only ends at its third.
LAUNCH = """
import json, sys, time
from pathlib import Path
from rolemodel.config import load_config, to_toml
cfg = load_config(sys.argv[1], sys.argv[2:])
run = Path(cfg.run.output_dir, cfg.run.run_name)
num = len([*run.glob("start*")])
(run / f"start{num}").touch()
time.sleep(600 if cfg.run.max_steps == 7 and num < 2 else 0)
(run / "config.toml").write_text(to_toml(cfg))
last = 0.5 + cfg.trainer.learning_rate + cfg.run.seed / (10 + cfg.trainer.warmup_steps)
evals = [{"step": 20 * i, "env": "e", "reward/mean": x, "rows": [x, x], "errors": 0} for i, x in enumerate((0.2, last))]
for name, lines in (("eval", evals), ("metrics", [{"step": 0}])):
    (run / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
sys.exit(3 if cfg.trainer.beta and num == 0 else int(cfg.trainer.weight_decay))
"""
LOSSES = "LOSSES = dict.fromkeys(map(str, (1, 2)))\n"  # of another trainer.py
GOOD = ["--arm", "low: trainer.learning_rate=0.1", "--arm", "high: trainer.learning_rate=0.2"]


@pytest.fixture
def study(tmp_path, models, monkeypatch):
    """study(*args) -> the lines of compare.jsonl: main() with LAUNCH."""
    (tmp_path / "launch.py").write_text(LAUNCH)
    (tmp_path / "launch.sh").write_text(f'exec {shlex.join([sys.executable, f"{tmp_path}/launch.py"])} "$@"\n')
    (tmp_path / "it.toml").write_text(BASE.format(model=models["untied"]))
    monkeypatch.setattr(compare, "ROOT", tmp_path)

    def go(*args):
        compare.main([f"{tmp_path}/it.toml", "--out", f"{tmp_path}/out", "max_steps=20", "eval.every=10", *args])
        return lines(tmp_path / "out" / "compare.jsonl")

    return go


def test_a_study(study, tmp_path):
    bad = ["--arm", "ends: trainer.weight_decay=5", "--arm", "dies: trainer.beta=0.1"]
    found = study(*GOOD, *bad, "--seeds", "2", "--jobs", "2")
    assert [line["exit"] for line in found] == [0, 0, 0, 0, 5, 5, 0, 0]
    assert [line["score"] for line in found[:4]] == pytest.approx([0.6, 0.7, 0.7, 0.8])
    again = {path.parent.name for path in tmp_path.glob("out/*/start1")}
    assert again == {"dies-seed0", "dies-seed1"} and not any(tmp_path.glob("out/*/start2"))
    text = (tmp_path / "out" / "compare.md").read_text()
    assert "| low | 2 | 0.650 +- 0.635 |" in text  # t(0.975, 1) = 12.7
    assert "- low and high: no difference can be claimed (-0.100; 2 seeds, p = 1)" in text  # equal ones: no interval
    # What has ended is not run again, and more seeds may follow. A study that has changed is another one.
    assert len(study(*GOOD, "--seeds", "3")) == 6 and not any(tmp_path.glob("out/low*/start1"))
    with pytest.raises(ConfigError, match="low-seed0 belongs to another study: .*trainer.learning_rate=0.3"):
        study("--arm", "low: trainer.learning_rate=0.3")
    (tmp_path / "it.toml").write_text((tmp_path / "it.toml").read_text() + "weight_decay = 0.1\n")
    with pytest.raises(ConfigError, match="it.toml, or --until-decided, has changed"):
        study(*GOOD)


def test_arms_that_are_code(study, tmp_path):
    def git(*words):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    launch, trainer, other = (tmp_path / f"{name}.py" for name in ("launch", "trainer", "orchestrator"))
    trainer.write_text(LOSSES)
    other.write_text(LOSSES.replace("LOSSES", "ADVANTAGES"))
    (tmp_path / "launch.sh").write_text(f'exec "{sys.executable}" launch.py "$@"\n')
    (tmp_path / ".cache" / "toy").mkdir(parents=True)
    git("init", "-qb", "main")
    git("add", "*.py", "launch.sh")
    git("commit", "-qm", "main")
    git("checkout", "-qb", "branch")
    trainer.write_text("LOSSES = {'mine': 1}")
    launch.write_text(LAUNCH.replace("0.5 +", "0.6 +"))
    git("commit", "-qam", "branch")
    git("checkout", "-q", "main")
    launch.write_text(LAUNCH.replace("0.5 +", "0.7 +"))
    (tmp_path / "it.patch").write_text(git("diff"))
    launch.write_text(LAUNCH.replace("0.5 +", "0.8 +"))
    command = [
        "--arm",
        "base: @main",
        "--arm",
        "mine: @branch trainer.loss=mine trainer.script=trainer.py",
        "--arm",
        f"it: @{tmp_path}/it.patch",
    ]
    found = study(*command, "--arm", "dirty:", "--seeds", "1")
    assert [line["score"] for line in found] == pytest.approx([0.501, 0.601, 0.701, 0.801])
    text = (tmp_path / "out" / "compare.md").read_text()
    assert text.count('trainer.loss = "cispo"') == 3 and 'trainer.loss = "mine"' in text and "Warning" not in text
    assert "\nmax_steps = 20\n" in text and text.count("-last = 0.5") == 2
    assert (tmp_path / "out" / "code" / "mine" / ".cache" / "toy").is_dir()
    # What has changed does not join it.
    git("branch", "-qf", "branch", "main")
    bad = {"out": "@branch has changed since", "x": "@main: .*'trainer.x': unknown", "y": "nothing.*single revision"}
    for out, arm in {"out": "mine: @branch", "x": "@main trainer.x=1", "y": "@nothing"}.items():
        with pytest.raises(ConfigError, match=bad[out]):
            study("--arm", arm, "--out", f"{tmp_path}/{out}")


def test_the_digest_is_of_the_content_of_all_files(tmp_path):
    """coding-tools-mcp #64, daydream #234: new files, files that are no code, those next to a TOML or a script that is
    elsewhere. opencode #18734: without a repository there is no commit, but the code in folders counts."""
    root, place, other, out = (tmp_path / name for name in ("root", "place", "other", "root/out"))
    for folder in (root, place, other, out, root / "rolemodel/__pycache__"):
        folder.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", root], check=True)
    (root / ".gitignore").write_text("ignored\n*.pyc")
    args = [f'origin="{place}/it.toml"', f"trainer.script={other}/my_trainer.py"]
    run = compare.Run("a", 0, out / "a-seed0", args, root=root)
    names = {"root/mine.py": 1, "root/task.txt": 1, "place/mine.py": 1, "root/ignored": 0, "root/out/log": 0}
    names |= {"root/rolemodel/losses.py": 1, "other/my_trainer.py": 1, "root/rolemodel/__pycache__/losses.pyc": 0}

    def check():
        for name, is_read in names.items():
            before = compare.find_code(run)
            for text in "ab":
                (tmp_path / name).write_text(text)
                assert (compare.find_code(run) != before) == is_read, name
                before = compare.find_code(run)

    check()
    shutil.rmtree(root / ".git")
    del names["root/ignored"]  # git knows what is ignored
    for name in names:
        (tmp_path / name).unlink()
    check()
    assert compare.find_code(run).startswith("none-")


def test_an_arm_may_be_a_copy_of_a_role(study, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "trainer")  # the tests have imported the original
    (tmp_path / "mine.py").write_text((ROOT / "trainer.py").read_text())
    study("--arm", "plain:", "--arm", "mine: trainer.script=mine.py", "--seeds", "1")
    assert 'trainer.script = "mine.py"' in (tmp_path / "out" / "compare.md").read_text()


def test_a_grid(study):
    found = study("--grid", "trainer.learning_rate=0.1,0.2,0.3", "trainer.loss=grpo,cispo", "--seeds", "1")
    assert len({line["arm"] for line in found}) == 6


def test_seeds_until_it_is_decided(study):
    arms = [*GOOD[:2], "--arm", "higher: trainer.learning_rate=0.3 trainer.warmup_steps=1"]
    assert len(study(*arms, "--until-decided", "--seeds", "4")) == 6
    with pytest.raises(ConfigError, match="--until-decided, has changed"):
        study(*arms, "--until-decided", "--seeds", "5")


def test_a_study_that_is_killed_goes_on(study, tmp_path):
    """No run outlives it, and the same command continues it."""
    command = [*GOOD, "max_steps=7", "--seeds", "1", "--jobs", "2"]
    for num, number in enumerate((signal.SIGKILL, signal.SIGTERM)):
        process = multiprocessing.get_context("fork").Process(target=study, args=command)
        process.start()
        wait_until(lambda: len([*tmp_path.glob(f"out/*/start{num}")]) == 2)
        os.kill(process.pid, number)
        process.join()
        assert process.exitcode == -number
        wait_until(lambda: not having(f"{tmp_path}/launch.py"))
    assert [line["exit"] for line in study(*command)] == [0, 0]


def test_one_run_makes_the_model_in_each_tree(tmp_path, monkeypatch):
    """Where all arms were code, no two runs ever ran at once (hydra #1974: n_jobs=2 without effect)."""
    names = ("a0", "b0", "a1", "b1")
    runs = [compare.Run(name[0], int(name[1]), tmp_path / name, [], root=tmp_path / name[0]) for name in names]
    running = []
    found = []  # the runs that run as another one starts, and whether it makes the model

    def start(run, *args):
        def poll():
            num = next(polls)
            if num == 1:
                (run.root / "model").mkdir(parents=True, exist_ok=True)
            if num < 3:
                return None
            running.remove(run.path.name)
            return 0

        found.append(([*running], not (run.root / "model").exists()))
        running.append(run.path.name)
        run.path.mkdir()
        polls = itertools.count()
        return SimpleNamespace(poll=poll)

    monkeypatch.setattr(compare, "start", start)
    compare.run_all(runs, None, 4, SimpleNamespace(run=SimpleNamespace(prepare="make.py", model="model")))
    assert found == [([], True), (["a0"], True), (["a0", "b0"], False), (["a0", "b0", "a1"], False)]


@pytest.mark.parametrize("args, message", [
    (["--arm", "a: trainer.loss=grpo", "--arm", "a:"], "two arms have the same name"),
    (["--arm", "seed=3"], "each run has a seed of its own"),
    (["--arm", "", "eval.every=0"], "eval.every is 0"),
])  # fmt: skip
def test_a_mistake_is_named_before_anything_starts(study, tmp_path, args, message):
    with pytest.raises(ConfigError, match=message):
        study(*args)
    assert not (tmp_path / "out").exists()


def test_what_was_under_the_microscope_stays(tmp_path):
    with pytest.raises(ConfigError, match="is there already"):
        microscope.main([str(tmp_path), "--arm", "", "--out", str(tmp_path)])


def test_runs_that_exist_already(study, tmp_path):
    study(*GOOD, "--seeds", "2")
    for path in (tmp_path / "out").glob("*-seed?"):
        (path / "compare.json").unlink()
        if path.name != "high-seed1":  # which is not finished
            (path / "done").write_text("20\n")
    out = tmp_path / "again"
    runs = f"{glob.escape(str(tmp_path))}/out"
    argv = ["--runs", f"a={runs}/low-*", f"b={runs}/high-*", "--out", str(out)]
    compare.main(argv)
    text = (out / "compare.md").read_text()
    assert "| b | 1 | 0.700 |" in text and "a and b: one seed shows nothing (-0.100)" in text
    assert "b, seed 1 is not finished" in text
    (tmp_path / "out" / "low-seed0" / "rows.json").write_text('{"e.dataset": "1", "e.eval_dataset": "2"}')
    compare.main(argv)
    assert "evaluated on different examples" in (text := (out / "compare.md").read_text()) and "a and b" not in text


def test_arms_are_compared_on_the_rows_that_all_have_scored(tmp_path):
    """lm-evaluation-harness #3421: two of four rows are too long for one arm, and wrong in the other."""
    for arm, seed in itertools.product(("short", "whole"), range(3)):
        rows = [1.0, 0.0, 1.0, seed / 10] if arm == "whole" else [1.0, None, 1.0, None]
        run = tmp_path / f"{arm}{seed}"
        run.mkdir()
        (run / "config.toml").write_text(f"seed = {seed}\nmax_steps = 0\nenv = [{{}}]")
        (run / "done").touch()
        about = {"step": 0, "env": "e", "reward/mean": np.mean([row for row in rows if row is not None])}
        append(run / "eval.jsonl", [about | {"rows": rows, "errors": rows.count(None)}])
    runs = [f"{arm}={glob.escape(str(tmp_path))}/{arm}?" for arm in ("short", "whole")]
    compare.main(["--runs", *runs, "--out", f"{tmp_path}/out"])
    text = (tmp_path / "out" / "compare.md").read_text()
    assert "| whole | 3 | 1.000 |" in text and "short and whole: no difference can be claimed (0.000; 3 seeds" in text
    assert "short, seed 0: its last evaluation lost 2 rollouts. Examples that any run has lost do not count." in text


# --- numbers ----------------------------------------------------------------------------------------------------------


def evaluation(step, *scores, errors=0):
    found = {"step": step, "rows": [0.0, 0.0], "errors": errors}
    return [found | {"env": f"e{i}", "reward/mean": score} for i, score in enumerate(scores)]


def test_the_scores_of_a_run():
    """Means over environments; the last evaluation lacks one."""
    evals = evaluation(0, 0.2, 0.4) + evaluation(10, 0.6, 0.8, errors=1) + evaluation(20, 0.9)
    found = compare.score_figures(evals, 2)
    assert found["points"] == [(0, pytest.approx(0.3)), (10, pytest.approx(0.7))]
    assert found["score"] == pytest.approx(0.7)
    assert found["lost"] == 2 and compare.score_figures(evals[4:], 2)["score"] is None


# --- statistics -------------------------------------------------------------------------------------------------------


def test_statistics_by_hand():
    assert [compare.p_value([x] * 5) for x in (1.0, 0.0)] == [0.0625, 1.0]  # equal in all seeds
    assert compare.p_value([1.0, 2.0, 3.0]) == pytest.approx(0.0742, abs=1e-4)  # t = 2 / 0.577, 2 degrees of freedom
    assert compare.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_looking_after_each_seed_is_allowed_for():
    """Normal scores as in findings.md: cispo, grpo, dppo and sapo against gspo at S = 1, dppo and cispo at S = 8. Of
    the five pairs 80% are found with half the seeds of a fixed design of 12, though the last one seldom."""
    rng = np.random.default_rng(0)
    limit = np.quantile(compare.peak(rng.standard_normal((100_000, 12))), 0.95)
    chance, found, early = [], [], []
    halves = (0.026, 0.017, 0.012, 0.014, 0.055), (0.024, 0.024, 0.024, 0.024, 0.126)
    for difference, *both in zip((0.070, 0.077, 0.084, 0.073, 0.136), *halves):
        x_RN = rng.normal(0, np.hypot(*both) * 5**0.5 / 2.776, (1000, 12))
        chance.append((compare.peak(x_RN) > limit).mean())
        looks = np.array([compare.peak(x_RN[:, :n] + difference) > limit for n in (6, 12)])
        early.append(looks[0].mean())
        found.append(looks[1].mean())
    assert abs(np.mean(chance) - 0.05) < 3 * np.sqrt(0.05 * 0.95 / 5000) and min(found) > 0.9 and np.mean(early) > 0.8
    assert [compare.sequential_p(x_N, 12) < 0.05 for x_N in x_RN[:9]] == [*(compare.peak(x_RN[:9]) > limit)]
    assert compare.sequential_p([0.1] * 5, 12) == compare.sequential_p([0.1, 0.2], 12) == 1


def test_what_is_claimed():
    base = {seed: 0.5 + seed / 10 for seed in range(5)}  # seeds differ more than arms do
    better = {seed: score + 0.01 * seed for seed, score in base.items()}
    (said,) = compare.compare_pairs({"a": base, "d": better})
    assert "**d is better than a** by 0.020 +- 0.020" in said
    # What may be claimed of one pair may not of six. Of five arms the first is compared with each.
    assert "better" not in str(compare.compare_pairs(dict.fromkeys("abc", base) | {"d": better}))
    said = compare.compare_pairs(dict.fromkeys("abcde", base))
    assert [text[:7] for text in said] == ["a and b", "a and c", "a and d", "a and e"]
    # Runs without a score may have been the worse ones. Rounding is no difference.
    (said,) = compare.compare_pairs({"a": base, "d": better | {0: None}})
    assert said.startswith("a and d: nothing can be claimed, 1 more seeds lack a score (-0.025 +- 0.021; 4 seeds")
    (said,) = compare.compare_pairs({"a": {0: 0.1 + 0.2, 1: 0.5}, "b": {0: 0.3, 1: 0.5}})
    assert "no difference can be claimed (0.000; 2 seeds, p = 1)" in said


def test_the_readme_shows_what_is_printed():
    """Its table had other columns and arms (clawrium #480); the digits may differ."""
    one, other = compare.parse_arms(["trainer.loss=cispo", "trainer.loss=mine:with_bonus"])
    scores = {one: {0: 0.7, 1: 0.72, 2: 0.71}, other: {0: 0.69, 1: 0.68, 2: 0.72}}
    found = [{"arm": arm, "score": score} for arm in scores for score in scores[arm].values()]
    printed = f"{compare.table(found)}\n\n- {compare.compare_pairs(scores)[0]}"
    printed, readme = (re.sub(r"\d\.\d+", "0.0", text) for text in (printed, (ROOT / "README.md").read_text()))
    assert printed in readme
