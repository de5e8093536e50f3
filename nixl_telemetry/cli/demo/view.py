# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""How the demo looks: evidence in, something that Rich prints out."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from nixl_telemetry.cli.demo.evidence import ModeEvidence, RejectionEvidence
from nixl_telemetry.cli.demo.folder import TRACE_FILE
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.catalogue import COMMON_LABELS, CONNECTOR_INFO, HANDSHAKE_REJECTIONS, MODE_CONFLICTS
from nixl_telemetry.signals.semconv import SpanName
from nixl_telemetry.testbed import Completion, MetricsSnapshot, ReceivedSpan

MODE_TITLES: Final = {
    "pull": "pull: the decode instance READs the KV cache from the prefill instance",
    "push": "push: the prefill instance WRITEs the KV cache to the decode instance",
}
"""What each mode is."""
REJECTION_TITLE: Final = "mismatch: a push decode instance meets a pull prefill instance"
"""What the last part is."""
_ADVICE: Final = (
    "Give both sides the same kv_connector (here the decode instance has NixlPushConnector, the prefill instance "
    "NixlPullConnector) and restart the one that is wrong; a retry cannot help."
)
_HIDDEN_LABELS: Final = {*COMMON_LABELS, "vllm_version", "nixl_version", "compat_hash", "handshake_enforced"}
"""Labels that are the same on every sample of a mode; what matters of them stands above the table."""
_ROLES: Final = {"kv_producer": "prefill", "kv_consumer": "decode"}
_HASH_LETTERS: Final = 12
_WAITS: Final = {
    "handshake": semconv.RECEIVE_HANDSHAKE_DURATION,
    "queue": semconv.RECEIVE_QUEUE_DURATION,
    "transfer": semconv.RECEIVE_TRANSFER_DURATION,
    "observation delay": semconv.RECEIVE_OBSERVATION_DELAY,
    "prefill": semconv.RECEIVE_REMOTE_DURATION,
}
"""The longer parts of a wait for KV."""
_NAME_WIDTH: Final = 36
_INDENT: Final = 4
_MILLISECOND: Final = 1e-3


def chapter(number: str, title: str) -> RenderableType:
    """The headline of a part."""
    return Group("", Rule(Text(f"{number}  {title}", "bold"), align="left", style="cyan"))


def request_line(tokens: int, answer: Completion) -> Text:
    """One request that was answered."""
    text = f"  request of {tokens:>3} tokens: {len(answer.token_ids) or '?'} tokens after {duration(answer.seconds)}"
    return Text(text, "dim")


def mode_report(seen: ModeEvidence) -> RenderableType:
    """Spans, metrics and the hash of one mode."""
    info = [sample.labels for snapshot in seen.metrics.values() for sample in snapshot.select(CONNECTOR_INFO.name)]

    def told(label: str) -> str:
        return ", ".join(sorted({labels[label] for labels in info})) or "?"

    equal = told("compat_hash") == seen.stock_hash
    verdict = Text("the same as a stock instance's", "green") if equal else Text("NOT a stock instance's", "bold red")
    labels = f'transfer_mode="{seen.mode}" and connector_version="{told("connector_version")}"'
    return Group(
        _heading("Versions ", f"vLLM {told('vllm_version')}, NIXL {told('nixl_version')}"),
        _heading("Compatibility hash ", f"{_short(told('compat_hash'))} on prefill and decode, ", verdict),
        _heading("Spans"),
        _indented(span_tree(seen.spans)),
        _heading("Metrics ", f"that are not 0, each one labelled {labels}"),
        _indented(metrics_table(seen.metrics)),
    )


def rejection_report(seen: RejectionEvidence) -> RenderableType:
    """The same rejection as the client, the trace, the log and the metrics tell it."""
    total = seen.metrics.value(HANDSHAKE_REJECTIONS.name) or 0
    local, remote = (
        seen.conflict.get(name, "?") for name in (semconv.MODE_CONFLICT_EXPECTED, semconv.MODE_CONFLICT_FOUND)
    )
    error = seen.handshake.attributes.get(semconv.ERROR_TYPE, "?") if seen.handshake else "?"
    happened = (
        f"The {local} decode instance refused its {remote} peer ({error}) before any data moved; "
        f"handshakes rejected: {number(total)}."
    )
    return Group(
        _heading("Client ", f"HTTP {seen.http_status}"),
        _indented(Text(seen.body, "dim")),
        _heading("Spans"),
        _indented(span_tree(seen.spans)),
        _heading("Log of the decode instance"),
        _indented(Text(_from_event(seen.log_line), "yellow")),
        _heading("Metrics of the decode instance"),
        _indented(metrics_table({"decode": seen.metrics}, only=(HANDSHAKE_REJECTIONS.name, MODE_CONFLICTS.name))),
        "",
        Panel(_words({"Why": seen.reason, "What happened": happened, "What to do": _ADVICE}), border_style="yellow"),
    )


def ending(missing: Sequence[str], out: Path) -> RenderableType:
    """The last lines."""
    if missing:
        lines = "\n".join(f"  - {what}" for what in missing)
        return Group("", Text(f"Not seen:\n{lines}", "bold red"), Text(f"What was measured, and the logs: {out}"))
    return Group(
        "",
        Text.assemble(("Everything was seen. ", "bold green"), f"Summary, spans, metrics, logs: {out}"),
        Text(f"A request across both instances: nixl-telemetry trace show {out / TRACE_FILE} --slowest"),
    )


# --------------------------------------------------------------------------------------------------------------- Spans


def span_tree(spans: Iterable[ReceivedSpan]) -> RenderableType:
    """A tree for each instance; a span whose parent is another instance's, or none of these, is a root.

    Spans of blocks are left out: the transfer says how many there were.
    """
    spans = sorted((span for span in spans if span.name != SpanName.BLOCK), key=lambda span: span.start_ns)
    by_id = {span.span_id: span for span in spans}
    children: dict[str, list[ReceivedSpan]] = {}
    trees: dict[str, Tree] = {}

    def add(tree: Tree, span: ReceivedSpan, depth: int) -> None:
        branch = tree.add(_span_line(span, depth))
        for event in span.events:
            branch.add(_event_line(event.name, event.attributes))
        for child in children.get(span.span_id, ()):
            add(branch, child, depth + 1)

    def parent_here(span: ReceivedSpan) -> ReceivedSpan | None:
        parent = by_id.get(span.parent_span_id)
        # Stages of a handshake do not say whose they are; they are always its own.
        is_another_s = parent and semconv.KV_ROLE in span.attributes and _instance(span) != _instance(parent)
        return None if is_another_s else parent

    for span in spans:
        if parent_here(span):
            children.setdefault(span.parent_span_id, []).append(span)
    for span in spans:
        if not parent_here(span):
            instance = _instance(span)
            tree = trees.setdefault(instance, Tree(Text(instance, "bold"), guide_style="dim"))
            add(tree, span, 1)
    return Group(*trees.values())


def _instance(span: ReceivedSpan) -> str:
    role = str(span.attributes.get(semconv.KV_ROLE, "?"))
    return f"{_ROLES.get(role, role)} ({span.attributes.get(semconv.TRANSFER_MODE, '?')})"


def _span_line(span: ReceivedSpan, depth: int) -> Text:
    failed = span.status == "ERROR"
    seconds = span.attributes.get(semconv.TRANSFER_DURATION, span.seconds)
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(f"{span.name:<{_NAME_WIDTH - _INDENT * depth}}", "red" if failed else "cyan" if depth == 1 else "")
    line.append(f"{duration(seconds):>8}  ")
    if failed:
        line.append(f"error.type={span.attributes.get(semconv.ERROR_TYPE, '?')}  ", "bold red")
    line.append(_details(span))
    return line


def _details(span: ReceivedSpan) -> Text:
    attributes = span.attributes
    match span.name:
        case SpanName.COMPAT_HASH:
            factors = sum(key.startswith(semconv.COMPAT_FACTOR_PREFIX) for key in attributes)
            return Text(f"{_short(str(attributes.get(semconv.COMPAT_HASH)))} of {factors} factors", "dim")
        case SpanName.HANDSHAKE:
            peer = f"{attributes.get(semconv.SERVER_ADDRESS)}:{attributes.get(semconv.SERVER_PORT)}"
            return Text(f"{peer} ({attributes.get(semconv.HANDSHAKE_PURPOSE)})", "dim")
        case SpanName.RECEIVE:
            waits = {label: attributes.get(key) for label, key in _WAITS.items()}
            return Text(", ".join(f"{label} {duration(wait)}" for label, wait in waits.items() if wait), "dim")
        case SpanName.LEASE:
            return Text(
                f"{attributes.get(semconv.LEASE_BLOCKS)} blocks, {attributes.get(semconv.LEASE_OUTCOME)}", "dim"
            )
        case SpanName.TRANSFER:
            operation = str(attributes.get(semconv.TRANSFER_OPERATION))
            blocks = f"{attributes.get(semconv.TRANSFER_BLOCKS)} blocks"
            moved = attributes.get(semconv.TRANSFER_BYTES)
            # The end lies in this gap: vLLM asks NIXL only once per engine step.
            gap = duration(attributes.get(semconv.TRANSFER_OBSERVATION_DELAY, 0.0))
            size = "? bytes" if moved is None else size_of(moved)
            return Text.assemble(
                (operation, "bold"), f"  {blocks:>10}  {size:>9}", (f"  ended in the last {gap}", "dim")
            )
    return Text()


def _event_line(name: str, attributes: Mapping[str, Any]) -> Text:
    values = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in attributes.items())
    return Text.assemble((f"event {name}", "yellow"), f"  {values}")


# ------------------------------------------------------------------------------------------------------------- Metrics


def metrics_table(metrics: Mapping[str, MetricsSnapshot], only: Sequence[str] = ()) -> Table:
    """The NIXL samples that are not 0, a column for each instance; a histogram is its count and its mean.

    Args:
        metrics: What each instance exposed.
        only: Names to show; by default all.
    """
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    table.add_column("metric", overflow="fold", ratio=1)
    for role in metrics:
        table.add_column(role, justify="right", no_wrap=True)
    rows: dict[str, dict[str, str]] = {}
    for role, snapshot in metrics.items():
        for title, name, value in _values(snapshot):
            if not only or name in only:
                rows.setdefault(title, {})[role] = value
    for title in sorted(rows):
        name, _, labels = title.partition(" ")
        table.add_row(Text.assemble(name, (f" {labels}", "dim")), *(rows[title].get(role, "-") for role in metrics))
    return table


def _values(snapshot: MetricsSnapshot) -> Iterable[tuple[str, str, str]]:
    """Title, name and value of each row."""
    sums = {(sample.name, *sample.labels.items()): sample.value for sample in snapshot.samples}
    for sample in snapshot.samples:
        if "nixl" not in sample.name or not sample.value or sample.name.endswith(("_created", "_bucket", "_sum")):
            continue
        name, value = sample.name, _with_unit(sample.name, sample.value)
        if name.endswith("_count"):
            name = name.removesuffix("_count")
            mean = sums[f"{name}_sum", *sample.labels.items()] / sample.value
            value = f"{number(sample.value)}, mean {_with_unit(name, mean)}"
        labels = " ".join(
            f"{key}={label}" for key, label in sample.labels.items() if key not in _HIDDEN_LABELS and label
        )
        yield f"{name} {labels}", name, value


# --------------------------------------------------------------------------------------------------------------- Words


def duration(seconds: float) -> str:
    """Seconds, or a smaller unit."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= _MILLISECOND else f"{seconds * 1e6:.0f} µs"


def size_of(count: float) -> str:
    """Bytes, or greater units."""
    for factor, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def number(value: float) -> str:
    """A count."""
    return f"{value:.6g}"


def _with_unit(name: str, value: float) -> str:
    if "seconds" in name:
        return duration(value)
    return size_of(value) if "bytes" in name else number(value)


def _short(digest: str) -> str:
    return f"{digest[:_HASH_LETTERS]}…" if len(digest) > _HASH_LETTERS else digest


def _from_event(line: str) -> str:
    """A log line without what vLLM's handler puts before the message."""
    start = line.find("event=")
    return line[max(start, 0) :]


def _heading(title: str, *rest: str | Text) -> RenderableType:
    return Group("", Text.assemble("  ", (title, "bold"), *rest))


def _words(paragraphs: Mapping[str, str]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for title, text in paragraphs.items():
        grid.add_row(Text(title, "bold"), text)
    return grid


def _indented(content: RenderableType) -> RenderableType:
    return Padding(content, (0, 0, 0, 4), expand=False)
