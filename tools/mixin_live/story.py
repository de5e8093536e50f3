# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What happens to the fleet, act by act, and the alerts that each act is to raise."""

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final

from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.duration import Duration
from nixl_telemetry.testbed import LOOPBACK
from tools.mixin_live.panels import Window
from tools.mixin_live.prometheus import Prometheus
from tools.mixin_live.scene import LEASE_SECONDS, Handover, Scene
from tools.mixin_live.webhook import Webhook

NOT_PROVOKED: Final[Mapping[str, str]] = {
    "NixlLeasesOverdue": "vLLM frees what is overdue with its next step, so no engine that is at work has any",
}
_SCALE: Final = 1 / 60
_HEALTHY_SECONDS: Final = 40.0
_DELIVERY_SECONDS: Final = 100.0
_RESOLUTION_SECONDS: Final = 150.0
_LOAD_EVERY: Final = 0.25
_POLL_SECONDS: Final = 0.5
_STALL_SECONDS: Final = 15.0
"""The alert wants 1 s of age and 5 s of pending, beside the delays of scrapes, rules and engine steps."""
_SLOW_HANDSHAKE_SECONDS: Final = 2.0
"""Less than the 5 s after which vLLM gives a handshake up."""
_UNMATCHED: Final = 4
"""So many wait at a time; each until its client gives up."""
_ABANDON_SECONDS: Final = 1.0
_LATE_SECONDS: Final = LEASE_SECONDS + 2.0
_STALLED: Final = 8
_DOOMED: Final = 30
_NO_HANDSHAKE: Final = b"GET /metrics HTTP/1.1\r\nHost: prefill\r\n\r\n"


def config() -> MixinConfig:
    """The alerts' own configuration with minutes turned into seconds, and what that asks for besides."""
    scaled = MixinConfig().scaled(_SCALE)
    return scaled.model_copy(
        update={
            # A fault of seconds is to be seen for longer than its `for`.
            "handshake_window": Duration.parse("30s"),
            "transfer_window": Duration.parse("30s"),
            # In a window of seconds there are few requests, and a pair that fits has one handshake.
            "handshake_floor": 1,
            "transfer_floor": 4,
            "burn_floor": 2,
            "decode_floor": 4,
            "lease_floor": 4,
            "push_floor": 4,
            # vLLM gives up a handshake after 5 s without an answer.
            "handshake_slow_seconds": 1.0,
            # The fastest one: the others would take minutes to resolve, and hold other alerts back meanwhile.
            "burn_windows": scaled.burn_windows[:1],
        }
    )


@dataclass
class Stage:
    """Where the story is played, and what it leaves for the report."""

    scene: Scene
    prometheus: Prometheus
    webhook: Webhook
    say: Callable[[str], None]
    loads: dict[str, "Load"] = field(default_factory=dict)
    provoked: set[str] = field(default_factory=set)
    false_alarms: set[str] = field(default_factory=set)
    windows: dict[str, Window] = field(default_factory=dict)
    """Times for which the boards are asked."""
    begin: float = field(default_factory=time.time)

    def wait(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Whether a condition comes true in time."""
        deadline = time.monotonic() + seconds
        while not (holds := condition()) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return holds


class Load:
    """Requests through a router, again and again, until it is closed."""

    def __init__(self, scene: Scene, url: str, model: str) -> None:
        """Begins at once."""
        self._scene, self._url, self._model = scene, url, model
        self._ended = threading.Event()
        self._resumed = threading.Event()
        self._resumed.set()
        self._thread = threading.Thread(target=self._run, name=f"load-{model}", daemon=True)
        self._thread.start()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No new requests meanwhile."""
        self._resumed.clear()
        try:
            yield
        finally:
            self._resumed.set()

    def close(self) -> None:
        """Ends, with the request that is under way."""
        self._ended.set()
        self._resumed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_LOAD_EVERY):
            self._resumed.wait()
            self._scene.ask(self._url, self._model, self._scene.prompt())


def play(stage: Stage) -> None:
    """All acts."""
    try:
        for act in ACTS:
            begin = time.monotonic()
            stage.say(act.title)
            stage.provoked |= set(act.alerts)
            act.play(stage)
            missing = sorted(name for name in act.alerts if not stage.webhook.delivered(name))
            stage.say(
                f"{act.title}: {time.monotonic() - begin:.0f} s; {len(act.alerts) - len(missing)} of {len(act.alerts)} "
                f"alerts delivered" + (f"; not: {', '.join(missing)}" if missing else "")
            )
    finally:
        for load in stage.loads.values():
            load.close()


@dataclass(frozen=True)
class Act:
    """A part of the story."""

    title: str
    play: Callable[[Stage], None]
    alerts: tuple[str, ...] = ()
    """Those that it is to raise."""


def _provoke(stage: Stage, alerts: Iterable[str], *disturbances: Callable[[], object]) -> None:
    """Disturb, again and again, until all alerts have arrived; each disturbance has a thread of its own."""
    ended = threading.Event()

    def run(disturbance: Callable[[], object]) -> None:
        while not ended.wait(_POLL_SECONDS):
            disturbance()

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in disturbances]
    for thread in threads:
        thread.start()
    try:
        stage.wait(lambda: all(map(stage.webhook.delivered, alerts)), _DELIVERY_SECONDS)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


# ------------------------------------------------------------------------------------------------------------ The acts

_ABSENT: Final = ("NixlMetricsAbsent",)
_PUSH: Final = (
    *("NixlTransferModeMismatch", "NixlModeConflict", "NixlHandshakeFailureRatioHigh"),
    *("NixlPushUnmatched", "NixlDecodeWithoutTransfers", "NixlListenerRefusing"),
    *("NixlTelemetryErrors", "NixlTelemetryDropping"),
)
_LEASES: Final = ("NixlLeasesExpiring", "NixlInvalidKv")
_STALL: Final = ("NixlTransferStalled", "NixlTransferSlow")
_KILLED: Final = ("NixlTransferFailureRatioHigh", "NixlTransferErrorBudgetBurn", "NixlTargetDown")
_SLOW: Final = ("NixlHandshakeSlow",)
_MIXED: Final = (
    *("NixlConnectorVersionsMixed", "NixlCompatHashesMixed", "NixlTransferModesMixed", "NixlEnforcementOff"),
)
_MISMATCH: Final = ("NixlConnectorVersionMismatch", "NixlCompatMismatch")


def _start(stage: Stage) -> None:
    """Prometheus is there before any server."""
    scene = stage.scene
    scene.start("pull-prefill", "pull-decode", "pull-stock")
    scene.start("push-prefill", "push-decode")
    stage.wait(lambda: all(map(stage.webhook.delivered, _ABSENT)), _DELIVERY_SECONDS)


def _healthy(stage: Stage) -> None:
    """Both deployments serve, and nothing may fire."""
    scene = stage.scene
    pull = scene.start_router("pull-prefill", "pull-decode", "pull-stock")
    push = scene.start_router("push-prefill", "push-decode")
    stage.loads = {"pull": Load(scene, pull, "chat-pull"), "push": Load(scene, push, "chat-push")}
    begin = time.time()
    # What the start has raised has the time to resolve.
    stage.wait(lambda: all(map(stage.webhook.resolved, _ABSENT)), _RESOLUTION_SECONDS)
    time.sleep(_HEALTHY_SECONDS)
    stage.windows["healthy"] = Window(begin, time.time())
    stage.false_alarms = stage.prometheus.firing() | (stage.webhook.names() - set(_ABSENT))


def _push_faults(stage: Stage) -> None:
    """A router that mixes deployments and loses request ids; a client without one; a port scan; a full disk."""
    scene = stage.scene
    listener = scene["push-prefill"].side_channel_port

    def unmatched() -> None:
        if handover := scene.prefill("push-prefill"):
            scene.decode("push-decode", handover, request_id=scene.new_id(), timeout=_ABANDON_SECONDS)

    def scan() -> None:
        with socket.create_connection((LOOPBACK, listener)) as connection:
            connection.sendall(_NO_HANDSHAKE)

    with scene.without_disk(), stage.loads["push"].paused():
        _provoke(
            stage,
            _PUSH,
            lambda: scene.pair("pull-prefill", "push-decode"),
            *[unmatched] * _UNMATCHED,
            lambda: scene.request("push-decode"),
            scan,
        )


def _lease_faults(stage: Stage) -> None:
    """Clients that hang up after the prefill, and a router that comes too late."""
    scene = stage.scene
    kept: deque[tuple[float, Handover]] = deque()

    def abandon() -> None:
        if handover := scene.prefill("pull-prefill"):
            kept.append((time.monotonic(), handover))

    def come_late() -> None:
        if kept and time.monotonic() - kept[0][0] > _LATE_SECONDS:
            scene.decode("pull-decode", kept.popleft()[1])

    _provoke(stage, _LEASES, abandon, come_late)


def _stall(stage: Stage) -> None:
    """The prefill instance stands still while its KV is read."""
    scene = stage.scene

    _provoke(stage, _STALL, lambda: _decode_meanwhile(scene, _prefilled(scene, _STALLED), _STALL_SECONDS))


def _kill(stage: Stage) -> None:
    """The prefill instance is gone, with KV that was promised; the new one is slow to answer whom it does not know."""
    scene, delivered = stage.scene, stage.webhook.delivered
    doomed = _prefilled(scene, _DOOMED)
    with stage.loads["pull"].paused():
        scene["pull-prefill"].process.kill()
        with _decoding(scene, doomed):
            stage.wait(lambda: all(map(delivered, _KILLED)), _DELIVERY_SECONDS)
        scene.restart("pull-prefill")
        _decode_meanwhile(scene, _prefilled(scene, 1), _SLOW_HANDSHAKE_SECONDS)
        stage.wait(lambda: all(map(delivered, _SLOW)), _DELIVERY_SECONDS)


def _rollout(stage: Stage) -> None:
    """An upgrade has left an old instance, which checks nothing; new ones have the wrong connector and another dtype.

    What differs is told before the first request meets it: afterwards Alertmanager holds it back, as a consequence.
    """
    scene = stage.scene
    scene.stop("pull-stock")
    scene.start("older-prefill", "wrong-decode", "other-decode")
    _provoke(stage, _MIXED)
    _provoke(
        stage,
        _MISMATCH,
        lambda: scene.pair("older-prefill", "pull-decode"),
        lambda: scene.pair("push-prefill", "other-decode"),
    )
    stage.windows["story"] = Window(stage.begin, time.time())


def _recover(stage: Stage) -> None:
    """What was wrong is taken away, and all alerts resolve."""
    stage.scene.stop("older-prefill", "wrong-decode", "other-decode")
    webhook = stage.webhook
    stage.wait(lambda: all(map(webhook.resolved, webhook.names())), _RESOLUTION_SECONDS)


def _prefilled(scene: Scene, count: int) -> list[Handover]:
    return [handover for _ in range(count) if (handover := scene.prefill("pull-prefill"))]


@contextmanager
def _decoding(scene: Scene, handovers: Sequence[Handover]) -> Iterator[None]:
    """Requests of the decode instance, all at once, that have an answer or a failure at the end."""
    with ThreadPoolExecutor(max(1, len(handovers))) as pool:
        for handover in handovers:
            pool.submit(scene.decode, "pull-decode", handover)
        yield


def _decode_meanwhile(scene: Scene, handovers: Sequence[Handover], seconds: float) -> None:
    """Requests of the decode instance while the prefill instance stands still, which end when it goes on."""
    with ExitStack() as answered, scene.standing_still("pull-prefill"):
        answered.enter_context(_decoding(scene, handovers))
        time.sleep(seconds)


ACTS: Final = (
    Act("the servers start", _start, _ABSENT),
    Act("all is well", _healthy),
    Act("routers, clients and a disk go wrong in the push deployment", _push_faults, _PUSH),
    Act("leases expire", _lease_faults, _LEASES),
    Act("a prefill instance stands still", _stall, _STALL),
    Act("a prefill instance is killed, and the new one is slow to shake hands", _kill, (*_KILLED, *_SLOW)),
    Act("a rollout leaves a mixed fleet", _rollout, (*_MIXED, *_MISMATCH)),
    Act("all is well again", _recover),
)
