# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The runbooks: one for each alert, complete, and what they tell to type exists."""

import re
import shlex
from pathlib import Path
from typing import Any, Final

import pytest
import typer

from nixl_telemetry.cli.main import app
from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.rules import build_alerts
from tests.mixin.promql import selectors

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "docs/runbooks"
ALERTS: Final = {alert.name: alert for alerts in build_alerts(MixinConfig()).values() for alert in alerts}
RUNBOOKS: Final = {path.stem: path.read_text("utf-8") for path in FOLDER.glob("*.md") if path.stem != "index"}
OF_RUNBOOKS: Final = pytest.mark.parametrize("name", sorted(RUNBOOKS))
COMMAND: Final[Any] = typer.main.get_command(app)


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    """And all are in the index, the navigation and the table of alerts."""
    index, table, navigation = (
        (ROOT / path).read_text("utf-8") for path in ("docs/runbooks/index.md", "docs/alerts.md", "mkdocs.yml")
    )

    assert RUNBOOKS.keys() == ALERTS.keys()
    assert re.findall(r"^- \[(\w+)\]\(\1\.md\)$", index, flags=re.MULTILINE) == list(ALERTS)
    assert list(dict.fromkeys(re.findall(r"\[(\w+)\]\(runbooks/\1\.md\)", table))) == list(ALERTS)
    assert re.findall(r"(\w+): runbooks/\1\.md$", navigation, flags=re.MULTILINE) == list(ALERTS)


@OF_RUNBOOKS
def test_a_runbook_is_complete(name: str) -> None:
    """Its title is the alert's name, it leads back and to how to read it, and none of its four sections is empty."""
    title, *sections = re.split(r"^#+ ", RUNBOOKS[name], flags=re.MULTILINE)[1:]
    heads = [section.partition("\n")[0] for section in sections]

    assert title.partition("\n")[0] == name
    assert (
        f"[All alerts](../alerts.md) · [how to read this page](index.md) · board `<grafana>/d/{ALERTS[name].board}"
        in title
    )
    assert heads == ["Meaning", "Impact", "Diagnosis", "Mitigation"]
    assert all(len(section.partition("\n")[2].split()) > 5 for section in sections)
    assert "```promql" in sections[2]
    assert "nixl-telemetry " in RUNBOOKS[name]


def _queries(text: str) -> list[str]:
    return [re.sub(r"\n +", "\n", block).strip() for block in re.findall(r"```promql\n(.*?)```", text, flags=re.DOTALL)]


@OF_RUNBOOKS
def test_queries_ask_for_what_there_is(name: str) -> None:
    """Each query parses, and names metrics and labels that exist."""
    for query in _queries(RUNBOOKS[name]):
        for selector in selectors(query.replace("[<window>]", "[1h]")):
            assert selector.unknown == set(), query


def _commands(text: str) -> list[list[str]]:
    shown = re.findall(r"`(nixl-telemetry [^`\n]+)`|^ +(nixl-telemetry .+)$", text, flags=re.MULTILINE)
    return [shlex.split((inline or line).partition(" | ")[0])[1:] for inline, line in shown]


@OF_RUNBOOKS
def test_commands_exist(name: str) -> None:
    """Each command that a runbook tells to type, with each of its options."""
    for words in _commands(RUNBOOKS[name]):
        command = COMMAND
        while hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        own = words[: words.index("--")] if "--" in words else words
        assert {word for word in own if word.startswith("--")} <= known, words
