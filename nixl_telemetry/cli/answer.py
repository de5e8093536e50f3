# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What a rank answered on the side channel, read as input from a stranger: bounded, by key, and each key for itself."""

import itertools
from dataclasses import dataclass
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta

from nixl_telemetry.compat.instance import Rank
from nixl_telemetry.compat.statement import ABSENT, Geometry, Statement, StatementError, decode

_REGIONS: Final = 1024
"""Different lengths of blocks that a geometry holds."""
_NIL: Final = msgspec.Raw(ABSENT)

_Text = Annotated[str, Meta(max_length=256)]
_Size = Annotated[int, Meta(ge=0, le=2**48)]
_Lengths = Annotated[list[_Size], Meta(max_length=65_536)]
_Value = TypeVar("_Value")


class AnswerError(ValueError):
    """An answer that is no handshake payload; the message follows the name of who sent it."""


@dataclass(frozen=True)
class Answer:
    """What one rank said."""

    compat_hash: str
    statement: Statement | None
    """What an instrumented instance says of itself."""
    disbelief: str | None
    """Why what it says of itself is not believed."""
    engine_id: str | None
    attn_backend_name: str | None
    num_blocks: int | None
    geometry: Geometry

    def rank(self, pp: int, tp: int) -> Rank:
        """The same, as the rank of an instance."""
        return Rank(
            pp_rank=pp,
            tp_rank=tp,
            compat_hash=self.compat_hash,
            engine_id=self.engine_id,
            attn_backend_name=self.attn_backend_name,
            num_blocks=self.num_blocks,
            geometry=self.geometry,
        )


class _Payload(msgspec.Struct):
    compatibility_hash: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
    agent_metadata_bytes: bytes = b""
    nixl_telemetry: msgspec.Raw = _NIL


class _Metadata(msgspec.Struct):
    """``NixlAgentMetadata``, of which every version has other fields: what is not there or odd is left out."""

    engine_id: msgspec.Raw = _NIL
    attn_backend_name: msgspec.Raw = _NIL
    num_blocks: msgspec.Raw = _NIL
    block_lens: msgspec.Raw = _NIL
    block_size: msgspec.Raw = _NIL
    kv_cache_layout: msgspec.Raw = _NIL
    dcp_size: msgspec.Raw = _NIL
    pcp_size: msgspec.Raw = _NIL


def read(data: bytes) -> Answer:
    """Read a handshake payload.

    Raises:
        AnswerError: It is none.
    """
    try:
        payload = msgspec.msgpack.decode(data, type=_Payload)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        problem = str(error) if isinstance(error, msgspec.ValidationError) else f"undecodable: {type(error).__name__}"
        raise AnswerError(f"answered what is no handshake payload ({problem})") from None
    statement, disbelief = None, None
    try:
        statement = decode(bytes(payload.nixl_telemetry), payload.compatibility_hash)
    except StatementError as error:
        disbelief = str(error)
    try:
        metadata = msgspec.msgpack.decode(payload.agent_metadata_bytes, type=_Metadata)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        metadata = _Metadata()
    lengths = _value(metadata.block_lens, _Lengths)
    runs = tuple(length for length, _ in itertools.groupby(lengths)) if lengths is not None else None
    return Answer(
        compat_hash=payload.compatibility_hash,
        statement=statement,
        disbelief=disbelief,
        engine_id=_value(metadata.engine_id, _Text),
        attn_backend_name=_value(metadata.attn_backend_name, _Text),
        num_blocks=_value(metadata.num_blocks, _Size),
        geometry=Geometry(
            dcp_size=_value(metadata.dcp_size, _Size),
            pcp_size=_value(metadata.pcp_size, _Size),
            block_size=_value(metadata.block_size, _Size),
            kv_cache_layout=_value(metadata.kv_cache_layout, _Text),
            block_lens=runs if runs is not None and len(runs) <= _REGIONS else None,
            num_regions=None if lengths is None else len(lengths),
        ),
    )


def _value(raw: msgspec.Raw, kind: type[_Value]) -> _Value | None:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
