# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""One fault on one pair, under load: what became of the requests, what named it, and whether all was well again."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from benchmarks.chaos.faults import Fault, staged
from benchmarks.chaos.identity import Account, MissingMetricError, accounts
from benchmarks.chaos.load import Load, Phases, phases, recovery_seconds
from benchmarks.chaos.scene import Scene, Sizes
from benchmarks.chaos.signals import Named, seen
from benchmarks.chaos.watch import DECODE, PREFILL, Watch, scrape
from benchmarks.clients import new_client
from nixl_telemetry.testbed import MetricsSnapshot, ProcessError

BEFORE_SECONDS: Final = 8.0
AFTER_SECONDS: Final = 12.0
"""At least."""
NEEDED: Final = 10
"""So many requests are served one after the other where a pair has recovered."""
LIMIT_SECONDS: Final = 60.0
"""In which it has to."""
_SETTLE_SECONDS: Final = 45.0
"""For what is under way to end: vLLM's leases have 30 s."""
_ROUTER_SECONDS: Final = 40.0
"""For requests that wait in vain, and for those after them."""
_POLL_SECONDS: Final = 0.5


@dataclass(frozen=True)
class Observation:
    """What was seen of one fault on one pair."""

    phases: Phases
    recovery_seconds: float | None
    """``None`` where it did not recover."""
    sizes: tuple[Sizes, Sizes]
    """Before the fault, and after everything."""
    named: Sequence[Named] = ()
    """The signals that named it, the most telling one first."""
    accounts: Sequence[Account] = ()
    missing: str = ""
    """The series that an account needs and that is not there."""
    healed: bool = True
    """Whether the telemetry itself is well again."""
    details: Mapping[str, Any] = field(default_factory=dict)
    recovered_with_new_router: bool | None = None
    """Where it did not recover: whether it did once the router was started anew."""
    failure: str = ""
    """What went wrong with an instance or the router that should not have, in one line."""

    @property
    def recovered(self) -> bool:
        """Requests are served again, and the telemetry is well."""
        return self.recovery_seconds is not None and self.healed and not self.failure

    @property
    def identity_holds(self) -> bool:
        """Whether every account is there and adds up."""
        return bool(self.accounts) and all(account.holds for account in self.accounts)


def observe(fault: Fault, scene: Scene) -> Observation:
    """Inflict a fault on a pair, under load."""
    scene.details.clear()
    failure = ""
    with staged(fault, scene) as stage, Watch(scene.pair) as watch:
        with Load(stage.ask, scene.questions, scene.expected) as load:
            time.sleep(BEFORE_SECONDS)
            before, begin = scene.sizes(), time.monotonic()
            try:
                fault.inflict(stage)
            except ProcessError as error:
                failure = str(error).partition("\n")[0]
            end = time.monotonic()
            healed = not failure and _wait_until_well(fault, scene, load, end)
            seconds = recovery_seconds(load.outcomes, end, NEEDED, LIMIT_SECONDS)
            cut = phases(load.outcomes, begin, end)
            with_new_router = None
            if seconds is None and not failure and not fault.past_the_router:
                with_new_router = _recovers_with_new_router(scene, load)
        failure = failure or _dead(scene)
        found, missing = _settled(scene) if scene.instrumented and not failure else ([], "")
        track = watch.track(begin, end)
    return Observation(
        cut,
        seconds,
        (before, scene.sizes()),
        seen(fault.named_by(scene.mode), track) if scene.instrumented else (),
        found,
        missing,
        healed or not scene.instrumented,
        dict(scene.details),
        with_new_router,
        failure,
    )


def _wait_until_well(fault: Fault, scene: Scene, load: Load, end: float) -> bool:
    """Wait for some time, and for the pair to recover; whether the telemetry has."""
    while True:
        time.sleep(_POLL_SECONDS)
        since = time.monotonic() - end
        serves = recovery_seconds(load.outcomes, end, NEEDED, LIMIT_SECONDS) is not None
        healed = not scene.instrumented or fault.healed(scene)
        if (serves and healed and since >= AFTER_SECONDS) or since >= LIMIT_SECONDS:
            return healed


def _recovers_with_new_router(scene: Scene, load: Load) -> bool:
    """Whether it is the router alone that keeps the pair from serving."""
    scene.restart_router()
    since = time.monotonic()
    while time.monotonic() - since < _ROUTER_SECONDS:
        time.sleep(_POLL_SECONDS)
        if recovery_seconds(load.outcomes, since, NEEDED, _ROUTER_SECONDS) is not None:
            return True
    return False


def _dead(scene: Scene) -> str:
    dead = [server.process.name for server in scene.servers if not server.process.is_running()]
    return f"{' and '.join(dead)} ended" if dead else ""


def _settled(scene: Scene) -> tuple[list[Account], str]:
    """The accounts once they add up and nothing is under way, or as they are when time is up; or what is missing."""
    deadline = time.monotonic() + _SETTLE_SECONDS
    found: list[Account] = []
    with new_client(_SETTLE_SECONDS) as client:
        while True:
            try:
                # What an engine has to report leaves with a step.
                scene.step()
                time.sleep(2 * _POLL_SECONDS)
                found = accounts(_snapshots(scene, client), scene.mode)
            except MissingMetricError as error:
                return [], str(error)
            except httpx.HTTPError as error:
                return found, f"{type(error).__name__} while the accounts were read"
            is_quiet = all(account.holds and not account.under_way for account in found)
            if is_quiet or time.monotonic() > deadline:
                return found, ""


def _snapshots(scene: Scene, client: httpx.Client) -> dict[str, MetricsSnapshot]:
    seen = {role: scrape(client, server.url) for role, server in zip((PREFILL, DECODE), scene.servers, strict=True)}
    return {role: metrics or MetricsSnapshot("") for role, metrics in seen.items()}
