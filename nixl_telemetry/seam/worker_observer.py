# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What a worker's hooks report to: which handshake, receive, lease and transfer each call belongs to."""

import time
from collections import OrderedDict, deque
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Final, TypeAlias

import msgspec
import zmq
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import PUSH_REG_NOTIF_PREFIX
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id

from nixl_telemetry.compat.factors import Factors, digest
from nixl_telemetry.compat.statement import Statement
from nixl_telemetry.operations.allowed_peers import AllowedPeers, PeerNotAllowedError
from nixl_telemetry.operations.compatibility import Compatibility
from nixl_telemetry.operations.errors import TEXT_LIMIT
from nixl_telemetry.operations.handshake import Current, Failure, Handshake, Waiters
from nixl_telemetry.operations.lease import Deliveries, LeaseTable
from nixl_telemetry.operations.mode import ModeCheck, ModeConflict
from nixl_telemetry.operations.peer import PeerBook
from nixl_telemetry.operations.push_match import PushMatches
from nixl_telemetry.operations.receive import NO_ORIGIN, Origin, Receive, ReceiveTable
from nixl_telemetry.operations.startup import announce
from nixl_telemetry.operations.transfer import Request, TransferTable
from nixl_telemetry.seam.carrier import StepNotes, WorkerNotes
from nixl_telemetry.seam.payload import add_statement, statement_of
from nixl_telemetry.seam.stats import TelemetryStats, with_updates
from nixl_telemetry.seam.versions import Parameters, is_nixl_error, nixl_version, vllm_version
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.catalogue import LEASE_RENEWALS, PUSH_REGISTRATIONS, TELEMETRY_DROPPED
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.propagation import CARRIER, NOTHING, Carried, carried, inject, read
from nixl_telemetry.signals.semconv import ConflictSource, InvalidKv, Purpose, RegistrationEvent, Signal, TransferMode
from nixl_telemetry.signals.telemetry import Telemetry, guarded

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call."""

_current = Current()


def payload_made(compat_hash: str, encoded: bytes) -> None:
    """A payload was made or decoded: on a thread that shakes hands, it is the peer's answer."""
    if _current.handshake is not None:
        _current.handshake.received(compat_hash, encoded)


class WorkerObserver:
    """What a worker's hooks report to.

    Args:
        telemetry: The hub.
        worker: The stock worker.
        transfers: The transfers of the worker's agent.
    """

    def __init__(self, telemetry: Telemetry, worker: Any, transfers: TransferTable) -> None:
        self.telemetry = telemetry
        self.transfers = transfers
        self.unsent: Final[tuple[Collection[object], ...]] = (telemetry.updates, *transfers.counts.waiting)
        """What the next stats have to take; mostly empty."""
        self._worker = worker
        self._compatibility: Compatibility | None = None
        self._peers = PeerBook()
        self._conflicts: dict[str, ModeConflict] = {}
        self._receives = ReceiveTable(telemetry)
        self.untold = self._receives.untold
        self._waiters = Waiters()
        self._leases: dict[str, Carried] = {}
        self._deliveries = Deliveries()
        self.news: Final[deque[_News]] = deque(maxlen=LeaseTable.LIMIT)
        """What the scheduler does not know yet; any thread may add."""
        self._expired: OrderedDict[str, None] = OrderedDict()
        """Requests whose lease expired lately."""
        self._pushes = PushMatches(telemetry)
        transfers.on_notification = self.notification_arrived
        self._mode = ModeCheck(telemetry)
        allowed = telemetry.settings.allowed_peers
        self._allowed = AllowedPeers(allowed) if allowed is not None else None
        self._handshake_parameters = Parameters(base_worker.NixlBaseConnectorWorker._nixl_handshake)
        post = getattr(worker, "_read_blocks", None) or worker._xfer_blocks
        self._post_parameters = Parameters(getattr(type(worker), post.__name__))

    @guarded
    def handshake_starts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Handshake:
        """A handshake begins on this thread."""

        def argument(name: str, default: Any = None) -> Any:
            return self._handshake_parameters.get(name, args, kwargs, default)

        peer = self._peers.at(argument("expected_engine_id"), argument("host"), argument("port"))
        conflict = self._conflicts.pop(peer.engine_id, None)
        _current.handshake = Handshake(
            self.telemetry,
            peer,
            Purpose.NOTIFY if argument("notif_agents_only", False) else Purpose.TRANSFER,
            self._compatibility or self._judge(None, None),
            int(argument("remote_tp_size", 0)),
            # Another process's clock says nothing here.
            replace(conflict, at_ns=now_ns()) if conflict else None,
            self._waiters.of(peer.engine_id),
            self.transfers.peers,
        )
        return _current.handshake

    @guarded
    def destination(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | PeerNotAllowedError:
        """The arguments with which vLLM is to shake hands, or why it must not.

        A host that is not on the list by name is replaced by the address that was found to be: looked up again, it may
        have another.
        """
        if self._allowed is None:
            return args, kwargs
        host = "unknown"
        try:
            host = str(self._handshake_parameters.get("host", args, kwargs))
            return self._handshake_parameters.replaced("host", self._allowed.destination(host), args, kwargs)
        except PeerNotAllowedError as refusal:
            return refusal
        except Exception as error:
            # What cannot be checked is not allowed.
            self.telemetry.failed("checking a peer", error)
            return PeerNotAllowedError(
                f"nixl_telemetry: the peer {host[:TEXT_LIMIT]!r} could not be checked: {error!r}"
            )

    @guarded
    def handshake_ends(self, error: BaseException | None) -> None:
        """The handshake of this thread ended."""
        handshake, _current.handshake = _current.handshake, None
        if handshake is None:
            return
        reason = handshake.finish(_failure(error) if error is not None else None)
        self._waiters.leave(handshake.peer.engine_id)
        self._receives.shook_hands(handshake.peer.engine_id, handshake.error, handshake.message)
        self._pushes.shook_hands(handshake.peer, handshake.error, handshake.message)
        if error is None:
            self._peers.meet(handshake.peer)
        elif reason:
            _put_in_front(error, reason)

    @guarded
    def handshake_wanted(self, engine_id: str) -> None:
        """Somebody on this thread needs a peer; a handshake follows, or is under way, unless it was had before."""
        if engine_id in self._worker._remote_agents:
            return
        engine_id = str(engine_id)[:TEXT_LIMIT]
        receive = _current.receive
        cause = receive.context if receive is not None else read(_current.registered) or read(_current.lease)
        if cause is not None:
            self._waiters.join(engine_id, cause)
        if receive is not None:
            receive.wants_handshake = True
        if _current.push is not None:
            self._pushes.deferred(engine_id, *_current.push)

    @guarded
    def acts_for_receive(self, request_id: str) -> None:
        """What follows on this thread is on behalf of a request that waits for KV."""
        _current.receive = self._receives.find(request_id)

    @guarded
    def acts_for_registration(self, request_id: str, registration: dict[str, Any]) -> None:
        """What follows on this thread is on behalf of a request whose KV another instance waits for."""
        registered_id = str(registration.get("request_id", ""))[:TEXT_LIMIT]
        _current.push, _current.met = (request_id, registered_id), True
        self._pushes.matched(request_id, registered_id)
        _current.registered = carried(registration.get(CARRIER))
        _current.lease = self._leases.get(request_id, NOTHING)

    @guarded
    def acts_for_nobody(self) -> None:
        """That is over."""
        _current.receive = _current.push = None
        _current.registered = _current.lease = NOTHING

    @guarded
    def registration_arrives(self) -> int:
        """A registration of the decode side is about to be looked at; how many wait."""
        _current.met = False
        return len(self._worker._pending_d_registrations)

    @guarded
    def registration_arrived(self, notification: bytes, waiting_before: int | None) -> None:
        """It was looked at: its push was started, or it waits."""
        pending = self._worker._pending_d_registrations
        if _current.met:
            return
        if waiting_before is not None and len(pending) > waiting_before:
            request_id = next(reversed(pending))
            get = pending[request_id].get
            sender = self._peers.at(get("decode_engine_id"), get("decode_host"), get("decode_port"))
            self._pushes.registered(request_id[:TEXT_LIMIT], sender)
        elif _request_of(notification) not in pending:
            self._pushes.unreadable()

    @guarded
    def registration_starts(self, request_id: str) -> None:
        """A registration is about to be sent."""
        receive = self._receives.find(request_id)
        if receive is not None:
            receive.reads(None)
        sent = self.transfers.sent
        sent.notifications = sent.failed_notifications = 0

    @guarded
    def registration_ends(self, request_id: str) -> None:
        """It was sent to all ranks of the peer, or not."""
        receive = self._receives.find(request_id)
        if receive is not None:
            receive.posted_ns = now_ns()
        sent = self.transfers.sent
        # vLLM raises nothing here, and sends nothing to a peer without agents.
        complete = sent.notifications and not sent.failed_notifications
        self.telemetry.record(PUSH_REGISTRATIONS, RegistrationEvent.SENT if complete else RegistrationEvent.FAILED)

    @guarded
    def registering(self) -> None:
        """The handshake of this thread has accepted a rank."""
        if _current.handshake is not None:
            _current.handshake.registering()

    @guarded
    def registered(self) -> None:
        """The handshake of this thread is through with a rank."""
        if _current.handshake is not None:
            _current.handshake.registered()

    @guarded
    def post_starts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Transfers to one rank of a peer are about to be posted for a request, on this thread."""
        arguments = self._post_parameters.named(args, kwargs) if args else kwargs
        spec = arguments["read_spec"]
        request = Request(
            arguments["request_id"],
            str(arguments["remote_request_id"])[:TEXT_LIMIT],
            self._peers.find(arguments["dst_engine_id"]),
            spec.remote_rank,
            spec.local_block_ids,
            spec.remote_block_ids,
            bool(getattr(spec, "block_ids_by_region", False)),
        )
        self.transfers.request = request
        request.receive = receive = self._receives.find(request.request_id)
        if receive is not None:
            deadline = receive.origin.lease_deadline
            receive.reads(self._lease_remaining(receive, deadline) if deadline is not None else None)
            return
        if self.telemetry.mode is TransferMode.PUSH:
            request.deliveries = self._deliveries
        request.registered, request.lease = _current.registered, _current.lease

    @guarded
    def post_ends(self) -> None:
        """They were posted, or not."""
        request, self.transfers.request = self.transfers.request, None
        if request is not None and request.receive is not None:
            request.receive.posted_ns = now_ns()

    @guarded
    def posts_end(self) -> None:
        """All that was to be posted in a step, was."""
        self._receives.notified(getattr(self._worker, "_invalid_remote_engines", ()))

    @guarded
    def notes_arrived(self, metadata: Any) -> None:
        """The scheduler's metadata for a step: what it noted for the handshakes to come."""
        # In pull it reads, though it serves nobody.
        if self.telemetry.mode is TransferMode.PUSH and self._only_replicates:
            return
        finished = getattr(metadata, "push_finished_blocks", None)
        if finished:
            self._pushes.blocks_ready(finished)
        notes = StepNotes.of(metadata) or StepNotes()
        if notes.leases:
            self._remember(self._leases, notes.leases, LeaseTable.LIMIT)
        if notes.conflicts:
            # Engines that never shake hands again may be among them.
            self._remember(self._conflicts, notes.conflicts, PeerBook.LIMIT)
        if notes.abandoned:
            self._receives.abandon(notes.abandoned, "the request ended while it waited")
        registrations = getattr(metadata, "push_registrations", None) or {}
        for request_id, meta in metadata.reqs_to_recv.items():
            self._start_receive(request_id, meta, registrations, notes.origins.get(request_id, NO_ORIGIN))

    @property
    def _only_replicates(self) -> bool:
        """Whether this rank serves nobody: the first of its group serves the KV that they share."""
        return getattr(self._worker, "pcp_rank", 0) > 0 and not getattr(self._worker, "pcp_dcp_sharded", False)

    def _remember(self, known: dict[str, Any], more: dict[str, Any], limit: int) -> None:
        """Add to a bounded map; the oldest go."""
        known |= more
        while len(known) > limit:
            known.pop(next(iter(known)))
            self.telemetry.record(TELEMETRY_DROPPED, Signal.HOOK)

    @guarded
    def _start_receive(self, request_id: str, meta: Any, registrations: dict[str, Any], origin: Origin) -> None:
        if self.telemetry.mode is TransferMode.PUSH and request_id not in registrations:
            return  # aborted before it was scheduled: nothing is sent, nothing will come
        remote = meta.remote
        receive = self._receives.start(
            request_id,
            str(remote.request_id)[:TEXT_LIMIT],
            self._peers.at(remote.engine_id, remote.host, remote.port),
            sum(map(len, meta.local_block_ids)),
            origin,
        )
        if request_id in registrations:
            if receive.context is not None:
                registrations[request_id][CARRIER] = inject(receive.context)
            receive.ids_differ = bool(receive.remote_request_id) and (
                get_base_request_id(request_id) != get_base_request_id(receive.remote_request_id)
            )

    @guarded
    def notified(self, request_ids: set[str]) -> None:
        """The decode side says that it has these."""
        for request_id in request_ids:
            self._deliveries.arrived(request_id)

    @guarded
    def results_arrived(self, results: Any) -> None:
        """The worker reports a step, in the way of vLLM 0.30 and later."""
        self._reported(results.finished_sending, results.finished_recving, results.failed_recving)

    @guarded
    def finished_arrived(self, finished: Any) -> None:
        """The worker reports a step, in the way of vLLM before 0.30."""
        sent, received = finished
        self._reported(sent, received, None)

    def _reported(self, sent: set[str], received: set[str], failed: set[str] | None) -> None:
        if received:
            for request_id in self._receives.finish(received, failed) or ():
                self.news.append(("failed", request_id, 0.0))
        if sent:
            late = self._deliveries.reported(sent)
            # A rank that only replicates others' KV reports all requests at once.
            if not self._only_replicates:
                for request_id in late:
                    self._expired[request_id] = None
                    self.news.append(("expired", request_id, 0.0))
                while len(self._expired) > LeaseTable.LIMIT:
                    self._expired.popitem(last=False)
            self._pushes.ended(sent)
            for request_id in sent:
                self._leases.pop(request_id, None)

    @guarded
    def shut_down(self) -> None:
        """The worker ends."""
        self._receives.shut_down()

    @guarded
    def notes_for_scheduler(self) -> WorkerNotes | None:
        """What the scheduler is to know of this step; ``None`` for nothing."""
        notes = WorkerNotes()
        # Only what is there now: other threads may keep adding.
        for _ in range(len(self.news)):
            kind, request_id, value = self.news.popleft()
            if kind == "expired":
                notes.expired.add(request_id)
            elif kind == "failed":
                notes.failed.add(request_id)
            elif kind == "renewed":
                notes.renewed[request_id] = value
            else:
                notes.invalid[request_id] = InvalidKv(kind)
        return notes or None

    @guarded
    def notification_arrived(self, message: bytes) -> None:
        """A peer's notification, before vLLM looks at it."""
        if message.startswith(_HEARTBEAT):
            self._renewed(message[len(_HEARTBEAT) :].decode("utf-8", "replace").split(","))
        elif not message.startswith(PUSH_REG_NOTIF_PREFIX):
            self._done_elsewhere(message.decode("utf-8", "replace").rpartition(":")[0])

    def _renewed(self, request_ids: list[str]) -> None:
        """A heartbeat of the decode side. vLLM is about to prolong those of these leases that it has."""
        held = [request_id for request_id in request_ids if request_id in self._worker._reqs_to_send]
        if held:
            self.telemetry.record(LEASE_RENEWALS, value=len(held))
            extension_s = float(getattr(self._worker, "_lease_extension", 0))
            self.news.extend(("renewed", request_id, extension_s) for request_id in held)

    def _done_elsewhere(self, request_id: str) -> None:
        """A peer is done with a request, which this instance may not know, or no longer."""
        worker = self._worker
        if request_id in worker._reqs_to_send or request_id in worker._reqs_to_process:
            # In pull vLLM waits for all ranks of the peer.
            if self.telemetry.mode is TransferMode.PUSH:
                self._deliveries.arrived(request_id)
        elif request_id not in worker._recving_metadata:
            reason = InvalidKv.READ_AFTER_EXPIRY if request_id in self._expired else InvalidKv.UNKNOWN_REQUEST
            self.news.append((reason, request_id[:TEXT_LIMIT], 0.0))

    def _lease_remaining(self, receive: Receive, deadline: float) -> float | None:
        """What is left of the peer's lease, by the offset of its clock that the handshake has found. Seconds."""
        offset = getattr(self._worker, "_engine_clock_offset", {}).get(receive.peer.engine_id)
        if offset is None:
            return None
        remaining_s = deadline - offset - time.perf_counter()
        # A client can write what it likes, and what a histogram has seen stays in its sum.
        return remaining_s if abs(remaining_s) < _LONGEST_LEASE_SECONDS else None

    @guarded
    def caches_registered(self, factors: list[dict[str, Any]], start_ns: int) -> None:
        """The KV caches are registered, hence the hash is known."""
        worker = self._worker
        # Other configs may have been hashed meanwhile.
        mine = next((seen for seen in factors if digest(seen) == worker.compat_hash), None)
        statement = self._state(mine) if mine is not None else None
        self._compatibility = self._judge(mine, statement)
        announce(
            self.telemetry,
            self._compatibility,
            versions=(vllm_version(), nixl_version()),
            kv_role=self._kv_role,
            start_ns=start_ns,
            conflict=self._mode.compare(
                ConflictSource.CLASS,
                getattr(worker, "_TRANSFER_MODE", self.telemetry.mode),
                {semconv.CODE_CLASS: type(worker).__name__},
            ),
        )
        if statement is not None:
            add_statement(worker, statement)

    @guarded
    def _state(self, factors: Factors) -> Statement | None:
        return statement_of(self._worker, factors)

    def _judge(self, factors: Factors | None, statement: Statement | None) -> Compatibility:
        worker = self._worker
        enforced = bool(worker.enforce_compat_hash)
        return Compatibility(self.telemetry, str(worker.compat_hash), enforced, self._kv_role, factors, statement)

    @property
    def _kv_role(self) -> str:
        return str(self._worker.kv_transfer_config.kv_role)

    @guarded
    def with_updates(self, stats: TelemetryStats | None) -> TelemetryStats | None:
        """The stats of a step with the metric updates in them; ``None`` when there are none."""
        return with_updates(stats, self.telemetry.drain())


def _put_in_front(error: BaseException, reason: str) -> None:
    """Make the reason the first line of vLLM's text; its type and the rest stay."""
    match error.args:
        case (str(text),):
            error.args = (f"{reason}\n{text}",)


_News: TypeAlias = tuple[str, str, float]
"""What happened, as one of the notes' names or an :class:`InvalidKv`; to which request; and a value."""

_HEARTBEAT: Final = b"HB:"
_LONGEST_LEASE_SECONDS: Final = 86_400.0


def _request_of(notification: bytes) -> str | None:
    """The request that a registration is for; ``None`` where vLLM cannot read it."""
    try:
        registration = msgspec.msgpack.decode(notification[len(PUSH_REG_NOTIF_PREFIX) :])
        request_id = registration["request_id"]
    except Exception:
        return None
    return request_id if isinstance(request_id, str) else None


def _failure(error: BaseException) -> Failure:
    return Failure(
        error,
        timed_out=isinstance(error, zmq.ZMQError),
        undecodable=isinstance(error.__cause__ or error, msgspec.MsgspecError),
        from_agent=is_nixl_error(error),
        not_allowed=isinstance(error, PeerNotAllowedError),
        unsupported=isinstance(error, NotImplementedError | ValueError),
        direct=_raised_in(error) == "_nixl_handshake",
    )


def _raised_in(error: BaseException) -> str:
    """Name of the function that raised."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_name if trace is not None else ""
