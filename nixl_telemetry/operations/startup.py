# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What is known once, at start: the compatibility hash with its factors, and the connector's identity."""

import json
import logging
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.trace import SpanKind

from nixl_telemetry.operations.mode import ModeConflict
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.catalogue import CONNECTOR_INFO
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.description import AttributeValue, Description, LogLine, Span
from nixl_telemetry.signals.semconv import EventName, SpanName
from nixl_telemetry.signals.telemetry import Telemetry

_ENFORCEMENT_OFF: Final = {
    "message": "enforce_handshake_compat is false: peers with another compatibility hash are let through and may "
    "exchange KV that does not fit; nixl_handshake_bypassed_total counts them"
}


def announce(
    telemetry: Telemetry,
    *,
    versions: tuple[str, str],
    kv_role: str,
    compat_hash: str,
    enforced: bool,
    factors: Mapping[str, Any] | None,
    start_ns: int,
    conflict: ModeConflict | None,
) -> None:
    """Tell who this connector is and what its hash is made of.

    Args:
        telemetry: Where to report.
        versions: Of vLLM and of NIXL.
        kv_role: vLLM's ``kv_role``.
        compat_hash: The hash that peers compare with theirs.
        enforced: Whether a differing hash rejects a peer.
        factors: What was hashed; ``None`` if it could not be seen.
        start_ns: When the computation of the hash began.
        conflict: A mode that the worker's class declares and the connector does not.
    """
    end_ns = now_ns()
    enforced_label = "true" if enforced else "false"
    telemetry.record(CONNECTOR_INFO, *versions, kv_role, compat_hash, enforced_label)

    def describe() -> Description:
        attributes: dict[str, AttributeValue] = {semconv.COMPAT_HASH: compat_hash, semconv.COMPAT_ENFORCED: enforced}
        attributes |= {
            semconv.COMPAT_FACTOR_PREFIX + name: value
            if isinstance(value, str | bool | int | float)
            else json.dumps(value)
            for name, value in (factors or {}).items()
        }
        events = (conflict.event(),) if conflict else ()
        span = Span(SpanName.COMPAT_HASH, SpanKind.INTERNAL, start_ns, end_ns, attributes, events=events)
        return Description(span, LogLine(EventName.COMPAT_HASH_COMPUTED, logging.INFO, attributes))

    telemetry.emit(describe)
    if not enforced:
        telemetry.emit(lambda: Description(log=LogLine(EventName.ENFORCEMENT_OFF, logging.WARNING, _ENFORCEMENT_OFF)))
