# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What Alertmanager tells, received."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from nixl_telemetry.testbed import LOOPBACK


@dataclass
class Received:
    """Alerts that came, by name and by fingerprint; each one's latest status."""

    _status: dict[str, dict[str, str]] = field(default_factory=dict)
    _fired: set[tuple[str, str]] = field(default_factory=set)
    notifications: int = 0

    def add(self, notification: Mapping[str, Any]) -> None:
        """Take one notification."""
        self.notifications += 1
        for alert in notification["alerts"]:
            name, fingerprint = alert["labels"]["alertname"], alert["fingerprint"]
            self._status.setdefault(name, {})[fingerprint] = alert["status"]
            if alert["status"] == "firing":
                self._fired.add((name, fingerprint))

    def delivered(self, name: str) -> bool:
        """Whether it came as firing."""
        return any(fired == name for fired, _ in self._fired)

    def resolved(self, name: str) -> bool:
        """Whether all that came as firing came as resolved, and none fires again."""
        fired = [fingerprint for alert, fingerprint in self._fired if alert == name]
        return bool(fired) and all(self._status[name][fingerprint] == "resolved" for fingerprint in fired)

    def names(self) -> set[str]:
        """Of all alerts that came as firing."""
        return {name for name, _ in self._fired}


class Webhook:
    """A receiver on loopback, for Alertmanager's ``webhook_configs``.

    Attributes:
        url: Where notifications go.
    """

    def __init__(self) -> None:
        """Listens at once, until it is closed."""
        self._received = Received()
        self._lock = threading.Lock()
        received, lock = self._received, self._lock

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    received.add(body)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
                """Nothing: requests are kept, not logged."""

        self._server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
        self.url = f"http://{LOOPBACK}:{self._server.server_address[1]}/"
        self._thread = threading.Thread(target=self._server.serve_forever, name="webhook", daemon=True)
        self._thread.start()

    def delivered(self, name: str) -> bool:
        """See ``Received``."""
        with self._lock:
            return self._received.delivered(name)

    def resolved(self, name: str) -> bool:
        """See ``Received``."""
        with self._lock:
            return self._received.resolved(name)

    def names(self) -> set[str]:
        """See ``Received``."""
        with self._lock:
            return self._received.names()

    def close(self) -> None:
        """Listens no more."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "Webhook":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
