# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The results: ``benchmarks/chaos.json``. A run of some faults leaves the others as they were."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.judge import TURNED_AWAY, problems
from benchmarks.chaos.load import Tally
from benchmarks.chaos.trial import Observation

PATH: Final = Path(__file__).resolve().parents[1] / "chaos.json"
_MODES: Final = ("pull", "push")


def entry(ours: Observation, stock: Observation) -> dict[str, Any]:
    """One fault in one mode, as JSON can hold it."""
    both, stock_both = _sums(ours), _sums(stock)
    made: dict[str, Any] = {
        "sent": both.sent,
        "served": both.served,
        "failed": both.sent - both.served,
        "failures": both.failures,
        "stock_sent": stock_both.sent,
        "stock_served": stock_both.served,
        "stock_failed": stock_both.sent - stock_both.served,
        "stock_failures": stock_both.failures,
        "named_by": ours.named[0].signal if ours.named else None,
        "named_after_s": round(ours.named[0].seconds, 1) if ours.named else None,
        "seen": {named.signal: round(named.seconds, 1) for named in ours.named},
        "recovered": ours.recovered,
        "recovery_s": _rounded(ours.recovery_seconds),
        "stock_recovered": stock.recovered,
        "stock_recovery_s": _rounded(stock.recovery_seconds),
        "recovered_with_new_router": ours.recovered_with_new_router,
        "stock_recovered_with_new_router": stock.recovered_with_new_router,
        "identity_holds": ours.identity_holds,
        "identity": {account.subject: {**account.numbers, "holds": account.holds} for account in ours.accounts},
        "missing": ours.missing,
        "memory_mib": [sizes.memory_mib for sizes in ours.sizes],
        "stock_memory_mib": [sizes.memory_mib for sizes in stock.sizes],
        "threads": [sizes.threads for sizes in ours.sizes],
        "stock_threads": [sizes.threads for sizes in stock.sizes],
        "phases": _phases(ours),
        "stock_phases": _phases(stock),
        "failure": ours.failure,
        "stock_failure": stock.failure,
        "details": dict(ours.details),
    }
    return {**made, "problems": problems(made)}


def merge(old: Mapping[str, Any], machine: Mapping[str, Any], found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The results of a run, and those of earlier runs on the same machine for the faults that it left out.

    Args:
        old: The results so far; empty if there are none.
        machine: What this run ran on.
        found: Entries by fault and mode.
    """
    kept = old.get("faults", {}) if old.get("machine") == machine else {}
    known = [f"{name}.{mode}" for name in FAULTS for mode in _MODES]
    together = {**kept, **found}
    return {"faults": {name: together[name] for name in known if name in together}, "machine": dict(machine)}


def load(path: Path = PATH) -> dict[str, Any]:
    """The results so far; empty if there are none."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def save(results: Mapping[str, Any], path: Path = PATH) -> None:
    """Write the results."""
    path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def sentence(name: str, made: Mapping[str, Any]) -> str:
    """An entry on one line."""
    parts = [
        f"{made['served']} of {made['sent']} served (stock {made['stock_served']} of {made['stock_sent']})",
        f"named by {made['named_by']} after {made['named_after_s']} s" if made["named_by"] else "NOT NAMED",
        _recovery("recovered", made, ""),
        _recovery("stock recovered", made, "stock_"),
        "accounts add up" if made["identity_holds"] else "accounts DO NOT ADD UP",
    ]
    return f"{name}: {'; '.join(parts)}" + "".join(f"\n    PROBLEM: {problem}" for problem in made["problems"])


def _sums(observation: Observation) -> Tally:
    """From the begin of the fault on."""
    during, after = observation.phases.during, observation.phases.after
    failures = {
        how: during.failures.get(how, 0) + after.failures.get(how, 0)
        for how in sorted({*during.failures, *after.failures})
    }
    return Tally(during.sent + after.sent, during.served + after.served, failures)


def _phases(observation: Observation) -> dict[str, list[int]]:
    cut = observation.phases
    named = {"before": cut.before, "during": cut.during, "after": cut.after}
    return {name: [tally.sent, tally.served, tally.failures.get(TURNED_AWAY, 0)] for name, tally in named.items()}


def _recovery(what: str, made: Mapping[str, Any], prefix: str) -> str:
    if made[f"{prefix}recovered"]:
        return f"{what} in {made[f'{prefix}recovery_s']} s"
    return f"NOT {what}" + (", with a new router it is" if made[f"{prefix}recovered_with_new_router"] else "")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
