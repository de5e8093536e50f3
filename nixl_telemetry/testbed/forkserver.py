# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A process that has imported what servers need, and forks them: each then starts without importing it again."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from nixl_telemetry.testbed.errors import ProcessError

_PROCESS = Path(__file__).with_name("forkserver_process.py")
_IMPORT_SECONDS = 300.0
_FORK_SECONDS = 20.0
_END_SECONDS = 10.0


class ForkedGuardian:
    """A guardian that is another process's child, as far as it is used like a ``Popen``."""

    def __init__(self, pid: int) -> None:
        """Takes hold of the process.

        Raises:
            ProcessLookupError: It is gone already.
        """
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Returns ``None`` while it runs, then 0: only its parent learns the true one."""
        return self._ended(0)

    def wait(self) -> int | None:
        """Waits for its end."""
        while self._ended(100) is None:
            pass
        return self.returncode

    def kill(self) -> None:
        """Ends it at once."""
        with self._lock, contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _ended(self, timeout_ms: int) -> int | None:
        with self._lock:
            if self.returncode is None:
                poll = select.poll()
                poll.register(self._pidfd, select.POLLIN)
                if poll.poll(timeout_ms):
                    self.returncode = 0
                    os.close(self._pidfd)
            return self.returncode


class ForkServer:
    """Forks guardians with servers. Nothing of it outlives this process.

    The environment of a server is its own, except for what the modules read when they are imported.
    """

    def __init__(self, python: Path, modules: Sequence[str], env: Mapping[str, str], work_dir: Path) -> None:
        """Starts it, and returns when it is ready.

        Args:
            python: The interpreter.
            modules: What to import.
            env: Its whole environment.
            work_dir: Existing folder for its log.

        Raises:
            ProcessError: It cannot import the modules; the message has the end of its log.
        """
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = work_dir / "forkserver.log"
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(python), str(_PROCESS), str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=work_dir,
                env=dict(env),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        try:
            self._answer(_IMPORT_SECONDS)
        except BaseException:
            self.close()
            raise

    def start_guardian(
        self, control: socket.socket, log: IO[bytes], work_dir: Path, env: Mapping[str, str]
    ) -> ForkedGuardian:
        """Forks a guardian, which then reads from its socket what to run.

        Raises:
            ProcessError: It is not possible any more.
        """
        request = json.dumps({"cwd": str(work_dir), "env": dict(env)}).encode()
        with self._lock:
            try:
                socket.send_fds(self._control, [request], [control.fileno(), log.fileno()])
                return ForkedGuardian(int(self._answer(_FORK_SECONDS)))
            except OSError as error:
                raise self._failure(f"cannot fork: {error}") from error

    def close(self) -> None:
        """Ends it; the guardians of servers that are left then stop them."""
        self._control.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self, timeout: float) -> bytes:
        try:
            self._control.settimeout(timeout)
            answer = self._control.recv(1 << 16)
        except OSError as error:
            # An answer that came later would be taken for the next one.
            self._control.close()
            raise self._failure(f"does not answer: {error}") from error
        if not answer:
            raise self._failure("died")
        return answer

    def _failure(self, what: str) -> ProcessError:
        return ProcessError(f"the fork server {what}", self._log, self._log.read_text("utf-8", errors="replace"))

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
