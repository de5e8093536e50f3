# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What is known of the peers: hosts (``--peer``) and configs (``--peer-config``)."""

from collections.abc import Iterator

from nixl_telemetry.cli.doctor.checks.network import resolve
from nixl_telemetry.cli.doctor.finding import Finding, fine, problem, shown, warning
from nixl_telemetry.cli.doctor.subject import Connector, Subject


def peer_hosts(subject: Subject) -> Iterator[Finding]:
    """Names that resolve."""
    for peer in subject.peers:
        if resolve(peer):
            yield fine(f"the peer {shown(peer)} resolves")
        else:
            yield warning(f"the peer {shown(peer)} does not resolve here", "correct --peer, or this host's DNS")


def peer_modes(subject: Subject) -> Iterator[Finding]:
    """Push and pull never pair."""
    for mine, theirs in _pairs(subject):
        if mine.mode == theirs.mode:
            yield fine(f"this instance and the peer are both in {mine.mode} mode")
        else:
            yield problem(
                f"kv_connector is {mine.name} ({mine.mode}) here and {theirs.name} ({theirs.mode}) at the peer: the "
                "handshake is refused, since the transfer mode is hashed",
                "use the same mode on both sides; NixlConnector is pull",
            )


def peer_roles(subject: Subject) -> Iterator[Finding]:
    """Two of the same role exchange nothing."""
    for mine, theirs in _pairs(subject):
        role, other = mine.config.get("kv_role"), theirs.config.get("kv_role")
        if role == other and role in {"kv_producer", "kv_consumer"}:
            yield problem(
                f"kv_role is {role} here and at the peer: nothing is exchanged",
                "make prefill kv_producer and decode kv_consumer, or both kv_both",
            )


def _pairs(subject: Subject) -> Iterator[tuple[Connector, Connector]]:
    for config in subject.peer_configs:
        other = Subject(environ={}, transfer=config).nixl
        if subject.nixl and other:
            yield subject.nixl[0], other[0]
