# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Writes the pages that come from the code: `docs/signals.md` and `docs/configuration.md`.

Run as `python -m tools.generate_docs`, by `make generate`. The output depends on the code only, so that `make
check-generated` can compare it with what is committed. Which attributes belong to which span is written down here and
held against real spans by `tests/unit/test_docs.py`.
"""

import ast
import inspect
import itertools
import re
import types
import typing
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from pydantic.fields import FieldInfo

from nixl_telemetry.compat.explanation import Source
from nixl_telemetry.settings import AUTO_VARIABLE, CONFIG_KEY, Settings, variable_of
from nixl_telemetry.signals import catalogue, semconv
from nixl_telemetry.signals.catalogue import CATALOGUE, COMMON_LABELS, Kind, Label, Metric
from nixl_telemetry.signals.logger import LOGGER_NAME
from nixl_telemetry.signals.semconv import (
    BlockDetail,
    ConflictSource,
    ErrorType,
    EventName,
    InvalidKv,
    Kept,
    LeaseOutcome,
    Purpose,
    PushSide,
    RegistrationEvent,
    RequestResult,
    RequestRole,
    Signal,
    SpanName,
    WaitsFor,
)
from nixl_telemetry.signals.traces import SCOPE

DOCS: Final = Path(__file__).resolve().parents[1] / "docs"

NOTE: Final = "<!-- Made by `python -m tools.generate_docs` from {source}. Do not edit: run `make generate`. -->\n"

# ---------------------------------------------------------------------------------------- What the code has no table of


@dataclass(frozen=True)
class SpanDoc:
    """What there is to say of a span."""

    kind: str
    covers: str
    attributes: tuple[str, ...] = ()
    """Names of constants in :mod:`nixl_telemetry.signals.semconv`."""
    on_failure: tuple[str, ...] = ()
    events: tuple[EventName, ...] = ()


@dataclass(frozen=True)
class LogDoc:
    """What there is to say of a log event."""

    level: str
    when: str


COMMON_ATTRIBUTES: Final = (
    "ENGINE_ID",
    "TRANSFER_MODE",
    "CONNECTOR_VERSION",
    "VLLM_VERSION",
    "NIXL_VERSION",
    "KV_ROLE",
    "RANK",
)
"""On every span without a parent, and on every log line; the rank where the process is a worker."""

DIFFERING: Final = ("COMPAT_SOURCE", "COMPAT_DIFFERING", "COMPAT_FACTOR_PREFIX", "REMOTE_COMPAT_FACTOR_PREFIX")
"""What a handshake whose hashes differ says of it."""

SPANS: Final = {
    SpanName.COMPAT_HASH: SpanDoc(
        "internal",
        "Start-up of a worker: registration of the KV caches, in which vLLM computes the hash. Most of the time is the "
        "registration.",
        ("COMPAT_HASH", "COMPAT_ENFORCED", "COMPAT_FACTOR_PREFIX"),
        events=(EventName.MODE_CONFLICT,),
    ),
    SpanName.HANDSHAKE: SpanDoc(
        "client",
        "A handshake that this instance initiates: from the first query to the last registered rank of the peer, or to "
        "the failure. Waiting for a free handshake thread is not in it.",
        (
            "SERVER_ADDRESS",
            "SERVER_PORT",
            "REMOTE_ENGINE_ID",
            "REMOTE_TP_SIZE",
            "HANDSHAKE_PURPOSE",
            "COMPAT_HASH",
            "COMPAT_ENFORCED",
            "REMOTE_COMPAT_HASH",
            *DIFFERING,
        ),
        ("ERROR_TYPE",),
        (EventName.MODE_CONFLICT, EventName.UNCOVERED_DIFFERENCE),
    ),
    SpanName.HANDSHAKE_METADATA: SpanDoc(
        "internal, child of `nixl.handshake`",
        "From the query of one rank until its payload is decoded.",
        on_failure=("ERROR_TYPE",),
    ),
    SpanName.HANDSHAKE_COMPAT: SpanDoc(
        "internal, child of `nixl.handshake`",
        "Comparing the hash and the engine id, and decoding the agent's metadata, of one rank.",
        DIFFERING,
        on_failure=("ERROR_TYPE",),
    ),
    SpanName.HANDSHAKE_REGISTER: SpanDoc(
        "internal, child of `nixl.handshake`",
        "Registering one rank's memory, or its agent only where notifications are all that is needed.",
        on_failure=("ERROR_TYPE",),
    ),
    SpanName.TRANSFER: SpanDoc(
        "client",
        "One NIXL handle (one for each request and remote rank): from its post to the poll that saw it done or failed.",
        (
            "TRANSFER_OPERATION",
            "TRANSFER_BLOCKS",
            "TRANSFER_DESCRIPTORS",
            "TRANSFER_OBSERVATION_DELAY",
            "REQUEST_ID",
            "REMOTE_REQUEST_ID",
            "REMOTE_ENGINE_ID",
            "REMOTE_RANK",
            "SERVER_ADDRESS",
            "SERVER_PORT",
            "TRANSFER_BYTES",
            "TRANSFER_DURATION",
            "TRANSFER_POST_DURATION",
            "BLOCK_DETAIL",
        ),
        ("ERROR_TYPE",),
        (EventName.MODE_CONFLICT,),
    ),
    SpanName.BLOCK: SpanDoc(
        "internal, child of `nixl.transfer`",
        "One block, or one run of neighbouring blocks; the interval is its transfer's, since NIXL times no block. "
        "Only where the trace is sampled.",
        (
            "BLOCK_LOCAL_ID",
            "BLOCK_REMOTE_ID",
            "BLOCK_GROUP",
            "BLOCK_REGION",
            "BLOCK_SIZE",
            "BLOCK_COUNT",
            "BLOCK_TIMING",
            "TRANSFER_OPERATION",
            "TRANSFER_MODE",
            "REMOTE_ENGINE_ID",
            "REMOTE_RANK",
            "SERVER_ADDRESS",
            "SERVER_PORT",
        ),
        ("ERROR_TYPE",),
    ),
    SpanName.RECEIVE: SpanDoc(
        "consumer",
        "A request of the decode side waits for its KV, in one worker: from the engine step that asked for it to the "
        "step that reported it. Its durations add up to it.",
        (
            "REQUEST_ID",
            "REMOTE_REQUEST_ID",
            "REMOTE_ENGINE_ID",
            "SERVER_ADDRESS",
            "SERVER_PORT",
            "RECEIVE_BLOCKS",
            "RECEIVE_HANDSHAKE_DURATION",
            "RECEIVE_QUEUE_DURATION",
            "RECEIVE_POST_DURATION",
            "RECEIVE_TRANSFER_DURATION",
            "RECEIVE_OBSERVATION_DELAY",
            "RECEIVE_REMOTE_DURATION",
            "RECEIVE_NOTIFICATION_DURATION",
            "LEASE_REMAINING",
        ),
        ("ERROR_TYPE",),
        (EventName.RECEIVE_WAITING,),
    ),
    SpanName.LEASE: SpanDoc(
        "producer",
        "The prefill side holds the KV blocks of a finished request: from the end of the prefill until the scheduler "
        "frees them, because the decode side has them or the lease expired.",
        ("REQUEST_ID", "LEASE_BLOCKS", "LEASE_OUTCOME"),
        ("ERROR_TYPE",),
    ),
    SpanName.TRIPWIRE: SpanDoc(
        "internal, without duration",
        "A request tripped a wire: its KV may be invalid, or it says nothing of its KV. The event says what.",
        ("REQUEST_ID", "INVALID_KV_REASON", "REQUEST_ROLE"),
        ("ERROR_TYPE",),
        (EventName.INVALID_KV, EventName.WITHOUT_TRANSFER_PARAMS),
    ),
}

TREE: Final = """\
Where a request is traced from, say by the router's `traceparent`, its spans on both sides are in that one trace:

| span | parent | linked to |
| --- | --- | --- |
| `nixl.lease` (P) | the request, as vLLM's own span of it | |
| `nixl.receive` (D) | the request, as vLLM's own span of it | `nixl.lease` |
| `nixl.handshake` | `nixl.receive` of who waited for it first; none for a heartbeat's | the others that waited |
| `nixl.transfer` in pull (D) | `nixl.receive` | |
| `nixl.transfer` in push (P) | D's `nixl.receive` | `nixl.lease` |
| `nixl.block` | `nixl.transfer` | |
| `nixl.tripwire` | the request, as vLLM's own span of it, or `nixl.lease` | |

vLLM hands a request's `traceparent` to its connectors only with `--otlp-traces-endpoint`.
Without it, and without a `traceparent` from the client, `nixl.lease` begins a trace and `nixl.receive` is its child, so
that P and D are joined all the same.
A router that asks both instances at once in push, as vllm-router does, cannot pass P's context on to D: then
`nixl.receive` is not linked to the lease; P's `nixl.transfer`, which is D's child and linked to the lease, joins them.
Without a `traceparent` that reaches both, these are two traces, joined by that link; for one, have the client or the
router send a `traceparent`, and start both instances with `--otlp-traces-endpoint`.
In push with several ranks at D, P writes to all of them for the registration of one: all its `nixl.transfer` are then
children of that rank's `nixl.receive`.
With a stock peer there is no context from it: D's spans hang below the request only, and P's `nixl.transfer` in push
below `nixl.lease`.
P's context travels in `kv_transfer_params`, D's in its registration, both under the key `nixl_telemetry`.

Sampling is the caller's decision where there is a caller, as with `OTEL_TRACES_SAMPLER`'s default; to export 5 % of
the traces of the others, set `OTEL_TRACES_SAMPLER=parentbased_traceidratio` and `OTEL_TRACES_SAMPLER_ARG=0.05` (a
fraction) for P and D alike. Two traces, as in push above, are then sampled each for itself.
What failed, or was slower than the settings `slow_*_seconds` say, is exported even if its trace is not sampled, with
the attribute `nixl.kept`; its parents, and the spans of its blocks, are then not there.
"""

LOG_EVENTS: Final = {
    EventName.COMPAT_HASH_COMPUTED: LogDoc("info", "once for each worker, at start-up: the hash and its factors"),
    EventName.ENFORCEMENT_OFF: LogDoc(
        "warning", "once for each worker, at start-up: `enforce_handshake_compat` is `false`, and nothing is rejected"
    ),
    EventName.HANDSHAKE_FINISHED: LogDoc("info; warning when slow", "a handshake succeeded"),
    EventName.HANDSHAKE_FAILED: LogDoc("error", "a handshake failed"),
    EventName.HANDSHAKE_REQUEST_REFUSED: LogDoc(
        "warning",
        "this instance's listener was asked for what it does not have, by somebody who is not allowed to, or in no "
        "sound way; at most one line for each result in 10 s",
    ),
    EventName.TRANSFER_FINISHED: LogDoc("debug; warning when slow", "a transfer succeeded"),
    EventName.TRANSFER_FAILED: LogDoc("error", "a transfer failed"),
    EventName.RECEIVE_FINISHED: LogDoc("debug; warning when slow", "a request has its remote KV"),
    EventName.RECEIVE_FAILED: LogDoc("error", "a request did not get its remote KV"),
    EventName.LEASE_FINISHED: LogDoc("debug", "the decode side has the KV"),
    EventName.LEASE_EXPIRED: LogDoc("warning", "KV was freed though nobody had fetched it"),
    EventName.LEASES_OVERDUE: LogDoc(
        "warning", "leases are held 2 s and more beyond their deadline; at most one line in 10 s"
    ),
    EventName.RECEIVE_WAITING: LogDoc(
        "warning",
        "a request has waited for its KV longer than `watchdog_seconds`: for what, from whom and since when; once for "
        "each, at most 20 every two seconds",
    ),
    EventName.PUSH_UNMATCHED: LogDoc(
        "warning",
        "on the prefill side, one half of a push has waited for the other longer than `watchdog_seconds`; once for "
        "each, at most 20 every two seconds",
    ),
    EventName.PUSH_IDS_DIFFER: LogDoc(
        "error",
        "both halves have waited so long, under different ids: no `X-Request-Id` is shared; once for each decode "
        "instance",
    ),
    EventName.PUSH_FAILED: LogDoc(
        "error",
        "the prefill side's handshake with a decode instance failed, and so does a push to it, of which the decode "
        "instance is not told; `nixl.remote.request.id` is the decode instance's request",
    ),
    EventName.INVALID_KV: LogDoc("error", "see `nixl_invalid_kv_total`; at most 10 lines in a second"),
    EventName.WITHOUT_TRANSFER_PARAMS: LogDoc(
        "warning", "see `nixl_requests_without_transfer_params_total`; at most one line in a minute"
    ),
    EventName.PEER_SLOW: LogDoc(
        "warning",
        "16 large transfers with a peer were slower by 4 times than the best 16 before, or than the latest 16 with a "
        "peer on the same host; once for each peer",
    ),
    EventName.MODE_CONFLICT: LogDoc(
        "warning", "the first conflict of each source and mode; the metric counts them all"
    ),
    EventName.UNCOVERED_DIFFERENCE: LogDoc(
        "warning", "before the first transfer with a peer that differs in what the hash does not cover"
    ),
}

SPAN_EVENTS: Final = {
    EventName.MODE_CONFLICT: ("MODE_CONFLICT_SOURCE", "MODE_CONFLICT_EXPECTED", "MODE_CONFLICT_FOUND"),
    EventName.UNCOVERED_DIFFERENCE: ("COMPAT_UNCOVERED",),
    EventName.RECEIVE_WAITING: ("RECEIVE_WAITS_FOR", "RECEIVE_WAITING"),
    EventName.INVALID_KV: ("REQUEST_ID", "INVALID_KV_REASON"),
    EventName.WITHOUT_TRANSFER_PARAMS: ("REQUEST_ID", "REQUEST_ROLE"),
}
"""Attributes of each span event."""

EVENT_MEANINGS: Final = {
    EventName.MODE_CONFLICT: "another transfer mode was met than the connector's own",
    EventName.UNCOVERED_DIFFERENCE: "the peer differs in what the hash does not cover; the log line says in what way",
    EventName.RECEIVE_WAITING: "the request had waited longer than `watchdog_seconds` by then",
    EventName.INVALID_KV: "the request's KV may have been another's, or was not loaded",
    EventName.WITHOUT_TRANSFER_PARAMS: "the request does not say what is to become of its KV, or where it is",
}
"""What each span event says."""

CONFLICT_CONTEXT: Final = {
    ConflictSource.PARAMS: ("REQUEST_ID", "REMOTE_ENGINE_ID", "SERVER_ADDRESS", "SERVER_PORT"),
    ConflictSource.OPERATION: ("TRANSFER_OPERATION",),
    ConflictSource.CLASS: ("CODE_CLASS",),
}
"""What the log line of a mode conflict has besides the event's attributes, by where the other mode was met."""

_PEER_KEYS: Final = ("REMOTE_ENGINE_ID", "SERVER_ADDRESS", "SERVER_PORT")
WATCH_KEYS: Final = {
    EventName.HANDSHAKE_REQUEST_REFUSED: (
        *("HANDSHAKE_REQUEST_RESULT", "CLIENT_ADDRESS", "CLIENT_PORT", "HANDSHAKE_REQUEST_COUNT"),
    ),
    EventName.RECEIVE_WAITING: (
        *("REQUEST_ID", "REMOTE_REQUEST_ID", *_PEER_KEYS, "RECEIVE_WAITS_FOR", "RECEIVE_WAITING"),
    ),
    EventName.LEASES_OVERDUE: ("LEASE_COUNT", "LEASE_BLOCKS", "REQUEST_ID"),
    EventName.PUSH_UNMATCHED: ("PUSH_SIDE", "REQUEST_ID", "REMOTE_REQUEST_ID", *_PEER_KEYS, "PUSH_WAITING"),
    EventName.PUSH_IDS_DIFFER: ("REQUEST_ID", "REMOTE_REQUEST_ID", *_PEER_KEYS),
    EventName.PUSH_FAILED: ("REQUEST_ID", "REMOTE_REQUEST_ID", *_PEER_KEYS, "ERROR_TYPE"),
    EventName.PEER_SLOW: (*_PEER_KEYS, "PEER_BANDWIDTH", "PEER_BANDWIDTH_BEFORE"),
}
"""Attributes of lines that are of no finished operation."""

LOG_KEYS: Final = (
    ("event", "the event"),
    ("duration_s", "float, seconds; of the operation"),
    ("message", "what went wrong, or what to do, for a person"),
    ("since", "time in UTC; since when a request waits for what it waits for"),
    ("overdue_s", "float, seconds; how long the oldest lease is overdue"),
    ("trace_id", "32 hex digits; where a span was made"),
    ("span_id", "16 hex digits; where a span was made"),
)
"""Keys of log lines that are no attributes."""

UNUSED_ERRORS: Final = (ErrorType.NOTIFICATION_FAILED,)
"""Members of the vocabulary that nothing reports yet."""

BUILT_IN: Final = (
    ("vllm:nixl_xfer_time_seconds", "histogram", "time of a transfer; NIXL's, which ends at the poll that saw it done"),
    ("vllm:nixl_post_time_seconds", "histogram", "time that posting took inside NIXL"),
    ("vllm:nixl_bytes_transferred", "histogram", "bytes of a transfer"),
    ("vllm:nixl_num_descriptors", "histogram", "descriptors of a transfer, after merging"),
    (
        "vllm:nixl_num_failed_transfers_total",
        "counter",
        "failed transfers; from vLLM 0.31 on, failed handshakes and notifications are in it",
    ),
    ("vllm:nixl_num_failed_notifications_total", "counter", "failed notifications"),
    ("vllm:nixl_num_kv_expired_reqs_total", "counter", "requests whose KV expired, on the prefill side"),
    (
        "vllm:nixl_num_notifications_after_expiry_total",
        "counter",
        "notifications for requests that were no longer known; vLLM 0.32 and later",
    ),
)
"""vLLM's own metrics: name, type and note."""

UNMEASURED: Final = """\
- NIXL times a handle, not a block: `nixl.transfer` is the finest interval there is.
  A `nixl.block` has its transfer's interval, and says so with `nixl.block.timing`; its bytes are an equal share.
- A completion is seen when vLLM polls, once per engine step.
  The true end lies somewhere in the observation delay, which is exported beside every duration.
  A busy engine makes transfers look longer.
- Only the initiator times a transfer: the decode instance in pull, the prefill instance in push.
  The other side has no transfer metrics.
- Only the initiator of a handshake sees a rejection.
  In push there are two handshakes, and the decode instance is not told when the one from prefill to decode fails: look
  at the prefill instance.
- With NIXL's own telemetry off (`NIXL_TELEMETRY_ENABLE=n`) bytes, post time and NIXL's duration are not known.
  Requests are served; `nixl_telemetry_errors_total{signal="nixl"}` counts such transfers, and their duration is taken
  from the suite's own clock.
- No duration spans both instances: clocks of two processes are not subtracted, but for `nixl.lease.remaining`, which
  takes the offset between them that vLLM's handshake finds, for what it is.
- A level gauge is a sum of changes.
  If an update is dropped (`nixl_telemetry_dropped_total{signal="metrics"}`), the gauge may stay off by it until the
  server restarts.
"""

# --------------------------------------------------------------------------------------------------- Reading the source


def docstrings(owner: types.ModuleType | type) -> dict[str, str]:
    """The string under each assignment of a module or class body, by the assigned name, as one line of Markdown."""
    tree = ast.parse(inspect.getsource(owner))
    body = tree.body
    if isinstance(owner, type):
        (definition,) = tree.body
        body = getattr(definition, "body", [])
    found = {}
    for statement, following in itertools.pairwise(body):
        match statement, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = markdown(text)
    return found


def markdown(text: str) -> str:
    """Docstring markup as Markdown, on one line."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").split())


def attribute(constant: str) -> str:
    """The attribute that a constant of ``semconv`` names."""
    return str(getattr(semconv, constant))


def attributes() -> dict[str, str]:
    """The docs of every attribute by its constant, in the order of the source."""
    return {name: text for name, text in docstrings(semconv).items() if _TYPED.match(text)}


_TYPED: Final = re.compile(r"(string|int|float|bool|prefix)\b[^;]*; ")

# -------------------------------------------------------------------------------------------------------------- Writing


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def codes(values: Iterable[object]) -> str:
    """Values as inline code."""
    return ", ".join(f"`{value}`" for value in values)


def sentence(text: str) -> str:
    """Text with its first letter large and a full stop."""
    return text[:1].upper() + text[1:].rstrip(".") + "."


def signals() -> str:
    """The page on metrics, spans and log lines."""
    source = "nixl_telemetry/signals/catalogue.py and semconv.py"
    return "\n".join([NOTE.format(source=source), *_metrics(), *_spans(), *_errors(), *_logs(), *_unmeasured()])


def _metrics() -> Iterator[str]:
    yield "# Signals\n"
    yield (
        "Every metric, span, attribute and log event of this version.\n"
        "Names, labels, bucket edges and value sets are part of the public interface: a change is in the changelog.\n"
    )
    yield "## Metrics\n"
    yield (
        "Metrics are on vLLM's own `/metrics`, in the API server.\n"
        "A worker's updates travel with the output of an engine step: a value is as old as the last step.\n"
        "Every metric, vLLM's own NIXL metrics included, carries these labels:\n"
    )
    yield table(("label", "value"), ((f"`{name}`", text) for name, text in COMMON_LABELS.items()))
    yield (
        "Series with a closed set of label values exist from the start, at 0, so that a rate sees the first event.\n"
        "`direction` starts with the one that the connector's mode uses: `read` in pull, `write` in push.\n"
        "Never a label: a request id, engine id, agent name, block id or exception text.\n"
    )
    yield table(("metric", "type", "own labels", "observed by"), map(_metric_row, CATALOGUE.values()))
    yield (
        "P is the prefill instance and D the decode instance.\n"
        "The initiator of a transfer is D in pull and P in push.\n"
        "The initiator of a handshake is D in pull; in push each side initiates one.\n"
    )
    yield "### What they say\n"
    yield (
        "".join(f"`{metric.name}`\n:   {metric.help}{_unit(metric)}\n\n" for metric in CATALOGUE.values()).rstrip()
        + "\n"
    )
    yield "### Closed label sets\n"
    yield table(("label", "on", "values"), _label_rows())
    yield (
        "An empty `error_type` is success; Prometheus treats it as no label at all.\n"
        'So an error ratio is `error_type!=""` over everything, of one metric.\n'
    )
    yield "### Bucket edges\n"
    yield table(("metric", "edges, seconds"), _bucket_rows())
    yield "### vLLM's own metrics\n"
    yield (
        f"They stay as they are, under their names, with {codes(catalogue.ADDED_LABELS)} added as labels.\n"
        "The labels are there with the setting `metrics` off too; with `enabled` off they are not.\n"
    )
    yield table(("metric", "type", "note"), ((f"`{name}`", kind, note) for name, kind, note in BUILT_IN))


def _metric_row(metric: Metric) -> tuple[str, str, str, str]:
    kind = "gauge" if metric.kind in {Kind.LEVEL, Kind.INFO, Kind.STATE} else metric.kind.value
    return f"`{metric.name}`", kind, codes(metric.label_names), metric.observed_by


def _unit(metric: Metric) -> str:
    if metric.kind is Kind.INFO:
        return " Always 1; the labels are the information."
    unit = re.search(r"_(seconds|bytes)(?:_total)?$", metric.name)
    return f" Unit: {unit[1]}." if unit else ""


def _label_rows() -> Iterator[tuple[str, str, str]]:
    users: dict[Label, list[str]] = {}
    for metric in CATALOGUE.values():
        for label in metric.labels:
            if label.values and not label.is_open:
                users.setdefault(label, []).append(metric.name)
    for label, names in users.items():
        values = ", ".join(f"`{value}`" if value else "(empty)" for value in label.values)
        yield f"`{label.name}`", codes(names), values


def _bucket_rows() -> Iterator[tuple[str, str]]:
    for metric in CATALOGUE.values():
        if metric.buckets:
            yield f"`{metric.name}`", ", ".join(f"{edge:g}" for edge in metric.buckets)


def _spans() -> Iterator[str]:
    yield "## Spans\n"
    yield (
        f"Instrumentation scope: `{SCOPE}`, with its version; schema {semconv.SCHEMA_URL}.\n"
        "Times come from one process's monotonic clock; the wall clock only places them on the calendar.\n"
        "On failure the status is ERROR with the message of the exception, and `error.type` is set.\n"
        "Prompt text and token ids are never recorded.\n"
    )
    yield table(("span", "kind", "covers"), ((f"`{name}`", doc.kind, doc.covers) for name, doc in SPANS.items()))
    yield "### One trace\n"
    yield TREE
    docs = attributes()
    yield "### Attributes of every span and log line\n"
    yield (
        "Stages of a handshake do not repeat them, and spans of blocks the transfer mode only.\n"
        "A stage that failed has `error.type`.\n"
    )
    yield _attribute_table((*COMMON_ATTRIBUTES, "KEPT"), docs)
    for name, doc in SPANS.items():
        constants = [*doc.attributes, *doc.on_failure]
        if doc.attributes:
            yield f"### `{name}`\n"
            if doc.events:
                yield f"Events: {codes(doc.events)}.\n"
            yield _attribute_table(constants, docs)
    yield "### Events\n"
    for event, event_attributes in SPAN_EVENTS.items():
        yield f"`{event}`: {EVENT_MEANINGS[event]}.\n"
        yield _attribute_table(event_attributes, docs)
    yield "### Values\n"
    sets: tuple[tuple[str, type[Enum]], ...] = (
        (attribute("HANDSHAKE_PURPOSE"), Purpose),
        (attribute("HANDSHAKE_REQUEST_RESULT"), RequestResult),
        (attribute("LEASE_OUTCOME"), LeaseOutcome),
        (attribute("BLOCK_DETAIL"), BlockDetail),
        (attribute("KEPT"), Kept),
        (attribute("RECEIVE_WAITS_FOR"), WaitsFor),
        (attribute("PUSH_SIDE"), PushSide),
        (attribute("INVALID_KV_REASON"), InvalidKv),
        (attribute("REQUEST_ROLE"), RequestRole),
        (attribute("MODE_CONFLICT_SOURCE"), ConflictSource),
        (attribute("COMPAT_SOURCE"), Source),
        ("event", RegistrationEvent),
        ("signal", Signal),
    )
    yield table(("of", "value", "meaning"), _value_rows(sets))
    yield "In push a heartbeat may shake hands first: the decode side's handshake is then one for `transfer` too.\n"


def _value_rows(sets: Iterable[tuple[str, type[Enum]]]) -> Iterator[tuple[str, str, str]]:
    for name, values in sets:
        docs = docstrings(values)
        for member in values:
            yield f"`{name}`", f"`{member.value}`", docs.get(member.name, "")


def _attribute_table(constants: Sequence[str], docs: dict[str, str]) -> str:
    def meaning(constant: str) -> str:
        text = sentence(docs[constant]).replace("an `ErrorType`", "an [error type](#error-types)")
        return re.sub(
            r"an? `(Purpose|RequestResult|ConflictSource|LeaseOutcome|BlockDetail|Kept"
            r"|WaitsFor|PushSide|InvalidKv|RequestRole)`",
            "one of the [values](#values)",
            text,
        )

    return table(("attribute", "type and meaning"), ((f"`{_shown(name)}`", meaning(name)) for name in constants))


def _shown(constant: str) -> str:
    name = attribute(constant)
    return f"{name}<factor>" if name.endswith(".") else name


def _errors() -> Iterator[str]:
    yield "## Error types\n"
    yield (
        "One closed vocabulary for `error.type` on spans and log lines and `error_type` on metrics.\n"
        "It is found from the stage in which an operation ended and the kind of exception, never from its text.\n"
        "Each metric has the part of the vocabulary that can happen to it, see its closed label set.\n"
    )
    docs = docstrings(ErrorType)
    yield table(("error type", "meaning"), ((f"`{error.value}`", docs[error.name]) for error in ErrorType))
    yield f"Part of the vocabulary, and not reported in this version: {codes(e.value for e in UNUSED_ERRORS)}.\n"


def _logs() -> Iterator[str]:
    yield "## Log lines\n"
    yield (
        f"The logger is `{LOGGER_NAME}`, a child of vLLM's: vLLM's handlers and `VLLM_LOGGING_LEVEL` are in charge.\n"
        "One line for each finished operation; the keys are the attribute names above.\n"
        "A transfer, receive or lease that ends well is logged at debug level, hence not shown at vLLM's\n"
        "default level.\n"
        "Slow means longer than `slow_handshake_seconds`, `slow_transfer_seconds` or `slow_receive_seconds`, see\n"
        "[Configuration](configuration.md).\n"
    )
    yield table(("event", "level", "when"), ((f"`{name}`", doc.level, doc.when) for name, doc in LOG_EVENTS.items()))
    yield f"`{EventName.MODE_CONFLICT}` has the attributes of the span event, and by its source:\n"
    yield table(("source", "more keys"), _conflict_rows())
    yield f"`{semconv.CODE_CLASS}` is on log lines only: {attributes()['CODE_CLASS']}\n"
    for event, keys in WATCH_KEYS.items():
        yield f"`{event}` has, beside its message:\n"
        yield _attribute_table(keys, attributes())
    yield "Keys that are no attributes:\n"
    yield table(("key", "meaning"), ((f"`{name}`", text) for name, text in LOG_KEYS))
    yield (
        "Besides these the suite warns in plain sentences, once for each cause: a failure of its own, an unsupported\n"
        "vLLM, and NIXL without telemetry.\n"
    )


def _conflict_rows() -> Iterator[tuple[str, str]]:
    for source, constants in CONFLICT_CONTEXT.items():
        yield f"`{source}`", codes(map(attribute, constants))


def _unmeasured() -> Iterator[str]:
    yield "## What cannot be measured\n"
    yield UNMEASURED


# -------------------------------------------------------------------------------------------------------- Configuration

_WIRINGS: Final = """\
# Configuration

The settings are optional: without any, everything is on.

## Wiring

Give one of the three to every vLLM instance whose connector is to be observed.
Instrumented and stock instances pair in both directions.
The other keys (`kv_role`, `kv_buffer_device`, ...) stay as they are.

### 1. The stock name, with our module (recommended)

```json
{"kv_connector": "NixlPushConnector", "kv_connector_module_path": "nixl_telemetry.connectors", "kv_role": "kv_both"}
```

The module has `NixlConnector`, `NixlPullConnector` and `NixlPushConnector`.

### 2. Our own name

```json
{"kv_connector": "InstrumentedNixlPushConnector", "kv_role": "kv_both"}
```

Also `InstrumentedNixlPullConnector` and `InstrumentedNixlConnector` (pull).
When vLLM makes its config the name is rewritten to the stock name with our module, so that every place in vLLM that
compares the name decides as for the stock connector.
Something outside vLLM that reads the name, an orchestrator for example, sees what you wrote.

### 3. No change of the config

```sh
export {auto}=1
```

The stock names then resolve to the instrumented classes.
For deployments whose config cannot be touched.
A config that has a `kv_connector_module_path` of its own is left alone.

Ways 2 and 3 need vLLM's plugins: if `VLLM_PLUGINS` is set, it has to list `nixl_telemetry`.

### In a MultiConnector

All three work for its children too:

```json
{
  "kv_connector": "MultiConnector",
  "kv_role": "kv_both",
  "kv_connector_extra_config": {
    "connectors": [
      {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "nixl_telemetry.connectors",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"telemetry": {"log_format": "json"}}
      }
    ]
  }
}
```

### On a vLLM that is not supported

The connectors are vLLM's own then: serving goes on without telemetry, and one log line says so.

## Settings

A setting is a key of the object `{key}` in `kv_connector_extra_config`, or an environment variable.

```json
{
  "kv_connector": "NixlPullConnector",
  "kv_connector_module_path": "nixl_telemetry.connectors",
  "kv_role": "kv_both",
  "kv_connector_extra_config": {"{key}": {"log_format": "json", "slow_transfer_seconds": 0.5}}
}
```

The config wins over the variable, and the variable over the default, for each setting on its own.
"""

_OTEL: Final = (
    (
        "`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, `OTEL_EXPORTER_OTLP_ENDPOINT`",
        "where spans go; without either there is no exporter",
    ),
    (
        "`OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`, `OTEL_EXPORTER_OTLP_PROTOCOL`",
        "`grpc` (the default, as in vLLM); anything else is OTLP over HTTP with protobuf",
    ),
    (
        "`OTEL_TRACES_EXPORTER`",
        (
            "`otlp` (default): the protocol above; `otlp_proto_grpc`, `otlp_proto_http`: this one, whatever is above; "
            "of several the first; all else, `none` too: no exporter"
        ),
    ),
    ("`OTEL_SDK_DISABLED`", "`true`: no exporter"),
)

_AFTER_SETTINGS: Final = """\
A boolean variable is `1`, `true`, `yes` or `on`, or the opposite of one of them.

`{auto}` is a variable only; it is on for `1`, `true`, `yes` and `on`, off for their opposites and where it is
empty, and anything else stops the start of vLLM.

NIXL owns the prefix `NIXL_TELEMETRY_`, and vLLM warns about unknown `VLLM_` variables: hence `NIXLTEL_`.
Variables that start with `NIXLTEL_TESTBED_` belong to the tests and are ignored.

### Mistakes

An unknown key, an unknown `NIXLTEL_` variable or a bad value stops the start of vLLM, before a model is loaded.
The message names the setting, the value and what is valid.
Two examples:

```text
{example_key}
{example_value}
```

## Where spans go

Spans are exported where somebody asked for it, and nowhere else:

1. **To vLLM's `--otlp-traces-endpoint`**, where there is one.
2. **To an endpoint in `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT`** otherwise.
3. **To `trace_file`**, beside either or alone; `nixl-telemetry trace show` reads it.

Metrics and log lines do not depend on them.
The exporters are OpenTelemetry's own, with their headers, TLS, compression, timeouts and retries.
By HTTP, `REQUESTS_CA_BUNDLE` and `CURL_CA_BUNDLE` win over OpenTelemetry's certificate variables, as with any of its
exporters; without `OTEL_SERVICE_NAME` (say `prefill` and `decode`) the service is `unknown_service:python`.
Resource and sampler are those of the process's tracer provider, which vLLM sets up with 1., and otherwise those that
the standard variables (`OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`) ask for.

vLLM hands a request's `traceparent` to its connectors with 1. only: with 2. and 3. alone the suite's spans are in
traces of their own, which still span prefill and decode; in push, two that are linked
([One trace](signals.md#one-trace)).

Handshakes and all that failed become spans at once.
Transfers, receives and leases that succeeded are gathered for a second; while requests keep coming until half a second
before the next message, but for 5 s at most, and until more than 32 wait.
Spans are sent 0.2 s after the last one; while more keep coming, every `OTEL_BSP_SCHEDULE_DELAY` milliseconds (5,000 by
default, as for vLLM's own spans; an hour at most), and as soon as 512 wait.
With `--shutdown-timeout 0`, its default, vLLM kills its processes within half a second when it is stopped, too early
for an export at exit: what waits then is lost, and nobody is left to count it.
With a `--shutdown-timeout` it is exported, as far as `shutdown_timeout_seconds` allows; with a shorter delay less is
lost, at a cost of about 2 ms of CPU time for each message by gRPC.
A batch that is not taken within the exporter's timeout is lost; `nixl_telemetry_dropped_total{signal="spans"}` counts
its spans.

Several processes of an instance, and several instances, may write the same trace file.
They hold at most `trace_file_count` times `trace_file_max_bytes`, unless a single message is larger.
The folder is made if missing; files are readable for owner and group (0640).

Read by the suite:

{otel}

The OpenTelemetry SDK reads the others itself: `OTEL_SERVICE_NAME`, `OTEL_RESOURCE_ATTRIBUTES`, `OTEL_TRACES_SAMPLER`,
and headers, certificates, compression and timeouts under `OTEL_EXPORTER_OTLP_*`.
The other `OTEL_BSP_*` and `OTEL_SPAN_*_LIMIT` have no effect on the suite's spans.
A gRPC endpoint without TLS starts with `http://`.
The resource has `vllm.process_id`.

With vLLM's endpoint, `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` alone chooses the protocol, as in vLLM: neither
`OTEL_EXPORTER_OTLP_PROTOCOL` nor the exporter's name does.

Metrics do not depend on sampling.
A failing exporter is counted in `nixl_telemetry_errors_total{signal="traces"}`; serving does not wait for it.

## Settings of vLLM and NIXL that matter here

`enforce_handshake_compat` (in `kv_connector_extra_config`)
:   `false` lets peers with another compatibility hash through.
    They may exchange KV that does not fit.
    The suite warns of it once and counts such peers in `nixl_handshake_bypassed_total`.

`kv_lease_duration` (in `kv_connector_extra_config`; both sides)
:   Seconds for which the prefill side holds KV for the decode side, 30 where not given.
    While a request waits, the decode side renews that every sixth of its own value, and the prefill side adds two
    thirds of its own: one that is much shorter on the prefill side expires in between.

`kv_load_failure_policy` (a key of `--kv-transfer-config` itself, beside `kv_role`; decode side)
:   `fail` (vLLM's default): a request whose KV cannot be loaded fails.
    `recompute`: the decode instance prefills it itself.

`VLLM_NIXL_SIDE_CHANNEL_HOST`, `VLLM_NIXL_SIDE_CHANNEL_PORT`
:   Where peers shake hands with this instance, `localhost` and 5600 where not given.
    Instances on different hosts need an address that the others reach, and two on one host different ports.

`NIXL_TELEMETRY_ENABLE`
:   With `n`, NIXL has no times and bytes of a transfer.
    A stock connector then fails each finished transfer; the instrumented one serves.

`VLLM_LOGGING_LEVEL`
:   With `DEBUG`, transfers that succeed are logged too.
"""


def configuration() -> str:
    """The page on settings."""
    return "\n".join(
        [
            NOTE.format(source="nixl_telemetry/settings.py"),
            _fill(_WIRINGS),
            table(("key", "variable", "type", "default", "description"), _setting_rows()),
            _fill(_AFTER_SETTINGS),
        ]
    )


def _fill(text: str) -> str:
    # Not str.format: the text is full of JSON.
    values = {
        "auto": AUTO_VARIABLE,
        "key": CONFIG_KEY,
        "example_key": mistake({"log_style": "json"}),
        "example_value": mistake({"queue_size": 3}),
        "otel": table(("variable", "effect"), _OTEL).rstrip(),
    }
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


def mistake(settings: dict[str, object]) -> str:
    """The message for bad settings."""
    try:
        Settings.load({CONFIG_KEY: settings}, {})
    except ValueError as error:
        return str(error)
    raise AssertionError(f"these settings are fine: {settings}")


def _setting_rows() -> Iterator[tuple[str, str, str, str, str]]:
    for name, setting in Settings.model_fields.items():
        default = str(setting.default).lower() if isinstance(setting.default, bool) else str(setting.default)
        shown = "" if setting.default is None else f"`{default}`"
        yield f"`{name}`", f"`{variable_of(name)}`", _type_of(setting), shown, setting.description or ""


def _type_of(setting: FieldInfo) -> str:
    if typing.get_origin(setting.annotation) is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(setting.annotation))
    names: dict[Hashable, str] = {bool: "boolean", int: "integer", float: "number", str | None: "text"}
    if setting.annotation == tuple[str, ...] | None:
        return "list of texts"
    limits = [
        f"{words} {getattr(limit, field):,}"
        for limit in setting.metadata
        for field, words in (("gt", "above"), ("ge", "at least"), ("le", "at most"), ("lt", "below"))
        if hasattr(limit, field)
    ]
    return ", ".join([names[typing.cast("Hashable", setting.annotation)], *limits])


# ----------------------------------------------------------------------------------------------------------------- Main

PAGES: Final = {"signals.md": signals, "configuration.md": configuration}
"""What makes each generated page."""


def main() -> None:
    """Write every page."""
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), encoding="utf-8")
        print(f"generated: docs/{name}")


if __name__ == "__main__":
    main()
