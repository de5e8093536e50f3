# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Cases of the alerts on transfers."""

from typing import Final

from tests.mixin.case import MODEL, Case, Kind, series, vllm

_LINK: Final = "nixl-transfers?var-job=pd&var-model=org%2Fmodel"
_DEPLOYMENT: Final = {"job": "pd", "model_name": MODEL}
_READS: Final = {**_DEPLOYMENT, "direction": "read"}

_FAILED: Final = (
    'sum(rate(nixl_transfer_duration_seconds_count{error_type!=""}[10m])) / '
    "sum(rate(nixl_transfer_duration_seconds_count[10m]))"
)


def _ended(succeeded: str, failed: str) -> dict[str, str]:
    return {
        series("nixl_transfer_duration_seconds_count", direction="read", error_type=""): succeeded,
        series("nixl_transfer_duration_seconds_count", direction="read", error_type="transfer_failed"): failed,
    }


def _burn(severity: str, window: str, budget: float, factor: str, failing: int, step: str) -> tuple[Case, ...]:
    """Cases of one window: ``budget`` of 10,000 transfers may fail, and ``failing`` do in the case that fires."""
    name, labels = "NixlTransferErrorBudgetBurn", {**_DEPLOYMENT, "window": window}
    only = {"window": window}
    ratio = f"job_model_name:nixl_transfer_failures_per_transfers:ratio_rate{window}"
    return (
        Case(
            name,
            severity,
            Kind.FIRES,
            f"{failing / 100:g} % fail",
            _ended(f"0+{10_000 - failing}x60", f"0+{failing}x60"),
            onset=1,
            labels=labels,
            description=f"{failing / 100:g}% of the transfers of {MODEL} in pd failed in the last {window}: the budget "
            f"of 0.1 % burns {factor} times too fast or more.",
            link=_LINK,
            step=step,
        ),
        Case(
            name,
            severity,
            Kind.THRESHOLD,
            "the budget burns exactly so fast",
            _ended(f"0+{10_000 - budget:g}x60", f"0+{budget:g}x60"),
            labels=only,
            reads=(ratio, budget / 10_000),
            step=step,
        ),
        Case(
            name,
            severity,
            Kind.NO_TRAFFIC,
            "4 of 600 transfers fail, which is more than the budget",
            _ended("0+10x60", "0x11 1 2 3 4x45"),
            until=60,
            labels=only,
            step=step,
        ),
        Case(
            name,
            severity,
            Kind.RESET,
            "an instance with old failures restarts",
            _ended("0+100x60", "900x30 0x30"),
            labels=only,
            step=step,
        ),
        Case(name, severity, Kind.HEALTHY, "none fail", _ended("0+100x60", "0x60"), labels=only, step=step),
    )


def _lasting(le1: str, le2: str) -> dict[str, str]:
    """Transfers that took 1 s at most, and 2.5 s, which is all."""
    return {
        series("nixl_transfer_duration_seconds_bucket", direction="read", error_type="", le="0.5"): "0x60",
        series("nixl_transfer_duration_seconds_bucket", direction="read", error_type="", le="1.0"): le1,
        series("nixl_transfer_duration_seconds_bucket", direction="read", error_type="", le="2.5"): le2,
        series("nixl_transfer_duration_seconds_bucket", direction="read", error_type="", le="+Inf"): le2,
        series("nixl_transfer_duration_seconds_count", direction="read", error_type=""): le2,
    }


def _in_flight(oldest: str, number: str, rank: str = "0") -> dict[str, str]:
    return {
        series("nixl_transfer_oldest_start_timestamp_seconds", direction="read", rank=rank): oldest,
        series("nixl_transfers_in_flight", direction="read"): number,
    }


def _instance(
    name: str, role: str, served: str, received: str, *, reason: str = "stop", mode: str = "pull"
) -> dict[str, str]:
    return {
        series("nixl_connector_info", instance=name, kv_role=role, transfer_mode=mode): "1x60",
        vllm("vllm:request_success_total", instance=name, finished_reason=reason): served,
        series("nixl_receive_wait_seconds_count", instance=name, outcome="received", transfer_mode=mode): received,
        series("nixl_receive_wait_seconds_count", instance=name, outcome="failed", transfer_mode=mode): "0+1x60",
    }


CASES: Final = (
    *_burn("critical", "1h", 144, "14.4", 200, "1m"),
    Case(
        "NixlTransferErrorBudgetBurn",
        "critical",
        Kind.HEALTHY,
        "a burn that is over, though the hour has not forgotten it",
        _ended("0+100x60", "0x5 500x60"),
        labels={"window": "1h"},
        since=15,
        until=60,
        reads=("job_model_name:nixl_transfer_failures_per_transfers:ratio_rate1h", 500 / 6500),
    ),
    Case(
        "NixlTransferErrorBudgetBurn",
        "critical",
        Kind.FIRES,
        "all of a small fleet's transfers fail, one a minute",
        _ended("0x60", "0+1x60"),
        onset=5,
        labels={**_DEPLOYMENT, "window": "1h"},
        description=f"100% of the transfers of {MODEL} in pd failed in the last 1h: the budget of 0.1 % burns 14.4 "
        "times too fast or more.",
        link=_LINK,
    ),
    *_burn("critical", "6h", 60, "6", 100, "1m"),
    *_burn("warning", "1d", 30, "3", 40, "5m"),
    *_burn("warning", "3d", 10, "1", 20, "5m"),
    Case(
        "NixlTransferFailureRatioHigh",
        "warning",
        Kind.FIRES,
        "1 in 10 fails",
        _ended("0+36x60", "0+4x60"),
        onset=1,
        labels=_READS,
        description=f"10% of the read transfers of {MODEL} in pd fail.",
        link=_LINK,
    ),
    Case(
        "NixlTransferFailureRatioHigh",
        "warning",
        Kind.THRESHOLD,
        "1 in 20 fails",
        _ended("0+38x60", "0+2x60"),
        reads=(_FAILED, 0.05),
    ),
    Case(
        "NixlTransferFailureRatioHigh",
        "warning",
        Kind.NO_TRAFFIC,
        "10 transfers in 10 min, all fail",
        _ended("0x60", "0+1x60"),
    ),
    Case(
        "NixlTransferFailureRatioHigh",
        "warning",
        Kind.RESET,
        "an instance with old failures restarts",
        _ended("0+40x60", "900x30 0x30"),
    ),
    Case("NixlTransferFailureRatioHigh", "warning", Kind.HEALTHY, "none fail", _ended("0+40x60", "0x60")),
    Case(
        "NixlTransferSlow",
        "warning",
        Kind.FIRES,
        "2 in 100 take up to 2.5 s",
        _lasting("0+98x60", "0+100x60"),
        onset=1,
        labels=_READS,
        description=f"1 in 100 read transfers of {MODEL} in pd takes longer than 1.75s. It is part of the time to the "
        "first token.",
        link=_LINK,
    ),
    Case(
        "NixlTransferSlow",
        "warning",
        Kind.THRESHOLD,
        "the 99th percentile is an edge",
        _lasting("0+99x60", "0+100x60"),
        reads=("histogram_quantile(0.99, sum by (le) (rate(nixl_transfer_duration_seconds_bucket[10m])))", 1),
    ),
    Case("NixlTransferSlow", "warning", Kind.NO_TRAFFIC, "10 in 10 min, all slow", _lasting("0x60", "0+1x60")),
    Case(
        "NixlTransferSlow",
        "warning",
        Kind.RESET,
        "an instance with slow ones behind it restarts",
        _lasting("0x30 0+50x30", "900x30 0+50x30"),
    ),
    Case("NixlTransferSlow", "warning", Kind.HEALTHY, "all take less than 1 s", _lasting("0+100x60", "0+100x60")),
    Case(
        "NixlTransferStalled",
        "warning",
        Kind.FIRES,
        "on one of two ranks a transfer that began after a minute hangs, while others end",
        {
            **_in_flight("0x1 60x60", "0x1 3x60", rank="1"),
            **_in_flight("0+60x60", "0x1 3x60"),
            **_ended("0+50x60", "0x60"),
        },
        onset=3,
        labels=_READS,
        description=f"The oldest read transfer of {MODEL} in pd has been in flight for 7m 0s. Its request waits, and "
        "the blocks of both sides are held.",
        link=_LINK,
    ),
    Case(
        "NixlTransferStalled",
        "warning",
        Kind.THRESHOLD,
        "the oldest is always 1 min old",
        _in_flight("0 0+60x60", "1x60"),
        reads=("time() - (nixl_transfer_oldest_start_timestamp_seconds > 0)", 60),
    ),
    Case(
        "NixlTransferStalled",
        "warning",
        Kind.RESET,
        "the instance restarts before anybody is told",
        _in_flight("60x5 0x50", "3x5 0x50"),
    ),
    Case(
        "NixlTransferStalled",
        "warning",
        Kind.HEALTHY,
        "the engine went idle after its last transfer and has not told that none is the oldest",
        _in_flight("60x60", "0x60"),
    ),
    Case("NixlTransferStalled", "warning", Kind.HEALTHY, "each is new", _in_flight("0+60x60", "5x60")),
    Case(
        "NixlDecodeWithoutTransfers",
        "warning",
        Kind.FIRES,
        "two of three decode instances, one of which pushes are for, only fail to receive",
        {
            **_instance("d0:8000", "kv_consumer", "0+20x60", "0x60"),
            **_instance("d1:8000", "kv_consumer", "0+20x60", "0x60", reason="length", mode="push"),
            **_instance("d2:8000", "kv_consumer", "0+20x60", "0+20x60"),
        },
        onset=1,
        labels=_DEPLOYMENT,
        description=f"2 decode instances of {MODEL} in pd answered requests in 15m and received no KV: they prefill "
        "everything themselves.",
        link=_LINK,
    ),
    Case(
        "NixlDecodeWithoutTransfers",
        "warning",
        Kind.THRESHOLD,
        "one request in ten minutes comes with KV",
        _instance("d0:8000", "kv_consumer", "0+20x60", "0x9 1x9 2x9 3x9 4x9 5x9"),
    ),
    Case(
        "NixlDecodeWithoutTransfers",
        "warning",
        Kind.NO_TRAFFIC,
        "9 requests in 15 min",
        _instance("d0:8000", "kv_consumer", "0+0.6x60", "0x60"),
    ),
    Case(
        "NixlDecodeWithoutTransfers",
        "warning",
        Kind.RESET,
        "the instance restarts and serves nothing",
        _instance("d0:8000", "kv_consumer", "900x30 0x30", "900x30 0x30"),
    ),
    Case(
        "NixlDecodeWithoutTransfers",
        "warning",
        Kind.HEALTHY,
        "P, an instance that may be both, a D with KV, one whose clients hang up, and a stock one",
        {
            **_instance("p0:8000", "kv_producer", "0+20x60", "0x60"),
            **_instance("b0:8000", "kv_both", "0+20x60", "0x60"),
            **_instance("d0:8000", "kv_consumer", "0+20x60", "0+20x60"),
            **_instance("d1:8000", "kv_consumer", "0+20x60", "0x60", reason="abort"),
            vllm("vllm:request_success_total", instance="s0:8000", finished_reason="stop"): "0+20x60",
        },
    ),
)
