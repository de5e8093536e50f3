# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Who can talk to whom, and what becomes of handshakes."""

from typing import Final

from dashboards import config, house
from dashboards.compatibility import fit
from dashboards.house import Panel, heatmap, organize, table, timeseries, traces
from dashboards.queries import Query, fraction, rare_quantiles, rates, total

_ALL: Final = "nixl_handshake_duration_seconds_count{SELECTED}"
_GOOD: Final = 'nixl_handshake_duration_seconds_count{SELECTED, error_type=""}'
_SLOW: Final = config.ALERTS.handshake_slow_quantile
_FAILED: Final = 'nixl_handshake_duration_seconds_count{SELECTED, error_type!=""}'


def board() -> house.Board:
    """The board for a fleet whose halves may not fit."""
    return house.board(
        config.HANDSHAKES,
        "Handshakes and compatibility",
        "Which instances can exchange KV, what differs where they cannot, and what becomes of handshakes.",
        {
            "Do the instances fit": fit(),
            "Handshakes: rate, errors, duration": _handshakes(),
            "The fleet over time": _over_time(),
        },
        about="""
            Since connector version 7 the side that begins a handshake refuses a peer whose compatibility hash differs,
            before any data moves; the client gets an error. The first table says what differs.
            `nixl-telemetry check HOST:PORT HOST:PORT` says the same without traffic, for stock instances too.

            Not hashed, and so not here: tensor-parallel size, block size and the model's revision.
            A dashed line is a median; a red dashed line is where an alert begins.
            """,
    )


def _handshakes() -> list[Panel]:
    failed = traces("Failed handshakes in traces", '{ name = "nixl.handshake" && status = error }')
    return [
        timeseries(
            "Handshakes, by outcome",
            "A pair has one when it first meets; one that does not fit has one with each request.",
            "ops",
            Query(total(_GOOD), "succeeded"),
            Query(total(_FAILED), "failed"),
            stack=True,
            colours=config.OF_OUTCOME,
            span=6,
            height=9,
        ),
        timeseries(
            "Share that fails",
            "0 while there are no handshakes.",
            "percentunit",
            Query(fraction(total(_FAILED), total(_ALL)), "failed"),
            limit="handshake_failure_warning",
            colours=config.OF_OUTCOME,
            span=6,
            height=9,
            runbooks=["NixlHandshakeFailureRatioHigh"],
            links=[failed],
        ),
        timeseries(
            "Failures, by cause",
            "`unreachable`: nobody listens there; `timeout`: somebody does, and did not answer; `compat_mismatch`: "
            "the hash differs.",
            "ops",
            rates(_FAILED, by="error_type"),
            colours=config.of_values("nixl_handshake_duration_seconds", "error_type"),
            many=True,
            span=12,
            height=9,
            runbooks=["NixlHandshakeFailureRatioHigh"],
            links=[failed],
        ),
        timeseries(
            "Duration of handshakes that succeed",
            "From the first query to the last registered rank; 0 while there are none.",
            "s",
            *rare_quantiles('nixl_handshake_duration_seconds_bucket{SELECTED, error_type=""}', other=_SLOW),
            limit="handshake_slow_seconds",
            runbooks=["NixlHandshakeSlow"],
            links=[traces("Slow handshakes in traces", '{ name = "nixl.handshake" && duration > 1s }')],
        ),
        timeseries(
            "Duration of handshakes that fail",
            "vLLM waits 5 s for an answer. 0 while there are none.",
            "s",
            *rare_quantiles('nixl_handshake_duration_seconds_bucket{SELECTED, error_type!=""}', other=_SLOW),
            links=[failed],
        ),
        heatmap(
            "Durations",
            "All handshakes, those that failed too.",
            "s",
            "nixl_handshake_duration_seconds_bucket{SELECTED}",
        ),
        table(
            "Failures, by peer",
            "Handshakes that failed in the time shown, the first with a peer left out: its series began with it.",
            """
            sum by (instance, peer, error_type)
              (increase(nixl_peer_handshakes_total{SELECTED, error_type!=""}[$__range]))
            or on () label_replace(vector(0), "peer", "none", "", "")
            """,
            steps=[
                organize(instance="Instance", peer="Peer", error_type="Cause", Value="After the first", hidden=["Time"])
            ],
            columns={"After the first": {"decimals": 0}},
            sort="After the first",
            descending=True,
            none="",
            span=12,
        ),
        timeseries(
            "Requests to the handshake listeners, by result",
            "Seen by the side that is asked. What is not served comes from something that is no peer: a scanner, a "
            "health check, a proxy.",
            "ops",
            rates("nixl_handshake_requests_total{SELECTED}", by="result"),
            colours=config.OF_RESULT,
            span=12,
            runbooks=["NixlListenerRefusing"],
        ),
    ]


def _over_time() -> list[Panel]:
    return [
        timeseries(
            "Versions",
            "Engines by vLLM's version and that of its connector. A rolling upgrade has two for a while.",
            "short",
            Query(
                "count by (vllm_version, connector_version) (nixl_connector_info{SELECTED})",
                "vLLM {{vllm_version}}, connector {{connector_version}}",
            ),
            stack=True,
            runbooks=["NixlConnectorVersionsMixed"],
        ),
        timeseries(
            "Compatibility hashes",
            "Engines by model and hash (its first 12 digits).",
            "short",
            Query(
                """
                count by (model_name, hash)
                  (label_replace(nixl_connector_info{SELECTED}, "hash", "$1", "compat_hash", "(.{12}).*"))
                """,
                "{{hash}} {{model_name}}",
            ),
            stack=True,
            runbooks=["NixlCompatHashesMixed"],
        ),
        timeseries(
            "Transfer modes",
            "Engines by mode. Within a model there should be one.",
            "short",
            Query("count by (transfer_mode) (nixl_connector_info{SELECTED})", "{{transfer_mode}}"),
            stack=True,
            colours=config.OF_MODE,
            runbooks=["NixlTransferModesMixed"],
        ),
        timeseries(
            "Let through anyway, by factor",
            "Handshakes that enforcement would have refused.",
            "ops",
            rates("nixl_handshake_bypassed_total{SELECTED}", by="factor"),
            colours=config.of_values("nixl_handshake_bypassed_total", "factor"),
            many=True,
            span=12,
            height=12,
            runbooks=["NixlEnforcementOff"],
        ),
        timeseries(
            "Mode conflicts, by source",
            "`params`: of a request; `operation`: what reached NIXL; `class`: what a class declares.",
            "ops",
            rates("nixl_mode_conflicts_total{SELECTED}", by="source"),
            colours=config.of_values("nixl_mode_conflicts_total", "source"),
            span=12,
            height=12,
            runbooks=["NixlModeConflict"],
        ),
    ]
