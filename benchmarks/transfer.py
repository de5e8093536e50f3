# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What a transfer costs the engine's thread, from post to done.

Real NIXL agents move real memory; vLLM's real worker posts a READ and asks for it, once, when NIXL is done. Meanwhile
the suite's own threads make its spans and encode them.
"""

from functools import partial
from statistics import median
from typing import Any, Final

from benchmarks.agents import Reader
from benchmarks.bare import exporting_to_sink
from benchmarks.figures import Budget, Figure, Part, differences, median_interval
from benchmarks.interleave import Cost, Rounds, at_any_speed, cost_of, interleaved
from nixl_telemetry.signals.clock import now_ns

TOGETHER: Final = 8
"""Transfers that one step posts."""
ROUNDS: Final = {10: 200, 10_000: 60}
"""How often, by the number of blocks."""
ALONE_ROUNDS: Final = 150
LIMIT_US: Final = 50.0
POLLS: Final = 1000


def measure() -> Part:
    """Stock and instrumented transfers, in turns."""
    budgets: list[Budget] = []
    figures: list[Figure] = []
    samples: dict[str, list[float]] = {}
    with exporting_to_sink():
        stock, ours = Reader(instrumented=False), Reader(instrumented=True)
        for blocks, rounds in ROUNDS.items():
            measured = _compare(stock, ours, blocks, TOGETHER, rounds)
            added, wall = _added(measured)
            samples[f"{blocks} blocks, added CPU µs"] = added
            samples[f"{blocks} blocks, added wall µs"] = wall
            name = f"engine-thread cost of a transfer of {blocks:,} blocks, post to done"
            budgets.append(Budget(name, median(added), LIMIT_US, "µs", interval=median_interval(added)))
            figures.append(
                Figure(
                    f"the stock transfer, {blocks:,} blocks", median(cost.cpu / 1e3 for cost in measured.firsts), "µs"
                )
            )
            figures.append(Figure(f"added in wall time, {blocks:,} blocks", median(wall), "µs", median_interval(wall)))
            figures += at_any_speed(f"a transfer of {blocks:,} blocks", measured)
        few, many = (samples[f"{blocks} blocks, added CPU µs"] for blocks in ROUNDS)
        figures.append(Figure("cost of 10,000 blocks, more than of 10", median(many) - median(few), "µs"))
        alone, _ = _added(_compare(stock, ours, 10, 1, ALONE_ROUNDS))
        samples["10 blocks, alone, added CPU µs"] = alone
        name = "engine-thread cost of a transfer of 10 blocks, alone after a pause"
        figures.append(Figure(name, median(alone), "µs", median_interval(alone)))
        figures.append(Figure("added by each further poll", _poll_cost(ours) / 1e3, "µs"))
    return Part(budgets, figures, samples)


def _compare(stock: Reader, ours: Reader, blocks: int, together: int, rounds: int) -> Rounds:
    return interleaved(
        partial(_transfer, stock, blocks, together), partial(_transfer, ours, blocks, together), rounds, warm_up=10
    )


def _added(rounds: Rounds) -> tuple[list[float], list[float]]:
    """CPU and wall time that is added, in microseconds."""
    mine, theirs = rounds.seconds, rounds.firsts
    cpu = differences([cost.cpu / 1e3 for cost in mine], [cost.cpu / 1e3 for cost in theirs])
    return cpu, differences([cost.wall / 1e3 for cost in mine], [cost.wall / 1e3 for cost in theirs])


def _transfer(reader: Reader, blocks: int, together: int) -> Cost:
    metadata = reader.metadata(blocks, together)
    post = cost_of(partial(reader.post, metadata))
    reader.wait()
    rest = cost_of(reader.ask)
    reader.forget()
    # The suite's threads finish before the next ones start, as they do while an engine computes.
    reader.settle()
    return Cost((post.wall + rest.wall) / together, (post.cpu + rest.cpu) / together)


def _poll_cost(reader: Reader) -> float:
    """A poll that sees a transfer in progress, less the call without the hook."""
    agent: Any = reader.worker.nixl_wrapper
    table = agent._nixl_telemetry
    table.prepared("READ", [1], now_ns(), 1)
    table.posting(1)
    cost = cost_of(lambda: table.polled(1, "PROC"), POLLS).cpu
    table.take(1)
    return cost
