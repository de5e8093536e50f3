# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Hooks on the worker: handshakes, registration of the KV caches, and which request a transfer is for.

What is touched, and why nothing public serves:

- ``_nixl_handshake``: the only place where a handshake begins and ends; it runs on a thread of the worker's.
- ``add_remote_agent``, ``_add_notif_only_remote_agent``: between the checks and the registration of a rank.
- ``NixlHandshakePayload`` in ``base_worker``'s namespace: see payload.py.
- ``_read_blocks``, ``_xfer_blocks``: the NIXL agent is not told for which request or peer a transfer is.
- ``_compute_desc_ids``: the block ids that are really moved, after prefix caching has trimmed them.
- ``register_kv_caches``: where the compatibility hash is computed.
- ``_ensure_handshake``, ``_background_nixl_handshake``, ``_send_registration_to_p``, ``_do_start_push_kv``: which
  request asks for a handshake. The last one also has D's registration, with the trace context in it.
- ``_read_blocks_for_req``: when all that was to be posted for a request now, was.
- ``_do_send_reg_notif``: when a registration is really sent.
- ``_get_new_notifs``: which requests were fetched; others that vLLM reports as sent have expired.
- ``get_transfer_results`` (from 0.30 on) and ``get_finished``: which requests have their KV, or failed.

Checked in vLLM 0.28.0 to 0.33.0. Where one is missing, what it shows stays invisible and everything else works.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import zmq
from opentelemetry.trace import SpanContext
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker

from nixl_telemetry.compat.factors import Factors, digest
from nixl_telemetry.compat.statement import Statement
from nixl_telemetry.operations.allowed_peers import AllowedPeers, PeerNotAllowedError
from nixl_telemetry.operations.compatibility import Compatibility
from nixl_telemetry.operations.errors import TEXT_LIMIT
from nixl_telemetry.operations.handshake import Current, Failure, Handshake, Waiters
from nixl_telemetry.operations.lease import Deliveries, LeaseTable
from nixl_telemetry.operations.mode import ModeCheck, ModeConflict
from nixl_telemetry.operations.peer import Peer, PeerBook
from nixl_telemetry.operations.receive import NO_ORIGIN, Origin, ReceiveTable
from nixl_telemetry.operations.startup import announce
from nixl_telemetry.operations.transfer import Request, TransferTable
from nixl_telemetry.seam.capture import seeing_factors
from nixl_telemetry.seam.carrier import StepNotes, WorkerNotes, has_notes
from nixl_telemetry.seam.payload import add_statement, statement_of
from nixl_telemetry.seam.stats import TelemetryStats, with_updates
from nixl_telemetry.seam.versions import Parameters, is_nixl_error, nixl_version, vllm_version
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.catalogue import TELEMETRY_DROPPED
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.propagation import CARRIER, extract, inject
from nixl_telemetry.signals.semconv import ConflictSource, Purpose, Signal, TransferMode
from nixl_telemetry.signals.telemetry import Telemetry, guarded

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker import NixlBaseConnectorWorker as _Stock
else:
    _Stock = object

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
        self.updates = telemetry.updates
        self.transfers = transfers
        self._worker = worker
        self._compatibility: Compatibility | None = None
        self._peers = PeerBook()
        self._conflicts: dict[str, ModeConflict] = {}
        self._receives = ReceiveTable(telemetry)
        self._waiters = Waiters()
        self._leases: dict[str, SpanContext] = {}
        self._deliveries = Deliveries()
        self.expired: set[str] = set()
        """Requests whose lease has expired and whose scheduler does not know that yet."""
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

        peer = _peer(argument("expected_engine_id"), argument("host"), argument("port"))
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
        )
        return _current.handshake

    @guarded
    def destination(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | PeerNotAllowedError:
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
        if error is None:
            self._peers.meet(handshake.peer)
        elif reason:
            _put_in_front(error, reason)

    @guarded
    def handshake_wanted(self, engine_id: str) -> None:
        """Somebody on this thread needs a peer; a handshake follows, or is under way, unless it was had before."""
        if _current.cause is not None and engine_id not in self._worker._remote_agents:
            self._waiters.join(str(engine_id)[:TEXT_LIMIT], _current.cause)

    @guarded
    def acts_for_receive(self, request_id: str) -> None:
        """What follows on this thread is on behalf of a request that waits for KV."""
        receive = self._receives.find(request_id)
        _current.cause = receive.context if receive is not None else None

    @guarded
    def acts_for_registration(self, request_id: str, registration: dict[str, Any]) -> None:
        """What follows on this thread is on behalf of a request whose KV another instance waits for."""
        _current.registered = extract(registration.get(CARRIER))
        _current.lease = self._leases.get(request_id)
        _current.cause = _current.registered or _current.lease

    @guarded
    def acts_for_nobody(self) -> None:
        """That is over."""
        _current.cause = _current.registered = _current.lease = None

    @guarded
    def registration_starts(self, request_id: str) -> None:
        """A registration is about to be sent."""
        receive = self._receives.find(request_id)
        if receive is not None:
            receive.turn_ns = now_ns()

    @guarded
    def registration_ends(self, request_id: str) -> None:
        """It was sent, or not."""
        receive = self._receives.find(request_id)
        if receive is not None:
            receive.posted_ns = now_ns()

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
        arguments = self._post_parameters.named(args, kwargs)
        spec = arguments["read_spec"]
        request = Request(
            arguments["request_id"],
            arguments["remote_request_id"],
            self._peers.find(arguments["dst_engine_id"]),
            spec.remote_rank,
            spec.local_block_ids,
            spec.remote_block_ids,
            bool(getattr(spec, "block_ids_by_region", False)),
        )
        self.transfers.current.request = request
        receive = self._receives.find(request.request_id)
        if receive is not None:
            receive.turn_ns = receive.turn_ns or now_ns()
            request.parent, request.receive = receive.context, receive
            return
        if self.telemetry.mode is TransferMode.PUSH:
            request.deliveries = self._deliveries
        if _current.registered is not None:
            request.parent, request.links = _current.registered, (_current.lease,) if _current.lease else ()
        else:
            request.parent = _current.lease

    @guarded
    def post_ends(self) -> None:
        """They were posted, or not."""
        request, self.transfers.current.request = self.transfers.current.request, None
        if request is not None and request.receive is not None:
            request.receive.posted_ns = now_ns()

    @guarded
    def posts_end(self, request_id: str) -> None:
        """All that was to be posted for a request now, was."""
        receive = self._receives.find(request_id)
        if receive is not None and not receive.blocks:
            invalid = getattr(self._worker, "_invalid_remote_engines", ())
            self._receives.notified(request_id, receive.peer.engine_id not in invalid)

    @guarded
    def notes_arrived(self, metadata: Any) -> None:
        """The scheduler's metadata for a step: what it noted for the handshakes to come."""
        # In pull it reads, though it serves nobody.
        if self._only_replicates and self.telemetry.mode is TransferMode.PUSH:
            return
        notes = StepNotes.of(metadata) or StepNotes()
        self._remember(self._leases, notes.leases, LeaseTable.LIMIT)
        # Engines that never shake hands again may be among them.
        self._remember(self._conflicts, notes.conflicts, PeerBook.LIMIT)
        if notes.abandoned:
            self._receives.abandon(notes.abandoned, "the request ended while it waited")
        for request_id, meta in metadata.reqs_to_recv.items():
            self._start_receive(request_id, meta, metadata, notes.origins.get(request_id, NO_ORIGIN))

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
    def _start_receive(self, request_id: str, meta: Any, metadata: Any, origin: Origin) -> None:
        registrations = getattr(metadata, "push_registrations", None) or {}
        if self.telemetry.mode is TransferMode.PUSH and request_id not in registrations:
            return  # aborted before it was scheduled: nothing is sent, nothing will come
        remote = meta.remote
        receive = self._receives.start(
            request_id,
            str(remote.request_id)[:TEXT_LIMIT],
            _peer(remote.engine_id, remote.host, remote.port),
            sum(map(len, meta.local_block_ids)),
            origin,
        )
        if request_id in registrations and receive.context is not None:
            registrations[request_id][CARRIER] = inject(receive.context)

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
            self._receives.finish(received, failed)
        if sent:
            late = self._deliveries.reported(sent)
            # A rank that only replicates others' KV reports all requests at once.
            if not self._only_replicates:
                self.expired |= late
            for request_id in sent:
                self._leases.pop(request_id, None)

    @guarded
    def shut_down(self) -> None:
        """The worker ends."""
        self._receives.shut_down()

    @guarded
    def notes_for_scheduler(self) -> WorkerNotes | None:
        """What the scheduler is to know of this step; ``None`` for nothing."""
        if not self.expired:
            return None
        expired, self.expired = self.expired, set()
        return WorkerNotes(expired)

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


class WorkerHooks(_Stock):
    """Goes in front of vLLM's pull and push workers.

    What is called in each step looks for itself whether there is anything to do: nearly always there is not, and the
    code of a busy engine's rare calls is in no cache.
    """

    _nixl_telemetry: WorkerObserver
    _nixl_telemetry_optional = frozenset({"get_transfer_results"})

    def _nixl_handshake(self, *args: Any, **kwargs: Any) -> Any:
        observer = self._nixl_telemetry
        observer.handshake_starts(args, kwargs)
        try:
            args, kwargs = _permitted(observer.destination(args, kwargs)) or (args, kwargs)
            result = super()._nixl_handshake(*args, **kwargs)
        except BaseException as error:
            observer.handshake_ends(error)
            raise
        observer.handshake_ends(None)
        return result

    def add_remote_agent(self, *args: Any, **kwargs: Any) -> Any:
        self._nixl_telemetry.registering()
        result = super().add_remote_agent(*args, **kwargs)
        self._nixl_telemetry.registered()
        return result

    def _add_notif_only_remote_agent(self, *args: Any, **kwargs: Any) -> Any:
        self._nixl_telemetry.registering()
        result = super()._add_notif_only_remote_agent(*args, **kwargs)
        self._nixl_telemetry.registered()
        return result

    def _compute_desc_ids(self, *args: Any, **kwargs: Any) -> Any:
        request = self._nixl_telemetry.transfers.current.request
        # vLLM passes keywords only, and no ratio for the remote side.
        if request is not None and "block_ids" in kwargs:
            if kwargs.get("block_size_ratio") is None:
                request.remote_blocks = kwargs["block_ids"]
            else:
                request.local_blocks = kwargs["block_ids"]
        return super()._compute_desc_ids(*args, **kwargs)

    def _ensure_handshake(self, engine_id: Any, *args: Any, **kwargs: Any) -> Any:
        self._nixl_telemetry.handshake_wanted(engine_id)
        return super()._ensure_handshake(engine_id, *args, **kwargs)

    def _get_new_notifs(self) -> Any:
        notified = super()._get_new_notifs()
        if notified:
            self._nixl_telemetry.notified(notified)
        return notified

    def get_transfer_results(self) -> Any:
        results = super().get_transfer_results()
        if getattr(results, "finished_sending", True) or getattr(results, "finished_recving", True):
            self._nixl_telemetry.results_arrived(results)
        return results

    def get_finished(self, *args: Any, **kwargs: Any) -> Any:
        finished = super().get_finished(*args, **kwargs)
        # From 0.30 on it calls the former.
        if not hasattr(super(), "get_transfer_results"):
            self._nixl_telemetry.finished_arrived(finished)
        return finished

    def start_load_kv(self, metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if has_notes(metadata) or getattr(metadata, "reqs_to_recv", True):
            self._nixl_telemetry.notes_arrived(metadata)
        return super().start_load_kv(metadata, *args, **kwargs)

    def register_kv_caches(self, *args: Any, **kwargs: Any) -> Any:
        start_ns = now_ns()
        with seeing_factors() as factors:
            result = super().register_kv_caches(*args, **kwargs)
        self._nixl_telemetry.caches_registered(factors, start_ns)
        return result

    def get_kv_connector_stats(self) -> Any:
        stats = super().get_kv_connector_stats()
        observer = self._nixl_telemetry
        return (observer.with_updates(stats) or stats) if observer.updates else stats


class PullWorkerHooks(WorkerHooks):
    """For the pull worker, which READs."""

    def _background_nixl_handshake(self, req_id: Any, *args: Any, **kwargs: Any) -> Any:
        observer = self._nixl_telemetry
        observer.acts_for_receive(req_id)
        try:
            return super()._background_nixl_handshake(req_id, *args, **kwargs)
        finally:
            observer.acts_for_nobody()

    def _read_blocks_for_req(self, req_id: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._read_blocks_for_req(req_id, *args, **kwargs)
        finally:
            self._nixl_telemetry.posts_end(req_id)

    def _read_blocks(self, *args: Any, **kwargs: Any) -> Any:
        self._nixl_telemetry.post_starts(args, kwargs)
        try:
            return super()._read_blocks(*args, **kwargs)
        finally:
            self._nixl_telemetry.post_ends()


class PushWorkerHooks(WorkerHooks):
    """For the push worker, which WRITEs, on a thread of its own."""

    def _send_registration_to_p(self, req_id: Any, *args: Any, **kwargs: Any) -> Any:
        observer = self._nixl_telemetry
        observer.acts_for_receive(req_id)
        try:
            return super()._send_registration_to_p(req_id, *args, **kwargs)
        finally:
            observer.acts_for_nobody()

    def _do_send_reg_notif(self, req_id: Any, *args: Any, **kwargs: Any) -> Any:
        observer = self._nixl_telemetry
        observer.registration_starts(req_id)
        try:
            return super()._do_send_reg_notif(req_id, *args, **kwargs)
        finally:
            observer.registration_ends(req_id)

    def _do_start_push_kv(
        self, request_id: Any, local_block_ids: Any, registration_data: Any, *args: Any, **kwargs: Any
    ) -> Any:
        observer = self._nixl_telemetry
        observer.acts_for_registration(request_id, registration_data)
        try:
            return super()._do_start_push_kv(request_id, local_block_ids, registration_data, *args, **kwargs)
        finally:
            observer.acts_for_nobody()

    def _xfer_blocks(self, *args: Any, **kwargs: Any) -> Any:
        self._nixl_telemetry.post_starts(args, kwargs)
        try:
            return super()._xfer_blocks(*args, **kwargs)
        finally:
            self._nixl_telemetry.post_ends()


def _peer(engine_id: object, host: object, port: object) -> Peer:
    """A peer as a client's request names it: with anything where its address should be."""
    number = port if isinstance(port, int) else int(port) if isinstance(port, str) and port.isdecimal() else 0
    return Peer(str(engine_id)[:TEXT_LIMIT], str(host)[:TEXT_LIMIT], number)


_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def _permitted(destination: _Arguments | PeerNotAllowedError | None) -> _Arguments | None:
    """Raise the one exception of ours that is meant for vLLM: it fails the requests that wait for this peer."""
    if isinstance(destination, PeerNotAllowedError):
        raise destination
    return destination


def _put_in_front(error: BaseException, reason: str) -> None:
    """Make the reason the first line of vLLM's text; its type and the rest stay."""
    match error.args:
        case (str(text),):
            error.args = (f"{reason}\n{text}",)


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
