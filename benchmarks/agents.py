# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Two real NIXL agents that move real memory, in one process, and a real worker that reads through one of them."""

import itertools
import time
import uuid
from types import SimpleNamespace
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata, RemoteMeta, ReqMeta
from vllm.distributed.nixl_utils import NixlWrapper, nixl_agent_config

from benchmarks.bare import ENGINE, PEER, worker_connector
from nixl_telemetry.operations.peer import Peer
from nixl_telemetry.seam.carrier import StepNotes

BLOCKS: Final = 16384
BLOCK_BYTES: Final = 64
_PROGRESS_SECONDS: Final = 30.0
_PAUSE_SECONDS: Final = 1e-3


class Side:
    """An agent with registered memory.

    It has no threads of its own: each would keep a core busy, and those of all agents here would take turns on few
    cores with what is measured. Transfers get on while they are waited for.
    """

    def __init__(self) -> None:
        config = nixl_agent_config(enable_prog_thread=False, num_threads=0, capture_telemetry=True)
        self.agent: Any = NixlWrapper(str(uuid.uuid4()), config)
        self._memory = torch.zeros((BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
        base = self._memory.data_ptr()
        region = self.agent.get_reg_descs([(base, self._memory.nbytes, 0, "")], "DRAM")
        self.agent.register_memory(region, backends=["UCX"])
        self._blocks = [(base + index * BLOCK_BYTES, BLOCK_BYTES, 0) for index in range(BLOCKS)]

    def prepare(self, name: str, other: "Side") -> Any:
        """The list of the blocks of a side."""
        return self.agent.prep_xfer_dlist(name, self.agent.get_xfer_descs(other._blocks, "DRAM"))


class Reader:
    """A worker of the decode side that reads from a peer.

    Args:
        instrumented: Whether it has the hooks.
        **settings: Of the telemetry.
    """

    def __init__(self, instrumented: bool, **settings: Any) -> None:
        here, self._there = Side(), Side()
        name = here.agent.add_remote_agent(self._there.agent.get_agent_metadata())
        local, remote = here.prepare("NIXL_INIT_AGENT", here), here.prepare(name, self._there)
        self._agent = here.agent
        self._stock_agent = type(here.agent)
        self.connector = worker_connector("pull", instrumented, here.agent, **settings)
        self.worker = self.connector.connector_worker
        self._meet(name, local, remote)
        self._numbers = itertools.count()
        self._here = here

    def _meet(self, name: str, local: Any, remote: Any) -> None:
        """What a handshake leaves behind."""
        group = SimpleNamespace()
        self.worker.__dict__.update(
            _remote_agents={PEER: {(0, 0): name}},
            _engine_by_address={("127.0.0.1", 5600): PEER},
            tp_mappings={
                PEER: SimpleNamespace(all_source_ranks=(0,), source_ranks_per_group=((0,),), local_consumers=1)
            },
            src_xfer_handles_by_block_size={16: local},
            dst_xfer_side_handles={PEER: {0: remote}},
            region_group_ids=[],
            dst_region_group_ids={PEER: []},
            dst_region_num_blocks={},
            dst_num_blocks={PEER: BLOCKS, ENGINE: BLOCKS},
            dst_uses_region_group_mapping={PEER: False},
            _uses_region_group_mapping=False,
            _transfer_layer_group_ids=[],
            num_regions=1,
            block_len_per_layer=[BLOCK_BYTES],
            kv_cache_config=SimpleNamespace(transfer_groups=[group]),
        )
        observer = getattr(self.worker, "_nixl_telemetry", None)
        if observer is not None:
            observer._peers.meet(Peer(PEER, "127.0.0.1", 5600))

    def metadata(self, blocks: int, requests: int) -> Any:
        """A step's metadata, with requests to fetch."""
        metadata = NixlConnectorMetadata()
        StepNotes().attach(metadata)
        for number in itertools.islice(self._numbers, requests):
            # Lists of their own, as the scheduler makes them.
            local, remote = list(range(0, BLOCKS, BLOCKS // blocks))[:blocks], list(range(blocks))
            metadata.reqs_to_recv[f"request-{number}"] = ReqMeta(
                local_block_ids=[local],
                local_physical_block_ids=[local],
                tp_size=1,
                remote=RemoteMeta([remote], "127.0.0.1", 5600, PEER, f"remote-{number}"),
                awaiting_kvs=True,
            )
        return metadata

    def post(self, metadata: Any) -> None:
        """The step that posts the transfers."""
        self.connector.bind_connector_metadata(metadata)
        self.connector.start_load_kv(None)

    def wait(self) -> None:
        """Until NIXL is done, past the hooks."""
        handles = [handle for handles in self.worker._recving_transfers.values() for handle in handles]
        deadline = time.monotonic() + _PROGRESS_SECONDS
        while any(self._stock_agent.check_xfer_state(self._agent, handle) == "PROC" for handle in handles):
            self.forget()
            if time.monotonic() > deadline:
                raise TimeoutError("NIXL does not finish a transfer in memory")

    def ask(self) -> None:
        """What a step asks for, and its stats."""
        self.worker.get_transfer_results()
        self.connector.get_kv_connector_stats()
        self.connector.build_connector_worker_meta()

    def settle(self) -> None:
        """Until the suite has exported what it was told."""
        observer = getattr(self.worker, "_nixl_telemetry", None)
        if observer is None:
            time.sleep(_PAUSE_SECONDS)
        elif not observer.telemetry._export.run(lambda: None, _PROGRESS_SECONDS):
            raise TimeoutError("the suite does not get through what it was told")

    def forget(self) -> None:
        """The peer's agent gets on, and keeps what it was told until somebody asks."""
        self._there.agent.get_new_notifs()
