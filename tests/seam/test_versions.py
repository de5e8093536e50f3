# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The tests of this folder against the real classes of every other supported vLLM."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / ".venvs" / "contract"
VERSIONS = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.33.0")
TESTS = ("test_contract.py", "test_handshake.py", "test_stats.py", "test_wiring.py")
ELSEWHERE = "tests/seam/test_wiring.py::test_an_unsupported_vllm_runs_stock"
"""Says the same in every version, and imports vLLM once more to do so."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", VERSIONS)
def test_version(version: str) -> None:
    """Its Python sources in front of the installed ones: imports find them, compiled parts are not needed."""
    assert (SOURCES / version / "vllm").is_dir(), f"no sources of vLLM {version}: run `make contract`"

    tests = [f"tests/seam/{name}" for name in TESTS]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "--deselect", ELSEWHERE],
        env={**os.environ, "PYTHONPATH": str(SOURCES / version), "NIXLTEL_TESTBED_VLLM": version},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.returncode == 0, result.stdout[-4000:]
