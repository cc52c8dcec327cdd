"""orchestrator.py: rollouts, groups, advantages, rows, staleness, evaluations and batch files, by a fake server."""

import asyncio
import itertools
import json
import math
import random
import shutil
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import toy
from conftest import ROOT, all_batches, lines
from plain_server import PlainServer
from think_env import DROPS, KEEPS, Turns, letters, noise, rows

import env
import orchestrator
import trainer
from env import Rubric, SingleTurnEnv
from orchestrator import ADVANTAGES, Order, Rollout, Sequence, add_advantages, extend_or_fork, to_arrays
from rolemodel import evaluation
from rolemodel.config import load_config
from rolemodel.limits import Limits
from rolemodel.lookup import find_function
from rolemodel.mixes import divide_slots
from rolemodel.role import ConfigError, DataError
from rolemodel.run_directory import resume_batches

PAIRS = "orchestrator.rollouts_per_example=2"
ON_POLICY = "orchestrator.max_staleness=0"


def single(reward, num=37, prompt="hello", kind=SingleTurnEnv, **more):
    return kind(rows(num, prompt), eval_dataset=rows(3), rubric=Rubric([reward]), **more)


# --- whole batches ----------------------------------------------------------------------------------------------------


def test_batches(run):
    run_dir = run(6, single(letters, num=16), ON_POLICY, PAIRS, "eval.every=4", "seed=1")
    batches = all_batches(run_dir)
    rollouts = lines(run_dir / "rollouts.jsonl")
    assert len(batches) == 6
    for n, (info, sequences) in enumerate(batches):
        assert len(sequences) == 16 and info["max_tokens"] == 6
        groups = {}
        for s in sequences:
            assert s["staleness"] == 0 and s["version"] == n and s["temperature"] == 1.0 and not s["mask"][0]
            assert np.isfinite(s["old_logp"][s["mask"]]).all() and np.isnan(s["old_logp"][~s["mask"]]).all()
            assert (s["adv"][~s["mask"]] == 0).all() and len(set(s["adv"][s["mask"]].tolist())) == 1
            groups.setdefault((s["slot"], s["attempt"]), []).append(s)
        for group in groups.values():
            rewards = np.array([s["reward"] for s in group])
            assert np.allclose([s["adv"][s["mask"]][0] for s in group], rewards - rewards.mean()) and rewards.std() > 0
        # Metrics are over all rollouts of the batch, also those of dropped groups.
        mine = [r for r in rollouts if r["step"] == n]
        rewards = [r["reward"] for r in mine]
        expected = {"reward/mean": np.mean(rewards), "reward/std": np.std(rewards), "rollout/num": len(mine)}
        expected |= {"reward/letters": np.mean(rewards), "rollout/tokens": np.mean([r["num_tokens"] for r in mine])}
        expected |= {"group/kept": 8, "group/flat": sum(r["dropped"] == "flat" for r in mine) / 2, "rollout/turns": 1}
        expected |= {"rollout/errors": 0, "rollout/forks": 0, "staleness/mean": 0, "staleness/max": 0}
        assert {key: info["metrics"][key] for key in expected} == pytest.approx(expected)
    assert {r["dropped"] for r in rollouts} == {"", "flat"}
    evals = lines(run_dir / "eval.jsonl")
    assert [(e["step"], e["n"]) for e in evals] == [(0, 3), (4, 3), (6, 3)]
    asked = lines(run_dir / "eval_rollouts.jsonl")
    assert [r["version"] for r in asked] == [0] * 3 + [4] * 3 + [6] * 3
    assert evals[1]["rows"] == [r["reward"] for r in asked[3:6]]


def test_staleness_is_bounded_and_used(run):
    fake = {"generate_s": 0.03, "slow": [30, 0.3]}
    run_dir = run(10, single(noise), "orchestrator.max_staleness=2", "eval.every=3", fake=fake, train_s=0.02)
    found = Counter(s["staleness"] for _, sequences in all_batches(run_dir) for s in sequences)
    assert set(found) == {0, 1, 2} and found[2] > 16
    assert all(r["version"] == r["step"] for r in lines(run_dir / "eval_rollouts.jsonl"))


MIX = """
[[env]]
id = "slow"
ratio = 3.0
[[env]]
id = "fast"
"""


@pytest.fixture
def mix(monkeypatch):
    """mix(slow=env, fast=env) makes these what MIX names."""
    return lambda **envs: monkeypatch.setattr(orchestrator, "load_environment", lambda id, args: envs[id])


def test_a_mix_is_trained_at_its_ratio(run, mix):
    """However long one environment takes, and however often the other is refilled."""

    def sleeps():
        time.sleep(random.choice((0, 0.2)))
        return random.random()

    mix(slow=single(sleeps), fast=single(letters))
    run_dir = run(3, MIX, "eval.every=3", PAIRS)
    rollouts = lines(run_dir / "rollouts.jsonl")
    for n, (info, sequences) in enumerate(all_batches(run_dir)):
        kept = {(s["env"], s["slot"], s["attempt"]) for s in sequences}
        assert Counter(name for name, *_ in kept) == {"slow": 6, "fast": 2}
        assert info["metrics"]["env/slow/group/kept"] == 6 and info["metrics"]["env/fast/group/kept"] == 2
        rewards = [r["reward"] for r in rollouts if r["step"] == n and r["env"] == "fast"]
        assert info["metrics"]["env/fast/reward/mean"] == pytest.approx(np.mean(rewards))
    assert [(e["step"], e["env"]) for e in lines(run_dir / "eval.jsonl")] == [
        (0, "slow"), (0, "fast"), (3, "slow"), (3, "fast")]  # fmt: skip


def test_the_same_batches_after_a_kill(run, tmp_path):
    """Examples are a function of the slot: what a killed run left half written is written again."""
    task = single(letters, num=16)
    how = [ON_POLICY, PAIRS, "eval.every=2", "seed=1"]
    run_dir = run(5, task, *how)
    whole = shutil.copytree(run_dir, tmp_path / "whole")
    for step in (2, 3, 4):
        (run_dir / "batches" / f"step_{step:06d}.safetensors").unlink()
    (run_dir / "batches" / "step_000002.tmp").write_text("half")
    (run_dir / "version").unlink()  # as rolemodel/launch.py does
    with open(run_dir / "rollouts.jsonl", "a") as file:
        file.write('{"step": 2, "half')
    path = run_dir / "eval.jsonl"
    path.write_text(path.read_text().partition('{"step": 2')[0] + '{"step": 2, "half')
    run(5, task, *how)
    assert (run_dir / "eval.jsonl").read_text() == (whole / "eval.jsonl").read_text()
    for name in ("rollouts.jsonl", "eval_rollouts.jsonl"):
        assert sorted(map(str, lines(run_dir / name))) == sorted(map(str, lines(whole / name)))
    for old, new in zip(all_batches(whole), all_batches(run_dir), strict=True):
        for info in (old.info, new.info):
            info["metrics"] = {name: x for name, x in info["metrics"].items() if not name.startswith("time/")}
        assert old.info == new.info and sorted(map(str, old.sequences)) == sorted(map(str, new.sequences))


def test_where_a_run_goes_on(tmp_path):
    others = ("checkpoints/step_000009.tmp", "checkpoints/step_backup", "batches/step_backup.safetensors")
    for name in ("batches", "checkpoints/step_000004", *others):
        (tmp_path / name).mkdir(parents=True)
    assert resume_batches(tmp_path) == (4, {})
    for step, start in ((1, 4), (4, 5), (5, 6), (999_999, 1_000_000), (1_000_000, 1_000_001)):
        path = tmp_path / "batches" / f"step_{step:06d}.safetensors"
        orchestrator.save_batch(path, [sequence()], {"order": {"e": step}})
        assert resume_batches(tmp_path) == (start, {"e": step})


def test_rows_are_a_function_of_the_slot(make_cfg):
    def picked(seed, *where):
        order = Order("e", [None] * 7, make_cfg(f"seed={seed}"), {})
        return [order.pick(*at) for at in where]

    slots = [(9, slot, 0) for slot in range(14)]
    one = picked(0, *slots)
    assert sorted(one[:7]) == list(range(7)) == sorted(one[7:]) and one[:7] != one[7:]
    assert picked(0, *reversed(slots)) == one[::-1] and picked(1, *slots) != one
    for varied in ([(9, i, 1) for i in range(9)], [(i, 9, 1) for i in range(9)], [(9, 9, 1 + i) for i in range(9)]):
        assert len(set(picked(0, *varied))) > 2  # a dropped group's replacement: not one row for all
    again = [(step, slot, attempt) for step in range(9) for slot in range(9) for attempt in (1, 2)]
    assert set(Counter(picked(0, *again))) == set(range(7)) and picked(0, *again) == picked(0, *again)


def test_slots_are_divided_in_proportion():
    ratios = {"a": 0.5, "b": 0.3, "c": 0.2}
    dealt = list(itertools.islice(divide_slots(ratios), 1000))
    for num in (10, 137, 1000):
        found = Counter(name for name, _ in dealt[:num])
        assert all(abs(found[name] - num * ratio) <= 1 for name, ratio in ratios.items())
    assert [slot for name, slot in dealt if name == "b"] == list(range(300))


# --- what is lost -----------------------------------------------------------------------------------------------------


def test_bad_rewards_lose_their_rollouts_and_never_become_zero(run):
    values = itertools.cycle([None, math.nan, 1.0, "x", math.inf, 2.0, True])

    def misbehaves():
        return next(values)

    run_dir = run(3, single(misbehaves), "orchestrator.rollouts_per_example=8")
    rollouts = lines(run_dir / "rollouts.jsonl")
    failed = [r for r in rollouts if r["error"]]
    assert 0.4 < len(failed) / len(rollouts) < 0.7 and all(r["reward"] is None and not r["metrics"] for r in failed)
    assert {r["reward"] for r in rollouts if not r["error"]} == {1.0, 2.0}
    for n, (info, sequences) in enumerate(all_batches(run_dir)):
        assert info["metrics"]["rollout/errors"] == sum(r["step"] == n for r in failed)
        assert all(s["reward"] for s in sequences)


def test_a_metric_may_be_missing(run):
    """TRL #4501: nan is no JSON, and one of them made a mean nan for good."""

    class Sometimes(Rubric):
        async def score(self, state):
            reward, metrics = await super().score(state)
            state["info"]["x"] = math.inf
            return reward, metrics | {"never": None, "sure": np.float32(0.5) if reward % 1 > 0.5 else math.nan}

    run_dir = run(1, SingleTurnEnv(rows(37), eval_dataset=rows(37), rubric=Sometimes([noise])), "eval.every=1")
    text = "".join(path.read_text() for path in run_dir.glob("*.jsonl"))
    assert not any(word in text for word in ("NaN", "Infinity", "never")) and '"x": null' in text
    rollouts = lines(run_dir / "rollouts.jsonl")
    assert {r["metrics"].get("sure", r["reward"] % 1 <= 0.5) for r in rollouts} == {0.5, True}
    assert lines(run_dir / "eval.jsonl")[0]["sure"] == all_batches(run_dir)[0].info["metrics"]["reward/sure"] == 0.5


def test_what_ends_a_run(run, mix):
    halves = itertools.cycle([None, 1.0, 2.0, 3.0])
    mix(slow=single(noise), fast=single(lambda: next(halves)))
    how = ("orchestrator.batch_size=64", "orchestrator.rollouts_per_example=8", "orchestrator.max_error_share=0.2")
    with pytest.raises(DataError, match="fast: .* were lost, mostly: ValueError: <lambda> returned None"):
        run(30, MIX.replace("3.0", "7.0"), *how)  # an eighth of all rollouts, a quarter of whose are lost
    with pytest.raises(DataError, match="groups in a row had no gradient .now: flat"):
        run(3, single(lambda: 0.5), "run_name=flat")
    assert (run(3, single(lambda: 1.0), "run_name=solved") / "solved").exists()  # which is no error
    with pytest.raises(ConfigError, match="'eval.every' = 1: think_env has no eval_dataset"):
        run(1, SingleTurnEnv(rows(3)), "eval.every=1", "run_name=none")
    with pytest.raises(DataError, match="evaluation .*: all rollouts are lost: ValueError"):
        run(1, single(lambda: None), "eval.every=1", "run_name=lost")


def test_requests_that_fail_hang_or_lack_a_number(run):
    """One that fails is asked again."""
    fake = {f"generate {n}": fault for n, fault in {2: "hang", 4: "close", 6: "500", 7: "400", 9: "logprobs"}.items()}
    rollouts = lines(run(3, single(noise), "orchestrator.generation_timeout=2", fake=fake) / "rollouts.jsonl")
    found = Counter(r["error"].split(":")[0] for r in rollouts)
    assert found == {"": len(rollouts) - 2, "TimeoutError": 1, "ValueError": 1}


def test_what_a_template_refuses_is_scored_if_the_policy_said_it(run, tmp_path):
    """As Llama 3's refuses two calls in a turn (unsloth #7426). Lost, they would be in no mean, and never unlearned."""
    refuses = "{% if m.role == 'assistant' and m.content > 'P' %}{{ raise_exception('so much') }}{% endif %}"
    (tmp_path / "refuses.jinja").write_text(KEEPS.replace("{{ m.content }}", refuses + "{{ m.content }}"))
    task = single(noise, kind=Turns, max_turns=2)
    rollouts = lines(run(1, task, template=str(tmp_path / "refuses.jinja")) / "rollouts.jsonl")
    assert {(r["num_turns"], r["completion"][0]["content"] > "P") for r in rollouts} == {(1, True), (2, False)}
    assert not any(r["error"] or r["reward"] is None for r in rollouts)


def test_a_refusal_is_the_policys_only_if_its_own_words_are_refused(make_cfg):
    """Not if an environment has put an image into its second turn (hexo-ai/sia #61)."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    said = {"message": {"role": "assistant", "content": "ab", "tool_calls": [call]}}
    refused = orchestrator.HttpRefused("no images here")
    r, bodies = play(make_cfg(), asks({}, {}), reply(**said), refused, reply())
    assert r.error == "ValueError: no images here" and r.reward is None and not r.truncated
    assert [m["content"] for m in bodies[2]["messages"]] == ["ok", "ab", "ok"]
    assert bodies[2]["messages"][2]["tool_call_id"] == "c1" and bodies[2]["max_tokens"] == 1
    r, _ = play(make_cfg(), asks({}, {}), reply(**said), refused, refused)
    assert (r.truncated, r.reward, r.error) == (True, 1.0, "")


class Unreadable(Exception):
    def __repr__(self):
        raise self

    __str__ = __repr__


def test_nothing_that_user_code_leaves_ends_a_run(run):
    """A tool stored a circular object, and rollouts.jsonl could not be written (helm #1381)."""
    circle = []
    circle.append(circle)
    bad = [{"info": circle}, {"info": {"x": Unreadable()}}, {"completion": [circle]}, {"agent_rewards": [1.0]}]
    bad += [{"agent_rewards": {"": "x"}}, {"turn_rewards": [1.0, 2.0]}, {"metrics": {"x": "y"}}, Unreadable()]
    left = itertools.cycle(itertools.chain(*([{}, {}, {}, what] for what in bad)))

    class Leaves(Rubric):
        async def score(self, state):
            what = next(left)
            if isinstance(what, Exception):
                raise what
            state |= what
            return random.random(), what.get("metrics", {})

    run_dir = run(5, SingleTurnEnv(rows(37), eval_dataset=rows(37), rubric=Leaves()), "eval.every=1")
    rollouts = [r for name in ("rollouts", "eval_rollouts") for r in lines(run_dir / f"{name}.jsonl")]
    errors = {r["error"].split(":")[0] for r in rollouts}
    assert errors == {"", "ValueError", "Unreadable", "AttributeError"} and len(rollouts) > 200
    assert sum(r["reward"] is None for r in rollouts) / len(rollouts) == pytest.approx(0.25, abs=0.02)


def lost(work, timeout_s=5.0):
    """Why a rollout was lost by this work."""
    r = Rollout("e", 0, 0, 0, 0, reward=1.0, metrics={"x": 1.0})

    async def go():
        await orchestrator.guard([r], work, timeout_s)
        assert not asyncio.current_task().cancelling()

    asyncio.run(go())
    assert r.reward is None and r.metrics == {}
    return r.error


def test_guard():
    """User code may await what was cancelled, swallow its own end, or try to end the process."""

    async def awaits_what_was_cancelled():
        task = asyncio.create_task(asyncio.sleep(5))
        task.cancel()
        await task

    async def swallows():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(5)

    def raises(error):
        raise error

    async def panics():
        raise BaseExceptionGroup("as of pyo3, or of a task group", [GeneratorExit()])

    assert lost(panics()).startswith("BaseExceptionGroup: as of")
    assert lost(awaits_what_was_cancelled()).startswith("CancelledError")
    assert lost(swallows(), 0.1).startswith("TimeoutError")
    assert lost(env.call(partial(raises, SystemExit(2)))).startswith("RuntimeError: raises raised SystemExit")
    with pytest.raises(ConfigError):
        lost(env.call(partial(find_function, "none", {})))

    async def fails_on_its_way_out():
        try:
            await asyncio.sleep(60)
        finally:
            raise ConnectionError

    async def is_cancelled():
        task = asyncio.create_task(orchestrator.guard([], fails_on_its_way_out(), 90))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(is_cancelled())


# --- a rollout --------------------------------------------------------------------------------------------------------


def reply(text="ab", ids=(5, 6), prompt=(1, 2), finish="stop", **choice):
    logprobs = {"content": [{"logprob": -1.0 - i} for i in range(len(ids))]}
    choice = {"finish_reason": finish, "token_ids": [*ids], "logprobs": logprobs, "message": {"content": text}} | choice
    return {"choices": [choice], "prompt_token_ids": [*prompt]}


def play(cfg, task, *replies):
    """A rollout whose server answers these. Returns it and the requests."""
    bodies = []
    answers = iter(replies)

    async def post(url, path, body):
        bodies.append(body)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def go():
        running = asyncio.Semaphore(1)
        client = SimpleNamespace(cfg=cfg, version=3, salt="s", running=running, post=post, load={"": 0})
        r = Rollout("e", 0, 0, 0, 7)
        await orchestrator.roll_out(client, task, task.dataset[0], r, 3, {}, lambda: "")
        return r

    return asyncio.run(go()), bodies


def test_a_faster_server_gets_more_groups(make_cfg):
    """Each answers one request at a time. By turns, the slow one would decide how long all of them take."""
    task = single(lambda: 1.0)

    also = [*make_cfg().sampling._fields, "return_token_ids", "cache_salt", "logprobs"]
    slow, fast = (PlainServer(lambda body, s=s: time.sleep(s) or reply(), also) for s in (0.1, 0.05))

    async def go(cfg):
        client = orchestrator.Client(cfg)
        groups = [[Rollout("e", 0, slot, 0, k) for k in range(4)] for slot in range(18)]
        await asyncio.gather(*(orchestrator.run_group(client, task, task.dataset[0], g, 0, {}) for g in groups))
        await client.http.close()
        assert all(r.reward == 1 for g in groups for r in g), groups[0][0].error

    with slow, fast:
        urls = [s.url.removesuffix("/v1") for s in (slow, fast)]
        asyncio.run(go(make_cfg(f"inference.urls={json.dumps(urls)}", "orchestrator.max_concurrent=8")))
    assert len(fast.bodies) % 4 == 0 and len(fast.bodies) > 1.4 * len(slow.bodies)


def asks(*kwargs):
    """An environment that calls generate with each of these."""

    class Asks(SingleTurnEnv):
        async def rollout(self, state, generate):
            for own in kwargs:
                state["completion"].append(await generate(state["prompt"], **own))

    return single(lambda: 1.0, kind=Asks)


def test_what_a_request_says(make_cfg):
    cfg = make_cfg("orchestrator.sampling.temperature=0.7")
    twice = asks({"max_tokens": 4}, {"max_tokens": 99, "trainable": False, "top_p": 0.5})
    r, bodies = play(cfg, twice, reply(), reply())
    plain = {"temperature": 0.7, "top_p": 1.0, "min_p": 0.0, "return_token_ids": True}
    assert bodies[0] == bodies[0] | plain | {"max_tokens": 4, "cache_salt": "s.3", "logprobs": True}
    assert bodies[1] == bodies[1] | plain | {"max_tokens": 16, "top_p": 0.5} and "seed" not in bodies[0]
    assert (r.num_turns, r.num_tokens, r.version, r.reward, len(r.sequences)) == (2, 2, 3, 1.0, 1)
    assert r.sequences[0].mask.tolist() == [False, False, True, True]
    assert r.sequences[0].old_logp.tolist()[2:] == [-1.0, -2.0]
    assert "token_ids" not in r.state["replies"][0]["choices"][0]
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    for own in ({"top_p": 0.5}, {"tools": tools}, {"logit_bias": {}}):
        r, _ = play(cfg, asks(own), reply())
        assert r.error.startswith("ValueError: generate(): ") and r.reward is None


def test_what_an_answer_says(make_cfg):
    cfg = make_cfg("orchestrator.max_prompt_len=3", "orchestrator.sampling.max_tokens=2", "max_seq_len=9")
    once = asks({})

    def content(**said):
        r, _ = play(cfg, once, reply(**said))
        return r.state["completion"][0]["content"], r.truncated

    assert content(stop_reason="Q") == ("abQ", False) and content(stop_reason=0) == ("ab", False)
    assert content(finish="length") == ("ab", True) == content(finish="tool_calls")  # of two tokens, the limit
    assert content(finish="tool_calls", ids=[5]) == ("ab", False)
    r, _ = play(cfg, once, reply(message={"content": None, "reasoning": "why", "refusal": None}))
    assert r.state["completion"] == [{"content": "", "reasoning": "why"}]
    long = {"prompt": [1] * 4}
    r, _ = play(cfg, once, reply(**long))
    assert (r.truncated, r.reward, r.error, r.sequences) == (True, None, "", [])
    r, _ = play(cfg, asks({}, {}), reply(), reply(**long))  # a later turn's prompt may be longer
    assert not r.truncated and r.reward == 1.0 and len(r.sequences) == 2
    r, _ = play(cfg, asks({}, {}), reply(), reply(prompt=[1] * 8, ids=[5], finish="length"))  # there was room for one
    assert r.truncated
    assert play(cfg, once, reply(finish="abort"))[0].error.startswith("ConnectionError")
    for wrong in (None, -9999.0, 0.7):
        assert "a log-probability" in play(cfg, once, reply(logprobs={"content": [{"logprob": wrong}] * 2}))[0].error
    r, _ = play(cfg, asks({}, {"trainable": False}), reply(), reply(finish="length"))  # not the policy's
    assert not r.truncated and r.num_tokens == 2


def test_a_turn_extends_the_longest_beginning_of_its_prompt():
    found = []
    extend_or_fork(found, [1, 2], [3], [-1.0], 0)
    extend_or_fork(found, [1, 2, 3, 4], [5, 6], [-2.0, -3.0], 1)
    assert len(found) == 1 and found[0].tokens == [1, 2, 3, 4, 5, 6] and found[0].turn == [0, 0, 0, 1, 1, 1]
    assert found[0].mask == [False, False, True, False, True, True]
    extend_or_fork(found, [1, 2, 9], [3], [-1.0], 2)  # not what was said
    extend_or_fork(found, [1, 2, 3, 4, 5, 6], [7], [-1.0], 3, agent="other")
    assert [s.tokens for s in found[1:]] == [[1, 2, 9, 3], [1, 2, 3, 4, 5, 6, 7]]
    for ids in ([2], [2, 9], [2]):
        extend_or_fork(found, [1], ids, [-1.0] * len(ids), 4)
    extend_or_fork(found, [1, 2, 9, 1], [8], [-1.0], 5)
    assert [s.tokens for s in found[3:]] == [[1, 2], [1, 2, 9, 1, 8], [1, 2]]


def sequence(is_masked=False, **change):
    given = {"tokens": [1, 2, 3], "mask": [True] * 3, "old_logp": [-1.0] * 3, "turn": [0] * 3, "adv": [1.0] * 3}
    return to_arrays(Sequence(**given | change), is_masked)


def test_arrays():
    s = sequence(fields={"place": [0, 1, 2], "my_ids": [[0, 1], [2, 3], [-1, -1]]})
    assert s.mask.tolist() == [False, True, True] and s.adv.tolist() == [0, 1, 1] and s.fields["place"].dtype == "f4"
    assert s.fields["my_ids"].dtype == "i4" and s.fields["my_ids"].shape == (3, 2)
    assert not sequence(is_masked=True).adv.any()
    for change in ({"mask": [True] * 2}, {"fields": {"x": [1.0]}}, {"old_logp": [0.0, math.nan, 0.0]}):
        with pytest.raises(ValueError):
            sequence(**change)


def test_a_batch_appears_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "step_000000.safetensors"
    existed = []
    monkeypatch.setattr(orchestrator.os, "replace", lambda *_: existed.append(path.exists()))
    orchestrator.save_batch(path, [sequence()], {})
    assert existed == [False]


def test_turns_fork_where_the_template_drops_history(run, tmp_path):
    """As templates of models that think drop their thoughts."""
    (tmp_path / "drops.jinja").write_text(DROPS)
    task = single(noise, prompt="hi", kind=Turns, max_turns=4)
    short = "orchestrator.sampling.max_tokens=4"
    ((info, sequences),) = all_batches(run(1, task, short))
    assert len(sequences) == 16 and info["metrics"]["rollout/forks"] == 0
    assert all(np.unique(s["turn"][s["mask"]]).tolist() == [0, 1, 2, 3] for s in sequences)
    ((info, sequences),) = all_batches(run(1, task, short, "run_name=forks", template=str(tmp_path / "drops.jinja")))
    assert info["metrics"]["rollout/forks"] == len(sequences) - 16 > 16
    turns = Counter((s["slot"], s["member"], turn) for s in sequences for turn in np.unique(s["turn"][s["mask"]]))
    assert len(turns) == 16 * 4 and set(turns.values()) == {1}
    assert sum(s["share"] for s in sequences) == pytest.approx(16)


def test_a_base_models_prompt_is_its_text(run):
    plain = str(ROOT / "configs" / "models" / "plain.jinja")
    ((_, sequences),) = all_batches(run(1, single(noise), template=plain))
    prompts = {toy.make_tokenizer().decode(s["tokens"][: s["mask"].argmax()].tolist()) for s in sequences}
    assert prompts <= {row["question"] for row in rows(37)}
    for bos, text in (("<|end|>", "a"), ("<|end|>", "<|end|>a"), (None, "<|end|>a")):  # not twice
        run.tokenizer.bos_token = bos
        ask = [{"role": "user", "content": text}]
        said = run.tokenizer.apply_chat_template(ask, chat_template=Path(plain).read_text(), tokenize=False)
        assert said == "<|end|>a"


def test_long_prompts_and_truncation(run):
    for prompt, override in (("hello", "max_prompt_len=10"), ("x" * 58, "sampling.max_tokens=4")):
        run_dir = run(1, single(noise, prompt=prompt), f"orchestrator.{override}", f"run_name=long{len(prompt)}")
        rollouts = lines(run_dir / "rollouts.jsonl")
        found = {(r["dropped"], r["example"] < 10, r["error"]) for r in rollouts}
        assert found == {("", True, ""), ("long", False, "")}

    def own(answer, state):
        state["agent_rewards"] = {"": noise(answer)}
        return noise(answer)

    for key in ("mask", "zero"):
        more = (f"orchestrator.{key}_truncated_completions=true", "orchestrator.sampling.max_tokens=40")
        ((_, sequences),) = all_batches(run(1, single(own), *more, f"run_name={key}"))
        assert {s["truncated"] for s in sequences} == {True, False}
        for s in sequences:
            assert (s["reward"] == 0) == (s["truncated"] and key == "zero")
            assert s["mask"].any() != (s["truncated"] and key == "mask")


# --- advantages and numbers -------------------------------------------------------------------------------------------


def rollout(reward, agents=None, num_turns=1, **more):
    r = Rollout("e", 0, 0, 0, 0, reward=reward, num_turns=num_turns, **more)
    r.state = {"agent_rewards": agents or {}}
    for agent in agents or [""]:
        r.sequences.append(sequence(agent=agent, adv=[0.0] * 3, turn=[0, 0, num_turns - 1]))
    return r


def test_advantages():
    rewards = np.array([1.0, 2.0, 6.0])
    assert ADVANTAGES["mean"](rewards, []).tolist() == [-2, -1, 3]
    assert ADVANTAGES["std"](rewards, []) == pytest.approx(np.array([-2, -1, 3]) / (math.sqrt(14 / 2) + 1e-4))
    # One baseline for each agent; one that spoke in a single rollout has none.
    group = [rollout(9.0, {"a": 1.0, "b": 5.0}), rollout(9.0, {"a": 3.0}), rollout(None, error="x")]
    add_advantages(group, ADVANTAGES["mean"])
    assert [s.adv.tolist() for r in group for s in r.sequences if s.agent] == [[0, -1, -1], [0, 0, 0], [0, 1, 1]]
    assert [s.info["reward"] for s in group[0].sequences] == [1.0, 5.0] and group[0].dropped == ""
    for group, reason in (
        ([rollout(1.0), rollout(1.0)], "flat"),
        ([rollout(1.0), rollout(None, error="x")], "failed"),
        ([rollout(None), rollout(None)], "long"),
    ):
        add_advantages(group, ADVANTAGES["mean"])
        assert {r.dropped for r in group} == {reason}
    add_advantages(group := [rollout(1.0), rollout(1.0)], lambda rewards, rollouts: rewards * math.nan)
    assert group[0].dropped == ""  # a mistake, which the trainer reports
    # Numbers by turn, and what an environment adds.
    group = [rollout(1.0, num_turns=2), rollout(1.0, num_turns=2)]
    group[0].sequences[0].adv[1] = 10
    add_advantages(group, lambda rewards, rollouts: [[1.0, 2.0], [-1.0, 0.0]])
    assert [r.sequences[0].adv.tolist() for r in group] == [[0, 11, 2], [0, -1, 0]]
    group[0].state["turn_rewards"] = [1.0, 0.0]
    with pytest.raises(ConfigError, match="turns:by_turn"):
        add_advantages(group, ADVANTAGES["mean"])


def test_an_environments_own_advantages_and_fields_reach_the_file(run):
    """adv at a token that the policy did not say makes it a loss token, which is imitated."""

    class Adds(SingleTurnEnv):
        async def add_fields(self, sequences):
            for s in sequences:
                s.fields["place"] = list(range(len(s.tokens)))
                s.adv[1] = -0.5

    ((_, sequences),) = all_batches(run(1, single(noise, kind=Adds)))
    for s in sequences:
        assert s["mask"][1] and s["adv"][1] == -0.5 and np.isnan(s["old_logp"][1])
        assert s["place"].tolist() == list(range(len(s["tokens"])))
        rewards = [other["reward"] for other in sequences if other["slot"] == s["slot"]]
        assert np.allclose(s["adv"][~np.isnan(s["old_logp"])], s["reward"] - np.mean(rewards))


HEADS = {"top_k=9,top_p=0.6": 9, "top_k=12,min_p=0.8": 12, "top_logprobs=3": 3, "": 0}


@pytest.mark.parametrize("given", HEADS)
def test_heads_of_the_samplers_distribution(given, run, tmp_path):
    """As the fake server, which draws as vLLM does, gave them; the trainer's log-probabilities are then the server's.
    The requests of evaluations are without."""
    words = [f"orchestrator.{'' if x.startswith('top_l') else 'sampling.'}{x}" for x in given.split(",") if x]
    fake = {"uniform": False, "log": str(tmp_path / "requests")}
    run_dir = run(1, single(noise, kind=Turns, max_turns=2), *words, "eval.every=1", "eval.num_examples=1", fake=fake)
    k = HEADS[given]
    sent = [(x.get("top_logprobs"), x.get("return_tokens_as_token_ids")) for x in lines(tmp_path / "requests")]
    assert set(sent) == {(k + 1, True), (None, None)} - (set() if k else {(1, True)})
    ((_, sequences),) = all_batches(run_dir)
    masses = []
    for s in sequences:
        assert s["top_k"] == (k if k > 3 else 0) and ("head_ids" in s) == (k > 0)
        for i in np.flatnonzero(~np.isnan(s["old_logp"])) if k else ():
            head = {x: logp for x, logp in zip(s["head_ids"][i], s["old_head_logp"][i]) if x >= 0}
            assert len(head) <= k and list(head.values()) == sorted(head.values(), reverse=True)
            assert k == 3 or head[s["tokens"][i]] == s["old_logp"][i]
            masses.append(sum(map(math.exp, head.values())))
        assert not k or (s["head_ids"][np.isnan(s["old_logp"])] == -1).all()
    assert not masses or (min(masses) > 1 - 1e-5) == (k > 3) and max(masses) < 1 + 1e-5
    cfg = load_config(tmp_path / "run.toml", words)
    policy, batch = trainer.build_policy(cfg), trainer.load_batch(run_dir / "batches" / "step_000000.safetensors")
    diff_T = trainer.score(policy, batch, [*range(len(batch.lens))], cfg) - batch.fields["old_logp"]
    assert diff_T[batch.fields["is_sampled"]].abs().max() < 1e-4


def test_evaluations_by_hand():
    """Means over rows of means over rollouts, all of them over those that have a reward."""
    groups = [
        [rollout(0.7 + 0.2 + 0.1, metrics={"exact": 1.0}, num_tokens=4), rollout(0.0, num_tokens=2, truncated=True)],
        [rollout(1.0, metrics={"exact": 0.4}), rollout(None, error="x")],
        [rollout(None, truncated=True)],  # too long a prompt
    ]
    found = evaluation.eval_metrics(groups)
    expected = {"n": 2, "errors": 2, "pass@1": 0.25, "pass@k": 0.5, "reward/mean": 0.75, "reward/lost_as_0": 0.4}
    assert found.pop("rows") == pytest.approx([0.5, 1.0, None]) and found.pop("success") == "exact"
    assert found == pytest.approx(expected | {"tokens": 1.5, "exact": 0.7, "truncated": 0.25})
    found = evaluation.batch_metrics(groups, [0])
    expected = {"rollout/tokens": 2.0, "rollout/truncated": 1 / 3, "rollout/errors": 1, "rollout/num": 5}
    assert {key: found[key] for key in expected} == pytest.approx(expected)


def test_another_scale_than_0_to_1_tells_no_success():
    """prime-rl #3566: of 0 to 10 points, 3 are no success, and neither is 1."""
    groups = [[rollout(0.3, metrics={"points": x}, num_tokens=1)] for x in (3.0, 1.0)]
    found = evaluation.eval_metrics(groups)
    assert not {"pass@1", "pass@k", "success"} & found.keys() and found["points"] == 2.0
    assert [evaluation.is_solved(group[0]) for group in groups] == [False, True]
    limits = Limits(0.1, 1)
    groups[1][0].dropped = "flat"
    with pytest.raises(DataError, match="had no gradient"):
        for group in [groups[0], *[groups[1]] * 300]:
            limits.see("e", group)


def test_a_task_is_not_solved_if_its_rewards_are_0():
    """verl #7405, UniRL #19: all right answers were cut off, zero_truncated_completions took their rewards, and the run
    ended with success."""
    group = [rollout(0.0, metrics={"exact": 1.0}, truncated=True, dropped="flat")]
    limits = Limits(0.1, 1)
    with pytest.raises(DataError, match="had no gradient"):
        for _ in range(300):
            limits.see("e", group)


@pytest.mark.parametrize("adapters", [False, True])
def test_evaluations_are_asked_alike_at_every_version(run, tmp_path, adapters):
    """And however long they take: the batch that would change their weights waits for them."""
    batches = tmp_path / "run" / "batches"

    class Slow(SingleTurnEnv):
        async def rollout(self, state, generate):
            if "train" not in state["prompt"][0]["content"]:
                batch = batches / f"step_{state['step']:06d}.safetensors"
                await asyncio.sleep(1 / (1 + state["step"]))
                assert not batch.exists()
            await super().rollout(state, generate)

    log = tmp_path / "log"
    how = ["eval.every=1", "eval.temperature=0.5", "eval.max_tokens=3", "eval.rollouts_per_example=2", ON_POLICY]
    how += ["trainer.use_lora=true", "trainer.dtype=bf16"] if adapters else []
    run_dir = run(2, single(noise, prompt="train", kind=Slow), *how, "eval.num_examples=2", fake={"log": str(log)})
    asked = {}
    for body in map(json.loads, log.read_text().splitlines()):
        if "train" in body["messages"][0]["content"]:
            assert "seed" in body and body["temperature"] == 1.0  # since the run can be repeated
        else:
            assert body["temperature"] == 0.5 and body["max_tokens"] == 3
            asked.setdefault(body["cache_salt"], []).append((body["seed"], body["messages"][0]["content"]))
            assert body["model"] == "run" + f"-v{body['cache_salt'][-1]}" * adapters
    first, second, _ = map(sorted, asked.values())
    assert first == second and len(set(first)) == 4
    assert [(e["step"], e["errors"]) for e in lines(run_dir / "eval.jsonl")] == [(0, 0), (1, 0), (2, 0)]
