# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A trace as rows on a common axis of time, for the terminal and for the page."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from nixl_telemetry.audit.chain import timestamp
from nixl_telemetry.cli.trace.reading import Span
from nixl_telemetry.cli.trace.selection import peer_of
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.semconv import SpanName, TransferMode

CLOCKS: Final = (
    "Bars of different processes are placed by the wall clocks of their hosts, and are only as comparable as these; "
    "each duration comes from one process's monotonic clock."
)
"""What a reader has to know where there is more than one process."""

_SHORT_ID: Final = 8
_MESSAGE_LINES: Final = 6
_ROLES: Final = {"kv_producer": "P", "kv_consumer": "D"}
_PARTS: Final = (
    ("handshake", semconv.RECEIVE_HANDSHAKE_DURATION),
    ("queue", semconv.RECEIVE_QUEUE_DURATION),
    ("post", semconv.RECEIVE_POST_DURATION),
    ("transfer", semconv.RECEIVE_TRANSFER_DURATION),
    ("observation delay", semconv.RECEIVE_OBSERVATION_DELAY),
    ("notification", semconv.RECEIVE_NOTIFICATION_DURATION),
    ("remote", semconv.RECEIVE_REMOTE_DURATION),  # after the notification that only push begins with
)
"""Where the time of a receive goes."""


class Kind(StrEnum):
    """What is drawn alike."""

    READ = "read"
    WRITE = "write"
    HANDSHAKE = "handshake"
    LEASE = "lease"
    RECEIVE = "receive"
    BLOCK = "block"
    OTHER = "other"


class Bar(NamedTuple):
    """A place on the axis, in parts of its length: from 0 to 1."""

    begin: float
    length: float


@dataclass(frozen=True)
class Row:
    """One line of a waterfall.

    Attributes:
        depth: How deep it is in the tree.
        name: What it is.
        place: The instance and the rank that made it.
        kind: How it is drawn.
        bar: Its place on the axis; ``None`` for a parent that is not in the files.
        duration_ns: How long it took, where that is known.
        is_failed: Whether it, or one of its blocks, failed.
        notes: What else there is to say, a line each.
        span: The span; ``None`` for blocks, and for a parent that is not in the files.
        blocks: The blocks that it stands for.
    """

    depth: int
    name: str
    place: str = ""
    kind: Kind = Kind.OTHER
    bar: Bar | None = None
    duration_ns: int | None = None
    is_failed: bool = False
    notes: tuple[str, ...] = ()
    span: Span | None = None
    blocks: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Instance:
    """One of the engines, or processes, that made spans."""

    label: str
    engine_id: str
    where: str
    """Host, service and process, as far as they are known."""


@dataclass(frozen=True)
class Waterfall:
    """A trace, ready to be drawn.

    Attributes:
        trace_id: 32 hex digits.
        start_ns: Unix time at which the axis begins, in nanoseconds.
        duration_ns: Length of the axis.
        mode: The transfer mode; empty where it is not known.
        rows: From top to bottom.
        instances: Whose spans there are.
        processes: How many processes made them.
        spans: How many there are.
    """

    trace_id: str
    start_ns: int
    duration_ns: int
    mode: str
    rows: tuple[Row, ...]
    instances: tuple[Instance, ...]
    processes: int
    spans: int


class Figure(NamedTuple):
    """A waterfall and what it is to the reader."""

    title: str
    drawn: Waterfall


class _Node(NamedTuple):
    """A span, several blocks that are folded, or a parent that is not in the files."""

    depth: int
    spans: tuple[Span, ...]
    missing_id: str = ""


class _Place(NamedTuple):
    """Who made a span."""

    engine_id: str
    role: str
    rank: str


def layout(trace: Sequence[Span], *, each_block: bool = False) -> Waterfall:
    """Lay out the spans of one trace; there is at least one.

    Args:
        trace: Its spans, in any order.
        each_block: Whether each block has a row, instead of one for the blocks of a transfer.
    """
    unique: dict[str, Span] = {}
    for span in trace:
        unique.setdefault(span.span_id, span)
    spans = sorted(unique.values(), key=lambda span: (span.start_ns, -(span.duration_ns or 0)))
    nodes = list(_tree(spans, each_block=each_block))
    places = _places(nodes)
    labels = _labels(spans, places)
    start_ns = spans[0].start_ns
    length_ns = max(span.end_ns or span.start_ns for span in spans) - start_ns
    with_blocks = {span.parent_id for span in spans if span.name == SpanName.BLOCK}
    told: set[str] = set()
    return Waterfall(
        trace_id=spans[0].trace_id,
        start_ns=start_ns,
        duration_ns=length_ns,
        mode=", ".join(sorted({span.text(semconv.TRANSFER_MODE) for span in spans} & set(TransferMode))),
        rows=tuple(_row(node, labels, start_ns, length_ns, with_blocks, told) for node in nodes),
        instances=tuple(_instances(spans, places, labels)),
        processes=_count_processes({(span.process, places[span.span_id].engine_id) for span in spans}),
        spans=len(spans),
    )


# ---------------------------------------------------------------------------------------------------------------- Tree


def _tree(spans: Sequence[Span], *, each_block: bool) -> Iterator[_Node]:
    """The rows in order: each span after its parent, whatever the parents are."""
    known = {span.span_id for span in spans}
    children: dict[str, list[Span]] = defaultdict(list)
    roots: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        (children if span.parent_id in known else roots)[span.parent_id].append(span)
    seen: set[str] = set()

    def below(span_id: str, depth: int) -> list[_Node]:
        """The children of a span, the last first."""
        return [_Node(depth, group) for group in reversed(_folded(children.pop(span_id, ()), each_block))]

    def walk(todo: list[_Node]) -> Iterator[_Node]:
        while todo:
            node = todo.pop()
            fresh = tuple(span for span in node.spans if span.span_id not in seen)
            if not fresh:
                continue
            seen.update(span.span_id for span in fresh)
            yield node._replace(spans=fresh)
            for span in reversed(fresh):
                todo.extend(below(span.span_id, node.depth + 1))

    for parent_id, of_parent in roots.items():
        if parent_id:
            yield _Node(0, (), parent_id)
        yield from walk([_Node(bool(parent_id), group) for group in reversed(_folded(of_parent, each_block))])
    for span in spans:  # what is left are spans that are their own ancestors
        yield from walk([_Node(0, (span,))])


def _folded(spans: Sequence[Span], each_block: bool) -> list[tuple[Span, ...]]:
    """Spans of one parent, with its blocks as one."""
    blocks = [] if each_block else [span for span in spans if span.name == SpanName.BLOCK]
    groups: list[tuple[Span, ...]] = [(span,) for span in spans if each_block or span.name != SpanName.BLOCK]
    if blocks:
        groups.append(tuple(blocks))
    return sorted(groups, key=lambda group: group[0].start_ns)


# -------------------------------------------------------------------------------------------------------------- Places


def _places(nodes: Sequence[_Node]) -> dict[str, _Place]:
    """Who made each span: one below another of its process does not repeat it."""
    places: dict[str, _Place] = {}
    processes: dict[str, tuple[str, ...]] = {}
    for span in (span for node in nodes for span in node.spans):
        place = _Place(span.text(semconv.ENGINE_ID), span.text(semconv.KV_ROLE), span.text(semconv.RANK))
        if not place.engine_id and processes.get(span.parent_id) == span.process:
            place = places[span.parent_id]
        places[span.span_id] = place
        processes[span.span_id] = span.process
    return places


def _count_processes(makers: Collection[tuple[tuple[str, ...], str]]) -> int:
    # Ids of processes repeat on other hosts, hence the engines; and what is not ours has no engine's id.
    ours = {process for process, engine_id in makers if engine_id}
    return sum(bool(engine_id) or process not in ours for process, engine_id in makers)


def _labels(spans: Sequence[Span], places: Mapping[str, _Place]) -> dict[str, str]:
    """A short name for who made each span."""
    roles: dict[str, set[str]] = defaultdict(set)
    for span in spans:
        engine_id, role, _ = places[span.span_id]
        letter = _ROLES.get(role) or _role_in(span)
        if engine_id and letter:
            roles[engine_id].add(letter)
    letters = {engine_id: min(found) for engine_id, found in roles.items() if len(found) == 1}
    engines = Counter(letters.values())
    labels = {}
    for span in spans:
        engine_id, _, rank = places[span.span_id]
        letter, short_id = letters.get(engine_id, ""), engine_id[:_SHORT_ID]
        if engines[letter] == 1:
            label = letter
        elif engine_id:
            label = f"{letter} {short_id}".strip()
        else:
            label = str(span.resource.get("service.name", "?"))
        labels[span.span_id] = f"{label}/{rank}" if rank else label
    return labels


def _role_in(span: Span) -> str:
    """What the engine of a span is in this trace, where it could be both."""
    if span.name == SpanName.RECEIVE:
        return "D"
    if span.name == SpanName.LEASE:
        return "P"
    return {"READ": "D", "WRITE": "P"}.get(span.text(semconv.TRANSFER_OPERATION), "")


def _instances(spans: Sequence[Span], places: Mapping[str, _Place], labels: Mapping[str, str]) -> Iterator[Instance]:
    shown = set()
    for span in spans:
        label = labels[span.span_id]
        names = (
            ("host", "host.name"),
            ("service", "service.name"),
            ("instance", "service.instance.id"),
            ("process", "vllm.process_id"),
        )
        where = ", ".join(f"{word} {span.resource[name]}" for word, name in names if name in span.resource)
        instance = Instance(label, places[span.span_id].engine_id, where)
        if instance not in shown:
            shown.add(instance)
            yield instance


# ---------------------------------------------------------------------------------------------------------------- Rows


def _row(
    node: _Node,
    labels: Mapping[str, str],
    axis_ns: int,
    length_ns: int,
    with_blocks: Collection[str],
    told: set[str],
) -> Row:
    if not node.spans:
        return Row(node.depth, f"parent {node.missing_id} is not in these files")
    first = node.spans[0]
    begin_ns = min(span.start_ns for span in node.spans)
    ends = [span.end_ns for span in node.spans if span.end_ns is not None]
    duration_ns = max(ends) - begin_ns if ends else None
    scale = 1 / length_ns if length_ns else 0.0
    is_block = first.name == SpanName.BLOCK
    return Row(
        depth=node.depth,
        name=_name_of_blocks(node.spans) if is_block else _name(first),
        place=labels[first.span_id],
        kind=_kind(first),
        bar=Bar((begin_ns - axis_ns) * scale, (duration_ns or 0) * scale),
        duration_ns=duration_ns,
        is_failed=any(span.is_failed for span in node.spans),
        notes=tuple(_notes(node.spans, told, has_blocks=first.span_id in with_blocks)),
        span=None if is_block else first,
        blocks=node.spans if is_block else (),
    )


def _kind(span: Span) -> Kind:
    if span.name.startswith(SpanName.HANDSHAKE):
        return Kind.HANDSHAKE
    if span.name == SpanName.TRANSFER:
        return {"READ": Kind.READ, "WRITE": Kind.WRITE}.get(span.text(semconv.TRANSFER_OPERATION), Kind.OTHER)
    kinds: dict[str, Kind] = {
        SpanName.RECEIVE: Kind.RECEIVE,
        SpanName.LEASE: Kind.LEASE,
        SpanName.BLOCK: Kind.BLOCK,
    }
    return kinds.get(span.name, Kind.OTHER)


def _name(span: Span) -> str:
    parts = [span.name or "(no name)"]
    if span.name == SpanName.TRANSFER:
        parts.append(span.text(semconv.TRANSFER_OPERATION))
        size = span.count(semconv.TRANSFER_BYTES)
        parts.append("" if size is None else size_text(size))
    elif span.name == SpanName.LEASE:
        parts.append(span.text(semconv.LEASE_OUTCOME))
    return " ".join(filter(None, parts))


def _name_of_blocks(spans: Sequence[Span]) -> str:
    count = sum(span.count(semconv.BLOCK_COUNT) or 1 for span in spans)
    if len(spans) == 1:
        local, remote = (_ids(spans[0], name, count) for name in (semconv.BLOCK_LOCAL_ID, semconv.BLOCK_REMOTE_ID))
        region = spans[0].text(semconv.BLOCK_REGION)  # without it, the same ids stand there once for each region
        return f"block{'' if count == 1 else 's'} {local}, remote {remote}{f', region {region}' if region else ''}"
    failed = sum(span.is_failed for span in spans)
    return f"{counted(count, 'block')}, {failed:,} failed" if failed else counted(count, "block")


def _ids(span: Span, name: str, count: int) -> str:
    """The id of a block, or the first and the last id of a run."""
    first = span.count(name)
    return f"{first}-{first + count - 1}" if first is not None and count > 1 else span.text(name) or "?"


def _notes(spans: Sequence[Span], told: set[str], *, has_blocks: bool) -> Iterator[str]:
    """What stands below a row.

    Args:
        spans: Of the row.
        told: Messages of failures that stand below others already: what fails a stage fails all that it is a part of.
        has_blocks: Whether the row's blocks have one of their own.
    """
    first = spans[0]
    if first.name == SpanName.RECEIVE and (parts := where_time_went(first)):
        yield parts
    if first.name == SpanName.TRANSFER and not has_blocks:
        yield from _blocks(first.count(semconv.TRANSFER_BLOCKS))
    if first.name == SpanName.LEASE:
        yield from _blocks(first.count(semconv.LEASE_BLOCKS))
    failure = next((span for span in spans if span.is_failed), None)
    if failure is not None:
        message = "" if failure.message in told else failure.message
        told.add(failure.message)
        lines = message.strip().splitlines() or [""]
        peer = f" ({peer_of(failure)})" if peer_of(failure) else ""
        yield f"failed: {failure.text(semconv.ERROR_TYPE) or 'no error.type'}{peer}: {lines[0]}".rstrip(": ")
        yield from lines[1:_MESSAGE_LINES]
        if len(lines) > _MESSAGE_LINES:
            yield f"and {len(lines) - _MESSAGE_LINES:,} more lines"


def _blocks(count: int | None) -> Iterator[str]:
    if count is not None:
        yield counted(count, "block")


def where_time_went(span: Span) -> str:
    """The parts of a receive that it tells, with their share of the whole.

    Parts of a failed one that took no time at all are stages that never came.
    """
    whole = (span.duration_ns or 0) / 1e9
    parts = []
    for word, name in _PARTS:
        seconds = span.seconds(name)
        if seconds is not None and (seconds or not span.is_failed):
            share = f" ({seconds / whole:.0%})" if 0 < seconds <= whole else ""
            parts.append(f"{word} {milliseconds(round(seconds * 1e9))}{share}")
    return ", ".join(parts)


# --------------------------------------------------------------------------------------------------------------- Texts


def about(drawn: Waterfall) -> list[str]:
    """What a heading says of a trace besides its id: when, in which mode, and how much of it there is."""
    counts = f"{counted(drawn.spans, 'span')} of {counted(drawn.processes, 'process', 'es')}"
    return [timestamp(drawn.start_ns), *filter(None, [drawn.mode]), counts]


def counted(count: int, thing: str, plural: str = "s") -> str:
    """A number of things."""
    return f"{count:,} {thing}{'' if count == 1 else plural}"


def milliseconds(duration_ns: int | None) -> str:
    """A duration for a person."""
    if duration_ns is None:
        return "?"
    value = duration_ns / 1e6
    return f"{value:,.1f} ms" if value >= 1 or not value else f"{value:.3f} ms"


def size_text(size_bytes: int) -> str:
    """A number of bytes for a person."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:  # noqa: PLR2004
            break
        value, unit = value / 1024, larger
    return f"{value:,.1f} {unit}" if unit != "B" else f"{size_bytes} B"
