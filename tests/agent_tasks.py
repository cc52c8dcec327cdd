"""Agents for tests: of several turns, with sub-agents, in a hurry, at fault, and in need of what they cannot have."""

import asyncio
import random

import httpx
import openai

from configs.environments.agents import AgentEnv
from configs.environments.rubrics import AgentRubric
from env import MultiTurnEnv, Rubric

RANDOM = random.Random(0)


def noise(answer):
    """Two rollouts never get the same."""
    return float(answer) + random.random()


async def say(client, messages, **options):
    """A turn: adds the answer to the messages, as the client echoes it, and returns the choice."""
    reply = await client.chat.completions.create(model="anything", messages=messages, **options)
    message = reply.choices[0].message
    messages.append({"role": "assistant", "content": message.content})
    return reply.choices[0]


async def turns(client, prompt):
    messages = list(prompt)
    for i in range(3):
        await say(client, messages)
        messages.append({"role": "user", "content": f"turn {i}"})
    return messages


def in_a_thread(base_url, prompt):
    """The synchronous client, streamed."""
    client = openai.OpenAI(base_url=base_url, api_key="none")
    stream = client.chat.completions.create(
        model="m", messages=prompt, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 0 and chunks[-2].choices[0].finish_reason
    return text


async def with_sub_agent(client, prompt):
    """A main agent and an unnamed sub-agent of 6 turns each, interleaved, of which each has its own conversation."""
    main, sub = list(prompt), [{"role": "user", "content": "sub"}]
    for i in range(6):
        for messages in (main, sub):
            await say(client, messages, max_tokens=2)
            messages.append({"role": "user", "content": f"{i}"})


async def proposer_and_solver(client, base_url, prompt):
    """Two agents with rewards of their own, and a user, whom the policy plays without being trained."""
    proposer = client.with_options(default_headers={"X-Agent": "proposer"})
    solver = openai.AsyncOpenAI(base_url=base_url.replace("/v1", "/solver/v1"), api_key="none")
    user = client.with_options(default_headers={"X-Agent": "user"})
    await asyncio.gather(*(say(who, list(prompt), max_tokens=3) for who in (proposer, solver, user)))


def shares():
    return {"proposer": 1 + random.random(), "solver": -1 - random.random()}


def half():
    return 0.5


async def compacts(client, prompt):
    """After two turns the history is replaced by a summary."""
    messages = list(prompt)
    for i in range(4):
        if i == 2:
            messages = [{"role": "user", "content": "summary"}]
        await say(client, messages, max_tokens=3)
        messages.append({"role": "user", "content": "on"})


async def wants_more(client, prompt):
    """Asks for what cannot be trained on, and for what can."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {}, "strict": True}}
    options = {"temperature": 0.2, "logit_bias": {"5": 9}, "tool_choice": "required", "tools": [tool]}
    await say(client, list(prompt), **options, max_tokens=2, response_format={"type": "json_object"})
    await say(client, list(prompt), temperature=1, top_p=1, stop=["z"], user="me", max_tokens=2)


async def parts(client, prompt):
    """Content in parts, and a developer before the system."""
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "one"}, {"role": "system", "content": content}, *prompt]
    await say(client, messages, max_tokens=3)


async def too_many(client, prompt):
    while True:
        await say(client, list(prompt), max_tokens=1)


async def too_long(client, prompt):
    messages = list(prompt)
    while True:
        await say(client, messages)
        messages.append({"role": "user", "content": "and so on and so on"})


class SameTurns(MultiTurnEnv):
    """What the agent `turns` does."""

    def env_response(self, messages, state):
        return [{"role": "user", "content": f"turn {state['turn'] - 1}"}]


class TurnsExceeded(Exception):
    pass


async def forgiven(client, prompt):
    await say(client, list(prompt))
    raise TurnsExceeded("no more turns")


async def crashes(client, prompt):
    await say(client, list(prompt))
    raise LookupError("a bug of the agent")


async def silent(client):
    return "42"


async def slow(client, prompt):
    await say(client, list(prompt))
    await asyncio.sleep(3600)


async def hides_errors(client, prompt):
    """Takes a failing server for an answer."""
    try:
        await say(client, list(prompt))
    except openai.APIStatusError as e:
        return str(e)


async def closes(client, prompt):
    """`async with` closes the client, but not the connections that others use."""
    async with client:
        await say(client, list(prompt), max_tokens=2)


LATE = []  # statuses of requests after the end of their rollout
TASKS = []  # which ask them


async def wants_misspelled(klient):
    pass


async def late(client, prompt):
    await say(client, list(prompt), max_tokens=2)
    TASKS.append(asyncio.create_task(ask_later(client, prompt)))


async def ask_later(client, prompt):
    await asyncio.sleep(0.05)
    try:
        await say(client, list(prompt))
    except openai.APIStatusError as e:
        LATE.append(e.status_code)


async def goes_away(client, base_url, prompt):
    """Gives up on its first request while that is sampled, and asks again."""
    body = {"messages": prompt}
    async with httpx.AsyncClient(trust_env=False) as http:
        try:
            await http.post(f"{base_url}/chat/completions", json=body, timeout=0.1)
        except httpx.TimeoutException:
            pass
    await say(client, list(prompt))


GARBAGE = [
    b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"messages": 1}', b'{"messages": []}',
    b'{"messages": [1]}',
    b'{"messages": [{}]}', b'{"messages": [{"role": 1}]}', b'{"messages": [{"role": "x"}], "n": 2}',
    b'{"messages": [{"role": "user", "content": 7}]}', b'{"messages": [{"role": "user", "content": [7]}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}',
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": -1}',
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": "9"}',
    b'{"messages": [{"role": "user", "content": "a"}], "stop": [1]}',
    b'{"messages": [{"role": "user", "content": "a"}], "tools": {}}',
    b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"function": 1}]}',
]  # fmt: skip


async def garbage(client, base_url, prompt):
    """Every malformed body is answered by 400 and a reason, and counts as no turn."""
    async with httpx.AsyncClient(trust_env=False) as http:
        for body in GARBAGE:
            reply = await http.post(f"{base_url}/chat/completions", content=body)
            error = reply.json()["error"]
            assert reply.status_code == 400 and error["message"] and error["code"], (body[:60], reply.text)
        odd = {"messages": prompt, "stream": True, "stream_options": [], "max_tokens": 2}
        assert (await http.post(f"{base_url}/chat/completions", json=odd)).status_code == 200
        replies = [await http.post(f"{base_url}/{path}", json={}) for path in ("audio", "embeddings", "x/y")]
        models = (await http.get(f"{base_url}/models")).json()
        guess = await http.post(f"{base_url.rsplit('/', 2)[0]}/guess/v1/chat/completions", json=odd)
    assert (
        {reply.status_code for reply in replies} == {404}
        and models["data"][0]["id"] == "policy"
        and guess.status_code == 410
    )


def load_environment(kind="turns", num_rows=37, **options):
    rows = [{"question": f"hello {i}", "answer": str(i)} for i in range(num_rows)]
    if kind == "mix":  # every kind at once
        return AgentEnv(mix, rows, rubric=Rubric([noise]), max_requests=5, forgive=[TurnsExceeded])
    if kind == "same_turns":
        return SameTurns(rows, rubric=Rubric([noise]), max_turns=3)
    if kind == "proposer_and_solver":
        options["rubric"] = AgentRubric([shares, half], [2.0, 1.0])
    options.setdefault("rubric", Rubric([noise]))
    options.setdefault("forgive", [TurnsExceeded])
    return AgentEnv(globals()[kind], rows, rows[:3], **options)


MIX = [turns, compacts, wants_more, too_many, too_long, forgiven, crashes, silent, closes, garbage]


async def mix(client, base_url, prompt, answer, state):
    """Another agent for each rollout, which writes down what it was answered."""
    agent = RANDOM.choice(MIX)
    state["info"]["kind"] = agent.__name__
    given = {"client": client, "base_url": base_url, "prompt": prompt}
    names = agent.__code__.co_varnames[: agent.__code__.co_argcount]
    return await agent(**{name: given[name] for name in names})
