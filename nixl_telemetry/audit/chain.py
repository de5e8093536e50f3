# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The chain: how a record becomes a line that names the one before it, and how a line is checked.

A line is compact JSON in ASCII. Its last member is a digest over all bytes before that member, and the member before
holds the digest of the previous line::

    {"seq":2,"time":"2026-01-31T12:00:00.000000Z","event":"transfer",...,"prev":"<64 hex>","hash":"<64 hex>"}

The form is exact, newline included, so that any changed byte is found.
"""

import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, Self, TypeAlias

import msgspec

Value: TypeAlias = str | int | float | bool | Mapping[str, Any] | list[Any] | tuple[Any, ...] | None
"""What an attribute may hold. Anything else is written as its ``str``, and a number that is none as ``null``."""

LINE_LIMIT: Final = 64 * 1024
"""Bytes of a line, newline included; no line of ours is longer."""
OPENED: Final = "audit.opened"
"""First record of a stream: who writes it."""
CLOSED: Final = "audit.closed"
"""Last record of a stream whose process ended in order."""
LOST: Final = "audit.lost"
"""Says how many records are not in the stream, and why."""

_OWN_MEMBERS: Final = frozenset({"seq", "time", "event", "prev", "hash"})
_EVENT: Final = re.compile(r"[a-z][a-z0-9_.]{0,63}")
_VALUE_LIMIT: Final = 1024
_KEY_BYTES: Final = (16, 4096)
_HASH_OPEN: Final = b',"hash":"'
_HASH_CLOSE: Final = b'"}\n'
_TAIL_BYTES: Final = len(_HASH_OPEN) + 64 + len(_HASH_CLOSE)
_LINE: Final = re.compile(
    rb'\{"seq":([1-9]\d{0,17}),"time":"([0-9TZ:.-]{27})","event":"([a-z0-9_.]{1,64})"(?:,.*)?'
    rb',"prev":"([0-9a-f]{64})","hash":"([0-9a-f]{64})"\}\n',
    re.DOTALL,
)
_CLAIM: Final = re.compile(rb'\{"seq":([1-9]\d{0,17}),"time":"')
_ANY_CLAIM: Final = b'{"seq":0,"time":"'
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=10**18)]
_dumps: Final = json.JSONEncoder(separators=(",", ":"), default=str).encode


class AuditKeyError(ValueError):
    """A key file that cannot be used; the message names it and what is wrong."""


def read_key(path: str | Path) -> bytes:
    """The key that a file holds: its bytes as they are.

    Raises:
        AuditKeyError: If it cannot be read, or is too short or too long for a key.
    """
    shortest, longest = _KEY_BYTES
    try:
        with Path(path).open("rb") as file:
            key = file.read(longest + 1)
    except OSError as error:
        raise AuditKeyError(f"The audit key file {path} cannot be read: {error.strerror}.") from None
    if not shortest <= len(key) <= longest:
        size = f"more than {longest:,}" if len(key) > longest else str(len(key))
        raise AuditKeyError(
            f"The audit key file {path} has {size} bytes; a key has {shortest} to {longest:,}. "
            "Make one with: head -c 32 /dev/urandom"
        )
    return key


class Record(NamedTuple):
    """One thing that happened. An attribute must not be called as a member that each line has."""

    event: str
    attributes: Mapping[str, Value]


class Entry(NamedTuple):
    """A record that is ready to be linked: only its place in the chain is missing."""

    time: str
    event: str
    attributes: str
    """JSON members, each after a comma."""

    @classmethod
    def of(cls, time_ns: int, record: Record) -> Self:
        """Encode a record that happened at a time of the wall clock.

        Raises:
            ValueError: If it cannot be a line: a bad event name, an attribute named like a member, or too much of it.
        """
        if not _EVENT.fullmatch(record.event):
            raise ValueError(f"{record.event!r} is no event name")
        if taken := _OWN_MEMBERS & record.attributes.keys():
            raise ValueError(f"attributes of {record.event} are named like members of each line: {sorted(taken)}")
        attributes = _members(record.attributes)
        if len(attributes) > LINE_LIMIT // 2:
            # A peer chooses some of the values; a record of a rejected one must not fail by their length.
            attributes = _members({name: _short(value) for name, value in record.attributes.items()})
        if len(attributes) > LINE_LIMIT // 2:
            raise ValueError(f"{record.event} has too many attributes for a line: {len(record.attributes)}")
        return cls(timestamp(time_ns), record.event, attributes)

    def link(self, seq: int, prev: str, seal: "Seal") -> tuple[bytes, str]:
        """The line at a place in the chain, and its digest."""
        content = f'{{"seq":{seq},"time":"{self.time}","event":"{self.event}"{self.attributes},"prev":"{prev}"'.encode(
            "ascii"
        )
        digest = seal.digest(content)
        return _sealed(content, digest), digest


class Seal:
    """SHA-256, or HMAC-SHA-256 where there is a key.

    Attributes:
        key_id: A fingerprint that tells keys apart and nothing else; ``None`` without a key.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = key
        self.key_id = None if key is None else hmac.digest(key, b"nixl-audit key id", "sha256").hex()[:16]

    def digest(self, content: bytes) -> str:
        """The digest of the sealed part of a line."""
        if self._key is None:
            return hashlib.sha256(content).hexdigest()
        return hmac.digest(self._key, content, "sha256").hex()

    def holds(self, line: bytes) -> bool:
        """Whether a line is, byte for byte, as it was sealed."""
        content = line[:-_TAIL_BYTES]
        return line == _sealed(content, self.digest(content))


class Line(NamedTuple):
    """A line as it was read; its seal is another question."""

    seq: int
    time: str
    event: str
    prev: str
    hash: str
    members: dict[str, Any]

    @classmethod
    def parse(cls, line: bytes) -> Self | None:
        """Read a line; ``None`` if it has not the exact form."""
        match = _LINE.fullmatch(line)
        if match is None:
            return None
        try:
            members = json.loads(line)
        except (ValueError, RecursionError):
            return None
        seq, time, event, prev, digest = (group.decode() for group in match.groups())
        return cls(int(seq), time, event, prev, digest, members)


def first_link(stream: str) -> str:
    """What the first record of a stream names as its predecessor, so that no stream passes for another."""
    return hashlib.sha256(b"nixl-audit 1 " + os.fsencode(stream)).hexdigest()


def claimed_seq(line: bytes) -> int | None:
    """The number that a damaged line claims; ``None`` if it has none where ours have it."""
    match = _CLAIM.match(line)
    return int(match[1]) if match else None


def could_be_cut(line: bytes) -> bool:
    """Whether this may be the beginning of a line of ours whose rest never reached the disk.

    A file that grew before its data was on the disk ends in zeros after a power failure.
    """
    begun = re.sub(rb'^\{"seq":[1-9]\d{0,17}', b'{"seq":0', line.rstrip(b"\0"))
    return begun.startswith(_ANY_CLAIM) or _ANY_CLAIM.startswith(begun)


class Head(msgspec.Struct, frozen=True):
    """What stands beside the files of a stream, so that a cut-off end is found."""

    stream: str
    """Name of the stream."""
    file: _Count
    """Number of the file that was written last."""
    seq: _Count
    """Number of the last record."""
    last: str
    """Digest of the last record."""
    synced: _Count
    """Up to this record all was on the disk: not even a power failure loses it."""
    closed: bool
    """Nothing comes after."""
    key: str | None
    """Fingerprint of the key."""

    def encode(self, seal: Seal) -> bytes:
        """The head as a line with a seal of its own. It begins unlike a record: neither passes for the other."""
        content = b'{"head":1,' + msgspec.json.encode(self)[1:-1]
        return _sealed(content, seal.digest(content))

    @classmethod
    def parse(cls, line: bytes, seal: Seal) -> Self | None:
        """Read a head; ``None`` if it is not as it was sealed."""
        try:
            head = msgspec.json.decode(line, type=cls)
        except (msgspec.DecodeError, RecursionError):
            return None
        return head if head.encode(seal) == line else None


def timestamp(time_ns: int) -> str:
    """A time of the wall clock as lines have it: UTC, and as texts in the order of time."""
    seconds, ns = divmod(time_ns, 10**9)
    return f"{datetime.fromtimestamp(seconds, UTC).isoformat()[:19]}.{ns // 1000:06d}Z"


def _sealed(content: bytes, digest: str) -> bytes:
    return content + _HASH_OPEN + digest.encode("ascii") + _HASH_CLOSE


def _members(attributes: Mapping[str, Value]) -> str:
    return f",{_encode(dict(attributes))[1:-1]}" if attributes else ""


def _encode(value: Value) -> str:
    """Compact JSON in printable ASCII, so that nothing in a log can command a terminal."""
    try:
        text = msgspec.json.encode(value, enc_hook=str).decode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON of a request can bring
        return _dumps(value)
    return text if text.isascii() and text.isprintable() else _dumps(json.loads(text))


def _short(value: Value) -> Value:
    text = _encode(value)
    return value if len(text) <= _VALUE_LIMIT else f"{text[:_VALUE_LIMIT]}... ({len(text)} characters)"
