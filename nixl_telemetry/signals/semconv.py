# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Names of spans, attributes and closed value sets.

Standard attributes come from OpenTelemetry's semantic conventions; everything that has no convention lives in the
``nixl.*`` namespace. Identifiers that are unbounded (request, engine, block ids) go on spans and log lines only, never
on metrics.
"""

from enum import StrEnum
from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.37.0"
"""Semantic-convention version of the standard attributes used here."""

SERVER_ADDRESS: Final = "server.address"
"""string; host of the peer's handshake side channel."""
SERVER_PORT: Final = "server.port"
"""int; port of the peer's handshake side channel."""
CLIENT_ADDRESS: Final = "client.address"
"""string; address of who asked this instance's handshake listener."""
CLIENT_PORT: Final = "client.port"
"""int; its port."""
ERROR_TYPE: Final = "error.type"
"""string; an :class:`ErrorType`, set only on failure."""

TRANSFER_MODE: Final = "nixl.transfer.mode"
"""string; ``pull`` or ``push``: the mode of this process's connector."""
CONNECTOR_VERSION: Final = "nixl.connector.version"
"""int; vLLM's ``NIXL_CONNECTOR_VERSION``."""
VLLM_VERSION: Final = "nixl.vllm.version"
"""string; version of vLLM."""
NIXL_VERSION: Final = "nixl.version"
"""string; version of the NIXL library."""
ENGINE_ID: Final = "nixl.engine.id"
"""string; engine id of this process."""
RANK: Final = "nixl.rank"
"""int; tensor-parallel rank of this worker. Absent on what a scheduler tells, such as a lease."""
KV_ROLE: Final = "nixl.kv.role"
"""string; ``kv_producer``, ``kv_consumer`` or ``kv_both``."""
REQUEST_ID: Final = "nixl.request.id"
"""string; request id in this engine."""
REMOTE_REQUEST_ID: Final = "nixl.remote.request.id"
"""string; request id in the peer's engine."""
REMOTE_ENGINE_ID: Final = "nixl.remote.engine.id"
"""string; engine id of the peer."""
REMOTE_RANK: Final = "nixl.remote.rank"
"""int; tensor-parallel rank at the peer."""
REMOTE_TP_SIZE: Final = "nixl.remote.tp_size"
"""int; tensor-parallel size of the peer."""

CODE_CLASS: Final = "nixl.class"
"""string; name of the class that declares a transfer mode."""

COMPAT_HASH: Final = "nixl.compat.hash"
"""string; compatibility hash of this instance (SHA-256, hex)."""
REMOTE_COMPAT_HASH: Final = "nixl.remote.compat.hash"
"""string; compatibility hash that the peer sent."""
COMPAT_ENFORCED: Final = "nixl.compat.enforced"
"""bool; whether a differing hash rejects the peer (``enforce_handshake_compat``)."""
COMPAT_FACTOR_PREFIX: Final = "nixl.compat.factor."
"""prefix; one attribute for each factor of the hash, JSON for values that are no string, number or bool."""

REMOTE_COMPAT_FACTOR_PREFIX: Final = "nixl.remote.compat.factor."
"""prefix; one attribute for each factor of the peer that differs, as for this instance's own."""
COMPAT_DIFFERING: Final = "nixl.compat.differing"
"""string[]; the factors that differ, the first to look at first. Absent where none is known."""
COMPAT_SOURCE: Final = "nixl.compat.source"
"""string; how that is known: ``exchanged``, ``recovered`` or ``unknown``. Set only where the hashes differ."""
COMPAT_UNCOVERED: Final = "nixl.compat.uncovered"
"""string[]; what differs though the hash does not cover it: sizes, layout, block lengths, model revision."""

HANDSHAKE_PURPOSE: Final = "nixl.handshake.purpose"
"""string; a :class:`Purpose`: what the handshake sets up."""

HANDSHAKE_REQUEST_RESULT: Final = "nixl.handshake_request.result"
"""string; a :class:`RequestResult`: what became of a request to the handshake listener."""
HANDSHAKE_REQUEST_COUNT: Final = "nixl.handshake_request.count"
"""int; requests with that result since the last line about it, this one included."""

TRANSFER_OPERATION: Final = "nixl.transfer.operation"
"""string; the operation that reached NIXL, ``READ`` or ``WRITE``."""
TRANSFER_BLOCKS: Final = "nixl.transfer.block.count"
"""int; KV cache blocks moved (kernel blocks, as NIXL addresses them), over all KV cache groups."""
TRANSFER_DESCRIPTORS: Final = "nixl.transfer.descriptor.count"
"""int; descriptors that NIXL moved, after merging; those asked for when NIXL tells nothing."""
TRANSFER_BYTES: Final = "nixl.transfer.size"
"""int, bytes; as NIXL counts them. Absent when NIXL's telemetry is off or the transfer failed."""
TRANSFER_POST_DURATION: Final = "nixl.transfer.post.duration"
"""float, seconds; time that posting took inside NIXL."""
TRANSFER_DURATION: Final = "nixl.transfer.duration"
"""float, seconds; NIXL's time from post to the poll that first saw the transfer done."""
TRANSFER_OBSERVATION_DELAY: Final = "nixl.transfer.observation_delay"
"""float, seconds; gap between the last poll that saw it in progress (or the post) and the poll that saw it done.
The transfer ended somewhere in this gap."""

RECEIVE_BLOCKS: Final = "nixl.receive.block.count"
"""int; KV cache blocks (of vLLM's block size) that the request waits for, over all KV cache groups."""
RECEIVE_HANDSHAKE_DURATION: Final = "nixl.receive.handshake.duration"
"""float, seconds; until the handshake with the peer was done; 0 where it was done before.

The durations of a receive follow each other and add up to it. Where it failed, the part
that it failed in has all the rest, and those after it are 0."""
RECEIVE_QUEUE_DURATION: Final = "nixl.receive.queue.duration"
"""float, seconds; until the worker turned to the request: after a handshake that is a later engine step."""
RECEIVE_POST_DURATION: Final = "nixl.receive.post.duration"
"""float, seconds; until its transfers were prepared and posted, with all ranks of the peer. Pull only."""
RECEIVE_TRANSFER_DURATION: Final = "nixl.receive.transfer.duration"
"""float, seconds; until the last poll that saw one of its transfers in progress. Pull only."""
RECEIVE_OBSERVATION_DELAY: Final = "nixl.receive.observation_delay"
"""float, seconds; from there until the poll that saw the last transfer done, which ended in this gap. Pull only."""
RECEIVE_REMOTE_DURATION: Final = "nixl.receive.remote.duration"
"""float, seconds; from the registration until the peer's notification was seen: the peer's prefill, its handshake, its
WRITE and the delay of seeing it. Push only; what of it was the transfer is in the peer's ``nixl.transfer``."""
RECEIVE_NOTIFICATION_DURATION: Final = "nixl.receive.notification.duration"
"""float, seconds; pull: from there until the worker reported the blocks; push: sending the registration."""

LEASE_BLOCKS: Final = "nixl.lease.block.count"
"""int; KV cache blocks (of vLLM's block size) that are held for the decode side, over all KV cache groups."""
LEASE_OUTCOME: Final = "nixl.lease.outcome"
"""string; a :class:`LeaseOutcome`."""
LEASE_REMAINING: Final = "nixl.lease.remaining"
"""float, seconds; what was left of the peer's lease, as it was granted, when the decode side began to read; below 0 it
had run out, unless it was renewed meanwhile. The one value in which another process's clock has a part: by the offset
between the two that vLLM's handshake finds. Pull only, between instrumented instances from connector version 5 on."""
LEASE_COUNT: Final = "nixl.lease.count"
"""int; leases that a log line is about."""

RECEIVE_WAITS_FOR: Final = "nixl.receive.waits_for"
"""string; a :class:`WaitsFor`: what a request that waits long for its KV is waiting for."""
RECEIVE_WAITING: Final = "nixl.receive.waiting.duration"
"""float, seconds; for how long it has waited so far, all in all."""

PUSH_SIDE: Final = "nixl.push.side"
"""string; a :class:`PushSide`: which half of a push waits for the other."""
PUSH_WAITING: Final = "nixl.push.waiting.duration"
"""float, seconds; for how long it has waited so far."""

INVALID_KV_REASON: Final = "nixl.invalid_kv.reason"
"""string; an :class:`InvalidKv`."""
REQUEST_ROLE: Final = "nixl.request.role"
"""string; a :class:`RequestRole`."""

PEER_BANDWIDTH: Final = "nixl.peer.bandwidth"
"""float, bytes per second; of the latest large transfers with a peer."""
PEER_BANDWIDTH_BEFORE: Final = "nixl.peer.bandwidth.before"
"""float, bytes per second; what it is compared with: the best that the same two instances did before, or that a peer
on the same host does."""

BLOCK_LOCAL_ID: Final = "nixl.block.local.id"
"""int; the block's id in this instance (the first one's of a run), as NIXL is asked for it: kernel blocks, of which a
block of vLLM's size may have several."""
BLOCK_REMOTE_ID: Final = "nixl.block.remote.id"
"""int; the block's id in the peer (the first one's of a run), likewise."""
BLOCK_GROUP: Final = "nixl.block.group"
"""int; index of the KV cache group."""
BLOCK_REGION: Final = "nixl.block.region"
"""int; index of the memory region, instead of the group, where the two instances group their layers differently."""
BLOCK_COUNT: Final = "nixl.block.count"
"""int; blocks in this run: neighbours in both instances. Only where blocks are told in runs."""
BLOCK_SIZE: Final = "nixl.block.size"
"""int, bytes; the block's (or run's) share of the transfer's bytes. Absent where NIXL tells no bytes."""
BLOCK_TIMING: Final = "nixl.block.timing"
"""string; ``transfer``: the interval is the whole transfer's. NIXL times no single block."""
BLOCK_DETAIL: Final = "nixl.block.detail"
"""string; a :class:`BlockDetail`: what the transfer's block spans are."""

KEPT: Final = "nixl.kept"
"""string; a :class:`Kept`: why the span was exported though its trace was not sampled. Its parents may be missing."""

MODE_CONFLICT_SOURCE: Final = "nixl.mode_conflict.source"
"""string; a :class:`ConflictSource`."""
MODE_CONFLICT_EXPECTED: Final = "nixl.mode_conflict.expected"
"""string; the mode of this process's connector."""
MODE_CONFLICT_FOUND: Final = "nixl.mode_conflict.found"
"""string; the mode that was found instead."""


class SpanName(StrEnum):
    """Every span of the suite."""

    COMPAT_HASH = "nixl.compat_hash"
    HANDSHAKE = "nixl.handshake"
    HANDSHAKE_METADATA = "nixl.handshake.metadata"
    HANDSHAKE_COMPAT = "nixl.handshake.compat"
    HANDSHAKE_REGISTER = "nixl.handshake.register"
    RECEIVE = "nixl.receive"
    TRANSFER = "nixl.transfer"
    BLOCK = "nixl.block"
    LEASE = "nixl.lease"
    TRIPWIRE = "nixl.tripwire"


class EventName(StrEnum):
    """Every span event and every log event."""

    COMPAT_HASH_COMPUTED = "nixl.compat_hash.computed"
    HANDSHAKE_FINISHED = "nixl.handshake.finished"
    HANDSHAKE_FAILED = "nixl.handshake.failed"
    HANDSHAKE_REQUEST_REFUSED = "nixl.handshake_request.refused"
    TRANSFER_FINISHED = "nixl.transfer.finished"
    TRANSFER_FAILED = "nixl.transfer.failed"
    RECEIVE_FINISHED = "nixl.receive.finished"
    RECEIVE_FAILED = "nixl.receive.failed"
    LEASE_FINISHED = "nixl.lease.finished"
    LEASE_EXPIRED = "nixl.lease.expired"
    LEASES_OVERDUE = "nixl.lease.overdue"
    RECEIVE_WAITING = "nixl.receive.waiting"
    PUSH_UNMATCHED = "nixl.push.unmatched"
    PUSH_IDS_DIFFER = "nixl.push.ids_differ"
    PUSH_FAILED = "nixl.push.failed"
    INVALID_KV = "nixl.invalid_kv"
    WITHOUT_TRANSFER_PARAMS = "nixl.request.without_transfer_params"
    PEER_SLOW = "nixl.peer.slow"
    MODE_CONFLICT = "nixl.mode_conflict"
    ENFORCEMENT_OFF = "nixl.compat.enforcement_off"
    UNCOVERED_DIFFERENCE = "nixl.compat.uncovered_difference"


class ErrorType(StrEnum):
    """Why an operation failed: one closed vocabulary for spans, metrics and log lines."""

    COMPAT_MISMATCH = "compat_mismatch"
    """The peer's compatibility hash differs."""
    ENGINE_ID_MISMATCH = "engine_id_mismatch"
    """Another engine answers at the peer's address: it was restarted or replaced."""
    PAYLOAD_DECODE = "payload_decode"
    """The answer to the handshake is no handshake payload."""
    METADATA_DECODE = "metadata_decode"
    """The payload is sound, the agent metadata inside it is not."""
    LAYOUT_MISMATCH = "layout_mismatch"
    """The hash agrees, but topology or KV cache layout cannot be paired."""
    TIMEOUT = "timeout"
    """The peer accepts connections and did not answer in time."""
    UNREACHABLE = "unreachable"
    """Nobody listens at the peer's address."""
    PEER_NOT_ALLOWED = "peer_not_allowed"
    """The peer is not on the list of allowed peers."""
    AGENT_ERROR = "agent_error"
    """The NIXL agent refused the peer's metadata or memory."""
    TRANSFER_SETUP = "transfer_setup"
    """NIXL would not prepare or post the transfer."""
    TRANSFER_FAILED = "transfer_failed"
    """The transfer was posted and failed."""
    NOTIFICATION_FAILED = "notification_failed"
    """A notification could not be sent."""
    KV_EXPIRED = "kv_expired"
    """The KV was released before it was read."""
    OTHER = "_OTHER"
    """None of the above."""


class TransferMode(StrEnum):
    """Who moves the KV."""

    PULL = "pull"
    PUSH = "push"


class Direction(StrEnum):
    """Which way the initiator moves KV: READ in pull, WRITE in push."""

    READ = "read"
    WRITE = "write"


MODE_OF_OPERATION: Final = {"READ": TransferMode.PULL, "WRITE": TransferMode.PUSH}
"""The mode that a NIXL operation belongs to."""

DIRECTION_OF_MODE: Final = {TransferMode.PULL: Direction.READ, TransferMode.PUSH: Direction.WRITE}
"""What the initiator does in a mode."""


class Purpose(StrEnum):
    """What a handshake sets up."""

    TRANSFER = "transfer"
    """Moving KV: READ in pull, WRITE in push."""
    NOTIFY = "notify"
    """Sending notifications only: the decode side in push, unless a heartbeat shook hands first."""


class RequestResult(StrEnum):
    """What became of a request to the handshake listener."""

    SERVED = "served"
    """It was answered with a rank's metadata."""
    MALFORMED = "malformed"
    """It was no query, or not even ZeroMQ: dropped."""
    UNKNOWN_RANK = "unknown_rank"
    """It asked for a rank that this instance does not have. The answer is one that vLLM cannot decode, so that its
    handshake fails at once."""
    NOT_ALLOWED = "not_allowed"
    """It came from an address that is not on the list of allowed peers: dropped."""


class ReceiveOutcome(StrEnum):
    """How waiting for remote KV ended."""

    RECEIVED = "received"
    FAILED = "failed"
    TIMEOUT = "timeout"
    """The peer did not answer the handshake in time."""


class LeaseOutcome(StrEnum):
    """How a lease ended."""

    RELEASED = "released"
    """The decode side has the KV."""
    EXPIRED = "expired"
    """The decode side does not have the KV: nobody fetched it in time, or it could not be written."""
    SHUTDOWN = "shutdown"
    """The instance ended first. On spans only: its metrics end with it."""


class WaitsFor(StrEnum):
    """What a request of the decode side waits for."""

    HANDSHAKE = "handshake"
    """The handshake with the prefill instance."""
    QUEUE = "queue"
    """The worker, which has not turned to the request yet."""
    REGISTRATION = "registration"
    """Its registration is not sent yet. Push only."""
    TRANSFER = "transfer"
    """The transfers that were posted. Pull only."""
    NOTIFICATION = "notification"
    """Push: the prefill instance's, that the KV was written. Pull: the worker's report; the transfers are done."""


class RegistrationEvent(StrEnum):
    """What became of registrations, in push."""

    SENT = "sent"
    """The decode side sent it."""
    RECEIVED = "received"
    """It reached the prefill side."""
    MATCHED = "matched"
    """It met the blocks of its request there."""
    FAILED = "failed"
    """The decode side could not send it, or the prefill side could not read it."""


class PushSide(StrEnum):
    """The two halves of a push, which meet on the prefill side."""

    REGISTRATION = "registration"
    """The decode side's: where the KV is to be written."""
    BLOCKS = "blocks"
    """The prefill side's: the KV of a finished request."""


class InvalidKv(StrEnum):
    """Why KV may have been used that was not what it should have been."""

    READ_AFTER_EXPIRY = "read_after_expiry"
    """The decode side reports that it has read KV whose lease had expired: it may have been overwritten."""
    UNKNOWN_REQUEST = "unknown_request"
    """A notification came for a request that this instance does not know, or no longer."""
    FAILED_LOAD_SERVED = "failed_load_served"
    """A request was served though its KV could not be loaded, and vLLM was not told to recompute it."""
    FAILED_LOAD_RECOMPUTED = "failed_load_recomputed"
    """A request whose KV could not be loaded was recomputed here and served: right, but at the price of a prefill."""


class RequestRole(StrEnum):
    """On which side a request came that does not say what is to become of its KV."""

    PREFILL = "prefill"
    """It does not say that somebody will fetch its KV: nobody can."""
    DECODE = "decode"
    """It does not say where its KV is: the decode side computes it itself."""


class BlockDetail(StrEnum):
    """What the block spans of a transfer are; nothing is said where ``block_spans`` is off."""

    RUNS = "runs"
    """One for each run of blocks that are neighbours in both instances, the unit that NIXL moves."""
    EACH = "each"
    """One for each block."""
    DROPPED = "dropped"
    """There are none: too many block ids were waiting for the export thread."""


class Kept(StrEnum):
    """Why a span was exported though its trace was not sampled."""

    FAILED = "failed"
    """It failed."""
    SLOW = "slow"
    """It was slower than ``slow_handshake_seconds``, ``slow_transfer_seconds`` or ``slow_receive_seconds``."""


class ConflictSource(StrEnum):
    """Where a transfer mode was seen that is not the connector's."""

    PARAMS = "params"
    """The ``kv_transfer_params`` of a request."""
    OPERATION = "operation"
    """The operation that reached NIXL."""
    CLASS = "class"
    """The mode that the worker's or the scheduler's class declares, which goes into the hash."""


class Signal(StrEnum):
    """Parts of the suite, as its own health metrics name them."""

    HOOK = "hook"
    """Code of ours on vLLM's threads."""
    METRICS = "metrics"
    """Updates on their way to `/metrics`."""
    TRACES = "traces"
    """Export of spans. As a dropped signal: records for the export thread, which carry a span and a log line."""
    SPANS = "spans"
    """Spans that were lost: too many waited to be sent, or the collector did not take them."""
    BLOCKS = "blocks"
    """Transfers without block spans, because too many block ids waited for the export thread."""
    LOGS = "logs"
    """Log lines."""
    NIXL = "nixl"
    """NIXL's own transfer telemetry, on which bytes and times rest."""
    EXCHANGE = "exchange"
    """What peers tell of themselves in a handshake."""
    AUDIT = "audit"
    """Records of the audit trail."""
