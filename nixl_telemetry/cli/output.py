# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""How the commands print, and how they fail: one line on standard error and an exit code."""

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, Final

import typer
from rich.console import Console
from rich.text import Text

_SHORT_HASH: Final = 12


class Exit(IntEnum):
    """Exit codes of the commands that judge."""

    FINE = 0
    INCOMPATIBLE = 1
    """Something does not fit, or is wrong."""
    UNKNOWN = 2
    """It could not be told, or something could not be reached or read."""


class CommandError(Exception):
    """Ends a command; the message is one line for its user."""


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Turns an error into one line and an exit code; one that nobody foresaw must not look like a verdict."""
    try:
        yield
    except CommandError as error:
        complain(str(error))
        raise typer.Exit(Exit.UNKNOWN) from None
    except (typer.Exit, typer.Abort, BrokenPipeError):  # typer's business
        raise
    except Exception as error:
        complain(f"{type(error).__name__}: {error}; this is a bug in nixl-telemetry, and worth a report")
        raise typer.Exit(Exit.UNKNOWN) from None


def complain(message: str) -> None:
    """Print an error."""
    typer.echo(f"error: {plain(message)}", err=True)


def short(compat_hash: str) -> str:
    """So much of a hash that hashes can be told apart by it."""
    return compat_hash[:_SHORT_HASH]


def print_json(value: Any) -> None:
    """Print JSON, and nothing else, to standard output."""
    typer.echo(json.dumps(value, indent=2))


def plain(text: str) -> str:
    """Text without anything that a terminal could take for a command: much of it comes from the network."""
    return re.sub(r"[^ -~→…]", lambda match: json.dumps(match[0])[1:-1], text)


class Printer:
    """Prints lines that stay whole: a log has no width, and a terminal wraps them."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, soft_wrap=True)

    def line(self, *parts: str | tuple[str, str]) -> None:
        """Print a line of texts, some of them with a style."""
        styled = [(plain(part), "") if isinstance(part, str) else (plain(part[0]), part[1]) for part in parts]
        self._console.print(Text.assemble(*styled))

    @contextlib.contextmanager
    def progress(self) -> Iterator[Callable[[str, str], None]]:
        """Prints what is going on meanwhile: in a terminal as a line that changes, else as one for each change.

        Yields:
            What takes the moment and what is going on then.
        """
        if self._console.is_interactive:
            with self._console.status("") as status:
                yield lambda moment, text: status.update(Text(f"{plain(moment)}  {plain(text)}"))
            return
        told: list[str] = []

        def tell(moment: str, text: str) -> None:
            if told[-1:] != [text]:
                told[:] = [text]
                self.line((moment, "dim"), f"  {text}")

        yield tell
