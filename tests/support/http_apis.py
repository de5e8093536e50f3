# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The HTTP API of an instance, with what vLLM answers."""

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Asked(NamedTuple):
    """A request that needs more than an answer by its path."""

    method: str
    headers: Message
    body: bytes


class Reply(NamedTuple):
    """An answer that is more than its body."""

    status: int
    body: str = ""
    headers: tuple[tuple[str, str], ...] = ()


@contextlib.contextmanager
def http_api(answers: Mapping[str, Any], requests: list[str] | None = None) -> Iterator[str]:
    """Answers by path, and with 404 any other; yields the URL.

    Args:
        answers: By path, without the query: a text, a :class:`Reply`, what becomes JSON, or a function that makes one
            of these of an :class:`Asked`. All but functions answer GET only.
        requests: Collects method and path of every request.
    """
    asked = [] if requests is None else requests

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            answer = answers.get(self.path.partition("?")[0])
            if callable(answer):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = answer(Asked(self.command, self.headers, body))
            elif self.command != "GET":
                answer = Reply(405)
            if not isinstance(answer, Reply):
                text = answer if isinstance(answer, str) else json.dumps(answer)
                answer = Reply(404 if answer is None else 200, text)
            self.send_response(answer.status)
            for name, value in answer.headers:
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # who asked has heard enough
                self.wfile.write(answer.body.encode())

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
