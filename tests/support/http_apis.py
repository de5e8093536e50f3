# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The HTTP API of an instance, with what vLLM answers to GET."""

import contextlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@contextlib.contextmanager
def http_api(answers: Mapping[str, Any], requests: list[str] | None = None) -> Iterator[str]:
    """Answers GET by path, JSON where it is no text, and with 404 any other; yields the URL.

    Args:
        answers: By path, without the query.
        requests: Collects method and path of every request.
    """
    asked = [] if requests is None else requests

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            answer = answers.get(self.path.partition("?")[0])
            body = answer if isinstance(answer, str) else json.dumps(answer)
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(body.encode())

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
