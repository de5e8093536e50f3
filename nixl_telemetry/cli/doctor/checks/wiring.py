# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether vLLM finds the instrumented connectors, and which are in force."""

from collections.abc import Iterator
from typing import Final

from nixl_telemetry.cli.doctor.finding import Finding, fine, meant, note, problem, shown, warning
from nixl_telemetry.cli.doctor.subject import MODULE, OWN, PLUGIN, STOCK, Subject, spec_of
from nixl_telemetry.settings import AUTO_VARIABLE, SettingsError, is_auto

_RECOMMENDED: Final = f'add "kv_connector_module_path": "{MODULE}"'


def plugin(subject: Subject) -> Iterator[Finding]:
    """vLLM's plugin mechanism finds ours; the module path does without."""
    needed = any(connector.name in OWN and not connector.module for connector in subject.nixl) or subject.auto
    # The module path works without the plugin.
    unneeded = bool(subject.nixl) and all(connector.module == MODULE for connector in subject.nixl)
    level = problem if needed else note if unneeded else warning
    if not subject.has_entry_point:
        yield level(
            "vLLM finds no plugin nixl_telemetry: the entry point in vllm.general_plugins is missing",
            "pip install nixl-telemetry into the Python of the server; a folder on PYTHONPATH has no entry points",
        )
    elif subject.plugin_filter is not None and PLUGIN not in subject.plugin_filter:
        yield level(
            f"VLLM_PLUGINS is {shown(','.join(subject.plugin_filter))}, which leaves out nixl_telemetry",
            f"add it: VLLM_PLUGINS={','.join(filter(None, [*subject.plugin_filter, PLUGIN]))[:200]}",
        )
    elif not subject.plugin_loads:
        yield level(
            "vLLM finds the plugin nixl_telemetry and does not load it",
            "look for `nixl_telemetry could not register` in the server's log",
        )
    else:
        yield fine("vLLM loads the plugin nixl_telemetry")


def module_path(subject: Subject) -> Iterator[Finding]:
    """A path that leads nowhere, or not to the connector."""
    for connector in subject.connectors:
        path = connector.module
        where = f"{connector.where}kv_connector_module_path"
        if path is None or path == MODULE:
            if path == MODULE and connector.name and connector.mode is None:
                similar = meant(connector.name, STOCK)
                yield problem(
                    f"{where} is {MODULE}, which has no {shown(connector.name)}",
                    f"write {similar}" if similar else f"name one of {', '.join(STOCK)}",
                )
            continue
        if not isinstance(path, str) or not path:
            yield problem(f"{where} is {shown(path)}: vLLM refuses it", f"write {MODULE}, or remove it")
        elif _is_typo(path):
            yield problem(f"{where} is {shown(path)}, which has no connectors", f"write {MODULE}")
        elif not _is_there(path):
            yield problem(
                f"{where} is {shown(path)}, and {shown(path.partition('.')[0])} is not installed here",
                f"correct it; the instrumented connectors are in {MODULE}",
            )


def in_force(subject: Subject) -> Iterator[Finding]:
    """Which of the wirings is in force; none means that nothing is observed."""
    try:
        is_auto(subject.environ)
    except SettingsError:
        value = subject.environ.get(AUTO_VARIABLE)
        yield problem(f"{AUTO_VARIABLE} is {shown(value)}, neither true nor false: vLLM does not start", "write 1 or 0")
    for connector in subject.nixl:
        who = f"{connector.where}kv_connector {connector.name}"
        if connector.name in OWN and not connector.module:
            if subject.plugin_loads:
                yield fine(f"{who} is instrumented: by its own name")
            else:
                yield problem(
                    f"{who} is not known to vLLM without the plugin nixl_telemetry",
                    f"write {connector.name.removeprefix('Instrumented')}, and {_RECOMMENDED}",
                )
        elif connector.module == MODULE:
            yield fine(f"{who} is instrumented: by kv_connector_module_path")
        elif connector.module:
            if not isinstance(connector.module, str) or _is_typo(connector.module) or not _is_there(connector.module):
                continue  # said already
            yield warning(
                f"{who} comes from {shown(connector.module)} and is not observed", f"for it to be, {_RECOMMENDED}"
            )
        elif subject.auto:
            yield (
                fine(f"{who} is instrumented: by {AUTO_VARIABLE}")
                if subject.plugin_loads
                else problem(
                    f"{AUTO_VARIABLE} has no effect without the plugin nixl_telemetry", f"instead, {_RECOMMENDED}"
                )
            )
        else:
            yield warning(
                f"{who} is the stock one: nothing is observed",
                f"{_RECOMMENDED}, or set {AUTO_VARIABLE}=1",
            )
        if connector.telemetry and not subject.is_instrumented(connector):
            yield warning(
                f'{connector.where}kv_connector_extra_config["telemetry"] has no effect on a stock connector',
                _RECOMMENDED,
            )


def _is_typo(path: str) -> bool:
    return path.startswith(PLUGIN) or meant(path, [MODULE], 0.8) is not None


def _is_there(path: str) -> bool:
    top = path.partition(".")[0]
    return bool(top) and spec_of(top) is not None
