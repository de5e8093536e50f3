# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``python -m dashboards``: write the boards' JSON, and which of their thresholds are an alert's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import handshakes, health, overview, push_leases, transfers
from nixl_telemetry.mixin.boards import FOLDER, THRESHOLDS

BOARDS: Final = (overview.board, handshakes.board, transfers.board, push_leases.board, health.board)


def generated() -> Mapping[Path, str]:
    """Every file that is generated, with what is in it; the same each time."""
    boards = [make() for make in BOARDS]
    encoder = JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False)
    files = {FOLDER / f"{board.dashboard.uid}.json": encoder.encode(board.dashboard) + "\n" for board in boards}
    knobs = {str(board.dashboard.uid): board.knobs for board in boards}
    return {**files, THRESHOLDS: json.dumps(knobs, indent=2, sort_keys=True) + "\n"}


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text, encoding="utf-8")
        print(f"generated: {path.name}")
