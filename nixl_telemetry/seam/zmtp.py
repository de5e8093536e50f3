# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The server's half of a ZeroMQ connection, as bytes in and messages out: ZMTP 3 with the NULL mechanism.

Why not libzmq: its limits are on the size of a frame and on the number of whole messages that wait. A message of
endlessly many frames grows without bound, connections are not counted, and one that is silent is kept for ever.
"""

from collections.abc import Sequence
from typing import Final

FRAME_LIMIT: Final = 4096
"""Bytes of a frame; a query has about 20."""
FRAMES_LIMIT: Final = 8
"""Frames of a message; a query has two."""

# Signature, version 3.0, mechanism, no server of a security mechanism, padding.
GREETING: Final = b"\xff\0\0\0\0\0\0\0\x01\x7f" + b"\x03\0" + b"NULL".ljust(20, b"\0") + b"\0" + bytes(31)
_SIGNATURE_SIZE: Final = 10
_MAJOR_VERSION: Final = 3

_MORE, _LONG, _COMMAND = 1, 2, 4
_CLIENTS: Final = (b"REQ", b"DEALER", b"ROUTER")
"""Socket types that a ROUTER talks to."""
_PING_TTL_SIZE: Final = 2
_PING_CONTEXT_LIMIT: Final = 16


class ProtocolError(ValueError):
    """What came is no ZMTP, or goes beyond a limit: nothing that follows can be understood."""


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def _command(name: bytes, body: bytes) -> bytes:
    content = bytes([len(name)]) + name + body
    return bytes([_COMMAND, len(content)]) + content


READY: Final = _command(b"READY", _property(b"Socket-Type", b"ROUTER") + _property(b"Identity", b""))


def encode(frames: Sequence[bytes]) -> list[bytes]:
    """A message as buffers to be sent one after the other; the frames are not copied."""
    buffers = []
    for left, frame in zip(range(len(frames) - 1, -1, -1), frames, strict=True):
        more, size = _MORE if left else 0, len(frame)
        buffers.append(
            bytes([more, size]) if size <= 255 else bytes([more | _LONG]) + size.to_bytes(8, "big")  # noqa: PLR2004
        )
        buffers.append(frame)
    return [buffer for buffer in buffers if buffer]


class Connection:
    """What a client has sent so far. Holds at most a message and what one read brings.

    After a :class:`ProtocolError` it is of no more use.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._greeted = False
        self._frames: list[bytes] = []
        self.is_ready = False
        """Whether the client has said who it is: from then on messages come."""

    @property
    def is_amid(self) -> bool:
        """Whether the client has begun something that it has not finished."""
        return not self.is_ready or self.is_cut

    @property
    def is_cut(self) -> bool:
        """Whether what came ends in the middle of a greeting, a frame or a message."""
        return bool(self._buffer) or bool(self._frames)

    def feed(self, data: bytes) -> None:
        """Take what was read."""
        self._buffer += data

    def next(self) -> list[bytes] | bytes | None:
        """What comes next: the frames of a message, what the protocol answers to a command, or ``None``: read more.

        Many commands ask for nothing. Their answer is empty and no reason to go on: a read may bring 2,000 of them.

        Raises:
            ProtocolError: The connection has to be closed.
        """
        if not self._greeted and not self._greet():
            return None
        while (frame := self._take()) is not None:
            flags, body = frame
            if flags & _COMMAND:
                return self._obey(body)
            if not self.is_ready:
                raise ProtocolError("a message before READY")
            self._frames.append(body)
            if not flags & _MORE:
                message, self._frames = self._frames, []
                return message
            if len(self._frames) >= FRAMES_LIMIT:
                raise ProtocolError(f"a message of more than {FRAMES_LIMIT} frames")
        return None

    def _greet(self) -> bool:
        head = self._buffer[:_SIGNATURE_SIZE]
        # Said as soon as it is known: other protocols may never send 64 bytes.
        if (head and head[0] != GREETING[0]) or (len(head) == _SIGNATURE_SIZE and not head[-1] & 1):
            raise ProtocolError("no ZeroMQ greeting")
        if len(self._buffer) > _SIGNATURE_SIZE and self._buffer[_SIGNATURE_SIZE] < _MAJOR_VERSION:
            raise ProtocolError("a ZMTP version before 3")
        if len(self._buffer) < len(GREETING):
            return False
        if self._buffer[12:32] != GREETING[12:32]:
            raise ProtocolError("a security mechanism other than NULL")
        del self._buffer[: len(GREETING)]
        self._greeted = True
        return True

    def _take(self) -> tuple[int, bytes] | None:
        """Flags and content of the next frame, once it is complete."""
        buffer = self._buffer
        if not buffer:
            return None
        flags = buffer[0]
        if flags & ~(_MORE | _LONG | _COMMAND):
            raise ProtocolError("unknown flags of a frame")
        start = 9 if flags & _LONG else 2
        if len(buffer) < start:
            return None
        size = int.from_bytes(buffer[1:start], "big")
        if size > FRAME_LIMIT:
            raise ProtocolError(f"a frame of {size} bytes")
        if len(buffer) < start + size:
            return None
        body = bytes(buffer[start : start + size])
        del buffer[: start + size]
        return flags, body

    def _obey(self, command: bytes) -> bytes:
        """Take a command; what it asks for."""
        size = command[0] if command else 0
        name, body = command[1 : 1 + size], command[1 + size :]
        if not self.is_ready:
            if name != b"READY":
                raise ProtocolError("another command than READY")
            if not any(_property(b"Socket-Type", client) in body for client in _CLIENTS):
                raise ProtocolError("a socket type that asks nothing")
            self.is_ready = True
            return b""
        if name == b"PING":
            return _command(b"PONG", body[_PING_TTL_SIZE:][:_PING_CONTEXT_LIMIT])
        if name == b"ERROR":
            raise ProtocolError("the client reports an error")
        return b""
