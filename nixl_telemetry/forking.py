# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What must start anew in a forked child: threads do not survive a fork, and locks may be held by one that did not."""

import os
import weakref
from collections.abc import Callable


def in_children(method: Callable[[], None]) -> None:
    """Have a bound method called in every forked child, for as long as its object lives."""
    owner = weakref.WeakMethod(method, _methods.discard)
    _methods.add(owner)


_methods: set["weakref.WeakMethod[Callable[[], None]]"] = set()


def _after_fork_in_child() -> None:
    for reference in list(_methods):
        method = reference()
        if method is not None:
            method()


os.register_at_fork(after_in_child=_after_fork_in_child)
