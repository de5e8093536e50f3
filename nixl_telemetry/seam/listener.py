# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The handshake listener that goes on: it stands in for vLLM's, whose thread ends with the first bad message.

What is touched: ``_nixl_handshake_listener`` of the scheduler, the target of vLLM's thread, with vLLM's arguments. The
thread, its start and its end stay vLLM's. Nothing public serves: the thread is started inside
``set_xfer_handshake_metadata``. Query and answer are those of vLLM 0.28.0 to 0.33.0, which do not differ. Where the
listener's parameters are others, or the port cannot be had, vLLM's own listener runs and does what it does.

Every connection has the same small share: what it may send at once, the time it may take, and the turns that it gets.
"""

import contextlib
import errno
import itertools
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from nixl_telemetry.operations.allowed_peers import AllowedPeers
from nixl_telemetry.operations.handshake_request import Client, HandshakeRequests
from nixl_telemetry.seam.zmtp import FRAME_LIMIT, GREETING, READY, Connection, ProtocolError, encode
from nixl_telemetry.signals.semconv import RequestResult

PARAMETERS: Final = ("encoded_data", "ready_event", "stop_event", "host", "port")
"""Of vLLM's listener."""

CONNECTIONS_LIMIT: Final = 256
"""Connections at a time; the one that was silent for longest makes room. A peer's handshake takes milliseconds."""
STALL_SECONDS: Final = 5.0
"""What a client may take for its greeting, for the rest of a message, and to take an answer. vLLM's initiators wait as
long for an answer."""
_LOOKUP_SECONDS: Final = 2.0
"""How long a request waits until the names of allowed peers are looked up."""
_MESSAGES_PER_TURN: Final = 8
_READS_PER_QUERY: Final = 16
"""An initiator needs up to six, where its greeting, READY and query come in parts."""
_ACCEPTS_PER_PASS: Final = 8
_SUSPECTS_PER_PASS: Final = 4
"""Turns for those who have sent something bad, or much, between two looks at all others. Each system call gives
vLLM's threads the interpreter, which may take 5 ms to come back."""
_TICK_SECONDS: Final = 0.5
"""How often time limits and vLLM's request to stop are looked at. Stock looks every second."""
_PARKED_TICK_SECONDS: Final = 0.02
_BUFFERS_AT_ONCE: Final = 64
_BACKLOG: Final = 128
_QUERY_FRAMES: Final = 2

_UNDECODABLE: Final = msgspec.msgpack.encode({})
"""An answer in the form of one that vLLM's initiator cannot decode: its handshake fails at once and says so. Silence
would keep the one thread that shakes hands for 5 s, and look like a dead peer."""


class BadQueryError(ValueError):
    """A message that asks for no rank."""


class _Client:
    """A connection and what is under way on it."""

    def __init__(self, connection: socket.socket, client: Client, now: float) -> None:
        self.socket = connection
        self.client = client
        self.received = Connection()
        self.out: deque[memoryview] = deque()
        self.since = now
        """When it last made progress."""
        self.parked: list[bytes] | None = None
        """A message that waits until it is known whether its sender is allowed."""
        self.admitted: bool | None = None
        """Whether its address is allowed; ``None`` while that is not known."""
        self.is_suspect = False
        """Whether it has sent something bad, or more than who waits for answers does: others go first."""
        self.reads = 0
        """Since its last query for a rank that exists."""
        self.closed = False

    @property
    def stage(self) -> str:
        """What it is in the middle of, where it is."""
        return "message" if self.received.is_ready else "greeting"

    @property
    def is_held(self) -> bool:
        """Whether nothing more is done for it now: until it has taken its answer, TCP makes it wait."""
        return bool(self.out) or self.parked is not None or self.closed


class HandshakeListener:
    """Answers queries for the metadata of ranks, until it is asked to stop.

    Args:
        word: The first element of a query.
        encoded_data: Payloads by (pp, tp) rank; looked at when asked, since vLLM 0.33 may change it.
        requests: Counts them.
        allowed: Who is answered; ``None`` for everybody.
        on_error: Told of what fails in here; the connection at which it did is closed.
    """

    def __init__(
        self,
        word: bytes,
        encoded_data: Mapping[tuple[int, int], bytes],
        requests: HandshakeRequests,
        allowed: AllowedPeers | None,
        on_error: Callable[[Exception], None],
    ) -> None:
        self._word = word
        self._payloads = encoded_data
        self._requests = requests
        self._allowed = allowed
        self._on_error = on_error
        self._decoder = msgspec.msgpack.Decoder(tuple[bytes, int, int])
        self._selector = selectors.DefaultSelector()
        self._server: socket.socket | None = None
        # In the order of last progress.
        self._clients: dict[int, _Client] = {}
        self._waiting: set[_Client] = set()
        """Those of which more can be done without reading."""
        self._suspects: dict[_Client, None] = {}
        """Suspects that have something to do, in the order of their turns."""

    def bind(self, host: str, port: int) -> None:
        """Listen.

        Raises:
            OSError: The address cannot be had.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # As libzmq: `::` takes IPv4 too.
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            server.bind(("" if host == "*" else host, port))
            server.listen(_BACKLOG)
            server.setblocking(False)
        except BaseException:
            server.close()
            raise
        self._server = server
        self._selector.register(server, selectors.EVENT_READ)

    def serve(self, stop: threading.Event) -> None:
        """Answer until ``stop`` is set. No client can end this."""
        swept = time.monotonic()
        while not stop.is_set():
            ready = self._selector.select(self._patience())
            now = time.monotonic()
            turns = self._waiting
            self._waiting = set()
            for key, events in ready:
                if key.fileobj is self._server:
                    self._accept(stop, now)
                else:
                    client: _Client = key.data
                    turns.add(client)
                    if events & selectors.EVENT_WRITE:
                        self._guard(client, self._send, now)
            for client in turns:
                if client.is_suspect:
                    self._suspects[client] = None
                else:
                    self._guard(client, self._turn, now)
            for client in list(itertools.islice(self._suspects, _SUSPECTS_PER_PASS)):
                self._suspects.pop(client, None)
                self._guard(client, self._turn, now)
            if now - swept >= _TICK_SECONDS:
                swept = now
                self._sweep(now)

    def close(self) -> None:
        """Close everything."""
        for client in list(self._clients.values()):
            self._drop(client)
        if self._server is not None:
            self._server.close()
        self._selector.close()

    def _patience(self) -> float:
        if self._suspects:
            return 0.0
        if not self._waiting:
            return _TICK_SECONDS
        return _PARKED_TICK_SECONDS if all(client.parked is not None for client in self._waiting) else 0.0

    # ------------------------------------------------------------------------------------------------- Connections

    def _accept(self, stop: threading.Event, now: float) -> None:
        assert self._server is not None  # noqa: S101 (bound before it serves)
        for _ in range(_ACCEPTS_PER_PASS):
            try:
                connection, address = self._server.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    continue  # it went away again
                # The process has no more to give: one of ours goes, or nobody is accepted for a moment.
                if not self._make_room():
                    stop.wait(_PARKED_TICK_SECONDS)
                return
            client = _Client(connection, Client(address[0], address[1]), now)
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._selector.register(connection, selectors.EVENT_READ, client)
            except OSError:
                connection.close()
                continue
            if len(self._clients) >= CONNECTIONS_LIMIT:
                self._make_room()
            self._clients[id(client)] = client
            client.out.append(memoryview(GREETING + READY))
            self._guard(client, self._send, now)

    def _make_room(self) -> bool:
        """Close the connection that was silent for longest; false if there is none."""
        client = next(iter(self._clients.values()), None)
        if client is None:
            return False
        self._drop(client)
        return True

    def _guard(self, client: _Client, act: Any, *args: Any) -> None:
        """Do something for a client; what goes wrong with it ends its connection and nothing else."""
        if client.closed:
            return
        try:
            act(client, *args)
        except ProtocolError as error:
            self._refuse(client, RequestResult.MALFORMED, f"the connection was closed: {error}")
            self._drop(client)
        except OSError:
            self._drop(client)
        except Exception as error:
            self._on_error(error)
            self._drop(client)

    def _refuse(self, client: _Client, result: RequestResult, message: str) -> None:
        try:
            self._requests.refused(result, client.client, message)
        except Exception as error:
            self._on_error(error)

    def _drop(self, client: _Client) -> None:
        client.closed = True
        self._clients.pop(id(client), None)
        self._waiting.discard(client)
        self._suspects.pop(client, None)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.socket)
        client.socket.close()

    def _sweep(self, now: float) -> None:
        """Close what has stalled."""
        for client in list(self._clients.values()):
            if now - client.since < STALL_SECONDS:
                break  # those behind it have moved later
            if client.out:
                self._drop(client)
            elif client.received.is_amid and client.parked is None:
                self._refuse(
                    client,
                    RequestResult.MALFORMED,
                    f"the connection was closed: it sent nothing more for {STALL_SECONDS:g} s, in the middle of a "
                    f"{client.stage}",
                )
                self._drop(client)

    def _moved(self, client: _Client, now: float) -> None:
        client.since = now
        self._clients[id(client)] = self._clients.pop(id(client))

    # ---------------------------------------------------------------------------------------------------- Messages

    def _turn(self, client: _Client, now: float) -> None:
        """Take a few messages of a client, and read if there is none."""
        if client.parked is not None:
            message, client.parked = client.parked, None
            self._selector.register(client.socket, selectors.EVENT_READ, client)
            self._handle(client, message, now)
        has_read = False
        for _ in range(_MESSAGES_PER_TURN):
            if client.is_held:
                return
            item = client.received.next()
            if item is None:
                if has_read or not self._read(client, now):
                    return
                has_read = True
            elif isinstance(item, list):
                self._moved(client, now)
                self._handle(client, item, now)
            elif item:
                self._answer(client, [memoryview(item)], now)
        # An initiator waits for each answer.
        client.is_suspect = True
        self._waiting.add(client)

    def _read(self, client: _Client, now: float) -> bool:
        """Read what has come; false if nothing has, or nothing will.

        Raises:
            ProtocolError: The client has left in the middle of something.
        """
        try:
            data = client.socket.recv(FRAME_LIMIT)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            if client.received.is_cut:
                raise ProtocolError(f"it ended in the middle of a {client.stage}")
            self._drop(client)
            return False
        if not client.received.is_amid:
            self._moved(client, now)
        client.received.feed(data)
        client.reads += 1
        if client.reads > _READS_PER_QUERY:
            client.is_suspect = True
        return True

    def _handle(self, client: _Client, message: list[bytes], now: float) -> None:
        if client.admitted is None:
            client.admitted = self._allowed.admits(client.client.address) if self._allowed is not None else True
        if client.admitted is None and now - client.since < _LOOKUP_SECONDS:
            client.parked = message
            self._waiting.add(client)
            # Or what else it sends would wake the loop over and over.
            self._selector.unregister(client.socket)
            return
        if not client.admitted:
            client.is_suspect = True
            text = "dropped: the address is not in allowed_peers"
            self._refuse(client, RequestResult.NOT_ALLOWED, text)
            return
        try:
            rank = self._rank(message)
        except BadQueryError as error:
            client.is_suspect = True
            self._refuse(client, RequestResult.MALFORMED, f"dropped: {error}")
            return
        payload = self._payloads.get(rank)
        if payload is not None:
            client.reads = 0
            self._requests.served()
        else:
            text = f"it asked for the rank (pp {rank[0]}, tp {rank[1]}); there are {_shown(self._payloads)}"
            self._refuse(client, RequestResult.UNKNOWN_RANK, text)
        # As vLLM's own: its clock, taken as late as can be.
        clock = msgspec.msgpack.encode(time.perf_counter())
        frames = [b"", payload if payload is not None else _UNDECODABLE, clock]
        self._answer(client, [memoryview(buffer) for buffer in encode(frames)], now)

    def _rank(self, message: list[bytes]) -> tuple[int, int]:
        if len(message) != _QUERY_FRAMES or message[0]:
            raise BadQueryError(f"a message of {len(message)} frames that is no query")
        try:
            word, pp_rank, tp_rank = self._decoder.decode(message[1])
        except (msgspec.MsgspecError, RecursionError):
            raise BadQueryError("a message that cannot be decoded") from None
        if word != self._word:
            raise BadQueryError("a message of another type")
        return pp_rank, tp_rank

    def _answer(self, client: _Client, buffers: list[memoryview], now: float) -> None:
        client.out.extend(buffers)
        self._send(client, now)

    def _send(self, client: _Client, now: float) -> None:
        """Send what can be sent now; the rest when there is room."""
        while client.out:
            try:
                sent = client.socket.sendmsg([*client.out][:_BUFFERS_AT_ONCE])
            except BlockingIOError:
                self._watch(client, selectors.EVENT_WRITE)
                return
            self._moved(client, now)
            while sent:
                first = client.out.popleft()
                if len(first) > sent:
                    client.out.appendleft(first[sent:])
                sent -= min(sent, len(first))
        self._watch(client, selectors.EVENT_READ)

    def _watch(self, client: _Client, events: int) -> None:
        if self._selector.get_key(client.socket).events != events:
            self._selector.modify(client.socket, events, client)


def _shown(payloads: Mapping[tuple[int, int], bytes]) -> str:
    """Which ranks there are, briefly."""
    ranks = list(payloads)
    pp_ranks, tp_ranks = ({rank[position] for rank in ranks} for position in (0, 1))
    return f"{len(pp_ranks)} pp and {len(tp_ranks)} tp ranks"
