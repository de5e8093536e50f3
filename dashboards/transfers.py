# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""READ and WRITE: rates, errors, durations, shapes, and who moves KV to whom."""

from typing import Final

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards import config
from dashboards.house import (
    Query,
    about,
    age,
    board as make_board,
    fraction,
    heatmap,
    matrix,
    merge,
    organize,
    quantiles,
    stat,
    table,
    timeseries,
    traces,
)

_FAILED: Final = (
    'sum by (direction) (rate(nixl_transfer_duration_seconds_count{SELECTED, error_type!=""}[$__rate_interval]))'
)
_ENDED: Final = "sum by (direction) (rate(nixl_transfer_duration_seconds_count{SELECTED}[$__rate_interval]))"
_DONE: Final = 'nixl_transfer_duration_seconds_bucket{SELECTED, error_type=""}'


def _per(quantity: str, whole: str) -> Query:
    """How much of one counter there is for one of another, by direction, while there is any."""
    rates = (f"sum by (direction) (rate({name}{{SELECTED}}[$__rate_interval]))" for name in (quantity, whole))
    return Query(" / ".join(f"({rate} > 0)" for rate in rates), "{{direction}}")


def board() -> Dashboard:
    """The board for KV that moves slowly, or not at all."""
    slow = traces("Slow transfers in traces", '{ name = "nixl.transfer" && duration > 1s }')
    failed = traces("Failed transfers in traces", '{ name = "nixl.transfer" && status = error }')
    oldest = age("nixl_transfer_oldest_start_timestamp_seconds{SELECTED}", "direction")
    return make_board(
        config.TRANSFERS,
        "Transfers",
        "READ and WRITE of KV: rates, errors, durations, shapes, and between whom.",
        {
            "Now": [
                stat(
                    "READ",
                    "Bytes a second that decode instances read, in pull.",
                    "Bps",
                    'sum(rate(nixl_transfer_bytes_total{SELECTED, direction="read"}[$__rate_interval])) or vector(0)',
                ),
                stat(
                    "WRITE",
                    "Bytes a second that prefill instances write, in push.",
                    "Bps",
                    'sum(rate(nixl_transfer_bytes_total{SELECTED, direction="write"}[$__rate_interval])) or vector(0)',
                ),
                stat(
                    "Transfers that fail",
                    "Share of the transfers.",
                    "percentunit",
                    fraction(_FAILED.replace(" by (direction)", ""), _ENDED.replace(" by (direction)", "")),
                    steps={
                        round(1 - config.ALERTS.transfer_objective, 9): config.ATTENTION,
                        config.ALERTS.transfer_failure_ratio: config.BAD,
                    },
                    runbooks=["NixlTransferFailureRatioHigh", "NixlTransferErrorBudgetBurn"],
                    links=[failed],
                ),
                stat(
                    "Transfer p99",
                    "99 of 100 transfers took less.",
                    "s",
                    quantiles(_DONE)[0].expr,
                    steps={config.ALERTS.transfer_slow_seconds: config.ATTENTION},
                    runbooks=["NixlTransferSlow"],
                    links=[slow],
                ),
                stat(
                    "In flight",
                    "Transfers that are posted and not yet seen done.",
                    "short",
                    "sum(nixl_transfers_in_flight{SELECTED})",
                ),
                stat(
                    "Oldest in flight",
                    "For how long the oldest transfer in flight has been so; 0 while none is.",
                    "s",
                    f"max({oldest})",
                    steps={config.ALERTS.stalled_age.seconds: config.BAD},
                    runbooks=["NixlTransferStalled"],
                ),
            ],
            "Transfers: rate, errors, duration": [
                timeseries(
                    "Transfers, by direction",
                    "Transfers that ended, well or not. One is for one request and one remote rank.",
                    "ops",
                    Query(_ENDED, "{{direction}}"),
                    stack=True,
                    colours=config.OF_DIRECTION,
                ),
                timeseries(
                    "Bytes, by direction",
                    "As NIXL counts them.",
                    "Bps",
                    Query(
                        "sum by (direction) (rate(nixl_transfer_bytes_total{SELECTED}[$__rate_interval]))",
                        "{{direction}}",
                    ),
                    stack=True,
                    colours=config.OF_DIRECTION,
                ),
                timeseries(
                    "Share that fails",
                    "0 while there are no transfers.",
                    "percentunit",
                    Query(fraction(_FAILED, _ENDED), "{{direction}}"),
                    limit=config.ALERTS.transfer_failure_ratio,
                    colours=config.OF_DIRECTION,
                    runbooks=["NixlTransferFailureRatioHigh", "NixlTransferErrorBudgetBurn"],
                    links=[failed],
                ),
                timeseries(
                    "Failures, by cause",
                    "`transfer_setup`: NIXL would not prepare or post it; `transfer_failed`: it was posted and failed.",
                    "ops",
                    Query(
                        "sum by (error_type) "
                        '(rate(nixl_transfer_duration_seconds_count{SELECTED, error_type!=""}[$__rate_interval]))',
                        "{{error_type}}",
                    ),
                    links=[failed],
                ),
                timeseries(
                    "Duration of transfers that succeed",
                    "From post to the poll that saw it done.",
                    "s",
                    *quantiles(_DONE, "{{direction}}", "direction"),
                    limit=config.ALERTS.transfer_slow_seconds,
                    colours=config.OF_DIRECTION,
                    runbooks=["NixlTransferSlow"],
                    links=[slow],
                ),
                heatmap("Durations", "Transfers that succeed, both directions.", "s", _DONE),
            ],
            "What a transfer is made of": [
                timeseries(
                    "Observation delay",
                    "By so much at most a duration may be too long: vLLM looks once per engine step. Durations that "
                    "are hardly longer say more of the engine than of the network.",
                    "s",
                    *quantiles(
                        "nixl_transfer_observation_delay_seconds_bucket{SELECTED}", "{{direction}}", "direction"
                    ),
                    colours=config.OF_DIRECTION,
                    span=6,
                ),
                timeseries(
                    "Descriptors per transfer",
                    "After NIXL merged neighbours. Many small ones are slow: KV that lies scattered.",
                    "short",
                    _per("nixl_transfer_descriptors_total", "nixl_transfers_posted_total"),
                    colours=config.OF_DIRECTION,
                    span=6,
                ),
                timeseries(
                    "Blocks per transfer",
                    "Kernel blocks, over all KV cache groups.",
                    "short",
                    _per("nixl_transfer_blocks_total", "nixl_transfers_posted_total"),
                    colours=config.OF_DIRECTION,
                    span=6,
                ),
                timeseries(
                    "Bytes per block",
                    "The block size, as it is on the wire.",
                    "bytes",
                    _per("nixl_transfer_bytes_total", "nixl_transfer_blocks_total"),
                    colours=config.OF_DIRECTION,
                    span=6,
                ),
            ],
            "In flight": [
                timeseries(
                    "Transfers in flight",
                    "Posted and not yet seen done or failed.",
                    "short",
                    Query("sum by (direction) (nixl_transfers_in_flight{SELECTED})", "{{direction}}"),
                    colours=config.OF_DIRECTION,
                    runbooks=["NixlTransferStalled"],
                ),
                timeseries(
                    "Age of the oldest, by instance",
                    "0 while none is in flight. One that only grows hangs.",
                    "s",
                    Query(f"max by (instance) ({oldest})", "{{instance}}"),
                    limit=config.ALERTS.stalled_age.seconds,
                    many=True,
                    runbooks=["NixlTransferStalled"],
                ),
                timeseries(
                    "Posted and ended",
                    "The two lines part where transfers pile up.",
                    "ops",
                    Query("sum(rate(nixl_transfers_posted_total{SELECTED}[$__rate_interval]))", "posted"),
                    Query(_ENDED.replace(" by (direction)", ""), "ended"),
                ),
            ],
            "Between whom": [
                table(
                    "Bytes a second, between each pair",
                    "Columns are the instances that move KV: decode in pull, prefill in push. Rows are their peers, by "
                    "the address of their handshake listener.",
                    """
                    label_join(
                      sum by (instance, peer) (rate(nixl_peer_transfer_bytes_total{SELECTED}[$__rate_interval])),
                      "order", " ", "peer", "instance"
                    )
                    """,
                    unit="Bps",
                    steps=matrix(rows="peer", columns="instance", cells="Value", title="Peer"),
                    columns={
                        "/.*/": {
                            "color": {"mode": "continuous-blues"},
                            "custom.cellOptions": {"type": "color-background", "mode": "basic"},
                            "custom.minWidth": 130,
                        },
                        "Peer": {"custom.cellOptions": {"type": "auto"}, "custom.width": 200},
                    },
                    none="-",
                    span=10,
                    height=9,
                ),
                table(
                    "Slowest peers",
                    "Bandwidth is a lower bound: bytes by the time of the transfers, observation delay included. "
                    "A peer whose transfers all fail has none and comes first.",
                    "sum by (instance, peer) (rate(nixl_peer_transfer_bytes_total{SELECTED}[$__rate_interval]))"
                    " / (sum by (instance, peer) (rate(nixl_peer_transfer_seconds_total{SELECTED}[$__rate_interval])) > 0)",
                    "sum by (instance, peer) (rate(nixl_peer_transfers_total{SELECTED}[$__rate_interval]))",
                    'sum by (instance, peer) (rate(nixl_peer_transfers_total{SELECTED, error_type!=""}[$__rate_interval]))',
                    "time() - max by (instance, peer) (nixl_peer_last_success_timestamp_seconds{SELECTED} > 0)",
                    steps=[
                        merge(),
                        organize(
                            peer="Peer",
                            instance="Instance",
                            **{
                                "Value #A": "Bandwidth",
                                "Value #B": "Transfers",
                                "Value #C": "Failures",
                                "Value #D": "Last success",
                            },
                            hidden=["Time"],
                        ),
                    ],
                    columns={
                        "Bandwidth": {"unit": "Bps"},
                        "Transfers": {"unit": "ops"},
                        "Failures": {"unit": "ops", "noValue": "0"},
                        "Last success": {"unit": "s"},
                    },
                    sort="Bandwidth",
                    none="-",
                    span=14,
                    height=9,
                ),
            ],
            "What requests wait for, on the decode side": [
                timeseries(
                    "Waits, by outcome",
                    "Requests that waited for remote KV. Each rank counts its own.",
                    "ops",
                    Query(
                        "sum by (outcome) (rate(nixl_receive_wait_seconds_count{SELECTED}[$__rate_interval]))",
                        "{{outcome}}",
                    ),
                    stack=True,
                    colours=config.OF_OUTCOME,
                    links=[traces("Failed receives in traces", '{ name = "nixl.receive" && status = error }')],
                ),
                timeseries(
                    "Wait for KV",
                    "From the step that asked for it to the step that had it: handshake, queue and transfer together.",
                    "s",
                    *quantiles('nixl_receive_wait_seconds_bucket{SELECTED, outcome="received"}'),
                ),
                heatmap(
                    "Waits",
                    "Requests that got their KV.",
                    "s",
                    'nixl_receive_wait_seconds_bucket{SELECTED, outcome="received"}',
                ),
            ],
            "vLLM's own metrics, stock instances too": [
                timeseries(
                    "Time of a transfer",
                    "NIXL's, which ends at the poll that saw the transfer done.",
                    "s",
                    *quantiles("vllm:nixl_xfer_time_seconds_bucket{SELECTED}"),
                    span=6,
                ),
                timeseries(
                    "Time to post",
                    "Time that posting took inside NIXL, on the engine's thread.",
                    "s",
                    *quantiles("vllm:nixl_post_time_seconds_bucket{SELECTED}"),
                    span=6,
                ),
                timeseries(
                    "Descriptors",
                    "Of a transfer, after merging.",
                    "short",
                    *quantiles("vllm:nixl_num_descriptors_bucket{SELECTED}"),
                    span=6,
                ),
                heatmap(
                    "Bytes of a transfer",
                    "How large transfers are.",
                    "bytes",
                    "vllm:nixl_bytes_transferred_bucket{SELECTED}",
                    span=6,
                ),
            ],
            "About": [
                about(
                    """
                    Only the side that moves the KV measures it: decode in pull (READ), prefill in push (WRITE).
                    NIXL times a handle, which is one request and one remote rank, and not a block.
                    Its end is seen when vLLM polls, once per engine step: a busy engine makes transfers look longer.

                    Dashed lines are medians; a red dashed line is where an alert begins.
                    """
                )
            ],
        },
    )
