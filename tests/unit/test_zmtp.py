# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The server's half of ZMTP, as bytes in and messages out."""

import pytest
from hypothesis import given, strategies as st

from nixl_telemetry.seam.zmtp import FRAME_LIMIT, FRAMES_LIMIT, GREETING, READY, Connection, ProtocolError, encode

CLIENT = GREETING + b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x03REQ\x08Identity\0\0\0\0"
MESSAGES = st.lists(st.lists(st.binary(max_size=400), min_size=1, max_size=FRAMES_LIMIT), max_size=6)


def read(connection: Connection) -> list[list[bytes] | bytes]:
    """All that is there, but for commands that ask for nothing."""
    found = []
    while (item := connection.next()) is not None:
        if item:
            found.append(item)
    return found


def test_a_greeting_is_64_bytes() -> None:
    """And READY says what it is."""
    assert len(GREETING) == 64
    assert READY == b"\x04\x29\x05READY\x0bSocket-Type\0\0\0\x06ROUTER\x08Identity\0\0\0\0"


@given(MESSAGES, st.integers(1, 50))
def test_messages_come_out_as_they_went_in(messages: list[list[bytes]], step: int) -> None:
    """In whatever parts they arrive."""
    data = CLIENT + b"".join(buffer for frames in messages for buffer in encode(frames))
    connection, found = Connection(), []
    for start in range(0, len(data), step):
        connection.feed(data[start : start + step])
        found += read(connection)

    assert found == messages
    assert connection.is_ready
    assert not connection.is_amid


@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    """Messages, a wait for more, or a ProtocolError; and never more held than came."""
    for start in (b"", GREETING, CLIENT):
        connection = Connection()
        connection.feed(start + data)
        try:
            read(connection)
        except ProtocolError:
            continue
        assert len(connection._buffer) <= len(start + data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x02" + (FRAME_LIMIT + 1).to_bytes(8, "big"),
        b"\x02" + b"\xff" * 8,
        b"\x01\0" * FRAMES_LIMIT,
        b"\x08\0",
        b"\x04\x06\x05ERROR",
    ],
)
def test_limits(data: bytes) -> None:
    """Said before any of it is kept."""
    connection = Connection()
    connection.feed(CLIENT + data)

    with pytest.raises(ProtocolError):
        read(connection)


def test_the_largest_that_is_taken() -> None:
    """A frame of the limit, and as many frames as the limit."""
    connection = Connection()
    largest = [[b"x" * FRAME_LIMIT], [b"y"] * FRAMES_LIMIT]
    connection.feed(CLIENT + b"".join(buffer for frames in largest for buffer in encode(frames)))

    assert read(connection) == largest


@pytest.mark.parametrize("client", [b"DEALER", b"ROUTER", b"REQ"])
def test_who_may_ask(client: bytes) -> None:
    """The socket types that libzmq's ROUTER talks to; versions after 3.0 too, and other properties."""
    body = b"\x05READY\x01X\0\0\0\x02yz\x0bSocket-Type" + len(client).to_bytes(4, "big") + client
    connection = Connection()
    connection.feed(GREETING[:11] + b"\x01" + GREETING[12:] + bytes([4, len(body)]) + body)

    assert connection.next() == b""
    assert connection.next() is None
    assert connection.is_ready


def test_commands_are_taken_one_at_a_time() -> None:
    """Between them, others have their turn: a flood of them is as long as its sender likes."""
    connection = Connection()
    connection.feed(CLIENT + b"\x04\x00" * 1000)

    assert [connection.next() for _ in range(1001)] == [b""] * 1001
    assert connection.next() is None


@pytest.mark.parametrize(
    ("data", "is_cut"),
    [
        (b"", False),
        (GREETING[:20], True),
        (GREETING, False),
        (CLIENT[:-1], True),
        (CLIENT, False),
        (CLIENT + b"\0\x02x", True),
        (CLIENT + b"\x01\0", True),
        (CLIENT + b"\x01\0\0\0", False),
    ],
)
def test_what_is_cut_short(data: bytes, is_cut: bool) -> None:
    """Wherever it ends."""
    connection = Connection()
    connection.feed(data)
    read(connection)

    assert connection.is_cut == is_cut
