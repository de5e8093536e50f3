# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A relay passes connections on, cuts them, and leads them elsewhere."""

import itertools
import socket

import pytest

from nixl_telemetry.testbed.relay import Relay


def test_connections_are_cut_and_restored() -> None:
    """They pass both ways, are dropped when it is cut, and refused until it is restored."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        with Relay(server.getsockname()[1]) as relay:
            for _ in range(2):
                with socket.create_connection(("127.0.0.1", relay.port), 10) as near, server.accept()[0] as far:
                    far.settimeout(10)
                    near.sendall(b"query")
                    assert far.recv(100) == b"query"
                    far.sendall(b"answer")
                    assert near.recv(100) == b"answer"
                    relay.cut()
                    assert near.recv(100) == b""
                    assert far.recv(100) == b""
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", relay.port), 10)
                relay.restore()


def test_connections_are_led_elsewhere() -> None:
    """Those to the port before are dropped; to lead them where they go already drops none."""
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        servers = (first, second, first)
        first.settimeout(10)
        second.settimeout(10)
        with Relay(first.getsockname()[1]) as relay:
            for server, other in itertools.pairwise(servers):
                with socket.create_connection(("127.0.0.1", relay.port), 10) as near, server.accept()[0] as far:
                    relay.lead_to(server.getsockname()[1])
                    near.sendall(b"query")
                    far.settimeout(10)
                    assert far.recv(100) == b"query"
                    relay.lead_to(other.getsockname()[1])
                    assert near.recv(100) == b""
                    assert far.recv(100) == b""
