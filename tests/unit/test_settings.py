# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Settings: both sources, their order, and errors that name the thing, the value and what is valid."""

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
        "block_spans": "each",
        "block_span_limit": 64,
        "keep_failed": True,
        "trace_file": None,
        "trace_file_max_bytes": 16 * 2**20,
        "trace_file_count": 4,
        "queue_size": 8192,
        "shutdown_timeout_seconds": 2.0,
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
