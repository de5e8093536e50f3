# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Every hook of ours raises, one at a time: vLLM and NIXL do what they do without us."""

import ast
import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

import pytest

from nixl_telemetry import operations, seam
from nixl_telemetry.operations import peer_traffic, transfer, transfer_counts
from nixl_telemetry.seam import scheduler, worker, worker_observer
from nixl_telemetry.seam.agent import AgentHooks, AskedAgentHooks, InboxHooks
from nixl_telemetry.seam.connector import InstrumentedNixlPullConnector
from nixl_telemetry.signals.catalogue import TRANSFER_BYTES
from nixl_telemetry.signals.telemetry import guarded
from tests.seam.test_handshake import GOOD, accepting, shake
from tests.support.agents import move
from tests.support.observed import Observed
from tests.support.peers import CLOCK, peer

Hook = tuple[type, str]


def hooks_in(*modules: ModuleType) -> list[Hook]:
    """The guarded methods of classes that these modules define."""
    return [
        (owner, name)
        for module in modules
        for owner in vars(module).values()
        if inspect.isclass(owner) and owner.__module__ == module.__name__
        for name, value in vars(owner).items()
        if hasattr(value, "__guarded__")
    ]


def modules_of(package: ModuleType) -> list[ModuleType]:
    """All there are, so that none is forgotten."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
    return [importlib.import_module(name) for name in names]


def name_of(hook: Hook) -> str:
    """As in an identifier."""
    return f"{hook[0].__name__}.{hook[1]}"


HOOKS = hooks_in(*modules_of(operations), *modules_of(seam))
OF_AGENT = hooks_in(transfer, transfer_counts, peer_traffic)
"""Those that an agent without a worker comes to."""


def test_there_are_hooks() -> None:
    """The list below is made by looking; this is what it must find at least."""
    names = set(map(name_of, HOOKS))

    assert {
        "Handshake.finish",
        "TransferTable.done",
        "TransferCounts.report",
        "WorkerObserver.with_updates",
        "SchedulerObserver.step_built",
    } <= names
    assert len(names) >= 25


@pytest.fixture(params=HOOKS, ids=name_of)
def broken_hook(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One hook that raises."""
    owner, name = request.param

    def raises(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"injected into {name}")

    raises.__qualname__ = name_of(request.param)
    monkeypatch.setattr(owner, name, guarded(raises))
    return raises.__qualname__


def test_a_handshake(broken_hook: str, observed: Observed, pull_worker: Any) -> None:
    """It has the stock result, and the failure has the stock exception."""
    with peer(lambda: [GOOD, CLOCK]) as port, accepting(pull_worker):
        assert shake(pull_worker, port)[0] == {(0, 0): "agent-there"}
    with peer(lambda: [b"junk", CLOCK]) as port, pytest.raises(RuntimeError, match="Failed to decode"):
        shake(pull_worker, port)


@pytest.mark.parametrize("broken_hook", OF_AGENT, indirect=True, ids=name_of)
def test_a_transfer(broken_hook: str, observed: Observed, make_pair: Any) -> None:
    """The memory arrives."""
    here, _table, local, remote = make_pair()

    assert move(here.agent, local, remote).totalBytes == 4 * 4096
    assert here.memory[[1, 2, 3, 9]].eq(7).all()


def test_a_step(broken_hook: str, observed: Observed, pull_worker: Any) -> None:
    """The stats that vLLM collected itself leave the worker."""
    connector: Any = object.__new__(InstrumentedNixlPullConnector)
    connector.connector_worker, connector._observer = pull_worker, pull_worker._nixl_telemetry
    pull_worker.xfer_stats.record_failed_transfer()
    observed.telemetry.record(TRANSFER_BYTES, "read")

    stats = connector.get_kv_connector_stats()

    assert stats.data["num_failed_transfers"] == [1]


def test_failures_are_counted(observed: Observed, monkeypatch: pytest.MonkeyPatch, pull_worker: Any) -> None:
    """In the suite's own health."""

    def raises(self: Any, *args: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(worker_observer.WorkerObserver, "handshake_starts", guarded(raises))
    with peer(lambda: [GOOD, CLOCK]) as port, accepting(pull_worker):
        shake(pull_worker, port)

    assert observed.updates() == {("nixl_telemetry_errors_total", "hook"): 1}


@pytest.mark.parametrize(
    ("hooks", "observer"),
    [
        (worker.WorkerHooks, worker_observer.WorkerObserver),
        (worker.PullWorkerHooks, worker_observer.WorkerObserver),
        (worker.PushWorkerHooks, worker_observer.WorkerObserver),
        (scheduler.SchedulerHooks, scheduler.SchedulerObserver),
        (AgentHooks, transfer.TransferTable),
        (AskedAgentHooks, transfer.TransferTable),
        (InboxHooks, transfer.TransferTable),
    ],
)
def test_hooks_call_guarded_methods_only(hooks: type, observer: type) -> None:
    """Read from the source, so that a guard that somebody removes is missed."""
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(inspect.getsource(hooks)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) in ("self._nixl_telemetry", "observer", "table")
    }

    assert called
    assert not any(
        node.keywords
        for node in ast.walk(ast.parse(inspect.getsource(hooks)))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in ("observer", "table")
    )
    assert [name for name in sorted(called) if not hasattr(getattr(observer, name), "__guarded__")] == []
