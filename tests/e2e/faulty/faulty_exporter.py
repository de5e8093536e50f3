# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The instrumented connectors, with an exporter that raises."""

from typing import Any

from nixl_telemetry.connectors import *  # noqa: F403
from nixl_telemetry.signals import traces


class _RaisingExporter:
    def export(self, spans: Any) -> Any:
        raise RuntimeError("injected into the exporter")

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 0) -> bool:
        return True


traces._exporter = lambda endpoint: _RaisingExporter()  # type: ignore[assignment,return-value]
