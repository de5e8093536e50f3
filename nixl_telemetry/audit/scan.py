# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""One pass over the lines of a stream: stretches that are linked, and what stands between them.

An untouched log is a single stretch, however long it is; each change breaks it in two or three. So what is kept in
memory grows with what is wrong, up to a limit, and not with the log.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from nixl_telemetry.audit.chain import CLOSED, LOST, Line, Seal, claimed_seq
from nixl_telemetry.audit.streams import RawLine, Stream, read_lines

ITEM_LIMIT: Final = 1000
"""Stretches and gaps of a stream that are told apart; beyond, the rest of the log is not looked at."""


class Place(NamedTuple):
    """A line of a file."""

    file: int
    line: int


@dataclass
class Run:
    """Records that follow each other in the file and in the chain."""

    start: Place
    end: Place
    first: int
    last: int
    prev: str
    """What the first record names as its predecessor's digest."""
    hash: str
    """Digest of the last record."""

    @property
    def length(self) -> int:
        """How many records it is."""
        return self.last - self.first + 1


@dataclass
class Block:
    """Lines that follow each other in a file and are not as they were written, whoever wrote them."""

    start: Place
    count: int = 0
    claim: int | None = None
    """Number of the record that the first line would be, going by the first line that claims a number."""

    def add(self, claim: int | None) -> None:
        """One more line, which claims to be a certain record."""
        if self.claim is None and claim is not None:
            self.claim = claim - self.count
        self.count += 1


@dataclass
class Loss:
    """What the process says it could not write."""

    place: Place
    seq: int
    records: int = 0
    times: int = 0


@dataclass
class Scan:
    """What one pass found.

    Attributes:
        items: Runs and blocks in the order of the files.
        torn: What follows the last newline of the last file, and where.
        lines: Lines that were read.
        unkeyed: Lines that are sound without a key, where one was given.
        key: Fingerprint of the key that the first record names.
        hashes: Digests of the record that the head names as the last one.
        closed: Where the stream says that it ends, and the record that says so.
        lost: What the process says it lost.
        complete: Whether all was read.
    """

    items: list[Run | Block] = field(default_factory=list)
    torn: tuple[Place, bytes] | None = None
    lines: int = 0
    unkeyed: int = 0
    key: str | None = None
    hashes: set[str] = field(default_factory=set)
    closed: tuple[Place, int] | None = None
    lost: Loss | None = None
    first_time: str | None = None
    last_time: str | None = None
    complete: bool = True

    @property
    def runs(self) -> list[Run]:
        """The runs, in the order of the files."""
        return [item for item in self.items if isinstance(item, Run)]


def lines_of(stream: Stream) -> Iterator[tuple[Place, RawLine]]:
    """All lines of a stream, in the order of its files."""
    for number, path in stream.files.items():
        with path.open("rb") as file:
            for raw in read_lines(file):
                yield Place(number, raw.number), raw


def sound_lines(stream: Stream, seal: Seal) -> Iterator[Line]:
    """The lines that are as they were sealed."""
    for _, raw in lines_of(stream):
        line = Line.parse(raw.data) if seal.holds(raw.data) else None
        if line is not None:
            yield line


class Scanner:
    """Makes a :class:`Scan`.

    Args:
        stream: What to read.
        seal: With the key that was given.
        watch: Number of the record whose digest is wanted.
    """

    def __init__(self, stream: Stream, seal: Seal, watch: int | None) -> None:
        self._stream = stream
        self._seal = seal
        self._plain = Seal() if seal.key_id is not None else None
        self._watch = watch
        self._ends: set[tuple[int, str]] = set()
        self.scan = Scan()

    def run(self) -> Scan:
        """Read everything."""
        for place, raw in lines_of(self._stream):
            self.scan.lines += 1
            line = Line.parse(raw.data)
            if self.scan.lines == 1:
                self._read_key(line)
            if line is not None and self._seal.holds(raw.data):
                self._sound(place, line)
            elif raw.ended or place.file != self._stream.last_file:
                self._unsound(place, raw.data)
            else:
                self.scan.torn = place, raw.data
            if len(self.scan.items) > ITEM_LIMIT:
                self.scan.complete = False
                break
        return self.scan

    def _read_key(self, line: Line | None) -> None:
        key = line.members.get("key") if line is not None else None
        self.scan.key = key if isinstance(key, str) else None

    def _sound(self, place: Place, line: Line) -> None:
        self._link(place, line)
        self.scan.first_time = self.scan.first_time or line.time
        self.scan.last_time = line.time
        if line.seq == self._watch:
            self.scan.hashes.add(line.hash)
        if line.event == CLOSED:
            self.scan.closed = place, line.seq
        elif line.event == LOST:
            lost = self.scan.lost = self.scan.lost or Loss(place, line.seq)
            records = line.members.get("records")
            lost.records += records if isinstance(records, int) else 0
            lost.times += 1

    def _link(self, place: Place, line: Line) -> None:
        last = self.scan.items[-1] if self.scan.items else None
        wanted = (line.seq - 1, line.prev)
        # After a copy of earlier records, the record that comes next continues the original.
        if isinstance(last, Run) and wanted == (last.last, last.hash) and wanted not in self._ends:
            last.end, last.last, last.hash = place, line.seq, line.hash
            return
        if isinstance(last, Run):
            self._ends.add((last.last, last.hash))
        self.scan.items.append(Run(place, place, line.seq, line.seq, line.prev, line.hash))

    def _unsound(self, place: Place, data: bytes) -> None:
        if self._plain is not None and self._plain.holds(data):
            self.scan.unkeyed += 1
        last = self.scan.items[-1] if self.scan.items else None
        if not isinstance(last, Block) or last.start.file != place.file:
            if isinstance(last, Run):
                self._ends.add((last.last, last.hash))
            last = Block(place)
            self.scan.items.append(last)
        last.add(claimed_seq(data))
