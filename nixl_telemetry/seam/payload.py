# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""vLLM's handshake payload with one more field: what this instance says of itself.

The class takes the place of stock's in the namespace of ``base_worker``, which makes the payload that is served and
decodes those of peers. Decoding is also the only sign that an answer has come: the handshake is one long method without
a call between the answer and the comparison of hashes, but msgspec runs ``__post_init__`` after decoding, on the thread
that shakes hands.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload

import nixl_telemetry
from nixl_telemetry.compat.factors import Factors
from nixl_telemetry.compat.statement import VERSION, Geometry, Statement, encode
from nixl_telemetry.seam.versions import nixl_version


@dataclass
class Payload(NixlHandshakePayload):
    """Stock's handshake payload, field for field, and ours."""

    # Not decoded with the rest: what is wrong with it must not fail the handshake. The default goes out as nil; with a
    # default factory, msgspec 0.23 decodes no Raw.
    nixl_telemetry: msgspec.Raw = None  # type: ignore[assignment]

    on_made: ClassVar[Callable[[str, bytes], None] | None] = None
    """Called with the hash and the encoded statement (empty: none) of each payload that is made or decoded."""

    def __post_init__(self) -> None:
        if Payload.on_made is not None:
            Payload.on_made(self.compatibility_hash, bytes(self.nixl_telemetry or b""))


def install(on_made: Callable[[str, bytes], None]) -> None:
    """Make vLLM use the payload, in this process."""
    Payload.on_made = staticmethod(on_made)
    base_worker.NixlHandshakePayload = Payload


def statement_of(worker: Any, factors: Factors) -> Statement:
    """What a worker says of itself, once its KV caches are registered.

    Where a version lacks an attribute, the size is left out.
    """
    parallel = worker.vllm_config.parallel_config
    staged = getattr(worker, "use_host_buffer", False)
    layout = getattr(worker, "host_buffer_kv_cache_layout" if staged else "kv_cache_layout", None)
    return Statement(
        version=VERSION,
        factors=dict(factors),
        nixl_version=nixl_version(),
        telemetry_version=nixl_telemetry.__version__,
        kv_role=str(worker.kv_transfer_config.kv_role),
        engine_id=str(worker.engine_id),
        geometry=Geometry(
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
            dcp_size=getattr(parallel, "decode_context_parallel_size", None),
            pcp_size=getattr(parallel, "prefill_context_parallel_size", None),
            block_size=worker.block_size,
            kv_cache_layout=None if layout is None else str(layout),
            block_lens=tuple(length for length, _ in itertools.groupby(worker.block_len_per_layer)),
            num_regions=len(worker.block_len_per_layer),
        ),
        model_revision=worker.vllm_config.model_config.revision,
    )


def add_statement(worker: Any, statement: Statement) -> None:
    """Put a statement into the payload that a worker serves."""
    payload = worker.xfer_handshake_metadata
    if isinstance(payload, Payload):
        payload.nixl_telemetry = msgspec.Raw(encode(statement))
