# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Cases of the alerts on what Prometheus sees."""

from typing import Final

from nixl_telemetry.mixin.config import MixinConfig
from tests.mixin.case import MODEL, Case, Kind, series, vllm


def _up(instance: str, values: str, job: str = "pd") -> dict[str, str]:
    return {f'up{{job="{job}", instance="{instance}"}}': values}


def _info(instance: str, values: str, model: str = MODEL) -> dict[str, str]:
    return {series("nixl_connector_info", instance=instance, model_name=model): values}


def _seen(instance: str, values: str) -> dict[str, str]:
    """What stock instances have, too."""
    return {vllm("vllm:nixl_bytes_transferred_count", instance=instance): values}


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
            **_seen("p0:8000", "0x10 stale"),
            **_seen("d0:8000", "0x60"),
        },
        onset=11,
        labels={"job": "pd"},
        description="50% of the instances of pd are down.",
        link="nixl-overview?var-job=pd",
    ),
    Case(
        "NixlTargetDown",
        "critical",
        Kind.THRESHOLD,
        "two of five",
        {
            **_up("p0:8000", "1 0x60"),
            **_up("p1:8000", "1 0x60"),
            **_up("p2:8000", "1x60"),
            **_up("d0:8000", "1x60"),
            **_up("d1:8000", "1x60"),
            **_seen("p0:8000", "0 stale"),
            **_seen("p1:8000", "0 stale"),
            **_seen("p2:8000", "0x60"),
            **_seen("d0:8000", "0x60"),
            **_seen("d1:8000", "0x60"),
        },
        reads=("count(up == 0) / count(up)", 0.4),
    ),
    Case(
        "NixlTargetDown",
        "critical",
        Kind.HEALTHY,
        "the fleet is doubled, and the new instances load their model",
        {
            **_up("p0:8000", "1x60"),
            **_up("d0:8000", "1x60"),
            **_up("p1:8000", "_x5 0x30 1x30"),
            **_up("d1:8000", "_x5 0x30 1x30"),
            **_info("p0:8000", "1x60"),
            **_seen("p0:8000", "0x60"),
            **_seen("d0:8000", "0x60"),
            **_seen("p1:8000", "_x35 0x30"),
            **_seen("d1:8000", "_x35 0x30"),
        },
        until=30,
        reads=("count(up == 0) / count(up)", 0.5),
    ),
    Case(
        "NixlTargetDown",
        "critical",
        Kind.RESET,
        "all restart at once",
        {**_up("p0:8000", "1x10 0x3 1x50"), **_seen("p0:8000", "0x10 stale _x3 0x50")},
    ),
    Case(
        "NixlTargetDown",
        "critical",
        Kind.HEALTHY,
        "all targets of another job are down",
        {**_up("p0:8000", "1x60"), **_seen("p0:8000", "0x60"), **_up("db:9187", "0x60", job="db")},
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

_BY_NAMESPACE: Final = MixinConfig.load({"job_label": "namespace"})
_PREFILL, _DECODE = "prefill", "decode"


def _in_namespace(*groups: dict[str, str]) -> dict[str, str]:
    """The same series with one more label."""
    every = {name: values for group in groups for name, values in group.items()}
    return {name.replace("}", ', namespace="ns"}'): values for name, values in every.items()}


def _group(prefill: str, *decode: str) -> dict[str, str]:
    """P and D in two jobs of one namespace, beside a job that is none of NIXL's and all of whose targets are down."""
    decoders = [
        {
            **_up(instance, "1x60", job=_DECODE),
            series("nixl_connector_info", job=_DECODE, instance=instance): "1x60",
            vllm("vllm:nixl_bytes_transferred_count", job=_DECODE, instance=instance): "0x60",
        }
        for instance in decode
    ]
    databases = [_up(f"db{number}:9187", "0x60", job="db") for number in range(9)]
    return _in_namespace(
        _up("p0:8000", prefill, job=_PREFILL),
        {series("nixl_connector_info", job=_PREFILL, instance="p0:8000"): "1x10 stale"},
        {vllm("vllm:nixl_bytes_transferred_count", job=_PREFILL, instance="p0:8000"): "0x10 stale"},
        *decoders,
        *databases,
    )


BY_NAMESPACE: Final = (
    Case(
        "NixlTargetDown",
        "critical",
        Kind.FIRES,
        "the one P, which has a job of its own",
        _group("1x10 0x50", "d0:8000"),
        onset=11,
        labels={"namespace": "ns"},
        description="50% of the instances of ns are down.",
        link="nixl-overview?var-job=ns",
        config=_BY_NAMESPACE,
    ),
    Case(
        "NixlTargetDown",
        "warning",
        Kind.FIRES,
        "one of three; databases are not counted",
        _group("1x10 0x50", "d0:8000", "d1:8000"),
        onset=11,
        labels={"namespace": "ns"},
        description="1 targets of ns are down.",
        link="nixl-overview?var-job=ns",
        config=_BY_NAMESPACE,
    ),
    *(
        Case(
            "NixlTargetDown",
            severity,
            Kind.HEALTHY,
            "databases of the namespace are down",
            _group("1x60", "d0:8000"),
            config=_BY_NAMESPACE,
        )
        for severity in ("critical", "warning")
    ),
)
"""Over rules in which the namespace says what belongs together."""
