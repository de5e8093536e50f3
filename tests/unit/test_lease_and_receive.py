# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A lease's and a receive's span, metrics and log line, and the parts of a wait."""

import pytest
from opentelemetry.trace import SpanContext, TraceFlags

from nixl_telemetry.operations import lease, receive
from nixl_telemetry.operations.lease import Deliveries, LeaseTable
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.operations.receive import Origin, Receive, ReceiveTable
from nixl_telemetry.signals.propagation import NOTHING, read, written
from nixl_telemetry.signals.semconv import ErrorType, Signal, TransferMode
from tests.support.observed import Observed

DROPPED = "nixl_telemetry_dropped_total"
WAIT = "nixl_receive_wait_seconds"
HELD, BLOCKS_HELD, OVERDUE = (
    (name, "") for name in ("nixl_leases_held", "nixl_lease_blocks_held", "nixl_leases_overdue")
)
PEER = Peer("there", "10.0.0.7", 5600)
REQUEST = SpanContext(1, 2, True, TraceFlags(1))
NOWHERE = Origin()
LEASE = SpanContext(3, 4, True, TraceFlags(1))


@pytest.mark.parametrize("expired", [False, True])
def test_a_lease(observed: Observed, expired: bool) -> None:
    """A producer span in the request's trace, whose ids are known when it begins."""
    leases = LeaseTable(observed.telemetry)
    opened = leases.open("r", 5, written(REQUEST))
    assert opened is not None
    told = read(opened.context)
    assert told is not None
    leases.close(["r", "unknown"], {"r"} if expired else set())
    leases.close(["r"], set())

    span = observed.span("nixl.lease")
    outcome = "expired" if expired else "released"
    assert (span.trace_id, span.parent_span_id) == (f"{1:032x}", f"{2:016x}")
    assert span.span_id == f"{told.span_id:016x}"
    assert (span.kind, span.status) == ("PRODUCER", "ERROR" if expired else "UNSET")
    assert span.attributes["nixl.lease.block.count"] == 5
    assert span.attributes["nixl.lease.outcome"] == outcome
    assert span.attributes.get("error.type") == ("kv_expired" if expired else None)
    updates = observed.updates()
    assert updates.pop(("nixl_lease_duration_seconds", outcome)) == [pytest.approx(span.seconds, abs=1e-6)]
    assert updates == {("nixl_leases_opened_total", ""): 1, HELD: 0, BLOCKS_HELD: 0}
    (line,) = observed.lines
    assert line.levelname == ("WARNING" if expired else "DEBUG")


def test_leases_are_bounded(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit they are not followed, and counted."""
    monkeypatch.setattr(LeaseTable, "LIMIT", 2)
    leases = LeaseTable(observed.telemetry)
    opened = [leases.open(str(number), 1) for number in range(3)]

    assert [one is not None for one in opened] == [True, True, False]
    assert observed.updates() == {
        (DROPPED, Signal.HOOK): 1,
        ("nixl_leases_opened_total", ""): 2,
        HELD: 2,
        BLOCKS_HELD: 2,
    }


def test_what_is_held(observed: Observed) -> None:
    """Leases and blocks, until they end; those of an instance that ends, too."""
    leases = LeaseTable(observed.telemetry)
    for name, blocks in (("a", 5), ("b", 7)):
        leases.open(name, blocks)
    leases.close(["a"], set())
    first = observed.updates()
    leases.shut_down()
    second = observed.updates()

    assert (first[HELD], first[BLOCKS_HELD]) == (1, 7)
    assert second == {HELD: -1, BLOCKS_HELD: -7}


def test_overdue_leases(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted while they are held beyond their deadline and what a step may take, told of once; a renewal ends it."""
    now = [0.0]
    monkeypatch.setattr(lease, "now_ns", lambda: int(now[0] * 1e9))
    leases = LeaseTable(observed.telemetry)
    leases.open("early", 3, NOTHING, 30.0)
    leases.open("late", 4, NOTHING, 40.0)
    leases.open("unknown", 1)
    seen = []
    for moment in (31.9, 32.1, 42.1, 42.2):
        now[0] = moment
        leases._look()
        seen.append(observed.updates().get(OVERDUE))
    leases.renew("early", 20.0)
    leases.renew("gone", 20.0)
    leases._look()
    seen.append(observed.updates()[OVERDUE])
    leases.close(["late"], {"late"})
    leases._look()
    seen.append(observed.updates()[OVERDUE])

    assert seen == [None, 1, 1, None, -1, -1]
    (line,) = [line for line in observed.messages() if "nixl.lease.overdue" in line]
    assert "nixl.lease.count=1 nixl.lease.block.count=3 nixl.request.id=early overdue_s=2.1" in line


def test_leases_that_become_overdue_between_two_lines_are_told_of(
    observed: Observed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line in a while, and the next one has all that came meanwhile."""
    now = [0.0]
    monkeypatch.setattr(lease, "now_ns", lambda: int(now[0] * 1e9))
    monkeypatch.setattr("time.monotonic", lambda: 1000 + now[0])
    leases = LeaseTable(observed.telemetry)
    leases.open("first", 3, NOTHING, 10.0)
    for number in range(500):
        leases.open(f"later-{number}", 1, NOTHING, 14.0)
    for moment in (13.0, 17.0, 24.0, 30.0):
        now[0] = moment
        leases._look()

    lines = [line for line in observed.messages() if "nixl.lease.overdue" in line]
    assert ["nixl.lease.count=1 " in lines[0], "nixl.lease.count=501 " in lines[1], len(lines)] == [True, True, 2]


@pytest.mark.parametrize(
    ("mode", "state", "waits_for", "since"),
    [
        ("pull", {}, "queue", 1_000),
        ("pull", {"wants_handshake": True}, "handshake", 1_000),
        ("pull", {"wants_handshake": True, "ready_ns": 1_100}, "queue", 1_100),
        ("pull", {"turn_ns": 1_200}, "transfer", 1_200),
        ("pull", {"turn_ns": 1_200, "posted_ns": 1_300}, "transfer", 1_300),
        ("pull", {"turn_ns": 1_200, "posted_ns": 1_300, "done_ns": 1_400}, "notification", 1_400),
        ("push", {"wants_handshake": True}, "handshake", 1_000),
        ("push", {"turn_ns": 1_200}, "registration", 1_200),
        ("push", {"turn_ns": 1_200, "posted_ns": 1_300}, "notification", 1_300),
    ],
)
def test_what_a_long_wait_is_for(
    mode: str,
    state: dict[str, int],
    waits_for: str,
    since: int,
    observed: Observed,
    clock: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Logged once, with whom it waits for and since when; the span has it as an event."""
    monkeypatch.setattr(observed.telemetry, "mode", TransferMode(mode))
    monkeypatch.setattr(receive, "unix_offset_ns", lambda: 0)
    table, begun = start(observed)
    for name, value in state.items():
        setattr(begun, name, value * 1_000_000 if name.endswith("_ns") else value)
    clock[0] = 10_999
    table._look()
    assert observed.messages() == []
    clock[0] = 11_001
    table._look()
    table._look()

    (line,) = observed.messages()
    assert line.startswith("event=nixl.receive.waiting ")
    assert f"nixl.receive.waits_for={waits_for} nixl.receive.waiting.duration=10.001" in line
    assert f"since=1970-01-01T00:00:0{since / 1000:.3f}+00:00" in line
    assert "nixl.remote.engine.id=there server.address=10.0.0.7 server.port=5600" in line
    table.finish(["r"], [])
    (event,) = observed.span("nixl.receive").events
    assert event.name == "nixl.receive.waiting"
    assert event.attributes["nixl.receive.waits_for"] == waits_for


def test_the_watchdog_tells_so_many_at_once(observed: Observed, clock: list[int]) -> None:
    """A peer that is gone may leave thousands waiting; the rest follows in the next seconds."""
    table = ReceiveTable(observed.telemetry)
    for number in range(50):
        table.start(str(number), "s", PEER, 1, NOWHERE).start_ns = 1_000_000_000
    clock[0] = 60_000
    told = []
    for _ in range(4):
        table._look()
        told.append(len(observed.messages()))

    assert told == [20, 40, 50, 50]


def test_ids_that_can_never_match(observed: Observed, clock: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they are known, the log says what to do."""
    monkeypatch.setattr(observed.telemetry, "mode", TransferMode.PUSH)
    table, begun = start(observed)
    begun.turn_ns = begun.posted_ns = 1_000_000_000
    begun.ids_differ = True
    clock[0] = 60_000
    table._look()

    (line,) = observed.messages()
    assert "must send the same X-Request-Id to both" in line


@pytest.mark.parametrize("seconds", [12.5, -3.0])
def test_what_was_left_of_the_lease(observed: Observed, clock: list[int], seconds: float) -> None:
    """When reading began; later transfers of the same request do not count again."""
    table, begun = start(observed)
    begun.reads(seconds)
    begun.reads(seconds - 1)
    table.finish(["r"], [])

    assert observed.updates()["nixl_lease_remaining_seconds", ""] == [seconds]
    assert observed.span("nixl.receive").attributes["nixl.lease.remaining"] == seconds


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
    table, begun = start(observed)
    begun.wants_handshake = True
    other = table.start("o", "p", Peer("elsewhere"), 1, Origin())
    clock[0] = 5_500
    table.shook_hands("there", error, "no answer")
    # vLLM reports it with a later step, which is no time in a queue.
    clock[0] = 6_000
    table.finish(["r"], {"r"})

    span = observed.span("nixl.receive")
    assert (span.status, span.status_message, span.attributes["error.type"]) == ("ERROR", "no answer", error)
    assert observed.updates() == {(WAIT, outcome): [5.0]}
    parts = durations(observed)
    assert parts.pop("handshake.duration") == 5_000
    assert set(parts.values()) == {0}
    assert (other.ready_ns, other.error) == (0, None)


@pytest.mark.parametrize(
    ("origin", "parent", "links"),
    [
        (Origin(written(REQUEST), written(LEASE)), REQUEST, [LEASE]),
        (Origin(lease=written(LEASE)), LEASE, [LEASE]),
        (Origin(("00-no-context-01", ""), written(LEASE)), LEASE, [LEASE]),
        (Origin(written(REQUEST)), REQUEST, []),
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
    table.notified(())
    assert observed.spans() == []
    begun.turn_ns = begun.posted_ns = begun.start_ns + 1
    table.notified(())

    assert observed.span("nixl.receive").attributes["nixl.receive.block.count"] == 0
    assert table.find("r") is None
    assert not table.untold
    assert observed.updates() == {}


@pytest.mark.parametrize("fault", ["handshake", "invalid peer"])
def test_nothing_to_receive_and_nobody_to_tell(observed: Observed, fault: str) -> None:
    """vLLM reports nothing then either; it is a failure, and not remembered for ever."""
    table, _ = start(observed, blocks=0)
    if fault == "handshake":
        table.shook_hands("there", ErrorType.UNREACHABLE, "nobody listens")
    else:
        table.notified({"there"})

    assert observed.span("nixl.receive").status == "ERROR"
    assert table.find("r") is None
    table.notified(())
    assert not table.untold
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
    """Their spans are there for whoever refers to them; they count as neither released nor expired."""
    leases = LeaseTable(observed.telemetry)
    leases.open("r", 5, written(REQUEST))
    leases.shut_down()

    assert observed.span("nixl.lease").attributes["nixl.lease.outcome"] == "shutdown"
    assert ("nixl_lease_duration_seconds", "shutdown") not in observed.updates()


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
