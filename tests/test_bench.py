"""The benchmark's parts at toy size."""

import json
import subprocess
import sys

import pytest
import whole
from common import row
from conftest import ROOT


def test_a_row_says_whether_its_target_is_met():
    assert [row("", 5, "", target)["met"] for target in ("", ">= 5", ">= 6", "<= 4.9")] == [None, True, False, False]


def test_time_to_the_goal():
    assert whole.until([0.5, 0.9, 0.89, 0.91, 0.9, 0.9], [1, 2, 3, 4, 5, 6]) == 4
    assert whole.until([0.5, 0.9, 0.9], [1, 2, 3]) is None


def bench(part, *args):
    command = [sys.executable, str(ROOT / "tests" / "bench" / f"{part}.py"), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.long
def test_the_gpu_rows_run_at_toy_size():
    rows = bench("gpu", "--toy")
    assert [r["unit"] for r in rows] == ["tokens/s", "GiB", "s"] * 5 + ["tokens/s"] * 2
    assert all(r["value"] > 0 for r in rows if r["unit"] == "tokens/s")  # memory is CUDA's, 0 here
    assert [r["measure"] for r in bench("gpu", "--toy", "head")] == [
        r["measure"] for r in rows if "head" in r["measure"]
    ]
    assert bench("gpu") == []  # here: not measured, and said so


@pytest.mark.long
def test_the_head_keeps_no_logits():
    """Memory of forward and backward does not grow with the number of tokens; the entropy is not used, as in losses."""
    chunk = 1 << 24  # 64 MiB in fp32, of which there are six at a time; all logits at once would be 512, twice
    assert bench("step", "head", "8192", "16384", str(chunk)) < 480


@pytest.mark.long
def test_the_orchestrators_rate_is_measured():
    rate, cpu, _ = bench("orchestrate", "measure", "2")
    assert rate > 0 and cpu > 0


@pytest.mark.long
def test_the_quick_benchmark_measures_every_part(tmp_path):
    command = [sys.executable, "tests/bench/run.py", "--quick", "--out", str(tmp_path / "bench.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "bench.json").read_text())["parts"]
    assert len(parts) == 7 and all(part["rows"] or name == "gpu" for name, part in parts.items())
