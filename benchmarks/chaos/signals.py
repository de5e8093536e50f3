# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Signals that name a fault: whether, and how soon, one was seen."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from benchmarks.chaos.watch import Look, Track
from nixl_telemetry.testbed import MetricsSnapshot

SILENT_SECONDS: Final = 4.0
"""Under the load of these tests a counter of requests stands still for so long only where none come."""


class Signal(Protocol):
    """Something that an operator could have an alert on."""

    def seen_after(self, track: Track) -> float | None:
        """Seconds from the begin of the fault; ``None`` if it was not seen."""

    def __str__(self) -> str: ...


class Named(NamedTuple):
    """A signal that named a fault."""

    signal: str
    seconds: float
    """After its begin."""


def seen(signals: Iterable[Signal], track: Track) -> list[Named]:
    """The signals of a list that were seen, in its order."""
    found = ((signal, signal.seen_after(track)) for signal in signals)
    return [Named(str(signal), seconds) for signal, seconds in found if seconds is not None]


@dataclass(frozen=True)
class Rise:
    """A counter rose."""

    instance: str
    metric: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def seen_after(self, track: Track) -> float | None:
        """When it was first seen higher; after a restart a counter begins at 0, and so does a series that is new."""
        baseline = 0.0
        for look, value in _values(track.looks[self.instance], self._value):
            if look.at < track.begin:
                baseline = value
            elif value > baseline:
                return look.at - track.begin
            elif value < baseline:
                baseline = 0.0
                if value > baseline:
                    return look.at - track.begin
        return None

    def _value(self, metrics: MetricsSnapshot) -> float | None:
        return metrics.value(self.metric, **self.labels)

    def __str__(self) -> str:
        return f"{_series(self.metric, self.labels)} at {self.instance}"


@dataclass(frozen=True)
class Slow(Rise):
    """A histogram has observations above one of its edges."""

    above: str = "1.0"
    """The edge, as in the label ``le``."""

    def _value(self, metrics: MetricsSnapshot) -> float | None:
        count = metrics.value(f"{self.metric}_count", **self.labels)
        below = metrics.value(f"{self.metric}_bucket", **self.labels, le=self.above)
        return None if count is None or below is None else count - below

    def __str__(self) -> str:
        return f"{_series(self.metric, self.labels)} above {float(self.above):g} s at {self.instance}"


@dataclass(frozen=True)
class Logged:
    """A log event came."""

    instance: str
    event: str

    def seen_after(self, track: Track) -> float | None:
        """When the log was first seen to have it."""
        for look in track.looks[self.instance]:
            if look.at >= track.begin and look.events.get(self.event):
                return look.at - track.begin
        return None

    def __str__(self) -> str:
        return f"log event {self.event} at {self.instance}"


@dataclass(frozen=True)
class Down:
    """An instance does not answer a scrape. Prometheus says so by itself, with ``up``."""

    instance: str

    def seen_after(self, track: Track) -> float | None:
        """When it first did not."""
        for look in track.looks[self.instance]:
            if look.at >= track.begin and look.metrics is None:
                return look.at - track.begin
        return None

    def __str__(self) -> str:
        return f"up == 0 of {self.instance}"


@dataclass(frozen=True)
class Silence:
    """A counter that rose before stands still."""

    instance: str
    metric: str

    def seen_after(self, track: Track) -> float | None:
        """When it had stood still for long enough, if that began before the fault ended."""
        last, changed_at = None, 0.0
        for look, value in _values(track.looks[self.instance], lambda metrics: metrics.value(self.metric)):
            if value != last:
                last, changed_at = value, look.at
            elif look.at > track.begin and changed_at <= track.end and look.at - changed_at >= SILENT_SECONDS:
                return look.at - track.begin
        return None

    def __str__(self) -> str:
        return f"{self.metric} stands still at {self.instance}"


def _values(looks: Iterable[Look], value: "_Value") -> Iterator[tuple[Look, float]]:
    for look in looks:
        found = None if look.metrics is None else value(look.metrics)
        if found is not None:
            yield look, found


class _Value(Protocol):
    def __call__(self, metrics: MetricsSnapshot, /) -> float | None: ...


def _series(metric: str, labels: Mapping[str, str]) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"{metric}{{{inside}}}" if inside else metric
