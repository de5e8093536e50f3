# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Addresses and ports that the instance will listen on."""

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from typing import Final

from nixl_telemetry.cli.doctor.finding import Finding, fine, note, problem, shown, warning
from nixl_telemetry.cli.doctor.subject import Subject

HOST: Final = "VLLM_NIXL_SIDE_CHANNEL_HOST"
PORT: Final = "VLLM_NIXL_SIDE_CHANNEL_PORT"
_API_PORT: Final = 8000
_LAST_PORT: Final = 65_535
_TRIED: Final = 512
_LISTED: Final = 8
_SET: Final = f"set {HOST} to an address of this host that peers reach, for example the pod's IP"


def side_channel_host(subject: Subject) -> Iterator[Finding]:
    """Where peers are told to connect to."""
    value = subject.environ.get(HOST)
    if value is None and subject.text("data_parallel_backend") == "ray":
        yield fine(f"{HOST} is unset, and Ray's data-parallel backend sets it")
        return
    host = value if value is not None else "localhost"
    named = f"{HOST} is {shown(value)}" if value is not None else f"{HOST} is unset, which is localhost"
    if not host or host != host.strip():
        yield problem(f"{named}: no address", _SET)
        return
    addresses = resolve(host)
    if not addresses:
        yield problem(f"{named}, a name that does not resolve here", _SET)
    elif any(address.is_unspecified for address in addresses):
        yield problem(f"{named}: peers are told to connect to it, and reach themselves", _SET)
    elif not any(address.is_loopback for address in addresses):
        yield fine(named)
    else:
        yield from _loopback(subject, named)


def _loopback(subject: Subject, named: str) -> Iterator[Finding]:
    remote = [peer for peer in subject.peers if resolve(peer) and not is_local(peer)]
    if remote:
        yield problem(f"{named}, and the peer {shown(remote[0])} is on another host: it cannot connect", _SET)
    elif subject.peers and all(map(is_local, subject.peers)):
        yield fine(f"{named}, and all peers are on this host")
    elif "KUBERNETES_SERVICE_HOST" in subject.environ:
        yield problem(f"{named}, and this is a Kubernetes pod: no other pod can connect", _SET)
    elif (subject.number("nnodes") or 1) > 1:
        yield problem(f"{named}, and the instance spans several nodes", _SET)
    else:
        yield warning(f"{named}: only peers on this host can connect", f"{_SET}, or name the peers with --peer")


def side_channel_ports(subject: Subject) -> Iterator[Finding]:
    """One free port for each data-parallel rank of this host."""
    ports = subject.ports
    if ports is None:
        yield problem(f"{PORT} is {shown(subject.environ.get(PORT))}: no port", "give a number from 1 to 65535")
        return
    if not ports:
        return
    last = ports[-1]
    ranks = f" for {len(ports)} data-parallel ranks ({PORT} plus the rank)" if len(ports) > 1 else ""
    named = f"side channel port {ports[0]}" if len(ports) == 1 else f"side channel ports {ports[0]} to {last}"
    if not 0 < ports[0] <= last <= _LAST_PORT:
        yield problem(f"{named}{ranks}: no ports", f"set {PORT} so that all are from 1 to 65535")
        return
    host = subject.environ.get(HOST, "localhost")
    failed = {port: why for port in ports[:_TRIED] if (why := not_free(host, port))}
    taken = [port for port, why in failed.items() if why == errno.EADDRINUSE]
    if taken:
        listed = ", ".join(map(str, taken[:_LISTED])) + (", …" if len(taken) > _LISTED else "")
        yield problem(
            f"{named}{ranks}: {listed} {'is' if len(taken) == 1 else 'are'} in use on {shown(host)}",
            f"set {PORT} to another port, or stop what listens there",
        )
    elif failed:
        port, why = next(iter(failed.items()))
        if why == errno.EADDRNOTAVAIL:
            yield problem(f"{HOST} is {shown(host)}, which is no address of this host: the listener cannot start", _SET)
        else:
            yield problem(
                f"{named}{ranks}: port {port} on {shown(host)} cannot be opened ({os.strerror(why)})",
                f"set {PORT} to a port that this user may open",
            )
    else:
        yield fine(f"{named}{ranks}: free on {shown(host)}")


def api_port(subject: Subject) -> Iterator[Finding]:
    """The port of the HTTP API, and that it is none of the side channels'."""
    if not subject.serving or subject.values.get("headless") or subject.text("uds"):
        return
    port = subject.number("port")
    port = _API_PORT if port is None else port
    host = subject.text("host") or "0.0.0.0"
    if not 0 <= port <= _LAST_PORT:
        yield problem(f"--port is {port}: no port", "give a number from 1 to 65535")
        return
    if subject.ports is not None and port in subject.ports:
        yield problem(
            f"--port {port} is also a side channel port of this instance", f"set --port or {PORT} to another port"
        )
    why = not_free(host, port)
    if why is None:
        yield fine(f"--port {port}: free on {shown(host)}")
    elif why == errno.EADDRINUSE:
        yield problem(f"--port {port} is in use on {shown(host)}", "give another --port, or stop what listens there")
    else:
        yield problem(
            f"--port {port} cannot be opened on {shown(host)} ({os.strerror(why)})", "give another --host or --port"
        )


def port_of_vllm(subject: Subject) -> Iterator[Finding]:
    """``VLLM_PORT``, which Kubernetes sets for a service that is called vllm."""
    value = subject.environ.get("VLLM_PORT")
    if value is None:
        return
    if "://" in value:
        yield problem(
            f"VLLM_PORT is {shown(value)}, as Kubernetes sets it for a service called vllm: vLLM does not start",
            "rename the service, or set enableServiceLinks: false in the pod",
        )
    elif not value.isdigit():
        yield problem(f"VLLM_PORT is {shown(value)}: no number, and vLLM does not start", "unset VLLM_PORT")
    else:
        yield note(f"VLLM_PORT is {value}: ports between vLLM's processes count from there; it is not the API's")


Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def resolve(host: str) -> list[Address]:
    """The addresses of a name; none where it does not resolve."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, ValueError):
        return []
    return list(dict.fromkeys(ipaddress.ip_address(str(info[4][0]).partition("%")[0]) for info in found))


def is_local(host: str) -> bool:
    """Whether a name leads to this host; one that does not resolve may be anywhere."""
    addresses = resolve(host)
    return bool(addresses) and all(address.is_loopback or _bindable(address) for address in addresses)


def _bindable(address: Address) -> bool:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6  # noqa: PLR2004
    with socket.socket(family, socket.SOCK_STREAM) as one:
        try:
            one.bind((str(address), 0))
        except OSError:
            return False
    return True


def not_free(host: str, port: int) -> int | None:
    """Why a port cannot be opened, as an errno; None: it can. It is closed again at once, and never listened on."""
    addresses = sorted(resolve(host), key=lambda address: address.version)
    if not addresses:
        return errno.EADDRNOTAVAIL
    family = socket.AF_INET if addresses[0].version == 4 else socket.AF_INET6  # noqa: PLR2004
    with socket.socket(family, socket.SOCK_STREAM) as one:
        # As servers do: a port that was in use a moment ago is free.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind((str(addresses[0]), port))
        except OSError as error:
            return error.errno or errno.EINVAL
    return None
