# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A server that is killed comes back on its ports; so does a router."""

from __future__ import annotations

import sys
from pathlib import Path

import httpx

from nixl_telemetry.testbed import Router, ServerConfig, VllmServer
from nixl_telemetry.testbed.procfs import process_info

# Answers with its pid; has a child, which ignores SIGTERM.
_SERVER = """
import http.server, os, signal, sys, time
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(300)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(os.getpid()).encode())
print("up", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
_LONG = 60.0


class Config(ServerConfig):
    """Runs a small program instead of vLLM."""

    def argv(self, port: int) -> list[str]:
        return [sys.executable, "-c", _SERVER, str(port)]


def _answer(url: str) -> str:
    return httpx.get(f"{url}/health", timeout=_LONG, trust_env=False).text


def test_a_killed_server_comes_back(tmp_path: Path) -> None:
    """Killed with all its processes, and at once; the new one has the same ports and a log of its own."""
    with VllmServer("server", Config(tmp_path), tmp_path) as server:
        before = server.process.members()
        ports = (server.port, server.side_channel_port)
        assert len(before) == 2

        report = server.process.kill()
        gone = [process_info(info.pid) for info in before]
        server.restart()
        server.wait_healthy(_LONG)

        assert report.returncode == -9
        assert report.seconds < 5
        assert gone == [None, None]
        assert (server.port, server.side_channel_port) == ports
        assert _answer(server.url) == str(server.process.pid) != str(before[0].pid)
        assert {path.name for path in tmp_path.glob("*.log")} == {"server.log", "server-1.log"}
    assert server.process.members() == ()


def test_a_router_comes_back(tmp_path: Path) -> None:
    """One that still runs is stopped first."""
    program = tmp_path / "router"
    # The port is an option among others.
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.argv[1] = sys.argv[sys.argv.index('--port') + 1]\n{_SERVER}"
    )
    program.chmod(0o755)
    with Router(["http://127.0.0.1:1"], ["http://127.0.0.1:2"], tmp_path, executable=program) as router:
        before = _answer(router.url)

        router.restart()
        router.wait_healthy(_LONG)

        assert _answer(router.url) == str(router.process.pid) != before
