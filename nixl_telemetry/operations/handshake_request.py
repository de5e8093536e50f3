# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Requests that come to the handshake listener: what became of them."""

import logging
import time
from dataclasses import dataclass
from typing import Final, NamedTuple

from nixl_telemetry.audit.chain import Record
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import AttributeValue
from nixl_telemetry.signals.catalogue import HANDSHAKE_REQUESTS
from nixl_telemetry.signals.description import Description, LogLine
from nixl_telemetry.signals.semconv import EventName, RequestResult
from nixl_telemetry.signals.telemetry import Telemetry

LOG_SECONDS: Final = 10.0
"""At most one line for each result in this time."""
_AUDITED_LIMIT: Final = 1024


class Client(NamedTuple):
    """Who asks."""

    address: str
    port: int


@dataclass
class _Tally:
    """Requests with one result. Counted by the listener's thread, reported by the engine's."""

    count: int = 0
    reported: int = 0
    logged: int = 0
    logged_at: float = float("-inf")


class HandshakeRequests:
    """Counts requests, and tells of refused ones at a bounded rate.

    Sums are kept here and recorded once per step: a flood would otherwise fill the queue of updates, which an idle
    engine does not empty.

    Args:
        telemetry: Where to report.
    """

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._tallies = {result: _Tally() for result in RequestResult}
        self._audited: set[str] = set()
        self.unreported: Final[set[RequestResult]] = set()
        """Results that :meth:`report` has to record."""

    def count(self, result: RequestResult) -> int:
        """Requests with that result since the start."""
        return self._tallies[result].count

    def served(self) -> None:
        """A request was answered."""
        self._tallies[RequestResult.SERVED].count += 1
        self.unreported.add(RequestResult.SERVED)

    def refused(self, result: RequestResult, client: Client, message: str) -> None:
        """A request was refused.

        Args:
            result: In what way.
            client: Who asked.
            message: Why, for a person.
        """
        tally = self._tallies[result]
        tally.count += 1
        self.unreported.add(result)
        if result is RequestResult.NOT_ALLOWED:
            self._audit(client)
        now = time.monotonic()
        if now - tally.logged_at < LOG_SECONDS:
            return
        keys: dict[str, AttributeValue] = {
            semconv.HANDSHAKE_REQUEST_RESULT: result,
            semconv.CLIENT_ADDRESS: client.address,
            semconv.CLIENT_PORT: client.port,
            semconv.HANDSHAKE_REQUEST_COUNT: tally.count - tally.logged,
            "message": message,
        }
        tally.logged, tally.logged_at = tally.count, now
        line = LogLine(EventName.HANDSHAKE_REQUEST_REFUSED, logging.WARNING, keys)
        self._telemetry.emit(lambda: Description(log=line))

    def report(self) -> None:
        """Record what came since the last call."""
        # Only what is there now: the listener goes on counting.
        for _ in range(len(self.unreported)):
            result = self.unreported.pop()
            tally = self._tallies[result]
            count = tally.count
            if count != tally.reported:
                self._telemetry.record(HANDSHAKE_REQUESTS, result, value=count - tally.reported)
                tally.reported = count

    def _audit(self, client: Client) -> None:
        # Once for each address: files are never deleted, and whoever is refused may ask for ever.
        if client.address in self._audited or len(self._audited) >= _AUDITED_LIMIT:
            return
        self._audited.add(client.address)
        keys: dict[str, AttributeValue] = {
            "decision": "rejected",
            semconv.CLIENT_ADDRESS: client.address,
            semconv.CLIENT_PORT: client.port,
            semconv.HANDSHAKE_REQUEST_RESULT: RequestResult.NOT_ALLOWED,
        }
        self._telemetry.audit(lambda: Record("handshake_request", keys))
