# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Cases of the alerts on handshakes."""

from typing import Final

from tests.mixin.case import MODEL, Case, Kind, series

_LINK: Final = "nixl-handshakes?var-job=pd&var-model=org%2Fmodel"
_DEPLOYMENT: Final = {"job": "pd", "model_name": MODEL}
_RATIO: Final = "job_model_name:nixl_handshake_failures_per_handshakes:ratio_rate10m"


def _ended(succeeded: str, timed_out: str) -> dict[str, str]:
    return {
        series("nixl_handshake_duration_seconds_count", error_type=""): succeeded,
        series("nixl_handshake_duration_seconds_count", error_type="timeout"): timed_out,
    }


def _lasting(**values: str) -> dict[str, str]:
    """Successful handshakes by bucket edge; the last is that of all."""
    edges = {"le5": "5.0", "le7": "7.5", "le10": "10.0", "all": "+Inf"}
    return {
        **{
            series("nixl_handshake_duration_seconds_bucket", error_type="", le=edges[name]): value
            for name, value in values.items()
        },
        series("nixl_handshake_duration_seconds_count", error_type=""): values["all"],
    }


def _failing(severity: str, fires: Case, exactly: Case) -> tuple[Case, ...]:
    name = "NixlHandshakeFailureRatioHigh"
    return (
        fires,
        exactly,
        Case(name, severity, Kind.NO_TRAFFIC, "5 handshakes in 10 min, all of which fail", _ended("0x60", "0+0.5x60")),
        Case(name, severity, Kind.RESET, "an instance with old failures restarts", _ended("0+10x60", "90x30 0x30")),
        Case(name, severity, Kind.HEALTHY, "handshakes succeed", _ended("0+10x60", "0x60")),
    )


CASES: Final = (
    *_failing(
        "warning",
        Case(
            "NixlHandshakeFailureRatioHigh",
            "warning",
            Kind.FIRES,
            "1 in 3 fails",
            _ended("0+10x60", "0x20 5+5x40"),
            onset=22,
            labels=_DEPLOYMENT,
            description=f"33.33% of the handshakes of {MODEL} in pd fail. Each takes at least one request with it.",
            link=_LINK,
        ),
        Case(
            "NixlHandshakeFailureRatioHigh",
            "warning",
            Kind.THRESHOLD,
            "1 in 20 fails",
            _ended("0+19x60", "0+1x60"),
            reads=(_RATIO, 0.05),
        ),
    ),
    *_failing(
        "critical",
        Case(
            "NixlHandshakeFailureRatioHigh",
            "critical",
            Kind.FIRES,
            "5 in 6 fail",
            _ended("0+10x60", "0x20 80+80x40"),
            onset=22,
            labels=_DEPLOYMENT,
            description=f"84.85% of the handshakes of {MODEL} in pd fail. Each takes at least one request with it.",
            link=_LINK,
        ),
        Case(
            "NixlHandshakeFailureRatioHigh",
            "critical",
            Kind.THRESHOLD,
            "half of them fail",
            _ended("0+8x60", "0+8x60"),
            reads=(_RATIO, 0.5),
        ),
    ),
    Case(
        "NixlHandshakeSlow",
        "warning",
        Kind.FIRES,
        "all take between 7.5 s and 10 s",
        _lasting(le7="0x60", le10="0+20x60", all="0+20x60"),
        onset=1,
        labels=_DEPLOYMENT,
        description=f"1 in 10 handshakes of {MODEL} in pd takes longer than 9.75s. The requests that need them wait.",
        link=_LINK,
    ),
    Case(
        "NixlHandshakeSlow",
        "warning",
        Kind.THRESHOLD,
        "the 90th percentile is an edge",
        _lasting(le5="0x60", le7="0+9x60", le10="0+10x60", all="0+10x60"),
        reads=("histogram_quantile(0.9, sum by (le) (rate(nixl_handshake_duration_seconds_bucket[10m])))", 7.5),
    ),
    Case(
        "NixlHandshakeSlow",
        "warning",
        Kind.NO_TRAFFIC,
        "5 handshakes in 10 min, all slow",
        _lasting(le7="0x60", le10="0+0.5x60", all="0+0.5x60"),
    ),
    Case(
        "NixlHandshakeSlow",
        "warning",
        Kind.RESET,
        "an instance with slow ones behind it restarts",
        _lasting(le5="0x30 0+10x30", le7="0x30 0+10x30", le10="90x30 0+10x30", all="90x30 0+10x30"),
    ),
    Case(
        "NixlHandshakeSlow",
        "warning",
        Kind.HEALTHY,
        "those that fail take 30 s, the others do not",
        {
            **_lasting(le5="0+20x60", le7="0+20x60", le10="0+20x60", all="0+20x60"),
            series("nixl_handshake_duration_seconds_bucket", error_type="timeout", le="30.0"): "0x60",
            series("nixl_handshake_duration_seconds_bucket", error_type="timeout", le="+Inf"): "0+50x60",
        },
    ),
    Case(
        "NixlListenerRefusing",
        "warning",
        Kind.FIRES,
        "one malformed query a minute, by two instances in turn",
        {
            series("nixl_handshake_requests_total", result="malformed"): "0x10 1+1x50",
            series("nixl_handshake_requests_total", result="malformed", instance="p1:8000"): "0x60",
        },
        onset=16,
        labels={**_DEPLOYMENT, "result": "malformed"},
        description=f"Handshake listeners of {MODEL} in pd refused queries, 15 in 15m: malformed.",
        link=_LINK,
    ),
    Case(
        "NixlListenerRefusing",
        "warning",
        Kind.THRESHOLD,
        "5 in 15 min",
        {series("nixl_handshake_requests_total", result="malformed"): "0+1x60"},
        reads=("increase(nixl_handshake_requests_total[15m])", 5),
        step="3m",
    ),
    Case(
        "NixlListenerRefusing",
        "warning",
        Kind.RESET,
        "an instance that refused many restarts",
        {series("nixl_handshake_requests_total", result="not_allowed"): "90x30 0x30"},
    ),
    Case(
        "NixlListenerRefusing",
        "warning",
        Kind.HEALTHY,
        "queries are served",
        {series("nixl_handshake_requests_total", result="served"): "0+10x60"},
    ),
    Case(
        "NixlModeConflict",
        "warning",
        Kind.FIRES,
        "one request with the parameters of the other mode, before the first scrape",
        {series("nixl_mode_conflicts_total", source="params"): "_x11 1x40"},
        onset=11,
        labels={**_DEPLOYMENT, "source": "params"},
        description=f"Instances of {MODEL} in pd met the other transfer mode, 1 times in 15m: params.",
        link=_LINK,
    ),
    Case(
        "NixlModeConflict",
        "warning",
        Kind.THRESHOLD,
        "none",
        {series("nixl_mode_conflicts_total", source="params"): "0x60"},
    ),
    Case(
        "NixlModeConflict",
        "warning",
        Kind.RESET,
        "an instance with old ones restarts",
        {series("nixl_mode_conflicts_total", source="params"): "9x40 0x40"},
        since=30,
        until=80,
    ),
    Case(
        "NixlModeConflict",
        "warning",
        Kind.HEALTHY,
        "transfers of the right mode",
        {
            series("nixl_mode_conflicts_total", source="operation"): "0x60",
            series("nixl_transfer_duration_seconds_count", direction="read"): "0+50x60",
        },
    ),
)
