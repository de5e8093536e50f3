# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What the scheduler process and the worker processes tell each other, beside vLLM's own.

To the workers it rides as an extra attribute of each step's connector metadata, which is pickled whole; stock code does
not look at it. From the workers it comes as vLLM's ``KVConnectorWorkerMetadata``, which its NIXL connectors do not use.
"""

from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from nixl_telemetry.operations.mode import ModeConflict
from nixl_telemetry.operations.receive import Origin
from nixl_telemetry.signals.propagation import Carried
from nixl_telemetry.signals.semconv import InvalidKv

NOTES: Final = "nixl_telemetry"
"""Attribute of a step's metadata that has the notes. There are none where a step brings nothing for the workers."""


@dataclass
class StepNotes:
    """Notes for the workers, for one step."""

    conflicts: dict[str, ModeConflict] = field(default_factory=dict)
    """Mode conflicts seen in requests' parameters, by the engine id that the request names as its peer."""
    origins: dict[str, Origin] = field(default_factory=dict)
    """Where the requests come from whose KV is to be received in this step, by request id."""
    abandoned: set[str] = field(default_factory=set)
    """Requests that ended while they waited for their KV."""
    leases: dict[str, Carried] = field(default_factory=dict)
    """Leases that began, by request id: in push the worker's transfers refer to them."""

    def attach(self, metadata: Any) -> None:
        """Put the notes on a step's metadata."""
        setattr(metadata, NOTES, self)

    @staticmethod
    def of(metadata: Any) -> "StepNotes | None":
        """The notes on a step's metadata, if there are any."""
        notes = getattr(metadata, NOTES, None)
        return notes if isinstance(notes, StepNotes) else None


@dataclass
class WorkerNotes(KVConnectorWorkerMetadata):
    """Notes for the scheduler, of one step."""

    expired: set[str] = field(default_factory=set)
    """Requests whose lease expired, at any rank."""
    renewed: dict[str, float] = field(default_factory=dict)
    """Leases that a heartbeat renewed, and for how long they last now. Seconds."""
    invalid: dict[str, InvalidKv] = field(default_factory=dict)
    """Requests whose KV may have been read too late, by id."""
    failed: set[str] = field(default_factory=set)
    """Requests whose KV could not be received, at any rank."""

    def __bool__(self) -> bool:
        return bool(self.expired or self.renewed or self.invalid or self.failed)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Add another rank's."""
        if not isinstance(other, WorkerNotes):
            return self
        return WorkerNotes(
            self.expired | other.expired,
            self.renewed | other.renewed,
            self.invalid | other.invalid,
            self.failed | other.failed,
        )
