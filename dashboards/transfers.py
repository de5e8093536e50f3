# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""READ and WRITE: rates, errors, durations, shapes, and who moves KV to whom."""

from typing import Final

from dashboards import config, house
from dashboards.house import Panel, heatmap, stat, timeseries, traces
from dashboards.peers import between_whom
from dashboards.queries import Query, age, fraction, p99, quantiles, rates, total
from dashboards.shapes import made_of, vllm

_ENDED: Final = "nixl_transfer_duration_seconds_count{SELECTED}"
_FAILED: Final = 'nixl_transfer_duration_seconds_count{SELECTED, error_type!=""}'
_DONE: Final = 'nixl_transfer_duration_seconds_bucket{SELECTED, error_type=""}'
_OLDEST: Final = "nixl_transfer_oldest_start_timestamp_seconds{SELECTED}"
_WAITS: Final = 'nixl_receive_wait_seconds_bucket{SELECTED, outcome="received"}'


def board() -> house.Board:
    """The board for KV that moves slowly, or not at all."""
    return house.board(
        config.TRANSFERS,
        "Transfers",
        "READ and WRITE of KV: rates, errors, durations, shapes, and between whom.",
        {
            "Now": _now(),
            "Transfers: rate, errors, duration": _transfers(),
            "Between whom": between_whom(),
            "In flight": _in_flight(),
            "What a transfer is made of": made_of(),
            "What requests wait for, on the decode side": _waits(),
            "vLLM's own metrics, stock instances too": vllm(),
        },
        about="""
            Only the side that moves the KV measures it: decode in pull (READ), prefill in push (WRITE).
            NIXL times a handle, which is one request and one remote rank, and not a block.
            Its end is seen when vLLM polls, once per engine step: a busy engine makes transfers look longer.

            A dashed line is a median; a red dashed line is where an alert begins.
            """,
    )


def _slow() -> house.Link:
    return traces("Slow transfers in traces", '{ name = "nixl.transfer" && duration > 1s }')


def _failed() -> house.Link:
    return traces("Failed transfers in traces", '{ name = "nixl.transfer" && status = error }')


def _now() -> list[Panel]:
    return [
        stat(
            "READ",
            "What decode instances read, in pull.",
            "Bps",
            total('nixl_transfer_bytes_total{SELECTED, direction="read"}') + " or vector(0)",
        ),
        stat(
            "WRITE",
            "What prefill instances write, in push.",
            "Bps",
            total('nixl_transfer_bytes_total{SELECTED, direction="write"}') + " or vector(0)",
        ),
        stat(
            "Transfers that fail",
            "Share of the transfers; orange is more than the objective allows.",
            "percentunit",
            fraction(total(_FAILED), total(_ENDED)),
            steps={
                "transfer_objective": config.ATTENTION,
                "transfer_failure_ratio": config.BAD,
            },
            runbooks=["NixlTransferFailureRatioHigh", "NixlTransferErrorBudgetBurn"],
            links=[_failed()],
        ),
        stat(
            "Transfer p99",
            "99 of 100 transfers took less.",
            "s",
            p99(_DONE),
            steps={"transfer_slow_seconds": config.ATTENTION},
            runbooks=["NixlTransferSlow"],
            links=[_slow()],
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
            f"max({age(_OLDEST, by='instance')})",
            steps={"stalled_age": config.BAD},
            runbooks=["NixlTransferStalled"],
        ),
    ]


def _transfers() -> list[Panel]:
    return [
        timeseries(
            "Transfers, by direction",
            "Transfers that ended, well or not. One is for one request and one remote rank.",
            "ops",
            rates(_ENDED, by="direction"),
            stack=True,
            colours=config.OF_DIRECTION,
            runbooks=["NixlDecodeWithoutTransfers"],
        ),
        timeseries(
            "Bytes, by direction",
            "As NIXL counts them.",
            "Bps",
            rates("nixl_transfer_bytes_total{SELECTED}", by="direction"),
            stack=True,
            colours=config.OF_DIRECTION,
        ),
        timeseries(
            "Share that fails, by direction",
            "0 while there are no transfers.",
            "percentunit",
            Query(fraction(rates(_FAILED, by="direction").expr, rates(_ENDED, by="direction").expr), "{{direction}}"),
            limit="transfer_failure_ratio",
            colours=config.OF_DIRECTION,
            runbooks=["NixlTransferFailureRatioHigh", "NixlTransferErrorBudgetBurn"],
            links=[_failed()],
        ),
        timeseries(
            "Failures, by cause",
            "`transfer_setup`: NIXL would not prepare or post it; `transfer_failed`: it was posted and failed.",
            "ops",
            rates(_FAILED, by="error_type"),
            colours=config.of_values("nixl_transfer_duration_seconds", "error_type"),
            runbooks=["NixlTransferFailureRatioHigh", "NixlTransferErrorBudgetBurn"],
            links=[_failed()],
        ),
        timeseries(
            "Duration of transfers that succeed",
            "From post to the poll that saw it done.",
            "s",
            *quantiles(_DONE, "{{direction}}", by="direction"),
            limit="transfer_slow_seconds",
            colours=config.OF_DIRECTION,
            runbooks=["NixlTransferSlow"],
            links=[_slow()],
        ),
        heatmap("Durations", "Transfers that succeed, both directions.", "s", _DONE),
    ]


def _in_flight() -> list[Panel]:
    return [
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
            Query(age(_OLDEST, by="instance"), "{{instance}}"),
            limit="stalled_age",
            many=True,
            runbooks=["NixlTransferStalled"],
        ),
        timeseries(
            "Posted and ended",
            "The two lines part where transfers pile up.",
            "ops",
            Query(total("nixl_transfers_posted_total{SELECTED}"), "posted"),
            Query(total(_ENDED), "ended"),
            colours={"posted": "blue", "ended": config.GOOD},
            runbooks=["NixlTransferStalled"],
        ),
    ]


def _waits() -> list[Panel]:
    return [
        timeseries(
            "Waits, by outcome",
            "Requests that waited for remote KV. Each rank counts its own.",
            "ops",
            rates("nixl_receive_wait_seconds_count{SELECTED}", by="outcome"),
            stack=True,
            colours=config.OF_OUTCOME,
            links=[traces("Failed receives in traces", '{ name = "nixl.receive" && status = error }')],
        ),
        timeseries(
            "Wait for KV",
            "From the step that asked for it to the step that had it: handshake, queue and transfer together.",
            "s",
            *quantiles(_WAITS),
            links=[traces("Slow receives in traces", '{ name = "nixl.receive" && duration > 1s }')],
        ),
        heatmap("Waits", "Requests that got their KV.", "s", _WAITS),
    ]
