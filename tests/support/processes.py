# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether processes are still there."""

from collections.abc import Iterable

from nixl_telemetry.testbed.procfs import process_info


def all_gone(pids: Iterable[int]) -> bool:
    """Whether none of them is there."""
    return all(process_info(pid) is None for pid in pids)
