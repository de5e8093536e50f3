# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Stats on their way, and the metrics that are made of them, in vLLM's and Prometheus's real classes."""

import functools
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from nixl_telemetry.connectors import NixlPullConnector, NixlPushConnector
from nixl_telemetry.seam.stats import UPDATES, TelemetryPromMetrics, TelemetryStats, WorkerStats, with_updates
from nixl_telemetry.seam.versions import connector_version
from nixl_telemetry.signals.catalogue import CATALOGUE, Kind
from nixl_telemetry.signals.semconv import TransferMode

ENGINES: dict[int, list[object]] = {0: ["tiny", "0"], 1: ["tiny", "1"]}
RESULT = SimpleNamespace(xferDuration=2_000_000, postDuration=1_000, totalBytes=10, descCount=2)


def stats(**updates: dict[str, Any]) -> TelemetryStats:
    """Stats of one step."""
    made = TelemetryStats()
    made.add(updates)
    return made


def test_ranks_add_up() -> None:
    """Two ranks of one step."""
    first = stats(nixl_transfer_bytes_total={"read": 5}, nixl_handshake_duration_seconds={"": [0.1]})
    first.record_transfer(RESULT)
    second = stats(nixl_transfer_bytes_total={"read": 7}, nixl_handshake_duration_seconds={"": [0.2]})
    second.record_transfer(RESULT)

    total = first.aggregate(second)

    assert total.data[UPDATES] == {
        "nixl_transfer_bytes_total": {"read": 12},
        "nixl_handshake_duration_seconds": {"": [0.1, 0.2]},
    }
    assert total.data["transfer_duration"] == [2.0, 2.0]
    assert total.reduce()["Num successful transfers"] == 2


def test_stock_stats_are_accepted() -> None:
    """A rank or step without our part."""
    stock = NixlKVConnectorStats()
    stock.record_transfer(RESULT)

    assert stats().aggregate(stock).data["bytes_transferred"] == [10]
    assert not TelemetryStats(data=dict(stock.data)).is_empty()


def test_emptiness() -> None:
    """Stats travel when either part has something."""
    assert TelemetryStats().is_empty()
    assert not stats(nixl_transfer_bytes_total={"read": 5}).is_empty()
    cleared = stats(nixl_transfer_bytes_total={"read": 5})
    cleared.reset()
    assert cleared.is_empty()


def test_clone_and_reset() -> None:
    """What was taken is not changed by what comes."""
    current = stats(nixl_transfer_bytes_total={"read": 5})
    taken = current.clone_and_reset()
    current.add({"nixl_transfer_bytes_total": {"read": 1}})

    assert taken.data[UPDATES] == {"nixl_transfer_bytes_total": {"read": 5}}


@pytest.mark.parametrize("order", [1, -1])
def test_vllm_adds_up_what_ranks_tell(order: int) -> None:
    """One has moved something, another only counted, and the third has nothing."""
    worker = WorkerStats()
    assert worker.is_empty()
    worker.record_transfer(RESULT)
    assert not worker.is_empty()
    batch = {"nixl_transfer_bytes_total": {"read": 5}}
    told = [with_updates(worker.clone_and_reset(), dict(batch)), with_updates(None, dict(batch)), None][::order]
    assert worker.is_empty()
    outputs: list[Any] = [
        ModelRunnerOutput([], {}, kv_connector_output=KVConnectorOutput(kv_connector_stats=one)) for one in told
    ]

    output = KVOutputAggregator(len(outputs)).aggregate(outputs)
    assert output is not None
    assert output.kv_connector_output is not None
    found = output.kv_connector_output.kv_connector_stats
    assert isinstance(found, TelemetryStats)
    assert found.data[UPDATES] == {"nixl_transfer_bytes_total": {"read": 10}}
    assert found.num_successful_transfers == 1


def test_no_measurement_is_no_failure() -> None:
    """``None`` is recorded as nothing, in every version."""
    made = TelemetryStats()
    made.record_transfer(None)

    assert made.is_empty()


def test_the_log_line_is_vllm_s() -> None:
    """Our part alone does not make vLLM log a line full of zeros."""
    data = stats(nixl_transfer_bytes_total={"read": 5}).data

    assert NixlPullConnector.build_kv_connector_stats(data).is_empty()
    assert NixlPullConnector.build_kv_connector_stats().is_empty()


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry of the test's own."""
    return CollectorRegistry()


def prom_metrics(registry: CollectorRegistry, mode: TransferMode = TransferMode.PULL, own: bool = True) -> Any:
    """The metrics of an API server with two engines."""
    types = {cls: functools.partial(cls, registry=registry) for cls in (Gauge, Counter, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    return TelemetryPromMetrics(config, types, ["model_name", "engine"], ENGINES, mode, own)


def test_every_sample_is_labelled(registry: CollectorRegistry) -> None:
    """vLLM's and ours, for each engine."""
    prom_metrics(registry)

    samples = [sample for family in registry.collect() for sample in family.samples]
    assert {sample.name.split("_")[0] for sample in samples} == {"vllm:nixl", "nixl"}
    for sample in samples:
        assert sample.labels["transfer_mode"] == "pull"
        assert sample.labels["connector_version"] == str(connector_version())
        assert sample.labels["engine"] in ("0", "1")


def test_zeros_before_the_first_event(registry: CollectorRegistry) -> None:
    """Every closed set is there from the start, so that a rate sees the first event."""
    prom_metrics(registry)

    for metric in CATALOGUE.values():
        for labels in metric.initial_series(TransferMode.PULL):
            name = metric.name + ("_count" if metric.kind is Kind.HISTOGRAM else "")
            own = dict(zip(metric.label_names, labels, strict=True))
            common = {"model_name": "tiny", "engine": "1", "transfer_mode": "pull"}
            wanted = {**common, "connector_version": str(connector_version()), **own}
            assert registry.get_sample_value(name, wanted) == 0, (name, wanted)


def test_observe(registry: CollectorRegistry) -> None:
    """Updates that crossed the process boundary land in the right series."""
    metrics = prom_metrics(registry, TransferMode.PUSH)
    sent = stats(
        nixl_transfer_bytes_total={"write": 5},
        nixl_transfers_in_flight={"write": 2},
        nixl_handshake_duration_seconds={"timeout": [5.0, 5.1]},
        nixl_connector_info={"0.32.0\x1f1.5.1\x1fkv_both\x1fabc\x1ftrue": 1},
    )
    sent.record_transfer(RESULT)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.data))
    metrics.observe(received, 1)
    metrics.observe({**received, UPDATES: {"nixl_transfers_in_flight": {"write": -1}}}, 1)

    def value(name: str, **labels: str) -> float | None:
        common = {"model_name": "tiny", "engine": "1", "transfer_mode": "push"}
        return registry.get_sample_value(name, {**common, "connector_version": str(connector_version()), **labels})

    assert value("nixl_transfer_bytes_total", direction="write") == 5
    assert value("nixl_transfers_in_flight", direction="write") == 1
    assert value("nixl_handshake_duration_seconds_count", error_type="timeout") == 2
    assert value("nixl_handshake_duration_seconds_sum", error_type="timeout") == 10.1
    info = {"vllm_version": "0.32.0", "nixl_version": "1.5.1", "kv_role": "kv_both", "compat_hash": "abc"}
    assert value("nixl_connector_info", handshake_enforced="true", **info) == 1
    assert value("vllm:nixl_bytes_transferred_sum") == 20


def test_updates_that_nobody_knows_are_counted(registry: CollectorRegistry) -> None:
    """Hostile or newer data does not break the API server."""
    metrics = prom_metrics(registry)
    bad = {
        "nixl_unknown_total": {"x": 1},
        "nixl_transfer_bytes_total": {"read": "many"},
        "nixl_connector_info": {"a": 1},
    }
    metrics.observe({**NixlKVConnectorStats().data, UPDATES: bad}, 0)

    labels = {"model_name": "tiny", "engine": "0", "transfer_mode": "pull", "signal": "metrics"}
    labels["connector_version"] = str(connector_version())
    assert registry.get_sample_value("nixl_telemetry_errors_total", labels) == 3


def test_stock_data_is_observed(registry: CollectorRegistry) -> None:
    """Data without our part."""
    prom_metrics(registry).observe(NixlKVConnectorStats().data, 0)


def test_own_metrics_can_be_off(registry: CollectorRegistry) -> None:
    """vLLM's stay, with the labels."""
    prom_metrics(registry, own=False).observe(stats(nixl_transfer_bytes_total={"read": 5}).data, 0)

    assert {family.name.split("_")[0] for family in registry.collect()} == {"vllm:nixl"}


def test_metrics_can_be_made_twice_in_a_process() -> None:
    """vLLM builds its metrics anew for a second engine, and unregisters its own by name."""
    config = SimpleNamespace(kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}))
    types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    for connector in (NixlPullConnector, NixlPushConnector):
        for collector in [c for c in REGISTRY._collector_to_names if "vllm" in getattr(c, "_name", "")]:
            REGISTRY.unregister(collector)
        connector.build_prom_metrics(config, types, ["model_name", "engine"], {0: ["tiny", "0"]})

    labels = {"model_name": "tiny", "engine": "0", "connector_version": str(connector_version()), "direction": "write"}
    assert REGISTRY.get_sample_value("nixl_transfer_bytes_total", {**labels, "transfer_mode": "push"}) == 0
    assert REGISTRY.get_sample_value("nixl_transfer_bytes_total", {**labels, "transfer_mode": "pull"}) is None
