# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Faults under load: the arithmetic, what names a fault, how it is judged, and the page. Real ones: `make chaos`."""

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks import machine
from benchmarks.chaos import page, report
from benchmarks.chaos.__main__ import main
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.identity import Account, MissingMetricError, accounts
from benchmarks.chaos.judge import is_fewer, problems
from benchmarks.chaos.load import (
    SERVED,
    WRONG,
    Load,
    Outcome,
    Phases,
    Tally,
    phases,
    questions,
    recovery_seconds,
    tally,
)
from benchmarks.chaos.malformed import flood
from benchmarks.chaos.scene import Sizes
from benchmarks.chaos.signals import Down, Logged, Named, Rise, Silence, Slow, seen
from benchmarks.chaos.trial import Observation
from benchmarks.chaos.watch import Look, Track
from benchmarks.load import Request
from nixl_telemetry.operations.handshake_request import HandshakeRequests
from nixl_telemetry.seam.listener import HandshakeListener
from nixl_telemetry.signals.semconv import RequestResult
from nixl_telemetry.testbed import MetricsSnapshot, TinyModel
from tests.support.observed import Observed
from tests.support.peers import wait_until

# ------------------------------------------------------------------------------------------------------------- Requests


def outcomes(*results: str, start: float = 0.0) -> list[Outcome]:
    """One request after the other, of a second each."""
    return [Outcome(start + number, start + number + 0.9, result) for number, result in enumerate(results)]


def test_requests_are_counted_by_what_became_of_them() -> None:
    assert tally(outcomes(SERVED, "500", SERVED, "timeout", "500", WRONG)) == Tally(
        6, 2, {"500": 2, "timeout": 1, WRONG: 1}
    )


def test_what_a_fault_touches_is_during_it() -> None:
    """Also what was under way when it began, and what it began with but outlasted."""
    load = [
        Outcome(0.0, 0.9, SERVED),
        Outcome(0.5, 1.5, "500"),
        Outcome(1.2, 1.4, "500"),
        Outcome(1.9, 5.0, "timeout"),
        Outcome(2.0, 2.1, SERVED),
    ]

    cut = phases(load, begin=1.0, end=2.0)

    assert (cut.before.sent, cut.during.sent, cut.after.sent) == (1, 3, 1)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([SERVED] * 3, 0.9),
        (["500", SERVED, SERVED, SERVED], 1.9),
        ([SERVED, SERVED, "500", SERVED, SERVED, SERVED], 3.9),
        ([SERVED, WRONG, SERVED, SERVED], None),
        ([SERVED, SERVED], None),
        (["500"] * 8 + [SERVED] * 3, None),  # too late
    ],
)
def test_recovered_is_served_again_and_again(results: list[str], expected: float | None) -> None:
    """The time is that of the first of them; one that fails between them begins it anew."""
    found = recovery_seconds(outcomes(*results, start=10.0), end=10.0, needed=3, limit=10.0)

    assert found == pytest.approx(expected) if expected is not None else found is None


def test_what_was_asked_before_the_end_is_no_recovery() -> None:
    assert recovery_seconds(outcomes(*[SERVED] * 5, start=0.0), end=3.0, needed=3, limit=10.0) is None


def test_questions_are_the_same_every_time() -> None:
    model = TinyModel()

    assert questions(model) == questions(model)
    assert len({question.prompt for question in questions(model)}) == len(questions(model))


def test_a_load_is_paced_and_says_how_each_request_ended() -> None:
    """What fails at once is not asked more often."""
    request = httpx.Request("POST", "http://x")
    ends: list[Any] = [
        (1, 2),
        (1, 3),
        httpx.ReadTimeout("t"),
        httpx.ConnectError("c"),
        httpx.ReadError("r"),
        httpx.HTTPStatusError("s", request=request, response=httpx.Response(503)),
        KeyError("choices"),
    ]
    left = list(ends)
    lock = threading.Lock()

    def ask(client: httpx.Client, question: Request) -> tuple[int, ...]:
        with lock:
            end = left.pop(0) if left else (1, 2)
        if isinstance(end, Exception):
            raise end
        return end

    question = Request("w1", 1)
    start = time.monotonic()
    with Load(ask, [question], {question: (1, 2)}) as load:
        assert wait_until(lambda: len(load.outcomes) >= len(ends), 30)
    seconds = time.monotonic() - start

    assert len(load.outcomes) <= 4 * seconds + 2
    counted = Counter(outcome.result for outcome in load.outcomes)
    assert counted[WRONG] == 1
    assert set(counted) == {
        SERVED,
        WRONG,
        "timeout",
        "connection refused",
        "connection lost",
        "503",
        "no answer in the answer",
    }


# ------------------------------------------------------------------------------------------------------------- Accounts


def snapshot(**values: float) -> MetricsSnapshot:
    """Series by name; labels are behind two underscores, as in ``nixl_x_total__event__sent``."""
    lines = []
    for name, value in values.items():
        metric, *labels = name.split("__")
        pairs = ",".join(f'{label}="{text}"' for label, text in zip(labels[::2], labels[1::2], strict=True))
        lines.append(f"{metric}{{{pairs}}} {value}\n")
    return MetricsSnapshot("".join(lines))


def transfers(direction: str, posted: float, done: float, failed: float, in_flight: float) -> dict[str, float]:
    """As an instance exposes them."""
    count = f"nixl_transfer_duration_seconds_count__direction__{direction}__error_type__"
    return {
        f"nixl_transfers_posted_total__direction__{direction}": posted,
        count: done,
        f"{count}transfer_failed": failed,
        f"nixl_transfers_in_flight__direction__{direction}": in_flight,
    }


LEASES = {
    "nixl_leases_opened_total": 9,
    "nixl_lease_duration_seconds_count__outcome__released": 5,
    "nixl_lease_duration_seconds_count__outcome__expired": 3,
    "nixl_leases_held": 1,
}
REGISTRATIONS = {
    "nixl_push_registrations_total__event__sent": 0,
    "nixl_push_registrations_total__event__received": 7,
    "nixl_push_registrations_total__event__matched": 4,
    "nixl_push_registrations_total__event__failed": 1,
    "nixl_push_unmatched__side__registration": 2,
    "nixl_push_unmatched__side__blocks": 5,
}


def test_accounts_of_a_pull_pair() -> None:
    """The decode instance moves the KV."""
    metrics = {"P": snapshot(**LEASES), "D": snapshot(**transfers("read", 6, 3, 2, 1))}

    moved, leases = accounts(metrics, "pull")

    assert moved == Account("transfers of D", "posted", {"posted": 6, "done": 3, "failed": 2, "in_flight": 1})
    assert leases == Account("leases of P", "opened", {"opened": 9, "released": 5, "expired": 3, "held": 1})
    assert moved.holds
    assert leases.holds
    assert (moved.under_way, leases.under_way) == (1, 1)


def test_accounts_of_a_push_pair() -> None:
    """The prefill instance moves it, and matches registrations."""
    metrics = {"P": snapshot(**LEASES, **transfers("write", 6, 3, 2, 1), **REGISTRATIONS), "D": snapshot()}

    moved, _, registrations = accounts(metrics, "push")

    assert moved.subject == "transfers of P"
    assert registrations.numbers == {"received": 7, "matched": 4, "failed": 1, "unmatched": 2}
    assert registrations.holds
    assert registrations.under_way == 0


@pytest.mark.parametrize("name", [*LEASES, *REGISTRATIONS])
def test_a_number_that_is_off_breaks_an_account(name: str) -> None:
    numbers = {**LEASES, **transfers("write", 6, 3, 2, 1), **REGISTRATIONS}
    numbers[name] += 1

    found = accounts({"P": snapshot(**numbers), "D": snapshot()}, "push")

    uninvolved = ("event__sent", "side__blocks")
    assert all(account.holds for account in found) is name.endswith(uninvolved)


@pytest.mark.parametrize("name", [*transfers("read", 0, 0, 0, 0), *LEASES])
def test_a_missing_metric_is_named(name: str) -> None:
    """Not taken for 0. Failed transfers are a part of a series that others keep there."""
    of_p, of_d = dict(LEASES), transfers("read", 6, 3, 2, 1)
    of_p.pop(name, None)
    of_d.pop(name, None)
    if name.endswith("transfer_failed"):
        return

    with pytest.raises(MissingMetricError, match=name.partition("__")[0]):
        accounts({"P": snapshot(**of_p), "D": snapshot(**of_d)}, "pull")


# --------------------------------------------------------------------------------------------------- What names a fault


def track(*values: float | None, begin: float = 2.5, end: float = 5.5, name: str = "n_total") -> Track:
    """A look every second, with a counter's values; without one, the instance does not answer."""
    looks = [
        Look(float(at), None if value is None else MetricsSnapshot(f"{name} {value}\n"), {})
        for at, value in enumerate(values)
    ]
    return Track(begin, end, {"P": looks, "D": []})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0, 0, 0, 0, 1), 1.5),
        ((0, 5, 5, 5, 5), None),  # before the fault
        ((7, 7, 7, None, None, 3), 2.5),  # a new process counts from 0, and has counted something
        ((7, 7, 7, None, 0, 0, 2), 3.5),
        ((7, 7, 7, None, 0, 0), None),
        ((None, None, None, 1), 0.5),  # a series that was not there
    ],
)
def test_a_counter_that_rose(values: tuple[float | None, ...], expected: float | None) -> None:
    assert Rise("P", "n_total").seen_after(track(*values)) == expected
    assert Rise("D", "n_total").seen_after(track(*values)) is None


def test_only_the_labels_that_are_asked_for_count() -> None:
    looks = [Look(float(at), MetricsSnapshot(f'n{{a="x"}} {at}\nn{{a="y"}} 0\n'), {}) for at in range(4)]
    looked = Track(0.5, 1.0, {"P": looks})

    assert Rise("P", "n", {"a": "x"}).seen_after(looked) == 0.5
    assert Rise("P", "n", {"a": "y"}).seen_after(looked) is None
    assert str(Rise("P", "n", {"a": "x"})) == 'n{a="x"} at P'


def test_a_histogram_above_an_edge() -> None:
    looks = [
        Look(float(at), MetricsSnapshot(f'h_bucket{{le="5.0"}} {at}\nh_count {at + (at >= 3)}\n'), {})
        for at in range(5)
    ]
    looked = Track(0.5, 1.0, {"P": looks})

    assert Slow("P", "h", above="5.0").seen_after(looked) == 2.5
    assert str(Slow("P", "h", above="5.0")) == "h above 5 s at P"


def test_a_log_event() -> None:
    looks = [Look(float(at), None, {"nixl.lease.expired": 1} if at in {0, 3} else {}) for at in range(5)]
    looked = Track(0.5, 1.0, {"P": looks})

    assert Logged("P", "nixl.lease.expired").seen_after(looked) == 2.5
    assert Logged("P", "nixl.transfer.failed").seen_after(looked) is None


def test_an_instance_that_does_not_answer() -> None:
    assert Down("P").seen_after(track(0, None, 0, 0, None)) == 1.5
    assert Down("P").seen_after(track(0, None, 0, 0, 0)) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1, 2, 3, 3, 3, 3, 3), 3.5),
        ((1, 2, 3, 3, 3, 4, 5), None),
        ((1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7), None),  # after the fault there may be no load
    ],
)
def test_a_counter_that_stands_still(values: tuple[float, ...], expected: float | None) -> None:
    assert Silence("P", "n_total").seen_after(track(*values)) == expected


def test_the_most_telling_signal_names_a_fault() -> None:
    """Not the quickest one."""
    looks = track(0, 0, 0, None, 1)
    rose, other, down = Rise("P", "n_total"), Rise("P", "m_total"), Down("P")

    assert seen([rose, other, down], looks) == [Named("n_total at P", 1.5), Named("up == 0 of P", 0.5)]
    assert seen([other], looks) == []


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_every_fault_has_signals(fault: Any, mode: str) -> None:
    assert all(str(signal) for signal in fault.named_by(mode))
    assert fault.named_by(mode)


# ------------------------------------------------------------------------------------------------ The verdict, the page


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((100, 95), (100, 100), False),
        ((100, 93), (100, 100), False),
        ((100, 92), (100, 100), True),
        ((10, 8), (10, 10), False),
        ((10, 7), (10, 10), True),
        ((200, 20), (50, 5), False),
        ((10, 0), (0, 0), False),
    ],
)
def test_fewer_than_stock(ours: tuple[int, int], theirs: tuple[int, int], expected: bool) -> None:
    """By more than one in twenty, and two more."""
    assert is_fewer(ours, theirs) is expected


def observation(**changes: Any) -> Observation:
    """A fault that was borne."""
    cut = Phases(Tally(30, 30, {}), Tally(40, 10, {"500": 30}), Tally(50, 49, {"timeout": 1}))
    values: dict[str, Any] = {
        "phases": cut,
        "recovery_seconds": 1.234,
        "sizes": (Sizes(2000.0, 90), Sizes(2001.5, 91)),
        "named": [
            Named('nixl_lease_duration_seconds_count{outcome="expired"} at P', 31.25),
            Named("up == 0 of D", 1.0),
        ],
        "accounts": [Account("leases of P", "opened", {"opened": 3, "released": 2, "expired": 1, "held": 0})],
    }
    return Observation(**(values | changes))


STOCK = observation(named=(), accounts=())


def test_an_entry_has_the_schema() -> None:
    entry = report.entry(observation(), STOCK)

    assert entry["problems"] == []
    assert {name: entry[name] for name in ("sent", "served", "failed", "stock_sent", "stock_served")} == {
        "sent": 90,
        "served": 59,
        "failed": 31,
        "stock_sent": 90,
        "stock_served": 59,
    }
    assert entry["failures"] == {"500": 30, "timeout": 1}
    assert entry["named_by"] == 'nixl_lease_duration_seconds_count{outcome="expired"} at P'
    assert (entry["recovered"], entry["recovery_s"], entry["stock_recovered"]) == (True, 1.2, True)
    assert entry["identity_holds"] is True
    assert entry["identity"]["leases of P"]["released"] == 2
    assert entry["memory_mib"] == [2000.0, 2001.5]
    assert entry["threads"] == [90, 91]
    json.dumps(entry)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"named": ()}, "no signal named it"),
        ({"accounts": ()}, "there are none"),
        ({"accounts": (), "missing": "P has no nixl_leases_held"}, "P has no nixl_leases_held"),
        ({"accounts": [Account("leases of P", "opened", {"opened": 3, "held": 1})]}, "do not add up: leases of P"),
        ({"recovery_seconds": None}, "not recovered"),
        ({"healed": False}, "not recovered"),
        ({"failure": "decode-1 died"}, "decode-1 died"),
        (
            {"phases": Phases(Tally(3, 3, {}), Tally(40, 2, {}), Tally(50, 49, {}))},
            "2 of 40 that arrived were served during",
        ),
        (
            {"phases": Phases(Tally(3, 3, {}), Tally(40, 10, {}), Tally(50, 40, {}))},
            "40 of 50 that arrived were served after",
        ),
    ],
)
def test_what_is_wrong_is_said(changes: Mapping[str, Any], problem: str) -> None:
    entry = report.entry(observation(**changes), STOCK)

    assert len(entry["problems"]) == 1
    assert problem in entry["problems"][0]
    assert f"PROBLEM: {entry['problems'][0]}" in report.sentence("kill_p.pull", entry)


def test_what_the_router_turns_away_is_not_compared() -> None:
    """It finds an instance that is up again with its next look, which is later for one pair than for the other."""
    lucky = observation(phases=Phases(Tally(3, 3, {}), Tally(40, 10, {}), Tally(46, 26, {"503": 20})))
    unlucky = observation(phases=Phases(Tally(3, 3, {}), Tally(40, 10, {}), Tally(47, 15, {"503": 32})))

    assert report.entry(unlucky, lucky)["phases"]["after"] == [47, 15, 32]
    assert problems(report.entry(unlucky, lucky)) == []

    # Only our pair is turned away, or far more often.
    shut = Phases(Tally(3, 3, {}), Tally(40, 10, {}), Tally(50, 0, {"503": 50}))
    open_ = observation(phases=Phases(Tally(3, 3, {}), Tally(40, 10, {}), Tally(50, 50, {})))
    assert "0 of 50 that arrived were served after" in problems(report.entry(observation(phases=shut), open_))[0]
    assert "0 of 10 that arrived were served after" in problems(report.entry(observation(phases=shut), lucky))[0]


def test_where_stock_does_not_recover_nothing_is_asked() -> None:
    entry = report.entry(observation(recovery_seconds=None), observation(recovery_seconds=None))

    assert problems(entry) == []


def test_it_may_be_the_router_that_does_not_recover() -> None:
    """Then the line and the page say so."""
    changes = {"recovery_seconds": None, "recovered_with_new_router": True}
    entry = report.entry(observation(**changes), observation(recovery_seconds=None, recovered_with_new_router=False))

    assert "; NOT recovered, with a new router it is; NOT stock recovered; " in report.sentence("kill_p.push", entry)
    made = page.make(report.merge({}, ANYWHERE, {"kill_p.push": entry}))
    assert "| **no**; with a new router yes | **no** | add up |" in made


ANYWHERE = machine.describe()


def test_a_run_of_some_faults_keeps_the_others_of_the_same_machine(tmp_path: Path) -> None:
    made = report.entry(observation(), STOCK)
    first = report.merge({}, ANYWHERE, {"kill_p.push": made, "collector.pull": made})

    again = report.merge(first, ANYWHERE, {"kill_p.pull": made})
    elsewhere = report.merge(first, {**ANYWHERE, "cores": 64}, {"kill_p.pull": made})

    assert list(again["faults"]) == ["collector.pull", "kill_p.pull", "kill_p.push"]
    assert list(elsewhere["faults"]) == ["kill_p.pull"]
    report.save(again, tmp_path / "chaos.json")
    assert report.load(tmp_path / "chaos.json") == again
    assert report.load(tmp_path / "missing.json") == {}


def test_the_page_has_every_fault_and_what_is_wrong() -> None:
    good, bad = report.entry(observation(), STOCK), report.entry(observation(named=()), STOCK)

    made = page.make(report.merge({}, ANYWHERE, {"kill_d.pull": good, "kill_d.push": bad}))

    for fault in FAULTS.values():
        assert f"{fault.title}\n:   What is done: " in made
    assert (
        '| decode instance killed | pull | `nixl_lease_duration_seconds_count{outcome="expired"} at P`, 31.2 s; '
        "also `up == 0 of D`, 1 s | 59 of 90 | 59 of 90 | 1.2 s | 1.2 s | add up |"
    ) in made
    assert "- decode instance killed, push: no signal named it\n" in made


def test_the_page_is_that_of_the_committed_results() -> None:
    found = report.load()

    assert page.PATH.read_text(encoding="utf-8") == page.make(found)
    assert set(found["faults"]) == {f"{name}.{mode}" for name in FAULTS for mode in ("pull", "push")}


def test_a_fault_that_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    """The message has those that are."""
    with pytest.raises(SystemExit):
        main(["--only", "kill_p,earthquake"])

    message = capsys.readouterr().err
    assert "earthquake: not one of collector, disk" in message


# ------------------------------------------------------------------------------------------------------------ The flood


def test_every_message_of_the_flood_is_malformed(observed: Observed) -> None:
    """The listener counts each of them once, and serves no one."""
    requests = HandshakeRequests(observed.telemetry)
    errors: list[Exception] = []
    listener = HandshakeListener(b"get_meta_msg", {(0, 0): b"payload"}, requests, None, errors.append)
    listener.bind("127.0.0.1", 0)
    assert listener._server is not None
    stop = threading.Event()
    thread = threading.Thread(target=listener.serve, args=(stop,))
    thread.start()
    try:
        sent = flood(listener._server.getsockname()[1], count=400, seconds=1.0)
        assert sent == 400
        assert wait_until(lambda: requests.count(RequestResult.MALFORMED) >= sent, 30)
    finally:
        stop.set()
        thread.join()
        listener.close()

    assert {str(result): requests.count(result) for result in RequestResult} == {
        "served": 0,
        "malformed": 400,
        "unknown_rank": 0,
        "not_allowed": 0,
    }
    assert errors == []
