# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Two real NIXL agents that move real memory, in one process."""

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
        table.request = Request("r", "s", Peer("there", "10.0.0.7", 5600), 0, [[1, 2, 3, 9]], [[4, 5, 6, 11]])
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
