# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The command line's entry: each command lives in a module of its own."""

import typer

import nixl_telemetry
from nixl_telemetry.cli import alerts, audit, dashboards
from nixl_telemetry.cli.check import check
from nixl_telemetry.cli.demo.command import demo
from nixl_telemetry.cli.doctor.command import doctor
from nixl_telemetry.cli.drain import drain
from nixl_telemetry.cli.explain import explain
from nixl_telemetry.cli.factors import factors
from nixl_telemetry.cli.probe import probe
from nixl_telemetry.cli.trace import command as trace

app = typer.Typer(help="Observability for vLLM's NIXL connectors.", no_args_is_help=True, add_completion=False)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"nixl-telemetry {nixl_telemetry.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
) -> None:
    """Observability for vLLM's NIXL connectors."""


for command in (doctor, probe, check, explain, factors, drain, demo):
    app.command()(command)
app.add_typer(alerts.app, name="alerts")
app.add_typer(audit.app, name="audit")
app.add_typer(dashboards.app, name="dashboards")
app.add_typer(trace.app, name="trace")
