# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Finding the factors of instances that only told a digest, from all that is known of them and of others."""

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from nixl_telemetry.cli.output import CommandError
from nixl_telemetry.compat.domain import Domain
from nixl_telemetry.compat.factors import FACTOR_NAMES, Factors
from nixl_telemetry.compat.instance import Instance, Origin
from nixl_telemetry.compat.recovery import Budget, Recovery
from nixl_telemetry.compat.releases import RELEASES, Release

_COMMON: Final[Factors] = {
    "num_kv_heads": 8,
    "head_size": 128,
    "num_hidden_layers": 32,
    "attn_backend_name": "FLASH_ATTN",
    "cache_dtype": "auto",
    "cross_layers_blocks": False,
    "speculative_config": None,
}
"""The starting point where no instance is known; the search changes up to three of these."""
_SMALL: Final = ("transfer_mode", "is_hma_enabled", "dtype")
"""Factors with so few values that each combination of them is a starting point of its own."""
_KINDS: Final = {
    **dict.fromkeys(("nixl_connector_version", "num_kv_heads", "head_size", "num_hidden_layers"), int),
    **dict.fromkeys(("cross_layers_blocks", "is_hma_enabled"), bool),
}
"""Factors that have values of one kind only, other than text."""
_LIKELY: Final = 6
"""Values of a factor that are tried first, of all releases; then all of them are."""


class Knowledge:
    """What may explain a digest.

    Args:
        seconds: How much CPU time to search with, for all digests together.
        likes: Instances of the same fleet.
        given: Factors that a side is said to have.
        told: Factors that an instance's HTTP API suggests.
    """

    def __init__(
        self, seconds: float, likes: Sequence[Instance] = (), given: Factors | None = None, told: Factors | None = None
    ) -> None:
        self._seconds: Final = seconds
        self._likes: Final = tuple(likes)
        self._given: Final = dict(given or {})
        self._hints: Final = {**(told or {}), **self._given}
        self._domain: Final = Domain()
        self._domain.learn(self._hints)
        self._searched = self._ran_out = False

    @property
    def outcome(self) -> str:
        """How the search ended that did not find all."""
        if self._ran_out:
            return f"the {self._seconds:g} s of search ran out (more: --search-seconds)"
        return "the search was finished" if self._searched else "there was nothing to start a search from"

    def complete(self, instances: Sequence[Instance]) -> list[Instance]:
        """The same instances, with their factors where they were found."""
        budget = Budget(self._seconds)
        starts: list[Factors] = []
        for instance in (*instances, *self._likes):
            if instance.factors is not None and instance.factors not in starts:
                starts.append(instance.factors)
        unknown = [instance for instance in instances if instance.factors is None]
        for instance in unknown:
            for rank in instance.ranks:
                self._domain.learn({"attn_backend_name": rank.attn_backend_name} if rank.attn_backend_name else {})
        found = self._search(starts, {instance.compat_hash for instance in unknown}, budget)
        missing = [instance for instance in unknown if instance.compat_hash not in found]
        if missing and "model" in self._hints:
            guessed = self._guess(missing, budget)
            rest = {instance.compat_hash for instance in missing} - guessed.keys()
            found |= guessed | self._search(list(guessed.values()), rest, budget)
        return [
            instance.with_factors(found[instance.compat_hash], Origin.RECOVERED)
            if instance.factors is None and instance.compat_hash in found
            else instance
            for instance in instances
        ]

    def _search(self, starts: list[Factors], wanted: Collection[str], budget: Budget) -> dict[str, Factors]:
        """Search near instances that are known; what is found is known then, too."""
        found: dict[str, Factors] = {}
        waiting = [base for start in starts for base in self._variants(start)]
        for start in starts:
            self._domain.learn(start)
        while waiting and (missing := set(wanted) - found.keys()):
            share = budget.left() / len(waiting)
            new = self._recover(waiting.pop(0), self._domain, missing, share)
            for factors in new.values():
                self._domain.learn(factors)
                waiting.append(factors)
            found |= new
        return found

    def _variants(self, start: Factors) -> Iterator[Factors]:
        """A starting point, before it the same with what was given by hand, which then costs no change."""
        changed = {**start, **{name: value for name, value in self._given.items() if name in start}}
        if changed != start:
            yield changed
        yield start

    def _guess(self, instances: Sequence[Instance], budget: Budget) -> dict[str, Factors]:
        """Search without a known instance, from what is common; ends with the first digest that comes out."""
        wanted = {instance.compat_hash for instance in instances}
        backends = {rank.attn_backend_name for instance in instances for rank in instance.ranks} - {None}
        pinned = {**({"attn_backend_name": backends.pop()} if len(backends) == 1 else {}), **self._hints}
        choices = [[pinned[name]] if name in pinned else self._domain.values(name) for name in _SMALL]
        for limit, release, *values in itertools.product((_LIKELY, None), _releases(pinned), *choices):
            domain = _Narrow({*pinned, *_SMALL}, limit)
            left = budget.left()
            if left <= 0:
                self._ran_out = True
                break
            known = {**_COMMON, **pinned, **dict(zip(_SMALL, values, strict=True))}
            known |= {"vllm_version": release.vllm_version, "nixl_connector_version": release.connector_version}
            start = {name: known[name] for name in release.factor_names}
            if found := self._recover(start, domain, wanted, left):
                return found
        return {}

    def _recover(self, start: Factors, domain: Domain, wanted: Collection[str], seconds: float) -> dict[str, Factors]:
        self._searched = True
        budget = Budget(seconds)
        found = Recovery(start, domain).recover_all(wanted, seconds)
        self._ran_out |= budget.left() <= 0
        return found


class _Narrow(Domain):
    """The likeliest values, none of the factors that are fixed, and no release but the starting point's."""

    def __init__(self, fixed: Collection[str], limit: int | None) -> None:
        super().__init__()
        self._fixed = frozenset(fixed)
        self._limit = limit

    def values(self, factor: str) -> list[Any]:
        if factor in self._fixed:
            return []
        return super().values(factor)[: None if factor == "num_hidden_layers" else self._limit]

    def releases(self) -> list[Release]:
        return []


def _releases(pinned: Mapping[str, Any]) -> list[Release]:
    """The releases that fit what is known; for a build of one's own, the one that it is near to."""
    version, number = pinned.get("vllm_version"), pinned.get("nixl_connector_version")
    fitting = [release for release in RELEASES if number in {None, release.connector_version}]
    if version is None:
        return fitting
    exact = [release for release in fitting if release.vllm_version == version]
    minor = re.match(r"\d+\.\d+\.", str(version))
    near = [release for release in fitting if minor and release.vllm_version.startswith(minor[0])]
    template = (exact or near or fitting or list(RELEASES))[0]
    connector_version = template.connector_version if number is None else number
    return [template._replace(vllm_version=str(version), connector_version=connector_version)]


class FactorError(CommandError):
    """A factor given by hand that cannot be used."""


def parse_factors(texts: Sequence[str]) -> dict[str, Any]:
    """Read NAME=VALUE, the value as JSON or, where it is none, as it stands.

    Raises:
        FactorError: It is not that, there is no such factor, or it never has such a value.
    """
    factors: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise FactorError(f"{text!r} is not NAME=VALUE")
        if name not in FACTOR_NAMES:
            raise FactorError(f"there is no factor {name!r}; there are {', '.join(FACTOR_NAMES)}")
        factors[name] = _as_hashed(name, value)
    return factors


def _as_hashed(name: str, value: str) -> Any:
    found = _read(name, value)
    if (kind := _KINDS.get(name)) and type(found) is not kind:
        raise FactorError(f"{name} is {value!r}; vLLM hashes {'a number' if kind is int else 'true or false'} there")
    return found


def _read(name: str, value: str) -> Any:
    if name in {"model", "vllm_version", "dtype", "cache_dtype", "attn_backend_name", "transfer_mode"}:
        # Text even if it looks like a number.
        value = value.removeprefix('"').removesuffix('"')
        if name == "dtype" and not value.startswith("torch."):
            return f"torch.{value}"
        return value
    try:
        return msgspec.json.decode(value.encode())
    except (msgspec.MsgspecError, RecursionError):
        return value
