"""The benchmark's parts at toy size, and the sentence on where time goes."""

import json
import subprocess
import sys

import pytest
import whole
from common import row
from conftest import ROOT

from configs.lib.metrics import where_time_goes

PAGE = """# HELP vllm:generation_tokens_total of something
vllm:generation_tokens_total{engine="0"} 1000.0
vllm:prefix_cache_queries_total{engine="0"} 400.0
vllm:prefix_cache_hits_total{engine="0"} 300.0
vllm:request_queue_time_seconds_sum{engine="0"} 5.0
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3"} 77.0
vllm:e2e_request_latency_seconds_sum{engine="0"} 50.0
vllm:num_preemptions_total{engine="0"} 2.0
"""


@pytest.mark.parametrize(
    "train, wait, sync, queue, remedy",
    [
        (5, 4, 1, 5, "raise orchestrator.max_concurrent or max_staleness"),
        (5, 4, 1, 40, "raise inference.gpus"),
        (5, 1, 4, 5, "make steps longer"),
        (5, 1, 1, 5, "raise checkpoint.every"),
        (9, 0.5, 0.5, 40, "training is the limit"),
    ],
)
def test_where_time_goes(train, wait, sync, queue, remedy, tmp_path):
    line = {"step": 3, "time/step_s": 10.0, "time/train_s": train, "time/wait_batch_s": wait, "time/sync_s": sync}
    line["time/checkpoint_s"] = 10 - train - wait - sync
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line | {"step": 2}) + "\n" + 2 * (json.dumps(line) + "\n"))
    page = PAGE.replace('seconds_sum{engine="0"} 5.0', f'seconds_sum{{engine="0"}} {queue}')
    said = where_time_goes(tmp_path, 3, [page], [page, page, page])
    assert said.startswith(f"time: the trainer trained {10 * train:.0f}%, waited {10 * wait:.0f}% for rollouts")
    assert f"of 20 s; servers: 100 tokens/s, {2 * queue}% of" in said
    assert "75% of prompts cached, 4 preemptions; " in said and remedy in said
    assert remedy in where_time_goes(tmp_path, 3, [""], [""]) or queue == 40


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
def test_the_gpu_rows_run_at_toy_size():
    rows = bench("gpu", "--toy")
    assert [r["unit"] for r in rows] == ["tokens/s", "GiB"] * 4 and all(r["value"] > 0 for r in rows)
    assert bench("gpu") == []  # here: not measured, and said so


def test_the_head_keeps_no_logits():
    """Memory of forward and backward does not grow with the number of tokens; the entropy is not used, as in losses."""
    chunk = 1 << 24  # 64 MiB in fp32, of which there are four at a time; all logits at once would be 512
    assert bench("step", "head", "8192", "16384", str(chunk)) < 420


@pytest.mark.long
def test_the_orchestrators_rate_is_measured():
    rate, cpu, _ = bench("orchestrate", "group", "2")
    assert rate > 0 and cpu > 0


@pytest.mark.long
def test_the_quick_benchmark_measures_every_part(tmp_path):
    command = [sys.executable, "tools/bench.py", "--quick", "--out", str(tmp_path / "bench.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((tmp_path / "bench.json").read_text())["parts"]
    assert len(parts) == 7 and all(part["rows"] or name == "gpu" for name, part in parts.items())
