"""A server with what every OpenAI-compatible server has, and nothing else, in a thread of its own."""

import asyncio
import threading

from aiohttp import web
from conftest import free_port

# Keys of a request, and no more: no n, nothing that only vLLM knows.
OPENAI = {"model", "messages", "prompt", "temperature", "top_p", "max_tokens", "stop", "tools"}


class PlainServer:
    """answer(body) -> the reply's message, its text alone, or (status, headers[, what is wrong]). also: more keys."""

    def __init__(self, answer, also=()):
        self.answer = answer
        self.keys = OPENAI.union(also)
        self.bodies = []
        self.port = free_port()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self.port}/v1"

    async def models(self, request):
        entries = [{"id": name, "object": "model", "created": 0, "owned_by": "test"} for name in ("plain", "second")]
        return web.json_response({"object": "list", "data": entries})

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body | {"authorization": request.headers["Authorization"]})
        if set(body) - self.keys:
            return web.json_response({"error": {"message": f"unknown keys {set(body) - self.keys}"}}, status=400)
        said = self.answer(body)
        if isinstance(said, tuple):
            message = said[2] if said[2:] else "no"
            return web.json_response({"error": {"message": message}}, status=said[0], headers=said[1])
        message = {"role": "assistant"} | (said if isinstance(said, dict) else {"content": said})
        num = len(message["content"] or "")  # a token per character
        is_cut = num >= body.get("max_tokens", 10**9)
        choice = {"index": 0, "finish_reason": "length" if is_cut else "stop", "message": message}
        choice["text"] = message["content"]
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
        usage = {"prompt_tokens": 1, "completion_tokens": num, "total_tokens": 1 + num}
        return web.json_response(reply | {"usage": usage})

    async def start(self):
        app = web.Application()
        app.add_routes([web.get("/v1/models", self.models), web.post("/v1/chat/completions", self.chat)])
        app.add_routes([web.post("/v1/completions", self.chat)])
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", self.port).start()

    def __enter__(self):
        self.thread.start()
        asyncio.run_coroutine_threadsafe(self.start(), self.loop).result(10)
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
