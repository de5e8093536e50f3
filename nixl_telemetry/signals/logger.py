# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The logger under which everything of ours is logged. Light: the plugin imports it in every process of vLLM's."""

import logging
from typing import Final

LOGGER_NAME: Final = "vllm.nixl_telemetry"
"""A child of vLLM's logger: vLLM installs its handler there and leaves the root logger alone."""


def logger() -> logging.Logger:
    """The logger."""
    return logging.getLogger(LOGGER_NAME)
