# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What goes into vLLM's NIXL compatibility hash, how the digest is made, and where two instances differ."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

FACTOR_NAMES: Final = (
    "vllm_version",
    "nixl_connector_version",
    "transfer_mode",
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
)
"""Every factor of connector versions 1 to 15. Of several that differ, the first here is the one to look at first."""

Factors = Mapping[str, Any]
"""Factor values by name, as vLLM hashes them: strings, numbers, booleans, ``None``, or JSON made of these."""

TEXT_LIMIT: Final = 256
"""Characters that are shown of a value: it may come from a peer."""


def digest(factors: Factors) -> str:
    """The SHA-256 hex digest that vLLM makes of ``factors``.

    Source: ``hash_factors`` in ``vllm/config/utils.py``, vLLM 0.13 to 0.33.
    """
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()


def value_text(value: Any) -> str:
    """A factor's value as JSON, at most 256 characters of it; control characters are escaped."""
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]}..."


class Difference(NamedTuple):
    """A factor of which two instances have different values."""

    factor: str
    local: Any
    remote: Any


def differences(local: Factors, remote: Factors) -> tuple[Difference, ...]:
    """The factors that differ, the most telling first.

    A factor that only one side has follows from its vLLM's version, which then differs too; it is left out unless
    nothing else differs.
    """
    order = {name: index for index, name in enumerate(FACTOR_NAMES)}
    names = sorted({*local, *remote}, key=lambda name: (order.get(name, len(order)), name))
    both = tuple(
        Difference(name, local[name], remote[name])
        for name in names
        if name in local and name in remote and not _same(local[name], remote[name])
    )
    one = tuple(
        Difference(name, local.get(name), remote.get(name)) for name in names if (name in local) != (name in remote)
    )
    return both or one


def _same(local: Any, remote: Any) -> bool:
    # As the hash sees them: True and 1 are equal in Python and not in JSON, a tuple and a list the other way round.
    return json.dumps(local, sort_keys=True) == json.dumps(remote, sort_keys=True)
