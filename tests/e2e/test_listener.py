# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The handshake listener and the list of allowed peers on real servers, in both modes."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import zmq

from nixl_telemetry.signals.semconv import RequestResult
from nixl_telemetry.testbed import (
    CONSUMER,
    PRODUCER,
    HttpStatusError,
    ServerConfig,
    VllmServer,
    complete,
    disaggregated_completion,
)
from tests.e2e.conftest import MODULE, fleet, metric, stock_name
from tests.support.peers import wait_until

HANDSHAKES = "nixl_handshake_duration_seconds_count"
PROMPT = "one two three four five six seven eight nine ten " * 12


class Pair(NamedTuple):
    """Two servers, and who of them shakes hands with the other. In push both do."""

    prefill: VllmServer
    decode: VllmServer
    asking: tuple[VllmServer, ...]
    asked: tuple[VllmServer, ...]


@pytest.fixture(scope="module", params=["pull", "push"])
def servers(request: pytest.FixtureRequest, model: Path) -> Iterator[Pair]:
    """Prefill and decode, each of which may talk to one address."""
    name, extra = stock_name(request.param), {"telemetry": {"allowed_peers": ["127.0.0.1"]}}
    with fleet(
        prefill=ServerConfig(model, PRODUCER, name, MODULE, extra),
        decode=ServerConfig(model, CONSUMER, name, MODULE, extra),
    ) as servers:
        prefill, decode = servers.pair("prefill", "decode")
        if request.param == "pull":
            yield Pair(prefill, decode, asking=(decode,), asked=(prefill,))
        else:
            yield Pair(prefill, decode, asking=(prefill, decode), asked=(prefill, decode))


def send(port: int, messages: list[bytes], source: str = "127.0.0.1") -> list[bytes]:
    """Send each message on a connection of its own, from an address; what was answered within half a second."""
    context = zmq.Context()
    answers = []
    for message in messages:
        client = context.socket(zmq.REQ)
        client.setsockopt(zmq.LINGER, 0)
        client.connect(f"tcp://{source}:0;127.0.0.1:{port}")
        client.send(message)
        if client.poll(500):
            answers.append(client.recv_multipart()[0])
        client.close()
    context.term()
    return answers


def requests(server: VllmServer) -> dict[str, float]:
    """What became of what a server was asked."""
    return {str(result): metric(server, "nixl_handshake_requests_total", result=result) for result in RequestResult}


def test_what_ends_a_stock_listener(servers: Pair) -> None:
    """Unknown ranks, junk, other protocols and unknown senders; the first handshakes of the pair come after them."""
    query, rank = (msgspec.msgpack.encode((b"get_meta_msg", 0, number)) for number in (0, 99))
    for server in servers.asked:
        port = server.side_channel_port
        assert send(port, [b"\xff\xfejunk", b"", msgspec.msgpack.encode("get_meta_msg")]) == []
        assert send(port, [rank, rank]) == [b"\x80"] * 2
        assert send(port, [query], "127.0.0.2") == []
        with socket.create_connection(("127.0.0.1", port), 10) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")

    assert len(disaggregated_completion(servers.prefill, servers.decode, PROMPT).token_ids) == 8
    # What an idle engine has counted is reported with its next step.
    disaggregated_completion(servers.prefill, servers.decode, PROMPT + "eleven twelve")
    for server in servers.asking:
        assert wait_until(lambda: metric(server, HANDSHAKES, error_type="") == 1, 30), server.name  # noqa: B023
    for server in servers.asked:
        expected = {"served": 1, "malformed": 4, "unknown_rank": 2, "not_allowed": 1}
        assert wait_until(lambda: requests(server) == expected, 30), (server.name, requests(server))  # noqa: B023
        assert "nixl.handshake_request.refused" in server.log_text()
    for server in (servers.prefill, servers.decode):
        assert metric(server, "nixl_telemetry_errors_total") == 0


def test_a_request_that_points_elsewhere(servers: Pair) -> None:
    """It fails, nobody is connected to, and the next request is served."""
    prefill, decode = servers.prefill, servers.decode
    with socket.create_server(("127.0.0.2", 0)) as elsewhere:
        elsewhere.settimeout(0.2)
        params = {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_block_ids": [[1, 2, 3, 4]],
            "remote_engine_id": "elsewhere",
            "remote_request_id": "r",
            "remote_host": "127.0.0.2",
            "remote_port": elsewhere.getsockname()[1],
            "tp_size": 1,
        }
        with pytest.raises(HttpStatusError):
            complete(decode.url, PROMPT, kv_transfer_params=params)
        with pytest.raises(TimeoutError):
            elsewhere.accept()

    assert "the peer '127.0.0.2' is not allowed" in decode.log_text()
    disaggregated_completion(prefill, decode, PROMPT)
    assert wait_until(lambda: metric(decode, HANDSHAKES, error_type="peer_not_allowed") >= 1, 30)
