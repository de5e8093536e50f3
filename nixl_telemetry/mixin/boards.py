# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The boards that the package ships, made to fit a Grafana; as JSON, as ConfigMaps, or as a provisioning folder."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.duration import Duration
from nixl_telemetry.mixin.rules import dump

FOLDER: Final = Path(__file__).with_name("boards")
"""One file for each board; written by ``python -m dashboards``."""
THRESHOLDS: Final = Path(__file__).with_name("thresholds.json")
"""Written with them: which steps of a panel's thresholds are where an alert begins."""
TITLE_PREFIX: Final = "NIXL / "

Board = dict[str, Any]


@dataclass(frozen=True)
class BoardOptions:
    """What may be another one in another Grafana."""

    datasource: str | None = None
    """Name or uid of the Prometheus that is chosen at first; ``None`` for Grafana's default one."""
    title_prefix: str = TITLE_PREFIX
    config: MixinConfig = field(default_factory=MixinConfig)
    """Of it the job label, the address of the runbooks, and what alerts and boards have in common: thresholds."""


def build_boards(options: BoardOptions) -> dict[str, Board]:
    """All boards by uid."""
    knobs = json.loads(THRESHOLDS.read_text(encoding="utf-8"))
    boards: dict[str, Board] = {}
    for path in sorted(FOLDER.glob("*.json")):
        board = _rewritten(json.loads(path.read_text(encoding="utf-8")), options.config)
        board["title"] = options.title_prefix + board["title"].removeprefix(TITLE_PREFIX)
        _choose(board, options)
        _set_thresholds(board, knobs[path.stem], options.config)
        boards[path.stem] = board
    return boards


def threshold(config: MixinConfig, knob: str) -> float:
    """The value at which a panel changes its colour, of a setting of the alerts."""
    if knob == "transfer_objective":
        return float(f"{1 - config.transfer_objective:g}")  # what is shown is what fails
    value = getattr(config, knob)
    return value.seconds if isinstance(value, Duration) else float(value)


def text(board: Board) -> str:
    """A board as JSON, the same each time."""
    return json.dumps(board, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def config_map(uid: str, board: Board, namespace: str | None = None, labels: Mapping[str, str] | None = None) -> str:
    """A board as a Kubernetes ConfigMap, with the label by which Grafana's sidecar finds it.

    Args:
        uid: The board's.
        board: The board.
        namespace: Where it is; ``None`` for that of whoever applies it.
        labels: More labels, or another value of that one.
    """
    metadata: dict[str, Any] = {"name": uid}
    if namespace:
        metadata["namespace"] = namespace
    metadata["labels"] = {"grafana_dashboard": "1", **(labels or {})}
    data = {f"{uid}.json": text(board)}
    return dump({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})


def provisioning(boards: Mapping[str, Board]) -> dict[str, str]:
    """The files of a folder from which a Grafana provisions itself, by path."""
    files = {f"dashboards/{uid}.json": text(board) for uid, board in boards.items()}
    return {**files, "provisioning/dashboards/nixl.yaml": _PROVIDER, "provisioning/datasources/nixl.yaml": _SOURCE}


_PROVIDER: Final = """\
# Grafana reads this from its provisioning folder (/etc/grafana/provisioning), and the boards from the path below:
# put the folder dashboards there, or write another path.
apiVersion: 1
providers:
  - name: nixl
    folder: NIXL
    type: file
    allowUiUpdates: false
    options:
      path: /var/lib/grafana/dashboards/nixl
"""
_SOURCE: Final = """\
# An example: leave it out where Grafana has a Prometheus already.
apiVersion: 1
datasources:
  - name: Prometheus
    type: prometheus
    access: proxy
    url: http://prometheus:9090
    jsonData:
      timeInterval: 15s # how often Prometheus scrapes
"""


def _rewritten(value: Any, config: MixinConfig) -> Any:
    """The same, with another job label in queries and another address in links to runbooks."""
    match value:
        case dict():
            return {key: _rewritten(each, config) for key, each in value.items()}
        case list():
            return [_rewritten(each, config) for each in value]
        case str():
            shown = _RUNBOOK.sub(lambda match: config.runbook_url.replace("{alert}", match[1]), value)
            return _JOB.sub(config.job_label, shown)
        case _:
            return value


_JOB: Final = re.compile(r'\bjob(?==~")|(?<=, )job(?=\)$)')
"""The label in matchers, and the one whose values a variable asks for."""
_RUNBOOK: Final = re.compile(re.escape(MixinConfig().runbook_url).replace(r"\{alert\}", r"(\w+)"))


def _choose(board: Board, options: BoardOptions) -> None:
    for variable in board["templating"]["list"]:
        if variable["name"] == "datasource" and options.datasource:
            # Grafana looks for the value among the uids, and then for the text among the names.
            variable["current"] = {"selected": True, "text": options.datasource, "value": options.datasource}
        if variable["name"] == "job" and options.config.job_label != "job":
            variable["label"] = options.config.job_label


def _set_thresholds(board: Board, knobs: Mapping[str, list[str | None]], config: MixinConfig) -> None:
    """``knobs`` has a setting for each step above the first of some panels, or ``None`` for a step that stays."""
    for panel in board["panels"]:
        steps = _steps(panel)
        for step, knob in zip(steps, knobs.get(str(panel["id"]), ()), strict=False):
            if knob:
                step["value"] = threshold(config, knob)
        # Grafana takes the last step before the first that is too high: the worse colour wins where they change places.
        for step, worse in zip(steps[-2::-1], steps[:0:-1], strict=False):
            step["value"] = min(step["value"], worse["value"])


def _steps(panel: Mapping[str, Any]) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = (
        panel.get("fieldConfig", {}).get("defaults", {}).get("thresholds", {}).get("steps", [])
    )
    return steps[1:]
