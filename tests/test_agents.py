"""Any agent as an environment: what it asks through its endpoint is what is trained, and nothing else."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter

import agent_tasks
import httpx
import openai
import pytest
import torch
from conftest import ROOT, all_batches, lines, some
from transformers import AutoModelForCausalLM

from configs.environments import endpoint
from configs.environments.agents import AgentEnv, is_forgiven
from configs.environments.rubrics import TurnRubric
from configs.runtime.role import RunError
from env import DataError, Rubric, SingleTurnEnv, Truncated, load_environment


def test_a_rollout_changes_no_row_of_the_dataset():
    async def run(row):
        pass

    env = AgentEnv(run, [{"question": "?", "hints": [1]}])
    for _ in range(2):
        row = env.start(env.dataset[0])["row"]
        assert row["hints"] == [1]
        row["hints"].append(2)


TASK = '[env]\nid = "agent_tasks"\nargs = {{ kind = "{}"{} }}'
TOOLS = "inference.args.enable_auto_tool_choice=true"
ALL_MAY_FAIL = "orchestrator.max_error_share=1.0"
FRESH = "orchestrator.max_staleness=0"


@pytest.fixture
def rollouts(run):
    """rollouts(kind, *overrides, args="", steps=2) -> lines of rollouts.jsonl, and batches."""

    def go(kind, *overrides, args="", steps=2, **kwargs):
        run_dir = run(steps, TASK.format(kind, args), TOOLS, ALL_MAY_FAIL, *overrides, **kwargs)
        return lines(run_dir / "rollouts.jsonl"), all_batches(run_dir)

    return go


def sequences_of(batches):
    """{(step, group, rollout): its sequences}"""
    found = {}
    for step, batch in enumerate(batches):
        for s in batch.sequences:
            found.setdefault((step, s["group"], s["rollout"]), []).append(s)
    return found


# --- what is trained --------------------------------------------------------------------------------------------------


def test_an_agent_is_trained_on_the_same_tokens_as_an_environment_of_the_same_turns(rollouts, run):
    """The fake server's answers are a function of the prompt, its turns and the weights."""
    options = ("orchestrator.sampling.max_tokens=3", FRESH)
    agents, batches = rollouts("turns", *options)
    assert {r["num_turns"] for r in agents} == {3} and not any(r["error"] for r in agents)
    for path in [*(run.run_dir / "batches").iterdir(), run.run_dir / "rollouts.jsonl"]:
        path.unlink()
    ours = run(2, '[env]\nid = "agent_tasks"\nargs = { kind = "same_turns" }', *options)
    for a, b in zip(batches, all_batches(ours)):
        for s, other in zip(a.sequences, b.sequences, strict=True):
            for name in ("tokens", "mask", "old_logp", "turn"):
                assert s[name].tolist() == other[name].tolist(), name
    for a, b in zip(agents, lines(ours / "rollouts.jsonl"), strict=True):
        assert a["completion"] == b["completion"] and a["prompt"] == b["prompt"]


def test_log_probabilities_are_those_of_the_tokens_that_were_sampled(rollouts, models):
    network = AutoModelForCausalLM.from_pretrained(models["untied"], dtype=torch.float32).eval()
    _, batches = rollouts("turns", "orchestrator.sampling.max_tokens=3", FRESH, steps=1)
    for s in batches[0].sequences:
        with torch.no_grad():
            logits = network(s["tokens"][None].long()).logits[0, :-1]
        logp = logits.log_softmax(-1).gather(-1, s["tokens"][1:, None].long())[:, 0]
        is_own = s["mask"][1:].bool()
        assert is_own.sum() == s["num_tokens"]
        assert (logp - s["old_logp"][1:])[is_own].abs().max() < 1e-4


def test_a_sub_agent_has_a_sequence_of_its_own_and_the_rollouts_advantage(rollouts):
    """Interleaved, 6 turns each: 2 sequences, not 12."""
    found, batches = rollouts("with_sub_agent", "max_seq_len=128", "orchestrator.sampling.max_tokens=2")
    assert {r["num_turns"] for r in found} == {12}
    for sequences in sequences_of(batches).values():
        assert len(sequences) == 2
        assert len({s["reward"] for s in sequences}) == 1 and {s["agent"] for s in sequences} == {""}
        assert sum(int(s["mask"].sum()) for s in sequences) == sequences[0]["num_tokens"]
    main = [m["content"] for m in found[0]["prompt"]]
    assert main == [f"hello {found[0]['answer']}"] and len(found[0]["completion"]) == 11


def test_agents_have_rewards_of_their_own_and_a_user_is_not_trained(rollouts):
    found, batches = rollouts("proposer_and_solver", args=', untrained = ["user"]')
    for r in found:
        own = {agent: 0.5 + 2 * r["metrics"][f"shares_{agent}"] for agent in ("proposer", "solver")}
        assert r["agent_rewards"] == pytest.approx(own)
        assert r["reward"] == pytest.approx(sum(own.values()) / 2) and r["metrics"]["half"] == 0.5
    for sequences in sequences_of(batches).values():
        by_agent = {s["agent"]: s for s in sequences}
        assert by_agent.keys() == {"proposer", "solver", "user"}
        assert by_agent["proposer"]["reward"] > 0 > by_agent["solver"]["reward"]
        assert [agent for agent, s in by_agent.items() if not s["trainable"]] == ["user"]


def test_a_compacted_history_is_a_new_sequence_and_each_token_is_trained_once(rollouts):
    found, batches = rollouts("compacts", "orchestrator.sampling.max_tokens=3")
    for r in found:
        assert r["num_turns"] == 4 and r["completion"][0]["role"] == "assistant"
    for sequences in sequences_of(batches).values():
        assert len(sequences) == 2
        turns = [sorted(set(s["turn"][s["mask"].bool()].tolist())) for s in sequences]
        assert turns == [[0, 1], [2, 3]]
        assert sum(int(s["mask"].sum()) for s in sequences) == sequences[0]["num_tokens"]


def test_the_readmes_agent_does_what_it_says(tmp_path, monkeypatch):
    """It calls its tool, and what the policy does wrong is scored."""
    code = (ROOT / "README.md").read_text().split("## Bring your own agent")[1].split("```python\n")[1].split("```")[0]
    (tmp_path / "my_agent.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    env = load_environment("my_agent", {"num": 60})

    def score(*said):
        policy = Policy(*said)
        state = asyncio.run(rollout(env, policy))
        return policy.asked[-1], asyncio.run(env.rubric.score(state))

    add = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 50, "b": 350}'}}
    asked, (reward, metrics) = score({"tool_calls": [add]}, {"content": "400"})
    assert asked[-1]["content"] == "400" and reward == 1 and metrics["agent_requests"] == 2
    wrong = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{"}}
    _, (reward, metrics) = score({"tool_calls": [wrong]})
    assert reward == 0 and metrics["agent_forgiven"] == 1


# --- what a request may ask for ---------------------------------------------------------------------------------------


def test_what_cannot_be_trained_on_is_dropped_named_once_and_counted(rollouts, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "NAMED", set())
    said = []
    monkeypatch.setattr(endpoint, "say", said.append)
    log = tmp_path / "requests"
    found, _ = rollouts("wants_more", fake={"log": str(log)})
    asked = lines(log)
    assert {r["metrics"]["agent_dropped"] for r in found} == {4}
    names = ["logit_bias", "response_format", "temperature", "tool_choice"]
    assert [re.search(r"asks for (\w+)", text)[1] for text in said] == names
    for body in asked:
        assert body["temperature"] == 1.0 and not set(names[:2]) & body.keys() and "tool_choice" not in body
        assert body["max_tokens"] == 2 and "strict" not in json.dumps(body.get("tools"))
        assert body["model"] == "run" and body["user"] in "0123"
    assert Counter(json.dumps(body["stop"]) for body in asked) == {"[]": len(asked) // 2, '["z"]': len(asked) // 2}


def test_a_limit_of_the_agents_own_does_not_count_as_cut_off(rollouts):
    """A random model never ends its answers."""
    assert not any(r["truncated"] for r in rollouts("compacts")[0])
    found, _ = rollouts("compacts", "orchestrator.sampling.max_tokens=3", "run_name=own")  # the run's limit, too
    assert all(r["truncated"] for r in found)


def test_parts_developers_and_several_system_messages_arrive_as_one(rollouts, tmp_path):
    log = tmp_path / "requests"
    rollouts("parts", fake={"log": str(log)}, steps=1)
    for body in lines(log):
        assert [m["role"] for m in body["messages"]] == ["system", "user"]
        assert body["messages"][0]["content"] == "one\n\na\nb"


class Policy:
    """A generate() that says what a test wants. Keeps what it is asked."""

    def __init__(self, *messages, stop_reason=None):
        self.left = list(messages)
        self.asked = []
        self.agents = []
        self.own = []
        self.stop_reason = stop_reason

    async def __call__(self, messages, tools=None, agent="", trainable=True, whole=False, **own):
        self.asked.append(messages)
        self.agents.append(agent)
        self.own.append(own)
        message = self.left.pop(0)
        if isinstance(message, Exception):
            raise message
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "finish_reason": reason, "message": {"role": "assistant"} | message}
        usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
        head = {"id": "1", "created": 0, "object": "chat.completion", "model": "run-3"}
        return head | {"choices": [choice | {"stop_reason": self.stop_reason}], "usage": usage}


def play(agent, policy, **options):
    """A rollout of an agent with this policy. Returns its state."""
    return asyncio.run(rollout(AgentEnv(agent, [{"question": "q"}], rubric=Rubric(), **options), policy))


async def rollout(env, policy):
    state = env.start(env.dataset[0]) | {"replies": []}
    await env.rollout(state, policy)
    return state


CALL = {"id": "a1", "type": "function", "function": {"name": "f", "arguments": '{"x":1,  "a": 2}'}}
THOUGHT = {"content": "\n\n4 ", "reasoning": "two and two", "tool_calls": [CALL]}


async def forgets(client, prompt):
    """Echoes a message as many agents do: without reasoning, stripped, the arguments written anew."""
    messages = list(prompt)
    for _ in range(2):
        reply = await client.chat.completions.create(model="m", messages=messages)
        message = reply.choices[0].message
        echo = {"role": "assistant", "content": message.content.strip()}
        for tool_call in message.tool_calls or []:
            arguments = json.dumps(json.loads(tool_call.function.arguments), sort_keys=True)
            function = {"name": tool_call.function.name, "arguments": arguments}
            echo.setdefault("tool_calls", []).append({"id": tool_call.id, "type": "function", "function": function})
        messages += [echo, {"role": "tool", "tool_call_id": "a1", "content": "3"}]


@pytest.mark.parametrize("restore", [True, False])
def test_the_policys_own_messages_are_restored_as_they_were_sampled(restore):
    policy = Policy(THOUGHT, {"content": "end"})
    state = play(forgets, policy, restore=restore)
    sent = policy.asked[1][1]
    assert state["agent"]["restored"] == restore and len(state["completion"]) == 3
    if restore:
        assert sent == {"role": "assistant"} | THOUGHT and state["completion"][0] == sent
    else:
        assert (
            "reasoning" not in sent
            and sent["content"] == "4"
            and sent["tool_calls"][0]["function"]["arguments"][1] == '"'
        )


def test_of_two_equal_answers_the_one_at_the_same_place_is_restored():
    async def agent(client, prompt):
        messages = list(prompt)
        for _ in range(3):
            reply = await client.chat.completions.create(model="m", messages=messages)
            messages += [{"role": "assistant", "content": reply.choices[0].message.content}, prompt[0]]

    said = [{"content": "yes", "reasoning": f"thought {i}"} for i in range(3)]
    policy = Policy(*said)
    play(agent, policy)
    assert [m["reasoning"] for m in policy.asked[2] if m["role"] == "assistant"] == ["thought 0", "thought 1"]


@pytest.mark.parametrize("names", [("", ""), ("a", "b")])
def test_no_conversation_gets_the_thoughts_of_another(names):
    """Two that have said the same, after as many messages."""

    async def agent(client, prompt):
        for name in names * 2:
            own = [{"role": "user", "content": f"view {names.index(name) if name else len(views)}"}]
            if len(views) >= 2:
                own = [*views[len(views) - 2], {"role": "assistant", "content": "yes"}, prompt[0]]
            views.append(own)
            await client.chat.completions.create(model="m", messages=own, extra_headers={"X-Agent": name})

    views = []
    policy = Policy(*[{"content": "yes", "reasoning": f"thought {i}"} for i in range(4)])
    play(agent, policy)
    assert [messages[1]["reasoning"] for messages in policy.asked[2:]] == ["thought 0", "thought 1"]


def test_a_stop_string_of_the_agent_is_in_the_tokens_but_not_in_what_it_gets():
    async def agent(client, prompt):
        reply = await client.chat.completions.create(model="m", messages=prompt, stop="</a>")
        text = reply.choices[0].message.content
        messages = [*prompt, {"role": "assistant", "content": text}, prompt[0]]
        await client.chat.completions.create(model="m", messages=messages)
        return text

    policy = Policy({"content": "<a>1</a>"}, {"content": ""}, stop_reason="</a>")
    state = play(agent, policy)
    assert state["result"] == "<a>1" and policy.asked[1][1]["content"] == "<a>1</a>"
    assert policy.own[0] == {"stop": ["</a>"]}


def test_a_plain_request_skips_http_and_is_answered_as_others_are(monkeypatch):
    by_http = []
    handle = endpoint.InProcess.handle_async_request
    monkeypatch.setattr(endpoint.InProcess, "handle_async_request", lambda *args: by_http.append(1) or handle(*args))

    async def agent(client, prompt):
        create = client.chat.completions.create
        plain = await create(model="m", messages=prompt)
        plain.choices[0].message.tool_calls[0].function.name = "changed"  # it is the agent's
        raw = await client.chat.completions.with_raw_response.create(model="m", messages=prompt)
        await client.with_options(default_headers={"x-agent": "b"}).chat.completions.create(model="m", messages=prompt)
        await create(model="m", messages=prompt, extra_headers=httpx.Headers({"X-Agent": "c"}))
        errors = []
        for own in ({}, {"extra_body": {"seed": 1}}):
            with pytest.raises(openai.BadRequestError) as caught:
                await create(model="m", messages=prompt, **own)
            errors.append((caught.value.status_code, caught.value.body, str(caught.value)))
        with pytest.raises(TypeError):
            await create(model="m", messages=[{"role": "user", "content": object()}])
        return plain, raw.parse(), errors

    policy = Policy(*[THOUGHT] * 4)
    plain, other, errors = play(agent, policy, max_requests=4)["result"]
    assert len(by_http) == 4 and policy.agents == ["", "", "b", "c"]
    assert errors[0] == errors[1] and errors[0][1]["code"] == "rollout_over"
    assert CALL["function"]["name"] == "f"
    plain.choices[0].message.tool_calls[0].function.name = "f"
    assert type(plain) is type(other) and plain.model_dump() == other.model_dump()
    assert plain.choices[0].message.reasoning == THOUGHT["reasoning"] and plain._request_id is None


def test_an_agents_own_time_limit_ends_its_request():
    ended = []

    async def silent(*args, **kwargs):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def agent(client, prompt):
        with pytest.raises(openai.APITimeoutError):
            hasty = client.with_options(timeout=0.1, max_retries=0)
            await hasty.chat.completions.create(model="m", messages=prompt)
        return list(ended)

    assert play(agent, silent)["result"] == [True]


def test_a_copy_of_the_client_with_an_http_client_of_its_own_asks_by_that():
    asked = []

    async def elsewhere(request):
        asked.append(str(request.url))
        return endpoint.HTTPX.Response(200, json={"choices": [], "model": "judge"})

    async def agent(client, prompt):
        await client.chat.completions.create(model="m", messages=prompt)
        own = openai.DefaultAsyncHttpxClient(transport=endpoint.HTTPX.MockTransport(elsewhere))
        judge = client.with_options(base_url="http://judge/v1", http_client=own)
        return (await judge.chat.completions.create(model="m", messages=prompt)).model

    assert play(agent, Policy({"content": "a"}))["result"] == "judge"
    assert asked == ["http://judge/v1/chat/completions"]


def test_a_plain_agent_may_run_an_event_loop_of_its_own():
    def agent(client, prompt):
        async def talk():
            first = await client.chat.completions.create(model="m", messages=prompt)
            stream = await client.chat.completions.create(model="m", messages=prompt, stream=True)
            return first.choices[0].message.content + "".join([c.choices[0].delta.content or "" async for c in stream])

        return asyncio.run(talk())

    assert play(agent, Policy({"content": "a"}, {"content": "b"}))["result"] == "ab"


# --- whose fault it is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, args",
    [("too_many", ", max_requests = 5"), ("too_long", ""), ("forgiven", ""), ("slow", ", time_limit = 3.0")],
)
def test_the_policys_fault_is_scored(rollouts, kind, args):
    found, _ = rollouts(kind, args=args)
    for r in found:
        assert not r["error"] and r["reward"] is not None
        assert r["metrics"]["agent_forgiven"] == (kind == "forgiven")
        if kind == "too_many":
            assert r["num_turns"] == 5 and r["metrics"]["agent_requests"] >= 5
        if kind == "too_long":
            assert r["truncated"] and r["num_turns"] < r["metrics"]["agent_requests"]


@pytest.mark.parametrize(
    "kind, fake, error",
    [
        ("crashes", {}, "LookupError: a bug of the agent in crashes, agent_tasks.py"),
        ("silent", {}, "DataError: the agent asked for nothing"),
        (
            "hides_errors",
            {"generate 1": "logprobs", "generate 9": "logprobs"},
            "AgentFailed: DataError: the server sent",
        ),
    ],
)
def test_the_agents_and_the_servers_fault_loses_the_rollout(run, kind, fake, error):
    try:
        run(2, TASK.format(kind, ""), ALL_MAY_FAIL, fake=fake)
    except RunError as e:
        assert kind != "hides_errors" and "in a row taught nothing, the last was failed" in str(e)
    found = lines(run.run_dir / "rollouts.jsonl") if kind == "hides_errors" else None
    if found:
        lost = [r for r in found if r["error"]]
        assert len(lost) == 2 and all(r["error"].startswith(error) and r["reward"] is None for r in lost)


@pytest.mark.parametrize("error", [LookupError("a bug"), RuntimeError("another")])
def test_what_an_agent_raises_comes_out_of_the_rollout(error):
    async def agent(client, prompt):
        await client.chat.completions.create(model="m", messages=prompt)
        raise error

    with pytest.raises(type(error)):
        play(agent, Policy({"content": "a"}), forgive=[openai.APIError])
    state = play(agent, Policy({"content": "a"}), forgive=[type(error)])
    assert state["agent"]["forgiven"] == 1


def test_what_a_plain_agent_may_not_do_is_not_forgiven_as_the_policys_fault():
    def agent(client, prompt):
        asyncio.run(client.chat.completions.create(model="m", messages=prompt))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    with pytest.raises(DataError, match="signal"):
        play(agent, Policy({"content": "a"}), forgive=[ValueError])


def test_a_rubric_may_be_shared_with_another_environment():
    rubric = Rubric([lambda completion: 1.0])
    AgentEnv(forgets, [{"question": "q"}], rubric=rubric)
    env = SingleTurnEnv([{"question": "q"}], rubric=rubric)
    assert asyncio.run(env.rubric.score(env.start(env.dataset[0])))[0] == 1.0


def test_a_truncated_rollout_says_so_to_the_agent_and_to_its_environment():
    async def agent(client, prompt):
        try:
            await client.chat.completions.create(model="m", messages=prompt)
        except openai.BadRequestError as e:
            assert e.code == "context_length_exceeded"
            return "handled"

    with pytest.raises(Truncated):
        play(agent, Policy(Truncated()))


def test_malformed_requests_are_answered_with_a_reason_and_count_for_nothing(rollouts):
    found, batches = rollouts("garbage", "orchestrator.sampling.max_tokens=2")
    assert not any(r["error"] for r in found) and {r["num_turns"] for r in found} == {1}


def test_requests_after_the_end_are_refused_and_the_shared_client_stays_open(rollouts):
    agent_tasks.LATE.clear()
    found, _ = rollouts("late", fake={"generate_s": 0.2})
    assert not any(r["error"] for r in found)
    assert set(agent_tasks.LATE) == {410}
    found, _ = rollouts("closes", "run_name=closes", steps=1)
    assert not any(r["error"] for r in found)


def test_a_client_that_goes_away_is_not_recorded(rollouts):
    found, _ = rollouts("goes_away", fake={"generate_s": 0.5}, steps=1)
    assert {r["num_turns"] for r in found} == {1} and not any(r["error"] for r in found)


def test_a_function_that_needs_what_is_not_there_is_found_before_a_server_starts(run):
    with pytest.raises(RunError, match="wants_misspelled.. wants .'klient'.") as e:
        run(1, TASK.format("wants_misspelled", ""))
    assert e.value.code == 4


def test_rewards_by_turn_are_refused():
    with pytest.raises(DataError, match="a TurnRubric rewards the turns of one conversation"):
        AgentEnv(forgets, [{"question": "q"}], rubric=TurnRubric([]))


@pytest.mark.parametrize("seed", some(range(30), 2))
def test_mixes_of_agents_add_up(rollouts, seed):
    """Each rollout has another agent, some of them at fault, and no rollout sees another's requests."""
    agent_tasks.RANDOM.seed(seed)
    found, batches = rollouts("mix", steps=3)
    lost = {"crashes": "LookupError", "silent": "DataError"}
    kinds = Counter()
    for r in found:
        kind = r["info"]["kind"]
        kinds[kind] += 1
        assert r["error"].split(":")[0] == lost.get(kind, ""), r["error"]
        if not r["error"]:
            assert r["reward"] is not None and r["metrics"]["agent_requests"] >= r["num_turns"]
            said = json.dumps(r["prompt"])
            assert f"hello {r['answer']}" in said or kind == "compacts"
    assert len(kinds) >= 8
    for sequences in sequences_of(batches).values():
        assert sum(int(s["mask"].sum()) for s in sequences) == sequences[0]["num_tokens"]


# --- streams and formats ----------------------------------------------------------------------------------------------


def test_the_synchronous_client_streams_in_a_thread(rollouts):
    found, _ = rollouts("in_a_thread", steps=1)
    assert not any(r["error"] for r in found) and {r["num_turns"] for r in found} == {1}


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_slow_stream_shows_life_and_reports_what_fails_later(monkeypatch, is_failing):
    monkeypatch.setattr(endpoint, "PAUSE", 0.05)
    text = []

    class Slow(Policy):
        async def __call__(self, *args, **kwargs):
            await asyncio.sleep(0.3)
            return await super().__call__(*args, **kwargs)

    async def agent(base_url, prompt):
        async with httpx.AsyncClient(trust_env=False) as http:
            reply = await http.post(f"{base_url}/chat/completions", json={"messages": prompt, "stream": True})
            assert reply.status_code == 200
            text.append(reply.text)

    try:
        play(agent, Slow(OSError("no server") if is_failing else {"content": "a"}))
    except Exception as e:
        assert is_failing and "no server" in str(e)
    assert text[0].count(": sampling\n\n") >= 3 and text[0].endswith("data: [DONE]\n\n")
    assert ('"server_error"' in text[0]) == is_failing


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_that_cannot_be_converted_loses_the_rollout(monkeypatch, is_streamed):
    def breaks(reply, body):
        yield from ()
        raise KeyError("usage")

    monkeypatch.setattr(endpoint.Chat, "events", breaks)
    monkeypatch.setattr(endpoint.Chat, "from_chat", lambda reply, body: list(breaks(reply, body)))

    async def agent(base_url, prompt):
        async with httpx.AsyncClient(trust_env=False) as http:
            await http.post(f"{base_url}/chat/completions", json={"messages": prompt, "stream": is_streamed})

    with pytest.raises(Exception, match="KeyError: 'usage'"):
        play(agent, Policy({"content": "a"}))


SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}


async def by_responses(client, prompt):
    """OpenAI's Responses, plain and streamed, with a tool whose result goes back."""
    tool = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "q"}]}]
    reply = await client.responses.create(model="m", input=items, instructions="S", tools=[tool], store=False)
    assert reply.usage.output_tokens == 4 and reply.status == "completed"
    items += [item.model_dump(exclude_none=True) for item in reply.output]
    call = reply.output[-1]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "42"})
    async with client.responses.stream(model="m", input=items, instructions="S", tools=[tool]) as stream:
        kinds = [event.type async for event in stream]
        last = await stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    return [json.loads(call.arguments), last.output_text]


async def by_messages(base_url, prompt):
    """Anthropic's Messages, likewise."""
    import anthropic

    client = anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key="none")
    tool = {"name": "f", "description": "d", "input_schema": SCHEMA}
    messages = [{"role": "user", "content": "q"}]
    given = {"model": "m", "max_tokens": 9, "system": "S", "tools": [tool]}
    async with client.messages.stream(messages=messages, **given) as stream:
        reply = await stream.get_final_message()
    assert reply.usage.output_tokens == 4 and reply.stop_reason == "tool_use"
    messages.append({"role": "assistant", "content": [block.model_dump() for block in reply.content]})
    call = reply.content[-1]
    messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "42"}]})
    last = await client.messages.create(messages=messages, **given)
    return [call.input, last.content[0].text]


@pytest.mark.parametrize("agent", [by_responses, by_messages])
def test_other_formats_are_the_same_chat(agent):
    policy = Policy(THOUGHT, {"content": "done"})
    state = play(agent, policy)
    assert state["result"] == [{"x": 1, "a": 2}, "done"]
    first, second = policy.asked
    assert [m["role"] for m in first] == ["system", "user"] and first[0]["content"] == "S"
    assert [m["role"] for m in second] == ["system", "user", "assistant", "tool"]
    assert second[2] == {"role": "assistant"} | THOUGHT and second[3]["content"] == "42"
    assert state["agent"]["requests"] == 2 and len(state["completion"]) == 3


@pytest.mark.parametrize("route", ["responses", "messages"])
def test_what_a_format_does_not_know_is_refused_with_a_reason(route):
    async def agent(base_url, client, prompt):
        async with httpx.AsyncClient(trust_env=False) as http:
            for body in (
                {},
                {"input": 3, "messages": 3, "max_tokens": 1},
                {"previous_response_id": "1", "messages": [1]},
            ):
                reply = await http.post(f"{base_url}/{route}", json=body)
                assert reply.status_code == 400 and reply.json()["error"]["message"], reply.text
        await client.chat.completions.create(model="m", messages=prompt)

    assert play(agent, Policy({"content": "a"}))["agent"]["requests"] == 1


# --- programs that others wrote ---------------------------------------------------------------------------------------

CAPTURED = {"capture_output": True, "text": True, "timeout": 120}
CLIS = ["@openai/codex@0.169.0", "@anthropic-ai/claude-code@2.1.332"]


@pytest.fixture(scope="module")
def clis(tmp_path_factory):
    """The directory of their programs."""
    if not shutil.which("npm"):
        pytest.skip("needs npm")
    path = tmp_path_factory.mktemp("clis")
    subprocess.run(["npm", "install", "--no-fund", "--no-audit", *CLIS], cwd=path, check=True, capture_output=True)
    return path / "node_modules" / ".bin"


def codex(bin, base_url):
    provider = f'{{name="rl", base_url="{base_url}", env_key="OPENAI_API_KEY", wire_api="responses"}}'
    settings = ["-c", "model_provider=rl", "-c", f"model_providers.rl={provider}"]
    flags = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return [f"{bin}/codex", "exec", *flags, *settings, "-m", "policy", "What does it print?"]


def claude(bin, base_url):
    return [f"{bin}/claude", "-p", "What does it print?", "--dangerously-skip-permissions", "--model", "policy"]


@pytest.mark.long
@pytest.mark.parametrize("command, tool, key", [(codex, "exec_command", "cmd"), (claude, "Bash", "command")])
def test_coding_agents_run_a_tool_and_end(clis, tmp_path, command, tool, key):
    """Streamed, by Responses and by Anthropic's Messages, with the agents' own prompts and tools, without a network."""
    function = {"name": tool, "arguments": json.dumps({key: "echo 4$((1+1))"})}
    policy = Policy({"tool_calls": [{"id": "c1", "type": "function", "function": function}]}, {"content": "it is 42"})

    def run(base_url):
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OPENAI_API_KEY": "none", "IS_SANDBOX": "1"}
        env |= {"ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": "none"}
        env |= {"NO_PROXY": "127.0.0.1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        done = subprocess.run(command(clis, base_url), env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, **CAPTURED)
        assert done.returncode == 0, done.stderr
        return done.stdout

    state = play(run, policy)
    assert state["result"].strip().endswith("it is 42")
    assert [m["role"] for m in state["completion"]] == ["assistant", "tool", "assistant"]
    assert "42" in state["completion"][1]["content"] and state["agent"]["requests"] == 2


# --- one wrong line at a time: each of these alone saw a change of one line -------------------------------------------


async def two_agents(client, prompt):
    """A policy that says one thing, and a user of many words, whom it plays as well."""
    user = [{"role": "user", "content": "play a user"}]
    for _ in range(2):
        reply = await client.chat.completions.create(model="m", messages=user, extra_headers={"X-Agent": "user"})
        user += [{"role": "assistant", "content": reply.choices[0].message.content}, prompt[0]]
    await client.chat.completions.create(model="m", messages=prompt)


def test_rewards_see_the_conversation_of_an_agent_that_is_trained():
    policy = Policy({"content": "u"}, {"content": "v"}, {"content": "answer"})
    state = play(two_agents, policy, untrained=["user"])
    assert [m["content"] for m in state["prompt"] + state["completion"]] == ["q", "answer"]


async def titles(client, prompt):
    """Asks for a title first, as many agents do."""
    await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a title?"}])
    messages = list(prompt)
    for _ in range(2):
        reply = await client.chat.completions.create(model="m", messages=messages)
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}, prompt[0]]


def test_rewards_see_the_longest_conversation_and_how_often_the_policy_was_asked():
    policy = Policy({"content": "title"}, {"content": "a"}, {"content": "b"})

    class Counts(Policy):
        async def __call__(self, *args, **kwargs):
            state["replies"].append({})
            return await super().__call__(*args, **kwargs)

    env = AgentEnv(titles, [{"question": "q"}], rubric=Rubric())
    state = env.start(env.dataset[0]) | {"replies": []}
    asyncio.run(env.rollout(state, Counts(*policy.left)))
    assert [m["content"] for m in state["completion"]] == ["a", "q", "b"] and state["turn"] == 3


class Busy(Exception):
    status = 429


@pytest.mark.parametrize(
    "error, is_lost", [(Busy("busy"), True), (type("Wrong", (Busy,), {"status": 422})("w"), False)]
)
def test_a_busy_server_loses_the_rollout_and_a_wrong_request_is_the_agents(error, is_lost):
    async def agent(client, prompt):
        with pytest.raises(openai.APIStatusError):
            await client.chat.completions.create(model="m", messages=prompt)

    if is_lost:
        with pytest.raises(Exception, match="Busy: busy"):
            play(agent, Policy(error))
    else:
        assert play(agent, Policy(error))["agent"]["requests"] == 1


def test_a_group_of_errors_is_forgiven_if_each_of_them_is():
    mixed = ExceptionGroup("", [KeyError(), LookupError()])
    assert is_forgiven(mixed, [LookupError]) and not is_forgiven(mixed, [KeyError])


async def asks_in_its_own_way(client, prompt):
    create = client.chat.completions.create
    await create(model="m", messages=prompt, max_tokens=5, extra_body={"max_completion_tokens": 3})
    await create(model="m", messages=prompt, parallel_tool_calls=False)
    await create(model="m", messages=prompt, parallel_tool_calls=True, tool_choice="none")


def test_the_lower_limit_counts_and_what_leaves_the_distribution_alone_is_honored():
    policy = Policy(*[{"content": "a"}] * 3)
    assert play(asks_in_its_own_way, policy)["agent"]["dropped"] == 0
    assert policy.own == [{"max_tokens": 3}, {"parallel_tool_calls": False}, {"tool_choice": "none"}]


def test_a_header_says_that_an_answer_is_not_trained_and_a_path_names_an_agent_before_a_header():
    found = []

    class Sees(Policy):
        async def __call__(self, messages, tools=None, agent="", trainable=True, **own):
            found.append((agent, trainable))
            return await super().__call__(messages, tools)

    async def agent(client, base_url, prompt):
        for value in ("False", "0", "true"):
            headers = {"X-Agent": "a", "X-Trainable": value}
            await client.chat.completions.create(model="m", messages=prompt, extra_headers=headers)
        other = client.with_options(base_url=base_url.replace("/v1", "/b/v1"), default_headers={"X-Agent": "a"})
        await other.chat.completions.create(model="m", messages=prompt)

    play(agent, Sees(*[{"content": "a"}] * 4))
    assert found == [("a", False), ("a", False), ("a", True), ("b", True)]


class Cut(Policy):
    """Its answers end at a limit."""

    async def __call__(self, *args, **kwargs):
        reply = await super().__call__(*args, **kwargs)
        reply["choices"][0]["finish_reason"] = "length"
        return reply


@pytest.mark.parametrize("route, body, own, key, said", [
    ("responses", {"input": "q", "max_output_tokens": 3}, {"max_tokens": 3}, "status", "incomplete"),
    ("messages", {"messages": [{"role": "user", "content": "q"}], "max_tokens": 3, "stop_sequences": ["z"]},
     {"max_tokens": 3, "stop": ["z"]}, "stop_reason", "max_tokens"),
])  # fmt: skip
def test_limits_of_other_formats_reach_the_policy_and_come_back(route, body, own, key, said):
    async def agent(base_url):
        async with httpx.AsyncClient(trust_env=False, timeout=60) as http:  # vLLM is imported
            return (await http.post(f"{base_url}/{route}", json=body | {"model": "m"})).json()

    policy = Cut({"content": "a"})
    assert play(agent, policy)["result"][key] == said and own.items() <= policy.own[0].items()


def test_thoughts_that_an_agent_sends_back_are_in_the_next_prompt():
    for name in ("reasoning", "reasoning_content"):
        message = {"role": "assistant", "content": "4", name: "two and two"}
        assert endpoint.as_chat({"messages": [message]}) == [message]
