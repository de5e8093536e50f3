# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What instances tell each other in the handshake, with vLLM's real payload class and handshake code."""

import pickle
from typing import Any, Final

import msgspec
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata

from nixl_telemetry.compat.factors import digest
from nixl_telemetry.compat.statement import Geometry, Statement, decode, encode
from nixl_telemetry.operations import compatibility
from nixl_telemetry.operations.compatibility import Compatibility
from nixl_telemetry.seam.payload import Payload, add_statement
from tests.seam.conftest import agent_metadata
from tests.seam.test_handshake import accepting, answering, shake
from tests.support.observed import Observed
from tests.support.peers import CLOCK, payload
from tests.support.statements import FACTORS, factors, factors_of_release, statement

HASH: Final = digest(FACTORS)
REJECTIONS: Final = "nixl_handshake_rejections_total"


@pytest.fixture
def worker(observed: Observed, pull_worker: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A decode worker that knows its factors, and has the time to search for a peer's on a busy machine."""
    monkeypatch.setattr(compatibility, "_SEARCH_SECONDS", 20.0)
    tell(observed, pull_worker, statement(kv_role="kv_consumer"))
    return pull_worker


def tell(observed: Observed, worker: Any, said: Statement | None, enforced: bool = True) -> None:
    """Let the worker be the instance that says this."""
    worker.compat_hash = HASH
    worker.enforce_compat_hash = enforced
    worker._nixl_telemetry._compatibility = Compatibility(
        observed.telemetry, HASH, enforced, "kv_consumer", FACTORS, said
    )


def answer(told: dict[str, Any], extension: bytes | None = None, **changes: Any) -> bytes:
    """The payload of a peer with these factors, instrumented unless an extension is given."""
    said = encode(statement(told, **changes)) if extension is None else extension
    return payload(digest(told), agent_metadata(), said)


# --------------------------------------------------------------------------------------------------------- On the wire


def test_stock_reads_ours_and_we_read_stock() -> None:
    """The class of this vLLM, both ways: one field more is no field less."""
    stock = metadata.NixlHandshakePayload(compatibility_hash="h", agent_metadata_bytes=b"m")
    ours = Payload(compatibility_hash="h", agent_metadata_bytes=b"m")
    ours.nixl_telemetry = msgspec.Raw(encode(statement()))

    read_by_stock = msgspec.msgpack.Decoder(metadata.NixlHandshakePayload).decode(msgspec.msgpack.encode(ours))
    read_by_us = msgspec.msgpack.Decoder(Payload).decode(msgspec.msgpack.encode(stock))

    assert read_by_stock == stock
    assert (read_by_us.compatibility_hash, read_by_us.agent_metadata_bytes) == ("h", b"m")
    on_the_wire = msgspec.msgpack.decode(msgspec.msgpack.encode(ours))
    assert on_the_wire["nixl_telemetry"] == msgspec.msgpack.decode(encode(statement()))


def test_without_a_statement_the_field_is_nil() -> None:
    """As it is between the registration of the caches and ours."""
    encoded = msgspec.msgpack.encode(Payload(compatibility_hash="h", agent_metadata_bytes=b"m"))

    assert msgspec.msgpack.decode(encoded)["nixl_telemetry"] is None
    assert bytes(msgspec.msgpack.Decoder(Payload).decode(encoded).nixl_telemetry) == b"\xc0"


def test_the_payload_reaches_the_engine() -> None:
    """vLLM pickles it from the worker to the engine core, which asks for its class and encodes it."""

    class Worker:
        xfer_handshake_metadata = Payload(compatibility_hash=HASH, agent_metadata_bytes=b"m")

    add_statement(Worker, statement())
    arrived = pickle.loads(pickle.dumps(Worker.xfer_handshake_metadata))

    assert isinstance(arrived, metadata.NixlHandshakePayload)
    assert decode(bytes(arrived.nixl_telemetry), HASH) == statement()


# ------------------------------------------------------------------------------------------------------------ Explained


def test_a_rejection_is_explained_by_what_the_peer_tells(observed: Observed, worker: Any) -> None:
    """Exception, span, metric and log line."""
    with answering(answer(factors(transfer_mode="push")), CLOCK) as port, pytest.raises(RuntimeError) as caught:
        shake(worker, port)

    first, _, rest = str(caught.value).partition("\n")
    assert first == (
        f'prefill 127.0.0.1:{port} is incompatible: transfer_mode is "push" there and "pull" here (exchanged)'
    )
    assert rest.startswith("NIXL compatibility hash mismatch. Local: ")
    assert type(caught.value) is RuntimeError
    assert observed.updates()[REJECTIONS, "transfer_mode"] == 1
    for name in ("nixl.handshake", "nixl.handshake.compat"):
        span = observed.span(name)
        attributes = span.attributes
        assert attributes["nixl.compat.source"] == "exchanged"
        assert attributes["nixl.compat.differing"] == ("transfer_mode",)
        assert attributes["nixl.compat.factor.transfer_mode"] == "pull"
        assert attributes["nixl.remote.compat.factor.transfer_mode"] == "push"
        assert str(span.status_message).startswith(first)
    (line,) = (line for line in observed.messages() if "nixl.handshake.failed" in line)
    assert "nixl.compat.differing=transfer_mode" in line


@pytest.mark.parametrize(
    ("there", "differing"),
    [
        (factors(transfer_mode="push"), ["transfer_mode"]),
        (factors_of_release("0.28.0"), ["vllm_version", "nixl_connector_version"]),
        (factors_of_release("0.31.0", dtype="torch.float16"), ["vllm_version", "nixl_connector_version", "dtype"]),
        (factors(num_kv_heads=8, num_hidden_layers=28), ["num_kv_heads", "num_hidden_layers"]),
    ],
)
def test_a_stock_peer_is_explained_by_its_digest(
    observed: Observed, worker: Any, there: dict[str, Any], differing: list[str]
) -> None:
    stock = payload(digest(there), agent_metadata())
    with answering(stock, CLOCK) as port, pytest.raises(RuntimeError, match="recovered"):
        shake(worker, port)

    attributes = observed.span("nixl.handshake").attributes
    assert attributes["nixl.compat.source"] == "recovered"
    assert list(attributes["nixl.compat.differing"]) == differing
    assert observed.updates()[REJECTIONS, differing[0]] == 1


def test_a_model_that_is_not_known_stays_unknown_until_a_peer_tells_it(observed: Observed, worker: Any) -> None:
    stock = payload(digest(factors(model="example/other")), agent_metadata())
    for expected in ("what differs is unknown", 'model is "example/other" there .* \\(recovered\\)'):
        with answering(stock, CLOCK) as port, pytest.raises(RuntimeError, match=expected):
            shake(worker, port)
        with answering(answer(factors(model="example/other")), CLOCK) as port, pytest.raises(RuntimeError):
            shake(worker, port)

    updates = observed.updates()
    assert updates[REJECTIONS, "unknown"] == 1
    assert updates[REJECTIONS, "model"] == 3


def test_enforcement_off_counts_what_was_let_through(observed: Observed, worker: Any) -> None:
    tell(observed, worker, statement(), enforced=False)
    there = payload(digest(factors(cache_dtype="fp8")), agent_metadata())
    with answering(there, CLOCK) as port, accepting(worker):
        shake(worker, port)

    assert observed.updates()["nixl_handshake_bypassed_total", "cache_dtype"] == 1
    assert observed.span("nixl.handshake").attributes["nixl.compat.differing"] == ("cache_dtype",)


def test_a_host_from_a_request_cannot_write_log_lines(observed: Observed, worker: Any) -> None:
    """It comes from a client."""
    handshake = worker._nixl_telemetry.handshake_starts(("127.0.0.1\nFAKE", 5600, 1, "there"), {})
    handshake.received(digest(factors(dtype="x\n\x1b[31m")), encode(statement(factors(dtype="x\n\x1b[31m"))))
    error = RuntimeError("NIXL compatibility hash mismatch")
    worker._nixl_telemetry.handshake_ends(error)

    first, _, rest = str(error).partition("\n")
    assert first.startswith("prefill 127.0.0.1\\nFAKE:5600 is incompatible: dtype is ")
    assert rest == "NIXL compatibility hash mismatch"
    assert first.isprintable()
    (line,) = observed.messages()
    assert line.isprintable()
    assert "x\\n\\x1b[31m" in line


def test_without_a_statement_the_hash_is_announced(observed: Observed, worker: Any) -> None:
    """This worker lacks nearly everything that a statement says."""
    worker._nixl_telemetry.caches_registered([{"other": 1}, FACTORS], 1)

    updates = observed.updates()
    assert updates["nixl_compat_factor_info", "model", "example/model"] == 1
    assert [key for key in updates if key[0] == "nixl_connector_info"]
    assert updates["nixl_telemetry_errors_total", "hook"] == 1
    there = payload(digest(factors(transfer_mode="push")), agent_metadata())
    with answering(there, CLOCK) as port, pytest.raises(RuntimeError, match=r"transfer_mode .* \(recovered\)"):
        shake(worker, port)


def test_a_peer_with_an_empty_hash_is_rejected(observed: Observed, worker: Any) -> None:
    """As vLLM does it."""
    with answering(payload("", agent_metadata()), CLOCK) as port, pytest.raises(RuntimeError, match="what differs"):
        shake(worker, port)

    assert observed.updates()[REJECTIONS, "unknown"] == 1


# --------------------------------------------------------------------------------------------- What the hash misses


def test_what_the_hash_misses_is_warned_of_before_the_first_transfer(observed: Observed, worker: Any) -> None:
    said = answer(FACTORS, geometry=Geometry(tp_size=2, block_size=64), model_revision="v2")
    with answering(said, CLOCK) as port, accepting(worker):
        shake(worker, port)

    warning, finished = observed.messages()
    assert "event=nixl.compat.uncovered_difference" in warning
    assert "nixl.compat.uncovered=block_size,tp_size,model_revision" in warning
    assert "vLLM does not compare revisions" in warning
    assert observed.lines[0].levelname == "WARNING"
    assert "nixl.handshake.finished" in finished
    (event,) = observed.span("nixl.handshake").events
    assert dict(event.attributes) == {"nixl.compat.uncovered": ("block_size", "tp_size", "model_revision")}


HOSTILE: Final = {
    "a number": msgspec.msgpack.encode(5),
    "a text": msgspec.msgpack.encode("hello"),
    "a list": msgspec.msgpack.encode([1] * 1000),
    "another version": msgspec.msgpack.encode(statement(version=2)),
    "other factors": encode(statement(factors(model="liar"))),
    "megabytes": b"\xc6\x00\x50\x00\x00" + b"x" * 5 * 2**20,
    "nested deeply": b"\x91" * 900 + b"\xc0",
}


@pytest.mark.parametrize("extension", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_extension_is_ignored_and_counted(observed: Observed, worker: Any, extension: bytes) -> None:
    """The handshake ends as it would with a stock peer."""
    with answering(answer(FACTORS, extension), CLOCK) as port, accepting(worker):
        assert shake(worker, port)[0] == {(0, 0): "agent-there"}

    updates = observed.updates()
    assert updates["nixl_telemetry_errors_total", "exchange"] == 1
    assert ("nixl_handshake_duration_seconds", "") in updates
    (warning,) = (line for line in observed.messages() if "treated as a stock one" in line)
    assert len(warning) < 300


def test_an_extension_that_stock_could_not_skip_fails_as_there(worker: Any) -> None:
    """Beyond msgspec's depth, stock fails as well: nothing is worse than it was."""
    nested = payload(HASH, agent_metadata(), b"\x91" * 100_000 + b"\xc0")
    with pytest.raises(RecursionError):
        msgspec.msgpack.Decoder(metadata.NixlHandshakePayload).decode(nested)
    with answering(nested, CLOCK) as port, pytest.raises(RecursionError):
        shake(worker, port)
