# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Peers for handshakes, good and bad, on a real ZeroMQ socket."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
import zmq

Answer = Callable[[], list[bytes] | None]
"""Makes the frames of an answer; ``None`` for silence."""

CLOCK: Final = msgspec.msgpack.encode(12.5)
"""The second frame of a good answer: the peer's clock."""


@contextlib.contextmanager
def peer(answer: Answer) -> Iterator[int]:
    """Answers every message on a port of the loopback interface, in vLLM's framing, until the end."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if not socket.poll(20):
                continue
            identity, _, _query = socket.recv_multipart()
            frames = answer()
            if frames is not None:
                socket.send_multipart([identity, b"", *frames])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield port
    finally:
        stop.set()
        thread.join()
        socket.close(linger=0)
        context.term()


@contextlib.contextmanager
def closing_peer() -> Iterator[int]:
    """Accepts a connection and then closes its port without an answer."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        if socket.poll(5000):
            socket.recv_multipart()
        socket.close(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield port
    finally:
        thread.join()
        context.term()


def payload(compatibility_hash: Any, agent_metadata: Any) -> bytes:
    """A handshake payload, as it is on the wire."""
    return msgspec.msgpack.encode(
        {"compatibility_hash": compatibility_hash, "agent_metadata_bytes": msgspec.msgpack.encode(agent_metadata)}
    )


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Wait for a condition; false if it did not come true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
