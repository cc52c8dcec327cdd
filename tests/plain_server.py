"""A server with what every OpenAI-compatible server has, and nothing else, in a thread of its own."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer


class PlainServer(HTTPServer):
    """answer(body) -> the text of the reply, or a dict: the whole reply. also: further keys that it accepts. It answers
    one request at a time."""

    request_queue_size = 128

    def __init__(self, answer, also=()):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        # Of a request, and no more: no n, nothing that only vLLM knows.
        self.keys = {"model", "messages", "prompt", "temperature", "top_p", "max_tokens", "stop", "tools"}.union(also)
        self.bodies = []
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=[0.02], daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(200, {"data": [{"id": name, "object": "model"} for name in ("plain", "second")]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body | {"authorization": self.headers["Authorization"]})
        if body.keys() - self.server.keys:
            return self.reply(400, {"error": {"message": f"unknown keys {body.keys() - self.server.keys}"}})
        text = self.server.answer(body)
        if isinstance(text, dict):
            return self.reply(200, text)
        num = len(text)  # a token per character
        choice = {"index": 0, "finish_reason": "length" if num >= body.get("max_tokens", 10**9) else "stop"}
        choice |= {"message": {"role": "assistant", "content": text}, "text": text}
        usage = {"prompt_tokens": 1, "completion_tokens": num, "total_tokens": 1 + num}
        head = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
        self.reply(200, head | {"choices": [choice], "usage": usage})

    def reply(self, status, answer):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args):
        pass
