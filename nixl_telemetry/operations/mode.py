# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Transfer-mode conflicts: another mode than the connector's own was met.

A connector variant that forgets to declare its mode hashes as pull, and is then paired with peers that it cannot talk
to. So the declared mode, the operations and the requests' parameters are compared with the mode that runs.
"""

import logging
from dataclasses import dataclass, field
from typing import Final

from nixl_telemetry.audit.chain import Record
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import Attributes
from nixl_telemetry.signals.catalogue import MODE_CONFLICTS
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.description import Description, Event, LogLine
from nixl_telemetry.signals.semconv import ConflictSource, EventName
from nixl_telemetry.signals.telemetry import Telemetry

_AUDITED_LIMIT: Final = 1024


@dataclass(frozen=True)
class ModeConflict:
    """One conflict."""

    source: ConflictSource
    expected: str
    """The mode of the connector that runs."""
    found: str
    at_ns: int = field(default_factory=now_ns)

    @property
    def attributes(self) -> Attributes:
        """Attributes for the event and the log line."""
        return {
            semconv.MODE_CONFLICT_SOURCE: self.source,
            semconv.MODE_CONFLICT_EXPECTED: self.expected,
            semconv.MODE_CONFLICT_FOUND: self.found,
        }

    def event(self) -> Event:
        """The span event."""
        return Event(EventName.MODE_CONFLICT, self.at_ns, self.attributes)


class ModeCheck:
    """Compares modes with the connector's own; counts every conflict and logs each kind once."""

    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._logged: set[tuple[ConflictSource, str]] = set()
        self._audited: set[tuple[object, ...]] = set()

    def compare(self, source: ConflictSource, found: str, context: Attributes) -> ModeConflict | None:
        """The conflict, if ``found`` is another mode.

        Args:
            source: Where the mode was found.
            found: The mode.
            context: More attributes for the log line.
        """
        expected = self._telemetry.mode.value
        if found == expected:
            return None
        conflict = ModeConflict(source, expected, found)
        self._telemetry.record(MODE_CONFLICTS, source)
        attributes = {**conflict.attributes, **context}
        # found comes from a request: only the two modes that exist may add to what is remembered.
        kind = (source, found if found in ("pull", "push") else "other")
        if kind not in self._logged:
            self._logged.add(kind)
            line = LogLine(EventName.MODE_CONFLICT, logging.WARNING, attributes)
            self._telemetry.emit(lambda: Description(log=line))
        # Once for each peer: clients say what they like, and files are never deleted.
        met = (*kind, context.get(semconv.REMOTE_ENGINE_ID, ""))
        if met not in self._audited and len(self._audited) < _AUDITED_LIMIT:
            self._audited.add(met)
            self._telemetry.audit(lambda: Record("mode_conflict", attributes))
        return conflict
