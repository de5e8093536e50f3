# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The other examples: Prometheus takes its configs, the collector's is whole, rotel runs, files say what to change."""

import ipaddress
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

from nixl_telemetry.signals.semconv import KEPT, Kept
from nixl_telemetry.testbed.collector import find_rotel
from nixl_telemetry.testbed.otlp_receiver import OtlpReceiver
from nixl_telemetry.testbed.ports import LOOPBACK, PortReservation
from nixl_telemetry.testbed.processes import ManagedProcess
from nixl_telemetry.testbed.readiness import port_open
from tests.support.manifests import EXAMPLES, MONITORING, SERVING, find

RULES: Final = EXAMPLES.parent / "alerts" / "nixl.rules.yaml"
PROMETHEUS: Final = sorted((EXAMPLES / "prometheus").glob("*.yml"))
COLLECTOR: Final = EXAMPLES / "otel-collector"
GENERATED: Final = {MONITORING / "prometheus-rule.yaml", *(MONITORING / "dashboards").iterdir()}
WRITTEN: Final = [
    path for path in sorted(EXAMPLES.rglob("*")) if path.is_file() and path.suffix != ".md" and path not in GENERATED
]


def loaded(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return config


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_file_says_what_to_change(path: Path) -> None:
    head = path.read_text(encoding="utf-8")[:1500]

    assert "SPDX-License-Identifier: Apache-2.0" in head
    assert "To change: " in head


def test_the_readme_names_every_folder() -> None:
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    links = set(re.findall(r"\]\(([^)#:]+)\)", readme))

    assert [link for link in links if not (EXAMPLES / link).exists()] == []
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    assert {link.partition("/")[0] for link in links} >= folders


# ----------------------------------------------------------------------------------------------------------- Prometheus


def check_config(path: Path, folder: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    """What promtool says of a config, with the rules in the folder that README.md says."""
    assert shutil.which("promtool"), "promtool is missing: `make promtool` installs it (Debian's package prometheus)"
    config = loaded(path)
    for scrape in config["scrape_configs"]:
        # Debian builds Prometheus without Kubernetes.
        if scrape.pop("kubernetes_sd_configs", None):
            scrape["static_configs"] = [{"targets": ["127.0.0.1:8000"]}]
        scrape.update(changes)
    (folder / path.name).write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / RULES.name).write_bytes(RULES.read_bytes())
    return subprocess.run(
        ["promtool", "check", "config", folder / path.name], capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.parametrize("path", PROMETHEUS, ids=lambda path: path.stem)
def test_promtool_takes_it(path: Path, tmp_path: Path) -> None:
    told = check_config(path, tmp_path)

    assert told.returncode == 0, told.stderr
    assert "1 rule files found" in told.stdout
    assert re.search(r"SUCCESS: \d+ rules found", told.stdout)


@pytest.mark.parametrize(
    "fault",
    [{"scrape_intervall": "5s"}, {"scrape_interval": "5 s"}, {"relabel_configs": [{"action": "kep", "regex": "x"}]}],
    ids=str,
)
@pytest.mark.parametrize("path", PROMETHEUS, ids=lambda path: path.stem)
def test_promtool_finds_planted_faults(path: Path, fault: dict[str, Any], tmp_path: Path) -> None:
    assert check_config(path, tmp_path, **fault).returncode == 1


def test_prefill_and_decode_are_one_job() -> None:
    """Alerts compare the instances of a job with each other."""
    (static,) = loaded(EXAMPLES / "prometheus" / "prometheus.yml")["scrape_configs"]

    assert len(static["static_configs"]) == 2
    (pods,) = loaded(EXAMPLES / "prometheus" / "prometheus-kubernetes.yml")["scrape_configs"]
    monitor = find("PodMonitor", "vllm")
    namespace = loaded(SERVING / "kustomization.yaml")["namespace"]
    assert pods["job_name"] == f"{namespace}/{monitor['metadata']['name']}"


def test_pods_are_found_as_by_the_monitor() -> None:
    (scrape,) = loaded(EXAMPLES / "prometheus" / "prometheus-kubernetes.yml")["scrape_configs"]
    (discovery,) = scrape["kubernetes_sd_configs"]
    (label, value), *others = find("PodMonitor", "vllm")["spec"]["selector"]["matchLabels"].items()

    assert others == []
    assert discovery == {
        "role": "pod",
        "namespaces": {"names": [loaded(SERVING / "kustomization.yaml")["namespace"]]},
        "selectors": [{"role": "pod", "label": f"{label}={value}"}],
    }


# ------------------------------------------------------------------------------------------------------------ Collector


def test_the_collector_has_what_it_uses_and_uses_what_it_has() -> None:
    """Its own check, `otelcol validate`, is in no package registry."""
    config = loaded(COLLECTOR / "config.yaml")
    pipelines = config["service"]["pipelines"].values()

    assert config.keys() == {"receivers", "processors", "exporters", "extensions", "service"}
    for kind in ("receivers", "processors", "exporters"):
        assert sorted({name for pipeline in pipelines for name in pipeline[kind]}) == sorted(config[kind])
    assert sorted(config["service"]["extensions"]) == sorted(config["extensions"])
    (traces,) = pipelines
    assert traces["processors"] == ["memory_limiter", "tail_sampling", "batch"]


def test_the_collector_listens_on_loopback() -> None:
    config = loaded(COLLECTOR / "config.yaml")
    protocols = config["receivers"]["otlp"]["protocols"]
    endpoints = [one["endpoint"] for one in [*protocols.values(), *config["extensions"].values()]]

    assert protocols.keys() == {"grpc", "http"}
    assert all(ipaddress.ip_address(endpoint.rpartition(":")[0]).is_loopback for endpoint in endpoints)


def test_failed_and_slow_traces_are_kept() -> None:
    """Each policy has the settings of its type and no others; the attribute is the suite's."""
    policies = loaded(COLLECTOR / "config.yaml")["processors"]["tail_sampling"]["policies"]
    by_type = {policy["type"]: policy for policy in policies}

    for policy in policies:
        assert policy.keys() == {"name", "type", policy["type"]}
    assert by_type["status_code"]["status_code"] == {"status_codes": ["ERROR"]}
    assert by_type["string_attribute"]["string_attribute"] == {"key": KEPT, "values": sorted(Kept)}
    assert by_type.keys() == {"status_code", "string_attribute", "latency", "probabilistic"}


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_rotel_passes_spans_on(protocol: str, tmp_path: Path) -> None:
    with OtlpReceiver() as backend, PortReservation(2) as reserved:
        grpc, http = (f"{LOOPBACK}:{port}" for port in reserved.ports)
        rotel = ManagedProcess(
            "rotel",
            [str(COLLECTOR / "rotel.sh")],
            work_dir=tmp_path,
            env={
                **os.environ,
                "ROTEL": str(find_rotel()),
                "GRPC": grpc,
                "HTTP": http,
                "BACKEND": backend.grpc_endpoint,
            },
        )
        try:
            rotel.start()
            for port in reserved.ports:
                rotel.wait_ready(port_open(LOOPBACK, port), 30)
            send_span(
                GrpcExporter(endpoint=f"http://{grpc}", insecure=True)
                if protocol == "grpc"
                else HttpExporter(endpoint=f"http://{http}/v1/traces")
            )
            (span,) = backend.wait_for(lambda spans: len(spans) == 1)
        finally:
            rotel.stop()

    assert (span.name, span.attributes[KEPT]) == ("nixl.transfer", "failed")


def send_span(exporter: SpanExporter) -> None:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    provider.get_tracer("nixl_telemetry").start_span("nixl.transfer", attributes={KEPT: "failed"}).end()
    provider.shutdown()


def test_rotel_without_a_backend_says_so() -> None:
    told = subprocess.run(
        [COLLECTOR / "rotel.sh"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )

    assert told.returncode == 2
    assert "BACKEND: is the OTLP endpoint to pass spans on to" in told.stderr
