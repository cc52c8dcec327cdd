"""orchestrator.py against the fake server: order, staleness, refills, what goes wrong, what resumes."""

import json
import shutil
from collections import Counter

import pytest
from conftest import launch, lines

import orchestrator
from configs.lib.batch import load_batch
from configs.lib.runtime import load_config
from orchestrator import Order, extend_or_fork

TOML = """
model = "{model}"
run_name = "run"
output_dir = "{out}"
max_steps = {steps}
max_seq_len = 64
[env]
id = "think_env"
args = {args}
[orchestrator]
batch_size = 16
rollouts_per_example = 4
[orchestrator.sampling]
max_tokens = 6
[trainer]
dtype = "fp32"
use_lora = false
learning_rate = 1e-3
gradient_checkpointing = false
"""


@pytest.fixture
def run(tmp_path, models):
    """run(steps, args, *overrides, check=True, **environment) -> CompletedProcess, run directory."""

    def go(steps, args, *overrides, check=True, **env):
        (tmp_path / "run.toml").write_text(TOML.format(model=models["untied"], out=tmp_path, steps=steps, args=args))
        return launch(tmp_path / "run.toml", *overrides, check=check, **env), tmp_path / "run"

    return go


def all_batches(run_dir):
    return [load_batch(path) for path in sorted((run_dir / "batches").glob("*.safetensors"))]


def test_extend_or_fork():
    samples = []
    assert not extend_or_fork(samples, [1, 2], [3, 4], [-0.1, -0.2], 0)
    assert not extend_or_fork(samples, [1, 2, 3, 4, 9], [5], [-0.3], 1)
    assert samples == [
        {"tokens": [1, 2, 3, 4, 9, 5], "mask": [0, 0, 1, 1, 0, 1], "logp": [0, 0, -0.1, -0.2, 0, -0.3], "turn": 0}
    ]
    assert extend_or_fork(samples, [1, 2, 4, 9, 5, 9], [6], [-0.4], 2)
    assert samples[1] == {"tokens": [1, 2, 4, 9, 5, 9, 6], "mask": [0] * 6 + [1], "logp": [0] * 6 + [-0.4], "turn": 2}


def test_order_is_a_function_of_seed_and_index():
    rows = [{"question": str(i)} for i in range(37)]
    order = Order(rows, 3, {"next": 0, "open": []})
    taken = [order.take() for _ in range(37 * 3)]
    assert [index for index, _, _ in taken] == list(range(37 * 3))
    for epoch in range(3):  # every row once an epoch, in another order
        assert sorted(number for _, number, _ in taken[37 * epoch : 37 * (epoch + 1)]) == list(range(37))
    assert [n for _, n, _ in taken[:37]] != [n for _, n, _ in taken[37:74]]
    resumed = Order(rows, 3, {"next": 50, "open": [41, 44]})
    assert [resumed.take() for _ in range(3)] == [taken[41], taken[44], taken[50]]
    assert Order(rows, 4, {"next": 0, "open": []}).take()[1] != taken[0][1] or True
    other = Order(rows, 4, {"next": 0, "open": []})
    assert [other.take()[1] for _ in range(37)] != [number for _, number, _ in taken[:37]]


def test_strictly_on_policy(run):
    done, run_dir = run(
        5, '{ kind = "noise" }', "orchestrator.max_staleness=0", "eval.every=2", "trainer.learning_rate=1e-2"
    )
    assert "[launch] done" in done.stdout
    for n, batch in enumerate(all_batches(run_dir)):
        assert all(set(s["versions"]) == {n} and s["age"] == 0 for s in batch.samples)
        assert sorted({s["group"] for s in batch.samples}) == list(range(4 * n, 4 * n + 4))
    metrics = lines(run_dir / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(5)) and [m["version"] for m in metrics] == [1, 2, 3, 4, 5]
    for m in metrics:
        assert m["policy/kl_sampler_age0"] < 1e-6 and m["policy/age0_tokens"] == sum_of_tokens(run_dir, m["step"])
        assert m["sync/dlogp_max"] < 1e-4
    evals = lines(run_dir / "eval.jsonl")
    assert [e["step"] for e in evals] == [0, 2, 4, 5] and all(e["version_first"] == e["version_last"] for e in evals)
    assert (run_dir / "final" / "model.safetensors").is_file() and not list(run_dir.glob("**/*.tmp"))


def sum_of_tokens(run_dir, step):
    return int(load_batch(run_dir / "batches" / f"step_{step:06d}.safetensors").loss_mask.sum())


KEYS = """step time version reward/mean reward/std rollout/tokens rollout/truncated rollout/errors rollout/forks group/kept
  group/flat staleness/mean staleness/max loss policy/entropy policy/kl_sampler policy/kl_sampler_age0 policy/age0_tokens
  policy/clip_frac sync/dlogp_max sync/dlogp_mean reward/p10 reward/p50 reward/p90 optim/lr optim/grad_norm time/step_s
  time/wait_batch_s time/train_s time/sync_s perf/tokens_per_s perf/mfu perf/peak_gib reward/letters""".split()
EVAL_KEYS = (
    "step version_first version_last env reward/mean pass@1 pass@k n ci95 tokens truncated seconds letters".split()
)
ROLLOUT_KEYS = "step version env example group rollout reward metrics truncated prompt completion error dropped".split()


def test_multi_turn_forks_or_not_and_writes_every_key(run, tmp_path):
    """Four turns: one sample a rollout where the template keeps history, four where it drops some of it."""
    from think_env import DROPS

    (tmp_path / "drops.jinja").write_text(DROPS)
    for template, num_samples in (("", 1), (f"chat_template={tmp_path / 'drops.jinja'}", 4)):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        args = '{ kind = "turns", num_turns = 4, prompt = "hi" }'
        _, run_dir = run(2, args, *[template] * bool(template), "eval.every=2", "orchestrator.sampling.max_tokens=4")
        members = Counter((s["group"], s["rollout"]) for s in all_batches(run_dir)[0].samples)
        for m in lines(run_dir / "metrics.jsonl"):
            assert not set(KEYS) - set(m), set(KEYS) - set(m)
            assert (m["rollout/forks"] > 0) == bool(template)
        assert not set(EVAL_KEYS) - set(lines(run_dir / "eval.jsonl")[0])
        assert not set(ROLLOUT_KEYS) - set(lines(run_dir / "rollouts.jsonl")[0])
        assert set(members.values()) == {num_samples}
        assert all(len(r["completion"]) == 7 for r in lines(run_dir / "rollouts.jsonl"))  # four answers, three replies


def test_text_prompts_go_to_completions(run):
    _, run_dir = run(2, '{ kind = "text" }')
    rollout = lines(run_dir / "rollouts.jsonl")[0]
    assert isinstance(rollout["prompt"], str) and isinstance(rollout["completion"][0], str)
    assert all(
        m["policy/kl_sampler_age0"] is None or m["policy/kl_sampler_age0"] < 1e-6
        for m in lines(run_dir / "metrics.jsonl")
    )


def test_no_chat_template_is_refused_with_the_remedy(run, models, tmp_path):
    model = tmp_path / "bare"
    shutil.copytree(models["untied"], model)
    (model / "chat_template.jinja").unlink()
    done, _ = run(2, '{ kind = "noise" }', f"model={model}", check=False)
    assert done.returncode == 2 and "no chat template: set chat_template" in done.stderr.splitlines()[-1]


def test_missing_eval_split_is_refused(run):
    done, _ = run(2, '{ kind = "constant" }', "eval.every=1", check=False)
    assert done.returncode == 2 and "eval.every = 1" in done.stderr.splitlines()[-1]


def test_flat_groups_are_dropped_and_refilled_in_order(run):
    """The reward is flat one time in five; the index moves on, nothing is lost."""
    _, run_dir = run(
        4,
        '{ kind = "turns", num_turns = 1 }',
        "orchestrator.sampling.max_tokens=2",
        "orchestrator.rollouts_per_example=2",
    )
    seen, flat = set(), 0
    for batch, m in zip(all_batches(run_dir), lines(run_dir / "metrics.jsonl")):
        trained = {s["group"] for s in batch.samples}
        dropped = {int(i) for i in batch.info["dropped"]}
        assert len(trained) == 8 == m["group/kept"] and len(dropped) == m["group/flat"] and not trained & dropped & seen
        seen |= trained | dropped
        flat += len(dropped)
        for s in batch.samples:
            assert s["advantage"] == pytest.approx(s["reward"] - mean_reward(batch, s["group"]), abs=1e-6)
    assert flat > 0 and seen | set(batch.info["ledger"]["open"]) == set(range(batch.info["ledger"]["next"]))


def mean_reward(batch, group):
    rewards = {s["rollout"]: s["reward"] for s in batch.samples if s["group"] == group}
    return sum(rewards.values()) / len(rewards)


def test_always_flat_ends_the_run(run):
    done, run_dir = run(3, '{ kind = "constant" }', check=False)
    assert done.returncode == 4 and "flat at reward 1" in done.stderr.splitlines()[-1]
    assert not lines_or_none(run_dir / "metrics.jsonl")


def test_always_failing_ends_the_run_and_shows_the_traceback_once(run):
    done, run_dir = run(3, '{ kind = "raises" }', check=False)
    assert done.returncode == 4 and "ValueError" in done.stderr.splitlines()[-1]
    assert (run_dir / "logs" / "orchestrator.log").read_text().count('raise ValueError("never scores")') == 1


def lines_or_none(path):
    return lines(path) if path.exists() else []


def test_bad_rewards_lose_their_rollouts_and_never_become_zero(run):
    _, run_dir = run(3, '{ kind = "misbehaves" }', "orchestrator.rollouts_per_example=8")
    rollouts = lines(run_dir / "rollouts.jsonl")
    failed = [r for r in rollouts if r["error"]]
    assert failed and {r["error"] for r in failed} <= {"RuntimeError", "ValueError"}
    assert all(r["reward"] is None and r["advantage"] is None for r in failed)
    assert all(r["reward"] > 0 for r in rollouts if not r["error"])
    by_step = {m["step"]: m["rollout/errors"] for m in lines(run_dir / "metrics.jsonl")}
    assert by_step == {n: sum(bool(r["error"]) for r in rollouts if r["step"] == n) for n in by_step}
    for batch in all_batches(run_dir):
        assert not {(s["group"], s["rollout"]) for s in batch.samples} & {(r["group"], r["rollout"]) for r in failed}


def test_slow_rollouts_are_cancelled_and_counted(run):
    faults = json.dumps({"generate 2": "hang", "generate 6": "500", "generate 9": "logprobs"})
    _, run_dir = run(3, '{ kind = "noise" }', "orchestrator.generation_timeout=4", FAKE_FAULTS=faults)
    rollouts = lines(run_dir / "rollouts.jsonl")
    errors = {r["error"] for r in rollouts if r["error"]}
    assert errors == {"TimeoutError", "ValueError"}  # the 500 was retried
    assert [m["step"] for m in lines(run_dir / "metrics.jsonl")] == [0, 1, 2]


def test_long_prompts_are_dropped_and_counted(run):
    """Rows 'hello 0' to 'hello 36': those of two digits are a token longer."""
    _, run_dir = run(3, '{ kind = "noise" }', "orchestrator.max_prompt_len=10")
    assert {r["example"] for r in lines(run_dir / "rollouts.jsonl")} <= set(range(10))
    batches = all_batches(run_dir)
    dropped = {i: why for b in batches for i, why in b.info["dropped"].items()}
    assert dropped and set(dropped.values()) == {"long prompt"}
    assert sum(m["group/long"] for m in lines(run_dir / "metrics.jsonl")) == len(dropped)


@pytest.mark.parametrize("key", ["mask_truncated_completions", "zero_truncated_completions"])
def test_truncated_completions(key, run):
    _, run_dir = run(3, '{ kind = "noise" }', f"orchestrator.{key}=true", "orchestrator.sampling.max_tokens=24")
    truncated = [r for r in lines(run_dir / "rollouts.jsonl") if r["truncated"]]
    assert truncated and any(not r["truncated"] for r in lines(run_dir / "rollouts.jsonl"))
    for batch in all_batches(run_dir):
        for s, mask in zip(batch.samples, batch.loss_mask.split(batch.sample_lens.tolist())):
            assert bool(mask.any()) != (s["truncated"] and key.startswith("mask"))
            assert (s["reward"] == 0) == (s["truncated"] and key.startswith("zero"))


def test_staleness_never_exceeds_its_bound(run):
    """One request in five is slow: batches of four versions are under way at once."""
    _, run_dir = run(12, '{ kind = "turns", num_turns = 2 }', "orchestrator.max_staleness=4", "orchestrator.sampling.max_tokens=3",
                     FAKE_SLOW="12:1.0", FAKE_GENERATE_S="0.1")  # fmt: skip
    metrics = lines(run_dir / "metrics.jsonl")
    assert max(m["staleness/max"] for m in metrics) == 4
    for n, batch in enumerate(all_batches(run_dir)):
        assert all(0 <= n - v <= 4 for s in batch.samples for v in s["versions"][:1])


def slow_cispo(**given):
    """A loss that makes a step last a second."""
    import time

    import trainer

    time.sleep(1.0)
    cfg = given.pop("cfg")
    return trainer.compute_loss(**given, cfg=cfg._replace(loss="cispo"))


def test_overlap(run):
    """Generate and train take a second each; together less than three quarters of their sum."""
    _, run_dir = run(8, '{ kind = "noise" }', "trainer.loss=test_orchestrator:slow_cispo", "trainer.micro_batch_size=64",
                     FAKE_GENERATE_S="1.0")  # fmt: skip
    seconds = sorted(m["time/step_s"] for m in lines(run_dir / "metrics.jsonl")[2:])
    assert seconds[len(seconds) // 2] < 0.75 * 2.0, seconds


def test_resume_continues_the_same_order(run, tmp_path):
    """Stopped at 4 and continued to 8 is 8 in one go: same groups, same losses, one line a step."""
    args = ("orchestrator.max_staleness=0", "checkpoint.every=2", "checkpoint.keep=9", "eval.every=2")
    env = '{ kind = "turns", num_turns = 1 }'
    _, run_dir = run(8, env, *args)
    shutil.move(run_dir, tmp_path / "straight")
    run(4, env, *args)
    shutil.rmtree(
        run_dir / "checkpoints" / "step_000004"
    )  # as if killed between batches 3 and 4: 2 and 3 are trained again
    done, _ = run(8, env, *args)
    straight = tmp_path / "straight"
    for name in ("metrics.jsonl", "eval.jsonl"):
        a, b = lines(straight / name), lines(run_dir / name)
        assert [x["step"] for x in a] == [x["step"] for x in b], name
        assert [x["reward/mean"] for x in a] == [x["reward/mean"] for x in b], name
    a, b = lines(straight / "metrics.jsonl"), lines(run_dir / "metrics.jsonl")
    assert [x["loss"] for x in a] == [x["loss"] for x in b]
    a, b = lines(straight / "rollouts.jsonl"), lines(run_dir / "rollouts.jsonl")
    assert [(x["step"], x["group"], x["rollout"], x["reward"]) for x in a] == [
        (x["step"], x["group"], x["rollout"], x["reward"]) for x in b
    ]
    assert [b.info["dropped"] for b in all_batches(straight)] == [b.info["dropped"] for b in all_batches(run_dir)]


def test_two_servers_share_the_groups(run):
    _, run_dir = run(3, '{ kind = "noise" }', "inference.gpus=2", "trainer.gpus=2")
    assert [m["step"] for m in lines(run_dir / "metrics.jsonl")] == [0, 1, 2]
    assert (run_dir / "logs" / "inference1.log").is_file()


def test_judge():
    from types import SimpleNamespace

    o = SimpleNamespace(mask_truncated_completions=True)
    r = orchestrator.Rollout({}, [{"mask": [0, 1]}], reward=1.0)
    assert "flat" in orchestrator.judge([r, r], o)
    assert "failed" in orchestrator.judge([r, orchestrator.Rollout({}, error="X")], o)
    masked = orchestrator.Rollout({}, [{"mask": [0, 1]}], reward=0.0, truncated=True)
    assert not orchestrator.judge([r, masked], o)
    assert orchestrator.judge([masked, orchestrator.Rollout({}, [{"mask": [0]}], reward=2.0)], o) == "empty or masked"


def test_config_of_the_tests_loads(tmp_path):
    (tmp_path / "x.toml").write_text(TOML.format(model="m", out=tmp_path, steps=1, args="{}"))
    assert load_config(tmp_path / "x.toml").env.id == "think_env"
