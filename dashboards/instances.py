# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Who is there: every engine with a NIXL connector, stock ones too."""

from dashboards import config
from dashboards.house import Panel, coloured_text, organize, table


def instances() -> list[Panel]:
    """The row with one line for each engine."""
    return [
        table(
            "Instances",
            "One row for each engine. Connector is its version, hash the beginning of the compatibility hash. Stock "
            "instances tell neither their mode nor their versions.",
            """
            label_replace(
              group by (instance, engine, model_name, kv_role, transfer_mode, connector_version, vllm_version,
                        nixl_version, compat_hash, handshake_enforced)
                (nixl_connector_info{SELECTED}),
              "hash", "$1", "compat_hash", "(.{12}).*"
            )
            or label_replace(
              group by (instance, engine, model_name) (vllm:nixl_bytes_transferred_count{SELECTED, transfer_mode=""}),
              "transfer_mode", "stock", "", ""
            )
            """,
            steps=[
                organize(
                    instance="Instance",
                    engine="Engine",
                    model_name="Model",
                    kv_role="Role",
                    transfer_mode="Mode",
                    connector_version="Connector",
                    vllm_version="vLLM",
                    nixl_version="NIXL",
                    hash="Hash",
                    handshake_enforced="Enforced",
                    hidden=["Time", "Value", "compat_hash"],
                ),
            ],
            columns={
                "Instance": {"custom.width": 170},
                "Engine": {"custom.width": 70},
                "Mode": {"custom.width": 80},
                "Model": {"custom.width": 250},
                "Enforced": coloured_text({"true": "text", "false": config.ATTENTION}),
            },
            sort="Instance",
            none="",
            height=10,
            runbooks=["NixlTransferModesMixed", "NixlConnectorVersionsMixed", "NixlEnforcementOff"],
        ),
    ]
