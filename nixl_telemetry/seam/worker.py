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
- ``_do_send_reg_notif``: when a registration is really sent.
- ``_handle_push_reg_notif``: that a registration came, and whether its request's blocks were there.
- ``_get_new_notifs`` (pull): which requests were fetched; others that vLLM reports as sent have expired.
- ``get_transfer_results`` (from 0.30 on) and ``get_finished``: which requests have their KV, or failed.

Checked in vLLM 0.28.0 to 0.33.0. Where one is missing, what it shows stays invisible and everything else works.
"""

from typing import Any

from nixl_telemetry.operations.allowed_peers import PeerNotAllowedError
from nixl_telemetry.seam.capture import seeing_factors
from nixl_telemetry.seam.carrier import NOTES
from nixl_telemetry.seam.instrument import Hooks
from nixl_telemetry.seam.worker_observer import Arguments, WorkerObserver
from nixl_telemetry.signals.clock import now_ns


class WorkerHooks(Hooks):
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
            result = self._stock_class._nixl_handshake(self, *args, **kwargs)
        except BaseException as error:
            observer.handshake_ends(error)
            raise
        observer.handshake_ends(None)
        return result

    def add_remote_agent(self, *args: Any, **kwargs: Any) -> Any:
        self._nixl_telemetry.registering()
        result = self._stock_class.add_remote_agent(self, *args, **kwargs)
        self._nixl_telemetry.registered()
        return result

    def _add_notif_only_remote_agent(self, *args: Any, **kwargs: Any) -> Any:
        self._nixl_telemetry.registering()
        result = self._stock_class._add_notif_only_remote_agent(self, *args, **kwargs)
        self._nixl_telemetry.registered()
        return result

    def _compute_desc_ids(self, *args: Any, **kwargs: Any) -> Any:
        request = self._nixl_telemetry.transfers.request
        # vLLM passes keywords only, and no ratio for the remote side.
        if request is not None and "block_ids" in kwargs:
            if kwargs.get("block_size_ratio") is None:
                request.remote_blocks = kwargs["block_ids"]
            else:
                request.local_blocks = kwargs["block_ids"]
        return self._stock_class._compute_desc_ids(self, *args, **kwargs)

    def _ensure_handshake(self, engine_id: Any, *args: Any, **kwargs: Any) -> Any:
        self._nixl_telemetry.handshake_wanted(engine_id)
        return self._stock_class._ensure_handshake(self, engine_id, *args, **kwargs)

    def get_transfer_results(self) -> Any:
        results = self._stock_class.get_transfer_results(self)
        if getattr(results, "finished_sending", True) or getattr(results, "finished_recving", True):
            self._nixl_telemetry.results_arrived(results)
        return results

    def get_finished(self, *args: Any, **kwargs: Any) -> Any:
        finished = self._stock_class.get_finished(self, *args, **kwargs)
        # From 0.30 on it calls the former.
        if not hasattr(self._stock_class, "get_transfer_results"):
            self._nixl_telemetry.finished_arrived(finished)
        return finished

    def register_kv_caches(self, *args: Any, **kwargs: Any) -> Any:
        start_ns = now_ns()
        with seeing_factors() as factors:
            result = self._stock_class.register_kv_caches(self, *args, **kwargs)
        self._nixl_telemetry.caches_registered(factors, start_ns)
        return result


class PullWorkerHooks(WorkerHooks):
    """For the pull worker, which READs."""

    def _get_new_notifs(self) -> Any:
        notified = self._stock_class._get_new_notifs(self)
        if notified:
            self._nixl_telemetry.notified(notified)
        return notified

    def start_load_kv(self, metadata: Any) -> Any:
        observer = self._nixl_telemetry
        if hasattr(metadata, NOTES):
            observer.notes_arrived(metadata)
        try:
            return self._stock_class.start_load_kv(self, metadata)
        finally:
            if observer.untold:
                observer.posts_end()

    def _background_nixl_handshake(self, req_id: Any, *args: Any, **kwargs: Any) -> Any:
        observer = self._nixl_telemetry
        observer.acts_for_receive(req_id)
        try:
            return self._stock_class._background_nixl_handshake(self, req_id, *args, **kwargs)
        finally:
            observer.acts_for_nobody()

    def _read_blocks(self, *args: Any, **kwargs: Any) -> Any:
        self._nixl_telemetry.post_starts(args, kwargs)
        try:
            return self._stock_class._read_blocks(self, *args, **kwargs)
        finally:
            self._nixl_telemetry.post_ends()


class PushWorkerHooks(WorkerHooks):
    """For the push worker, which WRITEs, on a thread of its own."""

    def start_load_kv(self, metadata: Any) -> Any:
        if hasattr(metadata, NOTES):
            self._nixl_telemetry.notes_arrived(metadata)
        return self._stock_class.start_load_kv(self, metadata)

    def _send_registration_to_p(self, req_id: Any, *args: Any, **kwargs: Any) -> Any:
        observer = self._nixl_telemetry
        observer.acts_for_receive(req_id)
        try:
            return self._stock_class._send_registration_to_p(self, req_id, *args, **kwargs)
        finally:
            observer.acts_for_nobody()

    def _do_send_reg_notif(self, req_id: Any, *args: Any, **kwargs: Any) -> Any:
        observer = self._nixl_telemetry
        observer.registration_starts(req_id)
        try:
            return self._stock_class._do_send_reg_notif(self, req_id, *args, **kwargs)
        finally:
            observer.registration_ends(req_id)

    def _handle_push_reg_notif(self, notif: Any, *args: Any, **kwargs: Any) -> Any:
        observer = self._nixl_telemetry
        waiting = observer.registration_arrives()
        try:
            return self._stock_class._handle_push_reg_notif(self, notif, *args, **kwargs)
        finally:
            observer.registration_arrived(notif, waiting)

    def _do_start_push_kv(
        self, request_id: Any, local_block_ids: Any, registration_data: Any, *args: Any, **kwargs: Any
    ) -> Any:
        observer = self._nixl_telemetry
        observer.acts_for_registration(request_id, registration_data)
        try:
            return self._stock_class._do_start_push_kv(
                self, request_id, local_block_ids, registration_data, *args, **kwargs
            )
        finally:
            observer.acts_for_nobody()

    def _xfer_blocks(self, *args: Any, **kwargs: Any) -> Any:
        self._nixl_telemetry.post_starts(args, kwargs)
        try:
            return self._stock_class._xfer_blocks(self, *args, **kwargs)
        finally:
            self._nixl_telemetry.post_ends()


def _permitted(destination: Arguments | PeerNotAllowedError | None) -> Arguments | None:
    """Raise the one exception of ours that is meant for vLLM: it fails the requests that wait for this peer."""
    if isinstance(destination, PeerNotAllowedError):
        raise destination
    return destination
