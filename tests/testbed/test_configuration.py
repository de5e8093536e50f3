# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What servers and the router are told, and what is said when something is missing or refused."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from nixl_telemetry import testbed
from nixl_telemetry.testbed import (
    HttpStatusError,
    MetricsSnapshot,
    MissingProgramError,
    ServerConfig,
    TinyModel,
    VllmServer,
)


def _options(config: ServerConfig) -> dict[str, str]:
    argv = config.argv(port=8100)
    return dict(itertools.pairwise(argv))


class _Server(BaseHTTPRequestHandler):
    """Answers like a prefill instance that works and a decode instance that may not."""

    seen: ClassVar[list[tuple[str, dict[str, str], dict[str, object]]]] = []
    decode_status = 200

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        headers = {name.lower(): value for name, value in self.headers.items()}
        role = "prefill" if body["kv_transfer_params"].get("do_remote_decode") else "decode"
        self.seen.append((role, headers, body))
        status = self.decode_status if role == "decode" else 200
        answer = {
            "choices": [{"text": "w1 w2", "token_ids": [4, 5], "finish_reason": "length"}],
            "kv_transfer_params": {"remote_engine_id": "e"} if role == "prefill" else None,
        }
        data = json.dumps(answer if status == 200 else {"error": "kv load failed"}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name is the base class's
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(_Server, "seen", [])
    http = HTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}"
    http.shutdown()
    http.server_close()
    thread.join()


def test_importing_the_testbed_imports_neither_vllm_nor_torch() -> None:
    script = "import sys, nixl_telemetry.testbed; print({'vllm', 'torch', 'transformers'} & set(sys.modules))"
    root = Path(__file__).parents[2]
    output = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=root)

    assert output.stdout.strip() == "set()"


def test_every_public_name_exists() -> None:
    assert [name for name in testbed.__all__ if not hasattr(testbed, name)] == []


def test_the_transfer_config_is_put_together(tmp_path: Path) -> None:
    config = ServerConfig(
        tmp_path,
        role=testbed.CONSUMER,
        connector="NixlPushConnector",
        connector_module="nixl_telemetry.connectors",
        extra_config={"telemetry": {"blocks": True}},
    )

    assert json.loads(_options(config)["--kv-transfer-config"]) == {
        "kv_connector": "NixlPushConnector",
        "kv_role": "kv_consumer",
        "kv_buffer_device": "cpu",
        "kv_connector_module_path": "nixl_telemetry.connectors",
        "kv_connector_extra_config": {"num_threads": 0, "telemetry": {"blocks": True}},
    }


def test_a_whole_transfer_config_replaces_everything(tmp_path: Path) -> None:
    config = ServerConfig(tmp_path, kv_transfer_config={"kv_connector": "MultiConnector", "kv_role": "kv_both"})

    assert json.loads(_options(config)["--kv-transfer-config"]) == config.kv_transfer_config


def test_sizes_and_endpoint_become_options(tmp_path: Path) -> None:
    config = ServerConfig(
        tmp_path, tensor_parallel_size=2, api_server_count=3, otlp_endpoint="http://x:1", args=("--seed", "7")
    )

    options = _options(config)
    assert (options["--tensor-parallel-size"], options["--api-server-count"]) == ("2", "3")
    assert (options["--otlp-traces-endpoint"], options["--host"]) == ("http://x:1", "127.0.0.1")
    assert options["--seed"] == "7"


def test_the_callers_shell_does_not_leak_into_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "NIXLTEL_AUTO", "NIXL_TELEMETRY_ENABLE", "VLLM_LOGGING_LEVEL"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("UNRELATED", "kept")

    environment = ServerConfig(tmp_path, env={"NIXLTEL_AUTO": "0"}).environment(side_channel_port=5600)

    assert environment["UNRELATED"] == "kept"
    assert environment["NIXLTEL_AUTO"] == "0"
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert {"OTEL_EXPORTER_OTLP_ENDPOINT", "NIXL_TELEMETRY_ENABLE", "VLLM_LOGGING_LEVEL"}.isdisjoint(environment)


@pytest.mark.parametrize(("polite", "module"), [(True, "sitecustomize"), (False, "posix")])
def test_a_polite_server_does_not_yield_and_keeps_the_callers_path(tmp_path: Path, polite: bool, module: str) -> None:
    config = ServerConfig(tmp_path, env={"PYTHONPATH": "/mine"}, polite=polite)

    assert run_in(config, "import os, sys; print(os.sched_yield.__module__, '/mine' in sys.path)") == [module, "True"]


@pytest.mark.skipif("amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="this CPU has no AMX")
def test_a_server_may_use_amx(tmp_path: Path) -> None:
    """ARCH_GET_XCOMP_PERM names what the process may use; feature 18 is the tiles' data."""
    script = (
        "import ctypes; mask = ctypes.c_uint64(); "
        "ctypes.CDLL(None).syscall(158, 0x1022, ctypes.byref(mask)); print(mask.value >> 18 & 1)"
    )

    assert run_in(ServerConfig(tmp_path), script) == ["1"]


def run_in(config: ServerConfig, script: str) -> list[str]:
    """What a Python of a server prints."""
    environment = config.environment(side_channel_port=5600)
    output = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return output.stdout.split()


def test_the_model_is_the_same_bytes_every_time(tmp_path: Path) -> None:
    model = TinyModel(num_layers=1, num_kv_heads=2)

    one, two = model.write(tmp_path / "one"), model.write(tmp_path / "two")

    assert {file.name: file.read_bytes() for file in one.iterdir()} == {
        file.name: file.read_bytes() for file in two.iterdir()
    }
    assert json.loads((one / "config.json").read_text())["num_key_value_heads"] == 2
    assert len(model.prompt(30, seed=1).split()) == 30
    assert model.prompt(30, seed=1) != model.prompt(30, seed=2)


def test_a_missing_router_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NIXLTEL_TESTBED_ROUTER", str(tmp_path / "router"))

    with pytest.raises(MissingProgramError, match=r"python3 -m venv \.venvs/router .*pip install vllm-router"):
        testbed.find_router()


def test_both_instances_get_the_same_request_and_decode_the_params_of_prefill(server: str) -> None:
    result = testbed.disaggregated_completion(
        server, server, "w1 w2 w3", 2, request_id="r-1", headers={"traceparent": "00-a-b-01"}
    )

    (first, first_headers, first_body), (second, second_headers, second_body) = _Server.seen
    assert (first, second) == ("prefill", "decode")
    for headers in (first_headers, second_headers):
        assert (headers["x-request-id"], headers["traceparent"]) == ("r-1", "00-a-b-01")
    assert (first_body["max_tokens"], second_body["max_tokens"]) == (1, 2)
    assert second_body["kv_transfer_params"] == {"remote_engine_id": "e"}
    assert (result.request_id, result.text, result.token_ids) == ("r-1", "w1 w2", (4, 5))


def test_a_refusal_carries_status_body_and_address(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Server, "decode_status", 500)

    with pytest.raises(HttpStatusError, match=r"answered 500: .*kv load failed") as failure:
        testbed.disaggregated_completion(server, server, "w1")

    assert failure.value.status == 500
    assert failure.value.url == f"{server}/v1/completions"


def test_metrics_are_found_by_name_and_labels() -> None:
    text = '# TYPE n_total counter\nn_total{engine="0",mode="pull"} 2\nn_total{engine="1",mode="pull"} 3\n'
    snapshot = MetricsSnapshot(text)

    assert snapshot.value("n_total", mode="pull") == 5
    assert snapshot.value("n_total", engine="1") == 3
    assert snapshot.value("n_total", mode="push") is None
    assert len(snapshot.select("n_total")) == 2


@pytest.mark.parametrize(("depth", "has_own"), [(1, True), (20, False)])
def test_temporary_files_go_with_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int, has_own: bool
) -> None:
    """Where vLLM puts its sockets; a path that is too long for them stays as it was."""
    outside = Path(tempfile.mkdtemp(dir="/tmp", prefix="t"))
    folder = outside.joinpath(*["deep"] * depth)
    folder.mkdir(parents=True)
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    server = VllmServer("server", ServerConfig(tmp_path), tmp_path)
    environment = server._environment()

    assert (Path(environment["TMPDIR"]).parent == folder) is has_own
    assert Path(environment["TMPDIR"]).is_dir()
    server.stop()
    assert list(folder.iterdir()) == []
    shutil.rmtree(outside)
