# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The process of a ``ForkServer``: imports modules, and forks a guardian for each server that is asked for.

Run by path with the interpreter of the servers (``python forkserver_process.py FD MODULE...``). It starts no thread
before it forks; what a server is told by its environment at run time, it is told as if it had been executed.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PARENT_CHECK_SECONDS = 0.5
_HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT)

if __name__ == "__main__":
    import guardian  # type: ignore[import-not-found]  # found by path

    # Python put this folder first; a server must not find our modules under their short names.
    del sys.path[0]


def main() -> None:
    """Serve until nobody is left to serve."""
    parent = os.getppid()
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    # What was imported stays, and collecting it would copy the pages that all share.
    gc.collect()
    gc.freeze()
    # Guardians are reaped by the kernel: they report over their own sockets.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads > 1:
        raise RuntimeError(f"{threads} threads after importing {', '.join(sys.argv[2:])}: a fork would lose them")
    # What is still buffered, each server would write into its own log.
    sys.stdout.flush()
    sys.stderr.flush()
    control.send(b"ready")
    while os.getppid() == parent:
        if not select.select([control], [], [], _PARENT_CHECK_SECONDS)[0]:
            continue
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 2)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            _become_guardian(json.loads(message), *fds)
        for fd in fds:
            os.close(fd)
        control.send(str(pid).encode())


def _become_guardian(request: dict[str, Any], control: int, log: int) -> None:
    os.setsid()
    os.chdir(request["cwd"])
    for fd in (1, 2):
        os.dup2(log, fd)
    os.close(log)
    # What stays is not touched: `setproctitle` finds the process's title by where its environment was.
    for name in os.environ.keys() - request["env"].keys():
        del os.environ[name]
    for name, value in request["env"].items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    # What was found out at import is found out anew: a server has a folder of its own for temporary files.
    tempfile.tempdir = None
    ours = socket.socket(fileno=control)
    status = guardian.guard(ours, lambda argv: _fork_leader(argv, ours))
    # Not by `sys.exit`: the handlers that the imported modules registered are the server's.
    os._exit(status)


def _fork_leader(argv: Sequence[str], control: socket.socket) -> int:
    """Fork the server; only the guardian returns from here."""
    # The guardian's handlers must not take what is meant for the server.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        # Both do it: whoever is the first to signal the group finds it.
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    signal.set_wakeup_fd(-1)
    for number in _HANDLED:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    control.close()
    os.setpgid(0, 0)
    guardian.die_with_guardian()
    try:
        _run(argv)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    raise SystemExit(0)


def _run(argv: Sequence[str]) -> None:
    """What ``python -m MODULE ARGUMENT...`` does, with this environment."""
    _, option, module, *arguments = argv
    if option != "-m":
        raise ValueError(f"a fork server runs modules, and not {' '.join(argv)}")
    for folder in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
        at_start = Path(folder, "sitecustomize.py")
        if folder and at_start.exists():
            runpy.run_path(str(at_start))
    # It runs as `__main__`, once.
    sys.modules.pop(module, None)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
