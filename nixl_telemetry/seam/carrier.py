# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What the scheduler process tells the worker processes, with each step's connector metadata.

It rides as an extra attribute of vLLM's metadata object, which is pickled whole; stock code does not look at it.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from nixl_telemetry.operations.mode import ModeConflict

_ATTRIBUTE: Final = "nixl_telemetry"


@dataclass
class StepNotes:
    """Notes for one step."""

    conflicts: dict[str, ModeConflict] = field(default_factory=dict)
    """Mode conflicts seen in requests' parameters, by the engine id that the request names as its peer."""

    def __bool__(self) -> bool:
        return bool(self.conflicts)

    def attach(self, metadata: Any) -> None:
        """Put the notes on a step's metadata."""
        setattr(metadata, _ATTRIBUTE, self)

    @staticmethod
    def of(metadata: Any) -> "StepNotes | None":
        """The notes on a step's metadata, if there are any."""
        notes = getattr(metadata, _ATTRIBUTE, None)
        return notes if isinstance(notes, StepNotes) else None
