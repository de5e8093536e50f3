# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""One trace of a request across router, prefill, transfer and decode, down to the block, on real servers."""

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from nixl_telemetry.cli.main import app
from nixl_telemetry.testbed import (
    CONSUMER,
    PRODUCER,
    Collector,
    OtlpReceiver,
    ReceivedSpan,
    Router,
    ServerConfig,
    disaggregated_completion,
)
from nixl_telemetry.testbed.pair import REMOTE_DECODE
from tests.e2e.block_moves import check_blocks
from tests.e2e.conftest import (
    BLOCK_SIZE,
    MODEL,
    MODULE,
    Servers,
    blocks_of,
    fleet,
    metric,
    stock_name,
)
from tests.e2e.received import has, named, one
from tests.support.peers import wait_until

OPERATIONS = {"pull": "READ", "push": "WRITE"}
PARTS = {
    "pull": ["handshake.duration", "queue.duration", "post.duration", "transfer.duration", "observation_delay"],
    "push": ["handshake.duration", "queue.duration", "remote.duration"],
}
FEW_BLOCKS = 160
"""Of the decode instance, so that two long prompts make it preempt: one alone needs 94."""


@dataclass
class Fleet:
    """Servers of one mode, and what their spans go through."""

    mode: str
    receiver: OtlpReceiver
    collector: Collector
    servers: Servers
    folder: Path

    @property
    def trace_file(self) -> Path:
        """Where prefill and decode write their spans, too."""
        return self.folder / "trace.jsonl"

    def recorded(self) -> Path:
        """What NIXL was asked for since this was called last."""
        path = self.folder / "moved.jsonl"
        path.write_text("")
        return path

    def spans(self, trace_id: str, until: Callable[[list[ReceivedSpan]], bool]) -> list[ReceivedSpan]:
        """The spans of a trace, once the condition holds for them."""

        def mine(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
            return [span for span in spans if span.trace_id == trace_id]

        return mine(self.receiver.wait_for(lambda spans: until(mine(spans)), timeout=60))


@pytest.fixture(scope="module", params=["pull", "push"])
def servers(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One fleet for each mode; in push, spans go by HTTP and through a real collector.

    Prefill and decode are spawned, since vLLM's API servers lose their own spans when forked.
    """
    mode = request.param
    name = stock_name(mode)
    folder = tmp_path_factory.mktemp("traces")
    with ExitStack() as stack:
        receiver = stack.enter_context(OtlpReceiver())
        collector = stack.enter_context(Collector(receiver.grpc_endpoint, folder))
        endpoint = receiver.grpc_endpoint if mode == "pull" else collector.http_endpoint
        protocol = {} if mode == "pull" else {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        environment = {**protocol, "NIXLTEL_TESTBED_RECORD": str(folder / "moved.jsonl")}
        traced: dict[str, Any] = {"connector_module": MODULE, "otlp_endpoint": endpoint}
        file = {"NIXLTEL_TRACE_FILE": str(folder / "trace.jsonl")}
        servers = stack.enter_context(
            fleet(
                ("prefill", "decode"),
                prefill=ServerConfig(model, PRODUCER, name, env={**environment, **file}, **traced),
                decode=ServerConfig(
                    model,
                    CONSUMER,
                    name,
                    env={**environment, **file},
                    args=(f"--num-gpu-blocks-override={FEW_BLOCKS}",),
                    **traced,
                ),
                prefill_short=ServerConfig(
                    model, PRODUCER, name, extra_config={"kv_lease_duration": 2}, env=protocol, **traced
                ),
                stock_prefill=ServerConfig(model, PRODUCER, name),
                stock_decode=ServerConfig(model, CONSUMER, name),
            )
        )
        yield Fleet(mode, receiver, collector, servers, folder)


def new_trace(*, sampled: bool = True) -> tuple[str, str, dict[str, str]]:
    """Ids of a caller's span, and its header."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, {"traceparent": f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}"}


def engine_of(span: ReceivedSpan) -> str:
    """Whose it is."""
    return str(span.attributes["nixl.kv.role"])


def test_the_whole_tree(servers: Fleet) -> None:
    """The first request of a pair, through the router: names, parents, links, kinds and processes."""
    prefill, decode = servers.servers.pair("prefill", "decode")
    trace_id, root, header = new_trace()
    with Router([prefill.url], [decode.url], servers.folder) as router:
        completion = router.complete(MODEL.prompt(200, seed=1), headers=header)
    assert len(completion.token_ids) == 8
    blocks = blocks_of(200)

    # Each process sends its own when it comes to it; in push, both sides shake hands.
    own = has(lease=1, receive=1, transfer=1, block=blocks, handshake=1 if servers.mode == "pull" else 2)
    spans = servers.spans(trace_id, lambda spans: own(spans) and len(named(spans, "llm_request")) == 2)

    lease, receive, transfer = (one(spans, f"nixl.{name}") for name in ("lease", "receive", "transfer"))
    assert (lease.parent_span_id, lease.kind, engine_of(lease)) == (root, "PRODUCER", PRODUCER)
    assert (receive.parent_span_id, receive.kind, engine_of(receive)) == (root, "CONSUMER", CONSUMER)
    assert wait_until(lambda: {receive.span_id, transfer.span_id} <= links_in(servers.trace_file).keys(), 60)
    links = links_in(servers.trace_file)
    # In push the router asks both at once, and so cannot pass the prefill's context on to the decode.
    assert links[receive.span_id] == ([lease.span_id] if servers.mode == "pull" else [])
    assert (transfer.parent_span_id, transfer.kind) == (receive.span_id, "CLIENT")
    assert engine_of(transfer) == (CONSUMER if servers.mode == "pull" else PRODUCER)
    assert links[transfer.span_id] == ([] if servers.mode == "pull" else [lease.span_id])
    assert transfer.attributes["nixl.transfer.operation"] == OPERATIONS[servers.mode]
    handshakes = named(spans, "nixl.handshake")
    assert sorted(map(engine_of, handshakes)) == ([CONSUMER] if servers.mode == "pull" else [CONSUMER, PRODUCER])
    for handshake in handshakes:
        assert (handshake.parent_span_id, handshake.kind) == (receive.span_id, "CLIENT")
        stages = [span.name for span in spans if span.parent_span_id == handshake.span_id]
        assert stages == ["nixl.handshake.metadata", "nixl.handshake.compat", "nixl.handshake.register"]
    moved = named(spans, "nixl.block")
    assert len(moved) == blocks
    for block in moved:
        assert (block.parent_span_id, block.kind) == (transfer.span_id, "INTERNAL")
    assert {span.parent_span_id for span in named(spans, "llm_request")} == {root}
    assert len({span.span_id for span in spans}) == len(spans)
    processes = {span.name: span.resource["vllm.process_id"] for span in (lease, receive, transfer)}
    assert len(set(processes.values())) == (2 if servers.mode == "pull" else 3), processes
    assert lease.attributes["nixl.lease.block.count"] == receive.attributes["nixl.receive.block.count"] == blocks
    assert lease.attributes["nixl.lease.outcome"] == "released"


def links_in(path: Path) -> dict[str, list[str]]:
    """What each span in a trace file is linked to; the collector of the push fleet drops links."""
    return {
        span["spanId"]: [link["spanId"] for link in span.get("links", ())]
        for line in (path.read_text().splitlines() if path.exists() else ())
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    }


def test_the_waterfall(servers: Fleet) -> None:
    """The trace file alone shows a request across both instances."""
    prefill, decode = servers.servers.pair("prefill", "decode")
    completion = disaggregated_completion(prefill, decode, MODEL.prompt(96, seed=8))

    def shown() -> str:
        command = ["trace", "show", str(servers.trace_file), "--request", completion.request_id]
        return CliRunner().invoke(app, command, env={"COLUMNS": "110", "NO_COLOR": "1"}).output

    wanted = ["nixl.lease released", "nixl.receive", f"nixl.transfer {OPERATIONS[servers.mode]}", "3 blocks"]
    assert wait_until(lambda: all(text in shown() for text in wanted), 30), shown()
    assert "processes" in shown()


def test_where_the_time_went(servers: Fleet) -> None:
    """The parts of every wait add up to it, and the metric is of the same operation."""
    prefill, decode = servers.servers.pair("prefill", "decode")
    trace_id, _, header = new_trace()
    disaggregated_completion(prefill, decode, MODEL.prompt(300, seed=2), headers=header)

    receive = one(servers.spans(trace_id, has(receive=1)), "nixl.receive")
    parts = {
        name.removeprefix("nixl.receive."): value
        for name, value in receive.attributes.items()
        if name.startswith("nixl.receive.") and isinstance(value, float)
    }
    assert sorted(parts) == sorted([*PARTS[servers.mode], "notification.duration"])
    assert sum(parts.values()) == pytest.approx(receive.seconds, abs=1e-3)
    assert parts["handshake.duration"] == 0
    decode.complete(MODEL.prompt(2), 2)
    assert metric(decode, "nixl_receive_wait_seconds_count", outcome="received") >= 2
    prefill.complete(MODEL.prompt(2), 2)
    assert metric(prefill, "nixl_lease_duration_seconds_count", outcome="released") >= 2


def test_without_a_caller_s_trace(servers: Fleet) -> None:
    """Prefill and decode are joined all the same."""
    prefill, decode = servers.servers.pair("prefill", "decode")
    begin = time.time_ns()
    disaggregated_completion(prefill, decode, MODEL.prompt(64, seed=3))

    def mine(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
        return [span for span in spans if span.start_ns > begin]

    complete = has(lease=1, transfer=1, receive=1)
    spans = mine(servers.receiver.wait_for(lambda spans: complete(mine(spans)), timeout=60))
    lease, receive, transfer = (one(spans, f"nixl.{name}") for name in ("lease", "receive", "transfer"))
    assert lease.parent_span_id == ""
    assert receive.parent_span_id == lease.span_id
    assert transfer.parent_span_id == receive.span_id
    assert len({span.trace_id for span in (lease, receive, transfer)}) == 1


def test_a_trace_that_is_not_sampled(servers: Fleet) -> None:
    """Leaves no span."""
    prefill, decode = servers.servers.pair("prefill", "decode")
    unsampled, _, header = new_trace(sampled=False)
    disaggregated_completion(prefill, decode, MODEL.prompt(64, seed=4), headers=header)
    sampled, _, header = new_trace()
    disaggregated_completion(prefill, decode, MODEL.prompt(64, seed=5), headers=header)

    servers.spans(sampled, has(lease=1, transfer=1, receive=1))
    assert [span for span in servers.receiver.spans() if span.trace_id == unsampled] == []


def test_with_a_stock_prefill(servers: Fleet) -> None:
    """The decode side's part is in the caller's trace, with nothing to link to."""
    prefill, decode = servers.servers.pair("stock_prefill", "decode")
    trace_id, root, header = new_trace()
    disaggregated_completion(prefill, decode, MODEL.prompt(100, seed=6), headers=header)

    spans = servers.spans(trace_id, has(receive=1, **({"transfer": 1} if servers.mode == "pull" else {})))
    receive = one(spans, "nixl.receive")
    assert (receive.parent_span_id, receive.links) == (root, ())
    assert [span.parent_span_id for span in named(spans, "nixl.transfer")] == (
        [receive.span_id] if servers.mode == "pull" else []
    )


def test_with_a_stock_decode(servers: Fleet) -> None:
    """The prefill side's part is in the caller's trace; in push the transfer is the lease's."""
    prefill, decode = servers.servers.pair("prefill", "stock_decode")
    trace_id, root, header = new_trace()
    disaggregated_completion(prefill, decode, MODEL.prompt(100, seed=7), headers=header)
    # A pull prefill hears of the end in its next step.
    prefill.complete(MODEL.prompt(2), 2)

    spans = servers.spans(trace_id, has(lease=1, **({"transfer": 1} if servers.mode == "push" else {})))
    lease = one(spans, "nixl.lease")
    assert lease.parent_span_id == root
    assert [span.parent_span_id for span in named(spans, "nixl.transfer")] == (
        [lease.span_id] if servers.mode == "push" else []
    )


def test_blocks_of_random_prompts(servers: Fleet) -> None:
    """Each block that was moved is told once: below the limit by itself, above it in runs."""
    prefill, decode = servers.servers.pair("prefill", "decode")
    recorded, traces, begin = servers.recorded(), [], time.time_ns()
    lengths = [1, 31, 33, 500, 2040, 2100, 3000]
    for seed, length in enumerate(lengths):
        trace_id, _, header = new_trace()
        traces.append(trace_id)
        disaggregated_completion(prefill, decode, MODEL.prompt(length, seed=100 + seed), headers=header)

    assert check_blocks(servers, prefill, decode, recorded, begin) == sum(map(blocks_of, lengths))
    details = {
        span.attributes["nixl.transfer.block.count"]: span.attributes["nixl.block.detail"]
        for span in servers.receiver.spans()
        if span.name == "nixl.transfer" and span.trace_id in traces
    }
    assert details[blocks_of(2040)] == "each"
    assert details[blocks_of(3000)] == "runs"


def test_blocks_of_a_prefix_that_decode_has(servers: Fleet) -> None:
    """Only what is missing is moved; where nothing is, there is no transfer."""
    prefill, decode = servers.servers.pair("prefill", "decode")
    shared = MODEL.prompt(10 * BLOCK_SIZE, seed=200)
    recorded, begin = servers.recorded(), time.time_ns()
    for tail in (5 * BLOCK_SIZE, 3 * BLOCK_SIZE, 0):
        prompt = f"{shared} {MODEL.prompt(tail, seed=201 + tail)}".strip()
        disaggregated_completion(prefill, decode, prompt)

    moved = check_blocks(servers, prefill, decode, recorded, begin)
    # The first brings all 15 blocks, the second its own 3; of the third the decode side may compute the last block.
    assert 15 + 3 <= moved <= 15 + 3 + 1


def test_blocks_with_preemption(servers: Fleet) -> None:
    """An instance that runs out of blocks computes again what it has lost; nothing is told twice."""
    prefill, decode = servers.servers.pair("prefill", "decode")
    recorded, begin = servers.recorded(), time.time_ns()
    tokens: list[int] = []

    def send(seed: int) -> None:
        prompt = MODEL.prompt(77 * BLOCK_SIZE, seed=seed)
        tokens.append(len(disaggregated_completion(prefill, decode, prompt, 150).token_ids))

    threads = [threading.Thread(target=send, args=(300 + seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert tokens == [150, 150]
    assert metric(decode, "vllm:num_preemptions_total") >= 1
    assert check_blocks(servers, prefill, decode, recorded, begin) >= 2 * 77


def test_a_lease_that_nobody_needs(servers: Fleet) -> None:
    """A prefill whose KV is not fetched ends as expired, which is an error, and is kept though it is not sampled."""
    (prefill,) = servers.servers.wake("prefill_short")
    trace_id, _, header = new_trace(sampled=False)
    prefill.complete(MODEL.prompt(100, seed=600), 1, headers=header, kv_transfer_params=dict(REMOTE_DECODE))

    def expired() -> bool:
        # An idle engine looks at its leases with its next step.
        prefill.complete(MODEL.prompt(2), 1)
        return metric(prefill, "nixl_lease_duration_seconds_count", outcome="expired") == 1

    assert wait_until(expired, 30)
    (lease,) = servers.spans(trace_id, has(lease=1))
    assert (lease.status, lease.attributes["error.type"]) == ("ERROR", "kv_expired")
    assert (lease.attributes["nixl.lease.outcome"], lease.attributes["nixl.kept"]) == ("expired", "failed")
    assert lease.seconds >= 2


def test_a_collector_that_goes_away(servers: Fleet) -> None:
    """Requests are served as before; spans are lost and counted, and come again when it does."""
    if servers.mode == "pull":
        pytest.skip("its spans do not go through the collector")
    prefill, decode = servers.servers.pair("prefill", "decode")
    prompt = MODEL.prompt(64, seed=500)
    before = disaggregated_completion(prefill, decode, prompt).token_ids
    servers.collector.stop()
    try:

        def lost() -> bool:
            answer = disaggregated_completion(prefill, decode, MODEL.prompt(64, seed=501))
            assert len(answer.token_ids) == 8
            return metric(decode, "nixl_telemetry_dropped_total", signal="spans") > 0

        assert wait_until(lost, 60)
        assert disaggregated_completion(prefill, decode, prompt).token_ids == before
        assert metric(decode, "nixl_telemetry_errors_total", signal="traces") > 0
    finally:
        servers.collector.start()

    def arrives() -> bool:
        trace_id, _, header = new_trace()
        disaggregated_completion(prefill, decode, MODEL.prompt(64, seed=502), headers=header)
        return wait_until(
            lambda: any(span.trace_id == trace_id and span.name == "nixl.receive" for span in servers.receiver.spans()),
            10,
        )

    assert wait_until(arrives, 60)
