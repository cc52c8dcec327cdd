"""The orchestrator's side of vLLM: the HTTP client, the live version, the tokenizer that measures prompts."""

import asyncio
import faulthandler
import json
import os
import sys
import time
import uuid
from pathlib import Path

import aiohttp

from configs.lib.runtime import RunError

RETRIES = 3  # of a lost connection, 429 or 5xx, after 0.5, 1 and 2 s or what Retry-After says
LOOP_LAG = 10.0  # s without a turn of the event loop until its stack is printed


class Client:
    """vLLM behind its OpenAI endpoint, and the live version. aiohttp, since openai's client takes longer than all else
    that the orchestrator does for a rollout."""

    def __init__(self, cfg):
        import transformers

        self.cfg, self.version, self.run_id = cfg, -1, os.environ.get("ROLEMODEL_RUN_ID", cfg.run.run_name)
        self.urls, self.session = list(cfg.inference.urls), None  # a session belongs to the event loop
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.run.model)
        if cfg.run.chat_template:
            self.tokenizer.chat_template = Path(cfg.run.chat_template).read_text()
        self.waiting = [0] * len(self.urls)  # requests under way, by server
        self.heard = [time.monotonic()] * len(self.urls)  # the last answer
        self.attempt = uuid.uuid4().hex[:8]  # a restarted trainer reaches a version again, with other weights

    async def follow(self, path, timeout_s):
        """Keeps self.version at what the trainer declared live, and watches that trainer and servers go on."""
        now = since = armed = time.monotonic()
        startup, silence = self.cfg.inference.startup_timeout, 0.9 * self.cfg.orchestrator.generation_timeout
        while self.version < self.cfg.run.max_steps:
            version = int(path.read_text()) if path.exists() else -1
            since = now if version != self.version else since
            if now - since > timeout_s + (startup if version < 0 else 0):
                what = f"the trainer made no version after {version} in {now - since:.0f} s"
                raise RunError(3, f"{what} (orchestrator.version_timeout); its stacks are in logs/trainer.log")
            self.heard = [then if waiting else now for waiting, then in zip(self.waiting, self.heard)]
            if now - min(self.heard, default=now) > silence:  # before the rollouts are given up one by one
                i = self.heard.index(min(self.heard))
                what = f"{self.waiting[i]} requests wait and {self.cfg.inference.urls[i]} has answered none"
                raise RunError(3, f"{what} for {silence:.0f} s (0.9 x orchestrator.generation_timeout)")
            if now - armed > LOOP_LAG / 10:  # a stack is printed where an async function blocks the event loop
                faulthandler.dump_traceback_later(LOOP_LAG, file=sys.__stderr__)
                armed = now
            self.version = version
            await asyncio.sleep(0.02)
            now = time.monotonic()
        faulthandler.cancel_dump_traceback_later()

    async def until(self, version):
        while self.version < version:
            await asyncio.sleep(0.02)

    def tokenize(self, prompt, tools=None):
        """-> the prompt's ids, as the server makes them."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not self.tokenizer.chat_template:
            raise RunError(
                2, f"{self.cfg.run.model} has no chat template: set chat_template, or give rows a text prompt"
            )
        more = self.cfg.sampling.chat_template_kwargs
        prompt = [as_template_sees(message) for message in prompt]
        return self.tokenizer.apply_chat_template(
            prompt, tools=tools, add_generation_prompt=True, return_dict=False, **more
        )

    def refuse_tokens(self, mine, theirs):
        at = next((i for i, (a, b) in enumerate(zip(mine, theirs)) if a != b), min(len(mine), len(theirs)))
        here, there = (self.tokenizer.decode(ids[at : at + 8]) for ids in (mine, theirs))
        where = f"from token {at} on trainer and server read a prompt differently: {here!r}, {there!r}"
        raise RunError(2, f"{where}. Give both the same model, tokenizer and chat_template")

    async def post(self, server, path, body):
        """-> the reply as a dict; a group keeps its number, so it stays on one server and its prefix cache."""
        i = server % len(self.urls)
        self.waiting[i] += 1
        try:
            reply = await self.ask(f"{self.urls[i]}/v1{path}", json.dumps(body).encode())
            self.heard[i] = time.monotonic()
            return reply
        finally:
            self.waiting[i] -= 1

    async def ask(self, url, data):
        if self.session is None:
            timeout = aiohttp.ClientTimeout(self.cfg.orchestrator.generation_timeout)
            kind = {"Content-Type": "application/json"}
            self.session = aiohttp.ClientSession(timeout=timeout, headers=kind, connector=aiohttp.TCPConnector(limit=0))
        for attempt in range(RETRIES + 1):
            wait = 0.5 * 2**attempt
            try:
                async with self.session.post(url, data=data) as reply:
                    if reply.status == 200:
                        return json.loads(await reply.read())
                    error = ServerError(f"{url} answered {reply.status}: {(await reply.text())[:500]}")
                    after = reply.headers.get("Retry-After", "")
                    wait = min(float(after), 60) if after.replace(".", "", 1).isdigit() else wait
                    if reply.status != 429 and reply.status < 500:
                        raise error
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as e:  # a time-out is no such error
                error = e
            if attempt < RETRIES:
                await asyncio.sleep(wait)
        raise error

    async def close(self):
        if self.session:
            await self.session.close()


class ServerError(Exception):
    """What a server answers instead of 200."""


def as_template_sees(message):
    """A message in OpenAI's format as vLLM hands it to the chat template: arguments of tool calls are objects."""
    message = message | ({"reasoning_content": message["reasoning"]} if message.get("reasoning") else {})
    if not message.get("tool_calls"):
        return message
    functions = [c["function"] | {"arguments": as_object(c["function"]["arguments"])} for c in message["tool_calls"]]
    return message | {"tool_calls": [c | {"function": f} for c, f in zip(message["tool_calls"], functions)]}


def as_object(text):
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
