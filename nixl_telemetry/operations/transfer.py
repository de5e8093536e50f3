# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The life cycle of a transfer: one NIXL handle, posted by its initiator and polled until it is done or failed.

NIXL times a handle (one for each request and remote rank), not a block, and vLLM polls it once per engine step.
"""

import logging
import threading
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Final, Protocol

from opentelemetry.trace import SpanContext, SpanKind

from nixl_telemetry.audit.chain import Record
from nixl_telemetry.operations.errors import text_of
from nixl_telemetry.operations.lease import Deliveries
from nixl_telemetry.operations.mode import ModeCheck, ModeConflict
from nixl_telemetry.operations.outcome import Outcome, outcome_line
from nixl_telemetry.operations.peer import NOBODY, Peer
from nixl_telemetry.operations.peer_traffic import PeerTraffic
from nixl_telemetry.operations.receive import Receive
from nixl_telemetry.operations.transfer_counts import TransferCounts
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import AttributeValue
from nixl_telemetry.signals.catalogue import (
    TELEMETRY_DROPPED,
    TELEMETRY_ERRORS,
    TRANSFER_OLDEST,
)
from nixl_telemetry.signals.clock import now_ns, unix_offset_ns
from nixl_telemetry.signals.description import Description, Span
from nixl_telemetry.signals.moves import BlockMoves
from nixl_telemetry.signals.propagation import NOTHING, Carried, read
from nixl_telemetry.signals.semconv import (
    DIRECTION_OF_MODE,
    MODE_OF_OPERATION,
    BlockDetail,
    ConflictSource,
    Direction,
    ErrorType,
    EventName,
    Signal,
    SpanName,
)
from nixl_telemetry.signals.telemetry import Telemetry, guarded

BlockGroups = Sequence[Sequence[int]]
"""Block ids for each KV cache group."""


@dataclass(slots=True)
class Request:
    """The request for which transfers are being posted."""

    request_id: str
    remote_request_id: str
    peer: Peer
    remote_rank: int
    local_blocks: BlockGroups = ()
    remote_blocks: BlockGroups = ()
    by_region: bool = False
    """Whether there is a list of blocks for each region of memory, instead of each KV cache group."""
    receive: Receive | None = None
    """What waits for the transfers in this process, in pull."""
    registered: Carried = NOTHING
    """The peer's receive, in push."""
    lease: Carried = NOTHING
    """The lease on what is moved, in push."""
    deliveries: Deliveries | None = None
    """Who is to know whether its KV arrived at the peer, in push."""
    unfinished: int = 0
    """Transfers that were started for it and have not ended."""
    has_transfer: bool = False

    def relatives(self) -> tuple[SpanContext | None, tuple[SpanContext, ...]]:
        """Whose span the transfers belong to, and which others they are linked to."""
        if self.receive is not None:
            return self.receive.context, ()
        registered, lease = read(self.registered), read(self.lease)
        return (registered, (lease,)) if registered and lease else (registered or lease, ())

    @property
    def blocks(self) -> int:
        """How many are moved, over all groups."""
        counts = map(len, self.local_blocks)
        # Regions of one group hold the same blocks, and which belong together is not said here: the longest counts.
        return max(counts, default=0) if self.by_region else sum(counts)


class Sent(threading.local):
    """What the calling thread has sent through the agent."""

    notifications: int = 0
    """Notifications since it set this to 0."""
    failed_notifications: int = 0
    """Those that could not be sent."""


class NixlResult(Protocol):
    """The part of ``nixlXferTelemetry`` that is read."""

    xferDuration: int
    postDuration: int
    totalBytes: int
    descCount: int


@dataclass(slots=True)
class Transfer:
    """One transfer."""

    table: "TransferTable"
    operation: str
    descriptors: int
    request: Request | None
    direction: Direction
    peer: Peer
    start_ns: int
    """When it was prepared, until it is posted."""
    is_first: bool = True
    """Whether it is the first that moves these blocks."""
    conflict: ModeConflict | None = None
    last_poll_ns: int = 0
    end_ns: int = 0
    posted: bool = False
    blocks: int = 0
    """Blocks moved, over all groups; known when it has ended."""
    held: tuple[BlockGroups, BlockGroups, int] | None = None
    """Which blocks, local and remote, and how many ids these are on each side, until it is described; ``None`` where no
    spans are made of them."""
    moves_dropped: bool = False
    is_measured: bool = False
    """Whether NIXL has told the sizes and times."""
    size_bytes: int = 0
    duration_s: float = 0.0
    """NIXL's own time where it has one, else ours; both end at the poll that saw the end."""
    post_duration_s: float = 0.0
    observation_delay_s: float = 0.0
    """Gap between the last poll that saw it in progress (or the post) and its end."""
    error: ErrorType | None = None
    message: str = ""

    def in_progress(self) -> None:
        """A poll saw it under way."""
        self.last_poll_ns = now_ns()
        if self.request is not None and self.request.receive is not None:
            self.request.receive.progress_ns = self.last_poll_ns

    def finish(self, error: ErrorType | None = None, message: str = "") -> None:
        """Record the outcome; a second call does nothing."""
        if self.end_ns:
            return
        end_ns = self.end_ns = now_ns()
        if not self.is_measured:
            self.duration_s = (end_ns - self.start_ns) / 1e9
        # Our clock starts before NIXL's: a delay cannot be longer than the whole.
        self.observation_delay_s = min((end_ns - (self.last_poll_ns or self.start_ns)) / 1e9, self.duration_s)
        self.error, self.message = error, message
        if self.request is not None:
            self._end_for(self.request)
        self.table.counts.ended(self)
        telemetry = self.table.telemetry
        can_wait = error is None and not telemetry.blocks.is_short
        if not telemetry.emit(self.describe, can_wait):
            self._take_moves()
        if telemetry.has_trail:
            telemetry.audit(self.audit_record)

    def _end_for(self, request: Request) -> None:
        """Tell who waits for the transfer, and take over the lists of blocks."""
        if request.receive is not None:
            request.receive.done_ns = self.end_ns
            if self.error is not None:
                request.receive.fail(self.error, self.message)
        if request.deliveries is not None:
            if self.error is None:
                request.deliveries.arrived(request.request_id)
            else:
                request.deliveries.failed(request.request_id)
        self.blocks = request.blocks
        telemetry = self.table.telemetry
        if self.is_first and telemetry.spans.makes_block_spans:
            ids = sum(map(len, request.local_blocks)) if request.by_region else self.blocks
            if telemetry.blocks.take(ids):
                self.held = request.local_blocks, request.remote_blocks, ids
            else:
                self.moves_dropped = True
                telemetry.record(TELEMETRY_DROPPED, Signal.BLOCKS)
        request.unfinished -= 1
        if request.unfinished <= 0:
            # What waits to be exported or written must not hold more lists than are bounded for.
            request.local_blocks = request.remote_blocks = ()

    def _take_moves(self) -> BlockMoves | None:
        held, self.held = self.held, None
        if held is None:
            return None
        local, remote, ids = held
        self.table.telemetry.blocks.give_back(ids)
        return BlockMoves(local, remote, by_region=self.request is not None and self.request.by_region)

    def audit_record(self) -> Record:
        """Who moved whose KV, for the audit trail."""
        return Record("transfer", {**self._attributes(), **self._outcome().keys()})

    def describe(self) -> Description:
        """The span and the log line."""
        moves = self._take_moves()
        if self.request is not None and self.is_measured:
            self.table.peers.measure(self.peer, self.size_bytes, self.duration_s, self.observation_delay_s)
        attributes = self._attributes()
        slow_s = self.table.telemetry.settings.slow_transfer_seconds
        parent, links = self.request.relatives() if self.request is not None else (None, ())
        if self.moves_dropped:
            attributes[semconv.BLOCK_DETAIL] = BlockDetail.DROPPED
        span = Span(
            SpanName.TRANSFER,
            SpanKind.CLIENT,
            self.start_ns,
            self.end_ns,
            attributes,
            self.error,
            self.message,
            events=(self.conflict.event(),) if self.conflict else (),
            parent=parent,
            links=links,
            slow=self.duration_s > slow_s,
            blocks=moves,
        )
        line = outcome_line(
            self._outcome(),
            attributes,
            EventName.TRANSFER_FINISHED,
            EventName.TRANSFER_FAILED,
            slow_s=slow_s,
            level=logging.DEBUG,
        )
        return Description(span, line)

    def _outcome(self) -> Outcome:
        return Outcome(self.duration_s, self.error, self.message)

    def _attributes(self) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            semconv.TRANSFER_OPERATION: self.operation,
            semconv.TRANSFER_BLOCKS: self.blocks,
            semconv.TRANSFER_DESCRIPTORS: self.descriptors,
            semconv.TRANSFER_OBSERVATION_DELAY: self.observation_delay_s,
        }
        if self.request is not None:
            attributes |= {
                semconv.REQUEST_ID: self.request.request_id,
                semconv.REMOTE_REQUEST_ID: self.request.remote_request_id,
                semconv.REMOTE_ENGINE_ID: self.peer.engine_id,
                semconv.REMOTE_RANK: self.request.remote_rank,
            }
            if self.peer.host:
                attributes |= {semconv.SERVER_ADDRESS: self.peer.host, semconv.SERVER_PORT: self.peer.port}
        if self.is_measured:
            attributes |= {
                semconv.TRANSFER_BYTES: self.size_bytes,
                semconv.TRANSFER_DURATION: self.duration_s,
                semconv.TRANSFER_POST_DURATION: self.post_duration_s,
            }
        return attributes


class TransferTable:
    """The transfers that are under way, by NIXL handle.

    Prepared and posted on the engine's or the push writer's thread, polled on the engine's. Bounded: beyond
    :attr:`LIMIT`, transfers are not followed but counted as dropped.
    """

    LIMIT: Final = 100_000

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry: Final = telemetry
        self.sent: Final = Sent()
        self.request: Request | None = None
        """For which transfers are being posted, on one thread: the engine's in pull, the writer's in push."""
        self.peers: Final = PeerTraffic(telemetry)
        self.on_notification: Callable[[bytes], object] = len
        """Told of each that peers have sent, on the thread that asks NIXL for them."""
        self._mode = ModeCheck(telemetry)
        self._expected = next(name for name, mode in MODE_OF_OPERATION.items() if mode is telemetry.mode)
        self.counts: Final = TransferCounts(telemetry, self.peers)
        # By identity (vLLM passes on the same one), without keeping it alive: its finaliser releases NIXL's memory.
        self._transfers: dict[int, Transfer] = {}
        # Whoever waits for a transfer has begun before, and has had the export thread woken.
        telemetry.watch(self._look, self._transfers)
        telemetry.sum_up(self.counts.report)

    @guarded
    def notified(self, notifications: dict[str, list[bytes]]) -> None:
        """Peers have sent these, by agent."""
        for messages in notifications.values():
            for message in messages:
                self.on_notification(message)

    @guarded
    def heard(self, message: bytes) -> None:
        """A peer has sent this."""
        self.on_notification(message)

    @guarded
    def prepared(self, operation: str, descriptors: Sized, start_ns: int, handle: object) -> None:
        """NIXL has prepared a transfer as ``handle``; it was asked to at ``start_ns``."""
        transfer = self._start(operation, descriptors, start_ns)
        if len(self._transfers) < self.LIMIT:
            self._transfers[id(handle)] = transfer
        else:
            self.telemetry.record(TELEMETRY_DROPPED, Signal.TRACES)

    @guarded
    def setup_failed(self, operation: str, descriptors: Sized, start_ns: int, error: BaseException) -> None:
        """NIXL would not prepare it."""
        self._start(operation, descriptors, start_ns).finish(ErrorType.TRANSFER_SETUP, text_of(error))

    def _start(self, operation: str, descriptors: Sized, start_ns: int) -> Transfer:
        direction = Direction.WRITE if operation == "WRITE" else Direction.READ
        request = self.request
        peer = request.peer if request is not None else NOBODY
        transfer = Transfer(self, operation, len(descriptors), request, direction, peer, start_ns)
        if operation != self._expected:
            mode = MODE_OF_OPERATION.get(operation, operation)
            context = {semconv.TRANSFER_OPERATION: operation}
            transfer.conflict = self._mode.compare(ConflictSource.OPERATION, mode, context)
        if request is not None:
            transfer.is_first = not request.has_transfer
            request.has_transfer = True
            request.unfinished += 1
        return transfer

    @guarded
    def posting(self, handle: object) -> None:
        """NIXL is asked to start the transfer."""
        transfer = self._transfers.get(id(handle))
        if transfer is not None and not transfer.posted:
            transfer.posted = True
            transfer.start_ns = now_ns()
            self.counts.posted(transfer.direction)

    @guarded
    def posting_failed(self, handle: object, error: BaseException) -> None:
        """NIXL would not start it."""
        self._finish(handle, ErrorType.TRANSFER_SETUP, text_of(error))

    @guarded
    def polled(self, handle: object, state: str) -> None:
        """vLLM asked for its state. ``DONE`` is not the end yet: its measurements follow."""
        if state == "PROC":
            transfer = self._transfers.get(id(handle))
            if transfer is not None:
                transfer.in_progress()
        elif state != "DONE":
            self._finish(handle, ErrorType.TRANSFER_FAILED, f"NIXL reports the state {state}")

    @guarded
    def poll_failed(self, handle: object, error: BaseException) -> None:
        """Asking for its state raised: vLLM takes that as a failed transfer."""
        self._finish(handle, ErrorType.TRANSFER_FAILED, text_of(error))

    @guarded
    def done(self, handle: object, result: NixlResult) -> None:
        """It is done, and this is what NIXL measured."""
        transfer = self._transfers.get(id(handle))
        if transfer is not None and not transfer.end_ns:
            transfer.is_measured = True
            # NIXL reports microseconds.
            transfer.duration_s, transfer.post_duration_s = result.xferDuration / 1e6, result.postDuration / 1e6
            # After NIXL merged neighbours.
            transfer.size_bytes, transfer.descriptors = result.totalBytes, result.descCount
            transfer.finish()

    @guarded
    def done_unmeasured(self, handle: object, reason: BaseException) -> None:
        """It is done, and NIXL measured nothing."""
        self.telemetry.record(TELEMETRY_ERRORS, Signal.NIXL)
        self.telemetry.warn_once(
            "NIXL measures nothing",
            "NIXL has no telemetry for a finished transfer (%r): its bytes and its time inside NIXL stay unknown. "
            "Requests are served. Is NIXL_TELEMETRY_ENABLE set to n?",
            reason,
        )
        transfer = self._transfers.get(id(handle))
        if transfer is not None:
            transfer.finish()

    @guarded
    def take(self, handle: object) -> Transfer | None:
        """NIXL is asked to release the handle."""
        return self._transfers.pop(id(handle), None)

    @guarded
    def put_back(self, handle: object, transfer: Transfer | None) -> None:
        """NIXL would not release it: vLLM keeps it and polls again."""
        if transfer is not None:
            self._transfers[id(handle)] = transfer

    @guarded
    def released(self, transfer: Transfer | None) -> None:
        """The handle is gone. A transfer that had not ended was cancelled."""
        if transfer is not None and transfer.posted:
            transfer.finish(ErrorType.OTHER, "released before it was seen done")

    @guarded
    def _look(self) -> None:
        """Tell since when the oldest is in flight, on the export thread."""
        starts = [one.start_ns for one in list(self._transfers.values()) if one.posted and not one.end_ns]
        oldest = (min(starts) + unix_offset_ns()) / 1e9 if starts else 0.0
        direction = DIRECTION_OF_MODE[self.telemetry.mode]
        self.telemetry.record_state(TRANSFER_OLDEST, direction, self.telemetry.rank, value=oldest)

    def _finish(self, handle: object, error: ErrorType, message: str) -> None:
        transfer = self._transfers.get(id(handle))
        if transfer is not None:
            transfer.finish(error, message)
