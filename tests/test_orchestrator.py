"""orchestrator.py against the fake server: order, staleness, refills, what goes wrong, what resumes."""

import asyncio
import os
import shutil
import threading
import time
from collections import Counter

import httpx
import pytest
from conftest import launch, lines

import orchestrator
from configs.lib.batch import load_batch
from configs.lib.order import Order
from configs.lib.runtime import RunError, load_config, run_directory
from orchestrator import extend_or_fork

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
def launched(tmp_path, models):
    """launched(steps, args, *overrides, **environment) -> CompletedProcess, run directory: the whole of launch.sh."""

    def go(steps, args, *overrides, check=True, **env):
        (tmp_path / "run.toml").write_text(TOML.format(model=models["untied"], out=tmp_path, steps=steps, args=args))
        return launch(tmp_path / "run.toml", *overrides, check=check, **env), tmp_path / "run"

    return go


@pytest.fixture
def run(tmp_path, models, fake_servers, monkeypatch):
    """run(steps, args, *overrides, fake={...}) -> run directory: orchestrator.run in this process, with a fake server
    and a stand-in for the trainer that declares version n + 1 live once batch n is there."""

    def go(steps, args, *overrides, fake=None, template="", train_s=0.0):
        (tmp_path / "run.toml").write_text(TOML.format(model=models["untied"], out=tmp_path, steps=steps, args=args))
        url = fake_servers(template)
        httpx.post(f"{url}/fake", json=fake or {})
        cfg = load_config(tmp_path / "run.toml", [f'inference.urls=["{url}"]', *overrides])
        monkeypatch.setenv("ROLEMODEL_RUN_ID", "run")
        run_dir, over = run_directory(cfg), threading.Event()

        def train():
            for n in range(steps + 1):
                while n and not (run_dir / "batches" / f"step_{n - 1:06d}.safetensors").exists():
                    if over.wait(0.01):
                        return
                time.sleep(train_s if n else 0)
                (tmp_path / "version").write_text(str(n))
                os.replace(tmp_path / "version", run_dir / "version")

        thread = threading.Thread(target=train)
        thread.start()
        try:
            asyncio.run(orchestrator.run(cfg))
        except BaseExceptionGroup as e:
            while isinstance(e, BaseExceptionGroup):
                e = e.exceptions[0]
            raise e from None
        finally:
            over.set()
            thread.join()
        return run_dir

    from transformers import AutoTokenizer

    go.run_dir, go.tokenizer = tmp_path / "run", AutoTokenizer.from_pretrained(models["untied"])
    return go


def all_batches(run_dir):
    return [load_batch(path) for path in sorted((run_dir / "batches").glob("*.safetensors"))]


def test_extend_or_fork():
    samples = []
    assert not extend_or_fork(samples, [1, 2], [3, 4], [-0.1, -0.2], 0)
    assert not extend_or_fork(samples, [1, 2, 3, 4, 9], [5], [-0.3], 1)
    assert samples == [
        {"tokens": [1, 2, 3, 4, 9, 5], "mask": [0, 0, 1, 1, 0, 1], "logp": [0, 0, -0.1, -0.2, 0, -0.3],
         "turns": [0, 0, 0, 0, 1, 1]}
    ]  # fmt: skip
    assert extend_or_fork(samples, [1, 2, 4, 9, 5, 9], [6], [-0.4], 2)
    fork = {"tokens": [1, 2, 4, 9, 5, 9, 6], "mask": [0] * 6 + [1], "logp": [0] * 6 + [-0.4], "turns": [2] * 7}
    assert samples[1] == fork


def test_order_is_a_function_of_seed_and_index(make_cfg):
    rows = [{"question": str(i)} for i in range(37)]
    order = Order(rows, make_cfg("seed=3"))
    taken = [order.take(0) for _ in range(37 * 3)]
    assert [index for index, _ in taken] == list(range(37 * 3))
    for epoch in range(3):  # every row once an epoch, in another order
        assert sorted(number for _, number in taken[37 * epoch : 37 * (epoch + 1)]) == list(range(37))
    assert [n for _, n in taken[:37]] != [n for _, n in taken[37:74]]
    resumed = Order(rows, make_cfg("seed=3"), {"next": 50, "open": [41, 44], "tasks": {}})
    assert [resumed.take(0) for _ in range(3)] == [taken[41], taken[44], taken[50]]
    other = Order(rows, make_cfg("seed=4"))
    assert [other.take(0)[1] for _ in range(37)] != [number for _, number in taken[:37]]


# --- in this process, against a fake server ---------------------------------------------------------------------------


def test_multi_turn_forks_only_where_the_template_drops_history(run, tmp_path):
    from think_env import DROPS

    (tmp_path / "drops.jinja").write_text(DROPS)
    for template, num_samples in (("", 1), (str(tmp_path / "drops.jinja"), 4)):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        args = '{ kind = "turns", num_turns = 4, prompt = "hi" }'
        run_dir = run(2, args, f"chat_template={template}", "orchestrator.sampling.max_tokens=4", template=template)
        batch = all_batches(run_dir)[0]
        assert set(Counter((s["group"], s["rollout"]) for s in batch.samples).values()) == {num_samples}
        assert (batch.info["metrics"]["rollout/forks"] > 0) == bool(template)
        rollouts = lines(run_dir / "rollouts.jsonl")
        assert all(len(r["completion"]) == 7 for r in rollouts)  # four answers, three replies
        assert all(s["turn"] == i % num_samples for i, s in enumerate(batch.samples))


def test_a_prompt_made_in_setup_state_is_what_is_sampled_from(run):
    for r in lines(run(1, '{ kind = "own prompt" }') / "rollouts.jsonl"):
        assert r["prompt"][0]["content"].startswith("changed") and not r["error"]
    for row in all_batches(tmp := run.run_dir)[0].tokens.split(all_batches(tmp)[0].sample_lens.tolist()):
        text = run.tokenizer.decode(row[:9].tolist())
        assert text.startswith("<|user|>changed"), text


def test_batches_of_another_configuration_are_refused(run):
    run(1, '{ kind = "noise" }')
    with pytest.raises(RunError, match="was made with .*'seed': 0.*choose another run_name") as e:
        run(1, '{ kind = "noise" }', "seed=3")
    assert e.value.code == 2


def test_context_that_ends_truncates(run):
    """Turns go on until max_seq_len is full; no request asks for more than fits (the server would answer 400)."""
    run_dir = run(1, '{ kind = "turns", num_turns = 50 }', "orchestrator.sampling.max_tokens=9")
    rollouts = lines(run_dir / "rollouts.jsonl")
    assert all(r["truncated"] and not r["error"] and r["reward"] is not None for r in rollouts)
    assert 56 <= max(all_batches(run_dir)[0].sample_lens) <= 64


def test_text_prompts_go_to_completions(run):
    rollout = lines(run(2, '{ kind = "text" }') / "rollouts.jsonl")[0]
    assert isinstance(rollout["prompt"], str) and isinstance(rollout["completion"][0], str)


def test_no_chat_template_is_refused_with_the_remedy(run, models, tmp_path):
    model = tmp_path / "bare"
    shutil.copytree(models["untied"], model)
    (model / "chat_template.jinja").unlink()
    with pytest.raises(RunError, match="no chat template: set chat_template") as e:
        run(2, '{ kind = "noise" }', f"model={model}")
    assert e.value.code == 2


def test_missing_eval_split_is_refused(run):
    with pytest.raises(RunError, match="eval.every = 1") as e:
        run(2, '{ kind = "constant" }', "eval.every=1")
    assert e.value.code == 2


def test_flat_groups_are_dropped_and_refilled_in_order(run):
    run_dir = run(6, '{ kind = "turns", num_turns = 1 }', "orchestrator.rollouts_per_example=2")
    seen, flat = set(), 0
    for batch in all_batches(run_dir):
        trained, dropped = {s["group"] for s in batch.samples}, {int(i.split(":")[1]) for i in batch.info["dropped"]}
        m = batch.info["metrics"]
        assert len(trained) == 8 == m["group/kept"] and len(dropped) == m["group/flat"]
        assert not trained & dropped and not (trained | dropped) & seen
        seen |= trained | dropped
        flat += len(dropped)
        for s in batch.samples:
            rewards = {x["rollout"]: x["reward"] for x in batch.samples if x["group"] == s["group"]}
            assert s["advantage"] == pytest.approx(s["reward"] - sum(rewards.values()) / len(rewards), abs=1e-6)
    ledger = batch.info["ledger"]["think_env"]
    assert flat > 0 and seen | set(ledger["open"]) == set(range(ledger["next"]))


def test_always_flat_or_failing_ends_the_run(run, capsys):
    with pytest.raises(RunError, match="flat at reward 1") as e:
        run(3, '{ kind = "constant" }')
    assert e.value.code == 4
    with pytest.raises(RunError, match="failed: ValueError") as e:
        run(3, '{ kind = "raises" }')
    assert e.value.code == 4 and capsys.readouterr().err.count('raise ValueError("never scores")') == 1


def test_bad_rewards_lose_their_rollouts_and_never_become_zero(run):
    run_dir = run(3, '{ kind = "misbehaves" }', "orchestrator.rollouts_per_example=8")
    rollouts = lines(run_dir / "rollouts.jsonl")
    failed = [r for r in rollouts if r["error"]]
    assert failed and {r["error"] for r in failed} <= {"RuntimeError", "ValueError"}
    assert all(r["reward"] is None and r["advantage"] is None for r in failed)
    assert all(r["reward"] > 0 for r in rollouts if not r["error"])
    for n, batch in enumerate(all_batches(run_dir)):
        assert batch.info["metrics"]["rollout/errors"] == sum(r["step"] == n for r in failed)
        assert not {(s["group"], s["rollout"]) for s in batch.samples} & {(r["group"], r["rollout"]) for r in failed}


def test_slow_rollouts_are_cancelled_and_counted(run):
    fake = {"generate 2": "hang", "generate 6": "500", "generate 9": "logprobs"}
    started = time.monotonic()
    rollouts = lines(run(3, '{ kind = "noise" }', "orchestrator.generation_timeout=3", fake=fake) / "rollouts.jsonl")
    assert {r["error"] for r in rollouts} == {"", "TimeoutError", "ValueError"}  # the 500 was retried
    assert time.monotonic() - started < 15


def test_blocking_rewards_delay_nobody(run):
    """Half of the rewards sleep 2 s in user code; together they take little more than one."""
    started = time.monotonic()
    run(1, '{ kind = "sleeps" }')
    assert time.monotonic() - started < 6


def test_long_prompts_are_dropped_and_counted(run):
    """Rows 'hello 0' to 'hello 36': those of two digits are a token longer."""
    run_dir = run(3, '{ kind = "noise" }', "orchestrator.max_prompt_len=10")
    assert {r["example"] for r in lines(run_dir / "rollouts.jsonl")} <= set(range(10))
    dropped = [why for b in all_batches(run_dir) for why in b.info["dropped"].values()]
    assert dropped and set(dropped) == {"long prompt"}
    assert sum(b.info["metrics"]["group/long"] for b in all_batches(run_dir)) == len(dropped)


@pytest.mark.parametrize("key", ["mask_truncated_completions", "zero_truncated_completions"])
def test_truncated_completions(key, run):
    run_dir = run(3, '{ kind = "noise" }', f"orchestrator.{key}=true", "orchestrator.sampling.max_tokens=24")
    truncated = [r["truncated"] for r in lines(run_dir / "rollouts.jsonl")]
    assert any(truncated) and not all(truncated)
    for batch in all_batches(run_dir):
        for s, mask in zip(batch.samples, batch.loss_mask.split(batch.sample_lens.tolist())):
            assert bool(mask.any()) != (s["truncated"] and key.startswith("mask"))
            assert (s["reward"] == 0) == (s["truncated"] and key.startswith("zero"))


def test_staleness_is_bounded_and_reached(run):
    """One request in fifty takes ten times as long. Batches of five versions are under way at once."""
    fake = {"generate_s": 0.1, "slow": [50, 1.0]}
    run_dir = run(40, '{ kind = "noise" }', "orchestrator.max_staleness=4", fake=fake, train_s=0.05)
    ages = [s["age"] for b in all_batches(run_dir) for s in b.samples]
    assert max(ages) == 4 and min(ages) == 0
    for n, batch in enumerate(all_batches(run_dir)):
        assert all(s["age"] == n - s["versions"][0] for s in batch.samples)


# --- the whole of launch.sh, with a fake server -----------------------------------------------------------------------


def test_strictly_on_policy(launched):
    done, run_dir = launched(
        5, '{ kind = "noise" }', "orchestrator.max_staleness=0", "eval.every=2", "trainer.learning_rate=1e-2"
    )
    assert "[launch] done" in done.stdout and done.stdout.count("\nstep ") + done.stdout.startswith("step ") == 5
    for n, batch in enumerate(all_batches(run_dir)):
        assert all(set(s["versions"]) == {n} and s["age"] == 0 for s in batch.samples)
        assert sorted({s["group"] for s in batch.samples}) == list(range(4 * n, 4 * n + 4))
    metrics = lines(run_dir / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(5)) and [m["version"] for m in metrics] == [1, 2, 3, 4, 5]
    for m in metrics:
        assert not set(KEYS) - set(m), set(KEYS) - set(m)
        assert m["policy/kl_sampler_age0"] < 1e-6 and m["policy/age0_tokens"] == sum_of_tokens(run_dir, m["step"])
        assert m["sync/dlogp_max"] < 1e-4
    evals = lines(run_dir / "eval.jsonl")
    assert [e["step"] for e in evals] == [0, 2, 4, 5] and all(e["version_first"] == e["version_last"] for e in evals)
    assert not set(EVAL_KEYS) - set(evals[0]) and not set(ROLLOUT_KEYS) - set(lines(run_dir / "rollouts.jsonl")[0])
    assert (run_dir / "final" / "model.safetensors").is_file() and not list(run_dir.glob("**/*.tmp"))


def sum_of_tokens(run_dir, step):
    return int(load_batch(run_dir / "batches" / f"step_{step:06d}.safetensors").loss_mask.sum())


KEYS = """step time version reward/mean reward/std rollout/tokens rollout/truncated rollout/errors rollout/forks
  group/kept group/flat staleness/mean staleness/max loss policy/entropy policy/kl_sampler policy/kl_sampler_age0
  policy/age0_tokens policy/clip_frac sync/dlogp_max sync/dlogp_mean reward/p10 reward/p50 reward/p90 optim/lr
  optim/grad_norm time/step_s
  time/wait_batch_s time/train_s time/sync_s perf/tokens_per_s perf/mfu perf/peak_gib reward/noisy""".split()
EVAL_KEYS = (
    "step version_first version_last env reward/mean pass@1 pass@k n ci95 tokens truncated seconds noisy".split()
)
ROLLOUT_KEYS = "step version env example group rollout reward metrics truncated prompt completion error dropped".split()


def slow_cispo(**given):
    """A loss that makes a step last a second."""
    import trainer

    time.sleep(1.0)
    cfg = given.pop("cfg")
    return trainer.compute_loss(**given, cfg=cfg._replace(loss="cispo"))


@pytest.mark.slow
def test_overlap(launched):
    """Generate and train take a second each; a step takes less than three quarters of their sum."""
    slow = ("trainer.loss=test_orchestrator:slow_cispo", "trainer.micro_batch_size=64")
    _, run_dir = launched(8, '{ kind = "noise" }', *slow, FAKE='{"generate_s": 1.0}')
    seconds = sorted(m["time/step_s"] for m in lines(run_dir / "metrics.jsonl")[2:])
    assert seconds[len(seconds) // 2] < 0.75 * 2.0, seconds


@pytest.mark.slow
def test_resume_continues_the_same_order(launched, tmp_path):
    """Stopped at 4, its last checkpoint lost, and continued to 6, is 6 in one go: same groups, same losses, one line a
    step; batches 2 and 3 are trained again as they are. Two servers and two ranks, for good measure."""
    args = (
        "orchestrator.max_staleness=0",
        "checkpoint.every=2",
        "checkpoint.keep=9",
        "eval.every=2",
        "inference.gpus=2",
    )
    env = '{ kind = "turns", num_turns = 1 }'
    _, run_dir = launched(6, env, *args)
    shutil.move(run_dir, tmp_path / "straight")
    launched(4, env, *args)
    assert (run_dir / "logs" / "inference1.log").is_file()
    shutil.rmtree(run_dir / "checkpoints" / "step_000004")
    launched(6, env, *args)
    straight = tmp_path / "straight"
    for name, keys in {"metrics.jsonl": ("step", "loss", "reward/mean"), "eval.jsonl": ("step", "reward/mean"),
                       "rollouts.jsonl": ("step", "group", "rollout", "reward", "dropped")}.items():  # fmt: skip
        a, b = ([[line[k] for k in keys] for line in lines(d / name)] for d in (straight, run_dir))
        assert a == b, name
    assert [b.info["dropped"] for b in all_batches(straight)] == [b.info["dropped"] for b in all_batches(run_dir)]


@pytest.mark.slow
def test_servers_that_run_elsewhere(launched, fake_servers):
    """inference.urls: launch.sh starts no server; the run is called what the server is called."""
    url = fake_servers()
    httpx.post(f"{url}/fake", json={})
    _, run_dir = launched(2, '{ kind = "noise" }', f'inference.urls=["{url}"]', ROLEMODEL_RUN_ID="run")
    assert [m["step"] for m in lines(run_dir / "metrics.jsonl")] == [0, 1]
    assert not (run_dir / "logs" / "inference.log").exists() and httpx.get(f"{url}/health").status_code == 200


@pytest.mark.slow
def test_a_run_that_cannot_learn_exits_4(launched):
    done, run_dir = launched(3, '{ kind = "constant" }', "trainer.gpus=2", check=False)
    assert done.returncode == 4 and "flat at reward 1" in done.stderr.splitlines()[-1]
    assert str(run_dir / "logs" / "orchestrator.log") in done.stderr.splitlines()[-1]


# --- parts ------------------------------------------------------------------------------------------------------------


def test_judge():
    good, none = orchestrator.Rollout({}, reward=1.0, trainable=True), orchestrator.Rollout({}, error="X")
    bad, masked = orchestrator.Rollout({}, reward=0.0, trainable=True), orchestrator.Rollout({}, reward=0.5)
    assert "flat" in orchestrator.judge([good, good, none])
    assert orchestrator.judge([good, none]) == "failed: , X" and not orchestrator.judge([good, bad, none])
    assert not orchestrator.judge([good, masked])
    assert orchestrator.judge([masked, orchestrator.Rollout({}, reward=0.7)]) == "empty or masked"


def test_config_of_the_tests_loads(tmp_path):
    (tmp_path / "x.toml").write_text(TOML.format(model="m", out=tmp_path, steps=1, args="{}"))
    assert load_config(tmp_path / "x.toml").env[0].id == "think_env"
