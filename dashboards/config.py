# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What all boards share: names, times, where links lead, and what colours mean."""

from typing import Final

from nixl_telemetry.mixin.alerts import leases
from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.signals.catalogue import CATALOGUE

ALERTS: Final = MixinConfig.load()
"""Where an alert begins, a board shows it: by the defaults, of which no number is written twice."""
TAG: Final = "nixl-mixin"
REFRESH: Final = "30s"
TIME_FROM: Final = "now-1h"

OVERVIEW: Final = "nixl-overview"
HANDSHAKES: Final = "nixl-handshakes"
TRANSFERS: Final = "nixl-transfers"
PUSH_LEASES: Final = "nixl-push-leases"
HEALTH: Final = "nixl-telemetry-health"

WRONG_KV: Final = f'nixl_invalid_kv_total{{SELECTED, reason=~"{leases.WRONG_KV}"}}'
"""What somebody is woken for."""

# Colours say the same thing on every board.
GOOD: Final = "green"
ATTENTION: Final = "orange"
BAD: Final = "red"
OF_MODE: Final = {"pull": "blue", "push": "purple", "stock": "gray"}
OF_DIRECTION: Final = {"/read/": "blue", "/write/": "purple"}
"""By the series' name: READ is what pull does, WRITE what push does."""
OF_SIDE: Final = {"/registration/": "blue", "/blocks/": "purple"}
"""The halves of a push: the decode side's and the prefill side's."""
OF_OUTCOME: Final = {
    "succeeded": GOOD,
    "received": GOOD,
    "released": GOOD,
    "failed": BAD,
    "expired": BAD,
    "timeout": ATTENTION,
}
OF_RESULT: Final = {"served": GOOD, "malformed": ATTENTION, "unknown_rank": "yellow", "not_allowed": BAD}
OF_EVENT: Final = {"sent": "blue", "received": "purple", "matched": GOOD, "failed": BAD}
_DISTINCT: Final = [
    f"{shade}{hue}" for shade in ("", "dark-", "light-") for hue in ("red", "orange", "purple", "blue", "yellow")
]


def of_values(metric: str, label: str) -> dict[str, str]:
    """A colour for each value of a label that tells what failed, the same on all boards; none of them is green."""
    (values,) = (each.values for each in CATALOGUE[metric].labels if each.name == label)
    return dict(zip(filter(None, values), _DISTINCT, strict=False))


def runbook(alert: str) -> str:
    """Where an alert's runbook is; the export puts another address in its place."""
    return ALERTS.runbook_url.replace("{alert}", alert)
