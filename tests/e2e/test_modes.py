# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Pull and push on real servers: the same as stock, every metric labelled, true counts, spans, all wirings."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nixl_telemetry.seam.versions import nixl_version
from nixl_telemetry.testbed import (
    CONSUMER,
    PRODUCER,
    OtlpReceiver,
    ReceivedSpan,
    ServerConfig,
    VllmServer,
    disaggregated_completion,
)
from tests.e2e.block_moves import check_blocks
from tests.e2e.conftest import (
    BLOCK_BYTES,
    MODEL,
    MODULE,
    Servers,
    blocks_of,
    direction,
    fleet,
    initiator,
    metric,
    prompt_lengths,
    side_channel_hash,
    stock_name,
    unlabelled,
)
from tests.e2e.received import has, named
from tests.support.peers import wait_until


@dataclass
class Fleet:
    """Stock and instrumented servers of one mode."""

    mode: str
    receiver: OtlpReceiver
    servers: Servers
    recorded: Path
    """What NIXL was asked for."""

    def wake(self, *names: str) -> list[VllmServer]:
        """Let just these run; returns them."""
        return self.servers.wake(*names)

    def pair(self, prefill: str, decode: str) -> tuple[VllmServer, VllmServer]:
        """Let just these two run; returns them."""
        return self.servers.pair(prefill, decode)

    def stock_tokens(self, prompt: str) -> tuple[int, ...]:
        """The tokens of a stock pair."""
        return disaggregated_completion(*self.pair("stock_prefill", "stock_decode"), prompt).token_ids


@pytest.fixture(scope="module", params=["pull", "push"])
def servers(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One fleet for each mode.

    Each instrumented server is wired in another way: the prefill by module path, the decode by its own name, the
    decode with two ranks and two API servers by NIXLTEL_AUTO, and one inside MultiConnector. In pull, spans go out as
    vLLM configures it, by gRPC; in push by HTTP, as plain OTEL variables say.
    """
    mode = request.param
    name = stock_name(mode)
    recorded = tmp_path_factory.mktemp("modes") / "moved.jsonl"
    # A server that is stopped (SIGSTOP) in the midst of sending must find its time not over when it goes on.
    environment = {"NIXLTEL_TESTBED_RECORD": str(recorded), "OTEL_EXPORTER_OTLP_TIMEOUT": "600"}
    with OtlpReceiver() as receiver:
        otlp: dict[str, Any] = (
            {"otlp_endpoint": receiver.grpc_endpoint, "env": environment}
            if mode == "pull"
            else {
                "env": {
                    **environment,
                    "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.http_endpoint.removesuffix("/v1/traces"),
                    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                    "OTEL_SERVICE_NAME": "fleet",
                }
            }
        )
        auto = {**otlp, "env": {**otlp["env"], "NIXLTEL_AUTO": "1"}}
        child = {"kv_connector": name, "kv_role": CONSUMER, "kv_connector_module_path": MODULE}
        # In pull the NIXL child stands beside another connector. That one cannot do HMA, which is a factor of the hash.
        other = {"kv_connector": "ExampleConnector", "kv_role": CONSUMER}
        other["kv_connector_extra_config"] = {"shared_storage_path": str(model / "storage")}  # type: ignore[assignment]
        beside = mode == "pull"
        multi = {
            "kv_connector": "MultiConnector",
            "kv_role": CONSUMER,
            "kv_connector_extra_config": {
                "connectors": [
                    {**child, "kv_connector_extra_config": {"num_threads": 0, "enforce_handshake_compat": not beside}},
                    *([other] if beside else []),
                ]
            },
        }
        with fleet(
            stock_prefill=ServerConfig(model, PRODUCER, name),
            stock_decode=ServerConfig(model, CONSUMER, name),
            prefill=ServerConfig(model, PRODUCER, name, MODULE, **otlp),
            decode=ServerConfig(model, CONSUMER, f"Instrumented{name}", **otlp),
            decode_tp2=ServerConfig(model, CONSUMER, name, tensor_parallel_size=2, api_server_count=2, **auto),
            decode_multi=ServerConfig(
                model,
                kv_transfer_config=multi,
                args=("--disable-hybrid-kv-cache-manager",) if beside else (),
                **otlp,
            ),
        ) as started:
            yield Fleet(mode, receiver, started, recorded)


INSTRUMENTED = ("prefill", "decode", "decode_tp2", "decode_multi")


@pytest.mark.parametrize("name", INSTRUMENTED)
def test_an_idle_engine_shows_itself(servers: Fleet, name: str) -> None:
    """Before any request: the info metric, zeros in every closed set, all labelled."""
    (server,) = servers.wake(name)
    assert wait_until(lambda: bool(server.metrics().select("nixl_connector_info")), 60)
    info = server.metrics().select("nixl_connector_info")
    assert [sample.value for sample in info] == [1]
    labels = info[0].labels
    assert labels["vllm_version"] == "0.32.0"
    assert labels["nixl_version"] == nixl_version()
    assert labels["compat_hash"] == side_channel_hash(server)
    assert labels["kv_role"] == (PRODUCER if name == "prefill" else CONSUMER)
    beside = servers.mode == "pull" and name == "decode_multi"
    assert labels["handshake_enforced"] == ("false" if beside else "true")
    assert metric(server, "nixl_transfer_bytes_total", direction=direction(servers.mode)) == 0
    assert metric(server, "nixl_handshake_duration_seconds_count", error_type="timeout") == 0
    assert metric(server, "nixl_handshake_rejections_total", factor="unknown") == 0
    assert metric(server, "nixl_mode_conflicts_total", source="params") == 0
    assert metric(server, "nixl_telemetry_errors_total") == 0
    assert unlabelled(server.metrics(), servers.mode) == []


def test_same_hash_as_stock(servers: Fleet) -> None:
    """On the side channel, where peers see it."""
    hashes = {name: side_channel_hash(*servers.wake(name)) for name in servers.servers}
    if servers.mode == "pull":
        hashes.pop("decode_multi")  # HMA is off there

    assert len(set(hashes.values())) == 1, hashes


def test_every_worker_traced_its_hash(servers: Fleet) -> None:
    """Both ranks behind two API servers too, with the factors, and ids of their own."""
    wanted = 5
    servers.wake(*INSTRUMENTED)
    spans = servers.receiver.wait_for(
        lambda spans: sum(span.name == "nixl.compat_hash" for span in spans) >= wanted, timeout=60
    )

    hashes = [span for span in spans if span.name == "nixl.compat_hash"]
    assert len(hashes) == wanted
    assert Counter(span.attributes["nixl.rank"] for span in hashes) == {0: 4, 1: 1}
    assert len({span.trace_id for span in hashes}) == len({span.span_id for span in hashes}) == wanted
    for span in hashes:
        assert span.scope.name == "nixl_telemetry"
        assert span.attributes["nixl.compat.factor.transfer_mode"] == servers.mode
        assert span.attributes["nixl.compat.factor.num_kv_heads"] == MODEL.num_kv_heads
        assert span.attributes["nixl.compat.factor.vllm_version"] == "0.32.0"


@pytest.mark.parametrize(
    ("prefill", "decode"), [("prefill", "stock_decode"), ("stock_prefill", "decode"), ("prefill", "decode")]
)
def test_stock_and_instrumented_pair(servers: Fleet, prefill: str, decode: str) -> None:
    """In both directions, with the tokens of a stock pair."""
    prompt = MODEL.prompt(200, seed=prefill.count("stock") + 2 * decode.count("stock"))

    mixed = disaggregated_completion(*servers.pair(prefill, decode), prompt)

    assert mixed.prefill.kv_transfer_params is not None
    assert mixed.token_ids == servers.stock_tokens(prompt)


def transfers(spans: Sequence[ReceivedSpan], since_ns: int = 0) -> list[ReceivedSpan]:
    """The transfer spans, by when they started: an earlier one may arrive late."""
    return [span for span in spans if span.name == "nixl.transfer" and span.start_ns >= since_ns]


def moved(mover: VllmServer, way: str) -> list[float]:
    """Transfers, blocks and bytes so far."""
    names = ("nixl_transfer_duration_seconds_count", "nixl_transfer_blocks_total", "nixl_transfer_bytes_total")
    return [metric(mover, name, direction=way) for name in names]


def moved_at_rest(mover: VllmServer, way: str) -> list[float]:
    """The same when it stands still: a push is seen done by a later step than the one that answers."""
    for _ in range(30):
        seen = moved(mover, way)
        time.sleep(0.5)
        if moved(mover, way) == seen and metric(mover, "nixl_transfers_in_flight", direction=way) == 0:
            return seen
    raise AssertionError(f"{mover.name} never rests: {moved(mover, way)}")


def moves(mover: VllmServer, way: str, before: Sequence[float], wanted: Sequence[float]) -> bool:
    """Whether it has moved just that since."""

    def all_of_it() -> bool:
        return [now - then for now, then in zip(moved(mover, way), before, strict=True)] == list(wanted)

    return wait_until(all_of_it, 30) and metric(mover, "nixl_transfers_in_flight", direction=way) == 0


def test_counts_are_true(servers: Fleet) -> None:
    """After N requests: transfers, blocks and bytes are what the prompts' lengths say, in metrics and in spans."""
    lengths = [1, 31, 32, 33, 64, 300, 1000]
    prefill, decode = servers.pair("prefill", "decode")
    mover = initiator(servers.mode, prefill, decode)
    way = direction(servers.mode)
    before = moved_at_rest(mover, way)
    since = time.time_ns()
    for seed, length in enumerate(lengths):
        disaggregated_completion(prefill, decode, MODEL.prompt(length, seed=100 + seed))

    blocks = sum(map(blocks_of, lengths))
    wanted = [len(lengths), blocks, blocks * BLOCK_BYTES]

    assert moves(mover, way, before, wanted), (moved(mover, way), before, wanted)
    assert metric(mover, "nixl_transfer_duration_seconds_count", direction=way) == metric(
        mover, "vllm:nixl_xfer_time_seconds_count"
    )
    assert metric(mover, "nixl_transfer_bytes_total") == metric(mover, "vllm:nixl_bytes_transferred_sum")
    assert metric(mover, "nixl_transfer_descriptors_total") == metric(mover, "vllm:nixl_num_descriptors_sum")
    found = transfers(
        servers.receiver.wait_for(lambda spans: len(transfers(spans, since)) >= len(lengths), timeout=60), since
    )
    assert sorted(span.attributes["nixl.transfer.block.count"] for span in found) == sorted(map(blocks_of, lengths))
    assert sum(span.attributes["nixl.transfer.size"] for span in found) == blocks * BLOCK_BYTES


def test_spans(servers: Fleet) -> None:
    """A handshake has its stages and its peer; a transfer its operation, times and peer."""
    spans = servers.receiver.wait_for(
        lambda spans: {"nixl.handshake", "nixl.transfer"} <= {span.name for span in spans}, timeout=60
    )
    handshake = next(span for span in spans if span.name == "nixl.handshake")
    stages = [span.name for span in spans if span.parent_span_id == handshake.span_id]
    assert (handshake.kind, handshake.status) == ("CLIENT", "UNSET")
    assert stages == ["nixl.handshake.metadata", "nixl.handshake.compat", "nixl.handshake.register"]
    side_channels = {servers.servers[name].side_channel_port for name in servers.servers}
    assert handshake.attributes["server.port"] in side_channels
    assert handshake.attributes["server.address"] == "127.0.0.1"
    transfer = transfers(spans)[-1]
    assert (transfer.kind, transfer.status) == ("CLIENT", "UNSET")
    assert transfer.attributes["nixl.transfer.operation"] == ("READ" if servers.mode == "pull" else "WRITE")
    assert transfer.attributes["server.port"] in side_channels
    assert 0 < transfer.attributes["nixl.transfer.post.duration"] <= transfer.attributes["nixl.transfer.duration"]
    delay = transfer.attributes["nixl.transfer.observation_delay"]
    assert 0 < delay <= transfer.attributes["nixl.transfer.duration"]
    assert transfer.attributes["nixl.transfer.mode"] == servers.mode
    if servers.mode == "push":
        assert transfer.resource["service.name"] == "fleet"


def test_two_ranks_and_two_api_servers(servers: Fleet) -> None:
    """P has one rank, D two: each rank's half of every block is moved, counted once and told in one span."""
    lengths = [40, 100, 500]
    prefill, decode = servers.pair("prefill", "decode_tp2")
    mover = initiator(servers.mode, prefill, decode)
    way = direction(servers.mode)
    before = moved_at_rest(mover, way)
    servers.recorded.write_text("")
    begin = time.time_ns()
    for seed, length in enumerate(lengths):
        split = disaggregated_completion(prefill, decode, MODEL.prompt(length, seed=200 + seed))
        assert split.prefill.kv_transfer_params is not None

    blocks = sum(map(blocks_of, lengths))
    wanted = [2 * len(lengths), 2 * blocks, blocks * BLOCK_BYTES]

    assert moves(mover, way, before, wanted), (moved(mover, way), before, wanted)
    # In pull two ranks shake hands with one, in push one and two do with each other.
    assert metric(decode, "nixl_handshake_duration_seconds_count", error_type="") == 2
    if servers.mode == "push":
        spans = servers.receiver.wait_for(
            lambda spans: sum(span.attributes["nixl.remote.rank"] == 1 for span in transfers(spans)) == len(lengths),
            timeout=60,
        )
        second = [span for span in transfers(spans) if span.attributes["nixl.remote.rank"] == 1]
        assert sum(span.attributes["nixl.transfer.size"] for span in second) == blocks * BLOCK_BYTES / 2
    assert [sample.value for sample in decode.metrics().select("nixl_connector_info")] == [1]
    assert unlabelled(decode.metrics(), servers.mode) == []
    assert check_blocks(servers, prefill, decode, servers.recorded, begin) == 2 * blocks
    check_traces_of_two_ranks(servers, begin, lengths)


def check_traces_of_two_ranks(servers: Fleet, begin_ns: int, lengths: Sequence[int]) -> None:
    """Every rank's spans are there once, in one trace for each request."""
    count = len(lengths)

    def mine(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
        return [span for span in spans if span.start_ns >= begin_ns]

    complete = has(lease=count, receive=2 * count, transfer=2 * count)
    found = mine(servers.receiver.wait_for(lambda spans: complete(mine(spans)), timeout=60))
    assert len({span.span_id for span in found}) == len(found)
    leases = sorted(named(found, "nixl.lease"), key=lambda lease: lease.start_ns)
    for lease, length in zip(leases, lengths, strict=True):
        spans = [span for span in found if span.trace_id == lease.trace_id]
        receives, sent = named(spans, "nixl.receive"), named(spans, "nixl.transfer")
        assert sorted(span.attributes["nixl.rank"] for span in receives) == [0, 1]
        assert len(sent) == 2
        assert sum(span.attributes["nixl.transfer.size"] for span in sent) == blocks_of(length) * BLOCK_BYTES
        parents, waiting = {span.parent_span_id for span in sent}, {span.span_id for span in receives}
        # P writes to both ranks for the registration of one of them.
        assert parents == waiting if servers.mode == "pull" else len(parents & waiting) == 1


def test_inside_multi_connector(servers: Fleet) -> None:
    """As the only child, and beside another connector, where enforcement is off and says so."""
    prompt = MODEL.prompt(150, seed=300)
    prefill, decode = servers.pair("prefill", "decode_multi")
    mover = initiator(servers.mode, prefill, decode)
    way = direction(servers.mode)
    before = moved_at_rest(mover, way)

    multi = disaggregated_completion(prefill, decode, prompt)

    blocks = blocks_of(150)
    wanted = [1, blocks, blocks * BLOCK_BYTES]
    assert moves(mover, way, before, wanted), (moved(mover, way), before, wanted)
    if servers.mode == "pull":
        assert metric(decode, "nixl_handshake_bypassed_total") == 1
        assert metric(decode, "nixl_handshake_bypassed_total", factor="is_hma_enabled") == 1
        assert "event=nixl.compat.enforcement_off" in decode.log_text()
    assert multi.token_ids == servers.stock_tokens(prompt)


def test_same_tokens_as_stock(servers: Fleet) -> None:
    """Greedy tokens for 50 random prompts from 1 to 3,000 tokens, through an instrumented and a stock pair."""
    prompts = [MODEL.prompt(length, 1000 + seed) for seed, length in enumerate(prompt_lengths(50, 3000, seed=7))]
    tokens = []
    for names in (("prefill", "decode"), ("stock_prefill", "stock_decode")):
        pair = servers.pair(*names)
        tokens.append([disaggregated_completion(*pair, prompt).token_ids for prompt in prompts])

    ours, stock = tokens
    assert ours == stock
    assert {len(generated) for generated in ours} == {8}


@pytest.mark.parametrize("name", INSTRUMENTED)
def test_nothing_went_wrong_inside(servers: Fleet, name: str) -> None:
    """After all that: no telemetry error, nothing dropped, no mode conflict, every sample labelled."""
    (server,) = servers.wake(name)

    assert [line for line in server.log_text().splitlines() if "telemetry failed" in line] == []
    assert metric(server, "nixl_telemetry_errors_total") == 0
    assert metric(server, "nixl_telemetry_dropped_total") == 0
    assert metric(server, "nixl_mode_conflicts_total") == 0
    assert unlabelled(server.metrics(), servers.mode) == []


def test_spans_outlive_the_server(servers: Fleet) -> None:
    """The last one of its fleet: the initiator is killed after a request, and its transfer has arrived."""
    prefill, decode = servers.pair("prefill", "decode")
    since = time.time_ns()
    disaggregated_completion(prefill, decode, MODEL.prompt(77, seed=400))
    time.sleep(3)  # spans are made within a second, and leave within another
    initiator(servers.mode, prefill, decode).stop()

    spans = servers.receiver.wait_for(lambda spans: len(transfers(spans, since)) >= 1, timeout=1)
    assert [span.attributes["nixl.transfer.block.count"] for span in transfers(spans, since)] == [blocks_of(77)]
