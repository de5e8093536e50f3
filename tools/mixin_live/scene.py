# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The fleet: a pull and a push deployment of real servers behind real routers, and what can be done to it."""

import itertools
import random
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import httpx

from nixl_telemetry.testbed import (
    CONSUMER,
    LOOPBACK,
    Completion,
    HttpStatusError,
    Router,
    ServerConfig,
    TinyModel,
    VllmServer,
    complete,
    stop_servers,
)
from nixl_telemetry.testbed.pair import REMOTE_DECODE
from tools.mixin_live.prometheus import Prometheus

ROOT: Final = Path(__file__).resolve().parents[2]
OLDER: Final = "0.31.0"
MODULE: Final = "nixl_telemetry.connectors"
LEASE_SECONDS: Final = 5
"""vLLM's own 30 s would make a run long."""
_START_SECONDS: Final = 300.0
_ROUTER_SECONDS: Final = 60.0
_REQUEST_SECONDS: Final = 20.0
_PULL, _PUSH = "NixlPullConnector", "NixlPushConnector"
_WORDS: Final = (20, 600)
_FAILURES: Final = (httpx.HTTPError, HttpStatusError)
_ROUTER_ARGUMENTS: Final = ("--disable-retries", "--disable-circuit-breaker", "--health-check-interval-secs", "5")


@dataclass(frozen=True)
class Member:
    """One server of the fleet."""

    name: str
    model: str
    """The served name: what makes a deployment."""
    config: ServerConfig


def members(weights: Path, folder: Path) -> dict[str, Member]:
    """All servers by name: two deployments, and what a rollout that goes wrong adds to them."""
    extra: dict[str, Any] = {"kv_lease_duration": LEASE_SECONDS}
    base = ServerConfig(
        weights,
        connector_module=MODULE,
        extra_config=extra,
        env={
            # As between machines: over shared memory a reader needs nothing of a peer that stands still.
            "UCX_TLS": "tcp,self",
            "NIXLTEL_TRACE_FILE": str(folder / "mount" / "spans.jsonl"),
            "NIXLTEL_AUDIT_DIR": str(folder / "audit"),
        },
        # The prompts repeat, and each is to move its KV.
        args=("--no-enable-prefix-caching",),
        fork=True,
    )
    decode = replace(base, role=CONSUMER)
    stock = replace(decode, connector_module=None)
    older = replace(
        base,
        python=ROOT / ".venvs" / f"vllm-{OLDER}" / "bin" / "python",
        extra_config={**extra, "enforce_handshake_compat": False},
        env={**base.env, "PYTHONPATH": str(ROOT)},
    )
    configs = {
        "pull-prefill": ("chat-pull", replace(base, connector=_PULL)),
        "pull-decode": ("chat-pull", replace(decode, connector=_PULL)),
        "pull-stock": ("chat-pull", replace(stock, connector=_PULL)),
        "push-prefill": ("chat-push", replace(base, connector=_PUSH)),
        "push-decode": ("chat-push", replace(decode, connector=_PUSH)),
        "older-prefill": ("chat-pull", replace(older, connector=_PULL)),
        "wrong-decode": ("chat-pull", replace(decode, connector=_PUSH)),
        "other-decode": ("chat-push", replace(decode, connector=_PUSH, dtype="float32")),
    }
    return {
        name: Member(name, model, replace(config, args=(*config.args, "--served-model-name", model)))
        for name, (model, config) in configs.items()
    }


@dataclass(frozen=True)
class Handover:
    """A prompt whose KV waits at a prefill instance."""

    prompt: Sequence[int]
    request_id: str
    params: Mapping[str, Any]
    """``kv_transfer_params``."""


class Scene:
    """The servers that run, and the requests that they get.

    Attributes:
        folder: Logs, weights, spans, audit trails.
    """

    def __init__(self, folder: Path, prometheus: Prometheus) -> None:
        """Writes the model; nothing runs yet."""
        self.folder = folder
        # Spans go through a link, as good as a mount point: the disk behind it can be taken away.
        self._disk = folder / "disk"
        self._disk.mkdir(parents=True)
        (folder / "mount").symlink_to(self._disk)
        self._tiny = TinyModel()
        self._members = members(self._tiny.write(folder / "tiny"), folder)
        self._servers: dict[str, VllmServer] = {}
        self._routers: dict[str, Router] = {}
        self._prometheus = prometheus
        self._random = random.Random(6)  # noqa: S311 - prompts, not secrets
        self._ids = itertools.count()

    def __getitem__(self, name: str) -> VllmServer:
        return self._servers[name]

    def start(self, *names: str) -> None:
        """Start servers side by side, have them scraped, and wait until they serve."""
        started = {name: VllmServer(name, self._members[name].config, self.folder) for name in names}
        self._servers |= started
        for server in started.values():
            server.start()
        for server in started.values():
            server.wait_healthy(_START_SECONDS)
        self._tell_prometheus()

    def stop(self, *names: str) -> None:
        """Take servers away; they are not scraped any more."""
        going = [self._servers.pop(name) for name in names]
        self._tell_prometheus()
        stop_servers(going)

    def restart(self, name: str) -> None:
        """Start a server anew that was killed, on the same ports."""
        self._servers[name].restart()
        self._servers[name].wait_healthy(_START_SECONDS)

    def start_router(self, prefill: str, *decode: str) -> str:
        """Put a router in front of servers; returns its base URL."""
        router = Router(
            [self[prefill].url], [self[name].url for name in decode], self.folder, name=f"router-{prefill}",
            args=_ROUTER_ARGUMENTS,
        )  # fmt: skip
        self._routers[prefill] = router
        router.start()
        router.wait_healthy(_ROUTER_SECONDS)
        return router.url

    def close(self) -> None:
        """Stop everything."""
        for router in self._routers.values():
            router.stop()
        for server in self._servers.values():
            # One that stands still would not hear that it is to end.
            server.process.send_signal(signal.SIGCONT)
        stop_servers(list(self._servers.values()))

    def prompt(self) -> list[int]:
        """Token ids of random length, long ones as likely as short ones."""
        return [self._random.randrange(10, 200) for _ in range(self._random.randint(*_WORDS))]

    def ask(self, url: str, model: str, prompt: Sequence[int], max_tokens: int = 4, **more: Any) -> Completion | None:
        """One request; ``None`` if it failed, as some are meant to."""
        with suppress(*_FAILURES):
            return complete(url, prompt, max_tokens, model=model, **{"timeout": _REQUEST_SECONDS, **more})
        return None

    def request(self, name: str, prompt: Sequence[int] | None = None, **more: Any) -> Completion | None:
        """One request straight to a server."""
        return self.ask(self[name].url, self._members[name].model, prompt or self.prompt(), **more)

    def prefill(self, name: str) -> "Handover | None":
        """Prefill one prompt for a decode instance; ``None`` if it failed."""
        prompt, request_id = self.prompt(), self.new_id()
        answer = self.request(
            name,
            prompt,
            max_tokens=1,
            headers={"X-Request-Id": request_id},
            kv_transfer_params=dict(REMOTE_DECODE),
        )
        return Handover(prompt, request_id, answer.kv_transfer_params) if answer and answer.kv_transfer_params else None

    def decode(self, name: str, handover: "Handover", *, request_id: str | None = None, **more: Any) -> None:
        """Have a decode instance fetch what was prefilled, and answer.

        Args:
            name: The instance.
            handover: What the prefill instance handed over.
            request_id: Another one than the prefill instance was told.
            **more: For the request.
        """
        headers = {"X-Request-Id": request_id or handover.request_id}
        self.request(name, handover.prompt, headers=headers, kv_transfer_params=dict(handover.params), **more)

    def pair(self, prefill: str, decode: str) -> None:
        """One request through two servers, past the routers."""
        if handover := self.prefill(prefill):
            self.decode(decode, handover)

    def new_id(self) -> str:
        """For a request."""
        return f"story-{next(self._ids)}"

    @contextmanager
    def standing_still(self, name: str) -> Iterator[None]:
        """A server takes no step meanwhile."""
        self[name].process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self[name].process.send_signal(signal.SIGCONT)

    @contextmanager
    def without_disk(self) -> Iterator[None]:
        """Spans have nowhere to go meanwhile."""
        away = self._disk.rename(self._disk.with_name("disk-away"))
        try:
            yield
        finally:
            away.rename(self._disk)

    def _tell_prometheus(self) -> None:
        self._prometheus.set_targets({name: f"{LOOPBACK}:{server.port}" for name, server in self._servers.items()})
