# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The life cycle of a lease: the prefill side holds a finished request's KV blocks until the decode side has them."""

import logging
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from opentelemetry.trace import SpanContext, SpanKind

from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import AttributeValue
from nixl_telemetry.signals.catalogue import (
    LEASE_BLOCKS_HELD,
    LEASE_DURATION,
    LEASE_OUTCOMES,
    LEASES_HELD,
    LEASES_OPENED,
    LEASES_OVERDUE,
    TELEMETRY_DROPPED,
)
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.description import Description, LogLine, Span
from nixl_telemetry.signals.metrics import Update
from nixl_telemetry.signals.propagation import NOTHING, Carried, read
from nixl_telemetry.signals.semconv import ErrorType, EventName, LeaseOutcome, Signal, SpanName
from nixl_telemetry.signals.telemetry import Telemetry, guarded

_GRACE_NS: Final = 2_000_000_000
"""vLLM frees blocks in its next step, with a deadline of each worker's own: only what is later than that is overdue."""
_LOG_SECONDS: Final = 10.0


@dataclass(slots=True)
class Lease:
    """One lease. Times are of the scheduler's process, where vLLM pins the blocks and frees them."""

    request_id: str
    blocks: int
    """Blocks of vLLM's block size, over all KV cache groups."""
    parent: Carried
    """Of the request that was prefilled."""
    context: Carried
    """Of the lease's own span; nothing where spans go nowhere."""
    start_ns: int
    deadline_ns: int
    """When vLLM is to free the blocks if nobody fetches them; 0 where that is not known."""
    end_ns: int = 0
    outcome: LeaseOutcome = LeaseOutcome.RELEASED

    @property
    def duration_s(self) -> float:
        """Seconds."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def span_context(self) -> SpanContext | None:
        """Of its own span, read."""
        return read(self.context, is_remote=False)

    def describe(self) -> Description:
        """The span and the log line."""
        expired = self.outcome is LeaseOutcome.EXPIRED
        attributes: dict[str, AttributeValue] = {
            semconv.REQUEST_ID: self.request_id,
            semconv.LEASE_BLOCKS: self.blocks,
            semconv.LEASE_OUTCOME: self.outcome,
        }
        span = Span(
            SpanName.LEASE,
            SpanKind.PRODUCER,
            self.start_ns,
            self.end_ns,
            attributes,
            ErrorType.KV_EXPIRED if expired else None,
            "the KV was freed, and the decode side does not have it" if expired else "",
            context=self.span_context,
            parent=read(self.parent),
        )
        line = LogLine(
            EventName.LEASE_EXPIRED if expired else EventName.LEASE_FINISHED,
            logging.WARNING if expired else logging.DEBUG,
            {**attributes, "duration_s": round(self.duration_s, 6)},
        )
        return Description(span, line)


class LeaseTable:
    """The leases that are held, by request id. Bounded: beyond :attr:`LIMIT`, they are not followed but counted."""

    LIMIT: Final = 100_000

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry: Final = telemetry
        self._opened = telemetry.series(LEASES_OPENED)
        self._held = telemetry.series(LEASES_HELD)
        self._blocks_held = telemetry.series(LEASE_BLOCKS_HELD)
        self._durations = {outcome: telemetry.series(LEASE_DURATION, outcome) for outcome in LEASE_OUTCOMES}
        self._leases: dict[str, Lease] = {}
        self._overdue = 0
        self._told = 0
        """How many of those were logged."""
        self._logged_at = -_LOG_SECONDS
        telemetry.watch(self._look, self._leases)

    @guarded
    def open(
        self, request_id: str, blocks: int, parent: Carried = NOTHING, granted_s: float | None = None
    ) -> Lease | None:
        """vLLM holds the blocks of a finished request for the decode side; the lease, if it is followed.

        Args:
            request_id: The request.
            blocks: How many.
            parent: Of the request that was prefilled.
            granted_s: For how long, if nobody renews it; ``None`` where that is not known. Seconds.
        """
        if len(self._leases) >= self.LIMIT:
            self.telemetry.record(TELEMETRY_DROPPED, Signal.HOOK)
            return None
        spans = self.telemetry.spans
        context = spans.new_carried(parent, SpanName.LEASE, SpanKind.PRODUCER) if spans.is_exporting else NOTHING
        now = now_ns()
        deadline_ns = now + int(granted_s * 1e9) if granted_s is not None else 0
        lease = self._leases[request_id] = Lease(request_id, blocks, parent, context, now, deadline_ns)
        self.telemetry.record_all(((self._opened, (1,)), (self._held, (1,)), (self._blocks_held, (blocks,))))
        self.telemetry.ensure_watched()
        return lease

    def find(self, request_id: str) -> Lease | None:
        """The lease on a request's blocks, if it is followed."""
        return self._leases.get(request_id)

    @guarded
    def renew(self, request_id: str, remaining_s: float) -> None:
        """A heartbeat of the decode side has renewed it."""
        lease = self._leases.get(request_id)
        if lease is not None:
            lease.deadline_ns = max(lease.deadline_ns, now_ns() + int(remaining_s * 1e9))

    @guarded
    def close(self, request_ids: Collection[str], expired: Collection[str]) -> None:
        """vLLM frees the blocks of these requests; those of some because nobody came for them."""
        for request_id in request_ids:
            lease = self._leases.pop(request_id, None)
            if lease is None:
                continue
            self._end(lease, LeaseOutcome.EXPIRED if request_id in expired else LeaseOutcome.RELEASED)

    @guarded
    def shut_down(self) -> None:
        """The instance ends while it holds blocks: whoever was told of these leases shall find them."""
        while self._leases:
            self._end(self._leases.popitem()[1], LeaseOutcome.SHUTDOWN)

    def _end(self, lease: Lease, outcome: LeaseOutcome) -> None:
        lease.end_ns = now_ns()
        lease.outcome = outcome
        updates: list[Update] = [(self._held, (-1,)), (self._blocks_held, (-lease.blocks,))]
        if outcome in self._durations:
            updates.append((self._durations[outcome], (lease.duration_s,)))
        self.telemetry.record_all(updates)
        self.telemetry.emit(lease.describe, outcome is LeaseOutcome.RELEASED)

    @guarded
    def _look(self) -> None:
        """Count those whose deadline has passed, on the export thread."""
        now = now_ns()
        overdue = [lease for lease in list(self._leases.values()) if 0 < lease.deadline_ns < now - _GRACE_NS]
        if len(overdue) != self._overdue:
            self.telemetry.record(LEASES_OVERDUE, value=len(overdue) - self._overdue)
        self._told = min(self._told, len(overdue))
        if len(overdue) > self._told and time.monotonic() - self._logged_at >= _LOG_SECONDS:
            self._logged_at, self._told = time.monotonic(), len(overdue)
            first = min(overdue, key=lambda lease: lease.deadline_ns)
            attributes: dict[str, AttributeValue] = {
                semconv.LEASE_COUNT: len(overdue),
                semconv.LEASE_BLOCKS: sum(lease.blocks for lease in overdue),
                semconv.REQUEST_ID: first.request_id,
                "overdue_s": round((now - first.deadline_ns) / 1e9, 1),
                "message": "vLLM holds these blocks beyond the deadline; an engine that takes no step frees none",
            }
            line = LogLine(EventName.LEASES_OVERDUE, logging.WARNING, attributes)
            self.telemetry.emit(lambda: Description(log=line))
        self._overdue = len(overdue)


class Deliveries:
    """What a worker of the prefill side knows of its leases: whose KV was fetched, or could not be written.

    vLLM reports requests whose KV has arrived and those whose lease has expired in one set. Used on the engine's thread
    and, in push, the writer's; the map changes in single steps. Bounded: the oldest is forgotten.
    """

    LIMIT: Final = LeaseTable.LIMIT

    def __init__(self) -> None:
        self._arrived: dict[str, bool] = {}

    def arrived(self, request_id: str) -> None:
        """The decode side has it, or a part of it, unless another part failed."""
        self._arrived.setdefault(request_id, True)
        if len(self._arrived) > self.LIMIT:
            self._arrived.pop(next(iter(self._arrived)), None)

    def failed(self, request_id: str) -> None:
        """A part of it could not be written."""
        self._arrived[request_id] = False

    def reported(self, request_ids: Iterable[str]) -> set[str]:
        """vLLM frees these; those of them whose KV the decode side does not have."""
        return {request_id for request_id in request_ids if not self._arrived.pop(request_id, False)}
