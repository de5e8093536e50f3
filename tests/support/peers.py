# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Peers for handshakes, good and bad, on a real ZeroMQ socket."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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


def payload(compatibility_hash: Any, agent_metadata: Any, statement: bytes | None = None) -> bytes:
    """A handshake payload, as it is on the wire; an instrumented instance adds its encoded statement."""
    fields = {"compatibility_hash": compatibility_hash, "agent_metadata_bytes": msgspec.msgpack.encode(agent_metadata)}
    if statement is not None:
        fields["nixl_telemetry"] = msgspec.Raw(statement)
    return msgspec.msgpack.encode(fields)


@dataclass
class Listener:
    """A stock instance's handshake listener."""

    address: str
    queries: list[tuple[int, int]] = field(default_factory=list)
    """The ranks that it was asked for, (pp, tp) each."""
    killed_by: bytes | None = None
    """The message that ended it."""


@contextlib.contextmanager
def listener(payloads: Mapping[tuple[int, int], bytes], host: str = "127.0.0.1", port: int = 0) -> Iterator[Listener]:
    """Serves as ``_nixl_handshake_listener`` of vLLM 0.32 does, which one bad query ends for good.

    The test fails if that happens.
    """
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.IPV6, int(":" in host))
    bracketed = f"[{host}]" if ":" in host else host
    router.bind(f"tcp://{bracketed}:{port or '*'}")
    endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
    state = Listener(endpoint.removeprefix("tcp://"))
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            if not router.poll(20):
                continue
            identity, _, message = router.recv_multipart()
            try:
                word, pp_rank, tp_rank = msgspec.msgpack.decode(message)
                answer = payloads[pp_rank, tp_rank]
                assert word == b"get_meta_msg"
            except Exception:
                state.killed_by = message
                break
            state.queries.append((pp_rank, tp_rank))
            router.send_multipart([identity, b"", answer, CLOCK])
        router.close(linger=0)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield state
    finally:
        stop.set()
        thread.join()
        context.term()
    assert state.killed_by is None, f"the message {state.killed_by!r} ended the listener"


@contextlib.contextmanager
def tcp_server(greet: Callable[[socket.socket], None]) -> Iterator[str]:
    """Calls back with each connection to a port of the loopback interface, which then stays open until the end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections = []

        def serve() -> None:
            with contextlib.suppress(OSError):  # closed at the end
                while True:
                    connection, _ = server.accept()
                    connections.append(connection)
                    greet(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in connections:
                connection.close()


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Wait for a condition; false if it did not come true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()
