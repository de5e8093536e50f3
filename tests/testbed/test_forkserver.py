# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Servers that are forked are as those that are executed, and nothing of them or of the fork server stays."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from nixl_telemetry.testbed.errors import ProcessDiedError, ProcessError
from nixl_telemetry.testbed.forkserver import ForkServer
from nixl_telemetry.testbed.processes import ManagedProcess
from tests.support.peers import wait_until
from tests.support.processes import all_gone

_LONG = 60.0
"""Only a bound: on a shared machine a small program may take long to come up."""

_SERVER = """
import atexit, json, os, sys, tempfile, threading, time, preloaded
how = sys.argv[1]
atexit.register(print, "finished", flush=True)
facts = {
    "name": __name__, "argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "pid": os.getpid(),
    "group": os.getpgid(0), "made_by": preloaded.PID, "threads": threading.active_count(), "at_start": os.marked,
    "temporary": tempfile.gettempdir(),
}
print(json.dumps(facts), flush=True)
if how == "raise":
    raise OSError("no such luck")
if how == "exit":
    sys.exit(7)
if os.fork() == 0:
    os.setsid()
time.sleep(300)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a module to import beforehand, and one that serves, which only the server's own path has."""
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "preloaded.py").write_text(
        "import os, tempfile\nPID, AT = os.getpid(), tempfile.gettempdir()\n"
    )
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "a_server.py").write_text(_SERVER)
    (tmp_path / "own" / "sitecustomize.py").write_text("import os\nos.marked = os.environ['MARK']\n")
    return tmp_path


@pytest.fixture
def forkserver(folder: Path) -> Iterator[ForkServer]:
    """One that has imported the module."""
    with ForkServer(Path(sys.executable), ["preloaded"], {"PYTHONPATH": str(folder / "before")}, folder) as forkserver:
        yield forkserver


def server(folder: Path, forkserver: ForkServer, *arguments: str) -> ManagedProcess:
    """One with an environment of its own."""
    env = {"PYTHONPATH": str(folder / "own"), "MARK": "it", "TMPDIR": str(folder)}
    argv = [sys.executable, "-m", "a_server", *arguments]
    return ManagedProcess("-".join(arguments), argv, work_dir=folder, env=env, stop_timeout=2, forkserver=forkserver)


def is_up(process: ManagedProcess) -> bool:
    """Whether it has told its facts."""
    return process.log_text().endswith("}\n")


def has_forked(process: ManagedProcess) -> bool:
    """Whether its child is there, too, which comes after the facts."""
    return len(process.members()) == 2


def test_it_runs_as_if_it_had_been_executed(folder: Path, forkserver: ForkServer) -> None:
    """Twice, since the module was imported by neither before."""
    for name in ("first", "second"):
        with server(folder, forkserver, "serve", name) as process:
            assert wait_until(partial(is_up, process), _LONG)
            facts = json.loads(process.log_text())
            assert wait_until(partial(has_forked, process), _LONG)
            members = [info.pid for info in process.members()]
            assert process.is_running()

        assert {key: facts[key] for key in ("name", "argv", "cwd", "threads", "at_start", "temporary")} == {
            "name": "__main__",
            "argv": ["serve", name],
            "cwd": str(folder),
            "threads": 1,
            "at_start": "it",
            # Though the module has asked for it before.
            "temporary": str(folder),
        }
        assert facts["env"] == {"PYTHONPATH": str(folder / "own"), "MARK": "it", "TMPDIR": str(folder)}
        assert facts["pid"] == facts["group"] == process.pid
        assert facts["made_by"] not in (os.getpid(), process.pid)
        assert wait_until(partial(all_gone, members), _LONG)


@pytest.mark.parametrize(("how", "status", "said"), [("raise", 1, "OSError: no such luck"), ("exit", 7, "finished")])
def test_its_end_is_told(folder: Path, forkserver: ForkServer, how: str, status: int, said: str) -> None:
    """With its status and the end of its log."""
    with (
        server(folder, forkserver, how) as process,
        pytest.raises(ProcessDiedError, match=f"status {status}") as caught,
    ):
        process.wait_ready(lambda: False, _LONG)

    assert said in str(caught.value)
    assert process.log_text().count("finished") == 1


def test_it_stands_still_and_is_killed_like_any_other(folder: Path, forkserver: ForkServer) -> None:
    with server(folder, forkserver, "serve") as process:
        assert wait_until(partial(has_forked, process), _LONG)
        process.send_signal(signal.SIGSTOP)
        assert wait_until(lambda: [info.state for info in process.members() if info.pid == process.pid] == ["T"], _LONG)
        report = process.kill()

    assert report.returncode == -signal.SIGKILL
    assert process.members() == ()


def test_no_server_outlives_its_fork_server(folder: Path) -> None:
    """Whatever ends that: a guardian looks after its parent."""
    with ForkServer(Path(sys.executable), ["preloaded"], {"PYTHONPATH": str(folder / "before")}, folder) as forkserver:
        process = server(folder, forkserver, "serve")
        process.start()
        assert wait_until(partial(has_forked, process), _LONG)
        members = [info.pid for info in process.members()]
        forkserver._process.kill()
        assert wait_until(partial(all_gone, members), _LONG)
        process.stop()

        with pytest.raises(ProcessError, match="the fork server"):
            server(folder, forkserver, "another").start()


def test_what_cannot_be_imported_is_named(folder: Path) -> None:
    with pytest.raises(ProcessError, match="No module named 'nowhere'"):
        ForkServer(Path(sys.executable), ["nowhere"], {}, folder)
