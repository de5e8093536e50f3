# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What a transfer is made of: delays, descriptors, blocks and bytes; by the suite, and by vLLM itself."""

from typing import Final

from dashboards import config
from dashboards.house import Panel, heatmap, timeseries
from dashboards.queries import Query, quantiles, rates

_SUCCEEDED: Final = 'nixl_transfer_duration_seconds_count{SELECTED, error_type=""}'
"""Of those that failed, nothing is counted that was moved."""


def made_of() -> list[Panel]:
    """The row with the suite's own metrics."""
    return [
        timeseries(
            "Observation delay",
            "By so much at most a duration may be too long: vLLM looks once per engine step. Durations that are hardly "
            "longer say more of the engine than of the network.",
            "s",
            *quantiles("nixl_transfer_observation_delay_seconds_bucket{SELECTED}", "{{direction}}", by="direction"),
            colours=config.OF_DIRECTION,
            span=6,
        ),
        timeseries(
            "Descriptors per transfer",
            "After NIXL merged neighbours. Many small ones are slow: the KV lies scattered.",
            "short",
            _per("nixl_transfer_descriptors_total{SELECTED}", _SUCCEEDED),
            colours=config.OF_DIRECTION,
            span=6,
        ),
        timeseries(
            "Blocks per transfer",
            "Kernel blocks, over all KV cache groups.",
            "short",
            _per("nixl_transfer_blocks_total{SELECTED}", _SUCCEEDED),
            colours=config.OF_DIRECTION,
            span=6,
        ),
        timeseries(
            "Bytes per block",
            "The block size, as it is on the wire.",
            "bytes",
            _per("nixl_transfer_bytes_total{SELECTED}", "nixl_transfer_blocks_total{SELECTED}"),
            colours=config.OF_DIRECTION,
            span=6,
        ),
    ]


def vllm() -> list[Panel]:
    """The row with metrics that every vLLM with a NIXL connector has."""
    return [
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
            "Descriptors of a transfer",
            "After merging.",
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
    ]


def _per(quantity: str, whole: str) -> Query:
    """How much of one counter there is for one of another, while there is any; both with their matchers."""
    some, all_ = (rates(counter, by="direction") for counter in (quantity, whole))
    return Query(f"{some.expr} / ({all_.expr} > 0)", some.legend)
