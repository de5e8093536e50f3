# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Cases of the alerts on leases and on KV that may be wrong."""

from typing import Final

from tests.mixin.case import MODEL, Case, Kind, series, vllm

_LINK: Final = "nixl-push-leases?var-job=pd&var-model=org%2Fmodel"
_DEPLOYMENT: Final = {"job": "pd", "model_name": MODEL}

_EXPIRED: Final = (
    'sum(rate(nixl_lease_duration_seconds_count{outcome="expired"}[15m])) / '
    "sum(rate(nixl_lease_duration_seconds_count[15m]))"
)


def _ended(released: str, expired: str) -> dict[str, str]:
    return {
        series("nixl_lease_duration_seconds_count", outcome="released"): released,
        series("nixl_lease_duration_seconds_count", outcome="expired"): expired,
    }


def _engine(overdue: str, opened: str, waiting: str) -> dict[str, str]:
    return {
        series("nixl_leases_overdue"): overdue,
        series("nixl_leases_opened_total"): opened,
        vllm("vllm:num_requests_waiting"): waiting,
    }


def _invalid(severity: str, reason: str, other: str, description: str) -> tuple[Case, ...]:
    name, metric = "NixlInvalidKv", "nixl_invalid_kv_total"
    return (
        Case(
            name,
            severity,
            Kind.FIRES,
            "two requests, one of them before the first scrape of its instance",
            {
                series(metric, reason=reason): "0x10 1x40",
                series(metric, reason=reason, instance="p1:8000"): "_x11 1x40",
            },
            onset=11,
            labels={**_DEPLOYMENT, "reason": reason},
            description=description,
            link=_LINK,
        ),
        Case(name, severity, Kind.THRESHOLD, "none", {series(metric, reason=reason): "0x60"}),
        Case(
            name,
            severity,
            Kind.RESET,
            "an instance with old ones restarts",
            {series(metric, reason=reason): "9x40 0x40"},
            since=30,
            until=80,
        ),
        Case(
            name,
            severity,
            Kind.HEALTHY,
            "those of the other severity",
            {series(metric, reason=other): "0+1x60", series(metric, reason=reason): "0x60"},
        ),
    )


CASES: Final = (
    Case(
        "NixlLeasesExpiring",
        "warning",
        Kind.FIRES,
        "1 in 10 expires",
        _ended("0+27x60", "0+3x60"),
        onset=1,
        labels=_DEPLOYMENT,
        description=f"10% of the leases of {MODEL} in pd expire. The prefill was in vain, and its blocks were held for "
        "the whole lease.",
        link=_LINK,
    ),
    Case(
        "NixlLeasesExpiring",
        "warning",
        Kind.THRESHOLD,
        "1 in 20 expires",
        _ended("0+38x60", "0+2x60"),
        reads=(_EXPIRED, 0.05),
    ),
    Case("NixlLeasesExpiring", "warning", Kind.NO_TRAFFIC, "15 in 15 min, all expire", _ended("0x60", "0+1x60")),
    Case("NixlLeasesExpiring", "warning", Kind.RESET, "an instance restarts", _ended("0+40x60", "900x30 0x30")),
    Case("NixlLeasesExpiring", "warning", Kind.HEALTHY, "all are released", _ended("0+40x60", "0x60")),
    Case(
        "NixlLeasesOverdue",
        "warning",
        Kind.FIRES,
        "an engine opens leases and does not free those that are over",
        _engine("0x10 3x40", "0+5x60", "0x60"),
        onset=11,
        labels=_DEPLOYMENT,
        description=f"3 leases of {MODEL} in pd are past their deadline, and vLLM does not free their blocks. The KV "
        "cache fills up with them.",
        link=_LINK,
    ),
    Case(
        "NixlLeasesOverdue",
        "warning",
        Kind.FIRES,
        "the cache is full of them: no lease is opened, and requests wait",
        _engine("0x10 900x40", "50x60", "7x60"),
        onset=11,
        labels=_DEPLOYMENT,
        description=f"900 leases of {MODEL} in pd are past their deadline, and vLLM does not free their blocks. The KV "
        "cache fills up with them.",
        link=_LINK,
    ),
    Case("NixlLeasesOverdue", "warning", Kind.THRESHOLD, "none is overdue", _engine("0x60", "0+5x60", "7x60")),
    Case(
        "NixlLeasesOverdue", "warning", Kind.RESET, "the instance restarts", _engine("3x8 0x50", "0+5x8 0x50", "0x60")
    ),
    Case(
        "NixlLeasesOverdue",
        "warning",
        Kind.HEALTHY,
        "an idle engine, which frees with its next step",
        _engine("3x60", "50x60", "0x60"),
    ),
    *_invalid(
        "critical",
        "read_after_expiry",
        "failed_load_recomputed",
        f"Requests of {MODEL} in pd whose KV may have been wrong, 2 in 15m: read_after_expiry.",
    ),
    *_invalid(
        "warning",
        "unknown_request",
        "failed_load_served",
        f"Requests of {MODEL} in pd, 2 in 15m: unknown_request.",
    ),
)
