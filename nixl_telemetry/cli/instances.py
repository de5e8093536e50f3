# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Instances from what a user names: HOST:PORT of a running one, a file of ``probe --json`` or ``factors --json``."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from nixl_telemetry.cli import answer as answers, http_api
from nixl_telemetry.cli.answer import Answer, AnswerError
from nixl_telemetry.cli.http_api import HttpAnswers, HttpApiError
from nixl_telemetry.cli.output import CommandError
from nixl_telemetry.cli.side_channel import (
    FIRST,
    Address,
    Position,
    SideChannel,
    SideChannelError,
    insist,
)
from nixl_telemetry.compat.factors import Factors, value_text
from nixl_telemetry.compat.instance import Instance, InstanceError, Origin
from nixl_telemetry.compat.statement import Geometry

STDIN: Final = "-"
_RANKS_LIMIT: Final = 256
"""Ranks of one instance that are asked."""
_FILE_LIMIT: Final = 8 * 2**20


class SourceError(CommandError):
    """A file that cannot be used."""


class Probed(NamedTuple):
    """An instance that was asked."""

    instance: Instance
    hints: Factors
    """Factors that its HTTP API suggests."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for running instances, in seconds."""

    timeout: float
    """For the connection, and again for each answer."""
    wait: float = 0.0
    """For an instance that is still starting."""


@dataclass(frozen=True)
class Ranks:
    """How many ranks an instance has, as far as somebody who must know said so."""

    tp: int | None = None
    pp: int | None = None

    def positions(self) -> Iterator[Position]:
        """All of them, the first one first; bounded, since a peer may have said so."""
        pairs = ((pp, tp) for pp in range(self.pp or 1) for tp in range(self.tp or 1))
        return itertools.starmap(Position, itertools.islice(pairs, _RANKS_LIMIT))


def load(source: str, patience: Patience) -> Instance:
    """The instance that a user names.

    Args:
        source: HOST:PORT, a path, or ``-`` for standard input.
        patience: For a running one.

    Raises:
        CommandError: It cannot be had.
    """
    if source == STDIN:
        return _parsed("standard input", sys.stdin.buffer.read(_FILE_LIMIT))
    path = Path(source)
    try:
        if path.is_file():
            with path.open("rb") as file:
                return _parsed(source, file.read(_FILE_LIMIT))
    except OSError as error:
        raise SourceError(f"{source} cannot be read: {error.strerror}") from None
    if path.suffix == ".json" or ("/" in source and "://" not in source):
        raise SourceError(f"{source}: there is no such file")
    return probe(source, patience).instance


def load_likes(sources: Sequence[str], patience: Patience) -> list[Instance]:
    """Instances from which the factors of others may be found.

    Raises:
        CommandError: One cannot be had, or its own factors are not known.
    """
    instances = [load(source, patience) for source in sources]
    for source, instance in zip(sources, instances, strict=True):
        if instance.factors is None:
            raise SourceError(f"--like {source}: its own factors are not known; name an instance that tells them")
    return instances


def _parsed(name: str, text: bytes) -> Instance:
    try:
        return Instance.from_json(text)
    except InstanceError as error:
        raise SourceError(f"{name}: {error}") from None


def probe(source: str, patience: Patience, said: Ranks | None = None, api: str | None = None) -> Probed:
    """Ask a running instance.

    Args:
        source: HOST:PORT of its side channel.
        patience: How long to wait.
        said: How many ranks it has, according to the user. Only an instrumented instance is believed more.
        api: URL of its HTTP API.

    Raises:
        CommandError: It cannot be asked, or does not answer as an instance does.
    """
    address = Address.parse(source)
    try:
        told = http_api.ask(api, patience.timeout) if api else HttpAnswers()
        told.check_version()
        ranks = _agreed(said or Ranks(), told)
    except HttpApiError as error:
        raise HttpApiError(f"{address} is not asked: {error}") from None
    return Probed(insist(lambda: _ask(address, patience.timeout, ranks, told), patience.wait), told.hints())


def _agreed(said: Ranks, told: HttpAnswers) -> Ranks:
    for name, given, found in (("tp", said.tp, told.tp_size), ("pp", said.pp, told.pp_size)):
        if given is not None and found is not None and given != found:
            raise HttpApiError(f"--{name} is {given}, and its HTTP API says {found}")
    return Ranks(told.tp_size if said.tp is None else said.tp, told.pp_size if said.pp is None else said.pp)


def _ask(address: Address, timeout: float, ranks: Ranks, told: HttpAnswers) -> Instance:
    with SideChannel(address, timeout) as channel:
        first = _answer(channel, FIRST)
        said = ranks
        if first.statement is not None:
            # It knows best, and whatever the user thinks would be asked in vain.
            ranks = Ranks(first.statement.geometry.tp_size, first.statement.geometry.pp_size)
        positions = list(ranks.positions())
        further = [(position, _answer(channel, position)) for position in positions[1:]]
    geometry = msgspec.structs.replace(first.geometry, tp_size=ranks.tp, pp_size=ranks.pp)
    instance = Instance(
        name=str(address),
        compat_hash=first.compat_hash,
        engine_id=first.engine_id,
        geometry=geometry,
        ranks=tuple(answer.rank(*position) for position, answer in [(FIRST, first), *further]),
        notes=tuple(_notes(first, said, ranks, told)),
    )
    if (statement := first.statement) is None:
        return instance
    return msgspec.structs.replace(
        instance,
        instrumented=True,
        origin=Origin.EXCHANGED,
        factors=statement.factors,
        nixl_version=statement.nixl_version,
        telemetry_version=statement.telemetry_version,
        kv_role=statement.kv_role,
        engine_id=statement.engine_id,
        model_revision=statement.model_revision,
        geometry=_merged(statement.geometry, geometry),
    )


def _answer(channel: SideChannel, position: Position) -> Answer:
    try:
        return answers.read(channel.ask(position))
    except AnswerError as error:
        raise SideChannelError(channel.address, str(error)) from None


def _merged(geometry: Geometry, other: Geometry) -> Geometry:
    """What one does not know from the other."""
    known = {name: value for name, value in msgspec.structs.asdict(geometry).items() if value is not None}
    return msgspec.structs.replace(other, **known)


def _notes(first: Answer, said: Ranks, ranks: Ranks, told: HttpAnswers) -> Iterator[str]:
    if first.disbelief:
        yield f"it says something of itself that is not believed, and is taken for a stock instance: {first.disbelief}"
    for name, given, known in (("tp", said.tp, ranks.tp), ("pp", said.pp, ranks.pp)):
        if given is not None and given != known:
            yield f"--{name} {given} is not used: it says that it has {known}"
    if (count := (ranks.tp or 1) * (ranks.pp or 1)) > _RANKS_LIMIT:
        yield f"of its {count} ranks, {_RANKS_LIMIT} were asked"
    if hints := told.hints():
        yield f"its HTTP API says: {', '.join(f'{name} {value_text(value)}' for name, value in hints.items())}"
    if told.compat_hash not in {None, first.compat_hash}:
        yield "the HTTP API is another instance's: the hash there is not that of the side channel"
    if told.enforced is False:
        yield "it takes peers with other hashes (enforce_handshake_compat is false)"
