# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What a transfer costs the engine's thread, from post to done.

Real NIXL agents move real memory; vLLM's real worker posts a READ and asks for it, once, when NIXL is done. Meanwhile
the suite's own threads make its spans and encode them.
"""

import time
from functools import partial
from statistics import median
from typing import Any, Final

from benchmarks.agents import Reader
from benchmarks.bare import exporting_to_sink
from benchmarks.figures import Budget, Figure, Part, differences, median_interval
from benchmarks.interleave import Cost, cost_of, interleaved

ROUNDS: Final = {10: 1000, 10_000: 200}
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
            theirs, mine = interleaved(
                partial(_transfer, stock, blocks), partial(_transfer, ours, blocks), rounds, warm_up=20
            )
            added = differences([cost.cpu / 1e3 for cost in mine], [cost.cpu / 1e3 for cost in theirs])
            wall = differences([cost.wall / 1e3 for cost in mine], [cost.wall / 1e3 for cost in theirs])
            samples[f"{blocks} blocks, added CPU µs"] = added
            samples[f"{blocks} blocks, added wall µs"] = wall
            name = f"engine-thread cost of a transfer of {blocks:,} blocks, post to done"
            interval = median_interval(added)
            budgets.append(Budget(name, median(added), LIMIT_US, "µs", interval=interval))
            figures.append(Figure(f"the stock transfer, {blocks:,} blocks", median(c.cpu / 1e3 for c in theirs), "µs"))
            figures.append(Figure(f"added in wall time, {blocks:,} blocks", median(wall), "µs", median_interval(wall)))
        figures.append(Figure("added by each further poll", _poll_cost(ours) / 1e3, "µs"))
    return Part(budgets, figures, samples)


def _transfer(reader: Reader, blocks: int) -> Cost:
    metadata = reader.metadata(blocks)
    post = cost_of(lambda: reader.post(metadata))
    reader.wait()
    rest = cost_of(reader.ask)
    # The export threads get the core before the next one starts, as they do while an engine computes.
    time.sleep(1e-3 if blocks < 1000 else 2e-2)
    return Cost(post.wall + rest.wall, post.cpu + rest.cpu)


def _poll_cost(reader: Reader) -> float:
    """A poll that sees a transfer in progress, less the call without the hook."""
    agent: Any = reader.worker.nixl_wrapper
    table = agent._nixl_telemetry
    transfer = table.start("READ", [1])
    table.prepared(transfer, 1)
    table.posting(1)
    cost = cost_of(lambda: table.polled(1, "PROC"), POLLS).cpu
    table.take(1)
    return cost
