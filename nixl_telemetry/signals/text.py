# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Text for people's terminals and log files."""


def printable(text: str) -> str:
    """The text with every character that does not print escaped.

    Hosts, ids and factors come from clients and peers: left as they are, they could move the cursor of whoever reads a
    log, or begin lines of their own.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
