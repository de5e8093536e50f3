# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether the two halves of a push find each other."""

from nixl_telemetry.mixin.alert import Alert, model_in_job
from nixl_telemetry.mixin.config import MixinConfig

_BOARD = "nixl-push-leases"


def alerts(c: MixinConfig) -> tuple[Alert, ...]:
    """Registrations without a prefill; blocks without a registration are leases that expire."""
    by = c.by()
    # Not how many wait, nor since when: a registration waits for its whole prefill, and vLLM keeps one whose request
    # was cancelled for ever.
    return (
        Alert(
            "NixlPushUnmatched",
            "warning",
            c.push_for,
            f"""
            1 -
            sum by ({by}) (rate(nixl_push_registrations_total{{event="matched"}}[{c.push_window}]))
            /
            sum by ({by}) (rate(nixl_push_registrations_total{{event="received"}}[{c.push_window}]))
            > {c.push_unmatched_ratio:g}
            and
            sum by ({by}) (
              increase(nixl_push_registrations_total{{event="received"}}[{c.push_window}])
            ) >= {c.push_floor:g}
            """,
            "Registrations of decode instances find no prefill.",
            f"{{{{ $value | humanizePercentage }}}} of the registrations that reach P of {model_in_job(c)} match no "
            "request there. Their requests wait on the decode side.",
            _BOARD,
            ("push_unmatched_ratio", "push_floor", "push_for", "push_window"),
        ),
    )
