# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The instrumented connectors, with the CPU time of the suite's own code counted; servers load this module.

Each process that has a connector writes what it counted so far into a file of the folder that ``FOLDER`` names, twice
a second: workers are killed before they could write it in the end.
"""

import json
import os
import threading
import time
from pathlib import Path
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
    NixlPullConnector as StockPull,
    NixlPushConnector as StockPush,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats

from benchmarks.measured import FOLDER
from benchmarks.meter import Meter, threads_ns
from nixl_telemetry.plugin import register
from nixl_telemetry.seam.connector import (
    InstrumentedNixlPullConnector,
    InstrumentedNixlPushConnector,
    _ConnectorHooks,
)
from nixl_telemetry.seam.payload import Payload
from nixl_telemetry.seam.stats import TelemetryStats

_WRITE_SECONDS: Final = 0.5

register()
_meter = Meter()
_meter.install()
_STATS_METHODS: Final = ("__post_init__", "reset", "is_empty", "aggregate", "record_transfer")
_meter.count_methods(TelemetryStats, *_STATS_METHODS)
_meter.leave_out_methods(NixlKVConnectorStats, *_STATS_METHODS)
_meter.count_methods(Payload, "__post_init__")
_roles: set[str] = set()


class _Reporting(_ConnectorHooks):
    """Begins to write once there is something to be counted."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if not _roles:
            threading.Thread(target=_write_forever, name="benchmark-meter", daemon=True).start()
        _roles.add("worker" if self.connector_worker is not None else "engine core")


def _write_forever() -> None:
    path = Path(os.environ[FOLDER], f"{os.getpid()}.json")
    while True:
        now = {
            "roles": sorted(_roles),
            "at": time.time(),
            "process_ns": time.process_time_ns(),
            "writer_ns": time.thread_time_ns(),
            "hooks": _meter.hooks(),
            "threads": threads_ns(),
        }
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(now), encoding="utf-8")
        temporary.replace(path)
        time.sleep(_WRITE_SECONDS)


def _measured(stock: type, ours: Any) -> Any:
    members = {"transfer_mode": ours.transfer_mode, "_worker_hooks": ours._worker_hooks}
    return _meter.layered(_Reporting, stock, **members)


NixlConnector = NixlPullConnector = _measured(StockPull, InstrumentedNixlPullConnector)
NixlPushConnector = _measured(StockPush, InstrumentedNixlPushConnector)
