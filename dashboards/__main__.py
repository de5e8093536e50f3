# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``python -m dashboards``: write the boards' JSON."""

from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards import config, handshakes, health, overview, push_leases, transfers

BOARDS: Final = (overview.board, handshakes.board, transfers.board, push_leases.board, health.board)


def encode(board: Dashboard) -> str:
    """A board as JSON, the same each time."""
    return JSONEncoder(sort_keys=True, indent=2).encode(board) + "\n"


if __name__ == "__main__":
    config.OUT.mkdir(exist_ok=True)
    for stale in config.OUT.glob("*.json"):
        stale.unlink()
    for board in (make() for make in BOARDS):
        path = config.OUT / f"{board.uid}.json"
        path.write_text(encode(board), encoding="utf-8")
        print(f"dashboards: {path.name}: {board.title}")
