# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Nothing that was started stays, however the one who started it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_telemetry.testbed.errors import ProcessDiedError, ProcessError, ProcessNotReadyError
from nixl_telemetry.testbed.processes import ManagedProcess, stop_all
from nixl_telemetry.testbed.procfs import process_info
from tests.support.peers import wait_until
from tests.support.processes import all_gone

# Only a bound: on a shared machine a small program may take long to come up.
_LONG = 60.0

# A server with a child, a grandchild in a session of its own, and pids written to a file. Descendants
# ignore SIGTERM; so does the leader when told to.
_TREE = """
import os, signal, subprocess, sys, time
pids, stubborn = sys.argv[1], len(sys.argv) > 2
if stubborn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
    with open(pids, "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(300)
with open(pids, "a") as file:
    file.write(f"{os.getpid()}\\n")
print("the tree stands", flush=True)
time.sleep(300)
"""

_SLOW_TO_STOP = """
import signal, sys, time
def stop(*_):
    time.sleep(0.7)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
time.sleep(300)
"""

# Somebody who starts the tree and then is ended from outside, or ends badly by itself.
_OWNER = """
import sys, time
from pathlib import Path
from nixl_telemetry.testbed.processes import ManagedProcess
work, tree, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
with ManagedProcess("tree", [sys.executable, "-c", tree, str(work / "pids")], work_dir=work, stop_timeout=2) as process:
    process.wait_ready(lambda: (work / "pids").exists() and len((work / "pids").read_text().split()) == 3, 60)
    print("up", flush=True)
    if how == "exception":
        raise RuntimeError("the test failed")
    if how == "exit":
        import os
        os._exit(3)
    time.sleep(300)
"""


def _pids(work: Path) -> list[int]:
    file = work / "pids"
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def _tree(work: Path, *, stubborn: bool = False, stop_timeout: float = 5.0) -> ManagedProcess:
    argv = [sys.executable, "-c", _TREE, str(work / "pids"), *(["stubborn"] if stubborn else [])]
    return ManagedProcess("tree", argv, work_dir=work, stop_timeout=stop_timeout)


@pytest.fixture
def started_tree(tmp_path: Path) -> Iterator[ManagedProcess]:
    with _tree(tmp_path) as process:
        process.wait_ready(lambda: len(_pids(tmp_path)) == 3, _LONG)
        yield process


@pytest.mark.parametrize("how", ["exception", "exit", "SIGINT", "SIGTERM", "SIGKILL"])
def test_nothing_outlives_the_owner(tmp_path: Path, how: str) -> None:
    """Children of children go too, those in their own session included, in every way the owner may end."""
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path), _TREE, how],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=Path(__file__).parents[2],
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        assert owner.stdout.readline() == b"up\n"
        if how.startswith("SIG"):
            owner.send_signal(signal.Signals[how])

    assert owner.returncode != 0
    assert len(_pids(tmp_path)) == 3
    assert wait_until(lambda: all_gone(_pids(tmp_path)), _LONG)


def test_stop_ends_the_whole_tree_and_says_what_it_killed(tmp_path: Path, started_tree: ManagedProcess) -> None:
    report = started_tree.stop()

    assert all_gone(_pids(tmp_path))
    assert report.returncode == -signal.SIGTERM
    assert len(report.killed) == 2


def test_a_leader_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    with _tree(tmp_path, stubborn=True, stop_timeout=0.5) as process:
        process.wait_ready(lambda: len(_pids(tmp_path)) == 3, _LONG)
        report = process.stop()

    assert report.returncode == -signal.SIGKILL
    assert report.seconds < 5
    assert len(report.killed) == 3


def test_a_paused_tree_stops_too(tmp_path: Path, started_tree: ManagedProcess) -> None:
    started_tree.send_signal(signal.SIGSTOP)
    assert wait_until(
        lambda: all(info.state == "T" for info in started_tree.members() if info.group == started_tree.pid), _LONG
    )

    report = started_tree.stop()

    assert report.returncode == -signal.SIGTERM
    assert all_gone(_pids(tmp_path))


def test_the_members_are_the_tree(tmp_path: Path, started_tree: ManagedProcess) -> None:
    assert sorted(info.pid for info in started_tree.members()) == sorted(_pids(tmp_path))


def test_a_killed_leader_takes_its_children_along(tmp_path: Path, started_tree: ManagedProcess) -> None:
    os.kill(started_tree.pid, signal.SIGKILL)

    assert wait_until(lambda: all_gone(_pids(tmp_path)), _LONG)
    assert not started_tree.is_running()
    assert started_tree.stop().returncode == -signal.SIGKILL


def test_a_killed_guardian_takes_the_leader_along(tmp_path: Path, started_tree: ManagedProcess) -> None:
    guardian = process_info(started_tree.pid)
    assert guardian is not None
    os.kill(guardian.parent, signal.SIGKILL)

    assert wait_until(lambda: process_info(started_tree.pid) is None, _LONG)
    assert not started_tree.is_running()
    for pid in _pids(tmp_path):
        if pid != started_tree.pid:
            os.kill(pid, signal.SIGKILL)


def test_early_death_shows_status_log_and_place(tmp_path: Path) -> None:
    script = "print('first'); raise SystemExit('no such model')"
    with (
        ManagedProcess("server", [sys.executable, "-c", script], work_dir=tmp_path) as process,
        pytest.raises(ProcessDiedError) as failure,
    ):
        process.wait_ready(lambda: False, _LONG)

    assert "server died with exit status 1" in str(failure.value)
    assert "no such model" in str(failure.value)
    assert str(tmp_path / "server.log") in str(failure.value)


def test_the_first_error_is_shown_when_it_is_far_above_the_end(tmp_path: Path) -> None:
    script = "print('(Worker) OSError: no such library'); print('RuntimeError: later', *range(100), sep='\\n'); exit(1)"
    with (
        ManagedProcess("server", [sys.executable, "-c", script], work_dir=tmp_path) as process,
        pytest.raises(ProcessDiedError, match=r"first error: \(Worker\) OSError: no such library\n"),
    ):
        process.wait_ready(lambda: False, _LONG)


def test_a_wait_that_is_too_long_says_so(tmp_path: Path) -> None:
    waited: list[float] = []
    script = "import time; print('still loading', flush=True); time.sleep(60)"
    with ManagedProcess("server", [sys.executable, "-c", script], work_dir=tmp_path) as process:
        process.wait_ready(lambda: "still loading" in process.log_text(), _LONG)
        with pytest.raises(ProcessNotReadyError, match=r"server was not ready within 0\.5 s(.|\n)*still loading"):
            process.wait_ready(lambda: False, 0.5, progress=waited.append)

    assert waited == sorted(waited)
    assert len(waited) > 1


def test_a_command_that_does_not_exist_is_an_error_at_start(tmp_path: Path) -> None:
    process = ManagedProcess("server", ["/no/such/program"], work_dir=tmp_path)

    with pytest.raises(ProcessError, match=r"server cannot be started: .*No such file"):
        process.start()
    assert not process.is_running()


def test_several_stop_side_by_side(tmp_path: Path) -> None:
    processes = [ManagedProcess(f"p{i}", [sys.executable, "-c", _SLOW_TO_STOP], work_dir=tmp_path) for i in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.wait_ready(lambda process=process: "up" in process.log_text(), _LONG)  # type: ignore[misc]
    begin = time.monotonic()

    reports = stop_all(processes)

    assert [report.returncode for report in reports] == [0, 0, 0]
    assert time.monotonic() - begin < 2.0
