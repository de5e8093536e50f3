# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The folder ``dashboards/preview``: its packages, its bundle and its schema check."""

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

PREVIEW: Final = Path(__file__).resolve().parents[2] / "dashboards" / "preview"
_SECONDS: Final = 900.0


class FrontendError(RuntimeError):
    """npm or Node.js failed; the message is what it said."""


def install() -> None:
    """Install the packages of the lock file, where they are not there already."""
    lock, installed = PREVIEW / "package-lock.json", PREVIEW / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < lock.stat().st_mtime:
        _run("npm", "ci", "--silent", "--ignore-scripts", "--no-audit", "--no-fund")
        installed.touch()


def build() -> None:
    """Bundle the renderer."""
    _run("node", "build.mjs")


def check_schema(boards: Iterable[Path]) -> None:
    """Check boards against Grafana's types, after a test of that check itself."""
    _run("node", "--test", "--test-reporter=dot")
    _run("node", "schema.mjs", *(str(board.resolve()) for board in boards))


def _run(*command: str) -> None:
    done = subprocess.run(command, cwd=PREVIEW, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        raise FrontendError(f"{' '.join(command[:2])} in {PREVIEW.name}/ failed:\n{said[-4000:]}")
