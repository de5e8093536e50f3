# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The life cycle of a handshake, as its initiator sees it: query, compare, register, for each rank of the peer."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from opentelemetry.trace import SpanContext, SpanKind

from nixl_telemetry.audit.chain import Record
from nixl_telemetry.compat.explanation import UNKNOWN_FACTOR, Explanation, Source
from nixl_telemetry.compat.geometry import GeometryDifference
from nixl_telemetry.compat.statement import Statement
from nixl_telemetry.operations.compatibility import Compatibility, factor_attribute
from nixl_telemetry.operations.errors import text_of
from nixl_telemetry.operations.mode import ModeConflict
from nixl_telemetry.operations.outcome import Outcome, outcome_line
from nixl_telemetry.operations.peer import Peer, is_listening
from nixl_telemetry.operations.peer_traffic import PeerTraffic
from nixl_telemetry.operations.receive import Receive
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import Attributes, AttributeValue
from nixl_telemetry.signals.catalogue import HANDSHAKE_BYPASSED, HANDSHAKE_DURATION, HANDSHAKE_REJECTIONS
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.description import Description, Event, LogLine, Span
from nixl_telemetry.signals.propagation import NOTHING, Carried
from nixl_telemetry.signals.semconv import ErrorType, EventName, Purpose, SpanName
from nixl_telemetry.signals.telemetry import Telemetry, guarded

_PROBE_SECONDS: Final = 0.25
_HASH_LIMIT: Final = 128
"""Characters that are kept of a peer's hash; a SHA-256 has 64."""
_REJECTIONS: Final = frozenset({ErrorType.COMPAT_MISMATCH, ErrorType.PEER_NOT_ALLOWED})
"""Failures that are this instance's own decision about the peer."""


@dataclass
class Failure:
    """What is known of the exception that ended a handshake."""

    error: BaseException
    timed_out: bool = False
    """The peer did not answer in time, or nobody is there."""
    undecodable: bool = False
    """It was caused by bytes that could not be decoded."""
    from_agent: bool = False
    """It comes from the NIXL agent."""
    unsupported: bool = False
    """vLLM says that such a pair is not implemented."""
    not_allowed: bool = False
    """It is the suite's own refusal of a peer that is not on the list."""
    direct: bool = False
    """It was raised by vLLM's handshake method itself, not by what that calls."""


@dataclass
class Stage:
    """One step of a handshake with one rank."""

    name: SpanName
    start_ns: int
    end_ns: int = 0


@dataclass
class Handshake:
    """One handshake. All methods but :meth:`describe` are called on the thread that shakes hands.

    Args:
        telemetry: Where to report.
        peer: Whom it is with.
        purpose: What it sets up.
        compatibility: Judges the peer.
        tp_size: Tensor-parallel size of the peer, as the request says.
    """

    telemetry: Telemetry
    peer: Peer
    purpose: Purpose
    compatibility: Compatibility
    tp_size: int
    conflict: ModeConflict | None = None
    waiters: Sequence[SpanContext] = ()
    """The requests that wait for it, in order. A heartbeat may have asked for it before the first one did."""
    peers: PeerTraffic | None = None
    """Who counts by peer."""
    remote_hash: str | None = None
    """The peer's; of ranks with several the first that differs from ours."""
    statement: Statement | None = None
    """What the peer told of itself, with that hash."""
    uncovered: tuple[GeometryDifference, ...] = ()
    """What differs and is not covered by the hash."""
    uncovered_ns: int = 0
    explanation: Explanation | None = None
    """What differs where the hashes do."""
    stages: list[Stage] = field(default_factory=list)
    start_ns: int = field(default_factory=now_ns)
    end_ns: int = 0
    error: ErrorType | None = None
    message: str = ""

    def __post_init__(self) -> None:
        self._enter(SpanName.HANDSHAKE_METADATA)

    @property
    def duration_s(self) -> float:
        """From the first query to the end. Seconds."""
        return (self.end_ns - self.start_ns) / 1e9

    @property
    def hash_differs(self) -> bool:
        """Whether the peer sent another hash than ours."""
        return self.remote_hash is not None and self.remote_hash != self.compatibility.compat_hash

    @guarded
    def received(self, remote_hash: str, encoded: bytes = b"") -> None:
        """A rank's payload was decoded: from now on it is compared.

        Args:
            remote_hash: The peer's compatibility hash.
            encoded: What the peer told of itself; empty if nothing.
        """
        self._enter(SpanName.HANDSHAKE_COMPAT)
        statement = self.compatibility.read(remote_hash, encoded)
        if not self.hash_differs:
            self.remote_hash, self.statement = remote_hash[:_HASH_LIMIT], statement
        rejected = self.hash_differs and self.compatibility.enforced
        if statement is not None and not self.uncovered and not rejected:
            self.uncovered = self.compatibility.uncovered(statement)
            self.uncovered_ns = now_ns()
            if self.uncovered:
                self.telemetry.emit(self._warn_of_uncovered)

    @guarded
    def registering(self) -> None:
        """The rank was accepted: from now on its memory is registered."""
        self._enter(SpanName.HANDSHAKE_REGISTER)

    @guarded
    def registered(self) -> None:
        """The rank is done; the next one, if any, is queried."""
        self._enter(SpanName.HANDSHAKE_METADATA)

    @guarded
    def finish(self, failure: Failure | None = None) -> str:
        """End the handshake, with success where ``failure`` is ``None``; a second call does nothing.

        Returns:
            Why the peer was rejected, for a person; empty if it was not.
        """
        if self.end_ns:
            return ""
        self.end_ns = self.stages[-1].end_ns = now_ns()
        deferred: Callable[[], Description] | None = None
        if failure is None:
            # Queried ahead for a rank that does not come.
            if len(self.stages) > 1:
                self.stages.pop()
        else:
            self.error = self._classify(failure)
            # Looking at the peer's port takes time, which vLLM's thread must not lose: its requests wait for the
            # failure.
            deferred = self._probe_and_describe if failure.timed_out else None
        reason = ""
        if self.error is ErrorType.COMPAT_MISMATCH:
            # Searched for on the thread that shakes hands, since vLLM's exception shall carry it.
            reason = self._explain()
        elif self.hash_differs:
            deferred = deferred or self._explain_and_describe
        if failure is not None:
            self.message = text_of(failure.error, reason)
        if deferred is None:
            self._record()
            self.telemetry.emit(self.describe)
        elif not self.telemetry.emit(deferred):
            self._record()
        return reason

    def _explain(self) -> str:
        """Find out what differs, and say it. Whatever fails here, the handshake is told of all the same."""
        try:
            self.explanation = self.compatibility.explain(self.remote_hash or "", self.statement)
            return self.compatibility.sentence(self.peer, self.explanation)
        except Exception as error:
            self.telemetry.failed("explaining a mismatch", error)
            self.explanation = Explanation(Source.UNKNOWN)
            return ""

    def _explain_and_describe(self) -> Description:
        if self.hash_differs:
            self._explain()
        self._record()
        return self.describe()

    def _probe_and_describe(self) -> Description:
        """ZeroMQ connects in the background and reports a dead port as silence too: look whether somebody listens."""
        if not is_listening(self.peer.host, self.peer.port, _PROBE_SECONDS):
            self.error = ErrorType.UNREACHABLE
        return self._explain_and_describe()

    def _record(self) -> None:
        self.telemetry.record(HANDSHAKE_DURATION, self.error or "", value=self.duration_s)
        if self.peers is not None:
            self.peers.shook_hands(self.peer, self.error)
        factor = self.explanation.factor if self.explanation else UNKNOWN_FACTOR
        if self.error is ErrorType.COMPAT_MISMATCH:
            self.telemetry.record(HANDSHAKE_REJECTIONS, factor)
        elif self.hash_differs:
            self.telemetry.record(HANDSHAKE_BYPASSED, factor)
        self.telemetry.audit(self.audit_record)

    def audit_record(self) -> Record:
        """The decision, for the audit trail."""
        return Record("handshake", {"decision": self._decision(), **self._attributes(), **self._outcome().keys()})

    def _decision(self) -> str:
        if self.error is not None:
            return "rejected" if self.error in _REJECTIONS else "failed"
        return "bypassed" if self.hash_differs else "accepted"

    def _warn_of_uncovered(self) -> Description:
        message = "; ".join(difference.text() for difference in self.uncovered)
        keys = {**self._peer_attributes(), **self._uncovered_attributes(), "message": message}
        return Description(log=LogLine(EventName.UNCOVERED_DIFFERENCE, logging.WARNING, keys))

    def describe(self) -> Description:
        """The span with its stages, and the log line."""
        differing = self._differing_attributes()
        attributes = self._attributes()
        span = Span(
            SpanName.HANDSHAKE,
            SpanKind.CLIENT,
            self.start_ns,
            self.end_ns,
            attributes,
            self.error,
            self.message,
            events=self._events(),
            parent=next(iter(self.waiters), None),
            links=tuple(self.waiters[1:]),
            slow=self.duration_s > self.telemetry.settings.slow_handshake_seconds,
            children=tuple(self._stage_span(stage, differing) for stage in self.stages),
        )
        line = outcome_line(
            self._outcome(),
            attributes,
            EventName.HANDSHAKE_FINISHED,
            EventName.HANDSHAKE_FAILED,
            slow_s=self.telemetry.settings.slow_handshake_seconds,
            level=logging.INFO,
        )
        return Description(span, line)

    def _outcome(self) -> Outcome:
        return Outcome(self.duration_s, self.error, self.message)

    def _attributes(self) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            **self._peer_attributes(),
            semconv.REMOTE_TP_SIZE: self.tp_size,
            semconv.HANDSHAKE_PURPOSE: self.purpose,
            semconv.COMPAT_HASH: self.compatibility.compat_hash,
            semconv.COMPAT_ENFORCED: self.compatibility.enforced,
        }
        if self.remote_hash is not None:
            attributes[semconv.REMOTE_COMPAT_HASH] = self.remote_hash
        return attributes | self._differing_attributes()

    def _stage_span(self, stage: Stage, differing: Attributes) -> Span:
        failed = self.error is not None and stage is self.stages[-1]
        return Span(
            stage.name,
            SpanKind.INTERNAL,
            stage.start_ns,
            stage.end_ns,
            differing if stage.name is SpanName.HANDSHAKE_COMPAT else {},
            error=self.error if failed else None,
            message=self.message if failed else "",
        )

    def _events(self) -> tuple[Event, ...]:
        events = [self.conflict.event()] if self.conflict else []
        if self.uncovered:
            events.append(Event(EventName.UNCOVERED_DIFFERENCE, self.uncovered_ns, self._uncovered_attributes()))
        return tuple(events)

    def _peer_attributes(self) -> dict[str, AttributeValue]:
        return {
            semconv.SERVER_ADDRESS: self.peer.host,
            semconv.SERVER_PORT: self.peer.port,
            semconv.REMOTE_ENGINE_ID: self.peer.engine_id,
        }

    def _differing_attributes(self) -> dict[str, AttributeValue]:
        if self.explanation is None:
            return {}
        found: dict[str, AttributeValue] = {semconv.COMPAT_SOURCE: self.explanation.source}
        differences = self.explanation.differences
        if differences:
            found[semconv.COMPAT_DIFFERING] = tuple(difference.factor for difference in differences)
        for factor, local, remote in differences:
            found[semconv.COMPAT_FACTOR_PREFIX + factor] = factor_attribute(local)
            found[semconv.REMOTE_COMPAT_FACTOR_PREFIX + factor] = factor_attribute(remote)
        return found

    def _uncovered_attributes(self) -> dict[str, AttributeValue]:
        return {semconv.COMPAT_UNCOVERED: tuple(difference.name for difference in self.uncovered)}

    def _enter(self, name: SpanName) -> None:
        now = now_ns()
        if self.stages:
            self.stages[-1].end_ns = now
        self.stages.append(Stage(name, now))

    def _classify(self, failure: Failure) -> ErrorType:
        """The error type, from where the handshake stood and what kind of exception ended it, never from its text."""
        stage = self.stages[-1].name
        if failure.not_allowed:
            return ErrorType.PEER_NOT_ALLOWED
        if failure.timed_out:
            return ErrorType.TIMEOUT
        if failure.from_agent:
            return ErrorType.AGENT_ERROR
        if stage is SpanName.HANDSHAKE_METADATA:
            # Too few frames fail an assertion of the handshake's own, a clock that is no number its arithmetic. What
            # fails below it, before the query, is about topology.
            mistaken = isinstance(failure.error, AssertionError | TypeError)
            if failure.undecodable or (mistaken and failure.direct):
                return ErrorType.PAYLOAD_DECODE
            return ErrorType.LAYOUT_MISMATCH if mistaken or failure.unsupported else ErrorType.OTHER
        if stage is SpanName.HANDSHAKE_REGISTER or failure.unsupported:
            return ErrorType.LAYOUT_MISMATCH
        if self.compatibility.enforced and self.hash_differs:
            return ErrorType.COMPAT_MISMATCH
        if failure.undecodable:
            return ErrorType.METADATA_DECODE
        # All that vLLM still compares between the hash and the registration.
        return ErrorType.ENGINE_ID_MISMATCH if isinstance(failure.error, RuntimeError) else ErrorType.OTHER


class Current(threading.local):
    """What the calling thread is in."""

    handshake: Handshake | None = None
    """The handshake that it shakes."""
    registered: Carried = NOTHING
    """The receive of the peer for whose registration it posts."""
    lease: Carried = NOTHING
    """The lease on what it posts."""
    receive: Receive | None = None
    """The request of this instance for which it acts."""
    push: tuple[str, str] | None = None
    """The request whose KV it is about to push: its id here, and at the peer."""
    met: bool = False
    """Whether the registration that it looks at has met its request's blocks."""


class Waiters:
    """Who waits for the handshakes that are under way, by engine id. Bounded; any thread may call.

    Lists are shared with the handshakes: whoever joins one that is already known to have failed is still told of.
    """

    LIMIT: Final = 1024
    """Engines."""
    LINKS: Final = 128
    """Requests for each engine; OpenTelemetry's own limit of links."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[SpanContext]] = {}

    def of(self, engine_id: str) -> list[SpanContext]:
        """Those who wait for a handshake with that peer."""
        if engine_id not in self._waiting and len(self._waiting) >= self.LIMIT:
            self._waiting.pop(next(iter(self._waiting)), None)
        return self._waiting.setdefault(engine_id, [])

    def join(self, engine_id: str, context: SpanContext) -> None:
        """A request asks for a handshake with a peer."""
        waiting = self.of(engine_id)
        if context not in waiting and len(waiting) < self.LINKS:
            waiting.append(context)

    def leave(self, engine_id: str) -> None:
        """The handshake with that peer is through."""
        self._waiting.pop(engine_id, None)
