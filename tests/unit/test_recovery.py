# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Digests are explained: by one change, by two, by three; exactly, in order, and within the time that is given."""

import gc
import itertools
import random
import time
from typing import Any, Final

import pytest
from hypothesis import given, settings, strategies as st

from nixl_telemetry.compat.domain import Domain
from nixl_telemetry.compat.factors import Factors, differences, digest
from nixl_telemetry.compat.recovery import Recovery, _Dimension
from nixl_telemetry.compat.releases import RELEASES, UNRELEASED, factor_names
from tests.support.statements import FACTORS, factors, factors_of_release

LONG: Final = 60.0


def dimensions() -> list[_Dimension]:
    """Everything that is searched, from the factors of the tests."""
    return list(Recovery(FACTORS)._dimensions())


def changed(*names: str) -> list[dict[str, Any]]:
    """Every combination of values of these dimensions, where the release has them all."""
    chosen = [dimension for dimension in dimensions() if dimension.name in names]
    combinations = itertools.product(*(dimension.changes for dimension in chosen))
    found = []
    for changes in combinations:
        values: dict[str, Any] = dict(FACTORS)
        for change in changes:
            values = change.apply(values) if change.values.keys() & values.keys() else {}
        found.append(values)
    return [values for values in found if values]


REAL: Final = {
    "6d0e89374604bd8328cc3e323b35d82a258c2bc9e1fdd81ff38a7e99c8e82ce4": {},
    "3a9a28552a2e8f1c1d79cf0b9c362b9eacdbfd0955a9a90bd24d852164da5471": {"transfer_mode": "push"},
    "95d31872b185ef139d53e7892e3a2876af7eed4706f1ffe1808b6c2c9b889bef": {
        "vllm_version": "0.28.0",
        "nixl_connector_version": 7,
        "cross_layers_blocks": False,
    },
}
"""Digests that real stock instances of vLLM 0.32.0 and 0.28.0 answered, and what differs from the first."""


@pytest.mark.parametrize(("wanted", "changes"), REAL.items())
def test_real_digests(wanted: str, changes: dict[str, Any]) -> None:
    start = factors(model="/".join(["", "tmp", "tiny"]))

    assert Recovery(start).recover(wanted, LONG) == {**start, **changes}


def test_every_single_change_is_found() -> None:
    """All values of all dimensions, in one search, and nothing else."""
    wanted = {digest(values): values for dimension in dimensions() for values in changed(dimension.name)}

    assert Recovery(FACTORS).recover_all(wanted, LONG) == wanted
    assert len(wanted) > 300


def test_every_pair_of_changes_is_found() -> None:
    """All values of all pairs of dimensions."""
    names = [dimension.name for dimension in dimensions()]
    wanted = {digest(values): values for pair in itertools.combinations(names, 2) for values in changed(*pair)}

    found = Recovery(FACTORS).recover_all(wanted, LONG)

    assert len(wanted) > 30_000
    assert found == wanted


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_triples_of_few_values_are_found(data: st.DataObject) -> None:
    """Three of the dimensions with few values."""
    names = data.draw(st.permutations(["transfer_mode", "dtype", "cache_dtype", "is_hma_enabled"]))[:3]
    values = data.draw(st.sampled_from(changed(*names)))

    assert Recovery(FACTORS).recover(digest(values), LONG) == values


@settings(max_examples=50, deadline=None)
@given(st.text(alphabet="0123456789abcdef", min_size=64, max_size=64))
def test_what_cannot_be_explained_is_not(wanted: str) -> None:
    """Random digests: nothing is reported, within the CPU time and what one inner loop takes."""
    gc.disable()  # what other tests have left is not to be collected now
    begin = time.thread_time(), time.monotonic()
    found = Recovery(FACTORS).recover(wanted, 0.05)
    taken = min(time.thread_time() - begin[0], time.monotonic() - begin[1])
    gc.enable()

    assert found is None
    assert taken < 1


def test_single_changes_are_found_however_short_the_time() -> None:
    """A collection of garbage may take all of it."""
    wanted = {digest(values): values for dimension in dimensions() for values in changed(dimension.name)}

    assert Recovery(FACTORS).recover_all(wanted, 0) == wanted


@pytest.mark.parametrize("wanted", ["", "xyz", "A" * 64, "g" * 64, "é" * 64, "0" * 63, "0" * 5_000_000])
def test_what_is_no_digest_is_not_searched_for(wanted: str) -> None:
    begin = time.thread_time()

    assert Recovery(FACTORS).recover(wanted, LONG) is None
    assert time.thread_time() - begin < 5


@pytest.mark.parametrize("release", RELEASES, ids=lambda release: release.vllm_version)
def test_whole_releases(release: Any) -> None:
    """One thing, though it changes several factors; both ways, with another mode or dtype on top."""
    there = factors_of_release(release.vllm_version, dtype="torch.float16")

    assert Recovery(FACTORS).recover(digest(there), LONG) == there
    if "transfer_mode" in there:
        assert Recovery(there).recover(digest(FACTORS), LONG) == FACTORS
    assert [difference.factor for difference in differences(FACTORS, there)] == [
        *(["vllm_version", "nixl_connector_version"] if release.vllm_version != "0.32.0" else []),
        "dtype",
    ]


@pytest.mark.parametrize("connector_version", range(1, 16))
def test_every_connector_version(connector_version: int) -> None:
    """A build of one's own: the same version of vLLM, another protocol, each of its sets of factors."""
    for names in factor_names(connector_version):
        values = {"cross_layers_blocks": False, **FACTORS, "nixl_connector_version": connector_version}
        there = {name: values[name] for name in names}

        assert Recovery(FACTORS).recover(digest(there), LONG) == there


def test_the_table_covers_every_version() -> None:
    """From 1 to 15, each in a release or between two."""
    known = {release.connector_version for release in RELEASES} | {number for number, _ in UNRELEASED}

    assert known == set(range(1, 16))
    assert factor_names(99) == (RELEASES[0].factor_names,)


def test_values_are_learnt_from_peers() -> None:
    """A model's name cannot be guessed; once a peer has told it, it is known. So is a build of vLLM."""
    recovery = Recovery(FACTORS)
    there = factors(model="example/other", vllm_version="0.32.1.dev7")
    assert recovery.recover(digest(there), 0.05) is None

    recovery.domain.learn(factors(model="example/other"))
    assert recovery.recover(digest(there), 0.05) is None
    recovery.domain.learn(factors(vllm_version="0.32.1.dev7", transfer_mode="push"))

    assert recovery.recover(digest(there), LONG) == there


def test_answers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rejected request brings the same digest: it is searched for once, until something was learnt."""
    searches = []

    def recover_all(self: Recovery, wanted: list[str], seconds: float) -> dict[str, Factors]:
        searches.append(wanted[0])
        return {}

    monkeypatch.setattr(Recovery, "recover_all", recover_all)
    recovery = Recovery(FACTORS)
    for _ in range(3):
        assert recovery.recover("0" * 64, 1) is None
    assert len(searches) == 1
    recovery.domain.learn(factors(model="new"))
    recovery.recover("0" * 64, 1)
    assert len(searches) == 2
    for number in range(1000):
        recovery.recover(f"{number:064x}", 1)
    assert len(recovery._known) == 256


def test_what_is_learnt_is_bounded() -> None:
    """Peers may say anything, any number of times."""
    domain = Domain()
    rng = random.Random(3)
    for number in range(1000):
        domain.learn(factors(model=f"model-{number}", vllm_version=str(number), speculative_config={"x": rng.random()}))
    domain.learn({"model": "m" * 1_000_000, "no such factor": 1})

    assert len(domain.values("model")) == len(domain.values("speculative_config")) - 1 == 64
    assert len(domain.releases()) == len(RELEASES) + 64
    assert domain.values("model")[0] == "model-999"
    assert domain.values("no such factor") == []
