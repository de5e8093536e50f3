# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The handshake listener and the list of allowed peers on real servers."""

import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from nixl_telemetry.testbed import (
    CONSUMER,
    HttpStatusError,
    ServerConfig,
    VllmServer,
    complete,
    disaggregated_completion,
)
from tests.e2e.conftest import MODULE, fleet, metric

PROMPT = "one two three four five six seven eight nine ten " * 12


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Prefill and decode, each of which may talk to one address."""
    extra = {"telemetry": {"allowed_peers": ["127.0.0.1"]}}
    with fleet(
        prefill=ServerConfig(model, connector_module=MODULE, extra_config=extra),
        decode=ServerConfig(model, CONSUMER, connector_module=MODULE, extra_config=extra),
    ) as servers:
        yield servers.pair("prefill", "decode")


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


def test_what_ends_a_stock_listener(servers: tuple[VllmServer, VllmServer]) -> None:
    """Unknown ranks, junk, other protocols and unknown senders; the first handshake of the pair comes after them."""
    prefill, decode = servers
    port = prefill.side_channel_port
    query, rank = (msgspec.msgpack.encode((b"get_meta_msg", 0, number)) for number in (0, 99))

    assert send(port, [b"\xff\xfejunk", b"", msgspec.msgpack.encode("get_meta_msg")]) == []
    assert send(port, [rank, rank]) == [b"\x80"] * 2
    assert send(port, [query], "127.0.0.2") == []
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")

    assert len(disaggregated_completion(prefill, decode, PROMPT).token_ids) == 8
    assert metric(decode, "nixl_handshake_duration_seconds_count", error_type="") == 1
    disaggregated_completion(prefill, decode, PROMPT)
    found = {
        result: metric(prefill, "nixl_handshake_requests_total", result=result)
        for result in ("served", "malformed", "unknown_rank", "not_allowed")
    }
    assert found == {"served": 1, "malformed": 4, "unknown_rank": 2, "not_allowed": 1}
    assert "nixl.handshake_request.refused" in prefill.log_text()


def test_a_request_that_points_elsewhere(servers: tuple[VllmServer, VllmServer]) -> None:
    """It fails, nobody is connected to, and the next request is served."""
    prefill, decode = servers
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
    assert metric(decode, "nixl_handshake_duration_seconds_count", error_type="peer_not_allowed") >= 1
