# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Turning a stock object into an instrumented one."""

import inspect
from typing import Any, ClassVar, Final

from nixl_telemetry.signals.logger import logger

OBSERVER: Final = "_nixl_telemetry"
"""Attribute that holds the observer of an instrumented object."""
OPTIONAL: Final = "_nixl_telemetry_optional"
"""Attribute of hooks that names the methods which not every supported version has."""


class Hooks:
    """Methods that go in front of those of a stock class, by the same names."""

    _stock_class: ClassVar[Any]
    """That class. Its methods are called through it: ``super()`` takes microseconds where the code is in no cache, and
    most hooks that the engine calls in each step have nothing else to do."""


def instrument(target: Any, hooks: type[Hooks], observer: object) -> bool:
    """Give ``target`` the methods of ``hooks`` in front of its own.

    vLLM's connectors build their worker, scheduler and agent by name inside ``__init__``, so a subclass cannot be put
    there. The finished object changes its class instead: construction stays vLLM's, ``isinstance`` holds, and what
    is not hooked costs nothing.

    Where the class lacks a hooked method, the hook is simply never called, which is told unless the hooks list the
    method as :data:`OPTIONAL`. Where the class cannot be replaced, because
    it is no plain Python class, nothing is observed. Either is told once.

    Returns:
        Whether it is observed.
    """
    stock = type(target)
    try:
        made = _made.get((hooks, stock)) or _made.setdefault((hooks, stock), _derive(hooks, stock))
        setattr(target, OBSERVER, observer)
        target.__class__ = made
    except (AttributeError, TypeError) as error:
        logger().warning("%s cannot be observed, it runs as it is: %r", stock.__qualname__, error)
        return False
    return True


_made: dict[tuple[type[Hooks], type], type] = {}


def _derive(hooks: type[Hooks], stock: type) -> type:
    hooked = {name for layer in hooks.__mro__ for name, value in vars(layer).items() if inspect.isfunction(value)}
    optional = getattr(hooks, OPTIONAL, ())
    missing = sorted(name for name in hooked if not hasattr(stock, name) and name not in optional)
    if missing:
        logger().warning(
            "%s has no %s in this version: what is observed there stays invisible",
            stock.__qualname__,
            ", ".join(missing),
        )
    return type(
        f"Instrumented{stock.__name__}", (hooks, stock), {"__module__": stock.__module__, "_stock_class": stock}
    )
