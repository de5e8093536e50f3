# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Runs the checks: at the same time, each for itself, and none longer than all may take."""

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

from nixl_telemetry.cli.doctor.checks import Check
from nixl_telemetry.cli.doctor.finding import Finding, Level, unchecked
from nixl_telemetry.cli.doctor.subject import Subject

_BUG = "this is a bug in nixl-telemetry, and worth a report"


def examine(subject: Subject, checks: Sequence[Check], seconds: float) -> list[Finding]:
    """All findings, the worst first."""
    results: list[list[Finding] | None] = [None] * len(checks)

    def look(position: int, check: Check) -> None:
        results[position] = _look(subject, check)

    # No pool, whose threads Python waits for at its end: a name server that does not answer is waited for in C.
    threads = [
        threading.Thread(target=look, args=(position, check), name=f"doctor-{check.name}", daemon=True)
        for position, check in enumerate(checks)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    found: list[Finding] = []
    for check, result in zip(checks, list(results), strict=True):
        late = f"{check.name} could not be checked: it took longer than {seconds:g} s"
        told = [unchecked(late, "give more --timeout")] if result is None else result
        found += [replace(finding, topic=check.topic) for finding in told]
    return in_order(found)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """The worst first, each once, and otherwise as they are."""
    return sorted(dict.fromkeys(findings), key=lambda finding: list(Level).index(finding.level))


def _look(subject: Subject, check: Check) -> list[Finding]:
    try:
        return list(check.look(subject))
    except Exception as error:
        # Without its text, which may hold anything of the environment.
        return [unchecked(f"{check.name} could not be checked: {type(error).__name__}", _BUG)]
