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
_NO_TRACE: Final = "0" * 32
_NO_SPAN: Final = "0" * 16
_MAPPINGS: Final = (dict, Mapping)  # in this order: an abstract class is slow to ask
_ODD: Final = "13579bdf"
"""Last digits of flags that say that a trace is sampled."""
_TEXT_LIMIT: Final = 512
"""Characters; W3C asks for that much of a ``tracestate`` to be passed on."""


def extract(carrier: object) -> SpanContext | None:
    """The context in headers, or in what a client or peer sent as such; ``None`` if there is none."""
    return read(carried(carrier))


def carried(carrier: object) -> Carried:
    """What :func:`read` needs of it."""
    if not isinstance(carrier, _MAPPINGS):
        return NOTHING
    return _text(carrier, "traceparent"), _text(carrier, "tracestate")


def read(texts: Carried, *, is_remote: bool = True) -> SpanContext | None:
    """The context that was carried; ``None`` if there is none."""
    fields = _fields(texts)
    if fields is None:
        return None
    trace_id, span_id, flags = fields
    state = texts[1]
    return SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=is_remote,
        trace_flags=TraceFlags(int(flags, 16)),
        trace_state=TraceState.from_header([state]) if state else None,
    )


def written(context: SpanContext) -> Carried:
    """The opposite of :func:`read`."""
    state = context.trace_state.to_header() if context.trace_state else ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}", state


def child(parent: Carried, span_id: int) -> Carried | None:
    """What a new span carries on, sampled if its parent is; ``None`` where there is no parent.

    The ``tracestate`` passes as it is: whoever reads it takes what is sound.
    """
    fields = _fields(parent)
    if fields is None:
        return None
    trace_id, _, flags = fields
    # On the engine's thread: formats of numbers are slow.
    return f"00-{trace_id}-{span_id.to_bytes(8, 'big').hex()}-{'01' if flags[1] in _ODD else '00'}", parent[1]


def carrier_of(texts: Carried) -> dict[str, str]:
    """The carrier of what was carried."""
    parent, state = texts
    if not parent:
        return {}
    return {"traceparent": parent, "tracestate": state} if state else {"traceparent": parent}


def inject(context: SpanContext) -> dict[str, str]:
    """The carrier of a context."""
    return carrier_of(written(context))


def _fields(texts: Carried) -> tuple[str, str, str] | None:
    """Trace, span and flags; ``None`` for whatever is no ``traceparent``."""
    match = _TRACEPARENT.fullmatch(texts[0])
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    # Version ff is forbidden; later ones than 00 may have more fields.
    if version == "ff" or (version == "00" and rest) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return trace_id, span_id, flags


def _text(carrier: Mapping[Any, Any], name: str) -> str:
    text = carrier.get(name)
    return text if isinstance(text, str) and len(text) <= _TEXT_LIMIT else ""
