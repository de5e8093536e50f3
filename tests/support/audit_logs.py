# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Audit logs on disk, small ones, and what is found in them."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from nixl_telemetry.audit.chain import Entry, Line, Record, Value
from nixl_telemetry.audit.findings import Finding, Kind, Report
from nixl_telemetry.audit.log import AuditLog
from nixl_telemetry.audit.scan import lines_of
from nixl_telemetry.audit.streams import Stream, find_streams
from nixl_telemetry.audit.trail import AuditTrail, Make

KEY = bytes(range(32))
SMALL = 4096
"""Bytes of a file that holds about ten records."""


def record(index: int) -> Record:
    """A transfer, told apart by its number."""
    return Record("transfer", {"decision": "done", "peer": f"host-{index}:5600", "bytes": index * 1024, "index": index})


def entry(index: int) -> Entry:
    """The same, ready to be linked."""
    return Entry.of(time.time_ns(), record(index))


def raise_error(error: Exception) -> None:
    """For logs of which no trouble is expected."""
    raise error


def new_log(
    folder: Path,
    *,
    key: bytes | None = None,
    max_file_bytes: int = SMALL,
    engine_id: str = "engine",
    on_error: Callable[[Exception], None] = raise_error,
) -> AuditLog:
    """A log that was not opened yet."""
    return AuditLog(folder, engine_id, "worker-0", on_error, {"version": "1"}, key, max_file_bytes)


def write_log(
    folder: Path, records: int, *, key: bytes | None = None, close: bool = True, engine_id: str = "engine"
) -> Stream:
    """A log of some files; it has the first and, if closed, the last record besides."""
    log = new_log(folder, key=key, engine_id=engine_id)
    for index in range(records):
        log.write([entry(index)])
        log.settle()
    if close:
        log.close()
    else:
        log.abandon()
    (stream,) = [stream for stream in find_streams([folder]) if f"-{engine_id}-" in stream.name]
    return stream


def read(folder: Path) -> list[Line]:
    """All records in a folder that has one stream."""
    (stream,) = find_streams([folder])
    lines = [Line.parse(raw.data) for _, raw in lines_of(stream)]
    assert None not in lines
    return [line for line in lines if line is not None]


def indexes(lines: Iterable[Line]) -> list[int]:
    """The numbers of the transfers."""
    return [line.members["index"] for line in lines if line.event == "transfer"]


def kinds(report: Report) -> list[Kind]:
    """What was found, in order."""
    return [finding.kind for finding in report.findings]


def place(finding: Finding) -> tuple[str, int | None]:
    """File and line of a finding; the file by its number."""
    assert finding.file is not None
    return finding.file.name.split(".")[-2], finding.line


@dataclass
class Trail:
    """A trail, and what it told its owner."""

    folder: Path
    errors: list[Exception] = field(default_factory=list)
    dropped: int = 0
    written: int = 0

    def start(self, *, queue_size: int = 8192, max_file_bytes: int = 1 << 20, key: bytes | None = None) -> AuditTrail:
        """The trail."""
        return AuditTrail(
            self.folder,
            engine_id="engine",
            process="worker-0",
            on_error=self.errors.append,
            on_dropped=self._drop,
            on_written=self._write,
            key=key,
            max_file_bytes=max_file_bytes,
            queue_size=queue_size,
        )

    def _drop(self) -> None:
        self.dropped += 1

    def _write(self, count: int) -> None:
        self.written += count

    def wait_for(self, condition: Callable[[], bool], seconds: float = 30) -> None:
        """Wait until something is so."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "did not happen in time"
            time.sleep(0.005)


def make(index: int, **more: Value) -> Make:
    """What a caller hands over."""
    return lambda: Record("transfer", {**record(index).attributes, **more})
