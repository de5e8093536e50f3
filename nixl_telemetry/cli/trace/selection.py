# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Which traces to show: the files are read once for a summary of each trace, and again for the spans of a few."""

import heapq
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from nixl_telemetry.cli.trace.reading import Span, TraceFiles
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.semconv import SpanName

TRACE_LIMIT: Final = 100_000
"""Traces that are kept in mind."""
SPAN_LIMIT: Final = 100_000
"""Spans that are shown."""

_TELLING: Final[tuple[str, ...]] = (SpanName.LEASE, SpanName.HANDSHAKE, SpanName.TRANSFER, SpanName.RECEIVE)
"""Spans that stand for a request in a list; the last that there is stands for it."""


@dataclass(slots=True)
class Summary:
    """What a list says of a trace."""

    trace_id: str
    start_ns: int
    last_ns: int
    """Start of its last span."""
    request_id: str = ""
    mode: str = ""
    peer: str = ""
    took_ns: int = 0
    moved_blocks: int | None = None
    leased_blocks: int | None = None
    size_bytes: int | None = None
    is_failed: bool = False
    error: str = ""
    lease_outcome: str = ""
    is_asked_for: bool = False
    telling: int = -1
    """Index of the kind of span that stands for it."""
    _transfers: set[str] = field(default_factory=set)

    @property
    def what(self) -> str:
        """The name of the span whose duration it has; empty if it has none of ours."""
        return _TELLING[self.telling] if self.telling >= 0 else ""

    @property
    def blocks(self) -> int | None:
        """Blocks that were moved, or else held for a peer."""
        return self.leased_blocks if self.moved_blocks is None else self.moved_blocks

    @property
    def outcome(self) -> str:
        """How it ended."""
        if self.is_failed:
            return self.error or "failed"
        return self.lease_outcome if self.lease_outcome == "expired" else "ok"

    def add(self, span: Span) -> None:
        """Take one of its spans into account."""
        self.start_ns = min(self.start_ns, span.start_ns)
        self.last_ns = max(self.last_ns, span.start_ns)
        telling = _TELLING.index(span.name) if span.name in _TELLING else -1
        is_better = telling > self.telling
        if is_better or (telling == self.telling >= 0 and (span.duration_ns or 0) > self.took_ns):
            self.telling, self.took_ns = telling, span.duration_ns or 0
        self.request_id = _better(self.request_id, span.text(semconv.REQUEST_ID), is_better)
        self.mode = _better(self.mode, span.text(semconv.TRANSFER_MODE), is_better)
        self.peer = _better(self.peer, peer_of(span), is_better)
        if span.is_failed:
            self.is_failed = True
            self.error = _better(self.error, span.text(semconv.ERROR_TYPE), is_better)
        if span.name == SpanName.LEASE:
            self.lease_outcome = span.text(semconv.LEASE_OUTCOME)
            self.leased_blocks = span.count(semconv.LEASE_BLOCKS)
        elif span.name == SpanName.TRANSFER and span.span_id not in self._transfers:  # it may have been exported twice
            self._transfers.add(span.span_id)
            self.moved_blocks = _sum(self.moved_blocks, span.count(semconv.TRANSFER_BLOCKS))
            self.size_bytes = _sum(self.size_bytes, span.count(semconv.TRANSFER_BYTES))


def peer_of(span: Span) -> str:
    """The peer's address, or else its engine id; empty where neither is known."""
    host, port = span.text(semconv.SERVER_ADDRESS), span.text(semconv.SERVER_PORT)
    if not host:
        return span.text(semconv.REMOTE_ENGINE_ID)
    host = f"[{host}]" if ":" in host else host
    return f"{host}:{port}" if port else host


def _sum(known: int | None, more: int | None) -> int | None:
    return known if more is None else (known or 0) + more


def _better(known: str, new: str, is_better: bool) -> str:
    return new if new and (is_better or not known) else known


@dataclass(frozen=True)
class Selection:
    """Which traces are wanted.

    Attributes:
        what: What a trace has if it is wanted; for the sentence that there is none.
        rank: Those of the highest rank are kept.
        is_wanted: Whether a trace is wanted at all.
        is_asked_for: Whether a span makes its trace one that was asked for.
        advice: What to do where there is none, though there are others.
    """

    what: str
    rank: Callable[[Summary], tuple[int, ...]]
    is_wanted: Callable[[Summary], bool]
    is_asked_for: Callable[[Span], bool] = lambda _: False
    advice: str = ""


def latest() -> Selection:
    """Of all requests and handshakes."""
    return Selection("with a request or a handshake", lambda s: (s.telling >= 0, s.last_ns), lambda s: s.telling >= 0)


def failed() -> Selection:
    """Those with a span that failed."""
    return Selection("with a span that failed", lambda s: (s.is_failed, s.last_ns), lambda s: s.is_failed)


def slowest() -> Selection:
    """Those with the longest receive, or else with the longest transfer."""
    least = _TELLING.index(SpanName.TRANSFER)
    return Selection(
        "with a receive or a transfer",
        lambda s: (s.telling, s.took_ns),
        lambda s: s.telling >= least,
        advice="the decode instance writes them (in push the prefill instance writes the transfer): give its file too",
    )


def of_request(request_id: str) -> Selection:
    """Those of a request: vLLM puts the id that a client gave between a prefix and a suffix."""

    def is_asked_for(span: Span) -> bool:
        return request_id in span.text(semconv.REQUEST_ID) or request_id in span.text(semconv.REMOTE_REQUEST_ID)

    return _asked_for(f"of a request with {request_id!r} in its id", is_asked_for)


def of_trace(trace_id: str) -> Selection:
    """The one whose id begins with this."""
    return _asked_for(f"whose id begins with {trace_id}", lambda span: span.trace_id.startswith(trace_id))


def _asked_for(what: str, is_asked_for: Callable[[Span], bool]) -> Selection:
    return Selection(what, lambda s: (s.is_asked_for, s.last_ns), lambda s: s.is_asked_for, is_asked_for)


@dataclass(frozen=True)
class Survey:
    """What there is in the files.

    Attributes:
        chosen: The traces that are wanted, the newest last.
        wanted: How many there are, of which ``chosen`` may be a part.
        traces: How many traces there are; more than :data:`TRACE_LIMIT` are not counted.
        is_whole: Whether all traces were looked at.
    """

    chosen: list[Summary]
    wanted: int
    traces: int
    is_whole: bool


def survey(files: TraceFiles, selection: Selection, count: int) -> Survey:
    """Read the files for the traces that are wanted, ``count`` at most."""
    summaries: dict[str, Summary] = {}
    is_whole = True
    for span in files.spans():
        summary = summaries.get(span.trace_id)
        if summary is None:
            if len(summaries) >= TRACE_LIMIT:
                is_whole = False
                kept = heapq.nlargest(TRACE_LIMIT // 2, summaries.values(), key=selection.rank)
                summaries = {summary.trace_id: summary for summary in kept}
            summary = summaries[span.trace_id] = Summary(span.trace_id, span.start_ns, span.start_ns)
        summary.add(span)
        summary.is_asked_for = summary.is_asked_for or selection.is_asked_for(span)
    wanted = [summary for summary in summaries.values() if selection.is_wanted(summary)]
    chosen = heapq.nlargest(count, wanted, key=selection.rank)
    chosen.sort(key=lambda summary: summary.start_ns)
    return Survey(chosen, len(wanted), len(summaries), is_whole)


@dataclass(frozen=True)
class Loaded:
    """Spans of the traces that are wanted, by trace id."""

    traces: dict[str, list[Span]]
    left_out: int
    """Spans beyond :data:`SPAN_LIMIT`."""


def load(files: TraceFiles, trace_ids: Collection[str]) -> Loaded:
    """Read the files for the spans of some traces."""
    traces: dict[str, list[Span]] = {trace_id: [] for trace_id in trace_ids}
    loaded = 0
    for span in files.spans(traces):
        loaded += 1
        if loaded <= SPAN_LIMIT:
            traces[span.trace_id].append(span)
    left_out = max(0, loaded - SPAN_LIMIT)
    return Loaded({trace_id: spans for trace_id, spans in traces.items() if spans}, left_out)


def linked(traces: Iterable[list[Span]]) -> list[str]:
    """The traces that spans link to, each once, in order."""
    return list(dict.fromkeys(trace_id for spans in traces for span in spans for trace_id in span.links))
