# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Asking a side channel: real sockets, and everything that may sit behind an address."""

import socket
import threading
import time

import pytest

from nixl_telemetry.cli.side_channel import Address, AddressError, Position, SideChannel, SideChannelError, insist
from tests.support.peers import closing_peer, free_port, listener, peer, tcp_server

PATIENT = 10.0
IMPATIENT = 0.3


def ask(address: str, timeout: float = PATIENT) -> bytes:
    with SideChannel(Address.parse(address), timeout) as channel:
        return channel.ask()


def problem(address: str, timeout: float = IMPATIENT) -> str:
    """What is said of an address behind which there is no instance."""
    with pytest.raises(SideChannelError) as caught:
        ask(address, timeout)
    text = str(caught.value)
    assert text.startswith(f"{address} ")
    assert "\n" not in text
    return text


# ------------------------------------------------------------------------------------------------------------ Addresses


@pytest.mark.parametrize(
    ("text", "host", "port", "shown"),
    [
        ("10.0.0.7:5600", "10.0.0.7", 5600, "10.0.0.7:5600"),
        ("prefill-0.vllm.svc:1", "prefill-0.vllm.svc", 1, "prefill-0.vllm.svc:1"),
        (" tcp://my_host:65535 ", "my_host", 65535, "my_host:65535"),
        ("[::1]:5600", "::1", 5600, "[::1]:5600"),
        ("tcp://[fd00:0::7]:5600", "fd00::7", 5600, "[fd00::7]:5600"),
        ("[fe80::1%eth0]:5600", "fe80::1%eth0", 5600, "[fe80::1%eth0]:5600"),
    ],
)
def test_an_address_is_read(text: str, host: str, port: int, shown: str) -> None:
    address = Address.parse(text)

    assert (address.host, address.port) == (host, port)
    assert str(address) == shown


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10.0.0.7", "has no port; the side channel's is 5600 by default"),
        ("", "has no port"),
        ("10.0.0.7:", "has the port ''"),
        ("10.0.0.7:0", "no number from 1 to 65535"),
        ("10.0.0.7:65536", "no number from 1 to 65535"),
        ("10.0.0.7:56000000000000000000000", "no number from 1 to 65535"),
        ("10.0.0.7:http", "has the port 'http'"),
        ("10.0.0.7:-1", "has the port '-1'"),
        ("10.0.0.7:٣", "has the port"),
        (":5600", "has no host name"),
        ("a b:5600", "has no host name"),
        ("a..b:5600", "a part is empty or too long"),
        ("a" * 64 + ":5600", "a part is empty or too long"),
        ("a;rm:5600", "has no host name"),
        ("::1:5600", "goes into brackets"),
        ("[::1]", "has no port"),
        ("[10.0.0.7]:5600", "no IPv6 address in the brackets"),
        ("[]:5600", "no IPv6 address in the brackets"),
        ("http://10.0.0.7:8000", "is a URL; give HOST:PORT of the side channel"),
    ],
)
def test_what_is_no_address_is_explained(text: str, said: str) -> None:
    with pytest.raises(AddressError) as caught:
        Address.parse(text)

    assert said in str(caught.value)


# -------------------------------------------------------------------------------------------------------------- Answers


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_first_rank_is_asked_and_no_other(host: str) -> None:
    """Also over IPv6."""
    with listener({(0, 0): b"payload"}, host) as there:
        assert ask(there.address) == b"payload"

    assert there.queries == [(0, 0)]


def test_a_name_is_resolved() -> None:
    with listener({(0, 0): b"payload"}) as there:
        assert ask(there.address.replace("127.0.0.1", "localhost")) == b"payload"


def test_several_ranks_are_asked_over_one_connection() -> None:
    with (
        listener({(0, 0): b"first", (1, 3): b"other"}) as there,
        SideChannel(Address.parse(there.address), PATIENT) as channel,
    ):
        assert [channel.ask(), channel.ask(Position(1, 3)), channel.ask()] == [b"first", b"other", b"first"]


def test_an_answer_without_the_clock_will_do() -> None:
    with peer(lambda: [b"payload"]) as port:
        assert ask(f"127.0.0.1:{port}") == b"payload"


# ----------------------------------------------------------------------------------------------------------- No answers


def test_nothing_listens() -> None:
    assert "refused the connection" in problem(f"127.0.0.1:{free_port()}")


def test_a_name_that_is_none() -> None:
    assert "does not resolve" in problem("no-such-host.invalid:5600")


def test_silence_without_zeromq() -> None:
    """An HTTP port says nothing until it is asked, and it is never asked."""
    with tcp_server(lambda connection: None) as address:
        assert "is it the HTTP port?" in problem(address)


def test_another_protocol() -> None:
    with tcp_server(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")) as address:
        assert "greets with b'SSH-2.0-Op', which is not ZeroMQ" in problem(address, PATIENT)


def test_a_connection_that_is_closed_at_once() -> None:
    with tcp_server(lambda connection: connection.close()) as address:
        assert "closed the connection without a word" in problem(address, PATIENT)


def test_half_a_greeting() -> None:
    with tcp_server(lambda connection: connection.sendall(b"\xff")) as address:
        assert "is not ZeroMQ" in problem(address)


def test_silence_of_zeromq() -> None:
    with peer(lambda: None) as port:
        assert "did not answer the query for rank (0, 0) within 0.3 s" in problem(f"127.0.0.1:{port}")


def test_a_listener_that_ends() -> None:
    """Told at once, not after the time is over."""
    started = time.monotonic()
    with closing_peer() as port:
        assert "closed the connection when it was asked" in problem(f"127.0.0.1:{port}", PATIENT)

    assert time.monotonic() - started < PATIENT


def test_an_answer_without_bounds() -> None:
    with peer(lambda: [bytes(17 * 2**20)]) as port:
        assert "longer than 16777216 bytes" in problem(f"127.0.0.1:{port}", PATIENT)


# -------------------------------------------------------------------------------------------------------------- Waiting


def test_an_instance_that_is_starting_is_waited_for() -> None:
    port = free_port()
    answers: list[bytes] = []
    thread = threading.Thread(
        target=lambda: answers.append(insist(lambda: ask(f"127.0.0.1:{port}"), PATIENT)), daemon=True
    )
    thread.start()
    time.sleep(0.2)
    with listener({(0, 0): b"payload"}, port=port):
        thread.join(PATIENT)

    assert answers == [b"payload"]


def test_waiting_has_an_end() -> None:
    started = time.monotonic()
    with pytest.raises(SideChannelError, match="refused"):
        insist(lambda: ask(f"127.0.0.1:{free_port()}"), 0.6)

    assert 0.5 <= time.monotonic() - started < PATIENT


def test_what_will_not_pass_is_not_waited_for() -> None:
    with tcp_server(lambda connection: connection.sendall(b"220 mail.example ESMTP\r\n")) as address:
        started = time.monotonic()
        with pytest.raises(SideChannelError, match="not ZeroMQ"):
            insist(lambda: ask(address), PATIENT)

    assert time.monotonic() - started < PATIENT


def test_nothing_is_sent_to_what_speaks_no_zeromq() -> None:
    sent: list[bytes] = []

    def greet(connection: socket.socket) -> None:
        connection.settimeout(PATIENT)
        sent.append(connection.recv(64))

    with tcp_server(greet) as address:
        problem(address)

    assert sent == [b""]
