# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Trace files as instances write them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

START: Final = 1_780_000_000_000_000_000
"""2026-05-28T20:26:40Z, in nanoseconds."""
MS: Final = 1_000_000
TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
P: Final = {"nixl.engine.id": "prefill-engine", "nixl.kv.role": "kv_producer", "nixl.transfer.mode": "pull"}
D: Final = {"nixl.engine.id": "decode-engine", "nixl.kv.role": "kv_consumer", "nixl.transfer.mode": "pull"}
P_HOST: Final = {"service.name": "vllm", "host.name": "host-p", "vllm.process_id": "11"}
D_HOST: Final = {"service.name": "vllm", "host.name": "host-d", "vllm.process_id": "22"}
REQUEST_ID: Final = "cmpl-client-7-0-1a2b3c4d"

Raw = dict[str, Any]


def value(of: object) -> Raw:
    """A value in OTLP's JSON encoding."""
    match of:
        case bool():
            return {"boolValue": of}
        case int():
            return {"intValue": str(of)}
        case float():
            return {"doubleValue": of}
        case list() | tuple():
            return {"arrayValue": {"values": [value(item) for item in of]}}
    return {"stringValue": of}


def pairs(attributes: Mapping[str, object]) -> list[Raw]:
    """Attributes in OTLP's JSON encoding."""
    return [{"key": name, "value": value(of)} for name, of in attributes.items()]


def span(
    name: str,
    number: int,
    begin_ms: float,
    end_ms: float,
    attributes: Mapping[str, object] | None = None,
    *,
    parent: int = 0,
    trace: str = TRACE,
    error: str = "",
    message: str = "",
    **more: Any,
) -> Raw:
    """A span; its number makes its id, and times are relative to :data:`START`."""
    failed = {"error.type": error} if error else {}
    raw: Raw = {
        "traceId": trace,
        "spanId": f"{number:016x}",
        "name": name,
        "kind": 1,
        "startTimeUnixNano": str(START + round(begin_ms * MS)),
        "endTimeUnixNano": str(START + round(end_ms * MS)),
        "attributes": pairs({**(attributes or {}), **failed}),
    }
    if parent:
        raw["parentSpanId"] = f"{parent:016x}"
    if error:
        raw["status"] = {"code": 2, "message": message}
    return raw | more


def line(*spans: Raw, resource: Mapping[str, object] | None = None) -> str:
    """One line of a file."""
    return json.dumps(
        {
            "resourceSpans": [
                {
                    "resource": {"attributes": pairs(resource or {})},
                    "scopeSpans": [{"scope": {"name": "nixl_telemetry"}, "spans": list(spans)}],
                }
            ]
        }
    )


def write(path: Path, *lines: str) -> Path:
    """A file of these lines."""
    path.write_text("".join(f"{text}\n" for text in lines), encoding="utf-8", errors="surrogatepass")
    return path


def pull(blocks: int = 3, trace: str = TRACE, request_id: str = REQUEST_ID, at_ms: float = 0) -> tuple[str, str]:
    """A request in pull under a router's span that is not in the files: lines of D and of P."""
    peer = {"server.address": "10.0.0.7", "server.port": 5600, "nixl.remote.engine.id": "prefill-engine"}
    ids = {"nixl.request.id": request_id, "nixl.remote.request.id": "cmpl-client-7-0-99999999"}
    receive = {
        **D,
        **peer,
        **ids,
        "nixl.receive.handshake.duration": 0.3,
        "nixl.receive.queue.duration": 0.002,
        "nixl.receive.post.duration": 0.0004,
        "nixl.receive.transfer.duration": 0.05,
    }
    moved = {
        **D,
        **peer,
        **ids,
        "nixl.transfer.operation": "READ",
        "nixl.transfer.block.count": blocks,
        "nixl.transfer.size": blocks * 2**20,
    }
    decode = [
        span("nixl.receive", 1, at_ms + 100, at_ms + 500, receive, parent=255, trace=trace),
        span("nixl.handshake", 2, at_ms + 102, at_ms + 402, {**D, **peer}, parent=1, trace=trace),
        span("nixl.handshake.metadata", 3, at_ms + 102, at_ms + 302, parent=2, trace=trace),
        span("nixl.transfer", 4, at_ms + 440, at_ms + 490, moved, parent=1, trace=trace),
    ]
    for index in range(blocks):
        block = {
            "nixl.block.group": 0,
            "nixl.block.local.id": index,
            "nixl.block.remote.id": 40 + index,
            "nixl.block.size": 2**20,
        }
        decode.append(span("nixl.block", 1000 + index, at_ms + 440, at_ms + 490, block, parent=4, trace=trace))
    held = {**P, "nixl.request.id": "cmpl-client-7-0-99999999", "nixl.lease.block.count": blocks}
    lease = span(
        "nixl.lease", 5, at_ms, at_ms + 500, {**held, "nixl.lease.outcome": "released"}, parent=255, trace=trace
    )
    return line(*decode, resource=D_HOST), line(lease, resource=P_HOST)
