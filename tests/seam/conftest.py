# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""vLLM's real workers, without a model: built without ``__init__``, given just what the hooked methods need."""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnectorWorker,
    NixlPushConnectorWorker,
    base_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

from nixl_telemetry.operations.transfer import TransferTable
from nixl_telemetry.seam.instrument import instrument
from nixl_telemetry.seam.payload import Payload
from nixl_telemetry.seam.stats import WorkerStats
from nixl_telemetry.seam.worker import PullWorkerHooks, PushWorkerHooks
from nixl_telemetry.seam.worker_observer import WorkerObserver, payload_made
from nixl_telemetry.signals.semconv import TransferMode
from tests.support.agents import make_pair
from tests.support.observed import Observed

__all__ = ["make_pair"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs vLLM's real classes."""
    for item in items:
        if "/tests/seam/" in str(item.path):
            item.add_marker(pytest.mark.vllm)


LOCAL_HASH = "a" * 64


def agent_metadata(engine_id: str = "there") -> dict[str, Any]:
    """The metadata of a rank, with all fields that this vLLM requires."""
    values = {"str": "x", "bytes": b"x", "int": 1, "list[int]": [1], "tuple[int, int]": (0, 0)}
    metadata: dict[str, Any] = {}
    for field in fields(NixlAgentMetadata):
        name = getattr(field.type, "__name__", str(field.type))
        metadata[field.name] = values.get(str(field.type), values.get(name))
    return {name: value for name, value in metadata.items() if value is not None} | {"engine_id": engine_id}


def bare_worker(stock: type) -> Any:
    """A stock worker that can shake hands."""
    worker: Any = object.__new__(stock)
    worker.__dict__.update(
        compat_hash=LOCAL_HASH,
        enforce_compat_hash=True,
        use_host_buffer=True,
        engine_id="here",
        tp_rank=0,
        _is_csa_linear=False,
        pcp_size=1,
        dcp_size=1,
        transfer_topo=SimpleNamespace(
            handshake_target_ranks=lambda *sizes: [0], register_remote_engine=lambda *args, **kwargs: None
        ),
        kv_transfer_config=SimpleNamespace(kv_role="kv_consumer"),
        nixl_wrapper=SimpleNamespace(add_remote_agent=lambda metadata: "agent"),
        xfer_stats=WorkerStats(),
        _handshake_lock=threading.RLock(),
        _handshake_futures={},
        _handshake_initiation_executor=ThreadPoolExecutor(1),
        _remote_agents=defaultdict(dict),
        _recving_metadata={},
        _engine_ttl=0,
    )
    return worker


@pytest.fixture
def pull_worker(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An instrumented pull worker."""
    with _instrumented(NixlPullConnectorWorker, PullWorkerHooks, observed, monkeypatch) as worker:
        yield worker


@pytest.fixture
def push_worker(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An instrumented push worker."""
    monkeypatch.setattr(observed.telemetry, "mode", TransferMode.PUSH)
    with _instrumented(NixlPushConnectorWorker, PushWorkerHooks, observed, monkeypatch) as worker:
        yield worker


@contextlib.contextmanager
def _instrumented(stock: type, hooks: type, observed: Observed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(base_worker, "NixlHandshakePayload", Payload)
    monkeypatch.setattr(Payload, "on_made", staticmethod(payload_made))
    # So that a silent peer takes the test two seconds and not 5; less, and a busy machine looks silent.
    socket_class = base_worker.zmq.Socket
    monkeypatch.setattr(
        socket_class, "setsockopt", _shortened(socket_class.setsockopt, base_worker.zmq.RCVTIMEO), raising=True
    )
    worker = bare_worker(stock)
    transfers = TransferTable(observed.telemetry)
    instrument(worker, hooks, WorkerObserver(observed.telemetry, worker, transfers))
    yield worker
    worker._handshake_initiation_executor.shutdown()
    # A worker's finaliser shuts it down, for which this one lacks nearly everything.
    worker.__class__ = _Finished


class _Finished:
    pass


def _shortened(setsockopt: Any, receive_timeout: int) -> Any:
    def shorter(self: Any, option: int, value: Any) -> Any:
        return setsockopt(self, option, 2000 if option == receive_timeout and value == 5000 else value)

    return shorter
