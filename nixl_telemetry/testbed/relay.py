# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A TCP relay on loopback, whose connections can be cut and led elsewhere."""

from __future__ import annotations

import contextlib
import socket
import threading
from types import TracebackType
from typing import Final

from nixl_telemetry.testbed.ports import LOOPBACK, PortReservation

_CONNECT_SECONDS: Final = 5.0
_BYTES: Final = 1 << 16


class Relay:
    """Passes connections on, until it is cut: then there are none, and new ones are refused.

    Attributes:
        port: Where it takes connections.
        sent: Bytes that clients have sent through it.
    """

    def __init__(self, target: int) -> None:
        """Reserves the port; ``restore`` takes connections.

        Args:
            target: The port that it passes them on to.
        """
        self._target = target
        self._reservation = PortReservation()
        self.port = self._reservation.ports[0]
        self.sent = 0
        self._listener: socket.socket | None = None
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()

    def restore(self) -> None:
        """Takes connections, again."""
        if self._listener is not None:
            return
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((LOOPBACK, self.port))
        listener.listen()
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def cut(self) -> None:
        """Drops all connections and refuses new ones."""
        with self._lock:
            listener, self._listener = self._listener, None
            connections = list(self._connections)
        for dropped in (*connections, *([listener] if listener is not None else [])):
            _end(dropped)
        if listener is not None:
            listener.close()

    def lead_to(self, target: int) -> None:
        """Passes connections on to another port; drops those to the one before."""
        if target != self._target:
            self._target = target
            self.cut()
            self.restore()

    def __enter__(self) -> Relay:
        self.restore()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()
        self._reservation.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((LOOPBACK, self._target), _CONNECT_SECONDS)
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._connections |= {near, far}
                is_cut = self._listener is not listener
            for source, sink, is_sent in ((near, far, True), (far, near, False)):
                threading.Thread(target=self._pass_on, args=(source, sink, is_sent), daemon=True).start()
            if is_cut:
                _end(near)
                _end(far)

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_sent: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_BYTES):
                if is_sent:
                    # Before it arrives: whoever has seen that it did shall find it counted.
                    with self._lock:
                        self.sent += len(data)
                sink.sendall(data)
        _end(sink)
        with self._lock:
            self._connections.discard(source)
        # Each thread closes what it reads; the other one has read the end of it by then.
        source.close()


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
