# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Cases of the alerts on what Prometheus sees."""

from typing import Final

from tests.mixin.case import MODEL, Case, Kind, series


def _up(instance: str, values: str, job: str = "pd") -> dict[str, str]:
    return {f'up{{job="{job}", instance="{instance}"}}': values}


def _info(instance: str, values: str, model: str = MODEL) -> dict[str, str]:
    return {series("nixl_connector_info", instance=instance, model_name=model): values}


CASES: Final = (
    Case(
        "NixlTargetDown",
        "warning",
        Kind.FIRES,
        "one of three, a stock one",
        {
            **_up("p0:8000", "1x60"),
            **_up("d0:8000", "1x60"),
            **_up("d1:8000", "1x10 0x50"),
            **_info("p0:8000", "1x60"),
        },
        onset=11,
        labels={"job": "pd"},
        description="1 targets of pd are down.",
        link="nixl-overview?var-job=pd",
    ),
    Case(
        "NixlTargetDown",
        "warning",
        Kind.THRESHOLD,
        "none is down",
        {**_up("p0:8000", "1x60"), **_info("p0:8000", "1x60")},
    ),
    Case(
        "NixlTargetDown",
        "warning",
        Kind.RESET,
        "an instance restarts",
        {**_up("p0:8000", "1x10 0x9 1x50"), **_info("p0:8000", "1x10 stale _x9 1x50")},
    ),
    Case(
        "NixlTargetDown",
        "warning",
        Kind.HEALTHY,
        "a target of a job that is none of NIXL's is down",
        {**_up("p0:8000", "1x60"), **_info("p0:8000", "1x60"), **_up("db:9187", "0x60", job="db")},
    ),
    Case(
        "NixlTargetDown",
        "critical",
        Kind.FIRES,
        "the one P of a pair",
        {
            **_up("p0:8000", "1x10 0x50"),
            **_up("d0:8000", "1x60"),
            **_info("p0:8000", "1x10 stale"),
            **_info("d0:8000", "1x60"),
        },
        onset=11,
        labels={"job": "pd"},
        description="50% of the targets of pd are down.",
        link="nixl-overview?var-job=pd",
    ),
    Case(
        "NixlTargetDown",
        "critical",
        Kind.THRESHOLD,
        "two of five",
        {
            **_up("p0:8000", "0x60"),
            **_up("p1:8000", "0x60"),
            **_up("p2:8000", "1x60"),
            **_up("d0:8000", "1x60"),
            **_up("d1:8000", "1x60"),
            **_info("d0:8000", "1x60"),
        },
        reads=("count(up == 0) / count(up)", 0.4),
    ),
    Case(
        "NixlTargetDown",
        "critical",
        Kind.RESET,
        "all restart at once",
        {**_up("p0:8000", "1x10 0x3 1x50"), **_info("p0:8000", "1x10 stale _x3 1x50")},
    ),
    Case(
        "NixlTargetDown",
        "critical",
        Kind.HEALTHY,
        "all targets of another job are down",
        {**_up("p0:8000", "1x60"), **_info("p0:8000", "1x60"), **_up("db:9187", "0x60", job="db")},
    ),
    Case(
        "NixlMetricsAbsent",
        "warning",
        Kind.FIRES,
        "the only instance of a model is gone, and another model goes on",
        {**_info("p0:8000", "1x10 stale"), **_info("p1:8000", "1x60", model="other")},
        onset=11,
        labels={"job": "pd", "model_name": MODEL},
        description=f"No instance of {MODEL} in pd has metrics of the suite.",
        link="nixl-overview",
    ),
    Case(
        "NixlMetricsAbsent",
        "warning",
        Kind.FIRES,
        "there never were any, only those of a stock instance",
        {series("vllm:nixl_num_failed_transfers_total", transfer_mode=None, connector_version=None): "0x60"},
        description="No instance of any model has metrics of the suite.",
        link="nixl-overview",
    ),
    Case(
        "NixlMetricsAbsent",
        "warning",
        Kind.THRESHOLD,
        "one of two instances is left",
        {**_info("p0:8000", "1x10 stale"), **_info("p1:8000", "1x60")},
    ),
    Case("NixlMetricsAbsent", "warning", Kind.RESET, "an instance restarts", _info("p0:8000", "1x10 stale _x9 1x50")),
    Case("NixlMetricsAbsent", "warning", Kind.HEALTHY, "all are there", _info("p0:8000", "1x60")),
)
