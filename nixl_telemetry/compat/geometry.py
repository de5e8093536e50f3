# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What vLLM does with a pair whose hashes agree and whose geometry differs."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from nixl_telemetry.compat.factors import Factors, value_text
from nixl_telemetry.compat.statement import Geometry


class Consequence(StrEnum):
    """What follows from a difference."""

    REFUSED = "refused"
    """vLLM ends the handshake."""
    CONDITIONAL = "conditional"
    """vLLM takes some such pairs and refuses others; it depends on the model and on further settings."""
    UNCHECKED = "unchecked"
    """vLLM does not look at it: the pair serves, and its output may be wrong."""


@dataclass(frozen=True)
class GeometryDifference:
    """Something that the hash does not cover and that differs."""

    name: str
    local: Any
    remote: Any
    consequence: Consequence
    advice: str
    """What vLLM does, and what to do."""

    def text(self) -> str:
        """The difference as half a sentence."""
        return f"{self.name} is {value_text(self.remote)} there and {value_text(self.local)} here: {self.advice}"


def geometry_differences(
    local: Geometry,
    remote: Geometry,
    revisions: tuple[str | None, str | None] = (None, None),
    factors: Factors | None = None,
) -> tuple[GeometryDifference, ...]:
    """Compare what the hash does not cover; what one side does not tell is left out.

    Source: ``_validate_remote_agent_handshake`` and ``_validate_remote_parallel_config`` in vLLM 0.32.

    Args:
        local: Geometry of one instance.
        remote: Geometry of the other.
        revisions: Model revisions, local and remote.
        factors: What both hash, where it is known.
    """
    found = [_judge(name, local, remote, factors) for name in _ORDER]
    mine, theirs = revisions
    if mine != theirs:
        found.append(
            GeometryDifference(
                "model_revision",
                mine,
                theirs,
                Consequence.UNCHECKED,
                "vLLM does not compare revisions, and KV of other weights gives wrong output; start both with one "
                "--revision",
            )
        )
    return tuple(difference for difference in found if difference is not None)


_ORDER = ("kv_cache_layout", "num_regions", "block_lens", "dcp_size", "pcp_size", "block_size", "tp_size", "pp_size")


def _judge(name: str, local: Geometry, remote: Geometry, factors: Factors | None) -> GeometryDifference | None:
    here, there = getattr(local, name), getattr(remote, name)
    if here is None or there is None:
        return None
    # Two instances may also be refused for sizes that they have in common.
    refusal = _context_refusal(local, remote) if name == "dcp_size" else None
    if here == there and refusal is None:
        return None
    consequence, advice = _RULES[name] if refusal is None else (Consequence.REFUSED, refusal)
    if name == "num_regions":
        stages = {local.pp_size, remote.pp_size}
        if None not in stages and len(stages) > 1:
            # Follows from them, and vLLM picks the regions of the layers that both have.
            return None
        if stages != {1}:
            consequence, advice = Consequence.CONDITIONAL, "vLLM refuses it unless PP splits the layers between ranks"
    if name == "block_lens":
        if _split_otherwise(local, remote):
            # Follows from the other sizes, and vLLM computes what it must be.
            return None
        if not _split_is_known(local, remote):
            consequence, advice = (
                Consequence.CONDITIONAL,
                "right if their TP or PP sizes differ, which is not known of both; vLLM refuses it if they do not",
            )
        elif not _lengths_are_checked(factors):
            consequence, advice = (
                Consequence.CONDITIONAL,
                "vLLM refuses it unless the model has Mamba layers; then nothing compares them",
            )
    return GeometryDifference(name, here, there, consequence, advice)


def _context_refusal(local: Geometry, remote: Geometry) -> str | None:
    """Why vLLM takes no such DCP and PCP sizes of a pair, as far as that is arithmetic."""
    sizes = [(one.pcp_size, one.dcp_size) for one in (local, remote)]
    if any(pcp is not None and pcp > 1 and dcp not in {None, 1, pcp} for pcp, dcp in sizes):
        return "with PCP, vLLM takes only a DCP size of 1 or of PCP's"
    if any(
        pcp is not None and pcp > 1 and dcp == 1 and other is not None and other > 1
        for (pcp, dcp), (_, other) in (sizes, sizes[::-1])
    ):
        return "vLLM pairs no instance that has PCP without DCP with one that has DCP"
    here, there = local.dcp_size, remote.dcp_size
    if here is not None and there is not None and here % max(there, 1) and there % max(here, 1):
        return "vLLM takes only sizes of which one divides the other"
    return None


def _lengths_are_checked(factors: Factors | None) -> bool:
    # Mamba layers need the hybrid KV cache manager; and where they come with MLA, vLLM compares lengths all the same.
    known = factors or {}
    return known.get("is_hma_enabled") is False or "MLA" in str(known.get("attn_backend_name"))


def _split_otherwise(local: Geometry, remote: Geometry) -> bool:
    sizes = [
        (getattr(local, name), getattr(remote, name))
        for name in ("tp_size", "pp_size", "dcp_size", "pcp_size", "block_size")
    ]
    return any(None not in pair and pair[0] != pair[1] for pair in sizes)


def _split_is_known(local: Geometry, remote: Geometry) -> bool:
    # A stock instance does not tell its ranks.
    return None not in {side for one in (local, remote) for side in (one.tp_size, one.pp_size)}


_RULES = {
    "kv_cache_layout": (
        Consequence.CONDITIONAL,
        "vLLM refuses other layouts but for MLA models and enable_permute_local_kv; set VLLM_KV_CACHE_LAYOUT alike",
    ),
    "num_regions": (Consequence.REFUSED, "vLLM takes only as many regions as it has; the KV caches are not the same"),
    "block_lens": (Consequence.REFUSED, "vLLM refuses blocks of other sizes; the KV caches are not the same"),
    "dcp_size": (Consequence.CONDITIONAL, "vLLM takes other sizes for some models only"),
    "pcp_size": (Consequence.CONDITIONAL, "vLLM takes other sizes only where DCP agrees with them"),
    "block_size": (
        Consequence.CONDITIONAL,
        "vLLM converts between block sizes unless a host buffer is used; the same --block-size is safer",
    ),
    "tp_size": (
        Consequence.CONDITIONAL,
        "vLLM splits heads between ranks where the KV heads divide and the layout keeps a block in one piece",
    ),
    "pp_size": (Consequence.CONDITIONAL, "vLLM takes other sizes in push mode only"),
}
