# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What was measured, as the summary tells it, and what should be there but is not. Nothing here is assumed."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.catalogue import ADDED_LABELS, CONNECTOR_INFO, HANDSHAKE_REJECTIONS
from nixl_telemetry.signals.semconv import MODE_OF_OPERATION, ErrorType, EventName, SpanName
from nixl_telemetry.testbed import MetricsSnapshot, ReceivedSpan

STAGES: Final = (SpanName.HANDSHAKE_METADATA, SpanName.HANDSHAKE_COMPAT, SpanName.HANDSHAKE_REGISTER)
"""The stages of a handshake with one rank."""


@dataclass(frozen=True)
class ModeEvidence:
    """What one mode left behind.

    Attributes:
        mode: The transfer mode.
        requests: How many requests were answered.
        spans: The suite's spans.
        metrics: What each instance exposed at the end, by role.
        stock_hash: The compatibility hash that a stock instance of this mode answers.
    """

    mode: str
    requests: int
    spans: tuple[ReceivedSpan, ...]
    metrics: Mapping[str, MetricsSnapshot]
    stock_hash: str


@dataclass(frozen=True)
class RejectionEvidence:
    """What a mismatched pair left behind.

    Attributes:
        http_status: What the client got.
        body: The answer, as text.
        spans: The suite's spans.
        metrics: What the decode instance exposed afterwards.
        log_line: The decode instance's line about the conflicting modes, or empty.
    """

    http_status: int
    body: str
    spans: tuple[ReceivedSpan, ...]
    metrics: MetricsSnapshot
    log_line: str

    @property
    def handshake(self) -> ReceivedSpan | None:
        """The handshake that failed."""
        failed = (span for span in self.spans if span.name == SpanName.HANDSHAKE and span.status == "ERROR")
        return next(failed, None)

    @property
    def conflict(self) -> Mapping[str, Any]:
        """Attributes of the handshake's event that names the two modes; empty where there is none."""
        events = self.handshake.events if self.handshake else ()
        return next((event.attributes for event in events if event.name == EventName.MODE_CONFLICT), {})

    @property
    def reason(self) -> str:
        """The first line of the exception, which says what differs; empty where there is none."""
        return self.handshake.status_message.partition("\n")[0] if self.handshake else ""


def of_mode(spans: Sequence[ReceivedSpan], mode: str) -> tuple[ReceivedSpan, ...]:
    """The suite's spans that instances of a mode made, in order of time."""
    ours = sorted((span for span in spans if span.name in tuple(SpanName)), key=lambda span: span.start_ns)
    # Children do not repeat the attributes of their parent.
    roots = {span.span_id for span in ours if span.attributes.get(semconv.TRANSFER_MODE) == mode}
    return tuple(span for span in ours if span.span_id in roots or span.parent_span_id in roots)


def count(spans: Iterable[ReceivedSpan], name: str) -> int:
    """How many spans have this name."""
    return sum(span.name == name for span in spans)


def summary(modes: Mapping[str, ModeEvidence], rejection: RejectionEvidence | None) -> dict[str, Any]:
    """The content of ``summary.json``; ``None`` stands for what was not seen or was not the same everywhere."""
    info = [sample.labels for seen in modes.values() for sample in _info(seen)]
    version = _only(labels["connector_version"] for labels in info)
    return {
        "vllm": _only(labels["vllm_version"] for labels in info),
        "nixl": _only(labels["nixl_version"] for labels in info),
        "connector_version": None if version is None else int(version),
        "modes": {mode: _mode_summary(seen) for mode, seen in modes.items()},
        "rejection": None if rejection is None else _rejection_summary(rejection),
    }


def missing(modes: Mapping[str, ModeEvidence], rejection: RejectionEvidence | None) -> list[str]:
    """What the demo should have shown but did not, one sentence each."""
    found = summary(modes, rejection)
    checks = {
        f"the same {key} on every instance": found[key] is not None for key in ("vllm", "nixl", "connector_version")
    }
    for mode, seen in modes.items():
        part = found["modes"][mode]
        operation = next(name for name, of in MODE_OF_OPERATION.items() if of == mode)
        handshakes = part["spans"].get(SpanName.HANDSHAKE, 0)
        checks |= {
            f"{mode}: a nixl.handshake span": handshakes > 0,
            f"{mode}: every handshake with its three stages": all(
                part["spans"].get(stage, 0) == handshakes for stage in STAGES
            ),
            f"{mode}: one {operation} for each request": part["operations"] == {operation: seen.requests},
            f"{mode}: no failed operation": not [span for span in seen.spans if span.status == "ERROR"],
            f"{mode}: NIXL metrics": part["nixl_samples"] > 0,
            f"{mode}: the labels {' and '.join(ADDED_LABELS)} on every NIXL sample": not part[
                "nixl_samples_unlabelled"
            ],
            f"{mode}: the compatibility hash of a stock instance": part["hash_equals_stock"],
        }
    if rejection is not None:
        part = found["rejection"]
        checks |= {
            "mismatch: HTTP 500 for the client": part["http_status"] == HTTPStatus.INTERNAL_SERVER_ERROR,
            "mismatch: error.type=compat_mismatch on the handshake": part["error_type"] == ErrorType.COMPAT_MISMATCH,
            "mismatch: both modes named": (part["local_mode"], part["remote_mode"]) == ("push", "pull"),
            "mismatch: what differs, in the exception": "transfer_mode" in rejection.reason,
            "mismatch: the log line": bool(rejection.log_line),
            "mismatch: a counted rejection": part["rejections_total"] > 0,
        }
    return [what for what, was_seen in checks.items() if not was_seen]


def plain(value: Any) -> Any:
    """What ``json`` cannot write by itself, as something it can."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes):
        return value.hex()
    return vars(value)


def _mode_summary(seen: ModeEvidence) -> dict[str, Any]:
    samples = [sample for snapshot in seen.metrics.values() for sample in snapshot.samples if "nixl" in sample.name]
    labelled = {"transfer_mode": seen.mode}
    return {
        "requests": seen.requests,
        "spans": dict(Counter(span.name for span in seen.spans)),
        "operations": dict(
            Counter(
                span.attributes[semconv.TRANSFER_OPERATION] for span in seen.spans if span.name == SpanName.TRANSFER
            )
        ),
        "nixl_samples": len(samples),
        "nixl_samples_unlabelled": sum(
            not (labelled.items() <= sample.labels.items() and sample.labels.get("connector_version"))
            for sample in samples
        ),
        "hash_equals_stock": _only(sample.labels["compat_hash"] for sample in _info(seen)) == seen.stock_hash,
    }


def _rejection_summary(seen: RejectionEvidence) -> dict[str, Any]:
    return {
        "local_mode": seen.conflict.get(semconv.MODE_CONFLICT_EXPECTED),
        "remote_mode": seen.conflict.get(semconv.MODE_CONFLICT_FOUND),
        "http_status": seen.http_status,
        "error_type": seen.handshake.attributes.get(semconv.ERROR_TYPE) if seen.handshake else None,
        "rejections_total": int(seen.metrics.value(HANDSHAKE_REJECTIONS.name) or 0),
    }


def _info(seen: ModeEvidence) -> list[Any]:
    return [sample for snapshot in seen.metrics.values() for sample in snapshot.select(CONNECTOR_INFO.name)]


def _only(values: Iterable[str]) -> str | None:
    different = set(values)
    return different.pop() if len(different) == 1 else None
