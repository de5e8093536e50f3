# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""vLLM's real connectors without a model: built without ``__init__``, given just what the measured methods need."""

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector, NixlPushConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.v1.outputs import KVConnectorOutput

from nixl_telemetry.seam.connector import InstrumentedNixlPullConnector, InstrumentedNixlPushConnector
from nixl_telemetry.seam.stats import WorkerStats
from nixl_telemetry.settings import Settings
from nixl_telemetry.signals import traces
from nixl_telemetry.signals.logger import LOGGER_NAME
from nixl_telemetry.signals.otlp import Message

ENGINE: Final = "here"
PEER: Final = "there"
HASH: Final = "a" * 64

CONNECTORS: Final = {
    "pull": (NixlPullConnector, InstrumentedNixlPullConnector),
    "push": (NixlPushConnector, InstrumentedNixlPushConnector),
}


class Sink:
    """Takes spans as an exporter does, up to their bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def send(self, message: Message) -> None:
        """Forget a batch."""
        self.bytes += len(message.data)

    def shutdown(self) -> None:
        """Nothing is open."""


class SilentAgent:
    """A NIXL agent that has nothing to tell."""

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """No notifications."""
        return {}

    def add_remote_agent(self, metadata: bytes) -> str:
        """A peer is known."""
        return "agent"

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> Any:
        """Never called."""

    transfer = check_xfer_state = get_xfer_telemetry = release_xfer_handle = send_notif = make_prepped_xfer


@contextmanager
def exporting_to_sink() -> Iterator[Sink]:
    """Spans of this process are made, encoded and serialised, and go nowhere; log lines are made and go nowhere."""
    sink = Sink()
    logger = logging.getLogger("vllm")
    handlers, logger.handlers = logger.handlers, [logging.NullHandler()]
    logging.getLogger(LOGGER_NAME).setLevel(logging.INFO)
    try:
        with (
            patch.object(traces, "is_configured", lambda endpoint: True),
            patch.object(traces, "connect", lambda endpoint: sink),
        ):
            yield sink
    finally:
        logger.handlers = handlers


def worker_connector(mode: str, instrumented: bool, agent: Any, **settings: Any) -> Any:
    """A connector of the worker's side.

    Args:
        mode: ``pull`` or ``push``.
        instrumented: Whether it has the hooks.
        agent: Its NIXL agent.
        **settings: Of the telemetry.
    """
    connector: Any = object.__new__(CONNECTORS[mode][instrumented])
    stock_worker = {"pull": "NixlPullConnectorWorker", "push": "NixlPushConnectorWorker"}[mode]
    worker = _bare_worker(stock_worker, agent)
    worker.xfer_stats = WorkerStats() if instrumented else NixlKVConnectorStats()
    connector.connector_worker, connector.connector_scheduler = worker, None
    return _attached(connector, instrumented, settings)


def scheduler_connector(mode: str, instrumented: bool, **settings: Any) -> Any:
    """A connector of the scheduler's side; the arguments are as for the worker's."""
    connector: Any = object.__new__(CONNECTORS[mode][instrumented])
    scheduler = _bare_scheduler({"pull": "NixlPullConnectorScheduler", "push": "NixlPushConnectorScheduler"}[mode])
    connector.connector_worker, connector.connector_scheduler = None, scheduler
    return _attached(connector, instrumented, settings)


def step(worker: Any, scheduler: Any) -> None:
    """One step of the engine, in vLLM's order; see its ``kv_connector_model_runner_mixin`` and ``Scheduler``."""
    metadata = scheduler.build_connector_meta(None)
    output = KVConnectorOutput()
    worker.bind_connector_metadata(metadata)
    worker.start_load_kv(None)
    results = worker.get_transfer_results(())
    output.finished_sending = results.finished_sending
    output.finished_recving = results.finished_recving
    output.failed_recving = results.failed_recving
    output.invalid_block_ids = worker.get_block_ids_with_load_errors()
    output.kv_connector_stats = worker.get_kv_connector_stats()
    output.kv_connector_worker_meta = worker.build_connector_worker_meta()
    worker.clear_connector_metadata()
    scheduler.get_kv_connector_stats()
    scheduler.update_connector_output(output)
    scheduler.has_pending_push_work()


def _attached(connector: Any, instrumented: bool, settings: dict[str, Any]) -> Any:
    connector.engine_id = ENGINE
    connector.kv_transfer_config = SimpleNamespace(kv_role="kv_consumer")
    connector._connector_metadata = None
    if instrumented:
        # What the connector's own constructor does after vLLM's.
        connector._attach(Settings.load({"telemetry": settings}, {}), None, None)
    return connector


def _bare_worker(name: str, agent: Any) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1 import nixl

    worker: Any = object.__new__(type(name, (getattr(nixl, name),), {"__del__": lambda self: None}))
    worker.__dict__.update(
        compat_hash=HASH,
        enforce_compat_hash=True,
        use_host_buffer=False,
        device_id=0,
        engine_id=ENGINE,
        tp_rank=0,
        pcp_rank=0,
        pcp_size=1,
        dcp_size=1,
        pcp_dcp_sharded=False,
        use_mla=False,
        _has_mamba=False,
        _is_csa_linear=False,
        _is_hma_required=False,
        _mixed_mem_types=False,
        _bidirectional_kv_xfer_enabled=False,
        enable_permute_local_kv=False,
        enable_heterogeneous_attn_post_process=False,
        _physical_blocks_per_logical_kv_block=1,
        kv_transfer_config=SimpleNamespace(kv_role="kv_consumer"),
        nixl_wrapper=agent,
        transfer_topo=_topology(),
        _handshake_lock=threading.RLock(),
        _handshake_futures={},
        _handshake_initiation_executor=ThreadPoolExecutor(1),
        _remote_agents=defaultdict(dict),
        _engine_by_address={},
        _engine_last_active={},
        _invalid_remote_engines=set(),
        _failed_remote_engines=set(),
        _invalid_engine_backoff={},
        _recving_metadata={},
        _recving_transfers={},
        _recv_failures=set(),
        _failed_recv_reqs=queue.Queue(),
        _ready_requests=queue.Queue(),
        _invalid_block_ids=queue.Queue(),
        _pending_recv_notifs={},
        _replicated_pcp_done_sending=set(),
        _reqs_to_process=set(),
        _reqs_to_send={},
        _engine_ttl=0,
        # Of the push worker.
        _sending_transfers={},
        _send_failures=set(),
        _sending_transfers_lock=threading.Lock(),
        _pending_completion_notifs=queue.Queue(),
        _push_writer_wake=threading.Event(),
    )
    return worker


def _topology() -> Any:
    remote = SimpleNamespace(
        remote_tp_size=1, remote_dcp_size=1, remote_block_size=16, remote_physical_blocks_per_logical=1
    )
    return SimpleNamespace(
        handshake_target_ranks=lambda *sizes: [0],
        register_remote_engine=lambda *args, **kwargs: None,
        get_engine_info=lambda engine_id: remote,
        tp_ratio=lambda tp_size: 1,
        block_size_ratio=lambda block_size: 1,
    )


def _bare_scheduler(name: str) -> Any:
    from vllm.distributed.kv_transfer.kv_connector.v1 import nixl

    scheduler: Any = object.__new__(getattr(nixl, name))
    scheduler.__dict__.update(
        use_host_buffer=False,
        _reqs_need_recv={},
        _reqs_need_send={},
        _reqs_in_batch=set(),
        _reqs_not_processed=set(),
        _heartbeat_by_engine={},
        _heartbeat_req_engine={},
        # Of the push scheduler.
        _push_registration_deadlines={},
        _push_pending_registrations={},
        _finished_request_blocks={},
        _newly_finished_push_blocks={},
    )
    return scheduler
