# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A hub whose spans, log lines and metric updates can be read back."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from nixl_telemetry.settings import CONFIG_KEY, Settings
from nixl_telemetry.signals import traces
from nixl_telemetry.signals.attributes import Attributes
from nixl_telemetry.signals.logger import LOGGER_NAME
from nixl_telemetry.signals.metrics import label_values
from nixl_telemetry.signals.otlp import Message
from nixl_telemetry.signals.semconv import TransferMode
from nixl_telemetry.signals.telemetry import Telemetry
from nixl_telemetry.testbed import ReceivedSpan
from nixl_telemetry.testbed.otlp_spans import decode


@dataclass
class Collector:
    """What the process exports its spans to."""

    requests: list[ExportTraceServiceRequest] = field(default_factory=list)

    def send(self, message: Message) -> None:
        """Keep a batch."""
        self.requests.append(ExportTraceServiceRequest.FromString(message.data))

    def shutdown(self) -> None:
        """Nothing is open."""

    def spans(self) -> list[ReceivedSpan]:
        """The spans that came, parents before their children."""
        for request in self.requests:
            for span in _spans_of(request):
                keys = [attribute.key for attribute in span.attributes]
                assert len(set(keys)) == len(keys), keys
        return [span for request in self.requests for span in decode(request)]


def _spans_of(request: ExportTraceServiceRequest) -> Iterator[OtlpSpan]:
    for of_resource in request.resource_spans:
        for of_scope in of_resource.scope_spans:
            yield from of_scope.spans


@dataclass
class Observed:
    """A hub and what came out of it."""

    telemetry: Telemetry
    collector: Collector
    lines: list[logging.LogRecord] = field(default_factory=list)

    def settle(self) -> None:
        """Wait until all that was handed over is exported."""
        assert self.telemetry._export.run(lambda: None, 5)
        assert self.telemetry.spans.flush(5)

    def spans(self) -> list[ReceivedSpan]:
        """The exported spans, parents before their children."""
        self.settle()
        return self.collector.spans()

    def span(self, name: str) -> ReceivedSpan:
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
def collector(monkeypatch: pytest.MonkeyPatch) -> Collector:
    """What every hub of this process exports to."""
    collector = Collector()
    monkeypatch.setattr(traces, "is_configured", lambda endpoint: True)
    monkeypatch.setattr(traces, "connect", lambda endpoint: collector)
    return collector


@contextmanager
def observing(
    collector: Collector, settings: Mapping[str, Any] | None = None, attributes: Attributes | None = None
) -> Iterator[Observed]:
    """A hub of a pull connector, until the end.

    Args:
        collector: What it exports to.
        settings: Those that differ from the defaults.
        attributes: Of every span and log line; by default an engine id only.
    """
    common = {"nixl.engine.id": "here"} if attributes is None else attributes
    telemetry = Telemetry(Settings.load({CONFIG_KEY: settings or {}}, {}), TransferMode.PULL, common)
    observed = Observed(telemetry, collector)
    handler = Collect(observed.lines)
    logger = logging.getLogger(LOGGER_NAME)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield observed
    logger.removeHandler(handler)
    logger.setLevel(level)
    telemetry.close()


@pytest.fixture
def observed(collector: Collector) -> Iterator[Observed]:
    """A hub with the default settings."""
    with observing(collector) as hub:
        yield hub
