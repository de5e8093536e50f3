# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Runs one part and writes what it found as JSON; each has a process of its own, so that none warms another up."""

import importlib
import json
import sys
from pathlib import Path
from typing import Final

from benchmarks.results import encode

PARTS: Final = ("step", "transfer", "block_spans", "handshake", "imports", "memory")
"""Modules whose ``measure`` needs no server."""


def main(name: str, output: str) -> None:
    """Run it."""
    found = encode(importlib.import_module(f"benchmarks.{name}").measure())
    Path(output).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
