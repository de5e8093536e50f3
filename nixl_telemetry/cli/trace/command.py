# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``nixl-telemetry trace show``: what to show, where to, and what to say beside it."""

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from nixl_telemetry.cli.output import CommandError, failing, plain
from nixl_telemetry.cli.trace import selection
from nixl_telemetry.cli.trace.page import BEGIN, page
from nixl_telemetry.cli.trace.reading import TraceFiles, open_files
from nixl_telemetry.cli.trace.selection import Loaded, Selection, Survey, linked, load, survey
from nixl_telemetry.cli.trace.terminal import Terminal
from nixl_telemetry.cli.trace.waterfall import CLOCKS, Figure, counted, layout


class _Group(TyperGroup):
    """Says what to write where ``show`` was forgotten."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # typer has had several classes of contexts
        """The command that is meant."""
        if args[0] not in self.commands:
            ctx.fail(f"No such command '{plain(args[0])}'; files are read by: nixl-telemetry trace show FILE")
        return super().resolve_command(ctx, args)


app = typer.Typer(help="Follow requests across prefill and decode.", no_args_is_help=True, cls=_Group)

_LAST: Final = 50
_LINKED: Final = 20
"""Linked traces that are drawn."""


@app.command()
def show(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Files that instances write (trace_file), of one instance or of several. Those that they were "
            "rotated to, FILE.1 and so on, are read too.",
            show_default=False,
        ),
    ],
    request: Annotated[
        str | None, typer.Option(metavar="ID", help="Draw the request with this in its id: the client's id will do.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(metavar="TRACE_ID", help="Draw this trace; the first digits will do.")
    ] = None,
    slowest: Annotated[bool, typer.Option("--slowest", help="Draw the one that waited longest for its KV.")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Draw all with a span that failed.")] = False,
    blocks: Annotated[bool, typer.Option("--blocks", help="Draw each block, if there are spans of blocks.")] = False,
    last: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="How many to show at most; the newest.", show_default=str(_LAST)),
    ] = None,
    html: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Write an HTML page instead, with all attributes. It replaces an earlier page."
        ),
    ] = None,
) -> None:
    """List the latest requests in trace files, or draw some as waterfalls.

    Exits with 2 if there is nothing to show, or a file cannot be read.
    """
    with failing(), open_files(files) as opened:
        if html is not None:
            _spare(html, opened)
        chosen = _selection(request, trace, slowest=slowest, failed=failed)
        wanted = chosen or selection.latest()
        found = survey(opened, wanted, 1 if slowest else last or _LAST)
        remarks = list(_remarks(opened, found, is_best_of_all=slowest))
        if not found.chosen:
            nothing = f"there is no trace {wanted.what} {_among(opened, found)}"
            advice = [wanted.advice] if wanted.advice and found.traces else []
            raise CommandError("; ".join([nothing, *advice, *remarks]))
        out = Terminal()
        if chosen is None and html is None:
            out.table(found.chosen)
        else:
            figures, more = _figures(opened, found, each_block=blocks and html is None)
            remarks += more
            if html is not None:
                _write(Path(html), figures, remarks)
                out.line(f"wrote {html}: {counted(len(figures), 'trace')}")
            else:
                if len(found.chosen) > 1:
                    out.line((f"{len(found.chosen):,} traces {wanted.what}", "bold"))
                _print(out, figures)
        if last is not None and slowest:
            remarks.append("--last changes nothing: --slowest draws one")
        if blocks and html is not None:
            remarks.append("--blocks changes nothing: a page always has a table of all blocks")
        elif blocks and chosen is None:
            remarks.append("--blocks changes nothing in a list; add --request, --trace, --slowest or --failed")
        for remark in remarks:
            out.paragraph(f"note: {remark}", style="yellow")


def _selection(request: str | None, trace: str | None, *, slowest: bool, failed: bool) -> Selection | None:
    """What was asked for; ``None`` if nothing was."""
    if sum((request is not None, trace is not None, slowest, failed)) > 1:
        raise CommandError("--request, --trace, --slowest and --failed exclude each other")
    if request is not None:
        if not request.strip():
            raise CommandError("--request is empty; give the id of a request, or a part of it")
        _refuse_option("--request", request.strip(), "give the part of the id after it")
        return selection.of_request(request.strip())
    if trace is not None:
        if not re.fullmatch(r"[0-9a-fA-F]{4,32}", trace):
            raise CommandError(
                f"--trace {trace!r} is no trace id: 32 hexadecimal digits, or the first of them, 4 at least"
            )
        return selection.of_trace(trace.lower())
    if failed:
        return selection.failed()
    return selection.slowest() if slowest else None


def _remarks(files: TraceFiles, found: Survey, *, is_best_of_all: bool) -> Iterator[str]:
    if str(files.unread):
        yield f"{files.unread}: broken, or still being written"
    if not found.is_whole:
        yield f"there are more than {selection.TRACE_LIMIT:,} traces, and not all were looked at"
    if found.wanted > len(found.chosen) and not is_best_of_all:
        yield f"these are the last {len(found.chosen):,} of {found.wanted:,}; --last shows more"


def _among(files: TraceFiles, found: Survey) -> str:
    names = ", ".join(map(str, files.asked_for))
    return f"among the {found.traces:,} in {names}" if found.traces else f"in {names}: no trace was written yet"


def _figures(files: TraceFiles, found: Survey, *, each_block: bool) -> tuple[list[Figure], list[str]]:
    """What to draw, each with its title, and what to say beside it."""
    loaded = load(files, [summary.trace_id for summary in found.chosen])
    others = [trace_id for trace_id in linked(loaded.traces.values()) if trace_id not in loaded.traces]
    below = load(files, others[:_LINKED]) if others else Loaded({}, 0)
    remarks = []
    left_out = loaded.left_out + below.left_out
    if left_out:
        remarks.append(f"{counted(left_out, 'span')} beyond {selection.SPAN_LIMIT:,} are not drawn")
    if len(others) > _LINKED:
        remarks.append(f"{counted(len(others) - _LINKED, 'linked trace')} more are not drawn")
    figures = []
    for spans in loaded.traces.values():
        figures.append(Figure("trace", layout(spans, each_block=each_block)))
        figures += [
            Figure("linked trace", layout(other, each_block=each_block))
            for trace_id in linked([spans])
            if (other := below.traces.pop(trace_id, None))
        ]
    if not figures:
        raise CommandError("the files were emptied while they were read; try again")
    return figures, remarks


def _print(out: Terminal, figures: Sequence[Figure]) -> None:
    for figure in figures:
        out.waterfall(figure)
        out.line("")
    if any(figure.drawn.processes > 1 for figure in figures):
        out.paragraph(CLOCKS, style="dim")


def _refuse_option(option: str, value: str, if_meant: str) -> None:
    """Refuse a value that is an option more likely: whose own value was forgotten takes the next one for it."""
    if value.startswith("-"):
        raise CommandError(f"{option} {value!r}: its value seems to be missing; if it begins with '-', {if_meant}")


def _spare(name: str, files: TraceFiles) -> None:
    """Refuse to write over what is no page: a forgotten value of ``--html`` makes the next file one."""
    _refuse_option("--html", name, f"write ./{name}")  # a path that begins with "./" forgets that
    path = Path(name)
    with _writing(path):
        if path.exists() and any(path.samefile(file) for file in files.paths if file.exists()):
            raise CommandError(f"{path} is a trace file, and would be lost; give --html another name")
        if path.is_file():  # what else there is, as a pipe, has nothing to lose
            with path.open("rb") as stream:
                begin = stream.read(len(BEGIN))
            if begin not in (b"", BEGIN.encode()):
                raise CommandError(
                    f"{path} is no page of this command, and would be lost; give --html another name, or remove it"
                )


def _write(path: Path, figures: Sequence[Figure], remarks: Sequence[str]) -> None:
    with _writing(path), path.open("w", encoding="utf-8") as stream:
        stream.writelines(page(figures, remarks))


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None
