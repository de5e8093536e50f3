# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The Kubernetes manifests: a cluster takes them, what they name exists, and their scripts do what they promise."""

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
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
from tests.support.manifests import (
    EXAMPLES,
    KUBERNETES,
    MONITORING,
    SERVING,
    Manifest,
    ManifestError,
    find,
    manifests,
    validate,
)
from tests.support.peers import free_port, listener, payload
from tests.support.statements import FACTORS, exchanged, factors, statement

ROLES: Final = ("prefill", "decode")
OTHER: Final = {"prefill": "decode", "decode": "prefill"}
OF_ROLES: Final = pytest.mark.parametrize("role", ROLES)
ALL: Final = [*manifests(SERVING), *manifests(MONITORING)]


def spec_of(deployment: Manifest) -> dict[str, Any]:
    """What a Deployment says of its pods."""
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def pod_of(role: str) -> dict[str, Any]:
    return spec_of(find("Deployment", role))


def labels_of(name: str) -> dict[str, str]:
    labels: dict[str, str] = find("Deployment", name)["spec"]["template"]["metadata"]["labels"]
    return labels


def config_of(role: str) -> dict[str, Any]:
    """The arguments of a role's servers."""
    config: dict[str, Any] = yaml.safe_load((SERVING / "config" / f"{role}.yaml").read_text())
    return config


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


# -------------------------------------------------------------------------------------------------------------- Schemas


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize(
    ("file", "manifest"), ALL, ids=lambda given: given if isinstance(given, str) else given["kind"]
)
def test_a_cluster_takes_it(file: str, manifest: Manifest, version: str) -> None:
    """Unknown fields are refused, too: a cluster drops most of them without a word."""
    validate(manifest, version)


def _misspelt_probe(manifest: Manifest) -> None:
    spec_of(manifest)["containers"][0]["livenessProbe"]["periodSecond"] = 5


def _misplaced_grace(manifest: Manifest) -> None:
    spec_of(manifest)["containers"][0]["terminationGracePeriodSeconds"] = 5


def _number_as_value(manifest: Manifest) -> None:
    spec_of(manifest)["containers"][0]["env"][4]["value"] = 5600


def _text_as_number(manifest: Manifest) -> None:
    manifest["spec"]["replicas"] = "2"


def _no_selector(manifest: Manifest) -> None:
    del manifest["spec"]["selector"]


def _interval(manifest: Manifest) -> None:
    manifest["spec"]["podMetricsEndpoints"][0]["interval"] = "15 s"


def _misspelt_endpoint(manifest: Manifest) -> None:
    manifest["spec"]["podMetricsEndpoint"] = manifest["spec"].pop("podMetricsEndpoints")


def _nested_metrics(manifest: Manifest) -> None:
    manifest["spec"]["podMetricsEndpoints"][0]["relabelings"][0]["source_labels"] = ["x"]


def _api_version(manifest: Manifest) -> None:
    manifest["apiVersion"] = "policy/v1beta1"


@pytest.mark.parametrize(
    ("kind", "name", "break_it"),
    [
        ("Deployment", "decode", _misspelt_probe),
        ("Deployment", "decode", _misplaced_grace),
        ("Deployment", "decode", _number_as_value),
        ("Deployment", "router", _text_as_number),
        ("Deployment", "router", _no_selector),
        ("PodMonitor", "vllm", _interval),
        ("PodMonitor", "vllm", _misspelt_endpoint),
        ("PodMonitor", "vllm", _nested_metrics),
        ("PodDisruptionBudget", "decode", _api_version),
    ],
)
def test_planted_faults_are_found(kind: str, name: str, break_it: Callable[[Manifest], None]) -> None:
    manifest = copy.deepcopy(find(kind, name))
    break_it(manifest)

    for version in KUBERNETES:
        with pytest.raises(ManifestError, match=kind):
            validate(manifest, version)


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ({"alert": "A", "expr": "up", "fore": "5m"}, "fore"),
        ({"alert": "A", "expr": "up", "for": "5 minutes"}, "for"),
        ({"alert": "A", "record": "a:b", "expr": "up"}, "either alert or record"),
        ({"alert": "A", "expr": "up", "labels": {"severity": 1}}, "severity"),
        ({"alert": "A"}, "expr"),
    ],
)
def test_planted_faults_in_rules_are_found(rule: dict[str, Any], problem: str) -> None:
    manifest = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "x"},
        "spec": {"groups": [{"name": "g", "rules": [rule]}]},
    }

    with pytest.raises(ManifestError, match=problem):
        validate(manifest, KUBERNETES[-1])


# ------------------------------------------------------------------------------------------------ What they name exists


@pytest.mark.parametrize("folder", [SERVING, MONITORING], ids=lambda folder: folder.name)
def test_kustomization_has_every_file(folder: Path) -> None:
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    generated = [name for one in kustomization.get("configMapGenerator", []) for name in one["files"]]

    files = {str(path.relative_to(folder)) for path in folder.rglob("*.yaml")} - {"kustomization.yaml"}
    assert {*kustomization["resources"], *generated} == files


def test_images_and_config_map_are_those_of_the_kustomization() -> None:
    kustomization = yaml.safe_load((SERVING / "kustomization.yaml").read_text())
    pods = [spec_of(one) for _, one in manifests(SERVING) if one["kind"] == "Deployment"]
    containers = [one for pod in pods for one in [*pod.get("initContainers", []), *pod["containers"]]]
    volumes = [volume for pod in pods for volume in pod["volumes"] if "configMap" in volume]

    assert {one["image"] for one in containers} == {image["name"] for image in kustomization["images"]}
    assert {one["configMap"]["name"] for one in volumes} == {kustomization["configMapGenerator"][0]["name"]}
    stages = set(re.findall(r"--target (\S+) -t (\S+):(\S+) ", (EXAMPLES / "kubernetes" / "Containerfile").read_text()))
    assert {(name, tag) for _, name, tag in stages} == {
        (one["newName"], one["newTag"]) for one in kustomization["images"]
    }


def test_the_two_roles_differ_in_nothing_else() -> None:
    """One file for each, so that either can be read alone; a change of one is a change of both."""
    whole, common = zip(*(halves(role) for role in ROLES), strict=True)

    assert whole[0] == whole[1]
    assert common[0] == common[1]


def halves(role: str) -> tuple[str, str]:
    """A role's file without the names of roles, up to the init container's script and from there on."""
    text = (SERVING / f"{role}.yaml").read_text().replace(role, "ROLE").replace(OTHER[role], "OTHER")
    before, found, after = text.partition("          command: [sh, -euc]\n")
    _, mark, rest = after.partition("          # Image, files, variables")
    assert found
    assert mark
    return before, rest


@pytest.mark.parametrize("name", [*ROLES, "router"])
def test_everything_selects_its_pods(name: str) -> None:
    deployment = find("Deployment", name)
    own = labels_of(name)
    service = find("Service", name if name == "router" else f"{name}-side-channel")
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        find("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"],
        service["spec"]["selector"],
    ]

    assert selectors == [own] * 3
    ports = {port["name"] for port in spec_of(deployment)["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_network_policies_and_monitor_select_the_pods() -> None:
    instances, router = find("NetworkPolicy", "vllm")["spec"], find("NetworkPolicy", "router")["spec"]
    among, requests = instances["ingress"]
    pods, scraper = requests["from"]
    (endpoint,) = find("PodMonitor", "vllm")["spec"]["podMetricsEndpoints"]

    for role in ROLES:
        for selector in (
            instances["podSelector"],
            among["from"][0]["podSelector"],
            find("PodMonitor", "vllm")["spec"]["selector"],
        ):
            assert selector["matchLabels"].items() <= labels_of(role).items()
        ports = {port["name"] for port in pod_of(role)["containers"][0]["ports"]}
        assert {endpoint["port"], requests["ports"][0]["port"]} <= ports
    assert pods["podSelector"]["matchLabels"] == router["podSelector"]["matchLabels"] == labels_of("router")
    assert scraper["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] == "monitoring"
    assert "ports" not in among


@pytest.mark.parametrize("name", [*ROLES, "router"])
def test_pods_are_whole_and_restricted(name: str) -> None:
    """Every mount has a volume, every probe a port, and the `restricted` Pod Security Standard is kept to."""
    pod = spec_of(find("Deployment", name))
    containers = [*pod.get("initContainers", []), *pod["containers"]]

    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["enableServiceLinks"] is False
    for container in containers:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert "memory" in container["resources"]["limits"]
    main = pod["containers"][0]
    probes = [probe for key, probe in main.items() if key.endswith("Probe")]
    assert {probe["httpGet"]["port"] for probe in probes} == {"http"}
    assert len(probes) == (2 if name == "router" else 3)


def test_the_router_may_see_pods_and_nothing_else() -> None:
    binding, role = find("RoleBinding", "router"), find("Role", "router")

    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (subject,) = binding["subjects"]
    assert subject["name"] == find("ServiceAccount", "router")["metadata"]["name"]
    assert spec_of(find("Deployment", "router"))["serviceAccountName"] == subject["name"]
    for name in ROLES:
        assert pod_of(name)["automountServiceAccountToken"] is False


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
    assert {words[0] for words in invocations()} >= {"factors", "check", "drain", "alerts"}
    with pytest.raises(Exception, match="--tiemout"):
        parse(["drain", "127.0.0.1:8000", "--tiemout", "3"])
    with pytest.raises(Exception, match="soon"):
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
    assert sorted(path.name for path in folder.iterdir()) == sorted(["generate", *resources])
    for name in resources:
        assert (folder / name).read_text() == (MONITORING / name).read_text()
