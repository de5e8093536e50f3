# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The process between a test and the server it starts: nothing the server spawned outlives it.

Run by path (``python -I -S guardian.py FD``), so it uses the standard library only and is up in
milliseconds. It owns a session, adopts every orphan below it (``PR_SET_CHILD_SUBREAPER``) and talks
JSON lines over the socket FD. When the socket closes or its parent is gone, whatever the reason, it
stops the server: SIGTERM to the leader, a bounded wait, SIGKILL to all that is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PARENT_CHECK_SECONDS = 0.5
# What the leader left behind gets this long to go by itself, and after SIGKILL to be reaped.
_LINGER_SECONDS = 1.0
_REAP_SECONDS = 10.0

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_guardian() -> None:
    """Have this process killed when its parent, the guardian, ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _descendants(root: int) -> dict[int, str]:
    """Returns pid -> name of every live process below *root*."""
    children: dict[int, list[tuple[int, str]]] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            head, _, tail = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
        except OSError:
            continue
        state, ppid = tail.split()[:2]
        if state not in "ZX":
            children.setdefault(int(ppid), []).append((int(folder.name), head.partition("(")[2]))
    found: dict[int, str] = {}
    pending = [root]
    while pending:
        for pid, name in children.get(pending.pop(), ()):
            found[pid] = name
            pending.append(pid)
    return found


class _Guardian:
    def __init__(self, control: socket.socket, start: Callable[[Sequence[str]], int]) -> None:
        self._control = control
        self._start = start
        self._parent = os.getppid()
        self._buffer = b""
        self._leader = 0
        self._returncode: int | None = None
        self._grace = 0.0
        self._told_to_stop = False
        wake_read, self._wake_write = socket.socketpair()
        wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._wake = wake_read
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        # Handlers, not SIG_IGN: an ignored signal stays ignored in the server after exec.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        request = self._read_request()
        if request is None:
            return 0
        self._grace = float(request["grace"])
        try:
            self._leader = self._start(request["argv"])
        except (OSError, subprocess.SubprocessError) as error:
            self._send({"error": str(error)})
            return 1
        self._send({"started": self._leader})
        while self._leader_lives() and not self._told_to_stop:
            self._wait(_PARENT_CHECK_SECONDS)
            self._check_parent()
        if not self._leader_lives():
            self._send({"exited": self._returncode})
        killed = self._clean_up()
        self._send({"exited": self._returncode, "killed": killed})
        return 0

    def _on_signal(self, *_: object) -> None:
        self._told_to_stop = True

    def _check_parent(self) -> None:
        # The socket alone does not do: a forked child of the parent may hold its end open.
        if os.getppid() != self._parent:
            self._told_to_stop = True

    def _read_request(self) -> dict[str, Any] | None:
        while b"\n" not in self._buffer:
            data = self._control.recv(1 << 16)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        request: dict[str, Any] = json.loads(line)
        return request

    def _wait(self, timeout: float) -> None:
        watched = [self._wake] if self._told_to_stop else [self._wake, self._control]
        ready, _, _ = select.select(watched, [], [], max(timeout, 0.0))
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)
        if self._control in ready:
            with contextlib.suppress(ConnectionError):
                # Any byte and the end of the stream both mean: stop.
                self._control.recv(4096)
            self._told_to_stop = True
        self._reap()

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._leader:
                self._returncode = os.waitstatus_to_exitcode(status)

    def _leader_lives(self) -> bool:
        return self._returncode is None

    def _clean_up(self) -> list[str]:
        if self._leader_lives():
            with contextlib.suppress(ProcessLookupError):
                # A paused server (SIGSTOP) would never see the SIGTERM.
                os.killpg(self._leader, signal.SIGCONT)
                os.kill(self._leader, signal.SIGTERM)
            deadline = time.monotonic() + self._grace
            while self._leader_lives() and time.monotonic() < deadline:
                self._wait(min(deadline - time.monotonic(), _PARENT_CHECK_SECONDS))
        if not self._leader_lives():
            deadline = time.monotonic() + _LINGER_SECONDS
            while _descendants(os.getpid()) and time.monotonic() < deadline:
                self._wait(0.05)
        return self._kill_rest()

    def _kill_rest(self) -> list[str]:
        killed: dict[int, str] = {}
        deadline = time.monotonic() + _REAP_SECONDS
        # In rounds: a process may fork between the look and the kill, and its child then becomes ours.
        while (alive := _descendants(os.getpid())) and time.monotonic() < deadline:
            killed.update(alive)
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._wait(0.05)
        self._reap()
        return [f"{name} ({pid})" for pid, name in killed.items()]

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")


_executed: list[subprocess.Popen[bytes]] = []
"""Kept, though only the pid is used: a Popen that is collected reaps the child and loses its status."""


def _execute(argv: Sequence[str]) -> int:
    # The server leads its own process group in our session; a group signal spares the guardian.
    server = subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=die_with_guardian,  # noqa: PLW1509 - there are no threads here
    )
    _executed.append(server)
    return server.pid


def guard(control: socket.socket, start: Callable[[Sequence[str]], int]) -> int:
    """Runs one server as told over the socket.

    Args:
        control: JSON lines come and go over it.
        start: Starts the server, a child that leads a process group of its own, and returns its pid.

    Returns:
        The exit status of the guardian.
    """
    control.set_inheritable(False)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    return _Guardian(control, start).run()


if __name__ == "__main__":
    sys.exit(guard(socket.socket(fileno=int(sys.argv[1])), _execute))
