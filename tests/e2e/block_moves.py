# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Which blocks real servers moved: what the spans tell, held against what NIXL was asked for and counted below."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nixl_telemetry.testbed import OtlpReceiver, ReceivedSpan, VllmServer
from tests.e2e.conftest import initiator
from tests.e2e.received import named

Pairs = Counter[tuple[int, int]]
"""Pairs of blocks, of the initiator and of its peer, and how often each was moved."""


@dataclass
class Moved:
    """One transfer."""

    pairs: Pairs
    size: int = 0
    """Bytes, as NIXL counts them, or those of the spans of blocks together; 0 where NIXL was not asked."""

    def key(self) -> tuple[list[tuple[tuple[int, int], int]], int]:
        """For comparison with others, in an order."""
        return sorted(self.pairs.items()), self.size


class Observed(Protocol):
    """A fleet whose spans are received."""

    mode: str
    receiver: OtlpReceiver


def asked_of_nixl(path: Path, local: int, remote: int) -> list[Moved]:
    """What NIXL was asked to move, transfer by transfer, and its own count of the bytes.

    Args:
        path: What was recorded below the suite.
        local: Blocks that the initiator has.
        remote: Blocks that its peer has.
    """
    transfers: dict[str, Moved] = {}
    for line in path.read_text().splitlines():
        match json.loads(line):
            case [str(key), list(mine), list(theirs)]:
                pairs = Counter((a % local, b % remote) for a, b in zip(mine, theirs, strict=True))
                # Every region of memory has all blocks.
                assert len(set(pairs.values())) <= 1
                transfers[key] = Moved(Counter(pairs.keys()))
            case [str(key), int(size)] if key in transfers:
                transfers[key].size = size
    return list(transfers.values())


def told_in_spans(spans: Sequence[ReceivedSpan]) -> list[Moved]:
    """The blocks that the spans tell, transfer by transfer, and the bytes of each transfer's blocks together."""
    transfers = []
    for transfer in named(spans, "nixl.transfer"):
        blocks = [span for span in named(spans, "nixl.block") if span.parent_span_id == transfer.span_id]
        pairs: Pairs = Counter()
        for block in blocks:
            mine, theirs = block.attributes["nixl.block.local.id"], block.attributes["nixl.block.remote.id"]
            length = block.attributes.get("nixl.block.count", 1)
            pairs.update((mine + step, theirs + step) for step in range(length))
        transfers.append(Moved(pairs, sum(block.attributes["nixl.block.size"] for block in blocks)))
    return transfers


def check_blocks(fleet: Observed, prefill: VllmServer, decode: VllmServer, recorded: Path, begin_ns: int) -> int:
    """Hold the spans since a moment against what NIXL was asked for; returns how many blocks were moved."""
    mover = initiator(fleet.mode, prefill, decode)
    peer = decode if mover is prefill else prefill
    blocks = blocks_in(mover), blocks_in(peer)
    expected = asked_of_nixl(recorded, *blocks)

    def everything(spans: Sequence[ReceivedSpan]) -> list[ReceivedSpan]:
        return [span for span in spans if span.start_ns >= begin_ns]

    def is_complete(spans: Sequence[ReceivedSpan]) -> bool:
        mine = everything(spans)
        told = told_in_spans(mine) if len(named(mine, "nixl.transfer")) >= len(expected) else []
        return count(told) >= count(expected)

    told = told_in_spans(everything(fleet.receiver.wait_for(is_complete, timeout=60)))
    # A push is seen done, and its bytes are asked for, after the request is answered.
    asked = asked_of_nixl(recorded, *blocks)
    assert sorted(map(Moved.key, told)) == sorted(map(Moved.key, asked))
    assert all(times == 1 for moved in told for times in moved.pairs.values())
    return count(asked)


def count(transfers: Sequence[Moved]) -> int:
    """Blocks of all of them."""
    return sum(moved.pairs.total() for moved in transfers)


def blocks_in(server: VllmServer) -> int:
    """Blocks of a server's KV cache."""
    (sample,) = server.metrics().select("vllm:cache_config_info")
    return int(sample.labels["num_gpu_blocks"])
