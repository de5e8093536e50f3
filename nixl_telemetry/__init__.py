# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Observability for vLLM's NIXL connectors.

Importing this package is cheap and pulls in neither vLLM nor OpenTelemetry; the connectors live in
:mod:`nixl_telemetry.connectors`, which vLLM imports when its config names them.
"""

from typing import Final

__all__ = ["__version__"]

__version__: Final = "0.1.0"
