# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Exceptions as text for a person."""

from typing import Final

TEXT_LIMIT: Final = 1024
"""Characters that are kept: vLLM's texts quote what a peer sent, and a peer may send megabytes."""


def text_of(error: BaseException, reason: str = "") -> str:
    """The exception's text, its class name where it has none, with a first line in front where there is a reason."""
    text = "\n".join(filter(None, [reason, str(error) or type(error).__name__]))
    return text if len(text) <= TEXT_LIMIT else f"{text[:TEXT_LIMIT]}... ({len(text)} characters)"
