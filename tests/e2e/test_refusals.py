# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What is refused at start, and what a mismatched pair looks like."""

from pathlib import Path

import pytest

from nixl_telemetry.testbed import CONSUMER, ProcessDiedError, ServerConfig
from tests.e2e.conftest import MODULE, fleet


@pytest.mark.parametrize(
    ("extra_config", "env", "parts"),
    [
        ({"telemetry": {"traces_on": True}}, {}, ["unknown key 'traces_on'", "Valid keys:", "queue_size"]),
        ({}, {"NIXLTEL_QUEUE_SIZE": "lots"}, ["NIXLTEL_QUEUE_SIZE", "'lots'"]),
    ],
)
def test_bad_settings_are_refused_before_the_model_is_loaded(
    model: Path, extra_config: dict[str, object], env: dict[str, str], parts: list[str]
) -> None:
    """The server ends at once; its log has the setting, the value and the valid ones."""
    config = ServerConfig(model, CONSUMER, "NixlPullConnector", MODULE, extra_config, env=env)
    with pytest.raises(ProcessDiedError) as caught, fleet(server=config):
        pass

    message = str(caught.value)
    assert [part for part in parts if part not in message] == []
    assert "Loading weights" not in message
