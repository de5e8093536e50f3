# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Cases of the alert on the halves of a push."""

from typing import Final

from tests.mixin.case import MODEL, Case, Kind, series

_UNMATCHED: Final = (
    '1 - sum(rate(nixl_push_registrations_total{event="matched"}[15m])) / '
    'sum(rate(nixl_push_registrations_total{event="received"}[15m]))'
)


def _registrations(received: str, matched: str) -> dict[str, str]:
    return {
        series("nixl_push_registrations_total", transfer_mode="push", event="received"): received,
        series("nixl_push_registrations_total", transfer_mode="push", event="matched"): matched,
    }


CASES: Final = (
    Case(
        "NixlPushUnmatched",
        "warning",
        Kind.FIRES,
        "2 in 10 match nothing",
        _registrations("0+20x60", "0+16x60"),
        onset=1,
        labels={"job": "pd", "model_name": MODEL},
        description=f"20% of the registrations that reach P of {MODEL} in pd match no request there. Their requests "
        "wait on the decode side.",
        link="nixl-push-leases?var-job=pd&var-model=org%2Fmodel",
    ),
    Case(
        "NixlPushUnmatched",
        "warning",
        Kind.THRESHOLD,
        "1 in 10 matches nothing",
        _registrations("0+20x60", "0+18x60"),
        reads=(_UNMATCHED, 0.1),
    ),
    Case(
        "NixlPushUnmatched", "warning", Kind.NO_TRAFFIC, "15 in 15 min, none matches", _registrations("0+1x60", "0x60")
    ),
    Case(
        "NixlPushUnmatched",
        "warning",
        Kind.RESET,
        "an instance with old ones restarts",
        _registrations("900x30 0+20x30", "9x30 0+20x30"),
    ),
    Case(
        "NixlPushUnmatched",
        "warning",
        Kind.HEALTHY,
        "all match, 100 wait for their prefill at any time, and one was left behind long ago",
        {
            **_registrations("0+100x60", "0+100x60"),
            series("nixl_push_unmatched", transfer_mode="push", side="registration"): "101x60",
            series(
                "nixl_push_unmatched_oldest_timestamp_seconds", transfer_mode="push", side="registration", rank="0"
            ): "60x60",
        },
    ),
)
