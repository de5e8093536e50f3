# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The real ``vllm-router``, from an environment of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from nixl_telemetry.testbed.client import Completion, complete, get_text
from nixl_telemetry.testbed.errors import MissingProgramError
from nixl_telemetry.testbed.metrics import MetricsSnapshot
from nixl_telemetry.testbed.ports import LOOPBACK, PortReservation
from nixl_telemetry.testbed.processes import ManagedProcess
from nixl_telemetry.testbed.procfs import ExitReport
from nixl_telemetry.testbed.readiness import http_ok

ROUTER_VARIABLE = "NIXLTEL_TESTBED_ROUTER"
_DEFAULT_PLACE = Path(".venvs", "router", "bin", "vllm-router")
_REPOSITORY = Path(__file__).resolve().parents[2]
# Every worker must be healthy before the router serves; it looks again only at this interval.
_WORKER_CHECK_SECONDS = 1


def find_router() -> Path:
    """Returns the router's executable.

    The environment variable ``NIXLTEL_TESTBED_ROUTER`` wins; otherwise ``.venvs/router`` in the
    repository or in the working directory.

    Raises:
        MissingProgramError: It is not installed; the message says how to do that.
    """
    named = os.environ.get(ROUTER_VARIABLE)
    candidates = [Path(named)] if named else [root / _DEFAULT_PLACE for root in (_REPOSITORY, Path.cwd())]
    for candidate in candidates:
        if os.access(candidate, os.X_OK):
            return candidate
    looked = ", ".join(str(candidate) for candidate in dict.fromkeys(candidates))
    raise MissingProgramError(
        f"vllm-router not found (looked at {looked}). Install it into an environment of its own: "
        f"python3 -m venv .venvs/router && .venvs/router/bin/pip install vllm-router; "
        f"or set {ROUTER_VARIABLE} to the executable"
    )


class Router:
    """One router in front of prefill and decode instances.

    Attributes:
        process: The operating system's side: pid, members, log, signals; another one after ``restart``.
        port: Where it takes requests.
        metrics_port: Where Prometheus scrapes it.
    """

    def __init__(
        self,
        prefill: Sequence[str],
        decode: Sequence[str],
        work_dir: Path,
        *,
        name: str = "router",
        executable: Path | None = None,
        policy: str = "round_robin",
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Reserves the ports; ``start`` runs the router.

        Args:
            prefill: Base URLs of the prefill instances.
            decode: Base URLs of the decode instances.
            work_dir: Existing folder for the log.
            name: Unique in *work_dir*.
            executable: By default what ``find_router`` finds.
            policy: How instances are chosen.
            args: More command-line arguments.
            env: Environment variables on top of this process's.
        """
        self._reservation = PortReservation(2)
        self.port, self.metrics_port = self._reservation.ports
        instances = [part for url in prefill for part in ("--prefill", url)]
        instances += [part for url in decode for part in ("--decode", url)]
        self._argv = [
            *(str(executable or find_router()), "--vllm-pd-disaggregation", *instances),
            *("--kv-connector", "nixl", "--policy", policy),
            *("--host", LOOPBACK, "--port", str(self.port)),
            *("--prometheus-host", LOOPBACK, "--prometheus-port", str(self.metrics_port)),
            *("--worker-startup-check-interval", str(_WORKER_CHECK_SECONDS)),
            *args,
        ]
        self._name = name
        self._work_dir = work_dir
        self._env = {**os.environ, **(env or {})}
        self._restarts = 0
        self.process = self._new_process(name)

    @property
    def url(self) -> str:
        """The base URL for clients."""
        return f"http://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        """Starts the router and returns at once."""
        self.process.start()

    def restart(self) -> None:
        """Starts the router anew, on the same ports and with a log of its own, and returns at once.

        What still runs of it is stopped first.
        """
        self.process.stop()
        self._restarts += 1
        self.process = self._new_process(f"{self._name}-{self._restarts}")
        self.process.start()

    def wait_healthy(self, timeout: float = 60.0) -> float:
        """Waits until the router and the instances behind it serve; returns the seconds waited."""
        return self.process.wait_ready(http_ok(f"{self.url}/health"), timeout)

    def complete(
        self,
        prompt: str | Sequence[int],
        max_tokens: int = 8,
        *,
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> Completion:
        """Sends one completion request; see ``client.complete``."""
        return complete(self.url, prompt, max_tokens, headers=headers, **body)

    def metrics(self) -> MetricsSnapshot:
        """Scrapes the router's metrics."""
        return MetricsSnapshot(get_text(f"http://{LOOPBACK}:{self.metrics_port}/metrics"))

    def stop(self) -> ExitReport:
        """Stops the router and gives the ports back."""
        report = self.process.stop()
        self._reservation.close()
        return report

    def _new_process(self, name: str) -> ManagedProcess:
        return ManagedProcess(name, self._argv, work_dir=self._work_dir, env=self._env)

    def __enter__(self) -> Router:
        try:
            self.start()
            self.wait_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
