# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Measuring two things beside each other, so that what disturbs one disturbs the other."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Cost(NamedTuple):
    """What something took of the calling thread, in nanoseconds."""

    wall: float
    cpu: float


def cost_of(work: Callable[[], Any], times: int = 1) -> Cost:
    """What each call costs."""
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    for _ in range(times):
        work()
    cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
    return Cost(wall / times, cpu / times)


def interleaved(
    first: Callable[[], Cost], second: Callable[[], Cost], rounds: int, warm_up: int = 3
) -> tuple[list[Cost], list[Cost]]:
    """The costs of both, measured in turns, each as often the first as the second of a round."""
    for _ in range(warm_up):
        first(), second()
    firsts, seconds = [], []
    with no_collection():
        for number in range(rounds):
            if number % 2:
                seconds.append(second())
                firsts.append(first())
            else:
                firsts.append(first())
                seconds.append(second())
            gc.collect(0)
    return firsts, seconds


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage is collected between rounds only: a collection takes as long as hundreds of hooks."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
