# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Trace contexts that come from clients and peers: taken if they are sound, ignored if not."""

from typing import Any

import pytest
from hypothesis import given, strategies as st
from opentelemetry import trace
from opentelemetry.trace import SpanContext, TraceFlags, TraceState
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from nixl_telemetry.signals.propagation import NOTHING, carried, child, extract, inject, read, written

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
    st.from_regex(r"[ ]?[0f][0-9f]-[0-9a-f]{31,33}-[0-9a-f]{16}-[0-9a-f]{2}(-x)?", fullmatch=True)
    | st.sampled_from([PARENT, "00" + "-" + "0" * 32 + PARENT[35:], PARENT[:36] + "0" * 16 + "-01"]),
    st.none() | st.sampled_from(["", "vendor=x", "a=1,b=2", "=", "a=1,a=2"]) | st.text("ab=,", max_size=12),
)
def test_as_the_propagator_of_opentelemetry(traceparent: str, tracestate: str | None) -> None:
    """The same contexts out of the same headers."""
    carrier = {"traceparent": traceparent} | ({"tracestate": tracestate} if tracestate is not None else {})
    expected = trace.get_current_span(TraceContextTextMapPropagator().extract(carrier)).get_span_context()

    assert extract(carrier) == (expected if expected.is_valid else None)


@given(
    st.dictionaries(st.sampled_from(["traceparent", "tracestate"]), st.text(max_size=80) | st.integers() | st.binary())
)
def test_anything(carrier: dict[str, Any]) -> None:
    """Never raises."""
    extract(carrier)


@pytest.mark.parametrize(
    ("parent", "expected"),
    [
        (PARENT, PARENT[:36] + "00000000000000ab-01"),
        (PARENT[:-2] + "00", PARENT[:36] + "00000000000000ab-00"),
        # Of the flags only the one for sampling is known here.
        (PARENT[:-2] + "03", PARENT[:36] + "00000000000000ab-01"),
        (PARENT[:-2] + "fe", PARENT[:36] + "00000000000000ab-00"),
        (" 01" + PARENT[2:] + "-more", PARENT[:36] + "00000000000000ab-01"),
    ],
)
def test_a_child(parent: str, expected: str) -> None:
    """In its parent's trace, with its parent's decision and the state of vendors."""
    assert child((parent, "vendor=x"), 0xAB) == (expected, "vendor=x")


@pytest.mark.parametrize("parent", ["", "x", "ff" + PARENT[2:], PARENT + "-more", "00-" + "0" * 32 + PARENT[35:]])
def test_a_child_of_nobody(parent: str) -> None:
    """It begins a trace of its own."""
    assert child((parent, ""), 1) is None


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans(), st.sampled_from(["", "vendor=x,a=b"]))
def test_as_texts(trace_id: int, span_id: int, sampled: bool, state: str) -> None:
    """What is written is read as it was, and is what the carrier has."""
    context = SpanContext(
        trace_id, span_id, True, TraceFlags(sampled), TraceState.from_header([state]) if state else TraceState()
    )

    texts = written(context)

    assert read(texts) == context
    assert carried(inject(context)) == texts
    assert read(NOTHING) is None
