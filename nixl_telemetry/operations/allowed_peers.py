# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Who may talk: the setting ``allowed_peers``, for connections that are made and for those that come."""

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

from nixl_telemetry.signals.text import printable

Lookup: TypeAlias = Callable[[str], Sequence[str]]
"""The IPv4 and IPv6 addresses of a host name; raises ``OSError``."""

LOOKUP_SECONDS: Final = 2.0
"""What a handshake may wait for names to be looked up."""
_FRESH_SECONDS: Final = 30.0
"""How long the addresses of a name are taken for current."""
_RETRY_SECONDS: Final = 1.0
"""How soon an unknown address makes the names be looked up again."""
_LOOKUPS_LIMIT: Final = 8
"""Threads that look up names. A resolver that hangs cannot be stopped."""
_TEXT_LIMIT: Final = 256
"""Characters of a host, which comes from a client, and of the list, in a message."""


class PeerNotAllowedError(RuntimeError):
    """A request names a peer that is not on the list; the message says what to do."""


def addresses_of(name: str) -> Sequence[str]:
    """The addresses of a host name, from the system's resolver.

    Raises:
        OSError: There are none.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise OSError("no host name") from None
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class AllowedPeers:
    """The list. Any thread may ask.

    Args:
        entries: CIDRs, addresses and host names, valid ones.
        lookup: Finds the addresses of a name.
    """

    def __init__(self, entries: Iterable[str], lookup: Lookup = addresses_of) -> None:
        self._entries = tuple(entries)
        self._lookup = lookup
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        self._names: dict[str, frozenset[str]] = {}
        for entry in self._entries:
            try:
                self._networks.append(ipaddress.ip_network(entry))
            except ValueError:
                self._names[_canonical(entry)] = frozenset()
        self._lock = threading.Lock()
        self._refresh: threading.Thread | None = None
        self._refreshed = -_FRESH_SECONDS
        self._lookups = threading.BoundedSemaphore(_LOOKUPS_LIMIT)

    def admits(self, address: str) -> bool | None:
        """Whether connections from an address are answered. Never waits; ``None``: the names are being looked up."""
        ip = _ip(address)
        if ip is None:
            return False
        if self._has(ip):
            if time.monotonic() - self._refreshed > _FRESH_SECONDS:
                self._look_up_names()
            return True
        return None if self._names and self._look_up_names() else False

    def destination(self, host: str) -> str:
        """What to connect to instead of ``host``, which a request names: the host itself, or the address it has.

        May wait for :data:`LOOKUP_SECONDS` twice. A name that is not on the list is looked up here and nowhere else:
        it could have another address the next time.

        Raises:
            PeerNotAllowedError: It is not on the list, or that cannot be found out.
        """
        if _canonical(host) in self._names:
            return host
        ip = _ip(host)
        # As libzmq connects to a name: by IPv4.
        found = [host] if ip is not None else [found for found in self._found(host) if ":" not in found]
        if found and all(self._waits_for(address) for address in found):
            return found[0]
        raise PeerNotAllowedError(self._refusal(host, found if ip is None else []))

    def _has(self, ip: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
        if any(ip in network for network in self._networks):
            return True
        text = str(ip)
        return any(text in known for known in self._names.values())

    def _waits_for(self, address: str) -> bool:
        """As :meth:`admits`, and waits for names."""
        admitted = self.admits(address)
        if admitted is None:
            refresh = self._refresh
            if refresh is not None:
                refresh.join(LOOKUP_SECONDS)
            ip = _ip(address)
            admitted = ip is not None and self._has(ip)
        return admitted

    def _look_up_names(self) -> bool:
        """Have the names looked up, unless that was just done; false then."""
        with self._lock:
            if self._refresh is not None and self._refresh.is_alive():
                return True
            if time.monotonic() - self._refreshed < _RETRY_SECONDS:
                return False
            refresh = threading.Thread(target=self._look_up, name="nixl_telemetry_names", daemon=True)
            refresh.start()
            self._refresh = refresh
            return True

    def _look_up(self) -> None:
        for name in self._names:
            try:
                found = frozenset(str(ip) for ip in map(_ip, self._lookup(name)) if ip is not None)
            except OSError:
                # Those from before stay: a resolver that is down shall not part instances that know each other.
                continue
            self._names = {**self._names, name: found}
        self._refreshed = time.monotonic()

    def _found(self, name: str) -> Sequence[str]:
        """The addresses of a name that a request gave; none where that takes too long."""
        if not self._lookups.acquire(blocking=False):
            return []
        found: list[str] = []

        def look() -> None:
            try:
                found.extend(self._lookup(name))
            except OSError:
                pass
            finally:
                self._lookups.release()

        thread = threading.Thread(target=look, name="nixl_telemetry_name", daemon=True)
        thread.start()
        thread.join(LOOKUP_SECONDS)
        return list(found)

    def _refusal(self, host: str, found: Sequence[str]) -> str:
        shown = printable(host[:_TEXT_LIMIT])
        at = f" ({', '.join(found)})" if found else ""
        listed = ", ".join(self._entries)
        if len(listed) > _TEXT_LIMIT:
            listed = f"{listed[:_TEXT_LIMIT]}... ({len(self._entries)} entries)"
        return (
            f"nixl_telemetry: the peer '{shown}'{at} is not allowed. allowed_peers is {listed}. "
            "The host comes from kv_transfer_params of the request (remote_host). If it is one of your instances, add "
            "its address, network or name to the setting allowed_peers (NIXLTEL_ALLOWED_PEERS) of this instance."
        )


def _canonical(name: str) -> str:
    return name.rstrip(".").lower()


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address, as IPv4 where IPv6 only wraps it."""
    try:
        ip = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip
