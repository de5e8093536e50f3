# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Ports are held against others and free for the server they are meant for."""

from __future__ import annotations

import socket

import pytest

from nixl_telemetry.testbed.ports import LOOPBACK, PortReservation, unreachable_port


def _listen_as_a_server_does(port: int) -> socket.socket:
    server = socket.socket()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind((LOOPBACK, port))
    server.listen()
    return server


def test_two_holders_never_share_a_port() -> None:
    with PortReservation(50) as one, PortReservation(50) as two:
        assert len({*one.ports, *two.ports}) == 100


def test_a_held_port_is_not_given_to_others() -> None:
    with PortReservation() as held, socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((LOOPBACK, held.ports[0]))


def test_the_server_can_listen_while_the_port_is_held() -> None:
    with (
        PortReservation() as held,
        _listen_as_a_server_does(held.ports[0]) as server,
        socket.create_connection((LOOPBACK, held.ports[0])) as client,
        server.accept()[0] as accepted,
    ):
        assert client.getsockname() == accepted.getpeername()


def test_the_server_can_start_again_on_the_same_port() -> None:
    with PortReservation() as held:
        for _ in range(2):
            _listen_as_a_server_does(held.ports[0]).close()


def test_consecutive_ports_follow_each_other() -> None:
    with PortReservation(4, consecutive=True) as held:
        assert list(held.ports) == list(range(held.ports[0], held.ports[0] + 4))


def test_closing_gives_the_port_back() -> None:
    held = PortReservation()
    held.close()
    held.close()

    with socket.socket() as other:
        other.bind((LOOPBACK, held.ports[0]))


def test_an_unreachable_port_refuses() -> None:
    with unreachable_port() as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection((LOOPBACK, held.ports[0]))
