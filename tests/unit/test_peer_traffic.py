# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Peers: what became of each one's transfers, in bounded labels, and which is slow."""

import pytest

from nixl_telemetry.operations import peer_traffic
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.operations.peer_traffic import PeerTraffic
from nixl_telemetry.signals.semconv import ErrorType
from tests.support.observed import Observed

NEAR, FAR = Peer("near", "10.0.0.7", 5600), Peer("far", "10.0.0.8", 5600)
NEIGHBOUR = Peer("neighbour", "10.0.0.7", 5601)
MIB = 1 << 20


@pytest.fixture
def traffic(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> PeerTraffic:
    """Of a worker."""
    monkeypatch.setattr(peer_traffic, "unix_offset_ns", lambda: 0)
    return PeerTraffic(observed.telemetry)


def test_transfers(traffic: PeerTraffic, observed: Observed) -> None:
    """Success, failure by cause, bytes and time of those that succeeded, and when that was."""
    for of_step in (
        traffic.transferred(NEAR, None, 2, 400, 0.75, 8_000_000_000),
        traffic.transferred(NEAR, ErrorType.TRANSFER_FAILED, 1, 0, 9.0, 9_000_000_000),
        traffic.transferred(FAR, ErrorType.TRANSFER_FAILED, 1, 0, 1.0, 9_000_000_000),
    ):
        observed.telemetry.record_all(of_step)
    traffic.shook_hands(FAR, ErrorType.COMPAT_MISMATCH)

    near, far = "10.0.0.7:5600", "10.0.0.8:5600"
    assert observed.updates() == {
        ("nixl_peer_transfers_total", near, ""): 2,
        ("nixl_peer_transfers_total", near, "transfer_failed"): 1,
        ("nixl_peer_transfers_total", far, "transfer_failed"): 1,
        ("nixl_peer_transfer_bytes_total", near): 400,
        ("nixl_peer_transfer_seconds_total", near): 0.75,
        ("nixl_peer_last_success_timestamp_seconds", near): 8.0,
        ("nixl_peer_handshakes_total", far, "compat_mismatch"): 1,
    }


def test_labels_are_bounded(traffic: PeerTraffic, observed: Observed) -> None:
    """A client names peers as it likes."""
    labels = {traffic.label(Peer(str(number), "10.0.0.9", number)) for number in range(1000)}

    assert len(labels) == PeerTraffic.LIMIT + 1
    assert "other" in labels
    assert traffic.label(Peer("nowhere")) == "unknown"


def moved(traffic: PeerTraffic, peer: Peer, gigabytes_per_second: float, times: int = 16, size: int = 64 * MIB) -> None:
    """Large transfers, whose end was seen at once."""
    for _ in range(times):
        traffic.measure(peer, size, size / gigabytes_per_second / 1e9, 0.0)


def test_a_peer_that_became_slow(traffic: PeerTraffic, observed: Observed) -> None:
    """Told once, with both figures."""
    moved(traffic, NEAR, 10.0)
    moved(traffic, NEAR, 3.0)
    assert observed.messages() == []
    moved(traffic, NEAR, 2.0)
    moved(traffic, NEAR, 1.0)

    (line,) = observed.messages()
    assert line.startswith("event=nixl.peer.slow ")
    assert "server.address=10.0.0.7 server.port=5600" in line
    assert "nixl.peer.bandwidth=2000000000 nixl.peer.bandwidth.before=10000000000" in line


def test_a_peer_that_is_slower_than_its_neighbour(traffic: PeerTraffic, observed: Observed) -> None:
    """On the same host; another host says nothing."""
    moved(traffic, FAR, 40.0)
    moved(traffic, NEAR, 1.0)
    assert observed.messages() == []
    moved(traffic, NEIGHBOUR, 8.0)
    moved(traffic, NEAR, 1.0)

    (line,) = observed.messages()
    assert "nixl.remote.engine.id=near" in line


@pytest.mark.parametrize(("size", "delay_share"), [(MIB - 1, 0.0), (64 * MIB, 0.9)], ids=["small", "seen late"])
def test_what_tells_nothing_of_the_network(
    traffic: PeerTraffic, observed: Observed, size: int, delay_share: float
) -> None:
    """Small transfers, and those whose end was seen by a later step."""
    moved(traffic, NEAR, 10.0)
    for _ in range(64):
        seconds = size / 1e8
        traffic.measure(NEAR, size, seconds, delay_share * seconds)

    assert observed.messages() == []
