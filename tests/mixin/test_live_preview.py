# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The renderer, the schema check and the programs around them, for real: `make mixin-live` runs this."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from nixl_telemetry.testbed import LOOPBACK
from tests.support.peers import wait_until
from tools.mixin_live import frontend, programs
from tools.mixin_live.alertmanager import Alertmanager
from tools.mixin_live.panels import Window, check
from tools.mixin_live.pictures import WIDTH, Pages, PictureError, draw
from tools.mixin_live.prometheus import Prometheus, QueryError
from tools.mixin_live.webhook import Webhook

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]
UP = 'up{job=~"$job"}'
ALERTMANAGER = {"route": {"receiver": "all"}, "receivers": [{"name": "all"}]}
RULES = {"groups": [{"name": "test", "rules": [{"alert": "NixlTest", "expr": "vector(1)"}]}]}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    programs.need(programs.PACKAGES)
    frontend.install()
    frontend.build()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Prometheus]:
    """One that has scraped itself for longer than a step of a query."""
    with Prometheus(tmp_path / "prometheus", alertmanager="127.0.0.1:1") as server:
        server.set_targets({"prometheus": server.url.removeprefix("http://")})
        assert wait_until(lambda: len(server.query("count_over_time(up[1m]) > 7", time.time())) == 1, 30)
        yield server


def board(plant: Callable[[dict[str, Any]], object] = lambda panel: None) -> dict[str, Any]:
    """A small board, perhaps with a fault."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panel = {
        "id": 1,
        "type": "timeseries",
        "title": "Up",
        "gridPos": {"x": 0, "y": 0, "w": 24, "h": 8},
        "datasource": source,
        "targets": [{"refId": "A", "expr": UP, "range": True, "datasource": source}],
        "fieldConfig": {"defaults": {"custom": {}}, "overrides": []},
        "options": {},
    }
    plant(panel)
    return {
        "title": "NIXL / Test",
        "uid": "test",
        "timezone": "utc",
        "panels": [panel],
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "job",
                    "type": "query",
                    "query": "label_values(up, job)",
                    "datasource": source,
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".+",
                    "refresh": 2,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
    }


def drawn(made: dict[str, Any], prometheus: Prometheus, folder: Path) -> Any:
    """The renderer's report; the picture is ``test.png``."""
    (folder / "test.json").write_text(json.dumps(made), encoding="utf-8")
    now = time.time()
    with Pages(folder) as pages:
        return draw(pages, "test", prometheus.url, Window(now - 60, now), folder / "test.png")


def test_a_board_is_drawn_with_its_data(prometheus: Prometheus, tmp_path: Path) -> None:
    report = drawn(board(), prometheus, tmp_path)

    assert report["queries"] == [{"panel": "Up", "refId": "A", "expr": 'up{job=~".+"}', "series": 1}]
    assert report["panels"]["1"]["state"] == "Done"
    picture = (tmp_path / "test.png").read_bytes()
    width, height = (int.from_bytes(picture[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (WIDTH, report["height"])
    now = time.time()
    assert check(board(), prometheus, Window(now - 60, now)).empty == {}


@pytest.mark.parametrize(
    ("plant", "expected"),
    [
        (lambda panel: panel.update(type="piechart"), "panel type piechart: not drawn here"),
        (lambda panel: panel["targets"][0].update(expr="sum("), r"Prometheus: .*parse error.*: sum\("),
        (lambda panel: panel.update(datasource={"type": "prometheus", "uid": "P1"}), "data source P1: a board must"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(
    plant: Callable[[dict[str, Any]], object], expected: str, prometheus: Prometheus, tmp_path: Path
) -> None:
    with pytest.raises(PictureError, match=expected):
        drawn(board(plant), prometheus, tmp_path)


def test_the_schema_check_names_the_fault(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(json.dumps(board(lambda panel: panel.update(heading="x"))), encoding="utf-8")
    with pytest.raises(frontend.FrontendError, match=r'panel Up: / must NOT have additional properties.*"heading"'):
        frontend.check_schema([tmp_path / "bad.json"])


def test_a_refused_query_is_quoted(prometheus: Prometheus) -> None:
    with pytest.raises(QueryError, match=r"parse error.*sum\($"):
        prometheus.query("sum(", time.time())


def test_an_alert_comes_from_prometheus_by_alertmanager_to_the_webhook(tmp_path: Path) -> None:
    rules, example = tmp_path / "rules.yaml", tmp_path / "alertmanager.yaml"
    rules.write_text(json.dumps(RULES), encoding="utf-8")
    example.write_text(json.dumps(ALERTMANAGER), encoding="utf-8")
    with Webhook() as webhook, Alertmanager(tmp_path / "alertmanager", example, webhook.url) as alertmanager:
        with Prometheus(tmp_path / "prometheus", rules=rules, alertmanager=alertmanager.address) as prometheus:
            assert wait_until(lambda: webhook.delivered("NixlTest"), 30)
            assert prometheus.firing() == {"NixlTest"}
            address = httpx.URL(prometheus.url)
        assert webhook.names() == {"NixlTest"}
    with pytest.raises(ConnectionRefusedError), socket.create_connection((LOOPBACK, address.port or 0), 5):
        pass
