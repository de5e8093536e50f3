# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The export thread: engine threads hand over a callable, everything costly happens here."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from nixl_telemetry.forking import in_children
from nixl_telemetry.signals.breaks import with_breaks
from nixl_telemetry.signals.description import Describe

ROUND_SECONDS: Final = 1.0
"""No operation is taken sooner, unless it is in haste."""
LOOK_SECONDS: Final = 2.0
"""Between two looks at what is under way. Nobody scrapes or is alerted so often, and each costs as much as describing
an operation."""
_LONGEST_SECONDS: Final = 5.0
"""No wait is longer: things that have begun meanwhile are to be looked at, too."""
_MANY: Final = 32
"""So many operations are not left to wait: what describes them holds Python's lock all the while."""


class _Task(NamedTuple):
    run: Callable[[], None]
    done: threading.Event


@dataclass(slots=True)
class _Watch:
    look: Callable[[], None]
    things: tuple[Collection[object], ...]
    had_things: bool = False


class ExportThread:
    """Runs what is submitted through a consumer on one daemon thread, started at the first submission.

    What can wait is taken a round later, or while it makes no difference when, at the latest moment or when much of it
    came together. To wake the thread for each operation would cost the engine's thread more than most of them, it would
    want Python's lock just while that thread is busy, and what is described once in a while finds its code in no cache.

    While there is something under way, the thread looks at it every :data:`LOOK_SECONDS`, through :meth:`watch`; where
    it began while operations were gathered, from then on when they are taken. Where nothing happens the thread sleeps:
    to wake costs as much as to describe an operation.

    A thread does not survive a fork: a child starts with an empty queue and, if it needs one, a thread of its own.

    Args:
        consume: Called with each submitted callable. It must not raise.
        limit: How many may wait.
        on_drop: Called for each one that was dropped because the queue was full.
        can_wait_until: Tells until when it makes no difference that something waits, by :func:`time.monotonic`: what is
            made of it would not be sent before.
    """

    def __init__(
        self,
        consume: Callable[[Describe], None],
        limit: int,
        on_drop: Callable[[], None],
        can_wait_until: Callable[[], float],
    ) -> None:
        self._consume = consume
        self._limit = limit
        self._many = min(_MANY, limit // 2)
        self._on_drop = on_drop
        self._can_wait_until = can_wait_until
        self._watches: list[_Watch] = []
        self.reset()
        in_children(self.reset)

    def reset(self) -> None:
        """Forget the queue and the thread, as a forked child must."""
        self._start_lock = threading.Lock()
        self._queue: queue.SimpleQueue[Describe | _Task] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._bell: queue.SimpleQueue[bool] = queue.SimpleQueue()
        """Wakes the thread, and tells whether somebody is in haste."""
        self._in_haste = False
        self._is_asleep = False
        """Whether only the bell will wake the thread."""
        self._look_at = 0.0
        self._take_at = 0.0

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
        if waiting >= self._many or not can_wait:
            self._bell.put(True)
        elif self._is_asleep:
            self._bell.put(False)
        return True

    def watch(self, look: Callable[[], None], *things: Collection[object]) -> None:
        """Have things looked at every :data:`LOOK_SECONDS`, for the first time within :data:`_LONGEST_SECONDS`.

        Args:
            look: Looks at them. It must not raise.
            *things: What is under way. Where there is none, nobody looks, but for once after there was.
        """
        self._watches.append(_Watch(look, things))

    def stop_watching(self) -> None:
        """Look at nothing more."""
        self._watches.clear()

    def ensure(self) -> None:
        """Something to be looked at has begun: the thread may not have been needed before."""
        if self._thread is None:
            self._start()
        elif self._is_asleep:
            self._bell.put(False)

    def run(self, task: Callable[[], None], timeout_seconds: float) -> bool:
        """Run a task on the thread, after all that was submitted before, and wait for it; false if time ran out.

        Nothing happens where nothing was ever submitted.
        """
        if self._thread is None:
            return True
        done = threading.Event()
        self._queue.put(_Task(task, done))
        self._bell.put(True)
        return done.wait(timeout_seconds)

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="nixl-telemetry-export", daemon=True)
                # The process may have no more threads: then the next operation tries again, and what does not fit into
                # the queue meanwhile is counted.
                with contextlib.suppress(RuntimeError):
                    thread.start()
                    self._thread = thread

    def _run(self) -> None:
        self._begin()
        while True:
            self._wait()
            self._look_if_due()
            is_due = time.monotonic() >= self._take_at
            if self._queue.empty() or not (is_due or self._in_haste):
                continue
            for item in with_breaks(self._waiting(), self._is_late):
                self._take(item)
                self._look_if_due()
            if is_due:
                self._plan()

    def _begin(self) -> None:
        """Something happens, after a time without; the engine's thread is busy with it just now."""
        self._look_at = time.monotonic() + LOOK_SECONDS
        self._plan()

    def _plan(self) -> None:
        """Decide until when operations are gathered."""
        now = time.monotonic()
        self._take_at = max(min(self._can_wait_until(), now + _LONGEST_SECONDS), now + ROUND_SECONDS)

    def _wait(self) -> None:
        """Until there is something to do."""
        wake_at = self._wake_at()
        if wake_at is None:
            self._is_asleep = True
            # Whatever came before that was said has rung no bell.
            wake_at = self._wake_at()
        timeout = None if wake_at is None else max(0.0, wake_at - time.monotonic())
        try:
            self._in_haste = self._bell.get(timeout=timeout)
        except queue.Empty:
            self._in_haste = False
        was_asleep, self._is_asleep = self._is_asleep, False
        while not self._bell.empty():
            self._in_haste |= self._bell.get()
        if was_asleep:
            self._begin()

    def _wake_at(self) -> float | None:
        """When the thread has something to do; ``None`` while nothing happens."""
        if any(watch.had_things or any(watch.things) for watch in self._watches):
            return self._look_at if self._queue.empty() else min(self._look_at, self._take_at)
        return self._take_at if time.monotonic() < self._take_at or not self._queue.empty() else None

    def _look_if_due(self) -> None:
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECONDS
            for watch in tuple(self._watches):
                has_things = any(watch.things)
                if has_things or watch.had_things:
                    watch.look()
                watch.had_things = has_things

    def _waiting(self) -> Iterator[Describe | _Task]:
        # Only what is there now: where more comes than can be described, the bell is to be heard all the same.
        for _ in range(self._queue.qsize()):
            yield self._queue.get()

    def _is_late(self) -> bool:
        return self._in_haste or not self._bell.empty() or self._queue.qsize() >= self._many

    def _take(self, item: Describe | _Task) -> None:
        if isinstance(item, _Task):
            try:
                item.run()
            finally:
                item.done.set()
        else:
            self._consume(item)
