# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The agent's hooks on real NIXL agents that move real memory, in one process."""

import uuid
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.operations.transfer import Request, TransferTable
from nixl_telemetry.seam.agent import AgentHooks
from nixl_telemetry.seam.instrument import instrument
from tests.support.observed import Observed
from tests.support.peers import wait_until

BLOCKS, BLOCK_BYTES = 64, 4096


class Side:
    """An agent with a registered tensor of blocks."""

    def __init__(self, fill: int, capture_telemetry: bool = True) -> None:
        self.agent: Any = NixlWrapper(
            str(uuid.uuid4()), nixl_agent_config(num_threads=1, capture_telemetry=capture_telemetry)
        )
        self.memory = torch.full((BLOCKS, BLOCK_BYTES), fill, dtype=torch.uint8)
        base = self.memory.data_ptr()
        self.agent.register_memory(
            self.agent.get_reg_descs([(base, self.memory.nbytes, 0, "")], "DRAM"), backends=["UCX"]
        )
        self.blocks = [(base + index * BLOCK_BYTES, BLOCK_BYTES, 0) for index in range(BLOCKS)]

    def prepare(self, name: str, blocks: list[tuple[int, int, int]]) -> Any:
        return self.agent.prep_xfer_dlist(name, self.agent.get_xfer_descs(blocks, "DRAM"))


@pytest.fixture
def make_pair(observed: Observed) -> Callable[..., tuple[Side, TransferTable, Any, Any]]:
    """An instrumented initiator, its table, and the prepared lists of both sides."""

    def make(capture_telemetry: bool = True) -> tuple[Side, TransferTable, Any, Any]:
        here, there = Side(0, capture_telemetry), Side(7)
        name = here.agent.add_remote_agent(there.agent.get_agent_metadata())
        table = TransferTable(observed.telemetry)
        instrument(here.agent, AgentHooks, table)
        table.current.request = Request("r", "s", Peer("there", "10.0.0.7", 5600), 0, [[1, 2, 3, 9]], [[4, 5, 6, 11]])
        here.there = there  # type: ignore[attr-defined]
        return here, table, here.prepare("NIXL_INIT_AGENT", here.blocks), here.prepare(name, there.blocks)

    return make


def move(agent: Any, local: Any, remote: Any) -> Any:
    """READ four blocks, as vLLM does it; returns NIXL's telemetry."""
    handle = agent.make_prepped_xfer("READ", local, [1, 2, 3, 9], remote, [4, 5, 6, 11], notif_msg=b"done")
    agent.transfer(handle)
    assert wait_until(lambda: bool(agent.check_xfer_state(handle) == "DONE"))
    result = agent.get_xfer_telemetry(handle)
    agent.release_xfer_handle(handle)
    return result


def test_a_read(observed: Observed, make_pair: Any) -> None:
    """The memory arrives, and what is reported is what NIXL says."""
    here, table, local, remote = make_pair()

    result = move(here.agent, local, remote)

    assert isinstance(here.agent, NixlWrapper)
    assert here.memory[[1, 2, 3, 9]].eq(7).all()
    assert here.memory[0].eq(0).all()
    updates = observed.updates()
    assert updates["nixl_transfer_bytes_total", "read"] == result.totalBytes == 4 * BLOCK_BYTES
    assert updates["nixl_transfer_blocks_total", "read"] == 4
    assert updates["nixl_transfer_descriptors_total", "read"] == result.descCount
    assert updates["nixl_transfer_duration_seconds", "read", ""] == [result.xferDuration / 1e6]
    assert updates["nixl_transfers_in_flight", "read"] == 0
    assert (observed.span("nixl.transfer").attributes or {})["nixl.transfer.size"] == 4 * BLOCK_BYTES
    assert table._transfers == {}


def test_without_nixl_telemetry(observed: Observed, make_pair: Any) -> None:
    """NIXL raises where vLLM asks for its telemetry, and the finished transfer stays finished."""
    here, _table, local, remote = make_pair(capture_telemetry=False)

    assert move(here.agent, local, remote) is None

    assert here.memory[[1, 2, 3, 9]].eq(7).all()
    updates = observed.updates()
    assert updates["nixl_telemetry_errors_total", "nixl"] == 1
    assert len(updates["nixl_transfer_duration_seconds", "read", ""]) == 1


def test_a_transfer_that_cannot_be_prepared(observed: Observed, make_pair: Any) -> None:
    """NIXL's exception passes on unchanged."""
    here, _table, local, remote = make_pair()

    with pytest.raises(Exception) as caught:
        here.agent.make_prepped_xfer("READ", local, [1, 2], remote, [BLOCKS + 5, BLOCKS + 6])

    assert type(caught.value).__module__.startswith("nixl")
    assert len(observed.updates()["nixl_transfer_duration_seconds", "read", "transfer_setup"]) == 1


def test_an_unknown_operation(observed: Observed, make_pair: Any) -> None:
    """A mistake of the caller's stays the caller's."""
    here, _table, local, remote = make_pair()

    with pytest.raises(KeyError):
        here.agent.make_prepped_xfer("MOVE", local, [1], remote, [1])

    assert observed.updates()["nixl_mode_conflicts_total", "operation"] == 1
