# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Tripwires: each counts, and is told of at a bounded rate, as span, log line and audit record."""

import pytest
from opentelemetry.trace import SpanContext, TraceFlags

from nixl_telemetry.audit.chain import Record
from nixl_telemetry.operations import tripwires
from nixl_telemetry.operations.tripwires import Tripwires
from nixl_telemetry.signals.semconv import InvalidKv, RequestRole
from tests.support.observed import Observed

REQUEST = SpanContext(1, 2, True, TraceFlags(0))


@pytest.fixture
def records(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """What the audit trail is given."""
    records: list[Record] = []
    monkeypatch.setattr(observed.telemetry, "audit", lambda make: records.append(make()))
    return records


@pytest.mark.parametrize("reason", list(InvalidKv))
def test_invalid_kv(reason: InvalidKv, observed: Observed, records: list[Record]) -> None:
    """An error, so that it is kept though its trace is not sampled; each rank's report of it counts once."""
    wires = Tripwires(observed.telemetry)
    wires.invalid_kv(reason, "r", REQUEST)
    wires.invalid_kv(reason, "r", REQUEST)

    assert observed.updates() == {("nixl_invalid_kv_total", reason): 1}
    span = observed.span("nixl.tripwire")
    assert (span.trace_id, span.parent_span_id, span.status) == (f"{1:032x}", f"{2:016x}", "ERROR")
    assert span.attributes["nixl.invalid_kv.reason"] == reason
    assert [event.name for event in span.events] == ["nixl.invalid_kv"]
    (line,) = observed.messages()
    assert line.startswith("event=nixl.invalid_kv ")
    assert f" nixl.request.id=r nixl.invalid_kv.reason={reason} " in line
    assert [(record.event, dict(record.attributes)) for record in records] == [
        ("invalid_kv", {"nixl.request.id": "r", "nixl.invalid_kv.reason": reason})
    ]


def test_a_request_without_parameters(observed: Observed, records: list[Record]) -> None:
    """A warning; all are counted, and one a minute is told of."""
    wires = Tripwires(observed.telemetry)
    for number in range(50):
        wires.without_params(RequestRole.DECODE, str(number), None)

    assert observed.updates() == {("nixl_requests_without_transfer_params_total", "decode"): 50}
    (line,) = observed.lines
    assert line.levelname == "WARNING"
    assert "nixl.request.role=decode" in line.getMessage()
    assert len(records) == 1
    assert observed.span("nixl.tripwire").status == "UNSET"


def test_floods(observed: Observed, records: list[Record], monkeypatch: pytest.MonkeyPatch) -> None:
    """All are counted, ten a second are told of, and no more is remembered than the limit."""
    now = [5.0]
    monkeypatch.setattr(tripwires, "monotonic", lambda: now[0])
    wires = Tripwires(observed.telemetry)
    for number in range(5_000):
        wires.invalid_kv(InvalidKv.UNKNOWN_REQUEST, str(number), None)
    now[0] += 1
    wires.invalid_kv(InvalidKv.UNKNOWN_REQUEST, "later", None)

    assert observed.updates()["nixl_invalid_kv_total", "unknown_request"] == 5_001
    assert len(records) == 11
    assert len(wires._seen) == Tripwires.LIMIT
