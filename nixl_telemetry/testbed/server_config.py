# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""How one vLLM server is configured: its command line and its environment."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nixl_telemetry.testbed.client import MODEL_NAME
from nixl_telemetry.testbed.ports import LOOPBACK

PRODUCER = "kv_producer"
CONSUMER = "kv_consumer"

# Settings of the caller's shell that would change what a server does or where its signals go.
_DROPPED_PREFIXES = ("OTEL_", "NIXLTEL_", "NIXL_", "VLLM_", "UCX_", "PROMETHEUS_")
_SERVE = Path(__file__).with_name("serve.py")
# Holds a sitecustomize.py, so that it takes effect whatever the interpreter and the vLLM version.
_AT_START = Path(__file__).with_name("at_start")
# Without bytecode each server compiles vLLM and torch anew, which takes as long as all the rest of its start.
_DROPPED_NAMES = ("TRACEPARENT", "TRACESTATE", "traceparent", "tracestate", "PYTHONDONTWRITEBYTECODE")


@dataclass(frozen=True)
class ServerConfig:
    """One vLLM server on the CPU with a NIXL connector.

    Attributes:
        model: Folder written by ``TinyModel.write``.
        role: ``kv_producer`` (prefill), ``kv_consumer`` (decode) or ``kv_both``.
        connector: The connector's name.
        connector_module: ``kv_connector_module_path``; without it vLLM's registry resolves the name.
        extra_config: ``kv_connector_extra_config``.
        kv_transfer_config: Replaces everything above that goes into ``--kv-transfer-config``, for
            example for a ``MultiConnector``.
        tensor_parallel_size: Ranks, one worker process each when there are several.
        data_parallel_size: Engines; rank *n* listens on the side-channel port plus *n*.
        api_server_count: API server processes.
        otlp_endpoint: ``--otlp-traces-endpoint``; for plain ``OTEL_*`` variables use *env*.
        env: Environment variables on top of the defaults.
        args: More command-line arguments, after the defaults so that they win.
        python: The interpreter of the environment whose vLLM to run.
        block_size: Tokens in a KV block, a multiple of 32 on the CPU.
        max_model_len: Longest prompt plus completion.
        dtype: Of weights and KV cache.
        kv_cache_gib: Memory for the KV cache, per rank.
        polite: Whether the server's polling sleeps instead of yielding, see ``at_start/sitecustomize.py``.
            Without it a pair on two cores stalls for up to half a minute at a time.
        fork: Whether engine core and workers are forked, which starts a server in half the time. The API server's own
            spans are then lost: gRPC does not survive a fork.
    """

    model: Path
    role: str = PRODUCER
    connector: str = "NixlPullConnector"
    connector_module: str | None = None
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    kv_transfer_config: Mapping[str, Any] | None = None
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    api_server_count: int = 1
    otlp_endpoint: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    python: Path = Path(sys.executable)
    block_size: int = 32
    max_model_len: int = 4096
    dtype: str = "bfloat16"
    kv_cache_gib: int = 1
    polite: bool = True
    fork: bool = False

    def transfer_config(self) -> dict[str, Any]:
        """Returns the value of ``--kv-transfer-config``."""
        if self.kv_transfer_config is not None:
            return dict(self.kv_transfer_config)
        config: dict[str, Any] = {
            "kv_connector": self.connector,
            "kv_role": self.role,
            "kv_buffer_device": "cpu",
        }
        if self.connector_module is not None:
            config["kv_connector_module_path"] = self.connector_module
        # NIXL's own threads poll: an idle worker costs 0.85 of a core with vLLM's four, and a third with none.
        extra = {**({"num_threads": 0} if self.polite else {}), **self.extra_config}
        if extra:
            config["kv_connector_extra_config"] = extra
        return config

    def argv(self, port: int) -> list[str]:
        """Returns the command that serves on *port*."""
        options: dict[str, object] = {
            "--model": self.model,
            "--served-model-name": MODEL_NAME,
            "--host": LOOPBACK,
            "--port": port,
            "--dtype": self.dtype,
            "--max-model-len": self.max_model_len,
            "--block-size": self.block_size,
            "--seed": 0,
            "--kv-transfer-config": json.dumps(self.transfer_config()),
        }
        if self.tensor_parallel_size > 1:
            options["--tensor-parallel-size"] = self.tensor_parallel_size
        if self.data_parallel_size > 1:
            options["--data-parallel-size"] = self.data_parallel_size
        if self.api_server_count > 1:
            options["--api-server-count"] = self.api_server_count
        if self.otlp_endpoint is not None:
            options["--otlp-traces-endpoint"] = self.otlp_endpoint
        # The module serves alone: it silently ignores the number of API servers, unlike `vllm serve`.
        alone = self.api_server_count == self.data_parallel_size == 1
        serve = ["-m", "vllm.entrypoints.openai.api_server"] if alone else [str(_SERVE), "serve"]
        arguments = [str(part) for option in options.items() for part in option]
        return [str(self.python), *serve, "--enforce-eager", *arguments, *self.args]

    def environment(self, side_channel_port: int) -> dict[str, str]:
        """Returns the server's whole environment."""
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(_DROPPED_PREFIXES) and name not in _DROPPED_NAMES
        }
        environment = {
            **inherited,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
            "VLLM_HOST_IP": LOOPBACK,
            "UCX_NET_DEVICES": "lo",
            "GLOO_SOCKET_IFNAME": "lo",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            # With several ranks the first request otherwise waits for a C++ compiler, for minutes on a busy machine.
            "TORCH_COMPILE_DISABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            # vLLM kills its workers when it is stopped, with the spans that wait.
            "OTEL_BSP_SCHEDULE_DELAY": "1000",
            **self.env,
        }
        rest = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = str(_AT_START) if not rest else f"{_AT_START}{os.pathsep}{rest}"
        if self.polite:
            environment["NIXLTEL_TESTBED_POLITE"] = "1"
        if self.fork:
            environment["NIXLTEL_TESTBED_FORK"] = "1"
        return environment
