# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Clocks: durations come from one process's monotonic clock; the wall clock only places them on the calendar."""

import time

now_ns = time.perf_counter_ns
"""Monotonic nanoseconds of this process; never compared with another process's."""


def unix_offset_ns() -> int:
    """What to add to a recent moment of :func:`now_ns` to get Unix nanoseconds.

    Taken once for a tree of spans, so that a step of the wall clock moves it as a whole and changes no duration.
    """
    return time.time_ns() - now_ns()
