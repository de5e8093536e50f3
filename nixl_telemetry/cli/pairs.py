# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What a handshake between two instances would end with, judged beforehand."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import msgspec

from nixl_telemetry.compat.factors import Difference, differences, value_text
from nixl_telemetry.compat.geometry import Consequence, GeometryDifference, geometry_differences
from nixl_telemetry.compat.instance import Instance, Origin

_SWAPPED: Final = {"prefill": "kv_consumer", "decode": "kv_producer"}
"""The ``kv_role`` of an instance that is named for the other role."""
_UNEXPLAINED: Final = (
    "the hashes differ, and which factor does is not known; --like an instance that tells its factors, or --factor "
    "model=NAME, helps to find it"
)


class Verdict(StrEnum):
    """Whether a pair can exchange KV."""

    COMPATIBLE = "compatible"
    INCOMPATIBLE = "incompatible"
    UNKNOWN = "unknown"
    """One of the two could not be reached or read."""


@dataclass(frozen=True)
class Side:
    """An instance in its role, or why there is none."""

    role: str
    """``prefill`` or ``decode``."""
    source: str
    """What the user calls it by."""
    instance: Instance | None
    error: str | None = None

    def __str__(self) -> str:
        return f"{self.role} {self.source}"

    def as_json(self) -> dict[str, Any]:
        """All of it, for a program."""
        instance = None if self.instance is None else msgspec.to_builtins(self.instance)
        return {"role": self.role, "source": self.source, "error": self.error, "instance": instance}


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode instance."""

    prefill: Side
    decode: Side
    verdict: Verdict
    reasons: tuple[str, ...] = ()
    """Why the verdict is not ``compatible``."""
    differences: tuple[Difference, ...] = ()
    """Factors, of prefill and of decode."""
    geometry: tuple[GeometryDifference, ...] = ()
    """What differs though the hash does not cover it."""
    warnings: tuple[str, ...] = ()
    """What does not end a handshake, and may be wrong all the same."""

    def as_json(self) -> dict[str, Any]:
        """All of it, for a program."""
        return {
            "prefill": self.prefill.source,
            "decode": self.decode.source,
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "differences": [
                {"factor": factor, "prefill": local, "decode": remote} for factor, local, remote in self.differences
            ],
            "geometry": [
                {
                    "name": difference.name,
                    "prefill": difference.local,
                    "decode": difference.remote,
                    "consequence": difference.consequence,
                    "advice": difference.advice,
                }
                for difference in self.geometry
            ],
            "warnings": list(self.warnings),
        }


def judge(prefill: Side, decode: Side) -> Pair:
    """Say how a handshake of the two would end."""
    here, there = prefill.instance, decode.instance
    if here is None or there is None:
        missing = [f"{side.role}: {side.error}" for side in (prefill, decode) if side.instance is None]
        return Pair(prefill, decode, Verdict.UNKNOWN, tuple(missing))
    factors: tuple[Difference, ...] = ()
    reasons: list[str] = []
    if here.compat_hash != there.compat_hash:
        if here.factors is not None and there.factors is not None:
            factors = differences(here.factors, there.factors)
        reasons.append(told(factors, (prefill.role, decode.role), (here, there)) if factors else _UNEXPLAINED)
    reasons += [
        f"ranks of {side.role} answer different hashes"
        for side, instance in ((prefill, here), (decode, there))
        if len(instance.hashes()) > 1
    ]
    same = (here.factors or there.factors) if here.compat_hash == there.compat_hash else None
    geometry = geometry_differences(here.geometry, there.geometry, _revisions(here, there), same)
    reasons += [_geometry_text(found) for found in geometry if found.consequence is Consequence.REFUSED]
    warnings = [_geometry_text(found) for found in geometry if found.consequence is not Consequence.REFUSED]
    warnings += [
        f"{side} runs with kv_role {instance.kv_role}; are the two swapped?"
        for side, instance in ((prefill, here), (decode, there))
        if instance.kv_role == _SWAPPED[side.role]
    ]
    verdict = Verdict.INCOMPATIBLE if reasons else Verdict.COMPATIBLE
    return Pair(prefill, decode, verdict, tuple(reasons), factors, geometry, tuple(warnings))


def told(found: tuple[Difference, ...], sides: tuple[str, str], instances: tuple[Instance, Instance]) -> str:
    """Factors that differ, as half a sentence that names the sides and how they are known."""
    texts = [
        f"{factor} is {value_text(local)} on {sides[0]} and {value_text(remote)} on {sides[1]}"
        for factor, local, remote in found
    ]
    origins = [instance.origin for instance in instances]
    known = (
        origins[0]
        if origins[0] == origins[1]
        else ", ".join(f"{side} {origin}" for side, origin in zip(sides, origins, strict=True))
    )
    return f"{'; '.join(texts)} ({known})"


def _geometry_text(found: GeometryDifference) -> str:
    return (
        f"{found.name} is {value_text(found.local)} on prefill and {value_text(found.remote)} on decode: {found.advice}"
    )


def _revisions(here: Instance, there: Instance) -> tuple[str | None, str | None]:
    """The revisions of the models, if both sides would say so if they had one."""
    if all(instance.instrumented or instance.origin is Origin.COMPUTED for instance in (here, there)):
        return here.model_revision, there.model_revision
    return None, None
