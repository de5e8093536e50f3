# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What the real OpenTelemetry SDK sends arrives whole, over both protocols."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from nixl_telemetry.testbed.black_hole import BlackHole
from nixl_telemetry.testbed.otlp_receiver import OtlpReceiver


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as running:
        yield running


def _exporter(receiver: OtlpReceiver, how: str) -> SpanExporter:
    if how == "grpc":
        return GrpcExporter(endpoint=receiver.grpc_endpoint, insecure=True)
    return HttpExporter(endpoint=receiver.http_endpoint, compression=Compression(how))


def _provider(exporter: SpanExporter) -> TracerProvider:
    provider = TracerProvider(resource=Resource({"service.name": "decode", "ranks": (0, 1)}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.mark.parametrize("how", ["grpc", "none", "gzip", "deflate"])
def test_every_field_of_a_span_arrives(receiver: OtlpReceiver, how: str) -> None:
    provider = _provider(_exporter(receiver, how))
    tracer = provider.get_tracer("nixl_telemetry", "1.2.3", schema_url="https://example.org/1", attributes={"a": 1})
    attributes: dict[str, Any] = {"text": "x", "yes": True, "int": 3, "float": 0.5, "list": ("a", "b")}
    parent = tracer.start_span("parent")
    span = tracer.start_span(
        "child",
        context=trace.set_span_in_context(parent),
        kind=trace.SpanKind.CONSUMER,
        attributes=attributes,
        links=[trace.Link(parent.get_span_context(), {"why": "lease"})],
        start_time=1_000,
    )
    span.add_event("polled", {"state": "PROC"}, timestamp=1_500)
    span.set_status(trace.StatusCode.ERROR, "it broke")
    span.end(end_time=2_000_001_000)
    parent.end()
    receiver.wait_for(lambda spans: len(spans) == 2)
    provider.shutdown()

    (received,) = receiver.spans("child")
    assert (received.kind, received.status, received.status_message) == ("CONSUMER", "ERROR", "it broke")
    assert (received.start_ns, received.end_ns, received.seconds) == (1_000, 2_000_001_000, 2.0)
    assert received.trace_id == f"{span.get_span_context().trace_id:032x}"
    assert received.span_id == f"{span.get_span_context().span_id:016x}"
    assert received.parent_span_id == f"{parent.get_span_context().span_id:016x}"
    assert received.attributes == attributes
    assert {name: type(value) for name, value in received.attributes.items()} == {
        name: type(value) for name, value in attributes.items()
    }
    assert received.resource == {"service.name": "decode", "ranks": (0, 1)}
    assert (received.scope.name, received.scope.version) == ("nixl_telemetry", "1.2.3")
    assert (received.scope.schema_url, received.scope.attributes) == ("https://example.org/1", {"a": 1})
    (event,) = received.events
    assert (event.name, event.time_ns, event.attributes) == ("polled", 1_500, {"state": "PROC"})
    (link,) = received.links
    assert (link.trace_id, link.span_id) == (received.trace_id, received.parent_span_id)
    assert link.attributes == {"why": "lease"}
    (root,) = receiver.spans("parent")
    assert (root.parent_span_id, root.status, root.kind) == ("", "UNSET", "INTERNAL")


def test_waiting_in_vain_says_what_came(receiver: OtlpReceiver) -> None:
    provider = _provider(_exporter(receiver, "gzip"))
    provider.get_tracer("test").start_span("other").end()
    provider.shutdown()

    with pytest.raises(TimeoutError, match=r"within 0\.1 s; 1 requests brought 1 spans: \['other'\]"):
        receiver.wait_for(lambda spans: any(span.name == "nixl.transfer" for span in spans), timeout=0.1)


def test_clear_forgets(receiver: OtlpReceiver) -> None:
    provider = _provider(_exporter(receiver, "none"))
    provider.get_tracer("test").start_span("one").end()
    provider.shutdown()
    assert receiver.requests == 1

    receiver.clear()

    assert (receiver.spans(), receiver.requests) == ((), 0)


@pytest.mark.parametrize(("path", "body", "status"), [("/v1/metrics", b"", 404), ("/v1/traces", b"\xff", 400)])
def test_what_is_not_a_trace_export_is_refused(receiver: OtlpReceiver, path: str, body: bytes, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{receiver.http_port}{path}", body, timeout=5)

    with refused.value:
        assert refused.value.code == status


def test_a_closed_receiver_frees_its_ports() -> None:
    with OtlpReceiver() as receiver:
        ports = (receiver.grpc_port, receiver.http_port)

    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_a_black_hole_takes_the_connection_and_says_nothing() -> None:
    with BlackHole() as hole:
        exporter = HttpExporter(endpoint=f"{hole.endpoint}/v1/traces", timeout=1)
        span = _provider(exporter).get_tracer("test").start_span("lost")
        span.end = lambda *_, **__: None  # type: ignore[method-assign] # only its data is needed
        begin = time.monotonic()

        result = exporter.export([span._readable_span()])  # type: ignore[attr-defined]

        assert result is SpanExportResult.FAILURE
        assert time.monotonic() - begin > 0.8
        assert hole.connections >= 1
        exporter.shutdown()  # type: ignore[no-untyped-call] # the SDK's
