# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans become the messages that OpenTelemetry's own encoder makes of the SDK's spans."""

from typing import Any

import pytest
from hypothesis import given, strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event as SdkEvent, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from nixl_telemetry.signals.attributes import AttributeValue
from nixl_telemetry.signals.description import Event, Span
from nixl_telemetry.signals.otlp import Envelope, ExportedSpan, encode_attributes, encode_count, encode_counts
from nixl_telemetry.signals.semconv import Direction, ErrorType, EventName, SpanName

VALUES = (
    st.text()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.lists(st.text(), max_size=3).map(tuple)
    | st.sampled_from(Direction)
)
ATTRIBUTES = st.dictionaries(st.text(min_size=1), VALUES, max_size=8)
CONTEXTS = st.builds(
    SpanContext,
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.booleans(),
    st.sampled_from([TraceFlags(0), TraceFlags(1)]),
    st.sampled_from([TraceState(), TraceState([("vendor", "x")])]),
)
RESOURCE, SCOPE = Resource({"service.name": "x", "n": 1}), InstrumentationScope("s", "1", "https://schema")


@pytest.mark.parametrize("number", [0, 1, 127, 128, 16_383, 16_384, 1 << 32, (1 << 63) - 1])
def test_counts(number: int) -> None:
    """One by one or many at once, whatever their length."""
    expected = OtlpSpan(attributes=[KeyValue(key="n", value=AnyValue(int_value=number))])

    assert OtlpSpan.FromString(encode_count("n", number)) == expected
    assert encode_counts("n", [number, 5]) == [encode_count("n", number), encode_count("n", 5)]


@pytest.mark.parametrize("is_list", [False, True])
def test_equal_values_of_other_types(is_list: bool) -> None:
    """Each as what it is, whichever was encoded before, also in a list."""
    values: list[Any] = [True, 1, 1.0]
    for value in values:
        (attribute,) = OtlpSpan.FromString(encode_attributes({"n": (value,) if is_list else value})).attributes
        found = attribute.value.array_value.values[0] if is_list else attribute.value
        assert (
            found
            == {
                bool: AnyValue(bool_value=True),
                int: AnyValue(int_value=1),
                float: AnyValue(double_value=1.0),
            }[type(value)]
        )


@given(
    ATTRIBUTES,
    CONTEXTS,
    st.none() | CONTEXTS,
    st.lists(CONTEXTS.filter(lambda context: not context.trace_state), max_size=2),  # the SDK leaves theirs out
    st.sampled_from(SpanKind),
    st.none() | st.sampled_from(ErrorType),
    st.text(),
    st.booleans(),
)
def test_as_the_sdk_does(
    attributes: dict[str, AttributeValue],
    context: SpanContext,
    parent: SpanContext | None,
    links: list[SpanContext],
    kind: SpanKind,
    error: ErrorType | None,
    message: str,
    has_event: bool,
) -> None:
    """Whatever was encoded before: true, 1 and 1.0 are three values."""
    event = Event(EventName.MODE_CONFLICT, 5, attributes)
    span = Span(
        SpanName.TRANSFER,
        kind,
        3,
        9,
        error=error,
        message=message if error else "",
        events=(event,) if has_event else (),
        links=tuple(links),
    )
    theirs = ReadableSpan(
        "nixl.transfer",
        context=context,
        parent=parent,
        resource=RESOURCE,
        attributes=attributes,
        events=[SdkEvent("nixl.mode_conflict", attributes, 105)] if has_event else [],
        links=[Link(link) for link in links],
        kind=kind,
        instrumentation_scope=SCOPE,
        status=Status(StatusCode.ERROR, message) if error else Status(),
        start_time=103,
        end_time=109,
    )
    encoded = ExportedSpan(span, context, parent, attributes, 100).encode()
    ours = Envelope.of(RESOURCE, SCOPE).around([encoded], 1)

    assert ours.span_count == 1
    assert ExportTraceServiceRequest.FromString(ours.data) == encode_spans([theirs])


@given(CONTEXTS, CONTEXTS)
def test_links_have_their_traces_state(context: SpanContext, link: SpanContext) -> None:
    """The SDK leaves it out."""
    span = Span(SpanName.TRANSFER, SpanKind.CLIENT, 3, 9, links=(link,))
    message = Envelope.of(RESOURCE, SCOPE).around([ExportedSpan(span, context, None, {}, 100).encode()], 1)

    (of_resource,) = ExportTraceServiceRequest.FromString(message.data).resource_spans
    ((found,),) = [encoded.links for of_scope in of_resource.scope_spans for encoded in of_scope.spans]
    assert found.trace_state == link.trace_state.to_header()
    assert (found.trace_id, found.span_id) == (link.trace_id.to_bytes(16, "big"), link.span_id.to_bytes(8, "big"))
    assert found.flags == (0x300 if link.is_remote else 0x100)
