# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Peers, as clients' requests name them."""

import pytest

from nixl_telemetry.operations.peer import Peer, PeerBook


@pytest.mark.parametrize(
    ("port", "number"),
    [
        (5600, 5600),
        ("5600", 5600),
        (65_535, 65_535),
        (65_536, 0),
        (0, 0),
        (-1, 0),
        (1 << 80, 0),
        ("9" * 5_000, 0),
        ("x", 0),
        (None, 0),
        (5600.5, 0),
        ([5600], 0),
    ],
)
def test_ports(port: object, number: int) -> None:
    """Whatever a client writes there, what becomes of it is a port, or 0."""
    assert PeerBook().at("engine", "host", port) == Peer("engine", "host", number)


def test_the_same_peer_again() -> None:
    """Whom the handshake has met; another address is another peer."""
    peers = PeerBook()
    met = Peer("engine", "host", 5600)
    peers.meet(met)

    assert peers.at("engine", "host", 5600) is met
    assert peers.at("engine", "host", 5601) == Peer("engine", "host", 5601)
    assert peers.find("engine") is met
    assert peers.find("other") == Peer("other")
