# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Breaks things under load, on an instrumented and on a stock pair, and holds what happens against each other.

    python -m benchmarks.chaos                                  # all, about an hour
    python -m benchmarks.chaos --only kill_p,kill_d --modes pull

Writes ``benchmarks/chaos.json`` and ``docs/resilience.md``; with ``--output`` that file only. Ends with 1 where a fault
is not named, an account does not add up, fewer requests are served than by the stock pair, or the pair does not recover
and stock does.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

from benchmarks import machine
from benchmarks.chaos import page, report
from benchmarks.chaos.faults import FAULTS, Fault
from benchmarks.chaos.scene import Scene, scene
from benchmarks.chaos.trial import Observation, observe

_MODES = ("pull", "push")


def main(arguments: Sequence[str] | None = None) -> int:
    """Inflict the faults that are asked for."""
    options = _parser().parse_args(arguments)
    faults = [fault for fault in FAULTS.values() if fault.name in options.only]
    start = time.monotonic()
    results = report.load(options.output)
    found = {}
    for mode in options.modes:
        ours = dict(_observed(mode, faults, instrumented=True, keep=options.keep))
        for name, stock in _observed(mode, faults, instrumented=False, keep=options.keep):
            made = report.entry(ours[name], stock)
            found[f"{name}.{mode}"] = made
            _say(report.sentence(f"{name}.{mode}", made))
            # After each one, so that what was found is kept if a later one fails.
            results = report.merge(results, machine.describe(), found)
            report.save(results, options.output)
            if options.output == report.PATH:
                page.PATH.write_text(page.make(results), encoding="utf-8")
    wrong = [name for name, entry in found.items() if entry["problems"]]
    summary = f"{len(found) - len(wrong)} of {len(found)} faults borne, {time.monotonic() - start:.0f} s"
    _say(f"{summary}; not: {', '.join(wrong)}" if wrong else summary)
    return 1 if wrong else 0


def _observed(
    mode: str, faults: Iterable[Fault], *, instrumented: bool, keep: bool
) -> Iterator[tuple[str, Observation]]:
    """Each fault on one pair; faults that want the same pair share it."""
    kind = "instrumented" if instrumented else "stock"
    for lease_seconds, group in groupby(faults, key=lambda fault: fault.lease_seconds):
        with ExitStack() as stack:
            _say(f"{mode}, {kind}: starting")
            pair = stack.enter_context(scene(mode, instrumented=instrumented, lease_seconds=lease_seconds, keep=keep))
            is_sound = True
            for fault in group:
                if not is_sound:
                    _say(f"{mode}, {kind}: starting anew")
                    pair.renew()
                begin = time.monotonic()
                observation = observe(fault, pair)
                is_sound = _is_sound(observation, pair)
                _say(f"{mode}, {kind}: {fault.name}, {time.monotonic() - begin:.0f} s: {_brief(observation)}")
                yield fault.name, observation


def _is_sound(observation: Observation, pair: Scene) -> bool:
    """Whether the next fault may have this pair."""
    # What does not add up would not do so in the next fault either.
    adds_up = observation.identity_holds or bool(observation.missing) or not pair.instrumented
    return observation.recovered and adds_up and pair.is_sound()


def _brief(observation: Observation) -> str:
    cut = observation.phases
    served = ", ".join(
        f"{name} {tally.served} of {tally.sent}{f' {dict(tally.failures)}' if tally.failures else ''}"
        for name, tally in (("before", cut.before), ("during", cut.during), ("after", cut.after))
    )
    named = f"named by {observation.named[0].signal}; " if observation.named else ""
    seconds = observation.recovery_seconds
    recovered = "not recovered" if seconds is None else f"recovered in {seconds:.1f} s"
    if observation.recovered_with_new_router is not None:
        recovered += f", with a new router {'it is' if observation.recovered_with_new_router else 'neither'}"
    healed = "" if observation.healed else "; the telemetry is not well"
    return f"served {served}; {named}{recovered}{healed}" + "".join(
        f"; {text}" for text in (observation.failure, observation.missing) if text
    )


def _say(text: str) -> None:
    print(f"chaos: {text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", type=_some_of(FAULTS), default=[*FAULTS], help=f"faults, with commas: {', '.join(FAULTS)}"
    )
    parser.add_argument("--modes", type=_some_of(_MODES), default=[*_MODES], help="pull,push")
    parser.add_argument("--output", type=Path, default=report.PATH, help="the results; alone, without the page")
    parser.add_argument("--keep", action="store_true", help="keep the temporary folders, with the servers' logs")
    return parser


class _some_of:  # noqa: N801 - argparse shows the name
    """Names of a list, with commas between them."""

    def __init__(self, known: Iterable[str]) -> None:
        self._known = list(known)

    def __call__(self, text: str) -> list[str]:
        names = text.split(",")
        unknown = [name for name in names if name not in self._known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(self._known)}")
        return names


if __name__ == "__main__":
    sys.exit(main())
