# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The parts of `make mixin-live` that need no servers: what is received, what is judged, what is missing."""

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from nixl_telemetry.mixin.rules import build_alerts
from nixl_telemetry.testbed import MissingProgramError
from tools.mixin_live import programs, story
from tools.mixin_live.__main__ import main
from tools.mixin_live.alertmanager import shortened
from tools.mixin_live.panels import BoardResult
from tools.mixin_live.report import MISMATCHES, AlertResult, Report
from tools.mixin_live.webhook import Received, Webhook


def told(status: str, *alerts: tuple[str, str]) -> dict[str, Any]:
    """A notification of Alertmanager's, as far as it is read."""
    return {
        "alerts": [
            {"status": status, "labels": {"alertname": name}, "fingerprint": fingerprint}
            for name, fingerprint in alerts
        ]
    }


# ------------------------------------------------------------------------------------------------------------ Receiving


def test_an_alert_is_resolved_when_all_that_fired_of_it_is() -> None:
    received = Received()
    received.add(told("firing", ("NixlA", "1"), ("NixlA", "2"), ("NixlB", "3")))
    received.add(told("resolved", ("NixlA", "1"), ("NixlB", "3")))
    assert received.delivered("NixlA")
    assert not received.resolved("NixlA")
    assert received.resolved("NixlB")

    received.add(told("resolved", ("NixlA", "2")))
    assert received.resolved("NixlA")
    received.add(told("firing", ("NixlA", "1")))
    assert not received.resolved("NixlA")


def test_what_never_fired_is_neither_delivered_nor_resolved() -> None:
    received = Received()
    received.add(told("resolved", ("NixlA", "1")))
    assert not received.delivered("NixlA")
    assert not received.resolved("NixlA")
    assert received.names() == set()


def test_notifications_come_over_http() -> None:
    with Webhook() as webhook, httpx.Client(trust_env=False) as client:
        for status in ("firing", "resolved"):
            answer = client.post(webhook.url, content=json.dumps(told(status, ("NixlA", "1"))) + "\n")
            assert answer.status_code == 200
        assert webhook.names() == {"NixlA"}
        assert webhook.resolved("NixlA")


def test_alertmanagers_routes_stay_and_its_waits_and_receivers_do_not() -> None:
    given = {
        "global": {"smtp_smarthost": "mail.example:25"},
        "route": {
            "receiver": "team",
            "group_by": ["alertname", "job"],
            "group_wait": "30s",
            "routes": [{"receiver": "pager", "matchers": ['severity="critical"'], "group_interval": "5m"}],
        },
        "inhibit_rules": [{"equal": ["job"]}],
        "receivers": [{"name": "team", "email_configs": [{"to": "team@example.org"}]}, {"name": "pager"}],
    }
    hook = {"webhook_configs": [{"url": "http://127.0.0.1:1/", "send_resolved": True}]}

    assert shortened(given, "http://127.0.0.1:1/") == {
        "global": {"resolve_timeout": "15s"},
        "route": {
            "receiver": "team",
            "group_by": ["alertname", "job"],
            "group_wait": "1s",
            "group_interval": "2s",
            "repeat_interval": "1h",
            "routes": [{"receiver": "pager", "matchers": ['severity="critical"'], "group_interval": "2s"}],
        },
        "inhibit_rules": [{"equal": ["job"]}],
        "receivers": [{"name": "team", **hook}, {"name": "pager", **hook}],
    }


# ------------------------------------------------------------------------------------------------------------- Judging


def good_report() -> Report:
    names = [*MISMATCHES, *(f"NixlOther{number}" for number in range(7))]
    alerts = {name: AlertResult(True, True, True) for name in names}
    return Report(boards={"nixl-overview": BoardResult(3, {})}, alerts=alerts)


def test_a_good_run_has_no_problems() -> None:
    assert list(good_report().problems()) == []


def test_each_shortcoming_is_a_problem() -> None:
    report = good_report()
    report.boards["nixl-overview"] = BoardResult(3, {"Rate (7)": "A: no data: rate(x[1m])"})
    report.alerts["NixlCompatMismatch"] = AlertResult(True, True, False)
    report.silent_annotations["nixl-overview"] = ["Restarts: no data: x"]
    report.false_alarms.add("NixlTransferSlow")

    assert list(report.problems()) == [
        "nixl-overview: Rate (7): A: no data: rate(x[1m])",
        "nixl-overview: annotation Restarts: no data: x",
        "NixlTransferSlow fired while nothing was wrong",
        "only 9 alerts were delivered and resolved, at least 10 should be",
        "NixlCompatMismatch: delivered, but not resolved",
    ]


def test_the_figures_are_written(tmp_path: Path) -> None:
    report = good_report()
    report.boards["nixl-overview"] = BoardResult(3, {"Rate (7)": "A: no data"})
    report.alerts = {"NixlB": AlertResult(True, False, False), "NixlA": AlertResult(True, True, True)}
    report.write(tmp_path / "out" / "mixin-live.json")

    assert json.loads((tmp_path / "out" / "mixin-live.json").read_text(encoding="utf-8")) == {
        "boards": {"nixl-overview": {"panels": 3, "panels_with_data": 2}},
        "alerts": {
            "NixlA": {"provoked": True, "delivered": True, "resolved": True},
            "NixlB": {"provoked": True, "delivered": False, "resolved": False},
        },
    }


def test_the_summary_says_why_an_alert_was_not_provoked() -> None:
    report = Report(alerts={"NixlA": AlertResult(False, False, False), "NixlB": AlertResult(True, False, False)})
    assert list(report.summary({"NixlA": "it cannot be"})) == [
        "NixlA: not provoked (it cannot be)",
        "NixlB: provoked, but not delivered",
    ]


# ----------------------------------------------------------------------------------------------------------- The story


def test_every_alert_is_raised_by_one_act_or_there_is_a_reason() -> None:
    raised = Counter(name for act in story.ACTS for name in act.alerts)
    known = {alert.name for alerts in build_alerts(story.config()).values() for alert in alerts}

    assert raised.keys() | story.NOT_PROVOKED.keys() == known
    assert not raised.keys() & story.NOT_PROVOKED.keys()
    assert set(raised.values()) == {1}


def test_no_alert_waits_for_longer_than_the_story() -> None:
    alerts = [alert for alerts in build_alerts(story.config()).values() for alert in alerts]
    assert max(alert.pending.seconds for alert in alerts) <= 30


def test_what_is_missing_is_named_where_it_cannot_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(MissingProgramError, match=r"missing: chromium prometheus; install it \(Debian: apt-get"):
        programs.need(["promtool", "prometheus", "chromium"])


def test_what_apt_says_is_told_where_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 100, "", "E: Unable to locate package chromium")
    monkeypatch.setattr("shutil.which", lambda command: "/usr/bin/apt-get" if command == "apt-get" else None)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: failed)
    with pytest.raises(MissingProgramError, match="apt-get update -qq failed: E: Unable to locate package chromium"):
        programs.need(["chromium"])


def test_pictures_without_data_say_how_to_get_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(programs, "need", lambda commands: None)
    monkeypatch.setattr("tools.mixin_live.frontend.install", lambda: None)
    monkeypatch.setattr("tools.mixin_live.frontend.build", lambda: None)
    assert main(["--pictures", "--out", str(tmp_path)]) == 1
    assert f"{tmp_path}/mixin-live/window.json: not there; a run (make mixin-live) leaves it" in capsys.readouterr().err
