# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""All three wirings lead to the instrumented classes and take the stock name's branch at every gate."""

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from nixl_telemetry import connectors
from nixl_telemetry.plugin import register
from nixl_telemetry.seam import wiring
from nixl_telemetry.seam.versions import unsupported, vllm_version
from nixl_telemetry.settings import Settings, SettingsError

STOCK = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
MODULE = "nixl_telemetry.connectors"


def config_of(wire: str, stock: str, monkeypatch: pytest.MonkeyPatch, **kwargs: Any) -> Any:
    """A config in one of the three wirings, as it is after vLLM has made its VllmConfig."""
    given: dict[str, Any] = {"kv_connector": stock, "kv_role": "kv_both", **kwargs}
    if wire == "module":
        given["kv_connector_module_path"] = MODULE
    elif wire == "name":
        given["kv_connector"] = f"Instrumented{stock}"
    else:
        monkeypatch.setenv("NIXLTEL_AUTO", "1")
    config = KVTransferConfig(**given)
    wiring.resolve(config)
    return config


WIRES = pytest.mark.parametrize("wire", ["module", "name", "auto"])
NAMES = pytest.mark.parametrize("stock", STOCK)


@WIRES
@NAMES
def test_the_factory_finds_the_instrumented_class(wire: str, stock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever wiring, the class is ours."""
    config = config_of(wire, stock, monkeypatch)

    found = KVConnectorFactory.get_connector_class(config)

    assert found is getattr(connectors, stock)
    assert found.__name__ == ("InstrumentedNixlPushConnector" if "Push" in stock else "InstrumentedNixlPullConnector")


def test_registry_knows_the_real_class_names() -> None:
    """MultiConnector rebuilds stats by class name."""
    for connector in (connectors.NixlPullConnector, connectors.NixlPushConnector):
        assert KVConnectorFactory.get_connector_class_by_name(connector.__name__) is connector


@WIRES
@NAMES
def test_inside_a_multi_connector(wire: str, stock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Children are dicts until MultiConnector makes configs of them."""
    child: dict[str, Any] = {"kv_connector": stock, "kv_role": "kv_both"}
    if wire == "module":
        child["kv_connector_module_path"] = MODULE
    elif wire == "name":
        child["kv_connector"] = f"Instrumented{stock}"
    else:
        monkeypatch.setenv("NIXLTEL_AUTO", "1")
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": [child, other]}
    )
    wiring.resolve(config)

    ours, theirs = config.kv_connector_extra_config["connectors"]
    assert ours.pop("kv_connector_extra_config") == {"telemetry": Settings.load({}, {}).model_dump()}
    assert ours == {"kv_connector": stock, "kv_role": "kv_both", "kv_connector_module_path": MODULE}
    assert theirs == other


def test_variables_are_written_into_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they hold in every process: Ray passes vLLM's variables on to its workers, and not ours."""
    monkeypatch.setenv("NIXLTEL_TRACES", "0")
    config = config_of("module", "NixlConnector", monkeypatch, kv_connector_extra_config={"num_threads": 1})
    monkeypatch.delenv("NIXLTEL_TRACES")

    assert Settings.load(config.kv_connector_extra_config) == Settings.load({"telemetry": {"traces": False}}, {})
    assert config.kv_connector_extra_config["num_threads"] == 1


def test_stock_stays_stock() -> None:
    """Without a wish for telemetry nothing is touched."""
    config = KVTransferConfig(kv_connector="NixlPushConnector", kv_role="kv_both")
    wiring.resolve(config)
    wiring.resolve(None)

    assert config.kv_connector_module_path is None
    assert KVConnectorFactory.get_connector_class(config).__module__.startswith("vllm.")


def test_another_s_module_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXLTEL_AUTO does not take over a connector that somebody else wired."""
    monkeypatch.setenv("NIXLTEL_AUTO", "1")
    config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", kv_connector_module_path="theirs")
    wiring.resolve(config)

    assert config.kv_connector_module_path == "theirs"


@pytest.mark.parametrize("nested", [False, True])
def test_bad_settings_are_refused_when_the_config_is_made(nested: bool) -> None:
    """Before a model is loaded, in MultiConnector too."""
    mine = {
        "kv_connector": "InstrumentedNixlConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"telemetry": {"tracing": True}},
    }
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [mine]},
    }

    with pytest.raises(SettingsError, match="unknown key 'tracing'"):
        wiring.resolve(KVTransferConfig(**(multi if nested else mine)))


def test_register_is_idempotent() -> None:
    """vLLM calls plugins in every process, more than once."""
    register()
    hooked = VllmConfig.__post_init__
    register()

    assert VllmConfig.__post_init__ is hooked


@functools.cache
def gates() -> tuple[tuple[str, str, str], ...]:
    """Every place in vLLM that compares a connector's name; the walk over its sources takes seconds."""
    return tuple(_walk())


def _walk() -> Iterator[tuple[str, str, str]]:
    """Every place in vLLM that compares a connector's name: (place, what is called or compared, the name).

    Found in the syntax tree: ``x.has_connector("Name")``, also with names from a loop over a literal tuple, and
    comparisons of ``x.kv_connector`` or ``x.get("kv_connector")`` with a literal or a tuple of literals.
    """
    root = Path(vllm.__file__).parent
    for path in root.rglob("*.py"):
        source = path.read_text()
        if not ("kv_connector" in source or "has_connector" in source) or path.name == "factory.py":
            continue
        tree = ast.parse(source)
        loops = {
            node.target.id: _strings(node.iter)
            for node in ast.walk(tree)
            if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name)
        }
        for node in ast.walk(tree):
            place = f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}"
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "has_connector"
            ):
                argument = node.args[0]
                names = loops.get(argument.id, []) if isinstance(argument, ast.Name) else _strings(argument)
                yield from ((place, "has_connector", name) for name in names)
            elif isinstance(node, ast.Compare) and _is_name_of_connector(node.left):
                yield from ((place, "compare", name) for side in node.comparators for name in _strings(side))


def _strings(node: ast.expr) -> list[str]:
    return [leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str)]


def _is_name_of_connector(node: ast.expr) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "kv_connector"
    return isinstance(node, ast.Call) and _strings(node) == ["kv_connector"]


@WIRES
@NAMES
def test_name_gates(wire: str, stock: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every gate answers for the wired config as for the stock one, at the top and inside a MultiConnector."""
    found = gates()
    if vllm_version() >= "0.29":
        assert any(name.startswith("Nixl") for _, _, name in found), "the walk finds no gate at all"

    def answers(config: Any) -> list[tuple[str, str, bool]]:
        return [
            (place, name, config.has_connector(name) if how == "has_connector" else config.kv_connector == name)
            for place, how, name in found
        ]

    plain = KVTransferConfig(kv_connector=stock, kv_role="kv_both")
    assert answers(config_of(wire, stock, monkeypatch)) == answers(plain)


def test_the_walk_finds_the_known_gates() -> None:
    """Those of vLLM 0.32, by hand: if it finds less, the test above proves less."""
    if not vllm_version().startswith("0.32"):
        pytest.skip("the list is of 0.32")
    by_file: dict[str, int] = {}
    for place, _how, name in gates():
        if name.startswith("Nixl"):
            by_file[place.split(":")[0]] = by_file.get(place.split(":")[0], 0) + 1

    assert by_file == {"config/vllm.py": 7, "platforms/cpu.py": 3}


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.27.1", False),
        ("0.28.0", True),
        ("0.32.0+cpu", True),
        ("0.33.1.dev5+g123", True),
        ("0.34.0", False),
        ("dev", False),
    ],
)
def test_supported_versions(version: str, supported: bool) -> None:
    """The message names the range and the version."""
    reason = unsupported(version)

    assert (reason is None) == supported
    if reason is not None:
        assert "0.28 to 0.33" in reason
        assert version in reason


def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own."""
    environ = {**os.environ, **env}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False)


def test_an_unsupported_vllm_runs_stock() -> None:
    """One message, then vLLM's own classes."""
    result = run(
        "import vllm; vllm.__version__ = '0.99.0'\n"
        "from nixl_telemetry import connectors as c\n"
        "print([c.NixlConnector.__module__, c.NixlPushConnector.__module__, c.InstrumentedNixlPushConnector.__name__])"
    )

    assert "['vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector', 'vllm." in result.stdout
    assert "'NixlPushConnector']" in result.stdout
    assert (result.stdout + result.stderr).count("supports vLLM 0.28 to 0.33, and this is vLLM 0.99.0") == 1
