# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What is known once, at start: the compatibility hash with its factors, and the connector's identity."""

import json
import logging
from typing import Final

from opentelemetry.trace import SpanKind

from nixl_telemetry.audit.chain import Record
from nixl_telemetry.operations.compatibility import Compatibility, factor_attribute
from nixl_telemetry.operations.mode import ModeConflict
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import AttributeValue
from nixl_telemetry.signals.catalogue import COMPAT_FACTOR_INFO, CONNECTOR_INFO
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.description import Description, LogLine, Span
from nixl_telemetry.signals.semconv import EventName, SpanName
from nixl_telemetry.signals.telemetry import Telemetry

_LABEL_LIMIT: Final = 128
_ENFORCEMENT_OFF: Final = {
    "message": "enforce_handshake_compat is false: peers with another compatibility hash are let through and may "
    "exchange KV that does not fit; nixl_handshake_bypassed_total counts them"
}


def announce(
    telemetry: Telemetry,
    compatibility: Compatibility,
    *,
    versions: tuple[str, str],
    kv_role: str,
    start_ns: int,
    conflict: ModeConflict | None,
) -> None:
    """Tell who this connector is and what its hash is made of.

    Args:
        telemetry: Where to report.
        compatibility: The hash, its factors and whether it is enforced.
        versions: Of vLLM and of NIXL.
        kv_role: vLLM's ``kv_role``.
        start_ns: When the computation of the hash began.
        conflict: A mode that the worker's class declares and the connector does not.
    """
    end_ns = now_ns()
    compat_hash, enforced = compatibility.compat_hash, compatibility.enforced
    factors = {name: factor_attribute(value) for name, value in (compatibility.factors or {}).items()}
    telemetry.record(CONNECTOR_INFO, *versions, kv_role, compat_hash, "true" if enforced else "false")
    for name, value in factors.items():
        telemetry.record(COMPAT_FACTOR_INFO, name, _label(value))

    attributes: dict[str, AttributeValue] = {semconv.COMPAT_HASH: compat_hash, semconv.COMPAT_ENFORCED: enforced}
    attributes |= {semconv.COMPAT_FACTOR_PREFIX + name: value for name, value in factors.items()}

    def describe() -> Description:
        events = (conflict.event(),) if conflict else ()
        span = Span(SpanName.COMPAT_HASH, SpanKind.INTERNAL, start_ns, end_ns, attributes, events=events)
        return Description(span, LogLine(EventName.COMPAT_HASH_COMPUTED, logging.INFO, attributes))

    telemetry.emit(describe)
    telemetry.audit(lambda: Record("compat_hash", attributes))
    if not enforced:
        telemetry.audit(lambda: Record("enforcement_off", {semconv.COMPAT_HASH: compat_hash}))
        telemetry.emit(lambda: Description(log=LogLine(EventName.ENFORCEMENT_OFF, logging.WARNING, _ENFORCEMENT_OFF)))


def _label(value: str | bool | int | float) -> str:
    """A factor's value as a label: as the hash has it, so that true is no number."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text[:_LABEL_LIMIT]
