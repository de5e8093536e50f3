# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Durations as Prometheus writes them."""

import re
from typing import Any, Final, Self

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

_UNITS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1}
_FORM: Final = re.compile("".join(rf"(?:(?P<{unit}>\d+){unit})?" for unit in _UNITS))


class Duration(int):
    """A positive number of milliseconds; its text is what PromQL and rule files take, such as ``5m`` or ``1h30m``."""

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Read a duration in Prometheus's form.

        Raises:
            ValueError: It is none, or 0.
        """
        if isinstance(value, cls):
            return value
        match = _FORM.fullmatch(value) if isinstance(value, str) and value else None
        parts = {unit: int(number) for unit, number in match.groupdict().items() if number} if match else {}
        if not (milliseconds := sum(_UNITS[unit] * number for unit, number in parts.items())):
            raise ValueError("it must be a duration of more than 0, such as 90s, 5m or 1h30m")
        return cls(milliseconds)

    @property
    def seconds(self) -> float:
        """The same as a number of seconds."""
        return self / 1000

    def scaled(self, factor: float, least: "Duration | None" = None) -> "Duration":
        """So many times the duration, but at least ``least``."""
        return Duration(max(round(self * factor), least or 1))

    def __str__(self) -> str:
        rest, text = int(self), ""
        for unit, size in _UNITS.items():
            number, rest = divmod(rest, size)
            text += f"{number}{unit}" if number else ""
        return text

    def __format__(self, form: str) -> str:
        return format(str(self), form)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(cls.parse)
