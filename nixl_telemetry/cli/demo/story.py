# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What happens in the demo, in order."""

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import httpx
from rich.console import Console

from nixl_telemetry.cli.demo import evidence, view
from nixl_telemetry.cli.demo.bench import Bench
from nixl_telemetry.cli.demo.evidence import ModeEvidence, RejectionEvidence
from nixl_telemetry.cli.demo.folder import DemoFolder
from nixl_telemetry.cli.instances import Patience, probe
from nixl_telemetry.cli.output import CommandError
from nixl_telemetry.signals.catalogue import HANDSHAKE_REJECTIONS, TRANSFER_DURATION
from nixl_telemetry.signals.semconv import EventName, SpanName
from nixl_telemetry.testbed import (
    LOOPBACK,
    HttpStatusError,
    MetricsSnapshot,
    MissingProgramError,
    ProcessError,
    ReceivedSpan,
    Router,
    VllmServer,
    complete,
    disaggregated_completion,
)
from nixl_telemetry.testbed.client import get_text

FAILURES: Final = (HttpStatusError, MissingProgramError, ProcessError, httpx.HTTPError, CommandError, OSError)
"""What ends the demo early, each with a message that a user can act on."""

# Generous: nothing here is a benchmark, and the machine may have other work.
_REQUEST_SECONDS = 600.0
_ROUTER_SECONDS = 300.0
_SIGNAL_SECONDS = 60.0
_SCRAPE_SECONDS = 60.0
_PATIENCE = Patience(timeout=30.0)


def run(
    console: Console, folder: DemoFolder, modes: Sequence[str], requests: int
) -> tuple[Mapping[str, Any], list[str]]:
    """Run the demo and show it; everything but the summary is written.

    Args:
        console: Where to show it.
        folder: Where to write.
        modes: Transfer modes, in order.
        requests: Requests in each mode.

    Returns:
        The summary, and what should have been seen but was not.
    """
    parts = len(modes) + (len(modes) > 1)
    seen: dict[str, ModeEvidence] = {}
    rejection: RejectionEvidence | None = None
    kept: dict[str, tuple[VllmServer, VllmServer]] = {}
    with Bench(console, folder) as bench:
        for number, mode in enumerate(modes, 1):
            console.print(view.chapter(f"{number}/{parts}", view.MODE_TITLES[mode]))
            prefill, decode, stock_hash = _start(bench, mode)
            kept[mode] = prefill, decode
            seen[mode] = _serve(console, bench, folder, mode, (prefill, decode), requests, stock_hash)
            console.print(view.mode_report(seen[mode]))
            # At most three servers at once: the next mode needs two more, and this prefill instance is used again.
            if mode != modes[-1]:
                bench.stop(decode)
                # Idle, it would still take a third of a core.
                prefill.process.send_signal(signal.SIGSTOP)
        if len(modes) > 1:
            console.print(view.chapter(f"{parts}/{parts}", view.REJECTION_TITLE))
            rejection = _mismatch(bench, folder, prefill=kept["pull"][0], decode=kept["push"][1])
            console.print(view.rejection_report(rejection))
    spans = {part: part_seen.spans for part, part_seen in seen.items()}
    if rejection is not None:
        spans["rejection"] = rejection.spans
    folder.write("spans.json", json.dumps(spans, indent=1, default=evidence.plain) + "\n")
    return evidence.summary(seen, rejection), evidence.missing(seen, rejection)


def _start(bench: Bench, mode: str) -> tuple[VllmServer, VllmServer, str]:
    """Start a prefill and a decode instance, and ask a stock one for its hash before it makes room for the other."""
    stock = bench.start("stock", mode)
    decode = bench.start("decode", mode)
    bench.wait(stock)
    stock_hash = probe(f"{LOOPBACK}:{stock.side_channel_port}", _PATIENCE).instance.compat_hash
    bench.stop(stock)
    prefill = bench.start("prefill", mode)
    bench.wait(decode, prefill)
    return prefill, decode, stock_hash


def _serve(
    console: Console,
    bench: Bench,
    folder: DemoFolder,
    mode: str,
    pair: tuple[VllmServer, VllmServer],
    requests: int,
    stock_hash: str,
) -> ModeEvidence:
    """Send requests through the router, and collect what they left behind."""
    prefill, decode = pair
    # No retries: a request that fails must show.
    router = Router([prefill.url], [decode.url], folder.logs, name=f"router-{mode}", args=("--disable-retries",))
    answered = 0
    try:
        router.start()
        with console.status("the router is starting"):
            router.wait_healthy(_ROUTER_SECONDS)
        for number in range(requests):
            tokens = 40 + 96 * (number % 10)
            with console.status(f"request {number + 1} of {requests}"):
                prompt = bench.model.prompt(tokens, seed=number)
                answer = complete(router.url, prompt, timeout=_REQUEST_SECONDS)
            answered += 1
            console.print(view.request_line(tokens, answer), highlight=False)
    finally:
        router.stop()
    with console.status("collecting spans and metrics"):
        spans = _spans(bench, mode, lambda found: evidence.count(found, SpanName.TRANSFER) >= requests)
        initiator = decode if mode == "pull" else prefill
        _until(lambda: (_scrape(initiator).value(f"{TRANSFER_DURATION.name}_count") or 0) >= requests)
        metrics = {"prefill": _scrape(prefill), "decode": _scrape(decode)}
    for role, snapshot in metrics.items():
        folder.write(f"metrics-{mode}-{role}.txt", snapshot.text)
    return ModeEvidence(mode, answered, spans, metrics, stock_hash)


def _mismatch(bench: Bench, folder: DemoFolder, prefill: VllmServer, decode: VllmServer) -> RejectionEvidence:
    """Send one request through a prefill and a decode instance of different modes."""
    prefill.process.send_signal(signal.SIGCONT)
    bench.receiver.clear()
    status, body = 200, ""
    try:
        disaggregated_completion(prefill, decode, bench.model.prompt(100, seed=99), timeout=_REQUEST_SECONDS)
    except HttpStatusError as error:
        status, body = error.status, error.body
    spans = _spans(bench, "push", lambda found: evidence.count(found, SpanName.HANDSHAKE) > 0)
    _until(lambda: (_scrape(decode).value(HANDSHAKE_REJECTIONS.name) or 0) > 0)
    metrics = _scrape(decode)
    folder.write("metrics-rejection-decode.txt", metrics.text)
    lines = [line for line in decode.log_text().splitlines() if EventName.MODE_CONFLICT in line]
    return RejectionEvidence(status, body, spans, metrics, lines[-1] if lines else "")


def _spans(bench: Bench, mode: str, enough: Callable[[Sequence[ReceivedSpan]], bool]) -> tuple[ReceivedSpan, ...]:
    """The suite's spans of a mode, as soon as they are enough; whatever there is when time is up."""

    def of_mode() -> tuple[ReceivedSpan, ...]:
        return evidence.of_mode(bench.receiver.spans(), mode)

    _until(lambda: enough(of_mode()))
    return of_mode()


def _scrape(server: VllmServer) -> MetricsSnapshot:
    return MetricsSnapshot(get_text(f"{server.url}/metrics", timeout=_SCRAPE_SECONDS))


def _until(condition: Callable[[], bool]) -> None:
    """Wait for signals that are on their way. If they do not come, what is missing is said at the end."""
    deadline = time.monotonic() + _SIGNAL_SECONDS
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.5)
