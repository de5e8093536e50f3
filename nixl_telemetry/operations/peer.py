# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The other side of a handshake or transfer."""

import socket
from collections import OrderedDict
from typing import Final, NamedTuple

from nixl_telemetry.operations.errors import TEXT_LIMIT


class Peer(NamedTuple):
    """A peer instance."""

    engine_id: str
    host: str = ""
    port: int = 0


_PORT_DIGITS: Final = 5
NOBODY: Final = Peer("")
"""A peer of which nothing is known."""


class PeerBook:
    """Where the peers are, by engine id. Bounded: the peer that was met longest ago is forgotten."""

    LIMIT: Final = 4096

    def __init__(self) -> None:
        self._peers: OrderedDict[str, Peer] = OrderedDict()

    def meet(self, peer: Peer) -> None:
        """Remember a peer's address."""
        self._peers[peer.engine_id] = peer
        self._peers.move_to_end(peer.engine_id)
        if len(self._peers) > self.LIMIT:
            self._peers.popitem(last=False)

    def find(self, engine_id: str) -> Peer:
        """The peer, without an address if it was never met."""
        return self._peers.get(engine_id) or Peer(engine_id)

    def at(self, engine_id: object, host: object, port: object) -> Peer:
        """The peer as a client's request names it: with anything where its address should be."""
        known = self._peers.get(engine_id) if isinstance(engine_id, str) else None
        if known is not None and known.host == host and known.port == port:
            return known
        return Peer(str(engine_id)[:TEXT_LIMIT], str(host)[:TEXT_LIMIT], port_number(port))


def port_number(port: object) -> int:
    """A port as a client's request has it, a number or a text; 0 for whatever is none."""
    if isinstance(port, str) and port.isdecimal() and len(port) <= _PORT_DIGITS:
        port = int(port)
    return int(port) if isinstance(port, int) and 0 < port < 1 << 16 else 0


def is_listening(host: str, port: int, timeout_seconds: float) -> bool:
    """Whether anybody accepts connections there. Nothing is sent."""
    try:
        with socket.create_connection((host, port), timeout_seconds):
            return True
    except (OSError, OverflowError, ValueError):
        # Names that cannot be encoded are a ValueError.
        return False
