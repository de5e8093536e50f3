# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans for the blocks of a transfer, encoded as OTLP directly.

A span of the SDK costs tens of microseconds to make and encode, and a transfer has up to thousands of blocks. The spans
of one transfer differ in an id and a few numbers only: what they share is encoded once.
"""

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import Attributes
from nixl_telemetry.signals.moves import Runs
from nixl_telemetry.signals.otlp import ExportedSpan, before_span, encode_count, encode_counts, encode_ids
from nixl_telemetry.signals.semconv import BlockDetail, SpanName


@dataclass(slots=True)
class BlockSpans:
    """Block spans of one transfer, ready to be encoded.

    Args:
        owner: The transfer's span: their parent, whose interval they have.
        runs: The blocks, or runs of blocks.
        sizes: Bytes of each, where they are known.
        detail: ``each`` or ``runs``.
        by_region: Whether a run's group is a region.
        attributes: Of each span.
    """

    owner: ExportedSpan
    runs: Runs
    sizes: Sequence[int | None]
    detail: BlockDetail
    by_region: bool
    attributes: Attributes

    def slices(self, length: int) -> Iterator["BlockSpans"]:
        """The same in parts of at most ``length`` spans."""
        if len(self.runs) <= length:
            yield self
            return
        for start in range(0, len(self.runs), length):
            part = slice(start, start + length)
            yield replace(self, runs=self.runs[part], sizes=self.sizes[part])

    def encode(self) -> bytes:
        """The spans, as fields of OTLP's ``ScopeSpans``."""
        attributes = {semconv.BLOCK_TIMING: _TIMING, **self.attributes}
        shared = self.owner.encode_children(SpanName.BLOCK, attributes)
        group_key = semconv.BLOCK_REGION if self.by_region else semconv.BLOCK_GROUP
        runs = self.runs
        columns = (
            encode_ids(len(runs)),
            encode_counts(semconv.BLOCK_LOCAL_ID, runs.local),
            encode_counts(semconv.BLOCK_REMOTE_ID, runs.remote),
            runs.groups,
            self.sizes,
            runs.lengths if self.detail is BlockDetail.RUNS else itertools.repeat(None, len(runs)),
        )
        begins: dict[int, bytes] = {}
        parts: list[bytes] = []
        for span_id, local, remote, group, block_bytes, length in zip(*columns, strict=True):
            # Most are of one group and one size.
            rest = _encode_rest(group_key, group, block_bytes, length)
            size = len(span_id) + len(local) + len(remote) + len(rest)
            begin = begins.get(size) or begins.setdefault(size, before_span(len(shared) + size) + shared)
            parts += (begin, span_id, local, remote, rest)
        return b"".join(parts)


def shares(size_bytes: int | None, lengths: Sequence[int]) -> Sequence[int | None]:
    """What runs of these lengths have of the bytes, in whole units that add up to all of them."""
    if size_bytes is None:
        return [None] * len(lengths)
    unit, rest = divmod(size_bytes, sum(lengths))
    if not rest:
        # Nearly always: a transfer's blocks are of one size.
        return [unit * length for length in lengths]
    ends = list(itertools.accumulate(lengths))
    until = [size_bytes * end // ends[-1] for end in ends]
    return list(map(operator.sub, until, [0, *until]))


@functools.lru_cache(1024)
def _encode_rest(group_key: str, group: int, size: int | None, count: int | None) -> bytes:
    """A span that has only these attributes, encoded."""
    numbers = {group_key: group, semconv.BLOCK_SIZE: size, semconv.BLOCK_COUNT: count}
    return b"".join(encode_count(name, number) for name, number in numbers.items() if number is not None)


_TIMING: Final = "transfer"
"""The only ``nixl.block.timing`` there is: a block's interval is its transfer's."""
