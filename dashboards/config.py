# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What all boards share: names, times, where links lead, and what colours mean."""

from pathlib import Path
from typing import Final

from nixl_telemetry import mixin
from nixl_telemetry.mixin.config import MixinConfig

OUT: Final = Path(mixin.__file__).parent / "boards"
"""Where the generated JSON goes: package data, which the installed command line exports."""

ALERTS: Final = MixinConfig.load()
"""Where an alert begins, a board shows it: by the defaults, of which no number is written twice."""
TRANSFER_BUDGET: Final = round(1 - ALERTS.transfer_objective, 6)
"""Share of transfers that may fail."""

TITLE_PREFIX: Final = "NIXL / "
TAG: Final = "nixl-mixin"
REFRESH: Final = "30s"
TIME_FROM: Final = "now-1h"

OVERVIEW: Final = "nixl-overview"
HANDSHAKES: Final = "nixl-handshakes"
TRANSFERS: Final = "nixl-transfers"
PUSH_LEASES: Final = "nixl-push-leases"
HEALTH: Final = "nixl-telemetry-health"

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


def runbook(alert: str) -> str:
    """Where an alert's runbook is; the export puts another address in its place."""
    return ALERTS.runbook_url.format(alert=alert)
