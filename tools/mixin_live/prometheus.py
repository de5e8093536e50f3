# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A real Prometheus on loopback, with targets that come and go."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import httpx

from nixl_telemetry.testbed import LOOPBACK, ManagedProcess, PortReservation, http_ok

Result = Sequence[Mapping[str, Any]]
SCRAPE_SECONDS: Final = 1
JOB: Final = "vllm"
_START_SECONDS: Final = 60.0
_QUERY_SECONDS: Final = 60.0
_RETENTION: Final = "10y"  # pictures are drawn again long after a run


class QueryError(RuntimeError):
    """Prometheus refused a query; the message has the query."""


class Prometheus:
    """One server; its data stay in the folder.

    Attributes:
        url: Its base URL.
        folder: Where its configuration, log and data are.
    """

    def __init__(self, folder: Path, *, rules: Path | None = None, alertmanager: str | None = None) -> None:
        """Reserves a port and writes the configuration.

        Args:
            folder: Made if missing.
            rules: File with the alert rules.
            alertmanager: Address (host:port) of the Alertmanager. Without it and ``rules`` old data are served.
        """
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._reservation = PortReservation()
        address = f"{LOOPBACK}:{self._reservation.ports[0]}"
        self.url = f"http://{address}"
        self._targets = folder / "targets.json"
        self._client = httpx.Client(base_url=self.url, timeout=_QUERY_SECONDS, trust_env=False)
        # JSON is YAML.
        config = folder / "prometheus.yml"
        config.write_text(json.dumps(self._config(rules, alertmanager), indent=2), encoding="utf-8")
        self._process = ManagedProcess(
            "prometheus",
            [
                "prometheus",
                f"--config.file={config.resolve()}",
                f"--storage.tsdb.path={(folder / 'data').resolve()}",
                f"--storage.tsdb.retention.time={_RETENTION}",
                f"--web.listen-address={address}",
                f"--web.external-url={self.url}",
                "--rules.alert.resend-delay=5s",  # by default a minute, should the first one be lost
                "--log.level=warn",
            ],
            work_dir=folder,
        )

    def set_targets(self, instances: Mapping[str, str]) -> None:
        """Scrape just these.

        Args:
            instances: Addresses (host:port) by the value of the label ``instance``.
        """
        listed = [{"targets": [address], "labels": {"instance": name}} for name, address in instances.items()]
        # Replaced in one step: Prometheus may look at any time.
        fresh = self._targets.with_suffix(".new")
        fresh.write_text(json.dumps(listed), encoding="utf-8")
        fresh.replace(self._targets)

    def query(self, expression: str, at: float) -> Result:
        """The series of an expression at a moment (Unix time)."""
        return self._get("query", {"query": expression, "time": at})

    def query_range(self, expression: str, start: float, end: float, step: float) -> Result:
        """The series of an expression over a time."""
        return self._get("query_range", {"query": expression, "start": start, "end": end, "step": step})

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        alerts = self._client.get("/api/v1/alerts").raise_for_status().json()["data"]["alerts"]
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}

    def _get(self, path: str, parameters: Mapping[str, str | float]) -> Result:
        # A POST, since an expression may be longer than an address.
        answer = self._client.post(f"/api/v1/{path}", data=dict(parameters)).json()
        if answer["status"] != "success":
            raise QueryError(f"{answer['error']}: {parameters['query']}")
        data = answer["data"]
        if data["resultType"] in {"scalar", "string"}:
            return [{"metric": {}, "value": data["result"]}]
        result: Result = data["result"]
        return result

    def _config(self, rules: Path | None, alertmanager: str | None) -> Mapping[str, Any]:
        every = f"{SCRAPE_SECONDS}s"
        config: dict[str, Any] = {"global": {"scrape_interval": every, "evaluation_interval": every}}
        if rules is not None:
            config["rule_files"] = [str(rules.resolve())]
        if alertmanager is None:
            return config
        self.set_targets({})
        discovery = {"files": [str(self._targets.resolve())], "refresh_interval": every}
        return {
            **config,
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
            "scrape_configs": [{"job_name": JOB, "file_sd_configs": [discovery]}],
        }

    def __enter__(self) -> "Prometheus":
        try:
            self._process.start()
            self._process.wait_ready(http_ok(f"{self.url}/-/ready"), _START_SECONDS)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stop()
        self._client.close()
        self._reservation.close()
