# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The table of metrics keeps the field's conventions."""

import math
import re

import pytest

from nixl_telemetry.signals.catalogue import (
    CATALOGUE,
    HANDSHAKE_DURATION,
    TRANSFER_DURATION,
    TRANSFER_OLDEST,
    Kind,
    Metric,
)
from nixl_telemetry.signals.semconv import TransferMode

METRICS = list(CATALOGUE.values())


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_name_and_unit(metric: Metric) -> None:
    """Prefix, base units, _total on counters only, no colon."""
    assert re.fullmatch(r"nixl_[a-z][a-z0-9_]*", metric.name)
    assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total")
    assert (metric.kind is Kind.STATE) == metric.name.endswith("_timestamp_seconds")
    assert (metric.kind in (Kind.HISTOGRAM, Kind.STATE)) == metric.name.endswith("_seconds")
    assert (metric.kind is Kind.INFO) == metric.name.endswith("_info")
    assert metric.help.endswith(".")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_cardinality(metric: Metric) -> None:
    """At most 100 series for each engine, where the sets are closed."""
    assert math.prod(max(1, len(label.values)) for label in metric.labels) <= 100


def test_forbidden_labels() -> None:
    """Nothing unbounded is a label."""
    names = {label.name for metric in METRICS for label in metric.labels}

    assert not names & {"request_id", "engine_id", "agent_name", "block_id", "message", "exception"}


@pytest.mark.parametrize("metric", [m for m in METRICS if m.kind is Kind.HISTOGRAM], ids=lambda metric: metric.name)
def test_buckets_ascend(metric: Metric) -> None:
    """Edges ascend, with one at a second: the default threshold for slow."""
    assert list(metric.buckets) == sorted(set(metric.buckets))
    assert 1.0 in metric.buckets


def test_initial_series() -> None:
    """Closed sets start at 0, in the direction of the mode; open sets do not."""
    assert ("",) in HANDSHAKE_DURATION.initial_series(TransferMode.PULL)
    assert {labels[0] for labels in TRANSFER_DURATION.initial_series(TransferMode.PULL)} == {"read"}
    assert {labels[0] for labels in TRANSFER_DURATION.initial_series(TransferMode.PUSH)} == {"write"}
    assert list(TRANSFER_OLDEST.initial_series(TransferMode.PULL)) == [("read", "0")]
    assert list(CATALOGUE["nixl_connector_info"].initial_series(TransferMode.PULL)) == []
