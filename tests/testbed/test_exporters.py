# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans and spans of blocks over real OTLP, set up by the standard variables as the SDK's own exporter would be."""

from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.trace import SpanKind

from nixl_telemetry.settings import Settings
from nixl_telemetry.signals.description import Span
from nixl_telemetry.signals.moves import BlockMoves
from nixl_telemetry.signals.semconv import SpanName
from nixl_telemetry.signals.traces import SpanWriter
from nixl_telemetry.testbed import BlackHole, OtlpReceiver, unreachable_port


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    """A real receiver."""
    with OtlpReceiver() as receiver:
        yield receiver


class Outcome:
    """A span writer, and what it tells of its failures."""

    def __init__(self, endpoint: str | None) -> None:
        self.lost: list[int] = []
        self.errors: list[Exception] = []
        self.writer = SpanWriter({}, Settings.load({}, {}), endpoint, self.lost.append, self.errors.append)

    def send(self) -> None:
        """Send a transfer with three blocks."""
        moves = BlockMoves([[1, 2, 3]], [[4, 5, 6]])
        self.writer.write(Span(SpanName.TRANSFER, SpanKind.CLIENT, 1, 2, blocks=moves))
        assert self.writer.flush(20)
        self.writer.close(1)


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_as_the_variables_say(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    """Endpoint, protocol, headers, compression, service name."""
    is_grpc = protocol == "grpc"
    endpoint = receiver.grpc_endpoint if is_grpc else receiver.http_endpoint.removesuffix("/v1/traces")
    for name, value in {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=fleet-7",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_SERVICE_NAME": "decode",
    }.items():
        monkeypatch.setenv(name, value)
    outcome = Outcome(None)
    outcome.send()

    transfer, *blocks = receiver.spans()
    assert [transfer.name, *(block.name for block in blocks)] == ["nixl.transfer", *["nixl.block"] * 3]
    assert {span.resource["service.name"] for span in receiver.spans()} == {"decode"}
    assert {block.parent_span_id for block in blocks} == {transfer.span_id}
    assert (outcome.lost, outcome.errors) == ([], [])
    (headers,) = receiver.headers
    assert headers["x-tenant"] == "fleet-7"
    if not is_grpc:  # gRPC's own transport says so where no server sees it
        assert headers["content-encoding"] == "gzip"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_vllm_s_endpoint(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    """It wins over the variable, and is used as vLLM uses it."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    Outcome(receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint).send()

    assert len(receiver.spans()) == 4


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
@pytest.mark.parametrize("fault", ["nobody there", "no answer"])
def test_what_cannot_be_sent_is_counted(monkeypatch: pytest.MonkeyPatch, protocol: str, fault: str) -> None:
    """One error, and each span."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    place: Any = unreachable_port() if fault == "nobody there" else BlackHole()
    with place:
        port = place.ports[0] if fault == "nobody there" else place.port
        outcome = Outcome(f"http://127.0.0.1:{port}" + ("" if protocol == "grpc" else "/v1/traces"))
        outcome.send()

    assert outcome.lost == [4]
    assert len(outcome.errors) == 1
