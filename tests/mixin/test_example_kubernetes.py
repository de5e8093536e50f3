# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The Kubernetes manifests: a cluster takes them, and what they name exists."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import nixl_telemetry
from tests.support.manifests import (
    EXAMPLES,
    KUBERNETES,
    MONITORING,
    OTHER,
    ROLES,
    SERVING,
    Manifest,
    ManifestError,
    find,
    labels_of,
    manifests,
    pod_of,
    spec_of,
    validate,
)

ALL: Final = [*manifests(SERVING), *manifests(MONITORING)]


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
    containerfile = (EXAMPLES / "kubernetes" / "Containerfile").read_text()
    assert f"nixl-telemetry=={nixl_telemetry.__version__} " in containerfile
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
