# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The hub of one connector: takes metric updates and finished operations, and answers for the suite's own failures."""

import atexit
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, Protocol, TypeVar

from nixl_telemetry.audit.chain import Record
from nixl_telemetry.audit.trail import AuditTrail
from nixl_telemetry.settings import Settings
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.attributes import Attributes
from nixl_telemetry.signals.catalogue import AUDIT_RECORDS, TELEMETRY_DROPPED, TELEMETRY_ERRORS, Metric
from nixl_telemetry.signals.description import Describe
from nixl_telemetry.signals.export import ExportThread
from nixl_telemetry.signals.logger import logger
from nixl_telemetry.signals.logs import LogWriter
from nixl_telemetry.signals.metrics import Batch, Recorder, Series, Update
from nixl_telemetry.signals.moves import BlockBudget
from nixl_telemetry.signals.semconv import Signal, TransferMode
from nixl_telemetry.signals.traces import SpanWriter

_REPORTED_LIMIT: Final = 100


class Telemetry:
    """What the operations of one connector, in one process, report to.

    Nothing here raises into the caller, waits or takes a contended lock.

    Args:
        settings: The user's settings.
        mode: The connector's transfer mode.
        attributes: Attributes of every span and log line, and of the first record of the audit trail.
        otlp_endpoint: vLLM's ``--otlp-traces-endpoint``.
        audit_key: Key of the audit trail.
        rank: The worker's among all workers of its engine; the tensor-parallel rank repeats in each pipeline stage.
    """

    def __init__(
        self,
        settings: Settings,
        mode: TransferMode,
        attributes: Attributes,
        otlp_endpoint: str | None = None,
        audit_key: bytes | None = None,
        rank: int = 0,
    ) -> None:
        self.settings: Final = settings
        self.mode: Final = mode
        self._has_metrics = settings.metrics
        self.rank: Final = str(rank)
        """Label value of states that each worker of an engine tells for itself."""
        self._states: dict[tuple[str, ...], float] = {}
        self._engine_id = str(attributes.get(semconv.ENGINE_ID, ""))
        self._recorder = Recorder(settings.queue_size)
        self.record_all: Final[Callable[[Sequence[Update]], None]] = (
            self._recorder.add_all if settings.metrics else _nothing
        )
        """Record several updates at once: no step sends some of them without the others."""
        self._reports: list[Callable[[], None]] = []
        self.updates: Final[Collection[object]] = self._recorder.updates
        """What :meth:`drain` has to take, beside what there is to sum up: looked at in every step, and mostly empty."""
        self.spans: Final = SpanWriter(attributes, settings, otlp_endpoint, self._lost, self._not_sent)
        self._log = LogWriter(attributes, settings.log_format) if settings.logs else None
        self._trail = self._make_trail(attributes, audit_key) if settings.audit_dir else None
        self.has_trail: Final = self._trail is not None
        """Whether :meth:`audit` does anything."""
        self._open_trail = self._trail
        self.blocks: Final = BlockBudget()
        self._export = ExportThread(self._consume, settings.queue_size, self._dropped, self.spans.can_wait_until)
        self.emit: Final = self._export.submit
        """Hand a finished operation to the export thread, and whether it can wait there; false if it was dropped."""
        self.watch: Final = self._export.watch
        """Have things that are under way looked at, every two seconds as a rule, on the export thread."""
        self.ensure_watched: Final = self._export.ensure
        """Something is under way, and the export thread may not have been needed before."""
        self._reported: set[str] = set()
        # Registered after vLLM's own handler, hence run before it shuts its provider down.
        atexit.register(self.close)

    def record(self, metric: Metric, *labels: str, value: float = 1.0) -> None:
        """Record one increment, observation or state of a metric."""
        if self._has_metrics:
            self._recorder.add(metric, labels, value)

    def series(self, metric: Metric, *labels: str) -> Series:
        """A series, for :meth:`record_all`."""
        return self._recorder.series(metric, labels)

    def record_state(self, metric: Metric, *labels: str, value: float) -> None:
        """Record what a state is now, if it was another before."""
        key = (metric.name, *labels)
        if self._states.get(key, 0.0) != value:
            self._states[key] = value
            self.record(metric, *labels, value=value)

    def audit(self, make: Callable[[], Record]) -> None:
        """Hand what happened to the audit trail, if there is one; ``make`` runs on its thread."""
        if self._trail is not None:
            self._trail.record(lambda: self._signed(make()))

    def _signed(self, record: Record) -> Record:
        # Whoever reads one record shall know who acted.
        return Record(record.event, {semconv.ENGINE_ID: self._engine_id, **record.attributes})

    def sum_up(self, report: Callable[[], None]) -> None:
        """Have updates recorded for a whole step, before they are drained. It must not raise."""
        self._reports.append(report)

    def drain(self) -> Batch | None:
        """Take the metric updates that came since the last call; ``None`` when there are none."""
        for report in self._reports:
            report()
        return self._recorder.drain()

    def failed(self, where: str, error: BaseException, signal: Signal = Signal.HOOK) -> None:
        """Count a failure of our own, and log it the first time that it happens at this place."""
        self._recorder.add(TELEMETRY_ERRORS, (signal,))
        self.warn_once(f"{where}: {type(error).__name__}", "telemetry failed in %s, serving goes on: %r", where, error)

    def warn_once(self, key: str, message: str, *args: object) -> None:
        """Log a warning unless ``key`` was warned of before."""
        if key not in self._reported and len(self._reported) < _REPORTED_LIMIT:
            self._reported.add(key)
            logger().warning(message, *args)

    def close(self) -> None:
        """Export what is left, within the time that the settings give; safe to call more than once."""
        try:
            atexit.unregister(self.close)
            self._export.stop_watching()
            # On the export thread: OpenTelemetry has time limits of its own, longer than ours, and a process that ends
            # cannot start another thread.
            self._export.run(self._finish, self.settings.shutdown_timeout_seconds)
            self._close_trail(self.settings.shutdown_timeout_seconds)
        except Exception as error:
            self.failed("closing", error)

    def _close_trail(self, timeout_seconds: float) -> None:
        trail, self._open_trail = self._open_trail, None
        if trail is not None:
            trail.close(timeout_seconds)

    def _make_trail(self, attributes: Attributes, key: bytes | None) -> AuditTrail:
        rank = attributes.get(semconv.RANK)
        return AuditTrail(
            str(self.settings.audit_dir),
            engine_id=self._engine_id,
            process="scheduler" if rank is None else f"worker-{rank}",
            attributes=attributes,
            key=key,
            max_file_bytes=self.settings.audit_max_file_bytes,
            queue_size=self.settings.queue_size,
            on_error=lambda error: self.failed("writing the audit trail", error, Signal.AUDIT),
            on_dropped=lambda: self._recorder.add(TELEMETRY_DROPPED, (Signal.AUDIT,)),
            on_written=lambda count: self.record(AUDIT_RECORDS, value=count),
        )

    def _finish(self) -> None:
        # After the operations that were handed over before, and before a slow exporter: vLLM kills its workers soon.
        # A slow disk gets half of the time, and the exporter the rest.
        self._close_trail(self.settings.shutdown_timeout_seconds / 2)
        self.spans.close(self.settings.shutdown_timeout_seconds)

    def _lost(self, count: int) -> None:
        self.record(TELEMETRY_DROPPED, Signal.SPANS, value=count)

    def _not_sent(self, error: Exception) -> None:
        self.failed("sending spans", error, Signal.TRACES)

    def _dropped(self) -> None:
        self._recorder.add(TELEMETRY_DROPPED, (Signal.TRACES,))

    def _consume(self, describe: Describe) -> None:
        try:
            description = describe()
        except Exception as error:
            self.failed("describing an operation", error)
            return
        context = None
        if description.span is not None:
            try:
                context = self.spans.write(description.span)
            except Exception as error:
                self.failed("writing a span", error, Signal.TRACES)
        if self._log is not None and description.log is not None:
            try:
                self._log.write(description.log, context)
            except Exception as error:
                self.failed("writing a log line", error, Signal.LOGS)


def _nothing(updates: Sequence[Update]) -> None:
    """Record nothing: the user wants no metrics."""


class HasTelemetry(Protocol):
    """Whatever owns guarded hooks."""

    @property
    def telemetry(self) -> Telemetry:
        """The hub that counts failures."""


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def guarded(hook: _Hook) -> _Hook:
    """Make a method of ours that runs on vLLM's threads unable to raise.

    A failure is counted and logged once, and the answer is ``None``. Only code of ours is ever guarded: what vLLM
    raises must pass. Arguments are given by position, and passed on as they came: keywords would cost each call of each
    step a dictionary, and to name the first one a second tuple.
    """

    @functools.wraps(hook)
    def safe(*args: Any) -> Any:
        try:
            return hook(*args)
        except Exception as error:
            owner: HasTelemetry = args[0]
            owner.telemetry.failed(hook.__qualname__, error)
            return None

    safe.__guarded__ = True  # type: ignore[attr-defined]
    return safe  # type: ignore[return-value]
