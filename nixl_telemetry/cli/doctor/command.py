# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``nixl-telemetry doctor``: checks an environment and a config before a server starts with them."""

import os
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, Final

import typer

from nixl_telemetry.cli import options
from nixl_telemetry.cli.doctor import arguments as reading, process
from nixl_telemetry.cli.doctor.checks import CHECKS
from nixl_telemetry.cli.doctor.examine import examine
from nixl_telemetry.cli.doctor.finding import Finding, Level
from nixl_telemetry.cli.doctor.subject import Subject, installed_vllm
from nixl_telemetry.cli.output import CommandError, Exit, Printer, failing, print_json

FORMAT: Final = "nixl_telemetry.doctor/1"
_STYLES: Final = {
    Level.PROBLEM: "bold red",
    Level.UNCHECKED: "magenta",
    Level.WARNING: "yellow",
    Level.NOTE: "cyan",
    Level.OK: "green",
}
_QUIET_LEVELS: Final = frozenset({Level.NOTE, Level.OK})
_LISTED: Final = 200


def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- MODEL ...",
            help="After --, the arguments of `vllm serve`. Without any, the environment is checked.",
            show_default=False,
        ),
    ] = None,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON", help="The config of the connector alone, instead of all arguments.", show_default=False
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="A host where peers run. May be given several times.", show_default=False),
    ] = None,
    peer_config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="JSON",
            help="The --kv-transfer-config of a peer, or a file with it. May be given several times.",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Import neither vLLM nor NIXL: takes a second.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1, max=3600, help="Seconds for vLLM to answer, and again for all checks together.")
    ] = 120,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as problems in the exit code.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print notes, and what is as it should be, too.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Check an environment and a config before a server starts with them; say what is wrong, and what to do.

    Run it where the server will run: with its Python, its variables and
    its user. Put the arguments of `vllm serve` after --.

    Nothing is changed, and nothing is left behind.

    Exits with 0 if there is nothing to repair, with 1 if there are
    problems, and else with 2 if something could not be checked.
    """
    with failing():
        subject = _subject(arguments or [], kv_transfer_config, peer or [], peer_config or [], quick, timeout)
        findings = examine(subject, CHECKS, timeout)
        code = _exit_code(findings, strict)
        if as_json:
            print_json(_as_json(findings))
        else:
            _show(Printer(), findings, verbose)
    raise typer.Exit(code)


def _subject(
    arguments: Sequence[str],
    transfer: str | None,
    peers: Sequence[str],
    peer_configs: Sequence[str],
    quick: bool,
    timeout: float,
) -> Subject:
    """Everything that there is to look at, with what vLLM makes of it."""
    if arguments and transfer is not None:
        raise CommandError("give either the arguments of vllm serve after `--`, or --kv-transfer-config alone")
    configs = [reading.transfer_config_or_file(text, "--peer-config") for text in peer_configs]
    given = reading.without_command(arguments)
    if transfer is not None:
        given = ["--kv-transfer-config", transfer]
    found = reading.read(given)
    vllm = installed_vllm()
    asked: dict[str, Any] = {}
    not_asked = None
    if vllm is not None and not quick:
        answer, reason = process.ask_vllm([] if found.transfer_error else given, timeout)
        asked, not_asked = (answer, None) if answer is not None else ({}, reason)
    values, config, file = found.values, found.transfer, found.config_file
    if isinstance(asked.get("values"), dict):
        values, file = asked["values"], None
    if config is None and isinstance(asked.get("transfer"), dict):
        # From a file of arguments; vLLM filled in what was not given.
        config = {key: value for key, value in asked["transfer"].items() if value is not None and key != "engine_id"}
    return Subject(
        environ=dict(os.environ),
        vllm=vllm,
        transfer=config,
        transfer_error=found.transfer_error,
        serving=bool(arguments),
        values=values,
        config_file=file,
        peers=[_host(peer) for peer in peers],
        peer_configs=configs,
        asked=asked,
        not_asked=not_asked,
        quick=quick,
        patience=timeout,
    )


def _host(peer: str) -> str:
    """The host of HOST, HOST:PORT or [ADDRESS]:PORT."""
    if peer.startswith("["):
        return peer[1:].partition("]")[0]
    return peer.partition(":")[0] if peer.count(":") == 1 else peer


def _exit_code(findings: Sequence[Finding], strict: bool) -> Exit:
    levels = {finding.level for finding in findings}
    if Level.PROBLEM in levels or (strict and Level.WARNING in levels):
        return Exit.INCOMPATIBLE
    return Exit.UNKNOWN if Level.UNCHECKED in levels else Exit.FINE


def _show(out: Printer, findings: Sequence[Finding], verbose: bool) -> None:
    printed = [finding for finding in findings if verbose or finding.level not in _QUIET_LEVELS]
    for finding in printed[:_LISTED]:
        remedy = f" → {finding.remedy}" if finding.remedy else ""
        out.line(
            (f"{finding.level:<9}", _STYLES[finding.level]),
            (f"  {finding.topic:<11}", "dim"),
            f"  {finding.what}",
            (remedy, "bold"),
        )
    if len(printed) > _LISTED:
        out.line(f"and {len(printed) - _LISTED:,} more; --json has all")
    counts = Counter(finding.level for finding in findings)
    told = [_number(counts[level], level) for level in Level if counts[level] and level is not Level.OK]
    head = "no problems" if not counts[Level.PROBLEM] else None
    hint = "" if verbose or not counts[Level.NOTE] else " (--verbose shows them)"
    text = ", ".join([*([head] if head else []), *told]) + hint
    out.line((f"{len(CHECKS)} checks: {text}", "green" if head else "bold red"))


def _number(count: int, level: Level) -> str:
    if level is Level.UNCHECKED:
        return f"{count} unchecked"
    return f"{count} {level}" if count == 1 else f"{count} {level}s"


def _as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    counts = Counter(finding.level for finding in findings)
    return {
        "format": FORMAT,
        "ok": not counts[Level.PROBLEM],
        "counts": {level: counts[level] for level in Level},
        "findings": [finding.as_json() for finding in findings],
    }
