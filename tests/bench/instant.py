"""A server that answers at once with what it was told to: `python instant.py PORT REPLIES.json`, {path: body}.

run.py measures the orchestrator against it, so it does next to nothing itself: it parses the length alone."""

import asyncio
import json
import re
import sys


class Http(asyncio.Protocol):
    replies, data = {}, b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.data += data
        while b"\r\n\r\n" in self.data:
            head, _, rest = self.data.partition(b"\r\n\r\n")
            length = int((re.search(rb"(?i)content-length: *(\d+)", head) or [0, 0])[1])
            if len(rest) < length:
                return
            self.data = rest[length:]
            answer = self.replies[head.split(b" ", 2)[1].decode()]
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: ")
            self.transport.write(str(len(answer)).encode() + b"\r\n\r\n" + answer)


async def main(port, file):
    with open(file) as f:
        Http.replies = {path: json.dumps(body).encode() for path, body in json.load(f).items()}
    server = await asyncio.get_running_loop().create_server(Http, "127.0.0.1", int(port))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
