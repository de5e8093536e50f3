# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The factors that vLLM really hashes, seen while it does."""

import contextlib
from collections.abc import Iterator
from typing import Any

import vllm.config.utils as config_utils


@contextlib.contextmanager
def seeing_factors() -> Iterator[list[dict[str, Any]]]:
    """Collects what vLLM hashes meanwhile; other configs may be among it.

    ``compute_nixl_compatibility_hash`` keeps the factors to itself, but looks ``hash_factors`` up when it is called.
    """
    seen: list[dict[str, Any]] = []
    stock = getattr(config_utils, "hash_factors", None)
    if stock is None:
        yield seen
        return

    def hash_factors(items: dict[str, Any]) -> str:
        seen.append(items)
        return str(stock(items))

    config_utils.hash_factors = hash_factors
    try:
        yield seen
    finally:
        config_utils.hash_factors = stock
