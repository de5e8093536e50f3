# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The configuration of rules and dashboards, from options and a file; and where an export goes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from nixl_telemetry.cli.output import CommandError
from nixl_telemetry.mixin.config import MixinConfig, MixinConfigError

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="YAML with settings by name; --set and other options win over it."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="A threshold, a window or a `for`, by its name in docs/alerts.md. May be given several times.",
        show_default=False,
    ),
]
JobLabel = Annotated[
    str | None,
    typer.Option(metavar="LABEL", help="Label that P and D of a deployment have in common; `job` where not given."),
]
RunbookUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Where the runbooks are served; {alert} in it stands for an alert's name."),
]
GrafanaUrl = Annotated[str | None, typer.Option(metavar="URL", help="Grafana's address, for links to dashboards.")]


def read_config(file: Path | None, settings: list[str] | None, options: Mapping[str, str | None]) -> MixinConfig:
    """The configuration: the file's, then ``--set``, then what has an option of its own and was given.

    Raises:
        CommandError: Something of it is unknown, bad, or cannot be read.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return MixinConfig.load(_read(file) if file else {}, pairs(settings or [], "--set"), given)
    except MixinConfigError as error:
        raise CommandError(str(error)) from None


def complain_of_reserved(config: MixinConfig, *names: str) -> None:
    """Say that links lead nowhere yet, where they do: those of the settings ``names``."""
    defaults = MixinConfig()
    unset = [f"--{name.replace('_', '-')}" for name in names if getattr(config, name) == getattr(defaults, name)]
    if unset:
        typer.echo(
            f"note: without {' and '.join(unset)}, links go to a reserved name under .example, which leads nowhere",
            err=True,
        )


def write(text: str, out: Path, name: str) -> None:
    """Write an export to standard output (``-``), into a folder under ``name``, or to a file.

    Raises:
        CommandError: It cannot be written.
    """
    if str(out) == "-":
        typer.echo(text, nl=False)
        return
    path = out / name if out.is_dir() else out
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {path}", err=True)


def pairs(entries: list[str], option: str) -> dict[str, str]:
    """``NAME=VALUE`` entries of an option.

    Raises:
        CommandError: One has no name or no ``=``.
    """
    split = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not (name and equals):
            raise CommandError(f"{option} {entry!r}: it must be NAME=VALUE")
        split[name] = value
    return split


def _read(file: Path) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CommandError(f"{file} cannot be read: {error.strerror}") from None
    except (UnicodeError, yaml.YAMLError) as error:
        raise CommandError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise CommandError(f"{file} holds {content!r:.80}; it must have settings by name, such as `mixed_for: 1h`")
    return content
