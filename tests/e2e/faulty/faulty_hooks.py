# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The instrumented connectors, with every hook of the telemetry raising."""

import importlib
import inspect
import pkgutil
from typing import Any

from nixl_telemetry import operations, seam
from nixl_telemetry.connectors import *  # noqa: F403
from nixl_telemetry.signals.telemetry import guarded

SPARED = ("with_updates",)
"""Carries the error counters, by which the test sees that the others raise."""


def _raising(name: str) -> Any:
    def raises(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"injected into {name}")

    raises.__qualname__ = name
    return guarded(raises)


_MODULES = [
    importlib.import_module(f"{package.__name__}.{module.name}")
    for package in (operations, seam)
    for module in pkgutil.iter_modules(package.__path__)
]
for module in _MODULES:
    for owner in list(vars(module).values()):
        if inspect.isclass(owner) and owner.__module__ == module.__name__:
            for name, value in list(vars(owner).items()):
                if hasattr(value, "__guarded__") and name not in SPARED:
                    setattr(owner, name, _raising(f"{owner.__name__}.{name}"))
