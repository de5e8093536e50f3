# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What can go wrong with a server or a request, as exceptions that say where to look."""

from __future__ import annotations

from pathlib import Path

_BODY_CHARACTERS = 2000


class ProcessError(RuntimeError):
    """A child process did not do what it was started for.

    Attributes:
        log_path: Where the output of the process is.
    """

    def __init__(self, message: str, log_path: Path, log_tail: str) -> None:
        """Adds the place and the last lines of the log to *message*."""
        self.log_path = log_path
        super().__init__(f"{message}\nlog: {log_path}, last lines:\n{log_tail or '(the log is empty)'}")


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
