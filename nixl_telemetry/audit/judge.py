# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Explains what a scan found.

The stretches are put in order by their numbers; the heaviest chain of them is taken for the log. Between two stretches
of the chain there is a gap: records that should be there, lines that are none, and stretches that belong elsewhere.
Each of these is explained once, so that one change is one finding.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Final

from nixl_telemetry.audit.chain import Head, Seal, could_be_cut, first_link
from nixl_telemetry.audit.findings import Finding, Kind
from nixl_telemetry.audit.scan import Block, Place, Run, Scan, sound_lines
from nixl_telemetry.audit.streams import Stream

_HEAD_PLACE: Final = Place(10**10, 0)
"""Where the head's findings are listed: after those of the files."""


@dataclass
class _Gap:
    """What is between two stretches of the log, before the first, or after the last."""

    before: Run | None
    after: Run | None
    blocks: list[Block] = field(default_factory=list)
    missing: list[range] = field(default_factory=list)
    """Numbers of the records that should be here."""

    @property
    def reached(self) -> int:
        """Number of the last record before the gap."""
        return self.before.last if self.before else 0


class Judge:
    """Explains a scan.

    Attributes:
        records: Records that are there, changed ones included.
        last_seq: Number of the last record that is there and sound.
    """

    def __init__(self, stream: Stream, scan: Scan, head: Head | None, seal: Seal) -> None:
        self._stream = stream
        self._scan = scan
        self._any_head = head
        self._head = head if head is not None and head.stream == stream.name else None
        self._seal = seal
        self._found: list[tuple[Place, Finding]] = []
        self._main = _without_tail(_heaviest(scan.runs), scan, self._head)
        self.records = sum(run.length for run in self._main)
        self.last_seq = self._main[-1].last if self._main else 0

    def findings(self) -> list[Finding]:
        """Everything that is wrong or worth a note, in the order of the files."""
        gaps = self._gaps()
        self._place_strays(gaps)
        for gap in gaps if self._scan.complete else gaps[:-1]:
            for block in gap.blocks:
                self._explain(block, gap)
            if gap.missing:
                self._report_missing(gap)
            self._check_link(gap)
        if self._scan.complete:
            self._check_tail(gaps[-1])
            self._check_head()
            self._check_end(gaps[-1])
        else:
            place = self._scan.items[-1].start
            self._add(Kind.TOO_MANY, place, "So much was changed that the rest of the stream was not looked at.")
        if lost := self._scan.lost:
            message = f"The process says that it could not write {lost.records:,} records"
            message += f", on {lost.times:,} occasions; this is the first." if lost.times > 1 else "."
            self._add(Kind.LOST, lost.place, message, lost.seq, lost.records)
        return [finding for _, finding in sorted(self._found, key=lambda found: found[0])]

    def _gaps(self) -> list[_Gap]:
        """All gaps in order, the blocks in them, and what each should hold."""
        main = {id(run) for run in self._main}
        ends: list[Run | None] = [None, *self._main, None]
        gaps = [_Gap(before, after) for before, after in pairwise(ends)]
        position = 0
        for item in self._scan.items:
            if isinstance(item, Block):
                gaps[position].blocks.append(item)
            elif id(item) in main:
                position += 1
        for gap in gaps[:-1]:
            if gap.after and gap.after.first > gap.reached + 1:
                gap.missing = [range(gap.reached + 1, gap.after.first)]
        if self._scan.complete:
            end = gaps[-1]
            stop = max(_claimed_end(end), self._head.seq if self._head else 0)
            end.missing = [range(end.reached + 1, stop + 1)] if stop > end.reached else []
        return gaps

    def _place_strays(self, gaps: Sequence[_Gap]) -> None:
        """Explain the stretches that are not where they belong, if they belong anywhere."""
        main = {id(run) for run in self._main}
        strays = [run for run in self._scan.runs if id(run) not in main]
        copies = self._copies(strays)
        for stray in strays:
            home = next((gap for gap in gaps if self._fits(stray, gap)), None)
            what, are = _records(stray.first, stray.length)
            if home is not None:
                home.missing = _outside(home.missing, stray.first, stray.last)
                self.records += stray.length
                kind, message = Kind.REORDERED, f"{what} {are} in a place that is not theirs."
            elif (stray.last, stray.hash) in copies:
                kind, message = Kind.DUPLICATED, f"{what} {are} here a second time."
            else:
                kind, message = Kind.INSERTED, f"What calls itself {what.lower()} {are} not of this chain."
            self._add(kind, stray.start, message, stray.first, stray.length)

    def _fits(self, stray: Run, gap: _Gap) -> bool:
        """Whether a stretch belongs into a gap."""
        after = gap.after
        if not gap.reached < stray.first or not (after is None or stray.last < after.first):
            return False
        if stray.first == gap.reached + 1 and stray.prev != self._digest_before(gap):
            return False
        if after is not None:
            return stray.last + 1 < after.first or stray.hash == after.prev
        return stray.first == gap.reached + 1 or (self._head is not None and stray.last <= self._head.seq)

    def _digest_before(self, gap: _Gap) -> str:
        return gap.before.hash if gap.before else first_link(self._stream.name)

    def _copies(self, strays: Sequence[Run]) -> set[tuple[int, str]]:
        """Of the records that end a stretch, those that are there more than once. A second pass, if there are any."""
        wanted = {(stray.last, stray.hash): 0 for stray in strays}
        if wanted:
            for line in sound_lines(self._stream, self._seal):
                if (line.seq, line.hash) in wanted:
                    wanted[line.seq, line.hash] += 1
        return {record for record, times in wanted.items() if times > 1}

    def _explain(self, block: Block, gap: _Gap) -> None:
        """Lines that are not as they were written: the missing records, changed, as far as there are any."""
        first = block.claim or 0
        if not _inside(gap.missing, first, first + block.count - 1):
            first = gap.missing[0].start if gap.missing else 0
        last = first + block.count - 1
        at = first
        for changed in _inside(gap.missing, first, last):
            self._inserted(block, at - first, changed.start - at)
            what, are = _records(changed.start, len(changed))
            message = f"{what} {are} not as {'it was' if are == 'is' else 'they were'} written."
            place = _below(block.start, changed.start - first)
            self._add(Kind.CHANGED, place, message, changed.start, len(changed))
            self.records += len(changed)
            at = changed.stop
        self._inserted(block, at - first, last + 1 - at)
        gap.missing = _outside(gap.missing, first, last)

    def _inserted(self, block: Block, offset: int, lines: int) -> None:
        if lines > 0:
            message = "The line is no record of this chain." if lines == 1 else f"{lines:,} lines are no records."
            self._add(Kind.INSERTED, _below(block.start, offset), message, None, lines)

    def _report_missing(self, gap: _Gap) -> None:
        first, records = gap.missing[0].start, sum(map(len, gap.missing))
        what, are = _records(first, gap.missing[-1].stop - first)
        begin = gap.before.end.file if gap.before else 1
        if gap.after is not None:
            stop = gap.after.start.file
        else:
            stop = 1 + max(self._stream.last_file, self._head.file if self._head else 0)
        # Not listed one by one: what the head says may be anything.
        files = stop - begin - sum(begin <= number < stop for number in self._stream.files)
        if files > 0:
            number = next(number for number in count(begin) if number not in self._stream.files)
            path = self._stream.path_of(number)
            more = f" and {files - 1:,} more are" if files > 1 else " is"
            message = f"The file {path.name}{more} missing. {what} {are} not there."
            finding = Finding(Kind.FILE_MISSING, self._stream.name, message, path, seq=first, records=records)
            self._found.append((Place(number, 0), finding))
        elif gap.after is not None:
            for part in gap.missing:
                what, are = _records(part.start, len(part))
                message = f"{what} {are} missing before this line."
                self._add(Kind.REMOVED, gap.after.start, message, part.start, len(part))
        elif self._head is not None:
            self._report_cut_off(gap, self._head, first, records)

    def _report_cut_off(self, gap: _Gap, head: Head, first: int, records: int) -> None:
        place = self._scan.torn[0] if self._scan.torn else self._last_place(gap)
        where = f"in the middle of record {first:,}" if self._scan.torn else f"before record {first:,}"
        message = f"The log ends {where}, and the head says that {head.seq:,} were written."
        if first > head.synced:
            message += " They were not yet synced to the disk: a power failure of the machine does this too."
        else:
            message += " They were on the disk: no crash does this."
        self._add(Kind.CUT_OFF, place, message, first, records)

    def _check_link(self, gap: _Gap) -> None:
        """Where the numbers follow each other, the digests have to agree too."""
        if gap.after is None or gap.after.first > gap.reached + 1 or gap.after.prev == self._digest_before(gap):
            return
        if gap.before is None:
            message = "The first record does not begin a stream of this name."
            self._add(Kind.FOREIGN, gap.after.start, message, gap.after.first)
        else:
            message = (
                f"Record {gap.after.first:,} names another predecessor: record {gap.before.last:,} was written anew, "
                "and perhaps more before or after it."
            )
            self._add(Kind.CHANGED, gap.before.end, message, gap.before.last)

    def _check_tail(self, gap: _Gap) -> None:
        """What follows the last newline: the beginning of a line, if the process died while it wrote."""
        if self._scan.torn is None or gap.missing:
            return
        place, data = self._scan.torn
        if self._is_closed or not could_be_cut(data):
            self._add(Kind.INSERTED, place, "The end of the file is no record of this chain.")
        else:
            self._add(Kind.TORN, place, "The process, or the machine, died in the middle of this line.")

    def _check_head(self) -> None:
        head, path = self._any_head, self._stream.head_path
        kind = Kind.HEAD_CHANGED
        if self._stream.head is None:
            kind, message = Kind.HEAD_MISSING, "There is no head file."
        elif head is None:
            message = "The head file is not as it was written."
        elif head.stream != self._stream.name:
            if any(finding.kind is Kind.FOREIGN for _, finding in self._found):
                return
            kind, message = Kind.FOREIGN, f"The head file is that of another stream, {head.stream}."
        elif head.last not in (self._scan.hashes or {head.last}) or (
            head.seq == 0 and head.last != first_link(self._stream.name)
        ):
            message = f"The head file has another digest of record {head.seq:,} than the log."
        elif self.last_seq > head.seq and not head.closed:
            ahead = self.last_seq - head.seq
            kind, message = Kind.HEAD_BEHIND, f"The log has {ahead:,} more records than the head file says."
        else:
            return
        self._found.append((_HEAD_PLACE, Finding(kind, self._stream.name, message, path)))

    def _check_end(self, gap: _Gap) -> None:
        """Nothing comes after the last record of a process that ended in order."""
        closed, head = self._scan.closed, self._head
        last = self._last_place(gap)
        if closed is not None and closed[1] < self.last_seq:
            seq, place = closed[1], _below(closed[0], 1)
        elif head is not None and head.closed and head.seq < self.last_seq:
            seq, place = head.seq, last
        else:
            if not self._is_closed and not gap.missing:
                self._add(Kind.NOT_CLOSED, last, "The process did not end the log in order.", self.last_seq or None)
            return
        message = f"The process ended the log with record {seq:,}; what follows was added."
        self._add(Kind.INSERTED, place, message, seq + 1, self.last_seq - seq)

    @property
    def _is_closed(self) -> bool:
        return self._scan.closed is not None or (self._head is not None and self._head.closed)

    def _last_place(self, gap: _Gap) -> Place:
        """The last line before what is missing at the end."""
        if gap.blocks:
            return _below(gap.blocks[-1].start, gap.blocks[-1].count - 1)
        return gap.before.end if gap.before else Place(1, 1)

    def _add(self, kind: Kind, place: Place, message: str, seq: int | None = None, records: int = 1) -> None:
        file = self._stream.path_of(place.file)
        self._found.append((place, Finding(kind, self._stream.name, message, file, place.line, seq, records)))


def _heaviest(runs: Sequence[Run]) -> list[Run]:
    """The runs with ascending numbers that hold most records together."""
    weights: list[int] = []
    predecessors: list[int | None] = []
    for run in runs:
        # Of equals the later one, so that the first line that is out of order is the one that is told of.
        candidates = [index for index in range(len(weights)) if runs[index].last < run.first]
        before = max(candidates, key=lambda index: (weights[index], index), default=None)
        weights.append(run.length + (0 if before is None else weights[before]))
        predecessors.append(before)
    chain = []
    index = max(range(len(weights)), key=lambda index: (weights[index], index), default=None)
    while index is not None:
        chain.append(runs[index])
        index = predecessors[index]
    return chain[::-1]


def _without_tail(main: list[Run], scan: Scan, head: Head | None) -> list[Run]:
    """Leave out what was put behind the record that the head names as the last one."""
    while head is not None and len(main) > 1:
        before, tail = main[-2:]
        between = scan.items[scan.items.index(before) + 1 : scan.items.index(tail)]
        damaged = sum(item.count for item in between if isinstance(item, Block))
        if before.last != head.seq or tail.first - before.last - 1 <= damaged:
            break
        main = main[:-1]
    return main


def _claimed_end(gap: _Gap) -> int:
    """The last record that damaged lines at the end claim to be, as far as they claim to go on where the log ends."""
    reached = gap.reached
    for block in gap.blocks:
        if block.claim == reached + 1:
            reached += block.count
    return reached


def _below(place: Place, lines: int) -> Place:
    return Place(place.file, place.line + lines)


def _inside(ranges: Iterable[range], first: int, last: int) -> list[range]:
    parts = (range(max(part.start, first), min(part.stop, last + 1)) for part in ranges)
    return [part for part in parts if part]


def _outside(ranges: Iterable[range], first: int, last: int) -> list[range]:
    parts = (side for part in ranges for side in (_inside([part], 0, first - 1), _inside([part], last + 1, part.stop)))
    return [part for side in parts for part in side]


def _records(first: int, count: int) -> tuple[str, str]:
    """Some records, and the verb that goes with them."""
    return (f"Record {first:,}", "is") if count == 1 else (f"Records {first:,} to {first + count - 1:,}", "are")
