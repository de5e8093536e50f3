# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans: ids, clocks, sampling, and which exporter the standard variables ask for."""

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk._configuration import _get_exporter_names
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, DEFAULT_ON, ParentBased
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from nixl_telemetry import __version__
from nixl_telemetry.settings import Settings
from nixl_telemetry.signals import exporters
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.description import Description, Span
from nixl_telemetry.signals.exporters import GrpcExporter, HttpExporter
from nixl_telemetry.signals.propagation import NOTHING, read, written
from nixl_telemetry.signals.semconv import ErrorType, SpanName
from nixl_telemetry.signals.traces import SpanWriter
from tests.support.observed import Collector, Observed
from tests.support.peers import wait_until

Writer = Callable[..., SpanWriter]


@pytest.fixture
def writer(collector: Collector) -> Writer:
    """Makes span writers that export to the collector."""

    def make(**settings: Any) -> SpanWriter:
        return SpanWriter(
            {},
            Settings.load({"telemetry": settings}, {}),
            None,
            lambda count: None,
            lambda error: pytest.fail(str(error)),
        )

    return make


def span(*children: Span, start_ns: int = 0, seconds: float = 1, **fields: Any) -> Span:
    """A span of a second."""
    start = start_ns or now_ns()
    end = start + int(seconds * 1e9)
    return Span(SpanName.HANDSHAKE, SpanKind.CLIENT, start, end, children=children, **fields)


def context(*, sampled: bool) -> SpanContext:
    """A caller's."""
    return SpanContext(0xABC, 0xDEF, True, TraceFlags(1 if sampled else 0))


@pytest.mark.parametrize("sampled", [None, True, False])
def test_the_default_sampler_decides_as_if_it_were_asked(writer: Writer, sampled: bool | None) -> None:
    """It is not, since asking takes a while; another one of the same kind is."""
    parent = None if sampled is None else context(sampled=sampled)
    contexts = []
    for sampler in (DEFAULT_ON, ParentBased(ALWAYS_ON)):
        spans = writer()
        spans.__dict__["_provider"] = TracerProvider(sampler=sampler, shutdown_on_exit=False)
        contexts.append(spans.new_context(parent, SpanName.RECEIVE, SpanKind.CONSUMER))

    quick, asked = contexts
    assert (quick.trace_flags, quick.trace_state, quick.is_remote) == (
        asked.trace_flags,
        asked.trace_state,
        asked.is_remote,
    )
    assert quick.trace_id == asked.trace_id or parent is None


def test_ids_do_not_come_from_the_global_generator(writer: Writer) -> None:
    """vLLM seeds it alike in every worker: P and D would have the same ids, and drawing would change its draws."""
    ids = []
    for _ in range(2):
        random.seed(0)
        written = writer().write(span())
        assert written is not None
        ids.append((written.trace_id, written.span_id))
        drawn = random.random()
        random.seed(0)
        assert drawn == random.random()

    assert ids[0] != ids[1]


def test_a_clock_step_does_not_tear_a_tree(
    writer: Writer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wall clock jumps with every look at it; durations and nesting stay."""
    wall = iter(range(10**18, 2 * 10**18, 3_600 * 10**9))
    monkeypatch.setattr("time.time_ns", lambda: next(wall))
    start = now_ns()
    tree = writer()

    tree.write(span(span(start_ns=start), start_ns=start))

    assert tree.flush(5)
    parent, child = collector.spans()
    assert (child.start_ns, child.end_ns) == (parent.start_ns, parent.end_ns)
    assert parent.end_ns - parent.start_ns == 1_000_000_000
    assert child.parent_span_id == parent.span_id


def test_scope_and_resource(writer: Writer, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Name, version and schema of the instrumentation; the resource is that of the process's provider."""
    provider = TracerProvider(resource=Resource({"service.name": "vllm"}), shutdown_on_exit=False)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    one = writer()
    one.write(span())

    assert one.flush(5)
    (sent,) = collector.spans()
    assert (sent.scope.name, sent.scope.version) == ("nixl_telemetry", __version__)
    assert sent.scope.schema_url.startswith("https://opentelemetry.io/schemas/")
    assert sent.resource == {"service.name": "vllm"}


def test_a_collector_that_hangs_does_not_take_the_file_s_time(
    writer: Writer, collector: Collector, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What ends has one time limit for all that it sends to."""
    hang = threading.Event()
    monkeypatch.setattr(collector, "send", lambda message: hang.wait(10))
    one = writer(trace_file=str(tmp_path / "t.jsonl"))
    one.write(span())
    begin = time.monotonic()
    one.close(0.5)

    assert time.monotonic() - begin < 3
    assert (tmp_path / "t.jsonl").read_text().count('"traceId"') == 1
    hang.set()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_says_what_process_it_is(writer: Writer) -> None:
    """Where the process has no provider of its own, the resource tells the process's id."""
    one = writer()
    assert one._provider.resource.attributes["vllm.process_id"] == str(os.getpid())
    child = os.fork()
    if child == 0:
        os._exit(one._provider.resource.attributes["vllm.process_id"] != str(os.getpid()))

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_parent_and_links(writer: Writer, collector: Collector) -> None:
    """A span goes on in its caller's trace, and points at others."""
    one = writer()
    mine = one.new_context(context(sampled=True), SpanName.RECEIVE, SpanKind.CONSUMER)
    one.write(span(context=mine, parent=context(sampled=True), links=(context(sampled=True),)))

    assert one.flush(5)
    (sent,) = collector.spans()
    assert (sent.trace_id, sent.parent_span_id) == (f"{0xABC:032x}", f"{0xDEF:016x}")
    assert sent.span_id == f"{mine.span_id:016x}"
    assert [(link.trace_id, link.span_id) for link in sent.links] == [(f"{0xABC:032x}", f"{0xDEF:016x}")]


@pytest.mark.parametrize(
    ("sampled", "fields", "settings", "kept"),
    [
        (True, {}, {}, ""),
        (False, {}, {}, None),
        (False, {"error": ErrorType.TIMEOUT}, {}, "failed"),
        (False, {"slow": True}, {}, "slow"),
        (False, {"slow": True, "error": ErrorType.TIMEOUT}, {}, "failed"),
        (False, {"error": ErrorType.TIMEOUT}, {"keep_failed": False}, None),
    ],
)
def test_sampling_follows_the_caller_and_keeps_failures(
    writer: Writer, collector: Collector, sampled: bool, fields: Any, settings: Any, kept: str | None
) -> None:
    """What was not sampled is exported only if it failed or was slow, and says why."""
    one = writer(**settings)
    one.write(span(parent=context(sampled=sampled), **fields))

    assert one.flush(5)
    assert [sent.attributes.get("nixl.kept", "") for sent in collector.spans()] == ([] if kept is None else [kept])


@pytest.mark.parametrize(
    ("sampler", "argument", "parent", "expected"),
    [
        ("", "", None, True),
        ("always_off", "", None, False),
        ("always_off", "", True, False),
        ("parentbased_always_off", "", True, True),
        ("parentbased_traceidratio", "0", None, False),
        ("traceidratio", "1", False, True),
    ],
)
def test_the_standard_samplers(
    writer: Writer, monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str, parent: bool | None, expected: bool
) -> None:
    """As OTEL_TRACES_SAMPLER says, where no provider was set up."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler or "parentbased_always_on")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    caller = None if parent is None else context(sampled=parent)

    made = writer().new_context(caller, SpanName.LEASE, SpanKind.PRODUCER)

    assert bool(made.trace_flags.sampled) is expected
    carried = writer().new_carried(written(caller) if caller else NOTHING, SpanName.LEASE, SpanKind.PRODUCER)
    told = read(carried)
    assert told is not None
    assert bool(told.trace_flags.sampled) is expected
    assert caller is None or told.trace_id == caller.trace_id


def test_the_provider_s_sampler(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's provider decides, where there is one."""
    provider = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)

    assert not writer().new_context(None, SpanName.LEASE, SpanKind.PRODUCER).trace_flags.sampled


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
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "otlp_proto_http"}, HttpExporter),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "console, otlp_proto_http"}, HttpExporter),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "otlp_proto_grpc,otlp_proto_http"}, GrpcExporter),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, None),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_exporter_of_the_environment(environ: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an endpoint there is none: nothing goes where nobody asked for."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    assert exporters.is_configured(None) is (expected is not None)
    if expected is not None:
        exporter = exporters.connect(None)
        assert type(exporter) is expected
        exporter.shutdown()


@pytest.mark.parametrize("exporter", [None, "otlp", "otlp_proto_grpc", " otlp_proto_http"])
@pytest.mark.parametrize("for_traces", [None, "", "grpc", "http/protobuf "])
@pytest.mark.parametrize("for_all", [None, "grpc", "http/protobuf"])
def test_protocol_as_the_sdk_decides(
    exporter: str | None,
    for_traces: str | None,
    for_all: str | None,
    observed: Observed,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The exporter's name, the variable for traces, the one for all; both warn where the name says otherwise."""
    environ = {
        "OTEL_TRACES_EXPORTER": exporter,
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": for_traces,
        "OTEL_EXPORTER_OTLP_PROTOCOL": for_all,
    }
    for name, value in environ.items():
        if value is not None:
            monkeypatch.setenv(name, value)
    ours = exporters.connect(None)
    ours.shutdown()
    if exporter is None:
        # Without a name the SDK sends nothing at all; the suite takes the standard's default.
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    (theirs,) = _get_exporter_names("traces")

    assert type(ours) is {"otlp_proto_grpc": GrpcExporter, "otlp_proto_http": HttpExporter}[theirs]
    their_lines = [record for record in caplog.records if record.name == "opentelemetry.sdk._configuration"]
    assert len(observed.lines) == len(their_lines)


def test_a_protocol_that_the_exporter_s_name_overrules(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says which one is taken."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp_proto_http")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    assert isinstance(exporters.connect(None), HttpExporter)

    assert observed.messages() == [
        "OTEL_TRACES_EXPORTER=otlp_proto_http is taken, though OTEL_EXPORTER_OTLP_*PROTOCOL asks for grpc"
    ]


def test_vllm_s_endpoint_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several API servers vLLM leaves the engine's processes without a provider; it reads this variable only."""
    ignored = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_TRACES_EXPORTER": "otlp_proto_http"}
    for name, value in {**ENDPOINT, **ignored}.items():
        monkeypatch.setenv(name, value)
    assert isinstance(exporters.connect("http://127.0.0.1:2"), GrpcExporter)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")

    exporter = exporters.connect("http://127.0.0.1:2/v1/traces")

    assert isinstance(exporter, HttpExporter)
    assert exporter._endpoint == "http://127.0.0.1:2/v1/traces"


@pytest.mark.parametrize(
    ("text", "seconds"), [(None, 5), ("", 5), ("200", 0.2), ("0", 5), ("-1", 5), ("1.5", 5), ("soon", 5)]
)
def test_how_long_spans_are_gathered(text: str | None, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the standard says."""
    monkeypatch.delenv("OTEL_BSP_SCHEDULE_DELAY", raising=False)
    if text is not None:
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", text)

    assert exporters.seconds_between_messages() == seconds


def test_spans_leave_as_soon_as_nothing_follows(observed: Observed) -> None:
    """vLLM kills its workers too early for an export at exit."""
    observed.telemetry.emit(lambda: Description(span()))

    assert wait_until(lambda: len(observed.collector.spans()) == 1, 2)


def test_without_an_exporter_there_is_no_span() -> None:
    """And no thread for one."""
    one = SpanWriter({}, Settings.load({}, {}), None, lambda count: None, lambda error: None)

    assert one.write(span()) is None
    assert not one.is_exporting


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_has_ids_of_its_own(writer: Writer) -> None:
    """vLLM forks its workers: two of them must not draw the same ones."""
    one = writer()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, str(one.new_context(None, SpanName.LEASE, SpanKind.PRODUCER).span_id).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        theirs = int(pipe.read())

    assert theirs != one.new_context(None, SpanName.LEASE, SpanKind.PRODUCER).span_id
