# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The export thread: engine threads hand over a callable, everything costly happens here."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from nixl_telemetry.forking import in_children
from nixl_telemetry.signals.breaks import with_breaks
from nixl_telemetry.signals.description import Describe

ROUND_SECONDS: Final = 1.0
_MANY: Final = 32
"""So many operations are not left to wait: what describes them holds Python's lock all the while."""


class _Task(NamedTuple):
    run: Callable[[], None]
    done: threading.Event


class ExportThread:
    """Runs what is submitted through a consumer on one daemon thread, started at the first submission.

    What can wait is taken every :data:`ROUND_SECONDS`, or when much of it came together. To wake the thread for each
    operation would cost the engine's thread more than most of them, it would want Python's lock just while that thread
    is busy, and what is described once in a while finds its code in no cache.

    Every :data:`ROUND_SECONDS` the thread also looks at what is under way, through :meth:`watch`.

    A thread does not survive a fork: a child starts with an empty queue and, if it needs one, a thread of its own.

    Args:
        consume: Called with each submitted callable. It must not raise.
        limit: How many may wait.
        on_drop: Called for each one that was dropped because the queue was full.
    """

    def __init__(
        self,
        consume: Callable[[Describe], None],
        limit: int,
        on_drop: Callable[[], None],
    ) -> None:
        self._consume = consume
        self._limit = limit
        self._many = min(_MANY, limit // 2)
        self._on_drop = on_drop
        self._watches: list[Callable[[], None]] = []
        self.reset()
        in_children(self.reset)

    def reset(self) -> None:
        """Forget the queue and the thread, as a forked child must."""
        self._start_lock = threading.Lock()
        self._queue: queue.SimpleQueue[Describe | _Task] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        self._is_hurried = False
        self._look_at = 0.0

    def submit(self, describe: Describe, can_wait: bool = False) -> bool:
        """Hand over one operation; never blocks. False if it was dropped.

        Args:
            describe: Describes it.
            can_wait: Whether it is one of many, of which nothing is to be told soon.
        """
        waiting = self._queue.qsize()
        if waiting >= self._limit:
            self._on_drop()
            return False
        self._queue.put(describe)
        if self._thread is None:
            self._start()
        if (waiting >= self._many or not can_wait) and not self._hurry.is_set():
            self._hurry.set()
        return True

    def watch(self, look: Callable[[], None]) -> None:
        """Have something looked at every :data:`ROUND_SECONDS`, as soon as the thread runs. It must not raise."""
        self._watches.append(look)

    def stop_watching(self) -> None:
        """Look at nothing more."""
        self._watches.clear()

    def ensure(self) -> None:
        """Start the thread, if it does not run: there is something to be looked at."""
        if self._thread is None:
            self._start()

    def run(self, task: Callable[[], None], timeout_seconds: float) -> bool:
        """Run a task on the thread, after all that was submitted before, and wait for it; false if time ran out.

        Nothing happens where nothing was ever submitted.
        """
        if self._thread is None:
            return True
        done = threading.Event()
        self._queue.put(_Task(task, done))
        self._hurry.set()
        return done.wait(timeout_seconds)

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="nixl-telemetry-export", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        self._look_at = time.monotonic() + ROUND_SECONDS
        while True:
            self._is_hurried = self._hurry.wait(max(0.0, self._look_at - time.monotonic()))
            self._hurry.clear()
            self._look_if_due()
            for item in with_breaks(self._waiting(), self._is_late):
                self._take(item)
                # Where more comes than can be described, this never ends.
                self._look_if_due()

    def _look_if_due(self) -> None:
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + ROUND_SECONDS
            for look in tuple(self._watches):
                look()

    def _waiting(self) -> Iterator[Describe | _Task]:
        while not self._queue.empty():
            yield self._queue.get()

    def _is_late(self) -> bool:
        return self._is_hurried or self._hurry.is_set() or self._queue.qsize() >= self._many

    def _take(self, item: Describe | _Task) -> None:
        if isinstance(item, _Task):
            item.run()
            item.done.set()
        else:
            self._consume(item)
