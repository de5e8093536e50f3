# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""A minute and a half of requests, or an hour with `make soak`, while the collector goes away and comes back."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from nixl_telemetry.signals.semconv import EventName
from nixl_telemetry.testbed import (
    CONSUMER,
    PRODUCER,
    Collector,
    OtlpReceiver,
    ServerConfig,
    VllmServer,
    disaggregated_completion,
)
from tests.e2e.conftest import MODEL, MODULE, blocks_of, fleet, metric
from tests.support.peers import wait_until

SECONDS = float(os.environ.get("NIXLTEL_TESTBED_SOAK_SECONDS", "90"))
PHASE_SECONDS = max(10.0, SECONDS / 60)
"""So long the collector is there, and so long it is away."""
EXPORT_SECONDS = 2
"""OpenTelemetry's patience with a collector; by default it is 10 s."""
LENGTHS = (40, 100, 300)
MIB = 2**20


def test_soak(model: Path, tmp_path: Path) -> None:
    """Tokens stay, threads and memory do not grow, and every span is either received or counted as lost."""
    with OtlpReceiver() as receiver, Collector(receiver.grpc_endpoint, tmp_path) as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.grpc_endpoint,
            "OTEL_EXPORTER_OTLP_TIMEOUT": str(EXPORT_SECONDS),
        }
        with fleet(
            prefill=ServerConfig(model, PRODUCER, connector_module=MODULE, env=environment),
            decode=ServerConfig(model, CONSUMER, connector_module=MODULE, env=environment),
        ) as servers:
            prefill, decode = servers.pair("prefill", "decode")
            prompts = [MODEL.prompt(length, seed=length) for length in LENGTHS]
            expected = [disaggregated_completion(prefill, decode, prompt).token_ids for prompt in prompts]
            made: Counter[str] = Counter()
            sizes: list[dict[str, tuple[int, int]]] = []

            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline or len(sizes) < 3:
                for is_there in (True, False):
                    if not is_there:
                        collector.stop()
                    until = time.monotonic() + PHASE_SECONDS
                    while time.monotonic() < until:
                        answers = [disaggregated_completion(prefill, decode, prompt).token_ids for prompt in prompts]
                        assert answers == expected
                        made["requests"] += len(answers)
                collector.start()
                sizes.append(dict(processes(prefill, decode)))

            check_growth(sizes)
            check_tripwires(receiver, prefill, decode)
            check_spans(receiver, prefill, decode)
            assert made["requests"] > SECONDS


def processes(*servers: VllmServer) -> Iterator[tuple[str, tuple[int, int]]]:
    """Threads and resident bytes of each engine core and worker."""
    for server in servers:
        for process in server.process.members():
            status = dict(
                line.split(":", 1)
                for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
                if ":" in line
            )
            name = status["Name"].strip()
            if name.startswith("VLLM"):
                yield f"{server.name} {name}", (int(status["Threads"]), int(status["VmRSS"].split()[0]) * 1024)


def check_growth(sizes: list[dict[str, tuple[int, int]]]) -> None:
    """Compare the last look with the first one, after everything had happened once."""
    first, last = sizes[0], sizes[-1]
    assert len(first) == 4, first
    for name, (threads, resident) in first.items():
        assert last[name][0] <= threads, (name, sizes)
        assert last[name][1] <= resident + 16 * MIB, (name, sizes)


def check_tripwires(receiver: OtlpReceiver, *servers: VllmServer) -> None:
    """Healthy requests trip no wire, whether the collector is there or not."""
    for name in ("nixl_invalid_kv_total", "nixl_requests_without_transfer_params_total"):
        assert [metric(server, name) for server in servers] == [0, 0], name
    assert [span for span in receiver.spans() if span.name == "nixl.tripwire"] == []
    for event in (EventName.RECEIVE_WAITING, EventName.LEASES_OVERDUE, EventName.LEASE_EXPIRED, EventName.PEER_SLOW):
        assert [server.name for server in servers if f"event={event}" in server.log_text()] == [], event


def check_spans(receiver: OtlpReceiver, prefill: VllmServer, decode: VllmServer) -> None:
    """All spans that were made are accounted for."""
    transfers = metric(decode, "nixl_transfer_duration_seconds_count")
    blocks = metric(decode, "nixl_transfer_blocks_total")
    handshakes = metric(decode, "nixl_handshake_duration_seconds_count")
    # The lease, the receive and the transfer of each request, its blocks, a handshake with three stages, two hashes.
    made = 3 * transfers + blocks + 4 * handshakes + 2

    def accounted() -> tuple[float, int]:
        """Spans that were lost, and different ones that came. Counters leave an engine with a step."""
        for server in (prefill, decode):
            server.complete(MODEL.prompt(2), 2)
        lost = sum(metric(server, "nixl_telemetry_dropped_total", signal="spans") for server in (prefill, decode))
        # The requests above trip a wire: they do not say what is to become of their KV.
        ours = [span for span in receiver.spans() if span.name.startswith("nixl.") and span.name != "nixl.tripwire"]
        return lost, len({span.span_id for span in ours})

    assert blocks >= sum(map(blocks_of, LENGTHS))
    # A batch that a collector took and did not acknowledge is counted as lost, too.
    assert wait_until(lambda: sum(accounted()) >= made, 30), (made, accounted())
    assert accounted()[1] <= made
    assert metric(decode, "nixl_telemetry_dropped_total", signal="spans") > 0
    assert metric(decode, "nixl_telemetry_dropped_total", signal="traces") == 0
    assert metric(decode, "nixl_telemetry_errors_total", signal="traces") > 0


pytestmark = pytest.mark.timeout(900 + 2 * SECONDS)
