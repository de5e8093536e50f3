# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``nixl-telemetry check``: whether prefill and decode instances can be paired, before any request is sent."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from nixl_telemetry.cli import options
from nixl_telemetry.cli.instances import Patience, load, load_likes
from nixl_telemetry.cli.knowledge import Knowledge, parse_factors
from nixl_telemetry.cli.output import CommandError, Exit, Printer, failing, print_json, short
from nixl_telemetry.cli.pairs import Pair, Side, Verdict, judge
from nixl_telemetry.cli.probe import summary
from nixl_telemetry.compat.instance import Instance

FORMAT: Final = "nixl_telemetry.check/1"
_ROLES: Final = ("prefill", "decode")
_AT_A_TIME: Final = 16
_STYLES: Final = {Verdict.COMPATIBLE: "green", Verdict.INCOMPATIBLE: "bold red", Verdict.UNKNOWN: "yellow"}


class Named(NamedTuple):
    """An instance as a user names it."""

    role: str
    source: str


def check(
    prefill: Annotated[
        str | None,
        typer.Argument(
            metavar="PREFILL",
            help="HOST:PORT of a side channel, or a file of `probe --json` or `factors --json`.",
            show_default=False,
        ),
    ] = None,
    decode: Annotated[
        str | None, typer.Argument(metavar="DECODE", help="The same for the other side.", show_default=False)
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="More of both: lines of `prefill SOURCE...` or `decode SOURCE...`, # comments.",
        ),
    ] = None,
    timeout: options.Timeout = 5,
    wait: options.Wait = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings make a pair incompatible.")] = False,
    like: options.Likes = None,
    factor: options.Factors = None,
    search_seconds: options.SearchSeconds = 5,
    as_json: options.AsJson = False,
) -> None:
    """Judge every pair of a prefill and a decode instance, running or not, as their handshake would.

    Exits with 0 if all are compatible, with 1 if any is not, and else
    with 2 if any instance could not be reached or read.
    """
    with failing():
        named = _named(prefill, decode, fleet)
        given = parse_factors(factor or [])
        patience = Patience(timeout, wait)
        likes = load_likes(like or [], patience)
        sides = _loaded(named, patience, Knowledge(search_seconds, likes, given))
        pairs = [judge(*pair) for pair in itertools.product(*(_of(role, sides) for role in _ROLES))]
        code = _exit_code(pairs, strict)
        if as_json:
            print_json(
                {
                    "format": FORMAT,
                    "verdict": {
                        Exit.FINE: Verdict.COMPATIBLE,
                        Exit.INCOMPATIBLE: Verdict.INCOMPATIBLE,
                        Exit.UNKNOWN: Verdict.UNKNOWN,
                    }[code],
                    "instances": [side.as_json() for side in sides],
                    "pairs": [pair.as_json() for pair in pairs],
                }
            )
        else:
            _show(Printer(), sides, pairs)
    raise typer.Exit(code)


def _named(prefill: str | None, decode: str | None, fleet: Path | None) -> list[Named]:
    """Everything that is named, each once.

    Raises:
        CommandError: That makes no pair, or the file cannot be read.
    """
    given = [Named(role, source) for role, source in zip(_ROLES, (prefill, decode), strict=True) if source]
    named = list(dict.fromkeys([*given, *(_listed(fleet) if fleet else [])]))
    for role in _ROLES:
        if not any(one.role == role for one in named):
            raise CommandError(
                f"there is no {role} instance to check; name PREFILL and DECODE, or --from FILE with both"
            )
    return named


def _listed(path: Path) -> Iterator[Named]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{path} is no text") from None
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        role, *sources = words
        if role not in _ROLES or not sources:
            raise CommandError(
                f"{path}, line {number}: {line.strip()!r} is not `prefill SOURCE...` or `decode SOURCE...`"
            )
        yield from (Named(role, source) for source in sources)


def _loaded(named: Sequence[Named], patience: Patience, knowledge: Knowledge) -> list[Side]:
    """Every instance or why there is none, with the factors that can be found."""

    def attempt(source: str) -> Instance | str:
        try:
            return load(source, patience)
        except CommandError as error:
            return str(error)

    sources = list(dict.fromkeys(source for _, source in named))
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        results = dict(zip(sources, pool.map(attempt, sources), strict=True))
    reached = {source: result for source, result in results.items() if isinstance(result, Instance)}
    completed = dict(zip(reached, knowledge.complete(list(reached.values())), strict=True))
    return [
        Side(role, source, completed.get(source), None if isinstance(result, Instance) else result)
        for role, source in named
        for result in (results[source],)
    ]


def _of(role: str, sides: Sequence[Side]) -> list[Side]:
    return [side for side in sides if side.role == role]


def _exit_code(pairs: Sequence[Pair], strict: bool) -> Exit:
    if any(pair.verdict is Verdict.INCOMPATIBLE or (strict and pair.warnings) for pair in pairs):
        return Exit.INCOMPATIBLE
    if any(pair.verdict is Verdict.UNKNOWN for pair in pairs):
        return Exit.UNKNOWN
    return Exit.FINE


def _show(out: Printer, sides: Sequence[Side], pairs: Sequence[Pair]) -> None:
    for side in sides:
        if side.instance is None:
            out.line(f"{side.role:<7} {side.source}  ", ("not known", "yellow"))
        else:
            out.line(f"{side.role:<7} {side.source}  {short(side.instance.compat_hash)}  {summary(side.instance)}")
            for note in side.instance.notes:
                out.line(("  note: ", "yellow"), note)
    for pair in pairs:
        first, *others = pair.reasons or ("",)
        out.line(
            f"{pair.prefill} → {pair.decode}  ", (pair.verdict, _STYLES[pair.verdict]), f": {first}" if first else ""
        )
        for reason in others:
            out.line(f"  {reason}")
        for warning in pair.warnings:
            out.line(("  warning: ", "yellow"), warning)
    if len(pairs) > 1:
        counts = Counter(pair.verdict for pair in pairs)
        out.line(f"{len(pairs)} pairs: " + ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict))
