# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The metrics of transfers, recorded once in a step for all that began or ended in it."""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.operations.peer_traffic import PeerTraffic
from nixl_telemetry.signals.catalogue import (
    TELEMETRY_DROPPED,
    TRANSFER_BLOCKS,
    TRANSFER_BYTES,
    TRANSFER_DESCRIPTORS,
    TRANSFER_DURATION,
    TRANSFER_ERRORS,
    TRANSFER_OBSERVATION_DELAY,
    TRANSFERS_IN_FLIGHT,
    TRANSFERS_POSTED,
)
from nixl_telemetry.signals.metrics import Update
from nixl_telemetry.signals.semconv import Direction, ErrorType, Signal
from nixl_telemetry.signals.telemetry import Telemetry, guarded


class Ended(Protocol):
    """What is read of a transfer that has ended."""

    direction: Direction
    peer: Peer
    error: ErrorType | None
    posted: bool
    end_ns: int
    duration_s: float
    observation_delay_s: float
    size_bytes: int
    blocks: int
    descriptors: int
    is_first: bool


class _Direction:
    """The series of one direction."""

    def __init__(self, telemetry: Telemetry, direction: Direction) -> None:
        series = telemetry.series
        self.posted: Final = series(TRANSFERS_POSTED, direction)
        self.in_flight: Final = series(TRANSFERS_IN_FLIGHT, direction)
        self.durations: Final = {
            error: series(TRANSFER_DURATION, direction, error or "") for error in (None, *TRANSFER_ERRORS)
        }
        self.observation_delay: Final = series(TRANSFER_OBSERVATION_DELAY, direction)
        self.size_bytes: Final = series(TRANSFER_BYTES, direction)
        self.blocks: Final = series(TRANSFER_BLOCKS, direction)
        self.descriptors: Final = series(TRANSFER_DESCRIPTORS, direction)

    def begun(self, count: int) -> tuple[Update, Update]:
        """What becomes of the levels when transfers are posted."""
        return (self.posted, (count,)), (self.in_flight, (count,))

    def ended(self, posted: bool, count: int) -> Update:
        """What becomes of the levels when transfers end."""
        # One that could not be prepared counts as posted, so that the numbers add up.
        return (self.in_flight, (-count,)) if posted else (self.posted, (count,))


class TransferCounts:
    """What began and ended since the last step. Any thread may add; the engine's reports.

    Args:
        telemetry: The hub.
        peers: Those that it was with.
    """

    LIMIT: Final = 100_000
    """How many may wait for their step. Of more, just that they were posted or ended is counted."""

    def __init__(self, telemetry: Telemetry, peers: PeerTraffic) -> None:
        self.telemetry: Final = telemetry
        self._peers = peers
        self._directions: Final = {direction: _Direction(telemetry, direction) for direction in Direction}
        # Without metrics nobody would ever take them.
        most = self.LIMIT if telemetry.settings.metrics else 0
        self._posted: Final[deque[Direction]] = deque(maxlen=most)
        self._ended: Final[deque[Ended]] = deque(maxlen=most)
        self.waiting: Final[tuple[Collection[object], ...]] = (self._posted, self._ended)
        """What :meth:`report` has to take; mostly empty."""

    def posted(self, direction: Direction) -> None:
        """A transfer in this direction was posted."""
        if len(self._posted) < self.LIMIT:
            self._posted.append(direction)
        else:
            self.telemetry.record_all(self._directions[direction].begun(1))

    def ended(self, transfer: Ended) -> None:
        """A transfer has ended."""
        if len(self._ended) < self.LIMIT:
            self._ended.append(transfer)
        else:
            self.telemetry.record(TELEMETRY_DROPPED, Signal.METRICS)
            # A lost change of a level would be wrong for ever.
            self.telemetry.record_all((self._directions[transfer.direction].ended(transfer.posted, 1),))

    @guarded
    def report(self) -> None:
        """Record them, on the engine's thread."""
        groups: dict[tuple[Direction, Peer, ErrorType | None, bool], list[Ended]] = {}
        # Only what is there now: in push, the writer's thread may add more. What ended before what was posted, or more
        # would have ended than ever began.
        for _ in range(len(self._ended)):
            one = self._ended.popleft()
            groups.setdefault((one.direction, one.peer, one.error, one.posted), []).append(one)
        posted = [self._posted.popleft() for _ in range(len(self._posted))]
        levels: list[Update] = []
        for direction, of_direction in self._directions.items():
            count = posted.count(direction)
            if count:
                levels += of_direction.begun(count)
        for (direction, _, _, was_posted), transfers in groups.items():
            levels.append(self._directions[direction].ended(was_posted, len(transfers)))
        # Before anything else can fail.
        self.telemetry.record_all(levels)
        for (direction, peer, error, was_posted), transfers in groups.items():
            self._report_ended(self._directions[direction], peer, error, was_posted, transfers)

    @guarded
    def _report_ended(
        self,
        direction: _Direction,
        peer: Peer,
        error: ErrorType | None,
        was_posted: bool,
        transfers: Sequence[Ended],
    ) -> None:
        """Record transfers that ended alike: how long they took, and what they moved if they were done."""
        durations, delays = [], []
        blocks = descriptors = size_bytes = 0
        for one in transfers:
            durations.append(one.duration_s)
            delays.append(one.observation_delay_s)
            descriptors += one.descriptors
            size_bytes += one.size_bytes
            # A request whose memory is of two kinds is moved by two transfers; its blocks are moved once.
            if one.is_first:
                blocks += one.blocks
        updates: list[Update] = [(direction.durations[error], durations)]
        if error is None:
            updates += (
                (direction.observation_delay, delays),
                (direction.blocks, (blocks,)),
                (direction.descriptors, (descriptors,)),
            )
        if size_bytes:
            updates.append((direction.size_bytes, (size_bytes,)))
        if was_posted:
            updates += self._peers.transferred(
                peer, error, len(transfers), size_bytes, sum(durations), transfers[-1].end_ns
            )
        self.telemetry.record_all(updates)
