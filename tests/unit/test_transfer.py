# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A transfer's span, metrics and log line, for every way in which it can end."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from nixl_telemetry.operations import transfer
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.operations.transfer import Request, TransferTable
from nixl_telemetry.operations.transfer_counts import TransferCounts
from nixl_telemetry.settings import Settings
from nixl_telemetry.signals.catalogue import TRANSFER_OLDEST
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.metrics import Batch, label_values, merge
from nixl_telemetry.signals.semconv import RANK, TransferMode
from nixl_telemetry.signals.telemetry import Telemetry
from tests.support.observed import Observed

DURATION = "nixl_transfer_duration_seconds"
DELAY = "nixl_transfer_observation_delay_seconds"
IN_FLIGHT = "nixl_transfers_in_flight"
POSTED = "nixl_transfers_posted_total"
PEER_TRANSFERS = "nixl_peer_transfers_total"
PEER = "10.0.0.7:5600"

NIXL_RESULT = SimpleNamespace(xferDuration=2_500, postDuration=40, totalBytes=4096, descCount=3)
ZERO: dict[tuple[str, ...], float] = {(POSTED, "read"): 1, (IN_FLIGHT, "read"): 0}


@pytest.fixture
def table(observed: Observed) -> TransferTable:
    """The table of a pull worker that posts for a request with 3 blocks in two groups."""
    table = TransferTable(observed.telemetry)
    table.request = Request("req", "remote-req", Peer("there", "10.0.0.7", 5600), 1, [[1, 2], [7]], [[3, 4], [8]])
    return table


Post = Callable[[object], None]


@pytest.fixture
def post(table: TransferTable) -> Post:
    """Prepares and posts a READ of 12 descriptors under a handle."""

    def post(handle: object) -> None:
        table.prepared("READ", range(12), now_ns(), handle)
        table.posting(handle)

    return post


def test_success(observed: Observed, table: TransferTable, post: Post) -> None:
    """What NIXL measured is on the span and in the metrics, in base units."""
    handle = object()
    post(handle)
    assert observed.updates() == {(POSTED, "read"): 1, (IN_FLIGHT, "read"): 1}
    table.polled(handle, "PROC")
    table.polled(handle, "DONE")
    table.done(handle, NIXL_RESULT)
    table.released(table.take(handle))

    updates = observed.updates()
    (delay,) = updates.pop((DELAY, "read"))
    assert updates.pop(("nixl_peer_last_success_timestamp_seconds", PEER)) == pytest.approx(time.time(), abs=60)
    assert updates == {
        (IN_FLIGHT, "read"): -1,
        (DURATION, "read", ""): [0.0025],
        (PEER_TRANSFERS, PEER, ""): 1,
        ("nixl_peer_transfer_bytes_total", PEER): 4096,
        ("nixl_peer_transfer_seconds_total", PEER): 0.0025,
        ("nixl_transfer_blocks_total", "read"): 3,
        ("nixl_transfer_descriptors_total", "read"): 3,
        ("nixl_transfer_bytes_total", "read"): 4096,
    }
    span = observed.span("nixl.transfer")
    assert span.kind == "CLIENT"
    assert span.status == "UNSET"
    assert dict(span.attributes) == {
        "nixl.engine.id": "here",
        "nixl.transfer.operation": "READ",
        "nixl.transfer.block.count": 3,
        "nixl.transfer.descriptor.count": 3,
        "nixl.transfer.size": 4096,
        "nixl.transfer.duration": 0.0025,
        "nixl.transfer.post.duration": 0.00004,
        "nixl.transfer.observation_delay": delay,
        "nixl.request.id": "req",
        "nixl.remote.request.id": "remote-req",
        "nixl.remote.engine.id": "there",
        "nixl.remote.rank": 1,
        "server.address": "10.0.0.7",
        "server.port": 5600,
        "nixl.block.detail": "each",
    }
    (line,) = observed.messages()
    assert line.startswith("event=nixl.transfer.finished")
    assert observed.lines[0].levelname == "DEBUG"


def test_observation_delay_runs_from_the_last_poll_in_progress(
    observed: Observed, table: TransferTable, post: Post
) -> None:
    """The end lies between two polls."""
    handle = object()
    post(handle)
    transfer = table._transfers[id(handle)]
    table.polled(handle, "PROC")
    first = transfer.last_poll_ns
    table.polled(handle, "PROC")
    assert transfer.last_poll_ns > first
    table.done(handle, NIXL_RESULT)

    assert transfer.observation_delay_s == (transfer.end_ns - transfer.last_poll_ns) / 1e9


def test_done_without_nixl_telemetry(observed: Observed, table: TransferTable, post: Post) -> None:
    """Blocks and our own time are known, bytes are not; the suite's health says so."""
    handle = object()
    post(handle)
    table.done_unmeasured(handle, RuntimeError("no telemetry"))
    table.released(table.take(handle))

    updates = observed.updates()
    (duration,) = updates.pop((DURATION, "read", ""))
    assert updates.pop((DELAY, "read")) == [duration]
    assert updates.pop(("nixl_peer_last_success_timestamp_seconds", PEER)) > 0
    assert updates == {
        **ZERO,
        (PEER_TRANSFERS, PEER, ""): 1,
        ("nixl_peer_transfer_bytes_total", PEER): 0,
        ("nixl_peer_transfer_seconds_total", PEER): duration,
        ("nixl_transfer_blocks_total", "read"): 3,
        ("nixl_transfer_descriptors_total", "read"): 12,
        ("nixl_telemetry_errors_total", "nixl"): 1,
    }
    assert "nixl.transfer.size" not in observed.span("nixl.transfer").attributes
    assert any("NIXL_TELEMETRY_ENABLE" in message for message in observed.messages())


def _setup(table: TransferTable, handle: object) -> None:
    table.setup_failed("READ", range(12), now_ns(), RuntimeError("no such memory"))


def _posting(table: TransferTable, handle: object) -> None:
    table.prepared("READ", range(12), now_ns(), handle)
    table.posting(handle)
    table.posting_failed(handle, RuntimeError("no route"))
    table.released(table.take(handle))


def _state(table: TransferTable, handle: object) -> None:
    table.prepared("READ", range(12), now_ns(), handle)
    table.posting(handle)
    table.polled(handle, "ERR")
    table.polled(handle, "ERR")
    table.released(table.take(handle))


def _poll(table: TransferTable, handle: object) -> None:
    table.prepared("READ", range(12), now_ns(), handle)
    table.posting(handle)
    table.poll_failed(handle, ConnectionError("remote disconnect"))
    table.released(table.take(handle))


def _cancelled(table: TransferTable, handle: object) -> None:
    table.prepared("READ", range(12), now_ns(), handle)
    table.posting(handle)
    table.released(table.take(handle))


@pytest.mark.parametrize(
    ("happens", "error_type", "message"),
    [
        (_setup, "transfer_setup", "no such memory"),
        (_posting, "transfer_setup", "no route"),
        (_state, "transfer_failed", "NIXL reports the state ERR"),
        (_poll, "transfer_failed", "remote disconnect"),
        (_cancelled, "_OTHER", "released before it was seen done"),
    ],
)
def test_failures(
    observed: Observed,
    table: TransferTable,
    happens: Callable[[TransferTable, object], None],
    error_type: str,
    message: str,
) -> None:
    """Each is one failed transfer, nothing stays in flight, no bytes or blocks are counted."""
    happens(table, object())

    updates = observed.updates()
    if updates.pop((IN_FLIGHT, "read"), None) is not None:
        # Of a peer's are those that were posted.
        assert updates.pop((PEER_TRANSFERS, PEER, error_type)) == 1
    assert updates.pop((POSTED, "read")) == 1
    assert [(key, len(value)) for key, value in updates.items()] == [((DURATION, "read", error_type), 1)]
    span = observed.span("nixl.transfer")
    assert (span.status, span.status_message) == ("ERROR", message)
    assert span.attributes["error.type"] == error_type
    (line,) = observed.messages()
    assert line.startswith("event=nixl.transfer.failed")
    assert table._transfers == {}


def test_nothing_is_known_of_a_foreign_handle(observed: Observed, table: TransferTable) -> None:
    """Handles that were prepared before the hooks, or dropped, are left alone."""
    table.posting(object())
    table.released(table.take(object()))
    table.polled(object(), "PROC")
    table.polled(object(), "ERR")
    table.done(object(), NIXL_RESULT)

    assert observed.updates() == {}
    assert observed.spans() == []


def test_the_table_is_bounded(observed: Observed, table: TransferTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles that are never released do not grow it for ever."""
    monkeypatch.setattr(TransferTable, "LIMIT", 2)
    handles = [object() for _ in range(5)]
    for handle in handles:
        table.prepared("READ", (), now_ns(), handle)

    assert len(table._transfers) == 2
    assert observed.updates() == {("nixl_telemetry_dropped_total", "traces"): 3}


def _fail(table: TransferTable, times: int) -> None:
    for _ in range(times):
        table.setup_failed("READ", (), now_ns(), RuntimeError("no such agent"))


def test_transfers_that_nobody_sums_up_are_not_kept(
    observed: Observed, table: TransferTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that does not come does not grow the table for ever; what was left out is counted."""
    monkeypatch.setattr(TransferCounts, "LIMIT", 2)
    for _ in range(5):
        _cancelled(table, object())

    assert (len(table.counts._posted), len(table.counts._ended)) == (2, 2)
    updates = observed.updates()
    assert updates["nixl_telemetry_dropped_total", "metrics"] == 3
    # How many are in flight must be right all the same.
    assert (updates[POSTED, "read"], updates[IN_FLIGHT, "read"]) == (5, 0)
    assert len(table.counts._ended) == 0

    _fail(table, 5)

    assert len(table.counts._ended) == 2
    updates = observed.updates()
    assert updates["nixl_telemetry_dropped_total", "metrics"] == 3
    assert updates[POSTED, "read"] == 5
    assert (IN_FLIGHT, "read") not in updates


def test_levels_are_right_whatever_fails(
    observed: Observed, table: TransferTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault in what is counted of one peer takes neither the levels with it nor what is counted of others."""

    def transferred(peer: Peer, *args: object) -> tuple[()]:
        if peer.engine_id == "there":
            raise RuntimeError("injected")
        return ()

    monkeypatch.setattr(table.peers, "transferred", transferred)
    for engine_id in ("there", "elsewhere"):
        assert table.request is not None
        table.request.peer = Peer(engine_id)
        handle = object()
        table.prepared("READ", (), now_ns(), handle)
        table.posting(handle)
        table.done(handle, NIXL_RESULT)

    updates = observed.updates()
    assert (updates[POSTED, "read"], updates[IN_FLIGHT, "read"]) == (2, 0)
    assert updates["nixl_telemetry_errors_total", "hook"] == 1
    assert updates[DURATION, "read", ""] == [0.0025]


def test_each_worker_tells_since_when_its_oldest_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that hangs on any is seen, whatever the others do; all stages of a pipeline have the same tensor ranks."""
    ages_s = iter((90, 30))
    monkeypatch.setattr(transfer, "now_ns", lambda: now_ns() - next(ages_s) * 10**9)
    told: Batch = {}
    settings = Settings.load({"telemetry": {"traces": False, "logs": False}}, {})
    for rank, handles in ((0, []), (1, [object(), object()])):
        telemetry = Telemetry(settings, TransferMode.PULL, {RANK: 0}, rank=rank)
        table = TransferTable(telemetry)
        for handle in handles:
            table.prepared("READ", range(12), now_ns(), handle)
            table.posting(handle)
        table._look()
        merge(told, telemetry.drain() or {})
        telemetry.close()

    series = {label_values(key): value for key, value in told[TRANSFER_OLDEST.name].items()}
    assert series == {("read", "1"): pytest.approx(time.time() - 90, abs=5)}


def test_without_metrics_no_transfer_is_kept() -> None:
    """The step that would sum them up has nothing to send, and takes none."""
    telemetry = Telemetry(
        Settings.load({"telemetry": {"metrics": False, "traces": False, "logs": False}}, {}), TransferMode.PULL, {}
    )
    table = TransferTable(telemetry)
    _fail(table, 5)
    telemetry.close()

    assert len(table.counts._ended) == 0
    assert telemetry.drain() is None


def test_two_threads_lose_nothing_and_count_nothing_twice(observed: Observed, table: TransferTable) -> None:
    """In push the writer's thread ends transfers while the engine's ends others and drains."""
    count, summed = 500, Counter[tuple[str, ...]]()

    def engine() -> None:
        for handle in range(count):
            table.prepared("READ", (), now_ns(), handle)
            table.posting(handle)
            table.done(handle, NIXL_RESULT)
            table.take(handle)
            drain()

    def drain() -> None:
        for name, series in (observed.telemetry.drain() or {}).items():
            for key, value in series.items():
                summed[name, key] += len(value) if isinstance(value, list) else value

    writer = threading.Thread(target=_fail, args=(table, count))
    table.request = None
    writer.start()
    engine()
    writer.join()
    drain()
    observed.settle()

    assert summed[POSTED, "read"] == 2 * count
    assert summed[IN_FLIGHT, "read"] == 0
    assert summed[DURATION, "read\x1f"] == summed[DELAY, "read"] == count
    assert summed[DURATION, "read\x1ftransfer_setup"] == count
    assert summed["nixl_transfer_bytes_total", "read"] == count * NIXL_RESULT.totalBytes
    assert summed[PEER_TRANSFERS, "unknown\x1f"] == count


def test_handles_are_not_kept_alive(table: TransferTable) -> None:
    """NIXL frees a transfer's memory when its handle dies, so the table must not hold it."""
    died = []

    class Handle:
        def __del__(self) -> None:
            died.append(True)

    handle = Handle()
    table.prepared("READ", (), now_ns(), handle)
    del handle

    assert died == [True]


def test_another_operation_than_the_mode_s_is_a_conflict(observed: Observed, table: TransferTable) -> None:
    """A WRITE by a pull connector: counted each time, logged once, on the span each time."""
    for _ in range(2):
        handle = object()
        table.prepared("WRITE", range(4), now_ns(), handle)
        table.posting(handle)
        table.done(handle, NIXL_RESULT)

    assert observed.updates()["nixl_mode_conflicts_total", "operation"] == 2
    spans = [span for span in observed.spans() if span.name == "nixl.transfer"]
    assert [[event.name for event in span.events] for span in spans] == [["nixl.mode_conflict"]] * 2
    warnings = [record for record in observed.lines if record.levelname == "WARNING"]
    assert ["nixl.mode_conflict.found=push" in record.getMessage() for record in warnings] == [True]


def test_blocks_that_two_transfers_move_together_count_once(
    observed: Observed, table: TransferTable, post: Post
) -> None:
    """Where a request's memory is of two kinds, vLLM posts one transfer for each."""
    for handle in (object(), object()):
        post(handle)
        table.done(handle, NIXL_RESULT)

    updates = observed.updates()
    assert updates["nixl_transfer_blocks_total", "read"] == 3
    assert len(updates[DURATION, "read", ""]) == 2


def test_a_handle_that_cannot_be_released_is_polled_again(observed: Observed, table: TransferTable, post: Post) -> None:
    """vLLM keeps it, and its end still counts once."""
    handle = object()
    post(handle)
    table.put_back(handle, table.take(handle))
    table.done(handle, NIXL_RESULT)
    table.released(table.take(handle))

    assert observed.updates()[DURATION, "read", ""] == [0.0025]
    assert table._transfers == {}


def test_blocks_by_region_are_not_multiplied_by_the_regions(observed: Observed, table: TransferTable) -> None:
    """vLLM lists the same blocks once for each region where the two sides group their caches differently."""
    assert table.request is not None
    table.request.by_region = True
    table.request.local_blocks = [[1, 2, 3]] * 27
    handle = object()
    table.prepared("READ", range(81), now_ns(), handle)
    table.done(handle, NIXL_RESULT)

    assert observed.updates()["nixl_transfer_blocks_total", "read"] == 3


def test_what_waits_to_be_written_holds_no_blocks(observed: Observed) -> None:
    """A disk that is full keeps thousands of finished transfers waiting."""
    table = TransferTable(observed.telemetry)
    table.request = Request("r", "s", Peer("there"), 0, [list(range(10_000))], [list(range(10_000))])
    handle = object()
    table.prepared("READ", [1], now_ns(), handle)
    table.done(handle, NIXL_RESULT)
    transfer = table.take(handle)
    assert transfer is not None

    assert transfer.blocks == 10_000
    assert transfer.request is not None
    assert (transfer.request.local_blocks, transfer.request.remote_blocks) == ((), ())
