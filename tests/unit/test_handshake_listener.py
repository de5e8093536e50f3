# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The parts of the handshake listener that a client cannot bring about at will."""

import errno
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from nixl_telemetry.operations import handshake_request
from nixl_telemetry.operations.handshake_request import Client, HandshakeRequests
from nixl_telemetry.seam.listener import HandshakeListener
from nixl_telemetry.seam.zmtp import GREETING, READY, encode
from nixl_telemetry.signals.semconv import RequestResult
from tests.support.observed import Observed


@pytest.fixture
def listener(observed: Observed) -> Iterator[HandshakeListener]:
    """One that is not bound."""
    errors: list[Exception] = []
    payloads = {(0, 0): b"payload"}
    listener = HandshakeListener(b"word", payloads, HandshakeRequests(observed.telemetry), None, errors.append)
    yield listener
    listener.close()
    assert errors == []


@pytest.mark.parametrize(
    ("host", "family"),
    [
        ("127.0.0.1", socket.AF_INET),
        ("localhost", socket.AF_INET),
        ("0.0.0.0", socket.AF_INET),
        ("*", socket.AF_INET),
        ("::1", socket.AF_INET6),
        ("::", socket.AF_INET6),
    ],
)
def test_where_it_listens(listener: HandshakeListener, host: str, family: socket.AddressFamily) -> None:
    """As vLLM's own: IPv6 for an IPv6 address; all addresses take IPv4 too."""
    try:
        listener.bind(host, 0)
    except OSError as error:
        if family == socket.AF_INET6:
            pytest.skip(f"no IPv6 here: {error}")
        raise
    server = listener._server
    assert server is not None
    assert server.family == family
    with socket.create_connection(("::1" if host == "::1" else "127.0.0.1", server.getsockname()[1]), 5):
        pass


def test_an_address_that_cannot_be_had(listener: HandshakeListener) -> None:
    """An OSError, and nothing is left open."""
    with pytest.raises(OSError, match=r"."):
        listener.bind("192.0.2.1", 0)
    with pytest.raises(OSError, match=r"."):
        listener.bind("no.such.name.invalid", 0)
    assert listener._server is None


class _Exhausted:
    """A server socket of a process that may open no more files."""

    def accept(self) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    def close(self) -> None:
        pass


def test_no_more_files(listener: HandshakeListener) -> None:
    """The connection that was silent for longest makes room; without one, nothing spins."""
    listener.bind("127.0.0.1", 0)
    server = listener._server
    assert server is not None
    with socket.create_connection(server.getsockname(), 5):
        stop = threading.Event()
        until(lambda: listener._accept(stop, time.monotonic()), lambda: len(listener._clients) == 1)
        listener._selector.unregister(server)
        server.close()
        listener._server = _Exhausted()  # type: ignore[assignment]

        listener._accept(stop, time.monotonic())
        assert listener._clients == {}
        start = time.monotonic()
        listener._accept(stop, time.monotonic())
        assert time.monotonic() - start > 0.01


HELLO = GREETING + READY.replace(b"ROUTER", b"DEALER")
QUERY, UNKNOWN = (b"".join(encode([b"", msgspec.msgpack.encode((b"word", 0, rank))])) for rank in (0, 1))
SENT: dict[str, tuple[list[bytes], bool]] = {
    "a query in parts": ([HELLO[:10], HELLO[10:64], HELLO[64:], QUERY[:2], QUERY[2:]], False),
    "queries, each after an answer": ([HELLO, *[QUERY] * 50], False),
    "a bad message": ([HELLO, b"\0\0"], True),
    "many queries at once": ([HELLO, QUERY * 20], True),
    "many commands at once": ([HELLO + b"\x04\0" * 20], True),
    "one byte after the other": ([HELLO, b"\0", b"\x64", *[b"x"] * 20], True),
    "one command after the other": ([HELLO, *[b"\x04\0"] * 20], True),
    "unknown ranks": ([HELLO, *[UNKNOWN] * 20], True),
}


@pytest.mark.parametrize("kind", SENT)
def test_who_has_to_wait_for_others(listener: HandshakeListener, kind: str) -> None:
    """Who sends what is bad or much. An initiator is never among them, however long it goes on."""
    parts, expected = SENT[kind]
    listener.bind("127.0.0.1", 0)
    server = listener._server
    assert server is not None
    with socket.create_connection(server.getsockname(), 5) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        until(lambda: listener._accept(threading.Event(), time.monotonic()), lambda: len(listener._clients) == 1)
        (client,) = listener._clients.values()
        for part in parts:
            connection.sendall(part)
            select.select([client.socket], [], [], 5)
            listener._turn(client, time.monotonic())

        assert client.is_suspect == expected


def until(act: Callable[[], None], condition: Callable[[], bool]) -> None:
    """Do something until it had its effect."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        act()
    assert condition()


def test_lines_of_refusals(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each result in a while, with how many there were; audited are addresses that are not allowed, once."""
    audited: list[Any] = []
    monkeypatch.setattr(observed.telemetry, "audit", lambda make: audited.append(make()))
    monkeypatch.setattr(handshake_request, "_AUDITED_LIMIT", 3)
    now = [1000.0]
    monkeypatch.setattr(handshake_request, "time", SimpleNamespace(monotonic=lambda: now[0]))
    requests = HandshakeRequests(observed.telemetry)
    for count in range(10):
        requests.refused(RequestResult.MALFORMED, Client("192.0.2.1", 1), "bad")
        requests.refused(RequestResult.NOT_ALLOWED, Client(f"192.0.2.{count // 2}", 1), "no")
    now[0] += handshake_request.LOG_SECONDS
    requests.refused(RequestResult.MALFORMED, Client("192.0.2.1", 1), "bad")
    assert requests.unreported
    requests.report()
    assert not requests.unreported
    monkeypatch.undo()

    counts = [line.split("nixl.handshake_request.count=")[1].split()[0] for line in observed.messages()]
    assert counts == ["1", "1", "10"]
    assert [record.attributes["client.address"] for record in audited] == ["192.0.2.0", "192.0.2.1", "192.0.2.2"]
    assert observed.updates() == {
        ("nixl_handshake_requests_total", "malformed"): 11,
        ("nixl_handshake_requests_total", "not_allowed"): 10,
    }
