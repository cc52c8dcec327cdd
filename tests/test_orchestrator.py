"""orchestrator.py against the fake server: order, staleness, refills, what goes wrong, what resumes."""

import itertools
import json
import shutil
import time
from collections import Counter

import httpx
import pytest
from conftest import all_batches, lines

import orchestrator
from configs.lib.batch import load_batch
from configs.lib.order import Order, deal
from configs.lib.runtime import RunError
from orchestrator import Group, Rollout, extend_or_fork


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
    with pytest.raises(RunError, match="seed was 0, now 3. Choose another run_name") as e:
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
    orchestrator.print_once.cache_clear()
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


def test_too_many_lost_rollouts_end_the_run(run):
    """A fifth is the limit: what is lost is not punished, and a policy would learn to lose."""
    with pytest.raises(RunError, match=r"the last \d+ rollouts of think_env too many were lost: {.*%") as e:
        run(9, '{ kind = "misbehaves" }', "orchestrator.max_error_share=0.4")
    assert e.value.code == 4


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


# --- several environments, difficulty, curriculum ---------------------------------------------------------------------

MIX = """
[[env]]
id = "think_env"
name = "often"
ratio = 3.0
args = {{ kind = "noise" }}
[[env]]
id = "think_env"
name = "seldom"
args = {{ kind = "{other}", num_rows = 7 }}
"""


def test_environments_are_dealt_out_by_ratio():
    for ratios in ({"a": 3, "b": 1}, {"a": 0.5, "b": 0.2, "c": 0.3}, {"a": 1}, {"a": 1, "b": 100}):
        names = list(itertools.islice(deal(ratios), 500))
        for num in range(1, 501):
            for name, ratio in ratios.items():
                assert abs(names[:num].count(name) - num * ratio / sum(ratios.values())) < 1


@pytest.mark.parametrize("other", ["sleeps", "turns"])  # the second is much slower, or mostly flat
def test_a_mix_is_trained_at_its_ratio(run, other):
    run_dir = run(6, MIX.format(other=other), "eval.every=6", "orchestrator.rollouts_per_example=2")
    batches = all_batches(run_dir)
    kept = Counter((s["env"], s["group"]) for b in batches for s in b.samples)
    shares = Counter(name for name, _ in kept)
    assert shares == {"often": 36, "seldom": 12}
    for batch in batches:
        m = batch.info["metrics"]
        assert m["env/often/group/kept"] == 6 and m["env/seldom/group/kept"] == 2
        assert m["env/often/rollout/num"] + m["env/seldom/rollout/num"] == m["rollout/num"]
        assert "env/often/reward/noisy" in m and "env/seldom/reward/noisy" not in m
    assert [(e["step"], e["env"]) for e in lines(run_dir / "eval.jsonl")] == [
        (0, "often"), (0, "seldom"), (6, "often"), (6, "seldom")
    ]  # fmt: skip


def groups_of(row, *rewards, dropped=""):
    return Group("e", row, row, [Rollout({}, reward=r) for r in rewards], dropped)


def test_online_difficulty_prefers_the_middle_and_retires_what_is_always_flat(make_cfg):
    rows = [{"question": str(i)} for i in range(40)]
    cfg = make_cfg("orchestrator.buffer=online-difficulty", "orchestrator.retire_after=2")
    order = Order(rows, cfg)
    assert sorted(order.take(0)[1] for _ in range(40)) == list(range(40))  # nothing is known yet
    for i in range(10):
        for _ in range(2):
            order.settle(groups_of(i, 1.0, 1.0, dropped="flat at reward 1"))  # always solved
            order.settle(groups_of(10 + i, 0.0, 0.0, dropped="flat at reward 0"))  # never
        order.settle(groups_of(20 + i, *[1.0] * 9, 0.0))  # easy
        order.settle(groups_of(30 + i, 1.0, 0.0))
    order.settle(groups_of(9, 1.0, 0.0))  # it is not always solved after all
    assert order.tasks["0"] == [1.0, 2] and order.tasks["20"] == [0.9, 0] and order.tasks["9"][1] == 0
    again = Order(rows, cfg, json.loads(json.dumps(order.ledger())))  # as a checkpoint has it
    taken = [order.take(0) for _ in range(300)]
    assert taken == [again.take(0) for _ in range(300)]
    counts = Counter(row for _, row in taken)
    assert not {*range(9), *range(10, 20)} & set(counts)
    easy, middle = (sum(counts[i] for i in r) for r in (range(20, 30), range(30, 40)))
    assert 1.5 < middle / easy < 3  # chances 1 and 4 x 0.9 x 0.1 + 0.1
    only = Order(rows[:2], cfg)
    for i in (0, 1, 0, 1):
        only.settle(groups_of(i, 1.0, 1.0, dropped="flat at reward 1"))
    with pytest.raises(RunError, match="no row is left at step 3.*retired") as e:
        only.take(3)
    assert e.value.code == 4


def test_curriculum_goes_by_difficulty_and_step(make_cfg):
    rows = [{"question": str(i), "difficulty": ["easy", 2, "hard", None][i % 4]} for i in range(40)]
    order = Order(rows, make_cfg('orchestrator.curriculum={easy=[0, 10], "2"=[5, 20], hard=[10, 100]}'))
    for step, allowed in {0: {0, 3}, 5: {0, 1, 3}, 10: {1, 2, 3}, 30: {2, 3}}.items():
        assert {order.take(step)[1] % 4 for _ in range(60)} == allowed
    with pytest.raises(RunError, match="no row is left at step 7: outside the curriculum"):
        Order(rows[2:3], make_cfg("orchestrator.curriculum={hard=[10, 100]}")).take(7)


def test_a_curriculum_of_difficulties_that_no_row_has_is_refused(run):
    with pytest.raises(RunError, match=r"curriculum names \['esay'\]; the rows' difficulties are \['None'\]") as e:
        run(1, '{ kind = "noise" }', "orchestrator.curriculum={esay=[0, 10]}")
    assert e.value.code == 2


def test_retirement_needs_no_buffer(make_cfg):
    order = Order([{"question": str(i)} for i in range(4)], make_cfg("orchestrator.retire_after=1"))
    order.settle(groups_of(2, 1.0, 1.0, dropped="flat at reward 1"))
    assert {order.take(0)[1] for _ in range(30)} == {0, 1, 3}


def test_difficulty_survives_in_batches_and_metrics(run):
    run_dir = run(4, '{ kind = "turns", num_turns = 1, num_rows = 9 }', "orchestrator.buffer=online-difficulty")
    ledger = all_batches(run_dir)[-1].info["ledger"]["think_env"]
    settled = [r for r in lines(run_dir / "rollouts.jsonl")]
    assert set(ledger["tasks"]) == {str(r["example"]) for r in settled}
    assert all(0 <= rate <= 1 for rate, _ in ledger["tasks"].values())


def test_oversampling_puts_the_surplus_back(run):
    """Twice the groups are under way; the lowest indices that teach are trained on, the rest come again later."""
    overrides = ("orchestrator.oversampling_factor=2.0", "orchestrator.rollouts_per_example=2")
    run_dir = run(5, '{ kind = "turns", num_turns = 1 }', *overrides, fake={"slow": [3, 0.2]})
    seen = set()
    for batch in all_batches(run_dir):
        trained = {s["group"] for s in batch.samples}
        dropped = {int(key.split(":")[1]) for key in batch.info["dropped"]}
        assert len(trained) == 8 and not (trained | dropped) & seen
        seen |= trained | dropped
        ledger = batch.info["ledger"]["think_env"]
        assert seen | set(ledger["open"]) == set(range(ledger["next"]))
    assert max(seen) < len(seen) + 24  # none is left behind for long


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
        assert m["policy/kl_age0"] < 1e-6 and m["policy/tokens_age0"] == sum_of_tokens(run_dir, m["step"])
        assert m["sync/dlogp_max"] < 1e-4
    evals = lines(run_dir / "eval.jsonl")
    assert [e["step"] for e in evals] == [0, 2, 4, 5] and all(e["version_first"] == e["version_last"] for e in evals)
    assert not set(EVAL_KEYS) - set(evals[0]) and not set(ROLLOUT_KEYS) - set(lines(run_dir / "rollouts.jsonl")[0])
    assert (run_dir / "final" / "model.safetensors").is_file() and not list(run_dir.glob("**/*.tmp"))


def sum_of_tokens(run_dir, step):
    return int(load_batch(run_dir / "batches" / f"step_{step:06d}.safetensors").loss_mask.sum())


KEYS = """step time version reward/mean reward/std rollout/tokens rollout/truncated rollout/errors rollout/forks
  group/kept group/flat staleness/mean staleness/max loss policy/entropy policy/kl_sampler policy/kl_age0
  policy/tokens_age0 policy/clip_frac sync/dlogp_max sync/dlogp_mean reward/p10 reward/p50 reward/p90 optim/lr
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
    _, run_dir = launched(6, '{ kind = "noise" }', *slow, FAKE='{"generate_s": 1.0}')
    seconds = sorted(m["time/step_s"] for m in lines(run_dir / "metrics.jsonl")[2:])
    assert seconds[len(seconds) // 2] < 0.75 * 2.0, seconds


@pytest.mark.slow
def test_servers_that_run_elsewhere(launched, fake_servers):
    """inference.urls: launch.sh starts no server; the run is called what the server is called."""
    url = fake_servers()
    httpx.post(f"{url}/fake", json={})
    _, run_dir = launched(2, '{ kind = "noise" }', f'inference.urls=["{url}"]', ROLEMODEL_RUN_ID="run")
    assert [m["step"] for m in lines(run_dir / "metrics.jsonl")] == [0, 1]
    assert not (run_dir / "logs" / "inference.log").exists() and httpx.get(f"{url}/health").status_code == 200


@pytest.mark.slow
def test_a_server_of_another_run_is_refused(launched, fake_servers):
    done, _ = launched(2, '{ kind = "noise" }', f'inference.urls=["{fake_servers()}"]', check=False)
    assert done.returncode == 2 and "a server of another run answers" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_user_code_that_never_returns_does_not_keep_the_run(launched):
    """One reward in five sleeps for ever in its thread: its rollouts time out, and the run ends when it is done."""
    started = time.monotonic()
    _, run_dir = launched(2, '{ kind = "stuck" }', "orchestrator.generation_timeout=2")
    assert "TimeoutError" in {r["error"] for r in lines(run_dir / "rollouts.jsonl")}
    assert time.monotonic() - started < 60


@pytest.mark.slow
def test_a_run_that_cannot_learn_exits_4(launched):
    done, run_dir = launched(3, '{ kind = "constant" }', check=False)
    assert done.returncode == 4 and "flat at reward 1" in done.stderr.splitlines()[-1]
    assert str(run_dir / "logs" / "orchestrator.log") in done.stderr.splitlines()[-1]


# --- parts ------------------------------------------------------------------------------------------------------------


def test_why_drop():
    good, none = orchestrator.Rollout({}, reward=1.0, trainable=True), orchestrator.Rollout({}, error="X")
    bad, masked = orchestrator.Rollout({}, reward=0.0, trainable=True), orchestrator.Rollout({}, reward=0.5)
    assert "flat" in orchestrator.why_drop([good, good, none], 1.0)
    assert orchestrator.why_drop([good, none], 1.0) == "failed: , X"
    assert not orchestrator.why_drop([good, bad, none], 1.0)
    slow = orchestrator.Rollout({}, reward=1.0, trainable=True, num_turns=3)
    assert "flat" in orchestrator.why_drop([good, slow], 1.0) and not orchestrator.why_drop([good, slow], 0.9)
    assert not orchestrator.why_drop([good, masked], 1.0)
    assert orchestrator.why_drop([masked, orchestrator.Rollout({}, reward=0.7)], 1.0) == "empty or masked"
