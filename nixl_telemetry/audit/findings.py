# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What verifying finds, in words that say what to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Final


class Kind(StrEnum):
    """Every kind of finding."""

    CHANGED = "changed"
    """A record is not as it was written."""
    REMOVED = "removed"
    """Records are missing between others."""
    REORDERED = "reordered"
    """Records stand where they do not belong."""
    INSERTED = "inserted"
    """Something stands there that is not of this chain."""
    DUPLICATED = "duplicated"
    """Records stand there a second time."""
    CUT_OFF = "cut_off"
    """The end is missing."""
    FILE_MISSING = "file_missing"
    """A whole file is missing, and the records in it."""
    FOREIGN = "foreign"
    """The stream has the name of another one."""
    HEAD_MISSING = "head_missing"
    """There is no head, so that a cut-off end would not be seen."""
    HEAD_CHANGED = "head_changed"
    """The head is not as it was written, or does not fit the log."""
    KEY_MISSING = "key_missing"
    """The log has a key and none was given."""
    KEY_WRONG = "key_wrong"
    """The log has another key than the one that was given."""
    KEY_UNUSED = "key_unused"
    """A key was given and the log has none."""
    COUNT_LOWER = "count_lower"
    """Fewer records than were counted."""
    TOO_MANY = "too_many"
    """So much is wrong that the rest was not looked at."""
    COUNT_HIGHER = "count_higher"
    """More records than were counted."""
    NOT_CLOSED = "not_closed"
    """The process was killed, or still writes."""
    TORN = "torn"
    """The process, or the machine, died in the middle of a line."""
    HEAD_BEHIND = "head_behind"
    """The log has more records than the head says."""
    LOST = "lost"
    """The process itself says that it could not write some records."""


NOTES: Final = frozenset({Kind.COUNT_HIGHER, Kind.NOT_CLOSED, Kind.TORN, Kind.HEAD_BEHIND, Kind.LOST})
"""Kinds that are no sign of tampering."""

_COMPARE: Final = "Compare with a copy of the log, from a backup or a log shipper."
ADVICE: Final[Mapping[Kind, str]] = MappingProxyType(
    {
        Kind.CHANGED: _COMPARE,
        Kind.REMOVED: _COMPARE,
        Kind.REORDERED: _COMPARE,
        Kind.INSERTED: "Do not rely on these lines.",
        Kind.DUPLICATED: "The first of the copies is the record.",
        Kind.CUT_OFF: _COMPARE,
        Kind.FILE_MISSING: "If it was archived, give its folder as well.",
        Kind.FOREIGN: "If somebody renamed the files, give them their names back, which `audit.opened` tells.",
        Kind.HEAD_MISSING: "Without it a cut-off end is not seen: compare the count with /metrics (--records).",
        Kind.HEAD_CHANGED: "The end of the log cannot be trusted: compare the count with /metrics (--records).",
        Kind.KEY_MISSING: "Give the key file that the process had (--key-file).",
        Kind.KEY_WRONG: "Give the key file that the process had; if this is the one, the whole log was written anew.",
        Kind.KEY_UNUSED: "If the process had this key, the whole log was written anew; if not, leave out --key-file.",
        Kind.COUNT_LOWER: "Look for missing streams and files; the counter starts anew with each server.",
        Kind.TOO_MANY: "Treat the whole stream as changed.",
        Kind.COUNT_HIGHER: "The counter travels with engine steps, so the last records of a process may be missing in "
        "it; more than those were added by somebody.",
        Kind.NOT_CLOSED: "Records that still waited in the process are lost, if it was killed; if it runs, nothing is "
        "wrong.",
        Kind.TORN: "That record was never complete, or is being written just now; nothing else is affected.",
        Kind.HEAD_BEHIND: "A process that writes, or was killed, is ahead of its head by a moment.",
        Kind.LOST: "Its counters (nixl_telemetry_dropped_total, nixl_telemetry_errors_total) and its log say why.",
    }
)
"""What to do about a finding."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth a note.

    Attributes:
        kind: What it is.
        stream: Name of the stream; empty for what concerns all of them.
        message: What it is, for a person, with numbers.
        file: The file in which to look.
        line: The line in that file.
        seq: Number of the first record that is concerned.
        records: How many records, or lines that are none, are concerned.
    """

    kind: Kind
    stream: str
    message: str
    file: Path | None = None
    line: int | None = None
    seq: int | None = None
    records: int = 1

    @property
    def is_note(self) -> bool:
        """Whether it is no sign of tampering."""
        return self.kind in NOTES

    @property
    def advice(self) -> str:
        """What to do."""
        return ADVICE[self.kind]


@dataclass(frozen=True)
class Summary:
    """One stream, as it was found."""

    stream: str
    files: int
    records: int
    first_time: str | None
    last_time: str | None
    key: str | None
    closed: bool


@dataclass(frozen=True)
class Report:
    """What verifying came to."""

    streams: tuple[Summary, ...]
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are no mere notes."""
        return tuple(finding for finding in self.findings if not finding.is_note)

    @property
    def records(self) -> int:
        """Records of all streams."""
        return sum(stream.records for stream in self.streams)
