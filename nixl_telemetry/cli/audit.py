# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Reading and verifying audit logs. Both work on copies, on a machine without vLLM.

What a log holds may have been put there by anybody: nothing of it reaches the terminal unescaped.
"""

import contextlib
import heapq
import json
import re
import resource
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from nixl_telemetry.audit.chain import AuditKeyError, Line, read_key, timestamp
from nixl_telemetry.audit.findings import Finding, Kind, Report, Summary
from nixl_telemetry.audit.scan import lines_of
from nixl_telemetry.audit.streams import AuditPathError, Stream, find_streams
from nixl_telemetry.audit.verify import verify as verify_streams
from nixl_telemetry.cli import options
from nixl_telemetry.cli.output import CommandError, Exit, Printer, complain, failing, print_json
from nixl_telemetry.signals import semconv

app = typer.Typer(help="Read and verify the audit trail.", no_args_is_help=True)

_LINK_MEMBERS: Final = frozenset({"seq", "time", "event", "prev", "hash"})
_UNIT_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_EXCERPT_BYTES: Final = 120
_LISTED: Final = 50
"""Findings of a stream that are listed for a person."""

_Paths = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH...",
        help="Folders with audit logs, or files; a file stands for its whole stream.",
        show_default=False,
    ),
]


class _Shown(NamedTuple):
    time: str
    where: str
    stream: str
    line: Line | None
    data: bytes


@app.command()
def show(
    paths: _Paths,
    event: Annotated[list[str] | None, typer.Option(help="Only this event; may be given several times.")] = None,
    peer: Annotated[
        str | None, typer.Option(help="Only records whose peer's host:port or engine id contains this.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Only records from then on: 2026-01-31T12:00, or 90s, 15m, 2h, 7d."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Print the records of all streams in the order of time. This verifies nothing."""
    with _reading():
        begin = _parse_since(since) if since else ""
        streams = find_streams(paths)
        out = Printer()
        unreadable = 0
        for shown in _merged(streams):
            if shown.line is None:
                unreadable += 1
                if not (as_json or event or peer):
                    excerpt = shown.data[:_EXCERPT_BYTES].decode("utf-8", "replace")
                    out.line((f"{shown.where} is no record: {excerpt}", "red"))
            elif _matches(shown.line, event, peer, begin):
                if as_json:
                    typer.echo(json.dumps(shown.line.members))
                else:
                    out.line(*_parts(shown.line, shown.stream if len(streams) > 1 else None))
        if unreadable:
            lines = "1 line is no record" if unreadable == 1 else f"{unreadable:,} lines are no records"
            complain(f"{lines}: `nixl-telemetry audit verify` says why")


@app.command()
def verify(
    paths: _Paths,
    key_file: Annotated[Path | None, typer.Option(help="The key that the processes had (audit_key_file).")] = None,
    records: Annotated[
        int | None, typer.Option(min=0, help="How many records nixl_audit_records_total counted, of all streams given.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Look for changed, removed, moved and added records.

    Exits with 0 if all is well, notes included; with 1 if something was changed or is missing; with 2 if that could not
    be told: a path, a log or a key is not there.
    """
    with _reading():
        key = None if key_file is None else read_key(key_file)
        report = verify_streams(paths, key, records)
        if as_json:
            print_json(_as_json(report))
        else:
            _print_report(Printer(), report)
    if report.errors:
        untold = all(finding.kind is Kind.KEY_MISSING for finding in report.errors)
        raise typer.Exit(Exit.UNKNOWN if untold else Exit.INCOMPATIBLE)


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Says what cannot be read, and ends the command."""
    with failing():
        try:
            yield
        except (AuditPathError, AuditKeyError) as error:
            raise CommandError(str(error)) from None
        except BrokenPipeError:  # typer's business: whoever reads has seen enough
            raise
        except OSError as error:
            raise CommandError(f"{error.filename} cannot be read: {error.strerror}.") from None


def _merged(streams: list[Stream]) -> Iterator[_Shown]:
    # Each stream holds a file open.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return heapq.merge(*map(_lines, streams), key=lambda shown: shown.time)


def _lines(stream: Stream) -> Iterator[_Shown]:
    at = ""
    for place, raw in lines_of(stream):
        line = Line.parse(raw.data)
        # What cannot be read stays behind the record before it.
        at = line.time if line else at
        yield _Shown(at, f"{stream.path_of(place.file)}:{place.line}", stream.name, line, raw.data)


def _matches(line: Line, events: list[str] | None, peer: str | None, begin: str) -> bool:
    if (events and line.event not in events) or line.time < begin:
        return False
    if peer is None:
        return True
    host, port = line.members.get(semconv.SERVER_ADDRESS, ""), line.members.get(semconv.SERVER_PORT, "")
    return peer in f"{host}:{port}" or peer in str(line.members.get(semconv.REMOTE_ENGINE_ID, ""))


def _parse_since(text: str) -> str:
    """The time that a user means, as lines have it."""
    if match := re.fullmatch(r"(\d{1,9})([smhd])", text):
        return timestamp(max(0, time.time_ns() - int(match[1]) * _UNIT_SECONDS[match[2]] * 10**9))
    try:
        since = datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(
            f"--since is {text!r}: give a time as 2026-01-31T12:00 (UTC), or 90s, 15m, 2h, 7d."
        ) from None
    since = since.replace(tzinfo=UTC) if since.tzinfo is None else since
    return timestamp(int(since.timestamp()) * 10**9)


def _parts(line: Line, stream: str | None) -> Iterator[str | tuple[str, str]]:
    """A record as it is printed, with styles."""
    members = line.members
    decision = members.get("decision")
    bad = semconv.ERROR_TYPE in members or decision == "rejected"
    yield line.time, "dim"
    yield f"  {line.event}", "red" if bad else "yellow" if decision == "bypassed" else "bold"
    for name, value in members.items():
        if name not in _LINK_MEMBERS:
            yield f" {name}=", "dim"
            yield _value(value)
    yield f"  #{line.seq}", "dim"
    if stream:
        yield f" {stream}", "dim"


def _value(value: Any) -> str:
    return value if isinstance(value, str) and re.fullmatch(r"[!#-\[\]-~]+", value) else json.dumps(value)


def _print_report(out: Printer, report: Report) -> None:
    for stream in report.streams:
        out.line((stream.stream, "bold"))
        out.line("  ", _heading(stream))
        _print_findings(out, [finding for finding in report.findings if finding.stream == stream.stream])
    _print_findings(out, [finding for finding in report.findings if not finding.stream])
    counts = f"{_number(len(report.streams), 'stream')}, {_number(report.records, 'record')}"
    if report.errors:
        out.line((f"{counts}: {_number(len(report.errors), 'problem')}.", "bold red"))
    else:
        out.line((f"{counts}: nothing was changed, and nothing is missing.", "green"))


def _heading(stream: Summary) -> str:
    parts = [_number(stream.files, "file"), _number(stream.records, "record")]
    if stream.first_time:
        parts.append(f"{stream.first_time} to {stream.last_time}")
    parts += [f"key {stream.key}" if stream.key else "no key", "closed" if stream.closed else "not closed"]
    return ", ".join(parts)


def _print_findings(out: Printer, findings: list[Finding]) -> None:
    for finding in findings[:_LISTED]:
        label, style = ("note", "yellow") if finding.is_note else ("error", "red")
        where = finding.file.name if finding.file else ""
        where += f":{finding.line}" if finding.line else ""
        text = f"{where}  {finding.message} {finding.advice}".strip()
        out.line("  ", (f"{label:<5} {finding.kind}", style), f"  {text}")
    if len(findings) > _LISTED:
        out.line(f"  and {len(findings) - _LISTED:,} more; --json has all")


def _number(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _as_json(report: Report) -> Mapping[str, Any]:
    findings = [
        {
            **asdict(finding),
            "file": finding.file and str(finding.file),
            "note": finding.is_note,
            "advice": finding.advice,
        }
        for finding in report.findings
    ]
    return {"ok": not report.errors, "streams": [asdict(stream) for stream in report.streams], "findings": findings}
