# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The arguments of ``vllm serve``, read without vLLM: the few that `doctor` looks at.

vLLM's own parser has the last word where it is installed; this is for where it is not, and for what it refuses.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from nixl_telemetry.cli.output import CommandError

_COMMAND: Final = ["vllm", "serve"]
_TRANSFER: Final = "--kv-transfer-config"
_CONFIG_FILE: Final = "--config"
_INTEGERS: Final = {
    "--port": "port",
    "--data-parallel-size": "data_parallel_size",
    "-dp": "data_parallel_size",
    "--data-parallel-size-local": "data_parallel_size_local",
    "-dpl": "data_parallel_size_local",
    "--data-parallel-rank": "data_parallel_rank",
    "-dpn": "data_parallel_rank",
    "--data-parallel-start-rank": "data_parallel_start_rank",
    "-dpr": "data_parallel_start_rank",
    "--tensor-parallel-size": "tensor_parallel_size",
    "-tp": "tensor_parallel_size",
    "--api-server-count": "api_server_count",
    "-asc": "api_server_count",
    "--nnodes": "nnodes",
    "-n": "nnodes",
}
_TEXTS: Final = {
    "--host": "host",
    "--uds": "uds",
    "--otlp-traces-endpoint": "otlp_traces_endpoint",
    "--data-parallel-backend": "data_parallel_backend",
    "-dpb": "data_parallel_backend",
}
_FLAGS: Final = {"--headless": "headless"}
_DIGITS: Final = 9
"""Of the numbers that are read."""
_LARGEST: Final = 2**20
"""Bytes of JSON that are read: an argument has at most 128 KiB, a file may have more."""


class TransferConfigError(ValueError):
    """A ``--kv-transfer-config`` that is no JSON object. The message names it."""


@dataclass
class Arguments:
    """What was found."""

    values: dict[str, Any] = field(default_factory=dict)
    """By vLLM's names, as its namespace has them."""
    transfer: dict[str, Any] | None = None
    transfer_error: str | None = None
    """Why there is no config though one was given."""
    config_file: str | None = None
    """A file with more arguments, which only vLLM reads."""


def read(arguments: Sequence[str]) -> Arguments:
    """Read what can be read; nothing is refused."""
    found = Arguments()
    for name, value in _pairs(without_command(arguments)):
        option, _, keys = name.partition(".")
        if option == _TRANSFER:
            try:
                _add(found, keys, value)
            except TransferConfigError as error:
                found.transfer_error = str(error)
        elif name == _CONFIG_FILE:
            found.config_file = value
        elif name in _FLAGS:
            found.values[_FLAGS[name]] = True
        elif name in _TEXTS and value is not None:
            found.values[_TEXTS[name]] = value
        elif name in _INTEGERS and value is not None and value.isascii() and value.isdigit() and len(value) <= _DIGITS:
            found.values[_INTEGERS[name]] = int(value)
    return found


def without_command(arguments: Sequence[str]) -> list[str]:
    """The arguments without ``vllm serve`` in front of them: a whole command line may be pasted."""
    return list(arguments[2:] if list(arguments[:2]) == _COMMAND else arguments)


def transfer_config(text: str, where: str) -> dict[str, Any]:
    """A ``KVTransferConfig`` from its JSON.

    Raises:
        TransferConfigError: It is none.
    """
    if len(text) > _LARGEST:
        raise TransferConfigError(f"{where} has {len(text):,} characters; no more than {_LARGEST:,} are read")
    try:
        value = json.loads(text)
    except RecursionError:
        raise TransferConfigError(f"{where} is nested too deeply") from None
    except ValueError as error:
        raise TransferConfigError(f"{where} is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise TransferConfigError(f"{where} is {type(value).__name__} and no JSON object")
    return value


def transfer_config_or_file(text: str, where: str) -> dict[str, Any]:
    """The same, from the text or from a file of this name.

    Raises:
        CommandError: It is none.
    """
    if not text.lstrip().startswith("{"):
        try:
            with open(text, encoding="utf-8") as file:  # noqa: PTH123  a name with a NUL is a ValueError here
                text = file.read(_LARGEST + 1)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise CommandError(
                f"{where} {text[:100]!r} is no JSON object, and no file that can be read: {reason}"
            ) from None
    try:
        return transfer_config(text, where)
    except TransferConfigError as error:
        raise CommandError(str(error)) from None


def _pairs(arguments: list[str]) -> Iterator[tuple[str, str | None]]:
    for position, argument in enumerate(arguments):
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.partition("=")
        option, dot, keys = name.partition(".")
        following = arguments[position + 1] if position + 1 < len(arguments) else None
        # vLLM takes underscores, too, but not in the keys of a JSON option.
        yield option.replace("_", "-") + dot + keys, value if equals else following


def _add(found: Arguments, keys: str, value: str | None) -> None:
    """A whole config, or with keys as ``--kv-transfer-config.kv_role`` a part of one."""
    if value is None:
        raise TransferConfigError(f"{_TRANSFER} has no value")
    if not keys:
        found.transfer = {**(found.transfer or {}), **transfer_config(value, _TRANSFER)}
        return
    try:
        part = json.loads(value)
    except (ValueError, RecursionError):
        part = value
    found.transfer = found.transfer if found.transfer is not None else {}
    place: Any = found.transfer
    *parents, last = keys.split(".")[:8]
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise TransferConfigError(f"{_TRANSFER}.{keys} goes into what is no object")
    place[last] = part
