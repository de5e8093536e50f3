# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Blocks that the prefill side holds for the decode side, and how the two halves of a push meet."""

from typing import Final

from dashboards import config, house
from dashboards.house import Panel, heatmap, stat, timeseries, traces
from dashboards.queries import Query, age, events, fraction, quantiles, rates, total

_ENDED: Final = "nixl_lease_duration_seconds_count{SELECTED}"
_EXPIRED: Final = 'nixl_lease_duration_seconds_count{SELECTED, outcome="expired"}'


def board() -> house.Board:
    """The board for KV that is held too long, or that waits for its other half."""
    return house.board(
        config.PUSH_LEASES,
        "Push and leases",
        "KV blocks that prefill instances hold, who fetches them, and whether pushes meet their registrations.",
        {
            "Now": _now(),
            "Leases: rate, errors, duration": _leases(),
            "Push: registrations, and who comes first": _push(),
            "Requests that were served wrongly, or not as meant": _wrong(),
        },
        about="""
            A lease is the promise of a prefill instance to hold a request's KV until the decode instance has it, 30 s
            by default. It ends when that is so, or when its time is over.

            In push the decode side sends a registration, where the KV is to be written, and the prefill side writes
            when it has both that and the KV. They meet by the request's id.
            Panels on push are 0 or empty in a pull fleet; headroom is measured in pull only.
            """,
    )


def _now() -> list[Panel]:
    return [
        stat(
            "KV that may be wrong",
            "Requests in the time shown that were answered with KV that may have been another's, or was not loaded.",
            "short",
            events(config.WRONG_KV),
            steps={1: config.BAD},
            whole=True,
            runbooks=["NixlInvalidKv"],
        ),
        stat(
            "Expired",
            "Leases in the time shown that ended though nobody had the KV.",
            "short",
            events(_EXPIRED),
            steps={1: config.ATTENTION},
            whole=True,
            runbooks=["NixlLeasesExpiring"],
        ),
        stat(
            "Overdue",
            "Leases whose deadline has passed and whose blocks vLLM has not freed. An engine that takes no step frees "
            "none.",
            "short",
            "sum(nixl_leases_overdue{SELECTED})",
            steps={1: config.ATTENTION},
            runbooks=["NixlLeasesOverdue"],
        ),
        stat(
            "Leases held",
            "Requests whose KV the prefill side holds for the decode side.",
            "short",
            "sum(nixl_leases_held{SELECTED})",
        ),
        stat(
            "Blocks held",
            "KV cache blocks that those leases hold: they serve no other request meanwhile.",
            "short",
            "sum(nixl_lease_blocks_held{SELECTED})",
        ),
        stat(
            "Push halves unmatched",
            "Registrations and blocks that wait for each other on the prefill side.",
            "short",
            "sum(nixl_push_unmatched{SELECTED})",
            runbooks=["NixlPushUnmatched"],
        ),
    ]


def _leases() -> list[Panel]:
    expired = traces("Expired leases in traces", '{ name = "nixl.lease" && status = error }')
    return [
        timeseries(
            "Leases that ended, by outcome",
            "`released`: the decode side has the KV; `expired`: it does not, and the blocks were freed.",
            "ops",
            rates(_ENDED, by="outcome"),
            stack=True,
            colours=config.OF_OUTCOME,
            runbooks=["NixlLeasesExpiring"],
            links=[expired],
        ),
        timeseries(
            "Share that expires",
            "0 while no lease ends.",
            "percentunit",
            Query(fraction(total(_EXPIRED), total(_ENDED)), "expired"),
            limit="lease_expired_ratio",
            colours=config.OF_OUTCOME,
            runbooks=["NixlLeasesExpiring"],
            links=[expired],
        ),
        timeseries(
            "Duration of leases that were released",
            "How long the prefill side held blocks. The end is seen by an engine step: an idle engine holds them until "
            "its next one.",
            "s",
            *quantiles('nixl_lease_duration_seconds_bucket{SELECTED, outcome="released"}'),
            links=[traces("Long leases in traces", '{ name = "nixl.lease" && duration > 5s }')],
        ),
        timeseries(
            "Leases and blocks held",
            "What a prefill instance cannot give to other requests.",
            "short",
            Query("sum(nixl_leases_held{SELECTED})", "leases"),
            Query("sum(nixl_lease_blocks_held{SELECTED})", "blocks"),
            colours={"leases": "blue", "blocks": "purple"},
        ),
        timeseries(
            "Overdue, by instance",
            "Leases that are held 2 s and more beyond their deadline.",
            "short",
            Query("sum by (instance) (nixl_leases_overdue{SELECTED})", "{{instance}}"),
            many=True,
            runbooks=["NixlLeasesOverdue"],
        ),
        timeseries(
            "Opened, ended and renewed",
            "A heartbeat of the decode side renews a lease while its request waits.",
            "ops",
            Query(total("nixl_leases_opened_total{SELECTED}"), "opened"),
            Query(total(_ENDED), "ended"),
            Query(total("nixl_lease_renewals_total{SELECTED}"), "renewed"),
            colours={"opened": "blue", "ended": config.GOOD, "renewed": "yellow"},
        ),
        timeseries(
            "Headroom of reads",
            "What was left of a lease when the decode side began to read, in pull: 1 of 100 had less than p1. Near 0, "
            "leases run out before they are read. Renewals are not in it.",
            "s",
            *quantiles("nixl_lease_remaining_seconds_bucket{SELECTED}", other=0.01),
            span=12,
            runbooks=["NixlLeasesExpiring", "NixlInvalidKv"],
        ),
        heatmap(
            "Headroom of all reads",
            "In the lowest range are those that had run out.",
            "s",
            "nixl_lease_remaining_seconds_bucket{SELECTED}",
            span=12,
        ),
    ]


def _push() -> list[Panel]:
    return [
        timeseries(
            "Registrations, by event",
            "`sent` by the decode side; `received` and `matched` with the request's blocks on the prefill side; "
            "`failed` on either. Each rank counts its own.",
            "ops",
            rates("nixl_push_registrations_total{SELECTED}", by="event"),
            colours=config.OF_EVENT,
            runbooks=["NixlPushUnmatched"],
        ),
        timeseries(
            "Who came first",
            "`registration`: the decode side was ready and waited; `blocks`: the KV was ready and waited.",
            "ops",
            rates("nixl_push_match_wait_seconds_count{SELECTED}", by="first"),
            stack=True,
            colours=config.OF_SIDE,
        ),
        timeseries(
            "Wait of the first half for the second",
            "By which came first. What registrations wait for is the prefill.",
            "s",
            *quantiles("nixl_push_match_wait_seconds_bucket{SELECTED}", "{{first}}", by="first"),
            colours=config.OF_SIDE,
        ),
        timeseries(
            "Unmatched, by half",
            "Halves that wait for the other. What only grows meets nothing: the two sides have different request ids, "
            "or the clients hang up.",
            "short",
            Query("sum by (side) (nixl_push_unmatched{SELECTED})", "{{side}}"),
            colours=config.OF_SIDE,
            span=12,
            runbooks=["NixlPushUnmatched"],
        ),
        timeseries(
            "Age of the oldest unmatched half",
            "0 while none waits.",
            "s",
            Query(age("nixl_push_unmatched_oldest_timestamp_seconds{SELECTED}", by="side"), "{{side}}"),
            colours=config.OF_SIDE,
            span=12,
            runbooks=["NixlPushUnmatched"],
        ),
    ]


def _wrong() -> list[Panel]:
    return [
        timeseries(
            "Invalid KV, by reason",
            "`read_after_expiry`: read when it may have been overwritten; `failed_load_served`: served though it was "
            "not loaded; `failed_load_recomputed` is right, at the price of a prefill; `unknown_request` is most often "
            "a client that hung up.",
            "ops",
            rates("nixl_invalid_kv_total{SELECTED}", by="reason"),
            colours=config.of_values("nixl_invalid_kv_total", "reason"),
            many=True,
            span=12,
            runbooks=["NixlInvalidKv"],
        ),
        timeseries(
            "Requests without transfer parameters, by role",
            "A decode instance computes such a request itself; nobody can fetch the KV of a prefill instance's.",
            "ops",
            rates("nixl_requests_without_transfer_params_total{SELECTED}", by="role"),
            colours={"prefill": "blue", "decode": "purple"},
            span=12,
            runbooks=["NixlDecodeWithoutTransfers"],
        ),
    ]
