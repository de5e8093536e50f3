# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A real OTLP trace receiver in this process: gRPC and HTTP/protobuf, on free loopback ports."""

from __future__ import annotations

import ssl
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from nixl_telemetry.testbed.otlp_spans import ReceivedSpan, decode
from nixl_telemetry.testbed.ports import LOOPBACK

TRACES_PATH = "/v1/traces"
# zlib's way of saying: gzip or zlib, as the header tells.
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_STOP_SECONDS = 5.0


@dataclass(frozen=True)
class ServerTls:
    """With which PEM files a receiver speaks TLS."""

    certificate: Path
    key: Path
    clients: Path | None = None
    """The authority whose certificates clients must have, if they need one."""


class OtlpReceiver:
    """Keeps the spans that exporters send to it. Thread-safe.

    Attributes:
        grpc_port: Where OTLP/gRPC arrives.
        http_port: Where OTLP/HTTP arrives.
    """

    def __init__(self, tls: ServerTls | None = None) -> None:
        """Binds and serves at once, until ``close``.

        Args:
            tls: For both protocols; plain text without it.
        """
        self._scheme = "https" if tls else "http"
        self._spans: list[ReceivedSpan] = []
        self._requests = 0
        self._headers: list[dict[str, str]] = []
        self._arrived = threading.Condition()
        # No port sharing: a second receiver must never get half of the spans.
        self._grpc = grpc.server(futures.ThreadPoolExecutor(4), options=(("grpc.so_reuseport", 0),))
        register: Callable[[TraceServiceServicer, grpc.Server], None] = add_TraceServiceServicer_to_server
        register(_TraceService(self._take), self._grpc)
        place = f"{LOOPBACK}:0"
        self.grpc_port: int = (
            self._grpc.add_secure_port(place, _grpc_credentials(tls)) if tls else self._grpc.add_insecure_port(place)
        )
        self._http = _HttpServer(self._take, tls)
        self.http_port: int = self._http.server_address[1]
        self._grpc.start()
        self._http_thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, name="otlp-http", daemon=True
        )
        self._http_thread.start()

    @property
    def grpc_endpoint(self) -> str:
        """What ``--otlp-traces-endpoint`` and ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` take for gRPC."""
        return f"{self._scheme}://{LOOPBACK}:{self.grpc_port}"

    @property
    def http_endpoint(self) -> str:
        """The same for HTTP/protobuf, path included."""
        return f"{self._scheme}://{LOOPBACK}:{self.http_port}{TRACES_PATH}"

    @property
    def requests(self) -> int:
        """How many export requests have arrived."""
        with self._arrived:
            return self._requests

    @property
    def headers(self) -> tuple[dict[str, str], ...]:
        """Headers of each export request, or its gRPC metadata; names in lower case."""
        with self._arrived:
            return tuple(self._headers)

    def spans(self, name: str | None = None) -> tuple[ReceivedSpan, ...]:
        """Returns the spans so far, in order of arrival, all or those called *name*."""
        with self._arrived:
            return tuple(span for span in self._spans if name is None or span.name == name)

    def clear(self) -> None:
        """Forgets what has arrived."""
        with self._arrived:
            self._spans.clear()
            self._headers.clear()
            self._requests = 0

    def wait_for(
        self, predicate: Callable[[Sequence[ReceivedSpan]], bool], timeout: float = 15.0
    ) -> tuple[ReceivedSpan, ...]:
        """Waits until *predicate* holds for the spans so far.

        Args:
            predicate: Called with all spans, first at once and then after each arrival.
            timeout: Seconds to wait at most.

        Returns:
            The spans for which it held.

        Raises:
            TimeoutError: It did not hold in time; the message says what has arrived.
        """
        deadline = time.monotonic() + timeout
        with self._arrived:
            while not predicate(tuple(self._spans)):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    names = sorted({span.name for span in self._spans})
                    raise TimeoutError(
                        f"not the spans waited for within {timeout:g} s; "
                        f"{self._requests} requests brought {len(self._spans)} spans: {names}"
                    )
                self._arrived.wait(remaining)
            return tuple(self._spans)

    def close(self) -> None:
        """Stops both servers; what has arrived stays readable."""
        self._grpc.stop(grace=None).wait(_STOP_SECONDS)
        self._http.shutdown()
        self._http.server_close()
        self._http_thread.join(_STOP_SECONDS)

    def __enter__(self) -> OtlpReceiver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, request: ExportTraceServiceRequest, headers: Iterable[tuple[str, str | bytes]]) -> None:
        spans = tuple(decode(request))
        with self._arrived:
            self._requests += 1
            self._headers.append({name.lower(): value for name, value in headers if isinstance(value, str)})
            self._spans += spans
            self._arrived.notify_all()


def _grpc_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.certificate.read_bytes())],
        tls.clients.read_bytes() if tls.clients else None,
        require_client_auth=tls.clients is not None,
    )


def _ssl_context(tls: ServerTls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.certificate, tls.key)
    if tls.clients:
        context.load_verify_locations(tls.clients)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


_Take = Callable[[ExportTraceServiceRequest, Iterable[tuple[str, str | bytes]]], None]


class _TraceService(TraceServiceServicer):
    def __init__(self, take: _Take) -> None:
        self._take = take

    def Export(  # noqa: N802 - the name is the protocol's
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self._take(request, context.invocation_metadata())
        return ExportTraceServiceResponse()


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, take: _Take, tls: ServerTls | None) -> None:
        self.take = take
        super().__init__((LOOPBACK, 0), _HttpHandler)
        if tls:
            # Who cannot agree with it is turned away by the server itself, which goes on.
            self.socket = _ssl_context(tls).wrap_socket(self.socket, server_side=True)


class _HttpHandler(BaseHTTPRequestHandler):
    server: _HttpServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != TRACES_PATH:
            self._answer(404, b"")
            return
        try:
            if self.headers.get("Content-Encoding", "identity") != "identity":
                body = zlib.decompress(body, wbits=_GZIP_OR_ZLIB)
            request = ExportTraceServiceRequest.FromString(body)
        except (zlib.error, DecodeError):
            self._answer(400, b"")
            return
        self.server.take(request, self.headers.items())
        self._answer(200, ExportTraceServiceResponse().SerializeToString())

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        pass

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
