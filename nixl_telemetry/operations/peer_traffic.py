# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What became of transfers and handshakes with each peer, and how fast each is: one sick pair among healthy ones."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import AttributeValue
from nixl_telemetry.signals.catalogue import (
    PEER_HANDSHAKES,
    PEER_LAST_SUCCESS,
    PEER_TRANSFER_BYTES,
    PEER_TRANSFER_SECONDS,
    PEER_TRANSFERS,
)
from nixl_telemetry.signals.clock import unix_offset_ns
from nixl_telemetry.signals.description import Description, LogLine
from nixl_telemetry.signals.metrics import Series, Update
from nixl_telemetry.signals.semconv import ErrorType, EventName
from nixl_telemetry.signals.telemetry import Telemetry, guarded

OTHER: Final = "other"
"""The label of all peers beyond the limit."""
UNKNOWN: Final = "unknown"
"""The label of peers whose address is not known."""
_LARGE_BYTES: Final = 1 << 20
"""Smaller transfers tell of the engine's steps, not of the network."""
_WINDOW: Final = 16
"""Large transfers that are looked at together."""
_FAR_BELOW: Final = 0.25


@dataclass(slots=True)
class _Speed:
    """How fast the large transfers with a peer are."""

    host: str
    count: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    latest: float = 0.0
    """Of the last full window. Bytes per second."""
    best: float = 0.0
    """Of any window."""
    told: bool = False

    def add(self, size_bytes: int, seconds: float) -> bool:
        """One more transfer; whether it completes a window."""
        self.count += 1
        self.size_bytes += size_bytes
        self.seconds += seconds
        if self.count < _WINDOW:
            return False
        self.latest = self.size_bytes / self.seconds if self.seconds else 0.0
        self.best = max(self.best, self.latest)
        self.count, self.size_bytes, self.seconds = 0, 0, 0.0
        return True


class PeerTraffic:
    """The peers of one worker: counted once a step; speeds, on the export thread.

    Bounded: beyond :attr:`LIMIT` peers, all others count together.
    """

    LIMIT: Final = 64

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry: Final = telemetry
        self._labels: dict[tuple[str, int], str] = {}
        self._speeds: dict[str, _Speed] = {}
        self._series = functools.cache(self._make_series)

    def label(self, peer: Peer) -> str:
        """What a peer is called."""
        address = (peer.host, peer.port)
        known = self._labels.get(address)
        if known is None:
            if not peer.host:
                return UNKNOWN
            if len(self._labels) >= self.LIMIT:
                return OTHER
            known = self._labels[address] = f"{peer.host}:{peer.port}"
        return known

    def transferred(
        self, peer: Peer, error: ErrorType | None, count: int, size_bytes: int, seconds: float, last_ns: int
    ) -> Sequence[Update]:
        """What to record of transfers that ended alike, in one step; ``last_ns`` is when the last of them did."""
        counts, sizes, times, last = self._series(self.label(peer), error)
        if error is not None:
            # What failed moved nothing.
            return ((counts, (count,)),)
        return (
            (counts, (count,)),
            (sizes, (size_bytes,)),
            (times, (seconds,)),
            (last, ((last_ns + unix_offset_ns()) / 1e9,)),
        )

    def _make_series(self, label: str, error: ErrorType | None) -> tuple[Series, Series, Series, Series]:
        series = self.telemetry.series
        return (
            series(PEER_TRANSFERS, label, error or ""),
            series(PEER_TRANSFER_BYTES, label),
            series(PEER_TRANSFER_SECONDS, label),
            series(PEER_LAST_SUCCESS, label),
        )

    @guarded
    def shook_hands(self, peer: Peer, error: ErrorType | None) -> None:
        """A handshake ended."""
        self.telemetry.record(PEER_HANDSHAKES, self.label(peer), error or "")

    def measure(self, peer: Peer, size_bytes: int, seconds: float, observation_delay_s: float) -> None:
        """Look at the speed of a finished transfer, on the export thread."""
        label = self.label(peer)
        # Where the end was seen late, the time says nothing of the network.
        if size_bytes < _LARGE_BYTES or observation_delay_s > seconds / 2 or label in (OTHER, UNKNOWN):
            return
        speed = self._speeds.setdefault(label, _Speed(peer.host))
        if not speed.add(size_bytes, seconds) or speed.told:
            return
        neighbours = [
            other.latest for name, other in self._speeds.items() if name != label and other.host == speed.host
        ]
        before = max([speed.best, *neighbours])
        if speed.latest < _FAR_BELOW * before:
            speed.told = True
            self._tell_slow(peer, speed.latest, before)

    def _tell_slow(self, peer: Peer, latest: float, before: float) -> None:
        attributes: dict[str, AttributeValue] = {
            semconv.REMOTE_ENGINE_ID: peer.engine_id,
            semconv.SERVER_ADDRESS: peer.host,
            semconv.SERVER_PORT: peer.port,
            semconv.PEER_BANDWIDTH: round(latest),
            semconv.PEER_BANDWIDTH_BEFORE: round(before),
            "message": "transfers with this peer are far slower than they were, or than those with its neighbour on "
            "the same host: look at the transport that UCX chose, and at the network between the two",
        }
        line = LogLine(EventName.PEER_SLOW, logging.WARNING, attributes)
        self.telemetry.emit(lambda: Description(log=line))
