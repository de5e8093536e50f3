# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The hub is a guest: it does not raise, block, grow or survive a fork wrongly."""

import os
import threading
import time
from functools import partial
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.trace import SpanKind

from nixl_telemetry.settings import Settings
from nixl_telemetry.signals import export, sender
from nixl_telemetry.signals.catalogue import TRANSFER_BYTES
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.description import Description, LogLine, Span
from nixl_telemetry.signals.otlp import Message
from nixl_telemetry.signals.semconv import EventName, Signal, SpanName, TransferMode
from nixl_telemetry.signals.telemetry import Telemetry, guarded
from nixl_telemetry.testbed.otlp_spans import decode
from tests.support.observed import Collector, Observed
from tests.support.peers import wait_until

ERRORS = "nixl_telemetry_errors_total"
DROPPED = "nixl_telemetry_dropped_total"


class Hooks:
    """Two hooks of ours."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry

    @guarded
    def works(self, value: int) -> int:
        """Returns twice the value."""
        return value * 2

    @guarded
    def breaks(self) -> None:
        """Raises."""
        raise RuntimeError("boom")


def test_a_guarded_hook_passes_results_and_swallows_its_own_errors(observed: Observed) -> None:
    """The failure is counted each time and logged once."""
    hooks = Hooks(observed.telemetry)

    assert hooks.works(21) == 42
    for _ in range(3):
        hooks.breaks()

    assert observed.updates() == {(ERRORS, Signal.HOOK): 3}
    (message,) = observed.messages()
    assert "Hooks.breaks" in message
    assert "boom" in message


def test_a_hook_that_is_called_wrongly_does_not_raise_either(observed: Observed) -> None:
    """What a guard holds includes the call."""
    works: Any = Hooks(observed.telemetry).works

    assert works() is None
    assert observed.updates() == {(ERRORS, Signal.HOOK): 1}


def test_a_description_that_raises_is_counted(observed: Observed) -> None:
    """And the export thread lives on."""

    def broken() -> Description:
        raise ValueError("no description")

    observed.telemetry.emit(broken)
    observed.telemetry.emit(Description)

    assert observed.spans() == []
    assert observed.updates() == {(ERRORS, Signal.HOOK): 1}


def test_a_full_queue_drops_and_counts() -> None:
    """A stuck export thread costs records, not memory or time."""
    telemetry = Telemetry(Settings.load({"telemetry": {"queue_size": 16}}, {}), TransferMode.PULL, {})
    release = threading.Event()

    def stuck() -> Description:
        release.wait(10)
        return Description()

    telemetry.emit(stuck)
    while telemetry._export._queue.qsize():
        time.sleep(0.001)
    for _ in range(20):
        telemetry.emit(Description)

    assert telemetry.drain() == {DROPPED: {Signal.TRACES: 4}}
    release.set()
    telemetry.close()


def test_close_is_bounded_and_repeatable() -> None:
    """A process that ends does not wait longer than the setting for an exporter that hangs."""
    telemetry = Telemetry(Settings.load({"telemetry": {"shutdown_timeout_seconds": 0.1}}, {}), TransferMode.PULL, {})
    hang = threading.Event()

    def stuck() -> Description:
        hang.wait(10)
        return Description()

    telemetry.emit(stuck)

    started = time.monotonic()
    telemetry.close()
    telemetry.close()

    assert time.monotonic() - started < 2
    hang.set()


def test_close_does_not_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in a finally of vLLM's shutdown, and at exit, where no thread can be started any more."""
    telemetry = Telemetry(Settings.load({}, {}), TransferMode.PULL, {})
    telemetry.emit(Description)

    def no_more_threads(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", no_more_threads)
    telemetry.close()
    monkeypatch.setattr(telemetry._export, "run", None)
    telemetry.close()


def test_an_exporter_that_raises_is_counted(observed: Observed, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its spans are counted as lost."""

    def raises(request: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(observed.collector, "send", raises)
    span = Span(SpanName.TRANSFER, SpanKind.CLIENT, 1, 2, children=(Span(SpanName.BLOCK, SpanKind.INTERNAL, 1, 2),))
    observed.telemetry.emit(lambda: Description(span))

    assert observed.updates() == {(ERRORS, Signal.TRACES): 1, (DROPPED, Signal.SPANS): 2}
    (message,) = observed.messages()
    assert "sending spans" in message
    assert "injected" in message


def test_metrics_can_be_switched_off_but_not_the_health() -> None:
    """With metrics off, no operation is recorded; failures still are."""
    telemetry = Telemetry(Settings.load({"telemetry": {"metrics": False}}, {}), TransferMode.PULL, {})

    telemetry.record(TRANSFER_BYTES, "read", value=5)
    telemetry.failed("somewhere", RuntimeError("x"))

    assert telemetry.drain() == {ERRORS: {Signal.HOOK: 1}}
    telemetry.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_a_forked_child_exports_on_a_thread_of_its_own(observed: Observed) -> None:
    """Threads do not survive a fork; the child starts one and does not send the parent's queue again."""
    observed.telemetry.emit(Description)
    observed.settle()
    child = os.fork()
    if child == 0:
        done = threading.Event()

        def describe() -> Description:
            done.set()
            return Description()

        observed.telemetry.emit(describe)
        os._exit(0 if done.wait(5) else 1)
    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0


def test_what_clients_and_peers_say_cannot_write_on_a_terminal(observed: Observed) -> None:
    """Escape sequences, carriage returns and other line breaks are shown, not obeyed."""
    hostile = "h\x1b[31m\r\u2028\x9b2Jé"
    line = LogLine(
        EventName.HANDSHAKE_FAILED, attributes={"server.address": hostile, "nixl.compat.differing": (hostile,)}
    )
    observed.telemetry.emit(lambda: Description(log=line))

    (message,) = observed.messages()
    shown = "h\\x1b[31m\\r\\u2028\\x9b2Jé"
    assert f"server.address={shown}" in message
    assert f"nixl.compat.differing={shown}" in message
    assert message.isprintable()


def test_spans_of_a_steady_stream_are_in_time(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are described when the next message is near, whatever fails in between."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1000")
    monkeypatch.setattr(export, "ROUND_SECONDS", 0.2)
    monkeypatch.setattr(sender, "_SPARE_SECONDS", 0.2)
    monkeypatch.setattr(sender, "QUIET_SECONDS", 0.05)
    arrivals: list[tuple[float, list[int]]] = []

    def send(message: Message) -> None:
        request = ExportTraceServiceRequest.FromString(message.data)
        arrivals.append((time.monotonic(), [int(span.attributes["number"]) for span in decode(request)]))

    monkeypatch.setattr(collector, "send", send)
    telemetry = Telemetry(Settings.load({}, {}), TransferMode.PULL, {"nixl.engine.id": "here"})
    ended: list[float] = []
    begin = time.monotonic()
    while time.monotonic() - begin < 4.5:
        span = Span(SpanName.LEASE, SpanKind.PRODUCER, now_ns(), now_ns(), {"number": len(ended)})
        ended.append(time.monotonic())
        telemetry.emit(partial(Description, span), len(ended) % 35 > 0)
        time.sleep(0.02)
    assert wait_until(lambda: sum(len(numbers) for _, numbers in arrivals) == len(ended), 5)
    telemetry.close()

    late = [at - ended[number] for at, numbers in arrivals for number in numbers]
    assert sorted(number for _, numbers in arrivals for number in numbers) == list(range(len(ended)))
    assert max(late) < 1.9
    assert len(arrivals) <= 7
