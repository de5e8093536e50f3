# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Hooks on the NIXL agent: every READ and WRITE passes here, and what peers have sent.

Its public API is the narrowest and most stable boundary there is: it has not changed from NIXL 0.7 to 1.5. Exceptions
always pass on unchanged, with one exception that is documented at ``get_xfer_telemetry``.
"""

from typing import Any

from nixl_telemetry.operations.transfer import TransferTable
from nixl_telemetry.seam.instrument import Hooks, instrument
from nixl_telemetry.seam.versions import is_missing_telemetry
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.semconv import TransferMode


class AgentHooks(Hooks):
    """Goes in front of ``nixl_agent``."""

    _nixl_telemetry: TransferTable

    def make_prepped_xfer(
        self, operation: str, local_xfer_side: Any, local_indices: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """A transfer is prepared."""
        table = self._nixl_telemetry
        start_ns = now_ns()
        try:
            handle = self._stock_class.make_prepped_xfer(
                self, operation, local_xfer_side, local_indices, *args, **kwargs
            )
        except BaseException as error:
            table.setup_failed(operation, local_indices, start_ns, error)
            raise
        table.prepared(operation, local_indices, start_ns, handle)
        return handle

    def transfer(self, handle: Any, *args: Any, **kwargs: Any) -> Any:
        """A transfer is posted."""
        table = self._nixl_telemetry
        table.posting(handle)
        try:
            return self._stock_class.transfer(self, handle, *args, **kwargs)
        except BaseException as error:
            table.posting_failed(handle, error)
            raise

    def check_xfer_state(self, handle: Any) -> Any:
        """A transfer is polled, once per engine step."""
        table = self._nixl_telemetry
        try:
            state = self._stock_class.check_xfer_state(self, handle)
        except BaseException as error:
            table.poll_failed(handle, error)
            raise
        # Its measurements follow, and only then it has ended.
        if state != "DONE":
            table.polled(handle, state)
        return state

    def get_xfer_telemetry(self, handle: Any) -> Any:
        """A transfer was seen done; vLLM asks for its times and bytes.

        With ``NIXL_TELEMETRY_ENABLE=n`` NIXL raises here, and stock vLLM then takes the finished transfer for a failed
        one and fails the request. Missing telemetry must not fail a request: the answer is ``None`` instead, which our
        stats class records as no measurement.
        """
        table = self._nixl_telemetry
        try:
            result = self._stock_class.get_xfer_telemetry(self, handle)
        except BaseException as error:
            if is_missing_telemetry(error):
                table.done_unmeasured(handle, error)
                return None
            table.poll_failed(handle, error)
            raise
        table.done(handle, result)
        return result

    def send_notif(self, *args: Any, **kwargs: Any) -> Any:
        """A notification is sent."""
        sent = self._nixl_telemetry.sent
        try:
            result = self._stock_class.send_notif(self, *args, **kwargs)
        except BaseException:
            sent.failed_notifications += 1
            raise
        sent.notifications += 1
        return result

    def release_xfer_handle(self, handle: Any) -> Any:
        """A handle is released: done, failed or cancelled."""
        table = self._nixl_telemetry
        # Taken first: once it is free, a handle's number or address may be another transfer's at once.
        transfer = table.take(handle)
        try:
            result = self._stock_class.release_xfer_handle(self, handle)
        except BaseException:
            table.put_back(handle, transfer)
            raise
        if transfer is not None and not transfer.end_ns:
            table.released(transfer)
        return result


class AskedAgentHooks(AgentHooks):
    """For an agent that is asked once per step what peers have sent, as in pull."""

    def get_new_notifs(self, *args: Any, **kwargs: Any) -> Any:
        """What peers have sent."""
        notifications = self._stock_class.get_new_notifs(self, *args, **kwargs)
        if notifications:
            self._nixl_telemetry.notified(notifications)
        return notifications


class InboxHooks(Hooks):
    """For the queue in which the push writer's thread leaves what peers have sent, but for registrations.

    While blocks wait for a registration, that thread asks the agent a thousand times a second: a hook there would cost
    more than all others.
    """

    _nixl_telemetry: TransferTable

    def put(self, item: Any, *args: Any, **kwargs: Any) -> Any:
        """Leave a notification for the engine's thread."""
        self._nixl_telemetry.heard(item)
        return self._stock_class.put(self, item, *args, **kwargs)


def observe_agent(worker: Any, table: TransferTable) -> None:
    """Put the hooks in front of a worker's agent, or of what passes on what it has to tell."""
    inbox = getattr(worker, "_pending_completion_notifs", None)
    is_push = table.telemetry.mode is TransferMode.PUSH
    tells = is_push and inbox is not None and instrument(inbox, InboxHooks, table)
    instrument(worker.nixl_wrapper, AgentHooks if tells else AskedAgentHooks, table)
