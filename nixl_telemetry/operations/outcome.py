# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""How an operation ended, and its one log line."""

import logging
from typing import NamedTuple

from nixl_telemetry.signals.attributes import Attributes, AttributeValue
from nixl_telemetry.signals.description import LogLine
from nixl_telemetry.signals.logger import logger
from nixl_telemetry.signals.semconv import ERROR_TYPE, ErrorType, EventName


class Outcome(NamedTuple):
    """How an operation ended."""

    duration_s: float
    error: ErrorType | None
    message: str
    """What went wrong, for a person; empty on success."""

    def keys(self) -> dict[str, AttributeValue]:
        """Duration and error type, as log lines and records have them."""
        failed: dict[str, AttributeValue] = {ERROR_TYPE: self.error} if self.error else {}
        return {"duration_s": round(self.duration_s, 6), **failed}


def outcome_line(
    outcome: Outcome, attributes: Attributes, finished: EventName, failed: EventName, *, slow_s: float, level: int
) -> LogLine | None:
    """The line: an error when it failed, a warning when it was slow; ``None`` where nobody wants it.

    Args:
        outcome: How it ended.
        attributes: What else to tell.
        finished: The event of a success.
        failed: The event of a failure.
        slow_s: A duration above this is slow. Seconds.
        level: Level of a success that was not slow.
    """
    if outcome.error:
        keys = {**attributes, **outcome.keys(), "message": outcome.message}
        return LogLine(failed, logging.ERROR, keys)
    level = logging.WARNING if outcome.duration_s > slow_s else level
    # Nearly all are of transfers that succeeded.
    return LogLine(finished, level, {**attributes, **outcome.keys()}) if logger().isEnabledFor(level) else None
