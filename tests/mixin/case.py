# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Cases of alerts, and how promtool is told them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from nixl_telemetry.mixin.alert import Alert
from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.duration import Duration
from nixl_telemetry.mixin.rules import Group, build_alerts

MODEL: Final = "org/model"
"""With a character that a link has to escape."""
_INSTANCE_LABELS: Final = {
    "job": "pd",
    "instance": "d0:8000",
    "model_name": MODEL,
    "engine": "0",
    "transfer_mode": "pull",
    "connector_version": "14",
}


class Kind(StrEnum):
    """What a case shows. That an alert is pending before it fires is part of the first."""

    FIRES = "fires"
    THRESHOLD = "threshold"
    """The query has exactly the value of the threshold, or there is no event."""
    NO_TRAFFIC = "no traffic"
    """So few that the ratio or percentile says nothing."""
    RESET = "reset"
    """Counters fall back to 0, and nothing else happens."""
    HEALTHY = "healthy"


@dataclass(frozen=True)
class Case:
    """One alert over some series."""

    alert: str
    severity: str
    kind: Kind
    why: str
    """A sentence."""
    series: Mapping[str, str]
    """Values of each series, in promtool's notation."""
    onset: int = 0
    """Step at which the query has a result; the alert fires ``for`` later."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels beside the name and the severity."""
    description: str = ""
    link: str = ""
    """Path and query of the link to the board."""
    reads: tuple[str, float] | None = None
    """A query, and the value that it has at the end of the case: that of the threshold."""
    since: int = 5
    """Step from which on an alert that must not fire is watched."""
    until: int = 45
    """And the last one."""
    step: str = "1m"
    config: MixinConfig = field(default_factory=MixinConfig)

    @property
    def name(self) -> str:
        """What promtool prints."""
        return f"{self.alert} ({self.severity}), {self.kind}: {self.why}"


def series(metric: str, **labels: str | None) -> str:
    """A series of an instance; a label that is ``None`` is left out."""
    pairs = {**_INSTANCE_LABELS, **labels}
    inner = ", ".join(f'{label}="{value}"' for label, value in pairs.items() if value is not None)
    return f"{metric}{{{inner}}}"


def vllm(metric: str, **labels: str | None) -> str:
    """A series of vLLM's own, which have not the labels that the suite adds."""
    return series(metric, transfer_mode=None, connector_version=None, **labels)


def alert_of(case: Case) -> Alert:
    """The alert that a case is about."""
    wanted = (case.alert, case.severity, case.labels.get("window"))
    (found,) = (
        alert
        for alerts in build_alerts(case.config).values()
        for alert in alerts
        if (alert.name, alert.severity, dict(alert.labels).get("window")) == wanted
    )
    return found


def promtool_file(cases: Iterable[Case], groups: Iterable[Group], rule_file: str, step: str) -> dict[str, Any]:
    """A file for ``promtool test rules``; all of the cases have the same step."""
    return {
        "rule_files": [rule_file],
        "evaluation_interval": step,
        "group_eval_order": [group["name"] for group in groups],
        "tests": [_test(case) for case in cases],
    }


def _test(case: Case) -> dict[str, Any]:
    return {
        "name": case.name,
        "interval": case.step,
        "input_series": [{"series": name, "values": values} for name, values in case.series.items()],
        **(_firing(case) if case.kind is Kind.FIRES else _silent(case)),
    }


def _firing(case: Case) -> dict[str, Any]:
    alert = alert_of(case)
    step = Duration.parse(case.step)
    onset = Duration(step * case.onset)
    before = Duration(onset + alert.pending - step)
    labels = {"severity": case.severity, **case.labels}
    pending = {"alertname": case.alert, "alertstate": "pending", **labels}
    annotations = {
        "summary": alert.summary,
        "description": case.description,
        "runbook_url": f"https://nixl-telemetry.example/runbooks/{case.alert}.html",
        "dashboard_url": f"https://grafana.example/d/{case.link}",
    }
    return {
        "alert_rule_test": [
            {
                "eval_time": str(Duration(onset + alert.pending)),
                "alertname": case.alert,
                "exp_alerts": [{"exp_labels": labels, "exp_annotations": annotations}],
            }
        ],
        "promql_expr_test": [
            {
                "expr": _state(case),
                "eval_time": str(before),
                "exp_samples": [{"labels": _labels("ALERTS", pending), "value": 1}],
            },
            *(
                [{"expr": _state(case), "eval_time": str(Duration(onset - step)), "exp_samples": []}]
                if case.onset > 1
                else []
            ),
        ],
    }


def _silent(case: Case) -> dict[str, Any]:
    step = Duration.parse(case.step)
    end = str(Duration(step * case.until))
    watched = Duration(step * (case.until - case.since))
    fired = f"present_over_time({_state(case, 'firing')}[{watched}])"
    tests: list[dict[str, Any]] = [{"expr": fired, "eval_time": end, "exp_samples": []}]
    if case.reads:
        expr, value = case.reads
        near = f"abs(max({expr}) - {value!r}) < bool 1e-9"
        tests.append({"expr": near, "eval_time": end, "exp_samples": [{"labels": "{}", "value": 1}]})
    return {"promql_expr_test": tests}


def _state(case: Case, state: str | None = None) -> str:
    wanted = {"alertname": case.alert, "severity": case.severity}
    if state:
        wanted["alertstate"] = state
    if "window" in case.labels:
        wanted["window"] = case.labels["window"]
    return _labels("ALERTS", wanted)


def _labels(metric: str, labels: Mapping[str, str]) -> str:
    return metric + "{" + ", ".join(f'{name}="{value}"' for name, value in labels.items()) + "}"
