# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The example's grouping and inhibition: what it names exists, and no alert is held back by another cause."""

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.rules import build_rules

CONFIG: Final = Path(__file__).resolve().parents[2] / "examples/alertmanager/alertmanager.yml"
ALERTS: Final = [rule for group in build_rules(MixinConfig()) for rule in group["rules"] if "alert" in rule]


def loaded() -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text("utf-8"))
    return config


def _matched(matchers: list[str], labels: Mapping[str, str]) -> bool:
    """Whether labels match, as Alertmanager reads matchers of these forms."""
    for matcher in matchers:
        found = re.fullmatch(r'(\w+)(=~?)"([^"]*)"', matcher)
        assert found, matcher
        name, operator, value = found.groups()
        if not re.fullmatch(value if operator == "=~" else re.escape(value), labels.get(name, "")):
            return False
    return True


def _labels(rule: Mapping[str, Any]) -> dict[str, str]:
    return {"alertname": rule["alert"], **rule["labels"]}


def inhibited() -> Iterator[tuple[str, str]]:
    """Pairs of alerts of which the first holds the second back, as name and severity."""
    for rule in loaded()["inhibit_rules"]:
        for source in map(_labels, ALERTS):
            for target in map(_labels, ALERTS):
                if _matched(rule["source_matchers"], source) and _matched(rule["target_matchers"], target):
                    yield f"{source['alertname']} {source['severity']}", f"{target['alertname']} {target['severity']}"


def test_each_rule_names_alerts_that_exist() -> None:
    names = {rule["alert"] for rule in ALERTS}
    for rule in loaded()["inhibit_rules"]:
        for side in ("source_matchers", "target_matchers"):
            named = re.findall(r"Nixl\w+", " ".join(rule[side]))
            assert set(named) <= names
            assert any(_matched(rule[side], _labels(alert)) for alert in ALERTS)


def test_a_page_is_held_back_by_a_page_only() -> None:
    for source, target in inhibited():
        assert not target.endswith("critical") or source.endswith("critical")


def test_no_two_alerts_hold_each_other_back() -> None:
    pairs = set(inhibited())

    assert [pair for pair in pairs if pair[::-1] in pairs] == []


def test_a_named_mismatch_holds_the_general_one_back() -> None:
    for named in ("NixlTransferModeMismatch", "NixlConnectorVersionMismatch"):
        assert (f"{named} warning", "NixlCompatMismatch warning") in set(inhibited())


def test_alerts_of_one_cause_are_one_group() -> None:
    """And each severity has a receiver."""
    route = loaded()["route"]
    severities = {re.findall('"(.*)"', matcher)[0] for child in route["routes"] for matcher in child["matchers"]}

    assert route["group_by"] == ["alertname", "job", "model_name"]
    assert severities == {rule["labels"]["severity"] for rule in ALERTS}


@pytest.mark.live
@pytest.mark.parametrize(
    ("severity", "receiver"), [("critical", "pager"), ("warning", "office-hours"), ("info", "nobody")]
)
def test_amtool_takes_it_and_routes_by_severity(severity: str, receiver: str) -> None:
    command = ["amtool", "config", "routes", "test", f"--config.file={CONFIG}", f"severity={severity}"]

    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == receiver
