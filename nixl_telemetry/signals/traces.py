# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans: which are exported, with which ids, and to where."""

import os
import random
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags

from nixl_telemetry import __version__
from nixl_telemetry.forking import in_children
from nixl_telemetry.settings import Settings
from nixl_telemetry.signals.attributes import Attributes
from nixl_telemetry.signals.blocks import BlockSpans, shares
from nixl_telemetry.signals.clock import unix_offset_ns
from nixl_telemetry.signals.description import Span
from nixl_telemetry.signals.exporters import Exporter, connect, is_configured, seconds_between_messages
from nixl_telemetry.signals.moves import Runs
from nixl_telemetry.signals.otlp import Envelope, ExportedSpan, encode_attributes
from nixl_telemetry.signals.propagation import Carried, child, read, written
from nixl_telemetry.signals.semconv import (
    BLOCK_DETAIL,
    ERROR_TYPE,
    KEPT,
    REMOTE_ENGINE_ID,
    REMOTE_RANK,
    SCHEMA_URL,
    SERVER_ADDRESS,
    SERVER_PORT,
    TRANSFER_BYTES,
    TRANSFER_MODE,
    TRANSFER_OPERATION,
    BlockDetail,
    Kept,
    SpanName,
)
from nixl_telemetry.signals.sender import Item, SpanSender
from nixl_telemetry.signals.trace_file import TraceFile

SCOPE: Final = "nixl_telemetry"
"""Instrumentation scope of every span."""

_SLICE_SPANS: Final = 2048
"""Block spans in one message: collectors refuse messages of more than 4 MiB."""


_SHARED_WITH_BLOCKS: Final = (
    TRANSFER_OPERATION,
    TRANSFER_MODE,
    REMOTE_ENGINE_ID,
    REMOTE_RANK,
    SERVER_ADDRESS,
    SERVER_PORT,
    ERROR_TYPE,
)
"""Attributes of a transfer that its blocks have, too."""


class SpanWriter:
    """Decides on spans and hands them to the threads that send them.

    The resource and the sampler are those of the process's tracer provider, which vLLM sets up in each of its processes
    when it is started with ``--otlp-traces-endpoint``; where there is none, the standard ``OTEL_*`` variables are
    honoured. Spans do not pass through that provider: it has no place for spans of blocks at a bearable cost, for ids
    that were told to a peer before, for failures of traces that are not sampled, and it does not tell what it loses.

    Args:
        common: Attributes of every span that has no parent in this process.
        settings: The user's settings.
        endpoint: vLLM's ``--otlp-traces-endpoint``.
        on_lost: Told how many spans were lost.
        on_error: Told what went wrong with sending.
    """

    def __init__(
        self,
        common: Attributes,
        settings: Settings,
        endpoint: str | None,
        on_lost: Callable[[int], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._encoded_common = encode_attributes(common)
        self._common_to_blocks = _for_blocks(common)
        self._settings = settings
        connects: list[Callable[[], Exporter]] = []
        if settings.traces and is_configured(endpoint):
            connects.append(partial(connect, endpoint))
        if settings.traces and settings.trace_file:
            path, size, count = Path(settings.trace_file), settings.trace_file_max_bytes, settings.trace_file_count
            connects.append(partial(TraceFile, path, size, count))
        pace = seconds_between_messages()
        self._senders = [
            SpanSender(connect, lambda: self._envelope, pace, settings.queue_size, on_lost, on_error)
            for connect in connects
        ]
        in_children(self.reset)
        self.is_exporting: Final = bool(self._senders)
        """Whether spans go anywhere."""
        self.makes_block_spans: Final = self.is_exporting and settings.block_spans != "off"
        """Whether sampled transfers get spans of blocks."""

    def new_context(self, parent: SpanContext | None, name: SpanName, kind: SpanKind) -> SpanContext:
        """Ids for a span that begins; its sampling is decided now."""
        trace_id = parent.trace_id if parent is not None else _ids.draw(128) or 1
        sampler = self._provider.sampler
        if sampler is DEFAULT_ON:
            # By far the most frequent one, on the engine's thread: what it would say is known.
            is_sampled = parent is None or parent.trace_flags.sampled
            state = parent.trace_state if parent is not None else None
        else:
            around = trace.set_span_in_context(NonRecordingSpan(parent), Context()) if parent is not None else Context()
            result = sampler.should_sample(around, trace_id, name, kind)
            is_sampled = result.decision is Decision.RECORD_AND_SAMPLE
            state = result.trace_state
        flags = _SAMPLED if is_sampled else _NOT_SAMPLED
        return SpanContext(trace_id, _ids.draw(64) or 1, is_remote=False, trace_flags=flags, trace_state=state)

    def new_carried(self, parent: Carried, name: SpanName, kind: SpanKind) -> Carried:
        """The same as texts: for a span of which others are told, and that only the export thread has to read."""
        if self._provider.sampler is DEFAULT_ON:
            carried = child(parent, _ids.draw(64) or 1)
            if carried is not None:
                return carried
        return written(self.new_context(read(parent), name, kind))

    def can_wait_until(self) -> float:
        """Until when it makes no difference that a span is not written yet, by :func:`time.monotonic`."""
        return min((sender.can_wait_until() for sender in self._senders), default=0.0)

    def write(self, span: Span) -> SpanContext | None:
        """Export a span with its children if its trace is sampled, or if it is to be kept.

        Returns:
            Its context; ``None`` where nothing exports spans.
        """
        if not self._senders:
            return None
        context = span.context or self.new_context(span.parent, span.name, span.kind)
        attributes: dict[str, Any] = {}
        if not context.trace_flags.sampled:
            kept = self._reason_to_keep(span)
            if kept is None:
                return context
            attributes[KEPT] = kept
        items = list(self._tree(span, context, span.parent, attributes, unix_offset_ns(), self._encoded_common))
        for sender in self._senders:
            sender.add(items)
        return context

    def flush(self, timeout_seconds: float) -> bool:
        """Export what is buffered; false if that took longer."""
        return False not in [sender.flush(left) for sender, left in self._together(timeout_seconds)]

    def close(self, timeout_seconds: float) -> None:
        """Export what is buffered, within the timeout, and nothing more."""
        for sender, left in self._together(timeout_seconds):
            sender.close(left)

    def _together(self, timeout_seconds: float) -> Iterator[tuple[SpanSender, float]]:
        """All senders, which have begun to send what they have, each with what is left of the time.

        One whose collector hangs does not take the others' time.
        """
        deadline = time.monotonic() + timeout_seconds
        for sender in self._senders:
            sender.flush(0)
        for sender in self._senders:
            yield sender, max(0.0, deadline - time.monotonic())

    def reset(self) -> None:
        """Say again what process this is, as a forked child must."""
        for name in ("_provider", "_envelope"):
            self.__dict__.pop(name, None)

    @cached_property
    def _provider(self) -> TracerProvider:
        provider = trace.get_tracer_provider()
        if isinstance(provider, TracerProvider):
            return provider
        # Not made global: whether other code of this process is traced is not ours to decide.
        resource = Resource.create({"vllm.process_id": str(os.getpid())})
        return TracerProvider(resource=resource, shutdown_on_exit=False)

    @cached_property
    def _envelope(self) -> Envelope:
        return Envelope.of(self._provider.resource, _SCOPE)

    def _reason_to_keep(self, span: Span) -> Kept | None:
        if not self._settings.keep_failed:
            return None
        if span.error is not None:
            return Kept.FAILED
        return Kept.SLOW if span.slow else None

    def _tree(
        self,
        span: Span,
        context: SpanContext,
        parent: SpanContext | None,
        attributes: dict[str, Any],
        offset_ns: int,
        encoded: bytes = b"",
    ) -> Iterator[Item]:
        attributes |= span.attributes
        if span.error is not None:
            attributes[ERROR_TYPE] = span.error.value
        runs = Runs()
        if span.blocks is not None and context.trace_flags.sampled:
            wanted = BlockDetail(self._settings.block_spans)
            detail, runs = span.blocks.detail(wanted, self._settings.block_span_limit)
            attributes[BLOCK_DETAIL] = detail
        exported = ExportedSpan(span, context, parent, attributes, offset_ns, encoded)
        yield exported
        if span.blocks is not None and runs:
            sizes = shares(attributes.get(TRANSFER_BYTES), runs.lengths)
            shared = self._common_to_blocks | _for_blocks(attributes)
            spans = BlockSpans(exported, runs, sizes, attributes[BLOCK_DETAIL], span.blocks.by_region, shared)
            yield from spans.slices(_SLICE_SPANS)
        for part in span.children:
            yield from self._tree(part, _child_of(context), context, {}, offset_ns)


def _for_blocks(attributes: Attributes) -> dict[str, Any]:
    """Those that a transfer's blocks have, too."""
    return {name: attributes[name] for name in _SHARED_WITH_BLOCKS if name in attributes}


_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_NOT_SAMPLED: Final = TraceFlags(TraceFlags.DEFAULT)
_SCOPE: Final = InstrumentationScope(SCOPE, __version__, SCHEMA_URL)


class _Ids:
    """Random ids, from a generator of this process's own.

    vLLM seeds Python's global one alike in every worker: P and D would draw the same ids, and drawing would change what
    vLLM draws. The operating system's would have the engine's thread give up Python's lock, and wait for it behind the
    threads that make and send spans.
    """

    def __init__(self) -> None:
        self.reset()
        in_children(self.reset)

    def reset(self) -> None:
        """Start from new entropy, as a forked child must."""
        self.draw = random.Random().getrandbits  # noqa: S311 - ids need not be hard to guess
        """Takes the number of bits: 128 for a trace, 64 for a span. 0 is no id."""


_ids: Final = _Ids()


def _child_of(parent: SpanContext) -> SpanContext:
    """Within one description, what is decided for the parent holds for its children."""
    return SpanContext(parent.trace_id, _ids.draw(64) or 1, False, parent.trace_flags, parent.trace_state)
