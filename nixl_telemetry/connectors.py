# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The connectors, under the names that a user writes in vLLM's config.

    {"kv_connector": "NixlPushConnector", "kv_connector_module_path": "nixl_telemetry.connectors", ...}

On a vLLM that is not supported these are vLLM's own connectors: serving goes on without telemetry, and one log line
says so.
"""

from typing import Any

from nixl_telemetry.plugin import register
from nixl_telemetry.seam.versions import unsupported, vllm_version
from nixl_telemetry.signals.logger import logger

__all__ = [
    "InstrumentedNixlConnector",
    "InstrumentedNixlPullConnector",
    "InstrumentedNixlPushConnector",
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
]


def _load() -> tuple[Any, Any]:
    reason = unsupported(vllm_version())
    if reason is None:
        try:
            from nixl_telemetry.seam.connector import InstrumentedNixlPullConnector, InstrumentedNixlPushConnector

            return InstrumentedNixlPullConnector, InstrumentedNixlPushConnector
        except Exception as error:
            reason = f"the NIXL connectors run as the stock ones, without telemetry: {error!r}"
    logger().warning(reason)
    from nixl_telemetry.seam.wiring import stock_connector

    return stock_connector("NixlPullConnector"), stock_connector("NixlPushConnector")


# MultiConnector looks classes up in vLLM's registry by their real names, also where the plugin was not loaded.
register()
InstrumentedNixlPullConnector, InstrumentedNixlPushConnector = _load()
InstrumentedNixlConnector = InstrumentedNixlPullConnector
NixlConnector = NixlPullConnector = InstrumentedNixlPullConnector
NixlPushConnector = InstrumentedNixlPushConnector
