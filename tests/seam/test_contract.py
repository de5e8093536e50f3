# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What the seam leans on is where it is expected, in whichever vLLM is installed."""

import ast
import inspect
import os
import re
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker, metadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.v1.outputs import KVConnectorOutput

from nixl_telemetry import connectors
from nixl_telemetry.cli.doctor.checks import config, environment
from nixl_telemetry.cli.doctor.subject import Subject, installed_vllm
from nixl_telemetry.compat.factors import FACTOR_NAMES
from nixl_telemetry.compat.releases import RELEASES
from nixl_telemetry.seam.carrier import WorkerNotes
from nixl_telemetry.seam.instrument import OPTIONAL
from nixl_telemetry.seam.scheduler import SchedulerHooks
from nixl_telemetry.seam.versions import Parameters, connector_version, vllm_version
from nixl_telemetry.seam.worker import PullWorkerHooks, PushWorkerHooks, WorkerHooks
from nixl_telemetry.signals.semconv import TransferMode

CONNECTOR_VERSIONS = {"0.28": 7, "0.29": 9, "0.30": 11, "0.31": 13, "0.32": 14, "0.33": 15}


def test_the_version_that_is_meant_runs() -> None:
    """Not another one that happens to be on the path."""
    assert vllm_version().startswith(os.environ.get("NIXLTEL_TESTBED_VLLM", "0.32."))
    assert connector_version() == CONNECTOR_VERSIONS[vllm_version()[:4]]


def hooked(hooks: type) -> list[str]:
    """Names of the methods that hooks go in front of."""
    return [name for layer in hooks.__mro__ for name, value in vars(layer).items() if inspect.isfunction(value)]


@pytest.mark.parametrize(
    ("hooks", "stock"),
    [
        (WorkerHooks, base_worker.NixlBaseConnectorWorker),
        (PullWorkerHooks, nixl.NixlPullConnectorWorker),
        (PushWorkerHooks, nixl.NixlPushConnectorWorker),
        (SchedulerHooks, NixlBaseConnectorScheduler),
        (SchedulerHooks, nixl.NixlPullConnectorScheduler),
        (SchedulerHooks, nixl.NixlPushConnectorScheduler),
    ],
)
def test_hooked_methods_exist(hooks: type, stock: type) -> None:
    """A hook in front of nothing sees nothing."""
    assert [
        name for name in hooked(hooks) if not hasattr(stock, name) and name not in getattr(hooks, OPTIONAL, ())
    ] == []


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (
            base_worker.NixlBaseConnectorWorker._nixl_handshake,
            ["host", "port", "remote_tp_size", "expected_engine_id", "notif_agents_only"],
        ),
        (
            nixl.NixlPullConnectorWorker._read_blocks,
            ["read_spec", "request_id", "remote_request_id", "dst_engine_id"],
        ),
        (
            nixl.NixlPushConnectorWorker._xfer_blocks,
            ["read_spec", "request_id", "remote_request_id", "dst_engine_id"],
        ),
        (base_worker.NixlBaseConnectorWorker._compute_desc_ids, ["block_ids", "block_size_ratio"]),
        (base_worker.NixlBaseConnectorWorker._ensure_handshake, ["engine_id"]),
        (nixl.NixlPushConnectorWorker._send_registration_to_p, ["req_id"]),
        (nixl.NixlPushConnectorWorker._do_send_reg_notif, ["req_id"]),
        (
            nixl.NixlPushConnectorWorker._do_start_push_kv,
            ["request_id", "local_block_ids", "registration_data"],
        ),
    ],
)
def test_parameters_that_are_read(method: Any, parameters: list[str]) -> None:
    """By name, so that their order may change."""
    assert [name for name in parameters if name not in inspect.signature(method).parameters] == []


@pytest.mark.parametrize(
    ("method", "parameters"),
    [
        (nixl.NixlPullConnectorWorker.start_load_kv, ["self", "metadata"]),
        (nixl.NixlPushConnectorWorker.start_load_kv, ["self", "metadata"]),
        (nixl.NixlPullConnectorScheduler.build_connector_meta, ["self", "scheduler_output"]),
        (nixl.NixlPushConnectorScheduler.build_connector_meta, ["self", "scheduler_output"]),
        (nixl.NixlPullConnectorScheduler.update_connector_output, ["self", "connector_output"]),
        (nixl.NixlPushConnectorScheduler.update_connector_output, ["self", "connector_output"]),
        (base_worker.NixlBaseConnectorWorker._get_new_notifs, ["self"]),
    ],
)
def test_parameters_of_what_is_called_in_each_step(method: Any, parameters: list[str]) -> None:
    """Passed on one by one: a list and a dictionary of them would cost each step a microsecond."""
    assert list(inspect.signature(method).parameters) == parameters


def test_parameters_by_position_and_keyword() -> None:
    """Both ways lead to the argument; what the version does not have is the default."""
    parameters = Parameters(base_worker.NixlBaseConnectorWorker._nixl_handshake)

    assert parameters.get("port", ("h", 5600, 1, "e"), {}) == 5600
    assert parameters.get("port", ("h",), {"port": 5601}) == 5601
    assert parameters.get("notif_agents_only", ("h", 1, 1, "e"), {}, False) is False
    assert parameters.get("no_such_parameter", ("h", 1, 1, "e"), {}, 3) == 3


@pytest.mark.parametrize("worker", [nixl.NixlPullConnectorWorker, nixl.NixlPushConnectorWorker])
def test_block_ids_are_passed_by_keyword(worker: Any) -> None:
    """The remote side is the one without a block size ratio."""
    post = getattr(worker, "_read_blocks", None) or worker._xfer_blocks
    calls = [
        node
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(post))))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "_compute_desc_ids"
    ]

    ratios = []
    for call in calls:
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        assert "block_ids" in keywords
        ratio = keywords["block_size_ratio"]
        ratios.append(isinstance(ratio, ast.Constant) and ratio.value is None)
    assert ratios == [True, False]


def callers(worker: Any, *names: str) -> set[str]:
    """Which methods of a worker call one of these."""
    return {
        method.name
        for layer in worker.__mro__[:-1]
        for method in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(layer))))
        if isinstance(method, ast.FunctionDef)
        and any(
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names
            for node in ast.walk(method)
        )
    }


def test_transfers_are_posted_on_one_thread() -> None:
    """In pull where the engine's step calls, in push on the writer's thread: for which request is noted once."""
    pull, push = nixl.NixlPullConnectorWorker, nixl.NixlPushConnectorWorker

    assert callers(pull, "make_prepped_xfer", "_compute_desc_ids") <= {"_read_blocks", "_read_blocks_mixed"}
    assert callers(pull, "_read_blocks", "_read_blocks_mixed") <= {"_read_blocks_for_req", "_read_blocks"}
    assert callers(pull, "_read_blocks_for_req") == {"start_load_kv"}
    assert callers(push, "make_prepped_xfer", "_compute_desc_ids") == {"_xfer_blocks"}
    assert callers(push, "_do_start_push_kv") == {"_push_writer_loop", "_handle_push_reg_notif"}
    assert callers(push, "_handle_push_reg_notif") == {"_push_writer_loop"}


def test_the_payload_is_looked_up_in_base_worker() -> None:
    """Both where it is decoded and where our own is made; its fields are the two that go over the wire."""
    source = inspect.getsource(base_worker)

    assert "Decoder(NixlHandshakePayload)" in source
    assert [field.name for field in fields(metadata.NixlHandshakePayload)] == [
        "compatibility_hash",
        "agent_metadata_bytes",
    ]


def test_metadata_of_a_step() -> None:
    """What is read of the requests that a worker is to receive KV for, and what is written to registrations."""
    step = metadata.NixlConnectorMetadata()
    step.add_new_req_to_recv(
        "r",
        ([1, 2],),
        {
            "remote_block_ids": ([3, 4],),
            "remote_engine_id": "e",
            "remote_request_id": "s",
            "remote_host": "h",
            "remote_port": 1,
            "tp_size": 1,
        },
    )
    received = step.reqs_to_recv["r"]

    assert sum(map(len, received.local_block_ids)) == 2
    remote = received.remote
    assert remote is not None
    assert (remote.engine_id, remote.request_id, remote.host, remote.port) == ("e", "s", "h", 1)
    assert step.push_registrations == {}


def test_workers_can_tell_their_scheduler() -> None:
    """By the channel that vLLM has for that, which its own connectors leave free; ranks add up."""
    notes = WorkerNotes({"a"}).aggregate(WorkerNotes({"b"}))

    assert isinstance(notes, WorkerNotes)
    assert notes.expired == {"a", "b"}
    assert not KVConnectorOutput(kv_connector_worker_meta=notes).is_empty()
    assert nixl.NixlPullConnector.build_connector_worker_meta is KVConnectorBase_V1.build_connector_worker_meta


def test_hash_factors_is_looked_up_when_called() -> None:
    """So that the real factors can be seen."""
    source = inspect.getsource(metadata.compute_nixl_compatibility_hash)

    assert "from vllm.config.utils import hash_factors" in source


def test_every_factor_is_known() -> None:
    """The keys of the dict in vLLM's source are those of the table of releases."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(metadata.compute_nixl_compatibility_hash)))
    (keys,) = [
        [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
    ]

    (release,) = (release for release in RELEASES if release.vllm_version == vllm_version())
    assert set(keys) == set(release.factor_names) <= set(FACTOR_NAMES)
    assert connector_version() == release.connector_version


@pytest.mark.parametrize(
    ("connector", "stock"),
    [
        (connectors.NixlPullConnector, nixl.NixlPullConnector),
        (connectors.NixlPushConnector, nixl.NixlPushConnector),
    ],
)
def test_the_connector_is_its_stock_class_for_layout_and_hma(connector: Any, stock: Any) -> None:
    """Properties that change the KV layout, and so the hash, are inherited and not redefined."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma

    ours = {
        name for layer in connector.__mro__ if layer.__module__.startswith("nixl_telemetry") for name in vars(layer)
    }
    theirs = {name for name in dir(stock) if not name.startswith("__")}

    assert issubclass(connector, stock)
    assert supports_hma(connector) == supports_hma(stock) is True
    assert ours & theirs <= {
        "_abc_impl",
        "build_connector_worker_meta",
        "build_kv_connector_stats",
        "build_prom_metrics",
        "get_kv_connector_stats",
        "has_pending_push_work",
        "shutdown",
    }
    assert connector.transfer_mode in TransferMode


def test_what_doctor_reads_without_importing_vllm() -> None:
    """Its version, its connectors and its variables, from the sources."""
    vllm = installed_vllm()
    assert vllm is not None
    assert vllm.version == vllm_version()
    subject = Subject({"VLLM_NO_SUCH_THING": "1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "1"}, vllm=vllm)
    (unknown,) = environment.variables_of_vllm(subject)
    (name,) = config.connector_names(Subject({}, vllm=vllm, transfer={"kv_connector": "NixlPushConnecter"}))

    assert unknown.what.startswith("VLLM_NO_SUCH_THING is set")
    assert (name.level, name.remedy) == ("problem", "write NixlPushConnector")


def test_doctor_knows_the_keys_of_a_config() -> None:
    """Those of vLLM's class, and those that the NIXL connectors look up in the extra one."""
    looked_up = {
        key
        for file in Path(base_worker.__file__).parent.glob("*.py")
        for key in re.findall(r'get_from_extra_config\(\s*"(\w+)"', file.read_text(encoding="utf-8"))
    }

    assert {field.name for field in fields(KVTransferConfig)} <= config._KEYS | config._OLD_KEYS
    assert looked_up
    assert looked_up <= config._EXTRA_KEYS
