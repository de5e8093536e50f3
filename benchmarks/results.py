# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The file with the results. A run of some parts leaves those of the others as they were."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Budget, Figure, Interval, Part

ORDER: Final = ("share", "pair", "step", "transfer", "block_spans", "handshake", "imports", "memory", "settings")
"""The parts, as the page has them."""
PATH: Final = Path(__file__).with_name("results.json")


def encode(part: Part) -> dict[str, Any]:
    """A part as JSON can hold it."""
    return {
        "budgets": [_encode_budget(budget) for budget in part.budgets],
        "figures": [_encode_figure(figure) for figure in part.figures],
        "samples": {name: [_rounded(value) for value in values] for name, values in part.samples.items()},
    }


def merge(old: Mapping[str, Any], machine: Mapping[str, Any], parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The results of a run, and those of earlier runs on the same machine for the parts that it left out.

    Args:
        old: The results so far; empty if there are none.
        machine: What this run ran on.
        parts: What ``encode`` made of each part.
    """
    kept = old if old.get("machine") == machine else {}
    samples = {name: values for name, values in kept.get("samples", {}).items() if name.partition(": ")[0] not in parts}
    for name, part in parts.items():
        samples |= {f"{name}: {sample}": values for sample, values in part["samples"].items()}
    merged: dict[str, Any] = {"machine": dict(machine)}
    for kind in ("budgets", "figures"):
        entries = [entry for entry in kept.get(kind, []) if entry["part"] not in parts]
        entries += [{"part": name, **entry} for name, part in parts.items() for entry in part[kind]]
        # Of several runs or one: the same order.
        merged[kind] = sorted(entries, key=lambda entry: ORDER.index(entry["part"]))
    return {**merged, "samples": samples}


def load(path: Path) -> dict[str, Any]:
    """The results so far; empty if there are none."""
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def save(results: Mapping[str, Any], path: Path) -> None:
    """Write the results, each list of samples on a line of its own."""
    texts = {name: f"[{', '.join(map(json.dumps, values))}]" for name, values in results["samples"].items()}
    samples = ",\n".join(f"    {json.dumps(name)}: {text}" for name, text in texts.items())
    rest = json.dumps({name: value for name, value in results.items() if name != "samples"}, indent=2)
    path.write_text(f'{rest[:-2]},\n  "samples": {{\n{samples}\n  }}\n}}\n', encoding="utf-8")


def _encode_budget(budget: Budget) -> dict[str, Any]:
    return {
        "name": budget.name,
        "value": _rounded(budget.value),
        "limit": budget.limit,
        "unit": budget.unit,
        "ok": budget.ok,
        "at_least": budget.at_least,
        "interval": _encode_interval(budget.interval),
        "remark": budget.remark,
    }


def _encode_figure(figure: Figure) -> dict[str, Any]:
    return {
        "name": figure.name,
        "value": _rounded(figure.value),
        "unit": figure.unit,
        "interval": _encode_interval(figure.interval),
    }


def _encode_interval(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [_rounded(interval.low), _rounded(interval.high)]


def _rounded(value: float) -> float:
    """Four digits: more would be noise."""
    return float(f"{value:.4g}")
