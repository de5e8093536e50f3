# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""PromQL as the boards write it, and its common shapes."""

import inspect
from dataclasses import dataclass
from typing import Final

from dashboards.variables import SELECTED, TARGETS

_EVERY_ONE: Final = "vllm:nixl_bytes_transferred_count{TARGETS}"
"""What every instance with a NIXL connector has, stock ones too."""
OF_NIXL: Final = f"and on (job, instance) {_EVERY_ONE}"
"""Without it, a query for what every target has finds those of other people too, while all jobs are chosen."""


@dataclass(frozen=True)
class Query:
    """PromQL with SELECTED (or TARGETS) where the board's variables go, and the name of what it gives."""

    expr: str
    legend: str = ""

    def promql(self) -> str:
        """The query as Grafana gets it."""
        return inspect.cleandoc(self.expr).replace("SELECTED", SELECTED).replace("TARGETS", TARGETS)


def rates(counter: str, by: str) -> Query:
    """How fast a counter grows, whose name and matchers are given, by a label."""
    return Query(f"sum by ({by}) (rate({counter}[$__rate_interval]))", f"{{{{{by}}}}}")


def total(counter: str) -> str:
    """How fast a counter grows, whose name and matchers are given."""
    return f"sum(rate({counter}[$__rate_interval]))"


def events(counter: str) -> str:
    """How often something was counted in the time shown. Prometheus extrapolates; what happened is a whole number."""
    return f"round(sum(increase({counter}[$__range])))"


def quantiles(histogram: str, legend: str = "", *, by: str = "", other: float = 0.99) -> list[Query]:
    """The median of a histogram and another quantile, by a label where one is given; gaps where nothing happens."""
    labels = ", ".join(filter(None, ["le", by]))
    buckets = f"sum by ({labels}) (rate({histogram}[$__rate_interval]))"
    # What nothing was measured of is NaN, and equal to nothing.
    return [Query(f"histogram_quantile({q}, {buckets}) >= 0", f"p{q * 100:g} {legend}".strip()) for q in (other, 0.5)]


def rare_quantiles(histogram: str, *, other: float) -> list[Query]:
    """The same of what may not happen for hours: 0 where it does not."""
    return [Query(f"{each.expr} or vector(0)", each.legend) for each in quantiles(histogram, other=other)]


def p99(histogram: str) -> str:
    """99 of 100 are below; 0 where there are none."""
    return rare_quantiles(histogram, other=0.99)[0].expr


def targets(up: int) -> str:
    """How many instances are up (1) or down (0), of jobs that had a NIXL connector in the time shown."""
    return f"count(up{{TARGETS}} == {up} and on (job) last_over_time({_EVERY_ONE}[$__range])) or vector(0)"


def fraction(part: str, whole: str) -> str:
    """The share of one rate in another; 0 while nothing happens, for 0 / 0 would be no value."""
    return f"{part} / clamp_min({whole}, 1e-9)"


def age(timestamp: str, by: str) -> str:
    """How long ago a timestamp is, by a label; 0 while it is 0, which means that there is none."""
    return f"max by ({by}) ((time() - {timestamp}) * ({timestamp} > bool 0))"
