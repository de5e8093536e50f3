# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whatever fails in the telemetry: requests are served, tokens unchanged, and the health metrics say what failed."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_telemetry.testbed import (
    CONSUMER,
    PRODUCER,
    BlackHole,
    ServerConfig,
    VllmServer,
    disaggregated_completion,
    unreachable_port,
)
from tests.e2e.conftest import MODEL, MODULE, Servers, fleet, metric, stock_name

REQUESTS = 6


@pytest.fixture(scope="module")
def black_hole() -> Iterator[BlackHole]:
    """Accepts connections and never answers."""
    with BlackHole() as hole:
        yield hole


@pytest.fixture(scope="module", params=["pull", "push"])
def servers(request: pytest.FixtureRequest, model: Path, black_hole: BlackHole) -> Iterator[Servers]:
    """A prefill and three decodes of one mode, each with something broken."""
    mode = request.param
    name = stock_name(mode)
    faulty = str(Path(__file__).with_name("faulty"))
    hooks = {"PYTHONPATH": faulty, "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{unreachable_port()}"}
    fast = {"OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with fleet(
        # In push, the initiator is the prefill: there the hooks break.
        prefill=ServerConfig(
            model,
            PRODUCER,
            name,
            MODULE if mode == "pull" else "faulty_connectors",
            env=hooks if mode == "push" else {},
        ),
        hooks_raise=ServerConfig(model, CONSUMER, name, "faulty_connectors", env={**hooks, **fast}),
        no_nixl_telemetry=ServerConfig(
            model,
            CONSUMER,
            name,
            MODULE,
            otlp_endpoint=f"http://127.0.0.1:{unreachable_port()}",
            env={**fast, "NIXL_TELEMETRY_ENABLE": "n"},
        ),
        black_hole=ServerConfig(model, CONSUMER, name, MODULE, otlp_endpoint=black_hole.endpoint, env=fast),
    ) as started:
        yield started


@pytest.fixture(scope="module")
def expected(servers: Servers) -> list[tuple[int, ...]]:
    """Tokens of a prefill instance that generates alone, without any transfer."""
    (prefill,) = servers.wake("prefill")
    return [prefill.complete(MODEL.prompt(50 * (seed + 1), seed)).token_ids for seed in range(REQUESTS)]


@pytest.mark.parametrize("name", ["hooks_raise", "no_nixl_telemetry", "black_hole"])
def test_all_requests_are_served(servers: Servers, expected: list[tuple[int, ...]], name: str) -> None:
    """With the tokens that they have without a transfer."""
    pair = servers.pair("prefill", name)
    tokens = [
        disaggregated_completion(*pair, MODEL.prompt(50 * (seed + 1), seed)).token_ids for seed in range(REQUESTS)
    ]

    assert tokens == expected


def eventually_counted(prefill: VllmServer, server: VllmServer, signal: str) -> bool:
    """Whether an error of this kind shows on /metrics; updates travel with steps, so there must be some."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        disaggregated_completion(prefill, server, MODEL.prompt(40, seed=time.monotonic_ns()))
        if metric(server, "nixl_telemetry_errors_total", signal=signal) > 0:
            return True
        time.sleep(1)
    return False


@pytest.mark.parametrize(
    ("name", "signals"),
    [("hooks_raise", ["hook"]), ("no_nixl_telemetry", ["traces"]), ("black_hole", ["traces"])],
)
def test_the_health_metrics_say_what_failed(servers: Servers, name: str, signals: list[str]) -> None:
    """One signal for each kind of failure."""
    for signal in signals:
        assert eventually_counted(*servers.pair("prefill", name), signal), signal


def test_nixl_without_telemetry_is_named(servers: Servers, request: pytest.FixtureRequest) -> None:
    """On the initiator, where stock vLLM fails every request."""
    if "push" in request.node.name:
        pytest.skip("the decode instance initiates nothing in push")
    prefill, server = servers.pair("prefill", "no_nixl_telemetry")

    assert eventually_counted(prefill, server, "nixl")
    assert "Is NIXL_TELEMETRY_ENABLE set to n?" in server.log_text()
    assert metric(server, "vllm:nixl_num_failed_transfers_total") == 0
