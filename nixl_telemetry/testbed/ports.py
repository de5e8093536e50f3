# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Loopback ports that two callers on one machine never get at the same time."""

from __future__ import annotations

import socket
from types import TracebackType

LOOPBACK = "127.0.0.1"
_ATTEMPTS = 200


class PortReservation:
    """Holds loopback ports until closed, while the server they are meant for can bind them.

    Each port is bound, never listened on, by a socket that asked for ``SO_REUSEADDR`` only after the
    bind. The kernel then gives the port to nobody else, neither as a free port nor as the source port
    of a connection, yet a server that sets ``SO_REUSEADDR`` (uvicorn, ZeroMQ and Rust's listeners all
    do) may bind it.

    A vLLM instance uses one side-channel port whatever its tensor-parallel size; data-parallel rank
    *n* adds *n* to it, so ask for *consecutive* ports there.
    """

    def __init__(self, count: int = 1, *, consecutive: bool = False) -> None:
        """Reserves *count* ports.

        Args:
            count: How many.
            consecutive: Whether they must follow each other.

        Raises:
            OSError: No such ports are free.
        """
        self._sockets = _bind_consecutive(count) if consecutive else [_bind(0) for _ in range(count)]
        self.ports: tuple[int, ...] = tuple(int(held.getsockname()[1]) for held in self._sockets)
        for held in self._sockets:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def close(self) -> None:
        """Gives the ports back; harmless when called again."""
        for held in self._sockets:
            held.close()

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def unreachable_port() -> PortReservation:
    """Returns a reservation of one port on which nothing listens: connections to it are refused."""
    return PortReservation()


def _bind(port: int) -> socket.socket:
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.bind((LOOPBACK, port))
    except OSError:
        held.close()
        raise
    return held


def _bind_consecutive(count: int) -> list[socket.socket]:
    for _ in range(_ATTEMPTS):
        held = [_bind(0)]
        first = int(held[0].getsockname()[1])
        try:
            held.extend(map(_bind, range(first + 1, first + count)))
        except (OSError, OverflowError):
            for taken in held:
                taken.close()
        else:
            return held
    raise OSError(f"no {count} consecutive free ports on {LOOPBACK} after {_ATTEMPTS} attempts")
