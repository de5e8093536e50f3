# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Explaining a digest: a stock peer sends nothing else, but the factors behind it come from small sets.

One instance's factors are the starting point. One, two and three things are changed until the digest comes out; a
release of vLLM is one thing, though it changes several factors and even which there are. What is found is exact, since
SHA-256 has no second origin for a digest; what is not found stays unknown.
"""

import hashlib
import itertools
import json
import math
import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

from nixl_telemetry.compat.domain import Domain
from nixl_telemetry.compat.factors import Factors, digest
from nixl_telemetry.compat.releases import RELEASES, UNRELEASED, FactorNames, Release, factor_names

_RELEASE: Final = "release"
_ORDER: Final = (
    *(_RELEASE, "transfer_mode", "model", "dtype", "cache_dtype", "is_hma_enabled", "cross_layers_blocks"),
    *("attn_backend_name", "speculative_config", "num_kv_heads", "head_size", "num_hidden_layers"),
)
"""What is changed, the likelier and the smaller first."""

_ADDED: Final = {
    "cross_layers_blocks": (False, True),
    "is_hma_enabled": (True, False),
    "speculative_config": (None,),
    "transfer_mode": ("pull", "push"),
}
"""Values of a factor that another release has and the starting point lacks."""

_CACHE_LIMIT: Final = 256
_SEARCHES: Final = 8
"""For one digest: peers can tell something new with every handshake."""


class _Change(NamedTuple):
    """Factors that get other values, and factors that go."""

    values: dict[str, Any]
    removed: FactorNames = ()

    def apply(self, factors: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in {**factors, **self.values}.items() if name not in self.removed}


class _Dimension(NamedTuple):
    """One thing that may be changed, with its alternatives."""

    name: str
    changes: list[_Change]
    texts: list[bytes]
    """The new values as JSON; empty for a release, which changes several."""


class Budget:
    """CPU time of the calling thread.

    Args:
        seconds: How much of it there is.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._cpu = time.thread_time()
        self._wall = time.monotonic()

    def left(self) -> float:
        """What is left. Seconds; negative when more was spent."""
        # The clock of a thread may leap on virtual machines; CPU time is never longer than time.
        return self._seconds - min(time.thread_time() - self._cpu, time.monotonic() - self._wall)


class Recovery:
    """Explains digests, starting from one instance's factors.

    Args:
        start: The factors of an instance that is known, usually one's own.
        domain: The values that factors may have.
    """

    def __init__(self, start: Factors, domain: Domain | None = None) -> None:
        self._start: Final = dict(start)
        self.domain: Final = domain or Domain()
        self._made: tuple[int, list[_Dimension]] = (-1, [])
        self._known: OrderedDict[str, tuple[int, int, Factors | None]] = OrderedDict()

    def recover(self, wanted: str, seconds: float) -> Factors | None:
        """The factors behind a digest, or ``None`` if they are not found in time.

        Answers are remembered. What was not found is searched for again after something was learnt, a few times.

        Args:
            wanted: A SHA-256 hex digest.
            seconds: How much of the thread's CPU time to search with; on a busy machine it lasts longer.
        """
        searches, generation, factors = self._known.get(wanted, (0, -1, None))
        if factors is None and generation < self.domain.generation and searches < _SEARCHES:
            factors = self.recover_all([wanted], seconds).get(wanted)
            self._known[wanted] = (searches + 1, self.domain.generation, factors)
            if len(self._known) > _CACHE_LIMIT:
                self._known.popitem(last=False)
        return factors

    def recover_all(self, wanted: Collection[str], seconds: float) -> dict[str, Factors]:
        """The factors behind each of several digests, as far as they are found in time; one search for all."""
        budget = Budget(seconds)
        targets = {bytes.fromhex(text) for text in wanted if _is_digest(text)}
        found: dict[str, Factors] = {}
        if digest(self._start) in wanted:
            found[digest(self._start)] = self._start
            targets.discard(bytes.fromhex(digest(self._start)))
        dimensions = self._current_dimensions()
        for count in (1, 2, 3):
            # The cheapest first.
            for combination in sorted(itertools.combinations(dimensions, count), key=_size):
                for factors in _matches(self._start, combination, targets, budget):
                    text = digest(factors)
                    targets.discard(bytes.fromhex(text))
                    found[text] = factors
                # Single changes take a millisecond and are always tried: collecting garbage alone may take longer.
                if not targets or (count > 1 and budget.left() < 0):
                    return found
        return found

    def _current_dimensions(self) -> list[_Dimension]:
        """Everything that may be changed, made anew when something was learnt."""
        generation, dimensions = self._made
        if generation != self.domain.generation:
            dimensions = list(self._dimensions())
            self._made = (self.domain.generation, dimensions)
        return dimensions

    def _dimensions(self) -> Iterator[_Dimension]:
        """Everything that may be changed."""
        for name in _ORDER:
            if name == _RELEASE:
                yield _Dimension(name, list(self._releases()), [])
            elif name in self._start:
                values = {_text(value): value for value in self.domain.values(name)}
                values.pop(_text(self._start[name]), None)
                yield _Dimension(name, [_Change({name: value}) for value in values.values()], list(values))

    def _releases(self) -> Iterator[_Change]:
        here = self._start.get("vllm_version")
        # A build of one's own may carry another connector version under the same version of vLLM.
        numbers = {*(release.connector_version for release in RELEASES), *(number for number, _ in UNRELEASED)}
        same = [Release(str(here), number, names) for number in sorted(numbers) for names in factor_names(number)]
        for release in [*self.domain.releases(), *same]:
            changed = {"vllm_version": release.vllm_version, "nixl_connector_version": release.connector_version}
            added = [name for name in release.factor_names if name not in self._start and name not in changed]
            removed = tuple(name for name in self._start if name not in release.factor_names)
            if not added and not removed and all(self._start.get(name) == value for name, value in changed.items()):
                continue
            for values in itertools.product(*(_ADDED.get(name, (None,)) for name in added)):
                yield _Change({**changed, **dict(zip(added, values, strict=True))}, removed)


def _size(combination: Sequence[_Dimension]) -> int:
    return math.prod(len(dimension.changes) for dimension in combination)


def _matches(
    start: dict[str, Any], dimensions: Sequence[_Dimension], targets: set[bytes], budget: Budget
) -> Iterator[dict[str, Any]]:
    """The combinations of one change of each dimension that have a wanted digest."""
    # The largest goes innermost, where a candidate costs one hash and not a whole JSON text.
    *outer, inner = sorted(dimensions, key=lambda dimension: (bool(dimension.texts), len(dimension.changes)))
    for changes in itertools.product(*(dimension.changes for dimension in outer)):
        factors = _applied(start, changes)
        if inner.name in factors:
            head, tail = _text_around(factors, inner.name)
            for change, text in zip(inner.changes, inner.texts, strict=True):
                if hashlib.sha256(head + text + tail).digest() in targets:
                    yield change.apply(factors)
        elif inner.name == _RELEASE:
            candidates = (change.apply(factors) for change in inner.changes)
            yield from (candidate for candidate in candidates if bytes.fromhex(digest(candidate)) in targets)
        if budget.left() < 0:
            return


def _applied(factors: dict[str, Any], changes: Sequence[_Change]) -> dict[str, Any]:
    """The factors after all changes; none where a release has no such factor."""
    for change in changes:
        factors = change.apply(factors) if change.values.keys() & factors.keys() else {}
    return factors


def _text_around(factors: dict[str, Any], name: str) -> tuple[bytes, bytes]:
    """The text that is hashed, up to the value of a factor and after it."""
    before = _text({other: value for other, value in factors.items() if other < name})[:-1]
    after = _text({other: value for other, value in factors.items() if other > name})[1:]
    head = before + (b"" if before == b"{" else b", ") + _text(name) + b": "
    return head, (b"" if after == b"}" else b", ") + after


def _text(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _is_digest(text: str) -> bool:
    return len(text) == hashlib.sha256().digest_size * 2 and all(letter in "0123456789abcdef" for letter in text)
