# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Breaks in what the suite's threads do at once."""

from types import SimpleNamespace

import pytest

from nixl_telemetry.signals import breaks
from nixl_telemetry.signals.breaks import with_breaks

ITEM_NS = 400_000


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The breaks, on a clock on which each item takes 0.4 ms."""
    slept: list[float] = []
    clock = iter(range(0, 10**12, ITEM_NS))
    monkeypatch.setattr(breaks, "time", SimpleNamespace(perf_counter_ns=lambda: next(clock), sleep=slept.append))
    return slept


@pytest.mark.parametrize(("in_haste", "expected"), [(False, [0.002] * 3), (True, [])])
def test_breaks(slept: list[float], in_haste: bool, expected: list[float]) -> None:
    """One after each millisecond, unless somebody waits; every item comes, in order."""
    assert list(with_breaks(range(11), lambda: in_haste)) == list(range(11))
    assert slept == expected


def test_a_little_work_is_done_at_once(slept: list[float]) -> None:
    """Most rounds have an operation or two."""
    assert list(with_breaks("ab", lambda: False)) == ["a", "b"]
    assert slept == []
