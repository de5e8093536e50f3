# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whatever fails in the telemetry: requests are served, tokens unchanged, and the health metrics say what failed."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
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
FAULTY = str(Path(__file__).with_name("faulty"))


@dataclass(frozen=True)
class Fault:
    """A pair, who of it is broken, and the signals under which that shows."""

    mode: str
    prefill: str
    decode: str
    broken: str
    signals: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.mode}-{self.broken}"


FAULTS = [
    Fault("pull", "prefill", "hooks_raise", "hooks_raise", ("hook",)),
    Fault("pull", "prefill", "black_hole", "black_hole", ("traces",)),
    Fault("pull", "prefill", "unmeasured", "unmeasured", ("traces", "nixl")),
    # In push, the prefill instance moves the KV.
    Fault("push", "hooks_raise", "exporter_raises", "hooks_raise", ("hook",)),
    Fault("push", "unmeasured", "exporter_raises", "unmeasured", ("traces", "nixl")),
    Fault("push", "unmeasured", "exporter_raises", "exporter_raises", ("traces",)),
]


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest, model: Path) -> Iterator[Servers]:
    """The servers of one mode: one in order, and the broken ones."""
    mode = request.param
    name = stock_name(mode)
    # Soon and often, so that what fails fails within the test.
    pace = {"OTEL_BSP_SCHEDULE_DELAY": "200", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    mover = CONSUMER if mode == "pull" else PRODUCER
    with BlackHole() as hole, unreachable_port() as held:
        nowhere = f"http://127.0.0.1:{held.ports[0]}"
        configs = {
            "hooks_raise": ServerConfig(model, mover, name, "faulty_hooks", env={**pace, "PYTHONPATH": FAULTY}),
            # As with stock vLLM and this variable every transfer would fail.
            "unmeasured": ServerConfig(
                model, mover, name, MODULE, otlp_endpoint=nowhere, env={**pace, "NIXL_TELEMETRY_ENABLE": "n"}
            ),
        }
        if mode == "pull":
            configs["prefill"] = ServerConfig(model, PRODUCER, name, MODULE)
            configs["black_hole"] = ServerConfig(model, mover, name, MODULE, otlp_endpoint=hole.endpoint, env=pace)
        else:
            raising = {**pace, "PYTHONPATH": FAULTY, "OTEL_EXPORTER_OTLP_ENDPOINT": nowhere}
            configs["exporter_raises"] = ServerConfig(model, CONSUMER, name, "faulty_exporter", env=raising)
        with fleet(**configs) as started:
            yield started


PARAMETERS = pytest.mark.parametrize(
    ("servers", "fault"),
    [pytest.param(fault.mode, fault, id=str(fault)) for fault in FAULTS],
    indirect=["servers"],
    scope="module",
)


@PARAMETERS
def test_all_requests_are_served(servers: Servers, fault: Fault) -> None:
    """With the tokens that the prefill instance generates alone, without any transfer."""
    prefill, decode = servers.pair(fault.prefill, fault.decode)
    prompts = [MODEL.prompt(50 * (seed + 1), seed) for seed in range(REQUESTS)]

    tokens = [disaggregated_completion(prefill, decode, prompt).token_ids for prompt in prompts]

    assert tokens == [prefill.complete(prompt).token_ids for prompt in prompts]


@PARAMETERS
def test_the_health_metrics_say_what_failed(servers: Servers, fault: Fault) -> None:
    """One signal for each kind of failure; vLLM itself counts no failed transfer."""
    pair = servers.pair(fault.prefill, fault.decode)
    broken = servers[fault.broken]

    for signal in fault.signals:
        assert eventually_counted(broken, pair, signal), signal
    assert metric(broken, "vllm:nixl_num_failed_transfers_total") == 0
    if "nixl" in fault.signals:
        assert "Is NIXL_TELEMETRY_ENABLE set to n?" in broken.log_text()


def eventually_counted(broken: VllmServer, pair: tuple[VllmServer, VllmServer], signal: str) -> bool:
    """Whether an error of this kind shows on /metrics; updates travel with steps, so there must be some."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        disaggregated_completion(*pair, MODEL.prompt(40, seed=time.monotonic_ns()))
        if metric(broken, "nixl_telemetry_errors_total", signal=signal) > 0:
            return True
        time.sleep(1)
    return False
