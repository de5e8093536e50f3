# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Settings: both sources, their order, and errors that name the thing, the value and what is valid."""

import json
from typing import Any

import pytest

from nixl_telemetry.settings import Settings, SettingsError, is_auto


def test_defaults() -> None:
    """Nothing given, everything on but the audit trail."""
    assert Settings.load({}, {}).model_dump() == {
        "enabled": True,
        "metrics": True,
        "traces": True,
        "logs": True,
        "log_format": "logfmt",
        "slow_handshake_seconds": 1.0,
        "slow_transfer_seconds": 1.0,
        "slow_receive_seconds": 5.0,
        "watchdog_seconds": 10.0,
        "block_spans": "each",
        "block_span_limit": 64,
        "keep_failed": True,
        "trace_file": None,
        "trace_file_max_bytes": 16 * 2**20,
        "trace_file_count": 4,
        "queue_size": 8192,
        "shutdown_timeout_seconds": 2.0,
        "listener": True,
        "allowed_peers": None,
        "audit_dir": None,
        "audit_key_file": None,
        "audit_max_file_bytes": 64 * 2**20,
    }


def test_config_wins_over_environment() -> None:
    """A key in the config beats its variable; a variable beats the default."""
    settings = Settings.load(
        {"telemetry": {"queue_size": 100}}, {"NIXLTEL_QUEUE_SIZE": "200", "NIXLTEL_LOGS": "0", "PATH": "/bin"}
    )

    assert (settings.queue_size, settings.logs) == (100, False)


def test_allowed_peers() -> None:
    """A list in the config, separated by commas in the variable; what is written out is read again."""
    entries = ["10.0.0.0/8", "192.0.2.7", "fd00::/8", "::1", "prefill-0.prefill.svc.cluster.local.", "node_1"]
    settings = Settings.load({"telemetry": {"allowed_peers": entries}}, {})

    assert settings.allowed_peers == tuple(entries)
    assert Settings.load({}, {"NIXLTEL_ALLOWED_PEERS": " , ".join(entries)}) == settings
    assert Settings.load({"telemetry": settings.model_dump()}, {}) == settings
    assert Settings.load({"telemetry": json.loads(settings.model_dump_json())}, {}) == settings


def test_foreign_variables_are_left_alone() -> None:
    """NIXL's own prefix, the automatic wiring and the test bed's variables are no settings."""
    environ = {"NIXL_TELEMETRY_ENABLE": "n", "NIXLTEL_AUTO": "1", "NIXLTEL_TESTBED_ROUTER": "/x"}

    assert Settings.load({}, environ) == Settings.load({}, {})


@pytest.mark.parametrize(
    ("config", "environ", "expected"),
    [
        ({"telemetry": {"quue_size": 7}}, {}, ["'quue_size'", "value 7", "queue_size"]),
        ({"telemetry": {"queue_size": "many"}}, {}, ['["telemetry"]["queue_size"]', "'many'", "integer"]),
        ({"telemetry": {"queue_size": 3}}, {}, ["queue_size", "is 3", "greater than or equal to 16"]),
        ({"telemetry": {"log_format": "xml"}}, {}, ["'xml'", "'logfmt' or 'json'"]),
        ({"telemetry": [1]}, {}, ["[1]", "object"]),
        ({"telemetry": None}, {}, ["None", "object"]),
        ({"telemetry": {"allowed_peers": ["10.0.0.0/8", "10.0.0.1/8"]}}, {}, ["'10.0.0.1/8'", "network is 10.0.0.0/8"]),
        ({"telemetry": {"allowed_peers": ["10.0.0.256"]}}, {}, ["entry '10.0.0.256'", "neither an address"]),
        ({"telemetry": {"allowed_peers": ["prefill:5600"]}}, {}, ["entry 'prefill:5600'", "host name"]),
        ({"telemetry": {"allowed_peers": ["a" * 64]}}, {}, [f"entry '{'a' * 64}'", "host name"]),
        ({"telemetry": {"allowed_peers": ["10.0.0.0/33"]}}, {}, ["entry '10.0.0.0/33'"]),
        ({"telemetry": {"allowed_peers": [""]}}, {}, ["entry ''", "host name"]),
        ({"telemetry": {"allowed_peers": []}}, {}, ["allowed_peers", "at least 1 item"]),
        ({"telemetry": {"allowed_peers": [7]}}, {}, ["allowed_peers", "[7]", "string"]),
        ({}, {"NIXLTEL_ALLOWED_PEERS": "10.0.0.0/8,*"}, ["NIXLTEL_ALLOWED_PEERS", "entry '*'"]),
        ({}, {"NIXLTEL_ALLOWED_PEERS": " , "}, ["NIXLTEL_ALLOWED_PEERS", "at least 1 item"]),
        ({}, {"NIXLTEL_QUEUE": "7"}, ["NIXLTEL_QUEUE='7'", "NIXLTEL_QUEUE_SIZE", "NIXLTEL_AUTO"]),
        ({}, {"NIXLTEL_TRACES": "perhaps"}, ["NIXLTEL_TRACES", "'perhaps'", "boolean"]),
    ],
)
def test_mistakes_are_named(config: dict[str, Any], environ: dict[str, str], expected: list[str]) -> None:
    """The message has the key or variable, the value, and what would be valid."""
    with pytest.raises(SettingsError) as caught:
        Settings.load(config, environ)

    assert [part for part in expected if part not in str(caught.value)] == []


def test_automatic_wiring() -> None:
    """A variable only; a value that is neither true nor false is a mistake."""
    assert [is_auto({"NIXLTEL_AUTO": value}) for value in ("1", "true", "on", "0", "no", "")] == [True] * 3 + [
        False
    ] * 3
    assert not is_auto({})
    with pytest.raises(SettingsError, match="NIXLTEL_AUTO is 'please'"):
        is_auto({"NIXLTEL_AUTO": "please"})
