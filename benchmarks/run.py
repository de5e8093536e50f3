# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Measures what the suite costs, beside stock vLLM, and holds it against its budgets.

    python -m benchmarks.run                          # all, about three quarters of an hour, or hours
    python -m benchmarks.run --only micro             # what needs no servers
    python -m benchmarks.run --only pair --modes pull

Writes ``benchmarks/results.json`` and ``docs/performance.md``. Ends with 1 where a budget is missed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks import machine, page, pair, results, share

MICRO: Final = ("step", "transfer", "block_spans", "handshake", "imports", "memory")
"""Parts without servers, each in a process of its own."""
SERVERS: Final[dict[str, Callable[[Sequence[str]], Any]]] = {
    "share": share.measure,
    "pair": pair.measure,
    "settings": pair.measure_settings,
}
"""Parts with servers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for."""
    options = _parser().parse_args(arguments)
    wanted = [part for name in options.only for part in (MICRO if name == "micro" else (name,))]
    modes = tuple(options.modes.split(","))
    found = results.load(results.PATH)
    start = time.monotonic()
    for part in dict.fromkeys(wanted):
        begin = time.monotonic()
        measured = _micro(part) if part in MICRO else results.encode(SERVERS[part](modes))
        print(f"bench: {part}, {time.monotonic() - begin:.0f} s", flush=True)
        for budget in measured["budgets"]:
            print("  " + page.sentence(budget), flush=True)
        # After each part, so that what was found is kept if a later one fails.
        found = results.merge(found, machine.describe(), {part: measured})
        results.save(found, results.PATH)
        page.PATH.write_text(page.make(found), encoding="utf-8")
    missed = [budget["name"] for budget in found["budgets"] if not budget["ok"]]
    kept = len(found["budgets"]) - len(missed)
    summary = f"bench: {kept} of {len(found['budgets'])} budgets kept, {time.monotonic() - start:.0f} s"
    print(f"{summary}; missed: {', '.join(missed)}" if missed else summary)
    return 1 if missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    choices = ["micro", *MICRO, *SERVERS]
    parser.add_argument("--only", nargs="+", choices=choices, default=["micro", *SERVERS], help="the parts to run")
    parser.add_argument("--modes", default="pull,push", help="transfer modes of the parts with servers")
    return parser


def _micro(part: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="nixl-telemetry-bench-") as folder:
        output, log = Path(folder, "found.json"), Path(folder, "log")
        with log.open("wb") as file:
            command = [sys.executable, "-m", "benchmarks.part", part, str(output)]
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        if not output.exists():
            raise RuntimeError(
                f"{part} ended with {code}:\n{log.read_text(encoding='utf-8', errors='replace')[-4000:]}"
            )
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
        return found


if __name__ == "__main__":
    sys.exit(main())
