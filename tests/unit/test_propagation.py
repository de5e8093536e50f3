# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Trace contexts that come from clients and peers: taken if they are sound, ignored if not."""

from typing import Any

import pytest
from hypothesis import given, strategies as st
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from nixl_telemetry.signals.propagation import extract, inject

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_round_trip() -> None:
    """With the sampling decision and the state of vendors."""
    context = SpanContext(7, 9, False, TraceFlags(0), TraceState([("vendor", "x")]))

    carried = extract(inject(context))

    assert carried is not None
    assert (carried.trace_id, carried.span_id, carried.trace_flags, carried.is_remote) == (7, 9, 0, True)
    assert carried.trace_state == context.trace_state


def test_headers() -> None:
    """As HTTP has them."""
    context = extract({"traceparent": PARENT, "X-Other": "1"})

    assert context is not None
    assert f"{context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert context.trace_flags.sampled


@pytest.mark.parametrize(
    "carrier",
    [
        None,
        {},
        "00-a-b-01",
        [],
        {"traceparent": None},
        {"traceparent": 5},
        {"traceparent": [PARENT]},
        {"traceparent": "00-00000000000000000000000000000000-b7ad6b7169203331-01"},
        {"traceparent": PARENT + "x" * 600},
    ],
)
def test_what_is_no_context(carrier: Any) -> None:
    """No error, no context."""
    assert extract(carrier) is None


@given(
    st.dictionaries(st.sampled_from(["traceparent", "tracestate"]), st.text(max_size=80) | st.integers() | st.binary())
)
def test_anything(carrier: dict[str, Any]) -> None:
    """Never raises."""
    extract(carrier)
