"""A chat-completions server in a thread, for the tests: real HTTP, with the failures real servers have."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# What a test's rule may say of a request: a dict (the reply), or one of these.
Reply = dict[str, Any] | tuple[int, dict[str, str], str] | bytes | float


def completion(text: str | None, tokens: int | None = 5, finish: str = "stop", **message: Any) -> dict[str, Any]:
    reply: dict[str, Any] = {
        "choices": [{"message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}]
    }
    return reply if tokens is None else {**reply, "usage": {"completion_tokens": tokens}}


class ChatServer:
    """`rule(prompt, attempt, body)` decides: a dict is sent, (status, headers, text) is an error, bytes are sent raw, a
    number is a silence of so many seconds."""

    def __init__(
        self, rule: Callable[[str, int, dict[str, Any]], Reply], models: tuple[str, ...] = ("served",)
    ) -> None:
        self.rule, self.models = rule, models
        self.attempts: Counter[str] = Counter()
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()
        self.url = ""


class Listener(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is part of a test, not something to tell on the terminal."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving(server: ChatServer) -> Iterator[ChatServer]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.answer(200, {}, json.dumps({"data": [{"id": name} for name in server.models]}).encode())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["messages"][0]["content"]
            with server.lock:
                server.attempts[prompt] += 1
                attempt = server.attempts[prompt]
                server.bodies.append(body)
                server.headers.append(dict(self.headers))
                server.times.append(time.monotonic())
                server.under_way += 1
                server.most_under_way = max(server.most_under_way, server.under_way)
            reply = server.rule(prompt, attempt, body)
            with server.lock:  # before the answer leaves: the client's next request may overtake what follows it
                server.under_way -= 1
            with suppress(BrokenPipeError):
                self.say(reply)

        def say(self, reply: Reply) -> None:
            if isinstance(reply, float):
                time.sleep(reply)
            elif isinstance(reply, bytes):
                self.answer(200, {}, reply)
            elif isinstance(reply, tuple):
                status, headers, text = reply
                self.answer(status, headers, text.encode())
            else:
                self.answer(200, {}, json.dumps(reply).encode())

        def answer(self, status: int, headers: dict[str, str], data: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    listener = Listener(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    server.url = f"http://127.0.0.1:{listener.server_port}/v1"
    thread = threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        listener.server_close()
