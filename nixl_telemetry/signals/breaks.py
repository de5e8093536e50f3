# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Breaks in the work of the suite's own threads.

A thread that runs Python code holds Python's lock for up to 5 ms while another one waits for it. What is described and
encoded together takes that long, and it would be one request that waits for all of it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final, TypeVar

_WORK_NS: Final = 1_000_000
_BREAK_SECONDS: Final = 0.002

_Item = TypeVar("_Item")


def with_breaks(items: Iterable[_Item], in_haste: Callable[[], bool]) -> Iterator[_Item]:
    """The items, with a break before the next one when those since the last break took a millisecond.

    Args:
        items: What there is to do.
        in_haste: Whether somebody waits for it; then there are no breaks.
    """
    begin_ns = time.perf_counter_ns()
    for item in items:
        yield item
        if time.perf_counter_ns() - begin_ns > _WORK_NS:
            if not in_haste():
                time.sleep(_BREAK_SECONDS)
            begin_ns = time.perf_counter_ns()
