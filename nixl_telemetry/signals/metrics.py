# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Metric updates on their way from the process that observes to the API server that serves ``/metrics``.

Prometheus objects made in a worker are on nobody's ``/metrics``. So updates are collected here, drained once per engine
step into a :data:`Batch`, and ride with the step's output through vLLM's ``KVConnectorStats``.
"""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from nixl_telemetry.signals.catalogue import CATALOGUE, TELEMETRY_DROPPED, Kind, Metric
from nixl_telemetry.signals.semconv import Signal

Batch: TypeAlias = dict[str, dict[str, Any]]
"""Updates by metric name and series key: a number, or a list of observations for a histogram. msgpack can carry it."""

_SEPARATOR: Final = "\x1f"
_LAST: Final = frozenset({Kind.INFO, Kind.STATE})
"""Of these the last value holds; histograms keep all, and the others add up."""


def series_key(labels: tuple[str, ...]) -> str:
    """The key of a series in a :data:`Batch`."""
    return _SEPARATOR.join(labels)


def label_values(key: str) -> tuple[str, ...]:
    """The label values of a series key."""
    return tuple(key.split(_SEPARATOR))


def merge(into: Batch, other: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the updates of ``other``, of another rank or step, to ``into``."""
    for name, series in other.items():
        mine = into.get(name)
        if mine is None:
            into[name] = dict(series)
            continue
        kind = CATALOGUE[name].kind
        for key, value in series.items():
            if kind is Kind.HISTOGRAM:
                mine[key] = [*mine.get(key, ()), *value]
            elif kind in _LAST:
                mine[key] = value
            else:
                mine[key] = mine.get(key, 0) + value


class Series:
    """One series of a metric: what updates are recorded of, looked up once."""

    __slots__ = ("is_sum", "keeps_all", "key", "kind", "name")

    def __init__(self, metric: Metric, labels: tuple[str, ...]) -> None:
        self.name: Final = metric.name
        self.kind: Final = metric.kind
        self.key: Final = series_key(labels)
        self.keeps_all: Final = metric.kind is Kind.HISTOGRAM
        """Whether values stay as they are; else one number comes of them."""
        self.is_sum: Final = metric.kind not in _LAST
        """Whether that is their sum, and not the last of them."""


Update: TypeAlias = tuple[Series, Sequence[float]]
"""Increments, observations or states of one series."""


class Recorder:
    """Collects the updates of one process. Any thread may add; one thread drains.

    Args:
        limit: How many updates may wait; what comes beyond is dropped and counted.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._series: dict[tuple[str, tuple[str, ...]], Series] = {}
        self.updates: Final[deque[Update]] = deque()
        """What waits to be drained."""
        self._dropped = itertools.count()
        self._has_dropped = False
        self._dropped_reported = 0

    def series(self, metric: Metric, labels: tuple[str, ...] = ()) -> Series:
        """The series of a metric with these label values."""
        known = self._series.get((metric.name, labels))
        return known or self._series.setdefault((metric.name, labels), Series(metric, labels))

    def add(self, metric: Metric, labels: tuple[str, ...] = (), value: float = 1.0) -> None:
        """Record one increment, observation or state. Takes no lock."""
        self.add_all(((self.series(metric, labels), (value,)),))

    def add_all(self, updates: Sequence[Update]) -> None:
        """Record several at once; as with :meth:`add`, they are dropped one by one where there is no room."""
        if len(self.updates) + len(updates) <= self._limit:
            self.updates.extend(updates)
            return
        for update in updates:
            # A lost change of a level would be wrong for ever; there are at most two for each transfer under way.
            if len(self.updates) < self._limit or update[0].kind is Kind.LEVEL:
                self.updates.append(update)
            else:
                next(self._dropped)
                self._has_dropped = True

    def drain(self) -> Batch | None:
        """Take all updates; ``None`` when there are none."""
        if not self.updates:
            return None
        batch: Batch = {}
        take_next = self.updates.popleft
        # Only what is there now: other threads may keep adding.
        for _ in range(len(self.updates)):
            series, values = take_next()
            of_metric = batch.get(series.name)
            if of_metric is None:
                of_metric = batch[series.name] = {}
            key = series.key
            # In the engine's steps: no calls of Python code.
            if series.keeps_all:
                known = of_metric.get(key)
                if known is None:
                    of_metric[key] = list(values)
                else:
                    known += values
            else:
                of_metric[key] = sum(values, of_metric.get(key, 0)) if series.is_sum else values[-1]
        if self._has_dropped:
            self._report_dropped(batch)
        return batch

    def _report_dropped(self, batch: Batch) -> None:
        # itertools.count counts atomically under the GIL and shows its next value only in its repr or by advancing.
        dropped = int(repr(self._dropped)[len("count(") : -1])
        if dropped > self._dropped_reported:
            merge(batch, {TELEMETRY_DROPPED.name: {series_key((Signal.METRICS,)): dropped - self._dropped_reported}})
            self._dropped_reported = dropped
