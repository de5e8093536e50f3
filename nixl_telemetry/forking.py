# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What must start anew in a forked child: threads do not survive a fork, and locks may be held by one that did not."""

import os
import weakref
from collections.abc import Callable
from types import MethodType
from typing import cast


def in_children(method: Callable[[], None]) -> None:
    """Have a bound method called in every forked child, for as long as its object lives."""
    bound = cast(MethodType, method)
    _methods[bound.__self__] = bound.__name__


_methods: "weakref.WeakKeyDictionary[object, str]" = weakref.WeakKeyDictionary()


def _after_fork_in_child() -> None:
    for owner, name in list(_methods.items()):
        getattr(owner, name)()


os.register_at_fork(after_in_child=_after_fork_in_child)
