# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What the span of a block costs, made and encoded, beside one of the OpenTelemetry SDK with the same content."""

from statistics import median
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanKind, set_span_in_context

from benchmarks.figures import Budget, Figure, Part, median_interval, ratios
from benchmarks.interleave import Cost, cost_of, interleaved
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.blocks import BlockSpans, shares
from nixl_telemetry.signals.description import Span
from nixl_telemetry.signals.moves import BlockMoves
from nixl_telemetry.signals.otlp import Envelope, ExportedSpan
from nixl_telemetry.signals.semconv import BlockDetail, SpanName

SIZES: Final = {64: 150, 2048: 20}
"""Blocks of a transfer, and how often it is measured."""
LIMIT: Final = 8.0
BLOCK_BYTES: Final = 65536

SHARED: Final[dict[str, Any]] = {
    semconv.TRANSFER_OPERATION: "READ",
    semconv.TRANSFER_MODE: "pull",
    semconv.REMOTE_ENGINE_ID: "0f8fad5b-d9cb-469f-a165-70867728950e",
    semconv.REMOTE_RANK: 0,
    semconv.SERVER_ADDRESS: "10.0.0.7",
    semconv.SERVER_PORT: 5600,
}

_SCOPE: Final = InstrumentationScope("nixl_telemetry")


class _Keeping(SpanExporter):
    """Keeps the spans, to be encoded at once, as a batch is."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Any) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


def measure() -> Part:
    """Both, on one thread, in turns."""
    kept = _Keeping()
    resource = Resource.create({"service.name": "vllm", "vllm.process_id": "1"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = provider.get_tracer("nixl_telemetry")
    owner = tracer.start_span(SpanName.TRANSFER, kind=SpanKind.CLIENT, attributes=SHARED)
    owner.end()
    (readable,) = kept.spans
    budgets, figures, samples = [], [], {}
    for blocks, rounds in SIZES.items():
        # No two are neighbours, so that each is a run, too.
        moves = BlockMoves([list(range(0, 2 * blocks, 2))], [list(range(7, 7 + 3 * blocks, 3))])

        def ours(moves: BlockMoves = moves) -> Cost:
            return cost_of(lambda: _ours(readable, moves))

        def theirs(moves: BlockMoves = moves) -> Cost:
            kept.spans.clear()
            return cost_of(lambda: _theirs(tracer, owner, readable, moves, kept))

        measured = interleaved(ours, theirs, rounds)
        per_block = [cost.cpu / 1e3 / blocks for cost in measured.firsts]
        per_span = [cost.cpu / 1e3 / blocks for cost in measured.seconds]
        samples[f"{blocks} blocks, one span µs"] = per_block
        samples[f"{blocks} blocks, one span of the SDK µs"] = per_span
        cheaper = ratios(per_span, per_block)
        name = f"a block span made and encoded, {blocks:,} blocks, against one of the SDK"
        interval = median_interval(cheaper)
        budgets.append(Budget(name, median(cheaper), LIMIT, "times cheaper", at_least=True, interval=interval))
        figures.append(Figure(f"one block span, {blocks:,} blocks", median(per_block), "µs"))
        figures.append(Figure(f"one span of the SDK, {blocks:,} blocks", median(per_span), "µs"))
    return Part(budgets, figures, samples)


def _ours(owner: ReadableSpan, moves: BlockMoves) -> bytes:
    detail, runs = moves.detail(BlockDetail.EACH, 0)
    said = Span(SpanName.TRANSFER, SpanKind.CLIENT, owner.start_time or 0, owner.end_time or 0)
    exported = ExportedSpan(said, owner.context, None, SHARED, 0)
    spans = BlockSpans(exported, runs, shares(BLOCK_BYTES * len(moves), runs.lengths), detail, False, SHARED)
    envelope = Envelope.of(owner.resource, _SCOPE)
    return envelope.around((part.encode() for part in spans.slices(2048)), len(runs)).data


def _theirs(tracer: Any, owner: Any, readable: ReadableSpan, moves: BlockMoves, kept: _Keeping) -> bytes:
    around = set_span_in_context(owner)
    start, end = readable.start_time, readable.end_time
    for local, remote in zip(moves.local[0], moves.remote[0], strict=True):
        tracer.start_span(
            SpanName.BLOCK,
            around,
            SpanKind.INTERNAL,
            {
                semconv.BLOCK_LOCAL_ID: local,
                semconv.BLOCK_REMOTE_ID: remote,
                semconv.BLOCK_GROUP: 0,
                semconv.BLOCK_SIZE: BLOCK_BYTES,
                semconv.BLOCK_TIMING: "transfer",
                **SHARED,
            },
            start_time=start,
        ).end(end)
    message: bytes = encode_spans(kept.spans).SerializeToString()
    return message
