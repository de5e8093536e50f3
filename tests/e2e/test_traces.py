# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""One trace of a request across router, prefill, transfer and decode, down to the block, on real servers."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from typer.testing import CliRunner

from nixl_telemetry.cli.main import app
from nixl_telemetry.testbed import (
    CONSUMER,
    LOOPBACK,
    PRODUCER,
    Collector,
    OtlpReceiver,
    ReceivedSpan,
    Relay,
    Router,
    ServerConfig,
    VllmServer,
    disaggregated_completion,
)
from nixl_telemetry.testbed.otlp_receiver import TRACES_PATH
from nixl_telemetry.testbed.pair import REMOTE_DECODE
from tests.e2e.block_moves import check_blocks
from tests.e2e.conftest import (
    BLOCK_BYTES,
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
TOKENS = 200
"""Of the prompts whose whole tree is looked at."""
FEW_BLOCKS = 160
"""Of the decode instance, so that two long prompts make it preempt: one alone needs 94."""


@dataclass
class Fleet:
    """Servers of one mode, and what their spans go through."""

    mode: str
    receiver: OtlpReceiver
    collector: Collector
    relay: Relay
    """Where servers send their spans, unless told otherwise."""
    servers: Servers
    folder: Path

    def lead_spans(self, *, through_collector: bool = False) -> None:
        """Straight to the receiver, or through a real collector in front of it."""
        receiver, collector = self.receiver, self.collector
        endpoints = {
            "pull": (receiver.grpc_endpoint, collector.grpc_endpoint),
            "push": (receiver.http_endpoint, collector.http_endpoint),
        }
        self.relay.lead_to(port_of(endpoints[self.mode][through_collector]))

    def pair(self, prefill: str, decode: str, *, through_collector: bool = False) -> tuple[VllmServer, VllmServer]:
        """Let just these two run, and lead their spans; returns them."""
        self.lead_spans(through_collector=through_collector)
        return self.servers.pair(prefill, decode)

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
    """One fleet for each mode; in push, spans go by HTTP.

    Prefill and decode are spawned, since vLLM's API servers lose their own spans when forked.
    """
    mode = request.param
    name = stock_name(mode)
    folder = tmp_path_factory.mktemp("traces")
    with ExitStack() as stack:
        receiver = stack.enter_context(OtlpReceiver())
        collector = stack.enter_context(Collector(receiver.grpc_endpoint, folder))
        relay = stack.enter_context(Relay(receiver.grpc_port if mode == "pull" else receiver.http_port))
        endpoint = f"http://{LOOPBACK}:{relay.port}" + ("" if mode == "pull" else TRACES_PATH)
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
        yield Fleet(mode, receiver, collector, relay, servers, folder)


def port_of(endpoint: str) -> int:
    """Of a URL that has one."""
    port = urlsplit(endpoint).port
    assert port is not None
    return port


def new_trace(*, sampled: bool = True) -> tuple[str, str, dict[str, str]]:
    """Ids of a caller's span, and its header."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, {"traceparent": f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}"}


def engine_of(span: ReceivedSpan) -> str:
    """Whose it is."""
    return str(span.attributes["nixl.kv.role"])


def pid_of(span: ReceivedSpan) -> int:
    """Of the process that made it."""
    return int(span.resource["vllm.process_id"])


def pids_of(server: VllmServer) -> set[int]:
    """All of a server's processes."""
    return {process.pid for process in server.process.members()}


def peer_of(span: ReceivedSpan) -> tuple[str, str, int]:
    """Whom it is with: engine id, address and port."""
    told = span.attributes
    return told["nixl.remote.engine.id"], told["server.address"], told["server.port"]


def parts_of(servers: Fleet, receive: ReceivedSpan) -> dict[str, float]:
    """What a wait was for, which adds up to it. Seconds."""
    parts = {
        name.removeprefix("nixl.receive."): value
        for name, value in receive.attributes.items()
        if name.startswith("nixl.receive.") and isinstance(value, float)
    }
    assert sorted(parts) == sorted([*PARTS[servers.mode], "notification.duration"])
    assert sum(parts.values()) == pytest.approx(receive.seconds, abs=1e-3)
    return parts


def by_router(servers: Fleet, prefills: Sequence[VllmServer], decode: VllmServer, seed: int) -> list[tuple[str, str]]:
    """Requests through the router, one for each prefill; returns trace and span ids of their callers.

    Their prompts are of this seed and the next ones: what decode has in its prefix cache is not moved.
    """
    callers = []
    with Router([prefill.url for prefill in prefills], [decode.url], servers.folder) as router:
        for number, _ in enumerate(prefills):
            trace_id, root, header = new_trace()
            completion = router.complete(MODEL.prompt(TOKENS, seed + number), headers=header)
            assert len(completion.token_ids) == 8
            callers.append((trace_id, root))
    return callers


def tree(servers: Fleet, trace_id: str, *, is_first: bool, api_servers: int) -> list[ReceivedSpan]:
    """All spans of such a request: each process sends its own when it comes to it."""
    # In push, both sides shake hands.
    handshakes = (1 if servers.mode == "pull" else 2) if is_first else 0
    own = has(lease=1, receive=1, transfer=1, block=blocks_of(TOKENS), handshake=handshakes)
    return servers.spans(trace_id, lambda spans: own(spans) and len(named(spans, "llm_request")) >= api_servers)


def test_the_whole_tree(servers: Fleet) -> None:
    """The first request of a pair, with spans straight from the servers."""
    prefill, decode = servers.pair("prefill", "decode")
    ((trace_id, root),) = by_router(servers, [prefill], decode, seed=1)

    spans = tree(servers, trace_id, is_first=True, api_servers=2)
    check_tree(servers, spans, root, (prefill, decode), is_first=True)
    assert len(named(spans, "llm_request")) == 2


def test_the_whole_tree_through_a_collector(servers: Fleet) -> None:
    """The first request of another pair, and one of a pair that knows each other: nothing is lost on the way."""
    prefill, short, decode = servers.servers.wake("prefill", "prefill_short", "decode")
    servers.lead_spans(through_collector=True)
    disaggregated_completion(prefill, decode, MODEL.prompt(2))
    seen = []
    for trace_id, root in by_router(servers, [prefill, short], decode, seed=10):
        lease = one(servers.spans(trace_id, has(lease=1)), "nixl.lease")
        is_first = pid_of(lease) in pids_of(short)
        # The short one's API server is forked, and has lost its own span.
        spans = tree(servers, trace_id, is_first=is_first, api_servers=1 if is_first else 2)
        check_tree(servers, spans, root, (short if is_first else prefill, decode), is_first=is_first)
        seen.append(is_first)
    assert sorted(seen) == [False, True]


def check_tree(
    servers: Fleet,
    spans: Sequence[ReceivedSpan],
    root: str,
    pair: tuple[VllmServer, VllmServer],
    *,
    is_first: bool,
) -> None:
    """Hold the spans of a request against what they are to be: names, parents, links, kinds, processes and peers."""
    is_pull = servers.mode == "pull"
    prefill, decode = pair
    lease, receive, transfer = (one(spans, f"nixl.{name}") for name in ("lease", "receive", "transfer"))
    assert (lease.parent_span_id, lease.kind, engine_of(lease)) == (root, "PRODUCER", PRODUCER)
    assert (receive.parent_span_id, receive.kind, engine_of(receive)) == (root, "CONSUMER", CONSUMER)
    assert (transfer.parent_span_id, transfer.kind) == (receive.span_id, "CLIENT")
    assert engine_of(transfer) == (CONSUMER if is_pull else PRODUCER)
    # In push the router asks both at once, and so cannot pass the prefill's context on to the decode.
    linked = receive if is_pull else transfer
    links = [(span.name, link.trace_id, link.span_id) for span in spans for link in span.links]
    assert links == [(linked.name, lease.trace_id, lease.span_id)]

    assert pid_of(lease) in pids_of(prefill)
    assert pid_of(receive) in pids_of(decode)
    assert pid_of(transfer) in pids_of(decode if is_pull else prefill)
    # A process that was forked has the resource of the one that it was forked from, since vLLM leaves it so.
    assert pid_of(transfer) != pid_of(lease) or prefill.config.fork
    workers = {pid_of(span): span.resource for span in (receive, transfer)}
    assert len(workers) == (1 if is_pull else 2)
    peers = {
        PRODUCER: (receive.attributes["nixl.engine.id"], LOOPBACK, decode.side_channel_port),
        CONSUMER: (lease.attributes["nixl.engine.id"], LOOPBACK, prefill.side_channel_port),
    }
    assert peer_of(receive) == peers[CONSUMER]
    assert peer_of(transfer) == peers[engine_of(transfer)]

    handshakes = named(spans, "nixl.handshake")
    assert sorted(map(pid_of, handshakes)) == (sorted(workers) if is_first else [])
    for handshake in handshakes:
        assert (handshake.parent_span_id, handshake.kind) == (receive.span_id, "CLIENT")
        assert handshake.resource == workers[pid_of(handshake)]
        assert engine_of(handshake) == (CONSUMER if pid_of(handshake) == pid_of(receive) else PRODUCER)
        assert peer_of(handshake) == peers[engine_of(handshake)]
        stages = [span for span in spans if span.parent_span_id == handshake.span_id]
        assert [stage.name.removeprefix("nixl.handshake.") for stage in stages] == ["metadata", "compat", "register"]
        assert {(stage.kind, pid_of(stage)) for stage in stages} == {("INTERNAL", pid_of(handshake))}
    assert (parts_of(servers, receive)["handshake.duration"] > 0) is is_first

    mode = {"nixl.transfer.operation": OPERATIONS[servers.mode], "nixl.transfer.mode": servers.mode}
    assert transfer.attributes.items() >= {**mode, "nixl.remote.rank": 0, "nixl.block.detail": "each"}.items()
    blocks = named(spans, "nixl.block")
    assert len(blocks) == blocks_of(TOKENS)
    for block in blocks:
        assert (block.parent_span_id, block.kind) == (transfer.span_id, "INTERNAL")
        assert block.resource == transfer.resource
        assert peer_of(block) == peer_of(transfer)
        assert block.attributes.items() >= {**mode, "nixl.remote.rank": 0, "nixl.block.group": 0}.items()
        assert block.attributes["nixl.block.size"] == BLOCK_BYTES

    assert {span.parent_span_id for span in named(spans, "llm_request")} == {root}
    assert len({span.span_id for span in spans}) == len(spans)
    assert lease.attributes["nixl.lease.block.count"] == receive.attributes["nixl.receive.block.count"] == len(blocks)
    assert lease.attributes["nixl.lease.outcome"] == "released"


def test_the_waterfall(servers: Fleet) -> None:
    """The trace file alone shows a request across both instances."""
    prefill, decode = servers.pair("prefill", "decode")
    completion = disaggregated_completion(prefill, decode, MODEL.prompt(96, seed=8))

    def shown() -> str:
        command = ["trace", "show", str(servers.trace_file), "--request", completion.request_id]
        return CliRunner().invoke(app, command, env={"COLUMNS": "110", "NO_COLOR": "1"}).output

    wanted = ["nixl.lease released", "nixl.receive", f"nixl.transfer {OPERATIONS[servers.mode]}", "3 blocks"]
    assert wait_until(lambda: all(text in shown() for text in wanted), 30), shown()
    assert "processes" in shown()


def test_where_the_time_went(servers: Fleet) -> None:
    """The parts of every wait add up to it, and the metric is of the same operation."""
    prefill, decode = servers.pair("prefill", "decode")
    trace_id, _, header = new_trace()
    disaggregated_completion(prefill, decode, MODEL.prompt(300, seed=2), headers=header)

    receive = one(servers.spans(trace_id, has(receive=1)), "nixl.receive")
    assert parts_of(servers, receive)["handshake.duration"] == 0
    decode.complete(MODEL.prompt(2), 2)
    assert metric(decode, "nixl_receive_wait_seconds_count", outcome="received") >= 2
    prefill.complete(MODEL.prompt(2), 2)
    assert metric(prefill, "nixl_lease_duration_seconds_count", outcome="released") >= 2


def test_without_a_caller_s_trace(servers: Fleet) -> None:
    """Prefill and decode are joined all the same."""
    prefill, decode = servers.pair("prefill", "decode")
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
    prefill, decode = servers.pair("prefill", "decode")
    unsampled, _, header = new_trace(sampled=False)
    disaggregated_completion(prefill, decode, MODEL.prompt(64, seed=4), headers=header)
    sampled, _, header = new_trace()
    disaggregated_completion(prefill, decode, MODEL.prompt(64, seed=5), headers=header)

    servers.spans(sampled, has(lease=1, transfer=1, receive=1))
    assert [span for span in servers.receiver.spans() if span.trace_id == unsampled] == []


def test_with_a_stock_prefill(servers: Fleet) -> None:
    """The decode side's part is in the caller's trace, with nothing to link to."""
    prefill, decode = servers.pair("stock_prefill", "decode")
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
    prefill, decode = servers.pair("prefill", "stock_decode")
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
    prefill, decode = servers.pair("prefill", "decode", through_collector=True)
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
    # The limit is 64.
    assert details[blocks_of(2100)] == details[blocks_of(3000)] == "runs"


def test_blocks_of_a_prefix_that_decode_has(servers: Fleet) -> None:
    """Only what is missing is moved; where nothing is, there is no transfer."""
    prefill, decode = servers.pair("prefill", "decode")
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
    prefill, decode = servers.pair("prefill", "decode")
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
    prefill, decode = servers.pair("prefill", "decode", through_collector=True)
    prompt = MODEL.prompt(64, seed=500)
    before = disaggregated_completion(prefill, decode, prompt).token_ids
    lost_before = metric(decode, "nixl_telemetry_dropped_total", signal="spans")
    servers.collector.stop()
    try:

        def lost() -> bool:
            answer = disaggregated_completion(prefill, decode, MODEL.prompt(64, seed=501))
            assert len(answer.token_ids) == 8
            return metric(decode, "nixl_telemetry_dropped_total", signal="spans") > lost_before

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
