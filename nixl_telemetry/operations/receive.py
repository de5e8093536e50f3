# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The life cycle of a receive: a request of the decode side waits for its KV, and for what it waits."""

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.trace import SpanContext, SpanKind

from nixl_telemetry.operations.outcome import Outcome, outcome_line
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import AttributeValue
from nixl_telemetry.signals.catalogue import RECEIVE_WAIT, TELEMETRY_DROPPED
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.description import Description, Span
from nixl_telemetry.signals.semconv import ErrorType, EventName, ReceiveOutcome, Signal, SpanName, TransferMode
from nixl_telemetry.signals.telemetry import Telemetry, guarded


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request comes from, as the scheduler knows it."""

    parent: SpanContext | None = None
    """Of the request, as the client or router sent it."""
    lease: SpanContext | None = None
    """Of the peer's lease on the KV."""


NO_ORIGIN: Final = Origin()
"""Of a request that came without a trace."""


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
    context: SpanContext | None
    start_ns: int = field(default_factory=now_ns)
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
    error: ErrorType | None = None
    message: str = ""

    @property
    def parent(self) -> SpanContext | None:
        """The request's own context; the peer's where the client sent none."""
        return self.origin.parent or self.origin.lease

    @property
    def duration_s(self) -> float:
        """Seconds."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def outcome(self) -> ReceiveOutcome:
        """How it ended."""
        if self.error is None:
            return ReceiveOutcome.RECEIVED
        return ReceiveOutcome.TIMEOUT if self.error is ErrorType.TIMEOUT else ReceiveOutcome.FAILED

    def fail(self, error: ErrorType, message: str) -> None:
        """Something that it needs failed; the first failure is its error."""
        if self.error is None:
            self.error, self.message = error, message

    def finish(self, failed: bool, message: str = "vLLM reports that loading failed") -> None:
        """It ended; a second call does nothing.

        Args:
            failed: Whether without the KV.
            message: Why, where nothing better is known.
        """
        if self.end_ns:
            return
        self.end_ns = now_ns()
        if failed:
            self.fail(ErrorType.OTHER, message)
        else:
            # vLLM may have tried again.
            self.error, self.message = None, ""
        # Nobody waits for blocks that are there already: the peer is only told so.
        if self.blocks or failed:
            self.telemetry.record(RECEIVE_WAIT, self.outcome, value=self.duration_s)
        self.telemetry.emit(self.describe)

    def describe(self) -> Description:
        """The span and the log line."""
        attributes: dict[str, AttributeValue] = {
            semconv.REQUEST_ID: self.request_id,
            semconv.REMOTE_REQUEST_ID: self.remote_request_id,
            semconv.REMOTE_ENGINE_ID: self.peer.engine_id,
            semconv.SERVER_ADDRESS: self.peer.host,
            semconv.SERVER_PORT: self.peer.port,
            semconv.RECEIVE_BLOCKS: self.blocks,
            **self._durations(),
        }
        settings = self.telemetry.settings
        span = Span(
            SpanName.RECEIVE,
            SpanKind.CONSUMER,
            self.start_ns,
            self.end_ns,
            attributes,
            self.error,
            self.message,
            context=self.context,
            parent=self.parent,
            links=(self.origin.lease,) if self.origin.lease else (),
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
        parts = [(semconv.RECEIVE_HANDSHAKE_DURATION, self.ready_ns or self.start_ns)]
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
        self._receives: dict[str, Receive] = {}

    def start(self, request_id: str, remote_request_id: str, peer: Peer, blocks: int, origin: Origin) -> Receive:
        """A worker is asked for a request's KV."""
        if len(self._receives) >= self.LIMIT:
            self._receives.pop(next(iter(self._receives)))
            self.telemetry.record(TELEMETRY_DROPPED, Signal.HOOK)
        spans = self.telemetry.spans
        receive = Receive(self.telemetry, request_id, remote_request_id, peer, blocks, origin, None)
        if spans.is_exporting:
            receive.context = spans.new_context(receive.parent, SpanName.RECEIVE, SpanKind.CONSUMER)
        self._receives[request_id] = receive
        return receive

    def find(self, request_id: str) -> Receive | None:
        """The receive of a request, if it is followed."""
        return self._receives.get(request_id)

    @guarded
    def shook_hands(self, engine_id: str, error: ErrorType | None, message: str) -> None:
        """A handshake ended: whoever waits for that peer goes on, or fails."""
        for receive in list(self._receives.values()):
            if receive.peer.engine_id == engine_id and not receive.turn_ns:
                receive.ready_ns = now_ns()
                if error is None:
                    continue
                receive.fail(error, message)
                if not receive.blocks:
                    # vLLM has nothing to report for it.
                    self._end(receive.request_id, failed=True)

    @guarded
    def finish(self, request_ids: Iterable[str], failed: Collection[str] | None) -> None:
        """The worker reports these requests, some of them as failed; ``None`` where vLLM does not say which."""
        for request_id in request_ids:
            receive = self._receives.get(request_id)
            if receive is not None:
                has_failed = receive.error is not None if failed is None else request_id in failed
                self._end(request_id, failed=has_failed)

    @guarded
    def notified(self, request_id: str, is_peer_valid: bool) -> None:
        """All that can be done for a request now was done: one that needs no KV has told its peer so, or cannot."""
        receive = self._receives.get(request_id)
        if receive is not None and not receive.blocks and (receive.posted_ns or not is_peer_valid):
            self._end(request_id, failed=not is_peer_valid)

    @guarded
    def abandon(self, request_ids: Iterable[str], message: str) -> None:
        """These end without their KV, and the worker will not report them, or not in time."""
        for request_id in list(request_ids):
            self._end(request_id, failed=True, message=message)

    @guarded
    def shut_down(self) -> None:
        """The instance ends while requests wait."""
        self.abandon(self._receives, "the instance was shut down")

    def _end(self, request_id: str, *, failed: bool, message: str = "vLLM reports that loading failed") -> None:
        receive = self._receives.pop(request_id, None)
        if receive is not None:
            receive.finish(failed, message)
