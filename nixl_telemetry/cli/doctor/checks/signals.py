# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Where spans, log lines, metrics and audit records go."""

import logging
import os
import shutil
import socket
import stat
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from nixl_telemetry.cli.doctor.finding import Finding, fine, note, problem, shown, shown_url, warning
from nixl_telemetry.cli.doctor.subject import Subject

_TRACES: Final = "OTEL_EXPORTER_OTLP_TRACES_"
_ALL: Final = "OTEL_EXPORTER_OTLP_"
_GRPC_PORT: Final = 4317
_HTTP_PORT: Final = 4318
_PATH: Final = "/v1/traces"
_SAMPLERS: Final = (
    "parentbased_traceidratio",
    "parentbased_always_on",
    "parentbased_always_off",
    "traceidratio",
    "always_on",
    "always_off",
)
_EXPORTER: Final = "OTEL_TRACES_EXPORTER"
_OTLP: Final = {"otlp": None, "otlp_proto_grpc": "grpc", "otlp_proto_http": "http/protobuf"}
"""Exporters by name, with the protocol that the name says."""
_NETWORK_FILES: Final = ("nfs", "cifs", "smb", "ceph", "lustre", "fuse", "9p", "gpfs", "beegfs", "efs")


def traces(subject: Subject) -> Iterator[Finding]:
    """Somewhere for spans to go."""
    if not subject.settings.enabled:
        return
    if not subject.settings.traces:
        if subject.settings.trace_file:
            yield warning("traces is false: nothing is written to trace_file", "set traces to true, or drop trace_file")
    elif _endpoint(subject) is None and not subject.settings.trace_file:
        yield note(
            "spans go nowhere: no OTLP endpoint and no trace_file",
            "give --otlp-traces-endpoint or OTEL_EXPORTER_OTLP_ENDPOINT, or NIXLTEL_TRACE_FILE",
        )


def exporter(subject: Subject) -> Iterator[Finding]:
    """Variables that say against the endpoint."""
    found = _endpoint(subject)
    if found is None or not subject.settings.traces:
        return
    named, endpoint = found
    if subject.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        yield problem(f"OTEL_SDK_DISABLED is true: no spans go to {named}", "unset OTEL_SDK_DISABLED")
    if _exporter_name(subject) is None:
        wanted = subject.environ.get(_EXPORTER, "")
        yield problem(f"{_EXPORTER} is {shown(wanted)}: no spans go to {named}", f"unset {_EXPORTER}")
    variable, protocol = _protocol(subject)
    if protocol not in {"grpc", "http/protobuf"}:
        yield warning(
            f"{variable} is {shown(protocol)}, which is taken for http/protobuf", "write grpc or http/protobuf"
        )
    if subject.text("otlp_traces_endpoint"):
        yield from _not_read(subject, endpoint)
    elif variable == _EXPORTER and (overruled := _protocol_variable(subject)) and overruled[1] != protocol:
        yield warning(
            f"{overruled[0]} is {shown(overruled[1])}, and {_EXPORTER} says {protocol}, which is spoken",
            f"unset {overruled[0]}, or set {_EXPORTER}=otlp",
        )


def _not_read(subject: Subject, endpoint: str) -> Iterator[Finding]:
    """What would choose another protocol than gRPC, but not for vLLM's endpoint."""
    if f"{_TRACES}PROTOCOL" in subject.environ:
        return
    variable, value = _EXPORTER, subject.environ.get(_EXPORTER)
    protocol = _OTLP.get(_exporter_name(subject) or "otlp")
    if protocol is None:
        variable = f"{_ALL}PROTOCOL"
        protocol = value = subject.environ.get(variable)
    if protocol and protocol != "grpc":
        yield problem(
            f"{variable} is {shown(value)}, which is not read for --otlp-traces-endpoint {shown_url(endpoint)}: "
            "vLLM and the suite speak gRPC there",
            f"set {_TRACES}PROTOCOL={protocol[:40]}",
        )


def sampler(subject: Subject) -> Iterator[Finding]:
    """The sampler is one, with an argument that it takes: OpenTelemetry exports everything where it is not."""
    if "OTEL_TRACES_SAMPLER" not in subject.environ or not subject.settings.traces:
        return
    name = subject.environ["OTEL_TRACES_SAMPLER"].lower()
    if name not in _SAMPLERS:
        yield problem(
            f"OTEL_TRACES_SAMPLER is {shown(name)}, no sampler: each trace is sampled unless its caller says otherwise",
            f"write one of {', '.join(_SAMPLERS)}",
        )
    if name.endswith("traceidratio"):
        ratio = subject.environ.get("OTEL_TRACES_SAMPLER_ARG", "")
        try:
            is_ratio = 0 <= float(ratio) <= 1
        except ValueError:
            is_ratio = False
        if not is_ratio:
            yield problem(
                f"OTEL_TRACES_SAMPLER_ARG is {shown(ratio)}, and {name} takes a fraction from 0 to 1: every trace is "
                "sampled unless its caller says otherwise",
                "write 0.05 for 5 %",
            )


def endpoint(subject: Subject) -> Iterator[Finding]:
    """The endpoint is one of its protocol, and something listens there."""
    found = _endpoint(subject)
    if found is None or not subject.settings.traces:
        return
    named, url = found
    _, protocol = _protocol(subject)
    grpc = protocol == "grpc"
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"//{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port, parts = None, None, urllib.parse.urlsplit("")
    if not host or port == 0 or parts.scheme not in {"", "http", "https"}:
        yield problem(f"{named} is no URL of a collector", "write http://HOST:4317 (gRPC) or http://HOST:4318 (HTTP)")
        return
    if not parts.scheme and not grpc:
        yield problem(
            f"{named} has no scheme, and the protocol is {shown(protocol)}", "write http:// or https:// before it"
        )
    elif not parts.scheme and not subject.text("otlp_traces_endpoint"):
        yield warning(
            f"{named} has no scheme: gRPC with TLS is spoken there", "write http:// before it for one without TLS"
        )
    port = port or (443 if parts.scheme == "https" else 80 if parts.scheme == "http" and not grpc else _GRPC_PORT)
    if grpc and port == _HTTP_PORT:
        yield problem(
            f"{named} has port 4318, that of OTLP over HTTP, and the protocol is gRPC",
            f"write port 4317, or {_choose(subject, 'http/protobuf')}",
        )
    elif not grpc and port == _GRPC_PORT:
        yield problem(
            f"{named} has port 4317, that of gRPC, and the protocol is {shown(protocol)}",
            f"write port 4318, or {_choose(subject, 'grpc')}",
        )
    if grpc and parts.path.strip("/"):
        yield warning(f"{named} has a path, and gRPC has none", f"remove it, or {_choose(subject, 'http/protobuf')}")
    elif not grpc and not named.startswith(f"{_ALL}ENDPOINT") and not parts.path.strip("/"):
        yield warning(f"{named} has no path: spans are posted to / there", f"write {_PATH} after it")
    yield _connected(subject, named, host, port)


def _connected(subject: Subject, named: str, host: str, port: int) -> Finding:
    try:
        with socket.create_connection((host, port), timeout=subject.seconds):
            return fine(f"{named}: something listens there")
    except TimeoutError:
        reason = f"does not answer in {subject.seconds:g} s"
    except socket.gaierror:
        reason = "does not resolve"
    except (OSError, UnicodeError, ValueError) as error:
        reason = f"cannot be reached ({getattr(error, 'strerror', None) or type(error).__name__})"
    return problem(
        f"{named}: {host[:100]} port {port} {reason}: spans are lost, and counted in nixl_telemetry_dropped_total",
        "start the collector, or correct the endpoint",
    )


def trace_file(subject: Subject) -> Iterator[Finding]:
    """``trace_file`` can be written."""
    path = subject.settings.trace_file
    if path is None or not subject.settings.traces:
        return
    file = Path(path)
    if _true(file.is_dir):
        yield problem(f"trace_file is {shown(path)}, a folder", "give the name of a file in it")
    elif _true(file.exists) and not os.access(file, os.W_OK):
        yield problem(f"trace_file {shown(path)} cannot be written", "give another file, or change its permissions")
    elif reason := _unwritable(file.parent):
        yield problem(f"trace_file is {shown(path)}: {reason}", "give a file in a folder that the server may write")
    else:
        yield fine(f"trace_file {shown(path)} can be written")
        yield from _space(
            f"trace_file {shown(path)}",
            file.parent,
            subject.settings.trace_file_max_bytes * subject.settings.trace_file_count,
        )
    if not file.is_absolute():
        yield note(f"trace_file {shown(path)} is relative to the folder in which the server starts")


def log_level(subject: Subject) -> Iterator[Finding]:
    """Warnings of the suite come through vLLM's log."""
    level = subject.environ.get("VLLM_LOGGING_LEVEL", "INFO").upper()
    number = logging.getLevelNamesMapping().get(level)
    if number is None:
        yield problem(
            f"VLLM_LOGGING_LEVEL is {shown(level)}, no level: vLLM does not start", "write DEBUG, INFO or WARNING"
        )
    elif number > logging.WARNING:
        yield warning(
            f"VLLM_LOGGING_LEVEL is {level}: warnings are hidden, of the suite and of vLLM", "write INFO, its default"
        )
    elif number > logging.INFO:
        yield note(f"VLLM_LOGGING_LEVEL is {level}: handshakes that succeed are not logged")
    else:
        yield fine(f"VLLM_LOGGING_LEVEL is {level}")
    path = subject.environ.get("VLLM_LOGGING_CONFIG_PATH")
    configured = subject.environ.get("VLLM_CONFIGURE_LOGGING", "1")
    if configured.strip() == "0":
        yield warning(
            "VLLM_CONFIGURE_LOGGING is 0: vLLM sets up no logging, and what is below a warning is not printed",
            "unset it, or set up the logger vllm yourself",
        )
    elif not configured.strip().isdigit():
        yield problem(f"VLLM_CONFIGURE_LOGGING is {shown(configured)}: vLLM does not start", "write 0 or 1")
    if path and not _true(Path(path).is_file):
        yield problem(f"VLLM_LOGGING_CONFIG_PATH is {shown(path)}, no file: vLLM does not start", "correct or unset it")


def audit_folder(subject: Subject) -> Iterator[Finding]:
    """``audit_dir`` can be written."""
    path = subject.settings.audit_dir
    if path is None:
        return
    if reason := _unwritable(Path(path)):
        yield problem(f"audit_dir is {shown(path)}: {reason}", "give a folder that the server may write")
    else:
        yield fine(f"audit_dir {shown(path)} can be written")
        yield from _space(f"audit_dir {shown(path)}", Path(path), subject.settings.audit_max_file_bytes)


def audit_key(subject: Subject) -> Iterator[Finding]:
    """``audit_key_file`` holds a key, which only its owner reads."""
    from nixl_telemetry.audit.chain import AuditKeyError, read_key

    path = subject.settings.audit_key_file
    if subject.settings.audit_dir is None:
        if path is not None:
            yield warning("audit_key_file is set and audit_dir is not: there is no audit trail", "set audit_dir")
        return
    if path is None:
        yield note("audit_key_file is not set: whoever may write the audit trail can make a new chain for it")
        return
    try:
        # What is no file could be a pipe, and wait.
        reason = None if _true(Path(path).is_file) and read_key(path) else f"{path[:200]} is no file here"
    except AuditKeyError as error:
        reason = str(error)
    if reason is not None:
        yield problem(
            f"audit_key_file holds no key: {reason.rstrip('.')}",
            "make one: head -c 32 /dev/urandom > FILE; chmod 400 FILE",
        )
        return
    if stat.S_IMODE(Path(path).stat().st_mode) & (stat.S_IRWXO | stat.S_IWGRP):
        yield warning(f"audit_key_file {shown(path)} may be read or written by others", f"chmod 400 {path[:100]}")
    else:
        yield fine(f"audit_key_file {shown(path)} holds a key")


def prometheus_folder(subject: Subject) -> Iterator[Finding]:
    """``PROMETHEUS_MULTIPROC_DIR``, which vLLM sets itself where there are several API servers."""
    path = subject.environ.get("PROMETHEUS_MULTIPROC_DIR")
    servers = subject.number("api_server_count") or 1
    if path is None:
        if servers > 1:
            yield fine(f"{servers} API servers: vLLM makes a folder for their metrics")
        return
    folder = Path(path)
    if not _true(folder.is_dir):
        yield problem(
            f"PROMETHEUS_MULTIPROC_DIR is {shown(path)}, no folder: there are no metrics",
            "make the folder, or unset it",
        )
        return
    if not os.access(folder, os.W_OK | os.X_OK):
        yield problem(
            f"PROMETHEUS_MULTIPROC_DIR is {shown(path)}, which cannot be written", "give another folder, or unset it"
        )
    if any(folder.glob("*.db")):
        yield warning(
            f"PROMETHEUS_MULTIPROC_DIR {shown(path)} has metrics of an earlier start, which are added to the new ones",
            "empty it before each start, or unset it: vLLM makes a folder of its own",
        )
    kind = _file_system(folder)
    if kind.startswith(_NETWORK_FILES):
        yield warning(
            f"PROMETHEUS_MULTIPROC_DIR {shown(path)} is on {kind}: /metrics may fail there (vllm#49983)",
            "give a folder on a local disk or in memory, or unset it",
        )


def _endpoint(subject: Subject) -> tuple[str, str] | None:
    """Where spans go as the suite decides it, and how to name it."""
    if url := subject.text("otlp_traces_endpoint"):
        return f"--otlp-traces-endpoint {shown_url(url)}", url
    for variable in (f"{_TRACES}ENDPOINT", f"{_ALL}ENDPOINT"):
        if url := subject.environ.get(variable):
            return f"{variable} {shown_url(url)}", url
    return None


def _exporter_name(subject: Subject) -> str | None:
    """The exporter that is asked for, as the suite decides it."""
    names = (name.strip() for name in (subject.environ.get(_EXPORTER) or "otlp").split(","))
    return next((name for name in names if name in _OTLP), None)


def _protocol(subject: Subject) -> tuple[str, str]:
    """The protocol as the suite decides it, and the variable that says it."""
    specific = f"{_TRACES}PROTOCOL"
    if subject.text("otlp_traces_endpoint"):
        return specific, subject.environ.get(specific, "grpc")
    if named := _OTLP.get(_exporter_name(subject) or "otlp"):
        return _EXPORTER, named
    return _protocol_variable(subject) or (specific, "grpc")


def _protocol_variable(subject: Subject) -> tuple[str, str] | None:
    """The variable of a protocol that is read where no exporter's name says one."""
    for variable in (f"{_TRACES}PROTOCOL", f"{_ALL}PROTOCOL"):
        if value := subject.environ.get(variable):
            return variable, value.strip()
    return None


def _choose(subject: Subject, protocol: str) -> str:
    """How to get another protocol."""
    if _protocol(subject)[0] == _EXPORTER:
        return f"set {_EXPORTER}=" + {"grpc": "otlp_proto_grpc"}.get(protocol, "otlp_proto_http")
    return f"set {_TRACES}PROTOCOL={protocol}"


def _unwritable(folder: Path) -> str | None:
    """Why nothing can be written in a folder, which is made if missing."""
    place = _existing(folder)
    if not _true(place.is_dir):
        return f"{str(place)[:200]} is no folder"
    if not os.access(place, os.W_OK | os.X_OK):
        made = "" if place == folder.absolute() else ", so that the folder cannot be made"
        return f"{str(place)[:200]} cannot be written{made}"
    return None


def _true(ask: Callable[[], bool]) -> bool:
    """The answer of a path; what is in a folder that may not be entered is not there."""
    try:
        return ask()
    except OSError:
        return False


def _existing(folder: Path) -> Path:
    """The folder, or what would hold it."""
    place = folder.absolute()
    while not _true(place.exists) and place != place.parent:
        place = place.parent
    return place


def _space(named: str, folder: Path, needed: int) -> Iterator[Finding]:
    free = shutil.disk_usage(_existing(folder)).free
    if free < needed:
        yield warning(
            f"{named}: {free // 2**20:,} MiB are free there, and it may take {needed // 2**20:,} MiB",
            "make room, or give another folder",
        )


def _file_system(folder: Path) -> str:
    """The type of the file system; empty where it cannot be told."""
    try:
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        return ""
    real = folder.resolve()
    found = [(len(words[1]), words[2]) for words in mounts if len(words) > 2 and real.is_relative_to(words[1])]  # noqa: PLR2004
    return max(found, default=(0, ""))[1]
