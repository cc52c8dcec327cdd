"""Environments of the real verifiers package, wrapped by verifiers_v0.py, against the same written for ours."""

import asyncio
import functools

import httpx
import openai
import pytest
import verifiers as vf
import vf_envs
from conftest import all_batches, lines
from datasets import Dataset
from scripted import play
from verifiers.clients import OpenAIChatCompletionsClient

import orchestrator
from configs.environments import verifiers_v0
from configs.environments.scoring import score
from configs.models import toy
from configs.runtime.role import RunError
from env import load_environment

ENV = '{{ kind = "{}" }}\n[inference.args]\nenable_auto_tool_choice = true'


@pytest.fixture
def rollouts(run):
    def go(kind, *overrides, steps=2, **kwargs):
        run_dir = run(steps, '[env]\nid = "vf_envs"\nargs = ' + ENV.format(kind), *overrides, **kwargs)
        return lines(run_dir / "rollouts.jsonl"), all_batches(run_dir)

    return go


@pytest.mark.parametrize("kind", ["single", "multi", "tool"])
def test_rewards_turns_and_tokens_come_through_unchanged(rollouts, kind, tmp_path):
    """The fake server's answers are a function of the prompt and the weights: what is equal here was asked, read and
    scored alike. A turn more or less, another tool schema or template input would give other tokens."""
    fresh = "orchestrator.max_staleness=0"  # otherwise which version a rollout starts at depends on the machine's load
    theirs, batches = rollouts(kind, fresh)
    for path in (tmp_path / "run" / "batches").iterdir():
        path.unlink()
    (tmp_path / "run" / "rollouts.jsonl").unlink()
    ours, our_batches = rollouts("our " + kind, fresh)
    assert len(theirs) == len(ours) > 0 and not any(r["error"] for r in theirs)
    for a, b in zip(theirs, ours):
        assert a["reward"] == b["reward"] and {k: a["metrics"][k] for k in b["metrics"]} == b["metrics"]
        assert [m["content"] for m in a["prompt"]] == ["S", *[m["content"] for m in b["prompt"][1:]]]
        assert [m["content"] for m in a["completion"]] == [m["content"] for m in b["completion"]]
        assert a["num_turns"] == b["num_turns"] and a["versions"][0] == b["versions"][0]
    for a, b in zip(batches, our_batches):
        for s, ours in zip(a.sequences, b.sequences, strict=True):
            for name in ("tokens", "mask", "old_logp", "turn"):
                assert s[name].tolist() == ours[name].tolist(), name
    if kind == "multi":
        assert {r["num_turns"] for r in theirs} == {3} and {r["metrics"]["num_turns"] for r in theirs} == {3.0}


def test_tools_are_called_and_errors_go_back_as_text():
    """A scripted policy: a call, a wrong one, an answer."""
    env = load_environment("vf_envs", {"kind": "tool"})

    def call(name, arguments):
        function = {"name": name, "arguments": arguments}
        calls = [{"id": "1", "type": "function", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    replies = [call("double", '{"a": 21}'), call("double", '{"a": '), "42"]
    state, reward, metrics = play(env, env.dataset[3], *replies)
    seen = state["asked"]
    tools = [m["content"] for m in state["completion"] if m["role"] == "tool"]
    assert tools[0] == "42" and "Expecting value" in tools[1] and state["turn"] == 3
    assert metrics["total_tool_calls"] == 2 and metrics["double_calls"] == 2 and reward == metrics["letters"] + 1.5
    assert env.tools[0]["function"]["name"] == "double"
    assert seen[1][-2]["tool_calls"][0]["function"] == {"name": "double", "arguments": '{"a": 21}'}
    assert seen[0] == env.start(env.dataset[3])["prompt"]
    tokenizer = toy.make_tokenizer()
    assert tokenizer.apply_chat_template(seen[0], tokenize=False) == "<|system|>S<|end|><|user|>row 3<|end|>"


@pytest.mark.parametrize("kind", ["raises", "nothing"])
def test_what_is_no_reward_loses_the_rollout_and_is_never_zero(rollouts, kind):
    found, _ = rollouts(kind)
    for r in found:
        assert (r["error"].startswith("ValueError: ") and r["reward"] is None) == (int(r["answer"]) % 3 == 0)
        if kind == "raises" and not r["error"]:
            assert r["reward"] == r["metrics"]["letters"] + 0.5 * r["metrics"]["number"] + 1.0


def test_functions_of_an_env_group_have_the_weights_of_their_environment():
    """Two of one name, a penalty in one environment and a reward in the other."""

    def one(**weights):
        names = {name: lambda completion: 1.0 for name in weights}
        for name, func in names.items():
            func.__name__ = name
        return vf.SingleTurnEnv(
            dataset=Dataset.from_list([{"question": "q", "answer": "a"}]),
            rubric=vf.Rubric([*names.values()], [*weights.values()]),
        )

    env = verifiers_v0.wrap(vf.EnvGroup([one(right=1.0, length=-0.5), one(right=1.0, length=0.5)], ["a", "b"]))
    for row in env.dataset:
        state = env.start(row) | {"completion": [{"role": "assistant", "content": "x"}]}
        reward, _ = asyncio.run(env.rubric.score(state))
        length = {"a": -0.5, "b": 0.5}[row["info"]["env_id"]]
        weights = {name: weight for name, weight in state["reward_weights"].items() if weight}
        assert reward == 1.0 + length and weights == {"right": 1.0, "length": length}


def test_a_reward_in_an_array_counts_a_list_is_none_and_names_of_the_run_stay_its_own(run, rollouts, tmp_path):
    """And the environment's own stop strings and limit reach the server."""
    env = load_environment("vf_envs", {"kind": "array"})
    log = tmp_path / "asked"
    found, _ = rollouts("array", fake={"log": str(log)})
    for r in found:
        assert not r["error"] and r["metrics"].keys() >= {"letters", "array", "reward_step"}
        assert r["metrics"]["array"] == float(r["answer"]) and r["reward_weights"]["reward_step"] == 1.0
        assert r["reward"] == r["metrics"]["letters"] + float(r["answer"]) + 1
    assert {(str(body["stop"]), body["max_tokens"]) for body in lines(log)} == {("['e']", 3)}
    listed = load_environment("vf_envs", {"kind": "listed"})
    assert score(listed, [env.dataset[0]["prompt"]], ["a"]) == [None]


def test_a_rubrics_cleanup_runs_for_a_lost_rollout_and_tool_calls_have_openais_form():
    vf_envs.CLEANED.clear()
    env = load_environment("vf_envs", {"kind": "fails"})
    with pytest.raises(Exception, match="the tool is gone"):
        play(env, env.dataset[3], "a")
    assert vf_envs.CLEANED == ["3"]
    call = {"id": "1", "type": "function", "function": {"name": "double", "arguments": "{}"}}
    theirs = {"role": "assistant", "tool_calls": [{"id": "1", "name": "double", "arguments": "{}"}]}
    assert verifiers_v0.as_openai(theirs)["tool_calls"] == verifiers_v0.as_openai({"tool_calls": [call]})["tool_calls"]
    assert verifiers_v0.as_openai(theirs)["tool_calls"] == [call]


def test_score_without_a_server():
    env = load_environment("vf_envs", {"kind": "single"})
    prompts = [row["prompt"] for row in env.dataset[:2]]
    assert score(env, prompts, ["a", "b"]) == [float(ord("a") % 7), ord("b") % 7 + 0.5]
    env = load_environment("vf_envs", {"kind": "group"})
    prompts = [env.dataset[0]["prompt"]] * 2
    assert score(env, prompts, ["a", "a"]) == [float(ord("a") % 7), ord("a") % 7 + 1.0]


def test_group_rewards(rollouts):
    found, _ = rollouts("group")
    assert not any(r["error"] for r in found)
    for r in found:
        assert r["metrics"]["spread"] == r["rollout"] and r["reward"] == r["metrics"]["letters"] + r["rollout"]


def test_groups_of_environments(rollouts):
    found, _ = rollouts("env group", steps=4)
    assert not any(r["error"] for r in found)
    assert {"total_tool_calls" in r["metrics"] for r in found} == {True}
    assert all(r["reward"] == r["metrics"]["letters"] + 0.5 * r["metrics"]["number"] for r in found)


def test_what_cannot_be_wrapped_is_refused():
    with pytest.raises(TypeError, match="load_environment returned object, neither"):
        load_environment("vf_envs", {"kind": "other"})
    with pytest.raises(ValueError, match="message_type = 'completion' is not supported"):
        load_environment("vf_envs", {"kind": "completion"})
    with pytest.raises(ValueError, match="no reward functions: environments that score in their own rollout"):
        load_environment("vf_envs", {"kind": "no rewards"})


def test_tools_need_the_servers_parser(run):
    """vLLM says so in its own words, and the run ends with them."""
    env = '[env]\nid = "vf_envs"\nargs = { kind = "tool" }'
    message = (
        "rollouts of vf_envs were lost, mostly by ServerError.*requires --enable-auto-tool-choice and --tool-call-p"
    )
    with pytest.raises(RunError, match=message) as e:
        run(1, env, "orchestrator.max_error_share=0.2", fake={"no_parser": True})
    assert e.value.code == 4


def seen_in(state):
    """What environments and rewards of verifiers may read of a rollout."""
    turns = []
    for step in state["trajectory"]:
        response = step["response"]
        turns.append((response.usage, response.message.finish_reason, response.message.is_truncated, response.model))
        turns.append((step["is_truncated"], [dict(message) for message in step["completion"]], step["extras"]))
    found = {
        key: state.get(key) for key in ("is_completed", "is_truncated", "stop_condition", "error", "usage", "model")
    }
    found |= {"turns": turns, "tools": state["tool_defs"], "answer": state["answer"], "info": state["info"]}
    found["messages"] = [dict(message) for message in [*state["prompt"], *state["completion"]]]
    return found | {"timing": sorted(dict(state["timing"])), "keys": sorted(state), "metrics": sorted(state["metrics"])}


@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("kind", ["single", "multi", "tool"])
def test_environments_see_what_verifiers_own_client_shows_them(kind, stop, make_cfg, fake_servers, monkeypatch):
    """The same answers of one server, through verifiers' client and through ours: whether they were cut, usage, finish
    reasons, limits, tools, timing. Only the names of the model and of the answers differ."""
    url = fake_servers()
    httpx.post(f"{url}/fake", json={"stop": stop})
    monkeypatch.setenv("ROLEMODEL_RUN_ID", "run")
    cfg = make_cfg(f'inference.urls=["{url}"]', "orchestrator.sampling.max_tokens=6")

    async def theirs(env, row):
        client = OpenAIChatCompletionsClient(openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none"))
        state = await env.rollout(
            row, client, "run", {"max_tokens": 6, "temperature": 1.0, "extra_body": {"user": "0"}}
        )
        await env.rubric.score_rollout(state)
        return state

    async def ours(env, row):
        client = orchestrator.Client(cfg)
        ask = functools.partial(orchestrator.sample, client, 0, user="0")
        rollout = await orchestrator.run_rollout(env, row, ask, 0, cfg)
        await client.session.close()
        assert not rollout.error and rollout.truncated == (not stop)
        return rollout.state["verifiers"]

    plain = vf_envs.load_environment(kind)
    env = verifiers_v0.wrap(vf_envs.load_environment(kind))
    one = seen_in(asyncio.run(theirs(plain, dict(plain.get_dataset()[3]))))
    two = seen_in(asyncio.run(ours(env, env.dataset[3])))
    assert one.pop("model") == "run" and two.pop("model") == "policy"
    assert one == two and one["is_truncated"] == (not stop)


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


def test_rows_that_an_environment_holds_out_are_its_own_and_rows_keep_their_info():
    env = load_environment("vf_envs", {"kind": "single"})
    assert (len(env.dataset), len(env.eval_dataset)) == (13, 2) and env.start(env.dataset[3])["info"] == {"number": 3}
