# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What went in came out, or is still inside: sums that hold over the counters of one life of a process."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from benchmarks.chaos.watch import DECODE, PREFILL
from nixl_telemetry.testbed import MetricsSnapshot


class MissingMetricError(LookupError):
    """An instance has no such series; the message names it."""


@dataclass(frozen=True)
class Account:
    """One sum: what began is what ended in one way or another, and what has not ended yet."""

    subject: str
    whole: str
    """What began, as a name of one of the numbers."""
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def holds(self) -> bool:
        """Whether the others add up to the whole."""
        return self.numbers[self.whole] == sum(value for name, value in self.numbers.items() if name != self.whole)

    @property
    def under_way(self) -> float:
        """What is to end by itself: a registration that nothing matches stays for ever."""
        return sum(self.numbers.get(name, 0) for name in ("in_flight", "held"))


def accounts(metrics: Mapping[str, MetricsSnapshot], mode: str) -> list[Account]:
    """The sums of a pair.

    Args:
        metrics: Of each instance, ``P`` and ``D``.
        mode: ``pull`` or ``push``.

    Raises:
        MissingMetricError: If a series is not there.
    """
    mover = DECODE if mode == "pull" else PREFILL
    prefill = metrics[PREFILL]
    found = [_transfers(metrics[mover], mover, "read" if mode == "pull" else "write"), _leases(prefill)]
    return [*found, _registrations(prefill)] if mode == "push" else found


def _transfers(metrics: MetricsSnapshot, instance: str, direction: str) -> Account:
    ended = _value(metrics, instance, "nixl_transfer_duration_seconds_count", direction=direction)
    done = _value(metrics, instance, "nixl_transfer_duration_seconds_count", direction=direction, error_type="")
    numbers = {
        "posted": _value(metrics, instance, "nixl_transfers_posted_total", direction=direction),
        "done": done,
        "failed": ended - done,
        "in_flight": _value(metrics, instance, "nixl_transfers_in_flight", direction=direction),
    }
    return Account(f"transfers of {instance}", "posted", numbers)


def _leases(metrics: MetricsSnapshot) -> Account:
    ended = {
        outcome: _value(metrics, PREFILL, "nixl_lease_duration_seconds_count", outcome=outcome)
        for outcome in ("released", "expired")
    }
    numbers = {
        "opened": _value(metrics, PREFILL, "nixl_leases_opened_total"),
        **ended,
        "held": _value(metrics, PREFILL, "nixl_leases_held"),
    }
    return Account(f"leases of {PREFILL}", "opened", numbers)


def _registrations(metrics: MetricsSnapshot) -> Account:
    numbers = {
        event: _value(metrics, PREFILL, "nixl_push_registrations_total", event=event)
        for event in ("received", "matched", "failed")
    }
    numbers["unmatched"] = _value(metrics, PREFILL, "nixl_push_unmatched", side="registration")
    return Account(f"registrations at {PREFILL}", "received", numbers)


def _value(metrics: MetricsSnapshot, instance: str, name: str, **labels: str) -> float:
    value = metrics.value(name, **labels)
    if value is None:
        raise MissingMetricError(f"{instance} has no {name}{_text(labels)}")
    return value


def _text(labels: Mapping[str, str]) -> str:
    return f"{{{', '.join(_pairs(labels))}}}" if labels else ""


def _pairs(labels: Mapping[str, str]) -> Iterator[str]:
    return (f'{name}="{value}"' for name, value in labels.items())
