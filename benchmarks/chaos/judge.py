# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether a fault was borne as it has to be."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from benchmarks.chaos.load import CLIENTS, LOOK_SECONDS, PACE_SECONDS

TOLERANCE: Final = 0.05
"""The share of requests that may be served less than by the stock pair, and"""
SPARE: Final = 2
"""so many requests more: the moment of a fault hits one or another."""
TURNED_AWAY: Final = "503"
"""How a request fails that the router turned away itself, for want of an instance that its health check has found."""
BETWEEN_LOOKS: Final = round(CLIENTS * LOOK_SECONDS / PACE_SECONDS)
"""Requests between two looks of the router: what the moment of a look makes more or fewer."""


def problems(entry: Mapping[str, Any]) -> list[str]:
    """What is wrong with an entry of the results; nothing, if the list is empty."""
    return list(_problems(entry))


def _problems(entry: Mapping[str, Any]) -> Iterator[str]:
    if not entry["named_by"]:
        yield "no signal named it"
    if entry["missing"]:
        yield f"the accounts cannot be made: {entry['missing']}"
    elif not entry["identity_holds"]:
        wrong = [subject for subject, account in entry["identity"].items() if not account["holds"]]
        yield f"the accounts do not add up: {', '.join(wrong) or 'there are none'}"
    for phase in ("during", "after"):
        here, there = entry["phases"][phase], entry["stock_phases"][phase]
        ours, theirs = _arrived(here, there), _arrived(there, here)
        if is_fewer(ours, theirs):
            yield f"{ours[1]} of {ours[0]} that arrived were served {phase}, stock {theirs[1]} of {theirs[0]}"
    if not entry["recovered"] and entry["stock_recovered"]:
        yield "not recovered from, and stock does" + (f": {entry['failure']}" if entry["failure"] else "")


def _arrived(phase: Sequence[int], other: Sequence[int]) -> tuple[int, int]:
    """Requests that came to a pair, and those served.

    What the router turns away is left out where it does so with both pairs, and not many more of the one than chance
    makes.
    """
    sent, served, turned_away = phase
    return sent - (min(turned_away, other[2] + BETWEEN_LOOKS) if other[2] else 0), served


def is_fewer(ours: tuple[int, int], theirs: tuple[int, int]) -> bool:
    """Whether fewer requests are served than by the stock pair, beyond what chance makes.

    Args:
        ours: Requests sent, and served.
        theirs: The same for the stock pair.
    """
    (sent, served), (stock_sent, stock_served) = ours, theirs
    if not stock_sent:
        return False
    return served < sent * (stock_served / stock_sent - TOLERANCE) - SPARE
