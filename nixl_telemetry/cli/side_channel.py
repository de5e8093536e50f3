# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Asking an instance's handshake side channel, as a peer does.

Harmless by construction: all that is ever sent is the query of vLLM 0.28 to 0.33, for a rank that the caller knows to
exist, and it is sent only to what speaks ZeroMQ. One query for another rank, or one malformed message, ends the
listener of a stock instance for good.
"""

import ipaddress
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, NamedTuple, Self, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from nixl_telemetry.cli.output import CommandError

_DEFAULT_PORT: Final = 5600
_HIGHEST_PORT: Final = 65_535
_ANSWER_LIMIT: Final = 16 * 2**20
"""Bytes of an answer. The metadata of a rank is some kilobytes, and some hundred of them with many regions."""
_GREETING_SIZE: Final = 10
"""Bytes that a ZeroMQ socket sends before it is told anything: 0xFF, eight of padding or length, 0x7F."""
_RETRY_SECONDS: Final = 0.5
_EXCERPT: Final = 16

_Answer = TypeVar("_Answer")


class AddressError(CommandError):
    """No HOST:PORT."""


class SideChannelError(CommandError):
    """The instance did not answer, or not as an instance does.

    Args:
        address: Who was asked.
        problem: What came instead of an answer.
        may_pass: Whether that is also how an instance looks that is still starting.
    """

    def __init__(self, address: "Address", problem: str, *, may_pass: bool = False) -> None:
        super().__init__(f"{address} {problem}")
        self.may_pass = may_pass


class Position(NamedTuple):
    """Which rank of an instance, as its listener counts."""

    pp: int
    tp: int

    def __str__(self) -> str:
        return f"({self.pp}, {self.tp})"


FIRST: Final = Position(0, 0)
"""Every instance has it."""


@dataclass(frozen=True)
class Address:
    """Where an instance answers handshakes."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read HOST:PORT.

        Raises:
            AddressError: It is not that.
        """
        scheme, found, rest = text.strip().rpartition("://")
        if found and scheme.lower() != "tcp":
            raise AddressError(
                f"{text!r} is a URL; give HOST:PORT of the side channel, whose port is VLLM_NIXL_SIDE_CHANNEL_PORT "
                f"({_DEFAULT_PORT} by default)"
            )
        host, colon, port = rest.rpartition(":")
        if not colon or host.startswith("[") != host.endswith("]"):
            raise AddressError(f"{text!r} has no port; the side channel's is {_DEFAULT_PORT} by default")
        if not (re.fullmatch("[0-9]+", port) and 0 < int(port[:6]) <= _HIGHEST_PORT):
            raise AddressError(f"{text!r} has the port {port!r}, which is no number from 1 to {_HIGHEST_PORT}")
        return cls(_host(host, text), int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _host(host: str, text: str) -> str:
    if host.startswith("["):
        try:
            return str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            raise AddressError(f"{text!r} has no IPv6 address in the brackets") from None
    if ":" in host:
        raise AddressError(
            f"{text!r} is ambiguous; an IPv6 address goes into brackets, as in [fd00::7]:{_DEFAULT_PORT}"
        )
    if not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise AddressError(f"{text!r} has no host name or address before the port")
    try:
        host.encode("idna")
    except UnicodeError:
        raise AddressError(f"{text!r} has a host name of which a part is empty or too long") from None
    return host


class SideChannel:
    """A connection to the side channel of one instance.

    Args:
        address: Where it is.
        timeout: Seconds for the connection, and again for each answer.

    Raises:
        SideChannelError: On entering, if nothing there speaks ZeroMQ.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self.address: Final = address
        self._timeout: Final = timeout

    def __enter__(self) -> Self:
        host, port = self._look()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.REQ)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _ANSWER_LIMIT)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            self._socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise SideChannelError(self.address, f"cannot be reached by ZeroMQ: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()

    def ask(self, rank: Position = FIRST) -> bytes:
        """The payload of a rank.

        The caller is sure that the rank exists.

        Raises:
            SideChannelError: No answer came.
        """
        # The same in vLLM 0.28 to 0.33; earlier ones had another query, see docs/cli.md.
        self._socket.send(msgspec.msgpack.encode((b"get_meta_msg", rank.pp, rank.tp)))
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(round(self._timeout * 1000)))
        if self._socket in ready:
            # The second frame is the peer's clock, which a probe has no use for.
            return self._socket.recv_multipart()[0]
        if self._monitor in ready:
            recv_monitor_message(self._monitor)
            raise SideChannelError(
                self.address,
                f"closed the connection when it was asked for rank {rank}, or its answer was longer than "
                f"{_ANSWER_LIMIT} bytes; look into the instance's log",
                may_pass=True,
            )
        raise SideChannelError(
            self.address,
            f"speaks ZeroMQ and did not answer the query for rank {rank} within {self._timeout:g} s; is it the NIXL "
            "side channel of a vLLM 0.28 or later?",
            may_pass=True,
        )

    def _look(self) -> tuple[str, int]:
        """Connect once without ZeroMQ, which retries silently; returns the address that was reached."""
        address, timeout = self.address, self._timeout
        try:
            with socket.create_connection((address.host, address.port), timeout) as connection:
                greeting = _receive(connection, timeout)
                reached = connection.getpeername()
        except socket.gaierror as error:
            problem = f"is not known: the name {address.host!r} does not resolve ({error.strerror})"
        except ConnectionRefusedError:
            problem = "refused the connection: the instance is not up yet, or its handshake listener has ended"
        except TimeoutError:
            problem = f"cannot be reached: no connection within {timeout:g} s; a firewall, or the wrong address"
        except OSError as error:
            problem = f"cannot be reached: {error.strerror or error}"
        else:
            if greeting is None:
                raise SideChannelError(
                    address,
                    f"accepts connections and says nothing for {timeout:g} s, where ZeroMQ greets at once; is it the "
                    "HTTP port? The side channel's is VLLM_NIXL_SIDE_CHANNEL_PORT",
                )
            if greeting[:1] == b"\xff" and greeting[-1:] == b"\x7f":
                return reached[0], reached[1]
            if greeting:
                raise SideChannelError(address, f"greets with {greeting[:_EXCERPT]!r}, which is not ZeroMQ")
            problem = "closed the connection without a word"
        raise SideChannelError(address, problem, may_pass=True)


def _receive(connection: socket.socket, timeout: float) -> bytes | None:
    """The first bytes that a server sends by itself; ``None`` for silence."""
    deadline = time.monotonic() + timeout
    received = b""
    try:
        while len(received) < _GREETING_SIZE:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            part = connection.recv(_GREETING_SIZE - len(received))
            if not part:
                break
            received += part
    except TimeoutError:
        return received or None
    return received


def insist(attempt: Callable[[], _Answer], seconds: float) -> _Answer:
    """Try until it works or time is over, as long as the instance may still be starting.

    Args:
        attempt: What to try; at least once.
        seconds: How long to begin another attempt.

    Raises:
        SideChannelError: What the last attempt raised.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return attempt()
        except SideChannelError as error:
            if not error.may_pass or time.monotonic() + _RETRY_SECONDS > deadline:
                raise
        time.sleep(_RETRY_SECONDS)
