# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Messages to a side channel that are no handshake."""

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import msgspec
import zmq

from nixl_telemetry.testbed import LOOPBACK

_QUERY: Final = b"get_meta_msg"
_UNKNOWN_RANK: Final = 99
_SECONDS: Final = 5.0
_RAW_EVERY: Final = 10
"""Every so many messages, one comes on a connection of its own and is not even ZeroMQ."""
_encode = msgspec.msgpack.encode
MESSAGES: Final = (
    b"",
    b"\xff\xfejunk",
    b"\xc1",  # the one byte that MessagePack never uses
    b"\x91" * 2000,  # nested deeply
    b"\xdd\xff\xff\xff\xff",  # an array of four thousand million elements, of which none comes
    b"\x00" * 4000,
    _encode("get_meta_msg"),
    _encode((b"other_msg", 0, 0)),
    _encode((_QUERY,)),
    _encode((_QUERY, "zero", None)),
    _encode({"get_meta_msg": 0}),
)
"""As messages of ZeroMQ."""
RAW: Final = (
    b"GET /metrics HTTP/1.1\r\nHost: prefill\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(64)),  # the begin of TLS
    bytes(64),
    b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48) + b"\xff" * 32,  # a greeting, and then no command
)
"""As bytes on a connection."""


def flood(port: int, count: int, seconds: float) -> int:
    """Send so many malformed messages, evenly over a time; how many could be sent.

    Args:
        port: Of a side channel on loopback.
        count: How many.
        seconds: In which time.
    """
    messages, raw = itertools.cycle(MESSAGES), itertools.cycle(RAW)
    start = time.monotonic()
    sent = 0
    with _socket(port, zmq.DEALER) as client:
        for number in range(count):
            time.sleep(max(0.0, start + number * seconds / count - time.monotonic()))
            try:
                if number % _RAW_EVERY:
                    client.send_multipart([b"", next(messages)])
                else:
                    _send_raw(port, next(raw))
            except (zmq.ZMQError, OSError):
                continue
            sent += 1
        # What is in ZeroMQ's hands is still to leave.
        client.setsockopt(zmq.LINGER, int(_SECONDS * 1e3))
    return sent


class Flood:
    """A flood on a thread of its own; it begins at once.

    Args:
        port: See :func:`flood`.
        count: See :func:`flood`.
        seconds: See :func:`flood`.
    """

    def __init__(self, port: int, count: int, seconds: float) -> None:
        self.sent = 0
        self.seconds = 0.0
        self._thread = threading.Thread(target=self._run, args=(port, count, seconds), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until all is sent."""
        self._thread.join()

    def _run(self, port: int, count: int, seconds: float) -> None:
        start = time.monotonic()
        self.sent = flood(port, count, seconds)
        self.seconds = time.monotonic() - start


def ask_for_an_unknown_rank(port: int) -> None:
    """Send one sound query for a rank that no instance here has: it ends a stock instance's listener for good."""
    with _socket(port, zmq.REQ) as client:
        client.send(_encode((_QUERY, 0, _UNKNOWN_RANK)))
        client.poll(int(_SECONDS * 1e3))


@contextmanager
def _socket(port: int, kind: int) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    try:
        client = context.socket(kind)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.SNDTIMEO, int(_SECONDS * 1e3))
        client.connect(f"tcp://{LOOPBACK}:{port}")
        yield client
        client.close()
    finally:
        context.destroy()


def _send_raw(port: int, data: bytes) -> None:
    with socket.create_connection((LOOPBACK, port), _SECONDS) as connection:
        connection.sendall(data)
