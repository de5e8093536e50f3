# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What an instance holds that it or others still need, as its ``/metrics`` tells it."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.samples import Sample

from nixl_telemetry.cli.http_api import samples
from nixl_telemetry.signals.catalogue import (
    LEASE_BLOCKS_HELD,
    LEASES_HELD,
    LEASES_OVERDUE,
    PUSH_UNMATCHED,
    TRANSFERS_IN_FLIGHT,
)
from nixl_telemetry.signals.semconv import PushSide, TransferMode

_RUNNING: Final = "vllm:num_requests_running"
_WAITING: Final = "vllm:num_requests_waiting"
_IN_FLIGHT: Final = TRANSFERS_IN_FLIGHT.name
_LEASES: Final = LEASES_HELD.name
_BLOCKS: Final = LEASE_BLOCKS_HELD.name
_OVERDUE: Final = LEASES_OVERDUE.name
_UNMATCHED: Final = PUSH_UNMATCHED.name
_REGISTRATIONS: Final = f"{_UNMATCHED}, {PushSide.REGISTRATION}"
"""The decode side's registrations have a count of their own; what is unmatched otherwise are blocks."""

_LARGEST: Final = 2**53
"""So far a sample's number is exact."""
_EXCERPT: Final = 120


class HoldingsError(ValueError):
    """An answer does not tell what is held; the message follows the name of what answered."""


@dataclass(frozen=True)
class _Kind:
    """A kind of things that are held."""

    key: str
    count: str
    one: str
    many: str
    why: str
    """Why they still are."""


_TRAFFIC: Final = "not finished yet, or the router still sends some"
_KINDS: Final = (
    _Kind("running", _RUNNING, "running request", "running requests", _TRAFFIC),
    _Kind("waiting", _WAITING, "waiting request", "waiting requests", _TRAFFIC),
    _Kind(
        "transfers_in_flight",
        _IN_FLIGHT,
        "transfer in flight",
        "transfers in flight",
        "posted, and not yet seen done or failed",
    ),
    _Kind(
        "leases",
        _LEASES,
        "lease",
        "leases",
        "the decode side has not fetched them; without a sign of life from it they expire after kv_lease_duration "
        "(30 s by default)",
    ),
    _Kind(
        "unmatched_registrations",
        _REGISTRATIONS,
        "unmatched registration",
        "unmatched registrations",
        "the decode side waits for KV of requests whose prefill has not come, or is not done",
    ),
    _Kind(
        "unmatched_blocks",
        _UNMATCHED,
        "unmatched prefill",
        "unmatched prefills",
        "the decode side has not registered for their blocks; they go with their leases",
    ),
)
"""What keeps an instance from being stopped."""


@dataclass(frozen=True)
class Holdings:
    """What an instance holds, by engine."""

    engines: Mapping[str, Mapping[str, int]]

    @property
    def anything(self) -> bool:
        """Whether anything keeps the instance from being stopped."""
        return any(self._total(kind.count) for kind in _KINDS)

    @property
    def idle(self) -> bool:
        """Whether there are no requests in it."""
        return not (self._total(_RUNNING) or self._total(_WAITING))

    @property
    def only_registrations(self) -> bool:
        """Whether all that is held are registrations that met no blocks."""
        return {kind.count for kind, _ in self._texts()} == {_REGISTRATIONS}

    @property
    def ranks(self) -> list[int | None]:
        """The engines that hold anything, as its API server counts them; ``None`` for one that is the only one."""
        if len(self.engines) == 1:
            return [None]
        numbered = sorted(self.engines.items(), key=lambda engine: (len(engine[0]), engine[0]))
        return [rank for rank, (_, held) in enumerate(numbered) if any(held.get(kind.count) for kind in _KINDS)]

    def reasons(self) -> list[str]:
        """What is held and why, by kind."""
        overdue = self._total(_OVERDUE)
        late = f"; {overdue} overdue: the engine takes no step, or not all ranks have reported" if overdue else ""
        return [f"{text}: {kind.why}{late if kind.count == _LEASES else ''}" for kind, text in self._texts()]

    def __str__(self) -> str:
        return ", ".join(text for _, text in self._texts()) or "nothing is held"

    def as_json(self) -> dict[str, int]:
        """The counts, by kind."""
        counts = {kind.key: self._total(kind.count) for kind in _KINDS}
        return {**counts, "lease_blocks": self._total(_BLOCKS), "leases_overdue": self._total(_OVERDUE)}

    def _total(self, count: str) -> int:
        return sum(held.get(count, 0) for held in self.engines.values())

    def _texts(self) -> Iterator[tuple[_Kind, str]]:
        for kind in _KINDS:
            if count := self._total(kind.count):
                blocks = self._total(_BLOCKS) if kind.count == _LEASES else 0
                pinned = f" ({_counted(blocks, 'block', 'blocks')})" if blocks else ""
                yield kind, _counted(count, kind.one, kind.many) + pinned


def read(body: bytes) -> Holdings:
    """Read an instance's ``/metrics``.

    Raises:
        HoldingsError: What is held is not in it.
    """
    try:
        found = samples(body, (_RUNNING, _WAITING, _IN_FLIGHT, _LEASES, _BLOCKS, _OVERDUE, _UNMATCHED))
    except ValueError as error:
        raise HoldingsError(f"cannot be read: {str(error)[:_EXCERPT]}") from None
    _check_complete(found, body)
    engines: dict[str, Counter[str]] = {}
    for sample in found:
        if not abs(sample.value) <= _LARGEST or sample.value != int(sample.value):
            raise HoldingsError(f"has {sample.name} {str(sample.value)[:_EXCERPT]}, which is no count")
        registration = sample.name == _UNMATCHED and sample.labels.get("side") == PushSide.REGISTRATION
        count = _REGISTRATIONS if registration else sample.name
        engines.setdefault(sample.labels.get("engine", ""), Counter())[count] += int(sample.value)
    return Holdings(engines)


def _check_complete(found: Sequence[Sample], body: bytes) -> None:
    """Find out whether everything is told that may be held: what is missing must not pass for nothing."""
    there = {sample.name for sample in found}
    modes = {sample.labels.get("transfer_mode") for sample in found}
    needed = (_RUNNING, _WAITING, _IN_FLIGHT, _LEASES, *([_UNMATCHED] if TransferMode.PUSH in modes else []))
    missing = [name for name in needed if name not in there]
    if not missing:
        return
    if not re.search(rb"^(?:vllm:|nixl_)", body, re.MULTILINE):
        remedy = "it is no vLLM instance's, or that of one with --disable-log-stats; give its API server's HOST:PORT"
    elif not re.search(rb"^nixl_", body, re.MULTILINE):
        remedy = "a stock connector runs, or the suite's metrics are off; see docs/configuration.md for the wiring"
    else:
        remedy = "an older nixl_telemetry runs, which does not count them; upgrade it"
    raise HoldingsError(f"has no {', '.join(missing)}, so whether it can be stopped cannot be said: {remedy}")


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
