# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Log lines: structlog events through the standard ``logging`` tree, so that the host's handlers stay in charge."""

from typing import Any, Literal

import structlog
from opentelemetry.trace import SpanContext

from nixl_telemetry.signals.attributes import Attributes
from nixl_telemetry.signals.description import LogLine
from nixl_telemetry.signals.logger import logger
from nixl_telemetry.signals.text import printable


class LogWriter:
    """Writes :class:`LogLine` descriptions, one line each.

    Args:
        common: Keys of every line.
        style: How keys are written.
    """

    def __init__(self, common: Attributes, style: Literal["logfmt", "json"] = "logfmt") -> None:
        renderer: Any = (
            structlog.processors.JSONRenderer()
            if style == "json"
            else structlog.processors.LogfmtRenderer(key_order=["event"], bool_as_flag=False)
        )
        # Wrapped here and not configured: structlog's global configuration belongs to the application.
        self._logger = structlog.wrap_logger(
            logger(),
            processors=[renderer, _point_at_caller],
            wrapper_class=structlog.stdlib.BoundLogger,
        ).bind(**common)

    def write(self, line: LogLine, context: SpanContext | None) -> None:
        """Log one line, with the ids of its span where there is one."""
        # Asked first: leases that were released have a line that nobody wants to see.
        if not logger().isEnabledFor(line.level):
            return
        ids = {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"} if context else {}
        self._logger.log(line.level, line.event.value, **_keys(line.attributes), **ids)


def _keys(attributes: Attributes) -> dict[str, Any]:
    """Attributes as a line has them: lists as one text, and nothing that does not print but line breaks.

    Renderers escape line breaks themselves.
    """
    texts = {name: ",".join(value) if isinstance(value, tuple) else value for name, value in attributes.items()}
    return {
        name: "\n".join(map(printable, value.split("\n"))) if isinstance(value, str) else value
        for name, value in texts.items()
    }


def _point_at_caller(_logger: Any, _method: str, rendered: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Handlers print file and line: past structlog's two frames, it is this module and not structlog.
    return (rendered,), {"stacklevel": 4}
