# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""One scrape of a metrics endpoint, parsed as Prometheus would."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


@dataclass(frozen=True)
class MetricsSnapshot:
    """What a server exposed at one moment.

    Attributes:
        text: The exposition as it was served.
    """

    text: str

    @cached_property
    def families(self) -> tuple[Metric, ...]:
        """The metric families; the parser strips ``_total`` from the names of counters."""
        parsed: Iterable[Metric] = text_string_to_metric_families(self.text)
        return tuple(parsed)

    @cached_property
    def samples(self) -> tuple[Sample, ...]:
        """Every sample."""
        return tuple(sample for family in self.families for sample in family.samples)

    def select(self, name: str, **labels: str) -> tuple[Sample, ...]:
        """Returns the samples called *name*, suffix included, that carry all of *labels*."""
        return tuple(
            sample for sample in self.samples if sample.name == name and labels.items() <= sample.labels.items()
        )

    def value(self, name: str, **labels: str) -> float | None:
        """Returns the sum over ``select``, or ``None`` when nothing matches."""
        matching = self.select(name, **labels)
        return sum(sample.value for sample in matching) if matching else None
