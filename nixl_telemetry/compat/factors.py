# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What goes into vLLM's NIXL compatibility hash, and how the digest is made."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final

FACTOR_NAMES: Final = (
    "vllm_version",
    "nixl_connector_version",
    "model",
    "dtype",
    "num_kv_heads",
    "head_size",
    "num_hidden_layers",
    "attn_backend_name",
    "cache_dtype",
    "cross_layers_blocks",
    "is_hma_enabled",
    "speculative_config",
    "transfer_mode",
)
"""Every factor of connector versions 1 to 15, in the order in which vLLM builds them."""


def digest(factors: Mapping[str, Any]) -> str:
    """The SHA-256 hex digest that vLLM makes of ``factors``.

    Source: ``hash_factors`` in ``vllm/config/utils.py``, vLLM 0.28 to 0.33.
    """
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()
