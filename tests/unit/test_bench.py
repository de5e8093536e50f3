# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The arithmetic of the benchmarks, their results and their page."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks import figures, interleave, machine, page, pair, results, run
from benchmarks.figures import Budget, Figure, Interval, Part
from benchmarks.interleave import Cost
from benchmarks.meter import Meter
from benchmarks.share import Counted, difference, until_settled
from nixl_telemetry.seam.instrument import Hooks

ANYWHERE = dict.fromkeys(page._MACHINE_LABELS, "x")


# ---------------------------------------------------------------------------------------------------------------- Turns


class Machine:
    """Its clock goes on by what is done, and by half as much again while it is disturbed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, disturbed: range) -> None:
        self.done: list[str] = []
        self.times = 0
        self._disturbed = disturbed
        monkeypatch.setattr(interleave, "cost_of", lambda work: self.cost("yardstick", 10.0))

    def cost(self, name: str, least: float) -> Cost:
        """What it takes now."""
        self.done.append(name)
        self.times += 1
        slow = 1.5 if self.times in self._disturbed else 1.0
        return Cost(2 * least * slow, least * slow)

    def compare(self, rounds: int) -> interleave.Rounds:
        """Two that take 3 and 4, where the one that comes first is cold."""

        def one(name: str, least: float) -> Cost:
            return self.cost(name, least + (5 if self.done[-1:] == ["yardstick"] else 0))

        return interleave.interleaved(lambda: one("a", 3.0), lambda: one("b", 4.0), rounds, warm_up=0)


def test_each_comes_once_before_and_once_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what the first of two pays is not taken for a difference."""
    machine = Machine(monkeypatch, range(0))
    rounds = machine.compare(20)

    assert machine.done[:7] == ["yardstick", "a", "b", "yardstick", "b", "a", "yardstick"]
    assert {(one.first.cpu, one.second.cpu, one.first.wall, one.second.wall) for one in rounds.taken} == {
        (5.5, 6.5, 11.0, 13.0)
    }
    assert len(rounds.counted) == len(rounds.taken) == 20


def test_rounds_of_a_disturbed_machine_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are taken for them, and what all of them give is told."""
    machine = Machine(monkeypatch, range(1, 7 * 10))
    rounds = machine.compare(20)

    assert (len(rounds.counted), len(rounds.taken)) == (20, 30)
    assert {cost.cpu for cost in rounds.firsts} == {5.5}
    assert {cost.cpu for cost in rounds.seconds} == {6.5}
    share, added = interleave.at_any_speed("x", rounds)
    assert (share.name, round(share.value, 1), share.unit) == ("x: rounds that count", 66.7, "%")
    assert (added.name, added.value, added.unit) == ("x: added over all rounds", 0.001, "µs")


def test_it_does_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too few were at full speed, there is nothing to tell them by, and all count."""
    rounds = Machine(monkeypatch, range(8, 10**6)).compare(20)

    assert len(rounds.counted) == len(rounds.taken) == 20 * interleave.MOST


def seen(*first_token: float) -> pair.Round:
    """What a client saw in a round."""
    return pair.Round(1.0, list(first_token), [1.0], {})


def test_a_request_is_compared_with_the_same_one_elsewhere() -> None:
    """Prompts differ by more than pairs do."""
    ours = [seen(1.1, 11.0, 110.0), seen(2.2, 22.0)]
    first, second = [seen(1.0, 10.0, 100.0), seen(2.0, 20.0)], [seen(1.0, 10.0, 50.0), seen(2.0, 20.0)]
    both = [pair._joined(a, b) for a, b in zip(first, second, strict=True)]
    statistic = pair._STATISTICS["time to first token p50, longer than stock"]

    value, interval = statistic(ours, both)
    assert value == pytest.approx(1.1)
    assert interval.low == pytest.approx(1.1)
    assert statistic(first, second)[0] == 1.0


# ----------------------------------------------------------------------------------------------------------- Arithmetic


@pytest.mark.parametrize(("share", "expected"), [(0.5, 50), (0.99, 99), (0.991, 100), (1.0, 100), (0.001, 1)])
def test_a_percentile_is_one_of_the_values(share: float, expected: int) -> None:
    assert figures.percentile(range(100, 0, -1), share) == expected


def test_pairs_are_compared_with_each_other() -> None:
    assert figures.differences([3, 5], [1, 2]) == [2, 3]
    assert figures.ratios([3, 5], [1, 2]) == [3, 2.5]
    with pytest.raises(ValueError, match="argument 2"):
        figures.ratios([1], [1, 2])


def test_an_interval_holds_the_median_and_is_the_same_every_time() -> None:
    values = [float(value % 17) for value in range(100)]

    interval = figures.median_interval(values)

    assert interval.low <= median(values) <= interval.high
    assert interval.low > min(values)
    assert interval.high < max(values)
    assert interval == figures.median_interval(values)


def test_more_values_make_an_interval_narrower() -> None:
    few, many = (figures.median_interval([float(value % 17) for value in range(count)]) for count in (17, 1700))

    assert many.high - many.low < few.high - few.low


def test_equal_values_have_an_interval_without_width() -> None:
    assert figures.median_interval([2.0] * 9) == (2.0, 2.0)


def test_rounds_are_drawn_whole() -> None:
    assert figures.pooled([[1, 2], [3]], [1, 0, 1]) == [3, 1, 2, 3]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [((0, 1), (1, 2), True), ((0, 1), (1.1, 2), False), ((0, 9), (3, 4), True), ((5, 6), (0, 1), False)],
)
def test_intervals_overlap(first: tuple[float, float], second: tuple[float, float], expected: bool) -> None:
    assert Interval(*first).overlaps(Interval(*second)) is expected


# -------------------------------------------------------------------------------------------------------------- Budgets


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (Budget("b", 5.0, 5.0, "µs"), True),
        (Budget("b", 5.1, 5.0, "µs"), False),
        (Budget("b", 8.0, 8.0, "times", at_least=True), True),
        (Budget("b", 7.9, 8.0, "times", at_least=True), False),
        (Budget("b", 1.0, 5.0, "µs", besides=False), False),
    ],
)
def test_a_limit_is_kept(budget: Budget, expected: bool) -> None:
    """Up to and with the limit itself, and only where what else is asked for holds."""
    assert budget.ok is expected


CONTROL = (1.0, Interval(0.98, 1.02))


@pytest.mark.parametrize(
    ("ratio", "interval", "expected"),
    [
        (1.01, (0.99, 1.03), True),
        (0.90, (0.82, 0.99), True),  # better is no harm
        (1.04, (1.00, 1.08), False),  # too much worse
        (1.025, (1.021, 1.03), False),  # little, but not as stock is to itself
    ],
)
@pytest.mark.parametrize("more_is_better", [False, True])
def test_a_ratio_is_judged_by_how_much_worse_it_is_and_by_the_control(
    ratio: float, interval: tuple[float, float], expected: bool, more_is_better: bool
) -> None:
    if more_is_better:
        ratio, interval = 2 - ratio, (2 - interval[1], 2 - interval[0])
    budget = figures.compare("throughput", (ratio, Interval(*interval)), CONTROL, more_is_better)

    assert budget.ok is expected
    assert budget.value == pytest.approx(100 * ((1 - ratio) if more_is_better else (ratio - 1)))
    assert budget.interval is not None
    assert budget.interval.low <= budget.value <= budget.interval.high
    assert f"instrumented ÷ stock {ratio:.3f}" in budget.remark
    assert "stock ÷ stock 1.000 [0.980, 1.020]" in budget.remark


def test_what_is_spent_is_the_difference_of_two_reports() -> None:
    """Hooks and threads that came in between count from 0; what counting costs is taken off."""
    before = {
        "at": 100.0,
        "process_ns": 1e9,
        "writer_ns": 0,
        "hooks": {"a": [1e6, 1], "nothing": [0, 0]},
        "threads": {"others": 1e9},
    }
    after = {
        "at": 110.0,
        "process_ns": 3.11e9,
        "writer_ns": 0.08e9,
        "hooks": {"a": [16e6, 6], "b": [5e6, 1], "nothing": [4e6, 4]},
        "threads": {"others": 3e9, "nixl-telemetry-send": 5e6, "gRPC": 1e6},
    }

    counted = difference("decode's worker", before, after)

    assert counted.clock_ns == 1e6
    assert counted.own == pytest.approx({"a": 0.01, "b": 0.004, "nixl-telemetry-send": 0.005, "gRPC": 0.001})
    assert counted.process == pytest.approx(2.0)
    assert counted.seconds == pytest.approx(10.0)
    assert counted.share == pytest.approx(1.0)


def test_what_the_suite_does_after_the_load_counts() -> None:
    """But not what an idle process takes."""
    load = Counted("decode's worker", 2.0, {"a": 0.01, "send": 0.002}, seconds=10.0)
    whole = Counted("decode's worker", 9.0, {"a": 0.01, "send": 0.007}, seconds=21.0)

    counted = until_settled(load, whole)

    assert (counted.own, counted.seconds) == (whole.own, 21.0)
    assert counted.process == pytest.approx(2.005)


@pytest.mark.parametrize(("own", "off", "left"), [(0.005, 0.004, 0.003), (0.005, 0.02, 0.0)])
def test_what_grpc_takes_without_the_suite_is_not_its_own(own: float, off: float, left: float) -> None:
    """By the second: one run may take longer than the other."""
    with_suite = Counted("decode's worker", 2.0, {"a": 0.01, "gRPC": own}, seconds=10.0)
    without = Counted("decode's worker", 2.0, {"gRPC": off}, seconds=20.0)

    assert with_suite.less_grpc_of(without).own == pytest.approx({"a": 0.01, "gRPC": left})
    assert with_suite.less_grpc_of(without).process == 2.0


# ---------------------------------------------------------------------------------------------------------------- Meter


class Stock:
    """As a class of vLLM's."""

    def step(self) -> int:
        spin(4_000_000)
        return self.inside()

    def inside(self) -> int:
        return 7


class SomeHooks(Hooks):
    """As hooks are: the stock class comes behind them when an object is instrumented."""

    def step(self) -> int:
        spin(1_000_000)
        return int(self._stock_class.step(self))

    def inside(self) -> int:
        spin(1_000_000)
        return int(self._stock_class.inside(self))


def test_the_meter_counts_hooks_and_not_what_they_call_of_vllm() -> None:
    """A hook that is called by vLLM's code under another hook counts for itself."""
    meter = Meter()

    assert meter.layered(SomeHooks, Stock)().step() == 7

    counted = meter.hooks()
    assert {name: count for name, (_, count) in counted.items()} == {"Stock.step": 2, "Stock.inside": 2}
    assert 0.9e6 < counted["Stock.step"][0] < 3e6
    assert 0.9e6 < counted["Stock.inside"][0] < 3e6


def spin(nanoseconds: int) -> None:
    """Use up CPU time of this thread."""
    end = time.thread_time_ns() + nanoseconds
    while time.thread_time_ns() < end:
        pass


# ------------------------------------------------------------------------------------------------ Results and the page

PART = Part(
    [Budget("a step", 4.123456, 5.0, "µs", interval=Interval(4.0, 4.2), remark="quiet")],
    [Figure("stock", 1234.5, "µs")],
    {"µs": [1.23456789, 2.0]},
)


def test_results_have_the_schema() -> None:
    merged = results.merge({}, ANYWHERE, {"step": results.encode(PART)})

    assert merged["machine"] == ANYWHERE
    (budget,) = merged["budgets"]
    assert budget == {
        "part": "step",
        "name": "a step",
        "value": 4.123,
        "limit": 5.0,
        "unit": "µs",
        "ok": True,
        "at_least": False,
        "interval": [4.0, 4.2],
        "remark": "quiet",
    }
    assert merged["samples"] == {"step: µs": [1.235, 2.0]}


def test_a_run_of_some_parts_keeps_the_others_of_the_same_machine() -> None:
    first = results.merge({}, ANYWHERE, {"step": results.encode(PART), "pair": results.encode(PART)})

    again = results.merge(first, ANYWHERE, {"pair": results.encode(Part())})
    elsewhere = results.merge(first, {**ANYWHERE, "cores": 64}, {"pair": results.encode(Part())})

    assert [entry["part"] for entry in again["budgets"]] == ["step"]
    assert list(again["samples"]) == ["step: µs"]
    assert elsewhere["budgets"] == []


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    merged = results.merge({}, ANYWHERE, {"step": results.encode(PART), "pair": results.encode(Part())})
    path = tmp_path / "results.json"
    results.save(merged, path)

    assert results.load(path) == merged
    assert results.load(tmp_path / "missing.json") == {}


def test_the_page_has_every_budget() -> None:
    merged = results.merge({}, ANYWHERE, {"step": results.encode(PART)})

    made = page.make(merged)

    assert "| a step | 4.12 [4, 4.2] µs | ≤ 5 µs | yes |" in made
    assert "| stock | 1,234 µs |" in made
    assert "All are kept.\n" in made
    missed = [{**merged["budgets"][0], "ok": False}]
    assert "**Not kept:** a step (4.12 [4, 4.2] µs).\n" in page.make({**merged, "budgets": missed})
    assert page.sentence(merged["budgets"][0]) == "kept: a step: 4.12 [4, 4.2] µs, ≤ 5 µs (quiet)"


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Part]:
    """What parts find in place of measuring; results and page go to a folder of the test's own."""
    found: dict[str, Part] = {}

    def measure(modes: Sequence[str]) -> Part:
        assert modes == ("pull",)
        return found["share"]

    monkeypatch.setattr(run, "_micro", lambda part: results.encode(found[part]))
    monkeypatch.setitem(run.SERVERS, "share", measure)
    monkeypatch.setattr(machine, "describe", lambda: ANYWHERE)
    monkeypatch.setattr(results, "PATH", tmp_path / "results.json")
    monkeypatch.setattr(page, "PATH", tmp_path / "performance.md")
    return found


@pytest.mark.parametrize(
    ("share", "code", "summary"),
    [(0.9, 0, "bench: 2 of 2 budgets kept, 0 s"), (1.1, 1, "bench: 1 of 2 budgets kept, 0 s; missed: a share")],
)
def test_a_run_ends_with_its_verdict(
    parts: dict[str, Part], capsys: pytest.CaptureFixture[str], share: float, code: int, summary: str
) -> None:
    """The last line sums up, and the exit code is for whoever does not read it."""
    parts |= {"step": PART, "share": Part([Budget("a share", share, 1.0, "%")])}

    assert run.main(["--only", "step", "share", "--modes", "pull"]) == code

    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == summary
    assert "  kept: a step: 4.12 [4, 4.2] µs, ≤ 5 µs (quiet)" in lines
    assert f"  {'MISSED' if code else 'kept'}: a share: {share} %, ≤ 1 %" in lines
    found = results.load(results.PATH)
    assert [(budget["part"], budget["ok"]) for budget in found["budgets"]] == [("share", not code), ("step", True)]
    assert page.PATH.read_text(encoding="utf-8") == page.make(found)


def test_a_run_of_some_parts_is_judged_with_the_others(
    parts: dict[str, Part], capsys: pytest.CaptureFixture[str]
) -> None:
    """What an earlier run on the same machine missed is missed until it is measured again."""
    parts |= {"step": PART, "share": Part([Budget("a share", 1.1, 1.0, "%")])}
    assert run.main(["--only", "share", "--modes", "pull"]) == 1
    assert run.main(["--only", "step"]) == 1
    parts["share"] = Part([Budget("a share", 0.9, 1.0, "%")])

    assert run.main(["--only", "share", "--modes", "pull"]) == 0
    assert [line[: line.index(",")] for line in capsys.readouterr().out.splitlines() if " budgets kept" in line] == [
        "bench: 0 of 1 budgets kept",
        "bench: 1 of 2 budgets kept",
        "bench: 2 of 2 budgets kept",
    ]


def test_a_machine_is_described_without_its_name() -> None:
    described = machine.describe()

    assert set(described) == set(page._MACHINE_LABELS)
    assert not any("/" in str(value) for name, value in described.items() if name != "cpu")


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_bf16", "bfloat16"),
        ("Features\t: fp asimd bf16 i8mm", "bfloat16"),
        ("flags\t\t: fpu avx2 fma", "float32"),
        ("Features\t: fp asimd", "float32"),
    ],
)
def test_models_run_in_a_type_of_the_cpu(monkeypatch: pytest.MonkeyPatch, cpuinfo: str, dtype: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: f"processor\t: 0\n{cpuinfo}\n")

    assert machine.dtype() == dtype


def test_the_page_is_that_of_the_committed_results() -> None:
    found: dict[str, Any] = json.loads(results.PATH.read_text(encoding="utf-8"))

    assert page.PATH.read_text(encoding="utf-8") == page.make(found)
    assert {budget["part"] for budget in found["budgets"]} >= {"step", "transfer", "block_spans", "share", "pair"}
