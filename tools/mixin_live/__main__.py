# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Proves the boards and alerts on the real thing.

    python -m tools.mixin_live               # about ten minutes
    python -m tools.mixin_live --pictures    # draws the boards again, from the data of the last run

Real servers, routers, Prometheus, Alertmanager and Chromium. Writes ``mixin-live.json`` and Prometheus's data into the
folder ``--out``, and a picture of each board into ``--images``. Ends with 1 where a panel has no data, an alert fires
while nothing is wrong, fewer than ten alerts are delivered and resolved, or one for a mismatch is not.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NoReturn

from nixl_telemetry.mixin.rules import build_alerts, rules_file
from nixl_telemetry.testbed import MissingProgramError, ProcessError, find_router
from tools.mixin_live import frontend, panels, pictures, programs, story
from tools.mixin_live.alertmanager import Alertmanager
from tools.mixin_live.frontend import FrontendError
from tools.mixin_live.panels import BoardResult, UnknownVariableError, Window
from tools.mixin_live.pictures import PictureError
from tools.mixin_live.prometheus import Prometheus
from tools.mixin_live.report import AlertResult, Report
from tools.mixin_live.scene import ROOT, Scene
from tools.mixin_live.webhook import Webhook

BOARDS: Final = ROOT / "nixl_telemetry" / "mixin" / "boards"
EXAMPLE: Final = ROOT / "examples" / "alertmanager" / "alertmanager.yml"
_FAILURES: Final = (FrontendError, MissingProgramError, PictureError, ProcessError, UnknownVariableError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the story, or draw pictures of the last one."""
    options = _parser().parse_args(arguments)
    try:
        programs.need(programs.PACKAGES)
        frontend.install()
        frontend.build()
        if options.pictures:
            draw(options.out / "mixin-live", options.images)
            return 0
        return run(options.out, options.images)
    except _FAILURES as error:
        print(f"mixin-live: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run(out: Path, images: Path) -> int:
    """Play the story and judge it."""
    find_router()
    boards = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(BOARDS.glob("*.json"))}
    say("checking the boards against Grafana's schema")
    frontend.check_schema(BOARDS.glob("*.json"))
    folder = out / "mixin-live"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    report = Report()
    with ExitStack() as stack:
        rules = folder / "rules.yaml"
        rules.write_text(rules_file(story.config()), encoding="utf-8")
        webhook = stack.enter_context(Webhook())
        alertmanager = stack.enter_context(Alertmanager(folder / "alertmanager", EXAMPLE, webhook.url))
        prometheus = stack.enter_context(
            Prometheus(folder / "prometheus", rules=rules, alertmanager=alertmanager.address)
        )
        scene = Scene(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="m-"))), prometheus)
        stack.callback(scene.close)
        stage = story.Stage(scene, prometheus, webhook, say)
        story.play(stage)
        report.false_alarms = stage.false_alarms
        report.alerts = results(stage)
        report.boards = {uid: asked(board, stage) for uid, board in boards.items()}
        window = stage.windows["story"]
        report.silent_annotations = {
            uid: list(panels.silent_annotations(board, prometheus, window)) for uid, board in boards.items()
        }
    (folder / "window.json").write_text(json.dumps(asdict(window)), encoding="utf-8")
    report.write(out / "mixin-live.json")
    draw(folder, images)
    for line in report.summary(story.NOT_PROVOKED):
        say(line)
    problems = list(report.problems())
    for problem in problems:
        say(f"problem: {problem}")
    say(f"{out / 'mixin-live.json'}: {f'{len(problems)} problems' if problems else 'all is well'}")
    return 1 if problems else 0


def results(stage: story.Stage) -> dict[str, AlertResult]:
    """What became of each alert that there is."""
    names = {alert.name for alerts in build_alerts(story.config()).values() for alert in alerts}
    webhook = stage.webhook
    return {
        name: AlertResult(name in stage.provoked, webhook.delivered(name), webhook.resolved(name)) for name in names
    }


def asked(board: Mapping[str, Any], stage: story.Stage) -> BoardResult:
    """What a board shows of the whole story, and of the part in which nothing was wrong: 0 rather than nothing."""
    shown = {name: panels.check(board, stage.prometheus, window) for name, window in stage.windows.items()}
    empty: dict[str, str] = {}
    for name, result in shown.items():
        for panel, problem in result.empty.items():
            empty[panel] = f"{empty[panel]}; {name}: {problem}" if panel in empty else f"{name}: {problem}"
    return BoardResult(shown["story"].panels, empty)


def draw(folder: Path, images: Path) -> None:
    """Draw each board from a run's data.

    Args:
        folder: With the data.
        images: Where the pictures go.

    Raises:
        PictureError: There are no data, or a board cannot be drawn.
    """
    kept = folder / "window.json"
    if not kept.exists():
        raise PictureError(f"{kept}: not there; a run (make mixin-live) leaves it, with the data to draw")
    window = Window(**json.loads(kept.read_text(encoding="utf-8")))
    with Prometheus(folder / "prometheus") as prometheus, pictures.Pages(BOARDS) as pages:
        for board in sorted(BOARDS.glob("*.json")):
            picture = images / f"{board.stem}.png"
            pictures.draw(pages, board.stem, prometheus.url, window, picture)
            say(f"{picture}: {picture.stat().st_size // 1000} kB")


def say(text: str) -> None:
    """Tell how far it is."""
    print(f"mixin-live: {time.strftime('%H:%M:%S')} {text}", flush=True)


def _end(*_: object) -> NoReturn:
    raise SystemExit(143)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.mixin_live", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pictures", action="store_true", help="only draw the pictures, from the last run's data")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder for figures and data")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="folder for the pictures")
    return parser


if __name__ == "__main__":
    # What runs is stopped on the way out, as with Ctrl-C.
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
