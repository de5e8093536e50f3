# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Verifying offline: what was changed, removed, moved or added, and where."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from nixl_telemetry.audit.chain import Head, Seal
from nixl_telemetry.audit.findings import Finding, Kind, Report, Summary
from nixl_telemetry.audit.judge import Judge
from nixl_telemetry.audit.scan import Scan, Scanner
from nixl_telemetry.audit.streams import Stream, find_streams

_KEY_IN_HEAD: Final = re.compile(rb'"key":"([0-9a-f]{16})"')


def verify(
    paths: Iterable[Path], key: bytes | None = None, expected_records: Mapping[str, int] | int | None = None
) -> Report:
    """Verify the streams in some folders, or those that some files belong to.

    A process may still be writing them.

    Args:
        paths: Folders and files.
        key: The key that the processes had.
        expected_records: How many records there should be as ``nixl_audit_records_total`` counted them: in all, or by
            the name of the stream.

    Raises:
        AuditPathError: If a path does not exist or holds no audit log.
        OSError: If something cannot be read.
    """
    seal = Seal(key)
    summaries, findings = [], []
    for stream in find_streams(paths):
        summary, found = _verify_stream(stream, seal)
        summaries.append(summary)
        findings += found
    findings += _compare_counts(summaries, expected_records)
    return Report(tuple(summaries), tuple(findings))


def _verify_stream(stream: Stream, seal: Seal) -> tuple[Summary, list[Finding]]:
    head = None if stream.head is None else Head.parse(stream.head, seal)
    scan = Scanner(stream, seal, head.seq if head else None).run()
    problem = _key_problem(stream, scan, head, seal)
    judge = Judge(stream, scan, head, seal)
    findings = [problem] if problem else judge.findings()
    closed = scan.closed is not None and scan.closed[1] == judge.last_seq
    summary = Summary(
        stream.name, len(stream.files), judge.records, scan.first_time, scan.last_time, _named_key(stream, scan), closed
    )
    return summary, findings


def _named_key(stream: Stream, scan: Scan) -> str | None:
    """Fingerprint of the key that the stream says it has."""
    match = _KEY_IN_HEAD.search(stream.head or b"")
    return scan.key or (match[1].decode() if match else None)


def _key_problem(stream: Stream, scan: Scan, head: Head | None, seal: Seal) -> Finding | None:
    """The one finding where nothing at all verifies, and that for want of the key."""
    if scan.runs or head is not None:
        return None
    named = _named_key(stream, scan)
    if seal.key_id is None:
        if named is None:
            return None
        kind, message = Kind.KEY_MISSING, f"The log has a key (its fingerprint is {named}) and none was given."
    elif scan.unkeyed or (stream.head is not None and Head.parse(stream.head, Seal()) is not None):
        kind, message = Kind.KEY_UNUSED, "A key was given, and the log has none: anybody can have written it."
    elif named not in (None, seal.key_id):
        kind = Kind.KEY_WRONG
        message = f"The log names another key (fingerprint {named}) than the one that was given ({seal.key_id})."
    else:
        return None
    return Finding(kind, stream.name, message, stream.path_of(1), 1)


def _compare_counts(summaries: Sequence[Summary], expected: Mapping[str, int] | int | None) -> Iterator[Finding]:
    found = {summary.stream: summary.records for summary in summaries}
    if expected is None:
        return
    if isinstance(expected, int):
        found, expected = {"": sum(found.values())}, {"": expected}
    for stream, wanted in expected.items():
        records = found.get(stream, 0)
        if records != wanted:
            kind = Kind.COUNT_LOWER if records < wanted else Kind.COUNT_HIGHER
            message = f"There are {records:,} records, and {wanted:,} were counted on /metrics."
            yield Finding(kind, stream, message, records=abs(records - wanted))
