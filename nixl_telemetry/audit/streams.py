# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Which files are a stream, and their lines. Whoever reads them expects anything in there."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from nixl_telemetry.audit.chain import LINE_LIMIT

_FILE: Final = re.compile(r"(nixl-audit-.+)\.(\d{6,9})\.jsonl", re.DOTALL)
_HEAD: Final = re.compile(r"(nixl-audit-.+)\.head\.json", re.DOTALL)
_HEAD_LIMIT: Final = 4096


class AuditPathError(ValueError):
    """A path that holds no audit log; the message names it and what to give instead."""


def file_name(stream: str, number: int) -> str:
    """Name of a stream's file."""
    return f"{stream}.{number:06d}.jsonl"


def head_name(stream: str) -> str:
    """Name of a stream's head."""
    return f"{stream}.head.json"


@dataclass
class Stream:
    """What one process wrote.

    Attributes:
        name: Its name, which the file names begin with.
        files: Its files by number.
        head: Content of its head; ``None`` if there is none.
        head_path: Where the head is, or should be.
    """

    name: str
    head_path: Path
    files: dict[int, Path] = field(default_factory=dict)
    head: bytes | None = None

    @property
    def last_file(self) -> int:
        """Number of the last file that is there; 0 without one."""
        return max(self.files, default=0)

    def path_of(self, number: int) -> Path:
        """Where the file of this number is, or should be."""
        return self.files.get(number) or self.head_path.with_name(file_name(self.name, number))


class RawLine(NamedTuple):
    """A line as it is in the file, at most :data:`~nixl_telemetry.audit.chain.LINE_LIMIT` bytes of it."""

    number: int
    data: bytes
    ended: bool
    """Whether it has a newline, though perhaps beyond the limit."""


def find_streams(paths: Iterable[Path]) -> list[Stream]:
    """The streams in some folders, or those that some files belong to. Symlinks are followed, folders not entered.

    A stream may be spread over several folders, as after archiving its older files.

    Raises:
        AuditPathError: If a path does not exist or has no audit log, or two folders have the same file of a stream.
        OSError: If something cannot be read.
    """
    streams: dict[str, Stream] = {}
    for folder, wanted in _places(paths).items():
        # Heads before logs: a process that is writing is then ahead of its head, and never behind.
        heads = {
            match[1]: (path, _read_head(path))
            for path in _files_in(folder)
            if (match := _HEAD.fullmatch(path.name)) and (wanted is None or match[1] in wanted)
        }
        for name, (path, content) in heads.items():
            stream = streams.setdefault(name, Stream(name, path))
            # Copies of a head grow old; the longest log wins below, and its head is the one in the same folder.
            if stream.head is None:
                stream.head, stream.head_path = content, path
        for path in _files_in(folder):
            match = _FILE.fullmatch(path.name)
            if match is None or not (wanted is None or match[1] in wanted):
                continue
            stream = streams.setdefault(match[1], Stream(match[1], folder / head_name(match[1])))
            number = int(match[2])
            if number in stream.files:
                if path.samefile(stream.files[number]):
                    continue
                raise AuditPathError(
                    f"{stream.files[number]} and {path} are two copies of one file. Give only one of their folders."
                )
            if number > stream.last_file and match[1] in heads:
                stream.head_path, stream.head = heads[match[1]]
            stream.files[number] = path
    for stream in streams.values():
        stream.files = dict(sorted(stream.files.items()))
    return sorted(streams.values(), key=lambda stream: stream.name)


def read_lines(file: BinaryIO) -> Iterator[RawLine]:
    """The lines of a file, from where it stands; however long they are, little is held in memory."""
    for number in count(1):
        data = file.readline(LINE_LIMIT)
        if not data:
            return
        end = data
        while len(end) == LINE_LIMIT and not end.endswith(b"\n"):
            end = file.readline(LINE_LIMIT)
        yield RawLine(number, data, end.endswith(b"\n"))


def _places(paths: Iterable[Path]) -> dict[Path, set[str] | None]:
    """Which streams are wanted of which folder; ``None`` for all."""
    places: dict[Path, set[str] | None] = {}
    for path in paths:
        if path.is_dir():
            if not any(_FILE.fullmatch(file.name) or _HEAD.fullmatch(file.name) for file in _files_in(path)):
                raise AuditPathError(
                    f"No audit log in the folder {path}: its files are called "
                    "nixl-audit-<engine id>-<process>-<pid>-<start>.000001.jsonl. "
                    "Give the folder of the setting audit_dir; folders inside it are not searched."
                )
            places[path] = None
        elif path.is_file():
            match = _FILE.fullmatch(path.name) or _HEAD.fullmatch(path.name)
            if match is None:
                raise AuditPathError(
                    f"{path} is not named like an audit log, nixl-audit-....000001.jsonl. "
                    "The name is a part of what is verified: keep it when you copy a log."
                )
            wanted = places.setdefault(path.parent, set())
            if wanted is not None:
                wanted.add(match[1])
        elif path.exists():
            raise AuditPathError(f"{path} is neither a file nor a folder.")
        else:
            raise AuditPathError(f"{path} does not exist.")
    return places


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def _read_head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_LIMIT)
