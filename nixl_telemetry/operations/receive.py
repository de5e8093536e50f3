# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The life cycle of a receive: a request of the decode side waits for its KV, and for what it waits."""

import logging
from collections import defaultdict
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from opentelemetry.trace import SpanContext, SpanKind

from nixl_telemetry.operations.outcome import Outcome, outcome_line
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import AttributeValue
from nixl_telemetry.signals.catalogue import LEASE_REMAINING, PUSH_REGISTRATIONS, RECEIVE_WAIT, TELEMETRY_DROPPED
from nixl_telemetry.signals.clock import now_ns, unix_offset_ns
from nixl_telemetry.signals.description import Description, Event, LogLine, Span
from nixl_telemetry.signals.propagation import NOTHING, Carried, read
from nixl_telemetry.signals.semconv import (
    ErrorType,
    EventName,
    ReceiveOutcome,
    RegistrationEvent,
    Signal,
    SpanName,
    TransferMode,
    WaitsFor,
)
from nixl_telemetry.signals.telemetry import Telemetry, guarded


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from, as the scheduler knows it."""

    parent: Carried = NOTHING
    """The request's trace, as the client or router sent it."""
    lease: Carried = NOTHING
    """The peer's lease on the KV."""
    lease_deadline: float | None = None
    """When that lease ends unless it is renewed, by the clock of the peer's scheduler. Seconds."""


NO_ORIGIN: Final = Origin()
"""Of a request that came without a trace."""

_NOT_LOADED: Final = "vLLM reports that loading failed"
_TOLD_AT_ONCE: Final = 20
"""Log lines about long waits at each look: a peer that is gone may leave thousands waiting."""

_HINTS: Final = {
    (TransferMode.PULL, WaitsFor.HANDSHAKE): "the prefill instance does not answer the handshake",
    (TransferMode.PULL, WaitsFor.QUEUE): "the engine has not turned to the request",
    (
        TransferMode.PULL,
        WaitsFor.TRANSFER,
    ): "NIXL has not finished reading: the network or the peer is gone",
    (TransferMode.PULL, WaitsFor.NOTIFICATION): "the blocks are here, and the worker has not reported them",
    (TransferMode.PUSH, WaitsFor.HANDSHAKE): "the prefill instance does not answer the handshake",
    (TransferMode.PUSH, WaitsFor.QUEUE): "the push writer's thread has not turned to the request",
    (TransferMode.PUSH, WaitsFor.REGISTRATION): "the registration cannot be sent",
    (
        TransferMode.PUSH,
        WaitsFor.NOTIFICATION,
    ): "the prefill instance has the registration and has not written: its log "
    "tells whether it rejected this instance (nixl.push.failed), or has no request with this id (nixl.push.unmatched); "
    "the router must send the same X-Request-Id to both",
}
"""What to look at, by mode and by what is waited for."""


@dataclass(slots=True)
class Receive:
    """One request's wait for its KV, in one worker. Moments are 0 until they come."""

    telemetry: Telemetry
    request_id: str
    remote_request_id: str
    peer: Peer
    blocks: int
    """Blocks of vLLM's block size, over all KV cache groups; 0 where none is needed: the prefix cache had all of them,
    or the request was aborted before it was scheduled. The peer is then told that it may free its own."""
    origin: Origin
    start_ns: int
    ready_ns: int = 0
    """The handshake that it waited for is done."""
    turn_ns: int = 0
    """Posting begins, or in push sending the registration."""
    posted_ns: int = 0
    """Transfers to all ranks are posted, or the registration is sent."""
    progress_ns: int = 0
    """The last poll that saw one of its transfers in progress."""
    done_ns: int = 0
    """The poll that saw its last transfer end."""
    end_ns: int = 0
    duration_s: float = 0.0
    """All of it, once it has ended."""
    error: ErrorType | None = None
    message: str = ""
    wants_handshake: bool = False
    """Whether it needs one that was not had before."""
    lease_remaining_s: float | None = None
    """What was left of the peer's lease when reading began. Seconds."""
    ids_differ: bool = False
    """In push: whether the peer has its half under an id that can never match this one's."""
    long_wait: Event | None = None
    """That it has waited so long that the log tells of it."""
    _context: SpanContext | None = None

    @property
    def context(self) -> SpanContext | None:
        """Of its span; ``None`` where spans go nowhere.

        Made when it is first asked for: on the engine's thread where a handshake or the peer is told of it, else on the
        export thread once it has ended.
        """
        context, spans = self._context, self.telemetry.spans
        if context is None and spans.is_exporting:
            made = spans.new_context(self.parent, SpanName.RECEIVE, SpanKind.CONSUMER)
            # Another thread may have made one meanwhile: the first holds.
            context = self._context = self._context or made
        return context

    @property
    def parent(self) -> SpanContext | None:
        """The request's own context; the peer's where the client sent none."""
        return read(self.origin.parent) or read(self.origin.lease)

    @property
    def waits_for(self) -> tuple[WaitsFor, int]:
        """What it is waiting for, and since when."""
        is_push = self.telemetry.mode is TransferMode.PUSH
        if not self.turn_ns:
            if self.wants_handshake and not self.ready_ns:
                return WaitsFor.HANDSHAKE, self.start_ns
            return WaitsFor.QUEUE, self.ready_ns or self.start_ns
        if not self.posted_ns:
            return WaitsFor.REGISTRATION if is_push else WaitsFor.TRANSFER, self.turn_ns
        if is_push:
            return WaitsFor.NOTIFICATION, self.posted_ns
        return (WaitsFor.NOTIFICATION, self.done_ns) if self.done_ns else (WaitsFor.TRANSFER, self.posted_ns)

    def reads(self, lease_remaining_s: float | None) -> None:
        """The first of its transfers is about to be posted, or its registration to be sent."""
        if self.turn_ns:
            return
        self.turn_ns = now_ns()
        if lease_remaining_s is not None:
            self.lease_remaining_s = lease_remaining_s
            self.telemetry.record(LEASE_REMAINING, value=lease_remaining_s)

    def fail(self, error: ErrorType, message: str) -> None:
        """Something that it needs failed; the first failure is its error."""
        if self.error is None:
            self.error, self.message = error, message

    def finish(self, failed: bool, message: str = _NOT_LOADED) -> None:
        """It ended; a second call does nothing.

        Args:
            failed: Whether without the KV.
            message: Why, where nothing better is known.
        """
        if self.end_ns:
            return
        self.end_ns = now_ns()
        self.duration_s = (self.end_ns - self.start_ns) / 1e9
        if failed:
            self.fail(ErrorType.OTHER, message)
        else:
            # vLLM may have tried again.
            self.error, self.message = None, ""
        self.telemetry.emit(self.describe, self.error is None)

    def tell_long_wait(self) -> None:
        """Log what it waits for, from whom and since when."""
        waits_for, since_ns = self.waits_for
        now = now_ns()
        keys: dict[str, AttributeValue] = {
            semconv.RECEIVE_WAITS_FOR: waits_for,
            semconv.RECEIVE_WAITING: round((now - self.start_ns) / 1e9, 3),
        }
        self.long_wait = Event(EventName.RECEIVE_WAITING, now, keys)
        since = datetime.fromtimestamp((unix_offset_ns() + since_ns) / 1e9, UTC).isoformat(timespec="milliseconds")
        attributes = {**self._identity(), **keys, "since": since, "message": self._hint(waits_for)}
        line = LogLine(EventName.RECEIVE_WAITING, logging.WARNING, attributes)
        self.telemetry.emit(lambda: Description(log=line))

    def _hint(self, waits_for: WaitsFor) -> str:
        if self.ids_differ:
            return (
                "the request has another id on the prefill side, and push pairs the two by it: whoever sends them must "
                "send the same X-Request-Id to both"
            )
        return _HINTS[self.telemetry.mode, waits_for]

    def _identity(self) -> dict[str, AttributeValue]:
        return {
            semconv.REQUEST_ID: self.request_id,
            semconv.REMOTE_REQUEST_ID: self.remote_request_id,
            semconv.REMOTE_ENGINE_ID: self.peer.engine_id,
            semconv.SERVER_ADDRESS: self.peer.host,
            semconv.SERVER_PORT: self.peer.port,
        }

    def describe(self) -> Description:
        """The span and the log line."""
        attributes = {**self._identity(), semconv.RECEIVE_BLOCKS: self.blocks, **self._durations()}
        if self.lease_remaining_s is not None:
            attributes[semconv.LEASE_REMAINING] = self.lease_remaining_s
        settings = self.telemetry.settings
        lease = read(self.origin.lease)
        span = Span(
            SpanName.RECEIVE,
            SpanKind.CONSUMER,
            self.start_ns,
            self.end_ns,
            attributes,
            self.error,
            self.message,
            events=(self.long_wait,) if self.long_wait else (),
            context=self.context,
            parent=self.parent,
            links=(lease,) if lease else (),
            slow=self.duration_s > settings.slow_receive_seconds,
        )
        line = outcome_line(
            Outcome(self.duration_s, self.error, self.message),
            attributes,
            EventName.RECEIVE_FINISHED,
            EventName.RECEIVE_FAILED,
            slow_s=settings.slow_receive_seconds,
            level=logging.DEBUG,
        )
        return Description(span, line)

    def _durations(self) -> dict[str, float]:
        """The parts of the wait. Each ends where the next begins, so that they add up to the whole."""
        # Who never saw it done waited for it until its turn, or to the end.
        ready_ns = self.ready_ns or (self.turn_ns if self.wants_handshake else self.start_ns)
        parts = [(semconv.RECEIVE_HANDSHAKE_DURATION, ready_ns)]
        if self.telemetry.mode is TransferMode.PUSH:
            parts += [
                (semconv.RECEIVE_QUEUE_DURATION, self.turn_ns),
                (semconv.RECEIVE_NOTIFICATION_DURATION, self.posted_ns),
                (semconv.RECEIVE_REMOTE_DURATION, self.end_ns),
            ]
        else:
            parts += [
                (semconv.RECEIVE_QUEUE_DURATION, self.turn_ns),
                (semconv.RECEIVE_POST_DURATION, self.posted_ns),
                (semconv.RECEIVE_TRANSFER_DURATION, self.progress_ns or self.posted_ns),
                (semconv.RECEIVE_OBSERVATION_DELAY, self.done_ns or self.posted_ns),
                (semconv.RECEIVE_NOTIFICATION_DURATION, self.end_ns),
            ]
        durations = {}
        begin = self.start_ns
        for name, moment in parts:
            # What never came ends with the receive: the part that it failed in has all the rest.
            end = min(max(begin, moment or self.end_ns), self.end_ns)
            durations[name] = (end - begin) / 1e9
            begin = end
        return durations


class ReceiveTable:
    """The requests that wait for KV, by request id.

    Used on the engine's thread, on those that shake hands and, in push, on the writer's; the map changes in single
    steps. Bounded: beyond :attr:`LIMIT`, the oldest is forgotten and counted.
    """

    LIMIT: Final = 100_000

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry: Final = telemetry
        self._receives: Final[dict[str, Receive]] = {}
        self.find: Final = self._receives.get
        """The receive of a request, if it is followed."""
        self.untold: Final[set[str]] = set()
        """In pull, those that need no KV, until their peer was told: vLLM does not report them."""
        outcomes = {None: ReceiveOutcome.RECEIVED, ErrorType.TIMEOUT: ReceiveOutcome.TIMEOUT}
        self._waits: Final = {
            error: telemetry.series(RECEIVE_WAIT, outcomes.get(error, ReceiveOutcome.FAILED))
            for error in (None, *ErrorType)
        }
        telemetry.watch(self._look, self._receives)

    def start(self, request_id: str, remote_request_id: str, peer: Peer, blocks: int, origin: Origin) -> Receive:
        """A worker is asked for a request's KV."""
        if len(self._receives) >= self.LIMIT:
            self._receives.pop(next(iter(self._receives)))
            self.telemetry.record(TELEMETRY_DROPPED, Signal.HOOK)
        receive = Receive(self.telemetry, request_id, remote_request_id, peer, blocks, origin, now_ns())
        self._receives[request_id] = receive
        if not blocks and self.telemetry.mode is TransferMode.PULL:
            self.untold.add(request_id)
        self.telemetry.ensure_watched()
        return receive

    @guarded
    def shook_hands(self, engine_id: str, error: ErrorType | None, message: str) -> None:
        """A handshake ended: whoever waits for that peer goes on, or fails."""
        for receive in list(self._receives.values()):
            if receive.peer.engine_id == engine_id and not receive.turn_ns:
                if error is None:
                    receive.ready_ns = now_ns()
                    continue
                receive.fail(error, message)
                if receive.blocks and self.telemetry.mode is TransferMode.PUSH:
                    self.telemetry.record(PUSH_REGISTRATIONS, RegistrationEvent.FAILED)
                if not receive.blocks:
                    # vLLM has nothing to report for it.
                    self._end(receive.request_id, failed=True)

    @guarded
    def finish(self, request_ids: Iterable[str], failed: Collection[str] | None) -> list[str]:
        """The worker reports these requests, some of them as failed; ``None`` where vLLM does not say which.

        Returns:
            Those that ended without their KV.
        """
        ended = []
        for request_id in request_ids:
            receive = self._receives.pop(request_id, None)
            if receive is not None:
                receive.finish(receive.error is not None if failed is None else request_id in failed)
                ended.append(receive)
        self._count(ended)
        return [receive.request_id for receive in ended if receive.error is not None]

    @guarded
    def notified(self, invalid_peers: Container[str]) -> None:
        """All that can be done in a step was done: who needs no KV has told its peer so, or cannot."""
        for request_id in tuple(self.untold):
            receive = self._receives.get(request_id)
            is_invalid = receive is not None and receive.peer.engine_id in invalid_peers
            if receive is None or receive.posted_ns or is_invalid:
                self._end(request_id, failed=is_invalid)
                self.untold.discard(request_id)

    @guarded
    def abandon(self, request_ids: Iterable[str], message: str) -> None:
        """These end without their KV, and the worker will not report them, or not in time."""
        for request_id in list(request_ids):
            self._end(request_id, failed=True, message=message)

    @guarded
    def shut_down(self) -> None:
        """The instance ends while requests wait."""
        self.abandon(self._receives, "the instance was shut down")

    @guarded
    def _look(self) -> None:
        """Tell of those that wait long, each once, on the export thread."""
        limit_ns = self.telemetry.settings.watchdog_seconds * 1e9
        if not limit_ns:
            return
        latest = now_ns() - limit_ns
        told = 0
        # The oldest come first.
        for receive in list(self._receives.values()):
            if receive.start_ns > latest or told >= _TOLD_AT_ONCE:
                return
            if receive.long_wait is None and not receive.end_ns:
                receive.tell_long_wait()
                told += 1

    def _end(self, request_id: str, *, failed: bool, message: str = _NOT_LOADED) -> None:
        receive = self._receives.pop(request_id, None)
        if receive is not None:
            receive.finish(failed, message)
            self._count((receive,))

    def _count(self, ended: Iterable[Receive]) -> None:
        """Record how long receives have waited that ended together."""
        waits: defaultdict[ErrorType | None, list[float]] = defaultdict(list)
        for receive in ended:
            # Nobody waits for blocks that are there already: the peer is only told so.
            if receive.blocks or receive.error is not None:
                waits[receive.error].append(receive.duration_s)
        self.telemetry.record_all([(self._waits[error], durations) for error, durations in waits.items()])
