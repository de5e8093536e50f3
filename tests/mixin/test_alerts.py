# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The alerts: promtool takes them, each fires when it must and only then, and all follow the rules of mixtool."""

import importlib
import json
import shutil
import subprocess
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Final

import pytest

from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.rules import build_alerts, build_rules
from tests.mixin.case import Case, promtool_file

ROOT: Final = Path(__file__).resolve().parents[2]
AREAS: Final = ("compatibility",)
CASES: Final[dict[str, tuple[Case, ...]]] = {
    area: importlib.import_module(f"tests.mixin.cases.{area}").CASES for area in AREAS
}


def promtool(*arguments: str | Path) -> str:
    """What promtool prints; the test fails if it finds a fault, or if there is no promtool."""
    assert shutil.which("promtool"), "promtool is missing: `make promtool` installs it (Debian's package prometheus)"
    done = subprocess.run(["promtool", *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("area", AREAS)
def test_alerts_fire_when_they_must_and_only_then(area: str, tmp_path: Path) -> None:
    """All cases of an area, over its rules as they are committed."""
    groups = [group for group in build_rules(MixinConfig()) if group["name"] in {f"nixl-{area}", f"nixl-{area}.rules"}]
    (tmp_path / "rules.json").write_text(json.dumps({"groups": groups}), encoding="utf-8")
    files = []
    for step, cases in groupby(sorted(CASES[area], key=lambda case: case.step), lambda case: case.step):
        path = tmp_path / f"{step}.test.json"
        path.write_text(json.dumps(promtool_file(cases, groups, "rules.json", step)), encoding="utf-8")
        files.append(path)

    promtool("test", "rules", *files)
