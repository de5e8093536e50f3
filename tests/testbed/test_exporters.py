# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans and spans of blocks over real OTLP, set up by the standard variables as the SDK's own exporter would be."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from opentelemetry.trace import SpanKind

from nixl_telemetry.settings import Settings
from nixl_telemetry.signals.description import Span
from nixl_telemetry.signals.moves import BlockMoves
from nixl_telemetry.signals.semconv import SpanName
from nixl_telemetry.signals.traces import SpanWriter
from nixl_telemetry.testbed import LOOPBACK, BlackHole, OtlpReceiver, Relay, ServerTls, unreachable_port
from tests.support.certificates import Authority, Identity

_GENERAL: Final = "OTEL_EXPORTER_OTLP_"
_TRACES: Final = "OTEL_EXPORTER_OTLP_TRACES_"

both_protocols = pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
both_prefixes = pytest.mark.parametrize("prefix", [_GENERAL, _TRACES])


@pytest.fixture(autouse=True)
def only_what_a_test_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the standard's, and nobody else's authorities: ``requests`` takes its own variables first."""
    for name in tuple(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


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


def endpoint(receiver: OtlpReceiver, protocol: str, prefix: str) -> str:
    """What the variable with this prefix takes: the one for all signals has no path."""
    if protocol == "grpc":
        return receiver.grpc_endpoint
    return receiver.http_endpoint if prefix == _TRACES else receiver.http_endpoint.removesuffix("/v1/traces")


def ask_for(
    monkeypatch: pytest.MonkeyPatch, receiver: OtlpReceiver, protocol: str, prefix: str, **variables: object
) -> None:
    """Set variables with this prefix, by their last words."""
    variables = {"PROTOCOL": protocol, "ENDPOINT": endpoint(receiver, protocol, prefix), **variables}
    for name, value in variables.items():
        monkeypatch.setenv(prefix + name, str(value))


def assert_sent(outcome: Outcome, receiver: OtlpReceiver) -> None:
    """All spans arrived."""
    assert (len(receiver.spans()), outcome.lost, outcome.errors) == (4, [], [])


def assert_lost(outcome: Outcome, receiver: OtlpReceiver) -> None:
    """None did, and that is known."""
    assert (receiver.spans(), outcome.lost, len(outcome.errors)) == ((), [4], 1)


@both_protocols
def test_as_the_variables_say(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    """Endpoint, protocol, headers, compression, service name."""
    for name, value in {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint(receiver, protocol, _GENERAL),
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
    if protocol != "grpc":  # gRPC's own transport says so where no server sees it
        assert headers["content-encoding"] == "gzip"


@both_protocols
def test_vllm_s_endpoint(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    """It wins over the variable, and is used as vLLM uses it."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", protocol)
    Outcome(receiver.grpc_endpoint if protocol == "grpc" else receiver.http_endpoint).send()

    assert len(receiver.spans()) == 4


@both_protocols
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


@both_protocols
def test_headers_for_traces_come_before_those_for_all(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """They replace them: nothing is added up."""
    monkeypatch.setenv(f"{_TRACES}ENDPOINT", endpoint(receiver, protocol, _TRACES))
    monkeypatch.setenv(f"{_TRACES}PROTOCOL", protocol)
    monkeypatch.setenv(f"{_GENERAL}HEADERS", "x-tenant=all,x-team=infra")
    monkeypatch.setenv(f"{_TRACES}HEADERS", "x-tenant=fleet-7")
    Outcome(None).send()

    (headers,) = receiver.headers
    assert (headers["x-tenant"], headers.get("x-team")) == ("fleet-7", None)


@both_protocols
@pytest.mark.parametrize(
    ("environ", "is_small"),
    [
        ({}, False),
        ({f"{_GENERAL}COMPRESSION": "gzip"}, True),
        ({f"{_TRACES}COMPRESSION": "gzip"}, True),
        # gRPC's exporter knows no other way, and refuses this one where it looks at it.
        ({f"{_GENERAL}COMPRESSION": "unheard-of", f"{_TRACES}COMPRESSION": "gzip"}, True),
    ],
)
def test_compression(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch, protocol: str, environ: dict[str, str], is_small: bool
) -> None:
    """Seen in what goes over the wire: a server is not told by gRPC."""
    environ = {**environ, f"{_TRACES}PROTOCOL": protocol, "OTEL_SERVICE_NAME": "x" * 50_000}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    port = receiver.grpc_port if protocol == "grpc" else receiver.http_port
    with Relay(port) as relay:
        monkeypatch.setenv(f"{_GENERAL}ENDPOINT", f"http://{LOOPBACK}:{relay.port}")
        Outcome(None).send()

    assert {span.resource["service.name"] for span in receiver.spans()} == {"x" * 50_000}
    assert (relay.sent < 10_000) is is_small


# ----------------------------------------------------------------------------------------------------------------- TLS


@dataclass(frozen=True)
class Certificates:
    """Of a collector and its clients, and one that has nothing to do with them."""

    authority: Path
    server: Identity
    client: Identity
    stranger: Path


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """Made once."""
    folder = tmp_path_factory.mktemp("certificates")
    authority = Authority(folder, "authority")
    stranger = Authority(folder, "stranger").certificate
    return Certificates(authority.certificate, authority.issue("server"), authority.issue("client"), stranger)


@pytest.fixture
def tls(certificates: Certificates) -> Iterator[OtlpReceiver]:
    """A receiver that speaks TLS."""
    with OtlpReceiver(ServerTls(certificates.server.certificate, certificates.server.key)) as receiver:
        yield receiver


@pytest.fixture
def mutual_tls(certificates: Certificates) -> Iterator[OtlpReceiver]:
    """One that wants to see a certificate, too."""
    server = certificates.server
    with OtlpReceiver(ServerTls(server.certificate, server.key, certificates.authority)) as receiver:
        yield receiver


@both_protocols
@both_prefixes
def test_tls(
    tls: OtlpReceiver, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, protocol: str, prefix: str
) -> None:
    """To a collector whose authority is given."""
    ask_for(monkeypatch, tls, protocol, prefix, CERTIFICATE=certificates.authority)
    outcome = Outcome(None)
    outcome.send()

    assert_sent(outcome, tls)


@both_protocols
@both_prefixes
def test_mutual_tls(
    mutual_tls: OtlpReceiver, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, protocol: str, prefix: str
) -> None:
    """To one that wants to know who sends."""
    ask_for(
        monkeypatch,
        mutual_tls,
        protocol,
        prefix,
        CERTIFICATE=certificates.authority,
        CLIENT_CERTIFICATE=certificates.client.certificate,
        CLIENT_KEY=certificates.client.key,
    )
    outcome = Outcome(None)
    outcome.send()

    assert_sent(outcome, mutual_tls)


@both_protocols
def test_certificates_for_traces_come_before_those_for_all(
    mutual_tls: OtlpReceiver, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """Those for all would be the wrong ones."""
    client = certificates.client
    for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"):
        monkeypatch.setenv(_GENERAL + name, str(certificates.stranger))
    ask_for(
        monkeypatch,
        mutual_tls,
        protocol,
        _TRACES,
        CERTIFICATE=certificates.authority,
        CLIENT_CERTIFICATE=client.certificate,
        CLIENT_KEY=client.key,
    )
    outcome = Outcome(None)
    outcome.send()

    assert_sent(outcome, mutual_tls)


@both_protocols
@both_prefixes
def test_a_collector_of_another_authority_gets_nothing(
    tls: OtlpReceiver, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, protocol: str, prefix: str
) -> None:
    """Spans are lost and counted; nobody fails."""
    ask_for(monkeypatch, tls, protocol, prefix, CERTIFICATE=certificates.stranger, TIMEOUT=1)
    outcome = Outcome(None)
    outcome.send()

    assert_lost(outcome, tls)


@both_protocols
def test_a_collector_that_wants_a_certificate_in_vain(
    mutual_tls: OtlpReceiver, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """The same from its side."""
    ask_for(monkeypatch, mutual_tls, protocol, _GENERAL, CERTIFICATE=certificates.authority, TIMEOUT=1)
    outcome = Outcome(None)
    outcome.send()

    assert_lost(outcome, mutual_tls)


@both_protocols
def test_tls_to_vllm_s_endpoint(
    tls: OtlpReceiver, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """vLLM's exporter asks for no TLS by gRPC; ``https`` says otherwise."""
    monkeypatch.setenv(f"{_TRACES}PROTOCOL", protocol)
    monkeypatch.setenv(f"{_GENERAL}CERTIFICATE", str(certificates.authority))
    outcome = Outcome(endpoint(tls, protocol, _TRACES))
    outcome.send()

    assert_sent(outcome, tls)
