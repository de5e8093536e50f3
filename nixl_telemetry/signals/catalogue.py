# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The one table of metrics: code, docs, dashboards and alerts are made from it.

Every metric also carries the labels of :data:`COMMON_LABELS`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product
from typing import Final

from nixl_telemetry.compat.explanation import UNKNOWN_FACTOR
from nixl_telemetry.compat.factors import FACTOR_NAMES
from nixl_telemetry.signals.semconv import (
    DIRECTION_OF_MODE,
    ConflictSource,
    Direction,
    ErrorType,
    InvalidKv,
    LeaseOutcome,
    PushSide,
    ReceiveOutcome,
    RegistrationEvent,
    RequestResult,
    RequestRole,
    Signal,
    TransferMode,
)


class Kind(StrEnum):
    """How values of a metric add up, across ranks, steps and API servers."""

    COUNTER = "counter"
    """Increments are summed."""
    LEVEL = "level"
    """A gauge whose changes are summed: they may arrive at any API server and still add up to the truth."""
    INFO = "info"
    """A gauge that is 1 for the labels in force."""
    STATE = "state"
    """A gauge whose latest value counts, whoever told it."""
    HISTOGRAM = "histogram"
    """Observations are collected."""


@dataclass(frozen=True)
class Label:
    """A label of a metric."""

    name: str
    values: tuple[str, ...] = ()
    """The values that there are from the start; empty where none is known before run time."""
    is_open: bool = False
    """Whether there may be others than these."""


@dataclass(frozen=True)
class Metric:
    """One row of the table."""

    name: str
    kind: Kind
    help: str
    """A sentence that says what starts and stops the clock, where there is one."""
    observed_by: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = field(default=(), repr=False)

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the metric's own labels, in order."""
        return tuple(label.name for label in self.labels)

    def initial_series(self, mode: TransferMode) -> Iterable[tuple[str, ...]]:
        """Label values that exist from the start, at 0, for a connector of ``mode``; none where a label has none."""
        if self.kind is Kind.INFO or any(not label.values for label in self.labels):
            return ()
        only = {"direction": (DIRECTION_OF_MODE[mode].value,)}
        return product(*(only.get(label.name, label.values) for label in self.labels))


ADDED_LABELS: Final[Mapping[str, str]] = {
    "transfer_mode": "`pull` or `push`",
    "connector_version": "vLLM's `NIXL_CONNECTOR_VERSION`",
}
"""Labels that the suite adds, to vLLM's own NIXL metrics too."""

COMMON_LABELS: Final[Mapping[str, str]] = {
    "model_name": "the served model name, as on vLLM's own metrics",
    "engine": "index of the engine, as on vLLM's own metrics",
    **ADDED_LABELS,
}
"""Labels on every metric."""

_HANDSHAKE_ERRORS: Final = (
    "",
    ErrorType.COMPAT_MISMATCH,
    ErrorType.ENGINE_ID_MISMATCH,
    ErrorType.PAYLOAD_DECODE,
    ErrorType.METADATA_DECODE,
    ErrorType.LAYOUT_MISMATCH,
    ErrorType.TIMEOUT,
    ErrorType.UNREACHABLE,
    ErrorType.PEER_NOT_ALLOWED,
    ErrorType.AGENT_ERROR,
    ErrorType.OTHER,
)
TRANSFER_ERRORS: Final = (ErrorType.TRANSFER_SETUP, ErrorType.TRANSFER_FAILED, ErrorType.OTHER)
"""How a transfer fails."""

_FACTOR: Final = Label("factor", (*FACTOR_NAMES, UNKNOWN_FACTOR))
_DIRECTION: Final = Label("direction", tuple(Direction))
_RANK: Final = Label("rank", ("0",), is_open=True)
"""Of a state that differs between the workers of an engine: each tells its own."""
_SIGNAL: Final = Label("signal", tuple(Signal))

# vLLM gives a handshake 5 s for each answer; NIXL posts small reads in microseconds and moves gigabytes in seconds.
_HANDSHAKE_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 7.5, 10.0, 30.0)
_TRANSFER_BUCKETS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
# A lease is 30 s by default and renewed while the decode side waits; multi-turn requests hold blocks for 8 minutes.
_LEASE_BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 480.0)

CONNECTOR_INFO: Final = Metric(
    "nixl_connector_info",
    Kind.INFO,
    "1 for the connector that runs: versions, role, compatibility hash and whether a differing hash is rejected.",
    "P and D",
    tuple(map(Label, ("vllm_version", "nixl_version", "kv_role", "compat_hash", "handshake_enforced"))),
)
COMPAT_FACTOR_INFO: Final = Metric(
    "nixl_compat_factor_info",
    Kind.INFO,
    "1 for each factor of the compatibility hash with its value, as JSON unless it is a text; at most 128 characters.",
    "P and D",
    tuple(map(Label, ("factor", "value"))),
)
HANDSHAKE_DURATION: Final = Metric(
    "nixl_handshake_duration_seconds",
    Kind.HISTOGRAM,
    "Time of a handshake from the first query to the last registered rank, or to its failure (error_type). "
    "Waiting for a free handshake thread is not in it.",
    "initiator",
    (Label("error_type", _HANDSHAKE_ERRORS),),
    _HANDSHAKE_BUCKETS,
)
HANDSHAKE_REJECTIONS: Final = Metric(
    "nixl_handshake_rejections_total",
    Kind.COUNTER,
    "Handshakes that this instance refused because the peer's compatibility hash differs, by the factor that differs; "
    "of several, the first of the label's values.",
    "initiator",
    (_FACTOR,),
)
HANDSHAKE_BYPASSED: Final = Metric(
    "nixl_handshake_bypassed_total",
    Kind.COUNTER,
    "Handshakes that this instance let through though the peer's compatibility hash differs, because enforcement is "
    "off, by the factor that differs.",
    "initiator, enforcement off",
    (_FACTOR,),
)
HANDSHAKE_REQUESTS: Final = Metric(
    "nixl_handshake_requests_total",
    Kind.COUNTER,
    "Requests to this instance's handshake listener, by what became of them; connections that were closed because of "
    "what came, or did not come, count as malformed. An idle engine reports them with its next step.",
    "listener",
    (Label("result", tuple(RequestResult)),),
)
TRANSFER_DURATION: Final = Metric(
    "nixl_transfer_duration_seconds",
    Kind.HISTOGRAM,
    "Time of a transfer from its post to the poll that first saw it done or failed (error_type). It includes the "
    "observation delay: vLLM polls once per engine step.",
    "initiator",
    (_DIRECTION, Label("error_type", ("", *TRANSFER_ERRORS))),
    _TRANSFER_BUCKETS,
)
TRANSFER_OBSERVATION_DELAY: Final = Metric(
    "nixl_transfer_observation_delay_seconds",
    Kind.HISTOGRAM,
    "Time between the last poll that saw a transfer in progress (or its post) and the poll that saw it done: by so "
    "much at most the duration may be too long.",
    "initiator",
    (_DIRECTION,),
    _TRANSFER_BUCKETS,
)
TRANSFER_BYTES: Final = Metric(
    "nixl_transfer_bytes_total",
    Kind.COUNTER,
    "Bytes moved by finished transfers, as NIXL counts them.",
    "initiator",
    (_DIRECTION,),
)
TRANSFER_BLOCKS: Final = Metric(
    "nixl_transfer_blocks_total",
    Kind.COUNTER,
    "KV cache blocks (kernel blocks, as NIXL addresses them) moved by finished transfers, over all KV cache groups; "
    "each rank counts its own.",
    "initiator",
    (_DIRECTION,),
)
TRANSFER_DESCRIPTORS: Final = Metric(
    "nixl_transfer_descriptors_total",
    Kind.COUNTER,
    "Descriptors moved by finished transfers, after NIXL merged neighbours.",
    "initiator",
    (_DIRECTION,),
)
TRANSFERS_POSTED: Final = Metric(
    "nixl_transfers_posted_total",
    Kind.COUNTER,
    "Transfers that were posted, or that NIXL would not even prepare. Those that ended "
    "(nixl_transfer_duration_seconds_count) and those in flight add up to it.",
    "initiator",
    (_DIRECTION,),
)
TRANSFERS_IN_FLIGHT: Final = Metric(
    "nixl_transfers_in_flight",
    Kind.LEVEL,
    "Transfers that were posted and not yet seen done or failed.",
    "initiator",
    (_DIRECTION,),
)
TRANSFER_OLDEST: Final = Metric(
    "nixl_transfer_oldest_start_timestamp_seconds",
    Kind.STATE,
    "When the oldest transfer in flight of a worker (`rank`, of all that the engine has) was posted, as Unix time; 0 "
    "while none is. Looked at every two seconds, 5 s after it began at the latest.",
    "initiator",
    (_DIRECTION, _RANK),
)
_PEER: Final = Label("peer")
PEER_TRANSFERS: Final = Metric(
    "nixl_peer_transfers_total",
    Kind.COUNTER,
    "Transfers that ended, by peer (address and port of its handshake listener; the first 64, then `other`) and, where "
    "they failed, by cause.",
    "initiator",
    (_PEER, Label("error_type")),
)
PEER_TRANSFER_BYTES: Final = Metric(
    "nixl_peer_transfer_bytes_total",
    Kind.COUNTER,
    "Bytes moved by finished transfers, by peer.",
    "initiator",
    (_PEER,),
)
PEER_TRANSFER_SECONDS: Final = Metric(
    "nixl_peer_transfer_seconds_total",
    Kind.COUNTER,
    "Time of the transfers whose bytes are counted, by peer: their quotient is a lower bound of the bandwidth, since "
    "a transfer's end is seen by the next poll.",
    "initiator",
    (_PEER,),
)
PEER_LAST_SUCCESS: Final = Metric(
    "nixl_peer_last_success_timestamp_seconds",
    Kind.STATE,
    "When a transfer with the peer last succeeded, as Unix time.",
    "initiator",
    (_PEER,),
)
PEER_HANDSHAKES: Final = Metric(
    "nixl_peer_handshakes_total",
    Kind.COUNTER,
    "Handshakes that ended, by peer and, where they failed, by cause.",
    "initiator",
    (_PEER, Label("error_type")),
)
RECEIVE_WAIT: Final = Metric(
    "nixl_receive_wait_seconds",
    Kind.HISTOGRAM,
    "Time that a request of the decode side waited for its remote KV, from the engine step that asked a worker for it "
    "to the step in which the worker reported it; each rank counts its own.",
    "D",
    (Label("outcome", tuple(ReceiveOutcome)),),
    _TRANSFER_BUCKETS,
)
LEASE_OUTCOMES: Final = (LeaseOutcome.RELEASED, LeaseOutcome.EXPIRED)
"""Those that a metric can tell."""
LEASE_DURATION: Final = Metric(
    "nixl_lease_duration_seconds",
    Kind.HISTOGRAM,
    "Time for which the prefill side held the KV blocks of a finished request, until the decode side had them or the "
    "lease expired. The end is seen by an engine step: an idle engine holds blocks until its next one.",
    "P",
    (Label("outcome", LEASE_OUTCOMES),),
    _LEASE_BUCKETS,
)
LEASES_OPENED: Final = Metric(
    "nixl_leases_opened_total",
    Kind.COUNTER,
    "Leases on the KV blocks of finished requests. Those that ended (nixl_lease_duration_seconds_count) and those that "
    "are held add up to it.",
    "P",
)
LEASES_HELD: Final = Metric(
    "nixl_leases_held",
    Kind.LEVEL,
    "Leases that are held. The end of one is seen by an engine step.",
    "P",
)
LEASE_BLOCKS_HELD: Final = Metric(
    "nixl_lease_blocks_held",
    Kind.LEVEL,
    "KV cache blocks (of vLLM's block size) that those leases hold.",
    "P",
)
LEASES_OVERDUE: Final = Metric(
    "nixl_leases_overdue",
    Kind.LEVEL,
    "Leases that are held though their deadline has passed, by more than 2 s: vLLM has not freed their blocks. An "
    "engine that takes no step frees none.",
    "P",
)
LEASE_RENEWALS: Final = Metric(
    "nixl_lease_renewals_total",
    Kind.COUNTER,
    "Leases that a heartbeat of the decode side renewed; each rank counts its own.",
    "P",
)
LEASE_REMAINING: Final = Metric(
    "nixl_lease_remaining_seconds",
    Kind.HISTOGRAM,
    "What was left of a lease, as it was granted, when the decode side began to read; renewals are not in it. In "
    "the lowest bucket are those that had run out.",
    "D, pull",
    (),
    (0.0, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 60.0, 120.0, 240.0, 480.0),
)
PUSH_REGISTRATIONS: Final = Metric(
    "nixl_push_registrations_total",
    Kind.COUNTER,
    "Registrations of the decode side, in push: sent there, received and matched with a request's blocks on the "
    "prefill side. Those received are matched, failed or unmatched; each rank counts its own.",
    "P and D, push",
    (Label("event", tuple(RegistrationEvent)),),
)
PUSH_MATCH_WAIT: Final = Metric(
    "nixl_push_match_wait_seconds",
    Kind.HISTOGRAM,
    "Time from the first half of a push to the second on the prefill side, by which came first: the registration or "
    "the request's blocks.",
    "P, push",
    (Label("first", tuple(PushSide)),),
    _LEASE_BUCKETS,
)
PUSH_UNMATCHED: Final = Metric(
    "nixl_push_unmatched",
    Kind.LEVEL,
    "Halves of a push that wait for the other on the prefill side; each rank counts its own. Blocks count from the "
    "first look at them, 2 to 5 s after they came: nearly all are matched before.",
    "P, push",
    (Label("side", tuple(PushSide)),),
)
PUSH_OLDEST: Final = Metric(
    "nixl_push_unmatched_oldest_timestamp_seconds",
    Kind.STATE,
    "Since when the oldest of them at a worker (`rank`, of all that the engine has) waits, as Unix time; 0 while none "
    "does. Looked at every two seconds, 5 s after it began at the latest.",
    "P, push",
    (Label("side", tuple(PushSide)), _RANK),
)
INVALID_KV: Final = Metric(
    "nixl_invalid_kv_total",
    Kind.COUNTER,
    "Requests whose KV may have been another's, or was not loaded: read after its lease had expired, reported for a "
    "request that is not known, or served after a failed load.",
    "P and D",
    (Label("reason", tuple(InvalidKv)),),
)
WITHOUT_TRANSFER_PARAMS: Final = Metric(
    "nixl_requests_without_transfer_params_total",
    Kind.COUNTER,
    "Requests that came to a decode instance without saying where their KV is, or to a prefill instance without saying "
    "that somebody will fetch it. Not counted where the role is kv_both.",
    "P and D",
    (Label("role", tuple(RequestRole)),),
)
MODE_CONFLICTS: Final = Metric(
    "nixl_mode_conflicts_total",
    Kind.COUNTER,
    "Times that another transfer mode was met than the connector's own: in a request's parameters, in the operation "
    "that reached NIXL, or declared by a class.",
    "P and D",
    (Label("source", tuple(ConflictSource)),),
)
TELEMETRY_ERRORS: Final = Metric(
    "nixl_telemetry_errors_total",
    Kind.COUNTER,
    "Failures inside the telemetry itself; serving went on without it.",
    "P and D",
    (_SIGNAL,),
)
TELEMETRY_DROPPED: Final = Metric(
    "nixl_telemetry_dropped_total",
    Kind.COUNTER,
    "Records that the telemetry dropped because a bounded queue or table was full.",
    "P and D",
    (_SIGNAL,),
)

AUDIT_RECORDS: Final = Metric(
    "nixl_audit_records_total",
    Kind.COUNTER,
    "Records that were written to the audit trail, by all processes of the engine; those that say when a stream was "
    "opened and closed are among them.",
    "P and D",
)

CATALOGUE: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        CONNECTOR_INFO,
        COMPAT_FACTOR_INFO,
        HANDSHAKE_DURATION,
        HANDSHAKE_REJECTIONS,
        HANDSHAKE_BYPASSED,
        HANDSHAKE_REQUESTS,
        TRANSFER_DURATION,
        TRANSFER_OBSERVATION_DELAY,
        TRANSFER_BYTES,
        TRANSFER_BLOCKS,
        TRANSFER_DESCRIPTORS,
        TRANSFERS_POSTED,
        TRANSFERS_IN_FLIGHT,
        TRANSFER_OLDEST,
        PEER_TRANSFERS,
        PEER_TRANSFER_BYTES,
        PEER_TRANSFER_SECONDS,
        PEER_LAST_SUCCESS,
        PEER_HANDSHAKES,
        RECEIVE_WAIT,
        LEASES_OPENED,
        LEASES_HELD,
        LEASE_BLOCKS_HELD,
        LEASES_OVERDUE,
        LEASE_RENEWALS,
        LEASE_REMAINING,
        LEASE_DURATION,
        PUSH_REGISTRATIONS,
        PUSH_MATCH_WAIT,
        PUSH_UNMATCHED,
        PUSH_OLDEST,
        INVALID_KV,
        WITHOUT_TRANSFER_PARAMS,
        MODE_CONFLICTS,
        TELEMETRY_ERRORS,
        TELEMETRY_DROPPED,
        AUDIT_RECORDS,
    )
}
"""The metrics by name."""
