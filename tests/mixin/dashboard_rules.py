# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What a board has to keep: the rules of Grafana's dashboard-linter and of mixtool, for all panels, and our own.

The linter looks at some types of panels only, and one of its rules never fires. These look at all types, and there are
no exclusions.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import combinations
from typing import Any, Final

import promql_parser
from grafana_foundation_sdk.models import units

from tests.mixin.promql import Selector, selectors

Board = Mapping[str, Any]
Panel = Mapping[str, Any]
Faults = Iterator[str]
Rule = Callable[[Board], Faults]

RULES: Final[dict[str, Rule]] = {}
"""All rules by name. Each gives the faults of a board, as sentences."""

_GRAFANAS_OWN: Final = {
    "__rate_interval": "11m",
    "__range": "13m",
    "__interval": "17s",
    **dict.fromkeys(("__all", "__from", "__to", "__url_time_range", "__all_variables"), ""),
}
"""Variables that every board has, with a value that is found again in a query."""
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::\w+)?\}|\$([A-Za-z_]\w*)")
"""``$1`` is none: a group of label_replace."""
_UNITS: Final = frozenset(value for name, value in vars(units).items() if isinstance(value, str) and name[0].isupper())
_SHOWS_NO_DATA: Final = frozenset({"row", "text"})
_RATES: Final = frozenset({"rate", "irate", "increase"})
_SAMPLED: Final = re.compile(r"\b(i?rate)\s*\(([^\[\]]*)\[([^\]]*)\]")
_VARIABLE_QUERY: Final = re.compile(r"label_values\((.+),\s*\w+\)|query_result\((.+)\)|metrics\((.+)\)|label_names\(\)")


def rule(function: Rule) -> Rule:
    """Add a rule; its name is that of the linter's, where the linter has it."""
    RULES[function.__name__.replace("_", "-")] = function
    return function


def all_panels(board: Board) -> Iterator[Panel]:
    """Panels and rows, those in collapsed rows too."""
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def panels(board: Board) -> Iterator[Panel]:
    """Panels that show data."""
    return (panel for panel in all_panels(board) if panel["type"] not in _SHOWS_NO_DATA)


def targets(board: Board) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Queries with the title of their panel."""
    return ((panel.get("title", ""), target) for panel in panels(board) for target in panel.get("targets", ()))


def variables(board: Board, kind: str) -> list[Mapping[str, Any]]:
    """The board's variables of a type."""
    return [each for each in board["templating"]["list"] if each["type"] == kind]


def substituted(text: str) -> str:
    """A query with its variables replaced: ``$job`` by ``var_job``, so that it is found again."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return _GRAFANAS_OWN.get(name, f"var_{name}")

    return _VARIABLE.sub(value, text)


def selected(board: Board) -> Iterator[tuple[str, Selector]]:
    """What the queries select that parse, with the title of their panel."""
    for title, target in targets(board):
        try:
            yield from ((title, selector) for selector in selectors(substituted(target["expr"])))
        except ValueError:
            continue  # another rule's


# ------------------------------------------------------------------------------------------------ The linter's 17 rules


@rule
def template_datasource_rule(board: Board) -> Faults:
    found = {
        each["name"]: each.get("label") for each in variables(board, "datasource") if each["query"] == "prometheus"
    }
    if found != {"datasource": "Data source"}:
        yield f"the data source must be a variable `datasource`, labelled `Data source`: {found}"


def _template(board: Board, name: str) -> Faults:
    found = [each for each in variables(board, "query") if each["name"] == name]
    if not found:
        yield f"there is no variable {name}"
    for each in found:
        actual = {key: each.get(key) for key in ("label", "multi", "includeAll", "allValue")}
        wanted = {"label": name.capitalize(), "multi": True, "includeAll": True, "allValue": ".+"}
        if actual != wanted or each["datasource"]["uid"] != "${datasource}":
            yield f"variable {name} has {actual}"


@rule
def template_job_rule(board: Board) -> Faults:
    yield from _template(board, "job")


@rule
def template_instance_rule(board: Board) -> Faults:
    yield from _template(board, "instance")


@rule
def template_label_promql_rule(board: Board) -> Faults:
    for each in variables(board, "query"):
        match = _VARIABLE_QUERY.fullmatch(each["query"])
        if match is None:
            yield f"variable {each['name']} asks for {each['query']!r}"
        elif (expr := next(filter(None, match.groups()), None)) and (fault := _syntax(expr)):
            yield f"variable {each['name']}: {fault}"


@rule
def template_on_time_change_reload_rule(board: Board) -> Faults:
    for each in variables(board, "query"):
        if each["refresh"] != 2:
            yield f"variable {each['name']} is not asked for again when the time changes"


@rule
def panel_datasource_rule(board: Board) -> Faults:
    for panel in panels(board):
        for holder in (panel, *panel.get("targets", ())):
            if holder.get("datasource", {}).get("uid") != "${datasource}":
                yield f"{panel.get('title')}: the data source is {holder.get('datasource')}"


@rule
def panel_title_description_rule(board: Board) -> Faults:
    for panel in all_panels(board):
        if not panel.get("title"):
            yield f"panel {panel.get('id')} has no title"
        if not panel.get("description") and panel["type"] != "row":
            yield f"{panel.get('title')}: there is no description"


@rule
def panel_units_rule(board: Board) -> Faults:
    for panel in panels(board):
        config = panel["fieldConfig"]
        own = [item["value"] for each in config["overrides"] for item in each["properties"] if item["id"] == "unit"]
        for unit in (config["defaults"].get("unit"), *own):
            if unit not in _UNITS:
                yield f"{panel['title']}: the unit is {unit}"


@rule
def panel_no_targets_rule(board: Board) -> Faults:
    for panel in panels(board):
        if not panel.get("targets"):
            yield f"{panel['title']}: there is no query"


@rule
def target_logql_rule(board: Board) -> Faults:
    """There is no parser of LogQL for Python: none is let through that is not checked."""
    for title, target in targets(board):
        if target["datasource"].get("type") == "loki":
            yield f"{title}: LogQL cannot be checked here"


@rule
def target_logql_auto_rule(board: Board) -> Faults:
    for title, target in targets(board):
        ranges = re.findall(r"\[([^\]]*)\]", target["expr"])
        if target["datasource"].get("type") == "loki" and set(ranges) - {"$__auto"}:
            yield f"{title}: a range of LogQL is not $__auto"


@rule
def target_promql_rule(board: Board) -> Faults:
    for title, target in targets(board):
        if fault := _syntax(target["expr"]):
            yield f"{title}: {fault}"


@rule
def target_rate_interval_rule(board: Board) -> Faults:
    for title, target in targets(board):
        for function, _, window in _SAMPLED.findall(target["expr"]):
            if window != "$__rate_interval":
                yield f"{title}: {function} is over {window}"


def _matcher(board: Board, name: str) -> Faults:
    for title, selector in selected(board):
        if (name, "=~", f"var_{name}") not in selector.matchers:
            yield f'{title}: {selector.metric} lacks {name}=~"${name}"'


@rule
def target_job_rule(board: Board) -> Faults:
    yield from _matcher(board, "job")


@rule
def target_instance_rule(board: Board) -> Faults:
    yield from _matcher(board, "instance")


@rule
def target_counter_agg_rule(board: Board) -> Faults:
    for title, selector in selected(board):
        if selector.metric.endswith(("_total", "_sum", "_bucket")) and not _RATES & set(selector.within[-1:]):
            yield f"{title}: {selector.metric} grows for ever, and is shown as it is"


@rule
def uneditable_dashboard(board: Board) -> Faults:
    if board.get("editable") is not False:
        yield "it can be edited"


# ------------------------------------------------------------------------------------------------------------ mixtool's


@rule
def dashboard_title_and_uid(board: Board) -> Faults:
    for key in ("title", "uid"):
        if not board.get(key):
            yield f"there is no {key}"


# ----------------------------------------------------------------------------------------------------------------- Ours


@rule
def panel_ids_unique(board: Board) -> Faults:
    for number, times in Counter(panel.get("id") for panel in all_panels(board)).items():
        if times > 1 or not number:
            yield f"{times} panels have the id {number}"


@rule
def ref_ids_unique(board: Board) -> Faults:
    for panel in panels(board):
        for ref_id, times in Counter(target.get("refId") for target in panel.get("targets", ())).items():
            if times > 1 or not ref_id:
                yield f"{panel['title']}: {times} queries are {ref_id}"


@rule
def grid_without_overlap(board: Board) -> Faults:
    places = [(panel.get("title"), panel["gridPos"]) for panel in board["panels"]]
    for title, place in places:
        if place["x"] + place["w"] > 24 or min(place["w"], place["h"]) < 1:
            yield f"{title}: {place} is not on the grid"
    for (one, a), (other, b) in combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        if not apart and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]:
            yield f"{one} and {other} overlap"


@rule
def grid_rows_full(board: Board) -> Faults:
    """A gap looks like a panel that failed to load."""
    widths: Counter[int] = Counter()
    for panel in board["panels"]:
        widths[panel["gridPos"]["y"]] += panel["gridPos"]["w"]
    for y, width in widths.items():
        if width != 24:
            yield f"panels at {y} are {width} wide, of 24"


@rule
def variables_declared_and_used(board: Board) -> Faults:
    declared = {each["name"] for each in board["templating"]["list"]}
    used = {match[1] or match[2] for match in _VARIABLE.finditer(" ".join(_texts(board)))} - _GRAFANAS_OWN.keys()
    for name in sorted(used - declared):
        yield f"${name} is not declared"
    for name in sorted(declared - used):
        yield f"${name} is not used"


@rule
def variables_of_all(board: Board) -> Faults:
    for each in variables(board, "query"):
        if not (each.get("multi") and each.get("includeAll") and each.get("allValue")):
            yield f"variable {each['name']} does not take several values, or all of them"


@rule
def targets_of_nixl_only(board: Board) -> Faults:
    """Every target has `up` and its like; with all jobs chosen, those of other people have to stay out."""
    queries = [*targets(board), *(("annotation", each) for each in board["annotations"]["list"])]
    for title, query in queries:
        with suppress(ValueError):  # another rule's
            metrics = {selector.metric for selector in selectors(substituted(query["expr"]))}
            if not any(metric.startswith(("nixl_", "vllm:nixl_")) for metric in metrics):
                yield f"{title}: {', '.join(sorted(metrics))} is everybody's"


@rule
def legends_set(board: Board) -> Faults:
    for panel in panels(board):
        for target in panel.get("targets", ()):
            if panel["type"] != "table" and not target.get("legendFormat"):
                yield f"{panel['title']}: {target.get('refId')} has no legend"


@rule
def no_value_set(board: Board) -> Faults:
    for panel in panels(board):
        if "noValue" not in panel["fieldConfig"]["defaults"]:
            yield f"{panel['title']}: nothing says what it means if there is no data"


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for each in value.values():
                yield from _texts(each)
        case list():
            for each in value:
                yield from _texts(each)


def _syntax(expr: str) -> str:
    """What is wrong with a query; nothing if it is empty."""
    try:
        promql_parser.parse(substituted(expr))
    except ValueError as error:
        return f"{error}: {expr}"
    return ""
