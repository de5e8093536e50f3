# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The export thread: engine threads hand over a callable, everything costly happens here."""

import queue
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from nixl_telemetry.forking import in_children
from nixl_telemetry.signals.description import Describe

GATHER_SECONDS: Final = 0.25
_LINGER_ROUNDS: Final = 40
WATCH_SECONDS: Final = 1.0


class _Task(NamedTuple):
    run: Callable[[], None]
    done: threading.Event


class ExportThread:
    """Runs what is submitted through a consumer on one daemon thread, started at the first submission.

    What comes after a long pause is taken at once. Then the thread looks every :data:`GATHER_SECONDS` for a while, and
    takes what came together: to wake it for each operation would cost the engine's thread more than most of them, and
    it would want Python's lock just while that thread is busy.

    About once a second the thread also looks at what is under way, through :meth:`watch`.

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

    def submit(self, describe: Describe) -> bool:
        """Hand over one operation; never blocks. False if it was dropped."""
        if self._queue.qsize() >= self._limit:
            self._on_drop()
            return False
        self._queue.put(describe)
        if self._thread is None:
            self._start()
        return True

    def watch(self, look: Callable[[], None]) -> None:
        """Have something looked at every :data:`WATCH_SECONDS`, as soon as the thread runs. It must not raise."""
        self._watches.append(look)

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
        quiet_rounds = _LINGER_ROUNDS
        looked_at = time.monotonic()
        while True:
            if quiet_rounds < _LINGER_ROUNDS:
                if self._hurry.wait(GATHER_SECONDS):
                    self._hurry.clear()
            elif self._take_next(WATCH_SECONDS if self._watches else None):
                quiet_rounds = 0
            quiet_rounds += 1
            while not self._queue.empty():
                self._take(self._queue.get())
                quiet_rounds = 0
            if time.monotonic() - looked_at >= WATCH_SECONDS:
                looked_at = time.monotonic()
                for look in self._watches:
                    look()

    def _take_next(self, timeout_seconds: float | None) -> bool:
        try:
            item = self._queue.get(timeout=timeout_seconds)
        except queue.Empty:
            return False
        self._take(item)
        return True

    def _take(self, item: Describe | _Task) -> None:
        if isinstance(item, _Task):
            item.run()
            item.done.set()
        else:
            self._consume(item)
