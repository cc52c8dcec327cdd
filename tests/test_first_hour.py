"""tests/gpu/: the report of a GPU's first hour, and checks of values, which here run on the CPU."""

import json
import sys

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "gpu"))
import first_hour
import values


def test_the_first_hour(tmp_path, models, monkeypatch):
    """Each step goes on when another fails; the table has what runs have written."""
    (tmp_path / "a.toml").write_text(values.TOML.format(models["untied"]))
    assert values.check_kernels(tmp_path / "a.toml")
    monkeypatch.setattr(first_hour, "REPORT", tmp_path / "out" / "first_hour.md")
    commands = {"machine": (["no-such-program"], 1), "values": ([sys.executable, "-c", "print('PASS 1')"], 1)}
    monkeypatch.setattr(first_hour, "steps", lambda *models: commands)
    (tmp_path / "out" / "first_hour_toy").mkdir(parents=True)
    keys = ("time/step_s", "time/train_s", "time/sync_s", "perf/tokens_per_s", "perf/peak_gib", "sync/dlogp_mean")
    for name, line in (("metrics", dict.fromkeys((*keys, "policy/kl_sampler"), 1.5)), ("eval", {"reward/mean": 0.25})):
        (tmp_path / "out" / "first_hour_toy" / f"{name}.jsonl").write_text(json.dumps(line))
    assert first_hour.main([]) == 127
    report = first_hour.REPORT.read_text()
    assert "## machine: exit code 127" in report and "PASS 1" in report and "| first_hour_toy | 0.250 | 1.5 |" in report
