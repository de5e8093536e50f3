# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""An alert storm: 50 instances that do not fit each other give one notification for each cause."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from nixl_telemetry.mixin.config import MixinConfig
from nixl_telemetry.mixin.rules import rules_file
from nixl_telemetry.testbed import LOOPBACK
from tests.support.peers import wait_until
from tools.mixin_live.alertmanager import Alertmanager
from tools.mixin_live.prometheus import Prometheus
from tools.mixin_live.webhook import Webhook

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

EXAMPLE: Final = Path(__file__).resolve().parents[2] / "examples/alertmanager/alertmanager.yml"
CAUSES: Final = {"NixlTransferModeMismatch", "NixlConnectorVersionMismatch"}
HELD_BACK: Final = {
    "NixlCompatMismatch",
    "NixlCompatHashesMixed",
    "NixlConnectorVersionsMixed",
    "NixlTransferModesMixed",
    "NixlHandshakeFailureRatioHigh",
}
"""They fire too, and say nothing more."""
_STARTED: Final = time.monotonic()


@dataclass(frozen=True)
class Instance:
    """One of the fleet: it refuses the instances of the other mode and of the other version once a second each."""

    number: int

    @property
    def labels(self) -> dict[str, str]:
        old, push = self.number % 5 == 0, self.number % 3 == 0
        return {
            "model_name": "model",
            "engine": "0",
            "transfer_mode": "push" if push else "pull",
            "connector_version": "13" if old else "14",
        }

    def exposition(self) -> str:
        """What it has on ``/metrics``."""
        seconds = int(time.monotonic() - _STARTED)
        identity = {
            "vllm_version": f"0.{int(self.labels['connector_version']) + 18}.0",
            "compat_hash": self.labels["transfer_mode"] + self.labels["connector_version"],
            "kv_role": "kv_consumer" if self.number % 2 else "kv_producer",
            "handshake_enforced": "true",
            "nixl_version": "1.5.1",
        }
        return "".join(
            (
                self._line("nixl_connector_info", 1, **identity),
                self._line("nixl_handshake_rejections_total", seconds, factor="transfer_mode"),
                self._line("nixl_handshake_rejections_total", seconds, factor="vllm_version"),
                self._line("nixl_handshake_rejections_total", 0, factor="dtype"),
                self._line("nixl_handshake_duration_seconds_count", 2 * seconds, error_type="compat_mismatch"),
                self._line("nixl_handshake_duration_seconds_count", 8 * seconds, error_type=""),
            )
        )

    def _line(self, metric: str, value: int, **labels: str) -> str:
        pairs = ",".join(f'{name}="{value}"' for name, value in (self.labels | labels).items())
        return f"{metric}{{{pairs}}} {value}\n"


@contextlib.contextmanager
def fleet(size: int) -> Iterator[list[str]]:
    """So many instances, each behind a port of its own."""
    servers = []
    for number in range(size):
        server = ThreadingHTTPServer((LOOPBACK, 0), _handler(Instance(number)))
        threading.Thread(target=server.serve_forever, name=f"instance {number}", daemon=True).start()
        servers.append(server)
    try:
        yield [f"{LOOPBACK}:{server.server_address[1]}" for server in servers]
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def _handler(instance: Instance) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(instance.exposition().encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
            """Nothing."""

    return Handler


def _alerts(address: str) -> list[dict[str, Any]]:
    alerts: list[dict[str, Any]] = httpx.get(f"http://{address}/api/v2/alerts", trust_env=False).json()
    return alerts


def _suppressed(address: str) -> set[str]:
    return {alert["labels"]["alertname"] for alert in _alerts(address) if alert["status"]["state"] == "suppressed"}


def _notifications(address: str) -> int:
    """How many Alertmanager has sent, of any group."""
    lines = httpx.get(f"http://{address}/metrics", trust_env=False).text.splitlines()
    (sent,) = (line for line in lines if line.startswith('alertmanager_notifications_total{integration="webhook"'))
    return int(float(sent.split()[-1]))


def test_fifty_mixed_instances_are_one_notification_for_each_cause(tmp_path: Path) -> None:
    """Not 50, and none for what only follows from a cause."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(rules_file(MixinConfig().scaled(1 / 60)), encoding="utf-8")
    with (
        Webhook() as webhook,
        Alertmanager(tmp_path / "alertmanager", EXAMPLE, webhook.url) as alertmanager,
        Prometheus(tmp_path / "prometheus", rules=rules, alertmanager=alertmanager.address) as prometheus,
        fleet(50) as instances,
    ):
        prometheus.set_targets({address: address for address in instances})

        assert wait_until(lambda: webhook.names() >= CAUSES, 60), webhook.names()
        assert wait_until(lambda: _suppressed(alertmanager.address) >= HELD_BACK, 90), _suppressed(alertmanager.address)
        time.sleep(5)  # as long as two groups' intervals

        assert webhook.names() == CAUSES
        assert _notifications(alertmanager.address) == len(CAUSES)
        assert len([alert for alert in _alerts(alertmanager.address) if alert["labels"]["alertname"] in CAUSES]) == 2
