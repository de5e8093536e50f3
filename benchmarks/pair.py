# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What a client sees of a real prefill and decode pair, instrumented and stock, measured in turns.

Two stock pairs run beside the instrumented one: what differs between those two is what the machine makes of equal
things, and the instrumented pair is held against it.
"""

import itertools
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.figures import (
    Figure,
    Interval,
    Part,
    bootstrap,
    compare,
    median_interval,
    percentile,
    pooled,
    ratios,
)
from benchmarks.fleet import NAMES, cpu_seconds, fleet
from benchmarks.load import requests, run
from benchmarks.receiver import RawReceiver
from nixl_telemetry.testbed import Pair, ServerConfig, TinyModel

ROUNDS: Final = 120
REQUESTS: Final = 6
"""In each round, of each pair."""
CLIENTS: Final = 2
LENGTHS: Final = (64, 1000)
"""Tokens of a prompt: from 2 to 32 blocks."""
MAX_TOKENS: Final = 16
ALONE: Final = 12
"""Requests of each round that are sent one after the other, for the time to the first token: where requests wait for
each other on two cores, its high percentiles tell of the queue."""
_WARM_UP: Final = 1
_MODULE: Final = "nixl_telemetry.connectors"
_STOCK: Final = ("stock A", "stock B")
_OURS: Final = "instrumented"


@dataclass(frozen=True)
class Round:
    """What one pair did in one round."""

    throughput: float
    """Requests in a second."""
    first_token: list[float]
    """Of the requests that were alone. Seconds."""
    between: list[float]
    cpu: dict[str, float]
    """CPU seconds by process, for the others."""

    @property
    def cpu_per_request(self) -> float:
        """CPU seconds of all processes for each request."""
        return sum(self.cpu.values()) / REQUESTS


def measure(modes: Sequence[str]) -> Part:
    """Each mode: two stock pairs and the instrumented one."""
    parts = [_of_mode(mode) for mode in modes]
    return Part(
        [budget for part in parts for budget in part.budgets],
        [figure for part in parts for figure in part.figures],
        {name: values for part in parts for name, values in part.samples.items()},
    )


def measure_settings(modes: Sequence[str]) -> Part:
    """The instrumented connector switched off, with its defaults, and with every block a span; in the first mode."""
    variants: dict[str, dict[str, Any]] = {
        "off": {"enabled": False},
        "default": {},
        "each without limit": {"block_spans": "each", "block_span_limit": 0},
    }
    found, _ = _alternate(modes[0], {name: (_MODULE, telemetry) for name, telemetry in variants.items()}, ROUNDS // 12)
    figures = []
    samples: dict[str, list[float]] = {}
    for name, rounds in found.items():
        values = {
            "CPU time per request": [one.cpu_per_request * 1e3 for one in rounds],
            "time to first token, p50": [median(one.first_token) * 1e3 for one in rounds],
            "time between tokens, p50": [median(one.between) * 1e3 for one in rounds],
        }
        for what, of_rounds in values.items():
            figures.append(Figure(f"{what}, {name}", median(of_rounds), "ms", median_interval(of_rounds)))
            samples[f"{what}, {name}, ms"] = of_rounds
    return Part((), figures, samples)


def _of_mode(mode: str) -> Part:
    variants: dict[str, tuple[str | None, dict[str, Any]]] = {name: (None, {}) for name in _STOCK}
    found, spans = _alternate(mode, {**variants, _OURS: (_MODULE, {})}, ROUNDS)
    ours, (first, second) = found[_OURS], [found[name] for name in _STOCK]
    both = [_joined(a, b) for a, b in zip(first, second, strict=True)]
    budgets = []
    for name, statistic in _STATISTICS.items():
        control = statistic(first, second)
        budgets.append(compare(f"{name}, {mode}", statistic(ours, both), control, name.startswith("throughput")))
    budgets = [replace(budget, besides=budget.besides and spans > 0) for budget in budgets]
    figures = [
        Figure(f"spans of the suite in the run, {mode}", spans, "spans"),
        *_cpu_figures(mode, ours, first, second),
    ]
    samples = {}
    for name, rounds in found.items():
        prefix = f"{mode}, {name}"
        samples[f"{prefix}, requests/s"] = [one.throughput for one in rounds]
        samples[f"{prefix}, first token ms"] = [value * 1e3 for one in rounds for value in one.first_token]
        samples[f"{prefix}, between tokens p50 ms"] = [median(one.between) * 1e3 for one in rounds]
        for process in sorted(rounds[0].cpu):
            samples[f"{prefix}, {process}, CPU ms per request"] = [one.cpu[process] * 1e3 / REQUESTS for one in rounds]
    return Part(budgets, figures, samples)


def _alternate(
    mode: str, variants: Mapping[str, tuple[str | None, Mapping[str, Any]]], rounds: int
) -> tuple[dict[str, list[Round]], int]:
    """Rounds of each variant, in an order that changes; and how many spans of the suite came.

    Args:
        mode: ``pull`` or ``push``.
        variants: The connector's module and its telemetry settings, by name.
        rounds: How many.
    """
    model = TinyModel()
    shuffling = random.Random(0)  # noqa: S311 (no secret)
    found: dict[str, list[Round]] = {name: [] for name in variants}
    with tempfile.TemporaryDirectory(prefix="nixl-telemetry-bench-") as name, RawReceiver() as receiver:
        folder = Path(name)
        weights = model.write(folder / "model")
        configs = {
            variant: ServerConfig(
                weights,
                connector=NAMES[mode],
                connector_module=module,
                extra_config={"telemetry": dict(telemetry)} if telemetry else {},
                otlp_endpoint=receiver.endpoint,
                fork=True,
            )
            for variant, (module, telemetry) in variants.items()
        }
        with fleet(configs, folder) as pairs:
            for number in range(-1, rounds):
                for variant in shuffling.sample(list(variants), len(variants)):
                    one = _round(pairs.wake(variant), model, number)
                    if number >= 0:
                        found[variant].append(one)
        return found, receiver.span_count("nixl_telemetry")


def _round(pair: Pair, model: TinyModel, number: int) -> Round:
    run(pair, requests(model, _WARM_UP, LENGTHS, 2, seed=-2 - number), 1)
    # The same requests for each pair, and others in each round: prefixes must not be cached.
    work = requests(model, REQUESTS, LENGTHS, MAX_TOKENS, seed=1000 + number)
    before = cpu_seconds(pair)
    timings, seconds = run(pair, work, CLIENTS)
    after = cpu_seconds(pair)
    alone, _ = run(pair, requests(model, ALONE, LENGTHS, 1, seed=5000 + number), 1)
    return Round(
        len(timings) / seconds,
        [timing.first_token for timing in alone],
        [gap for timing in timings for gap in timing.between],
        {name: spent - before.get(name, 0.0) for name, spent in after.items()},
    )


def _joined(first: Round, second: Round) -> Round:
    """Two stock rounds as one."""
    return Round(
        (first.throughput + second.throughput) / 2,
        first.first_token + second.first_token,
        first.between + second.between,
        {name: (first.cpu[name] + second.cpu.get(name, 0.0)) / 2 for name in first.cpu},
    )


_Statistic = Callable[[Sequence[Round], Sequence[Round]], tuple[float, Interval]]


def _median_of_ratios(of_round: Callable[[Round], float]) -> _Statistic:
    def statistic(ours: Sequence[Round], theirs: Sequence[Round]) -> tuple[float, Interval]:
        found = ratios([of_round(one) for one in ours], [of_round(one) for one in theirs])
        return median(found), median_interval(found)

    return statistic


def _median_by_request(of_round: Callable[[Round], list[float]]) -> _Statistic:
    """Each request is compared with the same one elsewhere: prompts differ by more than pairs do. Rounds are drawn."""

    def statistic(ours: Sequence[Round], theirs: Sequence[Round]) -> tuple[float, Interval]:
        # Two stock rounds as one have all requests twice.
        found = [
            [mine / other for mine, other in zip(itertools.cycle(of_round(one)), of_round(two), strict=False)]
            for one, two in zip(ours, theirs, strict=True)
        ]

        def middle(drawn: Sequence[int]) -> float:
            return median(pooled(found, drawn))

        return middle(range(len(found))), bootstrap(len(found), middle)

    return statistic


def _ratio_of_percentiles(of_round: Callable[[Round], list[float]], share: float) -> _Statistic:
    """A high percentile needs more values than a round has: those of all rounds, and rounds are drawn."""

    def statistic(ours: Sequence[Round], theirs: Sequence[Round]) -> tuple[float, Interval]:
        mine, stock = [of_round(one) for one in ours], [of_round(one) for one in theirs]

        def ratio(drawn: Sequence[int]) -> float:
            return percentile(pooled(mine, drawn), share) / percentile(pooled(stock, drawn), share)

        return ratio(range(len(mine))), bootstrap(len(mine), ratio)

    return statistic


_STATISTICS: Final[dict[str, _Statistic]] = {
    "throughput, lower than stock": _median_of_ratios(lambda one: one.throughput),
    "time to first token p50, longer than stock": _median_by_request(lambda one: one.first_token),
    "time to first token p99, longer than stock": _ratio_of_percentiles(lambda one: one.first_token, 0.99),
    "time between tokens p50, longer than stock": _median_of_ratios(lambda one: median(one.between)),
}


def _cpu_figures(mode: str, ours: Sequence[Round], first: Sequence[Round], second: Sequence[Round]) -> list[Figure]:
    figures = []
    for process in sorted(ours[0].cpu):
        for name, rounds in ((_OURS, ours), (_STOCK[0], first), (_STOCK[1], second)):
            spent = [one.cpu[process] * 1e3 / REQUESTS for one in rounds]
            what = f"CPU time per request, {mode}, {process}, {name}"
            figures.append(Figure(what, median(spent), "ms", median_interval(spent)))
    return figures
