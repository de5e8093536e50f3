# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Hooks on the scheduler side: what requests say of their transfer mode and trace, and the leases on finished ones.

The connector's public scheduler methods forward to these, so nothing private is touched but the object itself, and the
target of the listener's thread, see listener.py.
"""

import inspect
import time
from collections.abc import Collection
from typing import Any, Final

from nixl_telemetry.operations.allowed_peers import AllowedPeers
from nixl_telemetry.operations.handshake_request import HandshakeRequests
from nixl_telemetry.operations.lease import LeaseTable
from nixl_telemetry.operations.mode import ModeCheck
from nixl_telemetry.operations.peer import port_number
from nixl_telemetry.operations.receive import NO_ORIGIN, Origin
from nixl_telemetry.operations.tripwires import Tripwires
from nixl_telemetry.seam.carrier import StepNotes, WorkerNotes
from nixl_telemetry.seam.instrument import Hooks
from nixl_telemetry.seam.listener import PARAMETERS, HandshakeListener
from nixl_telemetry.seam.stats import TelemetryStats, with_updates
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.catalogue import TELEMETRY_DROPPED
from nixl_telemetry.signals.propagation import CARRIER, NOTHING, carried, carrier_of, extract
from nixl_telemetry.signals.semconv import ConflictSource, InvalidKv, RequestRole, Signal, TransferMode
from nixl_telemetry.signals.telemetry import Telemetry, guarded

_NOTES_LIMIT: Final = 1024
_ROLES: Final = {"kv_producer": RequestRole.PREFILL, "kv_consumer": RequestRole.DECODE}
_SERVED: Final = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")
"""Names of vLLM's ``RequestStatus``: the client has an answer."""
_DEADLINE: Final = "lease_deadline"
"""Key of ours beside the trace context in ``kv_transfer_params``: when the lease ends, by the clock of this process."""
_LATEST_SECONDS: Final = 1e12
"""Beyond any clock; JSON as Python reads it also has numbers that are none."""
_TEXT_LIMIT: Final = 256
"""Characters that are kept of what a request says: its parameters come from a client."""


class SchedulerObserver:
    """What a scheduler's hooks report to.

    Args:
        telemetry: The hub.
        scheduler: The stock scheduler.
        config: vLLM's ``KVTransferConfig``.
    """

    def __init__(self, telemetry: Telemetry, scheduler: Any, config: Any) -> None:
        self.telemetry = telemetry
        self._mode = ModeCheck(telemetry)
        self._notes = StepNotes()
        self._scheduler = scheduler
        self._leases = LeaseTable(telemetry)
        self._tripwires = Tripwires(telemetry)
        self._role = _ROLES.get(str(config.kv_role))
        self._recomputes = getattr(config, "kv_load_failure_policy", "fail") == "recompute"
        self._failed_loads: set[str] = set()
        """Requests whose KV could not be received, until they end."""
        self.requests = HandshakeRequests(telemetry)
        self.unsent: Final[tuple[Collection[object], ...]] = (telemetry.updates, self.requests.unreported)
        """What the next stats have to take; mostly empty."""
        self._expired: set[str] = set()
        self._origins: dict[str, Origin] = {}
        self._waiting: set[str] = set()
        """Requests whose KV a worker was asked for and has not reported."""
        self._ended: set[str] = set()
        """Requests that ended since the last step."""
        self.stepped = False
        """Whether a step was built since the start."""
        self.has_notes = True
        """Whether the next step has something to be noted, whatever is in it."""
        declared = getattr(scheduler, "_TRANSFER_MODE", telemetry.mode)
        self._mode.compare(ConflictSource.CLASS, declared, {semconv.CODE_CLASS: type(scheduler).__name__})

    @guarded
    def request_arrived(self, request: Any) -> None:
        """A request came in. A decode request of the other mode is named here, before its handshake fails."""
        params = request.kv_transfer_params
        self._check_params(request, params if isinstance(params, dict) else {})
        if not isinstance(params, dict):
            return
        # In either direction: a prefill may read what an earlier turn left on the decode side.
        if params.get("do_remote_prefill") or params.get("remote_block_ids"):
            self._remember_origin(request, params)
        # When a load has failed, vLLM adds a request that it aborts at once, so that P's blocks are freed.
        if getattr(request, "abort_immediately", False):
            return
        if not params.get("do_remote_prefill") or "transfer_mode" not in params:
            return
        engine_id = str(params.get("remote_engine_id", ""))[:_TEXT_LIMIT]
        conflict = self._mode.compare(
            ConflictSource.PARAMS,
            str(params["transfer_mode"])[:_TEXT_LIMIT],
            {
                semconv.REQUEST_ID: request.request_id,
                semconv.REMOTE_ENGINE_ID: engine_id,
                semconv.SERVER_ADDRESS: str(params.get("remote_host", ""))[:_TEXT_LIMIT],
                semconv.SERVER_PORT: port_number(params.get("remote_port")),
            },
        )
        if conflict is None:
            return
        if len(self._notes.conflicts) < _NOTES_LIMIT:
            self._notes.conflicts[engine_id] = conflict
            self.has_notes = True
        else:
            self.telemetry.record(TELEMETRY_DROPPED, Signal.HOOK)

    def _check_params(self, request: Any, params: dict[str, Any]) -> None:
        """Whether it says where its KV is, or that somebody will fetch it."""
        says = params.get("do_remote_prefill") or params.get("remote_block_ids") or params.get("do_remote_decode")
        if self._role is not None and not says:
            self._tripwires.without_params(self._role, request.request_id, extract(request.trace_headers))

    def _remember_origin(self, request: Any, params: dict[str, Any]) -> None:
        carrier = params.get(CARRIER)
        origin = Origin(carried(request.trace_headers), carried(carrier), _deadline(carrier))
        if origin == NO_ORIGIN:
            return
        if len(self._origins) < LeaseTable.LIMIT:
            self._origins[request.request_id] = origin
        else:
            self.telemetry.record(TELEMETRY_DROPPED, Signal.HOOK)

    @guarded
    def request_finished(self, request: Any, result: Any) -> None:
        """A request is finished; the result says whether its blocks are held, and what the decode side is told."""
        if request.request_id in self._failed_loads:
            self._failed_loads.discard(request.request_id)
            self._served_after_failed_load(request)
        # Not forgotten at once: where it ends before it was scheduled, a worker still tells the peer, in the next step.
        if self._origins or self._waiting:
            self._ended.add(request.request_id)
            self.has_notes = True
        is_held, handed_over = result
        if not is_held:
            return
        # The next step has its blocks in its metadata.
        self.has_notes |= self.telemetry.mode is TransferMode.PUSH
        if not isinstance(handed_over, dict):
            return
        blocks = sum(map(len, handed_over["remote_block_ids"]))
        # Where vLLM keeps the moment at which its workers are to free the blocks, by this process's clock.
        deadline = getattr(self._scheduler, "_reqs_need_send", {}).get(request.request_id)
        granted_s = deadline - time.perf_counter() if deadline is not None else None
        lease = self._leases.open(request.request_id, blocks, carried(request.trace_headers), granted_s)
        carrier: dict[str, Any] = {} if deadline is None else {_DEADLINE: deadline}
        if lease is not None and lease.context is not NOTHING:
            carrier |= carrier_of(lease.context)
            if self.telemetry.mode is TransferMode.PUSH:
                self._notes.leases[lease.request_id] = lease.context
        if carrier:
            handed_over[CARRIER] = carrier

    def _served_after_failed_load(self, request: Any) -> None:
        if getattr(request.status, "name", "") not in _SERVED:
            return
        reason = InvalidKv.FAILED_LOAD_RECOMPUTED if self._recomputes else InvalidKv.FAILED_LOAD_SERVED
        self._tripwires.invalid_kv(reason, request.request_id, extract(request.trace_headers))

    @guarded
    def output_arrived(self, output: Any) -> None:
        """The workers report a step."""
        notes = output.kv_connector_worker_meta
        # Asking an abstract class is slow, and nearly always there is nothing to ask about.
        if notes is not None and isinstance(notes, WorkerNotes):
            self._noted(notes)
        if output.finished_recving:
            self._waiting -= output.finished_recving
        if output.finished_sending:
            self._leases.close(output.finished_sending, self._expired)
            if self._expired:
                self._expired -= output.finished_sending

    def _noted(self, notes: WorkerNotes) -> None:
        # Ranks may differ by a step, and vLLM frees when all are done.
        self._expired |= notes.expired
        for request_id, remaining_s in notes.renewed.items():
            self._leases.renew(request_id, remaining_s)
        for request_id, reason in notes.invalid.items():
            lease = self._leases.find(request_id)
            self._tripwires.invalid_kv(reason, request_id, lease.span_context if lease is not None else None)
        if len(self._failed_loads) < LeaseTable.LIMIT:
            self._failed_loads |= notes.failed

    @guarded
    def step_built(self, metadata: Any) -> None:
        """The metadata of a step is ready for the workers."""
        self.stepped, self.has_notes = True, False
        notes, self._notes = self._notes, StepNotes()
        # Even where nothing is noted: the workers look at a step's requests and blocks only if there are notes.
        notes.attach(metadata)
        if self._ended:
            notes.abandoned = self._waiting & self._ended
            self._waiting -= self._ended
        for request_id in metadata.reqs_to_recv:
            if request_id in self._origins:
                notes.origins[request_id] = self._origins.pop(request_id)
            if request_id not in self._ended and len(self._waiting) < LeaseTable.LIMIT:
                self._waiting.add(request_id)
        if self._ended:
            for request_id in self._ended:
                self._origins.pop(request_id, None)
            self._ended = set()

    @guarded
    def shut_down(self) -> None:
        """The engine ends."""
        self._leases.shut_down()

    @guarded
    def listened(self, stock: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Answer handshakes on this thread until vLLM asks to stop; false where vLLM's own listener has to.

        Args:
            stock: That listener.
            args: What it is called with.
            kwargs: The same.
        """
        settings = self.telemetry.settings
        if not settings.listener:
            if settings.allowed_peers is not None:
                self._stock_listens("the setting listener is false")
            return False
        signature = inspect.signature(stock)
        if tuple(signature.parameters) != PARAMETERS:
            self._stock_listens(f"it takes other arguments in this version: {', '.join(signature.parameters)}")
            return False
        given = signature.bind(*args, **kwargs).arguments
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG

        listener = HandshakeListener(
            GET_META_MSG,
            given["encoded_data"],
            self.requests,
            AllowedPeers(settings.allowed_peers) if settings.allowed_peers is not None else None,
            lambda error: self.telemetry.failed("the handshake listener", error),
        )
        try:
            try:
                listener.bind(given["host"], given["port"])
            except OSError as error:
                self._stock_listens(f"{given['host']}:{given['port']} cannot be listened at: {error}")
                return False
            given["ready_event"].set()
            listener.serve(given["stop_event"])
        finally:
            listener.close()
        return True

    def _stock_listens(self, reason: str) -> None:
        allowed = self.telemetry.settings.allowed_peers
        also = " Who asks it is not checked against allowed_peers." if allowed is not None else ""
        self.telemetry.warn_once("listener", "vLLM's own handshake listener is used: %s.%s", reason, also)

    @guarded
    def with_updates(self, stats: TelemetryStats | None) -> TelemetryStats | None:
        """The stats of a step with the metric updates in them; ``None`` when there are none."""
        if self.requests.unreported:
            self.requests.report()
        return with_updates(stats, self.telemetry.drain())


def _deadline(carrier: object) -> float | None:
    """When the peer's lease ends, as a client's request says; ``None`` for whatever is no moment."""
    deadline = carrier.get(_DEADLINE) if isinstance(carrier, dict) else None
    return float(deadline) if isinstance(deadline, int | float) and abs(deadline) < _LATEST_SECONDS else None


class SchedulerHooks(Hooks):
    """Goes in front of vLLM's pull and push schedulers; as in the worker, each step's hooks look for themselves."""

    _nixl_telemetry: SchedulerObserver

    def on_new_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._nixl_telemetry.request_arrived(request)
        return self._stock_class.on_new_request(self, request, *args, **kwargs)

    def request_finished(self, request: Any, block_ids: Any, *args: Any, **kwargs: Any) -> Any:
        result = self._stock_class.request_finished(self, request, block_ids, *args, **kwargs)
        self._nixl_telemetry.request_finished(request, result)
        return result

    def update_connector_output(self, connector_output: Any) -> Any:
        result = self._stock_class.update_connector_output(self, connector_output)
        if (
            getattr(connector_output, "finished_sending", True)
            or getattr(connector_output, "finished_recving", True)
            or getattr(connector_output, "kv_connector_worker_meta", None) is not None
        ):
            self._nixl_telemetry.output_arrived(connector_output)
        return result

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        metadata = self._stock_class.build_connector_meta(self, scheduler_output)
        observer = self._nixl_telemetry
        if observer.has_notes or getattr(metadata, "reqs_to_recv", True):
            observer.step_built(metadata)
        return metadata

    def _nixl_handshake_listener(self, *args: Any, **kwargs: Any) -> Any:
        stock = self._stock_class._nixl_handshake_listener
        return None if self._nixl_telemetry.listened(stock, args, kwargs) else stock(*args, **kwargs)
