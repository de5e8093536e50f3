# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What the operations put into the audit trail, read back from its files and verified."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nixl_telemetry.audit.verify import verify
from nixl_telemetry.compat.factors import digest
from nixl_telemetry.operations.compatibility import Compatibility
from nixl_telemetry.operations.handshake import Failure, Handshake
from nixl_telemetry.operations.mode import ModeCheck
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.operations.startup import announce
from nixl_telemetry.operations.transfer import Request, TransferTable
from nixl_telemetry.settings import Settings
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.metrics import label_values
from nixl_telemetry.signals.semconv import ConflictSource, Purpose, TransferMode
from nixl_telemetry.signals.telemetry import Telemetry
from tests.support.statements import FACTORS, exchanged, factors, statement

KEY = b"k" * 32
PEER = Peer("there", "10.0.0.7", 5600)
HASH = digest(FACTORS)


@dataclass
class Audited:
    """A hub with an audit trail."""

    telemetry: Telemetry
    folder: Path

    def finish(self) -> list[dict[str, Any]]:
        """Close the trail; returns its records but for the first and the last, after it was verified."""
        self.telemetry.close()
        lines = [json.loads(line) for path in self.folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        counts = (self.telemetry.drain() or {})["nixl_audit_records_total"]
        assert {label_values(key): count for key, count in counts.items()} == {("",): len(lines)}
        report = verify([self.folder], KEY, len(lines))
        assert report.findings == ()
        assert [lines[0]["event"], lines[-1]["event"]] == ["audit.opened", "audit.closed"]
        for line in lines[1:-1]:
            assert line.pop("nixl.engine.id") == "here"
        return [{k: v for k, v in line.items() if k not in ("seq", "time", "prev", "hash")} for line in lines[1:-1]]


@pytest.fixture
def audited(tmp_path: Path) -> Iterator[Audited]:
    """A pull connector's, with a key."""
    settings = Settings.load({"telemetry": {"audit_dir": str(tmp_path / "audit"), "traces": False, "logs": False}}, {})
    telemetry = Telemetry(settings, TransferMode.PULL, {"nixl.engine.id": "here", "nixl.rank": 0}, audit_key=KEY)
    yield Audited(telemetry, tmp_path / "audit")
    telemetry.close()


def shake(audited: Audited, told: dict[str, Any] | None, *, enforced: bool = True, stock: bool = False) -> None:
    """A handshake with a peer that has these factors, or that is silent."""
    compatibility = Compatibility(audited.telemetry, HASH, enforced, "kv_consumer", FACTORS, statement())
    handshake = Handshake(audited.telemetry, PEER, Purpose.TRANSFER, compatibility, 1)
    failure = Failure(OSError("agent"), from_agent=True) if told is None else None
    if told is not None:
        remote_hash, encoded = exchanged(statement(told))
        handshake.received(remote_hash, b"" if stock else encoded)
        if enforced and remote_hash != HASH:
            failure = Failure(RuntimeError("mismatch"))
        else:
            handshake.registering()
            handshake.registered()
    handshake.finish(failure)


COMMON: dict[str, Any] = {
    "event": "handshake",
    "server.address": "10.0.0.7",
    "server.port": 5600,
    "nixl.remote.engine.id": "there",
    "nixl.remote.tp_size": 1,
    "nixl.handshake.purpose": "transfer",
    "nixl.compat.hash": HASH,
    "nixl.compat.enforced": True,
}
PUSH = {
    "nixl.compat.differing": ["transfer_mode"],
    "nixl.compat.factor.transfer_mode": "pull",
    "nixl.remote.compat.factor.transfer_mode": "push",
    "nixl.remote.compat.hash": digest(factors(transfer_mode="push")),
}


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ({"told": FACTORS}, {"decision": "accepted", "nixl.remote.compat.hash": HASH}),
        (
            {"told": factors(transfer_mode="push")},
            {"decision": "rejected", "error.type": "compat_mismatch", "nixl.compat.source": "exchanged", **PUSH},
        ),
        (
            {"told": factors(transfer_mode="push"), "stock": True},
            {"decision": "rejected", "error.type": "compat_mismatch", "nixl.compat.source": "recovered", **PUSH},
        ),
        (
            {"told": factors(transfer_mode="push"), "enforced": False, "stock": True},
            {"decision": "bypassed", "nixl.compat.enforced": False, "nixl.compat.source": "recovered", **PUSH},
        ),
        ({"told": None}, {"decision": "failed", "error.type": "agent_error"}),
    ],
)
def test_a_handshake(audited: Audited, how: dict[str, Any], expected: dict[str, Any]) -> None:
    """The decision, with both hashes, what differs, the peer and the initiator."""
    shake(audited, **how)

    (record,) = audited.finish()
    assert record.pop("duration_s") >= 0
    assert record == {**COMMON, **expected}


def test_a_transfer(audited: Audited) -> None:
    """Who moved whose KV, and how much; once for each."""
    table = TransferTable(audited.telemetry)
    table.request = Request("r", "s", PEER, 1, [[1, 2, 3]], [[4, 5, 6]])
    for _ in range(2):
        handle = object()
        table.prepared("READ", [1, 2, 3], now_ns(), handle)
        table.posting(handle)
        table.done(handle, SimpleNamespace(xferDuration=2000, postDuration=10, totalBytes=4096, descCount=2))
        table.released(table.take(handle))

    first, _ = audited.finish()
    assert first.pop("nixl.transfer.observation_delay") >= 0
    assert first == {
        "event": "transfer",
        "nixl.transfer.operation": "READ",
        "nixl.transfer.block.count": 3,
        "nixl.transfer.descriptor.count": 2,
        "nixl.request.id": "r",
        "nixl.remote.request.id": "s",
        "nixl.remote.engine.id": "there",
        "nixl.remote.rank": 1,
        "server.address": "10.0.0.7",
        "server.port": 5600,
        "nixl.transfer.size": 4096,
        "nixl.transfer.duration": 0.002,
        "nixl.transfer.post.duration": 1e-05,
        "duration_s": 0.002,
    }


def test_the_start_and_a_mode_conflict(audited: Audited) -> None:
    """The hash with its factors, enforcement off, and a conflict for each peer, though only the first is logged."""
    compatibility = Compatibility(audited.telemetry, HASH, False, "kv_consumer", FACTORS, statement())
    announce(
        audited.telemetry, compatibility, versions=("0.32.0", "1.5.1"), kv_role="kv_consumer", start_ns=1, conflict=None
    )
    check = ModeCheck(audited.telemetry)
    for peer in ("one", "one", "two"):
        check.compare(ConflictSource.PARAMS, "push", {"nixl.remote.engine.id": peer})

    start, off, *conflicts = audited.finish()
    assert (start["event"], start["nixl.compat.hash"], start["nixl.compat.factor.model"]) == (
        "compat_hash",
        HASH,
        "example/model",
    )
    assert off == {"event": "enforcement_off", "nixl.compat.hash": HASH}
    conflict = {
        "event": "mode_conflict",
        "nixl.mode_conflict.source": "params",
        "nixl.mode_conflict.expected": "pull",
        "nixl.mode_conflict.found": "push",
    }
    assert conflicts == [{**conflict, "nixl.remote.engine.id": peer} for peer in ("one", "two")]


def test_without_a_folder_there_is_no_trail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file, no thread."""
    monkeypatch.chdir(tmp_path)
    telemetry = Telemetry(Settings.load({}, {}), TransferMode.PULL, {})
    shake(Audited(telemetry, tmp_path), FACTORS)
    telemetry.close()

    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_counted(tmp_path: Path) -> None:
    """And nothing else happens."""
    (tmp_path / "file").write_text("")
    settings = Settings.load({"telemetry": {"audit_dir": str(tmp_path / "file"), "shutdown_timeout_seconds": 0.2}}, {})
    telemetry = Telemetry(settings, TransferMode.PULL, {})
    shake(Audited(telemetry, tmp_path), FACTORS)
    telemetry.close()

    assert (telemetry.drain() or {})["nixl_telemetry_errors_total"]["audit"] >= 1
