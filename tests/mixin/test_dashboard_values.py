# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What panels say of series that are known, by Prometheus's own engine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from nixl_telemetry.mixin.boards import BoardOptions, build_boards
from tests.mixin.case import series, vllm
from tests.mixin.dashboard_rules import targets
from tests.mixin.test_alerts import promtool

BOARDS: Final = build_boards(BoardOptions())
_CHOSEN: Final = {"$__rate_interval": "1m", "$__range": "1h", "$mode": ".*", "$version": ".*"}


def _asked(uid: str, title: str) -> str:
    """The one query of a panel, with everything chosen."""
    (expr,) = {target["expr"] for panel, target in targets(BOARDS[uid]) if panel == title}
    for name, value in _CHOSEN.items():
        expr = expr.replace(name, value)
    for name in ("$job", "$instance", "$model"):
        expr = expr.replace(name, ".+")
    return str(expr)


def _says(tmp_path: Path, expr: str, of: Mapping[str, str], samples: list[dict[str, Any]]) -> None:
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in of.items()],
        "promql_expr_test": [{"expr": expr, "eval_time": "70m", "exp_samples": samples}],
    }
    path = tmp_path / "values.json"
    path.write_text(json.dumps({"evaluation_interval": "1m", "tests": [test]}), encoding="utf-8")
    promtool("test", "rules", path)


def test_what_happened_once_is_one(tmp_path: Path) -> None:
    """Prometheus makes 1.004 of it in an hour."""
    rejected = series("nixl_handshake_rejections_total", factor="dtype")
    expr = _asked("nixl-overview", "Rejected: incompatible")

    _says(tmp_path, expr, {rejected: "0x100 1x300"}, [{"labels": "{}", "value": 1}])


@pytest.mark.parametrize(
    ("title", "metric", "each"),
    [
        ("Descriptors per transfer", "nixl_transfer_descriptors_total", 12),
        ("Blocks per transfer", "nixl_transfer_blocks_total", 3),
    ],
)
def test_transfers_that_fail_make_the_others_no_smaller(title: str, metric: str, each: int, tmp_path: Path) -> None:
    """Of one that fails nothing is counted that was moved; here it is every second one."""
    ended = {
        series("nixl_transfer_duration_seconds_count", direction="read", error_type=error): "0+1x400"
        for error in ("", "transfer_failed")
    }
    moved = {series(metric, direction="read"): f"0+{each}x400"}
    posted = {series("nixl_transfers_posted_total", direction="read"): "0+2x400"}

    samples = [{"labels": '{direction="read"}', "value": each}]
    _says(tmp_path, _asked("nixl-transfers", title), {**ended, **moved, **posted}, samples)


def test_targets_of_other_jobs_are_no_instances(tmp_path: Path) -> None:
    up = {f'up{{job="{job}", instance="{job}:1"}}': "0x400" for job in ("pd", "db")}
    seen = {vllm("vllm:nixl_bytes_transferred_count", instance="pd:1"): "0x200 stale"}

    _says(tmp_path, _asked("nixl-overview", "Instances down"), {**up, **seen}, [{"labels": "{}", "value": 1}])
