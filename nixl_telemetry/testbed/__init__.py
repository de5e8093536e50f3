# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Real vLLM servers, a real router and a real OTLP receiver on one machine without a GPU.

Used by the end-to-end tests and by the demo. Nothing here imports vLLM or torch: servers are child
processes, bound to loopback, and none outlives the process that started it.
"""

from nixl_telemetry.testbed.black_hole import BlackHole
from nixl_telemetry.testbed.client import MODEL_NAME, Completion, complete
from nixl_telemetry.testbed.collector import Collector
from nixl_telemetry.testbed.errors import (
    HttpStatusError,
    MissingProgramError,
    ProcessDiedError,
    ProcessError,
    ProcessNotReadyError,
)
from nixl_telemetry.testbed.metrics import MetricsSnapshot
from nixl_telemetry.testbed.model import TinyModel
from nixl_telemetry.testbed.otlp_receiver import OtlpReceiver, ServerTls
from nixl_telemetry.testbed.otlp_spans import Event, Link, ReceivedSpan, Scope
from nixl_telemetry.testbed.pair import DisaggregatedCompletion, Pair, disaggregated_completion, running_pair
from nixl_telemetry.testbed.ports import LOOPBACK, PortReservation, unreachable_port
from nixl_telemetry.testbed.processes import ManagedProcess, stop_all
from nixl_telemetry.testbed.procfs import ExitReport, ProcessInfo
from nixl_telemetry.testbed.readiness import http_ok, port_open
from nixl_telemetry.testbed.relay import Relay
from nixl_telemetry.testbed.router import Router, find_router
from nixl_telemetry.testbed.server_config import CONSUMER, PRODUCER, ServerConfig
from nixl_telemetry.testbed.vllm_server import VllmServer, running, stop_servers, vllm_forkserver

__all__ = [
    "CONSUMER",
    "LOOPBACK",
    "MODEL_NAME",
    "PRODUCER",
    "BlackHole",
    "Collector",
    "Completion",
    "DisaggregatedCompletion",
    "Event",
    "ExitReport",
    "HttpStatusError",
    "Link",
    "ManagedProcess",
    "MetricsSnapshot",
    "MissingProgramError",
    "OtlpReceiver",
    "Pair",
    "PortReservation",
    "ProcessDiedError",
    "ProcessError",
    "ProcessInfo",
    "ProcessNotReadyError",
    "ReceivedSpan",
    "Relay",
    "Router",
    "Scope",
    "ServerConfig",
    "ServerTls",
    "TinyModel",
    "VllmServer",
    "complete",
    "disaggregated_completion",
    "find_router",
    "http_ok",
    "port_open",
    "running",
    "running_pair",
    "stop_all",
    "stop_servers",
    "unreachable_port",
    "vllm_forkserver",
]
