# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``nixl-telemetry factors``: what an instance will hash that does not run yet."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from nixl_telemetry.cli import options
from nixl_telemetry.cli.knowledge import parse_factors
from nixl_telemetry.cli.output import CommandError, Printer, failing
from nixl_telemetry.cli.probe import show
from nixl_telemetry.compat.factors import digest
from nixl_telemetry.compat.instance import Instance

_COMMAND: Final = ["vllm", "serve"]
_QUIET: Final = {"VLLM_LOGGING_LEVEL": "ERROR", "TRANSFORMERS_VERBOSITY": "error", "PYTHONWARNINGS": "ignore"}
"""What the user's environment may override."""


def factors(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- MODEL ...",
            help="After --, the arguments of `vllm serve`, with --kv-transfer-config.",
            show_default=False,
        ),
    ] = None,
    factor: Annotated[
        list[str] | None,
        typer.Option(
            "--factor",
            metavar="NAME=VALUE",
            help="A factor that is another one where the instance will run, as attn_backend_name is on a GPU.",
            show_default=False,
        ),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compute the factors and the hash of an instance from its arguments, by vLLM's own code.

    Put the arguments of `vllm serve` after --: without it, its options
    are taken for options of this command.

    Needs vLLM here, but neither a GPU nor the weights. Save the output
    of --json, and `check` compares it with others.

    Exits with 0, or with 2 if vLLM is not here or refuses the arguments.
    """
    with failing():
        if not arguments:
            raise CommandError("put the arguments of vllm serve after `--`: nixl-telemetry factors -- MODEL ...")
        given = parse_factors(factor or [])
        instance = _with(given, _computed(arguments))
        if as_json:
            typer.echo(instance.to_json())
        else:
            show(Printer(), instance)


def _computed(arguments: list[str]) -> Instance:
    if arguments[:2] == _COMMAND:
        arguments = arguments[2:]
    model = arguments[0] if arguments else ""
    if model.startswith(("/", "./", "../")) and not Path(model).exists():
        raise CommandError(f"the model {model!r} is no folder here")
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    with _stdout_to_stderr():
        try:
            from nixl_telemetry.seam import preflight
        except ImportError as error:
            raise CommandError(
                f"vLLM's own code computes the factors, and it cannot be imported here ({error}); run this with the "
                "Python of the server's environment or image"
            ) from None
        try:
            return preflight.compute(arguments)
        except preflight.PreflightError as error:
            raise CommandError(str(error)) from None


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Keeps standard output for the answer, whatever vLLM and the libraries below it print."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _with(given: dict[str, Any], instance: Instance) -> Instance:
    """The instance with factors replaced.

    Raises:
        CommandError: It has no such factor.
    """
    if not given:
        return instance
    known = instance.factors or {}
    if foreign := sorted(given.keys() - known.keys()):
        raise CommandError(f"vLLM {known.get('vllm_version')} does not hash {', '.join(foreign)}")
    replaced = {**known, **given}
    note = f"not computed, but given by hand: {', '.join(given)}"
    return msgspec.structs.replace(
        instance, factors=replaced, compat_hash=digest(replaced), notes=(*instance.notes, note)
    )
