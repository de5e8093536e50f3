# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Queries that several alerts repeat, as recording rules named ``level:metric:operations``."""

from collections.abc import Mapping

from nixl_telemetry.mixin.alert import Recording
from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.duration import Duration


def events(metric: str, c: MixinConfig) -> str:
    """Events of the last window, by series that had any, as the inner part of an aggregation.

    A counter that is new to Prometheus counts from 0: what happened before the first scrape of an instance is no rise.
    """
    return f"""
  increase({metric}[{c.event_window}]) > 0
  or
  (
    {metric} > 0
    unless
    last_over_time({metric}[{c.history}] offset {c.event_window})
  )
"""


def rejections(c: MixinConfig) -> str:
    """Name of the recorded rejections of handshakes."""
    return f"{_level(c, 'factor')}:nixl_handshake_rejections:increase{c.event_window}"


def handshakes(c: MixinConfig) -> str:
    """Name of the recorded number of handshakes."""
    return f"{_level(c)}:nixl_handshakes:increase{c.handshake_window}"


def handshake_failures(c: MixinConfig) -> str:
    """Name of the recorded share of handshakes that failed."""
    return f"{_level(c)}:nixl_handshake_failures_per_handshakes:ratio_rate{c.handshake_window}"


def transfers(c: MixinConfig, window: Duration) -> str:
    """Name of the recorded number of transfers that ended."""
    return f"{_level(c)}:nixl_transfers:increase{window}"


def transfer_failures(c: MixinConfig, window: Duration) -> str:
    """Name of the recorded share of transfers that failed."""
    return f"{_level(c)}:nixl_transfer_failures_per_transfers:ratio_rate{window}"


def recordings(c: MixinConfig) -> Mapping[str, tuple[Recording, ...]]:
    """All recording rules by area."""
    long = sorted({window.long for window in c.burn_windows})
    either = sorted({*long, *(window.short for window in c.burn_windows)})
    return {
        "compatibility": (
            Recording(rejections(c), f"sum by ({c.by('factor')}) ({events('nixl_handshake_rejections_total', c)})"),
        ),
        "handshakes": (
            Recording(
                handshakes(c),
                f"sum by ({c.by()}) (increase(nixl_handshake_duration_seconds_count[{c.handshake_window}]))",
            ),
            Recording(handshake_failures(c), _ratio("nixl_handshake_duration_seconds_count", c, c.handshake_window)),
        ),
        "transfers": (
            *(
                Recording(
                    transfers(c, window),
                    f"sum by ({c.by()}) (increase(nixl_transfer_duration_seconds_count[{window}]))",
                )
                for window in long
            ),
            *(
                Recording(transfer_failures(c, window), _ratio("nixl_transfer_duration_seconds_count", c, window))
                for window in either
            ),
        ),
    }


def _level(c: MixinConfig, *labels: str) -> str:
    return c.by(*labels).replace(", ", "_")


def _ratio(count: str, c: MixinConfig, window: Duration) -> str:
    return f"""\
sum by ({c.by()}) (rate({count}{{error_type!=""}}[{window}]))
/
sum by ({c.by()}) (rate({count}[{window}]))
"""
