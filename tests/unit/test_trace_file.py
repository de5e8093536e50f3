# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The trace file: OTLP JSON, rotated, bounded, shared by processes, and never a reason to fail."""

import errno
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status
from opentelemetry.trace import SpanKind

from nixl_telemetry.settings import Settings
from nixl_telemetry.signals import description
from nixl_telemetry.signals.description import Description
from nixl_telemetry.signals.otlp import Message
from nixl_telemetry.signals.semconv import Signal, SpanName, TransferMode
from nixl_telemetry.signals.telemetry import Telemetry
from nixl_telemetry.signals.trace_file import TraceFile


def message(name: str) -> Message:
    """One span."""
    span = Span(
        trace_id=bytes(range(16)),
        span_id=bytes(range(8)),
        parent_span_id=bytes(range(8, 16)),
        name=name,
        kind=Span.SPAN_KIND_CLIENT,
        status=Status(code=Status.STATUS_CODE_ERROR, message="lost"),
        attributes=[KeyValue(key="n", value=AnyValue(int_value=5))],
        links=[Span.Link(trace_id=bytes(16), span_id=bytes(8))],
    )
    request = ExportTraceServiceRequest(resource_spans=[ResourceSpans(scope_spans=[ScopeSpans(spans=[span])])])
    return Message(request.SerializeToString(), 1)


def spans(path: Path) -> list[dict[str, Any]]:
    """The spans in a file."""
    return [
        span
        for line in path.read_text().splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def test_otlp_json(tmp_path: Path) -> None:
    """Ids are in hex and enums are numbers, as the specification wants and protobuf's own JSON does not have them."""
    path = tmp_path / "new" / "trace.jsonl"
    TraceFile(path, 10_000, 2).send(message("first"))

    (span,) = spans(path)
    assert span["traceId"] == "000102030405060708090a0b0c0d0e0f"
    assert span["spanId"] == "0001020304050607"
    assert span["parentSpanId"] == "08090a0b0c0d0e0f"
    assert (span["kind"], span["status"]) == (3, {"message": "lost", "code": 2})
    assert span["links"] == [{"traceId": "00" * 16, "spanId": "00" * 8}]
    assert span["attributes"] == [{"key": "n", "value": {"intValue": "5"}}]


def test_rotation(tmp_path: Path) -> None:
    """The newest in the file itself, no more files than asked for."""
    path = tmp_path / "trace.jsonl"
    file = TraceFile(path, 1, 3)
    for name in "abcde":
        file.send(message(name))

    assert sorted(child.name for child in tmp_path.iterdir()) == ["trace.jsonl", "trace.jsonl.1", "trace.jsonl.2"]
    assert [spans(child)[0]["name"] for child in sorted(tmp_path.iterdir())] == ["e", "d", "c"]


def test_one_file(tmp_path: Path) -> None:
    """It starts anew where only one is kept."""
    path = tmp_path / "trace.jsonl"
    file = TraceFile(path, 1, 1)
    for name in "ab":
        file.send(message(name))

    assert [child.name for child in tmp_path.iterdir()] == ["trace.jsonl"]
    assert [span["name"] for span in spans(path)] == ["b"]


def test_no_file_is_longer_than_it_may_be(tmp_path: Path) -> None:
    """The next one begins before, unless a single batch is longer."""
    path = tmp_path / "trace.jsonl"
    file = TraceFile(path, 1_000, 3)
    for number in range(50):
        file.send(message(f"{number}"))
    sizes = [child.stat().st_size for child in tmp_path.iterdir()]
    assert len(sizes) == 3
    assert all(600 < size <= 1_000 for size in sizes)

    file.send(message("x" * 5_000))

    assert [span["name"] for span in spans(path)] == ["x" * 5_000]


def test_a_line_that_was_torn_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk was full in the middle of one, or its process was killed there."""
    path = tmp_path / "trace.jsonl"
    file = TraceFile(path, 10_000, 2)
    file.send(message("first"))
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:20]) if data[:1] == b"{" else fail())
        with pytest.raises(OSError, match="No space left"):
            file.send(message("lost"))
    file.send(message("second"))
    with path.open("a") as stream:
        stream.write('{"resourceSpans": [{')
    file.send(message("third"))

    lines = path.read_text().splitlines()
    assert lines.pop(2) == '{"resourceSpans": [{'
    path.write_text("\n".join(lines))
    assert [span["name"] for span in spans(path)] == ["first", "second", "third"]


def fail() -> int:
    """As the operating system does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _write(path: Path, name: str) -> None:
    file = TraceFile(path, 4_000, 100)
    for number in range(50):
        file.send(message(f"{name}{number}"))


def test_several_processes(tmp_path: Path) -> None:
    """Nothing is lost or torn, though each of them rotates."""
    path = tmp_path / "trace.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write, args=(path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    names = [span["name"] for child in tmp_path.iterdir() for span in spans(child)]
    assert sorted(names) == sorted(f"{name}{number}" for name in "abc" for number in range(50))


def test_beside_or_instead_of_an_exporter(tmp_path: Path) -> None:
    """The setting alone is enough."""
    path = tmp_path / "trace.jsonl"
    telemetry = Telemetry(Settings.load({}, {"NIXLTEL_TRACE_FILE": str(path)}), TransferMode.PULL, {"nixl.rank": 3})
    span = description.Span(SpanName.TRANSFER, SpanKind.CLIENT, 1, 2)
    telemetry.emit(lambda: Description(span))
    telemetry.close()

    (written,) = spans(path)
    assert (written["name"], written["attributes"]) == (
        "nixl.transfer",
        [{"key": "nixl.rank", "value": {"intValue": "3"}}],
    )


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """Counted, and said once; nobody fails."""
    telemetry = Telemetry(Settings.load({}, {"NIXLTEL_TRACE_FILE": str(tmp_path)}), TransferMode.PULL, {})
    span = description.Span(SpanName.TRANSFER, SpanKind.CLIENT, 1, 2)
    telemetry.emit(lambda: Description(span))
    telemetry.close()

    assert telemetry.drain() == {
        "nixl_telemetry_errors_total": {Signal.TRACES: 1},
        "nixl_telemetry_dropped_total": {Signal.SPANS: 1},
    }
