# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Tripwires: requests whose KV may have been another's or was not loaded, and those that say nothing of their KV."""

import logging
from collections import OrderedDict
from time import monotonic
from typing import Final

from opentelemetry.trace import SpanContext, SpanKind

from nixl_telemetry.audit.chain import Record
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import Attributes
from nixl_telemetry.signals.catalogue import INVALID_KV, WITHOUT_TRANSFER_PARAMS
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.description import Description, Event, LogLine, Span
from nixl_telemetry.signals.semconv import ErrorType, EventName, InvalidKv, RequestRole, SpanName
from nixl_telemetry.signals.telemetry import Telemetry, guarded

_MESSAGES: Final = {
    InvalidKv.READ_AFTER_EXPIRY: "the decode side has read this request's KV after its lease had expired: the blocks "
    "may have held another request's; raise kv_lease_duration",
    InvalidKv.UNKNOWN_REQUEST: "a notification came for a request that this instance does not know, or no longer",
    InvalidKv.FAILED_LOAD_SERVED: "the request was served though its KV could not be loaded: its output may be wrong",
    InvalidKv.FAILED_LOAD_RECOMPUTED: "the request's KV could not be loaded and was recomputed here",
}
_RATES: Final = {EventName.INVALID_KV: (1.0, 10), EventName.WITHOUT_TRANSFER_PARAMS: (60.0, 1)}
"""How many are told of in how many seconds. All are counted."""
_RECORDS: Final = {EventName.INVALID_KV: "invalid_kv", EventName.WITHOUT_TRANSFER_PARAMS: "without_transfer_params"}
_EXPIRED: Final = (InvalidKv.READ_AFTER_EXPIRY, InvalidKv.UNKNOWN_REQUEST)


class Tripwires:
    """Counts what trips, once for each request, and tells of it at a bounded rate. Used on the engine's thread."""

    LIMIT: Final = 4096
    """Requests that are remembered, so that several ranks' reports count once."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry: Final = telemetry
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._told: dict[EventName, tuple[float, int]] = {}

    @guarded
    def invalid_kv(self, reason: InvalidKv, request_id: str, context: SpanContext | None) -> None:
        """A request's KV may be invalid.

        Args:
            reason: Why.
            request_id: The request, in this instance.
            context: Its trace.
        """
        if self._is_new(reason, request_id):
            self.telemetry.record(INVALID_KV, reason)
            attributes = {semconv.REQUEST_ID: request_id, semconv.INVALID_KV_REASON: reason}
            self._tell(EventName.INVALID_KV, attributes, _MESSAGES[reason], context)

    @guarded
    def without_params(self, role: RequestRole, request_id: str, context: SpanContext | None) -> None:
        """A request does not say what is to become of its KV, or where it is."""
        self.telemetry.record(WITHOUT_TRANSFER_PARAMS, role)
        attributes = {semconv.REQUEST_ID: request_id, semconv.REQUEST_ROLE: role}
        message = (
            "nobody will fetch this request's KV: it came to a prefill instance without do_remote_decode"
            if role is RequestRole.PREFILL
            else "this request is prefilled here: it came to a decode instance without do_remote_prefill"
        )
        self._tell(EventName.WITHOUT_TRANSFER_PARAMS, attributes, message, context)

    def _is_new(self, reason: str, request_id: str) -> bool:
        key = (reason, request_id)
        if key in self._seen:
            return False
        self._seen[key] = None
        if len(self._seen) > self.LIMIT:
            self._seen.popitem(last=False)
        return True

    def _tell(self, name: EventName, attributes: Attributes, message: str, context: SpanContext | None) -> None:
        if not self._may_tell(name):
            return
        error = None
        if name is EventName.INVALID_KV:
            error = ErrorType.KV_EXPIRED if attributes[semconv.INVALID_KV_REASON] in _EXPIRED else ErrorType.OTHER
        at_ns = now_ns()
        span = Span(
            SpanName.TRIPWIRE,
            SpanKind.INTERNAL,
            at_ns,
            at_ns,
            attributes,
            error,
            message if error else "",
            events=(Event(name, at_ns, attributes),),
            parent=context,
        )
        line = LogLine(name, logging.ERROR if error else logging.WARNING, {**attributes, "message": message})
        self.telemetry.emit(lambda: Description(span, line))
        self.telemetry.audit(lambda: Record(_RECORDS[name], attributes))

    def _may_tell(self, name: EventName) -> bool:
        seconds, limit = _RATES[name]
        now = monotonic()
        start, told = self._told.get(name, (now, 0))
        if now - start >= seconds:
            start, told = now, 0
        self._told[name] = start, told + 1
        return told < limit
