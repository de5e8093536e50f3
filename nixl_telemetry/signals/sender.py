# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The thread that encodes spans and sends them, in batches: a collector that hangs delays nothing else."""

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan

from nixl_telemetry.signals.blocks import BlockSpans
from nixl_telemetry.signals.exporters import Exporter

Item: TypeAlias = ReadableSpan | BlockSpans

QUIET_SECONDS: Final = 0.2
"""So long after the last span a batch is sent: vLLM kills its workers a few hundred milliseconds after it told them to
end, too early for an export at exit."""
_AGE_SECONDS: Final = 1.0
"""So long the first span of a batch waits at most."""
_BATCH_SPANS: Final = 512


class SpanSender:
    """Sends spans to one exporter, on a daemon thread that is started with the first span.

    A thread does not survive a fork, nor does gRPC: a child starts with nothing to send, and connects anew.

    Args:
        connect: Makes the exporter; called once in each process.
        limit: Spans that may wait. Those beyond are lost.
        on_lost: Told how many spans were lost, because too many waited or because they could not be sent.
        on_error: Told what was raised.
    """

    def __init__(
        self,
        connect: Callable[[], Exporter],
        limit: int,
        on_lost: Callable[[int], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._connect = connect
        self._limit = limit
        self._on_lost = on_lost
        self._on_error = on_error
        self.reset()
        _living.add(self)

    def reset(self) -> None:
        """Forget everything, as a forked child must."""
        self._changed = threading.Condition()
        self._waiting: deque[Item] = deque()
        self._span_count = 0
        self._first_at = self._last_at = 0.0
        self._flushing = self._sending = self._closed = False
        self._exporter: Exporter | None = None
        self._thread: threading.Thread | None = None

    def add(self, items: Iterable[Item]) -> None:
        """Hand spans over. Never waits for the exporter."""
        items = list(items)
        count = sum(map(_count, items))
        if not items:
            return
        with self._changed:
            if self._closed or self._span_count + count > self._limit:
                self._on_lost(count)
                return
            begins = not self._waiting
            self._last_at = time.monotonic()
            self._first_at = self._last_at if begins else self._first_at
            self._waiting.extend(items)
            self._span_count += count
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nixl-telemetry-send", daemon=True)
                self._thread.start()
            # Once it knows of a batch, the thread wakes in time by itself.
            if begins or self._span_count >= _BATCH_SPANS:
                self._changed.notify_all()

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

    def _is_due(self) -> bool:
        if not self._waiting:
            self._flushing = False
            return False
        now = time.monotonic()
        return (
            self._flushing
            or self._span_count >= _BATCH_SPANS
            or now - self._last_at >= QUIET_SECONDS
            or now - self._first_at >= _AGE_SECONDS
        )

    def _seconds_to_wait(self) -> float | None:
        if not self._waiting:
            return None
        return max(0.0, min(self._last_at + QUIET_SECONDS, self._first_at + _AGE_SECONDS) - time.monotonic())

    def _take_batch(self) -> list[Item]:
        batch: list[Item] = []
        taken = 0
        while self._waiting and taken < _BATCH_SPANS:
            batch.append(self._waiting.popleft())
            taken += _count(batch[-1])
        self._span_count -= taken
        self._first_at = self._last_at
        return batch

    def _send(self, batch: list[Item]) -> None:
        try:
            if self._exporter is None:
                self._exporter = self._connect()
            self._exporter.send(encode(batch))
        except Exception as error:
            self._on_error(error)
            self._on_lost(sum(map(_count, batch)))


def encode(batch: Sequence[Item]) -> ExportTraceServiceRequest:
    """Spans of one process, all of one scope, as an OTLP message."""
    readable = [item for item in batch if isinstance(item, ReadableSpan)]
    blocks = [item for item in batch if isinstance(item, BlockSpans)]
    request = encode_spans(readable or [blocks[0].owner])
    spans = request.resource_spans[0].scope_spans[0].spans
    if not readable:
        # Sent before; it only told resource and scope.
        del spans[:]
    for block in blocks:
        block.encode(spans)
    return request


def _count(item: Item) -> int:
    return len(item.runs) if isinstance(item, BlockSpans) else 1


_living: "weakref.WeakSet[SpanSender]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for sender in list(_living):
        sender.reset()


os.register_at_fork(after_in_child=_after_fork_in_child)
