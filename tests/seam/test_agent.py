# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The agent's hooks on real NIXL agents."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.nixl_utils import NixlWrapper

from nixl_telemetry.testbed import ServerConfig
from tests.support.agents import BLOCK_BYTES, BLOCKS, move
from tests.support.observed import Observed


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
    assert observed.span("nixl.transfer").attributes["nixl.transfer.size"] == 4 * BLOCK_BYTES
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

    with pytest.raises(Exception, match="NIXL_ERR") as caught:
        here.agent.make_prepped_xfer("READ", local, [1, 2], remote, [BLOCKS + 5, BLOCKS + 6])

    assert type(caught.value).__module__.startswith("nixl")
    assert len(observed.updates()["nixl_transfer_duration_seconds", "read", "transfer_setup"]) == 1


def test_an_unknown_operation(observed: Observed, make_pair: Any) -> None:
    """A mistake of the caller's stays the caller's."""
    here, _table, local, remote = make_pair()

    with pytest.raises(KeyError):
        here.agent.make_prepped_xfer("MOVE", local, [1], remote, [1])

    assert observed.updates()["nixl_mode_conflicts_total", "operation"] == 1


def test_agents_of_the_test_bed_wait_for_events(tmp_path: Path) -> None:
    """NIXL's progress thread otherwise polls with most of a core, and tests with many servers starve."""
    script = "import nixl_cu12._api as api; print(api.nixlBind.nixlAgent.__module__)"
    environment = ServerConfig(tmp_path).environment(side_channel_port=5600)

    output = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)

    assert output.stdout.split() == ["sitecustomize"]
