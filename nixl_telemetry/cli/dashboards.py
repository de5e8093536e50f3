# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``nixl-telemetry dashboards``: the dashboards, for a Grafana."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nixl_telemetry.cli import mixin_config
from nixl_telemetry.cli.output import CommandError, Printer, failing
from nixl_telemetry.mixin.boards import (
    TITLE_PREFIX,
    BoardOptions,
    build_boards,
    config_map,
    provisioning,
    text,
)

app = typer.Typer(help="The Grafana dashboards over the metrics.", no_args_is_help=True)


class Format(StrEnum):
    """What an export is for."""

    FOLDER = "folder"
    CONFIGMAP = "configmap"
    PROVISIONING = "provisioning"


@app.command()
def export(
    out: Annotated[
        str, typer.Option(metavar="DIR|-", help="Folder to write into; - is standard output, for configmap.")
    ] = "-",
    format_: Annotated[
        Format,
        typer.Option(
            "--format",
            help="JSON files to import; Kubernetes ConfigMaps that Grafana's sidecar finds; or a folder from which a "
            "Grafana provisions itself.",
        ),
    ] = Format.FOLDER,
    datasource: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|UID", help="The Prometheus that is chosen at first; Grafana's default one if not given."
        ),
    ] = None,
    job_label: mixin_config.JobLabel = None,
    prefix: Annotated[str, typer.Option(metavar="TEXT", help="In front of each title.")] = TITLE_PREFIX,
    runbook_url: mixin_config.RunbookUrl = None,
    settings: mixin_config.Settings = None,
    config: mixin_config.ConfigFile = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the ConfigMaps.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Label of the ConfigMaps, beside grafana_dashboard=1. May be given several times.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write the dashboards. Files of an earlier export are overwritten."""
    with failing():
        if format_ is not Format.CONFIGMAP and (namespace is not None or label):
            raise CommandError("--namespace and --label are for --format configmap")
        if format_ is not Format.CONFIGMAP and out == "-":
            raise CommandError(f"--format {format_} writes several files: say where to with --out DIR")
        given = {"job_label": job_label, "runbook_url": runbook_url}
        mixin = mixin_config.read_config(config, settings, given)
        boards = build_boards(BoardOptions(datasource, prefix, mixin))
        labels = mixin_config.pairs(label or [], "--label")
        if format_ is Format.FOLDER:
            files = {f"{uid}.json": text(board) for uid, board in boards.items()}
        elif format_ is Format.CONFIGMAP:
            files = {f"{uid}.yaml": config_map(uid, board, namespace, labels) for uid, board in boards.items()}
        else:
            files = provisioning(boards)
        if out == "-":
            typer.echo("---\n".join(files.values()), nl=False)
        else:
            _write(files, Path(out))
        mixin_config.complain_of_reserved(mixin, "runbook_url")


@app.command("list")
def list_() -> None:
    """List the dashboards: uid and title."""
    with failing():
        out = Printer()
        for uid, board in build_boards(BoardOptions()).items():
            out.line((f"{uid:22}", "bold"), f"  {board['title']}  ({board['description']})")


def _write(files: dict[str, str], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content, encoding="utf-8")
        except (FileExistsError, NotADirectoryError):
            raise CommandError(f"{path} cannot be written: --out {folder} must be a folder, or new") from None
        except OSError as error:
            raise CommandError(f"{path} cannot be written: {error.strerror}") from None
        typer.echo(f"wrote {path}", err=True)
