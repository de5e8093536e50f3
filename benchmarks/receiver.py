# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""An OTLP receiver that takes next to no time: it keeps messages as they came, and reads them when it is asked."""

import threading
from concurrent import futures
from types import TracebackType
from typing import Any, Final, Self

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from nixl_telemetry.testbed import LOOPBACK

_SERVICE: Final = "opentelemetry.proto.collector.trace.v1.TraceService"
_EMPTY: Final = b""
"""An answer without any field."""


class RawReceiver:
    """Keeps what exporters send to it. It shares the cores with the servers, so that it must not decode meanwhile."""

    def __init__(self) -> None:
        self._messages: list[bytes] = []
        self._lock = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(2), options=(("grpc.so_reuseport", 0),))
        export = grpc.unary_unary_rpc_method_handler(self._take)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Export": export}),))
        port = self._server.add_insecure_port(f"{LOOPBACK}:0")
        self._server.start()
        self.endpoint = f"http://{LOOPBACK}:{port}"

    def span_count(self, scope: str) -> int:
        """How many spans of an instrumentation scope have come."""
        with self._lock:
            messages = list(self._messages)
        return sum(
            len(spans.spans)
            for message in messages
            for resource in ExportTraceServiceRequest.FromString(message).resource_spans
            for spans in resource.scope_spans
            if spans.scope.name == scope
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=None).wait(5)

    def _take(self, message: bytes, context: Any) -> bytes:
        with self._lock:
            self._messages.append(message)
        return _EMPTY
