# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A handshake's span, stages, metrics and log line, for every way in which it can end."""

import itertools
import socket
from collections.abc import Callable, Iterator

import pytest
from opentelemetry.trace import SpanContext, TraceFlags

from nixl_telemetry.operations.compatibility import Compatibility
from nixl_telemetry.operations.handshake import Failure, Handshake, Waiters
from nixl_telemetry.operations.mode import ModeConflict
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.signals.semconv import ConflictSource, ErrorType, Purpose
from tests.support.observed import Observed

DURATION = "nixl_handshake_duration_seconds"
REJECTIONS = "nixl_handshake_rejections_total"
BYPASSED = "nixl_handshake_bypassed_total"

Start = Callable[..., Handshake]


@pytest.fixture
def listening_port() -> Iterator[int]:
    """A port that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def start(observed: Observed) -> Start:
    """Starts a handshake with engine ``there``."""

    def start(port: int = 5600, enforced: bool = True, conflict: ModeConflict | None = None) -> Handshake:
        peer = Peer("there", "127.0.0.1", port)
        compatibility = Compatibility(observed.telemetry, "aaa", enforced, "kv_consumer")
        return Handshake(observed.telemetry, peer, Purpose.TRANSFER, compatibility, 2, conflict)

    return start


def test_success(observed: Observed, start: Start) -> None:
    """Two ranks: six stages below one client span, one observation without an error."""
    handshake = start()
    for _ in range(2):
        handshake.received("aaa")
        handshake.registering()
        handshake.registered()
    handshake.finish()

    span = observed.span("nixl.handshake")
    assert span.kind == "CLIENT"
    assert span.status == "UNSET"
    assert dict(span.attributes) == {
        "nixl.engine.id": "here",
        "server.address": "127.0.0.1",
        "server.port": 5600,
        "nixl.remote.engine.id": "there",
        "nixl.remote.tp_size": 2,
        "nixl.handshake.purpose": "transfer",
        "nixl.compat.hash": "aaa",
        "nixl.remote.compat.hash": "aaa",
        "nixl.compat.enforced": True,
    }
    stages = [child for child in observed.spans() if child.parent_span_id == span.span_id]
    assert [stage.name.removeprefix("nixl.handshake.") for stage in stages] == ["metadata", "compat", "register"] * 2
    assert stages[0].start_ns == pytest.approx(span.start_ns, abs=1e6)
    for before, after in itertools.pairwise(stages):
        assert before.end_ns == pytest.approx(after.start_ns, abs=1e6)
    ((key, observations),) = observed.updates().items()
    assert key == (DURATION, "")
    assert observations == [pytest.approx(span.seconds, abs=1e-3)]
    (line,) = observed.messages()
    assert line.startswith("event=nixl.handshake.finished nixl.engine.id=here")
    assert f"trace_id={span.trace_id} span_id={span.span_id}" in line


def test_rejection(observed: Observed, start: Start) -> None:
    """A differing hash: the compat stage and the handshake fail, and a rejection is counted."""
    handshake = start()
    handshake.received("bbb")
    handshake.finish(Failure(RuntimeError("NIXL compatibility hash mismatch")))

    span = observed.span("nixl.handshake")
    assert span.status == "ERROR"
    assert span.status_message == (
        "prefill 127.0.0.1:5600 is incompatible: what differs is unknown: the factors of this instance could not be "
        "seen\nNIXL compatibility hash mismatch"
    )
    assert span.attributes["error.type"] == "compat_mismatch"
    assert observed.span("nixl.handshake.metadata").status == "UNSET"
    assert observed.span("nixl.handshake.compat").status == "ERROR"
    updates = observed.updates()
    assert updates.pop((DURATION, "compat_mismatch"))
    assert updates == {(REJECTIONS, "unknown"): 1}
    (line,) = observed.messages()
    assert "event=nixl.handshake.failed" in line
    assert "error.type=compat_mismatch" in line


def test_bypass(observed: Observed, start: Start) -> None:
    """With enforcement off a differing hash is let through, and counted."""
    handshake = start(enforced=False)
    handshake.received("bbb")
    handshake.registering()
    handshake.registered()
    handshake.finish()

    updates = observed.updates()
    assert updates.pop((DURATION, ""))
    assert updates == {(BYPASSED, "unknown"): 1}


def test_a_mismatch_of_any_rank_counts(observed: Observed, start: Start) -> None:
    """With enforcement off: the first rank differs, the second agrees, and then the peer is silent."""
    for failure in (None, Failure(Exception("again"), timed_out=True)):
        handshake = start(enforced=False)
        for remote_hash in ("bbb", "aaa"):
            handshake.received(remote_hash)
            handshake.registering()
            handshake.registered()
        handshake.finish(failure)

    assert observed.updates()[BYPASSED, "unknown"] == 2
    assert {span.attributes.get("nixl.remote.compat.hash") for span in observed.spans() if not span.parent_span_id} == {
        "bbb"
    }


def test_an_explanation_that_fails_leaves_the_rest(
    observed: Observed, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Duration, rejection, span and log line are there all the same."""

    def fail(*args: object) -> None:
        raise RecursionError

    monkeypatch.setattr(Compatibility, "explain", fail)
    handshake = start()
    handshake.received("bbb")

    assert handshake.finish(Failure(RuntimeError("NIXL compatibility hash mismatch"))) == ""
    updates = observed.updates()
    assert updates[REJECTIONS, "unknown"] == 1
    assert updates["nixl_telemetry_errors_total", "hook"] == 1
    assert observed.span("nixl.handshake").status_message == "NIXL compatibility hash mismatch"


@pytest.mark.parametrize(
    ("steps", "failure", "expected"),
    [
        ("", Failure(AssertionError(), direct=True), ErrorType.PAYLOAD_DECODE),
        ("", Failure(TypeError("clock"), direct=True), ErrorType.PAYLOAD_DECODE),
        ("", Failure(AssertionError("TP 2 and 3"), direct=False), ErrorType.LAYOUT_MISMATCH),
        ("", Failure(RuntimeError("Failed to decode"), undecodable=True), ErrorType.PAYLOAD_DECODE),
        ("c", Failure(RuntimeError("engine"), undecodable=False), ErrorType.ENGINE_ID_MISMATCH),
        ("c", Failure(RuntimeError("metadata"), undecodable=True), ErrorType.METADATA_DECODE),
        ("c", Failure(NotImplementedError("dcp"), unsupported=True), ErrorType.LAYOUT_MISMATCH),
        ("c", Failure(KeyError("x")), ErrorType.OTHER),
        ("cr", Failure(AssertionError("layout")), ErrorType.LAYOUT_MISMATCH),
        ("cr", Failure(Exception("NIXL_ERR"), from_agent=True), ErrorType.AGENT_ERROR),
        ("crd", Failure(AssertionError("second rank"), direct=True), ErrorType.PAYLOAD_DECODE),
        ("cr", Failure(KeyboardInterrupt()), ErrorType.LAYOUT_MISMATCH),
    ],
)
def test_error_types(observed: Observed, start: Start, steps: str, failure: Failure, expected: ErrorType) -> None:
    """The type follows from how far it got and what kind of exception ended it, not from the exception's text."""
    handshake = start()
    for step in steps:
        {"c": lambda: handshake.received("aaa"), "r": handshake.registering, "d": handshake.registered}[step]()
    handshake.finish(failure)

    assert [key for key in observed.updates() if key[0] == DURATION] == [(DURATION, expected)]
    assert observed.span("nixl.handshake").attributes["error.type"] == expected


def test_silence_is_a_timeout_where_somebody_listens(observed: Observed, start: Start, listening_port: int) -> None:
    """The peer's port is open: it did not answer in time."""
    start(port=listening_port).finish(Failure(Exception("again"), timed_out=True))

    assert observed.span("nixl.handshake").attributes["error.type"] == "timeout"


def test_silence_is_unreachable_where_nobody_listens(observed: Observed, start: Start, listening_port: int) -> None:
    """ZeroMQ reports a closed port as silence."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    start(port=port).finish(Failure(Exception("again"), timed_out=True))

    assert observed.span("nixl.handshake").attributes["error.type"] == "unreachable"


def test_a_handshake_ends_once(observed: Observed, start: Start) -> None:
    """The second end changes nothing."""
    handshake = start()
    handshake.received("aaa")
    handshake.finish()
    handshake.finish(Failure(RuntimeError("late")))

    assert list(observed.updates()) == [(DURATION, "")]
    assert observed.span("nixl.handshake").status == "UNSET"


def test_a_mode_conflict_is_an_event(observed: Observed, start: Start) -> None:
    """A conflict that the scheduler saw in the request's parameters stands on the handshake that will fail."""
    handshake = start(conflict=ModeConflict(ConflictSource.PARAMS, "push", "pull"))
    handshake.received("bbb")
    handshake.finish(Failure(RuntimeError("mismatch")))

    (event,) = observed.span("nixl.handshake").events
    assert event.name == "nixl.mode_conflict"
    assert dict(event.attributes) == {
        "nixl.mode_conflict.source": "params",
        "nixl.mode_conflict.expected": "push",
        "nixl.mode_conflict.found": "pull",
    }


def test_a_slow_handshake_is_a_warning(observed: Observed, start: Start) -> None:
    """Above the threshold of the settings."""
    handshake = start()
    handshake.start_ns -= 2_000_000_000
    handshake.received("aaa")
    handshake.finish()

    observed.messages()
    (record,) = observed.lines
    assert record.levelname == "WARNING"


def test_what_a_peer_sent_is_kept_short(observed: Observed, start: Start) -> None:
    """A peer may send megabytes, and vLLM's exception quotes them."""
    handshake = start()
    handshake.received("b" * 5_000_000)
    handshake.finish(Failure(RuntimeError("mismatch " + "b" * 5_000_000)))

    span = observed.span("nixl.handshake")
    assert len(str(span.attributes["nixl.remote.compat.hash"])) == 128
    assert len(str(span.status_message)) < 1100
    assert all(len(message) < 4000 for message in observed.messages())


def test_a_failure_before_the_query(observed: Observed, start: Start) -> None:
    """vLLM refuses the peer's topology, or the device, before it asks: no payload is to blame."""
    start().finish(Failure(NotImplementedError("TP"), unsupported=True))
    start().finish(Failure(RuntimeError("no CUDA context")))

    assert [key[1] for key in observed.updates() if key[0] == DURATION] == ["layout_mismatch", "_OTHER"]


@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".example", "", "no such host"])
def test_a_host_that_cannot_be_looked_up_is_unreachable(observed: Observed, host: str) -> None:
    """It comes from a client's request, and ZeroMQ takes anything."""
    peer = Peer("there", host, 70_000)
    compatibility = Compatibility(observed.telemetry, "aaa", enforced=True)
    handshake = Handshake(observed.telemetry, peer, Purpose.TRANSFER, compatibility, 1)
    handshake.finish(Failure(Exception(), timed_out=True))

    assert list(observed.updates()) == [(DURATION, "unreachable")]


def test_who_waited_for_it(observed: Observed, start: Start) -> None:
    """It belongs to the request that waited first, and is linked to the others; nobody is counted twice."""
    waiters = Waiters()
    first, second = (SpanContext(number, number, True, TraceFlags(1)) for number in (1, 2))
    for context in (first, second, first):
        waiters.join("there", context)
    handshake = start()
    handshake.waiters = waiters.of("there")
    handshake.finish()
    waiters.leave("there")

    span = observed.span("nixl.handshake")
    assert (span.trace_id, span.parent_span_id) == (f"{1:032x}", f"{1:016x}")
    assert [link.trace_id for link in span.links] == [f"{2:032x}"]
    assert waiters.of("there") == []


def test_waiters_are_bounded() -> None:
    """By engines and by requests: engine ids come from clients."""
    waiters = Waiters()
    for number in range(3 * Waiters.LIMIT):
        waiters.join(str(number), SpanContext(1, 1, True))
    for number in range(3 * Waiters.LINKS):
        waiters.join("one", SpanContext(1, 1 + number, True))

    assert len(waiters._waiting) <= Waiters.LIMIT
    assert len(waiters.of("one")) == Waiters.LINKS
