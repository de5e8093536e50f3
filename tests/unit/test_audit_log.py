# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The log on disk: form, head, rotation, and what happens when the disk or the folder fails."""

import json
import os
import stat
import subprocess
import sys
import textwrap
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from nixl_telemetry.audit.chain import (
    LINE_LIMIT,
    AuditKeyError,
    Entry,
    Head,
    Line,
    Record,
    Seal,
    could_be_cut,
    first_link,
    read_key,
)
from nixl_telemetry.audit.findings import Kind
from nixl_telemetry.audit.log import AuditLog
from nixl_telemetry.audit.streams import find_streams
from nixl_telemetry.audit.verify import verify
from tests.support.audit_logs import KEY, entry, indexes, kinds, new_log, raise_error, read, write_log

ROOT = Path(__file__).resolve().parents[2]


def only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


# ---------------------------------------------------------------------------------------------------------------- Form


def test_a_line_is_what_the_docs_say(tmp_path: Path) -> None:
    """Compact JSON; the digest covers every byte before it, and each line names the one before."""
    log = new_log(tmp_path)
    log.write([entry(0), entry(1)])
    log.close()

    lines = only(tmp_path, "*.jsonl").read_bytes().splitlines(keepends=True)
    prev = first_link(only(tmp_path, "*.jsonl").name.removesuffix(".000001.jsonl"))
    for seq, line in enumerate(lines, 1):
        members = json.loads(line)
        content = line[: line.rindex(b',"hash"')]
        assert list(members)[:3] == ["seq", "time", "event"]
        assert list(members)[-2:] == ["prev", "hash"]
        assert (members["seq"], members["prev"]) == (seq, prev)
        assert members["hash"] == sha256(content).hexdigest()
        assert line.endswith(f'"hash":"{members["hash"]}"}}\n'.encode())
        prev = members["hash"]
    assert [json.loads(line)["event"] for line in lines] == ["audit.opened", "transfer", "transfer", "audit.closed"]


def test_the_first_record_says_who_writes(tmp_path: Path) -> None:
    """The fingerprint of the key, and not the key."""
    log = new_log(tmp_path, key=KEY)
    log.write([entry(0)])
    log.close()

    opened = read(tmp_path)[0].members
    assert opened["stream"] == find_streams([tmp_path])[0].name
    assert (opened["nixl.engine.id"], opened["process"], opened["pid"]) == ("engine", "worker-0", os.getpid())
    assert opened["version"] == "1"
    assert opened["key"] == Seal(KEY).key_id
    for path in tmp_path.iterdir():
        assert KEY not in path.read_bytes()
        assert KEY.hex() not in path.read_text()


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    """Request ids and peers are in there."""
    folder = tmp_path / "new" / "audit"
    log = new_log(folder)
    log.write([entry(0)])
    log.close()

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == 2


def test_nothing_is_opened_before_the_first_record(tmp_path: Path) -> None:
    """No folder either."""
    log = new_log(tmp_path / "audit")

    assert log.settled
    assert log.close() == 0
    assert not (tmp_path / "audit").exists()


def test_names_that_a_peer_could_choose_stay_inside_the_folder(tmp_path: Path) -> None:
    """The engine id is the operator's, or made up by vLLM; a path it is not."""
    log = new_log(tmp_path / "audit", engine_id="../../etc/\n\0passwd" + "x" * 300)
    log.write([entry(0)])
    log.close()

    assert [path.name for path in tmp_path.iterdir()] == ["audit"]
    assert verify([tmp_path / "audit"]).findings == ()


@pytest.mark.parametrize(
    ("event", "attributes", "problem"),
    [
        ("no event", {}, "no event name"),
        ('a","seq":1', {}, "no event name"),
        ("transfer", {"hash": "x"}, "named like members"),
        ("transfer", {f"a{index}": "x" * 100 for index in range(1000)}, "too many attributes"),
    ],
)
def test_a_record_that_cannot_be_a_line(event: str, attributes: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Entry.of(0, Record(event, attributes))


@pytest.mark.parametrize("surrogate", ["", "\ud800"])
def test_values_that_a_peer_chose(tmp_path: Path, surrogate: str) -> None:
    """Control characters, surrogates, what is no JSON, and lengths without end: the line is ASCII and short."""
    peer = "\x1b]0;x\x07\x7f\x9b\u202e\U0001f600" + surrogate
    hostile: dict[str, Any] = {
        "peer": peer,
        "kind": Kind.CHANGED,
        "path": Path("/x"),
        "nested": {"a": [1, None]},
    }
    log = new_log(tmp_path)
    log.write([Entry.of(0, Record("handshake", {**hostile, "long": "é" * 1_000_000}))])
    log.close()

    line = only(tmp_path, "*.jsonl").read_bytes().splitlines()[1]
    members = json.loads(line)
    assert line.isascii()
    assert line.decode().isprintable()
    assert len(line) < LINE_LIMIT
    assert members["peer"] == peer
    assert (members["kind"], members["path"], members["nested"]) == ("changed", "/x", {"a": [1, None]})
    assert members["long"].endswith("... (6000002 characters)")
    assert verify([tmp_path]).findings == ()


def test_a_first_record_that_cannot_be_a_line(tmp_path: Path) -> None:
    """Told at once, to who makes the log; and nobody takes the log's own members away."""
    with pytest.raises(ValueError, match="named like members"):
        AuditLog(tmp_path, "engine", "worker-0", raise_error, {"seq": 1})
    log = AuditLog(tmp_path, "engine", "worker-0", raise_error, {"key": "none", "pid": 0, "more": 1})
    log.write([entry(0)])
    log.close()

    opened = read(tmp_path)[0].members
    assert (opened["key"], opened["pid"], opened["more"]) == (None, os.getpid(), 1)


def test_a_number_that_is_none_is_null() -> None:
    """JSON has no other word for it, and the record is worth more than the number."""
    assert Entry.of(0, Record("transfer", {"rate": float("nan"), "most": float("inf")})).attributes == (
        ',"rate":null,"most":null'
    )


def test_times_are_utc_with_microseconds() -> None:
    """Texts in the order of time."""
    assert Entry.of(1_767_225_600_000_001_999, Record("transfer", {})).time == "2026-01-01T00:00:00.000001Z"


# ----------------------------------------------------------------------------------------------------------------- Key


def test_a_key_changes_every_digest(tmp_path: Path) -> None:
    """Nobody without the key can tell or make one."""
    line, _ = entry(0).link(1, "0" * 64, Seal(KEY))

    assert Seal(KEY).holds(line)
    assert not Seal().holds(line)
    assert not Seal(KEY[::-1]).holds(line)
    assert Line.parse(line) is not None


@pytest.mark.parametrize("content", [b"", b"x" * 15, b"x" * 4097])
def test_a_file_that_is_no_key(tmp_path: Path, content: bytes) -> None:
    """The message names the file and its size."""
    path = tmp_path / "key"
    path.write_bytes(content)

    with pytest.raises(AuditKeyError, match=rf"{path} has .* bytes; a key has 16 to 4,096"):
        read_key(path)


def test_a_key_is_taken_as_it_is(tmp_path: Path) -> None:
    """A newline may be a part of it."""
    path = tmp_path / "key"
    path.write_bytes(b"\n" * 16)

    assert read_key(path) == b"\n" * 16
    with pytest.raises(AuditKeyError, match="gone cannot be read: No such file"):
        read_key(tmp_path / "gone")
    with pytest.raises(AuditKeyError, match="Is a directory"):
        read_key(tmp_path)


# ---------------------------------------------------------------------------------------------------------------- Head


@pytest.mark.parametrize("key", [None, KEY])
def test_the_head_follows_the_log(tmp_path: Path, key: bytes | None) -> None:
    """There is one before the first record, so that a missing one is never of our making."""
    log = new_log(tmp_path, key=key)

    def head() -> Head:
        head = Head.parse(only(tmp_path, "*.head.json").read_bytes(), Seal(key))
        assert head is not None
        return head

    log.write([entry(0)])
    assert (head().seq, head().closed, head().key) == (0, False, Seal(key).key_id)
    log.settle()
    assert (head().seq, head().synced, head().last) == (2, 2, read(tmp_path)[-1].hash)
    log.write([entry(1)])
    log.settle()
    assert (head().seq, head().synced) == (3, 2)  # synced at most once a second
    assert not log.settled
    log.close()
    assert (head().seq, head().synced, head().closed) == (4, 4, True)
    assert log.settled


def test_any_changed_byte_of_the_head_is_found(tmp_path: Path) -> None:
    """Each one, in turn."""
    stream = write_log(tmp_path, 1)
    assert stream.head is not None
    for position in range(len(stream.head)):
        changed = bytearray(stream.head)
        changed[position] ^= 1
        assert Head.parse(bytes(changed), Seal()) is None
    assert Head.parse(stream.head, Seal()) is not None


# ------------------------------------------------------------------------------------------------------------ Rotation


def test_rotation_keeps_the_chain(tmp_path: Path) -> None:
    """Files stay below their size, and nothing is ever deleted."""
    stream = write_log(tmp_path, 100)

    assert len(stream.files) > 5
    assert list(stream.files) == list(range(1, len(stream.files) + 1))
    assert all(path.stat().st_size <= 4096 for path in stream.files.values())
    assert indexes(read(tmp_path)) == list(range(100))
    assert [line.seq for line in read(tmp_path)] == list(range(1, 103))
    assert verify([tmp_path]).findings == ()


def test_a_batch_larger_than_a_file_is_written(tmp_path: Path) -> None:
    """In one file, rather than never."""
    log = new_log(tmp_path, max_file_bytes=100)
    assert log.write([entry(index) for index in range(10)]) == 11
    assert log.write([entry(10)]) == 1
    assert log.close() == 1

    assert len(find_streams([tmp_path])[0].files) == 3
    assert verify([tmp_path]).findings == ()


# ------------------------------------------------------------------------------------------------------------- Trouble


def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    """A real partial write: the file may not grow beyond a size, for a while. Then the same records are written."""
    script = """
        import resource, sys
        from pathlib import Path
        from tests.support.audit_logs import entry, new_log

        folder = Path(sys.argv[1])
        log = new_log(folder, max_file_bytes=1 << 20)
        log.write([entry(0)])
        (path,) = folder.glob("*.jsonl")
        size = path.stat().st_size
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 500, hard))
        batch = [entry(index) for index in range(1, 6)]
        for _ in range(3):
            try:
                log.write(batch)
            except OSError as error:
                print(type(error).__name__, error.errno, path.stat().st_size - size)
            log.settle()
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        log.write(batch)
        log.close()
    """
    run = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)]
    out = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert out.splitlines() == ["OSError 27 0"] * 3
    assert indexes(read(tmp_path)) == list(range(6))
    assert verify([tmp_path]).findings == ()


def test_what_could_not_be_taken_back_is_taken_back_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails to write and to truncate."""
    log = new_log(tmp_path)
    log.write([entry(0)])
    whole, cut = os.write, os.ftruncate
    calls = []

    def half(file: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return whole(file, data[: len(data) // 2])

    def fails(file: int, size: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "write", half)
    monkeypatch.setattr(os, "ftruncate", fails)
    with pytest.raises(OSError, match="No space left"):
        log.write([entry(1)])
    monkeypatch.setattr(os, "write", whole)
    with pytest.raises(OSError, match="Input/output"):
        log.write([entry(1)])
    monkeypatch.setattr(os, "ftruncate", cut)
    log.write([entry(1)])
    log.close()

    assert indexes(read(tmp_path)) == [0, 1]
    assert verify([tmp_path]).findings == ()


@pytest.mark.parametrize("how", ["deleted", "replaced", "moved"])
def test_a_file_that_vanished_is_noticed(tmp_path: Path, how: str) -> None:
    """The chain goes on in a new file; what was in the old one is missed when it is verified."""
    errors: list[Exception] = []
    log = new_log(tmp_path, on_error=errors.append)
    log.write([entry(0), entry(1)])
    path = only(tmp_path, "*.jsonl")
    if how == "deleted":
        path.unlink()
    elif how == "replaced":
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    else:
        path.rename(tmp_path / "old")
    log.write([entry(2)])
    log.close()

    (error,) = errors
    assert f"{path} was moved, replaced or deleted" in str(error)
    report = verify([tmp_path])
    if how == "replaced":
        assert report.findings == ()
    else:
        assert kinds(report) == [Kind.FILE_MISSING]
        assert report.findings[0].file == path
        assert (report.findings[0].seq, report.findings[0].records) == (1, 3)


def test_a_vanished_folder_is_not_made_again(tmp_path: Path) -> None:
    """A volume that is gone is not papered over with a folder on the root disk; when it is back, the chain goes on."""
    folder, away = tmp_path / "audit", tmp_path / "away"
    errors: list[Exception] = []
    log = new_log(folder, on_error=errors.append)
    log.write([entry(0)])
    folder.rename(away)

    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            log.write([entry(1)])
    assert not folder.exists()
    away.rename(folder)
    log.write([entry(1)])
    log.close()

    assert indexes(read(folder)) == [0, 1]
    assert verify([folder]).findings == ()
    assert len(errors) == 1


def test_a_folder_that_cannot_be_made_at_first(tmp_path: Path) -> None:
    """It is tried again with the next batch, and nothing of the first one is lost."""
    (tmp_path / "audit").write_text("in the way")
    log = new_log(tmp_path / "audit")
    with pytest.raises(FileExistsError):
        log.write([entry(0)])
    (tmp_path / "audit").unlink()
    log.write([entry(0)])
    log.close()

    assert verify([tmp_path / "audit"]).findings == ()


def test_the_folder_is_made_once_even_if_nothing_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was there, and vanished before the first head could be written."""
    log = new_log(tmp_path / "audit")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", lambda *args: raise_error(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            log.write([entry(0)])
    (tmp_path / "audit").rmdir()

    with pytest.raises(FileNotFoundError):
        log.write([entry(0)])
    assert not (tmp_path / "audit").exists()


@pytest.mark.parametrize("how", ["file", "link"])
def test_what_lies_in_the_way_is_not_followed(tmp_path: Path, how: str) -> None:
    """Neither written to nor hidden: the log goes past it, and verifying shows it."""
    folder = tmp_path / "audit"
    log = new_log(folder)
    log.write([entry(0)])
    victim = tmp_path / "victim"
    victim.write_text("precious")
    trap = Path(str(only(folder, "*.jsonl")).replace("000001", "000002"))
    if how == "file":
        trap.write_text("precious")
    else:
        trap.symlink_to(victim)

    log.max_file_bytes = 1
    with pytest.raises(FileExistsError):
        log.write([entry(1)])
    log.write([entry(1)])
    log.close()

    assert trap.read_text() == victim.read_text() == "precious"
    assert kinds(verify([folder])) == [Kind.INSERTED]


def test_what_somebody_appended_stays_as_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when a write of ours fails behind it."""
    log = new_log(tmp_path)
    log.write([entry(0)])
    path = only(tmp_path, "*.jsonl")
    with path.open("a") as file:
        file.write("graffiti\n")
    real = os.write

    def fails(file: int, data: memoryview) -> int:
        real(file, data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", fails)
    with pytest.raises(OSError, match="No space left"):
        log.write([entry(1)])
    monkeypatch.setattr(os, "write", real)
    log.write([entry(1)])
    log.close()

    assert path.read_text().splitlines()[2] == "graffiti"
    report = verify([tmp_path])
    assert kinds(report) == [Kind.INSERTED]
    assert report.findings[0].line == 3


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_head_and_sync_fail_without_losing_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """They are told of and tried again."""
    errors: list[Exception] = []
    log = new_log(tmp_path, on_error=errors.append)
    log.write([entry(0)])

    def broken(*args: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(*((os, "fsync", broken) if fails == "fsync" else (Path, "replace", broken)))
        log.settle()
        log.write([entry(1)])
    assert len(errors) == 1
    assert not log.settled
    assert len(list(tmp_path.iterdir())) == 2  # no temporary head stays behind
    log.close()

    assert indexes(read(tmp_path)) == [0, 1]
    assert verify([tmp_path]).findings == ()


def test_a_stale_temporary_head_is_cleared_away(tmp_path: Path) -> None:
    """Whatever it is; a link is not followed."""
    errors: list[Exception] = []
    log = new_log(tmp_path, on_error=errors.append)
    log.write([entry(0)])
    victim = tmp_path / "victim"
    victim.write_text("precious")
    only(tmp_path, "*.head.json").with_suffix(".tmp").symlink_to(victim)
    log.settle()
    assert len(errors) == 1
    log.settle()
    log.close()

    assert victim.read_text() == "precious"
    assert verify([tmp_path]).findings == ()


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (b'{"seq":12,"time":"2026', True),
        (b'{"seq":12', True),
        (b'{"s', True),
        (b"\0\0\0", True),
        (b'{"seq":1\0\0', True),
        (b"graffiti", False),
        (b'{"seq":x', False),
        (b'{"seq":0,"time"!', False),
    ],
)
def test_a_crash_in_the_middle_of_a_line_looks_like_one(end: bytes, expected: bool) -> None:
    """The beginning of a line of ours, or the zeros that a power failure leaves."""
    assert could_be_cut(end) is expected


def test_logs_of_one_process_have_names_of_their_own(tmp_path: Path) -> None:
    """Several connectors may live in a process."""
    logs: list[AuditLog] = [new_log(tmp_path) for _ in range(5)]
    for log in logs:
        log.write([entry(0)])
        log.close()

    assert len(find_streams([tmp_path])) == 5
    assert verify([tmp_path]).findings == ()
