# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Fleets of real servers, shared by the tests of a module."""

import atexit
import functools
import math
import random
import signal
import sys
import tempfile
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nixl_telemetry.testbed import (
    MetricsSnapshot,
    ServerConfig,
    TinyModel,
    VllmServer,
    running,
    vllm_forkserver,
)
from nixl_telemetry.testbed.forkserver import ForkServer

MODULE = "nixl_telemetry.connectors"
MODEL = TinyModel()
BLOCK_SIZE = 32
BLOCK_BYTES = BLOCK_SIZE * MODEL.num_layers * 2 * MODEL.num_kv_heads * MODEL.head_dim * 2
"""Bytes of one block over all layers: keys and values, in two-byte numbers."""

START_SECONDS = 600.0
"""Two servers of a fleet start side by side, on however few cores there are."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts real servers, which takes minutes where cores are few."""
    for item in items:
        if "/tests/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)
            # Added to an item, it would win over its module's own.
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(900))


def stock_name(mode: str) -> str:
    """vLLM's connector of a mode."""
    return {"pull": "NixlPullConnector", "push": "NixlPushConnector"}[mode]


def blocks_of(tokens: int) -> int:
    """Blocks that hold a prompt."""
    return math.ceil(tokens / BLOCK_SIZE)


def prompt_lengths(count: int, longest: int, seed: int) -> list[int]:
    """Random lengths from 1 to ``longest``, both included, as many short as long ones."""
    rng = random.Random(seed)
    between = [round(math.exp(rng.uniform(0, math.log(longest)))) for _ in range(count - 2)]
    return [1, longest, *between]


def initiator(mode: str, prefill: VllmServer, decode: VllmServer) -> VllmServer:
    """Who moves the KV."""
    return decode if mode == "pull" else prefill


def direction(mode: str) -> str:
    """Which way the initiator moves it."""
    return "read" if mode == "pull" else "write"


def side_channel_hash(server: VllmServer) -> str:
    """The compatibility hash that a server answers to a handshake: rank (0, 0) only, which every server has."""
    import msgspec
    import zmq

    context = zmq.Context()
    socket = context.socket(zmq.REQ)
    socket.setsockopt(zmq.RCVTIMEO, 10_000)
    socket.setsockopt(zmq.LINGER, 0)
    try:
        socket.connect(f"tcp://127.0.0.1:{server.side_channel_port}")
        socket.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 0)))
        return str(msgspec.msgpack.decode(socket.recv_multipart()[0])["compatibility_hash"])
    finally:
        socket.close()
        context.term()


def metric(server: VllmServer, name: str, **labels: str) -> float:
    """A metric's value, summed over the labels that are not given; fails if it is not there."""
    value = server.metrics().value(name, **labels)
    assert value is not None, f"{server.name} has no {name} {labels}"
    return value


def unlabelled(snapshot: MetricsSnapshot, mode: str) -> list[Any]:
    """The nixl samples without the two labels."""
    return [
        sample
        for sample in snapshot.samples
        if "nixl" in sample.name
        and (sample.labels.get("transfer_mode") != mode or not sample.labels.get("connector_version", "").isdigit())
    ]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model."""
    return MODEL.write(tmp_path_factory.mktemp("model"))


class Servers:
    """Servers by name, of which only some are awake.

    An idle worker polls NIXL with a third of a core and more, so on few cores those that a test does not need are
    stopped (SIGSTOP) meanwhile.
    """

    def __init__(self, servers: dict[str, VllmServer]) -> None:
        self._servers = servers

    def __getitem__(self, name: str) -> VllmServer:
        return self._servers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._servers)

    def pair(self, prefill: str, decode: str) -> tuple[VllmServer, VllmServer]:
        """Let just these two run; returns them."""
        self.wake(prefill, decode)
        return self._servers[prefill], self._servers[decode]

    def wake(self, *names: str) -> list[VllmServer]:
        """Let just these run; returns them."""
        for name, server in self._servers.items():
            if server.process.is_running():
                server.process.send_signal(signal.SIGCONT if name in names else signal.SIGSTOP)
        return [self._servers[name] for name in names]


@functools.cache
def _forkserver() -> ForkServer:
    """Started with the first server; it imports vLLM once for all of them."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nixl-telemetry-e2e-")))
    return stack.enter_context(vllm_forkserver(ServerConfig(folder, fork=True), folder))


def new_server(name: str, config: ServerConfig, folder: Path) -> VllmServer:
    """A server that is not started. Those whose parts are forked are so themselves, from one that has imported vLLM."""
    is_forked = config.fork and config.python == Path(sys.executable)
    return VllmServer(name, config, folder, forkserver=_forkserver() if is_forked else None)


@contextmanager
def fleet(spawned: Collection[str] = (), /, **configs: ServerConfig) -> Iterator[Servers]:
    """Servers that are started two at a time and stopped whatever happens; none is awake at first.

    Engine core and workers are forked, as on GPUs, and in half the time; and so is the server, without importing vLLM
    again. Those behind several API servers are executed and spawned, as on CPUs: so both ways are tested.

    Args:
        spawned: Names of others to execute and spawn: a forked API server loses its own spans.
        **configs: By name.
    """
    with tempfile.TemporaryDirectory(prefix="nixl-telemetry-e2e-") as folder, ExitStack() as stack:
        servers: dict[str, VllmServer] = {}
        names = list(configs)
        for pair in (names[index : index + 2] for index in range(0, len(names), 2)):
            chosen = {
                name: replace(configs[name], fork=configs[name].api_server_count == 1 and name not in spawned)
                for name in pair
            }
            starting = {name: new_server(name, chosen[name], Path(folder)) for name in pair}
            stack.enter_context(running(starting.values(), timeout=START_SECONDS))
            servers |= starting
            Servers(starting).wake()
        yield Servers(servers)
