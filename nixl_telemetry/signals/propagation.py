# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Carrying trace contexts between processes and instances, as W3C ``traceparent`` and ``tracestate``."""

from collections.abc import Mapping
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

CARRIER: Final = "nixl_telemetry"
"""Key of ours in ``kv_transfer_params`` (P to router to D) and in ``PUSH_REG`` messages (D to P). Stock peers pass keys
that they do not know through."""

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_FIELDS: Final = ("traceparent", "tracestate")
_TEXT_LIMIT: Final = 512
"""Characters; W3C asks for that much of a ``tracestate`` to be passed on."""


def extract(carrier: object) -> SpanContext | None:
    """The context in headers, or in what a client or peer sent as such; ``None`` if there is none."""
    if not isinstance(carrier, Mapping):
        return None
    texts = {name: carrier.get(name) for name in _FIELDS}
    sound = {name: text for name, text in texts.items() if isinstance(text, str) and len(text) <= _TEXT_LIMIT}
    if "traceparent" not in sound:
        return None
    context = trace.get_current_span(_PROPAGATOR.extract(sound)).get_span_context()
    return context if context.is_valid else None


def inject(context: SpanContext) -> dict[str, str]:
    """The carrier of a context."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(NonRecordingSpan(context)))
    return carrier
