# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Which blocks real servers moved: what the spans tell, held against what NIXL was asked for below the suite."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from nixl_telemetry.testbed import OtlpReceiver, ReceivedSpan, VllmServer
from tests.e2e.conftest import initiator
from tests.e2e.received import named

Moved = Counter[tuple[int, int]]
"""Pairs of blocks, of the initiator and of its peer, and how often each was moved."""


class Observed(Protocol):
    """A fleet whose spans are received."""

    mode: str
    receiver: OtlpReceiver


def asked_of_nixl(path: Path, local: int, remote: int) -> list[Moved]:
    """The pairs of blocks that NIXL was asked to move, transfer by transfer.

    Args:
        path: What was recorded below the suite.
        local: Blocks that the initiator has.
        remote: Blocks that its peer has.
    """
    transfers = []
    for line in path.read_text().splitlines():
        _, mine, theirs = json.loads(line)
        pairs = Counter((a % local, b % remote) for a, b in zip(mine, theirs, strict=True))
        # Every region of memory has all blocks.
        assert len(set(pairs.values())) <= 1
        transfers.append(Counter(pairs.keys()))
    return transfers


def told_in_spans(spans: Sequence[ReceivedSpan]) -> list[Moved]:
    """The pairs of blocks that the spans tell, transfer by transfer."""
    transfers = []
    for transfer in named(spans, "nixl.transfer"):
        blocks = [span for span in named(spans, "nixl.block") if span.parent_span_id == transfer.span_id]
        assert sum(block.attributes["nixl.block.size"] for block in blocks) == transfer.attributes["nixl.transfer.size"]
        moved: Moved = Counter()
        for block in blocks:
            mine, theirs = block.attributes["nixl.block.local.id"], block.attributes["nixl.block.remote.id"]
            length = block.attributes.get("nixl.block.count", 1)
            moved.update((mine + step, theirs + step) for step in range(length))
        transfers.append(moved)
    return transfers


def check_blocks(fleet: Observed, prefill: VllmServer, decode: VllmServer, recorded: Path, begin_ns: int) -> int:
    """Hold the spans since a moment against what NIXL was asked for; returns how many blocks were moved."""
    mover = initiator(fleet.mode, prefill, decode)
    peer = decode if mover is prefill else prefill
    asked = asked_of_nixl(recorded, blocks_in(mover), blocks_in(peer))

    def everything(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
        return [span for span in spans if span.start_ns >= begin_ns]

    def is_complete(spans: Sequence[ReceivedSpan]) -> bool:
        told = told_in_spans(everything(spans)) if len(named(everything(spans), "nixl.transfer")) >= len(asked) else []
        return sum(map(Counter.total, told)) >= sum(map(Counter.total, asked))

    spans = everything(fleet.receiver.wait_for(is_complete, timeout=60))
    told = told_in_spans(spans)
    assert sorted(sorted(moved.items()) for moved in told) == sorted(sorted(moved.items()) for moved in asked)
    assert all(count == 1 for moved in told for count in moved.values())
    return sum(map(Counter.total, asked))


def blocks_in(server: VllmServer) -> int:
    """Blocks of a server's KV cache."""
    (sample,) = server.metrics().select("vllm:cache_config_info")
    return int(sample.labels["num_gpu_blocks"])
