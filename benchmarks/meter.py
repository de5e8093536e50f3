# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Counts the CPU time of the suite's own code: of its hooks on vLLM's threads, and of its own threads.

Each hooked class gets two more layers: one in front of the hooks, which starts the thread's CPU clock, and one between
the hooks and vLLM's class, which stops it while vLLM's own code runs. What is counted is so the whole of each hook, its
call included, and nothing of vLLM's.

Reading the clock takes a while, and longer in a busy server, whose caches are full of other things, than in a loop. So
a method that is not hooked gets the layers, too, with nothing between them: what is counted there is the clock's own
time, and it is taken off each stretch.
"""

import functools
import inspect
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from nixl_telemetry.seam import instrument

_clock = time.thread_time_ns

NOTHING: Final = "nothing"
"""What is counted where there is no hook."""
GRPC: Final = "gRPC"
"""What gRPC's threads are counted as."""
EMPTY: Final = frozenset({"get_block_ids_with_load_errors", "take_events"})
"""Methods that vLLM calls in each step, of the worker and of the scheduler, and that have no hook."""

_OWN_THREADS: Final = "nixl-telemetry"
"""How the names of the suite's threads begin."""
_GRPC_COMMANDS: Final = ("grpc", "event_engine", "timer_manager", "resolver-execu")
"""How Linux names the threads of gRPC."""
_THREAD_CPU_CLOCK: Final = 6
"""Linux: CPUCLOCK_PERTHREAD_MASK and CPUCLOCK_SCHED; with a thread's number it makes the id of its CPU clock."""


class _Thread(threading.local):
    """The state of a thread that runs hooks."""

    def __init__(self, everybody: list[dict[str, list[int]]]) -> None:
        self.start = 0
        self.is_ours = False
        self.totals: dict[str, list[int]] = {}
        everybody.append(self.totals)


class Meter:
    """What was counted so far, in this process."""

    def __init__(self) -> None:
        self._everybody: list[dict[str, list[int]]] = []
        self._thread = _Thread(self._everybody)

    def hooks(self) -> dict[str, tuple[int, int]]:
        """Nanoseconds and stretches of CPU time by hook, over all threads, with the clock's own time."""
        sums: dict[str, tuple[int, int]] = {}
        for totals in list(self._everybody):
            for name, (spent, count) in list(totals.items()):
                before = sums.get(name, (0, 0))
                sums[name] = before[0] + spent, before[1] + count
        return sums

    def outer(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook, counted; where it is called by another one it is counted with that."""
        thread = self._thread

        @functools.wraps(hook)
        def counted(*args: Any, **kwargs: Any) -> Any:
            if thread.is_ours:
                return hook(*args, **kwargs)
            thread.is_ours = True
            # After vLLM's own work the clock itself is in no cache: what it takes then is not the hook's.
            _clock()
            thread.start = _clock()
            try:
                return hook(*args, **kwargs)
            finally:
                _add(thread, name)
                thread.is_ours = False

        return counted

    def inner(self, name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A stock method, not counted, whoever calls it."""
        thread = self._thread

        @functools.wraps(stock)
        def uncounted(*args: Any, **kwargs: Any) -> Any:
            if not thread.is_ours:
                return stock(*args, **kwargs)
            _add(thread, name)
            thread.is_ours = False
            try:
                return stock(*args, **kwargs)
            finally:
                thread.is_ours = True
                thread.start = _clock()

        return uncounted

    def layered(self, hooks: type, stock: type, **members: Any) -> type:
        """``hooks`` in front of ``stock``, with the layers that count."""
        names = {
            name
            for layer in hooks.__mro__
            for name, value in vars(layer).items()
            if inspect.isfunction(value) and not name.startswith("__") and hasattr(stock, name)
            # The handshake listener has a thread to itself, and does nothing in a step.
            if not isinstance(inspect.getattr_static(stock, name), staticmethod)
        }
        label = stock.__name__
        outer = {name: self.outer(f"{label}.{name}", getattr(hooks, name)) for name in names}
        inner = {name: self.inner(f"{label}.{name}", getattr(stock, name)) for name in names}
        for name in EMPTY.intersection(dir(stock)) - names:
            outer[name] = self.outer(NOTHING, self.inner(NOTHING, getattr(stock, name)))
        below = type("_Inner", (stock,), inner)
        layers = type("_Outer", (), outer), hooks, below
        return type(f"Measured{label}", layers, {"__module__": stock.__module__, "_stock_class": below, **members})

    def count_methods(self, owner: type, *names: str) -> None:
        """Count these methods of a class of the suite's."""
        for name in names:
            setattr(owner, name, self.outer(f"{owner.__name__}.{name}", getattr(owner, name)))

    def leave_out_methods(self, owner: type, *names: str) -> None:
        """Do not count these methods of a class of vLLM's where the suite calls them."""
        for name in names:
            setattr(owner, name, self.inner(f"{owner.__name__}.{name}", getattr(owner, name)))

    def install(self) -> None:
        """Count the hooks of all objects that are instrumented from now on."""
        instrument._derive = self.layered


def _add(thread: _Thread, name: str) -> None:
    spent = _clock() - thread.start
    total = thread.totals.get(name)
    if total is None:
        total = thread.totals[name] = [0, 0]
    total[0] += spent
    total[1] += 1


def threads_ns() -> dict[str, int]:
    """CPU time of this process's threads by kind: the suite's by their names, gRPC's, and the others."""
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    found: dict[str, int] = {}
    for folder in Path("/proc/self/task").iterdir():
        number = int(folder.name)
        try:
            command = (folder / "comm").read_text(encoding="utf-8").strip()
            spent = time.clock_gettime_ns(~number << 3 | _THREAD_CPU_CLOCK)
        except OSError:
            continue  # it has ended
        kind = _kind(names.get(number, ""), command)
        found[kind] = found.get(kind, 0) + spent
    return found


def _kind(name: str, command: str) -> str:
    if name.startswith(_OWN_THREADS):
        return name
    return GRPC if command.startswith(_GRPC_COMMANDS) or "channel_spin" in name else "others"
