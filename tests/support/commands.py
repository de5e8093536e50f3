# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Running a command of the command line in this process."""

import json
from collections.abc import Callable
from typing import Any

import typer
from typer.testing import CliRunner, Result


def run(command: Callable[..., None], *arguments: object, stdin: str | None = None) -> Result:
    """Run one command as a user would; its exit code, standard output and standard error are apart."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def output(result: Result, code: int = 0) -> Any:
    """The JSON that a command printed; the test fails if it ended with another exit code."""
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def refused(result: Result) -> str:
    """The one line with which a command gave up."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return str(line)
