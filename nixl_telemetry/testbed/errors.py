# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What can go wrong with a server or a request, as exceptions that say where to look."""

from __future__ import annotations

import re
from pathlib import Path

_BODY_CHARACTERS = 2000
_TAIL_LINES = 40
_FIRST_ERROR = re.compile(r"^.*\b[A-Z]\w*(?:Error|Exception): .+$", re.MULTILINE)


class ProcessError(RuntimeError):
    """A child process did not do what it was started for.

    Attributes:
        log_path: Where the output of the process is.
    """

    def __init__(self, message: str, log_path: Path, log: str) -> None:
        """Adds to *message* where the *log* is, its first error and its last lines."""
        self.log_path = log_path
        tail = "\n".join(log.splitlines()[-_TAIL_LINES:])
        parts = [message, f"log: {log_path}"]
        first = _FIRST_ERROR.search(log)
        # A server with several processes reports the same failure in each; the cause is far above the end.
        if first is not None and first.group() not in tail:
            parts.append(f"first error: {first.group()}")
        super().__init__("\n".join([*parts, "last lines:", tail or "(the log is empty)"]))


class ProcessDiedError(ProcessError):
    """The process ended although nobody asked it to."""


class ProcessNotReadyError(ProcessError):
    """The process runs but was not ready in time."""


class HttpStatusError(RuntimeError):
    """A server answered a request with something other than success.

    Attributes:
        url: What was asked.
        status: The HTTP status.
        body: The answer, as text.
    """

    def __init__(self, url: str, status: int, body: str) -> None:
        """Keeps the answer."""
        self.url = url
        self.status = status
        self.body = body
        super().__init__(f"{url} answered {status}: {body[:_BODY_CHARACTERS]}")


class MissingProgramError(RuntimeError):
    """A program that the test bed drives is not installed; the message says how to install it."""
