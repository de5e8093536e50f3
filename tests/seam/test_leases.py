# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Leases and trace contexts on vLLM's real schedulers and workers, in whichever version is installed."""

import queue
from collections import defaultdict
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnectorScheduler,
    NixlPushConnectorScheduler,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from nixl_telemetry.seam.carrier import StepNotes, WorkerNotes
from nixl_telemetry.seam.instrument import instrument
from nixl_telemetry.seam.scheduler import SchedulerHooks, SchedulerObserver
from nixl_telemetry.signals.propagation import CARRIER, extract
from nixl_telemetry.signals.semconv import TransferMode
from tests.support.observed import Observed

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
STOCK = {TransferMode.PULL: NixlPullConnectorScheduler, TransferMode.PUSH: NixlPushConnectorScheduler}


@pytest.fixture(params=list(TransferMode))
def scheduler(request: pytest.FixtureRequest, observed: Observed, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An instrumented scheduler, of a config that says no more than it is asked for."""
    monkeypatch.setattr(observed.telemetry, "mode", request.param)
    config = MagicMock()
    config.parallel_config = SimpleNamespace(
        tensor_parallel_size=1, decode_context_parallel_size=1, pipeline_parallel_size=1, data_parallel_index=0
    )
    config.cache_config.block_size = 32
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    config.kv_transfer_config.get_from_extra_config = lambda name, default: default
    caches = MagicMock(kv_cache_groups=[], transfer_groups=[], has_mamba_layers=False)
    caches.select_transfer_block_ids = lambda block_ids: block_ids
    scheduler = STOCK[request.param](config, "here", caches)
    instrument(scheduler, SchedulerHooks, SchedulerObserver(observed.telemetry, scheduler))
    return scheduler


def finished(**params: Any) -> Any:
    """A request that ended as a prefill ends."""
    return SimpleNamespace(
        request_id="r",
        kv_transfer_params={"do_remote_decode": True, **params},
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
        num_computed_tokens=70,
        trace_headers=HEADERS,
    )


@pytest.mark.parametrize("expired", [False, True])
def test_a_lease(scheduler: Any, observed: Observed, expired: bool) -> None:
    """It begins with the end of the prefill, whose answer carries its context, and ends when the workers say so."""
    is_held, params = scheduler.request_finished(finished(), ([1, 2, 3],))
    assert is_held
    lease = extract(params[CARRIER])
    assert lease is not None
    assert f"{lease.trace_id:032x}" == TRACE_ID
    notes = StepNotes.of(scheduler.build_connector_meta(MagicMock()))
    noted = [context.span_id for context in notes.leases.values()] if notes else []
    assert noted == ([lease.span_id] if observed.telemetry.mode is TransferMode.PUSH else [])
    assert observed.spans() == []
    if expired:
        scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=WorkerNotes({"r"})))
    scheduler.update_connector_output(KVConnectorOutput(finished_sending={"r"}))

    span = observed.span("nixl.lease")
    assert (span.trace_id, span.parent_span_id, span.span_id) == (TRACE_ID, SPAN_ID, f"{lease.span_id:016x}")
    assert span.attributes["nixl.lease.block.count"] == 3
    assert span.attributes["nixl.lease.outcome"] == ("expired" if expired else "released")


def test_a_request_that_holds_nothing(scheduler: Any, observed: Observed) -> None:
    """An aborted one, or one of another kind: the stock answer, and no lease."""
    aborted = finished()
    aborted.status = RequestStatus.FINISHED_ABORTED

    assert scheduler.request_finished(aborted, ([1],)) == (False, None)
    assert scheduler._nixl_telemetry._leases._leases == {}


def test_where_a_request_comes_from(scheduler: Any, observed: Observed) -> None:
    """Both contexts go to the workers with the step in which its KV is to be received, and nothing is left behind."""
    lease = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    for request_id in ("r", "never scheduled"):
        scheduler.on_new_request(
            SimpleNamespace(
                request_id=request_id,
                kv_transfer_params={"do_remote_prefill": True, CARRIER: lease},
                trace_headers=HEADERS,
            )
        )
    metadata = SimpleNamespace(reqs_to_recv={"r": None})
    scheduler._nixl_telemetry.step_built(metadata)
    ended = finished(do_remote_decode=False)
    ended.request_id = "never scheduled"
    scheduler.request_finished(ended, ([],))

    notes = StepNotes.of(metadata)
    assert notes is not None
    (origin,) = notes.origins.values()
    assert origin.parent is not None
    assert origin.lease is not None
    assert (f"{origin.parent.span_id:016x}", f"{origin.lease.span_id:016x}") == (SPAN_ID, "b" * 16)
    assert scheduler._nixl_telemetry._origins == {}


@pytest.mark.parametrize("carrier", ["x", 5, None, {}, {"traceparent": "x" * 10_000}, {"traceparent": {}}, [HEADERS]])
def test_what_clients_say_is_not_trusted(scheduler: Any, observed: Observed, carrier: Any) -> None:
    """Parameters come from a client: what is no context is none."""
    request = SimpleNamespace(
        request_id="r", kv_transfer_params={"do_remote_prefill": True, CARRIER: carrier}, trace_headers=None
    )
    scheduler.on_new_request(request)

    assert scheduler._nixl_telemetry._origins == {}
    assert observed.updates() == {}


def worker_at_rest(worker: Any) -> Any:
    """A worker that has nothing to do, with one lease of which the time is up."""
    worker.__dict__.update(
        transfer_topo=SimpleNamespace(),
        consumer_notification_counts_by_req=defaultdict(int),
        expected_consumer_notifications_by_req={},
        world_size=1,
        pcp_rank=0,
        _reqs_to_send={"late": 0.0},
        _reqs_to_process={"late", "fetched"},
        _recving_transfers=defaultdict(list),
        _recv_failures=set(),
        _failed_recv_reqs=queue.Queue(),
        _invalid_block_ids=queue.Queue(),
        _pending_recv_notifs={},
        _replicated_pcp_done_sending=set(),
        _failed_remote_engines=set(),
        _invalid_remote_engines={},
        _engine_last_active={},
        _engine_by_address={},
        _is_hma_required=False,
        _has_mamba=False,
        use_mla=False,
        enable_heterogeneous_attn_post_process=False,
        enable_permute_local_kv=False,
        _physical_blocks_per_logical_kv_block=1,
    )
    worker.__dict__["_cleanup_remote_engines"] = lambda: None
    return worker


def reported(worker: Any) -> set[str]:
    """What it reports as sent, by the newest method that it has."""
    stock = type(worker).__mro__[3]
    if hasattr(stock, "get_transfer_results"):
        return set(worker.get_transfer_results().finished_sending)
    return set(worker.get_finished()[0])


def test_a_worker_tells_expired_from_fetched(pull_worker: Any, observed: Observed) -> None:
    """vLLM reports both in one set."""
    worker = worker_at_rest(pull_worker)
    worker.nixl_wrapper = SimpleNamespace(get_new_notifs=lambda: {"agent": [b"fetched:1"]})
    worker.transfer_topo.tp_ratio = lambda size: 1

    assert reported(worker) == {"late", "fetched"}
    notes = worker._nixl_telemetry.notes_for_scheduler()
    assert notes is not None
    assert notes.expired == {"late"}
    assert worker._nixl_telemetry.notes_for_scheduler() is None
