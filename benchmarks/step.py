# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What a step without transfers costs the engine's thread."""

from functools import partial
from statistics import median
from typing import Final

from benchmarks.bare import SilentAgent, exporting_to_sink, scheduler_connector, step, worker_connector
from benchmarks.figures import Budget, Figure, Part, differences, median_interval
from benchmarks.interleave import Cost, at_any_speed, cost_of, interleaved

ROUNDS: Final = 200
STEPS: Final = 100
LIMIT_US: Final = 5.0


def measure() -> Part:
    """Stock and instrumented steps, in turns."""
    samples: dict[str, list[float]] = {}
    figures: list[Figure] = []
    with exporting_to_sink():
        for mode in ("pull", "push"):
            stock, ours = (_pair(mode, instrumented) for instrumented in (False, True))
            rounds = interleaved(partial(_cost, *stock), partial(_cost, *ours), ROUNDS)
            theirs, mine = rounds.firsts, rounds.seconds
            samples[f"{mode} stock µs"] = [cost.cpu / 1e3 for cost in theirs]
            samples[f"{mode} instrumented µs"] = [cost.cpu / 1e3 for cost in mine]
            figures.append(Figure(f"the stock step, {mode}", median(samples[f"{mode} stock µs"]), "µs"))
            wall = differences([cost.wall / 1e3 for cost in mine], [cost.wall / 1e3 for cost in theirs])
            figures.append(Figure(f"added to it in wall time, {mode}", median(wall), "µs", median_interval(wall)))
            figures += at_any_speed(f"a step without transfers, {mode}", rounds)
    budgets = []
    for mode in ("pull", "push"):
        added = differences(samples[f"{mode} instrumented µs"], samples[f"{mode} stock µs"])
        name = f"engine-thread cost of a step without transfers, {mode}"
        budgets.append(Budget(name, median(added), LIMIT_US, "µs", interval=median_interval(added)))
    return Part(budgets, figures, samples)


def _pair(mode: str, instrumented: bool) -> tuple[object, object]:
    pair = worker_connector(mode, instrumented, SilentAgent()), scheduler_connector(mode, instrumented)
    step(*pair)  # the first one is longer: the telemetry asks for it
    return pair


def _cost(worker: object, scheduler: object) -> Cost:
    return cost_of(lambda: step(worker, scheduler), STEPS)
