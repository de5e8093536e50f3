# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Clocks: durations come from one process's monotonic clock; the wall clock only places them on the calendar."""

import time

now_ns = time.perf_counter_ns
"""Monotonic nanoseconds of this process; never compared with another process's."""


def unix_ns(monotonic_ns: int) -> int:
    """The wall-clock time, in Unix nanoseconds, of a recent moment of :func:`now_ns`."""
    return time.time_ns() - (now_ns() - monotonic_ns)
