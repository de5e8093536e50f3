# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Factors and statements of instances, to be varied."""

from typing import Any, Final

from nixl_telemetry.compat.factors import digest
from nixl_telemetry.compat.releases import RELEASES
from nixl_telemetry.compat.statement import VERSION, Geometry, Statement, encode

FACTORS: Final[dict[str, Any]] = {
    "vllm_version": "0.32.0",
    "nixl_connector_version": 14,
    "model": "example/model",
    "dtype": "torch.bfloat16",
    "num_kv_heads": 4,
    "head_size": 64,
    "num_hidden_layers": 4,
    "attn_backend_name": "CPU_ATTN",
    "cache_dtype": "auto",
    "is_hma_enabled": True,
    "speculative_config": None,
    "transfer_mode": "pull",
}
"""A pull instance of vLLM 0.32.0."""

GEOMETRY: Final = Geometry(
    tp_size=1, pp_size=1, dcp_size=1, pcp_size=1, block_size=32, kv_cache_layout="LBHNC", block_lens=(32768,)
)


def factors(**changes: Any) -> dict[str, Any]:
    """The factors with some changed."""
    return {**FACTORS, **changes}


def factors_of_release(version: str, **changes: Any) -> dict[str, Any]:
    """The factors of the same instance under another vLLM."""
    (release,) = (release for release in RELEASES if release.vllm_version == version)
    values = {"cross_layers_blocks": False, **FACTORS, **changes}
    values |= {"vllm_version": version, "nixl_connector_version": release.connector_version}
    return {name: values[name] for name in release.factor_names}


def statement(told: dict[str, Any] | None = None, **changes: Any) -> Statement:
    """What an instance with these factors says."""
    values: dict[str, Any] = {
        "version": VERSION,
        "factors": FACTORS if told is None else told,
        "nixl_version": "1.5.1",
        "telemetry_version": "0.1.0",
        "kv_role": "kv_producer",
        "engine_id": "there",
        "geometry": GEOMETRY,
    }
    return Statement(**{**values, **changes})


def exchanged(said: Statement) -> tuple[str, bytes]:
    """The hash and the field of the payload with which it is said."""
    return digest(said.factors), encode(said)
