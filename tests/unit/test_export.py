# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""When the export thread takes what it was handed."""

import threading
import time
from collections.abc import Callable

import pytest

from nixl_telemetry.signals import export
from nixl_telemetry.signals.description import Describe, Description
from nixl_telemetry.signals.export import ExportThread
from tests.support.peers import wait_until
from tests.support.threads import cannot_start


class Bench:
    """An export thread, and how much of what it was handed it has taken."""

    def __init__(self, limit: int = 100, pace_seconds: float = 0.0) -> None:
        self.taken = self.dropped = 0
        self.taken_at = 0.0
        self.thread = ExportThread(self._take, limit, self._drop, lambda: self.taken_at + pace_seconds)

    def _take(self, describe: Describe) -> None:
        describe()
        self.taken += 1
        self.taken_at = time.monotonic()

    def _drop(self) -> None:
        self.dropped += 1

    def hand_over(self, count: int, can_wait: bool, describe: Callable[[], Description] = Description) -> None:
        """So many operations."""
        for _ in range(count):
            self.thread.submit(describe, can_wait)


def every(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds and looks."""
    monkeypatch.setattr(export, "ROUND_SECONDS", seconds)
    monkeypatch.setattr(export, "LOOK_SECONDS", seconds)


@pytest.fixture
def long_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round does not end while a test runs."""
    every(60.0, monkeypatch)


@pytest.mark.usefixtures("long_rounds")
def test_some_of_many_wait_for_the_round() -> None:
    """Whoever hands them over wakes nobody, until it is many of them."""
    bench = Bench()
    bench.hand_over(32, can_wait=True)
    time.sleep(0.2)
    assert bench.taken == 0
    bench.hand_over(1, can_wait=True)

    assert wait_until(lambda: bench.taken == 33, 5)


@pytest.mark.usefixtures("long_rounds")
def test_what_cannot_wait_is_taken_at_once() -> None:
    """With all that came before."""
    bench = Bench()
    bench.hand_over(3, can_wait=True)
    bench.hand_over(1, can_wait=False)

    assert wait_until(lambda: bench.taken == 4, 5)


@pytest.mark.usefixtures("long_rounds")
def test_a_short_queue_is_emptied_before_it_is_full() -> None:
    """Where the limit is small."""
    bench = Bench(limit=16)
    bench.hand_over(8, can_wait=True)
    time.sleep(0.1)
    assert bench.taken == 0
    bench.hand_over(1, can_wait=True)

    assert wait_until(lambda: bench.taken == 9, 5)
    assert bench.dropped == 0


def test_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each the thread looks at what is under way, and takes what that gave it to tell; however often it is woken."""
    every(0.2, monkeypatch)
    bench = Bench()
    looked: list[float] = []

    def look() -> None:
        looked.append(time.monotonic())
        bench.hand_over(1, can_wait=True)

    bench.thread.watch(look, [1])
    begin = time.monotonic()
    bench.thread.ensure()
    while len(looked) < 5 and time.monotonic() - begin < 5:
        bench.thread.run(lambda: None, 5)
        time.sleep(0.01)

    assert 0.9 < looked[4] - begin < 2
    assert bench.taken >= 4


def test_a_thread_that_could_not_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process may have no more of them for a while."""
    every(0.1, monkeypatch)
    bench = Bench()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", cannot_start)
        bench.hand_over(1, can_wait=False)
    bench.hand_over(1, can_wait=False)

    assert wait_until(lambda: bench.taken == 2, 5)


def test_a_steady_stream_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first after a pause is taken in the next round, the others together, when they can wait no longer."""
    every(0.2, monkeypatch)
    bench = Bench(pace_seconds=1.0)
    begin = time.monotonic()
    bench.hand_over(1, can_wait=True)
    assert wait_until(lambda: bench.taken == 1, 5)
    first = time.monotonic()
    for _ in range(5):
        bench.hand_over(1, can_wait=True)
        time.sleep(0.1)
    assert bench.taken == 1
    assert wait_until(lambda: bench.taken == 6, 5)

    assert 0.2 <= first - begin < 0.9
    assert 0.9 < time.monotonic() - first < 2


def test_what_is_gathered_is_not_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though something else is handed to the sender meanwhile: the message is the one that was planned for."""
    every(0.1, monkeypatch)
    bench = Bench()
    asked: list[float] = []

    def can_wait_until() -> float:
        asked.append(time.monotonic())
        return time.monotonic() + 0.4 * len(asked)

    bench.thread = ExportThread(bench._take, 100, bench._drop, can_wait_until)
    begin = time.monotonic()
    for number in range(8):
        bench.hand_over(1, can_wait=number > 0)
        time.sleep(0.02)
    assert wait_until(lambda: bench.taken == 8, 5)

    assert time.monotonic() - begin < 0.9
    assert len(asked) <= 3


def test_things_are_looked_at_though_nothing_is_to_be_sent_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """What began while operations are gathered, in time; then in each round."""
    every(0.1, monkeypatch)
    monkeypatch.setattr(export, "_LONGEST_SECONDS", 0.5)
    bench = Bench(pace_seconds=60.0)
    things: list[int] = []
    looked: list[float] = []
    bench.thread.watch(lambda: looked.append(time.monotonic()), things)
    bench.hand_over(1, can_wait=True)
    assert wait_until(lambda: bench.taken == 1, 5)
    begin = time.monotonic()
    things.append(1)
    bench.thread.ensure()
    assert wait_until(lambda: len(looked) >= 3, 5)

    assert looked[0] - begin < 1.5
    assert looked[2] - looked[0] < 1


def test_the_bell_is_heard_under_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation that comes while many wait rings it."""
    every(0.1, monkeypatch)
    bench = Bench()

    def slow() -> Description:
        time.sleep(0.002)
        return Description()

    rings = 0
    begin = time.monotonic()
    while time.monotonic() - begin < 2:
        bench.hand_over(1, can_wait=True, describe=slow)
        rings = max(rings, bench.thread._bell.qsize())
        time.sleep(0.0005)

    assert bench.dropped > 0
    assert rings <= 200


def test_nobody_looks_where_nothing_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """But once more after the last of it is gone, to tell that."""
    every(0.1, monkeypatch)
    bench = Bench()
    things: list[int] = []
    looked: list[int] = []
    bench.thread.watch(lambda: looked.append(len(things)), (), things)
    bench.thread.ensure()
    time.sleep(0.3)
    assert looked == []

    things.append(1)
    bench.thread.ensure()
    assert wait_until(lambda: len(looked) >= 2, 5)
    things.clear()
    assert wait_until(lambda: looked[-1] == 0, 5)
    time.sleep(0.3)
    assert looked[-2:] == [1, 0]


def test_nobody_is_forgotten_by_a_thread_that_falls_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes in just that moment."""
    every(0.001, monkeypatch)
    bench = Bench()
    for number in range(1000):
        bench.hand_over(1, can_wait=number % 3 > 0)
        time.sleep(number % 7 / 4000)
        if number % 5 == 0:
            assert wait_until(lambda count=number + 1: bench.taken == count, 5)  # type: ignore[misc]

    assert wait_until(lambda: bench.taken == 1000, 5)


def test_a_thread_without_work_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle engine is left alone."""
    every(0.05, monkeypatch)
    bench = Bench(pace_seconds=0.1)
    bench.hand_over(3, can_wait=True)
    assert wait_until(lambda: bench.taken == 3, 5)
    assert wait_until(lambda: bench.thread._is_asleep, 5)
    thread = bench.thread._thread
    assert thread is not None
    before = time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident or 0))
    time.sleep(0.5)

    assert time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident or 0)) == before
    bench.hand_over(1, can_wait=True)
    assert wait_until(lambda: bench.taken == 4, 5)


@pytest.mark.usefixtures("long_rounds")
def test_haste_is_not_lost_on_a_thread_that_was_woken_before() -> None:
    """By something that can wait."""
    bench = Bench()
    bench.hand_over(1, can_wait=False)
    assert wait_until(lambda: bench.taken == 1, 5)
    bench.thread._take_at = 0.0
    bench.thread._bell.put(False)
    assert wait_until(lambda: bench.thread._is_asleep, 5)
    bench.hand_over(1, can_wait=True)
    bench.hand_over(1, can_wait=False)

    assert wait_until(lambda: bench.taken == 3, 5)


def test_who_is_overloaded_looks_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine in trouble is the one to be watched."""
    every(0.1, monkeypatch)
    bench = Bench()
    looked: list[int] = []
    bench.thread.watch(lambda: looked.append(bench.taken), [1])

    def slow() -> Description:
        time.sleep(0.02)
        return Description()

    bench.hand_over(50, can_wait=True, describe=slow)

    assert wait_until(lambda: bench.taken == 50, 10)
    assert len([taken for taken in looked if 0 < taken < 50]) >= 3


@pytest.mark.usefixtures("long_rounds")
def test_whoever_waits_is_not_made_to_wait_for_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing has its own time limit."""
    breaks: list[bool] = []

    def with_breaks(items: object, in_haste: Callable[[], bool]) -> object:
        breaks.append(not in_haste())
        return items

    monkeypatch.setattr(export, "with_breaks", with_breaks)
    bench = Bench()
    bench.hand_over(3, can_wait=True)
    done = threading.Event()

    assert bench.thread.run(done.set, 5)
    assert done.is_set()
    assert bench.taken == 3
    assert breaks == [False]
