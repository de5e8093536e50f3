# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What importing the package and registering the plugin cost, each time in a new process."""

import subprocess
import sys
from statistics import median
from typing import Final

from benchmarks.figures import Budget, Part, median_interval

RUNS: Final = {"import": 15, "register": 5}
IMPORT_MS: Final = 20.0
REGISTER_MS: Final = 5.0

_IMPORT: Final = """
import time
start = time.perf_counter()
import nixl_telemetry
print((time.perf_counter() - start) * 1e3)
"""
# What vLLM has imported when it loads its plugins.
_REGISTER: Final = """
import time
import vllm.engine.arg_utils
start = time.perf_counter()
from nixl_telemetry.plugin import register
register()
print((time.perf_counter() - start) * 1e3)
"""


def measure() -> Part:
    """The median of several processes."""
    imported = _milliseconds(_IMPORT, RUNS["import"])
    registered = _milliseconds(_REGISTER, RUNS["register"])
    budgets = [
        Budget("import nixl_telemetry", median(imported), IMPORT_MS, "ms", interval=median_interval(imported)),
        Budget(
            "plugin.register() in a process with vLLM",
            median(registered),
            REGISTER_MS,
            "ms",
            interval=median_interval(registered),
        ),
    ]
    return Part(budgets, samples={"import ms": imported, "register ms": registered})


def _milliseconds(script: str, runs: int) -> list[float]:
    def run() -> float:
        output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        return float(output.split()[-1])

    run()  # the first one may have to compile
    return [run() for _ in range(runs)]
