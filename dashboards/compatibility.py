# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether the instances of a model can exchange KV: their hashes and factors, side by side."""

from typing import Final

from dashboards import config
from dashboards.house import Panel, matrix, organize, stat, table, timeseries, traces, transform
from dashboards.queries import events, rates

_FACTORS: Final = "nixl_compat_factor_info{SELECTED}"

# 1 for a factor that is the same on all instances of a model, 0 for one that differs: there are several values, or some
# instances have none, for what is hashed changes with the connector version.
_SAME: Final = f"""(
        count by (model_name, factor) (count by (model_name, factor, value) ({_FACTORS})) == bool 1
      ) * (
        count by (model_name, factor) (count by (model_name, factor, instance) ({_FACTORS}))
        == bool on (model_name) group_left ()
        count by (model_name) (count by (model_name, instance) ({_FACTORS}))
      )"""

# What becomes a label, here `same`, can be sorted and coloured by: Grafana colours a cell only by what is in it.
_CELLS: Final = f"""
label_join(
  label_join(
    count_values by (model_name, factor, instance, value) ("same",
      group by (model_name, factor, instance, value) ({_FACTORS})
      * on (model_name, factor) group_left () ({_SAME})
    ),
    "cell", " ", "same", "value"
  ),
  "order", " ", "same", "factor", "instance"
)
"""
_VALUES: Final = f"""
label_join(
  label_join(
    count by (model_name, factor, value) (group by (model_name, factor, value, instance) ({_FACTORS}))
    * on (model_name, factor) group_left (same)
    count_values by (model_name, factor) ("same", {_SAME}),
    "cell", " ", "same", "value"
  ),
  "order", " ", "same", "model_name", "factor", "value"
)
"""

_MARKED: Final = {
    "custom.cellOptions": {"type": "color-background", "mode": "basic"},
    "mappings": [
        {"type": "regex", "options": {"pattern": "/^0 (.*)$/", "result": {"text": "≠ $1", "color": config.ATTENTION}}},
        {"type": "regex", "options": {"pattern": "/^1 (.*)$/", "result": {"text": "$1", "color": "transparent"}}},
        {"type": "special", "options": {"match": "null", "result": {"text": "not hashed", "color": "transparent"}}},
    ],
}
"""Cells come with 0 in front where they differ, and with 1 where they do not."""


def fit() -> list[Panel]:
    """The row that says whether the instances fit, and what differs."""
    rejected = traces("Rejected handshakes in traces", '{ name = "nixl.handshake" && status = error }')
    return [
        stat(
            "Hashes of one model",
            "The most different compatibility hashes among instances that serve the same model. Instances with "
            "different hashes refuse each other.",
            "short",
            "max(count by (model_name) (count by (model_name, compat_hash) (nixl_connector_info{SELECTED})))",
            steps={2: config.ATTENTION},
            runbooks=["NixlCompatHashesMixed"],
        ),
        stat(
            "Factors that differ",
            "Factors of the hash that are not the same on all instances of a model; the table below names them.",
            "short",
            f"count(count by (factor) (({_SAME}) == 0)) or vector(0)",
            steps={1: config.ATTENTION},
            runbooks=["NixlCompatMismatch"],
        ),
        stat(
            "Rejected: incompatible",
            "Handshakes that were refused in the time shown because the hash differs.",
            "short",
            events("nixl_handshake_rejections_total{SELECTED}"),
            steps={1: config.BAD},
            whole=True,
            runbooks=["NixlCompatMismatch"],
            links=[rejected],
        ),
        stat(
            "Let through anyway",
            "Handshakes in the time shown that went on though the hash differs, because enforcement is off: the KV may "
            "be garbage.",
            "short",
            events("nixl_handshake_bypassed_total{SELECTED}"),
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
            "Times in the time shown that something of the other transfer mode was met: a request of push in a pull "
            "instance, or the reverse.",
            "short",
            events("nixl_mode_conflicts_total{SELECTED}"),
            steps={1: config.BAD},
            whole=True,
            runbooks=["NixlModeConflict", "NixlTransferModesMixed"],
        ),
        table(
            "Factors of all instances, side by side",
            "One row for each factor of the compatibility hash, one column for each instance. What differs between "
            "the instances of a model comes first, marked with ≠; `not hashed` is what an instance's version does not "
            "know. Stock instances tell no factors.",
            _CELLS,
            steps=matrix(rows="factor", columns="instance", cells="cell", title="Factor"),
            columns={"/.*/": {**_MARKED, "custom.minWidth": 130}, "Factor": {"custom.width": 200}},
            height=15,
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
            columns={"Value": _MARKED, "Factor": {"custom.width": 200}, "Instances": {"custom.width": 90}},
            span=12,
            height=10,
        ),
        timeseries(
            "Rejections, by factor",
            "By the factor that differs, of several the first. `unknown` is a stock peer whose digest could not be "
            "explained. Seen by the side that began the handshake.",
            "ops",
            rates("nixl_handshake_rejections_total{SELECTED}", by="factor"),
            colours=config.of_values("nixl_handshake_rejections_total", "factor"),
            many=True,
            span=12,
            height=10,
            runbooks=["NixlCompatMismatch", "NixlTransferModeMismatch", "NixlConnectorVersionMismatch"],
            links=[rejected],
        ),
    ]
