# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What a run found: ``mixin-live.json``, and whether it is good."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from tools.mixin_live.panels import BoardResult

LEAST: Final = 10
"""So many alerts are to be delivered and resolved."""
MISMATCHES: Final = ("NixlCompatMismatch", "NixlTransferModeMismatch", "NixlConnectorVersionMismatch")
"""They have to be among them: they are what the suite is for."""


@dataclass(frozen=True)
class AlertResult:
    """What became of one alert."""

    provoked: bool
    delivered: bool
    resolved: bool


@dataclass
class Report:
    """Everything that is judged."""

    boards: dict[str, BoardResult] = field(default_factory=dict)
    silent_annotations: dict[str, list[str]] = field(default_factory=dict)
    """What is wrong with annotations that mark nothing, by board."""
    alerts: dict[str, AlertResult] = field(default_factory=dict)
    false_alarms: set[str] = field(default_factory=set)
    """Alerts that fired while nothing was wrong."""

    def problems(self) -> Iterator[str]:
        """What is not as it should be, in one line each."""
        for uid, board in self.boards.items():
            for panel, problem in board.empty.items():
                yield f"{uid}: {panel}: {problem}"
        for uid, problems in self.silent_annotations.items():
            yield from (f"{uid}: annotation {problem}" for problem in problems)
        for name in sorted(self.false_alarms):
            yield f"{name} fired while nothing was wrong"
        good = [name for name, alert in self.alerts.items() if alert.delivered and alert.resolved]
        if len(good) < LEAST:
            yield f"only {len(good)} alerts were delivered and resolved, at least {LEAST} should be"
        for name in MISMATCHES:
            if name not in good:
                yield f"{name}: {_fate(self.alerts.get(name))}"

    def write(self, path: Path) -> None:
        """Write the figures."""
        figures = {
            "boards": {
                uid: {"panels": board.panels, "panels_with_data": board.panels_with_data}
                for uid, board in self.boards.items()
            },
            "alerts": {name: asdict(alert) for name, alert in sorted(self.alerts.items())},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")

    def summary(self, not_provoked: Mapping[str, str]) -> Iterator[str]:
        """The figures for a reader.

        Args:
            not_provoked: The reason, by alert.
        """
        for uid, board in self.boards.items():
            yield f"{uid}: {board.panels_with_data} of {board.panels} panels with data"
        for name, alert in sorted(self.alerts.items()):
            yield f"{name}: {_fate(alert)}" + (f" ({not_provoked[name]})" if name in not_provoked else "")


def _fate(alert: AlertResult | None) -> str:
    if alert is None or not alert.provoked:
        return "not provoked" + (", but delivered" if alert and alert.delivered else "")
    if not alert.delivered:
        return "provoked, but not delivered"
    return "delivered and resolved" if alert.resolved else "delivered, but not resolved"
