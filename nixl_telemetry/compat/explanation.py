# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Why two instances cannot be paired, and how that is known."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from nixl_telemetry.compat.factors import FACTOR_NAMES, Difference, Factors, differences, value_text
from nixl_telemetry.compat.recovery import Recovery

UNKNOWN_FACTOR: Final = "unknown"
"""Stands for the factor where none is known to differ."""


class Source(StrEnum):
    """How an explanation is known."""

    EXCHANGED = "exchanged"
    """The peer told its factors, and they give its hash."""
    RECOVERED = "recovered"
    """Factors were found that give the peer's hash."""
    UNKNOWN = "unknown"
    """The peer told nothing, and no known values give its hash."""


@dataclass(frozen=True)
class Explanation:
    """What differs between two instances whose hashes differ."""

    source: Source
    differences: tuple[Difference, ...] = ()
    """The most telling first; empty where the source is unknown."""
    reason: str = "it tells no factors, and no known values give its hash"
    """Why nothing is known."""

    @property
    def factor(self) -> str:
        """The factor to look at first, by a name of :data:`FACTOR_NAMES`."""
        known = (difference.factor for difference in self.differences if difference.factor in FACTOR_NAMES)
        return next(known, UNKNOWN_FACTOR)

    def text(self) -> str:
        """What differs, as half a sentence."""
        if not self.differences:
            return f"what differs is unknown: {self.reason}"
        told = "; ".join(
            f"{factor} is {value_text(remote)} there and {value_text(local)} here"
            for factor, local, remote in self.differences
        )
        return f"{told} ({self.source})"


def explain(
    local: Factors | None, remote_hash: str, remote: Factors | None, recovery: Recovery | None, seconds: float
) -> Explanation:
    """Say what differs.

    Args:
        local: Our factors; ``None`` if they are not known.
        remote_hash: The peer's hash.
        remote: The factors that the peer told, already found to give its hash.
        recovery: Searches for them where it told none; it starts from ``local``.
        seconds: How much of the thread's CPU time to search with.
    """
    if local is None:
        return Explanation(Source.UNKNOWN, reason="the factors of this instance could not be seen")
    if remote is not None:
        return Explanation(Source.EXCHANGED, differences(local, remote))
    found = recovery.recover(remote_hash, seconds) if recovery is not None else None
    if found is None:
        return Explanation(Source.UNKNOWN)
    return Explanation(Source.RECOVERED, differences(local, found))
