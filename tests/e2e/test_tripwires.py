# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Tripwires, leases, push matching and the watchdog on real servers: each is made to happen."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from nixl_telemetry.testbed import (
    CONSUMER,
    HttpStatusError,
    Pair,
    ServerConfig,
    VllmServer,
    complete,
    disaggregated_completion,
)
from nixl_telemetry.testbed.pair import REMOTE_DECODE
from tests.e2e.conftest import MODULE, fleet, metric, stock_name
from tests.support.peers import wait_until

LEASE_SECONDS = {"pull": 2, "push": 10}
"""In push, unmatched blocks are to be held for longer than the watchdog takes."""
WATCHDOG_SECONDS = 2
INVALID, WITHOUT = "nixl_invalid_kv_total", "nixl_requests_without_transfer_params_total"
PROMPTS = iter(range(10**6))


def prompt() -> str:
    """A prompt of several blocks that no cache has."""
    return f"number {next(PROMPTS)} " + "one two three four five six seven eight nine ten " * 12


@pytest.fixture(scope="module", params=["pull", "push"])
def pair(request: pytest.FixtureRequest, model: Path) -> Iterator[Pair]:
    """Prefill and decode with short leases; the decode side recomputes what it cannot load."""
    transfer: dict[str, Any] = {
        "kv_connector": stock_name(request.param),
        "kv_connector_module_path": MODULE,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "num_threads": 0,
            "kv_lease_duration": LEASE_SECONDS[request.param],
            "telemetry": {"watchdog_seconds": WATCHDOG_SECONDS},
        },
    }
    with fleet(
        prefill=ServerConfig(model, kv_transfer_config={**transfer, "kv_role": "kv_producer"}),
        decode=ServerConfig(model, CONSUMER, kv_transfer_config={**transfer, "kv_role": "kv_consumer"}),
    ) as servers:
        yield Pair(*servers.pair("prefill", "decode"))


@pytest.fixture
def mode(request: pytest.FixtureRequest) -> str:
    """The pair's."""
    return str(request.node.callspec.params["pair"])


def only(*modes: str) -> pytest.MarkDecorator:
    """For tests of what one mode only has."""
    return pytest.mark.parametrize("pair", modes, indirect=True)


def step(server: VllmServer) -> None:
    """Have the engine take steps: what its workers know leaves with one."""
    try:
        complete(server.url, prompt(), 2)
    except HttpStatusError as error:
        raise AssertionError(f"{server.name} does not serve") from error


def comes_true(condition: Callable[[], bool], server: VllmServer, seconds: float = 20) -> bool:
    """Whether a condition comes true while the server takes steps."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        step(server)
        time.sleep(0.2)
    return True


def logs(server: VllmServer, text: str) -> bool:
    """Whether a line comes: they are written by a thread of their own."""
    return wait_until(lambda: text in server.log_text(), 5)


def prefilled(pair: Pair, request_id: str) -> dict[str, Any]:
    """What the prefill side hands over for a request."""
    headers = {"X-Request-Id": request_id}
    answer = complete(pair.prefill.url, prompt(), 1, headers=headers, kv_transfer_params=dict(REMOTE_DECODE))
    assert answer.kv_transfer_params is not None
    return dict(answer.kv_transfer_params)


def test_healthy_requests_trip_nothing(pair: Pair, mode: str) -> None:
    """And the numbers add up: posted, done and in flight; opened, ended and held; received, matched and unmatched."""
    for _ in range(6):
        disaggregated_completion(pair.prefill, pair.decode, prompt())
    initiator = pair.decode if mode == "pull" else pair.prefill
    assert comes_true(lambda: metric(pair.prefill, "nixl_leases_held") == 0, pair.prefill)
    for server in (pair.prefill, pair.decode):
        assert server.metrics().value(INVALID) == 0
    ended = metric(initiator, "nixl_transfer_duration_seconds_count")
    assert metric(initiator, "nixl_transfers_posted_total") == ended == 6
    assert metric(initiator, "nixl_transfers_in_flight") == 0
    assert metric(pair.prefill, "nixl_leases_opened_total") == 6
    assert metric(pair.prefill, "nixl_lease_duration_seconds_count", outcome="released") == 6
    assert metric(pair.prefill, "nixl_lease_blocks_held") == 0
    peer = f"127.0.0.1:{(pair.prefill if mode == 'pull' else pair.decode).side_channel_port}"
    assert metric(initiator, "nixl_peer_transfers_total", peer=peer, error_type="") == 6
    assert metric(initiator, "nixl_peer_handshakes_total", peer=peer, error_type="") == 1
    moved = metric(initiator, "nixl_transfer_bytes_total")
    assert metric(initiator, "nixl_peer_transfer_bytes_total", peer=peer) == moved > 0
    assert time.time() - metric(initiator, "nixl_peer_last_success_timestamp_seconds", peer=peer) < 60
    if mode == "push":
        events = {
            (server.name, event): metric(server, "nixl_push_registrations_total", event=event)
            for server, event in [(pair.decode, "sent"), (pair.prefill, "received"), (pair.prefill, "matched")]
        }
        assert set(events.values()) == {6}, events
        assert metric(pair.prefill, "nixl_push_match_wait_seconds_count") == 6
        assert metric(pair.prefill, "nixl_push_unmatched") == 0
    else:
        assert metric(pair.decode, "nixl_lease_remaining_seconds_count") == 6
        assert metric(pair.decode, "nixl_lease_remaining_seconds_bucket", le="0.0") == 0


def test_requests_that_say_nothing(pair: Pair) -> None:
    """On either side; the log says what that means."""
    before = {role: metric(server, WITHOUT, role=role) for server, role in sides(pair)}
    for server, role in sides(pair):
        complete(server.url, prompt(), 2)
        step(server)
        assert metric(server, WITHOUT, role=role) == before[role] + 2
        assert logs(server, "nixl.request.without_transfer_params")


def sides(pair: Pair) -> list[tuple[VllmServer, str]]:
    """Each server with its role."""
    return [(pair.prefill, "prefill"), (pair.decode, "decode")]


@only("pull")
def test_kv_that_is_read_after_its_lease_expired(pair: Pair) -> None:
    """vLLM's decode side reads all the same; the prefill side learns of it by the notification."""
    params = prefilled(pair, "late")
    expired = metric(pair.prefill, "nixl_lease_duration_seconds_count", outcome="expired")
    time.sleep(LEASE_SECONDS["pull"])
    assert comes_true(
        lambda: metric(pair.prefill, "nixl_lease_duration_seconds_count", outcome="expired") == expired + 1,
        pair.prefill,
    )
    complete(pair.decode.url, prompt(), 4, kv_transfer_params=params)

    assert comes_true(lambda: metric(pair.prefill, INVALID, reason="read_after_expiry") == 1, pair.prefill)
    assert comes_true(lambda: metric(pair.decode, "nixl_lease_remaining_seconds_bucket", le="0.0") == 1, pair.decode)
    assert logs(pair.prefill, "nixl.invalid_kv.reason=read_after_expiry")


@only("pull")
def test_a_request_that_nobody_knows(pair: Pair) -> None:
    """Its notification comes to the prefill side."""
    params = prefilled(pair, "known")
    complete(pair.decode.url, prompt(), 4, kv_transfer_params={**params, "remote_request_id": "never-was"})

    assert comes_true(lambda: metric(pair.prefill, INVALID, reason="unknown_request") == 1, pair.prefill)
    assert logs(pair.prefill, "nixl.request.id=never-was")


def test_a_load_that_fails_and_is_recomputed(pair: Pair) -> None:
    """The client has its answer, at the price of a prefill on the decode side."""
    params = prefilled(pair, "lost")
    nowhere = {**params, "remote_engine_id": "nowhere", "remote_port": 1}
    text = prompt()
    answer = complete(pair.decode.url, text, 4, kv_transfer_params=nowhere, timeout=60)

    assert answer.token_ids == complete(pair.decode.url, text, 4).token_ids
    assert comes_true(lambda: metric(pair.decode, INVALID, reason="failed_load_recomputed") == 1, pair.decode)
    assert metric(pair.decode, "nixl_peer_handshakes_total", peer="127.0.0.1:1", error_type="unreachable") >= 1


@only("push")
def test_request_ids_that_can_never_match(pair: Pair) -> None:
    """Named on both sides within the watchdog's time; the decode side's request would wait for minutes."""
    params = prefilled(pair, "mine")
    with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=WATCHDOG_SECONDS + 8) as client:
        body = {"model": "tiny", "prompt": prompt(), "max_tokens": 2, "kv_transfer_params": params}
        headers = {"X-Request-Id": "yours"}
        waiting = pool.submit(client.post, f"{pair.decode.url}/v1/completions", json=body, headers=headers)
        deadline = time.monotonic() + WATCHDOG_SECONDS + 5
        told: dict[str, bool] = {}
        while time.monotonic() < deadline and not (told and all(told.values())):
            told = {
                "decode": "nixl.receive.waits_for=notification" in pair.decode.log_text(),
                "decode says why": "must send the same X-Request-Id to both" in pair.decode.log_text(),
                "registration": "nixl.push.side=registration" in pair.prefill.log_text(),
                "blocks": "nixl.push.side=blocks" in pair.prefill.log_text(),
                "prefill says why": "nixl.push.ids_differ" in pair.prefill.log_text(),
            }
            time.sleep(0.1)
        # The prefill side takes steps while it has blocks for somebody.
        unmatched = metric(pair.prefill, "nixl_push_unmatched", side="registration")
        waiting.exception()

    assert all(told.values()), told
    assert unmatched == 1
    assert metric(pair.prefill, "nixl_push_unmatched_oldest_timestamp_seconds", side="registration") > 1e9
