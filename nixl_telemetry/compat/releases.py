# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""vLLM's releases: the connector version and the set of hash factors of each.

Source: ``NIXL_CONNECTOR_VERSION`` and ``compute_nixl_compatibility_hash`` in the wheels of vLLM 0.13.0 to 0.33.0. The
set of factors is not a function of the connector version: version 2 lived through three sets.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple

FactorNames = tuple[str, ...]

_BASE: Final = (
    "vllm_version",
    "nixl_connector_version",
    "model",
    "dtype",
    "num_kv_heads",
    "head_size",
    "num_hidden_layers",
    "attn_backend_name",
    "cache_dtype",
)
_WITH_LAYERS: Final = (*_BASE, "cross_layers_blocks")
_WITH_HMA: Final = (*_WITH_LAYERS, "is_hma_enabled")
_WITH_SPECULATION: Final = (*_WITH_HMA, "speculative_config")
_WITH_MODE: Final = (*_WITH_SPECULATION, "transfer_mode")
_WITHOUT_LAYERS: Final = tuple(name for name in _WITH_MODE if name != "cross_layers_blocks")


class Release(NamedTuple):
    """One release of vLLM."""

    vllm_version: str
    connector_version: int
    factor_names: FactorNames
    """In the order of the alphabet."""


def _releases() -> Iterator[Release]:
    for connector_version, factor_names, versions in (
        (15, _WITHOUT_LAYERS, "0.33.0"),
        (14, _WITHOUT_LAYERS, "0.32.0"),
        (13, _WITHOUT_LAYERS, "0.31.0"),
        (11, _WITHOUT_LAYERS, "0.30.0"),
        (9, _WITHOUT_LAYERS, "0.29.0"),
        (7, _WITH_MODE, "0.28.0"),
        (5, _WITH_HMA, "0.27.1 0.27.0 0.26.0"),
        (4, _WITH_HMA, "0.25.1 0.25.0 0.24.0 0.23.0 0.22.1 0.22.0"),
        (3, _WITH_HMA, "0.21.0"),
        (2, _WITH_HMA, "0.20.2 0.20.1 0.20.0 0.19.1 0.19.0 0.18.1 0.18.0"),
        (2, _WITH_LAYERS, "0.17.1 0.17.0 0.16.0"),
        (2, _BASE, "0.15.1 0.15.0 0.14.1 0.14.0 0.13.0"),
    ):
        for version in versions.split():
            yield Release(version, connector_version, tuple(sorted(factor_names)))


RELEASES: Final = tuple(_releases())
"""Every release with a compatibility hash, the newest first."""

UNRELEASED: Final = (
    (12, _WITHOUT_LAYERS),
    (10, _WITHOUT_LAYERS),
    (8, _WITH_MODE),
    (6, _WITH_SPECULATION),
    (1, _BASE),
)
"""Connector versions that no release carries, with their factors: builds between two releases have them."""


def factor_names(connector_version: int) -> tuple[FactorNames, ...]:
    """Every set of factors that a connector version has had; that of the newest for one that is not known yet."""
    known = [
        *((release.connector_version, release.factor_names) for release in RELEASES),
        *((version, tuple(sorted(names))) for version, names in UNRELEASED),
    ]
    found = tuple(dict.fromkeys(names for version, names in known if version == connector_version))
    return found or (RELEASES[0].factor_names,)
