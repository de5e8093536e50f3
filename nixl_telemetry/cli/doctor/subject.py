# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What is examined: an environment, and the config of one instance in it."""

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Final

from nixl_telemetry.settings import AUTO_VARIABLE, CONFIG_KEY, ENV_PREFIX, Settings, SettingsError, is_auto, variable_of

MODULE: Final = "nixl_telemetry.connectors"
STOCK: Final = {"NixlConnector": "pull", "NixlPullConnector": "pull", "NixlPushConnector": "push"}
OWN: Final = {f"Instrumented{name}": mode for name, mode in STOCK.items()}
MODES: Final = {**STOCK, **OWN}
"""The transfer mode of each name of a NIXL connector."""
MULTI: Final = "MultiConnector"
PLUGIN: Final = "nixl_telemetry"
_GROUP: Final = "vllm.general_plugins"
_DIGITS: Final = 9


@dataclass(frozen=True)
class Connector:
    """The config of one connector."""

    where: str
    """Where it stands, in front of a key: empty, or that of a child of a MultiConnector."""
    config: Mapping[str, Any]

    @property
    def name(self) -> str:
        """``kv_connector``; empty for what is no text."""
        name = self.config.get("kv_connector")
        return name if isinstance(name, str) else ""

    @property
    def mode(self) -> str | None:
        """``pull`` or ``push``; None: it is no NIXL connector."""
        return MODES.get(self.name)

    @property
    def module(self) -> Any:
        """``kv_connector_module_path``."""
        return self.config.get("kv_connector_module_path")

    @property
    def extra(self) -> Mapping[str, Any]:
        """``kv_connector_extra_config``; empty for what is no object."""
        extra = self.config.get("kv_connector_extra_config")
        return extra if isinstance(extra, Mapping) else {}

    @property
    def telemetry(self) -> Any:
        """The settings in it."""
        return self.extra.get(CONFIG_KEY, {})


@dataclass(frozen=True)
class VllmInstalled:
    """A vLLM that is installed, seen without importing it."""

    folder: Path
    version: str

    def read(self, name: str) -> str:
        """A source of it; empty where it has none of this name."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return ""


@dataclass(frozen=True)
class Subject:
    """Everything that the checks look at."""

    environ: Mapping[str, str]
    vllm: VllmInstalled | None = None
    transfer: Mapping[str, Any] | None = None
    """``--kv-transfer-config``; None: not given."""
    transfer_error: str | None = None
    serving: bool = False
    """Whether arguments of a server were given."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Those of them that matter, by vLLM's names."""
    config_file: str | None = None
    """A file of arguments that was not read."""
    peers: Sequence[str] = ()
    """Hosts where peers run."""
    peer_configs: Sequence[Mapping[str, Any]] = ()
    asked: Mapping[str, Any] = field(default_factory=dict)
    """What vLLM itself says; empty: not asked, or no answer."""
    not_asked: str | None = None
    """Why vLLM was asked and did not answer."""
    quick: bool = False
    patience: float = 120.0
    """Seconds after which all checks are over."""
    seconds: float = 3.0
    """How long one attempt to connect may take."""

    @cached_property
    def connectors(self) -> tuple[Connector, ...]:
        """All connectors of the config, the children of a MultiConnector included."""
        return tuple(_connectors(self.transfer)) if self.transfer is not None else ()

    @cached_property
    def nixl(self) -> tuple[Connector, ...]:
        """Those that are NIXL's."""
        return tuple(connector for connector in self.connectors if connector.mode)

    @cached_property
    def plugin_filter(self) -> tuple[str, ...] | None:
        """``VLLM_PLUGINS`` as vLLM reads it."""
        value = self.environ.get("VLLM_PLUGINS")
        return None if value is None else tuple(value.split(","))

    @cached_property
    def has_entry_point(self) -> bool:
        """Whether the plugin is among the installed ones."""
        return any(point.name == PLUGIN for point in importlib.metadata.entry_points(group=_GROUP))

    @cached_property
    def plugin_loads(self) -> bool:
        """Whether vLLM loads the plugin: as vLLM says, or else as it decides."""
        if "plugin_loaded" in self.asked:
            return bool(self.asked["plugin_loaded"])
        return self.has_entry_point and (self.plugin_filter is None or PLUGIN in self.plugin_filter)

    @cached_property
    def auto(self) -> bool:
        """Whether stock names are asked to be the instrumented ones."""
        try:
            return is_auto(self.environ)
        except SettingsError:
            return False

    def is_instrumented(self, connector: Connector) -> bool:
        """Whether a connector resolves to an instrumented one."""
        if connector.mode is None:
            return False
        if connector.name in OWN:
            return self.plugin_loads or connector.module == MODULE
        return connector.module == MODULE or (not connector.module and self.auto and self.plugin_loads)

    @cached_property
    def settings(self) -> Settings:
        """What is set, as far as it is valid."""
        chosen = next((one for one in self.nixl if self.is_instrumented(one)), None)
        given: dict[str, Any] = {}
        for name in Settings.model_fields:
            value = self.environ.get(variable_of(name))
            if value is not None and bad_setting(name, value) is None:
                given[name] = value
        telemetry = chosen.telemetry if chosen else {}
        if isinstance(telemetry, Mapping):
            given |= {
                name: value
                for name, value in telemetry.items()
                if name in Settings.model_fields and bad_setting(name, value) is None
            }
        return Settings.model_validate(given)

    @property
    def ports(self) -> range | None:
        """The side channels' ports of this host, one for each data-parallel rank; None: the variable is no port."""
        text = self.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")
        try:
            base = int(text) if len(text) <= _DIGITS else -1
        except ValueError:
            return None
        if base < 0:
            return None
        rank = self.number("data_parallel_rank") or self.number("data_parallel_start_rank") or 0
        alone = self.number("data_parallel_rank") is not None
        local = self.number("data_parallel_size_local")
        count = 1 if alone else (self.number("data_parallel_size") or 1) if local is None else local
        return range(base + rank, base + rank + min(max(count, 0), 65_536))

    def number(self, name: str) -> int | None:
        """A value that is a whole number."""
        value = self.values.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def text(self, name: str) -> str | None:
        """A value that is a text with something in it."""
        value = self.values.get(name)
        return value if isinstance(value, str) and value else None


def bad_setting(name: str, value: Any) -> str | None:
    """What is wrong with the value of a setting, if anything is."""
    try:
        Settings.load({CONFIG_KEY: {name: value}}, {})
    except SettingsError as error:
        return str(error).rpartition(": ")[2].rstrip(".")
    return None


def is_setting_variable(name: str) -> bool:
    """Whether a variable is one of ours, known or not."""
    return name.startswith(ENV_PREFIX) and not name.startswith(f"{ENV_PREFIX}TESTBED_") and name != AUTO_VARIABLE


def installed_vllm() -> VllmInstalled | None:
    """The vLLM of this Python, without importing it."""
    spec = spec_of("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    found = VllmInstalled(Path(next(iter(spec.submodule_search_locations))), "unknown")
    if match := re.search(
        r"""^__version__ = (?:version = )?["']([^"']+)["']""", found.read("_version.py"), re.MULTILINE
    ):
        return VllmInstalled(found.folder, match[1])
    for distribution in importlib.metadata.packages_distributions().get("vllm", ()):
        return VllmInstalled(found.folder, importlib.metadata.version(distribution))
    return found


def spec_of(package: str) -> ModuleSpec | None:
    """Where a package is, without importing it; None: it is not installed."""
    try:
        return importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None


def _connectors(transfer: Mapping[str, Any]) -> Iterator[Connector]:
    top = Connector("", transfer)
    yield top
    children = top.extra.get("connectors")
    if top.name == MULTI and isinstance(children, list):
        for number, child in enumerate(children[:64]):
            if isinstance(child, Mapping):
                yield Connector(f"connectors[{number}].", child)
