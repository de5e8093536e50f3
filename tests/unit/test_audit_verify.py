# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Verifying: every edit of a log is found, at its place, and explained once."""

import contextlib
import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Final

import pytest

from nixl_telemetry.audit.chain import LINE_LIMIT, Entry, Head, Line, Record, Seal, first_link
from nixl_telemetry.audit.findings import ADVICE, NOTES, Finding, Kind
from nixl_telemetry.audit.streams import AuditPathError, Stream, find_streams, read_lines
from nixl_telemetry.audit.verify import verify
from tests.support.audit_logs import KEY, entry, kinds, new_log, place, write_log

EDITS: Final = 1000
RECORDS: Final = 40

# -------------------------------------------------------------------------------------------------------- Random edits


@dataclass
class Files:
    """The files of a stream in memory, edited line by line; the last one is the head."""

    lines: dict[str, list[bytes]]
    alien: list[bytes]
    """Lines of another stream, with the same key."""
    key: bytes | None
    at: tuple[str, int] = ("", 0)
    """Where the edit is: file and line."""
    reach: int = 1
    """So many lines further it may be seen."""

    @property
    def logs(self) -> list[str]:
        return [name for name in self.lines if name.endswith(".jsonl")]

    @property
    def head(self) -> str:
        (name,) = [name for name in self.lines if name.endswith(".json")]
        return name

    def pick(self, rng: random.Random, *, last: bool = True) -> tuple[str, int]:
        """A line, as file and index."""
        places = [(name, index) for name in self.logs for index in range(len(self.lines[name]))]
        return rng.choice(places if last else places[:-1])

    def mark(self, name: str, index: int) -> None:
        """The edit is here."""
        self.at = name, index + 1

    def write(self, folder: Path) -> None:
        for name, lines in self.lines.items():
            (folder / name).write_bytes(b"".join(lines))


def bytes_edit(files: Files, rng: random.Random, change: Callable[[bytearray, int], object]) -> None:
    name, index = files.pick(rng)
    line = bytearray(files.lines[name][index])
    change(line, rng.randrange(len(line)))
    files.lines[name][index] = bytes(line)
    files.mark(name, index)


def change_byte(files: Files, rng: random.Random) -> set[Kind]:
    def change(line: bytearray, position: int) -> None:
        line[position] ^= rng.randrange(1, 256)

    bytes_edit(files, rng, change)
    return {Kind.CHANGED, Kind.CUT_OFF}


def delete_byte(files: Files, rng: random.Random) -> set[Kind]:
    bytes_edit(files, rng, lambda line, position: line.pop(position))
    return {Kind.CHANGED, Kind.CUT_OFF}


def insert_byte(files: Files, rng: random.Random) -> set[Kind]:
    bytes_edit(files, rng, lambda line, position: line.insert(position, rng.randrange(256)))
    return {Kind.CHANGED}


def change_value(files: Files, rng: random.Random) -> set[Kind]:
    """What an attacker would do: another peer, another number, in valid JSON."""
    name, index = files.pick(rng)
    members = json.loads(files.lines[name][index])
    members[rng.choice(list(members))] = rng.choice([None, 7, "x", "2020-01-01T00:00:00.000000Z"])
    files.lines[name][index] = json.dumps(members, separators=(",", ":")).encode() + b"\n"
    files.mark(name, index)
    return {Kind.CHANGED}


def rewrite(files: Files, rng: random.Random) -> set[Kind]:
    """The same, with a digest to match: without a key anybody can make it, but the next line names the old one."""
    name, index = files.pick(rng, last=False)
    line = Line.parse(files.lines[name][index])
    assert line is not None
    forged = Entry(line.time, line.event, ',"peer":"nobody"')
    files.lines[name][index], _ = forged.link(line.seq, line.prev, Seal())
    files.mark(name, index)
    return {Kind.CHANGED}


def delete_lines(files: Files, rng: random.Random) -> set[Kind]:
    name, index = files.pick(rng)
    del files.lines[name][index : index + rng.choice([1, 1, 1, 2, 5])]
    files.mark(name, index)
    return {Kind.REMOVED, Kind.CUT_OFF}


def swap_lines(files: Files, rng: random.Random) -> set[Kind]:
    (one, first), (other, second) = sorted([files.pick(rng), files.pick(rng)])
    if (one, first) == (other, second):
        return swap_lines(files, rng)
    lines = files.lines
    lines[one][first], lines[other][second] = lines[other][second], lines[one][first]
    files.mark(one, first)
    return {Kind.REORDERED}


def move_lines(files: Files, rng: random.Random) -> set[Kind]:
    """Some lines to another place of the same file."""
    name = rng.choice(files.logs)
    lines = files.lines[name]
    length = rng.randrange(1, len(lines) // 2)
    start = rng.randrange(len(lines) - length)
    moved = lines[start : start + length]
    del lines[start : start + length]
    target = rng.choice([index for index in range(len(lines) + 1) if index != start])
    lines[target:target] = moved
    files.mark(name, min(start, target))
    files.reach = abs(start - target) + length  # either part may be said to have moved past the other
    return {Kind.REORDERED}


def copy_lines(files: Files, rng: random.Random) -> set[Kind]:
    name, index = files.pick(rng)
    source, start = files.pick(rng)
    copied = files.lines[source][start : start + rng.choice([1, 1, 3])]
    files.lines[name][index + 1 : index + 1] = copied
    files.mark(name, index + 1)
    files.reach = len(copied)  # in front of the original, nobody can tell which of them is the copy
    return {Kind.DUPLICATED}


def insert_line(files: Files, rng: random.Random) -> set[Kind]:
    """Garbage, emptiness, a line of another stream, or one that was made up."""
    name, index = files.pick(rng)
    made_up, _ = entry(rng.randrange(100)).link(rng.randrange(1, 100), "0" * 64, Seal())
    junk = [rng.randbytes(rng.randrange(200)).replace(b"\n", b"") + b"\n", b"\n", b"{}\n", b"[" * 5000 + b"\n"]
    files.lines[name].insert(index, rng.choice([*junk, made_up, rng.choice(files.alien)]))
    files.mark(name, index)
    return {Kind.INSERTED}


def append(files: Files, rng: random.Random) -> set[Kind]:
    """Behind the end, also without a newline."""
    name = files.logs[-1]
    last = Line.parse(files.lines[name][-1])
    assert last is not None
    next_one, _ = entry(0).link(last.seq + 1, last.hash, Seal(files.key))
    files.lines[name].append(rng.choice([next_one, next_one[:-1], next_one[:40], b"x", b"\n", rng.choice(files.alien)]))
    files.mark(name, len(files.lines[name]) - 1)
    return {Kind.INSERTED}


def truncate(files: Files, rng: random.Random) -> set[Kind]:
    """Any file, at any byte."""
    name = rng.choice(files.logs)
    content = b"".join(files.lines[name])
    left = content[: rng.randrange(len(content))].splitlines(keepends=True)
    files.lines[name] = left
    files.mark(name, len(left) - 1)
    return {Kind.CUT_OFF} if name == files.logs[-1] else {Kind.REMOVED, Kind.CHANGED}


def delete_file(files: Files, rng: random.Random) -> set[Kind]:
    name = rng.choice(files.logs)
    del files.lines[name]
    files.mark(name, -1)
    return {Kind.FILE_MISSING}


def swap_files(files: Files, rng: random.Random) -> set[Kind]:
    one, other = sorted(rng.sample(files.logs, 2))
    files.lines[one], files.lines[other] = files.lines[other], files.lines[one]
    files.mark(one, 0)
    return {Kind.REORDERED}


def edit_head(files: Files, rng: random.Random) -> set[Kind]:
    (content,) = files.lines[files.head]
    position = rng.randrange(len(content))
    edited = rng.choice(
        [
            content[:position] + bytes([content[position] ^ rng.randrange(1, 256)]) + content[position + 1 :],
            content[:position],
            content + b"\n",
            b"",
            b"[" * 10_000,
        ]
    )
    files.lines[files.head] = [edited]
    return {Kind.HEAD_CHANGED}


def delete_head(files: Files, rng: random.Random) -> set[Kind]:
    del files.lines[files.head]
    return {Kind.HEAD_MISSING}


@dataclass
class Original:
    """What is edited."""

    files: Files

    def copy(self) -> Files:
        files = self.files
        return Files({name: list(lines) for name, lines in files.lines.items()}, files.alien, files.key)


def describe(param: tuple[bytes | None, bool]) -> str:
    key, close = param
    return f"{'key' if key else 'no-key'}-{'closed' if close else 'killed'}"


@pytest.fixture(scope="module", params=[(None, True), (None, False), (KEY, True), (KEY, False)], ids=describe)
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Original:
    """Logs of some files, with and without a key, closed and not."""
    key, close = request.param
    folder = tmp_path_factory.mktemp("original")
    stream = write_log(folder / "log", RECORDS, key=key, close=close)
    alien = write_log(folder / "alien", 100, key=key)
    assert len(stream.files) > 2
    lines = {path.name: path.read_bytes().splitlines(keepends=True) for path in stream.files.values()}
    lines[stream.head_path.name] = [stream.head or b""]
    others = [line for path in alien.files.values() for line in path.read_bytes().splitlines(keepends=True)]
    return Original(Files(lines, others, key))


LINE_EDITS: Final = (
    change_byte, delete_byte, insert_byte, change_value, rewrite, delete_lines, swap_lines, move_lines, copy_lines,
    insert_line, truncate, delete_file, swap_files,
)  # fmt: skip
HEAD_EDITS: Final = (edit_head, delete_head)


def test_a_thousand_random_edits_are_found(original: Original, tmp_path: Path) -> None:
    """Each is found, is called what it is, at its place, and is not drowned in what follows from it."""
    key = original.files.key
    closed = b'"closed":true' in original.files.lines[original.files.head][0]
    edits = [*LINE_EDITS, *HEAD_EDITS, *([append] if closed else [])]
    rng = random.Random(20260131)
    for number in range(EDITS // 4):
        edit = edits[number % len(edits)]
        files, wanted = original.copy(), set[Kind]()
        while files.lines == original.files.lines:
            wanted = edit(files, rng)
        folder = tmp_path / "log"
        folder.mkdir()
        files.write(folder)

        errors = verify([folder], key).errors

        context = f"edit {number}: {edit.__name__} at {files.at}: {errors}"
        assert {finding.kind for finding in errors} & wanted, context
        assert len(errors) <= 4, context
        if edit not in HEAD_EDITS:
            assert any(is_near(finding, files) for finding in errors), context
        shutil.rmtree(folder)


def is_near(finding: Finding, files: Files) -> bool:
    """The line itself, or the next one where the line is gone; the next file begins at line 1."""
    name, line = files.at
    if finding.file is None:
        return False
    if finding.file.name == name:
        return finding.line is None or -1 <= finding.line - line <= files.reach
    # At the end of a file, the gap shows at the beginning of the next one.
    return finding.line == 1 and finding.file.name > name


def test_an_untouched_log_has_nothing(original: Original, tmp_path: Path) -> None:
    """But the note that it was not closed."""
    original.copy().write(tmp_path)
    report = verify([tmp_path], original.files.key)

    closed = report.streams[0].closed
    assert kinds(report) == ([] if closed else [Kind.NOT_CLOSED])
    assert report.errors == ()
    assert report.records == RECORDS + 1 + closed


# ------------------------------------------------------------------------------------------------------- What is said


@pytest.fixture
def stream(tmp_path: Path) -> Stream:
    """A closed log in several files."""
    return write_log(tmp_path / "log", RECORDS)


def lines_in(stream: Stream, number: int) -> list[bytes]:
    return stream.files[number].read_bytes().splitlines(keepends=True)


def found(stream: Stream, key: bytes | None = None) -> list[Finding]:
    return list(verify([stream.head_path.parent], key).findings)


@contextlib.contextmanager
def editing(stream: Stream, number: int) -> Iterator[list[bytes]]:
    """The lines of a file, to be edited."""
    lines = lines_in(stream, number)
    yield lines
    stream.files[number].write_bytes(b"".join(lines))


def first_seq(stream: Stream, number: int) -> int:
    line = Line.parse(lines_in(stream, number)[0])
    assert line is not None
    return line.seq


def test_a_changed_record(stream: Stream) -> None:
    """File, line, number of the record, and a sentence."""
    seq = first_seq(stream, 2) + 3
    with editing(stream, 2) as lines:
        lines[3] = lines[3].replace(b"host-", b"tost-")

    (finding,) = found(stream)
    assert (finding.kind, place(finding), finding.seq) == (Kind.CHANGED, ("000002", 4), seq)
    assert finding.message == f"Record {seq} is not as it was written."
    assert not finding.is_note


def test_changed_records_in_a_row_are_one_finding(stream: Stream) -> None:
    with editing(stream, 2) as lines:
        lines[2:5] = [line.replace(b"host-", b"tost-") for line in lines[2:5]]

    (finding,) = found(stream)
    assert (finding.kind, place(finding), finding.records) == (Kind.CHANGED, ("000002", 3), 3)


def test_changed_records_across_files_are_told_by_file(stream: Stream) -> None:
    last, first = len(lines_in(stream, 1)), first_seq(stream, 2)
    with editing(stream, 1) as lines, editing(stream, 2) as others:
        lines[-1], others[0] = b"x" + lines[-1], b"x" + others[0]

    assert [(finding.kind, *place(finding), finding.seq) for finding in found(stream)] == [
        (Kind.CHANGED, "000001", last, first - 1),
        (Kind.CHANGED, "000002", 1, first),
    ]


def test_one_record_removed_and_the_next_one_changed(stream: Stream) -> None:
    """Told apart by the number that the changed line claims."""
    seq = first_seq(stream, 2)
    with editing(stream, 2) as lines:
        lines[4] = lines[4].replace(b"host-", b"tost-")
        del lines[3]

    assert [(finding.kind, finding.seq, finding.line) for finding in found(stream)] == [
        (Kind.CHANGED, seq + 4, 4),
        (Kind.REMOVED, seq + 3, 5),
    ]


def test_a_removed_record(stream: Stream) -> None:
    """Told of at the line before which it is missing."""
    seq = first_seq(stream, 2)
    with editing(stream, 2) as lines:
        del lines[3:5]

    (finding,) = found(stream)
    assert (finding.kind, place(finding), finding.seq, finding.records) == (Kind.REMOVED, ("000002", 4), seq + 3, 2)
    assert finding.message == f"Records {seq + 3} to {seq + 4} are missing before this line."


def test_swapped_neighbours(stream: Stream) -> None:
    """The first line that is out of order."""
    seq = first_seq(stream, 2)
    with editing(stream, 2) as lines:
        lines[3], lines[4] = lines[4], lines[3]

    (finding,) = found(stream)
    assert (finding.kind, place(finding), finding.seq) == (Kind.REORDERED, ("000002", 4), seq + 4)


def test_a_record_moved_to_another_file(stream: Stream) -> None:
    seq = first_seq(stream, 1) + 4
    with editing(stream, 1) as lines, editing(stream, 3) as others:
        others.insert(2, lines.pop(4))

    (finding,) = found(stream)
    assert (finding.kind, place(finding), finding.seq) == (Kind.REORDERED, ("000003", 3), seq)


def test_a_copied_record(stream: Stream) -> None:
    """Right behind the original, and far away."""
    with editing(stream, 2) as lines:
        lines.insert(4, lines[3])
        lines.insert(1, lines[6])

    assert [(finding.kind, finding.line) for finding in found(stream)] == [(Kind.DUPLICATED, 2), (Kind.DUPLICATED, 6)]


def test_a_file_copied_as_the_next_one(stream: Stream) -> None:
    """One finding, however many records are in it."""
    last = stream.last_file
    shutil.copy(stream.files[last - 1], stream.path_of(last + 1))

    (finding,) = found(stream)
    assert (finding.kind, place(finding)) == (Kind.DUPLICATED, (f"{last + 1:06d}", 1))
    assert finding.records == len(lines_in(stream, last - 1))


def test_swapped_files_are_one_finding(stream: Stream) -> None:
    one, other = stream.files[1], stream.files[2]
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)

    (finding,) = found(stream)
    assert finding.kind is Kind.REORDERED


def test_an_inserted_line_of_another_stream(stream: Stream, tmp_path: Path) -> None:
    """It is sound, and its number is in use."""
    alien = write_log(tmp_path / "alien", 20)
    with editing(stream, 2) as lines:
        lines.insert(3, lines_in(alien, 1)[4])

    (finding,) = found(stream)
    assert (finding.kind, place(finding), finding.seq) == (Kind.INSERTED, ("000002", 4), 5)


def test_a_line_of_another_stream_behind_the_end(stream: Stream, tmp_path: Path) -> None:
    """Nobody misses the records up to its number: the head says where the log ends."""
    alien = write_log(tmp_path / "alien", 100)
    with editing(stream, stream.last_file) as lines:
        lines.append(lines_in(alien, alien.last_file)[-1])
        end = len(lines)

    (finding,) = found(stream)
    assert (finding.kind, finding.line, finding.seq) == (Kind.INSERTED, end, 102)


@pytest.mark.parametrize("which", [0, 1])
def test_removed_records_with_a_forged_one_elsewhere(stream: Stream, which: int) -> None:
    """It has the right number, and it is not the record that its neighbours name: it was not moved, it was made up."""
    seq = first_seq(stream, 2) + 3
    with editing(stream, 2) as lines, editing(stream, 3) as others:
        old = Line.parse(lines[3 + which])
        assert old is not None
        del lines[3:5]
        others.insert(2, Entry(old.time, old.event, "").link(old.seq, "0" * 64, Seal())[0])

    assert [(finding.kind, *place(finding), finding.seq, finding.records) for finding in found(stream)] == [
        (Kind.REMOVED, "000002", 4, seq, 2),
        (Kind.INSERTED, "000003", 3, seq + which, 1),
    ]


def test_a_record_written_anew_without_its_successors(stream: Stream) -> None:
    """Without a key its own digest can be made to fit; the next line still names the old one."""
    seq = first_seq(stream, 2) + 3
    with editing(stream, 2) as lines:
        old = Line.parse(lines[3])
        assert old is not None
        lines[3], _ = Entry(old.time, old.event, ',"peer":"nobody"').link(old.seq, old.prev, Seal())

    (finding,) = found(stream)
    assert (finding.kind, place(finding), finding.seq) == (Kind.CHANGED, ("000002", 4), seq)


def test_a_log_written_anew_up_to_its_end_is_found_by_the_head(stream: Stream) -> None:
    """Whoever forgets the head file."""
    number = stream.last_file
    with editing(stream, number) as lines:
        last, before = Line.parse(lines[-1]), Line.parse(lines[-2])
        assert last is not None
        assert before is not None
        lines[-2], digest = Entry(before.time, before.event, ',"peer":"nobody"').link(before.seq, before.prev, Seal())
        lines[-1], _ = Entry(last.time, last.event, "").link(last.seq, digest, Seal())

    (finding,) = found(stream)
    assert finding.kind is Kind.HEAD_CHANGED
    assert "another digest of record" in finding.message


def test_without_a_key_everything_can_be_written_anew(stream: Stream) -> None:
    """What the docs say this does not prove."""
    prev, seq = "", 0
    for path in stream.files.values():
        forged = []
        for line in map(Line.parse, path.read_bytes().splitlines(keepends=True)):
            assert line is not None
            seq, (text, prev) = line.seq, Entry(line.time, line.event, "").link(line.seq, prev or line.prev, Seal())
            forged.append(text)
        path.write_bytes(b"".join(forged))
    head = Head.parse(stream.head or b"", Seal())
    assert head is not None
    forged_head = Head(head.stream, head.file, seq, prev, seq, True, None)
    stream.head_path.write_bytes(forged_head.encode(Seal()))

    assert found(stream) == []
    assert [finding.kind for finding in found(stream, KEY)] == [Kind.KEY_UNUSED]


# ------------------------------------------------------------------------------------------------------------- The end


def test_a_cut_off_end(stream: Stream) -> None:
    """The head knows how many there were, and that they were on the disk."""
    with editing(stream, stream.last_file) as lines:
        del lines[-2:]
        left = len(lines)

    (finding,) = found(stream)
    assert (finding.kind, finding.line, finding.seq, finding.records) == (Kind.CUT_OFF, left, RECORDS + 1, 2)
    assert finding.message.startswith(f"The log ends before record {RECORDS + 1}, and the head says that {RECORDS + 2}")
    assert finding.message.endswith("They were on the disk: no crash does this.")


def test_an_end_that_a_power_failure_may_have_cut_off(tmp_path: Path) -> None:
    """Not synced yet, by the head's own word; found all the same."""
    stream = write_log(tmp_path, 5, close=False)
    with editing(stream, 1) as lines:
        del lines[-1]

    (finding,) = found(stream)
    assert (finding.kind, finding.seq) == (Kind.CUT_OFF, 6)
    assert "a power failure of the machine does this too" in finding.message


def test_a_last_file_that_is_gone(stream: Stream) -> None:
    """The head names it."""
    last = stream.last_file
    records = len(lines_in(stream, last))
    stream.files[last].unlink()

    (finding,) = found(stream)
    assert (finding.kind, finding.file, finding.records) == (Kind.FILE_MISSING, stream.files[last], records)


def test_several_files_that_are_gone(stream: Stream) -> None:
    """In the middle, and at the beginning, as after archiving."""
    for number in (2, 3):
        stream.files[number].unlink()
    (finding,) = found(stream)
    assert (finding.kind, finding.file) == (Kind.FILE_MISSING, stream.files[2])
    assert "and 1 more are missing" in finding.message

    stream.files[1].unlink()
    (finding,) = found(stream)
    assert (finding.kind, finding.file, finding.seq) == (Kind.FILE_MISSING, stream.files[1], 1)


def test_all_files_gone_but_the_head(stream: Stream) -> None:
    for path in stream.files.values():
        path.unlink()

    (finding,) = found(stream)
    assert (finding.kind, finding.records) == (Kind.FILE_MISSING, RECORDS + 2)


def test_archived_files_are_given_together(stream: Stream, tmp_path: Path) -> None:
    """One stream from two folders; the newest file's head counts, and an old copy of the head does no harm."""
    folder, archive = stream.head_path.parent, tmp_path / "archive"
    archive.mkdir()
    for number in (1, 2):
        shutil.move(stream.files[number], archive)
    old = Head(stream.name, 1, 1, "0" * 64, 1, False, None)
    (archive / stream.head_path.name).write_bytes(old.encode(Seal()))

    assert verify([archive, folder]).findings == verify([folder, archive]).findings == ()
    assert verify([folder, folder]).errors[0].kind is Kind.FILE_MISSING
    shutil.copy(archive / stream.files[1].name, folder)
    with pytest.raises(AuditPathError, match="two copies of one file"):
        verify([archive, folder])


def test_a_crash_in_the_middle_of_a_line_is_a_note(tmp_path: Path) -> None:
    """Recognised by a head that knows nothing of the record, and by a beginning that is ours."""
    stream = write_log(tmp_path, 5, close=False)
    with editing(stream, 1) as lines:
        lines.append(lines[-1].replace(b'"seq":6', b'"seq":7')[:50])

    findings = found(stream)
    assert [finding.kind for finding in findings] == [Kind.NOT_CLOSED, Kind.TORN]
    assert all(finding.is_note for finding in findings)
    assert findings[1].line == 7


def test_a_line_cut_off_in_the_middle_is_no_crash_if_the_head_knows_the_record(stream: Stream) -> None:
    with editing(stream, stream.last_file) as lines:
        lines[-1] = lines[-1][:50]

    (finding,) = found(stream)
    assert (finding.kind, finding.seq) == (Kind.CUT_OFF, RECORDS + 2)
    assert finding.message.startswith(f"The log ends in the middle of record {RECORDS + 2}")


def test_a_process_that_was_killed_between_log_and_head(tmp_path: Path) -> None:
    """A note: the log says more than the head, and what it says is chained."""
    log = new_log(tmp_path)
    log.write([entry(0)])
    log.settle()
    log.write([entry(1), entry(2)])
    log.abandon()

    report = verify([tmp_path])
    assert kinds(report) == [Kind.NOT_CLOSED, Kind.HEAD_BEHIND]
    assert "2 more records" in report.findings[1].message
    assert report.records == 4


@pytest.mark.parametrize("log_there", [True, False])
def test_a_process_that_was_killed_at_once(tmp_path: Path, log_there: bool) -> None:
    """There is a head from the start, and nothing else to be missed."""
    stream = write_log(tmp_path, 1, close=False)
    head = Head(stream.name, 1, 0, first_link(stream.name), 0, False, None)
    stream.head_path.write_bytes(head.encode(Seal()))
    stream.files[1].write_bytes(b"")
    if not log_there:
        stream.files[1].unlink()

    assert [finding.kind for finding in found(stream)] == [Kind.NOT_CLOSED]


def test_a_first_head_that_begins_another_stream(tmp_path: Path) -> None:
    """Its digest is that of the name."""
    stream = write_log(tmp_path, 1, close=False)
    stream.head_path.write_bytes(Head(stream.name, 1, 0, "0" * 64, 0, False, None).encode(Seal()))

    assert Kind.HEAD_CHANGED in [finding.kind for finding in found(stream)]


def test_a_removed_record_behind_an_old_head(tmp_path: Path) -> None:
    """Also what the head does not know of is chained."""
    log = new_log(tmp_path)
    log.write([entry(0)])
    log.settle()
    log.write([entry(index) for index in range(1, 6)])
    log.abandon()
    (stream,) = find_streams([tmp_path])
    with editing(stream, 1) as lines:
        del lines[4]

    findings = [finding for finding in found(stream) if not finding.is_note]
    assert [(finding.kind, finding.seq, finding.line) for finding in findings] == [(Kind.REMOVED, 5, 5)]


def test_changed_records_that_no_head_knows_of(tmp_path: Path) -> None:
    """They claim to go on where the log ends, so they are records of it, and not additions."""
    stream = write_log(tmp_path, 5, close=False)
    stream.head_path.unlink()
    with editing(stream, 1) as lines:
        lines[-2:] = [line.replace(b"host-", b"tost-") for line in lines[-2:]]

    findings = found(stream)
    assert [finding.kind for finding in findings] == [Kind.CHANGED, Kind.NOT_CLOSED, Kind.HEAD_MISSING]
    assert (findings[0].seq, findings[0].line, findings[0].records) == (5, 5, 2)


def test_records_behind_the_end(stream: Stream) -> None:
    """A process writes nothing after its last record; without a key, anybody can."""
    with editing(stream, stream.last_file) as lines:
        last = Line.parse(lines[-1])
        assert last is not None
        lines.append(entry(99).link(last.seq + 1, last.hash, Seal())[0])
        end = len(lines)

    (finding,) = found(stream)
    assert (finding.kind, finding.line, finding.seq) == (Kind.INSERTED, end, RECORDS + 3)
    assert f"ended the log with record {RECORDS + 2}" in finding.message


def test_lost_records_are_a_note(tmp_path: Path) -> None:
    """With the sum of what the process itself says."""
    log = new_log(tmp_path)
    log.write([Entry.of(0, Record("audit.lost", {"records": count, "reason": "queue_full"})) for count in (3, 4)])
    log.close()

    (finding,) = verify([tmp_path]).findings
    assert (finding.kind, finding.records, finding.line, finding.is_note) == (Kind.LOST, 7, 2, True)
    assert "could not write 7 records, on 2 occasions" in finding.message


# --------------------------------------------------------------------------------------------------------- Head and key


def test_a_renamed_stream(stream: Stream) -> None:
    """The first record names the stream; one finding, though the head tells it too."""
    for path in [*stream.files.values(), stream.head_path]:
        path.rename(path.with_name(path.name.replace("engine", "angine")))

    (finding,) = found(stream)
    assert (finding.kind, finding.line) == (Kind.FOREIGN, 1)


def test_the_head_of_another_stream(stream: Stream, tmp_path: Path) -> None:
    alien = write_log(tmp_path / "alien", 3)
    shutil.copy(alien.head_path, stream.head_path)

    (finding,) = found(stream)
    assert (finding.kind, finding.file) == (Kind.FOREIGN, stream.head_path)


def test_a_forged_head_without_bounds(stream: Stream) -> None:
    """Numbers that nobody can count to cost no time and no memory."""
    head = Head(stream.name, 10**17, 10**17, "0" * 64, 10**17, False, None)
    stream.head_path.write_bytes(head.encode(Seal()))

    (finding,) = found(stream)
    assert (finding.kind, finding.records) == (Kind.FILE_MISSING, 10**17 - RECORDS - 2)


@pytest.mark.parametrize(
    ("log_key", "given", "expected"),
    [
        (KEY, None, Kind.KEY_MISSING),
        (KEY, KEY[::-1], Kind.KEY_WRONG),
        (None, KEY, Kind.KEY_UNUSED),
        (KEY, KEY, None),
        (None, None, None),
    ],
)
def test_the_key_has_to_be_the_right_one(
    tmp_path: Path, log_key: bytes | None, given: bytes | None, expected: Kind | None
) -> None:
    """One finding, not one for each line."""
    stream = write_log(tmp_path, RECORDS, key=log_key)

    findings = found(stream, given)
    assert [finding.kind for finding in findings] == ([expected] if expected else [])
    assert not any(finding.is_note for finding in findings)
    for path in stream.files.values():
        path.unlink()
    (only,) = found(stream, given)
    assert only.kind is (expected or Kind.FILE_MISSING)


def test_a_changed_fingerprint_does_not_blame_the_key(tmp_path: Path) -> None:
    """As long as one line holds with the key, it is the right one."""
    stream = write_log(tmp_path, RECORDS, key=KEY)
    fingerprint = str(Seal(KEY).key_id).encode()
    for path in [stream.files[1], stream.head_path]:
        path.write_bytes(path.read_bytes().replace(fingerprint, b"0" * 16))

    assert [finding.kind for finding in found(stream, KEY)] == [Kind.CHANGED, Kind.HEAD_CHANGED]


def test_a_keyed_log_replaced_by_one_without_a_key(tmp_path: Path) -> None:
    """The head still holds with the key: the key is not to blame."""
    stream = write_log(tmp_path, 3, key=KEY)
    prev = first_link(stream.name)
    with editing(stream, 1) as lines:
        for index in range(len(lines)):
            lines[index], prev = entry(index).link(index + 1, prev, Seal())

    (finding,) = found(stream, KEY)
    assert (finding.kind, finding.seq, finding.records) == (Kind.CHANGED, 1, 5)


def test_the_end_of_a_keyed_log_replaced_without_the_key(tmp_path: Path) -> None:
    stream = write_log(tmp_path, RECORDS, key=KEY)
    with editing(stream, 2) as lines:
        old = Line.parse(lines[4])
        assert old is not None
        lines[4], _ = Entry(old.time, old.event, "").link(old.seq, old.prev, Seal())

    (finding,) = found(stream, KEY)
    assert (finding.kind, finding.line) == (Kind.CHANGED, 5)


# -------------------------------------------------------------------------------------------------------------- Counts


@pytest.mark.parametrize(("counted", "expected"), [(44, None), (47, Kind.COUNT_LOWER), (40, Kind.COUNT_HIGHER)])
def test_the_count_of_metrics(tmp_path: Path, counted: int, expected: Kind | None) -> None:
    """Over all streams: fewer is an error; more is a note, since the counter's last updates may not have come out."""
    write_log(tmp_path, 20, engine_id="one")
    write_log(tmp_path, 20, engine_id="two")

    report = verify([tmp_path], expected_records=counted)
    assert kinds(report) == ([expected] if expected else [])
    if expected:
        assert f"There are 44 records, and {counted} were counted" in report.findings[0].message
        assert report.findings[0].records == abs(44 - counted)


def test_a_stream_that_is_gone_is_found_by_its_count_only(tmp_path: Path) -> None:
    """By stream where the counts are known so."""
    one, two = (write_log(tmp_path, 20, engine_id=name) for name in ("one", "two"))
    for path in [*two.files.values(), two.head_path]:
        path.unlink()

    assert verify([tmp_path]).findings == ()
    (finding,) = verify([tmp_path], expected_records={one.name: 22, two.name: 22}).findings
    assert (finding.kind, finding.stream) == (Kind.COUNT_LOWER, two.name)


def test_a_changed_record_still_counts(stream: Stream) -> None:
    """One change is one finding."""
    with editing(stream, 2) as lines:
        lines[3] = b"x" + lines[3]

    report = verify([stream.head_path.parent], expected_records=RECORDS + 2)
    assert kinds(report) == [Kind.CHANGED]


# ------------------------------------------------------------------------------------------------------- Hostile, large


@pytest.mark.parametrize(
    "junk",
    [
        b"\0" * 100_000,
        b"\xff\xfe" * 50_000,
        b"[" * 200_000,
        b'{"a":' * 50_000,
        b'{"seq":1,"time":"' * 10_000,
        b"\n" * 5000,
        b'{"seq":' + b"9" * 5000 + b"}\n",
        b"x" * (LINE_LIMIT - 1) + b"\n" + b"y" * LINE_LIMIT + b"\n",
        b"\r\n\x1b[2J" * 100,
    ],
)
@pytest.mark.parametrize("where", ["only", "before", "behind", "middle"])
def test_junk(tmp_path: Path, junk: bytes, where: str) -> None:
    """Anything may lie there: it is an error, and the records beside it are still verified."""
    stream = write_log(tmp_path, 5)
    lines = lines_in(stream, 1)
    parts = {
        "only": [junk],
        "before": [junk, *lines],
        "behind": [*lines, junk],
        "middle": [*lines[:3], junk, *lines[3:]],
    }
    stream.files[1].write_bytes(b"".join(parts[where]))

    report = verify([tmp_path])
    assert 1 <= len(report.errors) <= 4
    assert report.records >= (0 if where == "only" else 6)


def test_a_line_that_nests_too_deeply(tmp_path: Path) -> None:
    """With a digest that fits, as anybody can make it without a key."""
    deep = Entry("2026-01-01T00:00:00.000000Z", "transfer", ',"a":' + "[" * 20_000 + "]" * 20_000)
    log = new_log(tmp_path)
    log.write([entry(0), deep, entry(1)])
    log.close()

    (finding,) = verify([tmp_path]).findings
    assert (finding.kind, finding.line) == (Kind.CHANGED, 3)


def test_a_log_that_was_shuffled(tmp_path: Path) -> None:
    """So much is wrong that it is not all told; but that it is wrong."""
    log = new_log(tmp_path, max_file_bytes=1 << 30)
    log.write([entry(index) for index in range(5000)])
    log.close()
    (stream,) = find_streams([tmp_path])
    with editing(stream, 1) as lines:
        random.Random(1).shuffle(lines)

    report = verify([tmp_path])
    assert Kind.TOO_MANY in kinds(report)
    assert len(report.findings) <= 2001


def test_a_log_with_a_thousand_changes(tmp_path: Path) -> None:
    """They are told until it is enough, and called by their name to the last."""
    log = new_log(tmp_path, max_file_bytes=1 << 30)
    log.write([entry(index) for index in range(1500)])
    log.close()
    (stream,) = find_streams([tmp_path])
    with editing(stream, 1) as lines:
        lines[::2] = [b"x" + line for line in lines[::2]]

    assert set(kinds(verify([tmp_path]))) == {Kind.CHANGED, Kind.TOO_MANY}


def test_long_lines_are_one_line_each() -> None:
    """Whatever their length, what follows keeps its number; only the last may lack an end."""
    long = b"x" * (3 * LINE_LIMIT)
    content = b"a\n" + long + b"\n" + long[:LINE_LIMIT] + b"\nb\n" + long
    lines = [(line.number, len(line.data), line.ended) for line in read_lines(BytesIO(content))]

    assert lines == [
        (1, 2, True), (2, LINE_LIMIT, True), (3, LINE_LIMIT, True), (4, 2, True), (5, LINE_LIMIT, False),
    ]  # fmt: skip


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """7 MB are verified in a tenth of that."""
    log = new_log(tmp_path, max_file_bytes=1 << 30)
    for start in range(0, 20_000, 1000):
        log.write(
            [Entry.of(0, Record("transfer", {"pad": "x" * 150, "index": start + index})) for index in range(1000)]
        )
    log.close()
    tracemalloc.start()

    report = verify([tmp_path])

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.findings == ()
    assert report.records == 20_002
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) > 7_000_000
    assert peak < 700_000


# --------------------------------------------------------------------------------------------------------------- Paths


def test_a_file_stands_for_its_stream(tmp_path: Path) -> None:
    """And for no other."""
    one, two = (write_log(tmp_path, 20, engine_id=name) for name in ("one", "two"))
    two.files[1].write_bytes(b"")

    for path in (one.files[2], one.head_path):
        report = verify([path])
        assert [summary.stream for summary in report.streams] == [one.name]
        assert report.findings == ()
    assert len(verify([one.files[1], tmp_path, two.files[2]]).streams) == 2


def test_paths_that_are_no_logs(tmp_path: Path) -> None:
    """The message says what to give instead."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "evidence.jsonl").write_text("{}\n")
    os.mkfifo(tmp_path / "nixl-audit-x.000001.jsonl")

    for path, message in {
        tmp_path / "gone": "does not exist",
        tmp_path / "empty": "No audit log in the folder",
        tmp_path / "evidence.jsonl": "is not named like an audit log",
        tmp_path / "nixl-audit-x.000001.jsonl": "is neither a file nor a folder",
        tmp_path: "No audit log in the folder",
    }.items():
        with pytest.raises(AuditPathError, match=message):
            verify([path])


def test_other_files_in_the_folder_do_no_harm(stream: Stream) -> None:
    folder = stream.head_path.parent
    (folder / "notes.txt").write_text("x")
    (folder / f"{stream.name}.head.tmp").write_text("x")
    (folder / "nixl-audit-folder.000001.jsonl").mkdir()
    os.mkfifo(folder / "nixl-audit-pipe.000001.jsonl")

    assert found(stream) == []


def test_every_kind_has_advice() -> None:
    assert set(ADVICE) == set(Kind)
    assert set(Kind) > NOTES
