# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans, through the process's own OpenTelemetry provider."""

import os
import secrets
import time
from typing import Final

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Tracer, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.trace import ProxyTracerProvider, SpanContext, Status, StatusCode

from nixl_telemetry import __version__
from nixl_telemetry.signals.clock import unix_offset_ns
from nixl_telemetry.signals.description import Attributes, Span
from nixl_telemetry.signals.semconv import ERROR_TYPE, SCHEMA_URL

SCOPE: Final = "nixl_telemetry"
"""Instrumentation scope of every span."""

_QUICK_SECONDS: Final = 1.0
_SLOW_PAUSE_SECONDS: Final = 60.0


def _configured(name: str, default: str = "") -> str:
    """A standard variable's value for traces, or else for all signals."""
    return (
        os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") or default
    )


def _exporter(endpoint: str | None) -> SpanExporter | None:
    """The OTLP exporter for vLLM's endpoint, or else the one that the ``OTEL_*`` variables ask for.

    Without an endpoint there is none: the SDK's default would send to a port of this host that nobody asked for.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not (endpoint or _configured("ENDPOINT")):
        return None
    wanted = {name.strip() for name in (os.environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(",")}
    if not wanted & {"otlp", "otlp_proto_grpc", "otlp_proto_http"}:
        return None
    # gRPC by default, as in vLLM; for its own endpoint vLLM reads one variable only.
    variable = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    protocol = os.environ.get(variable, "grpc") if endpoint else _configured("PROTOCOL", "grpc")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=endpoint, insecure=True) if endpoint else GrpcExporter()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint)


class _SystemIdGenerator(IdGenerator):
    """Ids from the operating system's randomness.

    The SDK draws them from Python's global generator. vLLM seeds that one with the same number in every worker, so P
    and D would get the same ids; and drawing from it would change what vLLM draws.
    """

    def generate_span_id(self) -> int:
        """A random span id, never 0."""
        return 1 + secrets.randbelow(2**64 - 1)

    def generate_trace_id(self) -> int:
        """A random trace id, never 0."""
        return 1 + secrets.randbelow(2**128 - 1)


class SpanWriter:
    """Turns :class:`Span` descriptions into OpenTelemetry spans.

    The provider is looked up at the first span: vLLM sets one up in each of its processes when it is started with
    ``--otlp-traces-endpoint``, or with ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``. Where there is none, the standard
    ``OTEL_*`` variables are honoured.

    Args:
        common: Attributes of every span.
        endpoint: vLLM's ``--otlp-traces-endpoint``. With several API servers vLLM does not set up a provider in the
            engine's processes, and then one is set up here as vLLM would.
    """

    def __init__(self, common: Attributes, endpoint: str | None = None) -> None:
        self._common = common
        self._endpoint = endpoint
        self._slow_until = 0.0
        self._own_provider: TracerProvider | None = None
        self._tracer: trace.Tracer | None = None

    def write(self, span: Span) -> SpanContext | None:
        """Record a span and its children; returns its context, or ``None`` where nothing exports spans."""
        if self._tracer is None:
            self._tracer = self._find_provider().get_tracer(SCOPE, __version__, schema_url=SCHEMA_URL)
            # vLLM's provider has the SDK's generator.
            if isinstance(self._tracer, Tracer):
                self._tracer.id_generator = _SystemIdGenerator()
        context = self._record(self._tracer, span, None, unix_offset_ns())
        return context if context.is_valid else None

    def flush(self) -> None:
        """Export what is buffered. It takes as long as the exporter takes."""
        provider = self._own_provider or trace.get_tracer_provider()
        if isinstance(provider, TracerProvider):
            provider.force_flush()

    def flush_if_quick(self) -> None:
        """Export what is buffered, unless exporting took long lately: then it is left to the provider's own pace."""
        started = time.monotonic()
        if self._tracer is None or started < self._slow_until:
            return
        self.flush()
        if time.monotonic() - started > _QUICK_SECONDS:
            self._slow_until = time.monotonic() + _SLOW_PAUSE_SECONDS

    def close(self) -> None:
        """Shut down the provider if it is ours; vLLM's is vLLM's."""
        if self._own_provider is not None:
            self._own_provider.shutdown()

    def _find_provider(self) -> trace.TracerProvider:
        provider = trace.get_tracer_provider()
        if not isinstance(provider, ProxyTracerProvider):
            return provider
        exporter = _exporter(self._endpoint)
        if exporter is None:
            return trace.NoOpTracerProvider()
        resource = Resource.create({"vllm.process_id": str(os.getpid())})
        # Not made global: whether other code of this process is traced is not ours to decide.
        self._own_provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._own_provider.add_span_processor(BatchSpanProcessor(exporter))
        return self._own_provider

    def _record(self, tracer: trace.Tracer, span: Span, parent: trace.Span | None, offset_ns: int) -> SpanContext:
        attributes = {**self._common, **span.attributes} if parent is None else dict(span.attributes)
        if span.error is not None:
            attributes[ERROR_TYPE] = span.error.value
        recording = tracer.start_span(
            span.name,
            context=trace.set_span_in_context(parent) if parent is not None else None,
            kind=span.kind,
            attributes=attributes,
            start_time=offset_ns + span.start_ns,
        )
        for event in span.events:
            recording.add_event(event.name, event.attributes, offset_ns + event.at_ns)
        for child in span.children:
            self._record(tracer, child, recording, offset_ns)
        if span.error is not None:
            recording.set_status(Status(StatusCode.ERROR, span.message))
        recording.end(offset_ns + span.end_ns)
        return recording.get_span_context()
