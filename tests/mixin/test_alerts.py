# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The alerts: promtool takes them, each fires when it must and only then, and all follow the rules of mixtool."""

import importlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.rules import build_alerts, build_rules, prometheus_rule, rules_file
from tests.mixin.case import Case, Kind, promtool_file
from tests.mixin.cases import instances
from tests.mixin.promql import selectors
from tools.generate_mixin import FILES

ROOT: Final = Path(__file__).resolve().parents[2]
AREAS: Final = tuple(build_alerts(MixinConfig()))
CASES: Final[dict[str, tuple[Case, ...]]] = {
    area: importlib.import_module(f"tests.mixin.cases.{area}").CASES for area in AREAS
}
COMMITTED: Final[list[dict[str, Any]]] = yaml.safe_load((ROOT / "alerts/nixl.rules.yaml").read_text("utf-8"))["groups"]
RULES: Final = [rule for group in COMMITTED for rule in group["rules"]]
ALERTS: Final = [rule for rule in RULES if "alert" in rule]
OF_ALERTS: Final = pytest.mark.parametrize(
    "rule", ALERTS, ids=lambda rule: "-".join((rule["alert"], *rule["labels"].values()))
)

NOT_APPLICABLE: Final = {
    ("NixlCompatMismatch", Kind.NO_TRAFFIC): "one rejection is enough",
    ("NixlTransferModeMismatch", Kind.NO_TRAFFIC): "one rejection is enough",
    ("NixlConnectorVersionMismatch", Kind.NO_TRAFFIC): "one rejection is enough",
    ("NixlCompatHashesMixed", Kind.NO_TRAFFIC): "instances differ with and without traffic",
    ("NixlConnectorVersionsMixed", Kind.NO_TRAFFIC): "instances differ with and without traffic",
    ("NixlTransferModesMixed", Kind.NO_TRAFFIC): "instances differ with and without traffic",
    ("NixlEnforcementOff", Kind.NO_TRAFFIC): "enforcement is off with and without traffic",
    ("NixlListenerRefusing", Kind.NO_TRAFFIC): "a number, not a ratio; without queries it is 0",
    ("NixlModeConflict", Kind.NO_TRAFFIC): "one conflict is enough",
    ("NixlTransferStalled", Kind.NO_TRAFFIC): "one transfer that hangs is enough",
    ("NixlLeasesOverdue", Kind.NO_TRAFFIC): "one lease is enough; that of an idle engine is the healthy case",
    ("NixlInvalidKv", Kind.NO_TRAFFIC): "one request is enough",
    ("NixlTargetDown", Kind.NO_TRAFFIC): "a target is down with and without traffic",
    ("NixlMetricsAbsent", Kind.NO_TRAFFIC): "metrics are there with and without traffic",
    ("NixlTelemetryDropping", Kind.NO_TRAFFIC): "a number, not a ratio; without records it is 0",
    ("NixlTelemetryErrors", Kind.NO_TRAFFIC): "a number, not a ratio; without traffic it is 0",
}
"""Kinds of cases that an alert cannot have, and why. All others it has to have."""


def promtool(*arguments: str | Path) -> str:
    """What promtool prints; the test fails if it finds a fault, or if there is no promtool."""
    assert shutil.which("promtool"), "promtool is missing: `make promtool` installs it (Debian's package prometheus)"
    done = subprocess.run(["promtool", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ------------------------------------------------------------------------------------------------------------ Behaviour


@pytest.mark.parametrize("area", AREAS)
def test_alerts_fire_when_they_must_and_only_then(area: str, tmp_path: Path) -> None:
    """All cases of an area, over its rules as they are committed."""
    _run(COMMITTED, area, CASES[area], tmp_path)


def test_a_target_is_judged_by_its_own_job_where_the_namespace_says_what_belongs_together(tmp_path: Path) -> None:
    groups = build_rules(instances.BY_NAMESPACE[0].config)

    _run(groups, "instances", instances.BY_NAMESPACE, tmp_path)


def _run(rules: list[dict[str, Any]], area: str, all_cases: tuple[Case, ...], tmp_path: Path) -> None:
    groups = [group for group in rules if group["name"] in {f"nixl-{area}", f"nixl-{area}.rules"}]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": groups}), encoding="utf-8")
    files = []
    for step, cases in groupby(sorted(all_cases, key=lambda case: case.step), lambda case: case.step):
        path = tmp_path / f"{step}.test.json"
        path.write_text(json.dumps(promtool_file(cases, groups, "rules.json", step)), encoding="utf-8")
        files.append(path)

    promtool("test", "rules", *files)


def _wanted() -> Iterator[tuple[str, str, str, Kind]]:
    for rule in ALERTS:
        for kind in Kind:
            if (rule["alert"], kind) not in NOT_APPLICABLE:
                yield rule["alert"], rule["labels"]["severity"], rule["labels"].get("window", ""), kind


def test_each_alert_has_all_kinds_of_cases() -> None:
    """Each tier of each alert, but for what cannot be; and no exception is left that is not one."""
    every = [case for cases in CASES.values() for case in cases]
    there = {(case.alert, case.severity, case.labels.get("window", ""), case.kind) for case in every}

    assert set(_wanted()) == there


def test_cases_have_names_of_their_own() -> None:
    names = [case.name + case.labels.get("window", "") for cases in CASES.values() for case in cases]

    assert sorted(names) == sorted(set(names))


# ---------------------------------------------------------------------------------------------------------------- Rules


@pytest.mark.parametrize(
    "config",
    [
        MixinConfig(),
        MixinConfig().scaled(1 / 60),
        MixinConfig().scaled(1 / 600),
        MixinConfig.load({"job_label": "namespace", "group_labels": "cluster,region", "alert_prefix": "Staging"}),
    ],
    ids=["default", "sixtieth", "shortest", "labels"],
)
def test_promtool_accepts_the_rules(config: MixinConfig, tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(rules_file(config), encoding="utf-8")

    assert f"SUCCESS: {sum(len(group['rules']) for group in build_rules(config))} rules found" in promtool(
        "check", "rules", "--lint=all", "--lint-fatal", path
    )


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("alerts/")])
def test_committed_rules_are_current(name: str) -> None:
    """As `make generate` would write them now."""
    assert (ROOT / name).read_text(encoding="utf-8") == FILES[name]()


def test_the_prometheusrule_has_the_same_groups() -> None:
    resource = yaml.safe_load(prometheus_rule(MixinConfig(), "monitoring", {"release": "prometheus"}))

    assert resource.pop("spec") == {"groups": COMMITTED}
    assert resource == {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "nixl-telemetry", "namespace": "monitoring", "labels": {"release": "prometheus"}},
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.get("alert") or rule["record"])
def test_each_query_asks_for_what_there_is(rule: dict[str, Any]) -> None:
    """Each metric is in the catalogue, is vLLM's or is recorded, and has each label that it is asked for."""
    recorded = {other["record"]: other["expr"] for other in RULES if "record" in other}

    for selector in selectors(rule["expr"]):
        if selector.metric in recorded:
            level = set(re.findall(r"^(.*?):", selector.metric)[0].replace("model_name", "model-name").split("_"))
            assert selector.labels <= {label.replace("-", "_") for label in level}
        else:
            assert selector.unknown == set(), selector


# ------------------------------------------------------------------------------------------- The seven rules of mixtool


@OF_ALERTS
def test_alert_name_camelcase(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"([A-Z]+[a-z0-9]+)+", rule["alert"])
    assert rule["alert"].startswith("Nixl")


@OF_ALERTS
def test_alert_severity(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in {"critical", "warning", "info"}


@OF_ALERTS
def test_alert_description_is_there_and_templated(rule: dict[str, Any]) -> None:
    """Two rules: without labels or a value it says no more than the summary."""
    assert re.search(r"\{\{.*\}\}", rule["annotations"]["description"])


@OF_ALERTS
def test_alert_summary_is_there_and_a_sentence_without_templates(rule: dict[str, Any]) -> None:
    """Three rules: alerts with the same summary can be grouped."""
    assert "{{" not in rule["annotations"]["summary"]
    assert re.fullmatch(r"[A-Z].+\.", rule["annotations"]["summary"])


# --------------------------------------------------------------------------------------------------- Rules of the house


@OF_ALERTS
def test_alert_has_a_for_and_links(rule: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d+[smhd]", rule["for"])
    assert rule["annotations"]["runbook_url"].endswith(f"/{rule['alert']}.html")
    assert re.match(r"https://grafana\.example/d/nixl-[a-z-]+(\?|$)", rule["annotations"]["dashboard_url"])
    assert list(rule) == ["alert", "expr", "for", "labels", "annotations"]


@OF_ALERTS
def test_alert_names_its_deployment(rule: dict[str, Any]) -> None:
    """But for those on targets, which have no model."""
    description = rule["annotations"]["description"]

    assert "$labels.job" in description
    assert "$labels.instance" not in description
    assert "$labels.model_name" in description or rule["alert"] == "NixlTargetDown"
