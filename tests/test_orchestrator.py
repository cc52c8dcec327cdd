"""orchestrator.py against the fake server: order, staleness, refills, hooks, what goes wrong, what resumes."""

import asyncio
import itertools
import json
import math
import re
import shutil
import sys
import time
from collections import Counter

import httpx
import numpy as np
import pytest
import torch
from aiohttp import web
from conftest import ROOT, all_batches, free_port, lines

import orchestrator
import trainer
from configs import RunError, load_config
from configs.algorithms.orders import Picky
from env import Rubric, SingleTurnEnv, Truncated
from orchestrator import Client, Group, Order, Rollout, ServerError, deal, extend_or_fork, save_batch, why_drop
from tools.watch import by_environment
from trainer import load_batch

# --- parts ------------------------------------------------------------------------------------------------------------


def test_extend_or_fork():
    samples = []
    extend_or_fork(samples, [1, 2], [3, 4], [-0.1, -0.2], 0)
    extend_or_fork(samples, [1, 2, 3, 4, 9], [5], [-0.3], 1)
    assert samples == [
        {"tokens": [1, 2, 3, 4, 9, 5], "mask": [0, 0, 1, 1, 0, 1], "old_logp": [0, 0, -0.1, -0.2, 0, -0.3],
         "turn": [0, 0, 0, 0, 1, 1]}
    ]  # fmt: skip
    extend_or_fork(samples, [1, 2, 4, 9, 5, 9], [6], [-0.4], 2)
    fork = {"tokens": [1, 2, 4, 9, 5, 9, 6], "mask": [0] * 6 + [1], "old_logp": [0] * 6 + [-0.4], "turn": [2] * 7}
    assert samples[1] == fork


def test_order_is_a_function_of_seed_and_index(make_cfg):
    rows = [{"question": str(i)} for i in range(37)]
    order = Order(rows, make_cfg("seed=3"))
    taken = [order.take(0) for _ in range(37 * 3)]
    assert [index for index, _ in taken] == list(range(37 * 3))
    for epoch in range(3):  # every row once an epoch, in another order
        assert sorted(number for _, number in taken[37 * epoch : 37 * (epoch + 1)]) == list(range(37))
    assert [n for _, n in taken[:37]] != [n for _, n in taken[37:74]]
    resumed = Order(rows, make_cfg("seed=3"), {"next": 50, "open": [41, 44], "extra": {}})
    assert [resumed.take(0) for _ in range(3)] == [taken[41], taken[44], taken[50]]
    other = Order(rows, make_cfg("seed=4"))
    assert [other.take(0)[1] for _ in range(37)] != [number for _, number in taken[:37]]


def test_why_drop(make_cfg):
    cfg, shorter = make_cfg(), make_cfg("trainer.gamma=0.9")
    said, cut = [{"mask": [0, 1]}], [{"mask": [0, 0]}]
    good, none = Rollout({}, said, reward=1.0, num_turns=1), Rollout({}, error="X: why")
    bad, masked = Rollout({}, said, reward=0.0, num_turns=1), Rollout({}, cut, reward=0.5, num_turns=1)
    assert why_drop([good, good, none], cfg) == "flat at reward 1"
    assert why_drop([good, none], cfg) == "failed: X: why"
    assert not why_drop([good, bad, none], cfg)
    slow = Rollout({}, said, reward=1.0, num_turns=3)
    assert "flat" in why_drop([good, slow], cfg) and not why_drop([good, slow], shorter)
    assert not why_drop([good, masked], cfg)
    assert why_drop([masked, Rollout({}, reward=0.7, num_turns=1)], cfg) == "empty or masked"
    assert why_drop([Rollout({}), Rollout({})], cfg) == "long prompt"


def test_environments_are_dealt_out_by_ratio():
    for ratios in ({"a": 3, "b": 1}, {"a": 0.5, "b": 0.2, "c": 0.3}, {"a": 1}, {"a": 1, "b": 100}):
        names = list(itertools.islice(deal(ratios), 500))
        for num in range(1, 501):
            for name, ratio in ratios.items():
                assert abs(names[:num].count(name) - num * ratio / sum(ratios.values())) < 1


@pytest.mark.parametrize("kind", [list, np.array])
def test_batch_files_carry_columns_by_name(kind, tmp_path):
    """A list or array as long as the tokens is a column; who has none has nan there; another length is refused."""
    path = tmp_path / "step_000000.safetensors"
    plain = {"tokens": [5, 6, 7], "mask": [0, 1, 1], "old_logp": [0.0, -1.0, -2.0], "turn": [0, 0, 0], "reward": 1.0}
    column = kind([0.5, 1.5, 2.5])
    save_batch(path, [plain | {"teacher_logp": column, "versions": [0, 0, 1]}, plain], {"step": 0})
    batch = load_batch(path)
    found = batch.columns["teacher_logp"].tolist()
    assert found[:3] == [0.5, 1.5, 2.5] and all(map(math.isnan, found[3:]))
    assert batch.samples[0]["versions"] == [0, 0, 1] and batch.columns["tokens"].tolist() == [5, 6, 7] * 2
    with pytest.raises(RunError, match="column 'teacher_logp' has 2 values for 3 tokens") as e:
        save_batch(path, [plain | {"teacher_logp": [0.5, 1.5]}], {"step": 0})
    assert e.value.code == 4


def test_what_is_asked_again(make_cfg):
    """Lost connections, 429 and 5xx three times; what the server refuses never; too long a prompt is no error."""
    answers = {"busy": [429, 503, 200], "down": [500] * 9, "wrong": [404], "long": [400]}
    asked = Counter()

    async def answer(request):
        kind = request.path[1:]
        asked[kind] += 1
        text = "This model's maximum context length is 64 tokens" if kind == "long" else "{}"
        return web.Response(status=answers[kind].pop(0), text=text)

    async def post(client, path):
        try:
            return await client.post(0, path, {})
        except Exception as e:
            return type(e)

    async def go():
        app, port = web.Application(), free_port()
        app.add_routes([web.post("/{kind}", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        client = Client(make_cfg(f'inference.urls=["http://127.0.0.1:{port}"]'))
        found = [await post(client, f"/{kind}") for kind in ("busy", "down", "wrong", "long")]
        await client.session.close()
        await runner.cleanup()
        return found

    assert asyncio.run(go()) == [{}, ServerError, ServerError, orchestrator.Truncated]
    assert asked == {"busy": 3, "down": 4, "wrong": 1, "long": 1}


def test_an_evaluation_asks_for_its_adapter_while_it_is_loaded(make_cfg):
    """Of version 4 with S = 1 the trainer keeps adapters 3 and 4 (and 2, until all know of 4)."""
    cfg, asked = make_cfg("trainer.dtype=bf16", "trainer.use_lora=true", "orchestrator.max_staleness=1"), []

    async def post(server, path, body):
        asked.append(body["model"])
        return {"choices": []}

    async def go():
        client = Client(cfg)
        client.post, client.version = post, 4
        for version in (None, 4, 3, 2, 0):
            await orchestrator.sample(client, 0, "text", 1, version=version)
        await client.session.close()

    asyncio.run(go())
    assert asked == [f"test-v{n}" for n in (4, 4, 3, 3, 3)]


def test_evaluations_count_what_was_lost():
    rollouts = [Rollout({}, reward=1.0, num_turns=1), Rollout({}, error="ValueError"), Rollout({}, reward=0.0)]
    found = orchestrator.eval_metrics([rollouts[:2], rollouts[2:], rollouts[1:2]])
    assert found["n"] == 2 and found["errors"] == 2 and found["reward/mean"] == 0.5 and found["pass@k"] == 0.5
    assert found["rows"] == [1.0, 0.0, None]
    solved = orchestrator.eval_metrics([[Rollout({}, reward=0.7 + 0.2 + 0.1)]])  # 0.9999999999999999
    assert solved["pass@1"] == solved["pass@k"] == 1


# --- in this process, against a fake server ---------------------------------------------------------------------------


def test_multi_turn_forks_only_where_the_template_drops_history(run, tmp_path):
    from think_env import DROPS

    (tmp_path / "drops.jinja").write_text(DROPS)
    for template, num_samples in (("", 1), (str(tmp_path / "drops.jinja"), 4)):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        args = '{ kind = "turns", num_turns = 4, prompt = "hi" }'
        run_dir = run(1, args, f"chat_template={template}", "orchestrator.sampling.max_tokens=4", template=template)
        batch, forks = all_batches(run_dir)[0], {}
        for r in lines(run_dir / "rollouts.jsonl"):
            assert len(r["completion"]) == 7  # four answers, three replies
            lost = [bool(m["content"]) for m in r["completion"][:5:2]]  # an answer of nothing cannot be dropped
            forks[r["group"], r["rollout"]] = sum(lost) if template else 0
        samples = Counter((s["group"], s["rollout"]) for s in batch.samples)
        assert samples == {key: 1 + forks[key] for key in samples}
        assert max(samples.values()) == num_samples and (batch.info["metrics"]["rollout/forks"] > 0) == bool(template)
        of_rollout = {key: [] for key in samples}
        for s, turn, mask in zip(batch.samples, each(batch, "turn"), each(batch, "mask")):
            of_rollout[s["group"], s["rollout"]] += turn[mask].unique().tolist()
        assert all(turns == [0, 1, 2, 3] for turns in of_rollout.values())  # each is said once


def each(batch, column):
    """A column, sample by sample."""
    return batch.columns[column].split(batch.lens.tolist())


def test_a_prompt_made_in_setup_state_is_what_is_sampled_from(run):
    run_dir = run(1, '{ kind = "own prompt" }')
    for r in lines(run_dir / "rollouts.jsonl"):
        assert r["prompt"][0]["content"].startswith("changed") and not r["error"]
    for tokens in each(all_batches(run_dir)[0], "tokens"):
        text = run.tokenizer.decode(tokens[:9].tolist())
        assert text.startswith("<|user|>changed"), text


def test_context_that_ends_truncates(run):
    """Turns go on until max_seq_len is full."""
    run_dir = run(1, '{ kind = "turns", num_turns = 50 }', "orchestrator.sampling.max_tokens=9")
    rollouts = lines(run_dir / "rollouts.jsonl")
    assert all(r["truncated"] and not r["error"] and r["reward"] is not None for r in rollouts)
    assert 56 <= max(all_batches(run_dir)[0].lens) <= 64


def test_a_prompt_that_fills_the_context_truncates(models, fake_servers):
    """vLLM cuts max_tokens to 0 and refuses that, in other words than where a prompt is too long."""

    async def ask(num):
        client = Client(load_config(ROOT / "configs" / "reverse_text.toml", [f'inference.urls=["{fake_servers()}"]']))
        body = {"model": "run", "prompt": "a" * num, "max_tokens": 9, "logprobs": 0, "return_token_ids": True}
        try:
            return await client.post(0, "/v1/completions", body)
        finally:
            await client.session.close()

    httpx.post(f"{fake_servers()}/fake", json={})
    assert len(asyncio.run(ask(63))["choices"][0]["token_ids"]) == 1
    for num in (64, 65):
        with pytest.raises(Truncated):
            asyncio.run(ask(num))


def test_text_prompts_go_to_completions(run):
    rollout = lines(run(2, '{ kind = "text" }') / "rollouts.jsonl")[0]
    assert isinstance(rollout["prompt"], str) and isinstance(rollout["completion"][0], str)


def test_what_the_environment_and_the_model_lack_is_refused(run):
    for kind, override, message in (
        ("noise", "model=nowhere/at_all", "model = 'nowhere/at_all'"),
        ("noise", "model=.cache/at_all", "model = '.cache/at_all'"),
        ("noise", "chat_template=nowhere.jinja", "chat_template.* 'nowhere.jinja'"),
        ("no such kind", "max_steps=2", r"env.id = 'think_env': StopIteration:  in load_environment, think_env.py:\d+"),
        ("noise", "env.id=not_there", "env.id = 'not_there': ModuleNotFoundError"),
        ("constant", "eval.every=1", "env.id = 'think_env': RunError: eval.every is set, but it has no eval_dataset"),
    ):
        with pytest.raises(RunError, match=message) as e:
            run(2, f'{{ kind = "{kind}" }}', override)
        assert e.value.code == (4 if "Stop" in message else 2)


def dropped_of(run_dir, batch):
    """{group: why} of the groups that were dropped on the way to a batch."""
    found = lines(run_dir / "rollouts.jsonl")
    return {r["group"]: r["dropped"] for r in found if r["step"] == batch.info["step"] and r["dropped"]}


def all_dropped(run_dir):
    return [why for batch in all_batches(run_dir) for why in dropped_of(run_dir, batch).values()]


def test_flat_groups_are_dropped_and_refilled_in_order(run):
    run_dir = run(6, '{ kind = "turns", num_turns = 1 }', "orchestrator.rollouts_per_example=2")
    seen, flat = set(), 0
    for batch in all_batches(run_dir):
        trained, dropped = {s["group"] for s in batch.samples}, set(dropped_of(run_dir, batch))
        m = batch.info["metrics"]
        assert len(trained) == 8 == m["group/kept"] and len(dropped) == m["group/flat"]
        assert not trained & dropped and not (trained | dropped) & seen
        seen |= trained | dropped
        flat += len(dropped)
    ledger = batch.info["ledger"]["think_env"]
    assert flat > 0 and seen | set(ledger["open"]) == set(range(ledger["next"]))


def test_always_flat_or_failing_ends_the_run(run):
    with pytest.raises(RunError, match="41 groups of think_env in a row.*flat at reward 1") as e:
        run(3, '{ kind = "constant" }')
    assert e.value.code == 4
    with pytest.raises(RunError, match="failed: ValueError") as e:
        run(3, '{ kind = "raises" }')
    assert e.value.code == 4


def test_bad_rewards_lose_their_rollouts_and_never_become_zero(run):
    run_dir = run(3, '{ kind = "misbehaves" }', "orchestrator.rollouts_per_example=8")
    rollouts = lines(run_dir / "rollouts.jsonl")
    failed = [r for r in rollouts if r["error"]]
    for r in failed:  # the cause and its place, or the function's name
        assert re.match(r"RuntimeError: user code fails in misbehaves, think_env.py:\d+$|ValueError: reward function "
                        "misbehaves returned (None|nan|1|inf), no finite number", r["error"]), r["error"]  # fmt: skip
    assert all(r["reward"] is None for r in failed) and all(r["reward"] > 0 for r in rollouts if not r["error"])
    for n, batch in enumerate(all_batches(run_dir)):
        assert batch.info["metrics"]["rollout/errors"] == sum(r["step"] == n for r in failed)
        assert not {(s["group"], s["rollout"]) for s in batch.samples} & {(r["group"], r["rollout"]) for r in failed}


def test_a_reward_of_none_ends_the_run_at_once_and_names_the_function(run):
    """What is lost is not punished, and a policy would learn to lose: a fifth is the limit, counted as it is lost."""
    message = (
        r"\d+ of the last \d+ rollouts of think_env were lost, mostly by ValueError: reward function none_if_wrong "
    )
    with pytest.raises(RunError, match=message + r"returned None.*\(orchestrator.max_error_share = 0.2\)") as e:
        run(9, '{ kind = "none_if_wrong" }', "orchestrator.max_error_share=0.2")
    assert e.value.code == 4 and len(list((run.run_dir / "batches").iterdir())) < 3


def test_slow_rollouts_are_cancelled_and_counted(run):
    fake = {"generate 2": "hang", "generate 6": "500", "generate 9": "logprobs"}
    started = time.monotonic()
    rollouts = lines(run(3, '{ kind = "noise" }', "orchestrator.generation_timeout=3", fake=fake) / "rollouts.jsonl")
    assert {r["error"].split(":")[0] for r in rollouts} == {"", "TimeoutError", "DataError"}  # the 500 was retried
    assert time.monotonic() - started < 15


def test_blocking_rewards_delay_nobody(run):
    """Half of 16 rewards sleep 2 s in user code; one after the other they would take 16 s."""
    started = time.monotonic()
    run(1, '{ kind = "sleeps" }')
    assert time.monotonic() - started < 12


def test_no_more_than_max_concurrent_rollouts_are_under_way(run, fake_servers):
    run(2, '{ kind = "noise" }', "orchestrator.max_concurrent=8", fake={"generate_s": 0.1})
    assert httpx.get(f"{fake_servers()}/health").json()["most"] == 2  # requests of four


def test_long_prompts_are_dropped_and_counted(run):
    """Rows 'hello 0' to 'hello 36': those of two digits are a token longer."""
    run_dir = run(3, '{ kind = "noise" }', "orchestrator.max_prompt_len=10")
    assert {r["example"] for r in lines(run_dir / "rollouts.jsonl") if not r["dropped"]} <= set(range(10))
    dropped = all_dropped(run_dir)
    assert dropped and set(dropped) == {"long prompt"}
    assert sum(b.info["metrics"]["group/long"] for b in all_batches(run_dir)) == len(dropped)


def test_prompts_that_max_seq_len_does_not_hold_are_dropped_too(run):
    """The server says so; rows of two digits have 64 tokens."""
    prompt = "x" * 58
    run_dir = run(2, f'{{ kind = "noise", prompt = "{prompt}" }}', "orchestrator.sampling.max_tokens=4")
    dropped = all_dropped(run_dir)
    assert dropped and set(dropped) == {"long prompt"}
    assert {r["example"] for r in lines(run_dir / "rollouts.jsonl") if not r["dropped"]} <= set(range(10))


@pytest.mark.parametrize("key", ["mask_truncated_completions", "zero_truncated_completions"])
def test_truncated_completions(key, run):
    run_dir = run(3, '{ kind = "noise" }', f"orchestrator.{key}=true", "orchestrator.sampling.max_tokens=24")
    truncated = [r["truncated"] for r in lines(run_dir / "rollouts.jsonl")]
    assert any(truncated) and not all(truncated)
    for batch in all_batches(run_dir):
        for s, mask in zip(batch.samples, each(batch, "mask")):
            assert bool(mask.any()) != (s["truncated"] and key.startswith("mask"))
            assert (s["reward"] == 0) == (s["truncated"] and key.startswith("zero"))


def test_staleness_is_bounded_and_reached(run):
    """One request in fifty takes ten times as long. Batches of five versions are under way at once."""
    fake = {"generate_s": 0.1, "slow": [50, 1.0]}
    run_dir = run(30, '{ kind = "noise" }', "orchestrator.max_staleness=4", fake=fake, train_s=0.05)
    ages = [s["age"] for b in all_batches(run_dir) for s in b.samples]
    assert max(ages) == 4 and min(ages) == 0
    for n, batch in enumerate(all_batches(run_dir)):
        assert all(s["age"] == n - s["versions"][0] for s in batch.samples)


def test_oversampling_puts_the_surplus_back(run):
    """Twice the groups are under way; the lowest indices that teach are trained on, the rest come again later."""
    overrides = ("orchestrator.oversampling_factor=2.0", "orchestrator.rollouts_per_example=2")
    run_dir = run(5, '{ kind = "turns", num_turns = 1 }', *overrides, fake={"slow": [3, 0.2]})
    seen = set()
    for batch in all_batches(run_dir):
        trained = {s["group"] for s in batch.samples}
        dropped = set(dropped_of(run_dir, batch))
        assert len(trained) == 8 and not (trained | dropped) & seen
        seen |= trained | dropped
        ledger = batch.info["ledger"]["think_env"]
        assert seen | set(ledger["open"]) == set(range(ledger["next"]))
    assert max(seen) < len(seen) + 24  # none is left behind for long


# --- several environments ---------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("other", ["sleeps", "turns"])  # the second is much slower, or mostly flat
def test_a_mix_is_trained_at_its_ratio(run, other):
    run_dir = run(6, MIX.format(other=other), "eval.every=6", "orchestrator.rollouts_per_example=2")
    batches = all_batches(run_dir)
    kept = Counter((s["env"], s["group"]) for b in batches for s in b.samples)
    assert Counter(name for name, _ in kept) == {"often": 36, "seldom": 12}
    for batch in batches:
        mine = [r for r in lines(run_dir / "rollouts.jsonl") if r["step"] == batch.info["step"]]
        m = batch.info["metrics"] | by_environment(mine)
        assert m["env/often/group/kept"] == 6 and m["env/seldom/group/kept"] == 2
        assert m["env/often/rollout/num"] + m["env/seldom/rollout/num"] == m["rollout/num"]
        assert "env/often/reward/noisy" in m and "env/seldom/reward/noisy" not in m
    assert [(e["step"], e["env"]) for e in lines(run_dir / "eval.jsonl")] == [
        (0, "often"), (0, "seldom"), (6, "often"), (6, "seldom")
    ]  # fmt: skip


# --- hooks ------------------------------------------------------------------------------------------------------------


class NoRows(Picky):
    def is_wanted(self, index, row, step):
        return False


class EvenRows(Picky):
    """Rows of even numbers alone; counts what it settles."""

    def is_wanted(self, index, row, step):
        return row % 2 == 0

    def settle(self, group):
        super().settle(group)
        self.extra["settled"] = self.extra.get("settled", 0) + 1


def test_an_order_of_ones_own(run):
    run_dir = run(3, '{ kind = "noise" }', "orchestrator.order=test_orchestrator:EvenRows")
    assert {r["example"] % 2 for r in lines(run_dir / "rollouts.jsonl")} == {0}
    ledgers = [batch.info["ledger"]["think_env"] for batch in all_batches(run_dir)]
    assert [ledger["extra"]["settled"] for ledger in ledgers] == [4, 8, 12]
    with pytest.raises(RunError, match=r"no row is left at step \d: NoRows wants none of them") as e:
        run(4, '{ kind = "noise" }', "orchestrator.order=test_orchestrator:NoRows")
    assert e.value.code == 4


KEPT = []  # what keep_most kept, for kept_before


def keep_most(rollouts, cfg):
    """Two rows of three; remembers them."""
    if int(rollouts[0].state["answer"]) % 3 == 0:
        return "not mine"
    KEPT.append(rollouts)
    return why_drop(rollouts, cfg)


def kept_before(n):
    """From batch 2 on, the first group that was kept."""
    return [Group("think_env", 1000 + n, 0, KEPT[0], "")] if n > 1 else []


def test_groups_are_kept_by_ones_own_rule_and_may_come_again(run):
    KEPT.clear()
    hooks = ("orchestrator.keep=test_orchestrator:keep_most", "orchestrator.extra_groups=test_orchestrator:kept_before")
    run_dir = run(4, '{ kind = "noise" }', *hooks, "orchestrator.max_staleness=0")
    batches = all_batches(run_dir)
    assert set(all_dropped(run_dir)) == {"not mine"}
    for n, batch in enumerate(batches):
        again = [s for s in batch.samples if s["group"] >= 1000]
        assert len(batch.samples) == 16 + len(again) and len(again) == 4 * (n > 1)
        assert batch.info["rollouts"] == len(batch.samples)
        assert {s["age"] for s in again} <= {n}
        assert all(s["example"] % 3 for s in batch.samples if s["group"] < 1000)


def keep_all(rollouts, cfg):
    return ""


def test_a_group_without_rewards_is_nobodys_to_keep(run):
    """On a row's first visit both rollouts are lost."""
    hooks = ["orchestrator.keep=test_orchestrator:keep_all", "orchestrator.max_error_share=1.0"]
    run_dir = run(1, '{ kind = "misbehaves" }', "orchestrator.rollouts_per_example=2", *hooks)
    (batch,) = all_batches(run_dir)
    assert {why.split(":")[0] for why in all_dropped(run_dir)} == {"failed"} and batch.samples


def test_an_environment_adds_columns(run):
    run_dir = run(1, '{ kind = "columns" }')
    batch = all_batches(run_dir)[0]
    assert batch.columns["place"].tolist() == [i for n in batch.lens.tolist() for i in range(n)]
    with pytest.raises(RunError, match="column 'place' has 1 values for") as e:
        run(1, '{ kind = "columns", num_turns = 0 }', "run_name=other")
    assert e.value.code == 4


# --- evaluation, resume -----------------------------------------------------------------------------------------------


def test_each_version_is_evaluated_once_and_holds_its_batch(run):
    run_dir = run(5, '{ kind = "noise" }', "eval.every=2", fake={"generate_s": 0.2})
    found = lines(run_dir / "eval.jsonl")
    assert [e["step"] for e in found] == [0, 2, 4, 5]
    assert all(e["version_first"] == e["version_last"] == e["step"] for e in found)
    assert all(e["n"] == 3 and e["errors"] == 0 and e["noisy"] == e["reward/mean"] for e in found)


def test_an_evaluation_that_takes_longer_than_its_hold_says_so(run, capsys):
    """No version is evaluated twice, and the last one is in any case."""
    slow = ("eval.every=1", "eval.hold_s=0.1", "orchestrator.max_staleness=0", "eval.rollouts_per_example=16")
    run_dir = run(6, '{ kind = "misbehaves" }', *slow, "orchestrator.max_concurrent=16", fake={"generate_s": 0.2})
    found = lines(run_dir / "eval.jsonl")
    steps = [e["step"] for e in found]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 6 and len(steps) < 7
    assert any(e["version_last"] > e["version_first"] for e in found)
    assert all(e["n"] == 3 and e["errors"] > 0 for e in found)
    said = capsys.readouterr().out
    assert f"n 3 errors {found[0]['errors']}" in said and said.count("eval ") == len(found)


def test_an_evaluation_in_which_all_is_lost_ends_the_run(run):
    with pytest.raises(
        RunError, match="evaluation of think_env at version 0, all is lost: failed: ValueError.*in raises"
    ) as e:
        run(2, '{ kind = "raises" }', "eval.every=1")
    assert e.value.code == 4


def test_an_evaluation_of_prompts_that_are_all_too_long_says_so(run):
    with pytest.raises(RunError, match="all is lost: long prompt") as e:
        run(2, '{ kind = "noise" }', "eval.every=1", "orchestrator.max_prompt_len=1")
    assert e.value.code == 4


ANSWERS = '{ kind = "turns", num_turns = 1, num_rows = 10 }'  # as good as the server's answers, which repeat exactly


def history(run_dir):
    keys = ("step", "group", "example", "rollout", "reward", "dropped")
    return sorted([line[k] for k in keys] for line in lines(run_dir / "rollouts.jsonl"))


def test_a_run_resumes_where_it_was_and_deals_out_the_same_rows(run, tmp_path):
    """From the batches that are there; what was written for later ones, or cut off, is made again."""
    overrides = ("orchestrator.max_staleness=0", "eval.every=2")
    whole = run(6, ANSWERS, *overrides)
    expected, evaluations = history(whole), [(e["step"], e["reward/mean"]) for e in lines(whole / "eval.jsonl")]
    for n in (3, 4, 5):  # as after a kill: lines that no batch has, and half a line
        (whole / "batches" / f"step_{n:06d}.safetensors").unlink()
    with open(whole / "rollouts.jsonl", "a") as f:
        f.write('{"step": 9, "half')
    again = run(6, ANSWERS, *overrides)
    assert history(again) == expected
    assert [(e["step"], e["reward/mean"]) for e in lines(again / "eval.jsonl")] == evaluations
    ledger = all_batches(again)[-1].info["ledger"]["think_env"]
    issued = {index for _, index, *_ in expected}
    assert issued | set(ledger["open"]) == set(range(ledger["next"]))


def test_evaluations_of_weights_that_do_not_come_again_are_dropped(run):
    """Of versions after the checkpoint, where the run goes on with another learning rate. The same: all stay."""
    run_dir = run(3, ANSWERS, "eval.every=1")
    cfg = load_config(run_dir / "config.toml")
    assert orchestrator.resume(run_dir, cfg)[:2] == (0, 3)
    assert [e["step"] for e in lines(run_dir / "eval.jsonl")] == [0, 1, 2, 3]
    other = load_config(run_dir / "config.toml", ["trainer.learning_rate=0.5"])
    assert orchestrator.resume(run_dir, other)[:2] == (0, 3)
    assert [e["step"] for e in lines(run_dir / "eval.jsonl")] == [0]


def test_batches_after_a_gap_are_refused(run):
    """They were sampled by versions that are far behind those that would train on them."""
    run_dir = run(4, ANSWERS)
    (run_dir / "batches" / "step_000001.safetensors").unlink()
    with pytest.raises(RunError, match=r"a batch before .*step_000003.safetensors is missing. Remove the rest") as e:
        orchestrator.resume(run_dir, load_config(run_dir / "config.toml"))
    assert e.value.code == 6


def test_batches_of_another_configuration_are_refused(run):
    run(1, '{ kind = "noise" }')
    with pytest.raises(RunError, match="seed was 0, now 3. Choose another run_name") as e:
        run(1, '{ kind = "noise" }', "seed=3")
    assert e.value.code == 2


# --- the whole of launch.sh, with a fake server -----------------------------------------------------------------------


def slow_cispo(micro, logp_N, entropy_N, cfg):
    """A loss that makes a step last a second."""
    time.sleep(1.0)
    return trainer.compute_loss(micro, logp_N, entropy_N, cfg._replace(loss="cispo"))


@pytest.mark.slow
@pytest.mark.long
def test_overlap(launched):
    """Generate and train take a second each; a step takes less than three quarters of their sum."""
    slow = ("trainer.loss=test_orchestrator:slow_cispo", "trainer.micro_batch_size=64")
    _, run_dir = launched(6, '{ kind = "noise" }', *slow, FAKE='{"generate_s": 1.0}')
    shares = [m["time/step_s"] / (1.0 + m["time/train_s"]) for m in lines(run_dir / "metrics.jsonl")[2:]]
    assert min(shares) < 0.75, shares  # without overlap it is 1 in every step; load makes single steps longer


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ["full", pytest.param("adapters", marks=pytest.mark.long)]
)  # test_vllm.py has them, too
@pytest.mark.long
def test_a_whole_run_in_16_bits(how, launched):
    """Every version within the canary's limit, rollouts up to two versions old; adapters go on from a checkpoint."""
    overrides = ("trainer.dtype=bf16", f"trainer.use_lora={str(how == 'adapters').lower()}", "checkpoint.every=2")
    more = ("orchestrator.max_staleness=2", "eval.every=2", "trainer.gradient_checkpointing=true")
    for steps in (2, 4) if how == "adapters" else (4,):
        done, run_dir = launched(steps, '{ kind = "noise" }', *overrides, *more)
    metrics = lines(run_dir / "metrics.jsonl")
    assert [m["step"] for m in metrics] == list(range(4)), done.stdout + done.stderr
    assert all(m["sync/dlogp_mean"] < 0.05 and m["policy/kl_sampler"] < 0.01 for m in metrics)
    assert [e["step"] for e in lines(run_dir / "eval.jsonl")] == [0, 2, 4]
    name = "adapter_model" if how == "adapters" else "model"
    assert (run_dir / "final" / f"{name}.safetensors").is_file() and not (run_dir / "adapters").exists()


@pytest.mark.slow
def test_servers_sleep_while_the_trainer_steps(launched, make_cfg, tmp_path):
    """inference.sleep: awake for sampling and for weights, asleep for each step, also while an evaluation goes on."""
    sleeping = ("inference.sleep=true", "orchestrator.max_staleness=0", "eval.every=1", "eval.hold_s=0.01")
    fake = json.dumps({"control": str(tmp_path / "control"), "generate_s": 0.1, "slow": [7, 1.0]})
    done, run_dir = launched(3, '{ kind = "noise" }', *sleeping, FAKE=fake)
    first, *steps = (tmp_path / "control").read_text().split("/sleep")
    assert first.split() == ["join_weight_group", "receive_weights"]
    assert [step.split() for step in steps] == [["/wake_up", "receive_weights"]] * 3
    assert [e["step"] for e in lines(run_dir / "eval.jsonl")][-1] == 3 and "warning" not in done.stdout
    assert all(e["errors"] == 0 for e in lines(run_dir / "eval.jsonl"))
    with pytest.raises(RunError, match="inference.sleep' = True: must be left out with orchestrator.max_staleness = 1"):
        make_cfg("inference.sleep=true")


def test_an_evaluation_that_was_not_finished_is_made_up_for(run):
    """A run was killed when batch 3 was committed, and evaluation 3, which had outlived its hold, was not."""
    how = (4, '{ kind = "noise" }', "eval.every=1", "eval.num_examples=2")
    run_dir = run(*how)
    told = [line for line in lines(run_dir / "eval.jsonl") if line["step"] != 3]
    (run_dir / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    run(*how, train_s=0.5)
    assert [line["step"] for line in lines(run_dir / "eval.jsonl")] == [0, 1, 2, 4, 3]


@pytest.mark.long
@pytest.mark.slow
def test_servers_that_run_elsewhere(launched, fake_servers):
    """inference.urls: launch.sh starts no server; the run is called what the server is called."""
    url = fake_servers()
    httpx.post(f"{url}/fake", json={})
    _, run_dir = launched(2, '{ kind = "noise" }', f'inference.urls=["{url}"]', ROLEMODEL_RUN_ID="run")
    assert [m["step"] for m in lines(run_dir / "metrics.jsonl")] == [0, 1]
    assert not (run_dir / "logs" / "inference.log").exists() and httpx.get(f"{url}/health").status_code == 200


def test_a_server_of_another_run_is_refused(make_cfg, fake_servers, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLEMODEL_RUN_ID", "mine")
    with pytest.raises(RunError, match="a server of another run answers: .*this run is 'mine'") as e:
        trainer.WeightSender(make_cfg(f'inference.urls=["{fake_servers()}"]'), tmp_path, torch.device("cpu"))
    assert e.value.code == 2


@pytest.mark.slow
@pytest.mark.long
def test_user_code_that_never_returns_does_not_keep_the_run(launched):
    """One reward in five sleeps for ever in its thread: its rollouts time out, and the run ends when it is done."""
    started = time.monotonic()
    _, run_dir = launched(2, '{ kind = "stuck" }', "orchestrator.generation_timeout=2")
    assert any(r["error"].startswith("TimeoutError") for r in lines(run_dir / "rollouts.jsonl"))
    assert time.monotonic() - started < 60


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_cannot_learn_exits_4(launched):
    done, run_dir = launched(3, '{ kind = "constant" }', check=False)
    assert done.returncode == 4 and "flat at reward 1" in done.stderr.splitlines()[-1]
    assert str(run_dir / "logs" / "orchestrator.log") in done.stderr.splitlines()[-1]


def test_a_cancellation_by_user_code_loses_its_rollout_and_a_real_one_ends_it():
    async def leaks():
        raise asyncio.CancelledError

    async def go():
        r = Rollout({}, reward=1.0)
        await orchestrator.guard([r], leaks(), 5)
        assert r.reward is None and r.error.startswith("CancelledError")
        task = asyncio.create_task(orchestrator.guard([r], asyncio.sleep(60), 90))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())


@pytest.mark.parametrize("function, error", [
    (lambda: next(iter(())), "RuntimeError: generator raised StopIteration"),
    (lambda: sys.exit(2), "SystemExit: 2 in <lambda>, test_orchestrator.py"),
], ids=["StopIteration", "SystemExit"])  # fmt: skip
def test_what_asyncio_treats_as_its_own_loses_its_rollout(function, error):
    """A future takes no StopIteration, so that its waiter hung; SystemExit ended the run, with what looked like 2."""
    r = Rollout({}, reward=1.0)
    asyncio.run(orchestrator.guard([r], orchestrator.call(function), 5))
    assert r.reward is None and r.error.startswith(error)


def test_two_first_calls_at_once_are_two_samples(make_cfg):
    """A best of two: only one of the calls is the group's request, the other is a request of its own."""

    class BestOfTwo(SingleTurnEnv):
        async def rollout(self, state, generate):
            state["completion"] += await asyncio.gather(generate(state["prompt"]), generate(state["prompt"]))

    count = itertools.count(10)

    async def ask(prompt, n, tools=None):
        await asyncio.sleep(0)
        return [({"role": "assistant", "content": ""}, [1, 2], [next(count)], [-1.0], "stop", [0, 0]) for _ in range(n)]

    env = BestOfTwo([{"question": "?"}], rubric=Rubric([lambda: 1.0]))
    rollouts = asyncio.run(orchestrator.run_group(env, env.dataset[0], 2, ask, 0, make_cfg(), asyncio.Semaphore(1)))
    assert len({s["tokens"][-1] for r in rollouts for s in r.samples}) == 4
    assert all(r.num_turns == 2 and not r.error for r in rollouts)


def test_an_empty_column_is_refused(tmp_path):
    sample = {"tokens": [1, 2], "mask": [0, 1], "old_logp": [0.0, -1.0], "turn": [0, 0]}
    with pytest.raises(RunError, match="column 'teacher' has 0 values for 2 tokens"):
        save_batch(tmp_path / "step_000000.safetensors", [sample | {"teacher": []}, sample], {})
