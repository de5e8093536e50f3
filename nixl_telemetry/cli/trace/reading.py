# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Trace files as plain spans: OTLP in its JSON encoding, one export request a line.

Nothing is believed: what is missing or of a wrong type is left out, and what cannot be used is counted.
"""

import contextlib
import functools
import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from nixl_telemetry.cli.output import CommandError

LINE_LIMIT: Final = 32 * 2**20
"""Bytes of a line that is still read."""

_TEXT_LIMIT: Final = 10_000
"""Characters of a text that are kept."""

_EXCERPT_BYTES: Final = 60
_BEGIN: Final = re.compile(rb"\s*\{\s*\"resourceSpans\"")
_GZIP: Final = b"\x1f\x8b"
_HEX: Final = re.compile(r"[0-9a-f]+")
_INTEGER: Final = re.compile(r"-?[0-9]{1,20}")
_NUMBER: Final = re.compile(r"[0-9]{1,9}")
_HUGE: Final = 1e300
_LONGEST_SECONDS: Final = 1e9
_ERROR: Final = (2, "STATUS_CODE_ERROR")
_IDENTITY: Final = ("host.name", "service.instance.id", "vllm.process_id")
"""Attributes of a resource that tell processes apart."""

_decode: Final = msgspec.json.Decoder().decode

Scalar = str | int | float | bool
Value = Scalar | tuple[Scalar, ...]
Attributes = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened during a span."""

    name: str
    time_ns: int | None
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Span:
    """One span.

    Attributes:
        trace_id: 32 hex digits, in lower case.
        span_id: 16 hex digits, in lower case.
        parent_id: The same, or empty.
        name: Its name; may be empty.
        start_ns: Unix time in nanoseconds.
        end_ns: The same; ``None`` where there is none, or one before the start.
        attributes: Its attributes.
        events: Its events, in order.
        links: Trace ids of the spans that it links to.
        is_failed: Whether its status is ERROR.
        message: The message of the status.
        resource: Attributes of the process that made it.
    """

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int | None
    attributes: Attributes
    events: tuple[Event, ...]
    links: tuple[str, ...]
    is_failed: bool
    message: str
    resource: Attributes

    @property
    def duration_ns(self) -> int | None:
        """How long it lasted, where that is known."""
        return None if self.end_ns is None else self.end_ns - self.start_ns

    @property
    def process(self) -> tuple[str, ...]:
        """What tells the process that made it from others; empty texts where its resource does not say."""
        return tuple(str(self.resource.get(name, "")) for name in _IDENTITY)

    def text(self, name: str) -> str:
        """An attribute as text; empty where there is none."""
        return str(self.attributes.get(name, ""))

    def count(self, name: str) -> int | None:
        """An attribute that counts something; ``None`` where there is none, or no count."""
        value = self.attributes.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

    def seconds(self, name: str) -> float | None:
        """An attribute that is a duration; ``None`` where there is none, or no duration."""
        value = self.attributes.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return float(value) if 0 <= value <= _LONGEST_SECONDS else None


@dataclass
class Unread:
    """What could not be read."""

    lines: int = 0
    spans: int = 0
    first: str = ""
    """FILE:LINE."""

    def note(self, place: str, *, lines: int = 0, spans: int = 0) -> None:
        """Count something that is at a place."""
        self.lines += lines
        self.spans += spans
        self.first = self.first or place

    def __str__(self) -> str:
        """One line for a person; empty if all was read."""
        parts = [
            f"{count:,} {thing}{'' if count == 1 else 's'}"
            for count, thing in ((self.lines, "line"), (self.spans, "span"))
            if count
        ]
        return f"{' and '.join(parts)} could not be read, the first at {self.first}" if parts else ""


_Part = tuple[Path, BinaryIO]
"""An open file."""


class TraceFiles:
    """Trace files with their rotated siblings, which may be read several times.

    Args:
        streams: The path that was asked for, and its open files, the oldest first.
    """

    def __init__(self, streams: Mapping[Path, Sequence[_Part]]) -> None:
        self._streams = streams
        self.unread = Unread()
        """What the last reading could not read."""

    @property
    def asked_for(self) -> list[Path]:
        """The files without their rotated siblings."""
        return list(self._streams)

    @property
    def paths(self) -> list[Path]:
        """Every file."""
        return [path for parts in self._streams.values() for path, _ in parts]

    def spans(self, traces: Container[str] | None = None) -> Iterator[Span]:
        """Reads everything once more: every span, or those of some traces.

        Raises:
            CommandError: A file is no trace file.
        """
        self.unread = unread = Unread()
        for path, parts in self._streams.items():
            is_trace_file, other = False, b""
            for place, line in _numbered(parts):
                if line is not None and line.isspace():
                    continue
                spans = None if line is None else _spans(line, traces)
                if spans is None:
                    unread.note(place, lines=1)
                    other = other or line or b"(a very long line)"
                    continue
                is_trace_file = True
                for span in spans:
                    if span is None:
                        unread.note(place, spans=1)
                    else:
                        yield span
            if other and not is_trace_file:
                raise CommandError(f"{path} {_no_trace_file(other)}")


@contextlib.contextmanager
def open_files(paths: Sequence[Path]) -> Iterator[TraceFiles]:
    """Open trace files, and those that they were rotated to: ``FILE.1`` is older than ``FILE``.

    All are held open, so that each reading finds the same ones though they are rotated meanwhile.

    Raises:
        CommandError: One does not exist, or cannot be opened.
    """
    with contextlib.ExitStack() as exits:
        seen: set[tuple[int, int]] = set()
        streams: dict[Path, list[_Part]] = {}
        for path in paths:
            parts = streams.setdefault(path, [])
            # The newest first: what is rotated while this runs is then met again, and not missed.
            for part in _existing([path, *_rotated(path)]):
                stream = exits.enter_context(_open(part))
                status = os.fstat(stream.fileno())
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    parts.insert(0, (part, stream))
        yield TraceFiles(streams)


def _existing(paths: Sequence[Path]) -> list[Path]:
    """Those that are files; the first is the one that was asked for."""
    try:
        found = [path for path in paths if path.is_file()]
        if found:
            return found
        what = "is no file: name the trace file itself" if paths[0].exists() else "does not exist"
    except OSError as error:
        what = f"cannot be read: {error.strerror}"
    raise CommandError(f"{paths[0]} {what}")


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None


def _rotated(path: Path) -> list[Path]:
    """The files that a file was rotated to, the newest first."""
    numbers = []
    with contextlib.suppress(OSError):  # then there are none that could be read
        for sibling in path.parent.iterdir():
            stem, _, number = sibling.name.rpartition(".")
            if stem and stem == path.name and _NUMBER.fullmatch(number):
                numbers.append(int(number))
    return [path.with_name(f"{path.name}.{number}") for number in sorted(numbers)]


def _numbered(parts: Sequence[_Part]) -> Iterator[tuple[str, bytes | None]]:
    """Every line of some files, and where it is; ``None`` stands for one that is too long."""
    for path, stream in parts:
        try:
            stream.seek(0)
            for number, line in enumerate(iter(functools.partial(stream.readline, LINE_LIMIT), b""), 1):
                is_whole = line.endswith(b"\n") or len(line) < LINE_LIMIT
                yield f"{path}:{number}", line if is_whole else None
                while not is_whole:
                    rest = stream.readline(LINE_LIMIT)
                    is_whole = not rest or rest.endswith(b"\n")
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error.strerror}") from None


def _no_trace_file(line: bytes) -> str:
    """What a file is instead, by its first line, and what to do."""
    if line.startswith(_GZIP):
        return "is compressed (gzip); unpack it first, with gunzip"
    if _BEGIN.match(line) and not _is_json(line):
        return "is cut off in its first line, or still being written; nothing of it can be shown yet"
    excerpt = line[:_EXCERPT_BYTES].decode("utf-8", "replace").strip()
    what = (
        f"is no trace file: it begins with {excerpt!r}, and a line of a trace file is a JSON object with resourceSpans"
    )
    if excerpt == "{":
        return f"{what}; it may be JSON over several lines: `jq -c . FILE` makes a line of it"
    return f"{what}; give the file that an instance writes (trace_file)"


def _is_json(line: bytes) -> bool:
    try:
        _decode(line)
    except (msgspec.MsgspecError, ValueError):
        return False
    except (OverflowError, RecursionError):  # as far as it was read, it is
        return True
    return True


def _spans(line: bytes, traces: Container[str] | None) -> list[Span | None] | None:
    """The spans of a line, ``None`` for each that cannot be used; ``None`` if it is no line of a trace file."""
    try:
        request = _decode(line)
        if not isinstance(request, dict) or not isinstance(request.get("resourceSpans"), list):
            return None
        return list(_walk(request["resourceSpans"], traces))
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return None


def _walk(resource_spans: list[Any], traces: Container[str] | None) -> Iterator[Span | None]:
    for of_resource in map(_object, resource_spans):
        resource = _attributes(_object(of_resource.get("resource")).get("attributes"))
        for of_scope in map(_object, _list(of_resource.get("scopeSpans"))):
            for raw in map(_object, _list(of_scope.get("spans"))):
                trace_id = _hex(raw.get("traceId"), 32)
                if traces is None or trace_id in traces:
                    yield _span(raw, trace_id, resource)


def _span(raw: Mapping[str, Any], trace_id: str, resource: Attributes) -> Span | None:
    span_id, start_ns = _hex(raw.get("spanId"), 16), _time(raw.get("startTimeUnixNano"))
    if not trace_id or not span_id or start_ns is None:
        return None
    end_ns = _time(raw.get("endTimeUnixNano"))
    status = _object(raw.get("status"))
    links = (_hex(link.get("traceId"), 32) for link in map(_object, _list(raw.get("links"))))
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        parent_id=_hex(raw.get("parentSpanId"), 16),
        name=_text(raw.get("name")),
        start_ns=start_ns,
        end_ns=end_ns if end_ns is not None and end_ns >= start_ns else None,
        attributes=_attributes(raw.get("attributes")),
        events=tuple(map(_event, map(_object, _list(raw.get("events"))))),
        links=tuple(filter(None, links)),
        is_failed=status.get("code") in _ERROR,
        message=_text(status.get("message")),
        resource=resource,
    )


def _event(raw: Mapping[str, Any]) -> Event:
    return Event(_text(raw.get("name")), _time(raw.get("timeUnixNano")), _attributes(raw.get("attributes")))


def _attributes(pairs: Any) -> Attributes:
    found = {}
    for pair in map(_object, _list(pairs)):
        key, value = pair.get("key"), _value(pair.get("value"))
        if isinstance(key, str) and value is not None:
            found[key] = value
    return found


def _value(raw: Any) -> Value | None:
    if isinstance(raw, dict) and isinstance(array := raw.get("arrayValue"), dict):
        items = map(_scalar, _list(array.get("values")))
        return tuple(item for item in items if item is not None)
    return _scalar(raw)


def _scalar(raw: Any) -> Scalar | None:
    match raw:
        case {"stringValue": value}:
            return _text(value)
        case {"boolValue": bool(value)}:
            return value
        case {"intValue": value}:
            return _integer(value)
        case {"doubleValue": bool()}:
            return None
        case {"doubleValue": int() | float() as value} if abs(value) < _HUGE:  # neither is NaN
            return float(value)
        case {"kvlistValue": value} | {"bytesValue": value}:
            return _text(msgspec.json.encode(value).decode())
    return None


def _integer(raw: Any) -> int | None:
    """An integer, which may be a number or a text."""
    if isinstance(raw, str) and _INTEGER.fullmatch(raw):
        raw = int(raw)
    is_integer = isinstance(raw, int) and not isinstance(raw, bool)
    return raw if is_integer and -(2**63) <= raw < 2**64 else None


def _time(raw: Any) -> int | None:
    """A time that can be one: zero is how the protocol says that there is none."""
    value = _integer(raw)
    return value if value is not None and value > 0 else None


def _hex(raw: Any, digits: int) -> str:
    """An id; empty if it is none."""
    text = raw.lower() if isinstance(raw, str) and len(raw) == digits else ""
    return text if _HEX.fullmatch(text) else ""


def _text(raw: Any) -> str:
    return raw[:_TEXT_LIMIT] if isinstance(raw, str) else ""


def _object(raw: Any) -> dict[str, Any]:
    return raw if isinstance(raw, dict) else {}


def _list(raw: Any) -> list[Any]:
    return raw if isinstance(raw, list) else []
