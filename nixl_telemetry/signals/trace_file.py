# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Spans as lines of OTLP JSON in a file, for where there is no collector. Several processes may write the same file."""

import base64
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from nixl_telemetry.signals.otlp import Message

_ID_KEYS: Final = frozenset({"traceId", "spanId", "parentSpanId"})


class TraceFile:
    """Appends batches of spans; the newest are in the file itself, older ones in ``FILE.1``, ``FILE.2`` and so on.

    Args:
        path: The file. Its folder is made if missing.
        max_bytes: No file grows larger, but for a single batch that is.
        count: Files that are kept, the newest included.
    """

    def __init__(self, path: Path, max_bytes: int, count: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._count = count

    def send(self, message: Message) -> None:
        """Append a batch as one line.

        Raises:
            OSError: The file cannot be written.
        """
        request = ExportTraceServiceRequest.FromString(message.data)
        text = json.dumps(_hex_ids(MessageToDict(request, use_integers_for_enums=True)), separators=(",", ":"))
        line = text.encode() + b"\n"
        with self._locked(len(line)) as descriptor:
            size = os.fstat(descriptor).st_size
            # Whoever was killed in the middle of a line must not take this one with it.
            remaining = memoryview(line if _ends_a_line(descriptor, size) else b"\n" + line)
            try:
                while remaining:
                    remaining = remaining[os.write(descriptor, remaining) :]
            except OSError:
                # Half a line would be lost with what comes after it.
                os.ftruncate(descriptor, size)
                raise

    def shutdown(self) -> None:
        """Nothing is open between batches."""

    @contextmanager
    def _locked(self, more: int) -> Iterator[int]:
        """The file, opened at its end and locked against others; the next one where ``more`` bytes are too many."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                # Another process may have moved it away while this one waited.
                if not self._is_current(descriptor):
                    continue
                size = os.fstat(descriptor).st_size
                if size and size + more > self._max_bytes:
                    self._rotate()
                    continue
                yield descriptor
                return
            finally:
                os.close(descriptor)

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        names = [self._path, *(Path(f"{self._path}.{number}") for number in range(1, self._count))]
        if self._count == 1:
            self._path.unlink()
        for older, newer in reversed(list(zip(names[1:], names, strict=False))):
            if newer.exists():
                newer.replace(older)


def _ends_a_line(descriptor: int, size: int) -> bool:
    return not size or os.pread(descriptor, 1, size - 1) == b"\n"


def _hex_ids(value: Any) -> Any:
    """OTLP's JSON has ids in hex, protobuf's in base64."""
    if isinstance(value, dict):
        return {
            key: base64.b64decode(item).hex() if key in _ID_KEYS and isinstance(item, str) else _hex_ids(item)
            for key, item in value.items()
        }
    return [_hex_ids(item) for item in value] if isinstance(value, list) else value
