# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether memory stays flat: 100,000 requests with 1,000 peers, through the suite's real hooks and tables.

Each request is fetched from one of the peers: a receive with its transfer, and on the other side its lease. Some
transfers fail, some leases expire, and each peer shakes hands now and then. Only NIXL and vLLM's own work are left out.
"""

import ctypes
import gc
import sys
from collections.abc import Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from opentelemetry.trace import SpanContext, TraceFlags

from benchmarks.bare import SilentAgent, Sink, exporting_to_sink, scheduler_connector, worker_connector
from benchmarks.figures import Budget, Figure, Part
from nixl_telemetry.seam.stats import UPDATES
from nixl_telemetry.signals.catalogue import TELEMETRY_ERRORS
from nixl_telemetry.signals.clock import now_ns

PEERS: Final = 1000
REQUESTS: Final = 100_000
SETTLE_EVERY: Final = 500
HALF: Final = REQUESTS // 2
LIMIT_MIB: Final = 2.0
BLOCKS: Final = 8
_DONE: Final = SimpleNamespace(xferDuration=1000, postDuration=10, totalBytes=8 * 65536, descCount=8)


def measure() -> Part:
    """The growth from half of the requests to all."""
    resident: list[float] = []
    blocks: list[float] = []
    with exporting_to_sink() as sink:
        traffic = Traffic(sink)
        for number in range(REQUESTS):
            traffic.serve(number)
            if number % SETTLE_EVERY == SETTLE_EVERY - 1:
                traffic.settle()
            if (number + 1) % (REQUESTS // 20) == 0:
                resident.append(_resident_mib())
                blocks.append(sys.getallocatedblocks())
        exported = sink.bytes / 2**20
    half = HALF * len(resident) // REQUESTS - 1
    name = f"memory at {PEERS:,} peers, growth from {HALF:,} to {REQUESTS:,} requests"
    return Part(
        [Budget(name, resident[-1] - resident[half], LIMIT_MIB, "MiB")],
        [
            Figure("resident memory after all requests", resident[-1], "MiB"),
            Figure("growth of Python's allocated blocks meanwhile", blocks[-1] - blocks[half], "blocks"),
            Figure("spans exported meanwhile", exported, "MiB"),
        ],
        {"resident MiB": resident, "allocated blocks": blocks},
    )


class Traffic:
    """Requests through the hooks of one worker and one scheduler."""

    def __init__(self, sink: Sink) -> None:
        worker = worker_connector("pull", True, SilentAgent()).connector_worker
        self._worker: Any = worker._nixl_telemetry
        self._scheduler: Any = scheduler_connector("pull", True)._scheduler_observer
        self._table = self._worker.transfers
        self._sink = sink
        self._blocks = [list(range(BLOCKS))]

    def serve(self, number: int) -> None:
        """One request, from the handshake to the end of its lease."""
        peer, name = f"engine-{number % PEERS}", f"request-{number}"
        if number % (PEERS * 10) < PEERS:
            self._shake_hands(peer)
        parent = SpanContext(number + 1, number + 1, True, TraceFlags(TraceFlags.SAMPLED))
        self._receive(name, peer)
        self._transfer(number, name, peer)
        self._lease(number, name, parent)
        for observer in (self._worker, self._scheduler):
            updates = observer.with_updates(None).data[UPDATES]
            if TELEMETRY_ERRORS.name in updates:
                raise RuntimeError(f"a hook failed, the log says which: {updates}")

    def settle(self) -> None:
        """Until everything is exported."""
        for observer in (self._worker, self._scheduler):
            telemetry = observer.telemetry
            if not telemetry._export.run(lambda: None, 60) or not telemetry.spans.flush(60):
                raise TimeoutError("the spans were not exported in time")

    def _shake_hands(self, peer: str) -> None:
        self._worker.handshake_wanted(peer)
        handshake = self._worker.handshake_starts(("127.0.0.1", 5600, 1, peer), {})
        handshake.received("a" * 64, b"")
        self._worker.registering()
        self._worker.registered()
        self._worker.handshake_ends(None)

    def _receive(self, name: str, peer: str) -> None:
        remote = SimpleNamespace(engine_id=peer, host="127.0.0.1", port=5600, request_id=f"remote-{name}")
        meta = SimpleNamespace(local_block_ids=self._blocks, remote=remote)
        self._worker.notes_arrived(SimpleNamespace(reqs_to_recv={name: meta}))

    def _transfer(self, number: int, name: str, peer: str) -> None:
        observer, table = self._worker, self._table
        spec = SimpleNamespace(remote_rank=0, local_block_ids=self._blocks, remote_block_ids=self._blocks)
        arguments = {
            "read_spec": spec,
            "dst_engine_id": peer,
            "request_id": name,
            "remote_request_id": f"remote-{name}",
        }
        observer.acts_for_receive(name)
        observer.post_starts((), arguments)
        handle = object()
        table.prepared("READ", range(BLOCKS), now_ns(), handle)
        table.posting(handle)
        observer.post_ends()
        observer.acts_for_nobody()
        observer.posts_end()
        table.polled(handle, "PROC")
        failed = number % 100 == 0
        table.polled(handle, "ERR" if failed else "DONE")
        if not failed:
            table.done(handle, _DONE)
        table.released(table.take(handle))
        observer.results_arrived(_results(received={name}, failed={name} if failed else set()))

    def _lease(self, number: int, name: str, parent: SpanContext) -> None:
        headers = {"traceparent": f"00-{parent.trace_id:032x}-{parent.span_id:016x}-01"}
        request = SimpleNamespace(request_id=name, trace_headers=headers)
        self._scheduler.request_finished(request, (True, {"remote_block_ids": self._blocks}))
        expired = number % 100 == 1
        if not expired:
            self._worker.notified({name})
        self._worker.results_arrived(_results(sent={name}))
        notes = self._worker.notes_for_scheduler()
        output = SimpleNamespace(kv_connector_worker_meta=notes, finished_sending={name}, finished_recving=set())
        self._scheduler.output_arrived(output)


def _results(sent: Set[str] = frozenset(), received: Set[str] = frozenset(), failed: Set[str] = frozenset()) -> Any:
    """What a worker reports of a step."""
    return SimpleNamespace(finished_sending=sent, finished_recving=received, failed_recving=failed)


def _resident_mib() -> float:
    gc.collect()
    # What is free goes back to the system, so that only what is held counts.
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * 4096 / 2**20
