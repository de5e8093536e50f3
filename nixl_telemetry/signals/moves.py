# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Which blocks a transfer moved from where to where."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from nixl_telemetry.forking import in_children
from nixl_telemetry.signals.semconv import BlockDetail


@dataclass(slots=True)  # frozen ones take twice as long to make
class BlockMoves:
    """The blocks of one transfer. The lists are vLLM's, and are read only.

    Args:
        local: Block ids of this instance, for each KV cache group (or region).
        remote: Those of the peer, in the same order.
        by_region: Whether the lists are of regions.
    """

    local: Sequence[Sequence[int]]
    remote: Sequence[Sequence[int]]
    by_region: bool = False

    def __len__(self) -> int:
        return sum(map(len, self.local))

    def detail(self, wanted: BlockDetail, limit: int) -> tuple[BlockDetail, "Runs"]:
        """What to make spans of: each block, or runs where there are more blocks than the limit (if it is not 0)."""
        if wanted is BlockDetail.EACH and (len(self) <= limit or not limit):
            return BlockDetail.EACH, self.each()
        return BlockDetail.RUNS, Runs(*map(list, zip(*self.runs(), strict=True)))

    def each(self) -> "Runs":
        """Every block."""
        blocks = Runs()
        for group, (local, remote) in enumerate(zip(self.local, self.remote, strict=False)):
            count = min(len(local), len(remote))
            blocks.groups += [group] * count
            blocks.local += map(int, local[:count])
            blocks.remote += map(int, remote[:count])
            blocks.lengths += [1] * count
        return blocks

    def runs(self) -> Iterator[tuple[int, int, int, int]]:
        """Blocks that are neighbours in both instances, together: group, first ids of both, and how many."""
        for group, (local, remote) in enumerate(zip(self.local, self.remote, strict=False)):
            end = min(len(local), len(remote))
            start = 0
            while start < end:
                length = _neighbours(local, remote, start, end)
                yield group, int(local[start]), int(remote[start]), length
                start += length


def _neighbours(local: Sequence[int], remote: Sequence[int], start: int, end: int) -> int:
    """How many blocks from ``start`` on follow each other on both sides.

    Whole slices are compared, in steps that double while they fit and halve when they do not: a thread that looks at
    each of thousands of ids in Python keeps the engine's threads waiting.
    """
    after = start + 1
    if after >= end or local[after] != local[start] + 1 or remote[after] != remote[start] + 1:
        return 1
    length = step = 2
    while step:
        first, last = start + length, min(start + length + step, end)
        if first < last and all(
            list(ids[first:last]) == list(range(ids[start] + length, ids[start] + last - start))
            for ids in (local, remote)
        ):
            length, step = last - start, 2 * step
        else:
            step //= 2
    return length


@dataclass(slots=True)
class Runs:
    """Runs of neighbouring blocks, or single ones, column by column: there are up to thousands."""

    groups: list[int] = field(default_factory=list)
    local: list[int] = field(default_factory=list)
    """First id of each in this instance."""
    remote: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.groups)

    def __getitem__(self, part: slice) -> "Runs":
        return Runs(self.groups[part], self.local[part], self.remote[part], self.lengths[part])


class BlockBudget:
    """Bounds the block ids that wait for the export thread: they are references into vLLM's lists, not copies."""

    LIMIT: Final = 500_000

    def __init__(self) -> None:
        self.reset()
        in_children(self.reset)

    def reset(self) -> None:
        """Nothing is reserved, as in a forked child: what waited there is the parent's."""
        self._lock = threading.Lock()
        self._taken = 0
        self.is_short = False
        """Whether what waits is better described soon."""

    def take(self, count: int) -> bool:
        """Reserve so many; false if there is no room. The lock is held for nanoseconds."""
        with self._lock:
            if self._taken + count > self.LIMIT:
                return False
            self._taken += count
            self.is_short = self._taken > self.LIMIT // 2
            return True

    def give_back(self, count: int) -> None:
        """They were described, or dropped."""
        with self._lock:
            self._taken -= count
            self.is_short = self._taken > self.LIMIT // 2
