# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The demo's servers: started side by side, watched while they start, and never left behind."""

import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from nixl_telemetry.cli.demo.folder import TRACE_FILE, DemoFolder
from nixl_telemetry.testbed import CONSUMER, PRODUCER, OtlpReceiver, ServerConfig, TinyModel, VllmServer, stop_servers

_LEASE_SECONDS = 10**9
_START_SECONDS = 900.0
_CONNECTORS = {"pull": "NixlPullConnector", "push": "NixlPushConnector"}
_ROLES = {"prefill": PRODUCER, "decode": CONSUMER, "stock": PRODUCER}
_ABOUT = {
    "prefill": "computes the KV cache of a prompt",
    "decode": "gets the KV cache and generates",
    "stock": "vLLM's own connector, only to be asked for its hash",
}


class Bench:
    """Servers, their model, and what receives their spans.

    Attributes:
        model: What the servers serve.
        receiver: Gets the spans of every instrumented server.
    """

    def __init__(self, console: Console, folder: DemoFolder) -> None:
        """Writes the model into a temporary folder.

        Args:
            console: Shows the progress.
            folder: Where servers write their logs and spans.
        """
        self.model = TinyModel()
        self.receiver = OtlpReceiver()
        self._console = console
        self._out = folder
        self._temporary = tempfile.TemporaryDirectory(prefix="nixl-telemetry-demo-")
        self._folder = Path(self._temporary.name)
        self.model.write(self._folder / "model")
        self._servers: dict[str, VllmServer] = {}
        self._started: dict[str, float] = {}

    def start(self, role: str, mode: str) -> VllmServer:
        """Start a server and return at once.

        Args:
            role: ``prefill``, ``decode`` or ``stock``: a prefill instance without this suite.
            mode: Its transfer mode.
        """
        stock = role == "stock"
        config = ServerConfig(
            self._folder / "model",
            role=_ROLES[role],
            connector=_CONNECTORS[mode],
            connector_module=None if stock else "nixl_telemetry.connectors",
            fork=True,  # half the time to wait
            # vLLM's first heartbeat shakes hands too, beside the request that is shown; a long lease puts it off.
            extra_config={"kv_lease_duration": _LEASE_SECONDS},
            otlp_endpoint=None if stock else self.receiver.grpc_endpoint,
            env={
                "NIXLTEL_TRACE_FILE": str(self._out.path / TRACE_FILE),
                # Else vLLM leaves files in the user's home.
                "XDG_CACHE_HOME": str(self._folder / "cache"),
                "XDG_CONFIG_HOME": str(self._folder / "config"),
            },
        )
        server = VllmServer(f"{role}-{mode}", config, self._out.logs)
        self._servers[server.name] = server
        self._started[server.name] = time.monotonic()
        server.start()
        self._say(f"  [dim]starting[/] {server.name:<13} [dim]{_ABOUT[role]}[/]")
        return server

    def wait(self, *servers: VllmServer) -> None:
        """Wait until they serve, and show how long each one takes."""
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        hidden = not self._console.is_terminal
        with Progress(*columns, console=self._console, transient=True, disable=hidden) as progress:
            bars = [progress.add_task(f"{server.name} is starting") for server in servers]
            for bar, server in zip(bars, servers, strict=True):
                server.wait_healthy(_START_SECONDS)
                progress.remove_task(bar)
                seconds = time.monotonic() - self._started[server.name]
                self._say(f"  [green]ready[/]    {server.name:<13} [dim]after {seconds:.0f} s, {server.url}[/]")

    def stop(self, *servers: VllmServer) -> None:
        """Stop servers side by side."""
        stop_servers(servers)
        for server in servers:
            self._servers.pop(server.name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._console.status("stopping the servers"):
            self.stop(*self._servers.values())
        self.receiver.close()
        self._temporary.cleanup()

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False)
