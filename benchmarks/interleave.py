# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Measuring two things beside each other, so that what disturbs one disturbs the other."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import mean, median
from typing import Any, Final, NamedTuple

from benchmarks.figures import Figure, median_interval

FULL_SPEED: Final = 1.2
"""How much longer than at best the yardstick may take in a round that counts."""
MOST: Final = 5
"""How many times as many rounds may be taken until enough of them count."""
FEWEST: Final = 20
"""With fewer that count there is nothing to tell them by: all do."""
_YARDSTICK_STEPS: Final = 4000


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


class Round(NamedTuple):
    """The mean of two turns of each, and how long the yardstick took around them, at worst."""

    first: Cost
    second: Cost
    yardstick: float


class Rounds(NamedTuple):
    """What was measured in turns."""

    counted: list[Round]
    taken: list[Round]
    """Those that do not count, too."""

    @property
    def firsts(self) -> list[Cost]:
        """Of those that count."""
        return [one.first for one in self.counted]

    @property
    def seconds(self) -> list[Cost]:
        """Of those that count."""
        return [one.second for one in self.counted]


def interleaved(first: Callable[[], Cost], second: Callable[[], Cost], rounds: int, warm_up: int = 3) -> Rounds:
    """The costs of both, measured in turns; in each round, each comes once before and once after the other.

    On a shared machine a processor is about half as fast whenever somebody else uses the other half of its core, for a
    second or for minutes. What has a limit in microseconds is judged at full speed: around each round the same piece
    of work is timed, the yardstick, and rounds in which it took much longer than at best do not count. Neither side
    has a part in that choice. More rounds are taken for those that do not count, within bounds.
    """
    for _ in range(warm_up):
        first(), second()
    taken: list[Round] = []
    with no_collection():
        while len(taken) < rounds or (len(taken) < MOST * rounds and len(_at_full_speed(taken)) < rounds):
            yardsticks = [cost_of(_yardstick).cpu]
            turns: list[tuple[Cost, Cost]] = []
            for is_first in (True, False):
                gc.collect(0)
                turns.append((first(), second()) if is_first else (second(), first())[::-1])
                yardsticks.append(cost_of(_yardstick).cpu)
            firsts, seconds = zip(*turns, strict=True)
            taken.append(Round(_mean(firsts), _mean(seconds), max(yardsticks)))
    counted = _at_full_speed(taken)
    return Rounds(counted if len(counted) >= FEWEST else taken, taken)


def at_any_speed(what: str, rounds: Rounds) -> list[Figure]:
    """How many of the rounds counted, and what all of them give, as figures."""
    added = [(one.second.cpu - one.first.cpu) / 1e3 for one in rounds.taken]
    return [
        Figure(f"{what}: rounds that count", 100 * len(rounds.counted) / len(added), "%"),
        Figure(f"{what}: added over all rounds", median(added), "µs", median_interval(added)),
    ]


def _at_full_speed(taken: list[Round]) -> list[Round]:
    fastest = min(one.yardstick for one in taken)
    return [one for one in taken if one.yardstick <= FULL_SPEED * fastest]


def _mean(costs: Sequence[Cost]) -> Cost:
    return Cost(mean(cost.wall for cost in costs), mean(cost.cpu for cost in costs))


def _yardstick() -> int:
    total = 0
    for number in range(_YARDSTICK_STEPS):
        total += number * number
    return total


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
