# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Cases of the alerts on the suite itself."""

from typing import Final

from tests.mixin.case import MODEL, Case, Kind, series


def _cases(alert: str, severity: str, metric: str, description: str) -> tuple[Case, ...]:
    def counted(values: str) -> dict[str, str]:
        return {series(metric, signal="spans"): values}

    return (
        Case(
            alert,
            severity,
            Kind.FIRES,
            "one a minute",
            counted("0x10 1+1x50"),
            onset=11,
            labels={"job": "pd", "model_name": MODEL, "signal": "spans"},
            description=description,
            link="nixl-telemetry-health?var-job=pd&var-model=org%2Fmodel",
        ),
        Case(alert, severity, Kind.THRESHOLD, "none", counted("0x60")),
        Case(alert, severity, Kind.RESET, "an instance with old ones restarts", counted("900x30 0x30")),
        Case(alert, severity, Kind.HEALTHY, "a burst that is over", counted("0x10 500x50")),
    )


CASES: Final = (
    *_cases(
        "NixlTelemetryDropping",
        "info",
        "nixl_telemetry_dropped_total",
        f"Instances of {MODEL} in pd dropped records of spans, 15 in 15m: what dashboards and traces show is not "
        "complete.",
    ),
    *_cases(
        "NixlTelemetryErrors",
        "warning",
        "nixl_telemetry_errors_total",
        f"Instances of {MODEL} in pd had failures of spans, 15 in 15m. Serving goes on without it.",
    ),
)
