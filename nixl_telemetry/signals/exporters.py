# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Where encoded spans go: OpenTelemetry's own OTLP exporters, which know endpoints, headers, TLS and retries."""

import inspect
import os
from typing import Any, Final, Protocol

from google.protobuf.empty_pb2 import Empty
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as SdkGrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as SdkHttpExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from nixl_telemetry.signals.logger import logger
from nixl_telemetry.signals.otlp import Message

_EXPORTER: Final = "OTEL_TRACES_EXPORTER"
_PROTOCOLS: Final = {"otlp": None, "otlp_proto_grpc": "grpc", "otlp_proto_http": "http/protobuf"}
"""By the name of an exporter that can be asked for: the protocol that it says."""
_SCHEDULE_DELAY: Final = "OTEL_BSP_SCHEDULE_DELAY"
_DEFAULT_DELAY_MS: Final = 5000
_LONGEST_DELAY_MS: Final = 3_600_000
_CHANNEL_OPTIONS: Final = (("grpc.http2.bdp_probe", 0),)
"""gRPC would measure the connection with each answer, in order to receive faster. Here all answers are empty, and to
measure would be a third of what a message costs its threads."""


class ExportError(Exception):
    """A batch was not taken; OpenTelemetry's log lines say why."""


class Exporter(Protocol):
    """Takes encoded spans."""

    def send(self, message: Message) -> None:
        """Send one batch. May take long, and may raise anything, after which the batch is lost."""

    def shutdown(self) -> None:
        """Send nothing more; ends a call of :meth:`send` that is waiting to try again."""


class GrpcExporter(SdkGrpcExporter):
    """Sends by gRPC. The SDK's exporter takes spans of the SDK; from its encoding on, this is the same one."""

    def __init__(self, **arguments: Any) -> None:
        # Older exporters of OpenTelemetry let nobody choose.
        if "channel_options" in inspect.signature(SdkGrpcExporter).parameters:
            arguments["channel_options"] = _CHANNEL_OPTIONS
        super().__init__(**arguments)

    def send(self, message: Message) -> None:
        """Send one batch.

        Raises:
            ExportError: It is lost.
        """
        _check(self._export(message) is SpanExportResult.SUCCESS)  # type: ignore[arg-type]

    def _translate_data(self, data: Any) -> Any:
        # gRPC's stub has protobuf encode whatever it is given, and protobuf passes on fields that it does not know.
        return Empty.FromString(data.data)

    def _count_data(self, data: Any) -> int:
        return data.span_count  # type: ignore[no-any-return]


class HttpExporter(SdkHttpExporter):
    """Sends by HTTP with protobuf; otherwise as :class:`GrpcExporter`."""

    def send(self, message: Message) -> None:
        """Send one batch.

        Raises:
            ExportError: It is lost.
        """
        data = message.data
        client = getattr(self, "_client", None)
        # Older exporters of OpenTelemetry are their own client, and their answer is that of ``requests``.
        _check(client.export(data).success if client is not None else self._export(data).ok)  # type: ignore[attr-defined]


def is_configured(endpoint: str | None) -> bool:
    """Whether spans are to be exported: to vLLM's endpoint, or as the ``OTEL_*`` variables ask.

    Without an endpoint they are not: the SDK's default would send to a port of this host that nobody asked for.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not (endpoint or _configured("ENDPOINT")):
        return False
    return _exporter() is not None


def connect(endpoint: str | None) -> Exporter:
    """The exporter for vLLM's endpoint, or else the one that the ``OTEL_*`` variables ask for."""
    # gRPC by default, as in vLLM; for its own endpoint vLLM reads one variable only.
    variable = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    protocol = os.environ.get(variable, "grpc") if endpoint else _protocol()
    if protocol == "grpc":
        return GrpcExporter(endpoint=endpoint, insecure=True) if endpoint else GrpcExporter()
    return HttpExporter(endpoint=endpoint)


def seconds_between_messages() -> float:
    """How long spans are gathered at most: ``OTEL_BSP_SCHEDULE_DELAY``, in milliseconds, or else the standard's 5 s.

    No longer than an hour.
    """
    text = os.environ.get(_SCHEDULE_DELAY, "")
    if text.isdecimal() and int(text):
        return min(int(text), _LONGEST_DELAY_MS) / 1e3
    if text:
        logger().warning("%s=%s is no number of milliseconds, %s is taken", _SCHEDULE_DELAY, text, _DEFAULT_DELAY_MS)
    return _DEFAULT_DELAY_MS / 1e3


def _check(sent: bool) -> None:
    if not sent:
        raise ExportError("a batch of spans was not taken")


def _exporter() -> str | None:
    """The exporter of OTLP that is asked for; the first one, since spans are sent once."""
    names = (name.strip() for name in (os.environ.get(_EXPORTER) or "otlp").split(","))
    return next((name for name in names if name in _PROTOCOLS), None)


def _protocol() -> str:
    """As the SDK decides it: an exporter's name comes before the variables of the protocol."""
    name = _exporter() or "otlp"
    named, configured = _PROTOCOLS[name], _configured("PROTOCOL").strip()
    if named and configured in _PROTOCOLS.values() and configured != named:
        logger().warning("%s=%s is taken, though OTEL_EXPORTER_OTLP_*PROTOCOL asks for %s", _EXPORTER, name, configured)
    return named or configured or "grpc"


def _configured(name: str) -> str:
    """A standard variable's value for traces, or else for all signals."""
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") or ""
