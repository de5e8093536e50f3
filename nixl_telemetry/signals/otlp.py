# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans as OTLP messages: the SDK's encoder for the spans, and one of our own for their attributes.

Most attributes of an instance's spans have the same few values, over and over: engine ids, versions, peers. What is
encoded once is copied afterwards, at a tenth of the time.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.sdk.trace import ReadableSpan

from nixl_telemetry.signals.attributes import Attributes, AttributeValue


class SpanItem(NamedTuple):
    """A span to be encoded."""

    span: ReadableSpan
    """Without its attributes."""
    attributes: Attributes


def encode(items: Sequence[SpanItem]) -> ExportTraceServiceRequest:
    """Spans of one process, all of one scope; there is at least one."""
    request = encode_spans([item.span for item in items])
    spans = request.resource_spans[0].scope_spans[0].spans
    for span, item in zip(spans, items, strict=True):
        span.attributes.extend(key_values(item.attributes))
    return request


def key_values(attributes: Attributes) -> Iterable[KeyValue]:
    """Attributes as OTLP has them; to be copied, not changed."""
    for name, value in attributes.items():
        # Times are never the same twice.
        yield _encoded(name, value) if isinstance(value, float) else _remembered(name, value)


def _encoded(name: str, value: AttributeValue) -> KeyValue:
    return KeyValue(key=name, value=_value(value))


# By type too: true is no number.
_remembered = functools.lru_cache(4096, typed=True)(_encoded)


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
