# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Builds the rule groups of a configuration, and writes them as a rules file or as a Kubernetes ``PrometheusRule``."""

from collections.abc import Mapping
from typing import Any, Final

import yaml

from nixl_telemetry.mixin.alert import Alert
from nixl_telemetry.mixin.alerts import compatibility, handshakes, instances, leases, push, telemetry, transfers
from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.recording import recordings

_AREAS: Final = {
    "compatibility": compatibility.alerts,
    "handshakes": handshakes.alerts,
    "transfers": transfers.alerts,
    "leases": leases.alerts,
    "push": push.alerts,
    "instances": instances.alerts,
    "telemetry": telemetry.alerts,
}

Group = dict[str, Any]
"""A group of rules, as in a rules file."""


def build_alerts(config: MixinConfig) -> dict[str, tuple[Alert, ...]]:
    """All alerts by area."""
    return {area: alerts(config) for area, alerts in _AREAS.items()}


def build_rules(config: MixinConfig) -> list[Group]:
    """All groups: ``nixl-<area>.rules`` with the recording rules of an area before ``nixl-<area>`` with its alerts."""
    recorded = recordings(config)
    groups: list[Group] = []
    for area, alerts in build_alerts(config).items():
        if records := recorded.get(area):
            rules = [{"record": record.name, "expr": record.expr} for record in records]
            groups.append({"name": f"nixl-{area}.rules", "rules": rules})
        groups.append({"name": f"nixl-{area}", "rules": [_rule(alert, config) for alert in alerts]})
    return groups


def rules_file(config: MixinConfig) -> str:
    """The rules as Prometheus reads them from a file."""
    return dump({"groups": build_rules(config)})


def prometheus_rule(config: MixinConfig, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> str:
    """The rules as a resource of the Prometheus operator.

    Args:
        config: The configuration.
        namespace: Namespace of the resource; ``None`` for that of whoever applies it.
        labels: Labels by which a Prometheus selects it.
    """
    metadata: dict[str, Any] = {"name": "nixl-telemetry"}
    if namespace:
        metadata["namespace"] = namespace
    if labels:
        metadata["labels"] = dict(labels)
    return dump(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": metadata,
            "spec": {"groups": build_rules(config)},
        }
    )


def runbook_url(alert: Alert, config: MixinConfig) -> str:
    """Where the runbook of an alert is."""
    return config.runbook_url.replace("{alert}", alert.name)


def dashboard_url(alert: Alert, config: MixinConfig) -> str:
    """Where its board is, with the variables set to the alert's labels."""
    label = {"job": config.job_label, "model": "model_name", "mode": "transfer_mode"}
    query = "&".join(f"var-{name}={{{{ $labels.{label[name]} | urlquery }}}}" for name in alert.variables)
    return f"{config.grafana_url.rstrip('/')}/d/{alert.board}" + (f"?{query}" if query else "")


def _rule(alert: Alert, config: MixinConfig) -> dict[str, Any]:
    return {
        "alert": config.alert_prefix + alert.name,
        "expr": alert.expr,
        "for": str(alert.pending),
        "labels": {"severity": alert.severity, **dict(alert.labels)},
        "annotations": {
            "summary": alert.summary,
            "description": alert.description,
            "runbook_url": runbook_url(alert, config),
            "dashboard_url": dashboard_url(alert, config),
        },
    }


class _Dumper(yaml.SafeDumper):
    """Keeps keys in order and writes a query of several lines as one."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dump(document: Any) -> str:
    """A document as YAML that people can read: keys as they come, texts of several lines as such."""
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True)
