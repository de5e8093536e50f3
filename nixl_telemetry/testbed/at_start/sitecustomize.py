# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Prepares every process of a vLLM server for small machines; Python imports this file by itself at start-up."""

import ctypes
import importlib.abc
import importlib.machinery
import itertools
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar

_POLL_SECONDS = 1e-3
_POLL_MICROSECONDS = 1000

# Linux: arch/x86/include/uapi/asm/prctl.h and the feature number of AMX's tile data.
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


def _sleep_instead() -> None:
    time.sleep(_POLL_SECONDS)


def _share_the_cores() -> None:
    """Sleep where vLLM yields, and let NIXL wait.

    Engine core and workers poll shared memory with ``os.sched_yield`` for a second after each message. Where threads
    outnumber cores, Linux 6.18 then starves others for many seconds, whole processes of other sessions included:
    ``sched_yield`` there moves the caller behind everybody else in virtual time. A short sleep gives the core away.
    """
    os.sched_yield = _sleep_instead
    _change_nixl(_wait_for_events)


def _wait_for_events(api: ModuleType) -> None:
    """Let NIXL's progress thread wait for events instead of asking without a pause, which takes most of a core.

    NIXL's Python API sets the pause to zero and offers no other way; so each agent's config is changed on its way.
    """
    bindings = api.nixlBind
    make_agent = bindings.nixlAgent

    def make_patient_agent(name: str, config: Any) -> Any:
        config.pthrDelay = _POLL_MICROSECONDS
        return make_agent(name, config)

    bindings.nixlAgent = make_patient_agent


def _record_transfers(api: ModuleType) -> None:
    """Write down each transfer that NIXL is asked for: what the suite reports is held against it.

    Two lines of JSON each, which begin with what is the transfer's own: the indices of the local and the remote
    descriptors, and the bytes that NIXL says it moved, once it was asked for them.
    """
    prepare, measure = api.nixl_agent.make_prepped_xfer, api.nixl_agent.get_xfer_telemetry
    numbers = itertools.count()
    # By identity: the handle has no place for more, and lives until vLLM has asked for the bytes.
    keys: dict[int, str] = {}

    def record(*values: object) -> None:
        with open(os.environ["NIXLTEL_TESTBED_RECORD"], "a", encoding="utf-8") as file:  # noqa: PTH123
            file.write(json.dumps(values) + "\n")

    def prepare_and_record(self: Any, operation: str, *arguments: Any, **named: Any) -> Any:
        _, local_indices, _, remote_indices, *_ = arguments
        key = f"{os.getpid()}-{next(numbers)}"
        record(key, list(map(int, local_indices)), list(map(int, remote_indices)))
        handle = prepare(self, operation, *arguments, **named)
        keys[id(handle)] = key
        return handle

    def measure_and_record(self: Any, handle: Any) -> Any:
        result = measure(self, handle)
        record(keys.pop(id(handle)), result.totalBytes)
        return result

    api.nixl_agent.make_prepped_xfer = prepare_and_record
    api.nixl_agent.get_xfer_telemetry = measure_and_record


def _change_nixl(change: Callable[[ModuleType], None]) -> None:
    """Change NIXL's Python API when it is imported."""
    if not _NixlImport.changes:
        sys.meta_path.insert(0, _NixlImport())
    _NixlImport.changes.append(change)


class _NixlImport(importlib.abc.MetaPathFinder):
    changes: ClassVar[list[Callable[[ModuleType], None]]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in {"nixl_cu12._api", "nixl_cu13._api"}:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            for change in self.changes:
                change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _ask_for_amx() -> None:
    """Ask Linux for the tile registers, which vLLM's attention uses on CPUs with AMX and forgets to ask for.

    oneDNN asks when it first multiplies something large. A decode worker gets its KV from elsewhere and may never have:
    it then dies of an illegal instruction (vLLM 0.32). Where there is no AMX the kernel refuses, and nothing changes.
    """
    if platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)


def _fork_instead_of_spawn() -> None:
    """Start engine core and workers as vLLM does on GPUs, without importing everything again: in half the time.

    On the CPU vLLM insists on spawning.
    """
    get_context: Callable[..., Any] = multiprocessing.get_context

    def forking(method: str | None = None) -> Any:
        return get_context("fork" if method == "spawn" else method)

    multiprocessing.get_context = forking


_ask_for_amx()
if os.environ.get("NIXLTEL_TESTBED_POLITE") == "1":
    _share_the_cores()
if "NIXLTEL_TESTBED_RECORD" in os.environ:
    _change_nixl(_record_transfers)
if os.environ.get("NIXLTEL_TESTBED_FORK") == "1":
    _fork_instead_of_spawn()
