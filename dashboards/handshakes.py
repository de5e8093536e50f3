# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Who can talk to whom: the factors of all instances, and what becomes of handshakes."""

from typing import Final

from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards import config
from dashboards.house import (
    Query,
    about,
    board as make_board,
    fraction,
    heatmap,
    matrix,
    organize,
    quantiles,
    stat,
    table,
    timeseries,
    traces,
    transform,
)

# 0 for a factor that differs between the instances of a model, 1 for one that does not. It differs if there are several
# values, or if some instances have none: what is hashed changes with the connector version.
_SAME: Final = """
    (
      count by (model_name, factor)
        (group by (model_name, factor, value) (nixl_compat_factor_info{SELECTED})) == bool 1
    )
    * (
      count by (model_name, factor)
        (group by (model_name, factor, instance) (nixl_compat_factor_info{SELECTED}))
      == bool on (model_name) group_left ()
      count by (model_name)
        (group by (model_name, instance) (nixl_compat_factor_info{SELECTED}))
    )
"""

# The verdict becomes the label `same`, by which Grafana sorts and colours: a cell can only be coloured by what is in it.
_CELLS: Final = f"""
label_join(
  label_join(
    count_values by (model_name, factor, instance, value) ("same",
      group by (model_name, factor, instance, value) (nixl_compat_factor_info{{SELECTED}})
      * on (model_name, factor) group_left () (
{_SAME.strip(chr(10))}
      )
    ),
    "cell", " ", "same", "value"
  ),
  "order", " ", "same", "factor", "instance"
)
"""

_VALUES: Final = f"""
label_join(
  label_join(
    count by (model_name, factor, value)
      (group by (model_name, factor, instance, value) (nixl_compat_factor_info{{SELECTED}}))
    * on (model_name, factor) group_left (same) count_values by (model_name, factor) ("same",
{_SAME.strip(chr(10))}
    ) ^ 0,
    "cell", " ", "same", "value"
  ),
  "order", " ", "same", "model_name", "factor", "value"
)
"""

_MARKED: Final = [
    {"type": "regex", "options": {"pattern": "/^0 (.*)$/", "result": {"text": "≠ $1", "color": config.ATTENTION}}},
    {"type": "regex", "options": {"pattern": "/^1 (.*)$/", "result": {"text": "$1", "color": "transparent"}}},
    {"type": "special", "options": {"match": "null", "result": {"text": "not hashed", "color": "transparent"}}},
]
"""Cells begin with 0 where they differ and with 1 where they do not."""
_COLOURED: Final = {"mappings": _MARKED, "custom.cellOptions": {"type": "color-background", "mode": "basic"}}

_FAILED = 'sum(rate(nixl_handshake_duration_seconds_count{SELECTED, error_type!=""}[$__rate_interval]))'
_ALL = "sum(rate(nixl_handshake_duration_seconds_count{SELECTED}[$__rate_interval]))"


def board() -> Dashboard:
    """The board for a fleet whose halves may not fit."""
    failed = traces("Failed handshakes in traces", '{ name = "nixl.handshake" && status = error }')
    return make_board(
        config.HANDSHAKES,
        "Handshakes and compatibility",
        "Which instances can exchange KV, what differs where they cannot, and what becomes of handshakes.",
        {
            "Do the instances fit": [
                stat(
                    "Hashes of one model",
                    "The most different compatibility hashes among instances that serve the same model. "
                    "Instances with different hashes refuse each other.",
                    "short",
                    "max(count by (model_name) (count by (model_name, compat_hash) (nixl_connector_info{SELECTED})))",
                    steps={2: config.ATTENTION},
                    runbooks=["NixlCompatHashesMixed"],
                ),
                stat(
                    "Factors that differ",
                    "Factors of the hash that are not the same on all instances of a model; the table names them.",
                    "short",
                    f"count(count by (factor) (\n{_SAME.strip(chr(10))} == 0\n)) or vector(0)",
                    steps={1: config.ATTENTION},
                    runbooks=["NixlCompatMismatch"],
                ),
                stat(
                    "Rejected: incompatible",
                    "Handshakes that were refused in the time shown because the hash differs.",
                    "short",
                    "ceil(sum(increase(nixl_handshake_rejections_total{SELECTED}[$__range])))",
                    steps={1: config.BAD},
                    whole=True,
                    runbooks=["NixlCompatMismatch"],
                    links=[failed],
                ),
                stat(
                    "Let through anyway",
                    "Handshakes in the time shown whose hash differs and that went on, because enforcement is off: "
                    "their KV may be garbage.",
                    "short",
                    "ceil(sum(increase(nixl_handshake_bypassed_total{SELECTED}[$__range])))",
                    steps={1: config.BAD},
                    whole=True,
                    runbooks=["NixlEnforcementOff"],
                ),
                stat(
                    "Enforcement off",
                    "Engines that do not refuse a peer whose hash differs.",
                    "short",
                    'count(nixl_connector_info{SELECTED, handshake_enforced="false"}) or vector(0)',
                    steps={1: config.ATTENTION},
                    runbooks=["NixlEnforcementOff"],
                ),
                stat(
                    "Mode conflicts",
                    "Times in the time shown that something of the other transfer mode was met: a request of push in a "
                    "pull instance, or the reverse.",
                    "short",
                    "ceil(sum(increase(nixl_mode_conflicts_total{SELECTED}[$__range])))",
                    steps={1: config.BAD},
                    whole=True,
                    runbooks=["NixlModeConflict", "NixlTransferModesMixed"],
                ),
                table(
                    "Factors of all instances, side by side",
                    "One row for each factor of the compatibility hash, one column for each instance. What differs "
                    "between instances of a model comes first and is marked with ≠. Stock instances tell no factors.",
                    _CELLS,
                    steps=matrix(rows="factor", columns="instance", cells="cell", title="Factor"),
                    columns={"/.*/": {**_COLOURED, "custom.minWidth": 130}, "Factor": {"custom.width": 200}},
                    height=12,
                    runbooks=["NixlCompatMismatch", "NixlTransferModeMismatch", "NixlConnectorVersionMismatch"],
                ),
                table(
                    "Values of each factor",
                    "The same for a fleet with too many instances for columns: how many have which value.",
                    _VALUES,
                    steps=[
                        transform("sortBy", fields={}, sort=[{"field": "order"}]),
                        organize(
                            factor="Factor",
                            cell="Value",
                            Value="Instances",
                            model_name="Model",
                            hidden=["Time", "order", "same", "value"],
                        ),
                    ],
                    columns={"Value": _COLOURED, "Factor": {"custom.width": 200}, "Instances": {"custom.width": 90}},
                    span=16,
                ),
                timeseries(
                    "Rejections, by factor",
                    "By the factor that differs, of several the first. `unknown` is a stock peer whose digest could "
                    "not be explained. Seen by the side that began the handshake.",
                    "ops",
                    Query(
                        "sum by (factor) (rate(nixl_handshake_rejections_total{SELECTED}[$__rate_interval]))",
                        "{{factor}}",
                    ),
                    many=True,
                    runbooks=["NixlCompatMismatch", "NixlTransferModeMismatch", "NixlConnectorVersionMismatch"],
                    links=[failed],
                ),
            ],
            "Handshakes: rate, errors, duration": [
                timeseries(
                    "Handshakes, by outcome",
                    "A pair has one when it first meets; one that does not fit has one with each request.",
                    "ops",
                    Query(
                        'sum(rate(nixl_handshake_duration_seconds_count{SELECTED, error_type=""}[$__rate_interval]))',
                        "succeeded",
                    ),
                    Query(_FAILED, "failed"),
                    stack=True,
                    colours=config.OF_OUTCOME,
                    span=6,
                ),
                timeseries(
                    "Share that fails",
                    "0 while there are no handshakes.",
                    "percentunit",
                    Query(fraction(_FAILED, _ALL), "failed"),
                    limit=config.ALERTS.handshake_failure_warning,
                    colours=config.OF_OUTCOME,
                    span=6,
                    runbooks=["NixlHandshakeFailureRatioHigh"],
                ),
                timeseries(
                    "Failures, by cause",
                    "`unreachable`: nobody listens there; `timeout`: somebody does, and did not answer; "
                    "`compat_mismatch`: see above.",
                    "ops",
                    Query(
                        "sum by (error_type) "
                        '(rate(nixl_handshake_duration_seconds_count{SELECTED, error_type!=""}[$__rate_interval]))',
                        "{{error_type}}",
                    ),
                    many=True,
                    span=12,
                    links=[failed],
                ),
                timeseries(
                    "Duration of handshakes that succeed",
                    "From the first query to the last registered rank.",
                    "s",
                    *quantiles('nixl_handshake_duration_seconds_bucket{SELECTED, error_type=""}', high=0.9),
                    limit=config.ALERTS.handshake_slow_seconds,
                    runbooks=["NixlHandshakeSlow"],
                    links=[traces("Slow handshakes in traces", '{ name = "nixl.handshake" && duration > 1s }')],
                ),
                timeseries(
                    "Duration of handshakes that fail",
                    "vLLM waits 5 s for an answer.",
                    "s",
                    *quantiles('nixl_handshake_duration_seconds_bucket{SELECTED, error_type!=""}', high=0.9),
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
                    "Handshakes that failed in the time shown. The first with a peer cannot be counted: its series "
                    "began with it.",
                    """
                    sum by (instance, peer, error_type)
                      (increase(nixl_peer_handshakes_total{SELECTED, error_type!=""}[$__range]))
                    or on () label_replace(vector(0), "peer", "none", "", "")
                    """,
                    unit="short",
                    steps=[
                        organize(
                            instance="Instance", peer="Peer", error_type="Cause", Value="Failures", hidden=["Time"]
                        )
                    ],
                    columns={"Failures": {"decimals": 0}},
                    sort="Failures",
                    descending=True,
                    none="",
                    span=12,
                ),
                timeseries(
                    "Requests to the handshake listeners, by result",
                    "Seen by the side that is asked. What is not served comes from something that is no peer: "
                    "a scanner, a health check, a proxy.",
                    "ops",
                    Query(
                        "sum by (result) (rate(nixl_handshake_requests_total{SELECTED}[$__rate_interval]))",
                        "{{result}}",
                    ),
                    colours=config.OF_OUTCOME,
                    span=12,
                    runbooks=["NixlListenerRefusing"],
                ),
            ],
            "The fleet over time": [
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
                        "{{model_name}} {{hash}}",
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
                    Query(
                        "sum by (factor) (rate(nixl_handshake_bypassed_total{SELECTED}[$__rate_interval]))",
                        "{{factor}}",
                    ),
                    many=True,
                    span=12,
                    runbooks=["NixlEnforcementOff"],
                ),
                timeseries(
                    "Mode conflicts, by source",
                    "`params`: of a request; `operation`: what reached NIXL; `class`: what a class declares.",
                    "ops",
                    Query(
                        "sum by (source) (rate(nixl_mode_conflicts_total{SELECTED}[$__rate_interval]))", "{{source}}"
                    ),
                    span=12,
                    runbooks=["NixlModeConflict"],
                ),
            ],
            "About": [
                about(
                    """
                    Since connector version 7 the side that begins a handshake refuses a peer whose compatibility hash
                    differs, before any data moves; the client gets an error. The first table says what differs.
                    `nixl-telemetry check HOST:PORT HOST:PORT` says the same without traffic, for stock instances too.

                    Not hashed, and so not here: tensor-parallel size, block size and the model's revision.
                    """
                )
            ],
        },
    )
