# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The trail is a guest: it does not raise, block, grow or survive a fork wrongly, and it says what it lost."""

import os
import signal
import struct
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from nixl_telemetry.audit.chain import Record
from nixl_telemetry.audit.findings import Kind
from nixl_telemetry.audit.streams import find_streams
from nixl_telemetry.audit.verify import verify
from tests.support.audit_logs import KEY, Trail, indexes, kinds, make, read, record
from tests.support.threads import cannot_start, threads_started

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def told(tmp_path: Path) -> Trail:
    """What a trail tells its owner; the folder does not exist yet."""
    return Trail(tmp_path / "audit")


def test_records_reach_the_file_at_once(told: Trail) -> None:
    """vLLM kills its workers half a second after it told them to end: nothing waits for a full batch or a close."""
    trail = told.start()
    trail.record(make(0))
    told.wait_for(lambda: told.written == 2)

    assert indexes(read(told.folder)) == [0]
    assert trail.close(30)


def test_a_trail_from_start_to_end(told: Trail) -> None:
    """Everything that was counted as written is in the log, and the log is whole."""
    trail = told.start(key=KEY)
    for index in range(3000):
        trail.record(make(index))
    assert trail.close(30)

    lines = read(told.folder)
    assert [lines[0].event, lines[-1].event] == ["audit.opened", "audit.closed"]
    assert indexes(lines) == list(range(3000))
    assert (told.written, told.dropped, told.errors) == (3002, 0, [])
    assert verify([told.folder], KEY, told.written).findings == ()


def test_a_trail_without_records_leaves_no_trace(told: Trail) -> None:
    """No thread, no folder."""
    started = threads_started()
    trail = told.start()

    assert started() == []
    assert trail.close(30)
    assert not told.folder.exists()


def test_closing_twice_and_recording_afterwards(told: Trail) -> None:
    """It runs in a finally of vLLM's shutdown, and at exit. What comes too late is counted."""
    trail = told.start()
    trail.record(make(0))

    assert trail.close(30)
    assert trail.close(30)
    trail.record(make(1))
    assert trail.close(30)

    assert told.dropped == 1
    assert [line.event for line in read(told.folder)] == ["audit.opened", "transfer", "audit.closed"]


def test_an_idle_trail_closes_at_once(told: Trail) -> None:
    """Its thread waits for records, without an end in sight."""
    trail = told.start()
    trail.record(make(0))
    told.wait_for(lambda: told.written == 2 and trail._log.settled)
    time.sleep(0.2)

    assert trail.close(30)
    assert verify([told.folder]).findings == ()


def test_the_time_is_that_of_the_call(told: Trail) -> None:
    """Not that of the audit thread, which may be late."""
    trail = told.start()
    release = threading.Event()

    def late() -> Record:
        release.wait(30)
        return record(0)

    trail.record(late)
    trail.record(make(1))
    after = time.time_ns()
    time.sleep(0.02)
    release.set()
    trail.close(30)

    times = [line.time for line in read(told.folder) if line.event == "transfer"]
    assert len(times) == 2
    assert (
        max(times) < f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(after // 10**9))}.{after // 1000 % 10**6:06d}Z"
    )


def test_a_record_that_cannot_be_made(told: Trail) -> None:
    """It is an error, it is counted as lost, and the log says that it is missing."""

    def broken() -> Record:
        raise RuntimeError("no record")

    trail = told.start()
    trail.record(make(0))
    trail.record(broken)
    trail.record(lambda: Record("transfer", {"hash": "taken"}))
    trail.record(lambda: None)  # type: ignore[arg-type, return-value]
    trail.record(make(1))
    trail.close(30)

    assert [type(error) for error in told.errors] == [RuntimeError, ValueError, AttributeError]
    assert told.dropped == 3
    lines = read(told.folder)
    assert indexes(lines) == [0, 1]
    lost = [line.members for line in lines if line.event == "audit.lost"]
    assert sum(members["records"] for members in lost) == 3
    assert {members["reason"] for members in lost} == {"not_made"}
    assert kinds(verify([told.folder])) == [Kind.LOST]


def test_an_overflow_is_told_of(told: Trail) -> None:
    """Without blocking: what does not fit is counted, and a record says how many were lost."""
    trail = told.start(queue_size=16)
    release = threading.Event()

    def stuck() -> Record:
        release.wait(30)
        return record(0)

    trail.record(stuck)
    told.wait_for(lambda: trail._queue.qsize() == 0)
    for index in range(1, 51):
        trail.record(make(index))
    release.set()
    assert trail.close(30)

    assert told.dropped == 34
    lines = read(told.folder)
    assert indexes(lines) == list(range(17))
    (lost,) = [line.members for line in lines if line.event == "audit.lost"]
    assert (lost["records"], lost["reason"]) == (34, "queue_full")
    report = verify([told.folder])
    assert kinds(report) == [Kind.LOST]
    assert report.findings[0].records == 34


def test_many_threads(told: Trail) -> None:
    """Written or dropped: no record is neither."""
    trail = told.start(queue_size=500)

    def work(number: int) -> None:
        for index in range(1000):
            trail.record(make(number * 1000 + index))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert trail.close(30)

    lines = read(told.folder)
    assert len(set(indexes(lines))) == len(indexes(lines)) == 8000 - told.dropped
    assert sum(line.members["records"] for line in lines if line.event == "audit.lost") == told.dropped
    assert verify([told.folder], expected_records=told.written).errors == ()


# -------------------------------------------------------------------------------------------------------------- Trouble


def test_a_folder_that_vanishes_and_comes_back(told: Trail, tmp_path: Path) -> None:
    """Nothing is lost meanwhile, as long as the queue holds it; each failure is an error."""
    trail = told.start()
    trail.record(make(0))
    told.wait_for(lambda: told.written == 2)
    told.folder.rename(tmp_path / "away")
    for index in range(1, 50):
        trail.record(make(index))
    told.wait_for(lambda: len(told.errors) > 2)
    (tmp_path / "away").rename(told.folder)
    assert trail.close(30)

    assert told.dropped == 0
    assert indexes(read(told.folder)) == list(range(50))
    assert verify([told.folder], expected_records=told.written).findings == ()


def test_a_disk_that_stays_full_does_not_hold_up_the_end(told: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing takes the time it was given; what was not written is counted."""
    trail = told.start()
    trail.record(make(0))
    told.wait_for(lambda: told.written == 2 and trail._log.settled)

    def full(file: int, data: memoryview) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    for index in range(1, 11):
        trail.record(make(index))
    started = time.monotonic()
    assert not trail.close(0.3)
    assert time.monotonic() - started < 15
    told.wait_for(lambda: told.dropped == 10)
    assert trail._ended.wait(30)

    monkeypatch.undo()
    assert [str(error) for error in told.errors[:1]] == ["[Errno 28] No space left on device"]
    assert kinds(verify([told.folder])) == [Kind.NOT_CLOSED]


def test_a_write_that_hangs_does_not_block_the_caller(told: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead network disk: the queue fills, the rest is dropped, the end comes in time."""
    trail = told.start(queue_size=16)
    hang = threading.Event()
    real = os.write
    monkeypatch.setattr(os, "write", lambda file, data: hang.wait(60) and real(file, data))
    started = time.monotonic()
    trail.record(make(0))
    told.wait_for(lambda: trail._queue.qsize() == 0)
    for index in range(1, 100):
        trail.record(make(index))
    assert not trail.close(0.1)
    assert time.monotonic() - started < 15
    assert told.dropped == 99 - 16

    hang.set()
    assert trail._ended.wait(30)
    assert verify([told.folder]).errors == ()


def test_a_full_disk_of_a_real_process(tmp_path: Path) -> None:
    """Files may not grow beyond a size for a while: partial writes, retries, and in the end every record."""
    script = """
        import resource, sys, time
        from pathlib import Path
        from tests.support.audit_logs import Trail, make

        told = Trail(Path(sys.argv[1]))
        trail = told.start()
        trail.record(make(0))
        told.wait_for(lambda: told.written == 2)
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
        for index in range(1, 100):
            trail.record(make(index))
        told.wait_for(lambda: len(told.errors) > 2)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert trail.close(30)
        print({error.errno for error in told.errors}, told.dropped, told.written)
    """
    run = [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "audit")]
    out = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert out == "{27} 0 102\n"
    assert indexes(read(tmp_path / "audit")) == list(range(100))
    assert verify([tmp_path / "audit"], expected_records=102).findings == ()


def test_a_thread_that_cannot_be_started(told: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the end of a process; the next record tries again, and what cannot be written is counted."""
    trail = told.start()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", cannot_start)
        trail.record(make(0))
    trail.record(make(1))
    assert trail.close(30)
    assert [str(error) for error in told.errors] == ["can't start new thread"]
    assert indexes(read(told.folder)) == [0, 1]

    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    never = told.start()
    never.record(make(2))
    assert not never.close(30)
    assert told.dropped == 1


def test_an_unexpected_failure_costs_a_batch_and_not_the_thread(told: Trail, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, its records are counted as lost."""
    trail = told.start()
    with monkeypatch.context() as patch:
        patch.setattr(trail._log, "write", lambda entries: 1 // 0)
        trail.record(make(0))
        told.wait_for(lambda: told.dropped == 1)
    trail.record(make(1))
    trail.close(30)

    assert [type(error) for error in told.errors] == [ZeroDivisionError]
    assert indexes(read(told.folder)) == [1]


# -------------------------------------------------------------------------------------------------- Forks and kill -9


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_stream_of_its_own(told: Trail) -> None:
    """It writes neither into its parent's files nor what its parent had queued."""
    trail = told.start()
    trail.record(make(0))
    told.wait_for(lambda: told.written == 2)
    child = os.fork()
    if child == 0:
        trail.record(make(1))
        os._exit(0 if trail.close(30) and not told.errors else 1)
    _, status = os.waitpid(child, 0)
    trail.record(make(2))
    assert trail.close(30)

    assert os.waitstatus_to_exitcode(status) == 0
    assert verify([told.folder]).findings == ()
    streams = find_streams([told.folder])
    written = {}
    for stream in streams:
        for path in [*stream.files.values(), stream.head_path]:
            target = told.folder.parent / stream.name
            target.mkdir(exist_ok=True)
            (target / path.name).write_bytes(path.read_bytes())
        lines = read(told.folder.parent / stream.name)
        written[lines[0].members["pid"]] = indexes(lines)
    assert written == {os.getpid(): [0, 2], child: [1]}


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_child_that_records_nothing_leaves_no_trace(told: Trail) -> None:
    """It holds no file of its parent's open, and its end does not end its parent's log."""
    trail = told.start()
    trail.record(make(0))
    told.wait_for(lambda: told.written == 2)
    child = os.fork()
    if child == 0:
        opened = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        still = any(str(told.folder) in path for path in opened)
        os._exit(0 if trail.close(30) and not still else 1)
    _, status = os.waitpid(child, 0)
    assert trail.close(30)

    assert os.waitstatus_to_exitcode(status) == 0
    assert len(find_streams([told.folder])) == 1
    assert verify([told.folder]).findings == ()


KILLED = """
    import mmap, os, struct, sys, time
    from pathlib import Path
    from nixl_telemetry.audit.trail import AuditTrail
    from tests.support.audit_logs import record

    folder, shared = Path(sys.argv[1]), mmap.mmap(os.open(sys.argv[2], os.O_RDWR), 8)
    def stop(error): os._exit(3)
    trail = AuditTrail(
        folder, engine_id="engine", process="worker-0", on_error=stop, on_dropped=lambda: os._exit(4),
        on_written=lambda count: os.write(1, struct.pack("<q", count)), queue_size=5000, max_file_bytes=200_000,
    )
    index = 0
    while True:
        if trail._queue.qsize() < 4000:
            trail.record(lambda index=index: record(index))
            index += 1
            shared[:] = struct.pack("<q", index)
"""


@pytest.mark.parametrize("records", [1, 3000, 9000])
def test_kill_9_under_load(tmp_path: Path, records: int) -> None:
    """What the process knew to be written is there; what is missing was queued; verifying says that it was killed."""
    shared = tmp_path / "shared"
    shared.write_bytes(bytes(8))
    folder = tmp_path / "audit"
    run = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(shared)]
    with subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        acknowledged = 0
        while acknowledged < records:
            acknowledged += struct.unpack("<q", process.stdout.read(8))[0]
        process.send_signal(signal.SIGKILL)
        for (count,) in struct.iter_unpack("<q", process.stdout.read()):
            acknowledged += count
    assert process.returncode == -signal.SIGKILL
    submitted = struct.unpack("<q", shared.read_bytes())[0]

    report = verify([folder], expected_records=acknowledged)
    assert report.errors == ()
    assert Kind.NOT_CLOSED in kinds(report)
    assert set(kinds(report)) <= {Kind.NOT_CLOSED, Kind.HEAD_BEHIND, Kind.TORN, Kind.COUNT_HIGHER}
    assert report.records >= acknowledged
    written = report.records - 1  # the first one is the trail's own
    assert 0 <= submitted + 1 - written <= 4000 + 1024 + 1
    (stream,) = find_streams([folder])
    content = b"".join(path.read_bytes() for path in stream.files.values())
    assert content.count(b'"event":"transfer"') in (written, written + 1)
