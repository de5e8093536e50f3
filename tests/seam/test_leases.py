# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Leases and trace contexts on vLLM's real schedulers and workers, in whichever version is installed."""

import queue
import time
from collections import defaultdict
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from opentelemetry.trace import SpanContext
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnectorScheduler,
    NixlPushConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from nixl_telemetry.seam.carrier import NOTES, StepNotes, WorkerNotes
from nixl_telemetry.seam.instrument import instrument
from nixl_telemetry.seam.scheduler import SchedulerHooks, SchedulerObserver
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.propagation import CARRIER, carried, extract, read, written
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
    observer = SchedulerObserver(observed.telemetry, scheduler, scheduler.vllm_config.kv_transfer_config)
    instrument(scheduler, SchedulerHooks, observer)
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
    # vLLM's own deadline, by this process's clock.
    assert params[CARRIER]["lease_deadline"] == pytest.approx(time.perf_counter() + 30, abs=5)
    assert f"{lease.trace_id:032x}" == TRACE_ID
    notes = StepNotes.of(scheduler.build_connector_meta(MagicMock()))
    noted = list(map(read, notes.leases.values())) if notes else []
    assert noted == ([lease] if observed.telemetry.mode is TransferMode.PUSH else [])
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


def test_only_steps_that_bring_something_have_notes(scheduler: Any) -> None:
    """They are what the worker looks for in each step; the first step has them in any case."""
    steps = [scheduler.build_connector_meta(MagicMock()) for _ in range(3)]
    with_a_request = SimpleNamespace(reqs_to_recv={"of which nothing is noted": None})
    scheduler._nixl_telemetry.step_built(with_a_request)

    assert [hasattr(step, NOTES) for step in (*steps, with_a_request)] == [True, False, False, True]


def test_blocks_that_a_step_hands_over_are_noted(scheduler: Any, observed: Observed) -> None:
    """Wherever spans go: in push they wait for their registration from now on."""
    scheduler.build_connector_meta(MagicMock())  # the first has notes in any case
    scheduler.request_finished(finished(), ([1, 2, 3],))
    metadata = scheduler.build_connector_meta(MagicMock())

    assert hasattr(metadata, NOTES) is (observed.telemetry.mode is TransferMode.PUSH)


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
    scheduler._nixl_telemetry.step_built(SimpleNamespace(reqs_to_recv={}))

    notes = StepNotes.of(metadata)
    assert notes is not None
    (origin,) = notes.origins.values()
    assert (origin.parent, origin.lease) == (carried(HEADERS), carried(lease))
    assert scheduler._nixl_telemetry._origins == {}


REMOTE = {
    "remote_engine_id": "there",
    "remote_request_id": "s",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "remote_block_ids": ([1, 2],),
    "tp_size": 1,
    CARRIER: {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"},
}
"""What a prefill instance tells of a request."""


def arriving(**params: Any) -> Any:
    """A request of the decode side, or of a later turn."""
    request = finished()
    request.kv_transfer_params = {**REMOTE, **params}
    return request


def test_a_request_that_is_aborted_before_it_is_scheduled(scheduler: Any) -> None:
    """A worker still tells the peer, in the next step, and this belongs to the request's trace."""
    request = arriving(do_remote_prefill=True)
    request.status = RequestStatus.FINISHED_ABORTED
    scheduler.on_new_request(request)
    scheduler.request_finished(request, ([],))

    metadata = scheduler.build_connector_meta(MagicMock())
    notes = StepNotes.of(metadata)
    assert list(metadata.reqs_to_recv) == ["r"]
    assert notes is not None
    assert list(notes.origins) == ["r"]
    assert scheduler._nixl_telemetry._origins == {}


@pytest.mark.parametrize("deadline", [float("nan"), float("inf"), 10**400, "5", None, [5]])
def test_a_deadline_that_is_none(scheduler: Any, deadline: Any) -> None:
    """JSON as Python reads it has such numbers; the rest of what the request says is taken."""
    lease = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "lease_deadline": deadline}
    request = arriving(do_remote_prefill=True)
    request.kv_transfer_params[CARRIER] = lease
    scheduler._nixl_telemetry.request_arrived(request)

    (origin,) = scheduler._nixl_telemetry._origins.values()
    assert (origin.lease, origin.lease_deadline) == (carried(lease), None)


def test_a_prefill_that_reads_from_an_earlier_turn(scheduler: Any) -> None:
    """Bidirectional transfers: the context of the decode side's lease comes with the request."""
    scheduler._nixl_telemetry.request_arrived(arriving(do_remote_decode=True))

    (origin,) = scheduler._nixl_telemetry._origins.values()
    lease = read(origin.lease)
    assert lease is not None
    assert f"{lease.span_id:016x}" == "b" * 16


@pytest.mark.parametrize("has_its_kv", [False, True])
def test_a_request_that_ends_while_it_waits(scheduler: Any, has_its_kv: bool) -> None:
    """Its client went away: the workers are told, since vLLM may never report it."""
    observer = scheduler._nixl_telemetry
    observer.step_built(SimpleNamespace(reqs_to_recv={"r": None}))
    if has_its_kv:
        scheduler.update_connector_output(KVConnectorOutput(finished_recving={"r"}))
    scheduler.request_finished(arriving(do_remote_prefill=False), ([],))
    metadata = SimpleNamespace(reqs_to_recv={})
    observer.step_built(metadata)

    notes = StepNotes.of(metadata)
    assert (notes.abandoned if notes else set()) == (set() if has_its_kv else {"r"})
    assert (observer._waiting, observer._ended) == (set(), set())


def test_leases_at_shutdown(scheduler: Any, observed: Observed) -> None:
    """Who was told of one finds it."""
    scheduler.request_finished(finished(), ([1],))
    scheduler._nixl_telemetry.shut_down()

    assert observed.span("nixl.lease").attributes["nixl.lease.outcome"] == "shutdown"


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
        _remote_registration_generations=defaultdict(int),
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
    if hasattr(worker._stock_class, "get_transfer_results"):
        return set(worker.get_transfer_results().finished_sending)
    return set(worker.get_finished()[0])


@pytest.mark.parametrize("report", [reported, lambda worker: set(worker.get_finished()[0])])
def test_a_worker_tells_expired_from_fetched(pull_worker: Any, report: Any) -> None:
    """vLLM reports both in one set, by whichever of its methods is called."""
    worker = worker_at_rest(pull_worker)
    worker.nixl_wrapper = SimpleNamespace(get_new_notifs=lambda: {"agent": [b"fetched:1"]})
    worker.transfer_topo.tp_ratio = lambda size: 1

    assert report(worker) == {"late", "fetched"}
    notes = worker._nixl_telemetry.notes_for_scheduler()
    assert notes is not None
    assert notes.expired == {"late"}
    assert worker._nixl_telemetry.notes_for_scheduler() is None


def test_a_push_worker_tells_expired_from_not_needed(push_worker: Any) -> None:
    """A decode side that has the KV already says so before any is written."""
    worker = worker_at_rest(push_worker)
    observer = worker._nixl_telemetry
    observer.notification_arrived(b"fetched:1")
    observer.notification_arrived(b"HB:late")
    observer.finished_arrived(({"late", "fetched"}, set()))

    notes = observer.notes_for_scheduler()
    assert notes is not None
    assert notes.expired == {"late"}
    assert notes.invalid == {}


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_lease_that_runs_out_after_a_write(push_worker: Any, observed: Observed, has_failed: bool) -> None:
    """Whether the decode side has the KV decides, however long ago it was written."""
    worker = worker_at_rest(push_worker)
    observer = worker._nixl_telemetry
    spec = SimpleNamespace(remote_rank=0, local_block_ids=[[1]], remote_block_ids=[[2]])
    observer.post_starts((), {"read_spec": spec, "request_id": "late", "remote_request_id": "s", "dst_engine_id": "e"})
    handle = object()
    observer.transfers.prepared("WRITE", [1], now_ns(), handle)
    observer.transfers.posting(handle)
    if has_failed:
        observer.transfers.polled(handle, "ERR")
    else:
        observer.transfers.done(handle, SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=1, descCount=1))
    observer.post_ends()
    observer.finished_arrived((set(), set()))
    observer.finished_arrived(({"late"}, set()))

    notes = observer.notes_for_scheduler()
    assert (notes.expired if notes else set()) == ({"late"} if has_failed else set())


def to_receive(request_id: str, port: Any = 5600) -> Any:
    """What a worker is told of a request whose KV it is to receive."""
    metadata = NixlConnectorMetadata()
    params = {**REMOTE, "remote_port": port}
    metadata.add_new_req_to_recv(request_id, ([1, 2],), params)
    return metadata.reqs_to_recv[request_id]


def test_the_request_that_needs_a_handshake_is_its_cause(pull_worker: Any) -> None:
    """In every version, wherever it asks for it."""
    worker = worker_at_rest(pull_worker)
    worker._handshake_initiation_executor.shutdown()
    worker._handshake_initiation_executor = MagicMock(submit=lambda *args: Future())
    worker._ready_requests = queue.Queue()
    worker._bidirectional_kv_xfer_enabled = False
    worker._logical_to_kernel_block_ids = lambda block_ids, *ratio: block_ids
    metadata = NixlConnectorMetadata()
    metadata.reqs_to_recv = {name: to_receive(name) for name in ("first", "second")}
    StepNotes().attach(metadata)
    worker.start_load_kv(metadata)

    observer = worker._nixl_telemetry
    receives = [observer._receives.find(name) for name in ("first", "second")]
    assert [receive.context for receive in receives] == observer._waiters.of("there")
    assert None not in observer._waiters.of("there")


def test_one_bad_request_hides_no_other(pull_worker: Any, observed: Observed) -> None:
    """A request's parameters come from a client."""
    observer = pull_worker._nixl_telemetry
    broken = to_receive("broken")
    broken.local_block_ids = 7
    requests = {"port": to_receive("port", port="x" * 10_000), "broken": broken, "good": to_receive("good")}
    notes = StepNotes(leases={"l": written(SpanContext(1, 2, False))})
    metadata = SimpleNamespace(reqs_to_recv=requests)
    notes.attach(metadata)
    observer.notes_arrived(metadata)

    assert [observer._receives.find(name) is not None for name in requests] == [True, False, True]
    assert observer._receives.find("port").peer.port == 0
    assert list(observer._leases) == ["l"]
    assert observed.updates() == {("nixl_telemetry_errors_total", "hook"): 1}


@pytest.mark.parametrize(("fixture", "reads"), [("pull_worker", True), ("push_worker", False)])
def test_a_rank_that_serves_nobody(request: pytest.FixtureRequest, fixture: str, reads: bool) -> None:
    """The first rank of its group serves the KV that they share. In pull the others read all the same."""
    worker = request.getfixturevalue(fixture)
    worker.pcp_rank, worker.pcp_dcp_sharded = 1, False
    metadata = SimpleNamespace(reqs_to_recv={"r": to_receive("r")}, push_registrations={"r": {}})
    worker._nixl_telemetry.notes_arrived(metadata)

    assert (worker._nixl_telemetry._receives.find("r") is not None) == reads
