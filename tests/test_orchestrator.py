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
from contextlib import suppress
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
import torch
from aiohttp import web
from conftest import all_batches, free_port, lines, make_sequences

import orchestrator
import trainer
from configs import load_config
from configs.algorithms import evaluation
from configs.algorithms.evaluation import eval_metrics
from configs.algorithms.orders import Picky
from configs.environments.rubrics import GroupRubric
from configs.runtime.directory import run_directory
from configs.runtime.role import RunError
from env import DataError, Rubric, SingleTurnEnv, Truncated
from orchestrator import (
    Client,
    Group,
    Order,
    Reply,
    Rollout,
    ServerError,
    deal,
    extend_or_fork,
    rollout_metrics,
    save_batch,
    unusable,
)
from trainer import load_batch

NOISE = '{ kind = "noise" }'

# --- parts ------------------------------------------------------------------------------------------------------------


def test_a_turn_extends_the_longest_sequence_that_its_prompt_begins_with():
    sequences = []
    extend_or_fork(sequences, [1, 2], [3, 4], [-0.1, -0.2], 0)
    extend_or_fork(sequences, [1, 2, 3, 4, 9], [5], [-0.3], 1)
    assert sequences == [
        {"tokens": [1, 2, 3, 4, 9, 5], "mask": [0, 0, 1, 1, 0, 1], "old_logp": [0, 0, -0.1, -0.2, 0, -0.3],
         "turn": [0, 0, 0, 0, 1, 1], "agent": "", "trainable": True}
    ]  # fmt: skip
    extend_or_fork(sequences, [1, 2, 4, 9, 5, 9], [6], [-0.4], 2)
    fork = {"tokens": [1, 2, 4, 9, 5, 9, 6], "mask": [0] * 6 + [1], "old_logp": [0] * 6 + [-0.4], "turn": [2] * 7}
    assert sequences[1] == fork | {"agent": "", "trainable": True}
    extend_or_fork(sequences, [1, 2, 3, 4, 9, 5, 7], [8], [-0.5], 3)  # the first one is not forgotten
    assert len(sequences) == 2 and sequences[0]["tokens"] == [1, 2, 3, 4, 9, 5, 7, 8]


def test_interleaved_conversations_are_two_sequences_and_agents_never_share_one():
    sequences = []
    for turn, prompt in enumerate([[1], [2], [1, 10, 5], [2, 11, 5]]):
        extend_or_fork(sequences, prompt, [10 + turn], [-1.0], turn)
    assert [s["tokens"] for s in sequences] == [[1, 10, 5, 12], [2, 11, 5, 13]]
    for agent, is_trained in (("critic", True), ("", False)):
        extend_or_fork(sequences, [1, 10, 5, 12, 6], [20], [-1.0], 4, agent, is_trained)
        assert (sequences[-1]["agent"], sequences[-1]["trainable"]) == (agent, is_trained)
        assert sequences[-1]["tokens"] == [1, 10, 5, 12, 6, 20] and sequences[-1]["mask"] == [0] * 5 + [1]


def test_order_is_a_function_of_seed_and_index(make_cfg):
    rows = [{"question": str(i)} for i in range(37)]
    order = Order(rows, make_cfg("seed=3"))
    taken = [order.take(0) for _ in range(37 * 3)]
    assert [index for index, _ in taken] == list(range(37 * 3))
    for epoch in range(3):  # every row once an epoch, in another order
        assert sorted(row for _, row in taken[37 * epoch : 37 * (epoch + 1)]) == list(range(37))
    assert [row for _, row in taken[:37]] != [row for _, row in taken[37:74]]
    resumed = Order(rows, make_cfg("seed=3"), {"next": 50, "open": [41, 44], "extra": {"a": 1}})
    assert [resumed.take(0) for _ in range(3)] == [taken[41], taken[44], taken[50]]
    resumed.commit(Group("e", 44, taken[44][1], [], ""))
    assert resumed.state() == {"next": 51, "open": [41, 50], "extra": {"a": 1}}
    other = Order(rows, make_cfg("seed=4"))
    assert [other.take(0)[1] for _ in range(37)] != [row for _, row in taken[:37]]


def test_which_groups_teach_something(make_cfg):
    said, cut = ([{"mask": np.array([0, last]), "trainable": True}] for last in (1, 0))
    judge = [{"mask": np.array([0, 1]), "trainable": False}]
    good, slow, bad = (Rollout({}, said, reward=r, num_turns=n) for r, n in ((1.0, 1), (1.0, 3), (0.0, 1)))
    lost, long, silent = Rollout({}, error="X: why"), Rollout({}, truncated=True), Rollout({})
    masked, other = Rollout({}, cut, reward=0.5, num_turns=1), Rollout({}, reward=0.7, num_turns=1)

    def dropped(*rollouts, **keys):
        cfg = make_cfg(*(f"trainer.{key}={value}" for key, value in keys.items()))
        return unusable(rollouts) or Order([{}], cfg).keep(rollouts)

    assert [dropped(good, lost), dropped(long, long)] == ["failed", "long"]
    assert [dropped(silent, silent), dropped(masked, other)] == ["empty", "empty"]  # it never asked; nothing is trained
    assert dropped(Rollout({}, judge, reward=1.0), Rollout({}, judge, reward=0.0)) == "empty"
    assert dropped(good, good, lost) == dropped(good, slow) == "flat"
    assert dropped(good, bad, lost) == dropped(good, masked) == dropped(good, slow, gamma=0.9) == ""


def test_environments_are_dealt_out_by_ratio():
    for ratios in ({"a": 3, "b": 1}, {"a": 0.5, "b": 0.2, "c": 0.3}, {"a": 1}, {"a": 1, "b": 100}):
        names = list(itertools.islice(deal(ratios), 500))
        for num in range(1, 501):
            for name, ratio in ratios.items():
                assert abs(names[:num].count(name) - num * ratio / sum(ratios.values())) < 1


@pytest.mark.parametrize("kind", [list, np.array])
def test_batch_files_carry_fields_by_name(kind, tmp_path):
    """A list or array as long as the tokens is a field; who has none has nan there; other lengths are refused."""
    path = tmp_path / "step_000000.safetensors"
    plain = {"tokens": [5, 6, 7], "mask": [0, 1, 1], "old_logp": [0.0, -1.0, -2.0], "turn": [0, 0, 0], "reward": 1.0}
    save_batch(path, [plain | {"hint": kind([0.5, 1.5, 2.5]), "versions": [0, 0, 1]}, plain], {"step": 0})
    first, second = load_batch(path).sequences
    assert first["hint"].tolist() == [0.5, 1.5, 2.5] and all(map(math.isnan, second["hint"]))
    assert first["versions"] == [0, 0, 1] and second["tokens"].tolist() == [5, 6, 7]
    for values in ([0.5, 1.5], []):
        with pytest.raises(RunError, match=f"field 'hint' has {len(values)} values for 3 tokens") as e:
            save_batch(path, [plain | {"hint": kind(values)}, plain], {"step": 0})
        assert e.value.code == 4


def test_sequences_without_a_field_of_whole_numbers_have_unknown_ones(tmp_path):
    """Demonstrations beside routes, which have a shape of their own; a recipe's extra sequences without turns."""
    path = tmp_path / "step_000000.safetensors"
    plain = {"tokens": [5, 6], "mask": [0, 1], "old_logp": [0.0, -1.0], "reward": 1.0}
    save_batch(path, [plain, plain | {"turn": [0, 0], "routes": np.ones((2, 3, 4), np.int16)}], {"step": 0})
    first, second = load_batch(path).sequences
    assert first["turn"].tolist() == [-1, -1] and second["turn"].tolist() == [0, 0]
    assert first["routes"].shape == second["routes"].shape == (2, 3, 4) and (first["routes"] == -1).all()


def with_client(make_cfg, answer, work):
    """What work(client) returns; the client has two servers, /a and /b of one, whose POSTs answer() answers."""

    async def go():
        app, port = web.Application(), free_port()
        app.add_routes([web.post("/{server}/{kind}", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        urls = json.dumps([f"http://127.0.0.1:{port}/{server}" for server in "ab"])
        client = Client(make_cfg(f"inference.urls={urls}", "inference.allow_remote=true"))
        found = await work(client)
        await client.session.close()
        await runner.cleanup()
        return found

    return asyncio.run(go())


def test_what_is_asked_again(make_cfg):
    """Lost connections, 429 and 5xx three times; what the server refuses never; too long a prompt is no error."""
    answers = {"busy": [429, 503, 200], "down": [500] * 9, "wrong": [404], "long": [400], "full": [400]}
    texts = {
        "long": "This model's maximum context length is 64 tokens",
        "full": "max_tokens must be at least 1, got 0.",  # vLLM 0.32, if a prompt leaves no room for a token
    }
    asked = Counter()

    async def answer(request):
        kind = request.match_info["kind"]
        asked[kind] += 1
        return web.Response(status=answers[kind].pop(0), text=texts.get(kind, "{}"))

    async def post(client, path):
        try:
            return await client.post(0, path, {})
        except Exception as e:
            return type(e)

    async def post_all(client):
        return [await post(client, f"/{kind}") for kind in answers]

    assert with_client(make_cfg, answer, post_all) == [{}, ServerError, ServerError, Truncated, Truncated]
    assert asked == {"busy": 3, "down": 4, "wrong": 1, "long": 1, "full": 1}


def test_evaluations_count_what_was_lost():
    rollouts = [Rollout({}, reward=1.0, num_turns=1), Rollout({}, error="ValueError"), Rollout({}, reward=0.0)]
    found = eval_metrics([rollouts[:2], rollouts[2:], rollouts[1:2]])
    assert found["n"] == 2 and found["errors"] == 2 and found["reward/mean"] == 0.5 and found["pass@k"] == 0.5
    assert found["rows"] == [1.0, 0.0, None]
    solved = eval_metrics([[Rollout({}, reward=0.7 + 0.2 + 0.1)]])  # 0.9999999999999999
    assert solved["pass@1"] == solved["pass@k"] == 1


# --- one rollout or group, without a server ---------------------------------------------------------------------------


def constant():
    return 1.0


async def ask(prompt, tools=None, user="", own=()):
    """A policy that says its user's number."""
    return Reply({"role": "assistant", "content": user}, [1, 2], [10 + int(user or 0)], [-1.0], {}, False, [0, 0])


def rollouts_of(cfg, env=SingleTurnEnv, n=1, ask=ask, places=9):
    env = env([{"question": "?"}], rubric=Rubric([constant]))
    group = orchestrator.run_group(env, env.dataset[0], n, ask, 0, cfg, asyncio.Semaphore(places))
    return asyncio.run(asyncio.wait_for(group, 30))


class Asks(SingleTurnEnv):
    own = {"temperature": 0.2}

    async def rollout(self, state, generate):
        state["completion"].append(await generate(state["prompt"], trainable=False, **self.own))
        state["completion"].append(await generate(state["prompt"], **self.own))


def test_a_turn_that_is_trained_is_sampled_as_the_run_says(make_cfg):
    """Other settings would be trained on as if they were the policy's."""
    asked = []

    async def ask_with(prompt, tools=None, user="", own=()):
        asked.append(own)
        return await ask(prompt, tools, user)

    (r,) = rollouts_of(make_cfg(), Asks, ask=ask_with)
    assert r.reward is None and r.error.startswith(
        "DataError: generate(): {'temperature': 0.2} or a tool's `strict` may"
    )
    assert asked == [Asks.own]


@pytest.mark.parametrize("strict, own, is_free", [
    (False, {"tool_choice": "required"}, False),
    (False, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, False),
    (True, {}, False),
    (False, {"tool_choice": "none", "chat_template_kwargs": {"enable_thinking": False}}, True),
])  # fmt: skip
def test_what_forces_the_form_of_an_answer_is_not_trained(strict, own, is_free, make_cfg):
    tool = {"type": "function", "function": {"name": "f", "strict": strict}}

    class Forces(SingleTurnEnv):
        async def rollout(self, state, generate):
            state["completion"].append(await generate(state["prompt"], [tool], **own))

    (r,) = rollouts_of(make_cfg(), Forces)
    assert (r.error == "") == is_free and ("`strict` may bias" in r.error) != is_free


def test_a_straggler_holds_one_place_and_not_its_groups(make_cfg):
    """While the first rollout waits in one of two places, the other five go through the other."""
    ended = []

    async def ask_slowly(prompt, tools=None, user="", own=()):
        while user == "0" and len(ended) < 5:
            await asyncio.sleep(0.01)
        ended.append(user)
        return await ask(prompt, tools, user)

    rollouts = rollouts_of(make_cfg(), n=6, ask=ask_slowly, places=2)
    assert ended == ["1", "2", "3", "4", "5", "0"]
    assert [r.state["completion"][0]["content"] for r in rollouts] == ["0", "1", "2", "3", "4", "5"]


async def ask_twice(prompt, tools=None, user="", own=()):
    """The context is full for "long" at once, and anything else is answered later."""
    if prompt == "long":
        raise Truncated
    await asyncio.sleep(0.05)
    return await ask(prompt, tools, user)


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_one_of_two_calls_finds_the_context_full(is_waited_for, make_cfg):
    """A TaskGroup raises it in a group of errors. If the other call goes on by itself, its answer comes too late."""
    late = []

    class Both(SingleTurnEnv):
        async def rollout(self, state, generate):
            state["completion"].append(await generate("first"))
            if is_waited_for:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(generate("long"))
                return
            late.append(asyncio.ensure_future(generate("second")))
            await asyncio.gather(generate("long"), late[0])

    class Slow(Rubric):
        async def score(self, state):
            if late:
                await asyncio.wait(late)
            return await super().score(state)

    async def go():
        env = Both([{"question": "?"}], rubric=Slow([constant]))
        return await orchestrator.run_rollout(env, env.dataset[0], ask_twice, 0, make_cfg())

    r = asyncio.run(go())
    assert r.truncated and r.reward == 1 and not r.error and r.num_turns == len(r.sequences) == 1
    assert [type(call.exception()) for call in late] == [DataError] * len(late)


def test_two_calls_at_once_are_two_sequences(make_cfg):
    """A best of two: both prompts are the same, and neither continues the other."""

    class BestOfTwo(SingleTurnEnv):
        async def rollout(self, state, generate):
            state["completion"] += await asyncio.gather(generate(state["prompt"]), generate(state["prompt"]))

    (r,) = rollouts_of(make_cfg(), BestOfTwo)
    assert r.num_turns == 2 and not r.error and [s["turn"].tolist() for s in r.sequences] == [[0] * 3, [1] * 3]


@pytest.mark.parametrize("name, values, error", [
    ("extra", [1, 2, 3], ""), ("extra", np.arange(3.0), ""), ("extra", torch.arange(3), ""), ("mask", [0, 0, 1.0], ""),
    ("extra", [1, 2], r"DataError: field 'extra' has values of shape \(2,\) for 3 tokens"),
    ("extra", torch.ones(3, 1), r"DataError: field 'extra' has values of shape \(3, 1\)"),
    ("extra", ["a", "b", "c"], "DataError: field 'extra': could not convert"), ("extra", None, "DataError: .*extra"),
    ("reward", [1, 2, 3], "DataError: a field may not be called 'reward', nor any of .*'staleness'"),
    ("row", [1, 2, 3], "DataError: a field may not be called 'row', nor any of .*'staleness'"),  # collate's own
])  # fmt: skip
def test_fields_of_the_environment_are_checked_where_the_rollout_ends(name, values, error, make_cfg):
    class Adds(SingleTurnEnv):
        def add_fields(self, state, sequences):
            sequences[0][name] = values

    rollouts = rollouts_of(make_cfg(), Adds, n=2)
    for r in rollouts:
        assert re.match(error + ("" if error else "$"), r.error), r.error
        assert (r.reward is None) == bool(error)
        if not error:
            assert r.sequences[0][name].tolist() == list(values)
            assert r.sequences[0][name].dtype == (bool if name == "mask" else np.float32)


def test_a_cancellation_by_user_code_loses_its_rollout_and_a_real_one_ends_it():
    async def leaks():
        raise asyncio.CancelledError

    async def cancels_itself():
        asyncio.current_task().cancel()
        await asyncio.sleep(0)

    async def swallows_its_cancellation():
        with suppress(asyncio.CancelledError):
            await cancels_itself()
        raise LookupError("later")

    async def go():
        errors = {leaks: "CancelledError", cancels_itself: "CancelledError", swallows_its_cancellation: "LookupError"}
        for work, error in errors.items():
            r = Rollout({}, reward=1.0, metrics={"exact": 1.0})
            await orchestrator.guard([r], work(), 5)
            assert r.reward is None and r.metrics == {} and r.error.startswith(error)
            assert not asyncio.current_task().cancelling()
        task = asyncio.create_task(orchestrator.guard([r], asyncio.sleep(60), 90))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())


def test_a_run_that_is_suspended_loses_no_rollout():
    """A process that is stopped sees as much as one whose loop is blocked: time has passed, and nothing else."""

    async def work():
        await asyncio.sleep(0.2)
        time.sleep(1.5)
        await asyncio.sleep(0.2)

    async def go():
        r = Rollout({}, reward=1.0)
        await orchestrator.guard([r], work(), 1.0)
        late = Rollout({}, reward=1.0)
        await orchestrator.guard([late], asyncio.sleep(5), 0.3)
        return r.error, late.error

    error, late = asyncio.run(go())
    assert error == "" and late.startswith("TimeoutError")


class Textless(Exception):
    def __str__(self):
        return 7


def raises(error):
    raise error


@pytest.mark.parametrize("function, error", [
    (lambda: next(iter(())), "RuntimeError: <lambda> raised StopIteration"),
    (lambda: sys.exit(2), "SystemExit: 2 in <lambda>, test_orchestrator.py"),
    (lambda: raises(Textless()), "Textless: <Textless> in raises, test_orchestrator.py"),
], ids=["StopIteration", "SystemExit", "no text"])  # fmt: skip
def test_what_asyncio_treats_as_its_own_loses_its_rollout(function, error):
    """A future takes no StopIteration, so its waiter would hang; SystemExit would end the run, seemingly with 2."""
    r = Rollout({}, reward=1.0)
    asyncio.run(orchestrator.guard([r], orchestrator.call(function), 5))
    assert r.reward is None and r.error.startswith(error)


# --- in this process, against a fake server ---------------------------------------------------------------------------


def test_each_rollout_asks_for_itself_by_its_number(run, tmp_path):
    """One request a turn, without n; the answers of a group differ."""
    run_dir = run(1, '{ kind = "turns", num_turns = 2 }', fake={"log": str(tmp_path / "log")})
    asked = lines(tmp_path / "log")
    rollouts = lines(run_dir / "rollouts.jsonl")
    assert len(asked) == 2 * len(rollouts) and not any("n" in body for body in asked)
    assert Counter(body["user"] for body in asked) == {str(i): len(asked) // 4 for i in range(4)}
    answers = {r["completion"][0]["content"] for r in rollouts if r["group"] == 0}
    assert len(answers) > 2


def test_multi_turn_forks_only_if_the_template_drops_history(run, tmp_path):
    from think_env import DROPS

    (tmp_path / "drops.jinja").write_text(DROPS)
    for template, num_sequences in (("", 1), (str(tmp_path / "drops.jinja"), 4)):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        args = '{ kind = "turns", num_turns = 4, prompt = "hi" }'
        run_dir = run(1, args, f"chat_template={template}", "orchestrator.sampling.max_tokens=4", template=template)
        batch, forks, turns = all_batches(run_dir)[0], {}, {}
        for r in lines(run_dir / "rollouts.jsonl"):
            assert len(r["completion"]) == 7  # four answers, three replies
            lost = [bool(m["content"]) for m in r["completion"][:5:2]]  # an answer of nothing cannot be dropped
            forks[r["group"], r["rollout"]] = sum(lost) if template else 0
        sequences = Counter((s["group"], s["rollout"]) for s in batch.sequences)
        assert sequences == {key: 1 + forks[key] for key in sequences}
        assert max(sequences.values()) == num_sequences
        assert (batch.info["metrics"]["rollout/forks"] > 0) == bool(template)
        for s in batch.sequences:
            turns.setdefault((s["group"], s["rollout"]), []).extend(s["turn"][s["mask"]].unique().tolist())
        assert all(found == [0, 1, 2, 3] for found in turns.values())  # each is said once


def test_a_prompt_made_in_setup_state_is_what_is_sampled_from(run):
    run_dir = run(1, '{ kind = "own prompt" }')
    for r in lines(run_dir / "rollouts.jsonl"):
        assert r["prompt"][0]["content"].startswith("changed") and not r["error"]
    for s in all_batches(run_dir)[0].sequences:
        text = run.tokenizer.decode(s["tokens"][:9].tolist())
        assert text.startswith("<|user|>changed"), text


def test_agents_and_fields_of_an_environment_reach_the_batch_file(run, tmp_path):
    """Each agent has a sequence of its own, with its own reward if there is one; the critic is not trained."""
    run_dir = run(1, '{ kind = "Agents" }')
    rewards = {(r["group"], r["rollout"]): r["reward"] for r in lines(run_dir / "rollouts.jsonl")}
    (batch,) = all_batches(run_dir)
    assert Counter((s["agent"], s["trainable"]) for s in batch.sequences) == {
        ("writer", True): 16,
        ("critic", False): 16,
    }
    for s in batch.sequences:
        assert s["turn"][s["mask"]].unique().tolist() == ([0, 2] if s["trainable"] else [1, 3])
        assert (s["reward"] == rewards[s["group"], s["rollout"]]) != s["trainable"]
    (batch,) = all_batches(run(1, '{ kind = "Fields" }', f"output_dir={tmp_path / 'other'}"))
    assert all(s["place"].tolist() == list(range(len(s["tokens"]))) for s in batch.sequences)


def test_context_that_ends_truncates(run):
    """Turns go on until max_seq_len is full."""
    run_dir = run(1, '{ kind = "turns", num_turns = 50 }', "orchestrator.sampling.max_tokens=9")
    rollouts = lines(run_dir / "rollouts.jsonl")
    assert all(r["truncated"] and not r["error"] and r["reward"] is not None for r in rollouts)
    assert 56 <= max(len(s["tokens"]) for s in all_batches(run_dir)[0].sequences) <= 64


def test_text_prompts_go_to_completions(run):
    rollout = lines(run(2, '{ kind = "text" }') / "rollouts.jsonl")[0]
    assert isinstance(rollout["prompt"], str) and isinstance(rollout["completion"][0], str)


@pytest.mark.parametrize("kind, override, code, message", [
    ("noise", "model=nowhere/at_all", 2, "model = 'nowhere/at_all'"),
    ("noise", "model=.cache/at_all", 2, "model = '.cache/at_all'"),
    ("noise", "chat_template=nowhere.jinja", 2, "chat_template.* 'nowhere.jinja'"),
    ("none", "max_steps=2", 4, r"env.id = 'think_env': StopIteration:  in load_environment, think_env.py:\d+"),
    ("noise", "env.id=not_there", 2, "env.id = 'not_there': ModuleNotFoundError"),
    ("constant", "eval.every=1", 2, "env.id = 'think_env': eval.every is set, but it has no eval_dataset"),
])  # fmt: skip
def test_what_the_environment_and_the_model_lack_is_refused(kind, override, code, message, run):
    with pytest.raises(RunError, match=message) as e:
        run(2, f'{{ kind = "{kind}" }}', override)
    assert e.value.code == code


def dropped_of(run_dir, step=None):
    """{group: why} of the groups that were dropped on the way to a batch, or to all of them."""
    found = [r for r in lines(run_dir / "rollouts.jsonl") if r["dropped"] and step in (None, r["step"])]
    return {r["group"]: r["dropped"] for r in found}


def check_indices(run_dir):
    """Every index is in one batch at most, or still open. Returns {step: groups that are trained on}."""
    seen, kept = set(), {}
    for batch in all_batches(run_dir):
        step = batch.info["step"]
        kept[step] = {s["group"] for s in batch.sequences}
        dropped = set(dropped_of(run_dir, step))
        assert not kept[step] & dropped and not (kept[step] | dropped) & seen
        seen |= kept[step] | dropped
        state = batch.info["sampler"]["think_env"]
        assert seen | set(state["open"]) == set(range(state["next"]))
    return kept


def test_flat_groups_are_dropped_and_refilled_in_order(run):
    run_dir = run(
        6, '{ kind = "turns", num_turns = 1 }', "orchestrator.rollouts_per_example=2", "orchestrator.max_staleness=0"
    )
    kept = check_indices(run_dir)
    assert set(dropped_of(run_dir).values()) == {"flat"}
    for batch in all_batches(run_dir):
        m = batch.info["metrics"]
        assert len(kept[batch.info["step"]]) == 8 == m["group/kept"]
        assert len(dropped_of(run_dir, batch.info["step"])) == m["group/flat"]


def test_oversampling_puts_the_surplus_back(run):
    """Twice the groups are under way; the lowest indices that teach are trained on, the rest come again later."""
    overrides = ("orchestrator.oversampling_factor=2.0", "orchestrator.rollouts_per_example=2")
    kept = check_indices(run(5, '{ kind = "turns", num_turns = 1 }', *overrides, fake={"slow": [3, 0.2]}))
    assert [len(groups) for groups in kept.values()] == [8] * 5
    assert max(kept[4]) < 8 * 5 + 24 + len(dropped_of(run.run_dir))  # none is left behind for long


@pytest.mark.parametrize("kind, message", [
    ("constant", r"41 groups of think_env in a row.*flat, \[1.0, 1.0"), ("raises", "failed, .'ValueError: never"),
])  # fmt: skip
def test_always_flat_or_failing_ends_the_run(kind, message, run):
    with pytest.raises(RunError, match=message) as e:
        run(3, f'{{ kind = "{kind}" }}')
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
        assert not {(s["group"], s["rollout"]) for s in batch.sequences} & {(r["group"], r["rollout"]) for r in failed}


def test_a_row_that_cannot_begin_loses_its_rollouts_and_the_run_goes_on(run):
    run_dir = run(3, '{ kind = "BadRow", num_rows = 6 }')
    bad = [r for r in lines(run_dir / "rollouts.jsonl") if r["error"]]
    assert bad and {r["example"] for r in bad} == {3} and {r["dropped"] for r in bad} == {"failed"}
    assert all(re.match(r"LookupError: no such table in start, think_env.py:\d+$", r["error"]) for r in bad)
    assert sum(batch.info["metrics"].get("error/LookupError", 0) for batch in all_batches(run_dir)) == len(bad)


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
    rollouts = lines(run(3, NOISE, "orchestrator.generation_timeout=3", fake=fake) / "rollouts.jsonl")
    found = Counter(r["error"].split(":")[0] for r in rollouts)
    assert found == {"": len(rollouts) - 2, "TimeoutError": 1, "DataError": 1}  # the 500 was retried
    assert time.monotonic() - started < 60


def test_no_more_than_max_concurrent_rollouts_are_under_way(run, fake_servers):
    run(2, NOISE, "orchestrator.max_concurrent=6", fake={"generate_s": 0.1})
    assert httpx.get(f"{fake_servers()}/health").json()["most"] == 6


@pytest.mark.parametrize("prompt, override", [
    ("hello", "orchestrator.max_prompt_len=10"),
    ("x" * 58, "orchestrator.sampling.max_tokens=4"),  # the server says so: rows of two digits have 64 tokens
], ids=["max_prompt_len", "max_seq_len"])  # fmt: skip
def test_long_prompts_are_dropped_and_counted(prompt, override, run):
    """Rows 0 to 36: those of two digits are a token longer."""
    run_dir = run(3, f'{{ kind = "noise", prompt = "{prompt}" }}', override)
    assert {r["example"] for r in lines(run_dir / "rollouts.jsonl") if not r["dropped"]} <= set(range(10))
    dropped = dropped_of(run_dir)
    assert set(dropped.values()) == {"long"}
    assert sum(b.info["metrics"]["group/long"] for b in all_batches(run_dir)) == len(dropped)


@pytest.mark.parametrize("key", ["mask_truncated_completions", "zero_truncated_completions"])
def test_truncated_completions(key, run):
    run_dir = run(3, NOISE, f"orchestrator.{key}=true", "orchestrator.sampling.max_tokens=24")
    truncated = [r["truncated"] for r in lines(run_dir / "rollouts.jsonl")]
    assert any(truncated) and not all(truncated)
    for s in itertools.chain(*(batch.sequences for batch in all_batches(run_dir))):
        assert bool(s["mask"].any()) != (s["truncated"] and key.startswith("mask"))
        assert (s["reward"] == 0) == (s["truncated"] and key.startswith("zero"))


def test_staleness_is_bounded_and_reached(run):
    """One request in fifty takes ten times as long. Batches of five versions are under way at once."""
    fake = {"generate_s": 0.1, "slow": [50, 1.0]}
    run_dir = run(15, NOISE, "orchestrator.max_staleness=4", fake=fake, train_s=0.05)
    staleness = set()
    for n, batch in enumerate(all_batches(run_dir)):
        assert all(s["staleness"] == n - s["versions"][0] for s in batch.sequences)
        staleness |= {s["staleness"] for s in batch.sequences}
    assert max(staleness) == 4 and min(staleness) == 0


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
    run_dir = run(3, MIX.format(other=other), "eval.every=3", "orchestrator.rollouts_per_example=2")
    for n, batch in enumerate(all_batches(run_dir)):
        kept = {(s["env"], s["group"]) for s in batch.sequences}
        assert Counter(name for name, _ in kept) == {"often": 6, "seldom": 2}
        mine = [r for r in lines(run_dir / "rollouts.jsonl") if r["step"] == n]
        assert len(mine) == batch.info["metrics"]["rollout/num"]
        assert {"noise" in r["metrics"] for r in mine if r["env"] == "often"} == {True}
    found = [(e["step"], e["env"]) for e in lines(run_dir / "eval.jsonl")]
    assert found == [(0, "often"), (0, "seldom"), (3, "often"), (3, "seldom")]


# --- an order of one's own --------------------------------------------------------------------------------------------


class NoRows(Picky):
    def is_wanted(self, index, row, step):
        return False


class EvenRows(Picky):
    """Takes rows of even numbers alone; counts what is committed."""

    def is_wanted(self, index, row, step):
        return row % 2 == 0

    def commit(self, group):
        super().commit(group)
        self.memory["committed"] = self.memory.get("committed", 0) + 1


class KeepsSome(Order):
    """Keeps two rows of three, whatever their rewards. From batch 2 on its first group is trained on once more."""

    kept = None

    def keep(self, rollouts):
        if int(rollouts[0].state["answer"]) % 3 == 0:
            return "not mine"
        self.kept = self.kept or rollouts
        return ""

    def extra(self, step):
        return [Group("think_env", 1000 + step, 0, self.kept, "")] if step > 1 else []


def test_an_order_takes_the_rows_it_wants_and_remembers(run):
    run_dir = run(3, NOISE, "orchestrator.order=test_orchestrator:EvenRows")
    assert {r["example"] % 2 for r in lines(run_dir / "rollouts.jsonl")} == {0}
    states = [batch.info["sampler"]["think_env"] for batch in all_batches(run_dir)]
    assert [state["extra"]["committed"] for state in states] == [4, 8, 12]
    with pytest.raises(RunError, match=r"no row is left at step \d: NoRows wants none of them") as e:
        run(4, NOISE, "orchestrator.order=test_orchestrator:NoRows")
    assert e.value.code == 4


def test_an_order_keeps_and_adds_groups(run):
    order = "orchestrator.order=test_orchestrator:KeepsSome"
    run_dir = run(4, '{ kind = "zero" }', order, "orchestrator.max_staleness=0")
    assert set(dropped_of(run_dir).values()) == {"not mine"}
    for n, batch in enumerate(all_batches(run_dir)):
        added = [s for s in batch.sequences if s["group"] >= 1000]
        assert len(batch.sequences) == 16 + len(added) and len(added) == (4 if n > 1 else 0)
        assert batch.info["metrics"]["rollout/num"] >= len(batch.sequences)
        assert {s["staleness"] for s in added} <= {n}
        assert batch.info["metrics"]["staleness/max"] == 0  # of the others
        assert all(s["example"] % 3 for s in batch.sequences if s["group"] < 1000)


def test_a_group_without_rewards_is_not_an_orders_to_keep(run):
    """On a row's first visit both rollouts are lost."""
    order = "orchestrator.order=test_orchestrator:KeepsSome"
    run_dir = run(1, '{ kind = "misbehaves" }', "orchestrator.rollouts_per_example=2", order)
    assert set(dropped_of(run_dir).values()) <= {"failed", "not mine"} and all_batches(run_dir)[0].sequences


class Counts(Order):
    """Remembers the last step that it has added to."""

    def extra(self, step):
        self.memory["last"] = step
        return []


def test_a_batch_has_the_memory_of_no_later_one(run):
    """The next ones are there before the first can be committed."""
    more = ["orchestrator.max_staleness=3", "orchestrator.max_concurrent=64"]
    env = '{ kind = "first_batch_is_slow" }'
    run_dir = run(4, env, *more, "orchestrator.order=test_orchestrator:Counts")
    states = [batch.info["sampler"]["think_env"]["extra"] for batch in all_batches(run_dir)]
    assert states == [{"last": step} for step in range(4)]


def test_a_lost_rollouts_fields_are_not_looked_at(make_cfg):
    """They may be why it was lost, and no shape can be relied on."""
    sound = {"trainable": True, "agent": "", "mask": [0, 1]}
    rollouts = [Rollout({}, [sound], reward=1.0), Rollout({}, [sound], reward=1.0)]
    rollouts.append(Rollout({}, [{"ce": [[1], [2, 3]]}], error="DataError: field 'ce'"))
    assert unusable(rollouts) == "" and Order([{}], make_cfg()).keep(rollouts) == "flat"


# --- evaluation, resume -----------------------------------------------------------------------------------------------


def test_each_version_is_evaluated_once_and_holds_its_batch(run):
    run_dir = run(5, NOISE, "eval.every=2", "eval.temperature=0.5", fake={"generate_s": 0.2})
    found = lines(run_dir / "eval.jsonl")
    assert [e["step"] for e in found] == [0, 2, 4, 5]
    assert all(e["version_first"] == e["version_last"] == e["step"] for e in found)
    assert all(e["n"] == 3 and e["errors"] == 0 and e["noise"] == e["reward/mean"] for e in found)
    kept = lines(run_dir / "eval_rollouts.jsonl")
    assert [(r["step"], r["group"]) for r in kept] == [(e["step"], i) for e in found for i in range(3)]
    assert {r["temperature"] for r in kept} == {0.5}


def test_rollouts_of_evaluations_need_not_be_kept(run):
    run_dir = run(1, NOISE, "eval.every=1", "eval.keep_rollouts=false")
    assert len(lines(run_dir / "eval.jsonl")) == 2 and lines(run_dir / "eval_rollouts.jsonl") == []


def test_requests_of_evaluations_have_seeds_which_every_version_repeats(run, tmp_path):
    run(1, '{ kind = "turns", num_turns = 2 }', "eval.every=1", fake={"log": str(tmp_path / "log")})
    seeds = Counter(body.get("seed") for body in lines(tmp_path / "log"))
    assert seeds.pop(None) >= 32  # of training
    assert len(seeds) == 3 * 2 and set(seeds.values()) == {2}  # rows x turns; versions 0 and 1


def test_an_evaluation_that_takes_longer_than_its_hold_says_so(run, capfd):
    """No version is evaluated twice, and the last one is in any case."""
    slow = ("eval.every=1", "eval.hold_s=0.1", "orchestrator.max_staleness=0", "eval.rollouts_per_example=16")
    run_dir = run(6, '{ kind = "misbehaves" }', *slow, "orchestrator.max_concurrent=16", fake={"generate_s": 0.2})
    found = lines(run_dir / "eval.jsonl")
    steps = [e["step"] for e in found]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == 6 and len(steps) < 7
    assert any(e["version_last"] > e["version_first"] for e in found)
    assert all(e["n"] == 3 and e["errors"] > 0 for e in found)
    printed = capfd.readouterr().out
    assert f"n 3 errors {found[0]['errors']}" in printed and printed.count("eval ") == len(found)


@pytest.mark.parametrize("kind, override, why", [
    ("raises", "seed=0", "ValueError: never scores in raises"),
    ("noise", "orchestrator.max_prompt_len=1", "the prompts are too long"),
])  # fmt: skip
def test_an_evaluation_in_which_all_is_lost_ends_the_run(kind, override, why, run):
    with pytest.raises(RunError, match=f"evaluation of think_env at version 0, all is lost: {why}") as e:
        run(2, f'{{ kind = "{kind}" }}', "eval.every=1", override)
    assert e.value.code == 4


def test_an_evaluation_that_was_not_finished_is_made_up_for(run):
    """A run was killed when batch 3 was committed, and evaluation 3, which had outlived its hold, was not."""
    how = (4, NOISE, "eval.every=1", "eval.num_examples=2")
    run_dir = run(*how)
    found = [line for line in lines(run_dir / "eval.jsonl") if line["step"] != 3]
    (run_dir / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    run(*how, train_s=0.5)
    assert [line["step"] for line in lines(run_dir / "eval.jsonl")] == [0, 1, 2, 4, 3]


ANSWERS = '{ kind = "turns", num_turns = 1, num_rows = 10 }'  # as good as the server's answers, which repeat exactly


def history(run_dir):
    keys = ("step", "group", "example", "rollout", "reward", "dropped")
    return sorted([line[k] for k in keys] for line in lines(run_dir / "rollouts.jsonl"))


def test_a_run_resumes_where_it_was_and_deals_out_the_same_rows(run, tmp_path):
    """From the batches that exist; what was written for later ones, or cut off, is made again."""
    overrides = ("orchestrator.max_staleness=0", "eval.every=2")
    whole = run(6, ANSWERS, *overrides)
    expected, evaluations = history(whole), [(e["step"], e["reward/mean"]) for e in lines(whole / "eval.jsonl")]
    for n in (3, 4, 5):  # as after a kill: lines that no batch has, and half a line
        batch_file(whole, n).unlink()
    with open(whole / "rollouts.jsonl", "a") as f:
        f.write('{"step": 9, "half')
    again = run(6, ANSWERS, *overrides)
    assert history(again) == expected
    assert [(e["step"], e["reward/mean"]) for e in lines(again / "eval.jsonl")] == evaluations
    check_indices(again)


def batch_file(run_dir, n):
    return run_dir / "batches" / f"step_{n:06d}.safetensors"


def test_what_a_resumed_run_goes_on_from(run):
    """The checkpoint, and the sampler state of the newest batch, also if that is older than the checkpoint."""
    run_dir = run(4, ANSWERS, "eval.every=1")
    (run_dir / "checkpoints" / "step_000002").mkdir()
    states = [batch.info["sampler"] for batch in all_batches(run_dir)]

    def resume(*overrides):
        return orchestrator.resume(run_dir, load_config(run_dir / "config.toml", overrides))

    def is_refused(code, message, *overrides):
        with pytest.raises(RunError, match=message) as e:
            resume(*overrides)
        return e.value.code == code

    def evaluated():
        return [e["step"] for e in lines(run_dir / "eval.jsonl")]

    assert resume() == (2, 4, states[3]) and evaluated() == [0, 1, 2, 3, 4]
    # With another learning rate the weights of versions after the checkpoint do not come again.
    assert resume("trainer.learning_rate=0.5")[:2] == (2, 4) and evaluated() == [0, 1, 2]
    assert is_refused(2, "seed was 0, now 3. Choose another run_name", "seed=3")

    newest = load_batch(batch_file(run_dir, 3))
    former = {"ledger" if key == "sampler" else key: value for key, value in newest.info.items()}
    save_batch(batch_file(run_dir, 3), [{"tokens": [1], "mask": [0], "old_logp": [0.0], "turn": [0]}], former)
    assert resume() == (2, 4, states[3])

    # Batches after a gap were sampled by versions that are far behind those that would train on them.
    batch_file(run_dir, 2).unlink()
    assert is_refused(6, r"the newest batch is .*step_000003.*, not .*step_000001.safetensors: one is missing")
    batch_file(run_dir, 3).unlink()
    assert resume() == (2, 2, states[1])
    batch_file(run_dir, 2).write_text("not a batch")
    assert is_refused(6, r"step_000002.safetensors is damaged .*Remove it")


# --- the whole of launch.sh, with a fake server -----------------------------------------------------------------------


@pytest.mark.slow
def test_servers_sleep_while_the_trainer_steps(launched, make_cfg, tmp_path):
    """inference.sleep: awake for sampling and for weights, asleep for each step, also while an evaluation goes on."""
    sleeping = ("inference.sleep=true", "orchestrator.max_staleness=0", "eval.every=1", "eval.hold_s=0.01")
    fake = json.dumps({"control": str(tmp_path / "control"), "generate_s": 0.1, "slow": [7, 1.0]})
    done, run_dir = launched(3, NOISE, *sleeping, FAKE=fake)
    first, *steps = (tmp_path / "control").read_text().split("/sleep")
    assert first.split() == ["join_weight_group", "receive_weights"]
    assert [step.split() for step in steps] == [["/wake_up", "receive_weights"]] * 3
    assert [e["step"] for e in lines(run_dir / "eval.jsonl")][-1] == 3 and "warning" not in done.stdout
    assert all(e["errors"] == 0 for e in lines(run_dir / "eval.jsonl"))
    with pytest.raises(RunError, match="inference.sleep' = True: must be left out with orchestrator.max_staleness = 1"):
        make_cfg("inference.sleep=true")


def test_a_server_of_another_run_is_refused(make_cfg, fake_servers, tmp_path, monkeypatch):
    monkeypatch.setenv("ROLEMODEL_RUN_ID", "mine")
    with pytest.raises(RunError, match="a server of another run answers: .* serves 'run', not 'mine'") as e:
        cfg = make_cfg(f'inference.urls=["{fake_servers()}"]')
        trainer.WeightSender(cfg, tmp_path, torch.device("cpu")).connect()
    assert e.value.code == 2


@pytest.mark.slow
@pytest.mark.long
def test_user_code_that_never_returns_does_not_keep_the_run(launched):
    """One reward in five sleeps for ever in its thread: its rollouts time out, and the run ends when it is done."""
    started = time.monotonic()
    _, run_dir = launched(2, '{ kind = "stuck" }', "orchestrator.generation_timeout=2")
    assert any(r["error"].startswith("TimeoutError") for r in lines(run_dir / "rollouts.jsonl"))
    assert time.monotonic() - started < 60


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def sampled(cfg, prompt=(), reason="stop", stop=None, num=4, **own):
    """What sample() asks of a server, and its reply to `num` tokens, while another version goes live."""
    asked = []

    async def post(group, path, body):
        asked.append(body)
        client.version += 1
        choice = {"finish_reason": reason, "stop_reason": stop, "token_ids": [5] * num}
        if isinstance(prompt, str):
            choice |= {"text": "a", "prompt_token_ids": [1, 2], "logprobs": {"token_logprobs": [-1.0] * num}}
            return {"choices": [choice]}
        choice |= {"message": {"role": "assistant", "content": "a"}, "logprobs": {"content": [{"logprob": -1.0}] * num}}
        return {"choices": [choice], "prompt_token_ids": [1, 2]}

    client = SimpleNamespace(cfg=cfg, version=7, attempt="x", post=post)
    reply = asyncio.run(orchestrator.sample(client, 0, prompt, own=own))
    return asked[0], reply


def test_an_agents_own_limit_can_only_lower_the_runs(make_cfg):
    assert [sampled(make_cfg(), max_tokens=most)[0]["max_tokens"] for most in (3, 99)] == [3, 16]


def test_the_versions_of_a_turn_are_those_at_its_start_and_at_its_end(make_cfg):
    body, reply = sampled(make_cfg())
    assert reply.versions == [7, 8] and body["cache_salt"] == "x.7"  # of this attempt: another has other weights


def test_a_models_own_penalties_are_switched_off(make_cfg):
    body, _ = sampled(make_cfg())
    assert body["presence_penalty"] == body["frequency_penalty"] == 0


def test_a_tool_call_that_fills_the_limit_was_cut_off(make_cfg):
    assert [sampled(make_cfg(), reason="tool_calls", num=num)[1].is_cut for num in (15, 16)] == [False, True]


@pytest.mark.parametrize("prompt", ["text", ()])
def test_a_stop_string_that_ended_an_answer_belongs_to_it(prompt, make_cfg):
    _, reply = sampled(make_cfg(), prompt, stop="</a>")
    assert (reply.message if prompt else reply.message["content"]) == "a</a>"
    _, reply = sampled(make_cfg(), prompt, stop=7)  # a token
    assert (reply.message if prompt else reply.message["content"]) == "a"


def test_a_group_asks_one_of_the_servers_and_the_next_group_the_next(make_cfg):
    async def answer(request):
        return web.json_response({"server": request.match_info["server"]})

    async def post_all(client):
        return [(await client.post(group, "/v1", {}))["server"] for group in (0, 0, 1, 2)]

    assert with_client(make_cfg, answer, post_all) == ["a", "a", "b", "a"]


def test_a_lost_connection_is_asked_again(make_cfg):
    asked = []

    async def answer(request):
        asked.append(request)
        if len(asked) == 1:
            request.transport.close()
        return web.json_response({})

    assert with_client(make_cfg, answer, lambda client: client.post(0, "/v1", {})) == {} and len(asked) == 2


class Twice(SingleTurnEnv):
    async def rollout(self, state, generate):
        for _ in range(2):
            state["completion"].append(await generate(state["prompt"]))


def test_a_rollout_of_which_one_turn_was_cut_off_is_truncated(make_cfg):
    cuts = [True, False]

    async def ask_cut(prompt, tools=None, user="", own=()):
        reply = await ask(prompt, tools, user)
        return reply._replace(is_cut=cuts.pop(0))

    (r,) = rollouts_of(make_cfg(), Twice, ask=ask_cut)
    assert r.truncated and r.num_turns == 2


def test_a_rollout_remembers_at_which_temperature_it_was_sampled(make_cfg):
    (r,) = rollouts_of(make_cfg("orchestrator.sampling.temperature=0.7"))
    assert r.temperature == 0.7


def scored_together(cfg, is_cut=False):
    """A group whose rubric rewards rollouts, agents and the group."""

    class Rewards(GroupRubric):
        async def score(self, state):
            state["turn_rewards"], state["agent_rewards"] = [1.0], {"": 1.0}
            return await super().score(state)

    def whole(completions):
        return [2.0 for _ in completions]

    async def ask_cut(prompt, tools=None, user="", own=()):
        return (await ask(prompt, tools, user))._replace(is_cut=is_cut)

    env = SingleTurnEnv([{"question": "?"}], rubric=Rewards([constant, whole], [1.0, 0.5]))
    group = orchestrator.run_group(env, env.dataset[0], 2, ask_cut, 0, cfg, asyncio.Semaphore(9))
    return asyncio.run(asyncio.wait_for(group, 30))


def test_a_functions_values_for_a_group_are_among_its_rollouts_metrics_and_weights(make_cfg):
    for r in scored_together(make_cfg()):
        assert r.reward == 2.0 and r.metrics == {"constant": 1.0, "whole": 2.0}
        assert r.reward_weights == {"constant": 1.0, "whole": 0.5}


def test_a_truncated_rollout_that_is_rewarded_0_has_no_reward_of_its_turns_or_agents(make_cfg):
    for r in scored_together(make_cfg("orchestrator.zero_truncated_completions=true"), is_cut=True):
        assert (r.reward, r.turn_rewards, r.agent_rewards) == (0.0, None, {})


def count(order, *groups, dropped=""):
    for errors in groups:
        rollouts = [Rollout({}, reward=None if error else 1.0, error=error) for error in errors]
        order.count(Group("e", 0, 0, rollouts, dropped))


def test_the_share_of_lost_rollouts_is_that_of_the_last_two_hundred(make_cfg):
    order = Order([{}], make_cfg("orchestrator.max_error_share=0.5"))
    count(order, [""] * 400, ["X: why"] * 100)  # as many as may be lost
    with pytest.raises(RunError, match="101 of the last 200 rollouts of e were lost, mostly by X: why"):
        count(order, ["X: why"])


def test_only_groups_in_a_row_are_too_many_that_taught_nothing(make_cfg):
    order = Order([{}], make_cfg())
    for _ in range(50):
        count(order, [""], dropped="flat")
        count(order, [""])
    assert order.num_useless == 0


def test_equal_rewards_are_not_flat_if_turns_or_agents_earned_different_ones(make_cfg):
    def keep(**parts):
        first, second = ({name: value[i] for name, value in parts.items()} for i in (0, 1))
        return Order([{}], make_cfg()).keep([Rollout({}, reward=1.0, **first), Rollout({}, reward=1.0, **second)])

    assert keep(turn_rewards=([0.0, 1.0], [1.0, 0.0])) == keep(agent_rewards=({"a": 0.0}, {"a": 2.0})) == ""
    assert keep(turn_rewards=([1.0], [1.0]), agent_rewards=({"a": 1.0}, {"a": 1.0})) == "flat"


def test_the_mean_reward_is_that_of_all_groups_and_the_staleness_that_of_the_trained(make_cfg):
    new = [Rollout({}, reward=reward, versions=[first, 6]) for reward, first in ((1.0, 3), (0.0, 4))]
    flat = [Rollout({}, reward=1.0, versions=[0, 0]) for _ in range(2)]
    found = rollout_metrics([Group("e", 0, 0, new, ""), Group("e", 1, 1, flat, "flat")], 6)
    assert found["reward/mean"] == 0.75 and found["staleness/max"] == 3 and found["staleness/mean"] == 2.5


def test_a_mix_that_is_resumed_goes_on_at_its_ratio(run):
    """Two of three groups: the shares of the batches differ."""
    how = (3, MIX.format(other="noise").replace("3.0", "2.0"), "orchestrator.max_staleness=0")

    def shares():
        return [Counter(s["env"] for s in batch.sequences) for batch in all_batches(run.run_dir)]

    run(*how)
    whole = shares()
    batch_file(run.run_dir, 1).unlink()
    batch_file(run.run_dir, 2).unlink()
    run(*how)
    assert shares() == whole and whole[0] != whole[1]


def test_seeds_of_evaluations_are_the_runs_and_their_limit_is_their_own(make_cfg, monkeypatch):
    asked = []

    async def sample(client, row, prompt, tools, user, own, **options):
        asked.append(options)
        return await ask(prompt, tools, user)

    monkeypatch.setattr(evaluation, "sample", sample)
    env = SingleTurnEnv([{"question": "?"}], [{"question": "?"}], rubric=Rubric([constant]))
    for seed in (0, 1, 1):
        cfg = make_cfg(f"seed={seed}", "eval.max_tokens=5", "eval.temperature=0.5")
        asyncio.run(evaluation.roll_out(env, SimpleNamespace(cfg=cfg, version=0)))
    first, second, third = (options["seed"] for options in asked)
    assert first != second == third and {(o["max_tokens"], o["temperature"]) for o in asked} == {(5, 0.5)}


def test_evaluations_take_the_first_rows_of_their_own_dataset_and_no_more_places_than_the_run(make_cfg, monkeypatch):
    under_way = Counter()

    async def sample(client, row, prompt, tools, user, own, **options):
        under_way["now"] += 1
        under_way["most"] = max(under_way["most"], under_way["now"])
        await asyncio.sleep(0.01)
        under_way["now"] -= 1
        return await ask(prompt, tools, user)

    monkeypatch.setattr(evaluation, "sample", sample)
    rows = [{"question": str(i)} for i in range(4)]
    env = SingleTurnEnv([{"question": "?"}], rows, rubric=Rubric([constant]))
    cfg = make_cfg("eval.num_examples=3", "eval.rollouts_per_example=2", "orchestrator.max_concurrent=4")
    groups = asyncio.run(evaluation.roll_out(env, SimpleNamespace(cfg=cfg, version=0)))
    found = [[r.state["prompt"][0]["content"] for r in rollouts] for rollouts in groups]
    assert found == [["0", "0"], ["1", "1"], ["2", "2"]] and under_way["most"] == 4


def test_a_lost_rollout_keeps_nothing_that_it_earned():
    r = Rollout({}, reward=1.0, turn_rewards=[1.0], agent_rewards={"a": 1.0}, metrics={"exact": 1.0})
    asyncio.run(orchestrator.guard([r], asyncio.sleep(5), 0.06))
    assert r.error.startswith("TimeoutError") and (r.reward, r.turn_rewards) == (None, None)
    assert r.agent_rewards == r.metrics == {}


def test_of_two_sequences_that_a_prompt_begins_with_the_longer_goes_on():
    sequences = []
    for turn, (prompt, ids) in enumerate([([1, 2], [3, 4]), ([1], [2]), ([1, 2, 3, 4, 5], [6])]):
        orchestrator.extend_or_fork(sequences, prompt, ids, [-1.0] * len(ids), turn)
    assert [s["tokens"] for s in sequences] == [[1, 2, 3, 4, 5, 6], [1, 2]]


def test_a_run_whose_oldest_batches_were_removed_resumes(run):
    """As checkpoint.keep_batches does."""
    run_dir = run(3, ANSWERS)
    (run_dir / "checkpoints" / "step_000002").mkdir()
    batch_file(run_dir, 0).unlink()
    assert orchestrator.resume(run_dir, load_config(run_dir / "config.toml"))[:2] == (2, 3)


def test_a_row_passes_at_k_if_one_of_its_rollouts_does():
    found = eval_metrics([[Rollout({}, reward=1.0), Rollout({}, reward=0.0)], [Rollout({}, reward=0.0)] * 2])
    assert (found["pass@1"], found["pass@k"], found["k"]) == (0.25, 0.5, 2)


def test_the_context_that_is_left_is_a_limit_of_a_tool_call_as_well(make_cfg):
    """The prompt of sampled() takes 2 of 18 tokens."""
    cfg = make_cfg("max_seq_len=18", "orchestrator.sampling.max_tokens=17")
    assert [sampled(cfg, reason="tool_calls", num=num)[1].is_cut for num in (15, 16)] == [False, True]


def test_only_the_first_prompt_of_a_rollout_may_be_too_long(make_cfg):
    async def ask_longer(prompt, tools=None, user="", own=()):
        return (await ask(prompt))._replace(prompt_ids=[1, 2] if prompt == "first" else [1] * 9)

    class Grows(SingleTurnEnv):
        async def rollout(self, state, generate):
            state["completion"] += [await generate("first"), await generate("second")]

    (r,) = rollouts_of(make_cfg("orchestrator.max_prompt_len=3"), Grows, ask=ask_longer)
    assert r.num_turns == 2 and not r.truncated and not r.error


def test_a_rollout_is_as_old_as_its_first_turn(make_cfg, tmp_path):
    live = itertools.count(3)

    async def ask_later(prompt, tools=None, user="", own=()):
        return (await ask(prompt))._replace(versions=[next(live), next(live)])

    (r,) = rollouts_of(make_cfg(), Twice, ask=ask_later)
    assert r.versions == [3, 4, 5, 6]
    orchestrator.append_rollouts(tmp_path / "lines", 7, [Group("e", 0, 0, [r], "")])
    assert lines(tmp_path / "lines")[0]["version"] == 3


def test_what_is_logged_of_a_batch_is_of_all_its_rollouts():
    """The deviation is that of these rewards, not an estimate of more."""
    kept = [Rollout({}, reward=reward, versions=[0, 0]) for reward in (1.0, 0.0)]
    long = [Rollout({}, truncated=True) for _ in range(2)]
    found = rollout_metrics([Group("e", 0, 0, kept, ""), Group("e", 1, 1, long, "long")], 0)
    assert found["rollout/truncated"] == 0.5 and found["reward/std"] == 0.5


def test_groups_of_a_batch_are_in_their_order_whichever_ends_first(make_cfg):
    async def job(index, row):
        await asyncio.sleep(0.05 * (2 - index))
        return Group("e", index, row, [], "")

    groups = asyncio.run(orchestrator.fill(Order([{}] * 3, make_cfg()), 3, 0, job))
    assert [group.index for group in groups] == [0, 1, 2]


def test_a_batch_has_the_memory_that_its_order_had_when_it_was_committed(make_cfg, tmp_path, monkeypatch):
    """An order may change it while the file is written."""
    cfg = make_cfg()
    order = Order([{}], cfg, {"next": 1, "open": [0], "extra": {"a": 1}})
    monkeypatch.setattr(orchestrator, "append_rollouts", lambda *_: order.memory.update(a=2))
    (tokens,) = make_sequences(1)
    group = Group("e", 0, 0, [Rollout({}, [tokens | {"agent": ""}], [0, 0], reward=1.0)], "")
    (tmp_path / "batches").mkdir()
    asyncio.run(orchestrator.commit_batch(0, [group], [], {"e": order}, tmp_path, cfg))
    state = load_batch(batch_file(tmp_path, 0)).info["sampler"]
    assert state == {"e": {"next": 1, "open": [], "extra": {"a": 1}}}


def test_pass_at_1_is_the_share_of_a_rows_rollouts_that_pass():
    found = eval_metrics([[Rollout({}, reward=reward) for reward in (1.0, 0.0, 0.0, 0.0)]])
    assert (found["pass@1"], found["pass@k"]) == (0.25, 1.0)


def test_what_was_evaluated_is_not_evaluated_again(make_cfg, monkeypatch):
    """Neither the version that is due nor, if it comes late, the one that is live."""
    cfg, done = make_cfg(), []

    async def roll_out(env, client):
        done.append(client.version)
        return [[Rollout({}, reward=1.0)]]

    monkeypatch.setattr(evaluation, "roll_out", roll_out)
    client = SimpleNamespace(cfg=cfg, until=lambda version: asyncio.sleep(0), evaluating=asyncio.Lock())
    (run_directory(cfg) / "eval.jsonl").touch()
    for due, client.version in ((2, 2), (2, 5), (3, 4), (3, 4)):
        asyncio.run(evaluation.evaluate(due, {"e": None}, client))
    assert done == [2, 4]
