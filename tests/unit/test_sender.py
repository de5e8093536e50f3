# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The thread that sends spans: bounded, patient with collectors, and gone after a fork."""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind

from nixl_telemetry.signals.blocks import BlockSpans
from nixl_telemetry.signals.description import Span
from nixl_telemetry.signals.moves import BlockMoves
from nixl_telemetry.signals.otlp import Envelope, ExportedSpan, Message
from nixl_telemetry.signals.semconv import BlockDetail, SpanName
from nixl_telemetry.signals.sender import SpanSender
from tests.support.peers import wait_until
from tests.support.threads import cannot_start, threads_started

PACE_SECONDS = 1.0


@dataclass
class Bench:
    """A sender, and what became of its spans."""

    limit: int = 100
    hold: threading.Event = field(default_factory=threading.Event)
    sent: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    connected: int = 0
    fails: bool = False
    shut: int = 0

    def __post_init__(self) -> None:
        self.hold.set()
        self.sender = SpanSender(
            self.connect, lambda: ENVELOPE, PACE_SECONDS, self.limit, self.lost.append, self.errors.append
        )

    def connect(self) -> Any:
        """The exporter is this object."""
        self.connected += 1
        return self

    def send(self, message: Message) -> None:
        """Take a batch."""
        self.hold.wait(10)
        if self.fails:
            raise ConnectionError("no collector")
        self.sent.append(message.span_count)

    def shutdown(self) -> None:
        """Count it."""
        self.shut += 1

    def add(self, count: int) -> None:
        """Hand over so many spans."""
        self.sender.add(span(number) for number in range(count))


def span(number: int) -> ExportedSpan:
    """A span."""
    said = Span(SpanName.TRANSFER, SpanKind.CLIENT, 1, 2)
    return ExportedSpan(said, SpanContext(1, 1 + number, is_remote=False), None, {}, 0)


ENVELOPE = Envelope.of(Resource({}), InstrumentationScope("test"))


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A sender."""
    bench = Bench()
    yield bench
    bench.hold.set()
    bench.sender.close(5)


def test_spans_go_in_batches(bench: Bench) -> None:
    """What comes together goes together, soon after the last."""
    bench.add(3)
    bench.add(4)

    assert wait_until(lambda: bool(bench.sent), 5)
    assert (bench.sent, bench.lost, bench.connected) == ([7], [], 1)


def test_a_thread_that_could_not_start_is_tried_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was handed over meanwhile goes with the next."""
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", cannot_start)
        bench.add(3)
    bench.add(4)

    assert wait_until(lambda: bool(bench.sent), 5)
    assert (bench.sent, bench.lost) == ([7], [])
    assert [str(error) for error in bench.errors] == ["can't start new thread"]


def test_a_steady_stream_does_not_wait_for_a_pause(bench: Bench) -> None:
    """The oldest span waits so long at most."""
    begin = time.monotonic()
    while not bench.sent and time.monotonic() - begin < 5:
        bench.add(1)
        time.sleep(0.02)

    assert bench.sent
    assert time.monotonic() - begin < 2.5


def test_spans_that_only_join_a_batch_wake_nobody(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread knows when the batch is due; to wake it each time costs more than the span."""
    woken: list[str] = []
    notify_all = bench.sender._changed.notify_all

    def note() -> None:
        woken.append(threading.current_thread().name)
        notify_all()

    monkeypatch.setattr(bench.sender._changed, "notify_all", note)
    for _ in range(20):
        bench.add(1)

    assert wait_until(lambda: sum(bench.sent) == 20)
    assert woken.count(threading.current_thread().name) <= 2


def test_a_collector_that_hangs_costs_spans_not_memory(bench: Bench) -> None:
    """Up to the limit they wait, beyond it they are lost and counted; nobody waits with them."""
    bench.hold.clear()
    bench.add(1)
    assert wait_until(lambda: bench.connected == 1, 5)
    begin = time.monotonic()
    for _ in range(150):
        bench.add(1)

    assert time.monotonic() - begin < 1
    assert sum(bench.lost) == 50
    bench.hold.set()
    assert bench.sender.flush(5)
    assert sum(bench.sent) == 101


def test_a_collector_that_fails_and_comes_back(bench: Bench) -> None:
    """Each lost batch is counted with its spans; the next is sent by the same exporter."""
    bench.fails = True
    bench.add(3)
    assert bench.sender.flush(5)
    bench.fails = False
    bench.add(2)
    assert bench.sender.flush(5)

    assert (bench.lost, bench.sent, len(bench.errors), bench.connected) == ([3], [2], 1, 1)


def test_a_span_that_cannot_be_encoded_takes_no_other_with_it(bench: Bench) -> None:
    """Numbers come from clients, and 64 bits is what there is; half of a surrogate pair is sent as something else."""
    attributes: tuple[dict[str, Any], ...] = ({}, {"n": 1 << 63}, {"n": -(1 << 63) - 1}, {"text": "\ud800"}, {})
    bench.sender.add([replace(span(number), attributes=each) for number, each in enumerate(attributes)])

    assert bench.sender.flush(5)
    assert (bench.sent, bench.lost, len(bench.errors)) == ([3], [1, 1], 2)


def test_of_a_tree_that_is_too_large_the_first_spans_go(bench: Bench) -> None:
    """The transfer comes before its blocks, of which 16 take the room of one span."""
    owner = span(0)
    runs = BlockMoves([range(64)], [range(64)]).each()
    blocks = BlockSpans(owner, runs, [None] * 64, BlockDetail.EACH, False, {})
    sender = SpanSender(bench.connect, lambda: ENVELOPE, PACE_SECONDS, 5, bench.lost.append, bench.errors.append)
    sender.add([owner, blocks, blocks])

    assert sender.flush(5)
    assert (bench.sent, bench.lost) == ([65], [64])
    sender.add([owner] * 5)
    assert sender.flush(5)
    assert bench.sent == [65, 5]
    sender.close(5)


def test_closing_is_bounded(bench: Bench) -> None:
    """It waits its time for a collector that hangs, then ends what is under way; later spans are lost and counted."""
    bench.hold.clear()
    bench.add(1)
    assert wait_until(lambda: bench.connected == 1, 5)
    begin = time.monotonic()
    bench.sender.close(0.2)

    assert 0.1 < time.monotonic() - begin < 2
    assert bench.shut == 1
    bench.add(2)
    assert bench.lost == [2]


def test_nothing_starts_without_spans(bench: Bench) -> None:
    """No thread, no connection."""
    started = threads_started()
    bench.sender.add([])
    assert bench.sender.flush(1)

    assert (started(), bench.connected) == ([], 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_sends_its_own_spans_only(bench: Bench) -> None:
    """What waits in the parent is the parent's; the child connects anew."""
    bench.hold.clear()
    bench.add(5)
    assert wait_until(lambda: bench.connected == 1, 5)
    child = os.fork()
    if child == 0:
        bench.hold.set()
        bench.sent.clear()
        bench.add(2)
        is_right = bench.sender.flush(5) and bench.sent == [2] and bench.connected == 2
        os._exit(0 if is_right else 1)
    _, status = os.waitpid(child, 0)
    bench.hold.set()

    assert os.waitstatus_to_exitcode(status) == 0
    assert bench.sender.flush(5)
    assert bench.sent == [5]
