# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The command: checks first, then the story, then the exit status."""

import importlib.util
import json
import signal
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from nixl_telemetry.cli.demo.folder import DemoFolder, ForeignFilesError

_PLAIN_WIDTH = 108
_NEEDED = ("vllm", "nixl", "httpx", "grpc", "opentelemetry.proto")
_INSTALL = "pip install 'nixl-telemetry[cpu]' (4 GB), or `make venv` in a checkout of the project"


class Modes(StrEnum):
    """Which transfer modes to show."""

    PULL = "pull"
    PUSH = "push"
    BOTH = "both"


def demo(
    out: Annotated[Path, typer.Option(help="Where to write; a folder of its own.")] = Path("demo-out"),
    requests: Annotated[int, typer.Option(min=1, max=50, help="Requests in each mode.")] = 5,
    mode: Annotated[Modes, typer.Option(help="With one mode only, there is no mismatch to show.")] = Modes.BOTH,
) -> None:
    """Run real prefill and decode servers and a router on this machine, and show every signal.

    Takes a minute or two, and 8 GB of memory on two cores; no GPU. Exits with 0 only if everything was seen.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    try:
        _check_installed()
        folder = DemoFolder.prepare(out.absolute())
    except (ForeignFilesError, RuntimeError) as error:
        raise _failed(console, str(error)) from None

    from nixl_telemetry.cli.demo import story, view

    # Then everything is stopped and removed in the same way as on Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    modes = ("pull", "push") if mode is Modes.BOTH else (mode.value,)
    try:
        summary, missing = story.run(console, folder, modes, requests)
    except KeyboardInterrupt:
        raise _failed(console, f"Interrupted; nothing is left running. Logs: {folder.logs}", status=130) from None
    except story.FAILURES as error:
        raise _failed(console, f"{error}\n\nLogs: {folder.logs}") from None
    folder.write("summary.json", json.dumps(summary, indent=2) + "\n")
    console.print(view.ending(missing, out))
    if missing:
        raise typer.Exit(1)


def _check_installed() -> None:
    """Look for everything that is not a dependency of the package itself, before anything is started."""
    missing = [name for name in _NEEDED if not _is_installed(name)]
    if missing:
        raise RuntimeError(f"The demo needs {', '.join(missing)} in this Python environment: {_INSTALL}.")
    from nixl_telemetry.testbed import find_router

    find_router()


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


def _failed(console: Console, message: str, status: int = 1) -> typer.Exit:
    # The end of a server's log may follow the first line.
    first, _, rest = message.partition("\n")
    console.print(Text.assemble("\n", (first, "bold red"), f"\n{rest}" if rest else ""))
    return typer.Exit(status)
