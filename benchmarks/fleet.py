# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Pairs of real servers, of which only one is awake: an idle pair takes a core."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from benchmarks.machine import dtype
from nixl_telemetry.testbed import CONSUMER, PRODUCER, Pair, ServerConfig, VllmServer, running

NAMES: Final = {"pull": "NixlPullConnector", "push": "NixlPushConnector"}
_START_SECONDS: Final = 300.0
_DEFAULTS: Final = {"OTEL_BSP_SCHEDULE_DELAY": "5000"}
"""What a server has whose environment says nothing; the test bed's servers send their spans sooner."""


class Fleet:
    """Pairs by name; none is awake at first."""

    def __init__(self, pairs: Mapping[str, Pair]) -> None:
        self._pairs = pairs

    def wake(self, name: str) -> Pair:
        """Let just this pair run."""
        for other, pair in self._pairs.items():
            if other != name:
                _signal(pair, signal.SIGSTOP)
        _signal(self._pairs[name], signal.SIGCONT)
        return self._pairs[name]


@contextmanager
def fleet(configs: Mapping[str, ServerConfig], folder: Path) -> Iterator[Fleet]:
    """Pairs that are started one after the other, each stopped (SIGSTOP) while the next one starts."""
    pairs: dict[str, Pair] = {}
    with ExitStack() as stack:
        for name, given in configs.items():
            config = replace(given, dtype=dtype(), env={**_DEFAULTS, **given.env})
            pair = Pair(
                VllmServer(f"{name}-prefill", replace(config, role=PRODUCER), folder),
                VllmServer(f"{name}-decode", replace(config, role=CONSUMER), folder),
            )
            # Entered first, so that it is woken before it is told to end.
            stack.enter_context(running((pair.prefill, pair.decode), timeout=_START_SECONDS))
            stack.callback(_signal, pair, signal.SIGCONT)
            _signal(pair, signal.SIGSTOP)
            pairs[name] = pair
        yield Fleet(pairs)


def cpu_seconds(pair: Pair) -> dict[str, float]:
    """CPU time so far of each process of a pair, by instance and kind of process."""
    found: dict[str, float] = {}
    for instance, server in (("prefill", pair.prefill), ("decode", pair.decode)):
        for process in server.process.members():
            name = f"{instance} {_kind(process.title)}"
            found[name] = found.get(name, 0.0) + process.cpu_seconds
    return found


def _kind(title: str) -> str:
    if "EngineCore" in title:
        return "engine core"
    return "worker" if "Worker" in title else "API server"


def _signal(pair: Pair, number: signal.Signals) -> None:
    for server in (pair.prefill, pair.decode):
        server.process.send_signal(number)
