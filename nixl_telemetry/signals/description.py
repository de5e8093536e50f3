# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What an operation hands to the export thread: a span tree and a log line, in plain data.

Nobody changes any of it; frozen classes take twice as long to make.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from opentelemetry.trace import SpanContext, SpanKind

from nixl_telemetry.signals.attributes import Attributes
from nixl_telemetry.signals.moves import BlockMoves
from nixl_telemetry.signals.semconv import ErrorType, EventName, SpanName


@dataclass(slots=True)
class Event:
    """Something that happened at one moment of a span."""

    name: EventName
    at_ns: int
    attributes: Attributes


@dataclass(slots=True)
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
    context: SpanContext | None = None
    """Its ids, where they were told to others before; new ones otherwise."""
    parent: SpanContext | None = None
    """Where it is no child of another description."""
    links: tuple[SpanContext, ...] = ()
    slow: bool = False
    """Whether it took so long that it is worth exporting though its trace is not sampled."""
    blocks: BlockMoves | None = None
    """What the span moved, where that may become spans of blocks."""


@dataclass(slots=True)
class LogLine:
    """One wide log line; its keys are attribute names."""

    event: EventName
    level: int = logging.INFO
    attributes: Attributes = field(default_factory=dict)


@dataclass(slots=True)
class Description:
    """How a finished operation becomes visible."""

    span: Span | None = None
    log: LogLine | None = None


Describe: TypeAlias = Callable[[], Description]
"""Makes the description. It runs on the export thread, so that the engine's threads pay for none of it."""
