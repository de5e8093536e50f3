# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Which threads a test started (a plain count also sees those of earlier tests end), and how none can be."""

import threading
from collections.abc import Callable


def threads_started() -> Callable[[], list[threading.Thread]]:
    """From now on: the function returned lists the threads that started since and still run."""
    before = set(threading.enumerate())
    return lambda: [thread for thread in threading.enumerate() if thread not in before]


def cannot_start(thread: threading.Thread) -> None:
    """In place of :meth:`threading.Thread.start`, as Python does where a process may have no more."""
    raise RuntimeError("can't start new thread")
