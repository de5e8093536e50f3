# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``doctor``: each planted mistake is found and named with what to do, and a good config is quiet."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from typer.testing import Result

from nixl_telemetry.cli.doctor import command, process
from nixl_telemetry.cli.doctor.arguments import read
from nixl_telemetry.cli.doctor.checks import CHECKS, Check, environment, network
from nixl_telemetry.cli.doctor.command import doctor
from nixl_telemetry.cli.doctor.examine import examine
from nixl_telemetry.cli.doctor.finding import Finding, Level, fine, shown, shown_url
from nixl_telemetry.cli.doctor.subject import Subject, VllmInstalled
from nixl_telemetry.testbed.ports import PortReservation
from tests.support.commands import refused, run

GOOD: Final[dict[str, Any]] = {
    "kv_connector": "NixlConnector",
    "kv_connector_module_path": "nixl_telemetry.connectors",
    "kv_role": "kv_both",
    "kv_buffer_device": "cuda",
}
OURS: Final = ("VLLM_", "NIXL", "OTEL_", "PROMETHEUS_", "KUBERNETES_")

# --------------------------------------------------------------------------------------------------------- The patient


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine with a vLLM that is there to be looked at only, and no variables."""
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)
    vllm = tmp_path / "vllm"
    factory = vllm / "distributed/kv_transfer/kv_connector/factory.py"
    factory.parent.mkdir(parents=True)
    names = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MultiConnector", "OffloadingConnector")
    factory.write_text("\n".join(f'register_connector(\n    "{name}",' for name in names))
    known = ["LOGGING_LEVEL", "CONFIGURE_LOGGING", "LOGGING_CONFIG_PATH", "API_KEY"]
    known += ["NIXL_SIDE_CHANNEL_HOST", "NIXL_SIDE_CHANNEL_PORT"]
    (vllm / "envs.py").write_text("\n".join(f'    "VLLM_{name}": lambda: None,' for name in known))
    monkeypatch.setattr(command, "installed_vllm", lambda: VllmInstalled(vllm, "0.32.0"))
    monkeypatch.setattr(environment, "nixl_packages", lambda: ["nixl"])
    monkeypatch.setattr(environment, "version_of", {"nixl": "1.5.1", "nixl-cu12": "1.5.1"}.get)
    monkeypatch.setattr(process, "run", lambda *arguments: process.Ended(0, "", ""))
    monkeypatch.setattr(process, "ask_vllm", lambda *arguments: ({}, ""))
    with PortReservation() as held:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(held.ports[0]))
        yield


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that nobody else gets."""
    with PortReservation() as held:
        yield held.ports[0]


@contextlib.contextmanager
def listening(port: int = 0) -> Iterator[int]:
    """Something that listens on this host."""
    with socket.create_server(("127.0.0.1", port)) as server:
        yield int(server.getsockname()[1])


def diagnose(config: Any = GOOD, *options: str, serve: tuple[str, ...] | None = None) -> Result:
    """Run the command, with peers on this host."""
    text = config if isinstance(config, str) else json.dumps(config)
    given = ["--kv-transfer-config", text]
    if serve is None:
        return run(doctor, "--peer", "localhost", *given, *options)
    return run(doctor, "--peer", "localhost", *options, "--", "my/model", *given, *serve)


def findings(result: Result) -> list[Finding]:
    """What was printed as JSON."""
    assert not result.stderr, result.stderr
    told = json.loads(result.stdout)
    assert told["format"] == "nixl_telemetry.doctor/1"
    assert told["ok"] == (result.exit_code != 1)
    return [Finding(Level(one["level"]), one["what"], one["remedy"], one["topic"]) for one in told["findings"]]


def bad(found: list[Finding]) -> list[Finding]:
    """What is not quiet."""
    return [one for one in found if one.level not in {Level.OK, Level.NOTE}]


# ------------------------------------------------------------------------------------------------------------- Healthy


def test_a_good_one_is_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setenv("NIXLTEL_TRACE_FILE", str(tmp_path / "spans.jsonl"))
    monkeypatch.setenv("NIXLTEL_ALLOWED_PEERS", "127.0.0.0/8")

    result = diagnose(serve=("--port", str(free_port)))

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{len(CHECKS)} checks: no problems\n"


def test_notes_are_shown_when_asked_for() -> None:
    quiet, verbose = diagnose(), diagnose(GOOD, "--verbose")

    assert quiet.stdout == f"{len(CHECKS)} checks: no problems, 2 notes (--verbose shows them)\n"
    assert verbose.exit_code == 0
    assert (
        "note       signals      spans go nowhere: no OTLP endpoint and no trace_file → give --otlp-" in verbose.stdout
    )
    assert (
        "note       settings     allowed_peers is not set: what remote_host of a client's request names is connected "
        in verbose.stdout
    )
    assert (
        "ok         wiring       kv_connector NixlConnector is instrumented: by kv_connector_module_path\n"
        in verbose.stdout
    )


@pytest.mark.parametrize(
    ("config", "environ", "way"),
    [
        (GOOD, {}, "by kv_connector_module_path"),
        ({"kv_connector": "InstrumentedNixlPushConnector", "kv_role": "kv_both"}, {}, "by its own name"),
        ({"kv_connector": "NixlPushConnector", "kv_role": "kv_both"}, {"NIXLTEL_AUTO": "1"}, "by NIXLTEL_AUTO"),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "connectors": [{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}, GOOD]
                },
            },
            {},
            "by kv_connector_module_path",
        ),
    ],
    ids=["module", "own", "auto", "multi"],
)
def test_every_wiring_is_good(config: Any, environ: dict[str, str], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)

    found = findings(diagnose(config, "--json"))

    assert bad(found) == []
    assert next(one.what for one in found if "is instrumented" in one.what).endswith(way)


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRACE_FILE", "AUDIT_DIR"):
        monkeypatch.setenv(f"NIXLTEL_{name}", str(tmp_path / "a/b" / name.lower()))
    before = sorted(tmp_path.rglob("*"))

    assert bad(findings(diagnose(GOOD, "--json"))) == []
    assert sorted(tmp_path.rglob("*")) == before


def test_only_the_environment() -> None:
    result = run(doctor, "--peer", "localhost", "--json")

    assert bad(findings(result)) == []
    assert any("only the environment is checked" in one.what for one in findings(result))


# -------------------------------------------------------------------------------------------------------- Misconfigured

MULTI: Final = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}


def with_extra(**extra: Any) -> dict[str, Any]:
    """A good config with an extra one."""
    return {**GOOD, "kv_connector_extra_config": extra}


def without(*names: str) -> dict[str, Any]:
    """A good config that lacks something."""
    return {name: value for name, value in GOOD.items() if name not in names}


# What is planted (variables, config), how bad it is, and what has to be said: the thing and its value, and the remedy.
PLANTED: Final[dict[str, tuple[dict[str, str], Any, Level, str, str]]] = {
    "nixl-telemetry-off": (
        {"NIXL_TELEMETRY_ENABLE": "n"},
        GOOD,
        Level.WARNING,
        'NIXL_TELEMETRY_ENABLE is "n": the instrumented connectors serve, without bytes and times of transfers',
        "unset NIXL_TELEMETRY_ENABLE",
    ),
    "nixl-telemetry-off-on-stock": (
        {"NIXL_TELEMETRY_ENABLE": "n"},
        without("kv_connector_module_path"),
        Level.PROBLEM,
        'NIXL_TELEMETRY_ENABLE is "n": stock connectors fail each finished transfer',
        "unset NIXL_TELEMETRY_ENABLE",
    ),
    "nixl-telemetry-misspelled": (
        {"NIXL_TELEMETRY_ENABLED": "y"},
        GOOD,
        Level.WARNING,
        "NIXL_TELEMETRY_ENABLED is set, and NIXL does not read it",
        "set NIXL_TELEMETRY_ENABLE instead",
    ),
    "host-in-kubernetes": (
        {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "NO_PEER": "1"},
        GOOD,
        Level.PROBLEM,
        'VLLM_NIXL_SIDE_CHANNEL_HOST is "127.0.0.1", and this is a Kubernetes pod',
        "set VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this host",
    ),
    "host-unset": (
        {"NO_PEER": "1"},
        GOOD,
        Level.WARNING,
        "VLLM_NIXL_SIDE_CHANNEL_HOST is unset, which is localhost: only peers on this host",
        "or name the peers with --peer",
    ),
    "host-wildcard": (
        {"VLLM_NIXL_SIDE_CHANNEL_HOST": "0.0.0.0"},
        GOOD,
        Level.PROBLEM,
        'VLLM_NIXL_SIDE_CHANNEL_HOST is "0.0.0.0": peers are told to connect to it',
        "set VLLM_NIXL_SIDE_CHANNEL_HOST",
    ),
    "host-elsewhere": (
        {"VLLM_NIXL_SIDE_CHANNEL_HOST": "192.0.2.7"},
        GOOD,
        Level.PROBLEM,
        'VLLM_NIXL_SIDE_CHANNEL_HOST is "192.0.2.7", which is no address of this host',
        "set VLLM_NIXL_SIDE_CHANNEL_HOST",
    ),
    "port-no-number": (
        {"VLLM_NIXL_SIDE_CHANNEL_PORT": "tcp://10.0.0.1:5600"},
        GOOD,
        Level.PROBLEM,
        'VLLM_NIXL_SIDE_CHANNEL_PORT is "tcp://10.0.0.1:5600": no port',
        "give a number from 1 to 65535",
    ),
    "vllm-port-of-kubernetes": (
        {"VLLM_PORT": "tcp://10.0.0.1:80"},
        GOOD,
        Level.PROBLEM,
        'VLLM_PORT is "tcp://10.0.0.1:80", as Kubernetes sets it',
        "enableServiceLinks: false",
    ),
    "plugin-left-out": (
        {"VLLM_PLUGINS": "lora_filesystem_resolver"},
        {"kv_connector": "InstrumentedNixlConnector", "kv_role": "kv_both"},
        Level.PROBLEM,
        'VLLM_PLUGINS is "lora_filesystem_resolver", which leaves out nixl_telemetry',
        "VLLM_PLUGINS=lora_filesystem_resolver,nixl_telemetry",
    ),
    "plugin-left-out-not-needed": (
        {"VLLM_PLUGINS": ""},
        GOOD,
        Level.NOTE,
        'VLLM_PLUGINS is "", which leaves out nixl_telemetry',
        "VLLM_PLUGINS=nixl_telemetry",
    ),
    "auto-without-plugin": (
        {"VLLM_PLUGINS": "x", "NIXLTEL_AUTO": "1"},
        without("kv_connector_module_path"),
        Level.PROBLEM,
        "NIXLTEL_AUTO has no effect without the plugin nixl_telemetry",
        '"kv_connector_module_path": "nixl_telemetry.connectors"',
    ),
    "stock": (
        {},
        without("kv_connector_module_path"),
        Level.WARNING,
        "kv_connector NixlConnector is the stock one: nothing is observed",
        'add "kv_connector_module_path": "nixl_telemetry.connectors", or set NIXLTEL_AUTO=1',
    ),
    "auto-no-boolean": (
        {"NIXLTEL_AUTO": "maybe"},
        GOOD,
        Level.PROBLEM,
        'NIXLTEL_AUTO is "maybe", neither true nor false',
        "write 1 or 0",
    ),
    "module-typo": (
        {},
        {**GOOD, "kv_connector_module_path": "nixl_telemetry.connector"},
        Level.PROBLEM,
        'kv_connector_module_path is "nixl_telemetry.connector", which has no connectors',
        "write nixl_telemetry.connectors",
    ),
    "module-not-installed": (
        {},
        {**GOOD, "kv_connector_module_path": "another_company.kv"},
        Level.PROBLEM,
        'kv_connector_module_path is "another_company.kv", and "another_company" is not installed here',
        "the instrumented connectors are in nixl_telemetry.connectors",
    ),
    "module-without-the-name": (
        {},
        {**GOOD, "kv_connector": "NixlPushConector"},
        Level.PROBLEM,
        'kv_connector_module_path is nixl_telemetry.connectors, which has no "NixlPushConector"',
        "write NixlPushConnector",
    ),
    "telemetry-on-stock": (
        {},
        {**without("kv_connector_module_path"), "kv_connector_extra_config": {"telemetry": {"logs": False}}},
        Level.WARNING,
        'kv_connector_extra_config["telemetry"] has no effect on a stock connector',
        "kv_connector_module_path",
    ),
    "role-missing": ({}, without("kv_role"), Level.PROBLEM, "kv_role is missing", "add kv_producer (prefill)"),
    "role-unknown": (
        {},
        {**GOOD, "kv_role": "producer"},
        Level.PROBLEM,
        'kv_role is "producer", which vLLM does not know',
        "write kv_producer",
    ),
    "connector-unknown": (
        {},
        {**without("kv_connector_module_path"), "kv_connector": "NixlPuschConnector"},
        Level.PROBLEM,
        'kv_connector is "NixlPuschConnector", which vLLM does not know',
        "write NixlPushConnector",
    ),
    "connector-missing": ({}, {"kv_role": "kv_both"}, Level.PROBLEM, "kv_connector is missing", "name a connector"),
    "connector-not-nixl": (
        {},
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
        Level.WARNING,
        'kv_connector "OffloadingConnector" is no NIXL connector',
        "NixlConnector",
    ),
    "key-unknown": (
        {},
        {**GOOD, "kv_conector_module_path": "x"},
        Level.PROBLEM,
        'the unknown key "kv_conector_module_path": vLLM refuses it',
        "write kv_connector_module_path",
    ),
    "key-misplaced": (
        {},
        {**GOOD, "enforce_handshake_compat": False},
        Level.PROBLEM,
        "enforce_handshake_compat stands beside kv_connector",
        "move it into kv_connector_extra_config",
    ),
    "extra-key-misspelled": (
        {},
        with_extra(enforce_handshake_compatibility=True),
        Level.WARNING,
        '"enforce_handshake_compatibility", which vLLM ignores',
        "write enforce_handshake_compat",
    ),
    "two-nixl": (
        {},
        {**MULTI, "kv_connector_extra_config": {"connectors": [GOOD, {**GOOD, "kv_connector": "NixlPushConnector"}]}},
        Level.PROBLEM,
        "connectors[1].kv_connector NixlPushConnector): they share one side channel port, in different transfer modes",
        "keep one of them",
    ),
    "not-enforced": (
        {},
        with_extra(enforce_handshake_compat=False),
        Level.WARNING,
        "enforce_handshake_compat is false",
        "remove it, and use `nixl-telemetry check`",
    ),
    "buffer-device": (
        {},
        {**GOOD, "kv_buffer_device": "gpu"},
        Level.WARNING,
        'kv_buffer_device is "gpu", which is no device',
        "write cuda",
    ),
    "engine-id": ({}, {**GOOD, "engine_id": "p0"}, Level.WARNING, 'engine_id is fixed to "p0"', "remove it"),
    "short-lease": (
        {},
        with_extra(kv_lease_duration=2),
        Level.WARNING,
        "kv_lease_duration is 2 s: prefill may release KV before it was read",
        "give at least 30",
    ),
    "bidirectional-push": (
        {},
        {**with_extra(bidirectional_kv_xfer=True), "kv_connector": "NixlPushConnector"},
        Level.PROBLEM,
        "bidirectional_kv_xfer is on with NixlPushConnector: push does not support it",
        "NixlPullConnector",
    ),
    "setting-unknown": (
        {},
        with_extra(telemetry={"log_formt": "json"}),
        Level.PROBLEM,
        'kv_connector_extra_config["telemetry"] has the unknown key "log_formt": vLLM does not start',
        "log_format",
    ),
    "setting-bad": (
        {},
        with_extra(telemetry={"queue_size": 3}),
        Level.PROBLEM,
        'kv_connector_extra_config["telemetry"]["queue_size"] is 3: vLLM does not start',
        "greater than or equal to 16",
    ),
    "settings-no-object": (
        {},
        with_extra(telemetry=[1]),
        Level.PROBLEM,
        'kv_connector_extra_config["telemetry"] is [1]: vLLM does not start',
        "make it an object of settings",
    ),
    "allowed-peers-unset": (
        {},
        {**GOOD, "kv_role": "kv_consumer"},
        Level.NOTE,
        "allowed_peers is not set: what remote_host of a client's request names is connected to",
        "set NIXLTEL_ALLOWED_PEERS to the networks of your instances",
    ),
    "variable-unknown": (
        {"NIXLTEL_LOGFORMAT": "json"},
        GOOD,
        Level.PROBLEM,
        "the variable NIXLTEL_LOGFORMAT is not known: vLLM does not start",
        "write NIXLTEL_LOG_FORMAT",
    ),
    "variable-bad": (
        {"NIXLTEL_LOG_FORMAT": "xml"},
        GOOD,
        Level.PROBLEM,
        'NIXLTEL_LOG_FORMAT is "xml": vLLM does not start',
        "'logfmt' or 'json'",
    ),
    "vllm-variable-unknown": (
        {"VLLM_NIXL_SIDE_CHANEL_HOST": "10.0.0.7"},
        GOOD,
        Level.WARNING,
        "VLLM_NIXL_SIDE_CHANEL_HOST is set, and this vLLM does not know it",
        "set VLLM_NIXL_SIDE_CHANNEL_HOST instead",
    ),
    "vllm-variable-gone": (
        {"VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "480"},
        GOOD,
        Level.WARNING,
        "VLLM_NIXL_ABORT_REQUEST_TIMEOUT is set, and this vLLM does not know it: it has no effect",
        'use "kv_lease_duration"',
    ),
    "no-collector": (
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        GOOD,
        Level.PROBLEM,
        'OTEL_EXPORTER_OTLP_ENDPOINT "http://127.0.0.1:1": 127.0.0.1 port 1 cannot be reached (Connection refused)',
        "start the collector, or correct the endpoint",
    ),
    "grpc-at-the-http-port": (
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318"},
        GOOD,
        Level.PROBLEM,
        "has port 4318, that of OTLP over HTTP, and the protocol is gRPC",
        "write port 4317, or set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf",
    ),
    "http-at-the-grpc-port": (
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
        GOOD,
        Level.PROBLEM,
        'has port 4317, that of gRPC, and the protocol is "http/protobuf"',
        "write port 4318, or set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc",
    ),
    "grpc-port-and-exporter-of-http": (
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4317", "OTEL_TRACES_EXPORTER": "otlp_proto_http"},
        GOOD,
        Level.PROBLEM,
        'has port 4317, that of gRPC, and the protocol is "http/protobuf"',
        "write port 4318, or set OTEL_TRACES_EXPORTER=otlp_proto_grpc",
    ),
    "protocol-overruled": (
        {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_TRACES_EXPORTER": "otlp_proto_grpc",
        },
        GOOD,
        Level.WARNING,
        'OTEL_EXPORTER_OTLP_PROTOCOL is "http/protobuf", and OTEL_TRACES_EXPORTER says grpc, which is spoken',
        "unset OTEL_EXPORTER_OTLP_PROTOCOL, or set OTEL_TRACES_EXPORTER=otlp",
    ),
    "protocol-unknown": (
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
        GOOD,
        Level.WARNING,
        'OTEL_EXPORTER_OTLP_PROTOCOL is "http/json", which is taken for http/protobuf',
        "write grpc or http/protobuf",
    ),
    "endpoint-no-url": (
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "udp://x"},
        GOOD,
        Level.PROBLEM,
        'OTEL_EXPORTER_OTLP_ENDPOINT "udp://x" is no URL of a collector',
        "http://HOST:4317",
    ),
    "exporter-none": (
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
        GOOD,
        Level.PROBLEM,
        'OTEL_TRACES_EXPORTER is "none": no spans go to',
        "unset OTEL_TRACES_EXPORTER",
    ),
    "sdk-disabled": (
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
        GOOD,
        Level.PROBLEM,
        "OTEL_SDK_DISABLED is true: no spans go to",
        "unset OTEL_SDK_DISABLED",
    ),
    "sampler-unknown": (
        {"OTEL_TRACES_SAMPLER": "parentbased_ratio"},
        GOOD,
        Level.PROBLEM,
        'OTEL_TRACES_SAMPLER is "parentbased_ratio", no sampler: each trace is sampled',
        "write one of parentbased_traceidratio, ",
    ),
    "sampler-percent": (
        {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "5"},
        GOOD,
        Level.PROBLEM,
        'OTEL_TRACES_SAMPLER_ARG is "5", and parentbased_traceidratio takes a fraction from 0 to 1',
        "write 0.05 for 5 %",
    ),
    "sampler-without-argument": (
        {"OTEL_TRACES_SAMPLER": "traceidratio"},
        GOOD,
        Level.PROBLEM,
        'OTEL_TRACES_SAMPLER_ARG is "", and traceidratio takes a fraction',
        "write 0.05 for 5 %",
    ),
    "trace-file-without-traces": (
        {"NIXLTEL_TRACE_FILE": "spans.jsonl", "NIXLTEL_TRACES": "false"},
        GOOD,
        Level.WARNING,
        "traces is false: nothing is written to trace_file",
        "set traces to true, or drop trace_file",
    ),
    "trace-file": (
        {"NIXLTEL_TRACE_FILE": "/dev/null/spans.jsonl"},
        GOOD,
        Level.PROBLEM,
        'trace_file is "/dev/null/spans.jsonl": /dev/null is no folder',
        "give a file in a folder that the server may write",
    ),
    "trace-file-folder": (
        {},
        with_extra(telemetry={"trace_file": "/dev"}),
        Level.PROBLEM,
        'trace_file is "/dev", a folder',
        "give the name of a file in it",
    ),
    "audit-folder": (
        {"NIXLTEL_AUDIT_DIR": "/dev/null"},
        GOOD,
        Level.PROBLEM,
        'audit_dir is "/dev/null": /dev/null is no folder',
        "give a folder that the server may write",
    ),
    "audit-key": (
        {"NIXLTEL_AUDIT_DIR": "/tmp", "NIXLTEL_AUDIT_KEY_FILE": "/nope/key"},
        GOOD,
        Level.PROBLEM,
        "audit_key_file holds no key: /nope/key is no file here",
        "head -c 32 /dev/urandom",
    ),
    "audit-key-alone": (
        {"NIXLTEL_AUDIT_KEY_FILE": "/nope/key"},
        GOOD,
        Level.WARNING,
        "audit_key_file is set and audit_dir is not",
        "set audit_dir",
    ),
    "warnings-hidden": (
        {"VLLM_LOGGING_LEVEL": "error"},
        GOOD,
        Level.WARNING,
        "VLLM_LOGGING_LEVEL is ERROR: warnings are hidden",
        "write INFO",
    ),
    "no-logging": (
        {"VLLM_CONFIGURE_LOGGING": "0"},
        GOOD,
        Level.WARNING,
        "VLLM_CONFIGURE_LOGGING is 0: vLLM sets up no logging",
        "unset it",
    ),
    "log-config": (
        {"VLLM_LOGGING_CONFIG_PATH": "/nope.json"},
        GOOD,
        Level.PROBLEM,
        'VLLM_LOGGING_CONFIG_PATH is "/nope.json", no file',
        "correct or unset it",
    ),
    "metrics-folder": (
        {"PROMETHEUS_MULTIPROC_DIR": "/nope"},
        GOOD,
        Level.PROBLEM,
        'PROMETHEUS_MULTIPROC_DIR is "/nope", no folder: there are no metrics',
        "make the folder, or unset it",
    ),
    "no-json": (
        {},
        "{'kv_connector': 'NixlConnector'}",
        Level.PROBLEM,
        "--kv-transfer-config is no JSON (Expecting property name enclosed in double quotes",
        "quote the whole JSON object for your shell",
    ),
    "no-object": ({}, '["NixlConnector"]', Level.PROBLEM, "--kv-transfer-config is list and no JSON object", "quote"),
}


ALONE: Final = {
    "plugin-left-out-not-needed": 0,
    "allowed-peers-unset": 0,
    "auto-without-plugin": 2,  # and that VLLM_PLUGINS leaves it out
    "plugin-left-out": 2,
    "nixl-telemetry-off-on-stock": 2,
    "telemetry-on-stock": 2,
    "grpc-at-the-http-port": 2,  # where nothing listens, either
    "http-at-the-grpc-port": 2,
    "grpc-port-and-exporter-of-http": 2,
    "protocol-overruled": 2,
    "protocol-unknown": 2,
    "exporter-none": 2,
    "sdk-disabled": 2,
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one finding; by more only where it has more than one consequence."""
    environ, config, level, what, remedy = PLANTED[name]
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    text = config if isinstance(config, str) else json.dumps(config)
    peer = () if "NO_PEER" in environ else ("--peer", "localhost")

    result = run(doctor, "--json", *peer, "--kv-transfer-config", text)

    found = findings(result)
    (one,) = (one for one in found if what in one.what)
    assert (one.level, result.exit_code) == (level, 1 if level is Level.PROBLEM else result.exit_code)
    assert remedy in one.remedy
    assert len(bad(found)) == ALONE.get(name, 1), bad(found)
    assert not [one for one in found if one.level is Level.UNCHECKED]


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
@pytest.mark.parametrize("telemetry", [{"allowed_peers": ["10.0.0.0/8"]}, {"allowed_peers": [7]}, {"enabled": False}])
def test_who_needs_no_list_of_peers(role: str, telemetry: dict[str, Any]) -> None:
    """Who has one, a wrong one included, and who has no telemetry that would look at it; all others are told."""
    told, quiet = (
        [one for one in findings(diagnose({**config, "kv_role": role}, "--json")) if "allowed_peers is not" in one.what]
        for config in (GOOD, with_extra(telemetry=telemetry))
    )

    assert [one.level for one in told] == [Level.NOTE]
    assert quiet == []


# ---------------------------------------------------------------------------------------------------- Ports and peers


def only(result: Result) -> Finding:
    """The only thing that is wrong."""
    (one,) = bad(findings(result))
    return one


def test_a_side_channel_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        one = only(diagnose(GOOD, "--json"))

    assert (one.level, one.topic) == (Level.PROBLEM, "network")
    assert one.what == f'side channel port {port}: {port} is in use on "localhost"'
    assert one.remedy.startswith("set VLLM_NIXL_SIDE_CHANNEL_PORT to another port")


@pytest.mark.parametrize(
    ("serve", "first", "count"),
    [
        (("--data-parallel-size", "4"), 0, 4),
        (("-dp=4", "--data_parallel_size_local=2"), 0, 2),
        (("-dp", "8", "-dpl", "2", "-dpr", "4"), 4, 2),
        (("-dp", "8", "-dpn", "3"), 3, 1),
        ((), 0, 1),
    ],
)
def test_each_data_parallel_rank_has_a_port(serve: tuple[str, ...], first: int, count: int) -> None:
    subject = Subject({"VLLM_NIXL_SIDE_CHANNEL_PORT": "7000"}, values=read(serve).values)

    assert subject.ports == range(7000 + first, 7000 + first + count)


def test_the_port_of_a_data_parallel_rank_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port - 2))
        result = diagnose(GOOD, "--json", serve=("-dp", "3", "--headless"))

    assert result.exit_code == 1
    (one,) = (one for one in findings(result) if one.what.startswith("side channel"))
    assert one.what.startswith(f"side channel ports {port - 2} to {port} for 3 data-parallel ranks (VLLM_NIXL_SIDE_")
    assert f"{port}" in one.what.partition(": ")[2]


def test_ports_beyond_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", "65530")

    one = only(diagnose(GOOD, "--json", serve=("-dp", "1000", "--headless")))

    assert "side channel ports 65530 to 66529" in one.what
    assert "from 1 to 65535" in one.remedy


def test_the_api_port_in_use() -> None:
    with listening() as port:
        one = only(diagnose(GOOD, "--json", serve=("--port", str(port))))

    assert (one.what, one.remedy[:18]) == (f'--port {port} is in use on "0.0.0.0"', "give another --por")


def test_the_api_port_is_a_side_channel_port(monkeypatch: pytest.MonkeyPatch) -> None:
    port = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])

    one = only(diagnose(GOOD, "--json", serve=("--host", "127.0.0.1", "--port", str(port))))

    assert one.what == f"--port {port} is also a side channel port of this instance"


def test_a_peer_on_another_host() -> None:
    result = run(doctor, "--json", "--peer", "192.0.2.1", "--kv-transfer-config", json.dumps(GOOD))

    one = only(result)
    assert one.level is Level.PROBLEM
    assert 'is unset, which is localhost, and the peer "192.0.2.1" is on another host: it cannot connect' in one.what


def test_a_peer_that_does_not_resolve() -> None:
    """Where it is stays unknown."""
    result = run(doctor, "--json", "--peer", "no-such-host.invalid", "--kv-transfer-config", json.dumps(GOOD))

    assert [(one.level, one.topic) for one in bad(findings(result))] == [("warning", "network"), ("warning", "peers")]


@pytest.mark.parametrize("peer", ["localhost", "127.0.0.1:5600", "[127.0.0.1]:5600", "localhost:5600"])
def test_a_peer_may_have_a_port(peer: str) -> None:
    assert bad(findings(run(doctor, "--json", "--peer", peer, "--kv-transfer-config", json.dumps(GOOD)))) == []


def test_an_address_that_peers_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "not_free", lambda host, port: None)
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "192.0.2.7")

    assert bad(findings(run(doctor, "--json", "--peer", "192.0.2.1", "--kv-transfer-config", json.dumps(GOOD)))) == []


def test_push_and_pull(tmp_path: Path) -> None:
    file = tmp_path / "peer.json"
    file.write_text(json.dumps({**GOOD, "kv_connector": "InstrumentedNixlPushConnector"}))

    one = only(diagnose(GOOD, "--json", "--peer-config", str(file)))

    assert one.level is Level.PROBLEM
    assert one.what.startswith(
        "kv_connector is NixlConnector (pull) here and InstrumentedNixlPushConnector (push) at the peer"
    )
    assert one.remedy == "use the same mode on both sides; NixlConnector is pull"


def test_two_producers() -> None:
    producer = {**GOOD, "kv_role": "kv_producer"}

    one = only(diagnose(producer, "--json", "--peer-config", json.dumps(producer)))

    assert one.what == "kv_role is kv_producer here and at the peer: nothing is exchanged"


# ---------------------------------------------------------------------------------------------------------- Installed


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "1.0.0"])
def test_a_vllm_that_is_not_supported(version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "installed_vllm", lambda: VllmInstalled(tmp_path, version))

    one = only(diagnose(GOOD, "--json"))

    assert (one.level, one.remedy) == (Level.PROBLEM, "install vLLM 0.28 to 0.33, or a newer nixl-telemetry")
    assert one.what == f"vLLM {version} is not supported: the stock connectors run, without telemetry"


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "installed_vllm", lambda: None)

    assert only(diagnose(GOOD, "--json")).what == "vLLM is not installed in this Python"


@pytest.mark.parametrize(
    ("versions", "what"),
    [
        ({"nixl-cu13": "1.4.1"}, "nixl-cu13 1.4.1 was built without telemetry"),
        ({"nixl": "1.3.0"}, "nixl 1.3.0 broke vLLM's own tests"),
        (
            {"nixl": "1.5.1", "nixl-cu12": "1.4.0"},
            "NIXL is installed in different versions: nixl 1.5.1, nixl-cu12 1.4.0",
        ),
        ({"nixl": "0.10.1"}, "NIXL is older than 1.0: nixl 0.10.1"),
    ],
)
def test_a_nixl_that_is_known_to_be_bad(versions: dict[str, str], what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "version_of", versions.get)

    one = only(diagnose(GOOD, "--json"))

    assert one.level is Level.WARNING
    assert one.what.startswith(what)


@pytest.mark.parametrize(
    ("ended", "level", "what"),
    [
        (
            (1, "Traceback\nImportError: libcuda.so.1: cannot open"),
            Level.PROBLEM,
            "imported: ImportError: libcuda.so.1",
        ),
        ((-6, ""), Level.PROBLEM, "cannot be imported: it was ended by SIGABRT"),
        ((None, ""), Level.UNCHECKED, "nixl was not imported in 60 s"),
    ],
    ids=["error", "abort", "hang"],
)
def test_a_nixl_that_cannot_be_imported(
    ended: tuple[int | None, str], level: Level, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "run", lambda *arguments: process.Ended(ended[0], "", ended[1]))

    result = diagnose(GOOD, "--json")

    assert (only(result).level, result.exit_code) == (level, 1 if level is Level.PROBLEM else 2)
    assert what in only(result).what


def test_variables_of_a_kubernetes_service_are_none_of_vllm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is called vllm-prefill."""
    for name in ("SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR"):
        monkeypatch.setenv(f"VLLM_PREFILL_{name}", "tcp://10.0.0.1:80" if name == "PORT" else "x")

    assert bad(findings(diagnose(GOOD, "--json"))) == []


def test_nixl_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "nixl_packages", list)

    assert only(diagnose(GOOD, "--json")).what == "NIXL is not installed: no NIXL connector starts"


def test_no_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Subject, "has_entry_point", False)

    one = only(run(doctor, "--json", "--peer", "localhost"))

    assert (one.level, one.topic) == (Level.WARNING, "wiring")
    assert one.what.endswith("the entry point in vllm.general_plugins is missing")


# --------------------------------------------------------------------------------------------------- What vLLM says


def answers(monkeypatch: pytest.MonkeyPatch, **answer: Any) -> list[Any]:
    """Has vLLM answer; what it is asked."""
    asked: list[Any] = []

    def ask(given: list[str], timeout: float) -> tuple[dict[str, Any], str]:
        asked.append(given)
        return answer, ""

    monkeypatch.setattr(process, "ask_vllm", ask)
    return asked


def test_vllm_reads_the_arguments(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    """Those of a file of arguments, too."""
    transfer = {**GOOD, "kv_role": "kv_nobody", "engine_id": "made-by-vllm"}
    asked = answers(monkeypatch, values={"port": free_port, "data_parallel_size": 1}, transfer=transfer)

    one = only(run(doctor, "--json", "--peer", "localhost", "--", "vllm", "serve", "my/model", "--config", "x.yaml"))

    assert asked == [["my/model", "--config", "x.yaml"]]
    assert one.what == 'kv_role is "kv_nobody", which vLLM does not know'


def test_a_file_of_arguments_that_nobody_read() -> None:
    result = run(doctor, "--json", "--quick", "--peer", "localhost", "--", "my/model", "--config", "x.yaml")

    assert result.exit_code == 2
    assert only(result).what == '--config "x.yaml" was not read: only vLLM reads it'


def test_vllm_refuses_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does not know may be a secret."""
    text = "vLLM refuses the arguments: unrecognized arguments: --api-kee sk-123 --tokn=sk-456 sk-789"
    answers(monkeypatch, refused=text)

    result = diagnose(GOOD, "--json", serve=("--api-kee", "sk-123", "--headless"))

    assert only(result).what == "vLLM refuses the arguments: unrecognized arguments: --api-kee --tokn"
    assert "sk-" not in result.output


def test_vllm_cannot_load_the_connector(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, values={}, connector_error="ImportError: no such thing")

    assert only(diagnose(GOOD, "--json")).what == "vLLM cannot load the connector: ImportError: no such thing"


def test_vllm_does_not_load_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, plugin_loaded=False)

    found = bad(findings(diagnose({"kv_connector": "InstrumentedNixlConnector", "kv_role": "kv_both"}, "--json")))

    assert [one.what for one in found] == [
        "vLLM finds the plugin nixl_telemetry and does not load it",
        "kv_connector InstrumentedNixlConnector is not known to vLLM without the plugin nixl_telemetry",
    ]


def test_the_platform_knows_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, device="cpu", buffer_devices=["cpu"])

    one = only(diagnose(GOOD, "--json"))

    assert one.what == 'kv_buffer_device is "cuda", and on cpu NIXL connectors take cpu only'
    assert (one.level, one.remedy) == (Level.PROBLEM, "write cpu")


@pytest.mark.parametrize(
    ("reason", "level", "code"),
    [("it did not answer in time", Level.UNCHECKED, 2), ("it was ended by SIGSEGV", Level.PROBLEM, 1)],
)
def test_vllm_does_not_answer(reason: str, level: Level, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "ask_vllm", lambda *arguments: (None, reason))

    result = diagnose(GOOD, "--json")

    assert (only(result).level, result.exit_code) == (level, code)
    assert reason in only(result).what


def test_quick_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*arguments: Any) -> Any:
        raise AssertionError(arguments)

    monkeypatch.setattr(process, "run", started)
    monkeypatch.setattr(process, "ask_vllm", started)

    assert bad(findings(diagnose(GOOD, "--json", "--quick"))) == []


# ----------------------------------------------------------------------------------------------------------- Processes


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The function that starts processes."""
    monkeypatch.undo()
    return process.run


def test_a_process_answers(real: Any) -> None:
    ended = real(["-c", "import sys; print(sys.stdin.read()); print('said', file=sys.stderr)"], "häé\udcff", 60)

    assert (ended.code, ended.output) == (0, "häé\N{REPLACEMENT CHARACTER}\n")
    assert ended.reason() == "said"


def test_what_a_process_leaves_is_removed(real: Any) -> None:
    ended = real(["-c", "import tempfile; print(tempfile.mkdtemp())"], "", 60)

    assert ended.code == 0
    assert not Path(ended.output.strip()).exists()


def test_a_process_that_hangs_is_gone_with_its_children(real: Any, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    code = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
    began = time.monotonic()

    ended = real(["-c", code], "", 3)

    assert (ended.code, ended.reason()) == (None, "it did not answer in time")
    assert time.monotonic() - began < 30
    deadline = time.monotonic() + 10
    left = [int(pid) for pid in pids.read_text().split()]
    while any(is_running(pid) for pid in left) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in left)


def is_running(pid: int) -> bool:
    """Whether a process is there, and no zombie that waits for its reaper."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("output", ["", "no JSON", "[1]", "[" * 100_000])
def test_an_answer_that_is_none(output: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(process, "run", lambda *arguments: process.Ended(0, output, ""))

    assert process.ask_vllm([], 1) == (None, "it ended with 0")


# ------------------------------------------------------------------------------------------------------------- Signals


def test_a_collector_that_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with listening() as port:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
        found = findings(diagnose(GOOD, "--json"))

    assert bad(found) == []
    assert not [one for one in found if one.level is Level.NOTE and one.topic == "signals"]


@pytest.mark.parametrize(
    ("variable", "value"),
    [("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"), ("OTEL_TRACES_EXPORTER", "otlp_proto_http")],
)
def test_vllm_s_endpoint_has_a_protocol_of_its_own(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)
    with listening() as port:
        serve = ("--headless", "--otlp-traces-endpoint", f"http://127.0.0.1:{port}")
        one = only(diagnose(GOOD, "--json", serve=serve))

    assert one.what.startswith(f'{variable} is "{value}", which is not read for --otlp-traces-endp')
    assert one.remedy == "set OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf"


def test_a_key_that_others_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"k" * 32)
    key.chmod(0o644)
    monkeypatch.setenv("NIXLTEL_AUDIT_DIR", str(tmp_path / "audit"))
    monkeypatch.setenv("NIXLTEL_AUDIT_KEY_FILE", str(key))

    one = only(diagnose(GOOD, "--json"))
    key.chmod(0o400)

    assert (one.level, one.remedy) == (Level.WARNING, f"chmod 400 {key}")
    assert bad(findings(diagnose(GOOD, "--json"))) == []


def test_metrics_of_an_earlier_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "counter_1.db").touch()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))

    assert "has metrics of an earlier start, which are added to the new ones" in only(diagnose(GOOD, "--json")).what


@pytest.mark.parametrize("serve", [(), ("--api-server-count", "4")])
def test_no_secret_is_printed(serve: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:hunter2@127.0.0.1:1/?token=hunter2")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=hunter2")
    monkeypatch.setenv("NIXLTEL_AUDIT_KEY", "hunter2")
    monkeypatch.setenv("VLLM_API_KEY", "hunter2")
    monkeypatch.setenv("VLLM_SECRET", "hunter2")

    for result in (
        diagnose(GOOD, "--json", serve=("--api-key", "hunter2", *serve)),
        diagnose(GOOD, "-v", serve=("--api-key", "hunter2")),
    ):
        assert result.exit_code == 1
        assert "NIXLTEL_AUDIT_KEY" in result.output
        assert "hunter2" not in result.output


# -------------------------------------------------------------------------------------------------------------- Hostile


def test_control_characters_are_escaped() -> None:
    result = diagnose({**GOOD, "kv_role": "\x1b[2J\n\x9bproblem\u202e", "\x1b[31m": 1})

    assert result.exit_code == 1
    assert not set(result.stdout) & set("\x1b\x9b\u202e")
    assert len(result.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "NaN",
        "[" * 100_000,
        '{"kv_connector":' + '{"a":' * 100_000,
        '{"kv_connector": "' + "x" * 2**21 + '"}',
        '{"kv_role": {}, "kv_connector": [], "kv_connector_extra_config": 1, "kv_connector_module_path": 7}',
        '{"kv_connector": "NixlConnector", "kv_role": [1], "kv_buffer_device": {}, "engine_id": []}',
        '{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [1, null, {}]}}',
        '{"kv_connector": "NixlConnector", "kv_connector_module_path": "../x"}',
        '{"kv_connector": "NixlConnector", "kv_connector_module_path": ".x"}',
        '{"kv_connector": "NixlConnector", "kv_connector_extra_config": {"telemetry": {"": null}, "engine_ttl": {}}}',
    ],
)
def test_odd_configs_are_problems(text: str) -> None:
    result = diagnose(text, "--json")

    assert result.exit_code == 1
    assert not [one for one in findings(result) if one.level is Level.UNCHECKED]
    assert len(result.stdout) < 20_000


JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS: Final = st.sampled_from(
    ["kv_connector", "kv_role", "kv_buffer_device", "engine_id", "kv_connector_module_path", "kv_load_failure_policy"]
)
EXTRA: Final = st.dictionaries(
    st.sampled_from(
        ["telemetry", "enforce_handshake_compat", "kv_lease_duration", "bidirectional_kv_xfer", "connectors"]
    ),
    JSON | st.dictionaries(st.sampled_from(["logs", "queue_size", "trace_file", "audit_dir"]), JSON),
)


@given(
    st.dictionaries(KEYS, JSON | st.sampled_from(["NixlConnector", "MultiConnector", "nixl_telemetry.connectors"])),
    EXTRA,
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_config_makes_a_check_fail(config: dict[str, Any], extra: Any) -> None:
    """Each value of another kind is a finding, and no error."""
    subject = Subject({"VLLM_NIXL_SIDE_CHANNEL_PORT": "7000"}, transfer={**config, "kv_connector_extra_config": extra})

    found = examine(subject, [check for check in CHECKS if check.topic not in {"environment", "network"}], 60)

    assert [one for one in found if one.level is Level.UNCHECKED] == []


@given(
    st.lists(
        st.text(max_size=20)
        | st.sampled_from(["--kv-transfer-config.a.b", "--kv_transfer_config", "-dp", "--port", "{}"])
    )
)
def test_no_arguments_make_the_reader_fail(arguments: list[str]) -> None:
    read(arguments)


def test_a_config_in_parts() -> None:
    found = read(["m", "--kv_transfer_config.kv_role", "kv_both", "--kv-transfer-config.kv_connector_extra_config.a=1"])

    assert found.transfer == {"kv_role": "kv_both", "kv_connector_extra_config": {"a": 1}}


@pytest.mark.parametrize("text", ["/nope.json", "x\0y", "[1]"])
def test_a_peer_s_config_that_is_none(text: str) -> None:
    assert "--peer-config" in refused(diagnose(GOOD, "--peer-config", text))


def test_arguments_and_a_config_alone() -> None:
    assert "either the arguments of vllm serve" in refused(diagnose(GOOD, "--", "my/model"))


# ---------------------------------------------------------------------------------------------------- Checks that fail


def test_a_check_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the text of the error, and the others go on."""

    def broken(subject: Subject) -> Iterator[Finding]:
        yield fine("half of it")
        raise RuntimeError("hunter2")

    monkeypatch.setattr(command, "CHECKS", (Check("config", broken), *CHECKS))

    result = diagnose(GOOD, "--json")

    assert result.exit_code == 2
    assert only(result) == Finding(
        Level.UNCHECKED,
        "broken could not be checked: RuntimeError",
        "this is a bug in nixl-telemetry, and worth a report",
        "config",
    )
    assert len(findings(result)) > 10
    assert "hunter2" not in result.output


def test_a_check_that_hangs_is_a_finding() -> None:
    ended = threading.Event()

    def stuck(subject: Subject) -> Iterator[Finding]:
        ended.wait(60)
        yield fine("too late")

    began = time.monotonic()
    found = examine(Subject({}), (Check("config", stuck), *CHECKS[:1]), 1)
    ended.set()

    assert time.monotonic() - began < 20
    assert "stuck could not be checked: it took longer than 1 s" in [one.what for one in found]


def test_problems_come_first_and_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    result = diagnose({**GOOD, "kv_role": "x"})
    warned = diagnose()

    levels = [line.split()[0] for line in result.stdout.splitlines()]
    assert levels == ["problem", "warning", str(len(CHECKS))]
    assert result.stdout.endswith(" checks: 1 problem, 1 warning, 2 notes (--verbose shows them)\n")
    assert (result.exit_code, warned.exit_code, diagnose(GOOD, "--strict").exit_code) == (1, 0, 1)


def test_what_is_shown_of_values() -> None:
    assert shown("x" * 1000) == '"' + "x" * 99 + "…"
    assert shown({1, 2}) == "\"<class 'set'>\"" or shown({1, 2}) == "<class 'set'>"
    assert shown_url("http://[::1") == '"http://[::1"'
    assert shown_url("http://a:b@c:1/v1?d#e") == '"http://c:1/v1"'


# ------------------------------------------------------------------------------------------------------ Without vLLM


def test_nothing_of_vllm_is_imported_by_the_command_line() -> None:
    code = (
        "import sys; from nixl_telemetry.cli.main import app; from typer.testing import CliRunner\n"
        "CliRunner().invoke(app, ['doctor', '--quick', '--peer', 'localhost'])\n"
        "print(*sorted({name.split('.')[0] for name in sys.modules} & {'vllm', 'torch', 'nixl', 'grpc'}))"
    )

    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)

    assert out.stdout.strip() == ""
