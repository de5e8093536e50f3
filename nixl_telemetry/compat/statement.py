# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What an instrumented instance says of itself in a handshake: one more field of vLLM's payload.

Stock peers ignore fields that they do not know. What arrives comes from the network: it is bounded, checked against the
hash that it claims to explain, and otherwise ignored.
"""

import json
import re
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from nixl_telemetry.compat.factors import digest

FIELD: Final = "nixl_telemetry"
"""Name of the field in the handshake payload."""
VERSION: Final = 1
"""Version of the statement. Another one is not understood."""
ABSENT: Final = b"\xc0"
"""The encoded field of a payload without a statement: nil."""

_SIZE_LIMIT: Final = 65_536
_DEPTH_LIMIT: Final = 8
_FACTOR_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,63}")
"""Also of factors that a later vLLM has: they become names of attributes."""
_Text = Annotated[str, Meta(max_length=256)]
_Size = Annotated[int, Meta(ge=0, le=2**48)]


class StatementError(ValueError):
    """A statement that is broken, hostile, or of another version."""


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """What vLLM checks at run time and does not hash. ``None`` where it is not known."""

    tp_size: _Size | None = None
    """Tensor-parallel ranks."""
    pp_size: _Size | None = None
    """Pipeline-parallel ranks."""
    dcp_size: _Size | None = None
    """Decode-context-parallel ranks."""
    pcp_size: _Size | None = None
    """Prefill-context-parallel ranks."""
    block_size: _Size | None = None
    """Tokens of a block, as NIXL addresses it."""
    kv_cache_layout: _Text | None = None
    """Order of the dimensions of the KV cache, as vLLM calls it."""
    block_lens: Annotated[tuple[_Size, ...], Meta(max_length=1024)] | None = None
    """Bytes of a block in each region of one rank; a run of equal ones is given once."""
    num_regions: _Size | None = None
    """Regions of one rank."""


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance says of itself."""

    version: int
    factors: Annotated[dict[_Text, Any], Meta(max_length=64)]
    """What it has hashed."""
    nixl_version: _Text
    telemetry_version: _Text
    kv_role: _Text
    engine_id: _Text
    geometry: Geometry
    model_revision: _Text | None = None
    """Revision of the model, where the instance was started with one; neither hashed nor checked by vLLM."""


def encode(statement: Statement) -> bytes:
    """The field's value, as MessagePack.

    Raises:
        StatementError: Peers would not take it.
    """
    data = msgspec.msgpack.encode(statement)
    decode(data, digest(statement.factors))
    return data


def decode(data: bytes, compat_hash: str) -> Statement | None:
    """Read what a peer said; ``None`` if it said nothing.

    Args:
        data: The field's value, as MessagePack.
        compat_hash: The hash that came with it.

    Raises:
        StatementError: It cannot be understood, or does not explain the hash.
    """
    if data in (b"", ABSENT):
        return None
    if len(data) > _SIZE_LIMIT:
        raise StatementError(f"a statement of {len(data)} bytes is larger than {_SIZE_LIMIT}")
    try:
        version = _VERSION_ONLY.decode(data).version
        if version != VERSION:
            raise StatementError(f"a statement of version {version}, not {VERSION}")
        statement = _STATEMENT.decode(data)
        if not all(map(_FACTOR_NAME.fullmatch, statement.factors)) or _nests(statement.factors, _DEPTH_LIMIT):
            raise StatementError("a statement with factors that are none")
        # Nor numbers that JSON does not have: what is read from our files could not be read back.
        json.dumps(statement.factors, allow_nan=False)
        explains = digest(statement.factors) == compat_hash
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, StatementError):
            raise
        raise StatementError(f"a statement that cannot be read: {type(error).__name__}") from None
    if not explains:
        raise StatementError("a statement whose factors do not give the hash that came with it")
    return statement


def _nests(value: Any, levels: int) -> bool:
    """Whether it is nested more deeply."""
    if not isinstance(value, dict | list):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_nests(item, levels - 1) for item in inside)


class _VersionOnly(msgspec.Struct):
    version: int


_VERSION_ONLY: Final = msgspec.msgpack.Decoder(_VersionOnly)
_STATEMENT: Final = msgspec.msgpack.Decoder(Statement)
