# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The demo without its servers: what it makes of spans and samples, how that looks, and where it writes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from rich.console import Console, RenderableType
from typer.testing import CliRunner

from nixl_telemetry.cli.demo import command, evidence, view
from nixl_telemetry.cli.demo.evidence import ModeEvidence, RejectionEvidence
from nixl_telemetry.cli.demo.folder import DemoFolder, ForeignFilesError
from nixl_telemetry.cli.main import app
from nixl_telemetry.testbed import Event, MetricsSnapshot, ReceivedSpan, Scope

STAGES = ("nixl.handshake.metadata", "nixl.handshake.compat", "nixl.handshake.register")
HASH = "d7ec7efda087e714d34144280ff29e0f45a521dfd2d9efaad1bbd821f02252f9"
_ids = count(1)


def span(
    name: str,
    attributes: Mapping[str, Any] | None = None,
    *,
    parent: str = "",
    error: str = "",
    events: Sequence[Event] = (),
    start_ms: float = 0,
    ms: float = 1,
) -> ReceivedSpan:
    return ReceivedSpan(
        resource=MappingProxyType({"vllm.process_id": "7"}),
        resource_schema_url="",
        scope=Scope("nixl_telemetry", "1", "", MappingProxyType({})),
        trace_id="0" * 32,
        span_id=f"{next(_ids):016x}",
        parent_span_id=parent,
        trace_state="",
        flags=0,
        name=name,
        kind="CLIENT",
        start_ns=int(start_ms * 1e6),
        end_ns=int((start_ms + ms) * 1e6),
        status="ERROR" if error else "UNSET",
        status_message="",
        attributes=MappingProxyType({**(attributes or {}), **({"error.type": error} if error else {})}),
        events=tuple(events),
        links=(),
        dropped=0,
    )


def handshake(
    mode: str, role: str, stages: Sequence[str] = STAGES, error: str = "", events: Sequence[Event] = ()
) -> tuple[ReceivedSpan, ...]:
    attributes = {
        "nixl.transfer.mode": mode,
        "nixl.kv.role": role,
        "server.address": "10.0.0.1",
        "server.port": 5600,
        "nixl.handshake.purpose": "transfer",
    }
    root = span("nixl.handshake", attributes, error=error, events=events, start_ms=10, ms=8)
    return root, *(span(stage, parent=root.span_id, start_ms=11 + at) for at, stage in enumerate(stages))


def transfer(mode: str, role: str, operation: str) -> ReceivedSpan:
    return span(
        "nixl.transfer",
        {
            "nixl.transfer.mode": mode,
            "nixl.kv.role": role,
            "nixl.transfer.operation": operation,
            "nixl.transfer.block.count": 3,
            "nixl.transfer.size": 393_216,
            "nixl.transfer.duration": 0.0026,
            "nixl.transfer.observation_delay": 0.00012,
        },
        start_ms=30,
    )


def exposition(mode: str, role: str, extra: str = "") -> MetricsSnapshot:
    labels = f'model_name="tiny",engine="0",transfer_mode="{mode}",connector_version="14"'
    versions = f'vllm_version="0.32.0",nixl_version="1.5.1",kv_role="{role}",compat_hash="{HASH}"'
    return MetricsSnapshot(
        f"""\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} 1.0
# TYPE nixl_connector_info gauge
nixl_connector_info{{{labels},{versions},handshake_enforced="true"}} 1.0
# TYPE vllm:nixl_xfer_time_seconds histogram
vllm:nixl_xfer_time_seconds_bucket{{{labels},le="+Inf"}} 2.0
vllm:nixl_xfer_time_seconds_count{{{labels}}} 2.0
vllm:nixl_xfer_time_seconds_sum{{{labels}}} 0.005
# TYPE nixl_transfer_bytes counter
nixl_transfer_bytes_total{{{labels},direction="read"}} 786432.0
# TYPE nixl_handshake_rejections counter
nixl_handshake_rejections_total{{{labels},factor="transfer_mode"}} 0.0
nixl_handshake_rejections_total{{{labels},factor="unknown"}} 0.0
{extra}"""
    )


@pytest.fixture
def pull() -> ModeEvidence:
    """Two requests in pull mode, with everything as it should be."""
    spans = (
        *handshake("pull", "kv_consumer"),
        transfer("pull", "kv_consumer", "READ"),
        transfer("pull", "kv_consumer", "READ"),
    )
    metrics = {"prefill": exposition("pull", "kv_producer"), "decode": exposition("pull", "kv_consumer")}
    return ModeEvidence("pull", 2, spans, metrics, HASH)


@pytest.fixture
def push() -> ModeEvidence:
    """One request in push mode: both sides shake hands."""
    spans = (
        *handshake("push", "kv_consumer"),
        *handshake("push", "kv_producer"),
        transfer("push", "kv_producer", "WRITE"),
    )
    metrics = {"prefill": exposition("push", "kv_producer"), "decode": exposition("push", "kv_consumer")}
    return ModeEvidence("push", 1, spans, metrics, HASH)


@pytest.fixture
def rejection() -> RejectionEvidence:
    """A push decode instance that has refused a pull prefill instance."""
    conflict = Event(
        "nixl.mode_conflict", 0, {"nixl.mode_conflict.expected": "push", "nixl.mode_conflict.found": "pull"}
    )
    failed, *stages = handshake("push", "kv_consumer", STAGES[:2], "compat_mismatch", [conflict])
    reason = 'prefill 10.0.0.1:5600 is incompatible: transfer_mode is "pull" there and "push" here (exchanged)'
    spans = (replace(failed, status_message=f"{reason}\nNIXL compatibility hash mismatch."), *stages)
    counted = exposition("push", "kv_consumer").text.replace('factor="unknown"} 0.0', 'factor="unknown"} 1.0')
    line = "(Worker pid=7) WARNING 01-01 [x.py:1] event=nixl.mode_conflict nixl.mode_conflict.found=pull"
    return RejectionEvidence(500, '{"error": "internal"}', spans, MetricsSnapshot(counted), line)


def shown(content: RenderableType) -> str:
    console = Console(width=100, file=StringIO(), color_system=None)
    console.print(content)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


# ------------------------------------------------------------------------------------------------------------- Summary


def test_the_summary_has_what_was_measured(
    pull: ModeEvidence, push: ModeEvidence, rejection: RejectionEvidence
) -> None:
    stages = dict.fromkeys(STAGES, 1)

    assert evidence.summary({"pull": pull, "push": push}, rejection) == {
        "vllm": "0.32.0",
        "nixl": "1.5.1",
        "connector_version": 14,
        "modes": {
            "pull": {
                "requests": 2,
                "spans": {"nixl.handshake": 1, **stages, "nixl.transfer": 2},
                "operations": {"READ": 2},
                "nixl_samples": 14,
                "nixl_samples_unlabelled": 0,
                "hash_equals_stock": True,
            },
            "push": {
                "requests": 1,
                "spans": {"nixl.handshake": 2, **dict.fromkeys(STAGES, 2), "nixl.transfer": 1},
                "operations": {"WRITE": 1},
                "nixl_samples": 14,
                "nixl_samples_unlabelled": 0,
                "hash_equals_stock": True,
            },
        },
        "rejection": {
            "local_mode": "push",
            "remote_mode": "pull",
            "http_status": 500,
            "error_type": "compat_mismatch",
            "rejections_total": 1,
        },
    }
    assert evidence.missing({"pull": pull, "push": push}, rejection) == []


def test_one_mode_has_no_rejection(pull: ModeEvidence) -> None:
    assert evidence.summary({"pull": pull}, None)["rejection"] is None
    assert evidence.missing({"pull": pull}, None) == []


def test_a_sample_without_our_labels_is_missed(pull: ModeEvidence) -> None:
    """Whichever label is absent or wrong; samples that are not NIXL's do not matter."""
    extra = (
        'vllm:nixl_bytes{transfer_mode="pull"} 1.0\n'
        'vllm:nixl_blocks{connector_version="14"} 0.0\n'
        'vllm:nixl_posts{transfer_mode="push",connector_version="14"} 0.0\n'
    )
    seen = replace(pull, metrics={**pull.metrics, "prefill": exposition("pull", "kv_producer", extra)})

    assert evidence.summary({"pull": seen}, None)["modes"]["pull"]["nixl_samples_unlabelled"] == 3
    assert evidence.missing({"pull": seen}, None) == [
        "pull: the labels transfer_mode and connector_version on every NIXL sample"
    ]


def test_instances_that_disagree_are_missed(pull: ModeEvidence) -> None:
    other = MetricsSnapshot(exposition("pull", "kv_producer").text.replace("0.32.0", "0.31.0"))
    seen = replace(pull, metrics={**pull.metrics, "prefill": other})

    assert evidence.summary({"pull": seen}, None)["vllm"] is None
    assert evidence.missing({"pull": seen}, None) == ["the same vllm on every instance"]


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"stock_hash": "another"}, ["pull: the compatibility hash of a stock instance"]),
        ({"requests": 3}, ["pull: one READ for each request"]),
        ({"spans": ()}, ["pull: a nixl.handshake span", "pull: one READ for each request"]),
        (
            {"spans": (*handshake("pull", "kv_consumer", STAGES[:2]), *[transfer("pull", "kv_consumer", "READ")] * 2)},
            ["pull: every handshake with its three stages"],
        ),
        (
            {"spans": (*handshake("pull", "kv_consumer"), *[transfer("pull", "kv_consumer", "WRITE")] * 2)},
            ["pull: one READ for each request"],
        ),
    ],
)
def test_what_is_not_seen_is_said(pull: ModeEvidence, change: dict[str, Any], missed: list[str]) -> None:
    assert evidence.missing({"pull": replace(pull, **change)}, None) == missed


def test_a_rejection_that_was_not_seen_is_said(pull: ModeEvidence) -> None:
    """A mismatched pair that serves is the worst outcome: every line of it is missing."""
    nothing = RejectionEvidence(200, "", (), exposition("push", "kv_consumer"), "")

    missed = evidence.missing({"pull": pull}, nothing)

    assert evidence.summary({}, nothing)["rejection"] == {
        "local_mode": None,
        "remote_mode": None,
        "http_status": 200,
        "error_type": None,
        "rejections_total": 0,
    }
    assert len(missed) == 6
    assert all(line.startswith("mismatch: ") for line in missed)


def test_only_the_spans_of_a_mode_count(pull: ModeEvidence) -> None:
    """Children follow their parent; vLLM's own spans are not ours."""
    spans = [*handshake("push", "kv_consumer"), *pull.spans, span("llm_request")]

    assert evidence.of_mode(spans, "pull") == pull.spans


def test_spans_can_be_written_as_json(rejection: RejectionEvidence) -> None:
    (first, *_) = json.loads(json.dumps(rejection.spans, default=evidence.plain))

    assert first["name"] == "nixl.handshake"
    assert first["attributes"]["error.type"] == "compat_mismatch"
    assert first["events"][0]["attributes"]["nixl.mode_conflict.found"] == "pull"


# ---------------------------------------------------------------------------------------------------------------- View


def test_spans_are_a_tree_for_each_instance(push: ModeEvidence) -> None:
    lines = [line.rstrip() for line in shown(view.span_tree(push.spans)).splitlines()]

    assert lines == [
        "decode (push)",
        "└── nixl.handshake                      8 ms  10.0.0.1:5600 (transfer)",
        "    ├── nixl.handshake.metadata         1 ms",
        "    ├── nixl.handshake.compat           1 ms",
        "    └── nixl.handshake.register         1 ms",
        "prefill (push)",
        "├── nixl.handshake                      8 ms  10.0.0.1:5600 (transfer)",
        "│   ├── nixl.handshake.metadata         1 ms",
        "│   ├── nixl.handshake.compat           1 ms",
        "│   └── nixl.handshake.register         1 ms",
        "└── nixl.transfer                     2.6 ms  WRITE    3 blocks    384 KiB  ended in the last 120 µs",
    ]


def test_a_span_under_a_span_that_is_not_shown_is_a_root() -> None:
    """A request's span is vLLM's."""
    orphan = replace(transfer("pull", "kv_consumer", "READ"), parent_span_id="feedfacefeedface")

    assert "nixl.transfer" in shown(view.span_tree([orphan]))


def test_a_request_is_shown_where_each_part_of_it_happened() -> None:
    """Parents may be on the other instance; blocks are left out."""
    mode = {"nixl.transfer.mode": "pull"}
    lease = span(
        "nixl.lease",
        {**mode, "nixl.kv.role": "kv_producer", "nixl.lease.block.count": 3, "nixl.lease.outcome": "released"},
        ms=50,
    )
    waits = {"nixl.receive.handshake.duration": 0.02, "nixl.receive.queue.duration": 0.0}
    receive = span(
        "nixl.receive", {**mode, "nixl.kv.role": "kv_consumer", **waits}, parent=lease.span_id, start_ms=10, ms=30
    )
    moved = replace(transfer("pull", "kv_consumer", "READ"), parent_span_id=receive.span_id)
    block = span("nixl.block", parent=moved.span_id)

    lines = [line.rstrip() for line in shown(view.span_tree([block, moved, receive, lease])).splitlines()]

    assert lines == [
        "prefill (pull)",
        "└── nixl.lease                         50 ms  3 blocks, released",
        "decode (pull)",
        "└── nixl.receive                       30 ms  handshake 20 ms",
        "    └── nixl.transfer                 2.6 ms  READ    3 blocks    384 KiB  ended in the last 120 µs",
    ]


def test_metrics_are_compact(pull: ModeEvidence) -> None:
    """Zeros, buckets and labels that every sample has are left out."""
    text = shown(view.metrics_table(pull.metrics))

    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "nixl_transfer_bytes_total direction=read 768 KiB 768 KiB" in rows
    assert "vllm:nixl_xfer_time_seconds 2, mean 2.5 ms 2, mean 2.5 ms" in rows
    assert "rejections" not in text
    assert "_bucket" not in text
    assert "num_requests_running" not in text
    assert "transfer_mode" not in text


def test_a_mode_is_reported_with_its_hash_and_labels(pull: ModeEvidence) -> None:
    text = shown(view.mode_report(pull))

    assert "d7ec7efda087… on prefill and decode, the same as a stock instance's" in text
    assert 'each one labelled transfer_mode="pull" and connector_version="14"' in text
    assert "NOT" in shown(view.mode_report(replace(pull, stock_hash="another")))


def test_a_rejection_says_what_happened_and_what_to_do(rejection: RejectionEvidence) -> None:
    text = " ".join(shown(view.rejection_report(rejection)).replace("│", " ").split())

    assert "HTTP 500" in text
    assert "error.type=compat_mismatch" in text
    assert "event nixl.mode_conflict expected=push found=pull" in text
    assert "event=nixl.mode_conflict nixl.mode_conflict.found=pull" in text
    assert "Worker pid" not in text
    assert "The push decode instance refused its pull peer (compat_mismatch)" in text
    assert "handshakes rejected: 1." in text
    assert 'transfer_mode is "pull" there and "push" here (exchanged)' in text
    assert "Give both sides the same kv_connector" in text


def test_a_rejection_that_was_not_seen_can_be_shown() -> None:
    assert "HTTP 200" in shown(view.rejection_report(RejectionEvidence(200, "", (), MetricsSnapshot(""), "")))


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 µs"), (0.00012, "120 µs"), (0.0026, "2.6 ms"), (0.25, "250 ms"), (12.34, "12.3 s")]
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert view.duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (393_216, "384 KiB"), (1 << 20, "1 MiB")])
def test_sizes_read_well(count: int, text: str) -> None:
    assert view.size_of(count) == text


# -------------------------------------------------------------------------------------------------- Folder and command


def test_the_folder_of_an_earlier_demo_is_emptied(tmp_path: Path) -> None:
    folder = DemoFolder.prepare(tmp_path / "new" / "out")
    for name in ("summary.json", "spans.json", "metrics-pull-prefill.txt", "logs/router-pull.log"):
        folder.write(name, "old")

    again = DemoFolder.prepare(folder.path)

    assert [path.name for path in again.path.rglob("*")] == ["logs"]


@pytest.mark.parametrize("name", ["notes.txt", "logs/deep/server.log", "summary.json.bak"])
def test_foreign_files_are_kept_and_named(tmp_path: Path, name: str) -> None:
    """Nothing is removed, not even what is the demo's."""
    for file in (tmp_path / "summary.json", tmp_path / name):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("precious")

    with pytest.raises(ForeignFilesError, match=name):
        DemoFolder.prepare(tmp_path)

    assert (tmp_path / "summary.json").read_text() == (tmp_path / name).read_text() == "precious"


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")

    with pytest.raises(ForeignFilesError, match="not a folder"):
        DemoFolder.prepare(tmp_path / "out")


def test_without_vllm_the_command_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_is_installed", lambda name: name != "vllm")

    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out")])

    assert result.exit_code == 1
    assert "needs vllm" in result.output
    assert "pip install 'nixl-telemetry[cpu]'" in result.output
    assert not (tmp_path / "out").exists()


def test_without_a_router_the_command_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_is_installed", lambda name: True)
    monkeypatch.setenv("NIXLTEL_TESTBED_ROUTER", str(tmp_path / "nowhere"))

    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path / "out")])

    assert result.exit_code == 1
    assert "pip install vllm-router" in " ".join(result.output.split())


def test_a_foreign_folder_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_check_installed", lambda: None)
    (tmp_path / "thesis.tex").write_text("precious")

    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path)])

    assert result.exit_code == 1
    assert "thesis.tex" in result.output
