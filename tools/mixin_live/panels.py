# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Every query of every panel of a board, asked as Grafana asks it."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tools.mixin_live.prometheus import SCRAPE_SECONDS, Prometheus, QueryError, Result

Board = Mapping[str, Any]
STEP_SECONDS: Final = 5
_ALL: Final = ".*"
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::\w+)?\}|\$([A-Za-z_]\w*)|\[\[(\w+)\]\]")
"""In the three ways of writing one; `$1` is a group of label_replace."""


class UnknownVariableError(ValueError):
    """A query has a variable that its board does not declare."""


@dataclass(frozen=True)
class Window:
    """A time in the story, in seconds of Unix time."""

    start: float
    end: float


@dataclass(frozen=True)
class Query:
    """One query of a panel, its variables replaced."""

    panel: str
    ref_id: str
    expression: str
    instant: bool


@dataclass(frozen=True)
class BoardResult:
    """What the panels of a board show."""

    panels: int
    empty: Mapping[str, str]
    """What is wrong, by panel."""

    @property
    def panels_with_data(self) -> int:
        """Panels of which every query has data."""
        return self.panels - len(self.empty)


def panels_of(board: Board) -> Iterator[Mapping[str, Any]]:
    """The panels that ask for something, those in collapsed rows included."""
    for panel in board["panels"]:
        for one in (panel, *panel.get("panels", ())):
            if one.get("targets"):
                yield one


def queries_of(board: Board, panel: Mapping[str, Any], window: Window) -> Iterator[Query]:
    """The queries of a panel, each variable at *All*.

    Raises:
        UnknownVariableError: A query has a variable that is not declared.
    """
    values = variables_of(board, window)
    for target in panel["targets"]:
        where = f"{panel['title']} {target['refId']}"
        yield Query(
            panel["title"],
            target["refId"],
            substituted(target["expr"], values, where),
            bool(target.get("instant")) and not target.get("range"),
        )


def variables_of(board: Board, window: Window) -> dict[str, str]:
    """Grafana's variables and the board's, the latter as if *All* were chosen."""
    seconds = round(window.end - window.start)
    # Grafana's rule: four scrapes at least, so that a rate never has less than two samples.
    rate = max(STEP_SECONDS + SCRAPE_SECONDS, 4 * SCRAPE_SECONDS)
    values = {
        "__interval": f"{STEP_SECONDS}s",
        "__interval_ms": str(STEP_SECONDS * 1000),
        "__rate_interval": f"{rate}s",
        "__range": f"{seconds}s",
        "__range_s": str(seconds),
        "__range_ms": str(seconds * 1000),
    }
    for variable in board.get("templating", {}).get("list", ()):
        if variable["type"] in {"query", "custom"} and variable.get("includeAll"):
            values[variable["name"]] = variable.get("allValue") or _ALL
        elif variable["type"] in {"constant", "textbox", "custom", "interval"}:
            values[variable["name"]] = variable["query"].partition(",")[0]
    return values


def substituted(text: str, values: Mapping[str, str], where: str) -> str:
    """A text with each variable replaced by its value.

    Args:
        text: The query.
        values: By name.
        where: What the message names.

    Raises:
        UnknownVariableError: A variable has no value.
    """

    def value(match: re.Match[str]) -> str:
        name = next(filter(None, match.groups()))
        if name not in values:
            raise UnknownVariableError(f"{where}: ${name} is not a variable of the board; it has {', '.join(values)}")
        return values[name]

    return _VARIABLE.sub(value, text)


def check(board: Board, prometheus: Prometheus, window: Window) -> BoardResult:
    """Ask everything that a board asks over a time."""
    count, empty = 0, {}
    for panel in panels_of(board):
        count += 1
        if problem := "; ".join(_problems(board, panel, prometheus, window)):
            empty[f"{panel['title']} ({panel['id']})"] = problem
    return BoardResult(count, empty)


def silent_annotations(board: Board, prometheus: Prometheus, window: Window) -> Iterator[str]:
    """What is wrong with annotations that mark nothing in a time, in one line each."""
    values = variables_of(board, window)
    for annotation in board["annotations"]["list"]:
        name, expression = annotation["name"], annotation["expr"]
        query = Query(name, "annotation", substituted(expression, values, name), instant=False)
        if problem := _problem(query, prometheus, window):
            yield f"{name}: {problem}"


def _problems(board: Board, panel: Mapping[str, Any], prometheus: Prometheus, window: Window) -> Iterator[str]:
    for query in queries_of(board, panel, window):
        if problem := _problem(query, prometheus, window):
            yield f"{query.ref_id}: {problem}"


def _problem(query: Query, prometheus: Prometheus, window: Window) -> str:
    try:
        if query.instant:
            result = prometheus.query(query.expression, window.end)
        else:
            result = prometheus.query_range(query.expression, window.start, window.end, STEP_SECONDS)
    except QueryError as error:
        return str(error)
    return "" if has_data(result) else f"no data: {query.expression}"


def has_data(result: Result) -> bool:
    """Whether a series has a number: a quantile of nothing is NaN, and shows nothing."""
    samples = (sample for series in result for sample in (series.get("values") or [series["value"]]))
    return any(not math.isnan(float(value)) for _, value in samples)
