# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether the suite itself is well. No request fails of what is told here."""

from nixl_telemetry.mixin.alert import COUNT, Alert, model_in_job
from nixl_telemetry.mixin.config import MixinConfig

_BOARD = "nixl-telemetry-health"


def alerts(c: MixinConfig) -> tuple[Alert, ...]:
    """What was dropped, and what went wrong."""
    model = model_in_job(c)

    def rise(metric: str) -> str:
        return f"sum by ({c.by('signal')}) (increase({metric}[{c.telemetry_window}])) > 0"

    return (
        Alert(
            "NixlTelemetryDropping",
            "info",
            c.telemetry_for,
            rise("nixl_telemetry_dropped_total"),
            "Telemetry is dropped.",
            f"Instances of {model} dropped records of {{{{ $labels.signal }}}}, {COUNT} in "
            f"{c.telemetry_window}: what dashboards and traces show is not complete.",
            _BOARD,
            ("telemetry_for", "telemetry_window"),
        ),
        Alert(
            "NixlTelemetryErrors",
            "warning",
            c.telemetry_for,
            rise("nixl_telemetry_errors_total"),
            "The telemetry itself fails.",
            f"Instances of {model} had failures of {{{{ $labels.signal }}}}, {COUNT} in "
            f"{c.telemetry_window}. Serving goes on without it.",
            _BOARD,
            ("telemetry_for", "telemetry_window"),
        ),
    )
