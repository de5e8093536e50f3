# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans as OTLP messages.

OpenTelemetry's encoder takes finished spans of its SDK; to make one and to encode it costs 50 µs and more, which would
be most of what the suite costs. Here a span becomes a message at once. Its attributes are put together from bytes:
what was encoded one after the other is merged when it is parsed, so that attributes that repeat (engine ids, versions,
peers) are encoded once, and of the others little more than their values is left to encode.
"""

import functools
import struct
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
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
_FLAGS: Final = {
    False: SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK,
    True: SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK | SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK,
}


def envelope(resource: Resource, scope: InstrumentationScope) -> ExportTraceServiceRequest:
    """A message without spans, as OpenTelemetry's own encoder makes it."""
    request = encode_spans(
        [
            ReadableSpan(
                "",
                context=SpanContext(1, 1, is_remote=False),
                resource=resource,
                instrumentation_scope=scope,
                start_time=0,
                end_time=0,
            )
        ]
    )
    del request.resource_spans[0].scope_spans[0].spans[:]
    return request


@dataclass(frozen=True, slots=True)
class ExportedSpan:
    """A span that is to be exported, without its children.

    Args:
        span: What it says.
        context: Its ids.
        parent: Its parent's.
        attributes: All that it is to have.
        offset_ns: What to add to its moments to get Unix time.
    """

    span: Span
    context: SpanContext
    parent: SpanContext | None
    attributes: Attributes
    offset_ns: int

    def encode(self, into: Any) -> None:
        """Append it to a repeated field of OTLP spans."""
        span, offset_ns = self.span, self.offset_ns
        encoded = into.add(
            trace_id=_trace_id(self.context),
            span_id=_span_id(self.context),
            parent_span_id=_span_id(self.parent) if self.parent is not None else b"",
            trace_state=_state(self.context),
            flags=_FLAGS[self.parent is not None and self.parent.is_remote],
            name=span.name,
            kind=_KINDS[span.kind],
            start_time_unix_nano=offset_ns + span.start_ns,
            end_time_unix_nano=offset_ns + span.end_ns,
            status=self._status(),
        )
        encoded.MergeFromString(encode_attributes(self.attributes))
        for event in span.events:
            encoded.events.add(
                name=event.name,
                time_unix_nano=offset_ns + event.at_ns,
                attributes=[_key_value(name, value) for name, value in event.attributes.items()],
            )
        for link in span.links:
            encoded.links.add(
                trace_id=_trace_id(link), span_id=_span_id(link), trace_state=_state(link), flags=_FLAGS[link.is_remote]
            )

    def encode_part(self, name: SpanName, attributes: Attributes) -> bytes:
        """A part of it, encoded: a child without id that has its interval and its status."""
        part = OtlpSpan(
            trace_id=_trace_id(self.context),
            parent_span_id=_span_id(self.context),
            trace_state=_state(self.context),
            flags=_FLAGS[False],
            name=name,
            kind=OtlpSpan.SPAN_KIND_INTERNAL,
            start_time_unix_nano=self.offset_ns + self.span.start_ns,
            end_time_unix_nano=self.offset_ns + self.span.end_ns,
            status=self._status(),
        )
        return b"".join((part.SerializeToString(), encode_attributes(attributes)))

    def _status(self) -> Status:
        if self.span.error is None:
            return Status()
        return Status(code=Status.STATUS_CODE_ERROR, message=self.span.message)


def encode_attributes(attributes: Attributes) -> bytes:
    """A span that has only these attributes, encoded."""
    return b"".join(
        # Times are never the same twice.
        _before_double(name) + _DOUBLE.pack(value) if type(value) is float else _remembered(name, value)
        for name, value in attributes.items()
    )


@functools.lru_cache(16384)
def encode_count(name: str, value: int) -> bytes:
    """A span that has one attribute only, a number of 0 or more, encoded."""
    number = _varint(value)
    return _before_varint(name, len(number)) + number


def _alone(name: str, value: AttributeValue) -> bytes:
    encoded: bytes = OtlpSpan(attributes=[_key_value(name, value)]).SerializeToString()
    return encoded


# By type too: true is no number.
_remembered = functools.lru_cache(4096, typed=True)(_alone)

_DOUBLE: Final = struct.Struct("<d")


@functools.lru_cache(256)
def _before_double(name: str) -> bytes:
    return _alone(name, 0.0)[: -_DOUBLE.size]


@functools.lru_cache(256)
def _before_varint(name: str, size: int) -> bytes:
    return _alone(name, 1 << 7 * (size - 1))[:-size]


def _varint(value: int) -> bytes:
    """Seven bits in each byte, the lowest first; all but the last have the eighth bit."""
    encoded = bytearray()
    while value >= 1 << 7:
        encoded.append(value % (1 << 7) + (1 << 7))
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


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
            return AnyValue(string_value=str(value))


def _trace_id(context: SpanContext) -> bytes:
    return context.trace_id.to_bytes(16, "big")


def _span_id(context: SpanContext) -> bytes:
    return context.span_id.to_bytes(8, "big")


def _state(context: SpanContext) -> str:
    return context.trace_state.to_header() if context.trace_state else ""
