# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Child processes that are never left behind, and that say why they died."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from nixl_telemetry.testbed.errors import ProcessDiedError, ProcessError, ProcessNotReadyError
from nixl_telemetry.testbed.forkserver import ForkedGuardian, ForkServer
from nixl_telemetry.testbed.procfs import ExitReport, ProcessInfo, descendants

_GUARDIAN = Path(__file__).with_name("guardian.py")
_LAUNCH_SECONDS = 20.0
# What the guardian needs after the server's own time is up, to kill and to report.
_CLEAN_UP_SECONDS = 15.0


class ManagedProcess:
    """One child process with everything it spawns, in a session of its own.

    Between this process and the child stands a guardian that stops the child and all its descendants
    when ``stop`` is called, and also when this process ends in any way at all, SIGKILL included.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        work_dir: Path,
        env: Mapping[str, str] | None = None,
        stop_timeout: float = 20.0,
        forkserver: ForkServer | None = None,
    ) -> None:
        """Prepares the process; ``start`` runs it.

        Args:
            name: What it is called in messages; its log is ``<work_dir>/<name>.log``.
            argv: Command and arguments.
            work_dir: Existing folder for the log, and the child's working directory.
            env: The child's whole environment; by default a copy of this process's.
            stop_timeout: Seconds between SIGTERM and SIGKILL.
            forkserver: Forks the child, ``python -m MODULE ARGUMENT...``, instead of executing it.
        """
        self.name = name
        self.argv = tuple(argv)
        self.work_dir = work_dir
        self.log_path = work_dir / f"{name}.log"
        self._env = None if env is None else dict(env)
        self._stop_timeout = stop_timeout
        self._forkserver = forkserver
        self._lock = threading.Lock()
        self._guardian: subprocess.Popen[bytes] | ForkedGuardian | None = None
        self._control: socket.socket | None = None
        self._pending = b""
        self._pid: int | None = None
        self._launch_error = ""
        self._returncode: int | None = None
        self._killed: tuple[str, ...] = ()
        self._stop_requested_at: float | None = None

    @property
    def pid(self) -> int:
        """The child's process id, which is also the id of its process group."""
        if self._pid is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._pid

    def start(self) -> None:
        """Runs the child.

        Raises:
            ProcessError: The command cannot be executed.
        """
        if self._guardian is not None:
            raise RuntimeError(f"{self.name} was started before")
        ours, theirs = socket.socketpair()
        self._control = ours
        try:
            with theirs, self.log_path.open("ab") as log:
                self._guardian = self._start_guardian(theirs, log)
            ours.sendall(json.dumps({"argv": self.argv, "grace": self._stop_timeout}).encode() + b"\n")
            self._receive(_LAUNCH_SECONDS)
        except BaseException:
            self.stop()
            raise
        if self._pid is None:
            self.stop()
            raise self._failure(ProcessError, f"cannot be started: {self._launch_error or 'no answer'}")

    def is_running(self) -> bool:
        """Whether the child itself is alive."""
        self._receive(0.0)
        return self._pid is not None and self._returncode is None and self._guardian_runs()

    def members(self) -> tuple[ProcessInfo, ...]:
        """Returns the child and every process below it that is alive now."""
        return () if self._guardian is None else descendants(self._guardian.pid)

    def wait_ready(
        self,
        ready: Callable[[], bool],
        timeout: float,
        *,
        progress: Callable[[float], None] | None = None,
        interval: float = 0.2,
    ) -> float:
        """Polls *ready* until it holds.

        Args:
            ready: The condition, usually from ``readiness``.
            timeout: Seconds to wait at most.
            progress: Called after each poll with the seconds waited.
            interval: Seconds between polls; the death of the child ends a pause at once.

        Returns:
            The seconds waited.

        Raises:
            ProcessDiedError: The child ended first.
            ProcessNotReadyError: Time is up.
        """
        begin = time.monotonic()
        while True:
            if not self.is_running():
                raise self._failure(ProcessDiedError, f"died with exit status {self._returncode}")
            is_ready = ready()
            waited = time.monotonic() - begin
            if is_ready:
                return waited
            if progress is not None:
                progress(waited)
            if waited >= timeout:
                raise self._failure(ProcessNotReadyError, f"was not ready within {timeout:g} s")
            self._receive(interval)

    def send_signal(self, number: signal.Signals) -> None:
        """Signals the child's whole process group, for example SIGSTOP and SIGCONT."""
        if self.is_running():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def request_stop(self) -> None:
        """Begins to stop the child and returns at once; ``stop`` then waits for the end."""
        with self._lock:
            if self._stop_requested_at is None:
                self._stop_requested_at = time.monotonic()
                if self._control is not None:
                    with contextlib.suppress(OSError):
                        self._control.shutdown(socket.SHUT_WR)

    def stop(self) -> ExitReport:
        """Stops the child and everything below it; harmless when called again."""
        self.request_stop()
        if self._guardian is not None and self._guardian.returncode is None:
            deadline = time.monotonic() + self._stop_timeout + _CLEAN_UP_SECONDS
            while self._guardian_runs() and time.monotonic() < deadline:
                self._receive(0.5)
            if self._guardian_runs():
                self._kill_everything(self._guardian)
            self._guardian.wait()
            self._receive(0.0)
        if self._control is not None:
            self._control.close()
        seconds = time.monotonic() - (self._stop_requested_at or time.monotonic())
        return ExitReport(self._returncode, seconds, self._killed)

    def kill(self) -> ExitReport:
        """Ends the child and everything below it by SIGKILL, without a warning, as a machine does that loses power."""
        for info in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(info.pid, signal.SIGKILL)
        return self.stop()

    def log_text(self) -> str:
        """Returns everything the child and its descendants have written."""
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def log_tail(self, lines: int = 40) -> str:
        """Returns the last *lines* lines of the log."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def __enter__(self) -> ManagedProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_guardian(self, control: socket.socket, log: IO[bytes]) -> subprocess.Popen[bytes] | ForkedGuardian:
        if self._forkserver is not None:
            env = os.environ if self._env is None else self._env
            return self._forkserver.start_guardian(control, log, self.work_dir, env)
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(_GUARDIAN), str(control.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=self.work_dir,
            env=self._env,
            pass_fds=(control.fileno(),),
            start_new_session=True,
        )

    def _failure(self, kind: type[ProcessError], what: str) -> ProcessError:
        return kind(f"{self.name} {what}", self.log_path, self.log_text())

    def _kill_everything(self, guardian: subprocess.Popen[bytes] | ForkedGuardian) -> None:
        for info in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(info.pid, signal.SIGKILL)
        guardian.kill()

    def _guardian_runs(self) -> bool:
        return self._guardian is not None and self._guardian.poll() is None

    def _receive(self, timeout: float) -> None:
        with self._lock:
            if self._control is None or self._control.fileno() < 0:
                return
            self._control.settimeout(timeout)
            try:
                data = self._control.recv(1 << 16)
            except (BlockingIOError, TimeoutError, ConnectionError):
                return
            if not data:
                # The guardian has closed its end and is about to exit.
                time.sleep(min(timeout, 0.02))
            *lines, self._pending = (self._pending + data).split(b"\n")
        for message in map(json.loads, lines):
            self._pid = message.get("started", self._pid)
            self._launch_error = message.get("error", self._launch_error)
            self._returncode = message.get("exited", self._returncode)
            self._killed = tuple(message.get("killed", self._killed))


def stop_all(processes: Iterable[ManagedProcess]) -> list[ExitReport]:
    """Stops several processes at the same time and returns their reports in order."""
    for process in (stopping := list(processes)):
        process.request_stop()
    return [process.stop() for process in stopping]
