# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What `make mixin-live` asks of Prometheus for a board, without a Prometheus."""

import json
import re
from typing import Any, cast

import pytest

from tools.mixin_live.__main__ import BOARDS
from tools.mixin_live.panels import (
    UnknownVariableError,
    Window,
    check,
    has_data,
    panels_of,
    queries_of,
    silent_annotations,
    substituted,
    variables_of,
)
from tools.mixin_live.prometheus import Prometheus, QueryError, Result

WINDOW = Window(1000.0, 1600.0)
ALL = {"name": "job", "type": "query", "includeAll": True, "allValue": ".+", "query": "label_values(up, job)"}


def panel(title: str, *targets: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"id": 1, "type": "timeseries", "title": title, "targets": list(targets), **more}


def target(expression: str, ref_id: str = "A", **more: Any) -> dict[str, Any]:
    return {"expr": expression, "refId": ref_id, **more}


def board(*panels: dict[str, Any]) -> dict[str, Any]:
    return {"panels": list(panels), "templating": {"list": [ALL]}}


class Answers:
    """A Prometheus that knows some expressions."""

    def __init__(self, known: dict[str, Result]) -> None:
        self.known = known
        self.asked: list[tuple[object, ...]] = []

    def query(self, expression: str, at: float) -> Result:
        self.asked.append((expression, at))
        return self._answer(expression)

    def query_range(self, expression: str, start: float, end: float, step: float) -> Result:
        self.asked.append((expression, start, end, step))
        return self._answer(expression)

    def _answer(self, expression: str) -> Result:
        if expression not in self.known:
            raise QueryError(f"parse error: {expression}")
        return self.known[expression]


def series(*values: str) -> dict[str, Any]:
    return {"metric": {}, "values": [[1000 + at, value] for at, value in enumerate(values)]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('a{job=~"$job"}', 'a{job=~".+"}'),
        ('a{job=~"${job}"}', 'a{job=~".+"}'),
        ('a{job=~"${job:regex}"}', 'a{job=~".+"}'),
        ('a{job=~"[[job]]"}', 'a{job=~".+"}'),
        ("rate(a[$__rate_interval])", "rate(a[6s])"),
        ("max_over_time(a[$__range])", "max_over_time(a[600s])"),
        ("a / $__range_s", "a / 600"),
        ('label_replace(a, "x", "$1", "y", "(.*)")', 'label_replace(a, "x", "$1", "y", "(.*)")'),
    ],
)
def test_variables_are_replaced(text: str, expected: str) -> None:
    assert substituted(text, variables_of(board(), WINDOW), "x A") == expected


def test_a_variable_that_the_board_does_not_have_is_named() -> None:
    with pytest.raises(UnknownVariableError, match=r"rate A: \$jobb is not a variable of the board; it has .*job"):
        substituted('a{job=~"$jobb"}', variables_of(board(), WINDOW), "rate A")


def test_panels_in_collapsed_rows_count_and_texts_do_not() -> None:
    row = {"type": "row", "title": "more", "panels": [panel("inside", target("a"))]}
    text = {"type": "text", "title": "about"}
    assert [one["title"] for one in panels_of(board(panel("first", target("a")), row, text))] == ["first", "inside"]


def test_a_query_is_asked_as_its_panel_asks_it() -> None:
    shown = panel("p", target("a", instant=True), target("b", "B", instant=True, range=True), target("c", "C"))
    instant = {query.ref_id: query.instant for query in queries_of(board(shown), shown, WINDOW)}
    assert instant == {"A": True, "B": False, "C": False}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ([], False),
        ([series("NaN", "NaN")], False),
        ([series("NaN"), series("NaN", "0")], True),
        ([{"metric": {}, "value": [1000, "0"]}], True),
        ([{"metric": {}, "value": [1000, "NaN"]}], False),
        ([series("+Inf")], True),
    ],
)
def test_zero_is_data_and_a_quantile_of_nothing_is_not(result: Result, expected: bool) -> None:
    assert has_data(result) is expected


def test_a_panel_has_data_where_each_of_its_queries_has() -> None:
    prometheus = Answers({"a": [series("1")], "none": []})
    shown = board(
        panel("good", target("a", instant=True)),
        panel("half", target("a"), target("none", "B"), id=2),
        panel("bad", target("sum(")),
    )
    result = check(shown, cast("Prometheus", prometheus), WINDOW)

    assert (result.panels, result.panels_with_data) == (3, 1)
    assert result.empty == {"half (2)": "B: no data: none", "bad (1)": "A: parse error: sum("}
    assert prometheus.asked[:2] == [("a", 1600.0), ("a", 1000.0, 1600.0, 5)]


def test_an_annotation_that_marks_nothing_is_named() -> None:
    prometheus = Answers({'a{job=~".+"}': [series("1")], "none": []})
    asked = [("Good", 'a{job=~"$job"}'), ("Silent", "none"), ("Bad", "sum(")]
    shown = {**board(), "annotations": {"list": [{"name": name, "expr": text} for name, text in asked]}}
    assert list(silent_annotations(shown, cast("Prometheus", prometheus), WINDOW)) == [
        "Silent: no data: none",
        "Bad: parse error: sum(",
    ]


@pytest.mark.parametrize("path", sorted(BOARDS.glob("*.json")), ids=lambda path: path.stem)
def test_the_boards_declare_every_variable_that_they_use(path: Any) -> None:
    shown = json.loads(path.read_text(encoding="utf-8"))
    expressions = [query.expression for panel in panels_of(shown) for query in queries_of(shown, panel, WINDOW)]
    assert expressions
    assert not [expression for expression in expressions if re.search(r"\$\D", expression)]
