# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What vLLM itself makes of an environment and of arguments, without an engine: a program, for `doctor` to start.

A process of its own, since importing vLLM takes seconds, starts what ends with the process only, and may abort it.
Reads the arguments as a JSON list from standard input; the last line of standard output is a JSON object.

What is touched, beside what ``preflight`` does, and why nothing public serves:

- ``KVConnectorFactory._registry``: whether the plugin was loaded.
- ``nixl.utils._NIXL_SUPPORTED_DEVICE``: which buffers go with a device.

Checked in vLLM 0.28.0 to 0.33.0. What is missing there is left out of the answer.
"""

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any, Final

_VALUES: Final = (
    *("host", "port", "uds", "headless", "api_server_count", "otlp_traces_endpoint", "tensor_parallel_size"),
    *("data_parallel_size", "data_parallel_size_local", "data_parallel_rank", "data_parallel_start_rank"),
    *("data_parallel_backend", "nnodes"),
)
"""Of the arguments, what `doctor` looks at; none of them is a secret."""


def inspect(arguments: Sequence[str]) -> dict[str, Any]:
    """Everything that vLLM says; what it does not say is left out."""
    found: dict[str, Any] = {}
    from vllm import envs, platforms
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.plugins import load_general_plugins

    from nixl_telemetry.seam import wiring

    load_general_plugins()
    found["plugin_loaded"] = set(wiring.STOCK_NAMES) <= set(KVConnectorFactory._registry)
    found["known_variables"] = sorted(envs.environment_variables)
    with contextlib.suppress(Exception):
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import utils

        device = platforms.current_platform.device_type
        if devices := utils._NIXL_SUPPORTED_DEVICE.get(device):
            found["device"], found["buffer_devices"] = device, list(devices)

    try:
        from nixl_telemetry.seam import preflight
    except Exception as error:
        return {**found, "unread": f"{type(error).__name__}: {error}"}
    try:
        args = preflight.parsed(arguments)
    except preflight.PreflightError as error:
        return {**found, "refused": str(error)}
    found["values"] = {name: getattr(args, name) for name in _VALUES if hasattr(args, name)}
    transfer = args.kv_transfer_config
    if transfer is not None:
        found["transfer"] = {**vars(transfer)}
        found |= _connector(transfer, resolve=wiring.resolve if found["plugin_loaded"] else None)
    return found


def _connector(transfer: Any, resolve: Any) -> dict[str, Any]:
    """The class that a config leads to, as a server finds it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from nixl_telemetry.settings import SettingsError

    try:
        if resolve is not None:
            resolve(transfer)
        connector = KVConnectorFactory.get_connector_class(transfer)
    except SettingsError:  # with values; `doctor` looks at the settings itself
        return {}
    except Exception as error:
        return {"connector_error": f"{type(error).__name__}: {error}"}
    return {"connector_class": f"{connector.__module__}.{connector.__qualname__}"}


def main() -> None:
    """Answer on standard output, to which nothing else is printed."""
    arguments = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        found = inspect(arguments)
    print(json.dumps(found, default=str), flush=True)  # noqa: T201  it is what this program is for


if __name__ == "__main__":
    main()
