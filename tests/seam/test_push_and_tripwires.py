# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Registrations, notifications and what they reveal, on vLLM's real workers and schedulers."""

import queue
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX, NixlConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from nixl_telemetry.operations.errors import TEXT_LIMIT
from nixl_telemetry.operations.receive import Origin
from nixl_telemetry.seam.agent import observe_agent
from nixl_telemetry.seam.carrier import WorkerNotes
from nixl_telemetry.signals.propagation import CARRIER
from nixl_telemetry.signals.semconv import InvalidKv, TransferMode
from tests.seam.test_leases import HEADERS, SPAN_ID, TRACE_ID, finished, scheduler, to_receive, worker_at_rest
from tests.support.observed import Observed

__all__ = ["scheduler"]

REGISTRATIONS, UNMATCHED, INVALID = (
    "nixl_push_registrations_total",
    "nixl_push_unmatched",
    "nixl_invalid_kv_total",
)
REGISTRATION = {
    "request_id": "cmpl-1-0-aaaaaaaa",
    "decode_engine_id": "decode",
    "decode_host": "10.0.0.8",
    "decode_port": 5700,
    "decode_tp_size": 1,
    "local_block_ids": [[1, 2]],
}


WRITER_QUEUES = (
    "_reg_send_inbox",
    "_finished_blocks_inbox",
    "_evict_finished_inbox",
    "_deferred_push_inbox",
)


class Agent:
    """A NIXL agent that is told what has come, and keeps what is sent."""

    def __init__(self) -> None:
        self.inbox: dict[str, list[bytes]] = {}
        self.sent: list[str] = []
        self.fails = False

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        """What has come since the last call."""
        inbox, self.inbox = self.inbox, {}
        return inbox

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        """Send, unless it fails."""
        if self.fails:
            raise ConnectionError("no agent")
        self.sent.append(agent)


def with_agent(worker: Any) -> Agent:
    """The worker's own agent, observed."""
    worker.nixl_wrapper = agent = Agent()
    observe_agent(worker, worker._nixl_telemetry.transfers)
    return agent


@pytest.fixture
def prefill(push_worker: Any) -> Any:
    """A push worker of the prefill side, whose handshakes are under way for ever."""
    worker = worker_at_rest(push_worker)
    worker._handshake_initiation_executor.shutdown()
    worker._handshake_initiation_executor = MagicMock(submit=lambda *args: Future())
    worker.__dict__.update(_push_finished_blocks={}, _pending_d_registrations={})
    worker._deferred_push_inbox = worker._push_writer_wake = MagicMock()
    with_agent(worker)
    return worker


def register(worker: Any, registration: Any = None) -> None:
    """A registration comes."""
    worker._handle_push_reg_notif(PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(registration or REGISTRATION))


def test_a_registration_that_waits(prefill: Any, observed: Observed) -> None:
    """It is the decode side's second rank that sends it again."""
    register(prefill)
    register(prefill)

    assert observed.updates() == {(REGISTRATIONS, "received"): 1, (UNMATCHED, "registration"): 1}


def test_a_registration_that_is_matched(prefill: Any, observed: Observed) -> None:
    """By the base of the request's id, as vLLM does it; then a handshake is needed, and fails."""
    metadata = NixlConnectorMetadata()
    metadata.push_finished_blocks = {"cmpl-1-0-bbbbbbbb": [[5, 6]]}
    prefill._nixl_telemetry.notes_arrived(metadata)
    prefill._push_finished_blocks.update(metadata.push_finished_blocks)
    register(prefill)

    updates = observed.updates()
    assert updates.pop(("nixl_push_match_wait_seconds", "blocks"))[0] >= 0
    assert updates == {
        (REGISTRATIONS, "received"): 1,
        (REGISTRATIONS, "matched"): 1,
    }
    observer = prefill._nixl_telemetry
    observer.handshake_starts(("10.0.0.8", 5700, 1, "decode"), {})
    observer.handshake_ends(RuntimeError("rejected"))
    (line,) = [line for line in observed.messages() if "nixl.push.failed" in line]
    assert "nixl.request.id=cmpl-1-0-bbbbbbbb nixl.remote.request.id=cmpl-1-0-aaaaaaaa" in line


@pytest.mark.parametrize("content", [b"\xc1", msgspec.msgpack.encode({"request_id": 7}), msgspec.msgpack.encode([1])])
def test_a_registration_that_cannot_be_read(prefill: Any, observed: Observed, content: bytes) -> None:
    """vLLM drops it, and so it counts."""
    prefill._handle_push_reg_notif(PUSH_REG_NOTIF_PREFIX + content)

    assert observed.updates() == {(REGISTRATIONS, "received"): 1, (REGISTRATIONS, "failed"): 1}


@pytest.mark.parametrize(
    ("agents", "fails", "event"),
    [
        ({(0, 0): "a", (0, 1): "b"}, False, "sent"),
        ({(0, 0): "a"}, True, "failed"),
        ({}, False, "failed"),
    ],
)
def test_registrations_of_the_decode_side(
    push_worker: Any, observed: Observed, agents: dict[tuple[int, int], str], fails: bool, event: str
) -> None:
    """Sent to every rank of the peer, or failed."""
    worker = worker_at_rest(push_worker)
    agent = with_agent(worker)
    agent.fails = fails
    worker._remote_agents["prefill"] = agents
    worker._do_send_reg_notif("r", {"remote_engine_id": "prefill"})

    assert observed.updates() == {(REGISTRATIONS, event): 1}


GONE = {"agent": [b"late:1", b"never:1", b"HB:held,elsewhere", b"fetched:1"]}
"""Read after the lease had expired, or of a request that never was; a heartbeat; and a read in time."""


def check_what_is_gone(worker: Any, observed: Observed) -> None:
    """What the scheduler and the metrics are told of it."""
    notes = worker._nixl_telemetry.notes_for_scheduler()
    assert notes.invalid == {"late": InvalidKv.READ_AFTER_EXPIRY, "never": InvalidKv.UNKNOWN_REQUEST}
    assert notes.renewed == {"held": 20.0}
    assert worker._nixl_telemetry.notes_for_scheduler() is None
    assert observed.updates()["nixl_lease_renewals_total", ""] == 1


def test_notifications_of_requests_that_are_gone(pull_worker: Any, observed: Observed) -> None:
    """The engine's thread asks the agent for them."""
    worker = worker_at_rest(pull_worker)
    agent = with_agent(worker)
    worker.transfer_topo.tp_ratio = lambda size: 1
    worker._lease_extension = 20
    worker.get_finished()
    assert worker._nixl_telemetry.notes_for_scheduler().expired == {"late"}
    worker._reqs_to_send["held"] = 1e18
    agent.inbox = dict(GONE)
    worker.get_finished()

    check_what_is_gone(worker, observed)


@pytest.mark.parametrize("has_queue", [True, False])
def test_notifications_of_requests_that_are_gone_in_push(prefill: Any, observed: Observed, has_queue: bool) -> None:
    """The push writer's thread asks for them, and has a queue for the engine's; whether the hooks find it or not."""
    queued: queue.Queue[bytes] = queue.Queue()
    if has_queue:
        prefill._pending_completion_notifs = queued
    agent = with_agent(prefill)
    prefill._pending_completion_notifs = queued
    prefill.__dict__.update({name: queue.Queue() for name in WRITER_QUEUES})
    prefill._lease_extension = 20
    prefill._reqs_to_send = {"held": 1e18}
    prefill._reqs_to_process = {"fetched"}
    prefill._nixl_telemetry._expired["late"] = None
    registration = PUSH_REG_NOTIF_PREFIX + msgspec.msgpack.encode(REGISTRATION)
    agent.inbox = {"agent": [*GONE["agent"], registration]}
    prefill._push_writer_stop = MagicMock(is_set=MagicMock(side_effect=[False, True]))
    prefill._push_writer_loop()

    check_what_is_gone(prefill, observed)
    assert prefill._pending_d_registrations.keys() == {"cmpl-1-0-aaaaaaaa"}
    assert [queued.get_nowait() for _ in range(4)] == GONE["agent"]
    assert type(prefill.nixl_wrapper).get_new_notifs is Agent.get_new_notifs or not has_queue


@pytest.mark.parametrize("content", [b"", b":", b"\xff\xfe:1", b"a" * 5000 + b":1"])
def test_hostile_notifications(pull_worker: Any, observed: Observed, content: bytes) -> None:
    """They cost a note of bounded size, and nothing raises."""
    observer = worker_at_rest(pull_worker)._nixl_telemetry
    observer.notification_arrived(content)

    assert all(len(request_id) <= TEXT_LIMIT for request_id in observer.notes_for_scheduler().invalid)
    assert observed.updates() == {}


def test_what_workers_note(scheduler: Any, observed: Observed) -> None:
    """Each request counts once, however many ranks tell of it; in its lease's trace where there is one."""
    scheduler.request_finished(finished(), ([1, 2, 3],))
    observed.updates()
    for _ in range(2):
        notes = WorkerNotes(
            renewed={"r": 500.0}, invalid={"r": InvalidKv.READ_AFTER_EXPIRY, "x": InvalidKv.UNKNOWN_REQUEST}
        )
        scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=notes))

    assert observed.updates() == {(INVALID, "read_after_expiry"): 1, (INVALID, "unknown_request"): 1}
    spans = [span for span in observed.spans() if span.name == "nixl.tripwire"]
    assert [span.trace_id == TRACE_ID for span in spans] == [True, False]
    assert scheduler._nixl_telemetry._leases.find("r").deadline_ns > 0


@pytest.mark.parametrize(
    ("status", "recomputes", "reason"),
    [
        (RequestStatus.FINISHED_STOPPED, False, "failed_load_served"),
        (RequestStatus.FINISHED_LENGTH_CAPPED, True, "failed_load_recomputed"),
        (RequestStatus.FINISHED_ABORTED, False, None),
    ],
)
def test_a_failed_load(
    scheduler: Any, observed: Observed, status: RequestStatus, recomputes: bool, reason: str | None
) -> None:
    """Served all the same, recomputed, or failed as it should be."""
    scheduler._nixl_telemetry._recomputes = recomputes
    notes = WorkerNotes(failed={"r"})
    scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=notes))
    request = finished(do_remote_decode=False)
    request.status = status
    scheduler.request_finished(request, ([],))
    scheduler.request_finished(request, ([],))

    assert observed.updates() == ({(INVALID, reason): 1} if reason else {})
    if reason:
        assert observed.span("nixl.tripwire").parent_span_id == SPAN_ID


@pytest.mark.parametrize(
    ("role", "params", "label"),
    [
        ("kv_producer", None, "prefill"),
        ("kv_producer", {"do_remote_decode": True}, None),
        ("kv_consumer", {}, "decode"),
        ("kv_consumer", {"do_remote_prefill": True}, None),
        ("kv_both", None, None),
    ],
)
def test_requests_without_parameters(
    scheduler: Any, observed: Observed, role: str, params: Any, label: str | None
) -> None:
    """On either side; where both are possible, nothing can be said."""
    config = SimpleNamespace(kv_role=role)
    observer = type(scheduler._nixl_telemetry)(observed.telemetry, scheduler, config)
    observer.request_arrived(SimpleNamespace(request_id="r", kv_transfer_params=params, trace_headers=HEADERS))

    expected = {("nixl_requests_without_transfer_params_total", label): 1} if label else {}
    assert observed.updates() == expected


def test_what_is_left_of_a_lease(pull_worker: Any, observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the offset between the two clocks that the handshake has found."""
    worker = worker_at_rest(pull_worker)
    worker._engine_clock_offset = {"there": 1000.0}
    observer = worker._nixl_telemetry
    monkeypatch.setattr("nixl_telemetry.seam.worker_observer.time.perf_counter", lambda: 50.0)
    receive = observer._receives.start("r", "s", SimpleNamespace(engine_id="there"), 1, Origin(lease_deadline=1062.5))
    unknown = observer._receives.start("q", "s", SimpleNamespace(engine_id="other"), 1, Origin(lease_deadline=1062.5))

    assert observer._lease_remaining(receive, 1062.5) == 12.5
    assert observer._lease_remaining(unknown, 1062.5) is None


@pytest.mark.parametrize("deadline", ["soon", None, [1], {}, True])
def test_deadlines_that_are_none(scheduler: Any, observed: Observed, deadline: Any) -> None:
    """A client can say what it likes."""
    params = {"do_remote_prefill": True, CARRIER: {"lease_deadline": deadline}}
    scheduler.on_new_request(SimpleNamespace(request_id="r", kv_transfer_params=params, trace_headers=HEADERS))

    assert scheduler._nixl_telemetry._origins["r"].lease_deadline in (None, 1.0)
    assert ("nixl_telemetry_errors_total", "hook") not in observed.updates()


@pytest.mark.parametrize(("remote", "differ"), [("s-11112222", True), ("r-33334444", False), ("", False)])
def test_ids_that_can_never_match(push_worker: Any, observed: Observed, remote: str, differ: bool) -> None:
    """Where the decode side knows both, it knows at once."""
    worker = worker_at_rest(push_worker)
    meta = to_receive("r-55556666")
    meta.remote.request_id = remote
    metadata = SimpleNamespace(reqs_to_recv={"r-55556666": meta}, push_registrations={"r-55556666": {}})
    worker._nixl_telemetry.notes_arrived(metadata)

    assert observed.telemetry.mode is TransferMode.PUSH
    assert worker._nixl_telemetry._receives.find("r-55556666").ids_differ is differ
