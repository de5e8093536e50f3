# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Peers that misbehave, for tests of what happens then."""

from __future__ import annotations

import socket
import threading
from types import TracebackType

from nixl_telemetry.testbed.ports import LOOPBACK

_ACCEPT_SECONDS = 0.1


class BlackHole:
    """Accepts TCP connections, reads nothing and never answers.

    Attributes:
        port: Where it listens on loopback.
    """

    def __init__(self) -> None:
        """Listens at once, until ``close``."""
        self._listener = socket.create_server((LOOPBACK, 0))
        self._listener.settimeout(_ACCEPT_SECONDS)
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._connections: list[socket.socket] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="black-hole", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """The URL to give to an exporter."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def connections(self) -> int:
        """How many connections were accepted."""
        with self._lock:
            return len(self._connections)

    def close(self) -> None:
        """Drops all connections and stops listening."""
        self._closed.set()
        self._thread.join()
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                connection.close()

    def __enter__(self) -> BlackHole:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            with self._lock:
                self._connections.append(connection)
