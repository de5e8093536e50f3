# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether handshakes succeed, and in time.

A pair that fits has one handshake, one that does not has a handshake with each request: the ratio is not that of the
requests, and rises at once.
"""

from nixl_telemetry.mixin.alert import COUNT, Alert, model_in_job
from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.recording import events, handshake_failures, handshakes

_BOARD = "nixl-handshakes"


def alerts(c: MixinConfig) -> tuple[Alert, ...]:
    """Handshakes that fail or are slow, queries that a listener refuses, and modes that contradict each other."""
    model = model_in_job(c)

    def failing(threshold: float) -> str:
        return f"""
        {handshake_failures(c)} > {threshold:g}
        and
        {handshakes(c)} >= {c.handshake_floor:g}
        """

    failed = f"{{{{ $value | humanizePercentage }}}} of the handshakes of {model} fail."
    return (
        Alert(
            "NixlHandshakeFailureRatioHigh",
            "warning",
            c.handshake_failure_warning_for,
            failing(c.handshake_failure_warning),
            "Handshakes fail.",
            f"{failed} Each takes at least one request with it.",
            _BOARD,
            ("handshake_failure_warning", "handshake_floor", "handshake_failure_warning_for", "handshake_window"),
        ),
        Alert(
            "NixlHandshakeFailureRatioHigh",
            "critical",
            c.handshake_failure_critical_for,
            failing(c.handshake_failure_critical),
            "Most handshakes fail.",
            f"{failed} Each takes at least one request with it.",
            _BOARD,
            ("handshake_failure_critical", "handshake_floor", "handshake_failure_critical_for", "handshake_window"),
        ),
        Alert(
            "NixlHandshakeSlow",
            "warning",
            c.handshake_slow_for,
            f"""
            histogram_quantile(
              {c.handshake_slow_quantile:g},
              sum by ({c.by("le")}) (
                rate(nixl_handshake_duration_seconds_bucket{{error_type=""}}[{c.handshake_window}])
              )
            ) > {c.handshake_slow_seconds:g}
            and
            sum by ({c.by()}) (
              increase(nixl_handshake_duration_seconds_count{{error_type=""}}[{c.handshake_window}])
            ) >= {c.handshake_floor:g}
            """,
            "Handshakes are slow.",
            f"1 in {1 / (1 - c.handshake_slow_quantile):g} handshakes of {model} takes longer than "
            "{{ $value | humanizeDuration }}. The requests that need them wait.",
            _BOARD,
            ("handshake_slow_seconds", "handshake_slow_quantile", "handshake_floor", "handshake_slow_for"),
        ),
        Alert(
            "NixlListenerRefusing",
            "warning",
            c.listener_for,
            f"""
            sum by ({c.by("result")}) (
              increase(nixl_handshake_requests_total{{result!="served"}}[{c.event_window}])
            ) > {c.listener_refused:g}
            """,
            "Handshake listeners refuse what they are asked.",
            f"Handshake listeners of {model} refused queries, {COUNT} in {c.event_window}: {{{{ $labels.result }}}}.",
            _BOARD,
            ("listener_refused", "listener_for", "event_window"),
        ),
        Alert(
            "NixlModeConflict",
            "warning",
            c.event_for,
            f"sum by ({c.by('source')}) ({events('nixl_mode_conflicts_total', c)}) > 0",
            "An instance met another transfer mode than its own.",
            f"Instances of {model} met the other transfer mode, {COUNT} times in {c.event_window}: "
            "{{ $labels.source }}.",
            _BOARD,
            ("event_for", "event_window"),
        ),
    )
