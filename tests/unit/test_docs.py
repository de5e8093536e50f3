# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The documentation: what is generated is current, and what is named exists."""

import json
import re
from collections.abc import Iterator, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from nixl_telemetry.compat.factors import digest
from nixl_telemetry.compat.statement import Geometry
from nixl_telemetry.operations.compatibility import Compatibility
from nixl_telemetry.operations.handshake import Failure, Handshake
from nixl_telemetry.operations.lease import LeaseTable
from nixl_telemetry.operations.mode import ModeConflict
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.operations.receive import Origin, ReceiveTable
from nixl_telemetry.operations.startup import announce
from nixl_telemetry.operations.transfer import Request, TransferTable
from nixl_telemetry.operations.tripwires import Tripwires
from nixl_telemetry.settings import AUTO_VARIABLE, Settings, variable_of
from nixl_telemetry.signals.catalogue import CATALOGUE
from nixl_telemetry.signals.clock import now_ns
from nixl_telemetry.signals.semconv import (
    ConflictSource,
    ErrorType,
    EventName,
    InvalidKv,
    Purpose,
    RequestRole,
    SpanName,
    TransferMode,
)
from nixl_telemetry.testbed import ReceivedSpan
from tests.support.observed import Collector, Observed, observing
from tests.support.statements import exchanged, factors, statement
from tools import generate_docs

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
OF_PAGES: Final = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def code(page: Path) -> list[str]:
    """Inline code and the lines of shell blocks."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [*re.findall(r"`([^`\n]+)`", prose(page)), *(line for block in blocks for line in block.splitlines())]


# ------------------------------------------------------------------------------------------------------------ Generated


@pytest.mark.parametrize("name", generate_docs.PAGES)
def test_generated_pages_are_current(name: str) -> None:
    """As `make generate` would write them now."""
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == generate_docs.PAGES[name]()


def test_every_name_is_documented() -> None:
    """Metrics, spans, events, error types, attributes and settings."""
    signals, configuration = (generate_docs.PAGES[name]() for name in ("signals.md", "configuration.md"))
    assert set(generate_docs.SPANS) == set(SpanName)
    assert set(generate_docs.LOG_EVENTS) == set(EventName)
    assert set(generate_docs.CONFLICT_CONTEXT) == set(ConflictSource)
    names = [*CATALOGUE, *SpanName, *EventName, *ErrorType, *map(generate_docs.attribute, generate_docs.attributes())]
    assert [name for name in names if f"`{name}" not in signals] == []
    assert [
        name for name in Settings.model_fields if f"| `{name}` | `{variable_of(name)}` |" not in configuration
    ] == []


def test_every_metric_with_an_open_label_set_says_so_in_its_help() -> None:
    """Only the identity, its factors and peers have labels whose values are not listed."""
    open_sets = {metric.name for metric in CATALOGUE.values() if any(not label.values for label in metric.labels)}

    peers = {name for name in CATALOGUE if name.startswith("nixl_peer_")}
    assert open_sets == {"nixl_connector_info", "nixl_compat_factor_info", *peers}


CONFLICT: Final = ModeConflict(ConflictSource.PARAMS, "pull", "push")


@pytest.fixture
def observed(collector: Collector) -> Iterator[Observed]:
    """A hub with all attributes that a connector gives it."""
    with observing(collector, attributes=dict.fromkeys(names(*generate_docs.COMMON_ATTRIBUTES), "x")) as hub:
        yield hub


def keys(span: ReceivedSpan) -> set[str]:
    """A span's attributes, with the factors as one."""
    return {re.sub(r"^(nixl\.(?:remote\.)?compat\.factor\.).*", r"\1", name) for name in span.attributes}


def documented(name: SpanName, *, failed: bool) -> set[str]:
    """The attributes that the page has for a span. Those of all spans are not repeated where there is a parent."""
    doc = generate_docs.SPANS[name]
    common = () if "child of" in doc.kind else generate_docs.COMMON_ATTRIBUTES
    return names(*common, *doc.attributes, *(doc.on_failure if failed else ()))


@pytest.mark.parametrize("failed", [False, True])
def test_attributes_of_a_handshake(observed: Observed, failed: bool) -> None:
    """Real spans have the documented attributes, kind and events."""
    mine, theirs = statement(), statement(factors(dtype="torch.float16"), geometry=Geometry(tp_size=2))
    compatibility = Compatibility(observed.telemetry, digest(mine.factors), False, "kv_consumer", mine.factors, mine)
    handshake = Handshake(observed.telemetry, Peer("e", "h", 1), Purpose.TRANSFER, compatibility, 1, CONFLICT)
    handshake.received(*exchanged(theirs))
    if not failed:
        handshake.registering()
        handshake.registered()
    handshake.finish(Failure(RuntimeError("engine")) if failed else None)

    check(observed, {SpanName.HANDSHAKE, SpanName.HANDSHAKE_COMPAT}, failed=failed)


@pytest.mark.parametrize("failed", [False, True])
def test_attributes_of_a_transfer(observed: Observed, failed: bool) -> None:
    """The same; bytes and times are there on success only."""
    table = TransferTable(observed.telemetry)
    table.request = Request("r", "s", Peer("e", "h", 1), 0, [[1]], [[2]])
    handle = object()
    table.prepared("WRITE", [1], now_ns(), handle)
    table.posting(handle)
    if failed:
        table.polled(handle, "ERR")
    else:
        table.done(handle, SimpleNamespace(xferDuration=1, postDuration=1, totalBytes=1, descCount=1))

    missing = ("TRANSFER_BYTES", "TRANSFER_DURATION", "TRANSFER_POST_DURATION") if failed else ()
    check(observed, {SpanName.TRANSFER}, failed=failed, missing=names(*missing))
    # Of a block's own attributes some exclude each other.
    absent = ("BLOCK_REGION", "BLOCK_COUNT", *(["BLOCK_SIZE"] if failed else []))
    check(observed, {SpanName.BLOCK}, failed=failed, missing=names(*absent))


@pytest.mark.parametrize("mode", list(TransferMode))
@pytest.mark.parametrize("failed", [False, True])
def test_attributes_of_a_receive(
    observed: Observed, monkeypatch: pytest.MonkeyPatch, mode: TransferMode, failed: bool
) -> None:
    """The same; each mode has phases of its own."""
    monkeypatch.setattr(observed.telemetry, "mode", mode)
    receives = ReceiveTable(observed.telemetry)
    receive = receives.start("r", "s", Peer("e", "h", 1), 1, Origin())
    receive.reads(1.0 if mode is TransferMode.PULL else None)
    receive.tell_long_wait()
    receives.finish(["r"], ["r"] if failed else [])

    absent = (
        ("RECEIVE_POST_DURATION", "RECEIVE_TRANSFER_DURATION", "RECEIVE_OBSERVATION_DELAY", "LEASE_REMAINING")
        if mode is TransferMode.PUSH
        else ("RECEIVE_REMOTE_DURATION",)
    )
    check(observed, {SpanName.RECEIVE}, failed=failed, missing=names(*absent))


@pytest.mark.parametrize("expired", [False, True])
def test_attributes_of_a_lease(observed: Observed, expired: bool) -> None:
    """The same."""
    leases = LeaseTable(observed.telemetry)
    leases.open("r", 1)
    leases.close(["r"], ["r"] if expired else [])

    check(observed, {SpanName.LEASE}, failed=expired)


@pytest.mark.parametrize("failed", [False, True])
def test_attributes_of_a_tripwire(observed: Observed, failed: bool) -> None:
    """The same."""
    wires = Tripwires(observed.telemetry)
    if failed:
        wires.invalid_kv(InvalidKv.UNKNOWN_REQUEST, "r", None)
    else:
        wires.without_params(RequestRole.DECODE, "r", None)

    missing = "REQUEST_ROLE" if failed else "INVALID_KV_REASON"
    other = EventName.WITHOUT_TRANSFER_PARAMS if failed else EventName.INVALID_KV
    check(observed, {SpanName.TRIPWIRE}, failed=failed, missing=names(missing), missing_events={other})


def test_attributes_of_the_hash(observed: Observed) -> None:
    """The same for the span at start-up."""
    mine = statement()
    compatibility = Compatibility(observed.telemetry, digest(mine.factors), True, "kv_both", mine.factors, mine)
    announce(
        observed.telemetry,
        compatibility,
        versions=("0.32.0", "1.5.1"),
        kv_role="kv_both",
        start_ns=1,
        conflict=CONFLICT,
    )

    check(observed, {SpanName.COMPAT_HASH}, failed=False)


def names(*constants: str) -> set[str]:
    """The attributes of constants."""
    return set(map(generate_docs.attribute, constants))


def check(
    observed: Observed,
    expected: set[SpanName],
    *,
    failed: bool,
    missing: frozenset[str] | set[str] = frozenset(),
    missing_events: Set[EventName] = frozenset(),
) -> None:
    """Hold what was exported against the page."""
    spans = {span.name: span for span in observed.spans()}
    assert set(spans) >= expected
    for name in expected:
        span, doc = spans[name], generate_docs.SPANS[name]
        assert keys(span) == documented(name, failed=failed) - missing
        assert doc.kind.split(",")[0] == span.kind.lower()
        assert {event.name for event in span.events} == set(doc.events) - missing_events
        for event in span.events:
            wanted = map(generate_docs.attribute, generate_docs.SPAN_EVENTS[EventName(event.name)])
            assert set(event.attributes) == set(wanted)


def test_common_attributes_are_those_of_the_connector() -> None:
    """Read from the connector's source, which needs vLLM to be imported."""
    source = (ROOT / "nixl_telemetry" / "seam" / "connector.py").read_text(encoding="utf-8")

    assert set(re.findall(r"\bsemconv\.([A-Z_]+)\b", source)) == set(generate_docs.COMMON_ATTRIBUTES)


# ---------------------------------------------------------------------------------------------------------------- Named


def test_named_pages_exist() -> None:
    """The pages whose content is checked below."""
    assert {page.name for page in PAGES} >= {"README.md", "index.md", "architecture.md", "testing.md", "signals.md"}


@OF_PAGES
def test_make_verbs_exist(page: Path) -> None:
    """Every `make X` that a page names."""
    verbs = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = {
        verb for text in code(page) for words in re.findall(r"\bmake((?: [a-z-]+)+)", text) for verb in words.split()
    }

    assert named - verbs == set()


@OF_PAGES
def test_metrics_exist(page: Path) -> None:
    """Every metric that a page names, in code blocks too; vLLM's own as well."""
    built_in = {name.removesuffix("_total") for name, _, _ in generate_docs.BUILT_IN}
    text = page.read_text(encoding="utf-8")
    ours = re.findall(r"(?<![\w:./-])nixl_\w+(?:_total|_seconds|_info|_in_flight)(?=\W|_count|_sum|_bucket)", text)
    theirs = re.findall(r"vllm:nixl_(?!\*)\w+", text)

    assert [name for name in ours if re.sub("_(count|sum|bucket)$", "", name) not in CATALOGUE] == []
    assert [name for name in theirs if re.sub("_(count|sum|bucket|total)$", "", name) not in built_in] == []


@OF_PAGES
def test_variables_exist(page: Path) -> None:
    """Every `NIXLTEL_*` variable that a page names."""
    known = {AUTO_VARIABLE, "NIXLTEL_TESTBED_", "NIXLTEL_", *map(variable_of, Settings.model_fields)}

    assert set(re.findall(r"NIXLTEL_[A-Z_]*", page.read_text(encoding="utf-8"))) - known == set()


@OF_PAGES
def test_settings_in_examples_are_valid(page: Path) -> None:
    """Every JSON example parses, and its settings load."""
    for block in re.findall(r"^```json\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL):
        for extra in extra_configs(json.loads(block)):
            Settings.load(extra, {})


def extra_configs(value: object) -> Iterator[dict[str, object]]:
    """Every ``kv_connector_extra_config`` in a JSON value."""
    if isinstance(value, list):
        for item in value:
            yield from extra_configs(item)
    elif isinstance(value, dict):
        if isinstance(extra := value.get("kv_connector_extra_config"), dict):
            yield extra
        for item in value.values():
            yield from extra_configs(item)


@OF_PAGES
def test_files_exist(page: Path) -> None:
    """Every path inside the repository that a page names in code."""
    folders = "nixl_telemetry|tests|tools|docs|dashboards|alerts|benchmarks|examples"
    named = {path for text in code(page) for path in re.findall(rf"(?<![\w./-])(?:{folders})/[\w./-]*", text)}

    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


@OF_PAGES
def test_links_resolve(page: Path) -> None:
    """Links to files of the repository, and to headings in them."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", prose(file), flags=re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\s-]", "", title).strip().lower().replace(" ", "-") for title in headings}
