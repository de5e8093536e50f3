# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What a handshake costs more than the stock one: vLLM's real method against a real ZeroMQ peer with our statement."""

from dataclasses import fields
from statistics import median
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

from benchmarks.bare import PEER, SilentAgent, exporting_to_sink, worker_connector
from benchmarks.figures import Budget, Figure, Part, differences, median_interval
from benchmarks.interleave import Cost, cost_of, interleaved
from nixl_telemetry.compat.factors import digest
from nixl_telemetry.operations.compatibility import Compatibility
from tests.support.peers import CLOCK, payload, peer
from tests.support.statements import FACTORS, exchanged, statement

ROUNDS: Final = 150
LIMIT_MS: Final = 1.0


def measure() -> Part:
    """Stock and instrumented handshakes with the same peer, in turns."""
    frames = [_answer(), CLOCK]
    with exporting_to_sink(), peer(lambda: frames) as port:
        stock, ours = (_worker(instrumented) for instrumented in (False, True))
        rounds = interleaved(lambda: _shake(stock, port), lambda: _shake(ours, port), ROUNDS, warm_up=20)
    theirs, mine = rounds.firsts, rounds.seconds
    added = differences([cost.wall / 1e6 for cost in mine], [cost.wall / 1e6 for cost in theirs])
    cpu = differences([cost.cpu / 1e6 for cost in mine], [cost.cpu / 1e6 for cost in theirs])
    budget = Budget(
        "a handshake, more than the stock one", median(added), LIMIT_MS, "ms", interval=median_interval(added)
    )
    figures = [
        Figure("the stock handshake", median(cost.wall / 1e6 for cost in theirs), "ms"),
        Figure("CPU time of its thread, more than the stock one", median(cpu), "ms", median_interval(cpu)),
    ]
    return Part([budget], figures, {"added ms": added})


def _worker(instrumented: bool) -> Any:
    worker = worker_connector("pull", instrumented, SilentAgent()).connector_worker
    worker.compat_hash = digest(FACTORS)
    worker.use_host_buffer = True  # no device to select
    worker._validate_remote_parallel_config = lambda metadata: None
    if instrumented:
        observer = worker._nixl_telemetry
        said = statement(engine_id=PEER)
        observer._compatibility = Compatibility(observer.telemetry, digest(FACTORS), True, "kv_consumer", FACTORS, said)
    stock: Any = next(layer for layer in type(worker).__mro__ if "add_remote_agent" in vars(layer) and _is_stock(layer))
    stock.add_remote_agent = lambda self, *args, **kwargs: "agent"  # the real one needs KV caches
    return worker


def _is_stock(layer: type) -> bool:
    return layer.__module__.startswith("vllm.")


def _shake(worker: Any, port: int) -> Cost:
    return cost_of(lambda: worker._nixl_handshake("127.0.0.1", port, 1, PEER))


def _answer() -> bytes:
    values: dict[str, Any] = {"str": "x", "bytes": b"x", "int": 1, "list[int]": [1], "tuple[int, int]": (0, 0)}
    metadata = {
        field.name: values.get(str(field.type), values.get(getattr(field.type, "__name__", "")))
        for field in fields(NixlAgentMetadata)
    }
    known = {name: value for name, value in metadata.items() if value is not None} | {"engine_id": PEER}
    compat_hash, said = exchanged(statement(engine_id=PEER))
    return payload(compat_hash, known, said)
