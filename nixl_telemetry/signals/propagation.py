# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Carrying trace contexts between processes and instances, as W3C ``traceparent`` and ``tracestate``.

OpenTelemetry's propagator does the same, by way of contexts, getters and spans: ten times the work, and this is done on
the engine's thread for each request.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from opentelemetry.trace import SpanContext, TraceFlags, TraceState

CARRIER: Final = "nixl_telemetry"
"""Key of ours in ``kv_transfer_params`` (P to router to D) and in ``PUSH_REG`` messages (D to P). Stock peers pass keys
that they do not know through."""

Carried: TypeAlias = tuple[str, str]
"""A ``traceparent`` and a ``tracestate`` as they came. To pass them on costs a fraction of reading them, which the
export thread can do."""
NOTHING: Final[Carried] = ("", "")
"""Of somebody without a trace."""

_TRACEPARENT: Final = re.compile(r"[ \t]*([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?[ \t]*")
_TEXT_LIMIT: Final = 512
"""Characters; W3C asks for that much of a ``tracestate`` to be passed on."""


def extract(carrier: object) -> SpanContext | None:
    """The context in headers, or in what a client or peer sent as such; ``None`` if there is none."""
    return read(carried(carrier))


def carried(carrier: object) -> Carried:
    """What :func:`read` needs of it."""
    # An abstract class is slow to ask.
    if not isinstance(carrier, dict | Mapping):
        return NOTHING
    return _text(carrier, "traceparent"), _text(carrier, "tracestate")


def read(texts: Carried) -> SpanContext | None:
    """The context that was carried; ``None`` if there is none."""
    parent, state = texts
    match = _TRACEPARENT.fullmatch(parent)
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    # Version ff is forbidden; later ones than 00 may have more fields.
    if version == "ff" or (version == "00" and rest):
        return None
    context = SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
        trace_state=TraceState.from_header([state]) if state else None,
    )
    return context if context.is_valid else None


def _text(carrier: Mapping[Any, Any], name: str) -> str:
    text = carrier.get(name)
    return text if isinstance(text, str) and len(text) <= _TEXT_LIMIT else ""


def inject(context: SpanContext) -> dict[str, str]:
    """The carrier of a context."""
    carrier = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    if context.trace_state:
        carrier["tracestate"] = context.trace_state.to_header()
    return carrier
