# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Is KV flowing, in which mode, at which versions, how fast, and what fails."""

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards import config
from dashboards.house import (
    Query,
    about,
    board as make_board,
    board_link,
    fraction,
    organize,
    quantiles,
    stat,
    table,
    timeseries,
    traces,
)

_FAILED_TRANSFERS = 'sum(rate(nixl_transfer_duration_seconds_count{SELECTED, error_type!=""}[$__rate_interval]))'
_TRANSFERS = "sum(rate(nixl_transfer_duration_seconds_count{SELECTED}[$__rate_interval]))"
_FAILED_HANDSHAKES = 'sum(rate(nixl_handshake_duration_seconds_count{SELECTED, error_type!=""}[$__rate_interval]))'
_HANDSHAKES = "sum(rate(nixl_handshake_duration_seconds_count{SELECTED}[$__rate_interval]))"


def _by_mode(rate: str) -> Query:
    """By transfer mode; what tells none is a stock instance's."""
    return Query(
        f'label_replace(sum by (transfer_mode) ({rate}), "transfer_mode", "stock", "transfer_mode", "")',
        "{{transfer_mode}}",
    )


def board() -> Dashboard:
    """The board to open first."""
    return make_board(
        config.OVERVIEW,
        "Overview",
        "Whether KV moves between prefill and decode instances, how fast, and what fails.",
        {
            "Is KV flowing, and how fast": [
                stat(
                    "KV moved",
                    "Bytes a second of all transfers, as vLLM's own metrics count them: stock instances are in it.",
                    "Bps",
                    "sum(rate(vllm:nixl_bytes_transferred_sum{SELECTED}[$__rate_interval]))",
                ),
                stat(
                    "Transfers",
                    "Transfers a second that succeeded, as vLLM's own metrics count them: stock instances are in it.",
                    "ops",
                    "sum(rate(vllm:nixl_bytes_transferred_count{SELECTED}[$__rate_interval]))",
                ),
                stat(
                    "Transfers in flight",
                    "Transfers that are posted and not yet seen done.",
                    "short",
                    "sum(nixl_transfers_in_flight{SELECTED})",
                ),
                stat(
                    "Transfer p99",
                    "99 of 100 transfers took less. It includes the delay until vLLM looked, once per engine step.",
                    "s",
                    quantiles('nixl_transfer_duration_seconds_bucket{SELECTED, error_type=""}')[0].expr,
                    steps={config.ALERTS.transfer_slow_seconds: config.ATTENTION},
                    runbooks=["NixlTransferSlow"],
                    links=[traces("Slow transfers in traces", '{ name = "nixl.transfer" && duration > 1s }')],
                ),
                stat(
                    "Wait for KV p50",
                    "Half of the requests on the decode side had their KV sooner. It is part of the time to first token.",
                    "s",
                    quantiles('nixl_receive_wait_seconds_bucket{SELECTED, outcome="received"}')[1].expr,
                ),
                stat(
                    "Wait for KV p99",
                    "99 of 100 requests on the decode side had their KV sooner.",
                    "s",
                    quantiles('nixl_receive_wait_seconds_bucket{SELECTED, outcome="received"}')[0].expr,
                    links=[traces("Slow receives in traces", '{ name = "nixl.receive" && duration > 1s }')],
                ),
                timeseries(
                    "KV moved, by transfer mode",
                    "From vLLM's own metrics; instances without the suite do not tell their mode: stock.",
                    "Bps",
                    _by_mode("rate(vllm:nixl_bytes_transferred_sum{SELECTED}[$__rate_interval])"),
                    stack=True,
                    colours=config.OF_MODE,
                    runbooks=["NixlDecodeWithoutTransfers"],
                ),
                timeseries(
                    "Transfers, by transfer mode",
                    "Those that succeeded, from vLLM's own metrics.",
                    "ops",
                    _by_mode("rate(vllm:nixl_bytes_transferred_count{SELECTED}[$__rate_interval])"),
                    stack=True,
                    colours=config.OF_MODE,
                ),
                timeseries(
                    "Wait for KV on the decode side",
                    "From the engine step that asked for a request's remote KV to the step that had it. "
                    "In push the prefill is in it.",
                    "s",
                    *quantiles(
                        'nixl_receive_wait_seconds_bucket{SELECTED, outcome="received"}',
                        "{{transfer_mode}}",
                        "transfer_mode",
                    ),
                    colours={"/pull/": "blue", "/push/": "purple"},
                    links=[traces("Receives in traces", '{ name = "nixl.receive" }')],
                ),
            ],
            "What fails": [
                stat(
                    "Handshakes that fail",
                    "Share of the handshakes. A pair that does not fit fails with each request.",
                    "percentunit",
                    fraction(_FAILED_HANDSHAKES, _HANDSHAKES),
                    steps={
                        config.ALERTS.handshake_failure_warning: config.ATTENTION,
                        config.ALERTS.handshake_failure_critical: config.BAD,
                    },
                    runbooks=["NixlHandshakeFailureRatioHigh"],
                ),
                stat(
                    "Transfers that fail",
                    "Share of the transfers.",
                    "percentunit",
                    fraction(_FAILED_TRANSFERS, _TRANSFERS),
                    steps={
                        round(1 - config.ALERTS.transfer_objective, 9): config.ATTENTION,
                        config.ALERTS.transfer_failure_ratio: config.BAD,
                    },
                    runbooks=["NixlTransferFailureRatioHigh", "NixlTransferErrorBudgetBurn"],
                ),
                stat(
                    "Rejected: incompatible",
                    "Handshakes that were refused in the time shown because the compatibility hash differs.",
                    "short",
                    "ceil(sum(increase(nixl_handshake_rejections_total{SELECTED}[$__range])))",
                    steps={1: config.BAD},
                    whole=True,
                    runbooks=["NixlCompatMismatch"],
                ),
                stat(
                    "Leases expired",
                    "Requests in the time shown whose KV nobody fetched.",
                    "short",
                    'ceil(sum(increase(nixl_lease_duration_seconds_count{SELECTED, outcome="expired"}[$__range])))',
                    steps={1: config.ATTENTION},
                    whole=True,
                    runbooks=["NixlLeasesExpiring"],
                ),
                stat(
                    "Invalid KV",
                    "Requests in the time shown whose KV may have been another's, or was not loaded.",
                    "short",
                    "ceil(sum(increase(nixl_invalid_kv_total{SELECTED}[$__range])))",
                    steps={1: config.BAD},
                    whole=True,
                    runbooks=["NixlInvalidKv"],
                ),
                stat(
                    "Instances down",
                    "Instances that Prometheus cannot scrape.",
                    "short",
                    "count(up{TARGETS} == 0) or vector(0)",
                    steps={1: config.BAD},
                    runbooks=["NixlTargetDown", "NixlMetricsAbsent"],
                ),
                timeseries(
                    "Handshakes that fail, by cause",
                    "Seen by the side that began the handshake. Error types are in the documentation of the signals.",
                    "ops",
                    Query(
                        "sum by (error_type) "
                        '(rate(nixl_handshake_duration_seconds_count{SELECTED, error_type!=""}[$__rate_interval]))',
                        "{{error_type}}",
                    ),
                    many=True,
                    links=[
                        traces("Failed handshakes in traces", '{ name = "nixl.handshake" && status = error }'),
                        board_link("Handshakes and compatibility", config.HANDSHAKES),
                    ],
                ),
                timeseries(
                    "Transfers that fail, by cause",
                    "Seen by the side that moves the KV: decode in pull, prefill in push.",
                    "ops",
                    Query(
                        "sum by (error_type) "
                        '(rate(nixl_transfer_duration_seconds_count{SELECTED, error_type!=""}[$__rate_interval]))',
                        "{{error_type}}",
                    ),
                    many=True,
                    links=[
                        traces("Failed transfers in traces", '{ name = "nixl.transfer" && status = error }'),
                        board_link("Transfers", config.TRANSFERS),
                    ],
                ),
                timeseries(
                    "Failures that vLLM counts",
                    "From vLLM's own metrics, stock instances too. From vLLM 0.31 on, failed handshakes and "
                    "notifications are in the failed transfers.",
                    "ops",
                    Query("sum(rate(vllm:nixl_num_failed_transfers_total{SELECTED}[$__rate_interval]))", "transfers"),
                    Query(
                        "sum(rate(vllm:nixl_num_failed_notifications_total{SELECTED}[$__rate_interval]))",
                        "notifications",
                    ),
                    Query("sum(rate(vllm:nixl_num_kv_expired_reqs_total{SELECTED}[$__rate_interval]))", "KV expired"),
                ),
            ],
            "Which instances, in which mode, at which versions": [
                table(
                    "Instances",
                    "One row for each engine. Stock instances tell neither their mode nor their versions.",
                    """
                    label_replace(
                      group by (instance, engine, model_name, kv_role, transfer_mode, connector_version, vllm_version,
                                nixl_version, compat_hash, handshake_enforced)
                        (nixl_connector_info{SELECTED}),
                      "hash", "$1", "compat_hash", "(.{12}).*"
                    )
                    or label_replace(
                      group by (instance, engine, model_name)
                        (vllm:nixl_bytes_transferred_count{SELECTED, transfer_mode=""}),
                      "transfer_mode", "stock", "", ""
                    )
                    """,
                    steps=[
                        organize(
                            instance="Instance",
                            model_name="Model",
                            kv_role="Role",
                            transfer_mode="Mode",
                            connector_version="Connector version",
                            vllm_version="vLLM",
                            nixl_version="NIXL",
                            hash="Compatibility hash",
                            handshake_enforced="Hash enforced",
                            engine="Engine",
                            hidden=["Time", "Value", "compat_hash"],
                        )
                    ],
                    sort="Instance",
                    none="",
                    runbooks=["NixlTransferModesMixed", "NixlConnectorVersionsMixed"],
                ),
            ],
            "About": [
                about(
                    """
                    Start here, then follow the boards in the menu at the top right.
                    The first row comes from metrics that every vLLM with a NIXL connector has.
                    The rest needs the suite in the instance; a stock one appears as `stock`, or not at all.

                    Only the side that begins an operation measures it: transfers are seen by the decode instance in
                    pull and by the prefill instance in push.
                    Dashed lines are medians; a red dashed line is where an alert begins.
                    """
                )
            ],
        },
    )
