# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The handshake listener on vLLM's real schedulers: it answers as vLLM's own does, and nothing that comes ends it."""

import contextlib
import itertools
import logging
import os
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnectorScheduler,
    NixlPushConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

from nixl_telemetry.cli.side_channel import Address, Position, SideChannel
from nixl_telemetry.operations.allowed_peers import AllowedPeers, PeerNotAllowedError
from nixl_telemetry.operations.handshake_request import HandshakeRequests
from nixl_telemetry.seam import listener
from nixl_telemetry.seam.instrument import instrument
from nixl_telemetry.seam.scheduler import SchedulerHooks, SchedulerObserver
from nixl_telemetry.seam.zmtp import GREETING, READY
from nixl_telemetry.settings import Settings
from nixl_telemetry.signals.semconv import RequestResult, TransferMode
from tests.seam.conftest import LOCAL_HASH, agent_metadata
from tests.seam.test_handshake import GOOD, accepting, shake
from tests.support.observed import Observed
from tests.support.peers import CLOCK, free_port, peer, wait_until

STOCK = {TransferMode.PULL: NixlPullConnectorScheduler, TransferMode.PUSH: NixlPushConnectorScheduler}
RANKS = list(itertools.product(range(2), range(4)))


def query(pp_rank: Any = 0, tp_rank: Any = 0, word: Any = b"get_meta_msg") -> bytes:
    """A query as vLLM encodes it."""
    return msgspec.msgpack.encode((word, pp_rank, tp_rank))


class Served:
    """A scheduler whose listener runs."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        scheduler.side_channel_host, scheduler.side_channel_port = "127.0.0.1", free_port()
        scheduler.set_xfer_handshake_metadata(
            {rank: NixlHandshakePayload("a" * 64, os.urandom(500) + bytes(rank)) for rank in RANKS}
        )
        self.port: int = scheduler.side_channel_port
        self.context = zmq.Context()

    @property
    def results(self) -> dict[str, int]:
        """Requests so far, by result; those without any are left out."""
        requests: HandshakeRequests = self.scheduler._nixl_telemetry.requests
        return {str(result): count for result in RequestResult if (count := requests.count(result))}

    def client(self, kind: int = zmq.REQ) -> Any:
        """A client."""
        client = self.context.socket(kind)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.SNDHWM, 0)
        client.connect(f"tcp://127.0.0.1:{self.port}")
        return client

    def ask(self, message: bytes | None = None, seconds: float = 10) -> list[bytes] | None:
        """What comes back for a message, sent as vLLM's initiator sends it; ``None`` for silence."""
        client = self.client()
        try:
            client.send(query() if message is None else message)
            return client.recv_multipart() if client.poll(seconds * 1000) else None
        finally:
            client.close()

    def raw(self, *first: bytes) -> socket.socket:
        """A TCP connection that has sent something."""
        connection = socket.create_connection(("127.0.0.1", self.port), 10)
        with contextlib.suppress(OSError):
            for data in first:
                connection.sendall(data)
        return connection

    def timed(self) -> float:
        """Seconds until a valid query is answered, on a new connection."""
        start = time.perf_counter()
        assert self.ask() is not None
        return time.perf_counter() - start

    def close(self) -> None:
        """Stop as vLLM does."""
        self.scheduler.shutdown()
        self.context.destroy(linger=0)


def make_scheduler(mode: TransferMode) -> Any:
    """A stock scheduler of a config that says no more than it is asked for."""
    config = MagicMock()
    config.parallel_config = SimpleNamespace(
        tensor_parallel_size=1, decode_context_parallel_size=1, pipeline_parallel_size=1, data_parallel_index=0
    )
    config.cache_config.block_size = 32
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    config.kv_transfer_config.get_from_extra_config = lambda name, default: default
    return STOCK[mode](config, "here", MagicMock(kv_cache_groups=[], transfer_groups=[], has_mamba_layers=False))


def instrumented(observed: Observed, mode: TransferMode = TransferMode.PULL) -> Any:
    """The same, observed."""
    scheduler = make_scheduler(mode)
    observer = SchedulerObserver(observed.telemetry, scheduler, scheduler.vllm_config.kv_transfer_config)
    instrument(scheduler, SchedulerHooks, observer)
    return scheduler


def use_settings(observed: Observed, monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    """Give the hub other settings."""
    monkeypatch.setattr(observed.telemetry, "settings", Settings.load({"telemetry": values}, {}))


@pytest.fixture(autouse=True)
def stops_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second for each test is a minute for all."""
    monkeypatch.setattr(listener, "_TICK_SECONDS", 0.05)


@pytest.fixture
def served(observed: Observed) -> Iterator[Served]:
    """Our listener, in a pull scheduler."""
    served = Served(instrumented(observed))
    yield served
    served.close()


# ------------------------------------------------------------------------------------------------------ What it answers


@pytest.mark.parametrize("mode", list(TransferMode))
def test_the_same_answers_as_stock(observed: Observed, monkeypatch: pytest.MonkeyPatch, mode: TransferMode) -> None:
    """Byte for byte, but for the clock, which is the one that vLLM stamps expiries with."""
    monkeypatch.setattr(observed.telemetry, "mode", mode)
    monkeypatch.setattr(os, "urandom", bytes)  # the same payloads twice
    stock, ours = Served(make_scheduler(mode)), Served(instrumented(observed, mode))
    try:
        answers = {}
        for served in (stock, ours):
            for kind in (zmq.REQ, zmq.DEALER):
                client = served.client(kind)
                for rank in RANKS:
                    client.send_multipart([query(*rank)] if kind == zmq.REQ else [b"", query(*rank)])
                    frames = client.recv_multipart()
                    answers[served, kind, rank] = frames[:-1]
                    assert len(frames[-1]) == len(CLOCK)
                    assert abs(msgspec.msgpack.decode(frames[-1]) - time.perf_counter()) < 5
                client.close()
        for kind, rank in itertools.product((zmq.REQ, zmq.DEALER), RANKS):
            assert answers[ours, kind, rank] == answers[stock, kind, rank]
        assert ours.results == {"served": 2 * len(RANKS)}
        assert stock.scheduler._nixl_handshake_listener_t.name == ours.scheduler._nixl_handshake_listener_t.name
    finally:
        stock.close()
        ours.close()


def test_a_handshake_with_it(observed: Observed, pull_worker: Any) -> None:
    """vLLM's initiator and our listener."""
    scheduler = instrumented(observed)
    scheduler.side_channel_host, scheduler.side_channel_port = "127.0.0.1", free_port()
    metadata = msgspec.msgpack.encode(agent_metadata())
    scheduler.set_xfer_handshake_metadata({(0, 0): NixlHandshakePayload(LOCAL_HASH, metadata)})
    try:
        with accepting(pull_worker):
            assert shake(pull_worker, scheduler.side_channel_port)[0] == {(0, 0): "agent-there"}
        pull_worker.transfer_topo.handshake_target_ranks = lambda *sizes: [7]
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="Failed to decode NixlHandshakePayload"):
            shake(pull_worker, scheduler.side_channel_port)
        # At once, and not after vLLM's 5 s, here 2 s.
        assert time.monotonic() - start < 1.5
    finally:
        scheduler.shutdown()
    updates = observed.updates()
    scheduler._nixl_telemetry.with_updates(None)
    assert ("nixl_handshake_duration_seconds", "payload_decode") in updates


def test_a_probe_of_it(served: Served) -> None:
    """The suite's own command takes it for what it is: it looks at the greeting first."""
    with SideChannel(Address("127.0.0.1", served.port), 5) as channel:
        payloads = [channel.ask(Position(*rank)) for rank in RANKS]

    assert len(set(payloads)) == len(RANKS)
    # The look at the greeting, which ends without a word, is no request.
    assert served.results == {"served": len(RANKS)}


def test_big_payloads_reach_slow_readers(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the kernel takes at once."""
    monkeypatch.setattr(os, "urandom", lambda size: b"x" * 20_000_000)
    served = Served(instrumented(observed))
    try:
        slow = served.raw(GREETING, READY.replace(b"ROUTER", b"DEALER"), b"\x01\x00" + framed(query()))
        assert len((served.ask() or [b""])[0]) > 20_000_000
        received = 0
        while received < 20_000_000:
            received += len(slow.recv(1 << 20))
        slow.close()
    finally:
        served.close()


# ------------------------------------------------------------------------------------------------------------ Bad input


def framed(body: bytes) -> bytes:
    """The last frame of a message."""
    return bytes([0, len(body)]) + body


BAD_MESSAGES: dict[str, list[bytes]] = {
    "random bytes": [b"", b"\xff\xfe junk"],
    "nothing": [b"", b""],
    "no delimiter": [query()],
    "a delimiter that is none": [b"x", query()],
    "three frames": [b"", query(), b""],
    "another word": [b"", query(word=b"get_meat_msg")],
    "a word that is text": [b"", query(word="get_meta_msg")],
    "a rank that is text": [b"", query("0")],
    "a rank that is a list": [b"", query([0])],
    "a rank that is a float": [b"", query(0.0)],
    "a rank that is true": [b"", query(False)],
    "a huge rank": [b"", query(2**64 - 1, "x")],
    "too few elements": [b"", msgspec.msgpack.encode((b"get_meta_msg", 0))],
    "too many elements": [b"", msgspec.msgpack.encode((b"get_meta_msg", 0, 0, 0))],
    "half a query": [b"", query()[:-1]],
    "a query and more": [b"", query() + b"\0"],
    "a map": [b"", msgspec.msgpack.encode({"get_meta_msg": [0, 0]})],
    "deep nesting": [b"", b"\x91" * 4000],
    "deep nesting in a query": [b"", b"\x93" + b"\x91" * 4000],
    "a length that lies": [b"", b"\xdd\xff\xff\xff\xff"],
}


@pytest.mark.parametrize("kind", BAD_MESSAGES)
def test_a_bad_message(served: Served, observed: Observed, kind: str) -> None:
    """Dropped and counted; the same connection may go on."""
    client = served.client(zmq.DEALER)
    client.send_multipart(BAD_MESSAGES[kind])
    client.send_multipart([b"", query(1, 3)])

    assert client.poll(10_000)
    assert len(client.recv_multipart()) == 3
    assert served.results == {"malformed": 1, "served": 1}
    (line,) = [line for line in observed.messages() if "nixl.handshake_request.refused" in line]
    assert "nixl.handshake_request.result=malformed" in line
    assert "client.address=127.0.0.1" in line
    client.close()


@pytest.mark.parametrize("rank", [(0, 4), (2, 0), (-1, 0), (0, 10**9), (2**63, 0)])
def test_a_rank_that_is_not_there(served: Served, rank: tuple[int, int]) -> None:
    """Answered with what vLLM cannot decode, in the form of an answer."""
    answer = served.ask(query(*rank))

    assert answer is not None
    assert len(answer) == 2
    assert isinstance(msgspec.msgpack.decode(answer[1]), float)
    with pytest.raises(msgspec.ValidationError, match="missing required field"):
        msgspec.msgpack.Decoder(NixlHandshakePayload).decode(answer[0])
    assert served.ask() is not None
    assert served.results == {"unknown_rank": 1, "served": 1}


REQ = READY.replace(b"ROUTER", b"REQ").replace(b"\x04\x29", b"\x04\x26").replace(b"\0\0\0\x06REQ", b"\0\0\0\x03REQ")
BAD_BYTES: dict[str, list[bytes]] = {
    "HTTP": [b"GET / HTTP/1.1\r\n\r\n"],
    "TLS": [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc"],
    "a signature that is none": [b"\xff" + bytes(9)],
    "an old ZMTP": [GREETING[:10] + b"\x01" + bytes(53)],
    "another mechanism": [GREETING.replace(b"NULL\0", b"PLAIN")],
    "a message before READY": [GREETING, framed(query())],
    "a command that is not READY": [GREETING, b"\x04\x06\x05HELLO"],
    "a subscriber": [GREETING, REQ.replace(b"REQ", b"SUB")],
    "unknown flags": [GREETING, REQ, b"\xf8\x00"],
    "a huge frame": [GREETING, REQ, b"\x02" + (2**40).to_bytes(8, "big")],
    "a frame just too big": [GREETING, REQ, b"\x02" + (4097).to_bytes(8, "big")],
    "a huge greeting of junk": [b"\xff" * 100_000],
    "endless frames": [GREETING, REQ, b"\x01\x00" * 100_000],
    "an error": [GREETING, REQ, b"\x04\x07\x05ERROR\x00"],
}


@pytest.mark.parametrize("kind", BAD_BYTES)
def test_bad_bytes(served: Served, kind: str) -> None:
    """The connection is closed and counted, once."""
    connection = served.raw(*BAD_BYTES[kind])

    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    assert wait_until(lambda: served.results == {"malformed": 1})
    assert served.ask() is not None
    connection.close()


def test_pings_are_answered(served: Served) -> None:
    """libzmq sends them where heartbeats are on; other commands are passed over."""
    connection = served.raw(GREETING, REQ, b"\x04\x05\x04JUNK", b"\x04\x09\x04PING\x00\x01hi")
    expected = GREETING + READY + b"\x04\x07\x04PONGhi"
    assert received(connection, lambda data: len(data) >= len(expected)) == expected
    connection.close()


def test_heartbeats_of_libzmq(served: Served) -> None:
    """A client with heartbeats stays connected."""
    client = served.client(zmq.DEALER)
    monitor = client.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    client.setsockopt(zmq.HEARTBEAT_IVL, 50)
    client.setsockopt(zmq.HEARTBEAT_TIMEOUT, 1000)
    client.connect(f"tcp://127.0.0.1:{served.port}")

    assert not monitor.poll(2000)
    client.disable_monitor()
    monitor.close()
    client.close()


@pytest.mark.parametrize("part", [b"", GREETING[:5], GREETING[:40], GREETING, GREETING + REQ + b"\x01\x00\x00"])
def test_slow_senders(served: Served, monkeypatch: pytest.MonkeyPatch, part: bytes) -> None:
    """Who stops in the middle is closed after a while, and meanwhile in nobody's way."""
    connection = served.raw(part)
    assert served.ask() is not None
    # Not before: on a busy machine, a client that is not slow may take as long.
    monkeypatch.setattr(listener, "STALL_SECONDS", 0.3)
    connection.settimeout(10)
    while connection.recv(4096):
        pass

    assert served.results == {"malformed": 1, "served": 1}
    connection.close()


def test_idle_connections_are_kept(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is between two queries is not slow, also when the second one comes in parts."""
    # Far longer than a busy machine makes of the tenth of a second between the parts.
    monkeypatch.setattr(listener, "STALL_SECONDS", 2.0)
    with served.raw(GREETING, REQ) as connection:
        time.sleep(3)
        connection.sendall(b"\x01\x00")
        time.sleep(0.1)
        connection.sendall(framed(query()))
        connection.settimeout(10)
        received(connection, lambda data: b"a" * 64 in data)

    assert served.results == {"served": 1}


def test_who_takes_no_answers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queries wait in its own socket, others are answered, and then it is closed."""
    # Far longer than those others take on a busy machine.
    monkeypatch.setattr(listener, "STALL_SECONDS", 2.0)
    connection = served.raw(GREETING, REQ)
    many = (b"\x01\x00" + framed(query())) * 1000

    def send() -> None:
        """It waits where nothing more is taken, and fails once the connection is closed."""
        for _ in range(1000):
            connection.sendall(many)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        while not sending.done():
            assert served.timed() < 5

    with pytest.raises(ConnectionError):
        sending.result()
    # Far fewer than it asked for, as it took none.
    assert served.results["served"] < 100_000
    connection.close()


def received(connection: socket.socket, is_enough: Callable[[bytes], bool]) -> bytes:
    """What the listener has sent, once it is enough."""
    data = b""
    while not is_enough(data):
        part = connection.recv(4096)
        assert part, f"the listener has closed the connection after {data!r}"
        data += part
    return data


# --------------------------------------------------------------------------------------------------------------- Floods


def report(what: str, seconds: list[float]) -> None:
    """Hold times to their limit: 100 ms. On a busy machine only their median tells of the listener."""
    median, most = statistics.median(seconds) * 1e3, max(seconds) * 1e3
    logging.getLogger(__name__).info("%s: %d answers, median %.1f ms, max %.1f ms", what, len(seconds), median, most)
    assert statistics.median(seconds) < 0.1
    assert max(seconds) < 3


def resident() -> int:
    """Bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


PING = b"\x04\x09\x04PING\x00\x01hi"
FLOODS: dict[str, tuple[bytes, bytes]] = {
    "bad messages": (b"", (b"\x01\x00" + framed(b"junk")) * 50),
    "queries": (b"", (b"\x01\x00" + framed(query())) * 50),
    "unknown ranks": (b"", (b"\x01\x00" + framed(query(9))) * 50),
    "commands": (b"", b"\x04\x00" * 1000),
    "pings": (b"", PING * 100),
    "a byte at a time": (b"\x02" + (4096).to_bytes(8, "big"), b"x"),
}
"""What each of many connections sends first, and then over and over."""


@pytest.mark.parametrize("kind", FLOODS)
def test_a_flood_from_many(served: Served, kind: str) -> None:
    """More connections than are kept, all of them sending all the time: valid requests go between them."""
    stop, (first, flood) = threading.Event(), FLOODS[kind]
    connections = [served.raw(GREETING + REQ + first) for _ in range(listener.CONNECTIONS_LIMIT + 20)]
    for connection in connections:
        connection.setblocking(False)

    def send(mine: list[socket.socket]) -> None:
        while not stop.is_set():
            for each in mine:
                with contextlib.suppress(OSError):
                    each.send(flood)
                with contextlib.suppress(OSError):
                    each.recv(1 << 16)
            stop.wait(0.02)  # or only the senders of this process would run

    threads = [threading.Thread(target=send, args=(connections[part::2],)) for part in range(2)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.5)
        start = resident()
        times = [served.timed() for _ in range(50)]
        grown = resident() - start
        stopping = time.monotonic()
        served.scheduler.shutdown()
        assert time.monotonic() - stopping < 3
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for connection in connections:
            connection.close()
    report(f"flood of {kind}", times)
    assert grown < 32 * 2**20


def test_connections_are_bounded(served: Served) -> None:
    """The one that was silent for longest makes room."""
    connections = [served.raw() for _ in range(listener.CONNECTIONS_LIMIT + 20)]
    assert served.ask() is not None
    connections[0].settimeout(10)
    while connections[0].recv(4096):
        pass

    for connection in connections:
        connection.close()


def test_endless_frames_take_no_memory(served: Served) -> None:
    """Which is where libzmq's own limits end."""
    start = resident()
    chunk = (b"\x01\x40" + bytes(64)) * 1000
    for _ in range(20):
        connection = served.raw(GREETING, REQ, *[chunk] * 20)
        connection.close()

    assert served.ask() is not None
    assert resident() - start < 16 * 2**20


def test_log_lines_are_bounded(served: Served, observed: Observed) -> None:
    """One for each result in a while, with the number of requests; the metric has them all."""
    client = served.client(zmq.DEALER)
    for _ in range(500):
        client.send(b"junk")
    assert wait_until(lambda: served.results == {"malformed": 500})

    assert len([line for line in observed.messages() if "nixl.handshake_request.refused" in line]) == 1
    served.scheduler._nixl_telemetry.requests.report()
    assert observed.updates() == {("nixl_handshake_requests_total", "malformed"): 500}
    served.scheduler._nixl_telemetry.requests.report()
    assert observed.updates() == {}
    client.close()


# ------------------------------------------------------------------------------------------------------ Start and end


def test_two_listeners(observed: Observed) -> None:
    """Each on its port; the end of one is not the other's."""
    one, other = Served(instrumented(observed)), Served(instrumented(observed))
    assert one.ask() is not None
    one.close()
    assert other.ask() is not None
    other.close()


def test_it_stops_when_vllm_asks(served: Served) -> None:
    """The thread is joined, and the port is free."""
    thread = served.scheduler._nixl_handshake_listener_t
    idle = served.raw(GREETING)
    start = time.monotonic()
    served.scheduler.shutdown()

    assert time.monotonic() - start < 2
    assert not thread.is_alive()
    with socket.create_server(("127.0.0.1", served.port)):
        pass
    idle.close()


def test_a_port_in_use(observed: Observed) -> None:
    """vLLM's own listener is asked, which fails as it always does: readiness is not told."""
    scheduler = instrumented(observed)
    ready = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(zmq.ZMQError):
        scheduler._nixl_handshake_listener({}, ready, threading.Event(), *other.getsockname())

    assert not ready.is_set()
    assert any("cannot be listened at" in line for line in observed.messages())


@pytest.fixture
def stock_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of vLLM's own listener, which does nothing now."""
    calls: list[tuple[Any, ...]] = []
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

    def stock(encoded_data: Any, ready_event: Any, stop_event: Any, host: Any, port: Any) -> str:
        calls.append((encoded_data, ready_event, stop_event, host, port))
        return "stock"

    monkeypatch.setattr(NixlBaseConnectorScheduler, "_nixl_handshake_listener", staticmethod(stock))
    return calls


def test_switched_off(observed: Observed, monkeypatch: pytest.MonkeyPatch, stock_runs: list[Any]) -> None:
    """Without a word, unless that leaves a list of allowed peers without effect."""
    use_settings(observed, monkeypatch, listener=False)

    assert instrumented(observed)._nixl_handshake_listener({}, 1, 2, "h", 3) == "stock"
    assert stock_runs == [({}, 1, 2, "h", 3)]
    assert observed.messages() == []
    use_settings(observed, monkeypatch, listener=False, allowed_peers=["10.0.0.0/8"])
    instrumented(observed)._nixl_handshake_listener({}, 1, 2, "h", 3)
    assert any("not checked against allowed_peers" in line for line in observed.messages())


def test_other_arguments(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a vLLM that nobody has seen yet: its own listener runs, which is told once."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler

    monkeypatch.setattr(
        NixlBaseConnectorScheduler, "_nixl_handshake_listener", staticmethod(lambda new, host, port: ("stock", new))
    )
    scheduler = instrumented(observed)

    assert scheduler._nixl_handshake_listener(1, host="h", port=2) == ("stock", 1)
    assert scheduler._nixl_handshake_listener(1, host="h", port=2) == ("stock", 1)
    assert len([line for line in observed.messages() if "takes other arguments" in line]) == 1


@pytest.mark.parametrize("broken", ["bind", "serve"])
def test_a_listener_that_fails(observed: Observed, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """Before or after it was ready: vLLM's own takes its place."""

    def raises(*args: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(listener.HandshakeListener, broken, raises)
    served = Served(instrumented(observed))

    assert served.ask() is not None
    assert observed.updates()["nixl_telemetry_errors_total", "hook"] == 1
    served.close()


def test_what_fails_at_one_client_is_not_the_others(
    served: Served, observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection ends, and that is all."""
    with monkeypatch.context() as context:

        def raises(*args: Any) -> None:
            raise KeyError("injected")

        context.setattr(HandshakeRequests, "refused", raises)
        context.setattr(HandshakeRequests, "served", raises)
        served.raw(b"GET /").close()
        assert served.ask(b"junk", 0.2) is None
        assert served.ask(seconds=0.2) is None

    assert served.ask() is not None
    assert observed.updates()["nixl_telemetry_errors_total", "hook"] >= 1


def test_metadata_that_changes(served: Served) -> None:
    """vLLM 0.33 may register again: what is served is what is there when it is asked for."""
    data = getattr(served.scheduler, "_handshake_data", None)
    if data is None:
        pytest.skip("this vLLM keeps it to itself")
    data[0, 0] = b"new"

    assert (served.ask() or [b""])[0] == b"new"


# -------------------------------------------------------------------------------------------------------- Who may talk


def test_who_is_not_allowed_is_not_answered(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped, counted, logged, and audited once for each address."""
    audited: list[Any] = []
    monkeypatch.setattr(observed.telemetry, "audit", lambda make: audited.append(make()))
    use_settings(observed, monkeypatch, allowed_peers=["10.0.0.0/8", "fd00::/8"])
    served = Served(instrumented(observed))

    assert served.ask(seconds=0.3) is None
    assert served.ask(b"junk", seconds=0.3) is None
    assert served.results == {"not_allowed": 2}
    assert any("nixl.handshake_request.result=not_allowed" in line for line in observed.messages())
    (record,) = audited
    assert record.event == "handshake_request"
    assert (record.attributes["decision"], record.attributes["client.address"]) == ("rejected", "127.0.0.1")
    served.close()


@pytest.mark.parametrize(
    "allowed", [["127.0.0.0/8"], ["127.0.0.1"], ["LOCALHOST."], ["no.such.name.invalid", "::1", "localhost"]]
)
def test_who_is_allowed_is_answered(observed: Observed, monkeypatch: pytest.MonkeyPatch, allowed: list[str]) -> None:
    """By network, address or name; the first request waits until names are looked up."""
    use_settings(observed, monkeypatch, allowed_peers=allowed)
    served = Served(instrumented(observed))

    assert served.ask() is not None
    assert served.results == {"served": 1}
    served.close()


def test_a_resolver_that_hangs(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is allowed by address is answered meanwhile; others are refused after a while."""
    hanging = threading.Event()

    def lookup(name: str) -> list[str]:
        hanging.wait(10)
        return []

    monkeypatch.setattr(listener, "_LOOKUP_SECONDS", 0.3)
    monkeypatch.setattr(
        "nixl_telemetry.seam.scheduler.AllowedPeers",
        lambda entries: AllowedPeers(["slow.example", "127.0.0.2"], lookup),
    )
    use_settings(observed, monkeypatch, allowed_peers=["slow.example"])
    served = Served(instrumented(observed))
    waiting = served.client(zmq.DEALER)
    waiting.send_multipart([b"", query()])
    waiting.send_multipart([b"", query()])
    other = socket.socket()
    other.bind(("127.0.0.2", 0))
    other.connect(("127.0.0.1", served.port))
    other.sendall(GREETING + REQ + b"\x01\x00" + framed(query()))
    other.settimeout(5)
    received(other, lambda data: b"a" * 64 in data)

    assert wait_until(lambda: served.results == {"served": 1, "not_allowed": 2})
    hanging.set()
    waiting.close()
    other.close()
    served.close()


@pytest.fixture(params=["pull_worker", "push_worker"])
def choosy_worker(observed: Observed, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """A worker that may talk to few: in push, the prefill's too, whom the decode's registration says where to write."""
    use_settings(observed, monkeypatch, allowed_peers=["127.0.0.2", "10.0.0.0/8", "no.such.name.invalid"])
    return request.getfixturevalue(request.param)


HOSTS: dict[str, Callable[[], str]] = {
    "an address": lambda: "127.0.0.1",
    "a name": lambda: "localhost",
    "another spelling": lambda: "127.1",
    "IPv6": lambda: "::1",
    "IPv4 in IPv6": lambda: "::ffff:127.0.0.1",
    "what zmq takes for two addresses": lambda: "127.0.0.2:0;127.0.0.1",
    "no name at all": lambda: "\0 \x1b[31m" + "x" * 100_000,
    "nothing": lambda: "",
}


@pytest.mark.parametrize("kind", HOSTS)
def test_no_connection_to_who_is_not_allowed(
    observed: Observed, choosy_worker: Any, monkeypatch: Any, kind: str
) -> None:
    """The handshake fails as vLLM's handshakes fail, before a socket is opened."""
    audited: list[Any] = []
    monkeypatch.setattr(observed.telemetry, "audit", lambda make: audited.append(make()))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        future = choosy_worker._ensure_handshake("there", HOSTS[kind](), server.getsockname()[1], 1)
        error = future.exception(10)
        with pytest.raises(TimeoutError):
            server.accept()

    assert isinstance(error, PeerNotAllowedError)
    assert "allowed_peers is 127.0.0.2, 10.0.0.0/8" in str(error)
    assert "NIXLTEL_ALLOWED_PEERS" in str(error)
    assert str(error).isprintable()
    assert len(str(error)) < 2000
    (key,) = [key for key in observed.updates() if key[0] == "nixl_handshake_duration_seconds"]
    assert key[1] == "peer_not_allowed"
    (record,) = audited
    assert (record.attributes["decision"], record.attributes["error.type"]) == ("rejected", "peer_not_allowed")
    assert observed.span("nixl.handshake").attributes["error.type"] == "peer_not_allowed"


def test_who_is_allowed_is_connected_to(
    observed: Observed, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As vLLM connects; a name that is not on the list is looked up once, and its address is what is connected to."""
    use_settings(observed, monkeypatch, allowed_peers=["127.0.0.0/8"])
    worker = request.getfixturevalue("pull_worker")
    lookups: list[str] = []

    def lookup(name: str) -> list[str]:
        lookups.append(name)
        return ["127.0.0.1"]

    monkeypatch.setattr(worker._nixl_telemetry._allowed, "_lookup", lookup)
    with peer(lambda: [GOOD, CLOCK]) as port, accepting(worker):
        agents, _ = worker._nixl_handshake("prefill.invalid", port, 1, "there")
        assert shake(worker, port)[0] == agents == {(0, 0): "agent-there"}

    assert lookups == ["prefill.invalid"]
    assert observed.spans()[0].attributes["server.address"] == "prefill.invalid"


def test_what_cannot_be_checked_is_not_allowed(
    observed: Observed, choosy_worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of the check is no way around it."""

    def raises(host: str) -> str:
        raise LookupError("injected")

    monkeypatch.setattr(choosy_worker._nixl_telemetry._allowed, "destination", raises)
    with pytest.raises(PeerNotAllowedError, match="could not be checked"):
        shake(choosy_worker, free_port())
