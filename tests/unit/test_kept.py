# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What is exported of traces that are not sampled: operations that failed, or were slower than their own setting."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Final

import pytest
from opentelemetry.trace import SpanContext, TraceFlags

from nixl_telemetry.operations.compatibility import Compatibility
from nixl_telemetry.operations.handshake import Failure, Handshake
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.operations.receive import Origin, Receive, ReceiveTable
from nixl_telemetry.operations.transfer import Request, TransferTable
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.propagation import Carried, written
from nixl_telemetry.signals.semconv import Purpose
from nixl_telemetry.signals.telemetry import Telemetry
from tests.support.observed import Collector, observing

UNSAMPLED: Final = SpanContext(0xABC, 0xDEF, True, TraceFlags(0))
PEER: Final = Peer("there", "10.0.0.7", 5600)
LIMITS: Final = {"handshake": 20.0, "transfer": 30.0, "receive": 40.0}
"""Above this an operation is slow. Seconds. None is the default, and none is that of another operation."""
SETTINGS: Final = {f"slow_{name}_seconds": seconds for name, seconds in LIMITS.items()}


def handshake(telemetry: Telemetry, seconds: float, *, failed: bool) -> None:
    """A handshake for which a request waits."""
    compatibility = Compatibility(telemetry, "aaa", True, "kv_consumer")
    one = Handshake(telemetry, PEER, Purpose.TRANSFER, compatibility, 1, waiters=[UNSAMPLED])
    one.start_ns -= int(seconds * 1e9)
    one.received("bbb" if failed else "aaa")
    if not failed:
        one.registering()
        one.registered()
    one.finish(Failure(RuntimeError("NIXL compatibility hash mismatch")) if failed else None)


def begun(table: ReceiveTable, seconds: float = 0) -> Receive:
    """A request that has waited so long."""
    one = table.start("r", "s", PEER, 3, Origin(written(UNSAMPLED)))
    one.start_ns -= int(seconds * 1e9)
    return one


def receive(telemetry: Telemetry, seconds: float, *, failed: bool) -> None:
    """A request's wait for its KV."""
    table = ReceiveTable(telemetry)
    begun(table, seconds)
    table.finish(["r"], ["r"] if failed else [])


def moved(
    telemetry: Telemetry, seconds: float, *, failed: bool, waits: Receive | None, registered: Carried = ("", "")
) -> None:
    """A transfer of three blocks."""
    table = TransferTable(telemetry)
    table.request = Request(
        "r", "s", PEER, 0, [[1, 2, 3]], [[4, 5, 6]], receive=waits, registered=registered, lease=registered
    )
    handle = object()
    table.prepared("READ", range(12), now_ns(), handle)
    table.posting(handle)
    if failed:
        table._transfers[id(handle)].start_ns -= int(seconds * 1e9)
        table.polled(handle, "ERR")
    else:
        result = SimpleNamespace(xferDuration=int(seconds * 1e6), postDuration=40, totalBytes=4096, descCount=3)
        table.done(handle, result)
    table.released(table.take(handle))


def pull(telemetry: Telemetry, seconds: float, *, failed: bool) -> None:
    """A transfer for which a request of the same process waits."""
    moved(telemetry, seconds, failed=failed, waits=begun(ReceiveTable(telemetry)))


def push(telemetry: Telemetry, seconds: float, *, failed: bool) -> None:
    """A transfer for which a request of the peer waits."""
    moved(telemetry, seconds, failed=failed, waits=None, registered=written(UNSAMPLED))


Operation = Callable[..., None]

OF_OPERATIONS: Final = pytest.mark.parametrize(
    ("operation", "name"),
    [(handshake, "handshake"), (pull, "transfer"), (push, "transfer"), (receive, "receive")],
    ids=["handshake", "pull", "push", "receive"],
)
HOW: Final = [
    (-1.0, False, None),
    (1.0, False, "slow"),
    (-1.0, True, "failed"),
    (1.0, True, "failed"),
]
"""Seconds beyond the limit, whether it failed, and why it is kept."""


@OF_OPERATIONS
@pytest.mark.parametrize(("beyond", "failed", "kept"), HOW)
def test_what_failed_or_was_slow_is_kept(
    collector: Collector, operation: Operation, name: str, beyond: float, failed: bool, kept: str | None
) -> None:
    """In its caller's trace, and it says why; what is neither leaves nothing, and blocks have no spans."""
    with observing(collector, SETTINGS) as observed:
        operation(observed.telemetry, LIMITS[name] + beyond, failed=failed)
        spans = observed.spans()

    assert [span.attributes["nixl.kept"] for span in spans if span.name == f"nixl.{name}"] == ([kept] if kept else [])
    # Stages are below their handshake.
    assert [span.name for span in spans if not span.name.startswith(f"nixl.{name}")] == []
    assert {span.trace_id for span in spans} == ({f"{UNSAMPLED.trace_id:032x}"} if kept else set())
    assert {span.status for span in spans if span.name == f"nixl.{name}"} <= {"ERROR" if failed else "UNSET"}


@OF_OPERATIONS
@pytest.mark.parametrize(("beyond", "failed"), [how[:2] for how in HOW])
def test_nothing_is_kept_where_nobody_wants_it(
    collector: Collector, operation: Operation, name: str, beyond: float, failed: bool
) -> None:
    """With ``keep_failed`` off."""
    with observing(collector, {**SETTINGS, "keep_failed": False}) as observed:
        operation(observed.telemetry, LIMITS[name] + beyond, failed=failed)

        assert observed.spans() == []
