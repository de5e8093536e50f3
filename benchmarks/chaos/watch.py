# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What somebody sees who scrapes both instances and follows their logs."""

import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx

from benchmarks.clients import new_client
from nixl_telemetry.testbed import MetricsSnapshot, Pair, VllmServer

INTERVAL_SECONDS: Final = 1.0
_SCRAPE_SECONDS: Final = 1.5
_WANTED: Final = ("nixl_", "vllm:nixl_", "vllm:request_success_total", "vllm:num_requests_running")
"""The rest of vLLM's metrics is not looked at: parsing all of them every second takes a good part of a core."""
_EVENT: Final = re.compile(rb"\bevent=(nixl\.[a-z_.]+)")

PREFILL: Final = "P"
DECODE: Final = "D"


@dataclass(frozen=True)
class Look:
    """One scrape of an instance, and what its log said since the one before."""

    at: float
    """Monotonic clock."""
    metrics: MetricsSnapshot | None
    """``None`` where it did not answer."""
    events: Mapping[str, int]
    """Log events by name."""


@dataclass(frozen=True)
class Track:
    """All that was seen around a fault."""

    begin: float
    end: float
    looks: Mapping[str, Sequence[Look]]
    """By instance, ``P`` and ``D``."""


class Watch:
    """Looks at both instances again and again, from ``with`` to its end."""

    def __init__(self, pair: Pair) -> None:
        self._servers = {PREFILL: pair.prefill, DECODE: pair.decode}
        self._looks: dict[str, list[Look]] = {role: [] for role in self._servers}
        self._read: dict[Path, int] = {}
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(role,), daemon=True) for role in self._servers]

    def track(self, begin: float, end: float) -> Track:
        """What was seen so far, of a fault that began and ended then."""
        return Track(begin, end, {role: list(looks) for role, looks in self._looks.items()})

    def __enter__(self) -> Self:
        for server in self._servers.values():
            self._new_events(server)  # what is there already is old
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, role: str) -> None:
        server = self._servers[role]
        with new_client(_SCRAPE_SECONDS) as client:
            while not self._ended.wait(INTERVAL_SECONDS):
                metrics = scrape(client, server.url)
                self._looks[role].append(Look(time.monotonic(), metrics, self._new_events(server)))

    def _new_events(self, server: VllmServer) -> Counter[str]:
        path = server.process.log_path
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
        except OSError:
            return Counter()
        # A line that is being written is left for the next look.
        whole = text.rfind(b"\n") + 1
        self._read[path] = self._read.get(path, 0) + whole
        return Counter(name.decode() for name in _EVENT.findall(text[:whole]))


def scrape(client: httpx.Client, url: str) -> MetricsSnapshot | None:
    """The metrics of NIXL, and few others; ``None`` where the instance does not answer."""
    try:
        response = client.get(f"{url}/metrics")
        response.raise_for_status()
    except httpx.HTTPError:
        return None
    return MetricsSnapshot("".join(line + "\n" for line in response.text.splitlines() if line.startswith(_WANTED)))
