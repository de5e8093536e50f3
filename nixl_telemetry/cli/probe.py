# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``nixl-telemetry probe``: what a running instance says of itself."""

from collections.abc import Iterator
from typing import Annotated

import msgspec
import typer

from nixl_telemetry.cli import options
from nixl_telemetry.cli.instances import Patience, Ranks, load_likes, probe as ask
from nixl_telemetry.cli.knowledge import Knowledge, parse_factors
from nixl_telemetry.cli.output import Exit, Printer, failing, short
from nixl_telemetry.compat.factors import FACTOR_NAMES, value_text
from nixl_telemetry.compat.instance import Instance, Origin
from nixl_telemetry.compat.statement import Geometry

_LABEL_WIDTH = 12
_REGIONS = 4
_WHY_UNKNOWN = (
    "it tells none, and none that are known give its hash; --like an instance of the same fleet that tells them, "
    "--factor model=NAME or --http URL help to find them"
)


def probe(
    source: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The side channel of a running instance.")],
    timeout: options.Timeout = 5,
    wait: options.Wait = 0,
    tp: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=4096,
            help="Its tensor-parallel size: asks all ranks of a stock instance. Too large a number ends its listener.",
        ),
    ] = None,
    pp: Annotated[int | None, typer.Option(min=1, max=4096, help="Its pipeline-parallel size; the same holds.")] = None,
    http: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Its HTTP API, which may tell more: the version, the model, how many ranks."),
    ] = None,
    like: options.Likes = None,
    factor: options.Factors = None,
    search_seconds: options.SearchSeconds = 5,
    as_json: options.AsJson = False,
) -> None:
    """Show what a running instance answers on its side channel: hash, factors, engine id, sizes, by rank.

    Works for stock instances too, and harms none: only ranks that are
    known to exist are asked.

    Exits with 0, with 1 if the instance's ranks have different hashes,
    and with 2 if it does not answer.
    """
    with failing():
        given = parse_factors(factor or [])
        patience = Patience(timeout, wait)
        found = ask(source, patience, Ranks(tp, pp), http)
        likes = load_likes(like or [], patience)
        (instance,) = Knowledge(search_seconds, likes, given, found.hints).complete([found.instance])
        if as_json:
            typer.echo(instance.to_json())
        else:
            show(Printer(), instance)
    if len(instance.hashes()) > 1:
        raise typer.Exit(Exit.INCOMPATIBLE)


def show(out: Printer, instance: Instance) -> None:
    """Print all of an instance."""
    out.line((instance.name, "bold"), "  ", summary(instance))
    for label, text in _facts(instance):
        out.line((f"  {label:<{_LABEL_WIDTH}}", "dim"), "  ", text)
    if instance.factors is not None:
        out.line((f"  factors ({instance.origin})", "dim"))
        for name in [*FACTOR_NAMES, *sorted(instance.factors.keys() - set(FACTOR_NAMES))]:
            if name in instance.factors:
                out.line(f"    {name:<22}  {value_text(instance.factors[name])}")
    else:
        out.line(("  factors unknown", "yellow"), f": {_WHY_UNKNOWN}")
    if len(instance.ranks) > 1:
        out.line(("  ranks (pp, tp)", "dim"))
        for rank in instance.ranks:
            same = rank.compat_hash == instance.compat_hash
            out.line(
                f"    ({rank.pp_rank}, {rank.tp_rank})  ",
                (short(rank.compat_hash), "" if same else "bold red"),
                f"  {_blocks(rank.num_blocks, rank.geometry)}",
            )
    if len(instance.hashes()) > 1:
        out.line(("  its ranks have different hashes: no peer can be paired with all of them", "bold red"))
    for note in instance.notes:
        out.line(("  note: ", "yellow"), note)


def summary(instance: Instance) -> str:
    """An instance in a few words."""
    factors = instance.factors or {}
    words = [str(factors["transfer_mode"])] if "transfer_mode" in factors else []
    if "vllm_version" in factors:
        words.append(f"vLLM {factors['vllm_version']}")
    if instance.origin is Origin.COMPUTED:
        words.append("not running")
    else:
        words.append("instrumented" if instance.instrumented else "stock")
    return ", ".join([*words, f"factors {instance.origin}"])


def _facts(instance: Instance) -> Iterator[tuple[str, str]]:
    yield "hash", instance.compat_hash
    versions = [f"NIXL {instance.nixl_version}"] if instance.nixl_version else []
    versions += [f"nixl_telemetry {instance.telemetry_version}"] if instance.telemetry_version else []
    for label, text in (
        ("versions", ", ".join(versions)),
        ("role", instance.kv_role),
        ("engine id", instance.engine_id),
        ("revision", instance.model_revision),
        ("geometry", _sizes(instance.geometry)),
    ):
        if text:
            yield label, text
    first = instance.ranks[:1]
    if first:
        yield "blocks", _blocks(first[0].num_blocks, instance.geometry)


def _sizes(geometry: Geometry) -> str:
    named = msgspec.structs.asdict(geometry)
    return ", ".join(
        f"{name} {value}"
        for name, value in named.items()
        if value is not None and name not in {"block_lens", "num_regions"}
    )


def _blocks(count: int | None, geometry: Geometry) -> str:
    text = "number unknown" if count is None else f"{count}"
    if (lengths := geometry.block_lens) is None:
        return text
    shown = ", ".join(map(str, lengths[:_REGIONS])) + (", …" if len(lengths) > _REGIONS else "")
    regions = "each region" if geometry.num_regions is None else f"each of {geometry.num_regions} regions"
    return f"{text} of {shown} bytes in {regions}"
