# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Who may talk: networks, addresses and names, and resolvers that are slow, down or hostile."""

import threading
import time
from collections.abc import Sequence

import pytest

from nixl_telemetry.operations import allowed_peers
from nixl_telemetry.operations.allowed_peers import AllowedPeers, PeerNotAllowedError, addresses_of
from tests.support.peers import wait_until
from tests.support.threads import cannot_start, threads_started


def resolver(**names: Sequence[str]) -> allowed_peers.Lookup:
    """Knows these names, with dots for underscores."""

    def lookup(name: str) -> Sequence[str]:
        if name.replace(".", "_") not in names:
            raise OSError("unknown")
        return names[name.replace(".", "_")]

    return lookup


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.1.2.3", True),
        ("11.0.0.1", False),
        ("192.0.2.7", True),
        ("192.0.2.8", False),
        ("::ffff:10.1.2.3", True),
        ("::ffff:11.0.0.1", False),
        ("fd00::7", True),
        ("fd00::7%eth0", True),
        ("fe80::1", False),
        ("no address", False),
        ("", False),
    ],
)
def test_addresses(address: str, expected: bool) -> None:
    """In a network or not, IPv4 also where IPv6 wraps it; nothing is looked up."""
    allowed = AllowedPeers(["10.0.0.0/8", "192.0.2.7", "fd00::/8"], resolver())

    assert allowed.admits(address) is expected


def test_names_are_looked_up_behind_the_caller() -> None:
    """The first question gets no answer yet; an unknown address makes them be looked up again, but not all the time."""
    lookups: list[str] = []

    def lookup(name: str) -> Sequence[str]:
        lookups.append(name)
        return ["192.0.2.1"]

    allowed = AllowedPeers(["Prefill.example."], lookup)

    assert allowed.admits("192.0.2.1") is None
    assert wait_until(lambda: allowed.admits("192.0.2.1") is True)
    assert lookups == ["prefill.example"]
    assert [allowed.admits("192.0.2.9") for _ in range(100)] == [False] * 100
    assert lookups == ["prefill.example"]


def test_names_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with another address than before is noticed; a resolver that is down changes nothing."""
    monkeypatch.setattr(allowed_peers, "_RETRY_SECONDS", 0.0)
    names = {"prefill": ["192.0.2.1"]}

    def lookup(name: str) -> Sequence[str]:
        return resolver(**names)(name)

    allowed = AllowedPeers(["prefill"], lookup)
    assert wait_until(lambda: allowed.admits("192.0.2.1") is True)

    names["prefill"] = ["192.0.2.2"]
    assert wait_until(lambda: allowed.admits("192.0.2.2") is True)
    assert not allowed.admits("192.0.2.1")
    names.clear()
    monkeypatch.setattr(allowed_peers, "_FRESH_SECONDS", 0.0)
    for _ in range(20):
        assert allowed.admits("192.0.2.2") is True
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        # By name on the list: its owner is trusted with what it means.
        ("decode.example", "decode.example"),
        ("DECODE.example.", "DECODE.example."),
        # By address only: what was checked is what is connected to.
        ("inside.example", "10.0.0.9"),
        # At the address of a name on the list.
        ("192.0.2.1", "192.0.2.1"),
    ],
)
def test_destinations(host: str, expected: str) -> None:
    """What to connect to."""
    lookup = resolver(inside_example=["10.0.0.9", "fd00::1"], decode_example=["192.0.2.1"])

    assert AllowedPeers(["10.0.0.0/8", "decode.example"], lookup).destination(host) == expected


@pytest.mark.parametrize(
    "host", ["11.0.0.1", "outside.example", "both.example", "v6.example", "nowhere", "", "a" * 999]
)
def test_destinations_that_are_refused(host: str) -> None:
    """A name of which one address is outside is outside; the message names host, list and setting."""
    lookup = resolver(
        outside_example=["11.0.0.1"], both_example=["10.0.0.1", "11.0.0.1"], v6_example=["fd00::1"], decode=["10.9.9.9"]
    )

    with pytest.raises(PeerNotAllowedError) as caught:
        AllowedPeers(["10.0.0.0/8", "fd00::/8", "decode"], lookup).destination(host)

    text = str(caught.value)
    assert all(part in text for part in (host[:256], "10.0.0.0/8, fd00::/8, decode", "allowed_peers", "remote_host"))


def test_a_thread_that_could_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process may have no more of them for a while."""
    allowed = AllowedPeers(["decode.example"], lambda name: ["10.0.0.1"])
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", cannot_start)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            allowed.destination("10.0.0.1")

    assert allowed.destination("10.0.0.1") == "10.0.0.1"


def test_slow_resolvers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits longer than the limit, and threads that hang are bounded."""
    monkeypatch.setattr(allowed_peers, "LOOKUP_SECONDS", 0.02)
    end = threading.Event()

    def hang(name: str) -> Sequence[str]:
        end.wait(10)
        return ["10.0.0.1"]

    allowed = AllowedPeers(["10.0.0.0/8", "decode.example"], hang)
    started = threads_started()
    start = time.monotonic()
    for count in range(20):
        with pytest.raises(PeerNotAllowedError):
            allowed.destination(f"name-{count}.example")
        with pytest.raises(PeerNotAllowedError):
            allowed.destination("11.0.0.1")

    assert time.monotonic() - start < 5
    assert len(started()) <= allowed_peers._LOOKUPS_LIMIT + 1
    end.set()
    assert wait_until(lambda: not started())
    assert allowed.destination("name.example") == "10.0.0.1"


def test_the_system_resolver() -> None:
    """Whatever is no name is no more than unknown."""
    assert "127.0.0.1" in addresses_of("localhost")
    for name in ("a" * 64 + ".example", "\0", "..", "no.such.name.invalid"):
        with pytest.raises(OSError, match=r"."):
            addresses_of(name)
