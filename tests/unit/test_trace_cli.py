# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""`nixl-telemetry trace show`: what it finds and draws, and what broken or hostile files cannot do to it."""

import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings, strategies as st
from typer.testing import CliRunner, Result

from nixl_telemetry.cli.main import app
from nixl_telemetry.cli.trace import reading, selection
from nixl_telemetry.cli.trace.page import BEGIN
from nixl_telemetry.cli.trace.reading import open_files
from nixl_telemetry.cli.trace.waterfall import Kind, layout, milliseconds, size_text
from tests.support.trace_files import D_HOST, MS, P_HOST, REQUEST_ID, START, TRACE, D, P, Raw, line, pull, span, write

ROOT: Final = Path(__file__).resolve().parents[2]
OTHER: Final = "00000000000000000000000000abcdef"
EVIL: Final = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u202e\u2066[bold red]x[/]<script>alert(1)</script>\"'&"


def run(*arguments: object, columns: int = 120) -> Result:
    return CliRunner().invoke(app, ["trace", "show", *map(str, arguments)], env={"COLUMNS": str(columns)})


def shown(result: Result) -> list[str]:
    """The lines that a command printed."""
    assert result.exit_code == 0, result.output
    return [text.rstrip() for text in result.stdout.splitlines()]


def refused(result: Result) -> str:
    """The one line with which it gave up."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (text,) = result.stderr.splitlines()
    return str(text)


def many(*numbers: int) -> list[str]:
    """Requests, one a second: number 7 is `r-07` in trace 8, since there is no trace 0."""
    return [text for number in numbers for text in pull(0, f"{number + 1:032x}", f"r-{number:02}", number * 1e3)]


def read(path: Path) -> tuple[list[reading.Span], reading.Unread]:
    """What is in a file, and what is not."""
    with open_files([path]) as files:
        return list(files.spans()), files.unread


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """One request, by both instances."""
    return write(tmp_path / "trace.jsonl", *pull())


# --------------------------------------------------------------------------------------------------------------- Files


def test_a_span_is_read_with_all_that_it_has(tmp_path: Path) -> None:
    """Integers are texts or numbers, kinds and statuses are numbers or names, ids are of any case."""
    raw = span(
        "nixl.receive",
        0xAB,
        1,
        3.5,
        {"text": "a", "count": 7, "ratio": 0.5, "flag": True, "list": ["x", 1]},
        parent=2,
        events=[{"name": "nixl.mode_conflict", "timeUnixNano": START, "attributes": []}],
        links=[{"traceId": OTHER.upper(), "spanId": "00"}, {"traceId": "no"}, 7],
        status={"code": "STATUS_CODE_ERROR", "message": "gone"},
        startTimeUnixNano=START,
    )
    raw["attributes"] += [
        {"key": "number", "value": {"intValue": 8}},
        {"key": "map", "value": {"kvlistValue": {"values": []}}},
        {"key": "empty", "value": {}},
    ]
    raw["traceId"] = TRACE.upper()
    ((found,), unread) = read(write(tmp_path / "f", line(raw, resource=D_HOST)))

    assert (found.trace_id, found.span_id, found.parent_id) == (TRACE, "00000000000000ab", "0000000000000002")
    assert (found.start_ns, found.end_ns, found.duration_ns) == (START, START + 3_500_000, 3_500_000)
    assert found.attributes == {
        "text": "a",
        "count": 7,
        "ratio": 0.5,
        "flag": True,
        "list": ("x", 1),
        "number": 8,
        "map": '{"values":[]}',
    }
    assert [(event.name, event.time_ns) for event in found.events] == [("nixl.mode_conflict", START)]
    assert found.links == (OTHER,)
    assert (found.is_failed, found.message) == (True, "gone")
    assert found.process == ("host-d", "", "22")
    assert str(unread) == ""


def test_rotated_files_are_read_the_oldest_first(tmp_path: Path) -> None:
    """And no other neighbours; a file that is named twice is read once."""
    for name, number in (("t", 4), ("t.1", 3), ("t.2", 2), ("t.10", 1), ("t.1.gz", 9), ("t.bak", 9), ("tt.1", 9)):
        write(tmp_path / name, line(span("nixl.lease", number, 0, 1)))

    with open_files([tmp_path / "t", tmp_path / "t.1", tmp_path / "t"]) as files:
        assert [int(found.span_id, 16) for found in files.spans()] == [1, 2, 3, 4]
        assert [int(found.span_id, 16) for found in files.spans()] == [1, 2, 3, 4]
        (tmp_path / "t").rename(tmp_path / "t.0")
        assert len(list(files.spans())) == 4


def test_a_file_that_was_just_rotated_away(tmp_path: Path) -> None:
    """FILE.1 without FILE is enough."""
    write(tmp_path / "t.1", *pull())

    assert REQUEST_ID in run(tmp_path / "t").stdout


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "gone does not exist"),
        ("folder", "is no file: name the trace file itself"),
        ("INFO 12:00 \x1b[31mready\n", "is no trace file: it begins with 'INFO 12:00 \\x1b[31mready', and a line of"),
        ('{"resourceLogs": []}\n', """is no trace file: it begins with '{"resourceLogs": []}', and"""),
        (
            json.dumps(json.loads(pull()[0]), indent=2),
            "resourceSpans; it may be JSON over several lines: `jq -c . FILE` makes a line of it",
        ),
        ('{\n"resourceSpans": []\n}\n', "is no trace file: it begins with '{'"),
        (pull()[0][:300], "gone is cut off in its first line, or still being written; nothing of it can be shown yet"),
        (pull()[0][:300] + "\n", "gone is cut off in its first line"),
        ('{"resourceSpans": 5}\n', """is no trace file: it begins with '{"resourceSpans": 5}'"""),
        ('{"resourceSpans": ' + "[" * 100_000 + "]" * 100_000 + "}", "is no trace file: it begins with"),
        ("\n  \n\na log after empty lines\n", "is no trace file: it begins with 'a log after empty lines'"),
        ("\x1f\x8b\x08\0\0", "gone is compressed (gzip); unpack it first, with gunzip"),
        ("\0" * 500, "is no trace file"),
        ("", "there is no trace with a request or a handshake in "),
        ('{"resourceSpans": []}\n\n', "no trace was written yet"),
    ],
)
def test_files_without_traces(tmp_path: Path, content: str | None, says: str) -> None:
    """One line that names the file and says what was found."""
    path = tmp_path / "gone"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_text(content, encoding="latin-1")

    said = refused(run(path))
    assert str(path) in said
    assert says in said


def test_a_file_that_is_no_trace_file_among_others(file: Path, tmp_path: Path) -> None:
    """A mistake is not passed over because another file is fine."""
    (tmp_path / "log").write_text("a log line\n")

    assert "log is no trace file" in refused(run(file, tmp_path / "log"))


def test_broken_lines_are_counted(file: Path) -> None:
    """The rest is shown: a last line may still be being written."""
    with file.open("a") as stream:
        stream.write("graffiti\n\n   \n[1]\n" + line(span("nixl.lease", 9, 0, 1, trace="zz"), {"spanId": 1}) + "\n")
        stream.write(pull()[0][:300])

    lines = shown(run(file))
    assert sum(REQUEST_ID in text for text in lines) == 1
    assert " ".join(" ".join(lines).split()).endswith(
        f"note: 3 lines and 2 spans could not be read, the first at {file}:3: broken, or still being written"
    )


def test_a_line_without_end_is_not_read_as_a_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is longer than a line may be is skipped to its end."""
    monkeypatch.setattr(reading, "LINE_LIMIT", 10_000)
    good = file.read_text()
    file.write_text(good + "x" * 35_000 + "\n" + good.replace(TRACE, OTHER) + "y" * 35_000)

    spans, unread = read(file)
    assert {found.trace_id for found in spans} == {TRACE, OTHER}
    assert (unread.lines, unread.first) == (2, f"{file}:3")


# ---------------------------------------------------------------------------------------------------------------- List


def test_the_list(tmp_path: Path) -> None:
    """A line for each request, the newest last; start-ups and traces of others are none."""
    failed = {**D, "nixl.request.id": "r-failed", "server.address": "fd00::7", "server.port": 5600}
    held = {**P, "nixl.request.id": "r-p", "nixl.lease.outcome": "expired"}
    file = write(
        tmp_path / "t",
        line(span("nixl.receive", 1, 60_000, 60_010, failed, trace="2" * 32, error="timeout", message="m")),
        *pull(),
        line(span("nixl.compat_hash", 1, 0, 1, D, trace="3" * 32)),
        line(span("llm_request", 1, 0, 1, trace="4" * 32)),
        line(span("nixl.handshake", 1, 70_000, 70_002.5, D, trace="5" * 32)),
        line(span("nixl.lease", 1, 80_000, 90_000, held, trace="6" * 32)),
    )

    lines = shown(run(file))
    receive, handshake, lease = (["pull", f"nixl.{name}"] for name in ("receive", "handshake", "lease"))
    assert [re.split(r"  +", text) for text in lines] == [
        ["time", "mode", "span", "took", "blocks", "bytes", "outcome", "peer", "request"],
        ["2026-05-28T20:26:40.000000Z", *receive, "400.0 ms", "3", "3.0 MiB", "ok", "10.0.0.7:5600", REQUEST_ID],
        ["2026-05-28T20:27:40.000000Z", *receive, "10.0 ms", "-", "-", "timeout", "[fd00::7]:5600", "r-failed"],
        ["2026-05-28T20:27:50.000000Z", *handshake, "2.5 ms", "-", "-", "ok", "-", f"(trace {'5' * 32})"],
        ["2026-05-28T20:28:00.000000Z", *lease, "10,000.0 ms", "-", "-", "expired", "-", "r-p"],
    ]


def test_the_list_has_the_newest(tmp_path: Path) -> None:
    """As many as were asked for; it says that there are more."""
    file = write(tmp_path / "t", *many(8, 7, 6, 5, 4, 3, 2, 1, 0))

    lines = shown(run(file, "--last", "2"))
    assert [text.split()[-1] for text in lines[1:3]] == ["r-07", "r-08"]
    assert lines[3] == "note: these are the last 2 of 9; --last shows more"


def test_what_was_exported_twice_counts_once(tmp_path: Path) -> None:
    """Blocks and bytes of both ranks are added up, those of a repeated span are not."""
    moved = {"nixl.transfer.block.count": 5, "nixl.transfer.size": 100}
    one = line(span("nixl.transfer", 1, 0, 1, {**D, **moved, "nixl.rank": 0}))
    two = line(span("nixl.transfer", 2, 0, 1, {**D, **moved, "nixl.rank": 1}))

    row = re.split(r"  +", shown(run(write(tmp_path / "t", one, two, one)))[1])
    assert row[4:6] == ["10", "200 B"]
    assert "2 spans of 1 process" in run(tmp_path / "t", "--slowest").stdout


def test_more_traces_than_are_kept_in_mind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest are kept, or those that were asked for; and it is said."""
    monkeypatch.setattr(selection, "TRACE_LIMIT", 10)
    file = write(tmp_path / "t", *many(*range(40)))

    lines = shown(run(file, "--last", "3"))
    assert [text.split()[-1] for text in lines[1:4]] == ["r-37", "r-38", "r-39"]
    assert "note: there are more than 10 traces, and not all were looked at" in lines
    assert f"trace {1:032x}" in run(file, "--request", "r-00").stdout


# ----------------------------------------------------------------------------------------------------------- Selection


@pytest.mark.parametrize(
    ("arguments", "traces"),
    [
        (["--request", REQUEST_ID], [1]),
        (["--request", "client-7"], [1, 2]),
        (["--request", "99999999"], [1, 2]),
        (["--trace", "0" * 28], [1, 2, 3]),
        (["--trace", f"{2:032X}"], [2]),
        (["--slowest"], [2]),
        (["--failed"], [3]),
        (["--trace", "0" * 28, "--last", "1"], [3]),
    ],
)
def test_what_is_drawn(tmp_path: Path, arguments: list[str], traces: list[int]) -> None:
    """By a part of either instance's request id, by trace id, or by what is wrong."""
    slow = span("nixl.receive", 1, 1000, 3000, {**D, "nixl.request.id": "cmpl-client-7-1-b"}, trace=f"{2:032x}")
    remote = span("nixl.lease", 2, 1000, 1500, {**P, "nixl.remote.request.id": "x-99999999"}, trace=f"{2:032x}")
    bad = span("nixl.handshake", 1, 4000, 9000, D, trace=f"{3:032x}", error="unreachable")
    file = write(tmp_path / "t", *pull(trace=f"{1:032x}"), line(slow, remote), line(bad))

    lines = shown(run(file, *arguments))
    assert [int(text.split()[1], 16) for text in lines if text.startswith("trace ")] == traces
    heading = re.fullmatch(r"(\d) traces .*", lines[0])
    assert (int(heading[1]) if heading else 1) == len(traces)


def test_slowest_falls_back_to_transfers(tmp_path: Path) -> None:
    """On the prefill side in push there are no receives."""
    file = write(
        tmp_path / "t",
        line(span("nixl.transfer", 1, 0, 50, P, trace=f"{1:032x}")),
        line(span("nixl.transfer", 1, 0, 70, P, trace=f"{2:032x}")),
        line(span("nixl.lease", 1, 0, 900, P, trace=f"{3:032x}")),
    )

    assert shown(run(file, "--slowest"))[0].startswith(f"trace {2:032x}  ")


def test_slowest_without_the_decode_instance(tmp_path: Path) -> None:
    """In pull, the prefill instance has leases only: it says whose file is missing, unless there is nothing at all."""
    file = write(tmp_path / "p.jsonl", line(span("nixl.lease", 1, 0, 900, P)))

    assert refused(run(file, "--slowest")) == (
        f"error: there is no trace with a receive or a transfer among the 1 in {file}; the decode instance writes them "
        "(in push the prefill instance writes the transfer): give its file too"
    )
    assert refused(run(write(file), "--slowest")).endswith(f"in {file}: no trace was written yet")


@pytest.mark.parametrize(
    ("arguments", "notes"),
    [
        (["--slowest", "--last", "50"], ["note: --last changes nothing: --slowest draws one"]),
        (["--failed", "--last", "50"], []),
        (["--blocks"], ["note: --blocks changes nothing in a list; add --request, --trace, --slowest or --failed"]),
        (["--slowest", "--blocks"], []),
        (
            ["--slowest", "--blocks", "--html", "/dev/null"],
            ["note: --blocks changes nothing: a page always has a table of all blocks"],
        ),
        (
            ["--blocks", "--html", "/dev/null"],
            ["note: --blocks changes nothing: a page always has a table of all blocks"],
        ),
    ],
    ids=" ".join,
)
def test_options_that_change_nothing(tmp_path: Path, arguments: list[str], notes: list[str]) -> None:
    """It says so."""
    file = write(tmp_path / "t", *pull(), line(span("nixl.lease", 1, 0, 1, P, trace=OTHER, error="timeout")))

    assert [text for text in shown(run(file, *arguments)) if text.startswith("note: ")] == notes


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--request", "nobody"], "there is no trace of a request with 'nobody' in its id among the 1 in "),
        (["--trace", "abcd"], "there is no trace whose id begins with abcd among the 1 in "),
        (["--failed"], "there is no trace with a span that failed among the 1 in "),
        (["--request", " "], "--request is empty; give the id of a request, or a part of it"),
        (["--trace", "xyz"], "--trace 'xyz' is no trace id: 32 hexadecimal digits, or the first of them, 4 at least"),
        (["--trace", "--failed"], "--trace '--failed' is no trace id: 32 hexadecimal digits, or the first of them"),
        (["--request", "--blocks"], "--request '--blocks': its value seems to be missing; if it begins with '-', give"),
        (["--failed", "--slowest"], "--request, --trace, --slowest and --failed exclude each other"),
        (["--request", "\x1b[2J"], r"of a request with '\x1b[2J' in its id"),
    ],
)
def test_nothing_to_draw(file: Path, arguments: list[str], says: str) -> None:
    """Exit status 2, and why."""
    assert says in refused(run(file, *arguments))


# ------------------------------------------------------------------------------------------------------------ Drawing


def test_a_request_across_both_instances(file: Path) -> None:
    """One tree on one axis; without colours where there is no terminal."""
    assert shown(run(file, "--request", "client-7", columns=100)) == [
        f"trace {TRACE}  2026-05-28T20:26:40.000000Z  pull  8 spans of 2 processes",
        "  P  engine prefill-engine, host host-p, service vllm, process 11",
        "  D  engine decode-engine, host host-d, service vllm, process 22",
        "                                               0 ms                               500.0 ms",
        "parent 00000000000000ff is not in these files",
        "  nixl.lease released                       P  ███████████████████████████████████████████  500.0 ms",
        "    3 blocks",
        "  nixl.receive                              D          ███████████████████████████████████  400.0 ms",
        "    handshake 300.0 ms (75%), queue 2.0 ms (0%), post 0.400 ms (0%), transfer 50.0 ms (12%)",
        "    nixl.handshake                          D          ███████████████████████████          300.0 ms",
        "      nixl.handshake.metadata               D          ██████████████████                   200.0 ms",
        "    nixl.transfer READ 3.0 MiB              D                                       █████    50.0 ms",
        "      3 blocks                              D                                       █████    50.0 ms",
        "",
        "Bars of different processes are placed by the wall clocks of their hosts, and are only as comparable",
        "  as these; each duration comes from one process's monotonic clock.",
    ]


def test_the_layout(file: Path) -> None:
    """Names, depths, places and bars."""
    drawn = layout(read(file)[0])

    assert (drawn.start_ns, drawn.duration_ns, drawn.processes, drawn.spans) == (START, 500 * MS, 2, 8)
    assert [(row.depth, row.name, row.place, row.kind, row.duration_ns) for row in drawn.rows] == [
        (0, "parent 00000000000000ff is not in these files", "", Kind.OTHER, None),
        (1, "nixl.lease released", "P", Kind.LEASE, 500 * MS),
        (1, "nixl.receive", "D", Kind.RECEIVE, 400 * MS),
        (2, "nixl.handshake", "D", Kind.HANDSHAKE, 300 * MS),
        (3, "nixl.handshake.metadata", "D", Kind.HANDSHAKE, 200 * MS),
        (2, "nixl.transfer READ 3.0 MiB", "D", Kind.READ, 50 * MS),
        (3, "3 blocks", "D", Kind.BLOCK, 50 * MS),
    ]
    places = [(0, 1), (0.2, 0.8), (0.204, 0.6), (0.204, 0.4), (0.88, 0.1), (0.88, 0.1)]
    assert [row.bar for row in drawn.rows if row.bar] == list(map(pytest.approx, places))
    assert [row.notes for row in drawn.rows if row.notes] == [
        ("3 blocks",),
        ("handshake 300.0 ms (75%), queue 2.0 ms (0%), post 0.400 ms (0%), transfer 50.0 ms (12%)",),
    ]
    assert [(instance.label, instance.engine_id, instance.where) for instance in drawn.instances] == [
        ("P", "prefill-engine", "host host-p, service vllm, process 11"),
        ("D", "decode-engine", "host host-d, service vllm, process 22"),
    ]


def test_each_block(file: Path) -> None:
    """A row for each, with both ids."""
    names = [row.name for row in layout(read(file)[0], each_block=True).rows]

    assert names[-3:] == ["block 0, remote 40", "block 1, remote 41", "block 2, remote 42"]
    assert run(file, "--slowest", "--blocks").stdout.count("remote 4") == 3


RUNS: Final = [
    {"nixl.block.local.id": 5, "nixl.block.remote.id": 70, "nixl.block.count": 60, "nixl.block.size": 60 * 2**20},
    {"nixl.block.local.id": 12_345, "nixl.block.remote.id": 23_456, "nixl.block.count": 100},
    {"nixl.block.local.id": 90, "nixl.block.remote.id": 91, "nixl.block.count": 1},
]


def with_runs(tmp_path: Path, *runs: dict[str, int]) -> Path:
    """A transfer whose blocks are told as runs, or by region."""
    blocks = [span("nixl.block", 10 + i, 0, 5, run, parent=2) for i, run in enumerate(runs)]
    return write(tmp_path / "runs", line(span("nixl.transfer", 2, 0, 5, D), *blocks, resource=D_HOST))


def test_runs_of_blocks(tmp_path: Path) -> None:
    """The first and the last id in both instances, at the width that a file has, too; together they are counted."""
    file = with_runs(tmp_path, *RUNS)

    lines = shown(run(file, "--slowest", "--blocks", columns=80))
    assert [re.split(r"  +", text.strip())[0] for text in lines if "remote" in text] == [
        "blocks 5-64, remote 70-129",
        "blocks 12345-12444, remote 23456-23555",
        "block 90, remote 91",
    ]
    assert max(map(len, lines)) == 80
    assert [row.name for row in layout(read(file)[0]).rows] == ["nixl.transfer", "161 blocks"]
    assert layout(read(with_runs(tmp_path, RUNS[0]))[0]).rows[1].name == "blocks 5-64, remote 70-129"


def test_blocks_by_region(tmp_path: Path) -> None:
    """The same ids are in each: the region tells them apart."""
    ids = {"nixl.block.local.id": 5, "nixl.block.remote.id": 70}
    file = with_runs(tmp_path, ids | {"nixl.block.region": 0}, ids | {"nixl.block.region": 7, "nixl.block.count": 2})

    assert [row.name for row in layout(read(file)[0], each_block=True).rows[1:]] == [
        "block 5, remote 70, region 0",
        "blocks 5-6, remote 70-71, region 7",
    ]


def labels(tmp_path: Path, *spans: Raw) -> list[str]:
    return [row.place for row in layout(read(write(tmp_path / "t", line(*spans)))[0]).rows]


def test_instances_that_could_be_both(tmp_path: Path) -> None:
    """What they do in a trace says what they are; ranks are told, and engines of one role are told apart."""
    both = {"nixl.kv.role": "kv_both"}
    one, two, three = ({**both, "nixl.engine.id": f"{name * 4}-engine"} for name in ("aa", "bb", "cc"))

    assert labels(tmp_path, span("nixl.receive", 1, 0, 1, one), span("nixl.lease", 2, 0, 1, two)) == ["D", "P"]
    write_it = {**two, "nixl.transfer.operation": "WRITE", "nixl.rank": 3}
    assert labels(tmp_path, span("nixl.transfer", 1, 0, 1, write_it)) == ["P/3"]
    assert labels(tmp_path, span("nixl.lease", 1, 0, 2, two), span("nixl.lease", 2, 0, 1, three)) == [
        "P bbbbbbbb",
        "P cccccccc",
    ]
    assert labels(tmp_path, span("nixl.receive", 1, 0, 2, one), span("nixl.lease", 2, 0, 1, one)) == ["aaaaaaaa"] * 2
    assert labels(tmp_path, span("nixl.handshake", 1, 0, 1, one)) == ["aaaaaaaa"]
    assert labels(tmp_path, span("llm_request", 1, 0, 1)) == ["?"]


def test_a_failure_says_why(tmp_path: Path) -> None:
    """Its type, its peer and its message, on lines of their own; a block that failed shows in the row of them all."""
    message = "the hash differs\n  local abc\n" + "\n".join(f"line {i}" for i in range(9))
    bad = span(
        "nixl.handshake",
        1,
        0,
        10,
        {**D, "server.address": "p", "server.port": 5600},
        error="compat_mismatch",
        message=message,
    )
    blocks = [span("nixl.block", 10 + i, 0, 5, parent=2, error="transfer_failed" if i else "") for i in range(2)]
    file = write(tmp_path / "t", line(bad, span("nixl.transfer", 2, 0, 5, D), *blocks))

    lines = shown(run(file, "--failed"))
    at = lines.index("  failed: compat_mismatch (p:5600): the hash differs")
    assert lines[at + 1 : at + 7] == ["    local abc", *(f"  line {i}" for i in range(4)), "  and 5 more lines"]
    assert any(text.startswith("  2 blocks, 1 failed  D") for text in lines)
    assert "    failed: transfer_failed" in lines


@pytest.mark.parametrize(
    ("error", "parts"),
    [
        ("compat_mismatch", "handshake 6.0 ms (60%), queue 4.0 ms (40%)"),
        ("", "handshake 6.0 ms (60%), queue 4.0 ms (40%), post 0.0 ms, transfer 0.0 ms"),
    ],
)
def test_stages_that_never_came(tmp_path: Path, error: str, parts: str) -> None:
    """A failed receive has no time in them, and another one has none to speak of."""
    took = {"handshake": 0.006, "queue": 0.004, "post": 0.0, "transfer": 0}
    durations = {f"nixl.receive.{name}.duration": seconds for name, seconds in took.items()}
    file = write(tmp_path / "t", line(span("nixl.receive", 1, 0, 10, {**D, **durations}, error=error)))

    assert layout(read(file)[0]).rows[0].notes[0] == parts


def test_linked_traces_are_drawn_below(tmp_path: Path) -> None:
    """Each once, after the trace that links to it; one that is not in the files is passed over."""
    links = [{"traceId": trace, "spanId": "1" * 16} for trace in (OTHER, OTHER, TRACE, "9" * 32)]
    file = write(
        tmp_path / "t",
        line(span("nixl.handshake", 1, 0, 5, D, trace=OTHER)),
        line(span("nixl.receive", 1, 10, 20, D, links=links)),
    )

    lines = shown(run(file, "--trace", TRACE))
    assert [text[:45] for text in lines if "trace " in text] == [f"trace {TRACE}  2026-", f"linked trace {OTHER}"]


@pytest.mark.parametrize(
    ("resources", "is_told"), [((P_HOST, D_HOST), True), ((D_HOST, D_HOST), False), (({}, {}), True)]
)
def test_clocks_are_mentioned_where_there_are_several(
    tmp_path: Path, resources: tuple[dict[str, str], dict[str, str]], is_told: bool
) -> None:
    """By the resource, or else by the engine."""
    second = D if resources[1] else P
    lines = [
        line(span("nixl.receive", i, 0, 1, of), resource=resource)
        for i, (of, resource) in enumerate(zip((D, second), resources, strict=True), 1)
    ]

    assert ("wall clocks" in run(write(tmp_path / "t", *lines), "--slowest").stdout) is is_told


@pytest.mark.parametrize("columns", [80, 100, 133, 200])
def test_it_fits(tmp_path: Path, columns: int) -> None:
    """Whatever the names are; every row of a tree ends at the same place."""
    deep = [
        span("nixl." + "x" * 90, i, i, 500, {**D, "nixl.rank": i}, parent=i - 1, error="e", message="m " * 200)
        for i in range(1, 30)
    ]
    file = write(tmp_path / "t", *pull(), line(*deep), *pull(trace=OTHER))

    lines = shown(run(file, "--trace", "0000", columns=columns)) + shown(run(file, "--trace", TRACE, columns=columns))
    assert max(map(len, lines)) <= columns
    assert {len(text) for text in lines if text.endswith(" ms") and "█" in text} == {columns}


def test_a_terminal_that_is_too_narrow(tmp_path: Path) -> None:
    """There still are bars, if only short ones."""
    ages = span("nixl." + "x" * 90, 1, 0, 1, D | {"nixl.rank": "r" * 90}, startTimeUnixNano=1)

    lines = shown(run(write(tmp_path / "t", line(ages)), "--trace", TRACE, columns=20))
    assert lines[-2].endswith(f"  {'█' * 10}  1,780,000,000,001.0 ms")


def test_a_terminal_without_unicode(file: Path) -> None:
    """Bars are made of what it has."""
    code = "import sys; from nixl_telemetry.cli.main import app; app(['trace', 'show', sys.argv[1], '--slowest'])"
    out = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "COLUMNS": "60"},
    ).stdout.decode("ascii")

    assert "  nixl.receive             D  " in out
    assert "  ####" in out
    assert "    nixl.transfer READ 3~  D  " in out


@pytest.mark.parametrize(
    ("duration_ns", "text"),
    [
        (None, "?"),
        (0, "0.0 ms"),
        (400, "0.000 ms"),
        (1_234, "0.001 ms"),
        (1_250_000, "1.2 ms"),
        (10**13, "10,000,000.0 ms"),
    ],
)
def test_durations(duration_ns: int | None, text: str) -> None:
    assert milliseconds(duration_ns) == text


def test_sizes() -> None:
    assert [size_text(size) for size in (0, 1023, 1024, 3 * 2**20, 2**64)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "3.0 MiB",
        "16,777,216.0 TiB",
    ]


# ---------------------------------------------------------------------------------------------------------------- Page


class Page(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page(file: Path, tmp_path: Path) -> None:
    """The same rows, every attribute, and a table of blocks; nothing from elsewhere."""
    out = tmp_path / "out.html"
    out.write_text(BEGIN + "something old")

    assert shown(run(file, "--slowest", "--html", out)) == [f"wrote {out}: 1 trace"]
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    tags = [tag for tag, _ in page.tags]
    assert (tags.count("details"), tags.count("section")) == (6, 1)
    assert {tag for tag in tags if tag in {"script", "link", "img", "iframe", "a", "object"}} == set()
    assert "http" not in text.replace("http-equiv", "")
    assert "url(" not in text
    bars = [attributes for tag, attributes in page.tags if tag == "span" and "bar" in (attributes.get("class") or "")]
    assert [(bar["class"], bar["style"]) for bar in bars][:2] == [
        ("bar lease", "left:0.000%;width:100.000%"),
        ("bar receive", "left:20.000%;width:80.000%"),
    ]
    assert "<tr><th>nixl.receive.queue.duration</th><td>0.002</td></tr>" in text
    assert "<tr><th>group</th><th>local id</th><th>remote id</th><th>bytes</th></tr>" in text
    assert "<tr><td>0</td><td>2</td><td>42</td><td>1048576</td></tr>" in text
    assert "only as comparable as these" in page.text
    assert "prefers-color-scheme: dark" in text
    assert "something old" not in text


@pytest.mark.parametrize(
    ("runs", "rows"),
    [
        (
            RUNS,
            [
                "<tr><th>local id</th><th>remote id</th><th>count</th><th>bytes</th></tr>",
                "<tr><td>5</td><td>70</td><td>60</td><td>62914560</td></tr>",
                "<tr><td>12345</td><td>23456</td><td>100</td><td></td></tr>",
                "<tr><td>90</td><td>91</td><td>1</td><td></td></tr>",
            ],
        ),
        (
            [{"nixl.block.region": 3, "nixl.block.local.id": 5, "nixl.block.remote.id": 70}],
            [
                "<tr><th>region</th><th>local id</th><th>remote id</th></tr>",
                "<tr><td>3</td><td>5</td><td>70</td></tr>",
            ],
        ),
    ],
    ids=["runs", "regions"],
)
def test_runs_and_regions_in_the_page(tmp_path: Path, runs: list[dict[str, int]], rows: list[str]) -> None:
    """The table has the columns that a span has."""
    run(with_runs(tmp_path, *runs), "--slowest", "--html", tmp_path / "out.html")

    text = (tmp_path / "out.html").read_text(encoding="utf-8")
    begin = text.index("block span")
    table = text[text.index("<table>", begin) : text.index("</table>", begin)]
    assert table.splitlines()[1:] == rows


def test_a_page_without_a_selection(tmp_path: Path) -> None:
    """Has what would be listed."""
    file = write(tmp_path / "t", *pull(), *pull(trace=OTHER, at_ms=5000))

    assert shown(run(file, "--html", tmp_path / "out.html")) == [f"wrote {tmp_path / 'out.html'}: 2 traces"]
    assert Page((tmp_path / "out.html").read_text()).text.count("3 blocks") >= 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gone/out.html", "gone/out.html cannot be written: No such file or directory"),
        (".", "cannot be written: Is a directory"),
        ("trace.jsonl", "trace.jsonl is a trace file, and would be lost; give --html another name"),
    ],
)
def test_a_page_that_cannot_be_written(file: Path, name: str, says: str) -> None:
    """One line, and the traces are still there."""
    before = file.read_bytes()

    assert refused(run(file, "--html", file.parent / name)).endswith(says)
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "content", [line(span("nixl.lease", 1, 0, 1)), "notes\n", BEGIN[:-1], "\n" + BEGIN, "\0\xff"], ids=repr
)
def test_a_page_replaces_pages_only(file: Path, tmp_path: Path, content: str) -> None:
    """Whose name for the page was forgotten would lose the first file."""
    victim = tmp_path / "victim.jsonl"
    victim.write_text(content, encoding="latin-1")

    assert refused(run("--slowest", "--html", victim, file)) == (
        f"error: {victim} is no page of this command, and would be lost; give --html another name, or remove it"
    )
    assert victim.read_text(encoding="latin-1") == content


def test_an_empty_file_is_no_loss(file: Path, tmp_path: Path) -> None:
    """As `mktemp` makes one; and what is no file, as a terminal, is written to."""
    (tmp_path / "empty").touch()

    shown(run(file, "--slowest", "--html", tmp_path / "empty"))
    assert (tmp_path / "empty").read_text().startswith(BEGIN)
    shown(run(file, "--slowest", "--html", tmp_path / "empty"))
    shown(run(file, "--slowest", "--html", "/dev/null"))


def test_a_page_whose_name_looks_like_an_option(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused, unless it is written as a path."""
    monkeypatch.chdir(tmp_path)

    assert refused(run("--html", "--slowest", file)) == (
        "error: --html '--slowest': its value seems to be missing; if it begins with '-', write ./--slowest"
    )
    assert not (tmp_path / "--slowest").exists()
    shown(run("--html", "./--slowest", file))
    assert (tmp_path / "--slowest").read_text().startswith(BEGIN)


# ------------------------------------------------------------------------------------------------------------- Hostile


def hostile() -> list[Raw]:
    """Everything that comes from clients, with everything that could do harm."""
    every = dict.fromkeys(
        (
            "nixl.request.id",
            "nixl.remote.request.id",
            "nixl.engine.id",
            "nixl.rank",
            "nixl.kv.role",
            "nixl.transfer.mode",
            "nixl.transfer.operation",
            "nixl.transfer.size",
            "nixl.lease.outcome",
            "nixl.block.local.id",
            "nixl.receive.queue.duration",
            "server.address",
            "server.port",
            EVIL,
        ),
        EVIL,
    )
    names = ("nixl.receive", "nixl.transfer", "nixl.block", "nixl.lease", "nixl.handshake", EVIL)
    return [
        span(name, i, 0, 5, every, error=EVIL, message=EVIL, events=[{"name": EVIL, "attributes": [None]}])
        for i, name in enumerate(names, 1)
    ]


@pytest.mark.parametrize(
    "arguments", [[], ["--slowest"], ["--failed", "--blocks"], ["--request", "owned"]], ids=" ".join
)
def test_nothing_hostile_reaches_the_terminal(tmp_path: Path, arguments: list[str]) -> None:
    """Neither as a control character nor as markup."""
    file = write(tmp_path / "\x1b[2J\u202e", line(*hostile(), resource={"host.name": EVIL, "service.name": EVIL}), EVIL)

    result = run(file, *arguments)
    assert result.exit_code == 0
    assert set(result.output) <= {*map(chr, range(32, 127)), "\n", "█", "…"}
    assert "[bold red]" in result.output


def test_nothing_hostile_reaches_the_page(tmp_path: Path) -> None:
    """Every text is one: no tag, no attribute and no control character comes from a file."""
    file = write(tmp_path / "t", line(*hostile(), resource={"host.name": EVIL, "service.name": EVIL}))
    run(file, "--failed", "--html", tmp_path / "out.html")

    text = (tmp_path / "out.html").read_text(encoding="utf-8")
    tags = {tag for tag, _ in Page(text).tags}
    assert "script" not in tags
    assert "alert(1)" in text
    assert all(letter.isprintable() or letter == "\n" for letter in text)


def test_trees_that_are_none(tmp_path: Path) -> None:
    """Cycles, spans that are their own parents, and repeated ids: each span is drawn once."""
    spans = [
        span("a", 1, 0, 9, parent=2),
        span("b", 2, 1, 9, parent=3),
        span("c", 3, 2, 9, parent=1),
        span("own", 4, 3, 9, parent=4),
        span("again", 4, 3, 9),
        span("backwards", 5, 4, 1),
        span("endless", 6, 5, 5),
    ]
    del spans[-1]["endTimeUnixNano"]

    rows = layout(read(write(tmp_path / "t", line(*spans)))[0]).rows
    assert [(row.depth, row.name, milliseconds(row.duration_ns)) for row in rows] == [
        (0, "backwards", "?"),
        (0, "endless", "?"),
        (0, "a", "9.0 ms"),
        (1, "c", "7.0 ms"),
        (2, "b", "8.0 ms"),
        (0, "own", "6.0 ms"),
    ]


def test_a_chain_of_thousands(tmp_path: Path) -> None:
    """Python's recursion has nothing to do with it."""
    file = write(tmp_path / "t", line(*(span("nixl.receive", i, i, 9000, D, parent=i - 1) for i in range(1, 5000))))

    assert run(file, "--slowest").stdout.count("nixl.receive") == 4999


def test_ten_thousand_blocks(tmp_path: Path) -> None:
    """One row, or one each."""
    file = write(tmp_path / "t", *pull(10_000))

    assert "10,000 blocks" in run(file, "--slowest").stdout
    assert run(file, "--slowest", "--blocks").stdout.count("block ") == 10_000
    run(file, "--slowest", "--html", tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text().count("<tr><td>0</td>") == 10_000


def test_more_spans_than_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded, and what is missing is told."""
    monkeypatch.setattr(selection, "SPAN_LIMIT", 5)
    file = write(tmp_path / "t", *pull())

    assert "note: 3 spans beyond 5 are not drawn" in shown(run(file, "--slowest"))


@pytest.mark.parametrize(
    "change",
    [
        {"startTimeUnixNano": 2**64 - 1, "endTimeUnixNano": 2**64 - 1},
        {"startTimeUnixNano": 1, "endTimeUnixNano": 2**64 - 1},
        {"startTimeUnixNano": "9" * 5000},
        {"startTimeUnixNano": 10**400},
        {"startTimeUnixNano": -5},
        {"startTimeUnixNano": True},
        {"startTimeUnixNano": [1]},
        {"endTimeUnixNano": {}},
        {"name": None},
        {"attributes": {"key": 1}},
        {
            "attributes": [
                1,
                {},
                {"key": 1},
                {"key": "a", "value": 1},
                {"key": "a", "value": {"arrayValue": {"values": 3}}},
            ]
        },
        {"status": []},
        {"status": {"code": [2], "message": {}}},
        {"links": {"traceId": OTHER}},
        {"events": [[], {"timeUnixNano": "x"}]},
        {"attributes": [{"key": "nixl.receive.queue.duration", "value": {"doubleValue": 10**400}}]},
        {"attributes": [{"key": "nixl.receive.queue.duration", "value": {"doubleValue": 1e308}}]},
        {"attributes": [{"key": "nixl.receive.queue.duration", "value": {"doubleValue": "NaN"}}]},
        {"attributes": [{"key": "nixl.receive.queue.duration", "value": {"doubleValue": -1}}]},
        {"attributes": [{"key": "nixl.transfer.size", "value": {"intValue": "9" * 30}}]},
        {"attributes": [{"key": "nixl.transfer.size", "value": {"intValue": str(2**63)}}]},
    ],
)
@pytest.mark.parametrize("name", ["nixl.receive", "nixl.transfer"])
def test_wrong_types_and_huge_numbers(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    """The rest is drawn."""
    file = write(tmp_path / "t", line(span(name, 77, 0, 1, D) | change), *pull())

    for arguments in ([], ["--trace", TRACE], ["--trace", TRACE, "--html", tmp_path / "out.html"]):
        assert run(file, *arguments).exit_code == 0


def test_depth_is_no_danger(file: Path) -> None:
    """JSON that is nested more deeply than Python goes is an unreadable line."""
    deep = '{"resourceSpans":' + "[" * 100_000 + "]" * 100_000 + "}"
    nested = '{"arrayValue":{"values":[' * 200 + "]}}" * 200
    odd = line(span("nixl.receive", 8, 0, 1)).replace(
        '"attributes": []', f'"attributes": [{{"key": "a", "value": {nested}}}]'
    )
    write(file, deep, odd, *pull())

    assert REQUEST_ID in run(file).stdout


JSON: Final = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([TRACE, "0" * 15 + "1"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "resourceSpans",
                    "resource",
                    "attributes",
                    "scopeSpans",
                    "spans",
                    "traceId",
                    "spanId",
                    "parentSpanId",
                    "name",
                    "startTimeUnixNano",
                    "endTimeUnixNano",
                    "status",
                    "code",
                    "events",
                    "links",
                    "key",
                    "value",
                    "stringValue",
                    "intValue",
                    "arrayValue",
                    "values",
                ]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=30,
)
FIELDS: Final = sorted(span("n", 1, 0, 1, parent=1, status={}, events=[], links=[]))


@settings(max_examples=150, deadline=None)
@given(
    junk=st.lists(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()), max_size=4),
    changes=st.lists(st.tuples(st.sampled_from(FIELDS), JSON), max_size=4),
    name=st.sampled_from(["nixl.receive", "nixl.transfer", "nixl.block", "nixl.lease", "nixl.handshake", "x"]),
)
def test_no_content_is_a_bug(
    tmp_path_factory: pytest.TempPathFactory, junk: list[bytes], changes: list[tuple[str, Any]], name: str
) -> None:
    """Whatever is in a file, the good lines are shown and nothing else happens."""
    file = tmp_path_factory.getbasetemp() / "garbage"
    changed = span(name, 1, 0, 1, {**D, "nixl.request.id": "r"}, parent=1) | dict(changes)
    good = [text.encode() for text in (line(changed), *pull())]
    file.write_bytes(b"\n".join([*junk, *good]))

    for arguments in ([], ["--trace", TRACE, "--blocks"]):
        result = run(file, *arguments)
        assert result.exit_code == 0, result.output
        assert set(result.output) <= {*map(chr, range(32, 127)), "\n", "█", "…", "→"}


# ---------------------------------------------------------------------------------------------------------- Elsewhere


def test_the_command_that_was_forgotten(file: Path) -> None:
    """It says which, and that as an error."""
    result = CliRunner().invoke(app, ["trace", str(file), "--slowest"], env={"COLUMNS": "200"})

    assert result.exit_code == 2
    assert "; files are read by: nixl-telemetry trace show FILE" in result.stderr


def test_the_command_works_without_vllm_and_opentelemetry() -> None:
    """On a laptop: neither is imported."""
    code = (
        "import sys, nixl_telemetry.cli.trace.command;"
        "print(*{'vllm', 'torch', 'nixl', 'opentelemetry'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert out.split() == []


def test_whoever_reads_may_have_seen_enough(tmp_path: Path) -> None:
    """`| head`: no complaint."""
    file = write(tmp_path / "t", *many(*range(2000)))
    command = [
        sys.executable,
        "-c",
        "from nixl_telemetry.cli.main import app; app()",
        "trace",
        "show",
        str(file),
        "--last",
        "10000",
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_colours_are_for_terminals(file: Path) -> None:
    """And there, what failed stands out."""
    plain_text = run(file, "--slowest").stdout
    result = CliRunner().invoke(
        app,
        ["trace", "show", str(file), "--slowest"],
        env={"COLUMNS": "120", "FORCE_COLOR": "1", "TERM": "xterm-256color"},
    )

    assert "\x1b[" not in plain_text
    assert "\x1b[32m" in result.stdout
    assert re.sub(r"\x1b\[[0-9;]*m", "", result.stdout) == plain_text
