# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What a check finds: how bad it is, what it is, and what to do."""

import difflib
import json
import re
import urllib.parse
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

_SHOWN: Final = 100
_TEXT_LIMIT: Final = 400


class Level(StrEnum):
    """How bad it is, the worst first."""

    PROBLEM = "problem"
    """It fails, or does something else than was asked for."""
    UNCHECKED = "unchecked"
    """Whether it is right could not be found out."""
    WARNING = "warning"
    """Right in some deployments, and wrong in most."""
    NOTE = "note"
    """Worth to know; nothing to do."""
    OK = "ok"


@dataclass(frozen=True)
class Finding:
    """One thing that was found."""

    level: Level
    what: str
    """Names the thing and its value."""
    remedy: str = ""
    """What to do."""
    topic: str = ""

    def as_json(self) -> dict[str, str]:
        """As it is printed with ``--json``."""
        return {"level": self.level, "topic": self.topic, "what": self.what, "remedy": self.remedy}


def problem(what: str, remedy: str) -> Finding:
    """It fails, or does something else than was asked for."""
    return Finding(Level.PROBLEM, _bounded(what), _bounded(remedy))


def warning(what: str, remedy: str) -> Finding:
    """Right in some deployments, and wrong in most."""
    return Finding(Level.WARNING, _bounded(what), _bounded(remedy))


def unchecked(what: str, remedy: str) -> Finding:
    """Could not be found out."""
    return Finding(Level.UNCHECKED, _bounded(what), _bounded(remedy))


def note(what: str, remedy: str = "") -> Finding:
    """Worth to know."""
    return Finding(Level.NOTE, _bounded(what), _bounded(remedy))


def fine(what: str) -> Finding:
    """As it should be."""
    return Finding(Level.OK, _bounded(what))


def shown(value: Any) -> str:
    """A value as a reader can tell it from others; not all of a long one."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = repr(type(value))
    return _bounded(text, _SHOWN)


def shown_url(url: str) -> str:
    """A URL without what may be secret in it: user, password and query."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        return shown(parts._replace(netloc=host, query="", fragment="").geturl())
    except ValueError:
        return shown(re.sub(r"[^/]*@|\?.*", "", url))


def meant(given: str, valid: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The valid name that was probably meant."""
    found = difflib.get_close_matches(given[:_SHOWN], list(valid), n=1, cutoff=cutoff)
    return found[0] if found else None


def _bounded(text: str, limit: int = _TEXT_LIMIT) -> str:
    return text if len(text) <= limit else f"{text[:limit]}…"
