# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The boards: they are what the code makes, keep every rule, and ask only for what there is."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from dashboards.__main__ import generated
from nixl_telemetry.mixin.boards import FOLDER, THRESHOLDS, BoardOptions, build_boards
from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.rules import build_alerts
from tests.mixin.dashboard_rules import RULES, all_panels, panels, selected, substituted, targets, variables
from tests.mixin.promql import KNOWN, selectors
from tests.mixin.test_alerts import promtool

BOARDS: Final[dict[str, dict[str, Any]]] = {
    path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))
}
OF_BOARDS: Final = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)


# ----------------------------------------------------------------------------------------------------------- What it is


def test_the_committed_boards_are_what_the_code_makes() -> None:
    made = generated()

    assert set(made) == {*FOLDER.iterdir(), THRESHOLDS}
    for path, text in made.items():
        assert text == path.read_text(encoding="utf-8"), f"{path.name} is not current: run `make generate`"


def test_there_are_five_boards_with_fixed_names() -> None:
    assert {uid: board["title"] for uid, board in BOARDS.items()} == {
        "nixl-handshakes": "NIXL / Handshakes and compatibility",
        "nixl-overview": "NIXL / Overview",
        "nixl-push-leases": "NIXL / Push and leases",
        "nixl-telemetry-health": "NIXL / Telemetry health",
        "nixl-transfers": "NIXL / Transfers",
    }
    assert {board["uid"] for board in BOARDS.values()} == set(BOARDS)


@OF_BOARDS
def test_grafana_knows_every_key(board: dict[str, Any]) -> None:
    """The SDK drops keys that it does not know."""
    register_default_plugins()
    encoder = JSONEncoder(sort_keys=True)

    assert json.loads(encoder.encode(Dashboard.from_json(copy.deepcopy(board)))) == board


def test_an_unknown_key_is_found() -> None:
    register_default_plugins()
    board = copy.deepcopy(BOARDS["nixl-overview"])
    board["panels"][1]["fieldConfig"]["defaults"]["units"] = "s"

    assert json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(board)))) != board


# ---------------------------------------------------------------------------------------------------------------- Rules


@OF_BOARDS
@pytest.mark.parametrize("name", RULES)
def test_a_board_keeps_the_rule(name: str, board: dict[str, Any]) -> None:
    assert list(RULES[name](board)) == []


def variable(board: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = (each for each in board["templating"]["list"] if each["name"] == name)
    assert isinstance(found, dict)
    return found


def panel(board: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(each for each in board["panels"] if each["type"] == kind)


def query(board: dict[str, Any], kind: str = "timeseries") -> dict[str, Any]:
    target = panel(board, kind)["targets"][0]
    assert isinstance(target, dict)
    return target


def replaced(old: str, new: str, kind: str = "heatmap") -> Callable[[dict[str, Any]], None]:
    """Plants a fault in a query; in a heatmap's, at which the linter does not look."""

    def plant(board: dict[str, Any]) -> None:
        target = query(board, kind)
        assert old in target["expr"]
        target["expr"] = target["expr"].replace(old, new)

    return plant


def loki(expr: str) -> Callable[[dict[str, Any]], None]:
    return lambda board: query(board).update(expr=expr, datasource={"type": "loki", "uid": "${datasource}"})


FAULTS: Final[dict[str, list[Callable[[dict[str, Any]], Any]]]] = {
    "template-datasource-rule": [
        lambda board: variable(board, "datasource").update(name="ds"),
        lambda board: variable(board, "datasource").update(label="Source"),
    ],
    "template-job-rule": [
        lambda board: board["templating"]["list"].remove(variable(board, "job")),
        lambda board: variable(board, "job").update(multi=False),
        lambda board: variable(board, "job").update(allValue=".*"),
        lambda board: variable(board, "job").update(label="job"),
    ],
    "template-instance-rule": [
        lambda board: variable(board, "instance").update(includeAll=False),
        lambda board: variable(board, "instance")["datasource"].update(uid="prometheus"),
    ],
    "template-label-promql-rule": [
        lambda board: variable(board, "mode").update(query="label_values(up{, transfer_mode)"),
        lambda board: variable(board, "mode").update(query="up"),
    ],
    "template-on-time-change-reload-rule": [lambda board: variable(board, "version").update(refresh=1)],
    "panel-datasource-rule": [
        lambda board: panel(board, "heatmap").update(datasource={"type": "prometheus", "uid": "prometheus"}),
        lambda board: query(board, "heatmap").update(datasource={"type": "prometheus", "uid": "prometheus"}),
    ],
    "panel-title-description-rule": [
        lambda board: panel(board, "heatmap").update(title=""),
        lambda board: panel(board, "text").update(description=""),
        lambda board: panel(board, "row").update(title=""),
    ],
    "panel-units-rule": [
        lambda board: panel(board, "heatmap")["fieldConfig"]["defaults"].pop("unit"),
        lambda board: panel(board, "stat")["fieldConfig"]["defaults"].update(unit="secs"),
        lambda board: panel(board, "table")["fieldConfig"]["overrides"].append(
            {"matcher": {}, "properties": [{"id": "unit", "value": "seconds"}]}
        ),
    ],
    "panel-no-targets-rule": [lambda board: panel(board, "heatmap").update(targets=[])],
    "target-logql-rule": [loki('{job="vllm"}')],
    "target-logql-auto-rule": [loki('rate({job="vllm"}[5m])')],
    "target-promql-rule": [replaced("sum by (le) (", "sum by (le) (("), replaced("rate(", "ratio(")],
    "target-rate-interval-rule": [replaced("$__rate_interval", "5m"), replaced("$__rate_interval", "$__interval")],
    "target-job-rule": [
        replaced('job=~"$job", ', ""),
        replaced('job=~"$job"', 'job="$job"'),
        replaced('job=~"$job"', 'job=~"$instance"'),
    ],
    "target-instance-rule": [replaced('instance=~"$instance", ', ""), replaced("$instance", ".+")],
    "target-counter-agg-rule": [
        lambda board: query(board).update(expr='nixl_transfer_bytes_total{job=~"$job", instance=~"$instance"}'),
        lambda board: query(board).update(expr='sum(nixl_transfer_bytes_total{job=~"$job", instance=~"$instance"})'),
        replaced("rate(", "delta("),
    ],
    "uneditable-dashboard": [lambda board: board.update(editable=True), lambda board: board.pop("editable")],
    "dashboard-title-and-uid": [lambda board: board.update(title=""), lambda board: board.pop("uid")],
    "panel-ids-unique": [
        lambda board: board["panels"][3].update(id=board["panels"][1]["id"]),
        lambda board: board["panels"][0].update(id=0),
    ],
    "ref-ids-unique": [lambda board: panel(board, "timeseries")["targets"].append(query(board))],
    "grid-without-overlap": [
        lambda board: board["panels"][2]["gridPos"].update(x=board["panels"][1]["gridPos"]["x"]),
        lambda board: board["panels"][-1]["gridPos"].update(x=1),
    ],
    "grid-rows-full": [lambda board: board["panels"].remove(panel(board, "heatmap"))],
    "variables-declared-and-used": [
        replaced("$mode", "$modus"),
        lambda board: board["templating"]["list"].append({"name": "engine", "type": "query", "query": "x"}),
        lambda board: panel(board, "text").update(title="$who"),
    ],
    "variables-of-all": [
        lambda board: variable(board, "mode").pop("allValue"),
        lambda board: variable(board, "model").update(multi=False),
    ],
    "targets-of-nixl-only": [
        lambda board: query(board).update(expr='count(up{job=~"$job", instance=~"$instance"} == 0)'),
        lambda board: board["annotations"]["list"][0].update(expr='process_start_time_seconds{job=~"$job"}'),
    ],
    "legends-set": [
        lambda board: query(board).update(legendFormat=""),
        lambda board: query(board, "heatmap").pop("legendFormat"),
    ],
    "no-value-set": [lambda board: panel(board, "heatmap")["fieldConfig"]["defaults"].pop("noValue")],
}
"""Faults that each rule has to find."""


PLANTED: Final = [
    pytest.param(name, fault, id=f"{name}-{number}")
    for name, faults in FAULTS.items()
    for number, fault in enumerate(faults, 1)
]


def test_every_rule_has_a_planted_fault() -> None:
    assert FAULTS.keys() == RULES.keys()


@pytest.mark.parametrize(("name", "plant"), PLANTED)
def test_a_rule_finds_the_planted_fault(name: str, plant: Callable[[dict[str, Any]], Any]) -> None:
    """On a board with panels of every type."""
    board = copy.deepcopy(BOARDS["nixl-transfers"])

    plant(board)

    assert list(RULES[name](board)) != []


# -------------------------------------------------------------------------------------------------------------- Queries


@OF_BOARDS
def test_every_metric_and_label_exists(board: dict[str, Any]) -> None:
    assert [(title, each.metric, each.unknown) for title, each in selected(board) if each.unknown] == []


@OF_BOARDS
def test_what_variables_and_annotations_ask_for_exists(board: dict[str, Any]) -> None:
    queries = [each["query"].removeprefix("label_values(").rpartition(",")[0] for each in variables(board, "query")]
    queries += [each["expr"] for each in board["annotations"]["list"]]
    found = [selector for expr in queries for selector in selectors(substituted(expr))]

    assert len(found) >= len(queries)
    for selector in found:
        for metric in selector.metric.split("|"):
            assert selector.labels <= KNOWN[metric]


@OF_BOARDS
def test_boards_use_no_recording_rules(board: dict[str, Any]) -> None:
    """A board that is imported alone works."""
    assert [each.metric for _, each in selected(board) if ":" in each.metric.removeprefix("vllm:")] == []


@OF_BOARDS
def test_no_query_knows_a_bucket_by_its_text(board: dict[str, Any]) -> None:
    """`le` is "1" in Prometheus 2 and "1.0" in Prometheus 3."""
    assert [each.metric for _, each in selected(board) for label, _, _ in each.matchers if label == "le"] == []


def test_promtool_takes_every_query(tmp_path: Path) -> None:
    """Prometheus 2.42's own parser, which is older than that of promql-parser."""
    rules = [
        {"record": "x", "expr": substituted(target["expr"])}
        for board in BOARDS.values()
        for _, target in targets(board)
    ]
    rules += [
        {"record": "x", "expr": substituted(each["expr"])}
        for board in BOARDS.values()
        for each in board["annotations"]["list"]
    ]
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"groups": [{"name": "boards", "rules": rules}]}), encoding="utf-8")

    assert f"{len(rules)} rules found" in promtool("check", "rules", "--lint=none", path)


# ---------------------------------------------------------------------------------------------------------------- Links


def test_every_alert_has_a_runbook_link_on_its_board() -> None:
    """Somebody who comes from an alert finds its panels, and the way back to its runbook."""
    url = MixinConfig().runbook_url
    links = {
        (uid, link["url"])
        for uid, board in BOARDS.items()
        for each in all_panels(board)
        for link in each.get("links") or ()
        if link["title"].startswith("Runbook: ")
    }
    alerts = [alert for area in build_alerts(MixinConfig()).values() for alert in area]

    assert {(alert.board, url.replace("{alert}", alert.name)) for alert in alerts} <= links
    assert {link for _, link in links} == {url.replace("{alert}", alert.name) for alert in alerts}


@OF_BOARDS
def test_boards_are_linked_by_their_tag(board: dict[str, Any]) -> None:
    (link,) = board["links"]

    assert board["tags"] == link["tags"] == ["nixl-mixin"]
    assert (link["type"], link["includeVars"], link["keepTime"]) == ("dashboards", True, True)


def test_links_between_boards_lead_to_boards() -> None:
    linked = {
        link["url"].split("/d/")[1].partition("?")[0]
        for board in BOARDS.values()
        for each in panels(board)
        for link in each["fieldConfig"]["defaults"].get("links") or ()
        if "/d/" in link["url"]
    }

    assert linked
    assert linked <= BOARDS.keys()


# ----------------------------------------------------------------------------------------------------------- Thresholds


def test_where_an_alert_begins_is_its_setting() -> None:
    """On the committed boards every threshold that an alert has too is the default one."""
    assert {uid: json.dumps(board, sort_keys=True) for uid, board in build_boards(BoardOptions()).items()} == {
        uid: json.dumps(board, sort_keys=True) for uid, board in BOARDS.items()
    }


@OF_BOARDS
def test_a_panel_of_an_alert_with_a_threshold_shows_it(board: dict[str, Any]) -> None:
    """Each fraction, and each duration with a red line: no panel has such a number of its own."""
    knobs = json.loads(THRESHOLDS.read_text(encoding="utf-8"))[board["uid"]]
    own = [
        each["title"]
        for each in panels(board)
        for step in each["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", [])[1:]
        if str(each["id"]) not in knobs and step["value"] not in {1, 2}
    ]

    assert own == []
