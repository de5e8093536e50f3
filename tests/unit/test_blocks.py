# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans of blocks: every block once, from where to where, with bytes that add up."""

import itertools
import os
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from opentelemetry.trace import SpanContext, TraceFlags

from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.operations.transfer import Request, TransferTable
from nixl_telemetry.settings import Settings
from nixl_telemetry.signals.blocks import shares
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.moves import BlockBudget, BlockMoves, Runs
from nixl_telemetry.signals.propagation import NOTHING, written
from nixl_telemetry.signals.semconv import BlockDetail, Signal, TransferMode
from nixl_telemetry.signals.telemetry import Telemetry
from nixl_telemetry.testbed import ReceivedSpan
from tests.support.observed import Collector, Observed

PAIRS = st.lists(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=40), max_size=3)


@given(PAIRS)
def test_runs_cover_every_block_once(groups: list[list[tuple[int, int]]]) -> None:
    """Whatever the ids; and no two runs that follow each other could be one."""
    moves = BlockMoves([[a for a, _ in pairs] for pairs in groups], [[b for _, b in pairs] for pairs in groups])
    runs = list(moves.runs())

    covered = [(group, a + step, b + step) for group, a, b, length in runs for step in range(length)]
    assert covered == [(group, *pair) for group, pairs in enumerate(groups) for pair in pairs]
    assert len(moves) == len(covered)
    for (group, a, b, length), other in itertools.pairwise(runs):
        assert other[:3] != (group, a + length, b + length)
    each = moves.each()
    assert list(zip(each.groups, each.local, each.remote, strict=True)) == covered
    assert each.lengths == [1] * len(covered)


@pytest.mark.parametrize("kind", [list, tuple, np.asarray])
def test_ids_of_any_sequence(kind: Callable[[list[int]], Any]) -> None:
    """vLLM has lists today."""
    moves = BlockMoves([kind([*range(5), 9])], [kind([*range(10, 15), 3])])

    assert list(moves.runs()) == [(0, 0, 10, 5), (0, 9, 3, 1)]


@pytest.mark.parametrize(
    ("wanted", "limit", "detail", "count"),
    [
        ("each", 64, "each", 4),
        ("each", 4, "each", 4),
        ("each", 3, "runs", 2),
        ("each", 0, "each", 4),
        ("runs", 64, "runs", 2),
    ],
)
def test_detail(wanted: str, limit: int, detail: str, count: int) -> None:
    """Each block up to the limit, then runs."""
    chosen, runs = BlockMoves([[1, 2, 3, 9]], [[11, 12, 13, 4]]).detail(BlockDetail(wanted), limit)

    assert (chosen, len(runs)) == (detail, count)
    if detail == "runs":
        assert runs == Runs([0, 0], [1, 9], [11, 4], [3, 1])


def transfer(
    telemetry: Telemetry,
    local: list[list[int]],
    remote: list[list[int]],
    size: int = 1000,
    parent: SpanContext | None = None,
) -> None:
    """A finished READ."""
    table = TransferTable(telemetry)
    table.request = Request(
        "r", "s", Peer("e", "h", 1), 0, local, remote, registered=written(parent) if parent else NOTHING
    )
    handle = object()
    table.prepared("READ", range(12), now_ns(), handle)
    table.posting(handle)
    table.done(handle, SimpleNamespace(xferDuration=2_500, postDuration=40, totalBytes=size, descCount=3))


def blocks_of(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
    """The spans of blocks."""
    return [span for span in spans if span.name == "nixl.block"]


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(0, 1 << 40), st.booleans())
def test_bytes_are_shared_out(lengths: list[int], size_bytes: int, even: bool) -> None:
    """By the lengths, in whole bytes, and all of them."""
    size_bytes *= sum(lengths) if even else 1
    found = shares(size_bytes, lengths)

    assert sum(share for share in found if share is not None) == size_bytes
    for share, length in zip(found, lengths, strict=True):
        assert share is not None
        assert abs(share * sum(lengths) - size_bytes * length) <= (0 if even else sum(lengths))


def test_no_shares_of_unknown_bytes() -> None:
    """Where NIXL did not measure."""
    assert shares(None, [1, 2]) == [None, None]


def test_each_block_is_a_span(observed: Observed) -> None:
    """Below the transfer's, with ids of both sides, the group, a share of the bytes, and how it was timed."""
    transfer(observed.telemetry, [[1, 2], [7]], [[3, 4], [8]])

    parent = observed.span("nixl.transfer")
    blocks = blocks_of(observed.spans())
    assert [
        (
            block.attributes["nixl.block.local.id"],
            block.attributes["nixl.block.remote.id"],
            block.attributes["nixl.block.group"],
            block.attributes["nixl.block.size"],
        )
        for block in blocks
    ] == [(1, 3, 0, 333), (2, 4, 0, 333), (7, 8, 1, 334)]
    assert len({block.span_id for block in blocks} | {parent.span_id}) == 4
    for block in blocks:
        assert (block.trace_id, block.parent_span_id) == (parent.trace_id, parent.span_id)
        assert (block.start_ns, block.end_ns, block.kind) == (parent.start_ns, parent.end_ns, "INTERNAL")
        assert block.attributes["nixl.block.timing"] == "transfer"
        assert block.attributes["nixl.transfer.operation"] == "READ"
        assert block.attributes["server.port"] == 1
        assert "nixl.block.count" not in block.attributes
        assert block.resource == parent.resource
    assert parent.attributes["nixl.block.detail"] == "each"


def test_many_blocks_become_runs(observed: Observed) -> None:
    """And the transfer says so."""
    transfer(observed.telemetry, [list(range(100))], [[*range(50), *range(60, 110)]], size=100_001)

    blocks = blocks_of(observed.spans())
    assert [block.attributes["nixl.block.count"] for block in blocks] == [50, 50]
    assert [block.attributes["nixl.block.remote.id"] for block in blocks] == [0, 60]
    assert sum(block.attributes["nixl.block.size"] for block in blocks) == 100_001
    assert observed.span("nixl.transfer").attributes["nixl.block.detail"] == "runs"


def test_without_limit_messages_stay_small(collector: Collector) -> None:
    """A collector takes 4 MiB; the bytes add up over all messages."""
    settings = Settings.load({"telemetry": {"block_span_limit": 0}}, {})
    telemetry = Telemetry(settings, TransferMode.PULL, {})
    observed = Observed(telemetry, collector)
    ids = list(range(7_000))
    transfer(telemetry, [ids], [ids[::-1]], size=1_000_003)

    blocks = blocks_of(observed.spans())
    assert Counter(block.attributes["nixl.block.local.id"] for block in blocks) == Counter(ids)
    assert sum(block.attributes["nixl.block.size"] for block in blocks) == 1_000_003
    assert max(request.ByteSize() for request in collector.requests) < 4 * 2**20
    assert {block.parent_span_id for block in blocks} == {observed.span("nixl.transfer").span_id}
    telemetry.close()


@pytest.mark.parametrize("settings", [{"block_spans": "off"}, {}])
def test_none_where_not_wanted_or_not_sampled(collector: Collector, settings: dict[str, str]) -> None:
    """Switched off, or a trace that the caller does not sample; then nothing is held either."""
    telemetry = Telemetry(Settings.load({"telemetry": settings}, {}), TransferMode.PULL, {})
    sampled = bool(settings)
    transfer(telemetry, [[1]], [[2]], parent=SpanContext(1, 2, True, TraceFlags(1 if sampled else 0)))

    spans = Observed(telemetry, collector).spans()
    assert [span.name for span in spans] == (["nixl.transfer"] if sampled else [])
    assert telemetry.blocks.take(BlockBudget.LIMIT)
    telemetry.close()


def test_no_limit_means_no_limit(collector: Collector) -> None:
    """As many blocks as a queue has room for records."""
    settings = Settings.load({"telemetry": {"block_span_limit": 0}}, {})
    telemetry = Telemetry(settings, TransferMode.PULL, {})
    ids = list(range(settings.queue_size))
    transfer(telemetry, [ids], [ids[::-1]])

    spans = Observed(telemetry, collector).spans()
    assert (len(blocks_of(spans)), len(spans)) == (8192, 8193)
    assert telemetry.drain()["nixl_transfer_blocks_total"] == {"read": 8192}  # type: ignore[index]
    telemetry.close()


def test_large_transfers_are_not_gathered(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait would take the room of those that come, which would be without their blocks."""
    monkeypatch.setattr(BlockBudget, "LIMIT", 1000)
    telemetry = Telemetry(Settings.load({}, {}), TransferMode.PULL, {})
    ids = list(range(300))
    begin = time.monotonic()
    for _ in range(12):
        transfer(telemetry, [ids], [ids])
        time.sleep(0.05)
    observed = Observed(telemetry, collector)

    assert observed.updates().get(("nixl_telemetry_dropped_total", "blocks")) is None
    transfers = [span for span in observed.spans() if span.name == "nixl.transfer"]
    assert [span.attributes["nixl.block.detail"] for span in transfers] == 12 * ["runs"]
    assert time.monotonic() - begin < 5
    telemetry.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_has_the_whole_budget() -> None:
    """What waits in the parent is the parent's, and so may be the lock."""
    budget = BlockBudget()
    assert budget.take(BlockBudget.LIMIT)
    child = os.fork()
    if child == 0:
        os._exit(0 if budget.take(BlockBudget.LIMIT) else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not budget.take(1)


def test_waiting_ids_are_bounded(observed: Observed) -> None:
    """Where too many wait, the transfer has no block spans, says so, and it is counted."""
    assert observed.telemetry.blocks.take(BlockBudget.LIMIT)
    transfer(observed.telemetry, [[1]], [[2]])

    assert observed.span("nixl.transfer").attributes["nixl.block.detail"] == "dropped"
    assert observed.updates()["nixl_telemetry_dropped_total", Signal.BLOCKS] == 1
    observed.telemetry.blocks.give_back(BlockBudget.LIMIT)
    transfer(observed.telemetry, [[1]], [[2]])

    assert len(blocks_of(observed.spans())) == 1
    assert observed.telemetry.blocks.take(BlockBudget.LIMIT)
