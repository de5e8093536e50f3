# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The demo as a user runs it: in a process of its own, against real servers and a real router."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = {"nixl.handshake.metadata", "nixl.handshake.compat", "nixl.handshake.register"}

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def start_demo(out: Path, *options: str) -> subprocess.Popen[str]:
    """Run the command of this checkout, whether or not the package is installed."""
    temporary = out.parent / "tmp"
    temporary.mkdir()
    return subprocess.Popen(
        [sys.executable, "-c", "from nixl_telemetry.cli.main import app; app()", "demo", "--out", str(out), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def processes_of(out: Path) -> list[str]:
    """What the demo has started and what is alive.

    Told by the working directory: vLLM renames its processes, which also overwrites their environment in /proc.
    """
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "cwd").readlink().is_relative_to(out):
                found.append((folder / "cmdline").read_text(errors="replace").replace("\0", " "))
        except OSError:
            continue
    return found


def assert_nothing_is_left(out: Path) -> None:
    assert processes_of(out) == []
    # Temporary files of others are theirs; the demo's own are gone.
    assert list((out.parent / "tmp").glob("nixl-telemetry-demo-*")) == []


def test_the_demo_shows_everything(tmp_path: Path) -> None:
    out = tmp_path / "out"

    process = start_demo(out, "--requests", "3")
    output, _ = process.communicate()

    assert process.returncode == 0, output
    summary = json.loads((out / "summary.json").read_text())
    assert summary.keys() == {"vllm", "nixl", "connector_version", "modes", "rejection"}
    assert summary["vllm"] == "0.32.0"
    assert summary["nixl"] == "1.5.1"
    assert summary["connector_version"] == 14
    # In push, both sides shake hands.
    for mode, operation, handshakes in (("pull", "READ", 1), ("push", "WRITE", 2)):
        seen = summary["modes"][mode]
        assert seen["requests"] == 3
        assert seen["operations"] == {operation: 3}
        assert seen["spans"]["nixl.transfer"] == 3
        assert {seen["spans"][name] for name in ("nixl.handshake", *STAGES)} == {handshakes}
        assert seen["nixl_samples"] > 0
        assert seen["nixl_samples_unlabelled"] == 0
        assert seen["hash_equals_stock"] is True
    assert summary["rejection"] == {
        "local_mode": "push",
        "remote_mode": "pull",
        "http_status": 500,
        "error_type": "compat_mismatch",
        "rejections_total": 1,
    }
    assert json.loads((out / "spans.json").read_text()).keys() == {"pull", "push", "rejection"}
    assert {path.name for path in out.glob("metrics-*.txt")} == {
        "metrics-pull-prefill.txt",
        "metrics-pull-decode.txt",
        "metrics-push-prefill.txt",
        "metrics-push-decode.txt",
        "metrics-rejection-decode.txt",
    }
    # As a file shows it: no colours, no cursor movements.
    assert "\x1b" not in output
    for text in (
        "nixl.handshake.register",
        "READ",
        "WRITE",
        "HTTP 500",
        "compat_mismatch",
        "(exchanged)",
        "Everything was seen.",
    ):
        assert text in output
    assert_nothing_is_left(out)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing_running(tmp_path: Path, how: signal.Signals) -> None:
    out = tmp_path / "out"
    process = start_demo(out)
    deadline = time.monotonic() + 120
    while not any("api_server" in title for title in processes_of(out)):
        assert time.monotonic() < deadline, "no server was started"
        time.sleep(0.2)

    process.send_signal(how)
    output, _ = process.communicate(timeout=180)

    assert process.returncode == 130, output
    assert "Interrupted; nothing is left running." in " ".join(output.split())
    assert not (out / "summary.json").exists()
    assert_nothing_is_left(out)
