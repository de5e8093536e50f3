# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A lease's and a receive's span, metrics and log line, and the parts of a wait."""

import pytest
from opentelemetry.trace import SpanContext, TraceFlags

from nixl_telemetry.operations import receive
from nixl_telemetry.operations.lease import Deliveries, LeaseTable
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.operations.receive import Origin, Receive, ReceiveTable
from nixl_telemetry.signals.semconv import ErrorType, Signal, TransferMode
from tests.support.observed import Observed

DROPPED = "nixl_telemetry_dropped_total"
WAIT = "nixl_receive_wait_seconds"
PEER = Peer("there", "10.0.0.7", 5600)
REQUEST = SpanContext(1, 2, True, TraceFlags(1))
NOWHERE = Origin()
LEASE = SpanContext(3, 4, True, TraceFlags(1))


@pytest.mark.parametrize("expired", [False, True])
def test_a_lease(observed: Observed, expired: bool) -> None:
    """A producer span in the request's trace, whose ids are known when it begins."""
    leases = LeaseTable(observed.telemetry)
    lease = leases.open("r", 5, REQUEST)
    assert lease is not None
    assert lease.context is not None
    leases.close(["r", "unknown"], {"r"} if expired else set())
    leases.close(["r"], set())

    span = observed.span("nixl.lease")
    outcome = "expired" if expired else "released"
    assert (span.trace_id, span.parent_span_id) == (f"{1:032x}", f"{2:016x}")
    assert span.span_id == f"{lease.context.span_id:016x}"
    assert (span.kind, span.status) == ("PRODUCER", "ERROR" if expired else "UNSET")
    assert span.attributes["nixl.lease.block.count"] == 5
    assert span.attributes["nixl.lease.outcome"] == outcome
    assert span.attributes.get("error.type") == ("kv_expired" if expired else None)
    ((key, observations),) = observed.updates().items()
    assert key == ("nixl_lease_duration_seconds", outcome)
    assert observations == [pytest.approx(span.seconds, abs=1e-6)]
    (line,) = observed.lines
    assert line.levelname == ("WARNING" if expired else "DEBUG")


def test_leases_are_bounded(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit they are not followed, and counted."""
    monkeypatch.setattr(LeaseTable, "LIMIT", 2)
    leases = LeaseTable(observed.telemetry)
    opened = [leases.open(str(number), 1, None) for number in range(3)]

    assert [lease is not None for lease in opened] == [True, True, False]
    assert observed.updates() == {(DROPPED, Signal.HOOK): 1}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the clock shows, in milliseconds."""
    now = [1_000]
    monkeypatch.setattr(receive, "now_ns", lambda: now[0] * 1_000_000)
    return now


def start(observed: Observed, origin: Origin = NOWHERE, blocks: int = 3) -> tuple[ReceiveTable, Receive]:
    """A request begins to wait."""
    table = ReceiveTable(observed.telemetry)
    begun = table.start("r", "s", PEER, blocks, origin)
    begun.start_ns = 1_000_000_000
    return table, begun


def durations(observed: Observed) -> dict[str, float]:
    """The parts of the wait, in milliseconds."""
    span = observed.span("nixl.receive")
    parts = {
        name.removeprefix("nixl.receive."): value * 1e3
        for name, value in span.attributes.items()
        if name.startswith("nixl.receive.") and isinstance(value, float)
    }
    assert sum(parts.values()) == pytest.approx(span.seconds * 1e3, abs=1e-6)
    return {name: round(value, 6) for name, value in parts.items()}


def test_where_the_time_of_a_pull_went(observed: Observed, clock: list[int]) -> None:
    """Handshake, queue, posting, transfer, observation delay, notification."""
    table, begun = start(observed)
    clock[0] = 1_010
    table.shook_hands("there", None, "")
    begun.turn_ns, begun.posted_ns, begun.progress_ns, begun.done_ns = (
        moment * 1_000_000 for moment in (1_013, 1_014, 1_050, 1_060)
    )
    clock[0] = 1_061
    table.finish(["r"], [])

    assert durations(observed) == {
        "handshake.duration": 10,
        "queue.duration": 3,
        "post.duration": 1,
        "transfer.duration": 36,
        "observation_delay": 10,
        "notification.duration": 1,
    }
    assert observed.updates() == {(WAIT, "received"): [pytest.approx(0.061)]}


def test_where_the_time_of_a_push_went(observed: Observed, clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Handshake, queue, sending the registration, and the peer's part."""
    monkeypatch.setattr(observed.telemetry, "mode", TransferMode.PUSH)
    table, begun = start(observed)
    begun.turn_ns, begun.posted_ns = 1_002_000_000, 1_003_000_000
    clock[0] = 1_500
    table.finish(["r"], [])

    assert durations(observed) == {
        "handshake.duration": 0,
        "queue.duration": 2,
        "notification.duration": 1,
        "remote.duration": 497,
    }


@pytest.mark.parametrize(("error", "outcome"), [(ErrorType.TIMEOUT, "timeout"), (ErrorType.COMPAT_MISMATCH, "failed")])
def test_a_failed_handshake_fails_who_waits_for_it(
    observed: Observed, clock: list[int], error: ErrorType, outcome: str
) -> None:
    """With its error type; others do not care."""
    table, _ = start(observed)
    other = table.start("o", "p", Peer("elsewhere"), 1, Origin())
    clock[0] = 6_000
    table.shook_hands("there", error, "no answer")
    table.finish(["r"], {"r"})

    span = observed.span("nixl.receive")
    assert (span.status, span.status_message, span.attributes["error.type"]) == ("ERROR", "no answer", error)
    assert observed.updates() == {(WAIT, outcome): [5.0]}
    assert durations(observed)["handshake.duration"] == 5_000
    assert (other.ready_ns, other.error) == (0, None)


@pytest.mark.parametrize(
    ("origin", "parent", "links"),
    [
        (Origin(REQUEST, LEASE), REQUEST, [LEASE]),
        (Origin(None, LEASE), LEASE, [LEASE]),
        (Origin(REQUEST, None), REQUEST, []),
        (Origin(), None, []),
    ],
)
def test_parent_and_link(
    observed: Observed, origin: Origin, parent: SpanContext | None, links: list[SpanContext]
) -> None:
    """The request's own trace first; the peer's where the client sent none; linked to the lease in any case."""
    table, _ = start(observed, origin)
    table.finish(["r"], [])

    span = observed.span("nixl.receive")
    assert span.parent_span_id == (f"{parent.span_id:016x}" if parent else "")
    assert [link.span_id for link in span.links] == [f"{link.span_id:016x}" for link in links]


def test_nothing_to_receive_ends_with_the_notification(observed: Observed) -> None:
    """The prefix cache had all blocks: the peer is told, and vLLM reports nothing."""
    table, begun = start(observed, blocks=0)
    table.notified("r", True)
    assert observed.spans() == []
    begun.turn_ns = begun.posted_ns = begun.start_ns + 1
    table.notified("r", True)

    assert observed.span("nixl.receive").attributes["nixl.receive.block.count"] == 0
    assert table.find("r") is None
    assert observed.updates() == {}


@pytest.mark.parametrize("fault", ["handshake", "invalid peer"])
def test_nothing_to_receive_and_nobody_to_tell(observed: Observed, fault: str) -> None:
    """vLLM reports nothing then either; it is a failure, and not remembered for ever."""
    table, _ = start(observed, blocks=0)
    if fault == "handshake":
        table.shook_hands("there", ErrorType.UNREACHABLE, "nobody listens")
    else:
        table.notified("r", False)

    assert observed.span("nixl.receive").status == "ERROR"
    assert table.find("r") is None
    assert list(observed.updates()) == [(WAIT, "failed")]


def test_a_handshake_that_failed_and_was_tried_again(observed: Observed) -> None:
    """vLLM decides whether the request failed."""
    table, _ = start(observed)
    table.shook_hands("there", ErrorType.TIMEOUT, "no answer")
    table.shook_hands("there", None, "")
    table.finish(["r"], set())

    span = observed.span("nixl.receive")
    assert (span.status, "error.type" in span.attributes) == ("UNSET", False)
    assert list(observed.updates()) == [(WAIT, "received")]


def test_where_vllm_does_not_say_who_failed(observed: Observed) -> None:
    """Before 0.30: what went wrong on the way decides."""
    table, _ = start(observed)
    table.start("o", "p", PEER, 1, NOWHERE)
    begun = table.find("r")
    assert begun is not None
    begun.fail(ErrorType.TRANSFER_FAILED, "lost")
    table.finish(["r", "o"], None)

    assert sorted((span.attributes["nixl.request.id"], span.status) for span in observed.spans()) == [
        ("o", "UNSET"),
        ("r", "ERROR"),
    ]


@pytest.mark.parametrize("how", ["the request ended while it waited", "the instance was shut down"])
def test_a_receive_that_is_given_up(observed: Observed, how: str) -> None:
    """The client went away, or the instance ends: told, with the reason."""
    table, _ = start(observed)
    if "shut down" in how:
        table.shut_down()
    else:
        table.abandon({"r", "unknown"}, how)
    table.finish(["r"], set())

    span = observed.span("nixl.receive")
    assert (span.status, span.status_message, span.attributes["error.type"]) == ("ERROR", how, "_OTHER")


def test_leases_that_are_held_at_the_end(observed: Observed) -> None:
    """Their spans are there for whoever refers to them; no metric can tell of them any more."""
    leases = LeaseTable(observed.telemetry)
    leases.open("r", 5, REQUEST)
    leases.shut_down()

    assert observed.span("nixl.lease").attributes["nixl.lease.outcome"] == "shutdown"
    assert observed.updates() == {}


def test_whose_kv_arrived() -> None:
    """All parts of it; what failed to be written is not there, whenever it is reported."""
    deliveries = Deliveries()
    for request_id in ("whole", "half"):
        deliveries.arrived(request_id)
    deliveries.failed("half")
    deliveries.arrived("half")

    assert deliveries.reported(["whole", "half", "never"]) == {"half", "never"}
    assert deliveries._arrived == {}


def test_deliveries_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is never reported does not stay."""
    monkeypatch.setattr(Deliveries, "LIMIT", 2)
    deliveries = Deliveries()
    for number in range(5):
        deliveries.arrived(str(number))

    assert len(deliveries._arrived) == 2


def test_receives_are_bounded(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest, which nobody reported, is forgotten and counted."""
    monkeypatch.setattr(ReceiveTable, "LIMIT", 2)
    table = ReceiveTable(observed.telemetry)
    for number in range(3):
        table.start(str(number), "s", PEER, 1, Origin())

    assert [table.find(str(number)) is not None for number in range(3)] == [False, True, True]
    assert observed.updates() == {(DROPPED, Signal.HOOK): 1}
