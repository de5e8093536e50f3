# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``nixl-telemetry alerts``: the alert and recording rules, for a Prometheus or for its operator."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nixl_telemetry.cli import mixin_config
from nixl_telemetry.cli.output import CommandError, Printer, failing
from nixl_telemetry.mixin.rules import build_alerts, prometheus_rule, rules_file

app = typer.Typer(help="The alert rules over the metrics.", no_args_is_help=True)


class Format(StrEnum):
    """What an export is for."""

    RULES = "rules"
    PROMETHEUSRULE = "prometheusrule"


@app.command()
def export(
    out: Annotated[
        Path, typer.Option(metavar="DIR|FILE|-", help="Where to write; - is standard output.", show_default=True)
    ] = Path("-"),
    format_: Annotated[
        Format, typer.Option("--format", help="A rules file of Prometheus, or a PrometheusRule of its operator.")
    ] = Format.RULES,
    job_label: mixin_config.JobLabel = None,
    prefix: Annotated[
        str | None, typer.Option(metavar="TEXT", help="In front of each alert's name, for example Staging.")
    ] = None,
    runbook_url: mixin_config.RunbookUrl = None,
    grafana_url: mixin_config.GrafanaUrl = None,
    settings: mixin_config.Settings = None,
    config: mixin_config.ConfigFile = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the PrometheusRule.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Label of the PrometheusRule, by which a Prometheus selects it. May be given several times.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the alert and recording rules."""
    with failing():
        if format_ is Format.RULES and (namespace is not None or label):
            raise CommandError("--namespace and --label are for --format prometheusrule")
        options = {
            "job_label": job_label,
            "alert_prefix": prefix,
            "runbook_url": runbook_url,
            "grafana_url": grafana_url,
        }
        mixin = mixin_config.read_config(config, settings, options)
        if format_ is Format.RULES:
            text = rules_file(mixin)
        else:
            text = prometheus_rule(mixin, namespace, mixin_config.pairs(label or [], "--label"))
        mixin_config.write(text, out, f"nixl.{format_}.yaml")
        mixin_config.complain_of_reserved(mixin, "runbook_url", "grafana_url")


@app.command("list")
def list_(settings: mixin_config.Settings = None, config: mixin_config.ConfigFile = None) -> None:
    """List the alerts: name, severity, `for`, and the settings that they depend on."""
    with failing():
        mixin = mixin_config.read_config(config, settings, {})
        rows = [alert for alerts in build_alerts(mixin).values() for alert in alerts]
        names = max(len(alert.name) for alert in rows)
        out = Printer()
        for alert in rows:
            knobs = ", ".join(f"{knob} {mixin.text(knob)}" for knob in alert.knobs if knob != "burn_windows")
            out.line((f"{alert.name:{names}}", "bold"), f"  {alert.severity:8}  {alert.pending:>4}  {knobs}")
