# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What importing the package and registering the plugin cost, each time in a new process."""

import subprocess
import sys
from statistics import median
from typing import Final

from benchmarks.figures import Budget, Figure, Part, median_interval

RUNS: Final = {"import": 15, "register": 3}
IMPORT_MS: Final = 20.0
REGISTER_MS: Final = 5.0

_IMPORT: Final = """
import time
start = time.perf_counter()
import nixl_telemetry
print((time.perf_counter() - start) * 1e3)
"""
_REGISTER: Final = """
import importlib, sys, time
importlib.import_module(sys.argv[1])
start = time.perf_counter()
from nixl_telemetry.plugin import register
register()
print((time.perf_counter() - start) * 1e3)
"""


def measure() -> Part:
    """The median of several processes."""
    imported = _milliseconds(_IMPORT, RUNS["import"])
    # What vLLM has imported when it loads its plugins. Its API server has not imported the factory of the connectors
    # by then, and what registers with that is the first who needs it.
    registered = _milliseconds(_REGISTER, RUNS["register"], "vllm.v1.engine.core")
    in_api_server = _milliseconds(_REGISTER, RUNS["register"], "vllm.entrypoints.openai.api_server")
    budgets = [
        Budget("import nixl_telemetry", median(imported), IMPORT_MS, "ms", interval=median_interval(imported)),
        Budget(
            "plugin.register() in the engine core's process",
            median(registered),
            REGISTER_MS,
            "ms",
            interval=median_interval(registered),
        ),
    ]
    name = "plugin.register() in the API server, with vLLM's factory of connectors, which is imported for it"
    figures = [Figure(name, median(in_api_server), "ms", median_interval(in_api_server))]
    samples = {"import ms": imported, "register ms": registered, "register in the API server ms": in_api_server}
    return Part(budgets, figures, samples)


def _milliseconds(script: str, runs: int, *arguments: str) -> list[float]:
    def run() -> float:
        command = [sys.executable, "-c", script, *arguments]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return float(output.split()[-1])

    run()  # the first one may have to compile
    return [run() for _ in range(runs)]
