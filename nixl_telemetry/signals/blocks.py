# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans for the blocks of a transfer, encoded as OTLP directly.

A span of the SDK costs tens of microseconds to make and encode, and a transfer has up to thousands of blocks. The spans
of one transfer differ in an id and a few numbers only: what they share is encoded once.
"""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import Attributes
from nixl_telemetry.signals.moves import Run
from nixl_telemetry.signals.otlp import ExportedSpan, encode_count
from nixl_telemetry.signals.semconv import BlockDetail, SpanName


@dataclass(frozen=True, slots=True)
class BlockSpans:
    """Block spans of one transfer, ready to be encoded.

    Args:
        owner: The transfer's span: their parent, whose interval they have.
        runs: The blocks, or runs of blocks.
        detail: ``each`` or ``runs``.
        by_region: Whether a run's group is a region.
        attributes: Of each span.
        size_bytes: Bytes of all these blocks, if known.
    """

    owner: ExportedSpan
    runs: Sequence[Run]
    detail: BlockDetail
    by_region: bool
    attributes: Attributes
    size_bytes: int | None

    def slices(self, length: int) -> Iterator["BlockSpans"]:
        """The same in parts of at most ``length`` spans."""
        blocks = sum(run.length for run in self.runs)
        before = 0
        for start in range(0, len(self.runs), length):
            part = self.runs[start : start + length]
            after = before + sum(run.length for run in part)
            size = None if self.size_bytes is None else _share(self.size_bytes, before, after, blocks)
            yield replace(self, runs=part, size_bytes=size)
            before = after

    def encode(self, into: Any) -> None:
        """Append the spans to a repeated field of OTLP spans."""
        attributes = {semconv.BLOCK_TIMING: _TIMING, **self.attributes}
        shared = self.owner.encode_part(SpanName.BLOCK, attributes)
        ids = secrets.token_bytes(8 * len(self.runs))
        blocks = sum(run.length for run in self.runs)
        group_key = semconv.BLOCK_REGION if self.by_region else semconv.BLOCK_GROUP
        before = 0
        for index, (group, local, remote, length) in enumerate(self.runs):
            parts = [
                shared,
                encode_count(semconv.BLOCK_LOCAL_ID, local),
                encode_count(semconv.BLOCK_REMOTE_ID, remote),
                encode_count(group_key, group),
            ]
            if self.size_bytes is not None:
                size = _share(self.size_bytes, before, before + length, blocks)
                parts.append(encode_count(semconv.BLOCK_SIZE, size))
                before += length
            if self.detail is BlockDetail.RUNS:
                parts.append(encode_count(semconv.BLOCK_COUNT, length))
            span = into.add()
            span.MergeFromString(b"".join(parts))
            span.span_id = ids[8 * index : 8 * index + 8]


_TIMING: Final = "transfer"
"""The only ``nixl.block.timing`` there is: a block's interval is its transfer's."""


def _share(total: int, before: int, after: int, blocks: int) -> int:
    """What the blocks from ``before`` to ``after`` have of the total, in whole units that add up to it."""
    return total * after // blocks - total * before // blocks
