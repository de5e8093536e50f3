# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A pair of real servers behind a real router, with all that a fault may take away."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos.load import LOOK_SECONDS, REQUEST_SECONDS, asking, questions
from benchmarks.clients import new_client
from benchmarks.fleet import NAMES
from benchmarks.load import Request
from benchmarks.receiver import RawReceiver
from nixl_telemetry.testbed import (
    CONSUMER,
    PRODUCER,
    Collector,
    Pair,
    Router,
    ServerConfig,
    TinyModel,
    VllmServer,
    http_ok,
    running,
    stop_servers,
)

START_SECONDS: Final = 300.0
_ROUTER_SECONDS: Final = 60.0
_MODULE: Final = "nixl_telemetry.connectors"
_EXPORT_SECONDS: Final = 2
"""OpenTelemetry's patience with a collector; by default it is 10 s, and a loss is seen so much later."""
_ROUTER_ARGUMENTS: Final = (
    "--disable-retries",  # a request that fails must show
    "--disable-circuit-breaker",  # it would keep a pair away for a minute that has recovered
    *("--health-check-interval-secs", str(LOOK_SECONDS)),
)
_MIB: Final = 2**20


@dataclass(frozen=True)
class Sizes:
    """All processes of both instances."""

    memory_mib: float
    threads: int


@dataclass
class Scene:
    """What a fault happens to."""

    mode: str
    instrumented: bool
    folder: Path
    pair: Pair
    router: Router
    collector: Collector
    receiver: RawReceiver
    questions: list[Request]
    expected: dict[Request, tuple[int, ...]] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    """What a fault wants to be in its report."""
    marks: dict[str, int] = field(default_factory=dict)
    """What it wants to compare with afterwards."""

    @property
    def mount(self) -> Path:
        """Where the disk with the trace file is seen: a link, as good as a mount point."""
        return self.folder / "disk"

    @property
    def disk(self) -> Path:
        """The disk itself."""
        return self.folder / "disk-itself"

    @property
    def trace_file(self) -> Path:
        """Where spans are written."""
        return self.mount / "traces.jsonl"

    @property
    def audit(self) -> Path:
        """The folder of the audit trail."""
        return self.folder / "audit"

    @property
    def servers(self) -> tuple[VllmServer, VllmServer]:
        """Both instances."""
        return self.pair.prefill, self.pair.decode

    def is_sound(self) -> bool:
        """Whether both instances and the router say that they are well."""
        urls = [*(server.url for server in self.servers), self.router.url]
        return all(http_ok(f"{url}/health")() for url in urls)

    def renew(self) -> None:
        """Start everything anew, on the same ports."""
        for server in self.servers:
            server.process.kill()
        for server in self.servers:
            server.restart()
        for server in self.servers:
            server.wait_healthy(START_SECONDS)
        self.restart_router()
        self.warm_up()

    def restart_router(self) -> None:
        """End the router, if it still runs, and start it anew."""
        self.router.restart()
        self.router.wait_healthy(_ROUTER_SECONDS)

    def warm_up(self) -> None:
        """Ask each question once through both instances, after the prefill instance alone gave the answers."""
        with new_client(REQUEST_SECONDS) as client:
            for question in self.questions:
                if question not in self.expected:
                    self.expected[question] = asking(self.pair.prefill.url)(client, question)
            for question in self.questions:
                asking(self.router.url)(client, question)

    def step(self) -> None:
        """Let each instance make a step of its engine: what it has to report leaves with it."""
        with new_client(REQUEST_SECONDS) as client:
            for server in self.servers:
                asking(server.url)(client, Request("w1 w2", 1))

    def sizes(self) -> Sizes:
        """Memory and threads now."""
        processes = [process for server in self.servers for process in server.process.members()]
        return Sizes(
            round(sum(process.resident_bytes for process in processes) / _MIB, 1),
            sum(_threads(process.pid) for process in processes),
        )


@contextmanager
def scene(mode: str, *, instrumented: bool, lease_seconds: int | None = None, keep: bool = False) -> Iterator[Scene]:
    """A running pair.

    Args:
        mode: ``pull`` or ``push``.
        instrumented: Whether the connectors are the suite's, or vLLM's own.
        lease_seconds: ``kv_lease_duration``; by default vLLM's own, 30 s.
        keep: Whether the folder with the logs stays.
    """
    folder = Path(tempfile.mkdtemp(prefix="nixl-telemetry-chaos-"))
    if keep:
        print(f"chaos: logs in {folder}", flush=True)
    try:
        with ExitStack() as stack:
            receiver = stack.enter_context(RawReceiver())
            collector = stack.enter_context(Collector(receiver.endpoint, folder))
            model = TinyModel()
            (folder / "disk-itself").mkdir()
            (folder / "disk").symlink_to(folder / "disk-itself")
            config = _config(mode, model.write(folder / "model"), instrumented, lease_seconds, folder, collector)
            pair = Pair(
                VllmServer("prefill", replace(config, role=PRODUCER), folder),
                VllmServer("decode", replace(config, role=CONSUMER), folder),
            )
            stack.enter_context(running((pair.prefill, pair.decode), timeout=START_SECONDS))
            router = Router([pair.prefill.url], [pair.decode.url], folder, args=_ROUTER_ARGUMENTS)
            stack.callback(router.stop)
            made = Scene(mode, instrumented, folder, pair, router, collector, receiver, questions(model))
            # Both stop at once, and first: the receiver would otherwise be gone while they send their last spans.
            stack.callback(stop_servers, made.servers)
            router.start()
            router.wait_healthy(_ROUTER_SECONDS)
            made.warm_up()
            yield made
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _config(
    mode: str, weights: Path, instrumented: bool, lease_seconds: int | None, folder: Path, collector: Collector
) -> ServerConfig:
    extra: dict[str, Any] = {} if lease_seconds is None else {"kv_lease_duration": lease_seconds}
    telemetry: Mapping[str, Any] = {"audit_dir": str(folder / "audit")}
    environment = {"OTEL_EXPORTER_OTLP_TIMEOUT": str(_EXPORT_SECONDS)}
    if instrumented:
        extra["telemetry"] = dict(telemetry)
        environment["NIXLTEL_TRACE_FILE"] = str(folder / "disk" / "traces.jsonl")
    return ServerConfig(
        weights,
        connector=NAMES[mode],
        connector_module=_MODULE if instrumented else None,
        extra_config=extra,
        otlp_endpoint=collector.grpc_endpoint,
        env=environment,
        # The questions repeat, and each is to move its KV.
        args=("--no-enable-prefix-caching",),
        fork=True,
    )


def _threads(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Threads:")), 0)
