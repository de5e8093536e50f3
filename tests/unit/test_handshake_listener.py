# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The parts of the handshake listener that a client cannot bring about at will."""

import errno
import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_telemetry.operations import handshake_request
from nixl_telemetry.operations.handshake_request import Client, HandshakeRequests
from nixl_telemetry.seam.listener import HandshakeListener
from nixl_telemetry.signals.semconv import RequestResult
from tests.support.observed import Observed


@pytest.fixture
def listener(observed: Observed) -> Iterator[HandshakeListener]:
    """One that is not bound."""
    errors: list[Exception] = []
    listener = HandshakeListener(b"word", {}, HandshakeRequests(observed.telemetry), None, errors.append)
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
        deadline = time.monotonic() + 5
        while not listener._clients and time.monotonic() < deadline:
            listener._accept(stop, time.monotonic())
        assert len(listener._clients) == 1
        listener._selector.unregister(server)
        server.close()
        listener._server = _Exhausted()  # type: ignore[assignment]

        listener._accept(stop, time.monotonic())
        assert listener._clients == {}
        start = time.monotonic()
        listener._accept(stop, time.monotonic())
        assert time.monotonic() - start > 0.01


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
    assert requests.has_news
    requests.report()
    assert not requests.has_news
    monkeypatch.undo()

    counts = [line.split("nixl.handshake_request.count=")[1].split()[0] for line in observed.messages()]
    assert counts == ["1", "1", "10"]
    assert [record.attributes["client.address"] for record in audited] == ["192.0.2.0", "192.0.2.1", "192.0.2.2"]
    assert observed.updates() == {
        ("nixl_handshake_requests_total", "malformed"): 11,
        ("nixl_handshake_requests_total", "not_allowed"): 10,
    }
