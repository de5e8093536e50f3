# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Conditions to wait for."""

from __future__ import annotations

import socket
from collections.abc import Callable

import httpx

_PROBE_SECONDS = 2.0


def http_ok(url: str) -> Callable[[], bool]:
    """Returns a condition that holds once a GET of *url* succeeds."""

    def check() -> bool:
        try:
            # trust_env=False: a proxy from the environment must not see loopback traffic.
            return httpx.get(url, timeout=_PROBE_SECONDS, trust_env=False).is_success
        except httpx.HTTPError:
            return False

    return check


def port_open(host: str, port: int) -> Callable[[], bool]:
    """Returns a condition that holds once *host*:*port* accepts TCP connections.

    Not for a NIXL side channel: connecting there and leaving is a malformed handshake.
    """

    def check() -> bool:
        try:
            socket.create_connection((host, port), timeout=_PROBE_SECONDS).close()
        except OSError:
            return False
        return True

    return check
