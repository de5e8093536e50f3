# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Every knob: ``kv_connector_extra_config["telemetry"]`` and ``NIXLTEL_*`` variables.

A setting given in the config wins over its variable. NIXL owns the prefix ``NIXL_TELEMETRY_`` and vLLM warns about
unknown ``VLLM_*`` variables, hence ``NIXLTEL_``.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

CONFIG_KEY: Final = "telemetry"
"""Key of the settings inside ``kv_connector_extra_config``."""
ENV_PREFIX: Final = "NIXLTEL_"
AUTO_VARIABLE: Final = "NIXLTEL_AUTO"
"""Set to 1, the stock connector names resolve to the instrumented classes. A variable only: it is for deployments whose
config cannot be touched."""
_TESTBED_PREFIX: Final = "NIXLTEL_TESTBED_"
_LABEL: Final = "[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME: Final = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*\.?", re.IGNORECASE)


class SettingsError(ValueError):
    """A setting that is unknown or has a bad value; the message names it, the value and what is valid."""


class Settings(BaseModel):
    """What a user can set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(True, description="`false`: the connectors behave as the stock ones, with no telemetry.")
    metrics: bool = Field(True, description="Own metrics on `/metrics`. The labels on vLLM's metrics stay either way.")
    traces: bool = Field(
        True,
        description="Spans, where they have somewhere to go: vLLM's `--otlp-traces-endpoint`, `OTEL_*` or "
        "`trace_file`.",
    )
    logs: bool = Field(True, description="One log line per finished operation.")
    log_format: Literal["logfmt", "json"] = Field("logfmt", description="How a log line's keys are written.")
    slow_handshake_seconds: float = Field(
        1.0, gt=0, description="A handshake slower than this is logged as a warning, and kept (`keep_failed`). Seconds."
    )
    slow_transfer_seconds: float = Field(
        1.0, gt=0, description="A transfer slower than this is logged as a warning, and kept (`keep_failed`). Seconds."
    )
    slow_receive_seconds: float = Field(
        5.0,
        gt=0,
        description="A request that waited longer for remote KV is logged as a warning, and kept (`keep_failed`). "
        "Seconds.",
    )
    block_spans: Literal["off", "runs", "each"] = Field(
        "each",
        description="Spans for the blocks of a sampled transfer: none, one for each run of neighbouring blocks (the "
        "unit that NIXL moves), or one for each block.",
    )
    block_span_limit: int = Field(
        64,
        ge=0,
        description="A transfer of more blocks gets a span for each run instead of each block, which are as many where "
        "no blocks are neighbours; `0`: no limit.",
    )
    keep_failed: bool = Field(
        True,
        description="Export what failed, or was slower than the settings above say, though its trace is not sampled.",
    )
    trace_file: str | None = Field(
        None,
        min_length=1,
        description="File for spans as lines of OTLP JSON, beside or instead of an exporter. Unset: none.",
    )
    trace_file_max_bytes: int = Field(
        16 * 2**20,
        ge=4096,
        le=2**40,
        description="Before a trace file grows larger, the next one begins; only a single message may be. Bytes.",
    )
    trace_file_count: int = Field(
        4, ge=1, le=1000, description="Trace files that are kept, the newest included; the oldest is deleted."
    )
    queue_size: int = Field(
        8192,
        ge=16,
        le=1_000_000,
        description="Records that may wait for the export thread, updates that may wait for the next engine step, and "
        "spans that may wait to be sent (16 spans of blocks count as one); beyond, they are dropped and counted.",
    )
    shutdown_timeout_seconds: float = Field(
        2.0, ge=0, le=30, description="How long a process that ends may wait for spans to be exported. Seconds."
    )

    watchdog_seconds: float = Field(
        10.0,
        ge=0,
        description="What waits longer than this is logged once: a request of the decode side for its KV, and either "
        "half of a push for the other. `0`: nothing is. Seconds.",
    )
    listener: bool = Field(
        True,
        description="Answer handshakes by a listener that survives what is no query. `false`: by vLLM's own, which one "
        "such message ends.",
    )
    allowed_peers: tuple[str, ...] | None = Field(
        None,
        min_length=1,
        description="Whom handshakes are had with, in either direction: CIDRs, addresses and host names, as a JSON "
        "list or, in the variable, separated by commas. Unset: everybody.",
    )

    audit_dir: str | None = Field(
        None,
        min_length=1,
        description="Folder for the [audit trail](audit.md), which is made if missing. Unset: no audit trail.",
    )
    audit_key_file: str | None = Field(
        None,
        min_length=1,
        description="File with the key of the audit trail. Unset: the chain is plain SHA-256.",
    )
    audit_max_file_bytes: int = Field(
        64 * 2**20, ge=4096, le=2**40, description="Size at which the next file of an audit trail begins. Bytes."
    )

    @field_validator("allowed_peers", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return [entry.strip() for entry in value.split(",") if entry.strip()] if isinstance(value, str) else value

    @field_validator("allowed_peers")
    @classmethod
    def _are_peers(cls, entries: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for entry in entries or ():
            if (problem := _no_peer(entry)) is not None:
                raise ValueError(f"the entry {entry!r} {problem}")
        return entries

    @classmethod
    def load(cls, extra_config: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> Self:
        """Read the settings.

        Args:
            extra_config: vLLM's ``kv_connector_extra_config``.
            environ: Environment variables; the process's own by default.

        Raises:
            SettingsError: On an unknown key or a bad value, in either place.
        """
        variables = os.environ if environ is None else environ
        return cls._validated(_from_environment(variables) | _from_config(extra_config or {}))

    @classmethod
    def _validated(cls, given: dict[str, tuple[str, Any]]) -> Self:
        try:
            return cls.model_validate({name: value for name, (_, value) in given.items()})
        except ValidationError as error:
            raise _bad(*given[str(error.errors()[0]["loc"][0])], error) from None


def is_auto(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the stock names shall resolve to the instrumented classes.

    Raises:
        SettingsError: If the variable has a value that is neither true nor false.
    """
    value = (os.environ if environ is None else environ).get(AUTO_VARIABLE, "")
    try:
        return TypeAdapter(bool).validate_python(value) if value else False
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise SettingsError(
            f"nixl_telemetry: the environment variable {AUTO_VARIABLE} is {value!r}: {problem}."
        ) from None


def _no_peer(entry: str) -> str | None:
    """What is wrong with an entry of ``allowed_peers``; ``None`` if nothing is."""
    try:
        network = ipaddress.ip_network(entry, strict=False)
    except ValueError:
        # A number in place of a name is a mistaken address.
        if _HOST_NAME.fullmatch(entry) and not re.fullmatch(r"[0-9.]+", entry):
            return None
        return "is neither an address, nor a network such as 10.0.0.0/8, nor a host name"
    if "/" in entry and ipaddress.ip_address(entry.partition("/")[0]) != network.network_address:
        return f"is an address inside a network; the network is {network}"
    return None


def _bad(where: str, value: Any, error: ValidationError) -> SettingsError:
    return SettingsError(
        f"nixl_telemetry: {where} is {value!r}: {error.errors()[0]['msg'].removeprefix('Value error, ')}."
    )


def variable_of(name: str) -> str:
    """The environment variable of the setting ``name``."""
    return ENV_PREFIX + name.upper()


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    settings = {variable_of(name): name for name in Settings.model_fields}
    given = {}
    for variable, value in environ.items():
        if not variable.startswith(ENV_PREFIX) or variable.startswith(_TESTBED_PREFIX) or variable == AUTO_VARIABLE:
            continue
        if variable not in settings:
            raise SettingsError(
                f"nixl_telemetry: the environment variable {variable}={value!r} is not known. "
                f"Valid ones: {', '.join(sorted([*settings, AUTO_VARIABLE]))}."
            )
        given[settings[variable]] = (f"the environment variable {variable}", value)
    return given


def _from_config(extra_config: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    where = f'kv_connector_extra_config["{CONFIG_KEY}"]'
    config = extra_config.get(CONFIG_KEY, {})
    if not isinstance(config, Mapping):
        raise SettingsError(f"nixl_telemetry: {where} is {config!r}; it must be an object of settings.")
    for name, value in config.items():
        if name not in Settings.model_fields:
            raise SettingsError(
                f"nixl_telemetry: {where} has the unknown key {name!r} (value {value!r}). "
                f"Valid keys: {', '.join(sorted(Settings.model_fields))}."
            )
    return {name: (f'{where}["{name}"]', value) for name, value in config.items()}
