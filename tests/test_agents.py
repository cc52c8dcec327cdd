"""Any agent as an environment: what it asks through its endpoint is what is trained, and nothing else."""

import asyncio
import json
import os
import random
import shutil
import subprocess

import anthropic
import httpx2 as httpx
import openai
import pytest
from conftest import all_batches, lines
from scripted import Policy
from think_env import KEEPS, Turns, noise, rows

from env import Rubric, Truncated
from rolemodel.environments import endpoint, formats
from rolemodel.environments.agents import AgentEnv, AgentFailed
from rolemodel.environments.rubrics import AgentRubric

ROWS = rows(37)
SHORT = ("orchestrator.sampling.max_tokens=3", "max_seq_len=128")


@pytest.fixture(autouse=True)
def cfg(make_cfg, monkeypatch):
    monkeypatch.setattr(Policy, "cfg", make_cfg())


def play(agent, *said, choice=None, **options):
    """A rollout of an agent with a policy that says this. Returns the policy, which has the state."""
    policy = Policy(*said, **choice or {})
    asyncio.run(policy.rollout(AgentEnv(agent, ROWS, rubric=Rubric(), **options), {"question": "q"}))
    return policy


async def say(client, messages, **options):
    """A turn. Adds the answer to the messages, without its reasoning, as many agents do."""
    reply = await client.chat.completions.create(model="anything", messages=messages, **options)
    messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return reply.choices[0].message


# --- what is trained --------------------------------------------------------------------------------------------------


async def turns(client, prompt):
    for i in (1, 2, 3):
        await say(client, prompt)
        prompt.append({"role": "user", "content": f"turn {i}"})


def test_an_agent_is_trained_on_the_same_tokens_as_an_environment_of_the_same_turns(run):
    """The fake server's answers are a function of prompt and seed."""
    found = []
    for env in (Turns(ROWS, 3, rubric=Rubric([noise])), AgentEnv(turns, ROWS, rubric=Rubric([noise]))):
        run_dir = run(1, env, *SHORT, "orchestrator.max_staleness=0")
        found.append((all_batches(run_dir)[0].sequences, lines(run_dir / "rollouts.jsonl")))
        shutil.rmtree(run_dir)
    for a, b in zip(found[0][0], found[1][0], strict=True):
        for name in ("tokens", "mask", "old_logp", "turn"):
            assert a[name].tolist() == pytest.approx(b[name].tolist(), nan_ok=True, abs=0), name
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert a["completion"] == b["completion"] and a["prompt"] == b["prompt"] and a["num_turns"] == 3


async def delegates(client, base_url, prompt):
    """Talks to an unnamed sub-agent in turns with its own conversation, and then replaces that by a summary. Of two
    more agents the path has the name, or a header; a user is played by the policy, but not trained."""
    sub, short = [{"role": "user", "content": "sub"}], [{"role": "user", "content": "summary"}]
    for messages in (prompt, sub, prompt, sub, prompt, short, short):
        await say(client, messages)
        messages.append({"role": "user", "content": "more"})
    solver = client.with_options(base_url=base_url.replace("/v1", "/solver/v1"), default_headers={"X-Agent": "no"})
    await say(solver, list(sub))
    await say(client, [{"role": "user", "content": "a"}] * 9, extra_headers={"X-Agent": "user"})  # the longest
    await say(client, list(sub), extra_headers={"X-Trainable": "false"})


def shares():
    return {"": 1 + random.random(), "solver": -1 - random.random()}


def test_each_conversation_is_a_sequence_with_its_agents_reward_and_each_token_is_trained_once(run):
    env = AgentEnv(delegates, ROWS, untrained=["user"], rubric=AgentRubric([shares, noise], [2.0, 0.0]))
    run_dir = run(1, env, *SHORT)
    rollouts = {(r["slot"], r["member"]): r for r in lines(run_dir / "rollouts.jsonl")}
    found = {place: [] for place in rollouts}
    sequences = all_batches(run_dir)[0].sequences
    for s in sequences:
        found[s["slot"], s["member"]].append((s["agent"], sorted({*s["turn"][s["mask"]].tolist()}), 1 / s["share"]))
        others = [x["reward"] for x in sequences if (x["slot"], x["turn"][-1]) == (s["slot"], s["turn"][-1])]
        assert s["reward"] == rollouts[s["slot"], s["member"]]["agent_rewards"][s["agent"]] and len(others) == 4
        assert s["adv"][s["mask"]] == pytest.approx(s["reward"] - sum(others) / 4)
    for place, r in rollouts.items():
        assert found[place] == [("", [0, 2, 4], 3), ("", [1, 3], 3), ("", [5, 6], 3), ("solver", [7], 1)]
        assert len(r["prompt"]) == 1 and len(r["completion"]) == 5 and r["metrics"]["agent_requests"] == 10


async def asks_again(client, prompt):
    """After an example that says what the policy will, too."""
    messages = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "yes"}, *prompt]
    await say(client, list(messages))
    await say(client, messages)
    await say(client, messages)


def test_rewards_see_what_the_policy_said_and_of_two_answers_the_one_that_was_used():
    state = play(asks_again, "no", "yes", "yes").state
    assert [m["content"] for m in state["prompt"]] == ["p", "yes", "q"]
    assert [m["content"] for m in state["completion"]] == ["yes", "yes"]


# --- what a request may ask for ---------------------------------------------------------------------------------------


async def wants_more(client, prompt):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
    options = {"temperature": 0.2, "logit_bias": {"5": 9}, "tool_choice": "required", "tools": [tool]}
    await say(client, list(prompt), **options, max_tokens=5, response_format={"type": "json_object"})
    await say(client, prompt, temperature=1, top_p=1, stop="</a>", user="me", parallel_tool_calls=False)
    limits = {"max_tokens": 5, "extra_body": {"max_completion_tokens": 3}}
    await say(client, prompt, tools=[tool], tool_choice="none", parallel_tool_calls=True, **limits)
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await say(client, [{"role": "developer", "content": "one"}, {"role": "system", "content": content}, *prompt])
    return prompt


def test_what_would_bias_an_answer_is_dropped_and_what_does_not_is_honored():
    policy = play(wants_more, "a", "b</a>", "c</a>", "d", choice={"stop_reason": "</a>"})
    assert policy.state["agent"]["dropped"] == 4
    settings = [{"max_tokens": 5}, {"stop": ["</a>"], "parallel_tool_calls": False}, {"max_tokens": 3}, {}]
    assert [asked.settings for asked in policy.asked] == settings
    assert policy.asked[0].tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert policy.asked[2].tools is None
    assert [endpoint.text_of(m["content"]) for m in policy.asked[3].messages] == ["one", "a\nb", "q", "b</a>", "c</a>"]
    assert [m["content"] for m in policy.state["result"]] == ["q", "b", "c</a>"]  # the client's own stop string is gone


CALL = {"id": "a1", "type": "function", "function": {"name": "f", "arguments": '{"x":1.0,  "a": 2e0}'}}
THOUGHT = {"role": "assistant", "content": "\n\n4 ", "reasoning": "two and two", "tool_calls": [CALL]}


@pytest.mark.parametrize("restore", [True, False])
def test_the_policys_own_messages_are_restored_as_they_were_sampled(restore):
    async def forgets(client, prompt):
        """Echoes a message as many agents do: without reasoning, stripped, the arguments written anew."""
        await say(client, prompt)
        function = {"name": "f", "arguments": '{"a": 2, "x": 1}'}
        prompt[-1] |= {"content": "4", "tool_calls": [{"id": "other", "type": "function", "function": function}]}
        await say(client, [*prompt, {"role": "tool", "tool_call_id": "other", "content": "3"}])

    policy = play(forgets, THOUGHT, "end", restore=restore)
    sent = policy.asked[1].messages[1]
    assert policy.state["agent"]["restored"] == restore and len(policy.state["completion"]) == 3
    assert (sent == THOUGHT) == restore and ("reasoning" in sent) == restore
    others = [THOUGHT | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": f'{{"x": {x}, "a": 2}}'}}]}
              for x in ("1", "2", "true", "1.5", '"1"')]  # fmt: skip
    assert [endpoint.key_of(message) == endpoint.key_of(THOUGHT) for message in others] == [True] + [False] * 4


def test_results_follow_their_calls_when_ids_are_restored():
    """kimi-code #2503. One id for both calls, or none, is told apart by the order."""
    said = {"tool_calls": [CALL | {"id": "a1"}, CALL | {"id": "a2"}]}
    for new in (["n1", "n2"], ["n", "n"], [None, None]):

        async def agent(client, prompt):
            await say(client, prompt)
            prompt[-1]["tool_calls"] = [CALL | {"id": id} for id in new]
            results = [{"role": "tool", "tool_call_id": id, "content": str(i)} for i, id in enumerate(new)]
            await say(client, [*prompt, *results])

        sent = play(agent, said, "end").asked[1].messages[1:]
        assert [call["id"] for call in sent[0]["tool_calls"]] == ["a1", "a2"]
        assert [(m["tool_call_id"], m["content"]) for m in sent[1:]] == [("a1", "0"), ("a2", "1")]


IMAGE = {"type": "input_image", "image_url": "data:,", "detail": "auto"}
NO_FUNCTION = {"type": "custom", "custom": {"name": "f"}}


@pytest.mark.parametrize("route, body, named", [
    ("chat/completions", {"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "'function_call'"),
    ("chat/completions", {"messages": [{"role": "assistant", "refusal": "no"}]}, "'refusal'"),
    ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [NO_FUNCTION]}]}, "type 'custom'"),
    ("chat/completions", {"messages": [], "tools": [NO_FUNCTION]}, "type 'custom'"),
    ("responses", {"model": "m", "input": [{"role": "user", "content": [IMAGE]}]}, "type 'input_image'"),
    ("responses", {"model": "m", "input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "'refusal'"),
])  # fmt: skip
def test_what_the_policy_would_not_see_is_refused_by_its_name(route, body, named):
    """vllm #46631, instructor #2464. A rollout that ends so is the agent's failure, even if the agent hides it."""

    async def agent(client, base_url, prompt):
        await say(client, prompt)
        with pytest.raises(openai.BadRequestError, match=named):
            await client.post(f"/{route}", body=body, cast_to=object)

    with pytest.raises(AgentFailed, match=named):
        play(agent, "a", forgive=[Exception])


@pytest.mark.parametrize("names", [("", ""), ("a", "b")])
def test_no_conversation_gets_the_thoughts_of_another(names):
    """Two that have said the same, after as many messages; then three times the same in one."""

    async def agent(client, prompt):
        views = [[{"role": "user", "content": text}] for text in "vw"]
        for i in (0, 1, 0, 1):
            await say(client, views[i], extra_headers={"X-Agent": names[i]})
            views[i] += prompt
        for _ in range(3):
            await say(client, prompt)
            prompt.append({"role": "user", "content": "q"})

    policy = play(agent, *[{"content": "yes", "reasoning": f"thought {i}"} for i in range(7)])
    thoughts = [[m["reasoning"][-1] for m in asked.messages if "reasoning" in m] for asked in policy.asked]
    assert thoughts == [[], [], ["0"], ["1"], [], ["4"], ["4", "5"]]


# --- whose fault it is ------------------------------------------------------------------------------------------------


async def endless(client, prompt):
    while True:
        await say(client, prompt)


async def raises(client, prompt):
    await say(client, prompt)
    raise KeyError("no more turns")


async def hides(client, prompt):
    with pytest.raises(openai.InternalServerError):
        await say(client, prompt)


def test_the_policys_fault_is_scored_and_any_other_loses_the_rollout(monkeypatch):
    assert play(endless, *"abc", max_requests=3).state["turn"] == 3
    assert play(endless, "a", None, time_limit=0.3).state["turn"] == 1
    assert play(raises, "a", forgive=[LookupError]).state["agent"]["forgiven"] == 1
    with pytest.raises(Truncated):
        play(endless, "a", Truncated())
    with pytest.raises(KeyError):
        play(raises, "a", forgive=[ValueError, 1])
    with pytest.raises(AgentFailed, match="OSError: no server"):
        play(hides, OSError("no server"), forgive=[Exception])
    with pytest.raises(AgentFailed, match="never got an answer"):
        play(lambda: "42")
    with pytest.raises(AgentFailed, match="never got an answer"):
        play(endless, None, time_limit=0.3)
    monkeypatch.setattr(endpoint.Chat, "from_chat", lambda reply, body: reply["missing"])
    with pytest.raises(AgentFailed, match="KeyError: 'missing'"):
        play(hides, "a")


def test_requests_that_are_malformed_late_or_of_clients_that_have_gone_are_not_recorded():
    late = []
    policy = Policy(None, None, None, "a", None)

    async def agent(client, base_url, prompt):
        async with httpx.AsyncClient(trust_env=False) as http:
            for body in ["", "[" * 100_000, '{"messages": [{}]}', '{"messages": [], "n": 2}']:
                assert (await http.post(f"{base_url}/chat/completions", content=body)).status_code == 400
            for more in ({}, {"stream": True}):
                with pytest.raises(httpx.ReadTimeout):
                    await http.post(f"{base_url}/chat/completions", json={"messages": prompt} | more, timeout=0.1)
        with pytest.raises(openai.APITimeoutError):
            await say(client.with_options(timeout=0.1, max_retries=0), prompt)
        while policy.num_ended < 3:
            await asyncio.sleep(0.01)
        await say(client, prompt)
        late.extend([asyncio.create_task(say(client, prompt)), client])
        await asyncio.sleep(0.01)

    async def go():
        await policy.rollout(AgentEnv(agent, ROWS, rubric=Rubric()), ROWS[0])
        await asyncio.wait(late[:1])
        assert late[0].cancelled() and len(policy.asked) == 5 and policy.state["turn"] == 1
        assert policy.state["agent"]["requests"] == 5 and policy.state["agent"]["unread"] == 4
        with pytest.raises(openai.APIStatusError, match="this rollout has ended"):
            await say(late[1], [])

    asyncio.run(asyncio.wait_for(go(), 60))


# --- streams and formats ----------------------------------------------------------------------------------------------


def test_agents_in_threads_may_stream_and_run_event_loops_of_their_own(monkeypatch):
    monkeypatch.setattr(endpoint, "PAUSE", 0.001)  # so that a stream begins at once, and shows life

    def agent(client, base_url, prompt):
        async def talk():
            async with client:
                return (await say(client, list(prompt))).content

        mine = openai.OpenAI(base_url=base_url, api_key="none")
        body = {"messages": prompt, "model": "m", "stream": True, "stream_options": {"include_usage": True}}
        chunks = list(mine.chat.completions.create(**body))
        assert chunks[-1].usage.completion_tokens == 4 and chunks[-2].choices[0].finish_reason == "stop"
        return chunks[0].choices[0].delta.content + asyncio.run(talk())

    assert play(agent, "a", "b").state["result"] == "ab"


def test_an_answer_whose_stream_is_closed_is_counted():
    async def agent(base_url, prompt):
        body = {"messages": prompt, "stream": True}
        async with httpx.AsyncClient(trust_env=False) as http:
            async with http.stream("POST", f"{base_url}/chat/completions", json=body) as reply:
                await anext(reply.aiter_bytes())
            await http.post(f"{base_url}/chat/completions", json=body)

    counts = play(agent, "a" * 30_000_000, "b").state["agent"]
    assert counts["requests"] == 2 and counts["unread"] == 1


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


async def by_responses(client, prompt):
    tool = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "q"}]}]
    options = {"model": "m", "instructions": "S", "tools": [tool], "max_output_tokens": 9}
    reply = await client.responses.create(input=items, store=False, **options)
    items += [item.model_dump(exclude_none=True) for item in reply.output]
    items.append({"type": "function_call_output", "call_id": reply.output[-1].call_id, "output": "42"})
    async with client.responses.stream(input=items, **options) as stream:
        last = [event async for event in stream][-1].response
    return last.status, json.loads(reply.output[-1].arguments), last.output_text


async def by_messages(base_url, prompt):
    client = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key="none")
    tool = {"name": "f", "description": "d", "input_schema": SCHEMA}
    options = {"model": "m", "max_tokens": 9, "system": "S", "tools": [tool]}
    async with client.messages.stream(messages=prompt, **options) as stream:
        reply = await stream.get_final_message()
    prompt.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
    answer = {"type": "tool_result", "tool_use_id": reply.content[-1].id, "content": "42"}
    last = await client.messages.create(messages=[*prompt, {"role": "user", "content": [answer]}], **options)
    return last.stop_reason, reply.content[-1].input, last.content[0].text


@pytest.mark.parametrize("agent, ended", [(by_responses, "incomplete"), (by_messages, "max_tokens")])
def test_other_formats_are_the_same_chat(agent, ended):
    policy = play(agent, THOUGHT, "done", choice={"finish_reason": "length"})
    assert policy.state["result"] == (ended, {"x": 1, "a": 2}, "done")
    first, second = (asked.messages for asked in policy.asked)
    assert [(m["role"], endpoint.text_of(m["content"])) for m in first] == [("system", "S"), ("user", "q")]
    assert second[:3] == [*first, THOUGHT] and second[3]["content"] == "42" and "input_text" not in str(second)
    assert policy.asked[0].settings == {"max_tokens": 9} and len(policy.state["completion"]) == 3
    assert policy.asked[0].tools[0]["function"]["parameters"] == SCHEMA
    assert policy.state["tools"] == policy.asked[-1].tools  # for a teacher, and for reading (verl #7659)
    if agent is by_messages:  # whose calls must be objects; the policy's may be anything
        odd = {"tool_calls": [CALL | {"function": {"name": "f", "arguments": '["x"'}}]}
        assert play(agent, odd, "").state["result"][1] == {"arguments": '["x"'}
        odd["tool_calls"] = [CALL | {"function": {"name": "f", "arguments": ""}}]
        assert play(agent, odd, "").state["result"][1] == {}


STRICT = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}{{ m.content }}"
STRICT = KEEPS.replace("{{ m.content }}", STRICT) + "{{ enable_thinking }}"


@pytest.mark.parametrize("template, roles, effort", [
    (KEEPS, ["system", "user", "system", "user"], "low"),  # without thinking, the prompt is the same
    (STRICT, ["system", "user", "user"], "none"),
])  # fmt: skip
def test_anthropics_messages_fit_the_template_as_on_vllms_server(template, roles, effort, make_cfg, tmp_path):
    """vllm #41114, #46021: Claude Code's reminders are system messages inside the conversation."""
    (tmp_path / "it.jinja").write_text(template)
    talk = [{"role": role, "content": role[0]} for role in ("user", "system", "user")]
    body = {"model": "m", "max_tokens": 9, "system": "S", "messages": talk, "thinking": {"type": "disabled"}}
    state = {"cfg": make_cfg(f"chat_template={tmp_path / 'it.jinja'}")}
    asked = endpoint.read_chat(asyncio.run(formats.Messages.to_chat(body, state)))
    assert [m["role"] for m in asked.messages] == roles
    assert "".join(m["content"] for m in asked.messages) == ("Susu" if len(roles) == 4 else "Ssuu")
    assert asked.settings == {"max_tokens": 9, "reasoning_effort": effort} and asked.num_dropped == 0


CLIS = ["@openai/codex@0.169.0", "@anthropic-ai/claude-code@2.1.332"]
PROVIDER = '{name="rl", base_url="{base_url}", env_key="OPENAI_API_KEY", wire_api="responses"}'
CODEX = "codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox -m policy -c model_provider=rl -c"
CODEX = [*CODEX.split(), f"model_providers.rl={PROVIDER}", "What does it print?"]
CLAUDE = ["claude", "-p", "What does it print?", "--dangerously-skip-permissions", "--model", "policy"]


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("npm"), reason="needs npm")
def test_coding_agents_run_a_tool_and_end(tmp_path, monkeypatch):
    """Streamed, by Responses and by Anthropic's Messages, with the agents' own prompts and tools, without a network."""
    subprocess.run(["npm", "install", "--no-fund", "--no-audit", *CLIS], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.setenv("PATH", f"{tmp_path}/node_modules/.bin:{os.environ['PATH']}")
    monkeypatch.setenv("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1")
    monkeypatch.setenv("IS_SANDBOX", "1")  # otherwise Claude Code refuses to run as root
    for words, tool, key in ((CODEX, "exec_command", "cmd"), (CLAUDE, "Bash", "command")):
        function = {"name": tool, "arguments": json.dumps({key: "echo 4$((1+1))"})}
        state = play(words, {"tool_calls": [CALL | {"function": function}]}, "it is 42", allow_code=True).state
        assert state["result"].strip().endswith("it is 42") and state["agent"]["requests"] == 2
        assert [m["role"] for m in state["completion"]] == ["assistant", "tool", "assistant"]
        assert "42" in state["completion"][1]["content"]
