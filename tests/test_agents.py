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

from configs.environments import endpoint
from configs.environments.agents import AgentEnv, AgentFailed
from configs.environments.rubrics import AgentRubric
from env import MultiTurnEnv, Rubric, Truncated

ROWS = [{"question": f"hello {i}", "answer": str(i)} for i in range(37)]
SHORT = ("orchestrator.sampling.max_tokens=3", "max_seq_len=128")


def play(agent, *said, **options):
    """A rollout of an agent with a policy that says this. Returns the policy, which has the state."""
    policy = said[0] if said and callable(said[0]) else Policy(*said)
    asyncio.run(policy.rollout(AgentEnv(agent, [{"question": "q"}], rubric=Rubric(), **options), {"question": "q"}))
    return policy


async def say(client, messages, **options):
    """A turn. Adds the answer to the messages, without its reasoning, as many agents do."""
    reply = await client.chat.completions.create(model="anything", messages=messages, **options)
    messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    return reply.choices[0].message


def noise(answer):
    """Two rollouts never get the same."""
    return float(answer) + random.random()


# --- what is trained --------------------------------------------------------------------------------------------------


async def turns(client, prompt):
    messages = list(prompt)
    for i in range(3):
        await say(client, messages)
        messages.append({"role": "user", "content": f"turn {i}"})


class SameTurns(MultiTurnEnv):
    def env_response(self, messages, state):
        return [{"role": "user", "content": f"turn {state['turn'] - 1}"}]


def test_an_agent_is_trained_on_the_same_tokens_as_an_environment_of_the_same_turns(run, tmp_path):
    """The fake server's answers are a function of the prompt."""
    ours = SameTurns(ROWS, max_turns=3, rubric=Rubric([noise]))
    found = []
    for env in (ours, AgentEnv(turns, ROWS, rubric=Rubric([noise]))):
        run_dir = run(2, env, *SHORT)
        found.append((all_batches(run_dir), lines(run_dir / "rollouts.jsonl")))
        shutil.rmtree(run_dir)
    for (_, expected), (_, sequences) in zip(found[0][0], found[1][0], strict=True):
        for s, other in zip(expected, sequences, strict=True):
            for name in ("tokens", "mask", "old_logp", "turn"):
                assert s[name].tolist() == pytest.approx(other[name].tolist(), nan_ok=True, abs=0), name
    for a, b in zip(found[0][1], found[1][1], strict=True):
        assert a["completion"] == b["completion"] and a["prompt"] == b["prompt"] and a["num_turns"] == 3


async def delegates(client, prompt):
    """Talks to an unnamed sub-agent in turns with its own conversation, and then replaces that by a summary."""
    main, sub, short = list(prompt), [{"role": "user", "content": "sub"}], [{"role": "user", "content": "summary"}]
    for messages in (main, sub, main, sub, main, short, short):
        await say(client, messages)
        messages.append({"role": "user", "content": "more"})


def test_each_conversation_is_a_sequence_and_each_token_is_trained_once(run):
    run_dir = run(1, AgentEnv(delegates, ROWS, rubric=Rubric([noise])), *SHORT)
    (batch,) = all_batches(run_dir)
    rollouts = {}
    for s in batch.sequences:
        rollouts.setdefault((s["group"], s["rollout"]), []).append(s)
    for sequences in rollouts.values():
        assert [sorted({*s["turn"][s["mask"]].tolist()}) for s in sequences] == [[0, 2, 4], [1, 3], [5, 6]]
        assert sum(s["mask"].sum() for s in sequences) == sequences[0]["num_tokens"]
        assert len({s["reward"] for s in sequences}) == 1
    for r in lines(run_dir / "rollouts.jsonl"):
        assert len(r["prompt"]) == 1 and len(r["completion"]) == 5 and r["metrics"]["agent_requests"] == 7


async def proposer_and_solver(client, base_url, prompt):
    """A name by header and one by path, of which the path counts; and a user, whom the policy plays untrained."""
    proposer = client.with_options(default_headers={"X-Agent": "proposer"})
    solver = client.with_options(base_url=base_url.replace("/v1", "/solver/v1"), default_headers={"X-Agent": "no"})
    user = client.with_options(default_headers={"X-Agent": "user"})
    await asyncio.gather(*(say(who, list(prompt), max_tokens=3) for who in (proposer, solver, user)))
    await say(client, list(prompt), extra_headers={"X-Trainable": "false"})


def shares():
    return {"proposer": 1 + random.random(), "solver": -1 - random.random()}


def test_agents_have_rewards_of_their_own_and_a_user_is_not_trained(run):
    env = AgentEnv(proposer_and_solver, ROWS, untrained=["user"], rubric=AgentRubric([shares, noise], [2.0, 0.0]))
    run_dir = run(1, env)
    rewards = {(r["group"], r["rollout"]): r["agent_rewards"] for r in lines(run_dir / "rollouts.jsonl")}
    (batch,) = all_batches(run_dir)
    assert {s["agent"] for s in batch.sequences} == {"proposer", "solver"} and len(batch.sequences) == 32
    for s in batch.sequences:
        others = [x["reward"] for x in batch.sequences if (x["group"], x["agent"]) == (s["group"], s["agent"])]
        assert s["reward"] == rewards[s["group"], s["rollout"]][s["agent"]] and len(others) == 4
        assert s["adv"][s["mask"]] == pytest.approx(s["reward"] - sum(others) / 4)


# --- what a request may ask for ---------------------------------------------------------------------------------------


async def wants_more(client, prompt):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
    options = {"temperature": 0.2, "logit_bias": {"5": 9}, "tool_choice": "required", "tools": [tool]}
    await say(client, list(prompt), **options, max_tokens=5, response_format={"type": "json_object"})
    await say(client, list(prompt), temperature=1, top_p=1, stop=["z"], user="me", parallel_tool_calls=False)
    limits = {"max_tokens": 5, "extra_body": {"max_completion_tokens": 3}}
    await say(client, list(prompt), tools=[tool], tool_choice="none", parallel_tool_calls=True, **limits)
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    await say(client, [{"role": "developer", "content": "one"}, {"role": "system", "content": content}, *prompt])


def test_what_would_bias_an_answer_is_dropped_and_what_does_not_is_honored(capfd):
    policy = play(wants_more, *"abcd")
    assert policy.state["agent"]["dropped"] == 4 and capfd.readouterr().out.count("dropped, since") == 4
    settings = [{"max_tokens": 5}, {"stop": ["z"], "parallel_tool_calls": False}, {"max_tokens": 3}, {}]
    assert [asked.settings for asked in policy.asked] == settings
    assert policy.asked[0].tools == [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert policy.asked[2].tools is None
    assert [m["content"] for m in policy.asked[3].messages] == ["one\n\na\nb", "q"]  # many templates refuse two


CALL = {"id": "a1", "type": "function", "function": {"name": "f", "arguments": '{"x":1,  "a": 2}'}}
THOUGHT = {"role": "assistant", "content": "\n\n4 ", "reasoning": "two and two", "tool_calls": [CALL]}


async def forgets(client, prompt):
    """Echoes a message as many agents do: without reasoning, stripped, the arguments written anew."""
    messages = list(prompt)
    for _ in range(2):
        reply = (await client.chat.completions.create(model="m", messages=messages)).choices[0].message
        message = {"role": "assistant", "content": reply.content.strip()}
        for call in reply.tool_calls or []:
            function = {"name": "f", "arguments": json.dumps(json.loads(call.function.arguments), sort_keys=True)}
            message["tool_calls"] = [{"id": "other", "type": "function", "function": function}]
        messages += [message, {"role": "tool", "tool_call_id": "a1", "content": "3"}]


@pytest.mark.parametrize("restore", [True, False])
def test_the_policys_own_messages_are_restored_as_they_were_sampled(restore):
    policy = play(forgets, THOUGHT, "end", restore=restore)
    sent = policy.asked[1].messages[1]
    assert policy.state["agent"]["restored"] == restore and len(policy.state["completion"]) == 3
    assert (sent == THOUGHT) == restore and ("reasoning" in sent) == restore


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


def test_a_stop_string_is_in_the_next_prompt_but_not_in_what_the_agent_gets():
    async def agent(client, prompt):
        await say(client, prompt, stop="</a>")
        return (await say(client, prompt)).content

    policy = play(agent, Policy("<a>1</a>", "2</a>", stop_reason="</a>"))
    assert policy.asked[1].messages[1]["content"] == "<a>1</a>" and policy.state["result"] == "2</a>"


def test_malformed_requests_are_answered_with_a_reason_and_count_for_nothing():
    bodies = ["", "[]", "[" * 100_000, '{"messages": 1}', '{"messages": [{}]}', '{"messages": [], "n": 2}']

    async def agent(base_url, client, prompt):
        async with httpx.AsyncClient(trust_env=False) as http:
            for body in bodies:
                for route in ("chat/completions", "responses", "messages"):
                    reply = await http.post(f"{base_url}/{route}", content=body, timeout=60)  # vLLM is imported
                    assert reply.status_code == 400 and reply.json()["error"]["message"], (route, body)
            assert (await http.post(f"{base_url}/embeddings", content="{}")).status_code == 404
            assert (await http.get(f"{base_url}/models")).json()["data"][0]["id"] == "policy"
            guess = f"{base_url.rsplit('/', 2)[0]}/guess/v1/models"
            assert (await http.get(guess)).status_code == 410
        await say(client, prompt)

    assert play(agent, "a").state["agent"]["requests"] == 1


# --- whose fault it is ------------------------------------------------------------------------------------------------


def test_the_policys_fault_is_scored():
    async def endless(client, prompt):
        while True:
            await say(client, prompt)

    async def hangs(client, prompt):
        await say(client, prompt)
        await asyncio.Event().wait()

    async def raises(client, prompt):
        await say(client, prompt)
        raise KeyError("no more turns")

    assert play(endless, *"abc", max_requests=3).state["turn"] == 3
    assert play(hangs, "a", time_limit=0.2).state["agent"]["requests"] == 1
    assert play(raises, "a", forgive=[LookupError]).state["agent"]["forgiven"] == 1
    with pytest.raises(Truncated):
        play(endless, "a", Truncated())
    with pytest.raises(KeyError):
        play(raises, "a", forgive=[ValueError, 1])


def test_the_servers_fault_loses_the_rollout_even_if_the_agent_hides_it(monkeypatch):
    async def hides(client, prompt):
        with pytest.raises(openai.InternalServerError):
            await say(client, prompt)

    async def streams(client, prompt):
        with pytest.raises(openai.APIError):
            async for _ in await client.chat.completions.create(model="m", messages=prompt, stream=True):
                pass

    with pytest.raises(AgentFailed, match="OSError: no server"):
        play(hides, OSError("no server"), forgive=[Exception])
    monkeypatch.setattr(endpoint.Chat, "events", lambda reply, body: [reply["missing"]])
    with pytest.raises(AgentFailed, match="KeyError: 'missing'"):
        play(streams, "a")
    with pytest.raises(AgentFailed, match="asked for nothing"):
        play(lambda: "42")


def test_requests_of_clients_that_have_gone_or_are_late_are_not_recorded():
    late = []

    async def agent(client, base_url, prompt):
        async with httpx.AsyncClient(trust_env=False) as http:
            for more in ({}, {"stream": True}):
                with pytest.raises(httpx.ReadTimeout):
                    await http.post(f"{base_url}/chat/completions", json={"messages": prompt} | more, timeout=0.1)
        with pytest.raises(openai.APITimeoutError):
            await say(client.with_options(timeout=0.1, max_retries=0), prompt)
        await say(client, prompt)
        late.append(asyncio.create_task(say(client, prompt)))
        late.append(client)
        await asyncio.sleep(0.01)

    async def go():
        policy = Policy(None, None, None, "a", None)
        await policy.rollout(AgentEnv(agent, ROWS, rubric=Rubric()), ROWS[0])
        await asyncio.wait(late[:1])
        assert late[0].cancelled() and len(policy.asked) == 5 and policy.state["turn"] == 1
        with pytest.raises(openai.APIStatusError, match="this rollout has ended"):
            await say(late[1], [])

    asyncio.run(asyncio.wait_for(go(), 60))


# --- streams and formats ----------------------------------------------------------------------------------------------


def test_agents_in_threads_may_stream_and_run_event_loops_of_their_own():
    def agent(client, base_url, prompt):
        async def talk():
            async with client:
                return (await say(client, list(prompt))).content

        mine = openai.OpenAI(base_url=base_url, api_key="none")
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(mine.chat.completions.create(model="m", messages=prompt, **options))
        assert chunks[-1].usage.completion_tokens == 4 and chunks[-2].choices[0].finish_reason == "stop"
        return chunks[0].choices[0].delta.content + asyncio.run(talk())

    assert play(agent, "a", "b").state["result"] == "ab"


class Slow(Policy):
    async def __call__(self, *args, **kwargs):
        await asyncio.sleep(0.3)
        return await super().__call__(*args, **kwargs)


def test_a_slow_stream_shows_life_and_reports_what_fails_later(monkeypatch):
    monkeypatch.setattr(endpoint, "PAUSE", 0.05)
    texts = []

    async def agent(base_url, prompt):
        async with httpx.AsyncClient(trust_env=False) as http:
            body = {"messages": prompt, "stream": True}
            texts.append((await http.post(f"{base_url}/chat/completions", json=body)).text)

    play(agent, Slow("a"))
    with pytest.raises(AgentFailed, match="no server"):
        play(agent, Slow(OSError("no server")))
    assert all(text.startswith(": sampling\n\n" * 3) and text.endswith("data: [DONE]\n\n") for text in texts)
    assert '"content": "a"' in texts[0] and '"server_error"' in texts[1]


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


async def by_responses(client, prompt):
    tool = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "q"}]}]
    options = {"model": "m", "instructions": "S", "tools": [tool], "max_output_tokens": 9}
    reply = await client.responses.create(input=items, store=False, **options)
    assert reply.usage.output_tokens == 4 and reply.status == "incomplete"
    items += [item.model_dump(exclude_none=True) for item in reply.output]
    items.append({"type": "function_call_output", "call_id": reply.output[-1].call_id, "output": "42"})
    async with client.responses.stream(input=items, **options) as stream:
        events = [event async for event in stream]
    assert [events[0].type, events[-1].type] == ["response.created", "response.incomplete"]
    return [json.loads(reply.output[-1].arguments), events[-1].response.output_text]


async def by_messages(base_url, prompt):
    client = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key="none")
    tool = {"name": "f", "description": "d", "input_schema": SCHEMA}
    messages = [{"role": "user", "content": "q"}]
    options = {"model": "m", "max_tokens": 9, "system": "S", "tools": [tool]}
    async with client.messages.stream(messages=messages, **options) as stream:
        reply = await stream.get_final_message()
    assert reply.usage.output_tokens == 4 and reply.stop_reason == "max_tokens"
    messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
    answer = {"type": "tool_result", "tool_use_id": reply.content[-1].id, "content": "42"}
    messages.append({"role": "user", "content": [answer]})
    last = await client.messages.create(messages=messages, **options)
    return [reply.content[-1].input, last.content[0].text]


@pytest.mark.parametrize("agent", [by_responses, by_messages])
def test_other_formats_are_the_same_chat(agent):
    policy = play(agent, Policy(THOUGHT, "done", finish_reason="length"))
    assert policy.state["result"] == [{"x": 1, "a": 2}, "done"]
    first, second = (asked.messages for asked in policy.asked)
    assert [(m["role"], endpoint.text_of(m["content"])) for m in first] == [("system", "S"), ("user", "q")]
    assert second[:3] == [*first, THOUGHT] and second[3]["content"] == "42" and second[3]["role"] == "tool"
    assert policy.asked[0].settings == {"max_tokens": 9} and len(policy.state["completion"]) == 3
    assert policy.asked[0].tools[0]["function"]["parameters"] == SCHEMA
    odd = THOUGHT | {"tool_calls": [CALL | {"function": {"name": "f", "arguments": '["x"'}}]}  # the policy's fault
    if agent is by_messages:
        assert play(agent, Policy(odd, "done", finish_reason="length")).state["result"][0] == {"arguments": '["x"'}


CLIS = ["@openai/codex@0.169.0", "@anthropic-ai/claude-code@2.1.332"]


def codex(bin, base_url):
    provider = f'{{name="rl", base_url="{base_url}", env_key="OPENAI_API_KEY", wire_api="responses"}}'
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-c", "model_provider=rl"]
    return [f"{bin}/codex", "exec", *flags, "-c", f"model_providers.rl={provider}", "-m", "policy", "What is it?"]


def claude(bin, base_url):
    return [f"{bin}/claude", "-p", "What does it print?", "--dangerously-skip-permissions", "--model", "policy"]


@pytest.fixture(scope="module")
def clis(tmp_path_factory):
    if not shutil.which("npm"):
        pytest.skip("needs npm")
    path = tmp_path_factory.mktemp("clis")
    subprocess.run(["npm", "install", "--no-fund", "--no-audit", *CLIS], cwd=path, check=True, capture_output=True)
    return path / "node_modules" / ".bin"


@pytest.mark.long
@pytest.mark.parametrize("command, tool, key", [(codex, "exec_command", "cmd"), (claude, "Bash", "command")])
def test_coding_agents_run_a_tool_and_end(clis, tmp_path, command, tool, key):
    """Streamed, by Responses and by Anthropic's Messages, with the agents' own prompts and tools, without a network."""
    function = {"name": tool, "arguments": json.dumps({key: "echo 4$((1+1))"})}

    def agent(base_url):
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OPENAI_API_KEY": "none", "IS_SANDBOX": "1"}
        env |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": "none"}
        env |= {"NO_PROXY": "127.0.0.1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        options = {"cwd": tmp_path, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 120}
        done = subprocess.run(command(clis, base_url), env=env, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    state = play(agent, {"tool_calls": [CALL | {"function": function}]}, "it is 42").state
    assert state["result"].strip().endswith("it is 42") and state["agent"]["requests"] == 2
    assert [m["role"] for m in state["completion"]] == ["assistant", "tool", "assistant"]
    assert "42" in state["completion"][1]["content"]
