# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``check``: verdicts on pairs, running or not, and what a fleet of them comes to."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nixl_telemetry.cli.check import FORMAT, check
from nixl_telemetry.cli.pairs import Side, Verdict, judge
from nixl_telemetry.compat.factors import digest
from nixl_telemetry.compat.instance import Instance, Origin, Rank
from nixl_telemetry.compat.statement import Geometry
from tests.support.commands import output, refused, run
from tests.support.peers import free_port, listener, payload
from tests.support.statements import FACTORS, GEOMETRY, exchanged, factors, factors_of_release, statement

PULL, PUSH = FACTORS, factors(transfer_mode="push")


def told(known: dict[str, Any], role: str = "kv_both", **geometry: Any) -> bytes:
    """The payload of an instrumented instance."""
    said = statement(known, kv_role=role, geometry=msgspec.structs.replace(GEOMETRY, **geometry))
    compat_hash, encoded = exchanged(said)
    return payload(compat_hash, {"engine_id": "e"}, encoded)


def instance(known: dict[str, Any] | None = None, **fields: Any) -> Instance:
    """An instance whose factors were computed."""
    known = FACTORS if known is None else known
    values = {"name": "x", "compat_hash": digest(known), "origin": Origin.COMPUTED, "factors": known}
    return Instance(**{**values, **fields})


def file(folder: Path, name: str, what: Instance) -> Path:
    path = folder / f"{name}.json"
    path.write_text(what.to_json())
    return path


# ------------------------------------------------------------------------------------------------------------- Verdicts


def test_running_instances_that_fit() -> None:
    with listener({(0, 0): told(PULL)}) as prefill, listener({(0, 0): told(PULL)}) as decode:
        result = run(check, prefill.address, decode.address)

    assert result.exit_code == 0
    assert prefill.queries == decode.queries == [(0, 0)]
    assert result.stdout.splitlines() == [
        f"prefill {prefill.address}  451e1900bd83  pull, vLLM 0.32.0, instrumented, factors exchanged",
        f"decode  {decode.address}  451e1900bd83  pull, vLLM 0.32.0, instrumented, factors exchanged",
        f"prefill {prefill.address} → decode {decode.address}  compatible",
    ]


def test_running_instances_that_do_not_fit() -> None:
    """The sentence names the sides and how it is known."""
    with listener({(0, 0): told(PULL)}) as prefill, listener({(0, 0): told(PUSH)}) as decode:
        result = run(check, prefill.address, decode.address)

    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == (
        f"prefill {prefill.address} → decode {decode.address}  incompatible: "
        'transfer_mode is "pull" on prefill and "push" on decode (exchanged)'
    )


def test_a_stock_instance_is_explained_by_the_other() -> None:
    stock = payload(digest(PUSH), {"engine_id": "e", "attn_backend_name": "CPU_ATTN"})
    with listener({(0, 0): told(PULL)}) as prefill, listener({(0, 0): stock, (0, 1): stock}) as decode:
        found = output(run(check, prefill.address, decode.address, "--json"), 1)

    assert decode.queries == [(0, 0)]
    (pair,) = found["pairs"]
    assert pair["reasons"] == [
        'transfer_mode is "pull" on prefill and "push" on decode (prefill exchanged, decode recovered)'
    ]
    assert pair["differences"] == [{"factor": "transfer_mode", "prefill": "pull", "decode": "push"}]


def test_two_stock_instances_that_cannot_be_explained() -> None:
    """Incompatible all the same, and what would help is said."""
    one, other = (payload(digest(known), {}) for known in (PULL, PUSH))
    with listener({(0, 0): one}) as prefill, listener({(0, 0): other}) as decode:
        result = run(check, prefill.address, decode.address)
        helped = run(
            check,
            *(prefill.address, decode.address),
            *("--factor", "model=example/model", "--factor", "vllm_version=0.32.0"),
            *("--factor", "attn_backend_name=CPU_ATTN", "--search-seconds", 60),
        )

    assert (result.exit_code, helped.exit_code) == (1, 1)
    assert "which factor does is not known; --like" in result.stdout
    assert 'transfer_mode is "pull" on prefill and "push" on decode (recovered)' in helped.stdout


def test_equal_hashes_need_no_factors() -> None:
    with listener({(0, 0): payload("a" * 64, {})}) as prefill, listener({(0, 0): payload("a" * 64, {})}) as decode:
        assert run(check, prefill.address, decode.address, "--search-seconds", 0).exit_code == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": "other/model"}, 'model is "example/model" on prefill and "other/model" on decode (computed)'),
        ({"dtype": "torch.float16"}, 'dtype is "torch.bfloat16" on prefill and "torch.float16" on decode (computed)'),
        (
            {"transfer_mode": "push", "is_hma_enabled": False},
            (
                'transfer_mode is "pull" on prefill and "push" on decode; '
                "is_hma_enabled is true on prefill and false on decode (computed)"
            ),
        ),
    ],
)
def test_every_factor_that_differs_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """For CI: two files that `factors --json` wrote."""
    base, changed = file(tmp_path, "base", instance()), file(tmp_path, "new", instance(factors(**change)))

    found = output(run(check, base, changed, "--json"), 1)

    assert found["verdict"] == "incompatible"
    assert found["pairs"][0]["reasons"] == [said]


def test_releases_differ_in_version_and_connector_version(tmp_path: Path) -> None:
    old = file(tmp_path, "old", instance(factors_of_release("0.28.0")))

    found = output(run(check, old, file(tmp_path, "new", instance()), "--json"), 1)

    assert [one["factor"] for one in found["pairs"][0]["differences"]] == ["vllm_version", "nixl_connector_version"]


def test_json_has_everything(tmp_path: Path) -> None:
    prefill = file(tmp_path, "prefill", instance(geometry=GEOMETRY))
    decode = file(tmp_path, "decode", instance(geometry=msgspec.structs.replace(GEOMETRY, tp_size=2)))

    found = output(run(check, prefill, decode, "--json"))

    assert (found["format"], found["verdict"]) == (FORMAT, "compatible")
    assert [(one["role"], one["source"], one["error"]) for one in found["instances"]] == [
        ("prefill", str(prefill), None),
        ("decode", str(decode), None),
    ]
    assert [one["instance"] for one in found["instances"]] == [
        json.loads(path.read_text()) for path in (prefill, decode)
    ]
    (pair,) = found["pairs"]
    assert pair.keys() == {"prefill", "decode", "verdict", "reasons", "differences", "geometry", "warnings"}
    (uncovered,) = pair["geometry"]
    assert uncovered.keys() == {"name", "prefill", "decode", "consequence", "advice"}
    assert (uncovered["name"], uncovered["prefill"], uncovered["decode"]) == ("tp_size", 1, 2)


# ------------------------------------------------------------------------------------------------- Beyond the hash


def verdict(prefill: Instance, decode: Instance) -> tuple[Verdict, list[str], list[str]]:
    pair = judge(Side("prefill", "p", prefill), Side("decode", "d", decode))
    return pair.verdict, list(pair.reasons), list(pair.warnings)


def beside(here: Geometry, there: Geometry, **hashed: Any) -> tuple[Verdict, list[str], list[str]]:
    """The verdict on instances with equal hashes."""
    return verdict(instance(factors(**hashed), geometry=here), instance(factors(**hashed), geometry=there))


@pytest.mark.parametrize("hashed", [{"is_hma_enabled": False}, {"attn_backend_name": "FLASH_ATTN_MLA"}])
def test_blocks_of_other_sizes_are_refused(hashed: dict[str, Any]) -> None:
    """Where no model can have Mamba layers, or vLLM compares them all the same."""
    result, reasons, warnings = beside(GEOMETRY, msgspec.structs.replace(GEOMETRY, block_lens=(1024,)), **hashed)

    assert result is Verdict.INCOMPATIBLE
    assert reasons[0].startswith("block_lens is [32768] on prefill and [1024] on decode: ")
    assert warnings == []


def test_blocks_of_other_sizes_may_be_those_of_a_hybrid_model() -> None:
    result, reasons, warnings = beside(GEOMETRY, msgspec.structs.replace(GEOMETRY, block_lens=(1024,)))

    assert (result, reasons) == (Verdict.COMPATIBLE, [])
    (warning,) = warnings
    assert warning.startswith("block_lens is [32768] on prefill and [1024] on decode: ")
    assert "unless the model has Mamba layers" in warning


@pytest.mark.parametrize(
    ("stages", "expected", "said"),
    [
        ((1, 1), Verdict.INCOMPATIBLE, "vLLM takes only as many regions as it has"),
        ((2, 2), Verdict.COMPATIBLE, "unless PP splits the layers"),
        ((None, 1), Verdict.COMPATIBLE, "unless PP splits the layers"),
    ],
)
def test_another_number_of_equal_regions(stages: tuple[int | None, int], expected: Verdict, said: str) -> None:
    """Their lengths are the same run."""
    here, there = (
        msgspec.structs.replace(GEOMETRY, pp_size=stage, num_regions=regions)
        for stage, regions in zip(stages, (4, 5), strict=True)
    )

    result, reasons, warnings = beside(here, there)

    assert result is expected
    (text,) = [*reasons, *warnings]
    assert text.startswith("num_regions is 4 on prefill and 5 on decode: ")
    assert said in text


def test_regions_follow_from_pp_sizes() -> None:
    here, there = (msgspec.structs.replace(GEOMETRY, pp_size=stages, num_regions=8 // stages) for stages in (1, 2))

    (warning,) = beside(here, there)[2]

    assert warning.startswith("pp_size is 1")


@pytest.mark.parametrize(
    ("here", "there", "said"),
    [
        ((2, 1), (1, 2), "no instance that has PCP without DCP with one that has DCP"),
        ((1, 2), (2, 1), "no instance that has PCP without DCP with one that has DCP"),
        ((2, 1), (None, 2), "no instance that has PCP without DCP with one that has DCP"),
        ((4, 8), (1, 1), "only a DCP size of 1 or of PCP's"),
        ((1, 1), (4, 2), "only a DCP size of 1 or of PCP's"),
        ((4, 2), (4, 2), "only a DCP size of 1 or of PCP's"),
        ((1, 2), (1, 3), "sizes of which one divides the other"),
        ((1, 2), (1, 4), None),
        ((4, 4), (1, 2), None),
        ((4, 1), (1, 1), None),
        ((None, 1), (1, 2), None),
        ((4, 2), (1, None), None),
    ],
)
def test_context_parallel_sizes_that_vllm_never_pairs(
    here: tuple[int | None, int | None], there: tuple[int | None, int | None], said: str | None
) -> None:
    """PCP and DCP sizes of prefill and decode; the same rule from either side."""
    sides = [Geometry(pcp_size=pcp, dcp_size=dcp) for pcp, dcp in (here, there)]

    for pair in (sides, sides[::-1]):
        result, reasons, _ = beside(*pair)
        assert result is (Verdict.INCOMPATIBLE if said else Verdict.COMPATIBLE)
        assert [said in reason for reason in reasons if said] == [True] * bool(said)


@pytest.mark.parametrize("known", [{}, {"tp_size": 1, "pp_size": 1}])
def test_blocks_of_other_sizes_may_be_right_where_the_ranks_are_not_known(known: dict[str, Any]) -> None:
    """A stock instance does not tell its TP size, and half as many heads make half as large blocks."""
    result, reasons, warnings = verdict(
        instance(geometry=Geometry(block_lens=(32768,), **known)), instance(geometry=Geometry(block_lens=(16384,)))
    )

    assert (result, reasons) == (Verdict.COMPATIBLE, [])
    assert warnings[0].startswith("block_lens is [32768] on prefill and [16384] on decode: right if their TP")


def test_a_zero_from_a_stranger_is_no_crash() -> None:
    verdict(instance(geometry=Geometry(dcp_size=0)), instance(geometry=Geometry(dcp_size=3)))


def test_revisions_are_compared_where_both_sides_would_tell() -> None:
    with_revision = instance(model_revision="abc")

    assert "model_revision" in verdict(with_revision, instance())[2][0]
    assert verdict(with_revision, instance(origin=Origin.RECOVERED)) == (Verdict.COMPATIBLE, [], [])


def test_roles_that_are_swapped_are_seen() -> None:
    prefill, decode = instance(kv_role="kv_consumer"), instance(kv_role="kv_producer")

    assert verdict(prefill, decode)[2] == [
        "prefill p runs with kv_role kv_consumer; are the two swapped?",
        "decode d runs with kv_role kv_producer; are the two swapped?",
    ]
    assert verdict(instance(kv_role="kv_both"), instance(kv_role="kv_both"))[2] == []


def test_ranks_that_disagree_fit_nobody() -> None:
    mixed = instance(ranks=(Rank(pp_rank=0, tp_rank=1, compat_hash="b" * 64),))

    assert verdict(mixed, instance())[:2] == (Verdict.INCOMPATIBLE, ["ranks of prefill answer different hashes"])


@pytest.mark.parametrize(("options", "code"), [([], 0), (["--strict"], 1)])
def test_warnings_count_where_they_are_asked_to(tmp_path: Path, options: list[str], code: int) -> None:
    prefill, decode = (file(tmp_path, f"tp{size}", instance(geometry=Geometry(tp_size=size))) for size in (1, 2))

    result = run(check, prefill, decode, *options)

    assert result.exit_code == code
    assert "  warning: tp_size is 1 on prefill and 2 on decode: " in result.stdout


# ---------------------------------------------------------------------------------------------------------------- Fleet


def test_a_fleet_is_a_matrix(tmp_path: Path) -> None:
    pull, push = file(tmp_path, "pull", instance(PULL)), file(tmp_path, "push", instance(PUSH))
    fleet = tmp_path / "fleet"
    fleet.write_text(f"# ours\nprefill {pull} {push}  # both\n\ndecode {pull}\ndecode {pull}\n")

    found = output(run(check, "--from", fleet, "--json"), 1)

    assert [(pair["prefill"], pair["decode"], pair["verdict"]) for pair in found["pairs"]] == [
        (str(pull), str(pull), "compatible"),
        (str(push), str(pull), "incompatible"),
    ]
    assert run(check, "--from", fleet).stdout.splitlines()[-1] == "2 pairs: 1 compatible, 1 incompatible, 0 unknown"


def test_arguments_join_a_fleet(tmp_path: Path) -> None:
    """A new configuration against all that run."""
    fleet = tmp_path / "fleet"
    fleet.write_text(f"decode {file(tmp_path, 'a', instance())} {file(tmp_path, 'b', instance())}")

    assert len(output(run(check, file(tmp_path, "new", instance()), "--from", fleet, "--json"))["pairs"]) == 2


@pytest.mark.parametrize(
    ("known", "code", "summary"),
    [
        (PULL, 2, "2 pairs: 1 compatible, 0 incompatible, 1 unknown"),
        (PUSH, 1, "2 pairs: 0 compatible, 1 incompatible, 1 unknown"),
    ],
)
def test_what_cannot_be_reached_is_said_beside_the_rest(
    tmp_path: Path, known: dict[str, Any], code: int, summary: str
) -> None:
    """An incompatible pair outweighs what is not known, which outweighs what is fine."""
    nowhere = f"127.0.0.1:{free_port()}"
    fleet = tmp_path / "fleet"
    fleet.write_text(
        f"prefill {file(tmp_path, 'p', instance())} {nowhere}\ndecode {file(tmp_path, 'd', instance(known))}"
    )

    result = run(check, "--from", fleet)

    assert result.exit_code == code
    lines = result.stdout.splitlines()
    assert lines[1] == f"prefill {nowhere}  not known"
    assert f"unknown: prefill: {nowhere} refused the connection" in lines[-2]
    assert lines[-1] == summary


def test_an_instance_in_both_roles_is_asked_once(tmp_path: Path) -> None:
    with listener({(0, 0): told(PULL)}) as both:
        assert run(check, both.address, both.address).exit_code == 0

    assert both.queries == [(0, 0)]


def test_all_are_asked_at_a_time(tmp_path: Path) -> None:
    """As patient with eight silent ones as with one."""
    with listener({(0, 0): told(PULL)}) as decode:
        fleet = tmp_path / "fleet"
        fleet.write_text(f"decode {decode.address}\nprefill " + " ".join(f"127.0.0.1:{free_port()}" for _ in range(8)))
        started = time.monotonic()
        result = run(check, "--from", fleet, "--wait", 0.6)

    assert result.exit_code == 2
    assert time.monotonic() - started < 4


def test_a_fleet_that_is_starting_is_waited_for() -> None:
    """As an init container does."""
    port = free_port()
    with listener({(0, 0): told(PULL)}) as prefill:
        codes: list[int] = []
        waiting = threading.Thread(
            target=lambda: codes.append(run(check, prefill.address, f"127.0.0.1:{port}", "--wait", 30).exit_code)
        )
        waiting.start()
        time.sleep(0.3)
        with listener({(0, 0): told(PULL)}, port=port):
            waiting.join()

    assert codes == [0]


# --------------------------------------------------------------------------------------------------------------- Errors


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "this is no instance"),
        ("[]", "this is no instance"),
        ("[" * 100_000, "this is no instance"),
        ('{"name": "x", "compat_hash": "a"}', "compat_hash"),
        ('{"name": "x", "compat_hash": "' + "a" * 64 + '", "format": "other/1"}', "the format is 'other/1'"),
        (instance().to_json().replace('"pull"', '"push"'), "it was edited"),
        (instance().to_json().replace('"model"', '"modelname"'), "unknown factors: modelname"),
        (instance().to_json().replace(digest(FACTORS), "b" * 64), "it was edited"),
        ("\x00\xff", "this is no instance"),
    ],
)
def test_a_file_that_is_no_instance(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("latin-1"))

    found = output(run(check, path, file(tmp_path, "good", instance()), "--json"), 2)

    assert found["verdict"] == "unknown"
    assert found["instances"][0]["instance"] is None
    assert found["instances"][0]["error"].startswith(f"{path}: ")
    assert said in found["instances"][0]["error"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("no/such/file", "there is no such file"),
        ("file.json", "there is no such file"),
        ("nonsense", "has no port"),
        ("[::1]", "has no port"),
        ("a" * 300, "cannot be read: File name too long"),
    ],
)
def test_a_source_that_is_none(tmp_path: Path, source: str, said: str) -> None:
    found = output(run(check, source, file(tmp_path, "good", instance()), "--json"), 2)

    assert said in found["pairs"][0]["reasons"][0]


def test_standard_input_is_a_source(tmp_path: Path) -> None:
    assert run(check, "-", file(tmp_path, "good", instance()), stdin=instance().to_json()).exit_code == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prefill 10.0.0.7:5600\n", "there is no decode instance to check"),
        ("prefil 10.0.0.7:5600\n", "line 1: 'prefil 10.0.0.7:5600' is not"),
        ("\n\ndecode\n", "line 3: 'decode' is not"),
        ("", "there is no prefill instance to check"),
        ("\xff", "is no text"),
    ],
)
def test_a_fleet_that_is_none(tmp_path: Path, text: str, said: str) -> None:
    fleet = tmp_path / "fleet"
    fleet.write_bytes(text.encode("latin-1"))

    assert said in refused(run(check, "--from", fleet))


def test_errors_before_anything_is_asked(tmp_path: Path) -> None:
    good = file(tmp_path, "good", instance())

    assert "there is no prefill instance" in refused(run(check))
    assert "there is no decode instance" in refused(run(check, good))
    assert "cannot be read" in refused(run(check, "--from", tmp_path))
    assert "refused the connection" in refused(run(check, good, good, "--like", f"127.0.0.1:{free_port()}"))
    assert "is not NAME=VALUE" in refused(run(check, good, good, "--factor", "model"))
