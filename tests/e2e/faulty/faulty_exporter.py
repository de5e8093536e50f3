# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The instrumented connectors, with an exporter that raises."""

from typing import Any

from nixl_telemetry.connectors import *  # noqa: F403
from nixl_telemetry.signals import traces


class _RaisingExporter:
    def send(self, request: Any) -> None:
        raise RuntimeError("injected into the exporter")

    def shutdown(self) -> None:
        pass


vars(traces).update(is_configured=lambda endpoint: True, connect=lambda endpoint: _RaisingExporter())
