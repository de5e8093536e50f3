# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Makes vLLM find the instrumented connectors: under their own names, and under the stock names if asked.

vLLM compares the *string* ``kv_connector`` at many places, some of which guard against silent KV corruption. So an own
name never reaches them: when a ``VllmConfig`` is made, it is rewritten to the stock name with
``kv_connector_module_path``, the wiring that vLLM documents for connectors of others. All gates then see the stock
name, in ``MultiConnector`` too.
"""

import functools
import sys
from collections.abc import MutableMapping
from typing import Any, Final, Protocol

from nixl_telemetry.seam.versions import unsupported, vllm_version
from nixl_telemetry.signals.logger import logger

MODULE: Final = "nixl_telemetry.connectors"
STOCK_NAMES: Final = {
    "InstrumentedNixlConnector": "NixlConnector",
    "InstrumentedNixlPullConnector": "NixlPullConnector",
    "InstrumentedNixlPushConnector": "NixlPushConnector",
}
"""The stock name of each own name."""

_FACTORY: Final = "vllm.distributed.kv_transfer.kv_connector.factory"
_INSTALLED: Final = "_nixl_telemetry_installed"


def install() -> None:
    """Register the own names and watch for configs; calling it again does nothing."""
    from vllm.config import VllmConfig

    if _FACTORY in sys.modules:
        _register_names()

    stock = VllmConfig.__post_init__
    if hasattr(stock, _INSTALLED):
        return

    @functools.wraps(stock)
    def resolve_first(self: Any, *args: Any, **kwargs: Any) -> None:
        from nixl_telemetry.settings import SettingsError

        try:
            if self.kv_transfer_config is not None:
                _register_names()
            resolve(self.kv_transfer_config)
        except SettingsError:
            raise
        except Exception as error:
            logger().warning("nixl_telemetry could not look at kv_transfer_config: %r", error)
        stock(self, *args, **kwargs)

    setattr(resolve_first, _INSTALLED, True)
    VllmConfig.__post_init__ = resolve_first


def _register_names() -> None:
    """Make the factory know the own names.

    Not before it is needed: importing it takes half a second, and most processes of most vLLMs transfer no KV.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    for name in STOCK_NAMES:
        if name not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(name, MODULE, name)


class _Config(Protocol):
    kv_connector: str | None
    kv_connector_module_path: str | None
    kv_connector_extra_config: dict[str, Any]


def resolve(config: _Config | None) -> None:
    """Rewrite a ``KVTransferConfig`` in place, with its children if it is a ``MultiConnector``'s.

    Raises:
        SettingsError: If the config is for us and has an unknown or bad setting.
    """
    if config is None:
        return
    _resolve_fields(vars(config))
    if config.kv_connector == "MultiConnector":
        for child in config.kv_connector_extra_config.get("connectors", ()):
            _resolve_fields(child)


def _resolve_fields(config: MutableMapping[str, Any]) -> None:
    # Not at the top: the plugin runs in every process, and building the settings model takes longer than all the rest.
    from nixl_telemetry.settings import CONFIG_KEY, Settings, is_auto

    name = config.get("kv_connector")
    if name in STOCK_NAMES:
        config["kv_connector"] = STOCK_NAMES[name]
        config["kv_connector_module_path"] = MODULE
    elif name in STOCK_NAMES.values() and is_auto() and not config.get("kv_connector_module_path"):
        config["kv_connector_module_path"] = MODULE
    if config.get("kv_connector_module_path") == MODULE and not unsupported(vllm_version()):
        extra_config = config.get("kv_connector_extra_config") or {}
        # Written out, so that they hold in every process: Ray does not pass our variables on to its workers.
        settings = Settings.load(extra_config).model_dump()
        config["kv_connector_extra_config"] = {**extra_config, CONFIG_KEY: settings}


def stock_connector(name: str) -> Any:
    """vLLM's own connector of this name, in any version; ``NixlConnector`` where the name is not known yet."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    load = KVConnectorFactory._registry.get(name) or KVConnectorFactory._registry["NixlConnector"]
    return load()
