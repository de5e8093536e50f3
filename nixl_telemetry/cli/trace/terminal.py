# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Waterfalls and lists of traces in a terminal, or in a file: colours add to what is there without them."""

import textwrap
from collections.abc import Sequence
from typing import Final, NamedTuple

from rich.text import Text

from nixl_telemetry.audit.chain import timestamp
from nixl_telemetry.cli.output import Printer, plain
from nixl_telemetry.cli.trace.selection import Summary
from nixl_telemetry.cli.trace.waterfall import Bar, Figure, Instance, Kind, Row, about, milliseconds, size_text

_WIDTHS: Final = range(60, 201)
_NAME_SHARE: Final = 0.42
_PLACE_WIDTH: Final = 14
_SHORTEST_BAR: Final = 10
_DEEPEST: Final = 8
_INSTANCES: Final = 20
_GAP: Final = "  "
_FAILED: Final = "bold red"
_STYLES: Final = {
    Kind.READ: "cyan",
    Kind.WRITE: "magenta",
    Kind.HANDSHAKE: "yellow",
    Kind.LEASE: "blue",
    Kind.RECEIVE: "green",
    Kind.BLOCK: "dim cyan",
    Kind.OTHER: "white",
}


class Terminal(Printer):
    """Prints what fits a terminal. Bars are the only texts that are not escaped."""

    def __init__(self) -> None:
        super().__init__()
        self._width = min(max(self._console.width, _WIDTHS[0]), _WIDTHS[-1])
        is_ascii = self._console.options.ascii_only
        self._full, self._cut = ("#", "~") if is_ascii else ("█", "…")

    def paragraph(self, text: str, indent: int = 0, style: str = "") -> None:
        """Print a text that is broken where the terminal ends."""
        margin = " " * indent
        wrapped = textwrap.wrap(
            plain(text), self._width, initial_indent=margin, subsequent_indent=margin + _GAP, break_on_hyphens=False
        )
        for line in wrapped:
            self._console.print(Text(line, style))

    def table(self, summaries: Sequence[Summary]) -> None:
        """Print a list of traces. The lines stay whole: the last column, the id, can be of any length."""
        head = ("time", "mode", "span", "took", "blocks", "bytes", "outcome", "peer", "request")
        rows = [head, *map(_cells, summaries)]
        widths = [max(len(plain(row[column])) for row in rows) for column in range(len(head))]
        for number, row in enumerate(rows):
            cells = [plain(cell) for cell in row]
            padded = [
                cell.rjust(width) if column in {"took", "blocks", "bytes"} else cell.ljust(width)
                for cell, width, column in zip(cells, widths, head, strict=True)
            ]
            style = "bold" if not number else "red" if summaries[number - 1].is_failed else ""
            self._console.print(Text(_GAP.join(padded).rstrip(), style))

    def waterfall(self, figure: Figure) -> None:
        """Print the spans of a trace, a line each."""
        title, drawn = figure
        self.paragraph(_GAP.join([f"{title} {drawn.trace_id}", *about(drawn)]), style="bold")
        for instance in drawn.instances[:_INSTANCES]:
            self.paragraph(_described(instance), indent=2, style="dim")
        if len(drawn.instances) > _INSTANCES:
            self.paragraph(f"and {len(drawn.instances) - _INSTANCES:,} more", indent=2, style="dim")
        widths = self._widths(drawn.rows)
        axis = "0 ms" + milliseconds(drawn.duration_ns).rjust(widths.bar - len("0 ms"))
        self._console.print(Text(" " * (widths.name + widths.place + 2 * len(_GAP)) + axis, "dim"))
        for row in drawn.rows:
            self._row(row, widths)

    def _row(self, row: Row, widths: "_Widths") -> None:
        if row.bar is None:
            self.paragraph(_name(row), style="dim")
            return
        style = _FAILED if row.is_failed else _STYLES[row.kind]
        begin, length = _cells_of(row.bar, widths.bar)
        bar = (" " * begin + self._full * length).ljust(widths.bar)
        parts = (
            (self._fit(_name(row), widths.name), _FAILED if row.is_failed else ""),
            (self._fit(plain(row.place), widths.place), "dim"),
            (bar, style),
            (milliseconds(row.duration_ns).rjust(widths.took), ""),
        )
        self._console.print(Text(_GAP).join(Text(text, style) for text, style in parts))
        for note in row.notes:
            self.paragraph(note, indent=_indent(row) + 2, style="red" if row.is_failed else "dim")

    def _widths(self, rows: Sequence[Row]) -> "_Widths":
        place = min(max(len(plain(row.place)) for row in rows), _PLACE_WIDTH)
        took = max(len(milliseconds(row.duration_ns)) for row in rows)
        left = self._width - place - took - 3 * len(_GAP)
        # The ids of blocks are all that their rows have to say: bars give way to them.
        ids = min(max((len(_name(row)) for row in rows if row.blocks), default=0), left - _SHORTEST_BAR)
        name = min(max(len(_name(row)) for row in rows), max(ids, int(self._width * _NAME_SHARE)))
        return _Widths(name, place, max(_SHORTEST_BAR, left - name), took)

    def _fit(self, text: str, width: int) -> str:
        return text.ljust(width) if len(text) <= width else text[: width - 1] + self._cut


class _Widths(NamedTuple):
    """Columns of a waterfall, in characters."""

    name: int
    place: int
    bar: int
    took: int


def _indent(row: Row) -> int:
    return 2 * min(row.depth, _DEEPEST)


def _name(row: Row) -> str:
    return " " * _indent(row) + plain(row.name)


def _cells_of(bar: Bar, width: int) -> tuple[int, int]:
    """Where a bar begins and how long it is, in characters: one at least."""
    begin = min(int(bar.begin * width), width - 1)
    return begin, max(1, min(round((bar.begin + bar.length) * width), width) - begin)


def _described(instance: Instance) -> str:
    engine = f"engine {instance.engine_id}" if instance.engine_id else ""
    return f"{instance.label}{_GAP}{', '.join(filter(None, (engine, instance.where)))}".rstrip()


def _cells(summary: Summary) -> tuple[str, ...]:
    return (
        timestamp(summary.start_ns),
        summary.mode or "-",
        summary.what or "-",
        milliseconds(summary.took_ns),
        "-" if summary.blocks is None else f"{summary.blocks:,}",
        "-" if summary.size_bytes is None else size_text(summary.size_bytes),
        summary.outcome,
        summary.peer or "-",
        summary.request_id or f"(trace {summary.trace_id})",
    )
