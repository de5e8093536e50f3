# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The real router with the arguments of the Kubernetes manifests, before a stand-in for the API server.

What the example relies on: the router finds pods by the labels that the Deployments give them, is ready when there is
one of each role, and sends nothing to a pod that is to be deleted, which would keep `drain` from its end.
"""

import contextlib
import json
import os
import queue
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest

from nixl_telemetry.testbed.ports import LOOPBACK, PortReservation
from nixl_telemetry.testbed.processes import ManagedProcess
from nixl_telemetry.testbed.readiness import http_ok
from nixl_telemetry.testbed.router import find_router
from tests.support.manifests import find
from tests.support.peers import wait_until

NAMESPACE: Final = "group"
LEFT_OUT: Final = ("--host=", "--port=", "--service-discovery-port=")
"""What is another one here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  its name in the base class
        """Says nothing."""

    def reply(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Cluster:
    """The API server of a cluster, as far as a watch on pods needs it."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        cluster = self

        class Api(_Handler):
            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                cluster.paths.append(path)
                if "watch=true" not in query:
                    self.reply(
                        {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": []}
                    )
                    return
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.end_headers()  # without a length: as long as the connection
                while event := cluster._events.get():
                    self.wfile.write(json.dumps(event).encode() + b"\n")
                self.close_connection = True

        self._server = ThreadingHTTPServer((LOOPBACK, 0), Api)
        self._server.daemon_threads = True
        self.url = f"http://{LOOPBACK}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def tell(self, what: str, role: str, address: str, *, ending: bool = False) -> None:
        """Something happened to a pod of a role."""
        metadata = {
            "name": f"{role}-{address}",
            "namespace": NAMESPACE,
            "resourceVersion": "2",
            "labels": find("Deployment", role)["spec"]["template"]["metadata"]["labels"],
            **({"deletionTimestamp": "2026-01-01T00:00:00Z"} if ending else {}),
        }
        status = {"phase": "Running", "podIP": address, "conditions": [{"type": "Ready", "status": "True"}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": []}, "status": status}
        self._events.put({"type": what, "object": pod})

    def kubeconfig(self, path: Path) -> Path:
        """A file with which its clients find it."""
        context = {"cluster": "c", "user": "u", "namespace": NAMESPACE}
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "x",
                    "contexts": [{"name": "x", "context": context}],
                    "clusters": [{"name": "c", "cluster": {"server": self.url}}],
                    "users": [{"name": "u", "user": {}}],
                }
            )
        )
        return path

    def close(self) -> None:
        """End it."""
        self._events.put({})
        self._server.shutdown()
        self._server.server_close()


@contextlib.contextmanager
def instances(addresses: list[str], port: int, served: list[str]) -> Iterator[None]:
    """API servers that answer every completion with nothing, and note who was asked for one."""

    class Instance(_Handler):
        def do_GET(self) -> None:
            self.reply({"data": [{"id": "m"}]})

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/completions":
                served.append(str(self.connection.getsockname()[0]))
            self.reply({"id": "x", "choices": [{"index": 0, "text": ""}], "kv_transfer_params": {}})

    servers = [ThreadingHTTPServer((address, port), Instance) for address in addresses]
    for server in servers:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


def status(url: str, body: dict[str, Any] | None = None) -> int:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.timeout(120)
def test_the_router_finds_pods_and_leaves_those_that_end(tmp_path: Path) -> None:
    container = find("Deployment", "router")["spec"]["template"]["spec"]["containers"][0]
    arguments = [
        argument.replace("$(POD_NAMESPACE)", NAMESPACE)
        for argument in container["args"]
        if not argument.startswith(LEFT_OUT)
    ]
    served: list[str] = []
    cluster = Cluster()
    with PortReservation(3) as reserved, contextlib.closing(cluster):
        port, metrics_port, instance_port = reserved.ports
        own = ["--host", LOOPBACK, "--port", port, "--prometheus-port", metrics_port]
        own += ["--service-discovery-port", instance_port]
        router = ManagedProcess(
            "router",
            [str(find_router()), *arguments, *map(str, own)],
            work_dir=tmp_path,
            env={**os.environ, "KUBECONFIG": str(cluster.kubeconfig(tmp_path / "kubeconfig"))},
        )
        url = f"http://{LOOPBACK}:{port}"
        probes = {key: container[f"{key}Probe"]["httpGet"]["path"] for key in ("readiness", "liveness")}

        def completion() -> list[str]:
            served.clear()
            assert status(f"{url}/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 2}) == 200
            return served.copy()

        with instances(["127.0.0.2", "127.0.0.3", "127.0.0.4"], instance_port, served):
            router.start()
            try:
                router.wait_ready(http_ok(url + probes["liveness"]), 60)
                assert status(url + probes["readiness"]) == 503
                cluster.tell("ADDED", "prefill", "127.0.0.2")
                cluster.tell("ADDED", "decode", "127.0.0.3")
                assert wait_until(lambda: status(url + probes["readiness"]) == 200, 30)
                assert completion() == ["127.0.0.2", "127.0.0.3"]

                cluster.tell("ADDED", "decode", "127.0.0.4")
                cluster.tell("MODIFIED", "decode", "127.0.0.3", ending=True)
                assert wait_until(lambda: completion()[1] == "127.0.0.4", 30)
                assert [completion() for _ in range(5)] == [["127.0.0.2", "127.0.0.4"]] * 5
            finally:
                router.stop()
    assert set(cluster.paths) == {f"/api/v1/namespaces/{NAMESPACE}/pods"}
