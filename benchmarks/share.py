# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Which share of the CPU time of worker and engine core is the suite's own, on real servers under load.

Counted, not inferred: ``measured_connectors`` reads thread clocks around the hooks, and those of the suite's threads.
gRPC's threads belong to vLLM's exporter as much as to the suite's, and wake even where nothing is sent: what they take
in servers whose connector is switched off, under the same load, is not the suite's.
"""

import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Budget, Figure, Part
from benchmarks.fleet import NAMES, fleet
from benchmarks.load import requests, run
from benchmarks.measured import FOLDER
from benchmarks.meter import GRPC, NOTHING
from nixl_telemetry.testbed import OtlpReceiver, Pair, ServerConfig, TinyModel

SETTINGS: Final[dict[str, tuple[dict[str, Any], float]]] = {
    "default settings": ({}, 1.0),
    "every block a span": ({"block_spans": "each", "block_span_limit": 0}, 2.0),
}
"""What is measured, and its limit in percent."""
_OFF: Final = "off"
LENGTHS: Final = (64, 3000)
"""Tokens of a prompt: from 2 to 94 blocks."""
MAX_TOKENS: Final = 64
REQUESTS: Final = 120
CLIENTS: Final = 4
_WARM_UP: Final = 8
_SETTLE_SECONDS: Final = 11.0
"""Then all spans are sent: operations are gathered for 5 s at most, and spans as well."""
_ROOT: Final = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Counted:
    """What one process spent between two reports. Seconds of CPU time."""

    role: str
    process: float
    """All of it, less what counting costs."""
    own: Mapping[str, float]
    """The suite's, by hook and thread."""
    clock_ns: float = 0.0
    """What reading the clock took, each time."""
    seconds: float = 0.0
    """Between the reports, by the wall clock."""

    def less_grpc_of(self, off: "Counted") -> "Counted":
        """Without what gRPC's threads take where nothing of the suite's runs, in as many seconds."""
        if GRPC not in self.own:
            return self
        grpc = self.own[GRPC] - off.own.get(GRPC, 0.0) * self.seconds / off.seconds
        return replace(self, own={**self.own, GRPC: max(0.0, grpc)})

    @property
    def share(self) -> float:
        """The suite's share, in percent."""
        return 100 * sum(self.own.values()) / self.process


def measure(modes: Sequence[str]) -> Part:
    """Each mode with each of the settings."""
    parts = [_of_mode(mode) for mode in modes]
    return Part(
        [budget for part in parts for budget in part.budgets],
        [figure for part in parts for figure in part.figures],
        {name: values for part in parts for name, values in part.samples.items()},
    )


def _of_mode(mode: str) -> Part:
    model = TinyModel()
    budgets, figures = [], []
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="nixl-telemetry-bench-") as name, OtlpReceiver() as receiver:
        folder = Path(name)
        (folder / "meter").mkdir()
        config = ServerConfig(
            model.write(folder / "model"),
            connector=NAMES[mode],
            connector_module="benchmarks.measured_connectors",
            otlp_endpoint=receiver.grpc_endpoint,
            env={FOLDER: str(folder / "meter"), "PYTHONPATH": str(_ROOT)},
            fork=True,
        )
        telemetry = {_OFF: {"enabled": False}, **{setting: own for setting, (own, _) in SETTINGS.items()}}
        configs = {setting: replace(config, extra_config={"telemetry": own}) for setting, own in telemetry.items()}
        with fleet(configs, folder) as pairs:
            work = requests(model, REQUESTS, LENGTHS, MAX_TOKENS, seed=9)

            def warm(setting: str) -> Pair:
                pair = pairs.wake(setting)
                run(pair, requests(model, _WARM_UP, LENGTHS, MAX_TOKENS, seed=8), CLIENTS)
                return pair

            off = {one.role: one for one in _count(warm(_OFF), folder / "meter", work)}
            for setting, (_, limit) in SETTINGS.items():
                pair = warm(setting)
                before, messages = len(receiver.spans("nixl.block")), receiver.requests
                counted = [one.less_grpc_of(off[one.role]) for one in _count(pair, folder / "meter", work)]
                spans, messages = len(receiver.spans("nixl.block")) - before, receiver.requests - messages
                instances = [together(counted, instance) for instance in ("prefill", "decode")]
                worst = max(instances, key=lambda one: one.share)
                budgets.append(
                    Budget(
                        f"share of the suite in the CPU time of worker and engine core, {mode}, {setting}",
                        worst.share,
                        limit,
                        "%",
                        besides=spans > 0,
                        remark="; ".join(f"{one.role} {one.share:.2f} %" for one in [*instances, *counted])
                        + f"; {spans:,} block spans in {messages:,} messages",
                    )
                )
                figures += _figures(f"{mode}, {setting}", counted)
                for one in counted:
                    prefix = f"{mode}, {setting}, {one.role}"
                    samples[f"{prefix}: process s"] = [one.process]
                    samples[f"{prefix}: clock ns"] = [one.clock_ns]
                    samples |= {f"{prefix}: {part} s": [spent] for part, spent in one.own.items()}
    return Part(budgets, figures, samples)


def _count(pair: Pair, folder: Path, work: Sequence[Any]) -> list[Counted]:
    # What the suite leaves for later is counted with the load that it is of.
    time.sleep(_SETTLE_SECONDS)
    before = _reports(pair, folder, time.time())
    run(pair, work, CLIENTS)
    loaded = _reports(pair, folder, time.time())
    time.sleep(_SETTLE_SECONDS)
    after = _reports(pair, folder, time.time())
    return [
        until_settled(difference(role, before[role], loaded[role]), difference(role, before[role], after[role]))
        for role in sorted(after, reverse=True)
    ]


def until_settled(load: Counted, whole: Counted) -> Counted:
    """What the suite spent until all was sent; of the process only what the load took, since idle ones are not idle."""
    later = sum(whole.own.values()) - sum(load.own.values())
    return replace(whole, process=load.process + later)


def together(counted: Sequence[Counted], instance: str) -> Counted:
    """All processes of an instance."""
    mine = [one for one in counted if one.role.startswith(instance)]
    own: dict[str, float] = {}
    for one in mine:
        for name, spent in one.own.items():
            own[name] = own.get(name, 0.0) + spent
    return Counted(instance, sum(one.process for one in mine), own)


def difference(role: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> Counted:
    """What was spent between two reports of a process, less what counting took."""
    hooks = {
        name: (spent - before["hooks"].get(name, (0, 0))[0], count - before["hooks"].get(name, (0, 0))[1])
        for name, (spent, count) in after["hooks"].items()
    }
    nothing, empty = hooks.pop(NOTHING, (0, 0))
    clock = nothing / empty if empty else 0.0
    own = {name: max(0.0, spent - count * clock) / 1e9 for name, (spent, count) in hooks.items()}
    own |= {
        name: (spent - before["threads"].get(name, 0)) / 1e9
        for name, spent in after["threads"].items()
        if name != "others"
    }
    # Of the time between two readings of the clock, one half is before the first and after the second; a hook's first
    # stretch has one more in front, counted here with all.
    counting = 3 * clock * (empty + sum(count for _, count in hooks.values()))
    process = after["process_ns"] - before["process_ns"] - (after["writer_ns"] - before["writer_ns"]) - counting
    return Counted(role, process / 1e9, own, clock, after["at"] - before["at"])


def _reports(pair: Pair, folder: Path, since: float) -> dict[str, dict[str, Any]]:
    """The first report of each process after a moment."""
    deadline = time.monotonic() + 30
    while True:
        found = {}
        for instance, server in (("prefill", pair.prefill), ("decode", pair.decode)):
            for process in server.process.members():
                path = folder / f"{process.pid}.json"
                if path.exists():
                    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
                    found[f"{instance}'s {' and '.join(report['roles'])}"] = report
        if found and all(report["at"] > since for report in found.values()):
            return found
        if time.monotonic() > deadline:
            raise TimeoutError(f"no report of {sorted(found)} in time")
        time.sleep(0.05)


def _figures(where: str, counted: Sequence[Counted]) -> list[Figure]:
    figures = []
    for one in counted:
        kinds = {"hooks": 0.0}
        for name, spent in one.own.items():
            kind = name if name.startswith("nixl-telemetry") or name == GRPC else "hooks"
            kinds[kind] = kinds.get(kind, 0.0) + spent
        figures += [
            Figure(f"{where}: the suite in {one.role}, for each request", 1e3 * sum(one.own.values()) / REQUESTS, "ms"),
            *(
                Figure(f"{where}: {kind} in {one.role}", 100 * spent / one.process, "%")
                for kind, spent in kinds.items()
            ),
        ]
    return figures
