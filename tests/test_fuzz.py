"""200 random tasks whose functions misbehave: every run ends with 0, or with the right code and a line that names what
did it; every rollout is counted once, none sees another's row, and nothing is left."""

import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest
from conftest import WATCHED, launch, lines, some, write_run

# What the last line names: the place, or the function whose value was refused.
NAMES = (
    r"fuzz_task.py:\d+|reward|score|start|env_response|is_completed|setup_state|add_fields|'mine'|keep|loss|advantage"
)
GROUPS = ("kept", "flat", "failed", "long", "empty")


@pytest.mark.slow
@pytest.mark.parametrize("seed", some(range(200), 0))
def test_a_random_task_spoils_no_run(seed, models, tmp_path):
    env = '[env]\nid = "fuzz_task"'
    toml = write_run(tmp_path, models["untied"], 2, env)
    (tmp_path / "fuzz_task.py").symlink_to(Path(__file__).parent / "fuzz_task.py")
    share = [0.2, 1.0][seed % 2]
    keys = [f"orchestrator.max_error_share={share}", "orchestrator.order=fuzz_task:Keeps", "eval.every=1"]
    keys += ["trainer.loss=fuzz_task:loss", "trainer.advantage=fuzz_task:advantage"]
    done = launch(toml, *keys, check=False, timeout=120, FUZZ_SEED=str(seed), **WATCHED)
    last = done.stderr.splitlines()[-1] if done.stderr else ""
    run_dir = tmp_path / "run"
    if done.returncode:
        assert done.returncode in (3, 4, 5) and re.search(NAMES, last), last
        assert done.returncode != 3 or "fuzz_task.py:" in last, last  # a hook raised: loss, advantage or keep
    else:
        assert len(lines(run_dir / "metrics.jsonl")) == 2 and (run_dir / "final").exists()
        console = [line for line in done.stdout.splitlines() if line.startswith(("step ", "eval "))]
        assert len(console) >= 2 + 3, done.stdout  # watch.py adds its own about evaluations
    check_rollouts(run_dir)
    left = subprocess.run(["pgrep", "-f", f"^sleep 777.{seed}$"], capture_output=True, text=True).stdout
    assert not left and os.getcwd() != "/"


def check_rollouts(run_dir):
    """Each index once, each rollout either scored by its own row or lost for a reason; counters add up."""
    path = run_dir / "rollouts.jsonl"
    rollouts = lines(path) if path.exists() else []
    seen = Counter((r["group"], r["rollout"]) for r in rollouts)
    assert set(seen.values()) <= {1}
    for r in rollouts:
        assert (r["reward"] is None) == bool(r["error"]) or r["num_turns"] == 0, r
        if r["reward"] is not None and r["metrics"]:
            assert r["metrics"].get("control", r["example"]) == r["example"] and abs(r["reward"]) < 1e6
        if r["prompt"]:
            assert json.dumps(r["prompt"]).startswith(
                json.dumps([{"role": "user", "content": f"row {r['example']}"}])[:-1]
            )
    for line in lines(run_dir / "metrics.jsonl") if (run_dir / "metrics.jsonl").exists() else []:
        of_step = [r for r in rollouts if r["step"] == line["step"]]
        assert line["rollout/num"] == len(of_step) == 4 * sum(line.get(f"group/{why}", 0) for why in GROUPS)
        assert line["rollout/errors"] == sum(bool(r["error"]) for r in of_step)
