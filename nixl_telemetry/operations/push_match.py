# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""How the two halves of a push meet on the prefill side: a registration of the decode side, and a request's blocks."""

import logging
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from nixl_telemetry.audit.chain import Record
from nixl_telemetry.operations.outcome import Outcome
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import AttributeValue
from nixl_telemetry.signals.catalogue import (
    PUSH_MATCH_WAIT,
    PUSH_OLDEST,
    PUSH_REGISTRATIONS,
    PUSH_UNMATCHED,
    TELEMETRY_DROPPED,
)
from nixl_telemetry.signals.clock import now_ns, unix_offset_ns
from nixl_telemetry.signals.description import Description, LogLine
from nixl_telemetry.signals.metrics import Update
from nixl_telemetry.signals.semconv import ErrorType, EventName, PushSide, RegistrationEvent, Signal
from nixl_telemetry.signals.telemetry import Telemetry, guarded

_TOLD_AT_ONCE: Final = 20
"""Log lines at each look."""
_HINTS: Final = {
    PushSide.REGISTRATION: "no request of this instance has this id, or its prefill is not done",
    PushSide.BLOCKS: "no decode instance has registered for this request",
}


@dataclass(slots=True)
class _Half:
    """One half of a push that waits for the other."""

    peer: Peer | None
    """Who registered."""
    start_ns: int = field(default_factory=now_ns)
    told: bool = False


class PushMatches:
    """The halves that wait, and those that met lately.

    The engine's thread brings blocks and takes away what is over; all else comes from the push writer's, but for
    :meth:`rejected`, which comes from those that shake hands. Maps change in single steps, and are bounded.
    """

    LIMIT: Final = 100_000

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry: Final = telemetry
        self._halves: Final[dict[PushSide, dict[str, _Half]]] = {side: {} for side in PushSide}
        self._met: OrderedDict[str, None] = OrderedDict()
        """Registrations that met their blocks lately."""
        self._deferred: dict[str, dict[str, str]] = {}
        """Those whose push waits for a handshake: by engine id, the peer's request id by this instance's."""
        self._blamed: set[str] = set()
        self._uncounted: Final[dict[str, bool]] = {}
        """Blocks that wait and were not counted yet, by request id; whoever takes one out decides if it ever is."""
        series = telemetry.series
        self._unmatched: Final = {side: series(PUSH_UNMATCHED, side) for side in PushSide}
        self._events: Final = {event: series(PUSH_REGISTRATIONS, event) for event in RegistrationEvent}
        self._match_wait: Final = {side: series(PUSH_MATCH_WAIT, side) for side in PushSide}
        telemetry.watch(self._look, *self._halves.values())

    @guarded
    def blocks_ready(self, request_ids: Iterable[str]) -> None:
        """The prefill of these requests is done.

        Those that wait are counted when they are first looked at: nearly all are matched before.
        """
        halves = self._halves[PushSide.BLOCKS]
        for request_id in request_ids:
            if request_id in halves:
                continue
            # First: the writer's thread may match it at once.
            self._uncounted[request_id] = True
            if not self._wait(PushSide.BLOCKS, request_id, None):
                del self._uncounted[request_id]

    @guarded
    def registered(self, request_id: str, peer: Peer) -> None:
        """A registration came, and its request's blocks are not there."""
        # Each rank of the decode side sends one, with the same id; vLLM uses the first.
        if request_id in self._met or request_id in self._halves[PushSide.REGISTRATION]:
            return
        updates: list[Update] = [(self._events[RegistrationEvent.RECEIVED], (1,))]
        if self._wait(PushSide.REGISTRATION, request_id, peer):
            updates.append((self._unmatched[PushSide.REGISTRATION], (1,)))
        self.telemetry.record_all(updates)

    @guarded
    def unreadable(self) -> None:
        """A registration came that vLLM cannot read."""
        events = (RegistrationEvent.RECEIVED, RegistrationEvent.FAILED)
        self.telemetry.record_all([(self._events[event], (1,)) for event in events])

    @guarded
    def matched(self, request_id: str, registered_id: str) -> None:
        """A request's blocks and its registration have met; a second call, after a handshake, does nothing.

        Args:
            request_id: Of the prefill side.
            registered_id: Of the decode side.
        """
        if registered_id in self._met:
            return
        self._met[registered_id] = None
        if len(self._met) > self.LIMIT:
            self._met.popitem(last=False)
        now = now_ns()
        registration = self._halves[PushSide.REGISTRATION].pop(registered_id, None)
        blocks = self._halves[PushSide.BLOCKS].pop(request_id, None)
        registered_ns = registration.start_ns if registration else now
        blocks_ns = blocks.start_ns if blocks else now
        first = PushSide.REGISTRATION if registered_ns < blocks_ns else PushSide.BLOCKS
        updates: list[Update] = [
            (self._events[RegistrationEvent.MATCHED], (1,)),
            (self._match_wait[first], (abs(registered_ns - blocks_ns) / 1e9,)),
            # One that did not wait was not counted before.
            (self._unmatched[PushSide.REGISTRATION], (-1,))
            if registration
            else (self._events[RegistrationEvent.RECEIVED], (1,)),
        ]
        if blocks and not self._uncounted.pop(request_id, False):
            updates.append((self._unmatched[PushSide.BLOCKS], (-1,)))
        self.telemetry.record_all(updates)

    @guarded
    def ended(self, request_ids: set[str]) -> None:
        """vLLM frees these requests' blocks, whether somebody came for them or not."""
        halves = self._halves[PushSide.BLOCKS]
        over = [request_id for request_id in request_ids if halves.pop(request_id, None)]
        counted = [request_id for request_id in over if not self._uncounted.pop(request_id, False)]
        if counted:
            self.telemetry.record_all([(self._unmatched[PushSide.BLOCKS], (-len(counted),))])

    @guarded
    def deferred(self, engine_id: str, request_id: str, registered_id: str) -> None:
        """A push needs a handshake with the peer first."""
        waiting = self._deferred.setdefault(engine_id, {})
        if len(self._deferred) > self.LIMIT:
            self._deferred.pop(next(iter(self._deferred)), None)
        if len(waiting) < self.LIMIT:
            waiting[request_id] = registered_id

    @guarded
    def shook_hands(self, peer: Peer, error: ErrorType | None, message: str) -> None:
        """A handshake with a peer ended. Where it failed, pushes to it fail, and the peer is not told."""
        waiting = self._deferred.pop(peer.engine_id, {})
        if error is None:
            return
        for request_id, registered_id in list(waiting.items())[:_TOLD_AT_ONCE]:
            self._tell_failure(request_id, registered_id, peer, Outcome(0.0, error, message))

    def _tell_failure(self, request_id: str, registered_id: str, peer: Peer, outcome: Outcome) -> None:
        attributes: dict[str, AttributeValue] = {
            semconv.REQUEST_ID: request_id,
            semconv.REMOTE_REQUEST_ID: registered_id,
            **_where(peer),
            semconv.ERROR_TYPE: outcome.error or ErrorType.OTHER,
        }
        line = LogLine(
            EventName.PUSH_FAILED,
            logging.ERROR,
            {**attributes, "message": f"the decode side waits until its own time is up: {outcome.message}"},
        )
        self.telemetry.emit(lambda: Description(log=line))
        self.telemetry.audit(lambda: Record("push_failed", attributes))

    def _wait(self, side: PushSide, request_id: str, peer: Peer | None) -> bool:
        """A half that is not there yet; whether there is room for it."""
        halves = self._halves[side]
        if len(halves) >= self.LIMIT:
            self.telemetry.record(TELEMETRY_DROPPED, Signal.HOOK)
            return False
        halves[request_id] = _Half(peer)
        self.telemetry.ensure_watched()
        return True

    @guarded
    def _look(self) -> None:
        """Tell since when the oldest wait, and of each that waits long, once; on the export thread."""
        blocks = self._halves[PushSide.BLOCKS]
        new = [one for one in tuple(self._uncounted) if one in blocks and self._uncounted.pop(one, False)]
        if new:
            self.telemetry.record_all([(self._unmatched[PushSide.BLOCKS], (len(new),))])
        limit_ns = self.telemetry.settings.watchdog_seconds * 1e9
        latest = now_ns() - limit_ns
        late: dict[PushSide, tuple[str, _Half]] = {}
        for side, halves in self._halves.items():
            waiting = list(halves.items())
            # In the order in which they came.
            oldest = (waiting[0][1].start_ns + unix_offset_ns()) / 1e9 if waiting else 0.0
            self.telemetry.record_state(PUSH_OLDEST, side, self.telemetry.rank, value=oldest)
            told = 0
            for request_id, half in waiting if limit_ns else ():
                if half.start_ns > latest or told >= _TOLD_AT_ONCE:
                    break
                late.setdefault(side, (request_id, half))
                if not half.told:
                    half.told = True
                    told += 1
                    self._tell_waiting(side, request_id, half)
        if len(late) == len(PushSide):
            self._tell_ids_differ(late[PushSide.BLOCKS][0], *late[PushSide.REGISTRATION])

    def _tell_waiting(self, side: PushSide, request_id: str, half: _Half) -> None:
        # A registration's id is the decode side's.
        key = semconv.REQUEST_ID if side is PushSide.BLOCKS else semconv.REMOTE_REQUEST_ID
        attributes: dict[str, AttributeValue] = {
            semconv.PUSH_SIDE: side,
            key: request_id,
            **_where(half.peer),
            semconv.PUSH_WAITING: round((now_ns() - half.start_ns) / 1e9, 3),
            "message": _HINTS[side],
        }
        line = LogLine(EventName.PUSH_UNMATCHED, logging.WARNING, attributes)
        self.telemetry.emit(lambda: Description(log=line))

    def _tell_ids_differ(self, request_id: str, registered_id: str, half: _Half) -> None:
        engine_id = half.peer.engine_id if half.peer else ""
        # Once for each cause: whoever sends requests to that peer.
        if engine_id in self._blamed or len(self._blamed) >= _TOLD_AT_ONCE:
            return
        self._blamed.add(engine_id)
        attributes: dict[str, AttributeValue] = {
            semconv.REQUEST_ID: request_id,
            semconv.REMOTE_REQUEST_ID: registered_id,
            **_where(half.peer),
            "message": "blocks wait for a registration and a registration waits for blocks, and their ids differ: "
            "whoever sends requests must send the same X-Request-Id to both sides",
        }
        line = LogLine(EventName.PUSH_IDS_DIFFER, logging.ERROR, attributes)
        self.telemetry.emit(lambda: Description(log=line))


def _where(peer: Peer | None) -> dict[str, AttributeValue]:
    if peer is None:
        return {}
    return {
        semconv.REMOTE_ENGINE_ID: peer.engine_id,
        semconv.SERVER_ADDRESS: peer.host,
        semconv.SERVER_PORT: peer.port,
    }
