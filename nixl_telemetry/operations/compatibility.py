# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What this instance can say of a peer's compatibility: what the peer told, what differs, and what the hash misses."""

import threading
from collections import deque
from typing import Any, Final

from nixl_telemetry.compat.domain import Domain
from nixl_telemetry.compat.explanation import Explanation, explain
from nixl_telemetry.compat.factors import TEXT_LIMIT, Factors, value_text
from nixl_telemetry.compat.geometry import GeometryDifference, geometry_differences
from nixl_telemetry.compat.recovery import Recovery
from nixl_telemetry.compat.statement import Statement, StatementError, decode
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.signals.catalogue import TELEMETRY_ERRORS
from nixl_telemetry.signals.semconv import Signal
from nixl_telemetry.signals.telemetry import Telemetry
from nixl_telemetry.signals.text import printable

_SEARCH_SECONDS: Final = 0.1
"""CPU time for a digest, once for each that is new: all single factors and pairs, and some triples."""

_TOLD_LIMIT: Final = 256
"""Peers whose factors may wait to be learnt from."""

_PEER_ROLES: Final = {"kv_consumer": "prefill", "kv_producer": "decode"}


def factor_attribute(value: Any) -> str | bool | int | float:
    """A factor's value as a span attribute: JSON for what is neither text, number nor boolean."""
    if isinstance(value, str):
        return value[:TEXT_LIMIT]
    return value if isinstance(value, bool | int | float) else value_text(value)


class Compatibility:
    """Judges peers. Used by the threads that shake hands and by the export thread.

    Args:
        telemetry: Where what goes wrong is counted.
        compat_hash: This instance's hash.
        enforced: Whether a differing hash rejects a peer.
        kv_role: vLLM's ``kv_role`` of this instance.
        factors: This instance's factors; ``None`` where they could not be seen.
        statement: What this instance tells its peers; ``None`` where it cannot be made.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        compat_hash: str,
        enforced: bool,
        kv_role: str = "",
        factors: Factors | None = None,
        statement: Statement | None = None,
    ) -> None:
        self._telemetry: Final = telemetry
        self.compat_hash: Final = compat_hash
        self.enforced: Final = enforced
        self.factors: Final = factors
        self._statement: Final = statement
        self._peer_role: Final = _PEER_ROLES.get(kv_role, "peer")
        self._domain: Final = Domain()
        self._recovery: Final = Recovery(factors, self._domain) if factors is not None else None
        self._told: Final[deque[Factors]] = deque(maxlen=_TOLD_LIMIT)
        self._searching: Final = threading.Lock()

    def read(self, remote_hash: str, encoded: bytes) -> Statement | None:
        """What a peer told of itself; ``None`` if that is nothing, or nothing that can be trusted."""
        try:
            statement = decode(encoded, remote_hash)
        except StatementError as error:
            self._telemetry.record(TELEMETRY_ERRORS, Signal.EXCHANGE)
            self._telemetry.warn_once(
                "statement", "a peer told of itself what cannot be used, and is treated as a stock one: %s", error
            )
            return None
        if statement is not None:
            # Learnt when a search needs it: searches hold the lock for long, and a good handshake must not wait.
            self._told.append(statement.factors)
        return statement

    def explain(self, remote_hash: str, statement: Statement | None) -> Explanation:
        """What differs from a peer whose hash differs; 0.1 s of CPU time at most, and none for a hash met before."""
        if statement is not None:
            return explain(self.factors, remote_hash, statement.factors, None, 0)
        with self._searching:
            while self._told:
                self._domain.learn(self._told.popleft())
            return explain(self.factors, remote_hash, None, self._recovery, _SEARCH_SECONDS)

    def uncovered(self, statement: Statement) -> tuple[GeometryDifference, ...]:
        """What differs from a peer and is not covered by the hash."""
        mine = self._statement
        if mine is None:
            return ()
        revisions = mine.model_revision, statement.model_revision
        same = self.factors if statement.factors == self.factors else None
        return geometry_differences(mine.geometry, statement.geometry, revisions, same)

    def sentence(self, peer: Peer, explanation: Explanation) -> str:
        """The explanation, for the first line of an exception."""
        return printable(f"{self._peer_role} {peer.host}:{peer.port} is incompatible: {explanation.text()}")
