# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans as they arrived over OTLP, with everything the protocol carries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan, Status

Attributes = Mapping[str, Any]
"""Attribute values as plain Python: str, bool, int, float, bytes, tuple, dict or ``None``."""


@dataclass(frozen=True)
class Scope:
    """The instrumentation scope that made a span."""

    name: str
    version: str
    schema_url: str
    attributes: Attributes


@dataclass(frozen=True)
class Event:
    """Something that happened during a span."""

    name: str
    time_ns: int
    attributes: Attributes


@dataclass(frozen=True)
class Link:
    """A reference to another span."""

    trace_id: str
    span_id: str
    trace_state: str
    attributes: Attributes


@dataclass(frozen=True)
class ReceivedSpan:
    """One span.

    Attributes:
        resource: Attributes of the process that made it.
        resource_schema_url: The schema these follow.
        scope: The instrumentation that made it.
        trace_id: 32 hex digits.
        span_id: 16 hex digits.
        parent_span_id: 16 hex digits, or empty for a root.
        trace_state: W3C trace state.
        flags: W3C trace flags and OTLP's "parent is remote" bits.
        name: Its name.
        kind: ``INTERNAL``, ``SERVER``, ``CLIENT``, ``PRODUCER`` or ``CONSUMER``.
        start_ns: Unix time in nanoseconds.
        end_ns: Unix time in nanoseconds.
        status: ``UNSET``, ``OK`` or ``ERROR``.
        status_message: What went wrong.
        attributes: Its attributes.
        events: Its events, in order.
        links: Its links, in order.
        dropped: How many attributes, events and links the sender dropped.
    """

    resource: Attributes
    resource_schema_url: str
    scope: Scope
    trace_id: str
    span_id: str
    parent_span_id: str
    trace_state: str
    flags: int
    name: str
    kind: str
    start_ns: int
    end_ns: int
    status: str
    status_message: str
    attributes: Attributes
    events: tuple[Event, ...]
    links: tuple[Link, ...]
    dropped: int

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return (self.end_ns - self.start_ns) / 1e9


def decode(request: ExportTraceServiceRequest) -> Iterator[ReceivedSpan]:
    """Yields every span of an export request."""
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope_spans in resource_spans.scope_spans:
            scope = Scope(
                name=scope_spans.scope.name,
                version=scope_spans.scope.version,
                schema_url=scope_spans.schema_url,
                attributes=_attributes(scope_spans.scope.attributes),
            )
            for span in scope_spans.spans:
                yield _span(span, scope, resource, resource_spans.schema_url)


def _span(span: ProtoSpan, scope: Scope, resource: Attributes, resource_schema_url: str) -> ReceivedSpan:
    return ReceivedSpan(
        resource=resource,
        resource_schema_url=resource_schema_url,
        scope=scope,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex(),
        trace_state=span.trace_state,
        flags=span.flags,
        name=span.name,
        kind=ProtoSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        status=Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
        status_message=span.status.message,
        attributes=_attributes(span.attributes),
        events=tuple(Event(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events),
        links=tuple(
            Link(link.trace_id.hex(), link.span_id.hex(), link.trace_state, _attributes(link.attributes))
            for link in span.links
        ),
        dropped=span.dropped_attributes_count + span.dropped_events_count + span.dropped_links_count,
    )


def _attributes(pairs: Iterable[KeyValue]) -> Attributes:
    return MappingProxyType({pair.key: _value(pair.value) for pair in pairs})


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return tuple(_value(item) for item in value.array_value.values)
    if kind == "kvlist_value":
        return {pair.key: _value(pair.value) for pair in value.kvlist_value.values}
    return getattr(value, kind)
