# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What is known of the processes of a server: while they run, and how they ended."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ProcessInfo:
    """One process at one moment."""

    pid: int
    parent: int
    group: int
    session: int
    state: str
    title: str
    cpu_seconds: float
    resident_bytes: int


@dataclass(frozen=True)
class ExitReport:
    """How a process ended.

    Attributes:
        returncode: Its exit status, negative for a signal; ``None`` when it could not be learned.
        seconds: How long the stop took, until every process of the server was gone.
        killed: Processes that had to be killed because they did not leave by themselves.
    """

    returncode: int | None
    seconds: float
    killed: tuple[str, ...]


def process_info(pid: int) -> ProcessInfo | None:
    """Returns what ``/proc`` knows of *pid*, or ``None`` when it is gone or a zombie."""
    folder = Path("/proc", str(pid))
    try:
        head, _, tail = (folder / "stat").read_text(errors="replace").rpartition(")")
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    fields = tail.split()
    if fields[0] in "ZX":
        return None
    return ProcessInfo(
        pid=pid,
        parent=int(fields[1]),
        group=int(fields[2]),
        session=int(fields[3]),
        state=fields[0],
        title=command or head.partition("(")[2],
        cpu_seconds=(int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND,
        resident_bytes=int(fields[21]) * _PAGE_BYTES,
    )


def descendants(root: int) -> tuple[ProcessInfo, ...]:
    """Returns every live process below *root*, parents before children."""
    children: dict[int, list[ProcessInfo]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and (info := process_info(int(folder.name))) is not None:
            children.setdefault(info.parent, []).append(info)
    found: list[ProcessInfo] = []
    pending = [root]
    while pending:
        below = children.get(pending.pop(0), [])
        found += below
        pending += [info.pid for info in below]
    return tuple(found)
