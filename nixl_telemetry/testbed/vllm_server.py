# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A running vLLM server."""

from __future__ import annotations

import contextlib
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from nixl_telemetry.testbed.client import Completion, complete, get_text
from nixl_telemetry.testbed.forkserver import ForkServer
from nixl_telemetry.testbed.metrics import MetricsSnapshot
from nixl_telemetry.testbed.ports import LOOPBACK, PortReservation
from nixl_telemetry.testbed.processes import ManagedProcess
from nixl_telemetry.testbed.procfs import ExitReport
from nixl_telemetry.testbed.readiness import http_ok
from nixl_telemetry.testbed.server_config import ServerConfig

# A pair is up in 35 s on two idle cores; other work on the machine stretches that to minutes.
START_SECONDS = 600.0

_PRELOADED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
)

_SOCKET_PATH_LIMIT = 107
"""Bytes that Linux gives the path of a socket."""

Progress = Callable[[str, float], None]
"""Called again and again during a wait, with the server's name and the seconds waited."""


class VllmServer:
    """One vLLM server on loopback.

    Start several with ``start`` and then wait for each, or use ``running``: they come up side by side.

    Attributes:
        name: Names the log file, too.
        config: What it runs.
        process: The operating system's side: pid, members, log, signals; another one after ``restart``.
        port: Where the API listens.
        side_channel_port: Where the connector answers handshakes.
    """

    def __init__(
        self,
        name: str,
        config: ServerConfig,
        work_dir: Path,
        *,
        stop_timeout: float = 20.0,
        forkserver: ForkServer | None = None,
    ) -> None:
        """Reserves the ports; ``start`` runs the server.

        Args:
            name: Unique in *work_dir*.
            config: What to run.
            work_dir: Existing folder for the log.
            stop_timeout: Seconds between SIGTERM and SIGKILL.
            forkserver: Forks the server; see ``vllm_forkserver``.
        """
        self.name = name
        self.config = config
        self._work_dir = work_dir
        self._stop_timeout = stop_timeout
        self._forkserver = forkserver
        self._api = PortReservation()
        self._side_channel = PortReservation(config.data_parallel_size, consecutive=True)
        self.port = self._api.ports[0]
        self.side_channel_port = self._side_channel.ports[0]
        self._temporary = tempfile.TemporaryDirectory(prefix="nixl-", ignore_cleanup_errors=True)
        self._restarts = 0
        self.process = self._new_process(name)

    @property
    def url(self) -> str:
        """The base URL of the API."""
        return f"http://{LOOPBACK}:{self.port}"

    def start(self) -> None:
        """Starts the server and returns at once."""
        self.process.start()

    def restart(self) -> None:
        """Starts the server anew, on the same ports and with a log of its own, and returns at once.

        What still runs of it is stopped first. The new one has another engine id.
        """
        self.process.stop()
        self._restarts += 1
        self.process = self._new_process(f"{self.name}-{self._restarts}")
        self.process.start()

    def wait_healthy(self, timeout: float = START_SECONDS, progress: Progress | None = None) -> float:
        """Waits until the server answers requests.

        Args:
            timeout: Seconds to wait at most.
            progress: Told about the wait.

        Returns:
            The seconds waited.

        Raises:
            ProcessDiedError: The server ended; the message has the end of its log.
            ProcessNotReadyError: It is still not ready.
        """
        report = None if progress is None else (lambda seconds: progress(self.name, seconds))
        return self.process.wait_ready(http_ok(f"{self.url}/health"), timeout, progress=report)

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
        """Scrapes ``/metrics``."""
        return MetricsSnapshot(get_text(f"{self.url}/metrics"))

    def log_text(self) -> str:
        """Returns everything the server's processes have written."""
        return self.process.log_text()

    def stop(self) -> ExitReport:
        """Stops every process of the server, gives the ports back and removes its temporary files."""
        report = self.process.stop()
        self._temporary.cleanup()
        self._api.close()
        self._side_channel.close()
        return report

    def _new_process(self, name: str) -> ManagedProcess:
        return ManagedProcess(
            name,
            self.config.argv(self.port),
            work_dir=self._work_dir,
            env=self._environment(),
            stop_timeout=self._stop_timeout,
            forkserver=self._forkserver,
        )

    def _environment(self) -> dict[str, str]:
        environment = self.config.environment(self.side_channel_port)
        # vLLM leaves sockets and files where temporary ones go. In a folder too deep for sockets it could not start.
        if len(f"{self._temporary.name}/{uuid.UUID(int=0)}") <= _SOCKET_PATH_LIMIT:
            environment["TMPDIR"] = self._temporary.name
        return environment

    def __enter__(self) -> VllmServer:
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


def vllm_forkserver(config: ServerConfig, work_dir: Path) -> ForkServer:
    """Starts what forks vLLM servers without importing vLLM for each, which takes ten seconds of CPU time.

    Servers may differ from *config* in everything but the interpreter and what is read at import: vLLM's logging, the
    number of OpenMP threads, and whether there are several API servers (``prometheus_client``).

    Args:
        config: Any that is forked; its environment is what the modules see when they are imported.
        work_dir: Existing folder for the log.
    """
    return ForkServer(config.python, _PRELOADED, config.environment(side_channel_port=0), work_dir)


@contextlib.contextmanager
def running(
    servers: Iterable[VllmServer], *, timeout: float = START_SECONDS, progress: Progress | None = None
) -> Iterator[None]:
    """Runs several servers: they start, and later stop, side by side."""
    started: list[VllmServer] = []
    try:
        for server in servers:
            started.append(server)
            server.start()
        for server in started:
            server.wait_healthy(timeout, progress)
        yield
    finally:
        stop_servers(started)


def stop_servers(servers: Sequence[VllmServer]) -> list[ExitReport]:
    """Stops several servers at the same time and returns their reports in order."""
    for server in servers:
        server.process.request_stop()
    return [server.stop() for server in servers]
