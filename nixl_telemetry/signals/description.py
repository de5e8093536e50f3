# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What an operation hands to the export thread: a span tree and a log line, in plain data."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from opentelemetry.trace import SpanKind

from nixl_telemetry.signals.semconv import ErrorType, EventName, SpanName

AttributeValue: TypeAlias = str | bool | int | float | tuple[str, ...]
Attributes: TypeAlias = Mapping[str, AttributeValue]


@dataclass(frozen=True)
class Event:
    """Something that happened at one moment of a span."""

    name: EventName
    at_ns: int
    attributes: Attributes


@dataclass(frozen=True)
class Span:
    """A finished span; times are of :func:`nixl_telemetry.signals.clock.now_ns`."""

    name: SpanName
    kind: SpanKind
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    error: ErrorType | None = None
    message: str = ""
    """What went wrong, for a person; set with ``error``."""
    events: tuple[Event, ...] = ()
    children: tuple["Span", ...] = ()


@dataclass(frozen=True)
class LogLine:
    """One wide log line; its keys are attribute names."""

    event: EventName
    level: int = logging.INFO
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """How a finished operation becomes visible."""

    span: Span | None = None
    log: LogLine | None = None


Describe: TypeAlias = Callable[[], Description]
"""Makes the description. It runs on the export thread, so that the engine's threads pay for none of it."""
