# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans: ids, clocks, and which exporter the standard variables ask for."""

import random
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import ProxyTracerProvider, SpanKind

from nixl_telemetry import __version__
from nixl_telemetry.signals import traces
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.description import Description, Span
from nixl_telemetry.signals.semconv import SpanName
from nixl_telemetry.signals.traces import SpanWriter
from tests.support.observed import Observed
from tests.support.peers import wait_until


def span(*children: Span, start_ns: int = 0) -> Span:
    """A span of a second."""
    start = start_ns or now_ns()
    return Span(SpanName.HANDSHAKE, SpanKind.CLIENT, start, start + 1_000_000_000, children=children)


def test_ids_do_not_come_from_the_global_generator(exporter: InMemorySpanExporter) -> None:
    """vLLM seeds it alike in every worker: P and D would have the same ids, and drawing would change its draws."""
    ids = []
    for _ in range(2):
        random.seed(0)
        context = SpanWriter({}).write(span())
        assert context is not None
        ids.append((context.trace_id, context.span_id))
        drawn = random.random()
        random.seed(0)
        assert drawn == random.random()

    assert ids[0] != ids[1]


def test_a_clock_step_does_not_tear_a_tree(exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock jumps with every look at it; durations and nesting stay."""
    wall = iter(range(10**18, 2 * 10**18, 3_600 * 10**9))
    monkeypatch.setattr("time.time_ns", lambda: next(wall))
    start = now_ns()

    SpanWriter({}).write(span(span(start_ns=start), start_ns=start))

    child, parent = exporter.get_finished_spans()
    assert (child.start_time, child.end_time) == (parent.start_time, parent.end_time)
    assert (parent.end_time or 0) - (parent.start_time or 0) == 1_000_000_000


def test_scope(exporter: InMemorySpanExporter) -> None:
    """Name, version and schema of the instrumentation."""
    SpanWriter({}).write(span())

    (finished,) = exporter.get_finished_spans()
    scope = finished.instrumentation_scope
    assert scope is not None
    assert (scope.name, scope.version) == ("nixl_telemetry", __version__)
    assert str(scope.schema_url).startswith("https://opentelemetry.io/schemas/")


ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
TRACES_ENDPOINT = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (ENDPOINT, GrpcExporter),
        (TRACES_ENDPOINT, GrpcExporter),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, HttpExporter),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}, HttpExporter),
        ({**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, GrpcExporter),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": ""}, GrpcExporter),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "otlp,console"}, GrpcExporter),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, None),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_exporter_of_the_environment(environ: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an endpoint there is none: nothing goes where nobody asked for."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    exporter = traces._exporter(None)

    assert (exporter is None) if expected is None else isinstance(exporter, expected)
    if exporter is not None:
        exporter.shutdown()


def test_vllm_s_endpoint_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several API servers vLLM leaves the engine's processes without a provider; it reads this variable only."""
    for name, value in {**ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}.items():
        monkeypatch.setenv(name, value)
    assert isinstance(traces._exporter("http://127.0.0.1:2"), GrpcExporter)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")

    exporter = traces._exporter("http://127.0.0.1:2/v1/traces")

    assert isinstance(exporter, HttpExporter)
    assert exporter._endpoint == "http://127.0.0.1:2/v1/traces"


def test_spans_leave_as_soon_as_nothing_follows(
    exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, observed: Observed
) -> None:
    """vLLM kills its workers too early for an export at exit, and the SDK's pace is 5 s."""
    flushed: list[str] = []
    monkeypatch.setattr(SpanWriter, "flush", lambda self: flushed.append("flush"))
    observed.telemetry.emit(lambda: Description(span()))

    assert wait_until(lambda: flushed == ["flush"], 5)


def test_a_slow_exporter_is_left_to_its_own_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log lines wait behind a flush, so one that hangs is not asked again soon."""
    monkeypatch.setattr(traces, "_QUICK_SECONDS", 0.0)
    writer = SpanWriter({})
    writer._tracer = trace.NoOpTracer()
    flushed: list[str] = []
    monkeypatch.setattr(writer, "flush", lambda: flushed.append("flush"))
    for _ in range(3):
        writer.flush_if_quick()

    assert flushed == ["flush"]


def test_without_an_exporter_there_is_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no thread for one."""
    monkeypatch.setattr(trace, "get_tracer_provider", ProxyTracerProvider)

    assert SpanWriter({}).write(span()) is None
