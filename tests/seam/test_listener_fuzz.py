# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The handshake listener under 100,000 hostile messages, on every layer; valid requests go among them.

Every message is counted, under the result that it has to have: what a message is, is decided here by msgspec without a
type; what a connection is, by the parser with all its bytes at once, where the listener gets them as they come.
"""

import contextlib
import gc
import logging
import os
import random
import socket
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, Phase, given, settings, strategies as st

from nixl_telemetry.operations import handshake_request
from nixl_telemetry.seam.zmtp import GREETING, READY, Connection, ProtocolError, encode
from tests.seam.test_listener import BAD_BYTES, BAD_MESSAGES, RANKS, REQ, Served, instrumented, query, resident
from tests.support.observed import Observed
from tests.support.peers import wait_until
from tests.support.threads import threads_started

MESSAGES: Final = 100_000
MADE: Final = 2000
"""Examples of hypothesis, of six messages each. It takes 4 ms for one; the rest is made by plain random numbers."""
BETWEEN: Final = 500
"""Messages from one valid request to the next."""
LIMIT: Final = 0.1
"""Seconds for an answer."""
ATTEMPTS: Final = 3
SLOW_SHARE: Final = 0.02
"""Of the answers, that may take longer in the first attempt. A machine that is busy with something else makes a pause
now and then, but not three in a row; a listener that is held up by what else it is sent does."""
GROWTH: Final = 8 * 2**20
"""Bytes. What 100,000 messages leave behind would be more, were it 100 bytes each."""

# ------------------------------------------------------------------------------------------------------ What is to come


def result_of(frames: Sequence[bytes]) -> str:
    """How a message has to be counted."""
    if len(frames) != 2 or frames[0]:
        return "malformed"
    try:
        asked = msgspec.msgpack.decode(frames[1])
    except Exception:
        return "malformed"
    if not isinstance(asked, list) or [type(part) for part in asked] != [bytes, int, int]:
        return "malformed"
    word, pp_rank, tp_rank = asked
    if word != b"get_meta_msg":
        return "malformed"
    return "served" if (pp_rank, tp_rank) in RANKS else "unknown_rank"


def results_of(data: bytes) -> Counter[str]:
    """How a connection has to be counted that sends this and ends."""
    results: Counter[str] = Counter()
    connection = Connection()
    connection.feed(data)
    try:
        while (item := connection.next()) is not None:
            if isinstance(item, list):
                results[result_of(item)] += 1
    except ProtocolError:
        results["malformed"] += 1
    else:
        results["malformed"] += connection.is_cut
    return results


# ------------------------------------------------------------------------------------------------------ What is hostile

HELLO: Final = GREETING + REQ
QUERY: Final = b"".join(encode([b"", query()]))
CHANGES: Final = ("overwrite", "insert", "remove", "repeat", "cut")
ENDS: Final = [
    b"",
    b"\x01",
    b"\x00\x50half a frame",
    b"\x01\x00",
    b"\x01\x00" * 8,
    b"\x02" + (2**63).to_bytes(8, "big"),
    b"\x02" + (4097).to_bytes(8, "big") + bytes(4097),
    b"\x02" + (4096).to_bytes(8, "big") + bytes(4096),
    b"\xf8\x00",
    b"\x04\x00" * 50,
    b"\x04\x07\x05ERROR\x00",
    b"\x04\x09\x04PING\x00\x01hi" * 20,
    b"\x05\x05\x04PING",
    REQ,
    HELLO,
]
"""How a conversation may go on or end: cut off, beyond a limit, with commands, from the beginning."""


def mutated(data: bytes, changes: Sequence[tuple[str, int, bytes]]) -> bytes:
    """The same with changes: how, where, and with which bytes."""
    changed = bytearray(data)
    for kind, place, new in changes:
        at = place % (len(changed) + 1)
        match kind:
            case "overwrite":
                changed[at : at + len(new)] = new
            case "insert":
                changed[at:at] = new
            case "remove":
                del changed[at : at + len(new)]
            case "repeat":
                changed[at:at] = changed[at : at + 40]
            case "cut":
                del changed[at:]
    return bytes(changed)


JUNK: Final = st.lists(st.binary(max_size=80), min_size=1, max_size=4)
NEARLY: Final = st.tuples(
    st.binary(max_size=16) | st.just(b"get_meta_msg"), st.integers(-5, 5), st.integers(-5, 5)
).map(lambda asked: [b"", msgspec.msgpack.encode(asked)])
FAR: Final = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
).map(lambda value: [b"", msgspec.msgpack.encode(value)])
MESSAGE: Final = JUNK | NEARLY | FAR
CHANGE: Final = st.tuples(st.sampled_from(CHANGES), st.integers(0, 300), st.binary(min_size=1, max_size=9))
CONVERSATION: Final = st.builds(
    lambda messages, end, changes: mutated(
        HELLO + b"".join(part for frames in messages for part in encode(frames)) + end, changes
    ),
    st.lists(MESSAGE, max_size=4),
    st.sampled_from(ENDS),
    st.lists(CHANGE, max_size=3),
)


class Hostile:
    """Random bytes, and valid ones with changes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def noise(self, most: int) -> bytes:
        """Random bytes."""
        return self.random.randbytes(self.random.randrange(most))

    def changed(self, data: bytes, most: int = 3) -> bytes:
        """With up to so many changes."""
        pick = self.random
        return mutated(
            data,
            [(pick.choice(CHANGES), pick.randrange(10_000), self.noise(9)) for _ in range(pick.randrange(1, most + 1))],
        )

    def message(self) -> list[bytes]:
        """One that ZeroMQ takes."""
        match self.random.randrange(5):
            case 0:
                return [self.noise(60) for _ in range(self.random.randrange(1, 9))]
            case 1:
                return [b"", self.changed(query(*self.random.choice(RANKS)), 1)]
            case 2:
                return [b"", query(self.random.randrange(-3, 9), self.random.randrange(2**64))]
            case 3:
                return [b"", self.noise(4097)]
            case _:
                return self.random.choice(list(BAD_MESSAGES.values()))

    def conversation(self) -> bytes:
        """What a connection sends: broken before, in or after the greeting, at READY, or after many messages."""
        match self.random.randrange(8):
            case 0:
                return self.noise(200)
            case 1:
                return b"".join(self.random.choice(list(BAD_BYTES.values())))[:5000]
            case 2:
                return self.changed(GREETING) + REQ + QUERY
            case 3:
                return GREETING + self.noise(200)
            case 4:
                return GREETING + self.changed(REQ) + QUERY
            case 5:
                return HELLO + self.noise(200)
            case 6:
                return self.changed(HELLO + QUERY * 3)
            case _:
                messages = [self.message() for _ in range(self.random.randrange(80))]
                return HELLO + b"".join(b"".join(encode(frames)) for frames in messages) + self.random.choice(ENDS)


# ---------------------------------------------------------------------------------------------------------- How it goes


class Attack:
    """Sends, and keeps account of it."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.expected: Counter[str] = Counter()
        self.sent = 0
        self.first: list[float] = []
        """Seconds that valid requests took, in the first attempt."""
        self.best: list[float] = []
        """In the best one."""
        self._dealer: Any = served.context.socket(zmq.DEALER)
        # What waits here is in this process's memory, which is measured.
        self._dealer.setsockopt(zmq.SNDHWM, 1000)
        self._dealer.connect(f"tcp://127.0.0.1:{served.port}")
        self._answers = 0
        self._due = 0
        self._kept: list[Any] = []

    def message(self, frames: list[bytes]) -> None:
        """By a real socket of ZeroMQ, on one connection for all."""
        self._dealer.send_multipart(frames)
        result = result_of(frames)
        self.count(Counter({result: 1}))
        self._due += result != "malformed"
        self.take_answers()

    def take_answers(self) -> bool:
        """Whether all have come that are due."""
        while self._dealer.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            assert len(self._dealer.recv_multipart()) == 3
            self._answers += 1
        return self._answers == self._due

    def conversations(self, several: Sequence[bytes], cuts: random.Random) -> None:
        """On connections of their own, in two parts each; a valid request comes when all have sent."""
        connections = []
        for data in several:
            cut = cuts.randrange(len(data) + 1)
            connections.append(self.served.raw(data[:cut], data[cut:]))
            self.count(results_of(data))
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        self.valid()
        for connection in connections:
            # Closed before it was read to the end, it would take back what it has sent.
            with contextlib.suppress(ConnectionError):
                while connection.recv(1 << 16):
                    pass
            connection.close()

    def kept_open(self) -> None:
        """What ends in the middle and stays, and what sockets of ZeroMQ send that is beyond a limit."""
        for part in (b"", GREETING[:5], GREETING, HELLO + b"\x01\x00", HELLO + b"\x00\x50half a frame"):
            self._kept += [self.served.raw(part) for _ in range(4)]
            self.count(Counter(malformed=4))
        for frames in ([b"x"] * 9, [b"", bytes(4097)]):
            for _ in range(4):
                client = self.served.client(zmq.DEALER)
                client.send_multipart(frames)
                self._kept.append(client)
                self.count(Counter(malformed=1))
        for message in (b"junk", b"", query(word=b"x")):
            client = self.served.client(zmq.REQ)
            client.send(message)
            self._kept.append(client)
            self.count(Counter(malformed=1))

    def count(self, results: Counter[str]) -> None:
        """A message or a connection was sent."""
        self.expected += results
        self.sent += max(1, results.total())

    def valid(self) -> None:
        """A request as vLLM's initiator makes it, on a connection of its own."""
        times = []
        for _ in range(ATTEMPTS):
            times.append(self.served.timed())
            self.expected["served"] += 1
            if times[-1] < LIMIT:
                break
        self.first.append(times[0])
        self.best.append(min(times))

    def close(self) -> None:
        """Close what is open."""
        for client in (*self._kept, self._dealer):
            client.close()


def open_files() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a path would be opened for each)


def threads() -> set[str]:
    """Of this process, with those that Python does not know."""
    return {task.name for task in Path("/proc/self/task").iterdir()}


@pytest.fixture
def attack(observed: Observed) -> Iterator[Attack]:
    """On a listener in a scheduler of vLLM's."""
    served = Served(instrumented(observed))
    attack = Attack(served)
    yield attack
    attack.close()
    served.close()


def test_fuzz(attack: Attack, observed: Observed) -> None:
    """All are counted as what they are, and neither time nor memory, threads, connections or log lines add up."""
    served = attack.served
    began = time.monotonic()
    attack.valid()
    attack.message([b"junk"])
    wait_until(lambda: served.results.get("malformed") == 1)
    before, started = threads(), threads_started()
    files = open_files()
    attack.kept_open()
    hostile = Hostile(1)

    @settings(
        max_examples=2000,
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(st.lists(MESSAGE, max_size=20), st.lists(CONVERSATION, max_size=2))
    def made(messages: list[list[bytes]], conversations: list[bytes]) -> None:
        for frames in messages:
            attack.message(frames)
        if conversations:
            attack.conversations(conversations, hostile.random)

    made()
    gc.collect()
    memory = resident()
    while attack.sent < MESSAGES:
        start = attack.sent
        attack.conversations([hostile.conversation() for _ in range(16)], hostile.random)
        while attack.sent < start + BETWEEN:
            attack.message(hostile.message())

    assert wait_until(lambda: sum(served.results.values()) >= attack.expected.total(), 20), served.results
    seconds = time.monotonic() - began
    assert served.results == attack.expected
    assert attack.expected["malformed"] > MESSAGES * 0.5
    assert attack.expected["unknown_rank"] > MESSAGES * 0.05
    assert wait_until(attack.take_answers)
    assert served.scheduler._nixl_handshake_listener_t.is_alive()
    gc.collect()
    grown = resident() - memory
    more = threads() - before, started()
    attack.close()
    slow = sum(taken >= LIMIT for taken in attack.first)
    logging.getLogger(__name__).info(
        "%d messages in %.1f s; %d valid requests: median %.1f ms, longest %.1f ms, %d beyond %.0f ms; %.1f MiB more",
        attack.sent,
        seconds,
        len(attack.first),
        statistics.median(attack.first) * 1e3,
        max(attack.first) * 1e3,
        slow,
        LIMIT * 1e3,
        grown / 2**20,
    )
    assert len(attack.first) > MESSAGES / BETWEEN / 1.5
    assert max(attack.best) < LIMIT
    assert slow <= len(attack.first) * SLOW_SHARE
    assert grown < GROWTH
    assert more == (set(), [])
    assert wait_until(lambda: open_files() <= files)
    # In the log at a bounded rate, in the metrics all of them, and nothing failed in here.
    lines = [line for line in observed.messages() if "nixl.handshake_request.refused" in line]
    assert 2 <= len(lines) <= 2 * (seconds / handshake_request.LOG_SECONDS + 1)
    told = sum(int(line.partition("nixl.handshake_request.count=")[2].split()[0]) for line in lines)
    assert told <= attack.expected.total()
    served.scheduler._nixl_telemetry.requests.report()
    assert observed.updates() == {
        ("nixl_handshake_requests_total", result): count for result, count in attack.expected.items()
    }


@pytest.mark.parametrize("ends", [0, 1])
def test_an_end_in_the_middle(attack: Attack, ends: int) -> None:
    """Who leaves half a greeting, frame or message behind is counted; who leaves between two is not."""
    cut = [GREETING[:30], HELLO[:-1], HELLO + b"\x01", HELLO + b"\x01\x00", HELLO + QUERY + b"\x00\x05x"]
    whole = [b"", GREETING, HELLO, HELLO + QUERY, HELLO + READY]
    for data in (cut, whole)[ends]:
        attack.conversations([data], random.Random(0))

    served = len(attack.first) + 1
    expected = ({"malformed": 5, "served": served}, {"served": served})[ends]
    assert wait_until(lambda: attack.served.results == expected), attack.served.results
