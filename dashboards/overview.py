# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Is KV flowing, in which mode, at which versions, how fast, and what fails."""

from typing import Final

from dashboards import config, house
from dashboards.house import Panel, board_link, stat, timeseries, traces
from dashboards.instances import instances
from dashboards.queries import Query, events, fraction, p99, quantiles, rates, targets, total

_HANDSHAKES: Final = "nixl_handshake_duration_seconds_count{SELECTED}"
_FAILED_HANDSHAKES: Final = 'nixl_handshake_duration_seconds_count{SELECTED, error_type!=""}'
_TRANSFERS: Final = "nixl_transfer_duration_seconds_count{SELECTED}"
_FAILED_TRANSFERS: Final = 'nixl_transfer_duration_seconds_count{SELECTED, error_type!=""}'
_WAITS: Final = 'nixl_receive_wait_seconds_bucket{SELECTED, outcome="received"}'


def board() -> house.Board:
    """The board to open first."""
    return house.board(
        config.OVERVIEW,
        "Overview",
        "Whether KV moves between prefill and decode instances, how fast, and what fails.",
        {
            "Is KV flowing, and how fast": _flowing(),
            "What fails": _failing(),
            "Which instances, in which mode, at which versions": instances(),
        },
        about="""
            Start here; the other boards are in the menu at the top right.
            KV moved and transfers come from metrics that every vLLM with a NIXL connector has.
            The rest needs the suite in the instance: a stock one appears as `stock`, or not at all.

            Only the side that begins an operation measures it: the decode instance in pull, the prefill instance in
            push. A dashed line is a median.
            """,
    )


def _by_mode(counter: str) -> Query:
    """What tells no mode is a stock instance's."""
    rate = rates(counter, by="transfer_mode")
    return Query(f'label_replace({rate.expr}, "transfer_mode", "stock", "transfer_mode", "")', rate.legend)


def _flowing() -> list[Panel]:
    slow = traces("Slow receives in traces", '{ name = "nixl.receive" && duration > 1s }')
    return [
        stat(
            "KV moved",
            "By all transfers, as vLLM's own metrics count them: stock instances are in it.",
            "Bps",
            total("vllm:nixl_bytes_transferred_sum{SELECTED}"),
            runbooks=["NixlDecodeWithoutTransfers"],
        ),
        stat(
            "Transfers",
            "Those that succeeded, as vLLM's own metrics count them: stock instances are in it.",
            "ops",
            total("vllm:nixl_bytes_transferred_count{SELECTED}"),
        ),
        stat(
            "Transfers in flight",
            "Transfers that are posted and not yet seen done.",
            "short",
            "sum(nixl_transfers_in_flight{SELECTED})",
            runbooks=["NixlTransferStalled"],
        ),
        stat(
            "Transfer p99",
            "99 of 100 transfers took less, the delay until vLLM looks included; 0 while there are none.",
            "s",
            p99('nixl_transfer_duration_seconds_bucket{SELECTED, error_type=""}'),
            steps={"transfer_slow_seconds": config.ATTENTION},
            runbooks=["NixlTransferSlow"],
            links=[traces("Slow transfers in traces", '{ name = "nixl.transfer" && duration > 1s }')],
        ),
        stat(
            "Wait for KV, p99",
            "99 of 100 requests on the decode side had their KV sooner. It is part of the time to the first token.",
            "s",
            p99(_WAITS),
            links=[slow],
        ),
        stat(
            "Instances down",
            "Instances that Prometheus cannot scrape, of jobs in which there was a NIXL connector.",
            "short",
            targets(up=0),
            steps={1: config.BAD},
            runbooks=["NixlTargetDown", "NixlMetricsAbsent"],
        ),
        timeseries(
            "KV moved, by transfer mode",
            "From vLLM's own metrics; instances without the suite do not tell their mode: stock.",
            "Bps",
            _by_mode("vllm:nixl_bytes_transferred_sum{SELECTED}"),
            stack=True,
            colours=config.OF_MODE,
            runbooks=["NixlDecodeWithoutTransfers"],
        ),
        timeseries(
            "Transfers, by transfer mode",
            "Those that succeeded, from vLLM's own metrics.",
            "ops",
            _by_mode("vllm:nixl_bytes_transferred_count{SELECTED}"),
            stack=True,
            colours=config.OF_MODE,
        ),
        timeseries(
            "Wait for KV on the decode side",
            "From the engine step that asked for a request's remote KV to the step that had it. In push the prefill "
            "is in it.",
            "s",
            *quantiles(_WAITS, "{{transfer_mode}}", by="transfer_mode"),
            colours={"/pull/": "blue", "/push/": "purple"},
            links=[slow],
        ),
    ]


def _failing() -> list[Panel]:
    return [
        stat(
            "Handshakes that fail",
            "Share of the handshakes. A pair that does not fit fails with each request.",
            "percentunit",
            fraction(total(_FAILED_HANDSHAKES), total(_HANDSHAKES)),
            steps={
                "handshake_failure_warning": config.ATTENTION,
                "handshake_failure_critical": config.BAD,
            },
            runbooks=["NixlHandshakeFailureRatioHigh"],
        ),
        stat(
            "Transfers that fail",
            "Share of the transfers; orange is more than the objective allows.",
            "percentunit",
            fraction(total(_FAILED_TRANSFERS), total(_TRANSFERS)),
            steps={
                "transfer_objective": config.ATTENTION,
                "transfer_failure_ratio": config.BAD,
            },
            runbooks=["NixlTransferFailureRatioHigh", "NixlTransferErrorBudgetBurn"],
        ),
        stat(
            "Rejected: incompatible",
            "Handshakes that were refused in the time shown because the compatibility hash differs.",
            "short",
            events("nixl_handshake_rejections_total{SELECTED}"),
            steps={1: config.BAD},
            whole=True,
            runbooks=["NixlCompatMismatch"],
            links=[board_link("Handshakes and compatibility", config.HANDSHAKES)],
        ),
        stat(
            "Leases expired",
            "Requests in the time shown whose KV nobody fetched.",
            "short",
            events('nixl_lease_duration_seconds_count{SELECTED, outcome="expired"}'),
            steps={1: config.ATTENTION},
            whole=True,
            runbooks=["NixlLeasesExpiring"],
            links=[board_link("Push and leases", config.PUSH_LEASES)],
        ),
        stat(
            "KV that may be wrong",
            "Requests in the time shown that were answered with KV that may have been another's, or was not loaded.",
            "short",
            events(config.WRONG_KV),
            steps={1: config.BAD},
            whole=True,
            runbooks=["NixlInvalidKv"],
            links=[board_link("Push and leases", config.PUSH_LEASES)],
        ),
        stat(
            "Mode conflicts",
            "Times in the time shown that something of the other transfer mode was met.",
            "short",
            events("nixl_mode_conflicts_total{SELECTED}"),
            steps={1: config.BAD},
            whole=True,
            runbooks=["NixlModeConflict"],
            links=[board_link("Handshakes and compatibility", config.HANDSHAKES)],
        ),
        timeseries(
            "Handshakes that fail, by cause",
            "Seen by the side that began the handshake.",
            "ops",
            rates(_FAILED_HANDSHAKES, by="error_type"),
            colours=config.of_values("nixl_handshake_duration_seconds", "error_type"),
            many=True,
            span=10,
            height=9,
            runbooks=["NixlHandshakeFailureRatioHigh"],
            links=[
                traces("Failed handshakes in traces", '{ name = "nixl.handshake" && status = error }'),
                board_link("Handshakes and compatibility", config.HANDSHAKES),
            ],
        ),
        timeseries(
            "Transfers that fail, by cause",
            "Seen by the side that moves the KV: decode in pull, prefill in push.",
            "ops",
            rates(_FAILED_TRANSFERS, by="error_type"),
            colours=config.of_values("nixl_transfer_duration_seconds", "error_type"),
            span=7,
            height=9,
            runbooks=["NixlTransferFailureRatioHigh", "NixlTransferErrorBudgetBurn"],
            links=[
                traces("Failed transfers in traces", '{ name = "nixl.transfer" && status = error }'),
                board_link("Transfers", config.TRANSFERS),
            ],
        ),
        timeseries(
            "Failures that vLLM counts",
            "From vLLM's own metrics, stock instances too. From vLLM 0.31 on, failed handshakes and notifications are "
            "in the failed transfers.",
            "ops",
            Query(total("vllm:nixl_num_failed_transfers_total{SELECTED}"), "transfers"),
            Query(total("vllm:nixl_num_failed_notifications_total{SELECTED}"), "notifications"),
            Query(total("vllm:nixl_num_kv_expired_reqs_total{SELECTED}"), "KV expired"),
            colours={"transfers": config.BAD, "notifications": "yellow", "KV expired": config.ATTENTION},
            span=7,
            height=9,
        ),
    ]
