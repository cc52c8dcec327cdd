"""tools/export.py: what a run's checkpoints hold, as models and adapters."""

import pytest
import torch
from conftest import append, write_batches
from peft import PeftModel
from ranks import replays
from transformers import AutoModelForCausalLM

from rolemodel.role import ConfigError
from tools import export


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_best_is_of_all_environments_and_the_earliest_of_equal_ones(tmp_path):
    """labs-molt #18, NeMo-RL #3071: of equal ones, the order of a set would choose 56."""
    (tmp_path / "config.toml").write_text('env = [{ id = "a" }, { id = "b" }]')
    rewards = {56: (0, 1), 20: (0, 1), 150: (1, 0), 999_999: (0, 0), 1_000_000: (1,), 500: (0.5, 0.5)}
    for step, scores in rewards.items():
        (tmp_path / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
        append(tmp_path / "eval.jsonl", [{"step": step, "env": e, "rows": [x]} for e, x in zip("ab", scores)])
    (tmp_path / "checkpoints" / "step_backup").mkdir()
    found = [export.find_checkpoint(tmp_path, which).name for which in ("best", None, "999999")]
    assert found == ["step_000020", "step_1000000", "step_999999"]


@pytest.mark.parametrize("lora", ["false", "true"])
def test_an_export_is_the_final_of_a_shorter_run(lora, make_cfg, models, tmp_path):
    """Bit for bit; the run keeps every byte. The best evaluation counts on rows that all of them have scored."""
    make_cfg()
    how = [tmp_path / "test.toml", write_batches(tmp_path / "saved", 3), f"output_dir={tmp_path}"]
    how += [f"trainer.use_lora={lora}", "checkpoint.every=1"]
    replays([[*how, f"max_steps={num}", f"run_name=run{num}"] for num in (2, 3)])
    short, run = (tmp_path / f"run{num}-replay-cispo" for num in (2, 3))
    rows = {1: [1, 1], 2: [0.5, None], 3: [0.4, 1]}
    append(run / "eval.jsonl", [{"step": step, "env": "e", "rows": x} for step, x in rows.items()])
    before = contents(run)
    for at, expected in (("", run), ("@3", run), ("@2", short), ("@best", short)):
        replays([[f"{run}{at}", tmp_path / f"out{at}"]], export.main)
        assert contents(tmp_path / f"out{at}") == contents(expected / "final")
    assert contents(short / "final") != contents(run / "final") and contents(run) == before
    for at, words in (("@1", r"@1: there are checkpoints of \[2, 3\]"), ("@2", "out@2 has files")):
        with pytest.raises(ConfigError, match=words):
            replays([[f"{run}{at}", tmp_path / f"out{at}"]], export.main)
    if lora == "true":
        replays([[run, tmp_path / "merged", "--merge"]], export.main)
        base, merged = (AutoModelForCausalLM.from_pretrained(path) for path in (models["untied"], tmp_path / "merged"))
        expected = PeftModel.from_pretrained(base, tmp_path / "out").eval()(torch.arange(20)[None]).logits
        torch.testing.assert_close(merged(torch.arange(20)[None]).logits, expected, atol=1e-5, rtol=0)
