"""The programs for a real GPU and for null GPUs: what they say of what they find. With --all and where .nullgpu/ is
there, the rehearsal itself."""

import subprocess
import sys

import pytest
import torch
from conftest import ROOT

sys.path[:0] = [str(ROOT / "tests" / "gpu"), str(ROOT / "tests" / "nullgpu")]
import first_hour
import rehearse
import values

import trainer


def test_every_step_goes_on_when_another_fails(tmp_path, monkeypatch, capsys):
    def fails(models):
        raise KeyError("time/step_s")

    steps = {"one": lambda models: (0, "all well"), "two": fails, "three": lambda models: (5, "numbers")}
    monkeypatch.setattr(first_hour, "STEPS", steps)
    monkeypatch.setattr(first_hour, "REPORT", tmp_path / "outputs" / "first_hour.md")
    monkeypatch.setattr(first_hour, "run", lambda command, minutes: (0, "", 0.0))
    assert first_hour.main(["--only", "one", "two", "three"]) == 5
    report = first_hour.REPORT.read_text()
    for row in ("| one | 0 | 0.0 |", "| two | 1 | 0.0 |", "| three | 5 | 0.0 |", "KeyError('time/step_s')", "all well"):
        assert row in report
    assert "rehearsal" not in report
    monkeypatch.setattr(first_hour, "IS_NULL", True)
    first_hour.main(["--only", "one"])
    assert "A rehearsal on null GPUs: nothing was computed." in first_hour.REPORT.read_text()


def test_a_command_that_hangs_fails_or_is_not_there():
    assert first_hour.run(["sh", "-c", "echo so; exit 3"], 1)[:2] == (3, "so\n")
    assert first_hour.run(["sleep", "9"], 0.01)[0] == 124
    assert first_hour.run(["no-such-program"], 1)[0] == 127


@pytest.mark.parametrize("means, code, told", [
    ([0.01, 0.012], 0, "far below"), ([0.01, 0.04], 0, "too tight"), ([0.06], 5, "too tight"),
])  # fmt: skip
def test_the_canarys_limits_are_judged(means, code, told, tmp_path, monkeypatch):
    monkeypatch.setattr(first_hour, "ROOT", tmp_path)
    folder = tmp_path / "outputs" / "first_hour_reverse"
    folder.mkdir(parents=True)
    line = '{{"sync/dlogp_mean": {}, "sync/dlogp_max": 0.3, "policy/kl_sampler": 0.002}}\n'
    (folder / "metrics.jsonl").write_text("".join(map(line.format, means)))
    found, text = first_hour.canary({})
    assert found == code and told in text and f"{max(means):.4f} | 0.300 | 0.0020" in text


@pytest.mark.parametrize("codes, told", [
    ((0, 4), "follows a sync with captured graphs as without"), ((3, 0), "read old weights"),
    ((4, 3), "does not follow a sync without graphs"), ((3, 3), "no server follows"),
])  # fmt: skip
def test_graphs_that_keep_old_weights_are_told_in_words(codes, told, monkeypatch):
    def launch(config, name, minutes, *more):
        return codes["inference.args.enforce_eager=true" in more], ""

    monkeypatch.setattr(first_hour, "launch", launch)
    code, text = first_hour.graphs({})
    assert told in text and (code == 0) == (set(codes) <= {0, 4})


def test_values_that_are_wrong_are_told(tmp_path, monkeypatch, capsys):
    """On a CPU: the checks pass, and fail if the compiled policy, or rows with padding, compute something else."""
    values.toy.make_model(tmp_path / "model", values.toy.make_tokenizer(), layers=2, hidden=64)
    (tmp_path / "a.toml").write_text(values.CONFIG.format(model=tmp_path / "model"))
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    assert values.check_kernels(tmp_path) and values.check_compiled(tmp_path) and values.check_nccl()
    told = capsys.readouterr().out
    assert told.count("values: PASS") == 4 and "values: SKIP NCCL" in told
    monkeypatch.setattr(torch, "compile", lambda function, **options: lambda *args, **kw: function(*args, **kw) * 1.1)
    assert not values.check_compiled(tmp_path) and "set trainer.compile = false" in capsys.readouterr().out
    collate = trainer.collate

    def shifted(sequences, device):
        micro = collate(sequences, device)
        return micro | {"ids_BW": micro["ids_BW"].roll(1, 0)}

    monkeypatch.setattr(trainer, "collate", shifted)
    assert not values.check_kernels(tmp_path) and "values: FAIL fp32: padded rows" in capsys.readouterr().out


WAITS = """
/x/transformers/masking_utils.py:757: UserWarning: called a synchronizing CUDA operation (Triggered ...)
/x/torch/_inductor/fx_passes/joint_graph.py:344: UserWarning: called a synchronizing CUDA operation (Triggered ...)
step    20 | reward 0.1
"""
CASE = rehearse.Case("a case", "1 x 24 GB", rehearse.LORA_1, "tiny")


@pytest.mark.parametrize("log, null, case, code, problem", [
    (WAITS, "", CASE, 0, ""),
    (WAITS, "", CASE, 3, "exit code 3: ['[launch] done']"),
    (WAITS, "", CASE._replace(shows="step     3"), 0, "exit code 0"),
    (WAITS + "/x/trainer.py:9: UserWarning: called a synchronizing CUDA operation", "", CASE, 0,
     "waits for the device: /x/trainer.py:9"),
    (WAITS, "[12] OUT OF MEMORY: device 0, 24000 MiB used", CASE, 0, "OUT OF MEMORY: device 0"),
    ("Recompiling function a" + WAITS, "", CASE._replace(look=rehearse.recompilations), 0, ""),
    (WAITS + "Recompiling function b", "", CASE._replace(look=rehearse.recompilations), 0, "compiles again: Recompi"),
])  # fmt: skip
def test_what_a_rehearsal_notices(log, null, case, code, problem, tmp_path):
    logs = tmp_path / "tree" / "outputs" / "a_case" / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    (logs / "trainer.log").write_text(log)
    (tmp_path / "logs" / "a_case.null").write_text(null)
    found = rehearse.problems_of(case, tmp_path, "a_case", code, "[launch] done")
    assert len(found) == bool(problem) and problem in "".join(found)


def test_mutations_of_the_rehearsal_fit_the_trainer():
    text = (ROOT / "trainer.py").read_text()
    changed = [case.mutation[0] for case in rehearse.MUTATIONS if case.mutation]
    assert len(changed) == 3 and all(old in text for old in changed)


@pytest.mark.long
@pytest.mark.skipif(not (ROOT / ".nullgpu" / "libraries").exists(), reason="bash tests/nullgpu/run.sh makes it")
def test_the_rehearsal():
    done = subprocess.run(["bash", "tests/nullgpu/run.sh"], cwd=ROOT, capture_output=True, text=True, timeout=7200)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
