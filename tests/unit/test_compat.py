# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Differences, statements and geometry: what two instances say, and what is made of it."""

from typing import Any

import msgspec
import pytest

from nixl_telemetry.compat.explanation import Source, explain
from nixl_telemetry.compat.factors import FACTOR_NAMES, Difference, differences, digest, value_text
from nixl_telemetry.compat.geometry import Consequence, geometry_differences
from nixl_telemetry.compat.instance import Instance, InstanceError, Origin
from nixl_telemetry.compat.recovery import Recovery
from nixl_telemetry.compat.releases import RELEASES
from nixl_telemetry.compat.statement import ABSENT, Geometry, StatementError, decode, encode
from tests.support.statements import FACTORS, GEOMETRY, exchanged, factors, factors_of_release, statement

# ---------------------------------------------------------------------------------------------------------- Differences


@pytest.mark.parametrize("factor", sorted(FACTORS))
def test_one_difference(factor: str) -> None:
    there = {**FACTORS, factor: "other"}

    assert differences(FACTORS, there) == (Difference(factor, FACTORS[factor], "other"),)


def test_the_most_telling_difference_comes_first() -> None:
    """The version before what follows from it, the mode before the shapes."""
    there = factors_of_release("0.28.0", transfer_mode="push", num_kv_heads=8)

    assert [difference.factor for difference in differences(FACTORS, there)] == [
        "vllm_version",
        "nixl_connector_version",
        "transfer_mode",
        "num_kv_heads",
    ]


def test_values_differ_as_the_hash_sees_them() -> None:
    """Python takes True for 1 and a tuple for no list; JSON does not."""
    assert differences({"is_hma_enabled": True}, {"is_hma_enabled": 1}) == (Difference("is_hma_enabled", True, 1),)
    assert differences({"speculative_config": (1, 2)}, {"speculative_config": [1, 2]}) == ()


def test_a_factor_of_one_side_only_is_told_when_nothing_else_differs() -> None:
    there = factors(cross_layers_blocks=False)

    assert differences(FACTORS, there) == (Difference("cross_layers_blocks", None, False),)


def test_values_are_shown_as_json_and_shortened() -> None:
    assert value_text("a\nb\x1b") == '"a\\nb\\u001b"'
    assert value_text(None) == "null"
    assert len(value_text("x" * 10_000)) == 259


def test_every_factor_of_every_release_has_a_place() -> None:
    assert {name for release in RELEASES for name in release.factor_names} == set(FACTOR_NAMES)


# ----------------------------------------------------------------------------------------------------------- Statements


def test_a_statement_survives_the_wire() -> None:
    said = statement(model_revision="abc")
    compat_hash, encoded = exchanged(said)

    assert decode(encoded, compat_hash) == said
    assert decode(ABSENT, compat_hash) is decode(b"", compat_hash) is None


def deep(levels: int) -> bytes:
    return b"\x91" * levels + b"\xc0"


HOSTILE: dict[str, bytes] = {
    "a number": msgspec.msgpack.encode(5),
    "a list": msgspec.msgpack.encode([1, 2]),
    "no version": msgspec.msgpack.encode({"factors": {}}),
    "another version": msgspec.msgpack.encode({**msgspec.to_builtins(statement()), "version": 2}),
    "a version that is text": msgspec.msgpack.encode({**msgspec.to_builtins(statement()), "version": "1"}),
    "no factors": msgspec.msgpack.encode({**msgspec.to_builtins(statement()), "factors": None}),
    "factors that are a list": msgspec.msgpack.encode({**msgspec.to_builtins(statement()), "factors": [1]}),
    "factors of another instance": encode(statement(factors(dtype="torch.float16"))),
    "factors that are NaN": msgspec.msgpack.encode(
        {**msgspec.to_builtins(statement()), "factors": factors(head_size=float("nan"))}
    ),
    "factors that are infinite": msgspec.msgpack.encode(
        {**msgspec.to_builtins(statement()), "factors": factors(head_size=float("inf"))}
    ),
    "bytes among the factors": msgspec.msgpack.encode(
        {**msgspec.to_builtins(statement()), "factors": factors(model=b"\xff")}
    ),
    "numbers as names": msgspec.msgpack.encode({**msgspec.to_builtins(statement()), "factors": {1: 2}}),
    "a negative size": msgspec.msgpack.encode({**msgspec.to_builtins(statement()), "geometry": {"tp_size": -1}}),
    "a long text": msgspec.msgpack.encode({**msgspec.to_builtins(statement()), "engine_id": "x" * 10_000}),
    "megabytes": b"\xc6\x00\x50\x00\x00" + b"x" * 5 * 2**20,
    "deep nesting": b"\x82\xa7version\x01\xa7factors" + deep(50_000),
    "deep nesting in a factor": b"\x82\xa7version\x01\xa7factors\x81\xa5model" + deep(900),
    "cut off": exchanged(statement())[1][:50],
    "garbage": b"\xc1\xff\xfe",
    "text that is no UTF-8": b"\x81\xa7version\xa2\xff\xfe",
}


@pytest.mark.parametrize("encoded", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_statement_is_refused(encoded: bytes) -> None:
    with pytest.raises(StatementError) as caught:
        decode(encoded, digest(FACTORS))

    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("changes", [{"x\nlevel": 1}, {"X": 1}, {"speculative_config": [[[[[[[[[[1]]]]]]]]]]}])
def test_factors_that_are_none_are_refused_even_if_they_give_the_hash(changes: dict[str, Any]) -> None:
    """They would become attribute names, or exhaust the stack where they are compared."""
    there = factors(**changes)
    encoded = msgspec.msgpack.encode({**msgspec.to_builtins(statement()), "factors": there})

    with pytest.raises(StatementError, match="factors that are none"):
        decode(encoded, digest(there))
    with pytest.raises(StatementError):
        encode(statement(there))


def test_a_factor_of_a_later_vllm_is_told_and_not_counted_by_its_name() -> None:
    """The digest proves it; the metric's label has a closed set of values."""
    there = factors(new_factor=3)
    assert decode(encode(statement(there)), digest(there)) == statement(there)

    told = explain(factors(new_factor=2), digest(there), there, None, 1)

    assert (told.factor, told.text()) == ("unknown", "new_factor is 3 there and 2 here (exchanged)")


def test_a_statement_that_is_too_large_is_not_said() -> None:
    with pytest.raises(StatementError, match="larger than 65536"):
        encode(statement(factors(speculative_config={"x": "y" * 70_000})))


def test_more_fields_are_left_alone() -> None:
    """A later release of ours may say more under the same version."""
    more = msgspec.msgpack.encode({**msgspec.to_builtins(statement()), "later": [1, {"a": 2}]})

    assert decode(more, digest(FACTORS)) == statement()


# ------------------------------------------------------------------------------------------------------------- Geometry


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"tp_size": 2, "block_lens": (16384,)}, {"tp_size": Consequence.CONDITIONAL}),
        ({"pp_size": 2}, {"pp_size": Consequence.CONDITIONAL}),
        ({"dcp_size": 2}, {"dcp_size": Consequence.CONDITIONAL}),
        ({"pcp_size": 2}, {"pcp_size": Consequence.CONDITIONAL}),
        ({"block_size": 64, "block_lens": (65536,)}, {"block_size": Consequence.CONDITIONAL}),
        ({"kv_cache_layout": "LBNHC"}, {"kv_cache_layout": Consequence.CONDITIONAL}),
        ({"block_lens": (16384,)}, {"block_lens": Consequence.REFUSED}),
        ({"tp_size": None, "block_lens": None}, {}),
    ],
)
def test_geometry(changes: dict[str, Any], expected: dict[str, Consequence]) -> None:
    there = msgspec.structs.replace(GEOMETRY, **changes)

    # Without the hybrid cache manager there are no Mamba layers.
    found = geometry_differences(GEOMETRY, there, factors=factors(is_hma_enabled=False))

    assert {difference.name: difference.consequence for difference in found} == expected
    for difference in found:
        assert f"{difference.name} is " in difference.text()


def test_block_lengths_may_differ_where_there_may_be_mamba_layers() -> None:
    (found,) = geometry_differences(GEOMETRY, msgspec.structs.replace(GEOMETRY, block_lens=(16384,)), factors=FACTORS)

    assert found.consequence is Consequence.CONDITIONAL


def test_sizes_that_do_not_divide_are_refused() -> None:
    (found,) = geometry_differences(Geometry(dcp_size=2), Geometry(dcp_size=3))

    assert found.consequence is Consequence.REFUSED


def test_a_differing_revision_is_told() -> None:
    (found,) = geometry_differences(GEOMETRY, GEOMETRY, ("main", None))

    assert found.consequence is Consequence.UNCHECKED
    assert found.text().startswith('model_revision is null there and "main" here: vLLM does not compare')


# --------------------------------------------------------------------------------------------------------- Explanations


def test_explanations() -> None:
    there = factors(transfer_mode="push")
    told = explain(FACTORS, digest(there), there, None, 1)
    found = explain(FACTORS, digest(there), None, Recovery(FACTORS), 1)
    unknown = explain(FACTORS, "0" * 64, None, Recovery(FACTORS), 0.01)

    assert (told.source, found.source, unknown.source) == (Source.EXCHANGED, Source.RECOVERED, Source.UNKNOWN)
    assert told.text() == 'transfer_mode is "push" there and "pull" here (exchanged)'
    assert found.text() == 'transfer_mode is "push" there and "pull" here (recovered)'
    assert (told.factor, found.factor, unknown.factor) == ("transfer_mode", "transfer_mode", "unknown")
    ours_unknown = explain(None, "0" * 64, there, None, 1)
    assert ours_unknown.source is Source.UNKNOWN
    assert ours_unknown.text() == "what differs is unknown: the factors of this instance could not be seen"


# ------------------------------------------------------------------------------------------------------------ Instances


def test_an_instance_survives_a_file() -> None:
    instance = Instance(name="p", compat_hash=digest(FACTORS), geometry=GEOMETRY).with_factors(FACTORS, Origin.COMPUTED)

    assert Instance.from_json(instance.to_json().encode()) == instance


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x/9"}, "the format is 'x/9'"),
        ({"compat_hash": "0" * 64}, "it was edited"),
        ({"compat_hash": "short"}, "this is no instance"),
        ({"factors": {**FACTORS, "size": 1}}, "unknown factors: size"),
        ({"name": None}, "this is no instance"),
    ],
)
def test_files_that_are_no_instance(change: dict[str, Any], message: str) -> None:
    instance = Instance(name="p", compat_hash=digest(FACTORS)).with_factors(FACTORS, Origin.COMPUTED)
    edited = msgspec.json.encode({**msgspec.to_builtins(instance), **change})

    with pytest.raises(InstanceError, match=message):
        Instance.from_json(edited)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b" " * (5 * 2**20)])
def test_bytes_that_are_no_instance(text: bytes) -> None:
    with pytest.raises(InstanceError):
        Instance.from_json(text)
