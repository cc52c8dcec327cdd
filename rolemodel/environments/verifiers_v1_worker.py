"""The process in which tasksets of verifiers 0.4 run, in a venv of its own: verifiers_v1.py starts one for each
environment. It imports nothing of ours. Each line is a JSON object, and `id` says which question it asks or answers.

    in   {"id": 0, "config": {"taskset": {"id": "my-tasks"}}, "harness": "", "num_rows": 0, "time_limit": 0.0}
    out  {"id": 0, "rows": [{"question": text, or "prompt": messages, "answer": text, "info": {"task": 3}}, ...]}
    in   {"id": 7, "task": 3, "base_url": "http://127.0.0.1:1/secret/v1"}    plays the task; {"id": 7} ends it
    out  {"id": 7, "traces": [{"agent": "solver", "trainable": true, "reward": 0.5, "rewards": {}, "metrics": {}}]}
    out  {"id": 7, "error": "a message"}"""

import asyncio
import contextlib
import copy
import functools
import json
import logging
import os

import openai
import verifiers.v1 as vf
from pydantic import Field
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.compaction import bound_tool_message, is_context_overflow
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import InterceptionServer

__all__ = ["InProcess"]  # verifiers finds a harness by what its module exports
REGISTER = InterceptionServer.register
CLIENT = openai.AsyncOpenAI(base_url="", api_key="none", max_retries=0, timeout=None)  # rollouts share connections
SERVERS = contextlib.AsyncExitStack()
TASKS = []  # [(environment, task), ...]
RUNNING = {}  # id of a question: asyncio.Task

# --- the harness ------------------------------------------------------------------------------------------------------


class InProcess(vf.Harness[vf.HarnessConfig]):
    """A chat with tools, like verifiers' harness "null", in this event loop. A program of its own would cost each
    rollout a second of a core."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, *args):
        try:
            await self.chat(*args)
        except openai.APIStatusError as e:
            # If the policy has used up its context or its requests, what there is gets scored.
            if not is_context_overflow(e) and "rollout_over" not in str(e):
                raise
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def chat(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        create = CLIENT.with_options(base_url=endpoint, api_key=secret).chat.completions.create
        messages = messages_of(data)
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with contextlib.AsyncExitStack() as stack:
            tools, places, connections = await connect_mcp({"mcpServers": servers}, stack)
            while True:
                reply = await create(model=ctx.model, messages=messages, tools=tools or openai.omit)
                message = reply.choices[0].message
                messages.append(message.model_dump(exclude_none=True))
                for tool_call in message.tool_calls or []:
                    content = await result_of(tool_call.function, places, connections)
                    result = {"role": "tool", "tool_call_id": tool_call.id, "content": content}
                    messages.append(bound_tool_message(result))
                if not message.tool_calls:
                    return


def messages_of(data):
    """The first messages of a task's conversation, as they are in requests."""
    prompt = data.prompt or []
    if isinstance(prompt, str):
        prompt = [vf.UserMessage(content=prompt)]
    if data.system_prompt:
        prompt = [vf.SystemMessage(content=data.system_prompt), *prompt]
    return [message_to_wire(message) for message in prompt]


async def result_of(function, places, connections):
    """A tool's answer, or what is wrong with the call."""
    try:
        arguments = {**json.loads(function.arguments or "{}")}
    except (TypeError, ValueError) as e:
        return f"error: the arguments are not a JSON object ({e})"
    if function.name not in places:
        return f"error: unknown tool {function.name!r}"
    return await call_mcp(connections, places, function.name, arguments)


# --- the endpoint -----------------------------------------------------------------------------------------------------


class Policy(vf.EvalClientConfig):
    """The endpoint of a rollout. verifiers keeps a client for each configuration forever. Since the address is
    excluded, all rollouts have the same configuration."""

    base_url: str = Field(exclude=True)
    api_key_var: str = "NO_KEY"


def register(server, session):
    """InterceptionServer.register, but each request also tells the endpoint which agent it comes from."""
    keys = REGISTER(server, session)
    if isinstance(session.ctx.client, Policy):
        agent = session.trace.agent
        session.client = copy.copy(session.client)
        session.client.base_url = session.ctx.client.base_url
        session.client.headers = {"X-Agent": agent.name, "X-Trainable": str(agent.trainable)}
    return keys


# --- questions --------------------------------------------------------------------------------------------------------


def take(line, answers):
    question = json.loads(line)
    number = question.pop("id")
    if question:
        RUNNING[number] = asyncio.create_task(answer(number, question, answers))
    elif number in RUNNING:
        RUNNING[number].cancel()


async def answer(number, question, answers):
    try:
        reply = await (play(**question) if "task" in question else load(**question))
    except Exception as e:
        logging.exception("failed: %s", question)
        reply = {"error": f"{type(e).__name__}: {' '.join(str(e).split())}"}
    finally:
        del RUNNING[number]
    print(json.dumps({"id": number} | reply), file=answers, flush=True)


async def load(config, harness, num_rows, time_limit):
    """Loads tasks, and starts the servers that rollouts share."""
    own = {"runtime": {"type": "subprocess"}, "timeout": {"rollout": time_limit or None}}  # a cloud by default
    kind = vf.env_config_type(config["taskset"]["id"], config.get("id", ""))
    for role in agent_config_fields(kind.model_construct()):
        config[role] = {"harness": {"id": harness or "__main__"}} | own | config.get(role, {})
    env = vf.load_environment(vf.resolve_env_config(config))
    taskset = env.taskset.take(num_rows) if num_rows else env.taskset
    if not taskset.bounded:
        raise ValueError("the taskset never ends: set num_rows, how many of its tasks to take")
    await SERVERS.enter_async_context(env.serving())
    return {"rows": [add(env, task) for task in taskset]}


def add(env, task):
    """Adds a task, and returns its example."""
    data = task.data
    row = {"info": {"task": len(TASKS)}, "answer": str(getattr(data, "answer", ""))}
    TASKS.append((env, task))
    if data.prompt is None:  # the environment opens the conversation
        return row | {"question": data.name or f"task {data.idx}"}
    return row | {"prompt": messages_of(data)}


async def play(task, base_url):
    env, task = TASKS[task]
    episode = await env.run_episode(task, vf.ModelContext(model="policy", client=Policy(base_url=base_url)))
    if env.complete(episode):
        return {"traces": [summary(trace) for trace in episode.traces]}
    errors = sum([trace.errors for trace in episode.traces], episode.errors)
    return {"error": "; ".join(f"{e.type}: {e.message}" for e in errors) or "the episode is not complete"}


def summary(trace):
    """None as a reward: its function was not called, or it ran out of time."""
    rewards = {name: reward and reward.score for name, reward in trace.rewards.items()}
    agent = {"agent": trace.agent.name, "trainable": trace.agent.trainable}
    return agent | {"reward": trace.reward, "rewards": rewards, "metrics": trace.metrics}


async def main(questions, answers):
    loop = asyncio.get_running_loop()

    def read():
        for line in questions:
            loop.call_soon_threadsafe(take, line, answers)
        os._exit(0)  # the client has gone; the kernel ends what was started here

    await asyncio.to_thread(read)


if __name__ == "__main__":
    logging.basicConfig()
    InterceptionServer.register = register
    # Tool servers and harnesses must not outlive this process.
    asyncio.create_subprocess_exec = functools.partial(asyncio.create_subprocess_exec, "setpriv", "--pdeathsig", "KILL")
    # What tasksets print must not be taken for an answer, nor may their programs read the questions.
    pipes = [os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    asyncio.run(main(*pipes))
