# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The folder that the demo writes to: its own, or none."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

TRACE_FILE: Final = "trace.jsonl"
"""Where all instances write their spans."""
_OURS: Final = re.compile(r"summary\.json|spans\.json|trace\.jsonl(\.\d+)?|metrics-\w+-\w+\.txt|logs/[\w-]+\.log")


class ForeignFilesError(Exception):
    """The folder holds files that are not the demo's; the message names them."""


@dataclass(frozen=True)
class DemoFolder:
    """Where the demo's files go."""

    path: Path

    @classmethod
    def prepare(cls, path: Path) -> Self:
        """Make the folder, or empty the one that an earlier demo has left.

        Raises:
            ForeignFilesError: There is something else in it. Nothing was removed.
        """
        if path.exists() and not path.is_dir():
            raise ForeignFilesError(f"{path} is not a folder. Choose another one with --out.")
        files = sorted(file for file in path.rglob("*") if not file.is_dir() or file.is_symlink())
        foreign = [name for file in files if not _OURS.fullmatch(name := file.relative_to(path).as_posix())]
        if foreign:
            shown = ", ".join(foreign[:3]) + (", ..." if foreign[3:] else "")
            raise ForeignFilesError(f"{path} has files that are not the demo's: {shown}. Choose another --out.")
        for file in files:
            file.unlink()
        folder = cls(path)
        folder.logs.mkdir(parents=True, exist_ok=True)
        return folder

    @property
    def logs(self) -> Path:
        """Where the servers log."""
        return self.path / "logs"

    def write(self, name: str, text: str) -> None:
        """Write one file."""
        (self.path / name).write_text(text, encoding="utf-8")
