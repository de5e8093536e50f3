# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Programs that are no Python packages: found, installed, or named."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from typing import Final

from nixl_telemetry.testbed import MissingProgramError

PACKAGES: Final = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "chromium": "chromium",
    "node": "nodejs",
    "npm": "npm",
}
"""Debian's package for each command."""


def need(commands: Iterable[str]) -> None:
    """Install what is missing, as root on Debian.

    Raises:
        MissingProgramError: Something is missing and cannot be installed here.
    """
    packages = sorted({PACKAGES[command] for command in commands if shutil.which(command) is None})
    if not packages:
        return
    wanted = " ".join(packages)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise MissingProgramError(f"missing: {wanted}; install it (Debian: apt-get install {wanted}) and try again")
    print(f"mixin-live: apt: {wanted}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-y", "-qq", "--no-install-recommends", *packages]):
        done = subprocess.run(["apt-get", *command], env=environment, capture_output=True, text=True, check=False)  # noqa: S607 - apt-get is found by PATH
        if done.returncode:
            raise MissingProgramError(f"apt-get {' '.join(command)} failed: {done.stderr.strip()[-400:]}")
