# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether KV that waits on a prefill instance is fetched, freed and right."""

from typing import Final

from nixl_telemetry.mixin.alert import COUNT, Alert, model_in_job
from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.recording import events

_BOARD = "nixl-push-leases"

WRONG_KV: Final = "read_after_expiry|failed_load_served"
"""Reasons of invalid KV after which an answer may be wrong."""


def alerts(c: MixinConfig) -> tuple[Alert, ...]:
    """Leases that expire or are not freed, halves of a push without the other, and KV that may be wrong."""
    model = model_in_job(c)
    by = c.by()
    on_engine = c.by("instance", "engine")

    def invalid(reasons: str) -> str:
        counted = events(f'nixl_invalid_kv_total{{reason=~"{reasons}"}}', c)
        return f"sum by ({c.by('reason')}) ({counted}) > 0"

    return (
        Alert(
            "NixlLeasesExpiring",
            "warning",
            c.lease_for,
            f"""
            sum by ({by}) (rate(nixl_lease_duration_seconds_count{{outcome="expired"}}[{c.lease_window}]))
            /
            sum by ({by}) (rate(nixl_lease_duration_seconds_count[{c.lease_window}]))
            > {c.lease_expired_ratio:g}
            and
            sum by ({by}) (increase(nixl_lease_duration_seconds_count[{c.lease_window}])) >= {c.lease_floor:g}
            """,
            "Leases expire before the decode side has the KV.",
            f"{{{{ $value | humanizePercentage }}}} of the leases of {model} expire. The prefill was in vain, and its "
            "blocks were held for the whole lease.",
            _BOARD,
            ("lease_expired_ratio", "lease_floor", "lease_for", "lease_window"),
        ),
        # An engine that takes no step frees nothing and tells nothing: only one that is at work is judged. One whose
        # cache is full of such leases opens no more; requests wait for it.
        Alert(
            "NixlLeasesOverdue",
            "warning",
            c.overdue_for,
            f"""
            sum by ({by}) (
              nixl_leases_overdue > 0
              and on ({on_engine}) (
                rate(nixl_leases_opened_total[{c.overdue_window}]) > 0
                or on ({on_engine})
                max_over_time(vllm:num_requests_waiting[{c.overdue_window}]) > 0
              )
            ) > 0
            """,
            "Leases are over and their blocks are still held.",
            f"{{{{ $value }}}} leases of {model} are past their deadline, and vLLM does not free their blocks. The KV "
            "cache fills up with them.",
            _BOARD,
            ("overdue_for", "overdue_window"),
        ),
        Alert(
            "NixlInvalidKv",
            "critical",
            c.invalid_kv_for,
            invalid(WRONG_KV),
            "Answers may be made of another request's KV.",
            f"Requests of {model} whose KV may have been wrong, {COUNT} in {c.event_window}: {{{{ $labels.reason }}}}.",
            _BOARD,
            ("invalid_kv_for", "event_window"),
        ),
        # Most often a client that hung up or a prefill instance that was restarted; or right, but prefilled twice.
        Alert(
            "NixlInvalidKv",
            "warning",
            c.event_for,
            invalid("unknown_request|failed_load_recomputed"),
            "KV was not used as it was meant to be.",
            f"Requests of {model}, {COUNT} in {c.event_window}: {{{{ $labels.reason }}}}.",
            _BOARD,
            ("event_for", "event_window"),
        ),
    )
