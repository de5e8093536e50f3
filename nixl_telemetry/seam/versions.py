# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Which vLLM runs here, and what differs between its versions.

Checked against vLLM 0.28.0 to 0.33.0. What moved between them, and how the seam takes it:

- ``_nixl_handshake`` has no ``remote_dcp_size`` in 0.28: arguments are read by parameter name and passed through.
- ``record_transfer(None)`` is known from 0.32 on: our stats class accepts it everywhere.
- Own names and ``has_connector``: 0.28 compares no names at all; later versions do in ``VllmConfig``, see wiring.py.
"""

import functools
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

SUPPORTED: Final = ((0, 28), (0, 33))
"""First and last supported minor version of vLLM, both included."""


@functools.cache
def vllm_version() -> str:
    """The version of vLLM, as it goes into the compatibility hash."""
    import vllm

    return str(vllm.__version__)


@functools.cache
def nixl_version() -> str:
    """The version of the NIXL library; ``unknown`` where no distribution tells it."""
    for distribution in ("nixl", "nixl-cu12", "nixl-cu13", "nixl-rocm"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


@functools.cache
def connector_version() -> int:
    """vLLM's ``NIXL_CONNECTOR_VERSION``."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION

    return int(NIXL_CONNECTOR_VERSION)


def unsupported(version: str) -> str | None:
    """Why this vLLM cannot be instrumented; ``None`` if it can."""
    first, last = (".".join(map(str, minor)) for minor in SUPPORTED)
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and SUPPORTED[0] <= (int(found[1]), int(found[2])) <= SUPPORTED[1]:
        return None
    return (
        f"nixl_telemetry supports vLLM {first} to {last}, and this is vLLM {version}: the NIXL connectors run as the "
        "stock ones, without telemetry. Install a supported vLLM or a newer nixl_telemetry."
    )


def is_nixl_error(error: BaseException) -> bool:
    """Whether the exception was raised by the NIXL library: its classes live in ``nixl*._bindings``."""
    return type(error).__module__.startswith("nixl")


def is_missing_telemetry(error: BaseException) -> bool:
    """Whether NIXL says that it has no telemetry for a finished transfer.

    Matched by name: the class lives in a package that differs by platform, and NIXL's Python API does not export it.
    """
    return is_nixl_error(error) and type(error).__name__ == "nixlNoTelemetryError"


class Parameters:
    """Reads arguments of a method by parameter name, whether they came by position or by keyword.

    Args:
        method: The stock method, of whichever vLLM is installed.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        _, *self._names = inspect.signature(method).parameters
        self._positions = {name: index for index, name in enumerate(self._names)}

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """All arguments of a call by name; `args` are those after ``self``."""
        return {**dict(zip(self._names, args, strict=False)), **kwargs}

    def get(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], default: Any = None) -> Any:
        """The argument ``name`` of a call; `args` are those after ``self``."""
        if name in kwargs:
            return kwargs[name]
        position = self._positions.get(name, len(args))
        return args[position] if position < len(args) else default

    def replaced(
        self, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call with another value for ``name``, which must have been given."""
        if name in kwargs:
            return tuple(args), {**kwargs, name: value}
        position = self._positions[name]
        return (*args[:position], value, *args[position + 1 :]), dict(kwargs)
