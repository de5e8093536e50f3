# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A real OpenTelemetry collector, ``rotel``, in front of another receiver."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import TracebackType

from nixl_telemetry.testbed.errors import MissingProgramError
from nixl_telemetry.testbed.ports import LOOPBACK, PortReservation
from nixl_telemetry.testbed.processes import ManagedProcess
from nixl_telemetry.testbed.readiness import port_open

_START_SECONDS = 30.0


class Collector:
    """One collector, which takes spans by gRPC and HTTP and passes them on by gRPC. It can stop and come back.

    Attributes:
        grpc_endpoint: Where it takes spans by gRPC.
        http_endpoint: Where it takes them by HTTP.
    """

    def __init__(self, target: str, work_dir: Path) -> None:
        """Reserves the ports; ``start`` runs it.

        Args:
            target: The gRPC endpoint that it passes spans on to.
            work_dir: Existing folder for its logs.

        Raises:
            MissingProgramError: ``rotel`` is not installed.
        """
        self._ports = PortReservation(2)
        self._target = target
        self._work_dir = work_dir
        self._starts = 0
        self._executable = find_rotel()
        self._process: ManagedProcess | None = None
        self.grpc_endpoint = f"http://{LOOPBACK}:{self._ports.ports[0]}"
        self.http_endpoint = f"http://{LOOPBACK}:{self._ports.ports[1]}/v1/traces"

    def start(self) -> None:
        """Runs it, on the same ports as before, and waits until it listens."""
        grpc, http = self._ports.ports
        options = {
            "--otlp-grpc-endpoint": f"{LOOPBACK}:{grpc}",
            "--otlp-http-endpoint": f"{LOOPBACK}:{http}",
            "--exporter": "otlp",
            "--otlp-exporter-protocol": "grpc",
            "--otlp-exporter-endpoint": self._target,
        }
        self._starts += 1
        argv = [str(self._executable), "start", *(part for option in options.items() for part in option)]
        self._process = ManagedProcess(f"collector-{self._starts}", argv, work_dir=self._work_dir)
        self._process.start()
        for port in (grpc, http):
            self._process.wait_ready(port_open(LOOPBACK, port), _START_SECONDS)

    def stop(self) -> None:
        """Ends it; harmless when it does not run."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def __enter__(self) -> Collector:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._ports.close()


def find_rotel() -> Path:
    """Returns the executable, which is in the wheel.

    Raises:
        MissingProgramError: It is not installed.
    """
    package = importlib.util.find_spec("rotel")
    if package is None or package.origin is None:
        raise MissingProgramError("rotel not found: pip install rotel, or install this project with its extra dev")
    return Path(package.origin).with_name("rotel-agent")
