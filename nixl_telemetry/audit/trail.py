# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The trail of one process: any thread hands records over, one thread of our own makes and writes them."""

import functools
import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from nixl_telemetry.audit.chain import LOST, Entry, Record, Value
from nixl_telemetry.audit.log import MAX_FILE_BYTES, SYNC_SECONDS, AuditLog
from nixl_telemetry.forking import in_children

Make: TypeAlias = Callable[[], Record]
"""Makes a record. It runs on the audit thread, so that the engine's threads pay for none of it."""

BATCH_SECONDS: Final = 0.05
"""Pause after a batch, so that a flood of records costs few writes. vLLM kills its workers half a second after it told
them to end; a record is in the file long before that."""
_BATCH_LIMIT: Final = 1024
_RETRY_SECONDS: Final = 0.05
_RETRY_LIMIT_SECONDS: Final = 5.0


class _Waiting(NamedTuple):
    time_ns: int
    make: Make


class AuditTrail:
    """Writes records to an :class:`AuditLog` on one daemon thread, started at the first record.

    What cannot be written stays and is tried again, with growing pauses; meanwhile the queue fills, and what comes then
    is dropped, counted and, once writing works again, told of in a record of its own.

    A thread does not survive a fork: a child starts with an empty queue and a stream of its own.

    Args:
        folder: Where the files go. It is made if missing, once.
        engine_id: Engine id of this process.
        process: What this process is in its engine, its role and rank for instance; a part of the file names.
        attributes: What else the first record says, versions for instance.
        key: Key of the chain; none means plain SHA-256.
        max_file_bytes: Size at which the next file begins.
        queue_size: How many records may wait.
        on_error: Called for each failure. Like the others, it must not raise.
        on_dropped: Called for each record that is lost.
        on_written: Called with the number of records that reached the file, the trail's own included.

    Raises:
        ValueError: On attributes that cannot be a record.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        engine_id: str,
        process: str,
        on_error: Callable[[Exception], None],
        on_dropped: Callable[[], None],
        on_written: Callable[[int], None],
        attributes: Mapping[str, Value] | None = None,
        key: bytes | None = None,
        max_file_bytes: int = MAX_FILE_BYTES,
        queue_size: int = 8192,
    ) -> None:
        self._new_log = functools.partial(
            AuditLog, Path(folder), engine_id, process, on_error, attributes or {}, key, max_file_bytes
        )
        self._limit = queue_size
        self._on_error = on_error
        self._on_dropped = on_dropped
        self._on_written = on_written
        self.reset()
        in_children(self.leave_to_parent)

    def reset(self) -> None:
        """Forget queue, thread and stream, as a forked child must."""
        self._start_lock = threading.Lock()
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._log = self._new_log()
        self._overflowed = _Count()
        self._unmade = _Count()
        self._ending = threading.Event()
        self._ended = threading.Event()
        self._deadline = 0.0

    def leave_to_parent(self) -> None:
        """In a forked child: let go of what is the parent's, and start clean."""
        self._log.abandon()
        self.reset()

    def record(self, make: Make) -> None:
        """Hand over a record of what happens now. Never raises, blocks or takes a lock, but to start the thread."""
        try:
            if self._ending.is_set() or self._queue.qsize() >= self._limit:
                self._overflowed.add()
                self._on_dropped()
                return
            self._queue.put(_Waiting(time.time_ns(), make))
            if self._thread is None:
                self._start()
        except Exception as error:
            self._on_error(error)

    def close(self, timeout_seconds: float) -> bool:
        """Write what waits and the last record; false if time ran out. Safe to call more than once."""
        if not self._ending.is_set():
            self._deadline = time.monotonic() + timeout_seconds
            self._ending.set()
        if self._thread is None:
            # Where no thread could be started, what waits is lost.
            unwritten = self._take(0)
            for _ in unwritten:
                self._on_dropped()
            return not unwritten
        self._queue.put(None)
        return self._ended.wait(timeout_seconds)

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="nixl-telemetry-audit", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        while not self._ending.is_set():
            waiting = self._take(None if self._log.settled else SYNC_SECONDS)
            self._write(waiting)
            self._log.settle()
            if len(waiting) < _BATCH_LIMIT:
                self._ending.wait(BATCH_SECONDS)
        while waiting := self._take(0):
            self._write(waiting)
        self._write([])
        self._try(self._log.close)
        self._ended.set()

    def _take(self, timeout: float | None) -> list[_Waiting]:
        """All that waits, up to a limit; at least one, unless time ran out or the trail ends."""
        taken: list[_Waiting] = []
        try:
            while len(taken) < _BATCH_LIMIT:
                waiting = self._queue.get(timeout=timeout)
                timeout = 0
                if waiting is not None:
                    taken.append(waiting)
        except queue.Empty:
            pass
        return taken

    def _write(self, waiting: Sequence[_Waiting]) -> None:
        entries = [*self._made(waiting), *self._losses()]
        if entries and not self._try(functools.partial(self._log.write, entries)):
            for _ in entries:
                self._on_dropped()

    def _made(self, waiting: Sequence[_Waiting]) -> Iterator[Entry]:
        for time_ns, make in waiting:
            try:
                yield Entry.of(time_ns, make())
            except Exception as error:
                self._unmade.add()
                self._on_error(error)
                self._on_dropped()

    def _losses(self) -> Iterator[Entry]:
        for reason, count in (("queue_full", self._overflowed), ("not_made", self._unmade)):
            if lost := count.take():
                yield Entry.of(time.time_ns(), Record(LOST, {"records": lost, "reason": reason}))

    def _try(self, action: Callable[[], int]) -> bool:
        """Do something with the log until it works; false if the trail's time is over."""
        pause = _RETRY_SECONDS
        while True:
            try:
                written = action()
            except OSError as error:
                self._on_error(error)
            except Exception as error:
                self._on_error(error)
                return False
            else:
                self._on_written(written)
                return True
            if self._ending.wait(pause):
                if time.monotonic() >= self._deadline:
                    return False
                time.sleep(_RETRY_SECONDS)
            pause = min(2 * pause, _RETRY_LIMIT_SECONDS)


class _Count:
    """Counts on any thread without a lock; one thread takes."""

    def __init__(self) -> None:
        # Counts atomically under the GIL, and tells its value only by counting on.
        self._counter = itertools.count()
        self._taken = 0

    def add(self) -> None:
        next(self._counter)

    def take(self) -> int:
        """How many were added since the last call."""
        new = next(self._counter) - self._taken
        self._taken += new + 1
        return new
