# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What is shipped, and which part may import which: the house rules of design section 2."""

import ast
import configparser
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = "nixl_telemetry"

# --------------------------------------------------------------------------------------------------------------- Rules


@dataclass(frozen=True)
class Rule:
    """What one part of the package may import.

    `always` may be imported anywhere, `lazily` only inside a function or under TYPE_CHECKING; `engine` allows vLLM,
    NIXL and torch, anywhere. Every part may import itself and `nixl_telemetry/__init__.py`.
    """

    always: str = ""
    lazily: str = ""
    engine: bool = False


# A part is a top-level folder or module of the package.
RULES: Final = {
    #   part                 may import
    "__init__":    Rule(),
    "settings":    Rule(),  # for every part to use
    "forking":     Rule(),  # the same
    # seam → operations → signals → compat, never back
    "compat":      Rule(always="settings"),
    "audit":       Rule(always="settings forking"),  # also read where nothing runs
    "signals":     Rule(always="settings forking compat audit"),
    "operations":  Rule(always="settings compat audit signals"),
    "seam":        Rule(always="settings compat audit signals operations", engine=True),
    "mixin":       Rule(always="compat signals"),  # dashboards and alerts over the metrics
    # entry points: what vLLM loads
    "connectors":  Rule(always="settings signals seam plugin"),
    "plugin":      Rule(always="settings", lazily="seam connectors"),
    # entry points: what an operator starts, also where vLLM is not installed
    "testbed":     Rule(always="settings compat signals"),
    "cli":         Rule(always="settings compat audit signals operations testbed mixin", lazily="seam"),
}  # fmt: skip

ENGINE: Final = frozenset({"vllm", "nixl", "torch"})
"""Third-party packages that only a part with `engine=True` may import, also lazily."""

HEAVY: Final = frozenset({"vllm", "torch", "nixl", "opentelemetry", "prometheus_client"})
"""Packages that `import nixl_telemetry` must not bring in."""

SOURCES: Final = ("alerts", "benchmarks", "dashboards", "examples", PACKAGE, "tests", "tools")
"""Folders whose Python files carry the licence header."""

HEADER: Final = """\
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""

# -------------------------------------------------------------------------------------------------------------- Reading

When = Literal["always", "lazily"]


def imports(source: str, module: str, *, is_package: bool) -> Iterator[tuple[str, When, int]]:
    """Every import of a module as (full name, when, line); `from a import b` counts as `a.b`."""

    def visit(node: ast.AST, when: When) -> Iterator[tuple[str, When, int]]:
        match node:
            case ast.Import():
                yield from ((alias.name, when, node.lineno) for alias in node.names)
            case ast.ImportFrom():
                parents = module.split(".")[: -node.level + is_package or None] if node.level else []
                base = ".".join([*parents, *filter(None, [node.module])])
                yield from ((f"{base}.{alias.name}", when, node.lineno) for alias in node.names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name, when, node.lineno
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                when = "lazily"
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                when = "lazily"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, when)

    yield from visit(ast.parse(source), "always")


def part_of(name: str) -> str:
    """The part that a full name of this package belongs to; a name that is no part is one of `__init__`."""
    part = [*name.split("."), "__init__"][1]
    return part if part in RULES else "__init__"


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """The imports of one module that RULES forbids."""
    part = part_of(f"{module}.__init__" if module == PACKAGE else module)
    rule = RULES[part]
    allowed = {
        "always": {part, "__init__", *rule.always.split()},
        "lazily": {part, "__init__", *rule.always.split(), *rule.lazily.split()},
    }
    found = []
    for name, when, line in imports(source, module, is_package=is_package):
        top = name.split(".")[0]
        if (top in ENGINE and not rule.engine) or (top == PACKAGE and part_of(name) not in allowed[when]):
            found.append(f"{module}:{line} imports {name} ({when})")
    return found


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package as (full name, file)."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


# ------------------------------------------------------------------------------------------------------------ Direction


def test_every_part_has_a_rule() -> None:
    """A new top-level module or folder says what it may import, instead of slipping through."""
    parts = {path.stem if path.is_file() else path.name for path in (ROOT / PACKAGE).iterdir()}
    code = {part for part in parts if (ROOT / PACKAGE / part).is_dir() or (ROOT / PACKAGE / f"{part}.py").is_file()}

    assert code - {"__pycache__"} <= RULES.keys()


@pytest.mark.parametrize(("module", "path"), [pytest.param(*entry, id=entry[0]) for entry in modules()])
def test_imports_follow_the_direction(module: str, path: Path) -> None:
    """Imports go seam → operations → signals → compat, and only the seam sees vLLM and NIXL."""
    found = violations(path.read_text(encoding="utf-8"), module, is_package=path.name == "__init__.py")

    assert found == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("compat.diff", "from nixl_telemetry.signals import semconv"),
        ("compat.diff", "from nixl_telemetry import signals"),
        ("compat.diff", "from ..signals import semconv"),
        ("signals.traces", "import nixl_telemetry.operations.handshake"),
        ("operations.lease", "def f():\n    from nixl_telemetry.seam import agent"),
        ("operations.lease", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import vllm.config"),
        ("settings", "from nixl_telemetry.compat import factors"),
        ("connectors", "from vllm.distributed import kv_transfer"),
        ("plugin", "from nixl_telemetry.seam import agent"),
        ("plugin", "def register():\n    import vllm"),
        ("testbed.servers", "import nixl"),
        ("cli.main", "from nixl_telemetry.seam import versions"),
        ("cli.doctor", "def f():\n    import importlib\n    importlib.import_module('vllm.version')"),
        ("signals.audit", "from nixl_telemetry.testbed import servers"),
        ("seam.agent", "from nixl_telemetry.cli import main"),
    ],
)
def test_a_forbidden_import_is_found(module: str, source: str) -> None:
    assert len(violations(source, f"{PACKAGE}.{module}")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("compat.diff", "import nixl_telemetry\nfrom nixl_telemetry import __version__, settings"),
        ("compat.diff", "from . import factors\nfrom .factors import FACTORS\nfrom .. import settings"),
        ("operations.lease", "from nixl_telemetry.compat import diff\nfrom nixl_telemetry.signals import traces"),
        ("seam.agent", "import vllm, nixl, torch\nfrom nixl_telemetry.operations import lease"),
        ("plugin", "def register():\n    from nixl_telemetry.seam import versions"),
        ("cli.demo", "from nixl_telemetry.testbed import servers"),
        ("cli.doctor", "def f():\n    from nixl_telemetry.seam import versions"),
    ],
)
def test_an_allowed_import_is_not_found(module: str, source: str) -> None:
    assert violations(source, f"{PACKAGE}.{module}") == []


# --------------------------------------------------------------------------------------------------------------- Weight


def test_importing_the_package_imports_nothing_heavy() -> None:
    """vLLM loads the package in every process, whether or not NIXL is used there."""
    code = "import sys; before = set(sys.modules); import nixl_telemetry; print(*(set(sys.modules) - before))"

    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    brought_in = {name.split(".")[0] for name in out.split()}
    assert PACKAGE in brought_in
    assert brought_in & HEAVY == set()


# --------------------------------------------------------------------------------------------------------------- Wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel that a release would ship, built without the network."""
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(target)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def dist_info(wheel: zipfile.ZipFile, name: str) -> str:
    (member,) = (member for member in wheel.namelist() if member.endswith(f".dist-info/{name}"))
    return wheel.read(member).decode()


def test_the_wheel_ships_the_package_only(wheel: zipfile.ZipFile) -> None:
    """The type marker and the licence are there; tests and tools are not."""
    names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}

    assert f"{PACKAGE}/py.typed" in names
    assert {PACKAGE} == {top for top in tops if not top.endswith(".dist-info")}
    assert not [name for name in names if "test_" in name or "conftest" in name or "__pycache__" in name]
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_registers_the_plugin_and_the_command(wheel: zipfile.ZipFile) -> None:
    """The group is the one that vLLM reads (`vllm.general_plugins`, not `vllm.plugins`)."""
    entry_points = configparser.ConfigParser()
    entry_points.read_string(dist_info(wheel, "entry_points.txt"))

    assert {name: dict(section) for name, section in entry_points.items() if section} == {
        "vllm.general_plugins": {"nixl_telemetry": "nixl_telemetry.plugin:register"},
        "console_scripts": {"nixl-telemetry": "nixl_telemetry.cli.main:app"},
    }


@pytest.mark.parametrize("target", ["nixl_telemetry.plugin:register", "nixl_telemetry.cli.main:app"])
def test_an_entry_point_leads_to_something_callable(target: str) -> None:
    module, name = target.split(":")
    code = f"import {module}, sys; sys.exit(not callable({module}.{name}))"

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_wheel_does_not_ask_for_vllm(wheel: zipfile.ZipFile) -> None:
    """Installing the suite must not move the vLLM, the NIXL or the torch of a serving environment."""
    requirements = [
        line.removeprefix("Requires-Dist: ")
        for line in dist_info(wheel, "METADATA").splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]

    assert requirements
    assert not [line for line in requirements if line.startswith(tuple(ENGINE))]
    assert not [line for line in requirements if "<" in line or "==" in line]


# ------------------------------------------------------------------------------------------------------------- Licence


@pytest.mark.parametrize("folder", SOURCES)
def test_every_python_file_has_the_licence_header(folder: str) -> None:
    """Two lines at the top, or right after `#!`."""

    def has_header(path: Path) -> bool:
        text = path.read_text(encoding="utf-8")
        return (text.partition("\n")[2] if text.startswith("#!") else text).startswith(HEADER)

    sources = [path for path in sorted((ROOT / folder).rglob("*.py")) if "node_modules" not in path.parts]

    assert [str(path.relative_to(ROOT)) for path in sources if not has_header(path)] == []
