# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The thread that encodes spans and sends them, in batches: a collector that hangs delays nothing else."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from nixl_telemetry.forking import in_children
from nixl_telemetry.signals.blocks import BlockSpans
from nixl_telemetry.signals.breaks import with_breaks
from nixl_telemetry.signals.exporters import Exporter
from nixl_telemetry.signals.otlp import Envelope, ExportedSpan

Item: TypeAlias = ExportedSpan | BlockSpans

QUIET_SECONDS: Final = 0.2
"""So long after the last span a batch is sent, unless one was sent lately: whoever tries something out sees it soon."""
_SPARE_SECONDS: Final = 0.5
"""So long before a message is sent its last spans are to come."""
_BATCH_SPANS: Final = 512
_BLOCKS_PER_SPAN: Final = 16


class SpanSender:
    """Sends spans to one exporter, on a daemon thread that is started with the first span.

    A thread does not survive a fork, nor does gRPC: a child starts with nothing to send, and connects anew.

    Args:
        connect: Makes the exporter; called once in each process.
        envelope: Gives a message without spans.
        pace_seconds: Between two messages of a steady stream, and the longest wait of a span. A message costs as much
            as dozens of spans.
        limit: Spans that may wait, of which 16 spans of blocks count as one. Those beyond are lost.
        on_lost: Told how many spans were lost, because too many waited or because they could not be sent.
        on_error: Told what was raised.
    """

    def __init__(
        self,
        connect: Callable[[], Exporter],
        envelope: Callable[[], Envelope],
        pace_seconds: float,
        limit: int,
        on_lost: Callable[[int], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._connect = connect
        self._envelope = envelope
        self._pace_seconds = pace_seconds
        self._limit = limit
        self._on_lost = on_lost
        self._on_error = on_error
        self.reset()
        in_children(self.reset)

    def reset(self) -> None:
        """Forget everything, as a forked child must."""
        self._changed = threading.Condition()
        self._waiting: deque[Item] = deque()
        self._span_count = 0
        self._room = self._limit
        self._first_at = self._last_at = 0.0
        self._sent_at = -self._pace_seconds
        self._flushing = self._sending = self._closed = False
        self._exporter: Exporter | None = None
        self._thread: threading.Thread | None = None

    def add(self, items: Iterable[Item]) -> None:
        """Hand spans over. Never waits for the exporter."""
        items = list(items)
        if not items:
            return
        with self._changed:
            fitting = self._fitting(items)
            lost = sum(map(_count, items[fitting:]))
            if lost:
                self._on_lost(lost)
            if not fitting:
                return
            begins = not self._waiting
            self._last_at = time.monotonic()
            self._first_at = self._last_at if begins else self._first_at
            self._waiting.extend(items[:fitting])
            self._span_count += sum(map(_count, items[:fitting]))
            self._room -= sum(map(_weight, items[:fitting]))
            if self._thread is None:
                self._start()
            # Once it knows of a batch, or of a stream, the thread wakes in time by itself.
            in_stream = self._last_at < self._sent_at + self._pace_seconds
            if (begins and not in_stream) or self._span_count >= _BATCH_SPANS:
                self._changed.notify_all()

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name="nixl-telemetry-send", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # The process may have no more threads; the next spans try again.
            self._on_error(error)
        else:
            self._thread = thread

    def can_wait_until(self) -> float:
        """Until when a span can come and be sent no later for it, by :func:`time.monotonic`."""
        at = self._sent_at + self._pace_seconds
        if self._waiting:
            at = self._due_at()
            # It is about to be sent.
            if at < time.monotonic() + _SPARE_SECONDS:
                at += self._pace_seconds
        return at - _SPARE_SECONDS

    def flush(self, timeout_seconds: float) -> bool:
        """Send what waits; false if that took longer than the timeout."""
        with self._changed:
            self._flushing = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: not (self._waiting or self._sending), timeout_seconds)

    def close(self, timeout_seconds: float) -> None:
        """Send what waits, within the timeout, then nothing more."""
        self.flush(timeout_seconds)
        with self._changed:
            self._closed = True
            exporter = self._exporter
            self._changed.notify_all()
        if exporter is not None:
            exporter.shutdown()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                while not self._is_due():
                    if self._closed:
                        return
                    self._changed.wait(self._seconds_to_wait())
                batch = self._take_batch()
                self._sending = True
            self._send(batch)

    def _is_late(self) -> bool:
        return self._flushing or self._span_count >= _BATCH_SPANS

    def _fitting(self, items: Sequence[Item]) -> int:
        """How many of the items there is room for, in order: a transfer comes before its blocks."""
        if self._closed:
            return 0
        room = self._room
        for number, item in enumerate(items):
            room -= _weight(item)
            if room < 0:
                return number
        return len(items)

    def _is_due(self) -> bool:
        if not self._waiting:
            self._flushing = False
            return False
        return self._flushing or self._span_count >= _BATCH_SPANS or time.monotonic() >= self._due_at()

    def _seconds_to_wait(self) -> float | None:
        now = time.monotonic()
        if self._waiting:
            return max(0.0, self._due_at() - now)
        next_at = self._sent_at + self._pace_seconds
        return next_at - now if now < next_at else None

    def _due_at(self) -> float:
        soon = max(self._last_at + QUIET_SECONDS, self._sent_at + self._pace_seconds)
        return min(soon, self._first_at + self._pace_seconds)

    def _take_batch(self) -> list[Item]:
        batch: list[Item] = []
        taken = 0
        while self._waiting and taken < _BATCH_SPANS:
            batch.append(self._waiting.popleft())
            taken += _count(batch[-1])
            self._room += _weight(batch[-1])
        self._span_count -= taken
        self._first_at = self._last_at
        self._sent_at = time.monotonic()
        return batch

    def _send(self, batch: list[Item]) -> None:
        spans, count = self._encode(batch)
        if not spans:
            return
        try:
            if self._exporter is None:
                self._exporter = self._connect()
            self._exporter.send(self._envelope().around(spans, count))
        except Exception as error:
            self._on_error(error)
            self._on_lost(count)

    def _encode(self, batch: Sequence[Item]) -> tuple[list[bytes], int]:
        """The spans, and how many they are. One that cannot be encoded takes no other with it."""
        spans, count = [], 0
        for item in with_breaks(batch, self._is_late):
            try:
                spans.append(item.encode())
                count += _count(item)
            except Exception as error:
                self._on_error(error)
                self._on_lost(_count(item))
        return spans, count


def _count(item: Item) -> int:
    return len(item.runs) if isinstance(item, BlockSpans) else 1


def _weight(item: Item) -> int:
    """What an item takes of the room, by the memory that it takes."""
    return -(-len(item.runs) // _BLOCKS_PER_SPAN) if isinstance(item, BlockSpans) else 1
