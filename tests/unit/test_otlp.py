# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Attributes are encoded as OpenTelemetry's own encoder does it."""

from hypothesis import given, strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

from nixl_telemetry.signals.attributes import AttributeValue
from nixl_telemetry.signals.otlp import SpanItem, encode
from nixl_telemetry.signals.semconv import Direction

VALUES = (
    st.text()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.lists(st.text(), max_size=3).map(tuple)
    | st.sampled_from(Direction)
)


def span(attributes: dict[str, AttributeValue] | None) -> ReadableSpan:
    """A span."""
    context = SpanContext(1, 2, is_remote=False)
    return ReadableSpan("x", context=context, attributes=attributes, resource=Resource({}), start_time=1, end_time=2)


@given(st.dictionaries(st.text(min_size=1), VALUES, max_size=8))
def test_as_the_sdk_does(attributes: dict[str, AttributeValue]) -> None:
    """Whatever was encoded before: true, 1 and 1.0 are three values."""
    assert encode([SpanItem(span(None), attributes)]) == encode_spans([span(attributes)])
