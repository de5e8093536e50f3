# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A real Alertmanager on loopback, with the example's routes, shortened waits and one receiver."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import yaml

from nixl_telemetry.testbed import LOOPBACK, ManagedProcess, PortReservation, http_ok

_WAITS: Final = {"group_wait": "1s", "group_interval": "2s", "repeat_interval": "1h"}
_RESOLVE: Final = "15s"
_START_SECONDS: Final = 60.0


def shortened(config: Mapping[str, Any], webhook: str) -> dict[str, Any]:
    """A configuration whose routes and inhibitions are kept, but that does not wait, and tells the webhook only."""
    receivers = [
        {"name": receiver["name"], "webhook_configs": [{"url": webhook, "send_resolved": True}]}
        for receiver in config["receivers"]
    ]
    return {
        **config,
        "global": {"resolve_timeout": _RESOLVE},
        "route": {**_WAITS, **_quick(config["route"])},
        "receivers": receivers,
    }


def _quick(route: Mapping[str, Any]) -> dict[str, Any]:
    waits = {name: wait for name, wait in _WAITS.items() if name in route}
    children = {"routes": [_quick(child) for child in route["routes"]]} if "routes" in route else {}
    return {**route, **waits, **children}


class Alertmanager:
    """One server.

    Attributes:
        address: Host and port, as Prometheus wants it.
    """

    def __init__(self, folder: Path, example: Path, webhook: str) -> None:
        """Reserves a port and writes the configuration.

        Args:
            folder: Made if missing.
            example: The configuration to start from.
            webhook: Where notifications go.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._reservation = PortReservation()
        self.address = f"{LOOPBACK}:{self._reservation.ports[0]}"
        config = folder / "alertmanager.yml"
        given = yaml.safe_load(example.read_text(encoding="utf-8"))
        config.write_text(json.dumps(shortened(given, webhook), indent=2), encoding="utf-8")
        self._process = ManagedProcess(
            "alertmanager",
            [
                "prometheus-alertmanager",
                f"--config.file={config.resolve()}",
                f"--storage.path={(folder / 'data').resolve()}",
                f"--web.listen-address={self.address}",
                f"--web.external-url=http://{self.address}",
                "--cluster.listen-address=",  # by default it listens for peers on all addresses
                "--log.level=warn",
            ],
            work_dir=folder,
        )

    def __enter__(self) -> "Alertmanager":
        try:
            self._process.start()
            self._process.wait_ready(http_ok(f"http://{self.address}/-/ready"), _START_SECONDS)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stop()
        self._reservation.close()
