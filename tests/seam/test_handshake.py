# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""vLLM's real handshake code against real sockets: every way in which a peer can be bad, and the good one after it."""

import contextlib
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import pytest

from tests.seam.conftest import LOCAL_HASH, agent_metadata
from tests.support.observed import Observed
from tests.support.peers import CLOCK, closing_peer, payload, peer

GOOD = payload(LOCAL_HASH, agent_metadata())


def shake(worker: Any, port: int, **kwargs: Any) -> Any:
    """One handshake, called as vLLM calls it."""
    return worker._nixl_handshake("127.0.0.1", port, 1, "there", **kwargs)


@contextlib.contextmanager
def accepting(worker: Any) -> Any:
    """Lets ``add_remote_agent`` of the stock worker succeed: it needs KV caches."""
    stock: Any = worker._stock_class
    original = stock.add_remote_agent
    stock.add_remote_agent = lambda self, *args, **kwargs: "agent-there"
    try:
        yield
    finally:
        stock.add_remote_agent = original


def error_types(observed: Observed) -> list[str]:
    """The error types under which handshakes were counted."""
    return [key[1] for key in observed.updates() if key[0] == "nixl_handshake_duration_seconds"]


def test_a_good_peer(observed: Observed, pull_worker: Any) -> None:
    """The result is the stock one, and the span has its stages."""
    with peer(lambda: [GOOD, CLOCK]) as port, accepting(pull_worker):
        agents, _offset = shake(pull_worker, port)

    assert agents == {(0, 0): "agent-there"}
    assert [span.name for span in observed.spans()] == [
        "nixl.handshake",
        "nixl.handshake.metadata",
        "nixl.handshake.compat",
        "nixl.handshake.register",
    ]
    assert observed.span("nixl.handshake").attributes["server.port"] == port
    assert error_types(observed) == [""]


def test_the_decode_side_of_push_only_wants_to_notify(observed: Observed, push_worker: Any) -> None:
    """Its handshake says so."""
    with peer(lambda: [GOOD, CLOCK]) as port:
        agents, _offset = shake(push_worker, port, notif_agents_only=True)

    assert agents == {(0, 0): "agent"}
    assert observed.span("nixl.handshake").attributes["nixl.handshake.purpose"] == "notify"


def answering(*frames: bytes) -> AbstractContextManager[int]:
    """A peer with one answer."""
    return peer(lambda: list(frames))


BAD_PEERS: dict[str, tuple[Callable[[], AbstractContextManager[int]], str]] = {
    "garbage": (lambda: answering(b"\xff\xfe garbage", CLOCK), "payload_decode"),
    "random bytes": (lambda: answering(os.urandom(512), CLOCK), "payload_decode"),
    "one frame": (lambda: answering(GOOD), "payload_decode"),
    "no frame": (lambda: answering(b""), "payload_decode"),
    "half a payload": (lambda: answering(GOOD[: len(GOOD) // 2], CLOCK), "payload_decode"),
    "a clock that is text": (lambda: answering(GOOD, msgspec.msgpack.encode("noon")), "payload_decode"),
    "a clock that is garbage": (lambda: answering(GOOD, b"\xc1"), "payload_decode"),
    "a hash that is a number": (lambda: answering(payload(7, agent_metadata()), CLOCK), "payload_decode"),
    "another hash": (lambda: answering(payload("b" * 64, agent_metadata()), CLOCK), "compat_mismatch"),
    "another hash, megabytes": (lambda: answering(payload("b" * 4_000_000, {}), CLOCK), "compat_mismatch"),
    "no metadata": (lambda: answering(payload(LOCAL_HASH, {}), CLOCK), "metadata_decode"),
    "metadata that is a list": (lambda: answering(payload(LOCAL_HASH, [1, 2]), CLOCK), "metadata_decode"),
    "another engine": (lambda: answering(payload(LOCAL_HASH, agent_metadata("other")), CLOCK), "engine_id_mismatch"),
    "silence": (lambda: peer(lambda: None), "timeout"),
    "a port that closes": (closing_peer, "unreachable"),
}


@pytest.mark.parametrize("kind", BAD_PEERS)
def test_a_bad_peer(observed: Observed, pull_worker: Any, kind: str) -> None:
    """vLLM's exception passes on, the error type is right, and the next good peer works."""
    make, expected = BAD_PEERS[kind]
    with make() as port:
        with pytest.raises(Exception) as caught:  # noqa: PT011 (vLLM raises six different types)
            shake(pull_worker, port)
        # The peer's port is looked at afterwards.
        observed.settle()

    assert "nixl_telemetry" not in str(caught.value)
    assert error_types(observed) == [expected]
    failed = observed.span("nixl.handshake")
    assert failed.attributes["error.type"] == expected
    assert failed.status == "ERROR"
    with peer(lambda: [GOOD, CLOCK]) as port, accepting(pull_worker):
        assert shake(pull_worker, port)[0] == {(0, 0): "agent-there"}
    assert error_types(observed) == [""]


def test_registration_that_fails(observed: Observed, pull_worker: Any) -> None:
    """The hash agrees, the memory does not fit: the stock worker has no KV caches here."""
    with peer(lambda: [GOOD, CLOCK]) as port, pytest.raises(AttributeError):
        shake(pull_worker, port)

    assert error_types(observed) == ["layout_mismatch"]
    assert observed.span("nixl.handshake.register").status == "ERROR"


def test_tensor_parallel_sizes_that_do_not_fit(observed: Observed, pull_worker: Any) -> None:
    """vLLM asserts that before it asks anything: the peer is not to blame for its payload."""

    def target_ranks(*sizes: int) -> list[int]:
        raise AssertionError("Local tensor parallel size 2 is not divisible by remote tensor parallel size 3.")

    pull_worker.transfer_topo.handshake_target_ranks = target_ranks
    with peer(lambda: [GOOD, CLOCK]) as port, pytest.raises(AssertionError):
        shake(pull_worker, port)

    assert error_types(observed) == ["layout_mismatch"]


def test_enforcement_off(observed: Observed, pull_worker: Any) -> None:
    """A differing hash is let through and counted."""
    pull_worker.enforce_compat_hash = False
    with answering(payload("b" * 64, agent_metadata()), CLOCK) as port, accepting(pull_worker):
        shake(pull_worker, port)

    updates = observed.updates()
    assert updates["nixl_handshake_bypassed_total", "unknown"] == 1
    assert observed.span("nixl.handshake").attributes["nixl.compat.enforced"] is False


def test_through_the_executor(observed: Observed, pull_worker: Any) -> None:
    """vLLM shakes hands on a thread of its pool; the failure is known before the future tells."""
    with peer(lambda: [b"junk", CLOCK]) as port:
        future = pull_worker._ensure_handshake("there", "127.0.0.1", port, 1)
        assert isinstance(future.exception(10), RuntimeError)
        updates = observed.updates()

    assert ("nixl_handshake_duration_seconds", "payload_decode") in updates
    pull_worker._handshake_initiation_executor.shutdown()
