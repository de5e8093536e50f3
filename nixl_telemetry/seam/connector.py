# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The instrumented connectors: vLLM's own, whose worker, scheduler and agent are observed."""

from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlPullConnector, NixlPushConnector

from nixl_telemetry.audit.chain import AuditKeyError, read_key
from nixl_telemetry.operations.transfer import TransferTable
from nixl_telemetry.seam import payload
from nixl_telemetry.seam.agent import observe_agent
from nixl_telemetry.seam.instrument import Hooks, instrument
from nixl_telemetry.seam.scheduler import SchedulerHooks, SchedulerObserver
from nixl_telemetry.seam.stats import UPDATES, TelemetryPromMetrics, TelemetryStats, WorkerStats
from nixl_telemetry.seam.versions import connector_version, nixl_version, vllm_version
from nixl_telemetry.seam.worker import PullWorkerHooks, PushWorkerHooks, WorkerHooks
from nixl_telemetry.seam.worker_observer import WorkerObserver, payload_made
from nixl_telemetry.settings import Settings, SettingsError
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.logger import logger
from nixl_telemetry.signals.semconv import TransferMode
from nixl_telemetry.signals.telemetry import Telemetry

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlBaseConnector as _Stock
else:
    _Stock = object


class _ConnectorHooks(Hooks, _Stock):
    """Goes in front of vLLM's connectors."""

    transfer_mode: ClassVar[TransferMode]
    _worker_hooks: ClassVar[type[WorkerHooks]]
    _telemetry: Telemetry | None = None
    _observer: SchedulerObserver | WorkerObserver | None = None
    """Whichever of the following two this process has."""
    _scheduler_observer: SchedulerObserver | None = None
    _worker_observer: WorkerObserver | None = None

    # The factory looks for the parameter kv_cache_config by name.
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        settings = Settings.load(vllm_config.kv_transfer_config.kv_connector_extra_config)
        audit_key = _audit_key(settings)
        super().__init__(vllm_config, role, kv_cache_config)
        if self.connector_worker is not None:
            # In any case: ranks and the scheduler add their stats up, and stock ones cannot take ours in.
            self.connector_worker.xfer_stats = WorkerStats()
        if settings.enabled:
            try:
                rank = int(getattr(getattr(vllm_config, "parallel_config", None), "rank", 0))
                self._attach(settings, getattr(vllm_config, "observability_config", None), audit_key, rank)
            except Exception as error:
                logger().warning("%s runs without telemetry: %r", type(self).__name__, error)

    def _attach(self, settings: Settings, observability: Any, audit_key: bytes | None, rank: int = 0) -> None:
        """Put the hooks in front of what vLLM built."""
        side = self.connector_worker if self.connector_worker is not None else self.connector_scheduler
        telemetry = Telemetry(
            settings,
            self.transfer_mode,
            {
                semconv.ENGINE_ID: self.engine_id,
                semconv.TRANSFER_MODE: self.transfer_mode,
                semconv.CONNECTOR_VERSION: connector_version(),
                semconv.VLLM_VERSION: vllm_version(),
                semconv.NIXL_VERSION: nixl_version(),
                semconv.KV_ROLE: str(self.kv_transfer_config.kv_role),
                **({semconv.RANK: side.tp_rank} if hasattr(side, "tp_rank") else {}),
            },
            getattr(observability, "otlp_traces_endpoint", None),
            audit_key,
            rank,
        )
        if self.connector_worker is not None:
            transfers = TransferTable(telemetry)
            self._observer = self._worker_observer = WorkerObserver(telemetry, self.connector_worker, transfers)
            payload.install(payload_made)
            instrument(self.connector_worker, self._worker_hooks, self._worker_observer)
            observe_agent(self.connector_worker, transfers)
        else:
            self._observer = self._scheduler_observer = SchedulerObserver(telemetry, side, self.kv_transfer_config)
            instrument(side, SchedulerHooks, self._scheduler_observer)
        self._telemetry = telemetry

    def get_kv_connector_stats(self) -> Any:
        """Stats of a step, of the worker or of the scheduler."""
        stats = self._stock_class.get_kv_connector_stats(self)
        observer = self._observer
        if observer is not None and any(observer.unsent):
            return observer.with_updates(stats) or stats
        return stats

    def build_connector_worker_meta(self) -> Any:
        """What the worker tells its scheduler, beside vLLM's own."""
        notes = self._stock_class.build_connector_worker_meta(self)
        observer = self._worker_observer
        if notes is None and observer is not None and observer.news:
            notes = observer.notes_for_scheduler()
        return notes

    def has_pending_push_work(self) -> bool:
        """Whether the engine must take a step though no request asks for one.

        Stats leave the worker with a step only. One empty step at the start brings the info metrics of an idle engine
        to its API server.
        """
        pending = bool(self._stock_class.has_pending_push_work(self))
        return pending or (self._scheduler_observer is not None and not self._scheduler_observer.stepped)

    def shutdown(self) -> Any:
        """Shut down, then export what is left."""
        try:
            return super().shutdown()
        finally:
            if self._observer is not None:
                self._observer.shut_down()
            if self._telemetry is not None:
                self._telemetry.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
        """Rebuild stats for vLLM's periodic log line, which has no use for our part."""
        return TelemetryStats(data={name: value for name, value in (data or {}).items() if name != UPDATES})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """The Prometheus metrics, in the API server."""
        settings = Settings.load(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if not settings.enabled:
            return super().build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        return TelemetryPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, cls.transfer_mode, settings.metrics
        )


def _audit_key(settings: Settings) -> bytes | None:
    """The key of the audit trail, if there is to be one.

    Raises:
        SettingsError: The file holds no key. A trail that anybody can rewrite is not what was asked for.
    """
    if not (settings.enabled and settings.audit_dir and settings.audit_key_file):
        return None
    try:
        return read_key(settings.audit_key_file)
    except AuditKeyError as error:
        raise SettingsError(f"nixl_telemetry: audit_key_file: {error}") from None


class InstrumentedNixlPullConnector(_ConnectorHooks, NixlPullConnector):
    """vLLM's pull connector, observed: the decode side READs the KV."""

    transfer_mode = TransferMode.PULL
    _stock_class = NixlPullConnector
    _worker_hooks = PullWorkerHooks


class InstrumentedNixlPushConnector(_ConnectorHooks, NixlPushConnector):
    """vLLM's push connector, observed: the prefill side WRITEs the KV."""

    transfer_mode = TransferMode.PUSH
    _stock_class = NixlPushConnector
    _worker_hooks = PushWorkerHooks
