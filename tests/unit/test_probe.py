# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``probe``: what it makes of answers, which ranks it asks, and what it finds out about stock instances."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nixl_telemetry.cli.probe import probe
from nixl_telemetry.compat.factors import digest
from nixl_telemetry.compat.instance import FORMAT, Instance, Origin
from nixl_telemetry.compat.statement import Geometry, Statement
from tests.support.commands import output, refused, run
from tests.support.http_apis import http_api
from tests.support.peers import free_port, listener, payload, peer, tcp_server
from tests.support.statements import FACTORS, GEOMETRY, exchanged, factors, statement

METADATA = {
    "engine_id": "5b1f",
    "agent_metadata": b"\x00" * 200,
    "kv_caches_base_addr": [2**40, 2**41],
    "num_blocks": 100,
    "block_lens": [32768] * 8,
    "kv_cache_layout": "LBHNC",
    "block_size": 32,
    "attn_backend_name": "CPU_ATTN",
    "dcp_size": 1,
    "pcp_size": 1,
    "packed_member_layouts": {"layer": (0, 1)},
}
STOCK = payload(digest(FACTORS), METADATA)


def told(said: Statement | None = None, **metadata: Any) -> bytes:
    """The payload of an instrumented instance."""
    compat_hash, encoded = exchanged(said or statement())
    return payload(compat_hash, METADATA | metadata, encoded)


def saved(folder: Path, **changes: Any) -> Path:
    """A file of an instance whose factors are known."""
    known = factors(**changes)
    instance = Instance(name="saved", compat_hash=digest(known), origin=Origin.EXCHANGED, factors=known)
    path = folder / "saved.json"
    path.write_text(instance.to_json())
    return path


# ---------------------------------------------------------------------------------------------------------------- Ranks


def test_a_stock_instance_is_asked_for_the_first_rank_only() -> None:
    """It has another one, which nobody said."""
    with listener({(0, 0): STOCK, (0, 1): STOCK}) as there:
        found = output(run(probe, there.address, "--json", "--search-seconds", 0))

    assert there.queries == [(0, 0)]
    assert found["format"] == FORMAT
    assert found["compat_hash"] == digest(FACTORS)
    assert (found["instrumented"], found["origin"], found["factors"]) == (False, "unknown", None)
    assert found["engine_id"] == "5b1f"
    sizes = msgspec.structs.replace(GEOMETRY, tp_size=None, pp_size=None, num_regions=8)
    assert found["geometry"] == json.loads(msgspec.json.encode(sizes))
    assert [(rank["attn_backend_name"], rank["num_blocks"]) for rank in found["ranks"]] == [("CPU_ATTN", 100)]


def test_all_ranks_of_an_instrumented_instance_are_asked() -> None:
    said = statement(geometry=msgspec.structs.replace(GEOMETRY, tp_size=2, pp_size=2), kv_role="kv_both")
    ranks = {(pp, tp): told(said, num_blocks=10 * pp + tp) for pp in range(2) for tp in range(2)}
    with listener(ranks) as there:
        found = output(run(probe, there.address, "--json"))

    assert there.queries == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rank["num_blocks"] for rank in found["ranks"]] == [0, 1, 10, 11]
    assert (found["instrumented"], found["origin"], found["factors"]) == (True, "exchanged", FACTORS)
    assert (found["kv_role"], found["nixl_version"], found["telemetry_version"]) == ("kv_both", "1.5.1", "0.1.0")


def test_the_user_may_know_the_ranks_of_a_stock_instance() -> None:
    with listener(dict.fromkeys([(0, 0), (0, 1)], STOCK)) as there:
        found = output(run(probe, there.address, "--tp", 2, "--json", "--search-seconds", 0))

    assert there.queries == [(0, 0), (0, 1)]
    assert found["geometry"]["tp_size"] == 2


def test_an_instrumented_instance_knows_better_than_the_user() -> None:
    with listener({(0, 0): told()}) as there:
        found = output(run(probe, there.address, "--tp", 2, "--json"))

    assert there.queries == [(0, 0)]
    assert found["notes"] == ["--tp 2 is not used: it says that it has 1"]


def test_the_http_api_may_know_the_ranks() -> None:
    """In development mode; nothing but GET is used, and no completion."""
    requests: list[str] = []
    info = {"vllm_config": {"parallel_config": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}}}
    with (
        listener(dict.fromkeys([(0, 0), (0, 1)], STOCK)) as there,
        http_api({"/version": {"version": "0.32.0"}, "/server_info": info}, requests) as url,
    ):
        output(run(probe, there.address, "--http", url, "--json", "--search-seconds", 0))

    assert there.queries == [(0, 0), (0, 1)]
    assert requests == ["GET /version", "GET /v1/models", "GET /metrics", "GET /server_info?config_format=json"]


def test_nobody_is_asked_about_ranks_that_are_disputed() -> None:
    info = {"vllm_config": {"parallel_config": {"tensor_parallel_size": 1}}}
    with listener({(0, 0): STOCK}) as there, http_api({"/version": {}, "/server_info": info}) as url:
        assert "--tp is 2, and its HTTP API says 1" in refused(run(probe, there.address, "--http", url, "--tp", 2))

    assert there.queries == []


def test_a_vllm_that_may_not_understand_the_query_is_not_asked() -> None:
    with listener({(0, 0): STOCK}) as there, http_api({"/version": {"version": "0.27.1"}}) as url:
        assert "is not asked: it runs vLLM 0.27.1" in refused(run(probe, there.address, "--http", url))

    assert there.queries == []


def test_a_liar_does_not_make_us_ask_forever() -> None:
    said = statement(geometry=Geometry(tp_size=2**40, pp_size=2**40))
    with listener({(0, rank): told(said) for rank in range(256)}) as there:
        found = output(run(probe, there.address, "--json"))

    assert len(there.queries) == 256
    assert found["notes"] == [f"of its {2**80} ranks, 256 were asked"]


def test_ranks_that_disagree() -> None:
    """One instance with two hashes: no peer fits both."""
    with listener({(0, 0): STOCK, (0, 1): payload("b" * 64, METADATA)}) as there:
        result = run(probe, there.address, "--tp", 2, "--search-seconds", 0)

    assert result.exit_code == 1
    assert "its ranks have different hashes" in result.stdout


# ------------------------------------------------------------------------------------------------------- Stock factors


def test_factors_are_recovered_from_a_like_instance(tmp_path: Path) -> None:
    like = saved(tmp_path, transfer_mode="push", model="example/model")
    with listener({(0, 0): STOCK}) as there:
        found = output(run(probe, there.address, "--like", like, "--json"))

    assert (found["origin"], found["factors"]) == ("recovered", FACTORS)


def test_a_running_instance_may_be_like_it() -> None:
    other = statement(factors(transfer_mode="push"))
    with listener({(0, 0): STOCK}) as there, listener({(0, 0): told(other)}) as like:
        assert output(run(probe, there.address, "--like", like.address, "--json"))["origin"] == "recovered"


def test_an_instance_that_tells_nothing_is_like_nothing() -> None:
    with listener({(0, 0): STOCK}) as there:
        assert "its own factors are not known" in refused(run(probe, there.address, "--like", there.address))


def test_factors_are_recovered_from_a_model_name() -> None:
    """Without any other instance: the rest is common, or in the answer."""
    with listener({(0, 0): STOCK}) as there:
        found = output(
            run(probe, there.address, "--json", "--factor", "model=example/model", "--factor", "vllm_version=0.32.0")
        )

    assert (found["origin"], found["factors"]) == ("recovered", FACTORS)


def test_the_http_api_may_know_the_model() -> None:
    """As stock vLLM and as an instrumented one describe themselves."""
    answers = {
        "/version": {"version": "0.32.0"},
        "/v1/models": {"object": "list", "data": [{"id": "served", "root": "example/model"}]},
        "/metrics": (
            'vllm:cache_config_info{block_size="32",cache_dtype="auto",engine="0"} 1.0\n'
            f'nixl_connector_info{{compat_hash="{"c" * 64}",transfer_mode="pull",handshake_enforced="false"}} 1.0\n'
        ),
    }
    with listener({(0, 0): STOCK}) as there, http_api(answers) as url:
        found = output(run(probe, there.address, "--http", url, "--json"))

    assert (found["origin"], found["factors"]) == ("recovered", FACTORS)
    assert found["notes"] == [
        ('its HTTP API says: vllm_version "0.32.0", model "example/model", cache_dtype "auto", transfer_mode "pull"'),
        "the HTTP API is another instance's: the hash there is not that of the side channel",
        "it takes peers with other hashes (enforce_handshake_compat is false)",
    ]


@pytest.mark.parametrize("answer", ["", "[" * 100_000, "null", '{"version": 5}', '{"version": {}}'])
def test_an_odd_http_api_tells_nothing(answer: str) -> None:
    with listener({(0, 0): STOCK}) as there:
        paths = dict.fromkeys(["/version", "/v1/models", "/server_info"], answer)
        with http_api({**paths, "/metrics": f"nixl_connector_info{{{answer}}} 1\n"}) as url:
            found = output(run(probe, there.address, "--http", url, "--json", "--search-seconds", 0))

    assert found["geometry"]["tp_size"] is None


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:{port}", "Connection refused"),
        ("http://127.0.0.1:http", "is no URL"),
        ("ftp://127.0.0.1/", "is no URL"),
        ("http://", "is no URL"),
        ("http://[::1", "is no URL"),
    ],
)
def test_an_http_api_that_is_none(url: str, said: str) -> None:
    with listener({(0, 0): STOCK}) as there:
        assert said in refused(run(probe, there.address, "--http", url.format(port=free_port())))

    assert there.queries == []


# -------------------------------------------------------------------------------------------------------------- Hostile


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"", "undecodable: DecodeError"),
        (b"\xff\xfejunk", "Expected `object`"),
        (b"\x91" * 200_000, "Expected `object`"),
        (msgspec.msgpack.encode("text"), "no handshake payload"),
        (msgspec.msgpack.encode({}), "missing required field `compatibility_hash`"),
        (payload(5, {}), "Expected `str`"),
        (payload("A" * 64, {}), "compatibility_hash"),
        (payload("a" * 63, {}), "compatibility_hash"),
        (payload("a" * 64 + "\n", {}), "compatibility_hash"),
        (payload("a" * 64, {}, b"\x91" * 200_000 + b"\xc0"), "undecodable: RecursionError"),
        (msgspec.msgpack.encode({"compatibility_hash": "a" * 64, "agent_metadata_bytes": 7}), "Expected `bytes`"),
    ],
)
def test_what_is_no_payload(answer: bytes, said: str) -> None:
    """One line that names the address, and exit code 2, also with --json."""
    with peer(lambda: [answer]) as port:
        for options in ([], ["--json"]):
            line = refused(run(probe, f"127.0.0.1:{port}", *options))
            assert line.startswith(f"error: 127.0.0.1:{port} answered what is no handshake payload")
            assert said in line


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        {1: 2},
        {"engine_id": 5, "num_blocks": -1, "block_lens": "x", "kv_cache_layout": None, "block_size": 2**60},
        {"engine_id": "x" * 300, "block_lens": [1.5], "dcp_size": "1", "kv_cache_layout": b"LBHNC"},
        {"block_lens": [[[]]] * 1000},
    ],
)
def test_odd_metadata_tells_nothing(metadata: Any) -> None:
    """The hash is there all the same."""
    with listener({(0, 0): payload("a" * 64, metadata)}) as there:
        found = output(run(probe, there.address, "--json", "--search-seconds", 0))

    assert found["compat_hash"] == "a" * 64
    assert found["engine_id"] is None
    assert set(found["geometry"].values()) == {None}


def test_regions_are_counted_where_their_lengths_are_too_many() -> None:
    with listener({(0, 0): payload("a" * 64, {"block_lens": list(range(2000))})}) as there:
        found = output(run(probe, there.address, "--json", "--search-seconds", 0))

    assert (found["geometry"]["block_lens"], found["geometry"]["num_regions"]) == (None, 2000)


def test_one_odd_value_does_not_hide_the_others() -> None:
    with listener({(0, 0): payload("a" * 64, METADATA | {"num_blocks": "many"})}) as there:
        found = output(run(probe, there.address, "--json", "--search-seconds", 0))

    assert found["ranks"][0]["num_blocks"] is None
    assert found["geometry"]["block_size"] == 32


@pytest.mark.parametrize(
    "field",
    [
        msgspec.msgpack.encode({"version": 2}),
        msgspec.msgpack.encode("text"),
        msgspec.msgpack.encode("x" * 70_000),
        msgspec.msgpack.encode(statement(factors(model="another"))),
        msgspec.msgpack.encode(statement({**FACTORS, "unheard_of": 1})),
    ],
)
def test_a_statement_that_is_not_believed(field: bytes) -> None:
    """The instance is taken for a stock one, and the reader is told."""
    with listener({(0, 0): payload(digest(FACTORS), METADATA, field)}) as there:
        found = output(run(probe, there.address, "--json", "--search-seconds", 0))

    assert (found["instrumented"], found["factors"]) == (False, None)
    assert len(found["notes"]) == 1
    assert "is not believed" in found["notes"][0]


def test_nothing_of_a_peer_reaches_the_terminal_as_a_command() -> None:
    said = statement(factors(model="\x1b[2J\nmodel\x9b\x7f"), engine_id="\x1b]0;title\x07", kv_role="\u202e")
    with listener({(0, 0): told(said)}) as there:
        text = run(probe, there.address).stdout
        as_json = run(probe, there.address, "--json").stdout

    assert as_json.isascii()
    assert "\x7f" not in as_json
    assert json.loads(as_json)["factors"]["model"] == "\x1b[2J\nmodel\x9b\x7f"
    assert r"\u001b[2J\nmodel" in text
    assert not any(letter < " " and letter != "\n" for letter in text)
    assert "\u202e" not in text


# --------------------------------------------------------------------------------------------------------- Command line


def test_the_text_has_everything() -> None:
    said = statement(model_revision="abc", geometry=msgspec.structs.replace(GEOMETRY, tp_size=2))
    with listener(dict.fromkeys([(0, 0), (0, 1)], told(said))) as there:
        result = run(probe, there.address)

    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{there.address}  pull, vLLM 0.32.0, instrumented, factors exchanged",
        f"  hash          {digest(FACTORS)}",
        "  versions      NIXL 1.5.1, nixl_telemetry 0.1.0",
        "  role          kv_producer",
        "  engine id     there",
        "  revision      abc",
        "  geometry      tp_size 2, pp_size 1, dcp_size 1, pcp_size 1, block_size 32, kv_cache_layout LBHNC",
        "  blocks        100 of 32768 bytes in each of 8 regions",
        "  factors (exchanged)",
        '    vllm_version            "0.32.0"',
        "    nixl_connector_version  14",
        '    transfer_mode           "pull"',
        '    model                   "example/model"',
        '    dtype                   "torch.bfloat16"',
        "    num_kv_heads            4",
        "    head_size               64",
        "    num_hidden_layers       4",
        '    attn_backend_name       "CPU_ATTN"',
        '    cache_dtype             "auto"',
        "    is_hma_enabled          true",
        "    speculative_config      null",
        "  ranks (pp, tp)",
        f"    (0, 0)  {digest(FACTORS)[:12]}  100 of 32768 bytes in each of 8 regions",
        f"    (0, 1)  {digest(FACTORS)[:12]}  100 of 32768 bytes in each of 8 regions",
    ]


def test_what_would_help_is_said() -> None:
    with listener({(0, 0): STOCK}) as there:
        text = run(probe, there.address, "--search-seconds", 0).stdout

    assert "stock, factors unknown" in text
    assert "--factor model=NAME" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "has no port"),
        (["a" * 64 + ":5600"], "has a host name of which a part is empty or too long"),
        (["127.0.0.1:99999"], "no number from 1 to 65535"),
        (["127.0.0.1:{port}"], "refused the connection"),
        (["127.0.0.1:{port}", "--factor", "modelname=x"], "there is no factor 'modelname'; there are vllm_version, "),
        (["127.0.0.1:{port}", "--factor", "model"], "'model' is not NAME=VALUE"),
    ],
)
def test_errors_are_one_line(arguments: list[str], said: str) -> None:
    assert said in refused(run(probe, *(argument.format(port=free_port()) for argument in arguments)))


@pytest.mark.parametrize(
    "options", [["--timeout", "0"], ["--timeout", "x"], ["--timeout", "-1"], ["--wait", "-1"], ["--tp", "0"], []]
)
def test_bad_options_are_refused(options: list[str]) -> None:
    result = run(probe, *(["127.0.0.1:5600", *options] if options else []))

    assert result.exit_code == 2
    assert result.stdout == ""


def test_a_bug_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends with one line, and not with the exit code of ranks that disagree."""

    def fail(*args: object) -> None:
        raise KeyError("oh\nno")

    monkeypatch.setattr("nixl_telemetry.cli.probe.ask", fail)

    assert refused(run(probe, "127.0.0.1:5600")) == (
        r"error: KeyError: 'oh\nno'; this is a bug in nixl-telemetry, and worth a report"
    )


def test_waiting_covers_the_whole_probe() -> None:
    with tcp_server(lambda connection: connection.close()) as address:
        assert "without a word" in refused(run(probe, address, "--wait", "0.7", "--timeout", "1"))


def test_the_output_is_the_input_of_others(tmp_path: Path) -> None:
    with listener({(0, 0): told()}) as there:
        text = run(probe, there.address, "--json").stdout

    assert json.loads(text) == json.loads(Instance.from_json(text.encode()).to_json())
