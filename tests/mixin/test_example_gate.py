# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The Kubernetes manifests: vLLM, the suite and the command line take what is in them, and the gate works."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer
import yaml

from nixl_telemetry.cli.doctor.command import doctor
from nixl_telemetry.cli.main import app
from nixl_telemetry.compat.factors import digest
from nixl_telemetry.compat.instance import Instance, Origin
from nixl_telemetry.settings import Settings
from tests.support.commands import run
from tests.support.manifests import EXAMPLES, MONITORING, OTHER, ROLES, config_of, find, pod_of
from tests.support.peers import free_port, listener, payload
from tests.support.statements import FACTORS, exchanged, factors, statement

OF_ROLES: Final = pytest.mark.parametrize("role", ROLES)


def environment(container: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


def hook(role: str) -> str:
    """The shell command that runs before a server is stopped."""
    command: list[str] = pod_of(role)["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command[:2] == ["sh", "-c"]
    return command[2]


def script(role: str) -> str:
    """What the init container runs."""
    (container,) = pod_of(role)["initContainers"]
    assert container["command"] == ["sh", "-euc"]
    (text,) = container["args"]
    return str(text)


# --------------------------------------------------------------------------------------------------- vLLM and the suite


def test_what_is_hashed_is_the_same_on_both_sides() -> None:
    prefill, decode = (config_of(role) for role in ROLES)

    roles = [config["kv-transfer-config"].pop("kv_role") for config in (prefill, decode)]
    assert roles == ["kv_producer", "kv_consumer"]
    assert prefill == decode


@OF_ROLES
def test_the_transfer_config_is_sound(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's own settings take it, and `doctor` has nothing against it."""
    for name in [name for name in os.environ if name.startswith(("NIXL", "OTEL_"))]:
        monkeypatch.delenv(name)
    transfer = config_of(role)["kv-transfer-config"]

    settings = Settings.load(transfer["kv_connector_extra_config"])

    services = [f"{one}-side-channel" for one in ROLES]
    assert settings.allowed_peers == tuple(services)
    assert all(find("Service", name)["spec"]["publishNotReadyAddresses"] for name in services)
    result = run(doctor, "--json", "--quick", "--peer", "localhost", "--kv-transfer-config", json.dumps(transfer))
    found = json.loads(result.stdout)["findings"]
    judged = {"config", "wiring", "settings"}
    assert [one for one in found if one["topic"] in judged and one["level"] not in {"ok", "note"}] == []
    assert judged <= {one["topic"] for one in found}


def test_doctor_would_find_a_mistake() -> None:
    transfer = {**config_of("decode")["kv-transfer-config"], "kv_rol": "kv_consumer"}

    result = run(doctor, "--json", "--quick", "--peer", "localhost", "--kv-transfer-config", json.dumps(transfer))

    assert result.exit_code == 1
    assert "kv_rol" in result.stdout


@OF_ROLES
def test_server_and_init_container_are_started_alike(role: str) -> None:
    """What is hashed depends on image, files, variables and device."""
    (check,), (server,) = pod_of(role)["initContainers"], pod_of(role)["containers"]

    for field in ("image", "env", "volumeMounts", "resources"):
        assert check[field] == server[field]
    assert server["command"] == ["vllm", "serve"]
    assert server["args"] == ["--config", f"/etc/vllm/{role}.yaml"]
    assert shlex.split(script(role))[:6] == ["nixl-telemetry", "factors", "--json", "--", *server["args"]]
    variables = environment(server)
    assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert variables["OTEL_RESOURCE_ATTRIBUTES"] == (
        "service.instance.id=$(POD_NAME),k8s.pod.name=$(POD_NAME),"
        "k8s.namespace.name=$(POD_NAMESPACE),k8s.node.name=$(NODE_NAME)"
    )
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    assert ports == {
        "http": config_of(role)["port"],
        "side-channel": int(variables["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
    }


@OF_ROLES
def test_a_drain_ends_before_the_grace_period(role: str) -> None:
    """Sleep, drain and vLLM's own shutdown, with half a minute to spare."""
    found = re.fullmatch(
        r"sleep (\d+); exec nixl-telemetry drain 127\.0\.0\.1:(\d+) --timeout (\d+) > /proc/1/fd/1 2>&1", hook(role)
    )
    assert found is not None
    sleep, port, timeout = map(int, found.groups())
    shutdown = config_of(role)["shutdown-timeout"]

    assert sleep + timeout + shutdown + 30 <= pod_of(role)["terminationGracePeriodSeconds"]
    assert port == config_of(role)["port"]


def invocations() -> Iterator[list[str]]:
    """Every call of the command line in a shell script of the manifests and in the README."""
    texts = [*map(script, ROLES), *map(hook, ROLES), (MONITORING / "generate").read_text()]
    texts += re.findall(r"```sh\n(.*?)```", (EXAMPLES / "README.md").read_text(), flags=re.DOTALL)
    for line in "\n".join(texts).replace("\\\n", " ").splitlines():
        for part in re.split(r"\|\||&&|[;|>]", line):
            words = shlex.split(part, comments=True)
            if "nixl-telemetry" in words:
                yield words[words.index("nixl-telemetry") + 1 :]


def parse(arguments: list[str]) -> None:
    """Have the real parser read a call, without running it.

    Raises:
        Exception: It refuses it; Typer brings a click of its own, whose classes have no public name.
    """
    command: Any = typer.main.get_command(app)
    context = command.context_class(command)
    while hasattr(command, "resolve_command"):
        _, command, arguments = command.resolve_command(context, arguments)
    command.make_context(command.name, list(arguments))


@pytest.mark.parametrize("arguments", list(invocations()), ids=" ".join)
def test_the_command_line_takes_the_options(arguments: list[str]) -> None:
    parse(arguments)


def test_options_that_do_not_exist_are_found() -> None:
    assert {words[0] for words in invocations()} >= {"factors", "check", "drain", "alerts", "dashboards"}
    with pytest.raises(Exception, match="--tiemout"):
        parse(["drain", "127.0.0.1:8000", "--tiemout", "3"])
    with pytest.raises(Exception, match="valid number"):
        parse(["check", "a:1", "b:2", "--wait", "soon"])


# --------------------------------------------------------------------------------------------------- The gate, for real

PUSH: Final = factors(transfer_mode="push")


def shell(folder: Path, *command: str, own: Path = Path("missing")) -> tuple[int, str]:
    """Run a command with the real command line in its path, of which only `factors` is a stand-in that prints a file.

    Returns:
        Its exit code and what it printed.
    """
    program = folder / "nixl-telemetry"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = factors ] && exec cat {own}\n'
        f'exec {sys.executable} -c "from nixl_telemetry.cli.main import app; app()" "$@"\n'
    )
    program.chmod(0o755)
    paths = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(EXAMPLES.parent)}
    ended = subprocess.run(
        command, env={**os.environ, **paths}, capture_output=True, text=True, timeout=60, check=False
    )
    return ended.returncode, ended.stdout + ended.stderr


def gate(role: str, own: dict[str, Any], peer: str, folder: Path) -> tuple[int, str]:
    """Run the script of an init container with the real `check`, as an instance with these factors."""
    file = folder / "factors.json"
    file.write_text(Instance(name="x", compat_hash=digest(own), origin=Origin.COMPUTED, factors=own).to_json())
    text = script(role).replace("/tmp/", f"{folder}/").replace("--wait 900", "--wait 1")
    return shell(folder, "sh", "-euc", text.replace(f"{OTHER[role]}-side-channel:5600", peer), own=file)


@OF_ROLES
@pytest.mark.parametrize(("running", "code", "verdict"), [(FACTORS, 0, "  compatible"), (PUSH, 1, "  incompatible: ")])
def test_a_pod_starts_only_where_it_fits(
    role: str, running: dict[str, Any], code: int, verdict: str, tmp_path: Path
) -> None:
    compat_hash, encoded = exchanged(statement(running))
    with listener({(0, 0): payload(compat_hash, {"engine_id": "e"}, encoded)}) as peer:
        ended, text = gate(role, FACTORS, peer.address, tmp_path)

    assert ended == code, text
    assert verdict in text
    assert ("transfer_mode is" in text) == (code == 1)


@pytest.mark.parametrize(("role", "code"), [("prefill", 0), ("decode", 2)])
def test_without_a_peer_prefill_starts_and_decode_waits(role: str, code: int, tmp_path: Path) -> None:
    """So that the first start of a group comes to an end."""
    ended, text = gate(role, FACTORS, f"127.0.0.1:{free_port()}", tmp_path)

    assert ended == code, text
    assert "refused the connection" in text


@OF_ROLES
def test_factors_that_cannot_be_computed_stop_the_start(role: str, tmp_path: Path) -> None:
    ended, text = shell(tmp_path, "sh", "-euc", script(role).replace("/tmp/", f"{tmp_path}/"))

    assert ended == 1
    assert "missing: No such file" in text


# ----------------------------------------------------------------------------------------------------------- Monitoring


def test_generated_manifests_are_current(tmp_path: Path) -> None:
    """As `monitoring/generate` writes them."""
    folder = tmp_path / "monitoring"
    folder.mkdir()
    shutil.copy(MONITORING / "generate", folder)

    ended, text = shell(tmp_path, str(folder / "generate"))

    assert ended == 0, text
    resources = yaml.safe_load((MONITORING / "kustomization.yaml").read_text())["resources"]
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert written == {"generate", *resources}
    for name in resources:
        assert (folder / name).read_text() == (MONITORING / name).read_text()
