# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The arithmetic of the benchmarks: medians, paired ratios, bootstrap intervals, and whether a budget is kept."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final, NamedTuple

RESAMPLES: Final = 1000


class Interval(NamedTuple):
    """A bootstrap interval of 95 %."""

    low: float
    high: float

    def overlaps(self, other: "Interval") -> bool:
        """Whether both have a value in common."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True)
class Figure:
    """One measured value, not judged."""

    name: str
    value: float
    unit: str
    interval: Interval | None = None


@dataclass(frozen=True)
class Budget:
    """One measured value and its limit."""

    name: str
    value: float
    limit: float
    unit: str
    at_least: bool = False
    """Whether the limit is a lower one."""
    interval: Interval | None = None
    besides: bool = True
    """Whether what else the budget asks for holds."""
    remark: str = ""
    """What else it asks for, with its figures."""

    @property
    def ok(self) -> bool:
        """Whether it is kept."""
        within = self.value >= self.limit if self.at_least else self.value <= self.limit
        return within and self.besides


@dataclass(frozen=True)
class Part:
    """What one part of the benchmarks found."""

    budgets: Sequence[Budget] = ()
    figures: Sequence[Figure] = ()
    samples: dict[str, list[float]] = field(default_factory=dict)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def differences(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours less theirs, pair by pair."""
    return [a - b for a, b in zip(ours, theirs, strict=True)]


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours by theirs, pair by pair."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def bootstrap(count: int, statistic: Callable[[Sequence[int]], float], resamples: int = RESAMPLES) -> Interval:
    """The interval of a statistic over ``count`` rounds.

    Args:
        count: How many rounds there were.
        statistic: Takes the indices of the rounds that were drawn, with repetition.
        resamples: How often to draw.
    """
    # The same draws every time, so that the same samples give the same interval.
    drawing = random.Random(0)  # noqa: S311 (no secret)
    found = sorted(statistic(drawing.choices(range(count), k=count)) for _ in range(resamples))
    return Interval(percentile(found, 0.025), percentile(found, 0.975))


def median_interval(values: Sequence[float]) -> Interval:
    """The interval of the median."""
    return bootstrap(len(values), lambda drawn: median([values[index] for index in drawn]))


def pooled(rounds: Sequence[Sequence[float]], drawn: Sequence[int]) -> list[float]:
    """All values of the rounds that were drawn."""
    return [value for index in drawn for value in rounds[index]]


def compare(
    name: str,
    ours: tuple[float, Interval],
    control: tuple[float, Interval],
    more_is_better: bool = False,
    tolerance: float = 0.03,
) -> Budget:
    """The budget of a ratio: hardly worse than 1, and not to be told apart from what stock is to itself.

    Args:
        name: Of the budget.
        ours: Instrumented by stock, with its interval.
        control: Stock by stock, measured in the same run.
        more_is_better: Whether a ratio above 1 is the better one.
        tolerance: How much worse than 1 the ratio may be.
    """
    ratio, interval = ours
    control_ratio, control_interval = control
    worse = sorted((bound - 1) * (-100 if more_is_better else 100) for bound in interval)
    return Budget(
        name,
        (ratio - 1) * (-100 if more_is_better else 100),
        tolerance * 100,
        "%",
        interval=Interval(*worse),
        besides=interval.overlaps(control_interval),
        remark=f"instrumented ÷ stock {ratio:.3f} [{interval.low:.3f}, {interval.high:.3f}]; stock ÷ stock "
        f"{control_ratio:.3f} [{control_interval.low:.3f}, {control_interval.high:.3f}]",
    )
