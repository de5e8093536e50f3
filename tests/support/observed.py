# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A hub whose spans, log lines and metric updates can be read back."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from nixl_telemetry.settings import Settings
from nixl_telemetry.signals.logger import LOGGER_NAME
from nixl_telemetry.signals.metrics import label_values
from nixl_telemetry.signals.semconv import TransferMode
from nixl_telemetry.signals.telemetry import Telemetry


@dataclass
class Observed:
    """A hub and what came out of it."""

    telemetry: Telemetry
    exporter: InMemorySpanExporter
    lines: list[logging.LogRecord] = field(default_factory=list)

    def settle(self) -> None:
        """Wait until all that was handed over is exported."""
        assert self.telemetry._export.run(lambda: None, 5)

    def spans(self) -> list[ReadableSpan]:
        """The exported spans, children before their parents."""
        self.settle()
        return list(self.exporter.get_finished_spans())

    def span(self, name: str) -> ReadableSpan:
        """The only span of this name."""
        (span,) = [span for span in self.spans() if span.name == name]
        return span

    def messages(self) -> list[str]:
        """The log lines."""
        self.settle()
        return [record.getMessage() for record in self.lines]

    def updates(self) -> dict[tuple[str, ...], Any]:
        """The metric updates since the last call, by (name, *labels)."""
        self.settle()
        batch = self.telemetry.drain() or {}
        return {(name, *label_values(key)): value for name, series in batch.items() for key, value in series.items()}


class Collect(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, records: list[logging.LogRecord]) -> None:
        super().__init__(logging.DEBUG)
        self.records = records

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record."""
        self.records.append(record)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What the process's tracer provider exports to."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter


@pytest.fixture
def observed(exporter: InMemorySpanExporter) -> Iterator[Observed]:
    """A hub of a pull connector."""
    telemetry = Telemetry(Settings.load({}, {}), TransferMode.PULL, {"nixl.engine.id": "here"})
    observed = Observed(telemetry, exporter)
    handler = Collect(observed.lines)
    logger = logging.getLogger(LOGGER_NAME)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield observed
    logger.removeHandler(handler)
    logger.setLevel(level)
    telemetry.close()
