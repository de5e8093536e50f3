# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Picking spans from those that were received."""

from collections.abc import Callable, Sequence

from nixl_telemetry.testbed import ReceivedSpan


def named(spans: Sequence[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    """The spans of this name."""
    return [span for span in spans if span.name == name]


def one(spans: Sequence[ReceivedSpan], name: str) -> ReceivedSpan:
    """The only span of this name."""
    (span,) = named(spans, name)
    return span


def has(**counts: int) -> Callable[[Sequence[ReceivedSpan]], bool]:
    """Whether there are so many spans of these names."""
    return lambda spans: all(len(named(spans, f"nixl.{name}")) >= count for name, count in counts.items())
