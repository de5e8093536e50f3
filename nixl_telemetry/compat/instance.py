# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What is known of one instance, running or not, as ``probe`` and ``factors`` write it and ``check`` reads it."""

import json
from enum import StrEnum
from typing import Annotated, Any, Final, Self

import msgspec
from msgspec import Meta

from nixl_telemetry.compat.factors import FACTOR_NAMES, Factors, digest
from nixl_telemetry.compat.statement import Geometry

FORMAT: Final = "nixl_telemetry.instance/1"
"""What a file says that it is."""

_SIZE_LIMIT: Final = 4 * 2**20


class InstanceError(ValueError):
    """A file that describes no instance; the message names what is wrong."""


class Origin(StrEnum):
    """Where the factors of an instance come from."""

    EXCHANGED = "exchanged"
    """The instance told them."""
    RECOVERED = "recovered"
    """They were found from its hash."""
    COMPUTED = "computed"
    """vLLM's own code computed them from arguments, without running the instance."""
    UNKNOWN = "unknown"
    """They are not known."""


class Rank(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank answers."""

    pp_rank: int
    tp_rank: int
    compat_hash: str
    engine_id: str | None = None
    attn_backend_name: str | None = None
    num_blocks: int | None = None
    geometry: Geometry = Geometry()


class Instance(msgspec.Struct, frozen=True, kw_only=True):
    """One instance."""

    format: str = FORMAT
    name: str
    """Address, or what else the user calls it by."""
    compat_hash: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    instrumented: bool = False
    """Whether it told what it is."""
    origin: Origin = Origin.UNKNOWN
    factors: dict[str, Any] | None = None
    nixl_version: str | None = None
    telemetry_version: str | None = None
    kv_role: str | None = None
    engine_id: str | None = None
    model_revision: str | None = None
    geometry: Geometry = Geometry()
    ranks: tuple[Rank, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader should know about where all this comes from."""

    def hashes(self) -> set[str]:
        """The hashes of all ranks: one, if all is well."""
        return {self.compat_hash, *(rank.compat_hash for rank in self.ranks)}

    def with_factors(self, factors: Factors, origin: Origin) -> Self:
        """The same instance, with its factors known."""
        return msgspec.structs.replace(self, factors=dict(factors), origin=origin)

    def to_json(self) -> str:
        """The instance as JSON, with line breaks; in ASCII, since much of it may come from a stranger."""
        return json.dumps(msgspec.to_builtins(self), indent=2)

    @staticmethod
    def from_json(text: bytes) -> "Instance":
        """Read an instance.

        Raises:
            InstanceError: The text is no instance, or its factors do not give its hash.
        """
        if len(text) > _SIZE_LIMIT:
            raise InstanceError(f"{len(text)} bytes are too many for an instance; at most {_SIZE_LIMIT} are read")
        try:
            instance = msgspec.json.decode(text, type=Instance)
        except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
            raise InstanceError(f"this is no instance as `probe --json` or `factors` write it: {error}") from None
        if instance.format != FORMAT:
            raise InstanceError(f"the format is {instance.format!r}; this version reads {FORMAT!r}")
        if instance.factors is not None:
            unknown = sorted(instance.factors.keys() - set(FACTOR_NAMES))
            if unknown:
                raise InstanceError(f"unknown factors: {', '.join(unknown)}; known ones: {', '.join(FACTOR_NAMES)}")
            given = digest(instance.factors)
            if given != instance.compat_hash:
                raise InstanceError(f"it was edited: its factors give {given} and it says {instance.compat_hash}")
        return instance
