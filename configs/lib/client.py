"""The orchestrator's side of vLLM: OpenAI clients, the live version, the tokenizer that measures prompts."""

import asyncio
import json
import os
import time
import uuid
from pathlib import Path

from configs.lib.runtime import RunError


class Client:
    """vLLM behind its OpenAI endpoint, and the live version. The openai library retries lost connections, 429, 5xx."""

    def __init__(self, cfg):
        import openai
        import transformers

        self.cfg, self.version, self.run_id = cfg, -1, os.environ.get("ROLEMODEL_RUN_ID", cfg.run.run_name)
        how = {"api_key": "none", "max_retries": 3, "timeout": cfg.orchestrator.generation_timeout}
        self.clients = [openai.AsyncOpenAI(base_url=f"{url}/v1", **how) for url in cfg.inference.urls]
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.run.model)
        if cfg.run.chat_template:
            self.tokenizer.chat_template = Path(cfg.run.chat_template).read_text()
        self.seen = set()  # names of the errors that were printed
        self.attempt = uuid.uuid4().hex[:8]  # a restarted trainer reaches a version again, with other weights

    async def follow(self, path, timeout_s):
        """Keeps self.version at what the trainer declared live."""
        since = time.monotonic()
        while self.version < self.cfg.run.max_steps:
            version = int(path.read_text()) if path.exists() else -1
            since = time.monotonic() if version != self.version else since
            if time.monotonic() - since > timeout_s:
                raise RunError(3, f"no version after {version} in {timeout_s:.0f} s (orchestrator.version_timeout)")
            self.version = version
            await asyncio.sleep(0.02)

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

    async def post(self, server, path, body):
        """-> the reply as a dict; a group keeps its number, so it stays on one server and its prefix cache."""
        return await self.clients[server % len(self.clients)].post(path, cast_to=object, body=body)


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
