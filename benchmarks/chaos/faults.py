# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The faults: what is done, what it looks like, and which signals name it."""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from benchmarks.chaos.load import REQUEST_SECONDS, Ask, asking, asking_past_the_router
from benchmarks.chaos.malformed import Flood, ask_for_an_unknown_rank
from benchmarks.chaos.scene import START_SECONDS, Scene
from benchmarks.chaos.signals import Down, Logged, Rise, Signal, Silence, Slow
from benchmarks.chaos.watch import DECODE, PREFILL
from benchmarks.clients import new_client
from benchmarks.load import Request
from nixl_telemetry.testbed import Relay, VllmServer

GONE_SECONDS: Final = 5.0
"""So long a victim is away before it is started anew."""
STOPPED_SECONDS: Final = 8.0
HELD_SECONDS: Final = 15.0
"""So long a collector, a disk or a folder is away, and so long a side channel is cut for an instance that is up."""
LEASE_SECONDS: Final = 2
MESSAGES: Final = 10_000
FLOOD_SECONDS: Final = 100.0
"""For :data:`MESSAGES` of them; an instance that is started meanwhile has its own flood after that."""
_STEP_SECONDS: Final = 0.5

Moment = Callable[[Scene], None]


@dataclass
class Stage:
    """What is set up around a fault, before the load begins."""

    scene: Scene
    ask: Ask
    """How requests are sent."""
    proxy: Relay | None = None


@dataclass(frozen=True)
class Fault:
    """One kind of fault."""

    name: str
    title: str
    done: str
    """What is done, for the page."""
    looks: str
    """What it looks like, for the page."""
    inflict: Callable[[Stage], None]
    """From the begin of the fault to its end."""
    named_by: Callable[[str], Sequence[Signal]]
    """Signals that name it in a mode, the most telling ones first."""
    healed: Callable[[Scene], bool] = field(default=lambda _: True)
    """Whether the telemetry itself is well again, asked after the fault, again and again."""
    lease_seconds: int | None = None
    past_the_router: bool = False
    """Whether requests go through a proxy in front of P's side channel, and so not through the router."""
    remark: str = ""
    """What is different for the stock pair, for the page."""


@contextmanager
def staged(fault: Fault, scene: Scene) -> Iterator[Stage]:
    """Set up what a fault needs."""
    if not fault.past_the_router:
        yield Stage(scene, asking(scene.router.url))
        return
    prefill, decode = scene.servers
    with Relay(prefill.side_channel_port) as proxy:
        yield Stage(scene, asking_past_the_router(prefill.url, decode.url, proxy.port), proxy)


# ------------------------------------------------------------------------------------------------- What is done to whom


def _kill(server: VllmServer) -> None:
    """SIGKILL to all its processes; some seconds later a new one takes its place."""
    server.process.kill()
    time.sleep(GONE_SECONDS)
    server.restart()
    server.wait_healthy(START_SECONDS)


def _kill_router(stage: Stage) -> None:
    stage.scene.router.process.kill()
    time.sleep(GONE_SECONDS)
    stage.scene.restart_router()


def _stop(server: VllmServer) -> None:
    server.process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(STOPPED_SECONDS)
    finally:
        server.process.send_signal(signal.SIGCONT)


def _cut_the_side_channel(stage: Stage) -> None:
    """A new decode instance has to shake hands, and cannot."""
    proxy = stage.proxy
    if proxy is None:
        raise RuntimeError("the side channel can be cut where there is a proxy only")
    proxy.cut()
    try:
        _kill(stage.scene.pair.decode)
        time.sleep(HELD_SECONDS)
    finally:
        proxy.restore()


def _flood(stage: Stage) -> None:
    """Malformed messages, and a new decode instance that has to shake hands among them."""
    scene = stage.scene
    prefill, decode = scene.servers
    if not scene.instrumented:
        ask_for_an_unknown_rank(prefill.side_channel_port)
        _kill(decode)
        return
    floods = {PREFILL: Flood(prefill.side_channel_port, MESSAGES, FLOOD_SECONDS)}
    _kill(decode)
    if scene.mode == "push":
        floods[DECODE] = Flood(decode.side_channel_port, MESSAGES, FLOOD_SECONDS)
    for flood in floods.values():
        flood.wait()
    scene.details["malformed_sent"] = {role: flood.sent for role, flood in floods.items()}
    scene.details["malformed_seconds"] = {role: round(flood.seconds, 1) for role, flood in floods.items()}


def _take_the_collector(stage: Stage) -> None:
    stage.scene.collector.stop()
    time.sleep(HELD_SECONDS)
    stage.scene.marks["spans"] = stage.scene.receiver.span_count("nixl_telemetry")
    stage.scene.collector.start()


def _take_the_disk(stage: Stage) -> None:
    scene = stage.scene
    away = scene.disk.with_name("disk-away")
    scene.disk.rename(away)
    try:
        time.sleep(HELD_SECONDS)
    finally:
        away.rename(scene.disk)
    scene.marks["bytes"] = _size(scene)


def _take_the_audit_folder(stage: Stage) -> None:
    shutil.rmtree(stage.scene.audit, ignore_errors=True)
    time.sleep(HELD_SECONDS)
    if stage.scene.instrumented:
        stage.scene.audit.mkdir(mode=0o700)


def _outlast_the_lease(stage: Stage) -> None:
    with _busy(stage.scene.pair.prefill):
        _stop(stage.scene.pair.decode)


@contextmanager
def _busy(server: VllmServer) -> Iterator[None]:
    """Requests for this instance alone: an idle engine takes no steps, and without one it ends no lease."""
    ended = threading.Event()

    def ask() -> None:
        with new_client(REQUEST_SECONDS) as client:
            while not ended.wait(_STEP_SECONDS):
                asking(server.url)(client, Request("w1 w2", 1))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _size(scene: Scene) -> int:
    return scene.trace_file.stat().st_size if scene.trace_file.exists() else 0


# -------------------------------------------------------------------------------------------------- What names a fault

_HANDSHAKE: Final = "nixl_handshake_duration_seconds_count"
_TRANSFER: Final = "nixl_transfer_duration_seconds"
_RECEIVE: Final = "nixl_receive_wait_seconds"
_LEASE: Final = "nixl_lease_duration_seconds"
_REGISTRATIONS: Final = "nixl_push_registrations_total"
_EXPIRED_OF_VLLM: Final = "vllm:nixl_num_kv_expired_reqs_total"
_BOTH: Final = (PREFILL, DECODE)


def _handshakes_fail(instance: str) -> list[Signal]:
    return [Rise(instance, _HANDSHAKE, {"error_type": error}) for error in ("unreachable", "timeout")]


def _transfers_fail(instance: str) -> list[Signal]:
    errors = ("transfer_failed", "transfer_setup", "_OTHER")
    return [Rise(instance, f"{_TRANSFER}_count", {"error_type": error}) for error in errors]


def _receives_fail() -> list[Signal]:
    outcomes = [Rise(DECODE, f"{_RECEIVE}_count", {"outcome": outcome}) for outcome in ("failed", "timeout")]
    return [*outcomes, Logged(DECODE, "nixl.receive.waiting")]


def _all_is_slow(mode: str) -> list[Signal]:
    return [
        Logged(DECODE, "nixl.receive.waiting"),
        Slow(DECODE, _RECEIVE, above="5.0"),
        Slow(_mover(mode), _TRANSFER, above="5.0"),
        Slow(PREFILL, _LEASE, {"outcome": "released"}, above="5.0"),
        *([Logged(PREFILL, "nixl.push.unmatched")] if mode == "push" else []),
    ]


def _mover(mode: str) -> str:
    return DECODE if mode == "pull" else PREFILL


def _leases_expire() -> list[Signal]:
    return [Rise(PREFILL, f"{_LEASE}_count", {"outcome": "expired"}), Logged(PREFILL, "nixl.lease.expired")]


def _prefill_is_killed(mode: str) -> list[Signal]:
    own = _transfers_fail(DECODE) if mode == "pull" else [Rise(DECODE, _REGISTRATIONS, {"event": "failed"})]
    known = [*_handshakes_fail(DECODE), *own, *_receives_fail()]
    # Nothing was under way: that a new engine answers is all that D can see.
    return [*known, Rise(DECODE, _HANDSHAKE, {"error_type": ""}), Down(PREFILL)]


def _decode_is_killed(mode: str) -> list[Signal]:
    own = [*_transfers_fail(PREFILL), *_handshakes_fail(PREFILL)] if mode == "push" else []
    unmatched: list[Signal] = [Logged(PREFILL, "nixl.push.unmatched")] if mode == "push" else []
    return [*own, *_leases_expire(), *unmatched, Down(DECODE)]


def _lease_is_outlasted() -> list[Signal]:
    read = Rise(PREFILL, "nixl_invalid_kv_total", {"reason": "read_after_expiry"})
    return [*_leases_expire(), read, Logged(PREFILL, "nixl.invalid_kv"), Rise(PREFILL, _EXPIRED_OF_VLLM)]


def _own_health(what: str, *signals: str) -> list[Signal]:
    return [Rise(instance, f"nixl_telemetry_{what}_total", {"signal": name}) for name in signals for instance in _BOTH]


FAULTS: Final = {
    fault.name: fault
    for fault in (
        Fault(
            "collector",
            "OTLP collector gone",
            f"the collector that takes the spans is stopped for {HELD_SECONDS:.0f} s",
            "requests as ever; spans are missing",
            _take_the_collector,
            lambda mode: [*_own_health("dropped", "spans"), *_own_health("errors", "traces")],
            lambda scene: scene.receiver.span_count("nixl_telemetry") > scene.marks["spans"],
            remark="vLLM's own exporter loses its collector",
        ),
        Fault(
            "disk",
            "disk with the trace file gone",
            f"the folder of `trace_file` is a link that leads nowhere for {HELD_SECONDS:.0f} s",
            "requests as ever; spans are missing in the file",
            _take_the_disk,
            lambda mode: [*_own_health("dropped", "spans"), *_own_health("errors", "traces")],
            lambda scene: _size(scene) > scene.marks["bytes"],
            remark="nothing is taken from it: it writes no file",
        ),
        Fault(
            "audit",
            "audit folder gone",
            f"`audit_dir` is removed, and made again, empty, after {HELD_SECONDS:.0f} s",
            "requests as ever; records wait, and are written when the folder is there",
            _take_the_audit_folder,
            lambda mode: _own_health("errors", "audit"),
            lambda scene: any(scene.audit.iterdir()),
            remark="nothing is taken from it: it has no audit trail",
        ),
        Fault(
            "kill_router",
            "router killed",
            f"SIGKILL; a new one is started after {GONE_SECONDS:.0f} s",
            "connections are refused; to both instances it looks like no traffic",
            _kill_router,
            # The suite sees what comes: nothing comes.
            lambda mode: [Silence(PREFILL, "vllm:request_success_total")],
        ),
        Fault(
            "stop_p",
            "prefill instance stands still",
            f"SIGSTOP to all its processes, SIGCONT after {STOPPED_SECONDS:.0f} s",
            "requests take so much longer",
            lambda stage: _stop(stage.scene.pair.prefill),
            lambda mode: [*_all_is_slow(mode), Down(PREFILL)],
        ),
        Fault(
            "stop_d",
            "decode instance stands still",
            f"SIGSTOP to all its processes, SIGCONT after {STOPPED_SECONDS:.0f} s",
            "requests take so much longer; KV is held at P meanwhile",
            lambda stage: _stop(stage.scene.pair.decode),
            lambda mode: [*_all_is_slow(mode), Down(DECODE)],
        ),
        Fault(
            "kill_p",
            "prefill instance killed",
            "SIGKILL to all its processes; a new one, on the same ports and with a new engine id, is started after "
            f"{GONE_SECONDS:.0f} s",
            "requests fail until it is up; D shakes hands with an engine that it does not know",
            lambda stage: _kill(stage.scene.pair.prefill),
            _prefill_is_killed,
        ),
        Fault(
            "kill_d",
            "decode instance killed",
            f"SIGKILL to all its processes; a new one is started after {GONE_SECONDS:.0f} s",
            "requests fail until it is up; KV of those that were prefilled for it is held until its lease expires",
            lambda stage: _kill(stage.scene.pair.decode),
            _decode_is_killed,
        ),
        Fault(
            "side_channel",
            "side channel cut",
            "a proxy in front of P's side channel drops all connections and refuses new ones; D is killed and started "
            f"anew, since a pair that knows each other needs no side channel; the proxy works again {HELD_SECONDS:.0f} "
            "s after D is up",
            "requests fail, each after the 5 s that vLLM waits for a handshake",
            _cut_the_side_channel,
            lambda mode: [*_handshakes_fail(DECODE), Logged(DECODE, "nixl.handshake.failed")],
            past_the_router=True,
        ),
        Fault(
            "malformed",
            "malformed handshakes",
            f"{MESSAGES:,} messages that are no handshake within {FLOOD_SECONDS:.0f} s to P's side channel, in push as "
            "many to D's; meanwhile D is killed and started anew, and has to shake hands",
            "requests fail until D is up, and no longer",
            _flood,
            lambda mode: [
                Rise(PREFILL, "nixl_handshake_requests_total", {"result": "malformed"}),
                Logged(PREFILL, "nixl.handshake_request.refused"),
            ],
            remark="it gets one sound query for a rank that it does not have, which ends its listener for good: no new "
            "instance can shake hands with it until it is started anew",
        ),
        Fault(
            "lease",
            "lease expires",
            f"`kv_lease_duration` is {LEASE_SECONDS} s, and D stands still (SIGSTOP) for {STOPPED_SECONDS:.0f} s "
            "while P has other work",
            "P frees KV that nobody fetched; vLLM lets D fetch it all the same, whatever is there by then",
            _outlast_the_lease,
            lambda mode: _lease_is_outlasted(),
            lease_seconds=LEASE_SECONDS,
        ),
    )
}
"""By name, in the order in which they are tried: after the last ones, a stock pair is of no more use."""
