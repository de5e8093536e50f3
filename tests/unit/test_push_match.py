# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""How the halves of a push meet: every registration is matched, failed or waits; who came first, and for how long."""

import sys
import threading
import time

import pytest
from hypothesis import given, settings, strategies as st

from nixl_telemetry.operations import push_match
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.operations.push_match import PushMatches
from nixl_telemetry.settings import Settings
from nixl_telemetry.signals.metrics import label_values
from nixl_telemetry.signals.semconv import ErrorType, PushSide, TransferMode
from nixl_telemetry.signals.telemetry import Telemetry
from tests.support.observed import Observed

DECODE = Peer("decode", "10.0.0.8", 5700)
REGISTRATIONS, WAIT, UNMATCHED, OLDEST = (
    "nixl_push_registrations_total",
    "nixl_push_match_wait_seconds",
    "nixl_push_unmatched",
    "nixl_push_unmatched_oldest_timestamp_seconds",
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock shows, in seconds."""
    now = [100.0]
    monkeypatch.setattr(push_match, "now_ns", lambda: int(now[0] * 1e9))
    monkeypatch.setattr(push_match, "unix_offset_ns", lambda: 0)
    return now


@pytest.fixture
def matches(observed: Observed, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> PushMatches:
    """Of a push connector; each half begins when the clock says."""
    monkeypatch.setattr(push_match, "_Half", lambda peer: _half(peer, clock))
    return PushMatches(observed.telemetry)


def _half(peer: Peer | None, clock: list[float]) -> push_match._Half:
    return HALF(peer, int(clock[0] * 1e9))


HALF = push_match._Half


def test_the_registration_comes_first(matches: PushMatches, observed: Observed, clock: list[float]) -> None:
    """It waits for the blocks."""
    matches.registered("d-1", DECODE)
    waiting = observed.updates()
    clock[0] += 1.5
    matches.blocks_ready(["p-1"])
    matches.matched("p-1", "d-1")
    matches.matched("p-1", "d-1")

    assert waiting == {(REGISTRATIONS, "received"): 1, (UNMATCHED, "registration"): 1}
    assert observed.updates() == {
        (UNMATCHED, "registration"): -1,
        (REGISTRATIONS, "matched"): 1,
        (WAIT, "registration"): [1.5],
    }


def test_the_blocks_come_first(matches: PushMatches, observed: Observed, clock: list[float]) -> None:
    """They wait for the registration, which is matched as it comes."""
    matches.blocks_ready(["p-1"])
    clock[0] += 0.25
    matches.matched("p-1", "d-1")

    assert observed.updates() == {
        (REGISTRATIONS, "received"): 1,
        (REGISTRATIONS, "matched"): 1,
        (WAIT, "blocks"): [0.25],
    }


def test_each_rank_of_the_decode_side_registers(matches: PushMatches, observed: Observed) -> None:
    """vLLM uses the first, and keeps the second for ever."""
    matches.registered("d-1", DECODE)
    matches.registered("d-1", DECODE)
    matches.matched("p-1", "d-1")
    matches.registered("d-1", DECODE)

    updates = observed.updates()
    assert (updates[REGISTRATIONS, "received"], updates[UNMATCHED, "registration"]) == (1, 0)


def test_blocks_that_nobody_wants(matches: PushMatches, observed: Observed) -> None:
    """They are told when they are looked at, and when their lease expires."""
    matches.blocks_ready(["p-1", "p-2"])
    assert observed.updates() == {}
    matches._look()
    assert observed.updates()[UNMATCHED, "blocks"] == 2
    matches.ended({"p-1", "other"})

    assert observed.updates() == {(UNMATCHED, "blocks"): -1}


def test_threads_agree_on_what_was_counted(matches: PushMatches, observed: Observed) -> None:
    """The export thread counts what is taken away by the writer's and the engine's just now."""

    def come_and_go(prefix: str) -> None:
        for number in range(2000):
            matches.blocks_ready([f"{prefix}{number}"])
            matches._look()
            matches.ended({f"{prefix}{number}"})

    def bring() -> None:
        for number in range(2000):
            matches.blocks_ready([f"w{number}"])
            time.sleep(0)

    def match() -> None:
        for number in range(2000):
            while f"w{number}" not in matches._halves[PushSide.BLOCKS]:
                time.sleep(0)
            matches.matched(f"w{number}", f"d{number}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=come_and_go, args=(prefix,)) for prefix in "ab"]
    threads += [threading.Thread(target=bring), threading.Thread(target=match)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(interval)

    assert observed.updates().get((UNMATCHED, "blocks"), 0) == 0


def test_registrations_that_cannot_be_read(matches: PushMatches, observed: Observed) -> None:
    """Counted as received and failed."""
    matches.unreadable()

    assert observed.updates() == {(REGISTRATIONS, "received"): 1, (REGISTRATIONS, "failed"): 1}


def test_a_peer_that_is_rejected_is_told_of_here(matches: PushMatches, observed: Observed) -> None:
    """With the decode side's request id: the decode side never hears of it."""
    matches.deferred("decode", "p-1", "d-1")
    matches.deferred("other", "p-2", "d-2")
    matches.shook_hands(DECODE, ErrorType.COMPAT_MISMATCH, "model differs")
    matches.shook_hands(DECODE, ErrorType.COMPAT_MISMATCH, "model differs")

    (line,) = observed.messages()
    assert line.startswith("event=nixl.push.failed ")
    assert "nixl.request.id=p-1 nixl.remote.request.id=d-1 nixl.remote.engine.id=decode" in line
    assert "error.type=compat_mismatch" in line
    assert "model differs" in line


def test_a_handshake_that_succeeds_is_not_told_of(matches: PushMatches, observed: Observed) -> None:
    """The push follows."""
    matches.deferred("decode", "p-1", "d-1")
    matches.shook_hands(DECODE, None, "")
    matches.shook_hands(DECODE, ErrorType.TIMEOUT, "later")

    assert observed.messages() == []


def test_halves_that_wait_long(matches: PushMatches, observed: Observed, clock: list[float]) -> None:
    """Each is told of once, both together as ids that can never match, and since when is a metric."""
    matches.registered("d-1", DECODE)
    clock[0] += 4
    matches.blocks_ready(["p-1"])
    matches._look()
    states = [observed.updates()]
    for _ in range(2):
        clock[0] += 10.5
        matches._look()
    states.append(observed.updates())
    matches.matched("p-1", "d-1")
    matches._look()
    states.append(observed.updates())

    names = [line.split()[0] for line in observed.messages()]
    assert sorted(names) == ["event=nixl.push.ids_differ", *2 * ["event=nixl.push.unmatched"]]
    told = "\n".join(observed.messages())
    assert "nixl.push.side=registration nixl.remote.request.id=d-1 nixl.remote.engine.id=decode" in told
    assert "nixl.push.side=blocks nixl.request.id=p-1 nixl.push.waiting.duration=10.5" in told
    assert "must send the same X-Request-Id" in told
    assert [state.get((OLDEST, side, "0")) for state in states for side in ("registration", "blocks")] == [
        100.0,
        104.0,
        None,
        None,
        0.0,
        0.0,
    ]


def test_nothing_is_told_where_the_watchdog_is_off(clock: list[float], observed: Observed) -> None:
    """By its setting."""
    telemetry = Telemetry(Settings.load({"telemetry": {"watchdog_seconds": 0}}, {}), TransferMode.PUSH, {})
    matches = PushMatches(telemetry)
    matches.registered("d-1", DECODE)
    clock[0] += 1e6
    matches._look()
    telemetry.close()

    assert observed.messages() == []


EVENTS = st.lists(
    st.tuples(st.sampled_from(["registered", "blocks", "matched", "ended", "unreadable"]), st.integers(0, 5)),
    max_size=60,
)


@given(EVENTS)
@settings(max_examples=200, deadline=None)
def test_the_numbers_add_up(events: list[tuple[str, int]]) -> None:
    """In whatever order things come: received = matched + failed + unmatched, and no gauge falls below 0."""
    telemetry = Telemetry(Settings.load({}, {}), TransferMode.PUSH, {})
    matches = PushMatches(telemetry)
    for kind, number in events:
        if kind == "registered":
            matches.registered(f"d-{number}", DECODE)
        elif kind == "blocks":
            matches.blocks_ready([f"p-{number}"])
        elif kind == "matched":
            matches.matched(f"p-{number}", f"d-{number}")
        elif kind == "ended":
            matches.ended({f"p-{number}"})
        else:
            matches.unreadable()
    batch = telemetry.drain() or {}
    telemetry.close()
    count = {label_values(key)[0]: value for key, value in batch.get(REGISTRATIONS, {}).items()}
    level = {label_values(key)[0]: value for key, value in batch.get(UNMATCHED, {}).items()}

    received = count.get("matched", 0) + count.get("failed", 0) + level.get("registration", 0)
    assert count.get("received", 0) == received
    assert min([*level.values(), 0]) == 0
