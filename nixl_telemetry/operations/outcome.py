# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The one log line of a finished operation."""

import logging
from typing import NamedTuple

from nixl_telemetry.signals.description import Attributes, LogLine
from nixl_telemetry.signals.semconv import ERROR_TYPE, ErrorType, EventName


class Outcome(NamedTuple):
    """How an operation ended."""

    duration_s: float
    error: ErrorType | None
    message: str
    """What went wrong, for a person; empty on success."""


def outcome_line(
    outcome: Outcome, attributes: Attributes, finished: EventName, failed: EventName, *, slow_s: float, level: int
) -> LogLine:
    """The line: an error when it failed, a warning when it was slow.

    Args:
        outcome: How it ended.
        attributes: What else to tell.
        finished: The event of a success.
        failed: The event of a failure.
        slow_s: A duration above this is slow. Seconds.
        level: Level of a success that was not slow.
    """
    keys = {**attributes, "duration_s": round(outcome.duration_s, 6)}
    if outcome.error:
        return LogLine(failed, logging.ERROR, {**keys, ERROR_TYPE: outcome.error, "message": outcome.message})
    return LogLine(finished, logging.WARNING if outcome.duration_s > slow_s else level, keys)
