# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans as OTLP messages.

OpenTelemetry's encoder takes finished spans of its SDK; to make one and to encode it costs 50 µs and more, which would
be most of what the suite costs. Here a span is put together from bytes: the fields of a message may come in any order,
so what repeats (names, engine ids, versions, peers) is encoded once, by protobuf, and of the rest little more than the
values is left to encode.
"""

import functools
import secrets
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan, SpanFlags, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind

from nixl_telemetry.signals.attributes import Attributes, AttributeValue
from nixl_telemetry.signals.description import Span
from nixl_telemetry.signals.semconv import SpanName

_KINDS: Final = {
    SpanKind.INTERNAL: OtlpSpan.SPAN_KIND_INTERNAL,
    SpanKind.SERVER: OtlpSpan.SPAN_KIND_SERVER,
    SpanKind.CLIENT: OtlpSpan.SPAN_KIND_CLIENT,
    SpanKind.PRODUCER: OtlpSpan.SPAN_KIND_PRODUCER,
    SpanKind.CONSUMER: OtlpSpan.SPAN_KIND_CONSUMER,
}
# What precedes a field in a span, or an id in a link: its number and length, or its number and that it has eight bytes.
_TRACE_ID: Final = b"\x0a\x10"
_SPAN_ID: Final = b"\x12\x08"
_PARENT_ID: Final = b"\x22\x08"
_START: Final = b"\x39"
_END: Final = b"\x41"
_MOMENTS: Final = struct.Struct("<2s16ssQsQ")
_FLAGS: Final = {
    False: SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK,
    True: SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK,
}


class Message(NamedTuple):
    """An ``ExportTraceServiceRequest`` that is encoded."""

    data: bytes
    span_count: int


@dataclass(frozen=True)
class Envelope:
    """A message without spans, encoded in two parts."""

    resource: bytes
    """Of the ``ResourceSpans``."""
    scope: bytes
    """Of the ``ScopeSpans``."""

    @classmethod
    def of(cls, resource: Resource, scope: InstrumentationScope) -> "Envelope":
        """As OpenTelemetry's own encoder makes it."""
        context = SpanContext(1, 1, is_remote=False)
        span = ReadableSpan(
            "", context=context, resource=resource, instrumentation_scope=scope, start_time=0, end_time=0
        )
        (of_resource,) = encode_spans([span]).resource_spans
        (of_scope,) = of_resource.scope_spans
        of_scope.ClearField("spans")
        encoded_scope = of_scope.SerializeToString()
        of_resource.ClearField("scope_spans")
        return cls(of_resource.SerializeToString(), encoded_scope)

    def around(self, spans: Iterable[bytes], count: int) -> Message:
        """A message with so many spans, each a field of ``ScopeSpans``."""
        of_scope = b"".join((self.scope, *spans))
        of_resource = b"".join((self.resource, _before_message(2, len(of_scope)), of_scope))
        return Message(_before_message(1, len(of_resource)) + of_resource, count)


@dataclass(slots=True)
class ExportedSpan:
    """A span that is to be exported, without its children.

    Args:
        span: What it says.
        context: Its ids.
        parent: Its parent's.
        attributes: All that it is to have, but for those that are encoded.
        offset_ns: What to add to its moments to get Unix time.
        encoded: Attributes that many spans have, encoded.
    """

    span: Span
    context: SpanContext
    parent: SpanContext | None
    attributes: Attributes
    offset_ns: int
    encoded: bytes = b""

    def encode(self) -> bytes:
        """The span, as a field of OTLP's ``ScopeSpans``."""
        span, offset_ns = self.span, self.offset_ns
        parts = [
            self._moments(),
            _SPAN_ID + _span_id(self.context),
            _described(span.name, span.kind, self.parent is not None and self.parent.is_remote),
            self.encoded,
            encode_attributes(self.attributes),
            self._outcome(),
            *map(_encode_link, span.links),
        ]
        if self.parent is not None:
            parts.append(_PARENT_ID + _span_id(self.parent))
        if span.events:
            rest = OtlpSpan()
            for event in span.events:
                rest.events.add(
                    name=event.name,
                    time_unix_nano=offset_ns + event.at_ns,
                    attributes=[_key_value(name, value) for name, value in event.attributes.items()],
                )
            parts.append(rest.SerializeToString())
        encoded = b"".join(parts)
        return before_span(len(encoded)) + encoded

    def encode_children(self, name: SpanName, attributes: Attributes) -> bytes:
        """What children have in common that have its interval and its status. They lack their ids and the like."""
        return b"".join(
            (
                self._moments(),
                _PARENT_ID + _span_id(self.context),
                _described(name, SpanKind.INTERNAL, False),
                encode_attributes(attributes),
                self._outcome(),
            )
        )

    def _moments(self) -> bytes:
        """Its trace and its interval."""
        start_ns, end_ns = self.offset_ns + self.span.start_ns, self.offset_ns + self.span.end_ns
        return _MOMENTS.pack(_TRACE_ID, _trace_id(self.context), _START, start_ns, _END, end_ns)

    def _outcome(self) -> bytes:
        """Its status and its trace's state; for nearly all spans :func:`_described` has said all of that."""
        error, state = self.span.error, _state(self.context)
        if error is None and not state:
            return b""
        status = Status()
        if error is not None:
            status = Status(code=Status.STATUS_CODE_ERROR, message=_utf8(self.span.message).decode())
        encoded: bytes = OtlpSpan(trace_state=state, status=status).SerializeToString()
        return encoded


def encode_attributes(attributes: Attributes) -> bytes:
    """A span that has only these attributes, encoded."""
    return b"".join([_ENCODERS.get(type(value), _remembered)(name, value) for name, value in attributes.items()])


def encode_ids(count: int) -> list[bytes]:
    """So many spans that have only an id, a new one, encoded."""
    ids = secrets.token_bytes(8 * count)
    return [_SPAN_ID + ids[at : at + 8] for at in range(0, len(ids), 8)]


def before_span(size: int) -> bytes:
    """What precedes a span of so many bytes in OTLP's ``ScopeSpans``."""
    return _before_message(2, size)


@functools.lru_cache(1024)
def _before_message(number: int, length: int) -> bytes:
    """What precedes a message that is a field with this number."""
    return bytes((number << 3 | 2,)) + _varint(length)


@functools.cache
def _described(name: SpanName, kind: SpanKind, has_remote_parent: bool) -> bytes:
    # With a status, as the SDK's encoder has it.
    span = OtlpSpan(name=name, kind=_KINDS[kind], flags=_FLAGS[has_remote_parent], status=Status())
    encoded: bytes = span.SerializeToString()
    return encoded


def _encode_link(link: SpanContext) -> bytes:
    """A span that has only this link, encoded."""
    parts = (_TRACE_ID, _trace_id(link), _SPAN_ID, _span_id(link), _linked(link.is_remote, _state(link)))
    encoded = b"".join(parts)
    return _before_message(OtlpSpan.LINKS_FIELD_NUMBER, len(encoded)) + encoded


@functools.lru_cache(64)
def _linked(is_remote: bool, state: str) -> bytes:
    encoded: bytes = OtlpSpan.Link(trace_state=state, flags=_FLAGS[is_remote]).SerializeToString()
    return encoded


def encode_count(name: str, value: int) -> bytes:
    """A span that has one attribute only, a number of 0 or more, encoded."""
    number = _varint(value)
    return _before_varint(name, len(number)) + number


def encode_counts(name: str, values: Iterable[int]) -> list[bytes]:
    """The same for each of many numbers."""
    before = _before_varint(name, 2)
    # Nearly all numbers of blocks take two bytes: seven bits, with the eighth set, and seven more.
    return [
        before + (value + (value & ~0x7F) + 0x80).to_bytes(2, "little")
        if 1 << 7 <= value < 1 << 14
        else encode_count(name, value)
        for value in values
    ]


def _encode_double(name: str, value: float) -> bytes:
    return _before_double(name) + _DOUBLE.pack(value)


def _encode_integer(name: str, value: int) -> bytes:
    # Protobuf refuses what has no 64 bits.
    return encode_count(name, value) if 0 <= value < 1 << 63 else _alone(name, value)


def _encode_text(name: str, value: str) -> bytes:
    text = _utf8(value)
    return _before_text(name, len(text)) + text


def _alone(name: str, value: AttributeValue) -> bytes:
    encoded: bytes = OtlpSpan(attributes=[_key_value(name, value)]).SerializeToString()
    return encoded


_ENCODERS: Final[dict[type, Callable[[str, Any], bytes]]] = {
    float: _encode_double,
    int: _encode_integer,
    str: _encode_text,
    # Few spans have one, and below two are the same where their elements are equal: (1,) and (True,).
    tuple: _alone,
}
# The names of enumerations, above all. By type too: true is no number.
_remembered: Final = functools.lru_cache(1024, typed=True)(_alone)
_DOUBLE: Final = struct.Struct("<d")


# What precedes a value: protobuf encodes the attribute with one that is as long.


@functools.lru_cache(256)
def _before_double(name: str) -> bytes:
    return _alone(name, 0.0)[: -_DOUBLE.size]


@functools.lru_cache(256)
def _before_varint(name: str, size: int) -> bytes:
    return _alone(name, 1 << 7 * (size - 1))[:-size]


@functools.lru_cache(1024)
def _before_text(name: str, size: int) -> bytes:
    encoded = _alone(name, "x" * size)
    return encoded[: len(encoded) - size]


def _varint(value: int) -> bytes:
    """Seven bits in each byte, the lowest first; all but the last have the eighth bit."""
    encoded = bytearray()
    while value >= 1 << 7:
        encoded.append(value % (1 << 7) + (1 << 7))
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _utf8(text: str) -> bytes:
    """Protobuf refuses half of a surrogate pair: no reason to lose a span."""
    return text.encode("utf-8", "replace")


def _key_value(name: str, value: AttributeValue) -> KeyValue:
    return KeyValue(key=name, value=_value(value))


def _value(value: AttributeValue) -> AnyValue:
    match value:
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case tuple():
            return AnyValue(array_value=ArrayValue(values=map(_value, value)))
        case _:
            return AnyValue(string_value=_utf8(str(value)).decode())


def _trace_id(context: SpanContext) -> bytes:
    return context.trace_id.to_bytes(16, "big")


def _span_id(context: SpanContext) -> bytes:
    return context.span_id.to_bytes(8, "big")


def _state(context: SpanContext) -> str:
    return context.trace_state.to_header() if context.trace_state else ""
