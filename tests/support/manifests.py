# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Kubernetes manifests: reading them, and refusing what a cluster would refuse or silently drop."""

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import kubernetes_validate
import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError, model_validator
from pydantic.alias_generators import to_camel

EXAMPLES: Final = Path(__file__).resolve().parents[2] / "examples"
SERVING: Final = EXAMPLES / "kubernetes" / "serving"
MONITORING: Final = EXAMPLES / "kubernetes" / "monitoring"

ROLES: Final = ("prefill", "decode")
OTHER: Final = {"prefill": "decode", "decode": "prefill"}

KUBERNETES: Final = ("1.29", "1.37")
"""The oldest and the newest release that manifests are checked against."""

Manifest = dict[str, Any]


class ManifestError(ValueError):
    """A manifest that a cluster would not take, or not as it is meant."""


def documents(path: Path) -> list[Manifest]:
    """What a file holds."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


@cache
def manifests(folder: Path) -> tuple[tuple[str, Manifest], ...]:
    """All of a folder and those below, with their file's name; the arguments of vLLM are none."""
    paths = [path for path in sorted(folder.rglob("*.yaml")) if path.parent.name != "config"]
    return tuple((path.name, document) for path in paths for document in documents(path))


def find(kind: str, name: str, folder: Path = SERVING) -> Manifest:
    """The one of this kind with this name."""
    (found,) = (
        one for _, one in manifests(folder) if one["kind"] == kind and one.get("metadata", {}).get("name") == name
    )
    return found


def spec_of(deployment: Manifest) -> dict[str, Any]:
    """What a Deployment says of its pods."""
    spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
    return spec


def pod_of(role: str) -> dict[str, Any]:
    """What the Deployment of a role says of its pods."""
    return spec_of(find("Deployment", role))


def labels_of(name: str) -> dict[str, str]:
    """The labels of a Deployment's pods."""
    labels: dict[str, str] = find("Deployment", name)["spec"]["template"]["metadata"]["labels"]
    return labels


def config_of(role: str) -> dict[str, Any]:
    """The arguments of a role's servers."""
    (config,) = documents(SERVING / "config" / f"{role}.yaml")
    return config


def validate(manifest: Manifest, version: str) -> None:
    """Hold a manifest against the schema of its kind; fields that are not in it are refused.

    Raises:
        ManifestError: It does not fit; the message says where.
    """
    try:
        if model := _OTHERS.get(manifest["kind"]):
            model.model_validate(manifest)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)
    except (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError, ValidationError) as error:
        raise ManifestError(f"{manifest['kind']}: {error}") from error


# ------------------------------------------------------------------------------------- What Kubernetes has no schema of

# Written by hand from the resource definitions of the Prometheus Operator 0.90 and of Kustomize 5: the fields that are
# used here, and no others.

Duration = Annotated[str, Field(pattern=r"^(0|(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?)$", min_length=1)]
LabelName = Annotated[str, Field(pattern="^[a-zA-Z_][a-zA-Z0-9_]*$")]
Labels = dict[str, StrictStr]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", alias_generator=to_camel)


class _Metadata(_Strict):
    name: Annotated[str, Field(pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]
    namespace: StrictStr | None = None
    labels: Labels = {}
    annotations: Labels = {}


class _Selector(_Strict):
    match_labels: Labels


class _Relabeling(_Strict):
    source_labels: list[LabelName] = []
    regex: StrictStr | None = None
    target_label: LabelName | None = None
    replacement: StrictStr | None = None
    action: Literal["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"] = "replace"


class _Endpoint(_Strict):
    port: Annotated[str, Field(min_length=1, max_length=15)]
    path: Annotated[str, Field(pattern="^/")]
    interval: Duration
    scrape_timeout: Duration
    relabelings: list[_Relabeling] = []


class _PodMonitorSpec(_Strict):
    selector: _Selector
    pod_metrics_endpoints: Annotated[list[_Endpoint], Field(min_length=1)]


class _PodMonitor(_Strict):
    api_version: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PodMonitor"]
    metadata: _Metadata
    spec: _PodMonitorSpec


class _Rule(_Strict):
    alert: Annotated[str, Field(min_length=1)] | None = None
    record: Annotated[str, Field(pattern="^[a-zA-Z_:][a-zA-Z0-9_:]*$")] | None = None
    expr: Annotated[str, Field(min_length=1)]
    pending: Duration | None = Field(None, alias="for")
    keep_firing_for: Duration | None = Field(None, alias="keep_firing_for")
    labels: dict[LabelName, StrictStr] = {}
    annotations: dict[LabelName, StrictStr] = {}

    @model_validator(mode="after")
    def _is_one(self) -> "_Rule":
        if (self.alert is None) == (self.record is None):
            raise ValueError("a rule has either alert or record")
        return self


class _RuleGroup(_Strict):
    name: Annotated[str, Field(min_length=1)]
    interval: Duration | None = None
    rules: list[_Rule]


class _Rules(_Strict):
    groups: Annotated[list[_RuleGroup], Field(min_length=1)]


class _PrometheusRule(_Strict):
    api_version: Literal["monitoring.coreos.com/v1"]
    kind: Literal["PrometheusRule"]
    metadata: _Metadata
    spec: _Rules


class _Generator(_Strict):
    name: StrictStr
    files: Annotated[list[StrictStr], Field(min_length=1)]


class _Image(_Strict):
    name: StrictStr
    new_name: StrictStr
    new_tag: StrictStr


class _LabelSet(_Strict):
    pairs: Labels


class _Kustomization(_Strict):
    api_version: Literal["kustomize.config.k8s.io/v1beta1"]
    kind: Literal["Kustomization"]
    namespace: StrictStr
    resources: Annotated[list[StrictStr], Field(min_length=1)]
    config_map_generator: list[_Generator] = []
    images: list[_Image] = []
    labels: list[_LabelSet] = []


_OTHERS: Final[dict[str, type[BaseModel]]] = {
    "PodMonitor": _PodMonitor,
    "PrometheusRule": _PrometheusRule,
    "Kustomization": _Kustomization,
}
