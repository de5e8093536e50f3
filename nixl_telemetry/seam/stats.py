# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What crosses from the worker to the API server, and the Prometheus metrics that are built there."""

import functools
from collections.abc import Callable
from typing import Any, Final

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats, NixlPromMetrics

from nixl_telemetry.seam.versions import connector_version
from nixl_telemetry.signals.catalogue import ADDED_LABELS, CATALOGUE, TELEMETRY_ERRORS, Kind, Metric
from nixl_telemetry.signals.logger import logger
from nixl_telemetry.signals.metrics import Batch, label_values, merge, series_key
from nixl_telemetry.signals.semconv import Signal, TransferMode

UPDATES: Final = "nixl_telemetry"
"""Key of our metric updates among the data of vLLM's stats."""


class TelemetryStats(NixlKVConnectorStats):
    """vLLM's NIXL stats of one step, with our metric updates."""

    def __post_init__(self) -> None:
        # Whoever gives the updates gives the rest, too.
        if UPDATES not in self.data:
            super().__post_init__()
            self.data.setdefault(UPDATES, {})

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.data[UPDATES] = {}

    def add(self, batch: Batch) -> None:
        """Add metric updates."""
        merge(self.data[UPDATES], batch)

    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self.data[UPDATES] and NixlKVConnectorStats.is_empty(self)

    def aggregate(self, other: Any) -> "TelemetryStats":
        """Add another rank's or step's stats, stock or instrumented."""
        theirs = dict(other.data)
        self.add(theirs.pop(UPDATES, {}))
        # Stock adds lists key by key, and knows its own keys only.
        super().aggregate(NixlKVConnectorStats(data=theirs))
        return self

    def record_transfer(self, res: Any) -> None:
        """Record NIXL's telemetry of one transfer; ``None``, which only vLLM 0.32 and later take, is no measurement."""
        if res is not None:
            NixlKVConnectorStats.record_transfer(self, res)


class WorkerStats(TelemetryStats):
    """What a worker collects. Updates are added to what it gives away: asked in each step, it has none."""

    is_empty = NixlKVConnectorStats.is_empty

    def clone_and_reset(self) -> TelemetryStats:
        """Give away what there is. vLLM adds ranks up that are of one class, whatever each of them had to tell."""
        return TelemetryStats(data=super().clone_and_reset().data)


def with_updates(stats: TelemetryStats | None, batch: Batch | None) -> TelemetryStats | None:
    """Stats of a step with metric updates added, made where there are none; ``None`` without updates."""
    if batch is None:
        return None
    # Nobody else has the batch: nothing has to be copied.
    if stats is None:
        return TelemetryStats(data={UPDATES: batch, **{name: [] for name in _stock_names()}})
    stats.data[UPDATES] = batch
    return stats


@functools.cache
def _stock_names() -> tuple[str, ...]:
    """Keys of vLLM's own data, which its own code expects."""
    return tuple(NixlKVConnectorStats().data)


class TelemetryPromMetrics(NixlPromMetrics):
    """vLLM's NIXL metrics with two more labels, and ours beside them.

    Args:
        mode: The connector's transfer mode.
        own_metrics: Whether to make our own metrics.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        mode: TransferMode,
        own_metrics: bool,
    ) -> None:
        labelnames = [*labelnames, *ADDED_LABELS]
        per_engine_labelvalues = {
            engine: [*values, mode.value, str(connector_version())] for engine, values in per_engine_labelvalues.items()
        }
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series: dict[str, _Instrument] = {}
        if own_metrics:
            try:
                self._series = _make_instruments(metric_types, labelnames, per_engine_labelvalues, mode)
            except Exception as error:
                logger().warning("nixl_telemetry makes no metrics of its own, serving goes on: %r", error)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Record the stats of a step."""
        super().observe(transfer_stats_data, engine_idx)
        if not self._series:
            return
        for name, series in transfer_stats_data.get(UPDATES, {}).items():
            try:
                instrument = self._series[name]
                for key, value in series.items():
                    instrument.apply(engine_idx, key, value)
            except Exception:
                self._series[TELEMETRY_ERRORS.name].apply(engine_idx, Signal.METRICS.value, 1)


class _Instrument:
    """A metric's Prometheus object for all engines of this API server."""

    def __init__(self, metric: Metric, prometheus: Any, engines: dict[int, list[object]], mode: TransferMode) -> None:
        self._metric = metric
        self._prometheus = prometheus
        self._engines = engines
        self._child = functools.cache(self._make_child)
        self._levels: dict[tuple[int, str], float] = {}
        for engine in engines:
            for labels in metric.initial_series(mode):
                child = self._child(engine, series_key(tuple(map(str, labels))))
                if metric.kind in (Kind.LEVEL, Kind.STATE):
                    child.set(0)

    def apply(self, engine: int, key: str, value: Any) -> None:
        """Record an update of the series with this key."""
        child = self._child(engine, key)
        if self._metric.kind is Kind.COUNTER:
            child.inc(value)
        elif self._metric.kind is Kind.HISTOGRAM:
            for observation in value:
                child.observe(observation)
        elif self._metric.kind in (Kind.INFO, Kind.STATE):
            child.set(value)
        else:
            # Ray's gauges can only be set, so the sum is kept here.
            level = self._levels[engine, key] = self._levels.get((engine, key), 0) + value
            child.set(level)

    def _make_child(self, engine: int, key: str) -> Any:
        labels = label_values(key) if self._metric.labels else ()
        return self._prometheus.labels(*self._engines[engine], *labels)


_registered: list[Any] = []
"""Our collectors in the process's registry. vLLM unregisters its own by name when it builds its metrics anew."""


def _make_instruments(
    metric_types: dict[Any, Any], labelnames: list[str], engines: dict[int, list[object]], mode: TransferMode
) -> dict[str, _Instrument]:
    while _registered:
        REGISTRY.unregister(_registered.pop())
    makers: dict[Kind, Callable[..., Any]] = {
        Kind.COUNTER: metric_types[Counter],
        Kind.HISTOGRAM: metric_types[Histogram],
        # With several API servers each holds a part of the sum, all of an info, and a state that may be an old one.
        Kind.LEVEL: functools.partial(metric_types[Gauge], multiprocess_mode="livesum"),
        Kind.INFO: functools.partial(metric_types[Gauge], multiprocess_mode="livemax"),
        Kind.STATE: functools.partial(metric_types[Gauge], multiprocess_mode="livemostrecent"),
    }
    instruments = {}
    for metric in CATALOGUE.values():
        extra = {"buckets": list(metric.buckets)} if metric.kind is Kind.HISTOGRAM else {}
        prometheus = makers[metric.kind](
            name=metric.name, documentation=metric.help, labelnames=[*labelnames, *metric.label_names], **extra
        )
        if metric_types[Counter] is Counter:
            _registered.append(prometheus)
        instruments[metric.name] = _Instrument(metric, prometheus, engines, mode)
    return instruments
