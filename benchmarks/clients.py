# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""HTTP clients of vLLM servers."""

from typing import Final

import httpx

_IDLE_SECONDS: Final = 2.0
"""vLLM closes a connection after 5 s without a request. httpx would use one until then, and now and then a request
would meet its end."""


def new_client(timeout_seconds: float) -> httpx.Client:
    """A client that keeps its connections, but not until the server closes them."""
    return httpx.Client(timeout=timeout_seconds, trust_env=False, limits=httpx.Limits(keepalive_expiry=_IDLE_SECONDS))
