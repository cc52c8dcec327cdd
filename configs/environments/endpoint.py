"""The OpenAI endpoint that agents.py gives to agents, in the orchestrator's own event loop. Each rollout has an address
under a secret, which ends with the rollout:

    http://127.0.0.1:<port>/<secret>[/<agent>]/v1/chat/completions, /responses, /messages or /models

A path segment, or the header X-Agent, names one of several agents. X-Trainable: false marks a request whose answer is
not trained.

Sampling is the run's. Settings that would change the distribution (temperature, tool_choice = "required", JSON formats)
are dropped, named once and counted: the log-probabilities that vLLM reports with them are not the policy's, and nothing
could be trained on such tokens. A tool's `strict` is dropped as well, but not counted: some clients always set it."""

import asyncio
import contextlib
import copy
import importlib
import json
import weakref
from collections import namedtuple
from typing import Literal

import openai
import pydantic
from aiohttp import web
from openai.types.chat import ChatCompletion

from configs.runtime.role import say

# Keys of a request that are honored or have no effect on the answer, and values of others that ask for the default.
HARMLESS = set(
    "model messages tools stop max_tokens max_completion_tokens parallel_tool_calls stream stream_options n user "
    "metadata store service_tier prompt_cache_key prompt_cache_retention safety_identifier verbosity".split()
)
DEFAULTS = {"temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0, "logprobs": False}
DEFAULTS |= {"tool_choice": "auto", "response_format": {"type": "text"}}
# Keys of a message that templates use.
MESSAGE = ("role", "content", "name", "reasoning", "reasoning_content", "tool_calls", "tool_call_id")
NAMED = set()  # dropped settings that the log has named
PAUSE = 5.0  # s until a stream shows life: clients and proxies give up on silence
# The library under openai's client: httpx or, since its version 3, httpx2.
HTTPX = importlib.import_module(openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])
STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
NO_RETRY = {"x-should-retry": "false"}  # openai's client would ask again after a 5xx

SERVERS = weakref.WeakKeyDictionary()  # event loop: the task that starts its server
SESSIONS = {}  # secret: agents.Session
RUNNERS = {}  # port of a server: what serves it, which can serve a Unix socket as well


class Refused(Exception):
    """An answer that is no completion: a status, and what OpenAI's error object says."""

    def __init__(self, status, code, reason):
        super().__init__(reason)
        self.status = status
        self.object = {"message": reason, "type": code, "code": code, "param": None}


# --- requests ---------------------------------------------------------------------------------------------------------


class Message(pydantic.BaseModel, extra="allow", strict=True):
    role: str
    content: str | list[dict] | None = None
    tool_calls: list[dict] | None = None


class Function(pydantic.BaseModel, extra="allow", strict=True):
    name: str


class Tool(pydantic.BaseModel, extra="allow", strict=True):
    function: Function


class ChatRequest(pydantic.BaseModel, extra="allow", strict=True):
    messages: list[Message] = pydantic.Field(min_length=1)
    tools: list[Tool] | None = None
    n: Literal[1] | None = None
    stop: str | list[str] | None = None
    max_tokens: pydantic.PositiveInt | None = None
    max_completion_tokens: pydantic.PositiveInt | None = None


def checked(body):
    """A chat request without what is None. Raises Refused."""
    try:
        ChatRequest.model_validate(body)
    except pydantic.ValidationError as e:
        raise Refused(400, "invalid_request_error", str(e)) from None
    body = {key: value for key, value in body.items() if value is not None}
    tools = []
    for tool in body.get("tools", []):
        # vLLM constrains what is sampled for a tool with `strict`.
        function = {key: value for key, value in tool["function"].items() if key != "strict"}
        tools.append(tool | {"function": function})
    return body | {"tools": tools or None}


def settings(body):
    """What a request asks for beside messages and tools: {key: value} for generate(), and how many it asks in vain."""
    own = {}
    limits = [body[key] for key in ("max_tokens", "max_completion_tokens") if key in body]
    if limits:
        own["max_tokens"] = min(limits)
    stop = body.get("stop")
    if stop:
        own["stop"] = [stop] if isinstance(stop, str) else stop
    if body.get("parallel_tool_calls") is False:
        own["parallel_tool_calls"] = False
    if body.get("tool_choice") == "none":
        own["tool_choice"] = "none"
    dropped = []
    for key, value in body.items():
        if key not in HARMLESS and key not in own and value not in (DEFAULTS.get(key), {}, []):
            dropped.append(key)
            if key not in NAMED:
                NAMED.add(key)
                say(f"warning: an agent asks for {key} = {str(value)[:100]}: dropped, since sampling is the run's")
    return own, len(dropped)


def as_chat(body):
    """A request's messages without what is None. Leading system messages become one: many templates refuse two."""
    result = []
    for message in body["messages"]:
        message = {key: message[key] for key in MESSAGE if message.get(key) not in (None, [])}
        message.setdefault("content", "")
        if message["role"] == "developer":
            message["role"] = "system"
        if message["role"] == "system" and [m["role"] for m in result] == ["system"]:
            message["content"] = f"{text_of(result.pop()['content'])}\n\n{text_of(message['content'])}"
        result.append(message)
    return result


def text_of(content):
    """The text of a message's content, which may come in parts; vLLM joins them like this."""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)


def key_of(message):
    """What an agent keeps of the policy's message: its text, and its calls, however it writes them."""
    calls = []
    for tool_call in message.get("tool_calls", []):
        function = tool_call.get("function", {})
        arguments = function.get("arguments")
        try:
            arguments = json.dumps(json.loads(arguments), sort_keys=True)
        except (TypeError, ValueError):
            arguments = str(arguments)
        calls.append((function.get("name"), arguments))
    return text_of(message["content"]).strip(), tuple(calls)


# --- the server -------------------------------------------------------------------------------------------------------

# A request, from a socket or from a client in this process.
Asked = namedtuple("Asked", "path headers text")


async def endpoint():
    """The address of this event loop's endpoint, which the first rollout starts."""
    loop = asyncio.get_running_loop()
    if loop not in SERVERS:
        SERVERS[loop] = loop.create_task(serve())
    return await asyncio.shield(SERVERS[loop])


async def serve():
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", handle)
    # A request whose client has gone is cancelled. Otherwise its answer would be sampled, recorded and trained on.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    _, port = runner.addresses[0]
    RUNNERS[port] = runner
    return f"http://127.0.0.1:{port}"


async def handle(request):
    """Answers a request from a socket."""
    text = (await request.read()).decode(errors="replace")
    status, answer = await respond(Asked(request.path, request.headers, text))
    if isinstance(answer, dict):
        return web.json_response(answer, status=status, headers=NO_RETRY)
    response = web.StreamResponse(headers=STREAM)
    await response.prepare(request)
    async with contextlib.aclosing(answer):
        async for text in answer:
            await response.write(text.encode())
    return response


class HttpClient(openai.DefaultAsyncHttpxClient):
    """For openai's client: its requests come here."""

    def __init__(self):
        self.loop = asyncio.get_running_loop()
        super().__init__(transport=InProcess(self.loop), trust_env=False, timeout=None)


class Client(openai.AsyncOpenAI):
    """openai's client for agents in this process. Its copies may have options and HTTP clients of their own."""

    def __init__(self, http_client=None, **options):
        super().__init__(http_client=http_client or HttpClient(), **options)

    async def post(self, path, *, cast_to, body=None, **others):
        """A plain chat request skips HTTP, which is half of what a request costs."""
        is_here = isinstance(self._client, HttpClient) and self.timeout == self._client.timeout
        has_own = others.get("options", {}).keys() - {"security"} or others.get("stream") or self._custom_headers
        text = ""
        if path == "/chat/completions" and cast_to is ChatCompletion and is_here and not has_own:
            with contextlib.suppress(TypeError, ValueError):  # the long way knows more types, or says what is wrong
                text = json.dumps(body, allow_nan=False)
        if not text:
            return await super().post(path, cast_to=cast_to, body=body, **others)
        asked = Asked(self.base_url.path + path.lstrip("/"), {}, text)
        status, answer = await respond_whole(asked, self._client.loop)
        if status == 200:
            completion = ChatCompletion.construct(**copy.deepcopy(answer))  # the agent may change its own
            completion._request_id = None
            return completion
        request = HTTPX.Request("POST", self.base_url)
        raise self._make_status_error_from_response(HTTPX.Response(status, json=answer, request=request))


class InProcess:
    """Transport of the HTTP client that agents in this process get. Their requests need no socket, which halves what a
    request costs, and the client no certificates, which would take 29 ms of the event loop for each rollout."""

    def __init__(self, loop):
        self.loop = loop

    async def handle_async_request(self, request):
        text = (await request.aread()).decode(errors="replace")
        asked = Asked(request.url.path, request.headers, text)
        try:
            async with asyncio.timeout(request.extensions["timeout"]["read"]):
                status, answer = await respond_whole(asked, self.loop)
        except TimeoutError as e:
            raise HTTPX.ReadTimeout("the agent's own limit", request=request) from e
        if isinstance(answer, dict):
            return HTTPX.Response(status, json=answer, headers=NO_RETRY)
        return HTTPX.Response(status, text=answer, headers=STREAM)

    async def aclose(self):
        pass

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        pass


async def respond_whole(asked, loop):
    """respond(), with a stream as one text. loop: the endpoint's; an agent in a thread may run another."""
    if loop is not asyncio.get_running_loop():
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(respond_whole(asked, loop), loop))
    status, answer = await respond(asked)
    if not isinstance(answer, dict):
        async with contextlib.aclosing(answer):
            answer = "".join([text async for text in answer])
    return status, answer


async def respond(asked):
    """Returns a status and an object or, for a stream, a generator of text. An error of ours, or of a format's
    converter, loses the rollout."""
    secret, _, path = asked.path.strip("/").partition("/")
    session = SESSIONS.get(secret)
    try:
        if not session:
            raise Refused(410, "rollout_over", "this rollout has ended, or never was")
        return 200, await answer(asked, path, session)
    except Refused as e:
        error = e
    except Exception as e:
        session.lost = f"{type(e).__name__}: {e}"
        error = Refused(500, "server_error", session.lost)
    return error.status, error_event(error)


def error_event(error):
    return {"type": "error", "error": error.object}  # Anthropic's clients look for the outer type


async def answer(asked, path, session):
    """The answer to one request of a rollout. path: [<agent>/]v1/<route>"""
    before, _, route = f"/{path}".partition("/v1/")
    agent = before.strip("/") or asked.headers.get("X-Agent", "")
    is_trained = asked.headers.get("X-Trainable", "").lower() not in ("false", "0")
    if route == "models":
        return {"object": "list", "data": [{"id": "policy", "object": "model", "created": 0}]}
    form = await format_of(route)
    try:
        body = json.loads(asked.text)
    except (ValueError, RecursionError) as e:
        raise Refused(400, "invalid_request_error", f"the body is no JSON: {e}") from None
    if not isinstance(body, dict):
        raise Refused(400, "invalid_request_error", "the body is no JSON object")
    task = asyncio.create_task(session.complete(checked(form.to_chat(body)), agent, is_trained))
    session.tasks.add(task)
    task.add_done_callback(session.tasks.discard)
    if not body.get("stream"):
        return form.from_chat(await task, body)
    try:
        await asyncio.wait([task], timeout=PAUSE)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if task.done():
        task.result()  # what fails at once is answered by its status, with which a stream begins
    return stream(task, form, body, session)


async def stream(task, form, body, session):
    """Server-sent events of a reply, once it is complete; no client needs smaller pieces."""
    try:
        while not task.done():
            yield ": sampling\n\n"
            await asyncio.wait([task], timeout=PAUSE)
        try:
            events = list(form.events(task.result(), body))
        except Refused as e:
            events = [error_event(e)]
        except Exception as e:  # of a format's: as respond() has it
            session.lost = f"{type(e).__name__}: {e}"
            events = [error_event(Refused(500, "server_error", session.lost))]
        for event in events:
            name = f"event: {event['type']}\n" if "type" in event else ""
            yield f"{name}data: {json.dumps(event)}\n\n"
        if form is Chat:
            yield "data: [DONE]\n\n"
    finally:
        task.cancel()  # the client has gone; nothing happens to a task that is done


async def format_of(route):
    if route == "chat/completions":
        return Chat
    if route not in ("responses", "messages"):
        raise Refused(404, "not_found", f"no /v1/{route} here, only chat/completions, responses, messages and models")
    return await asyncio.to_thread(load_format, route)


def load_format(route):
    from configs.serving import formats  # imports a part of vLLM: seconds, the first time

    return formats.FORMATS[route]


class Chat:
    """/v1/chat/completions. configs/serving/formats.py has the others, with the same three functions."""

    def to_chat(body):
        return body

    def from_chat(reply, body):
        return reply

    def events(reply, body):
        """The whole message as one delta."""
        head = {key: reply[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
        choice = reply["choices"][0]
        delta = dict(choice["message"])
        if "tool_calls" in delta:
            delta["tool_calls"] = [tool_call | {"index": i} for i, tool_call in enumerate(delta["tool_calls"])]
        chunk = {"index": 0, "delta": delta, "finish_reason": None}
        end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
        events = [head | {"choices": [chunk]}, head | {"choices": [end]}]
        options = body.get("stream_options")
        if isinstance(options, dict) and options.get("include_usage"):
            events.append(head | {"choices": [], "usage": reply["usage"]})
        return events
