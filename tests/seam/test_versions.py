# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The tests of this folder against the real classes of every other supported vLLM."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / ".venvs" / "contract"
VERSIONS = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.33.0")
TESTS = (
    *("test_contract.py", "test_exchange.py", "test_handshake.py", "test_leases.py", "test_listener.py"),
    "test_push_and_tripwires.py",
    *("test_stats.py", "test_wiring.py"),
)
ELSEWHERE = "tests/seam/test_wiring.py::test_an_unsupported_vllm_runs_stock"
"""Says the same in every version, and imports vLLM once more to do so."""

Result = subprocess.CompletedProcess[str]


def run_tests(version: str) -> Result:
    """Its Python sources in front of the installed ones: imports find them, compiled parts are not needed."""
    tests = [f"tests/seam/{name}" for name in TESTS]
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "--deselect", ELSEWHERE],
        env={**os.environ, "PYTHONPATH": str(SOURCES / version), "NIXLTEL_TESTBED_VLLM": version},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, Future[Result]]]:
    """The runs of all versions, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield {version: pool.submit(run_tests, version) for version in VERSIONS}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", VERSIONS)
def test_version(version: str, results: dict[str, Future[Result]]) -> None:
    """All of them pass."""
    assert (SOURCES / version / "vllm").is_dir(), f"no sources of vLLM {version}: run `make contract`"

    result = results[version].result()

    assert result.returncode == 0, result.stdout[-4000:]
