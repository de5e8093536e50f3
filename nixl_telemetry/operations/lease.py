# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The life cycle of a lease: the prefill side holds a finished request's KV blocks until the decode side has them."""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.trace import SpanContext, SpanKind

from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import AttributeValue
from nixl_telemetry.signals.catalogue import LEASE_DURATION, LEASE_OUTCOMES, TELEMETRY_DROPPED
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.description import Description, LogLine, Span
from nixl_telemetry.signals.semconv import ErrorType, EventName, LeaseOutcome, Signal, SpanName
from nixl_telemetry.signals.telemetry import Telemetry, guarded


@dataclass(slots=True)
class Lease:
    """One lease. Times are of the scheduler's process, where vLLM pins the blocks and frees them."""

    request_id: str
    blocks: int
    """Blocks of vLLM's block size, over all KV cache groups."""
    parent: SpanContext | None
    """Of the request that was prefilled."""
    context: SpanContext | None
    """Of the lease's own span; ``None`` where nothing exports spans."""
    start_ns: int = field(default_factory=now_ns)
    end_ns: int = 0
    outcome: LeaseOutcome = LeaseOutcome.RELEASED

    @property
    def duration_s(self) -> float:
        """Seconds."""
        return (self.end_ns - self.start_ns) / 1e9

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
            context=self.context,
            parent=self.parent,
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
        self._leases: dict[str, Lease] = {}

    @guarded
    def open(self, request_id: str, blocks: int, parent: SpanContext | None) -> Lease | None:
        """vLLM holds the blocks of a finished request for the decode side; the lease, if it is followed."""
        if len(self._leases) >= self.LIMIT:
            self.telemetry.record(TELEMETRY_DROPPED, Signal.HOOK)
            return None
        spans = self.telemetry.spans
        context = spans.new_context(parent, SpanName.LEASE, SpanKind.PRODUCER) if spans.is_exporting else None
        lease = self._leases[request_id] = Lease(request_id, blocks, parent, context)
        return lease

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
        if outcome in LEASE_OUTCOMES:
            self.telemetry.record(LEASE_DURATION, outcome, value=lease.duration_s)
        self.telemetry.emit(lease.describe)


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
