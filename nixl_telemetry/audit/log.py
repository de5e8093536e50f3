# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The files of one stream: append-only, rotated by size, with a head beside them."""

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from nixl_telemetry.audit.chain import CLOSED, OPENED, Entry, Head, Record, Seal, Value, first_link
from nixl_telemetry.audit.streams import file_name, head_name

SYNC_SECONDS: Final = 1.0
"""At most so much of the log is lost when the machine loses power; nothing when only the process dies."""
MAX_FILE_BYTES: Final = 64 * 1024 * 1024

_NEW_FILE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
_OWNER_ONLY: Final = 0o600
_OWNER_FOLDER: Final = 0o700


@dataclass
class AuditLog:
    """Writes one stream. Nothing is opened before the first :meth:`write`; all methods are called on one thread.

    An ``OSError`` of :meth:`write` means that nothing of the batch was written: the caller may try again.

    Args:
        folder: Where the files go. It is made if missing, once.
        engine_id: Engine id of this process.
        process: What this process is in its engine, its role and rank for instance.
        on_error: Told of what goes wrong without losing a record: a vanished file, a head or a sync that failed.
        attributes: What else the first record says, versions for instance.
        key: Key of the chain; none means plain SHA-256.
        max_file_bytes: A batch that would make a file longer begins the next one.

    Raises:
        ValueError: On attributes that cannot be a record.
    """

    folder: Path
    engine_id: str
    process: str
    on_error: Callable[[OSError], None]
    attributes: Mapping[str, Value] = field(default_factory=dict)
    key: bytes | None = None
    max_file_bytes: int = MAX_FILE_BYTES

    def __post_init__(self) -> None:
        Entry.of(0, Record(OPENED, self.attributes))
        self._seal = Seal(self.key)
        self._folder_made = False
        self._stream = ""
        self._file: int | None = None
        self._path = self.folder
        self._number = 0
        self._cut_to: int | None = None
        self._seq = 0
        self._last = ""
        self._synced = 0
        self._sync_due = 0.0
        self._closed = False
        self._head: Head | None = None

    @property
    def settled(self) -> bool:
        """Whether :meth:`settle` has nothing to do, now and later."""
        return self._synced == self._seq and self._head == self._current_head()

    def write(self, entries: Sequence[Entry]) -> int:
        """Append a batch of at least one record; the answer is how many were written, the stream's own included.

        Raises:
            OSError: Nothing was written.
        """
        if not self._stream:
            self._begin()
        if not self._seq:
            # With the time of the first record, which may have waited: within a stream, time goes on.
            entries = [self._opened()._replace(time=entries[0].time), *entries]
        seq, last = self._seq, self._last
        lines = []
        for entry in entries:
            seq += 1
            line, last = entry.link(seq, last, self._seal)
            lines.append(line)
        data = b"".join(lines)
        self._append(self._file_for(len(data)), data)
        self._seq, self._last = seq, last
        return len(entries)

    def settle(self) -> None:
        """Bring the head up to date, and sync the file if that was not done within the last second."""
        if self._synced < self._seq and time.monotonic() >= self._sync_due:
            self._sync()
        self._save_head()

    def close(self) -> int:
        """Write the last record and let go of the file; nothing happens where nothing was written.

        Raises:
            OSError: Nothing was written.
        """
        if self._closed or not self._seq:
            return 0
        written = self.write([Entry.of(time.time_ns(), Record(CLOSED, {}))])
        self._closed = True
        # Before the sync, which takes its time, and after it.
        self._save_head()
        self._leave_file()
        self._save_head()
        return written

    def abandon(self) -> None:
        """Let go of the file and leave it as it is, as a forked child must: it is the parent's."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def _begin(self) -> None:
        """Name the stream and write its head, so that a log without a head is never of our making."""
        if not self._folder_made:
            self.folder.mkdir(mode=_OWNER_FOLDER, parents=True, exist_ok=True)
            self._folder_made = True
        started = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
        stream = f"nixl-audit-{_safe(self.engine_id)}-{_safe(self.process)}-{os.getpid()}-{started}"
        head = Head(stream, 1, 0, first_link(stream), 0, False, self._seal.key_id)
        self._replace_head(head)
        self._stream, self._last, self._head = stream, head.last, head

    def _opened(self) -> Entry:
        own: dict[str, Value] = {
            "stream": self._stream,
            "nixl.engine.id": self.engine_id,
            "process": self.process,
            "pid": os.getpid(),
            "key": self._seal.key_id,
        }
        return Entry.of(time.time_ns(), Record(OPENED, {**own, **self.attributes, **own}))

    def _file_for(self, size: int) -> int:
        """The file that takes a batch of so many bytes."""
        if self._file is not None:
            has = self._size_in_place(self._file)
            if has is None:
                self.on_error(FileNotFoundError(f"{self._path} was moved, replaced or deleted"))
                self._leave_file()
            elif has and has + size > self.max_file_bytes:
                self._leave_file()
        if self._file is None:
            self._file = self._open_next()
        return self._file

    def _size_in_place(self, file: int) -> int | None:
        """Bytes of the open file; ``None`` if it is no longer the one of its name."""
        try:
            here, there = os.fstat(file), self._path.stat(follow_symlinks=False)
        except OSError:
            return None
        return here.st_size if os.path.samestat(here, there) else None

    def _open_next(self) -> int:
        path = self.folder / file_name(self._stream, self._number + 1)
        try:
            file = os.open(path, _NEW_FILE | os.O_APPEND, _OWNER_ONLY)
        except FileExistsError:
            # Not ours: verifying will say so. The next attempt goes past it.
            self._number += 1
            raise
        self._number += 1
        self._path = path
        return file

    def _append(self, file: int, data: bytes) -> None:
        self._repair()
        # The size, and not a count of ours: what somebody else appended is evidence.
        self._cut_to = os.fstat(file).st_size
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(file, rest) :]
        except OSError:
            # A full disk takes the beginning of a batch.
            with contextlib.suppress(OSError):
                self._repair()
            raise
        self._cut_to = None

    def _repair(self) -> None:
        """Take away what a failed write left."""
        if self._cut_to is not None and self._file is not None:
            os.ftruncate(self._file, self._cut_to)
        self._cut_to = None

    def _leave_file(self) -> None:
        if self._file is None:
            return
        self._sync()
        try:
            os.close(self._file)
        except OSError as error:  # what a network file system says of writes that came before
            self.on_error(error)
        self._file = self._cut_to = None

    def _sync(self) -> None:
        self._sync_due = time.monotonic() + SYNC_SECONDS
        if self._file is None:
            return
        try:
            os.fsync(self._file)
            self._synced = self._seq
        except OSError as error:
            self.on_error(error)

    def _current_head(self) -> Head | None:
        if not self._stream:
            return None
        file = max(1, self._number)
        return Head(self._stream, file, self._seq, self._last, self._synced, self._closed, self._seal.key_id)

    def _save_head(self) -> None:
        head = self._current_head()
        if head is None or head == self._head:
            return
        try:
            self._replace_head(head)
            self._head = head
        except OSError as error:
            self.on_error(error)

    def _replace_head(self, head: Head) -> None:
        path = self.folder / head_name(head.stream)
        temporary = path.with_suffix(".tmp")
        try:
            file = os.open(temporary, _NEW_FILE, _OWNER_ONLY)
            try:
                data = head.encode(self._seal)
                if os.write(file, data) < len(data):
                    raise OSError(f"{temporary} could not be written in full")
            finally:
                os.close(file)
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def _safe(text: str) -> str:
    """Text as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", text)[:64] or "_"
