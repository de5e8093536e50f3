# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Prefill by decode: how much KV moves between each pair, and which peers are slow."""

from dashboards.house import Panel, matrix, merge, organize, table


def between_whom() -> list[Panel]:
    """The row with the pairs."""
    return [
        table(
            "Bytes a second, between each pair",
            "Columns are the instances that move KV: decode in pull, prefill in push. Rows are their peers, by the "
            "address of their handshake listener.",
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
                "Peer": {"custom.cellOptions": {"type": "auto"}, "custom.width": 150},
            },
            none="-",
            span=11,
        ),
        table(
            "Slowest peers",
            "Bandwidth is a lower bound: bytes by the time of the transfers, observation delay included. A peer whose "
            "transfers all fail has none, and comes first.",
            """
            sum by (instance, peer) (rate(nixl_peer_transfer_bytes_total{SELECTED}[$__rate_interval]))
            / (sum by (instance, peer) (rate(nixl_peer_transfer_seconds_total{SELECTED}[$__rate_interval])) > 0)
            """,
            "sum by (instance, peer) (rate(nixl_peer_transfers_total{SELECTED}[$__rate_interval]))",
            """
            sum by (instance, peer) (rate(nixl_peer_transfers_total{SELECTED, error_type!=""}[$__rate_interval]))
            or 0 * sum by (instance, peer) (rate(nixl_peer_transfers_total{SELECTED}[$__rate_interval]))
            """,
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
                "Peer": {"custom.width": 150},
                "Instance": {"custom.width": 150},
                "Bandwidth": {"unit": "Bps"},
                "Transfers": {"unit": "ops"},
                "Failures": {"unit": "ops"},
                "Last success": {"unit": "s", "decimals": 0},
            },
            sort="Bandwidth",
            none="-",
            span=13,
        ),
    ]
