# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``explain``: digests out of logs, and what is behind them."""

import logging
import textwrap
from pathlib import Path
from typing import Any, Literal

import pytest

from nixl_telemetry.cli.explain import FORMAT, Mismatch, explain, find, told_in
from nixl_telemetry.compat.factors import digest
from nixl_telemetry.compat.instance import Instance, Origin
from nixl_telemetry.operations.compatibility import factor_attribute
from nixl_telemetry.signals.attributes import AttributeValue
from nixl_telemetry.signals.description import LogLine
from nixl_telemetry.signals.logs import LogWriter
from nixl_telemetry.signals.semconv import EventName
from tests.support.commands import output, refused, run
from tests.support.peers import free_port, listener, payload
from tests.support.statements import FACTORS, exchanged, factors, factors_of_release, statement

PULL, PUSH = digest(FACTORS), digest(factors(transfer_mode="push"))
BY_HAND = (
    *("--factor", "model=example/model", "--factor", "vllm_version=0.32.0"),
    *("--factor", "attn_backend_name=CPU_ATTN", "--search-seconds", 60),
)


def message(local: str = PULL, remote: str = PUSH) -> str:
    """As vLLM writes it."""
    return (
        f"RuntimeError: NIXL compatibility hash mismatch. Local: {local}, Remote: {remote}. Prefill and decode "
        "instances have incompatible configurations. This may be due to: different vLLM versions, models, dtypes, KV "
        "cache layouts, attention backends, etc."
    )


def saved(folder: Path, known: dict[str, Any] | None = None) -> Path:
    """A file of an instance whose factors are known."""
    known = FACTORS if known is None else known
    path = folder / "saved.json"
    instance = Instance(name="saved", compat_hash=digest(known), origin=Origin.EXCHANGED, factors=known)
    path.write_text(instance.to_json())
    return path


# ------------------------------------------------------------------------------------------------------------- In texts


@pytest.mark.parametrize(
    "text",
    [
        message(),
        f"(Worker_TP0 pid=812) ERROR 01-31 12:00:00 [base_worker.py:1084] {message()}",
        f"decode-1  | (EngineCore pid=7) ERROR 01-31 12:00:00 [x.py:1] {message()}\ndecode-1  | next",
        f"[pod/decode-0/vllm] 2026-01-31T12:00:00.1Z {message()}",
        "\x1b[1;31m" + message().replace(PULL, f"\x1b[0m{PULL}") + "\x1b[0m",
        f'{{"log":"Traceback\\n{message()}\\n","stream":"stderr"}}',
        "\n".join(textwrap.wrap(message(), 80)),
        "\n".join(textwrap.wrap(message(), 47)),
        "\r\n".join(textwrap.wrap(message(), 80)),
        "\n".join(f"(Worker pid=812) {line}" for line in textwrap.wrap(message(), 60)),
        "\n".join(f"vllm-decode-1 | {line}" for line in textwrap.wrap(message(), 60)),
        "\n".join(f"│ {line:<60} │" for line in textwrap.wrap(message(), 60)),
        f"event=nixl.handshake nixl.compat.hash={PULL} nixl.peer=x nixl.remote.compat.hash={PUSH} error.type=x",
        f'{{"event": "nixl.handshake", "nixl.compat.hash": "{PULL}", "nixl.remote.compat.hash": "{PUSH}"}}',
        f'decode 10.0.0.9:5600 is incompatible: transfer_mode is "pull" there (exchanged)\n{message()}',
    ],
)
def test_a_mismatch_is_found(text: str) -> None:
    """With colours and prefixes, wrapped, escaped, framed, and in our own log lines."""
    assert find(text) == [Mismatch(PULL, PUSH)]


def test_each_mismatch_is_found_once_in_order() -> None:
    text = "\n".join([message(), message(PUSH, PULL), "noise", message()])

    assert find(text) == [Mismatch(PULL, PUSH), Mismatch(PUSH, PULL)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "NIXL compatibility check passed (hash: " + PULL + ")",
        message(PULL[:-1]),
        message(PULL + "a"),
        message(PULL.upper()),
        message().replace("Remote", "Other"),
        "Local: " + "a " * 100_000,
    ],
)
def test_what_is_no_mismatch(text: str) -> None:
    assert find(text) == []


# ------------------------------------------------------------------------------------------------------------ Explained


def test_a_saved_instance_explains_its_peer(tmp_path: Path) -> None:
    result = run(explain, message(), "--like", saved(tmp_path))

    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        (
            f"local {PULL[:12]}, remote {PUSH[:12]}  incompatible: "
            'transfer_mode is "pull" on local and "push" on remote (local exchanged, remote recovered)'
        )
    ]


def test_a_running_instance_explains_its_peer() -> None:
    compat_hash, encoded = exchanged(statement())
    with listener({(0, 0): payload(compat_hash, {}, encoded)}) as like:
        found = output(run(explain, message(PUSH, PULL), "--like", like.address, "--json"), 1)

    (one,) = found["explanations"]
    assert one["differences"] == [{"factor": "transfer_mode", "local": "push", "remote": "pull"}]
    assert one["known"] == {"local": "recovered", "remote": "exchanged"}


def test_an_instance_that_is_neither_side_helps(tmp_path: Path) -> None:
    """Of the same fleet, but another release and half as deep."""
    like = saved(tmp_path, factors_of_release("0.31.0", num_hidden_layers=2))

    assert run(explain, message(), "--like", like, "--search-seconds", 60).exit_code == 1


def test_two_digests_and_json(tmp_path: Path) -> None:
    found = output(run(explain, "--local", PULL, "--remote", PUSH, "--like", saved(tmp_path), "--json"), 1)

    assert found == {
        "format": FORMAT,
        "explanations": [
            {
                "local": PULL,
                "remote": PUSH,
                "differences": [{"factor": "transfer_mode", "local": "pull", "remote": "push"}],
                "known": {"local": "exchanged", "remote": "recovered"},
                "factors": {"local": FACTORS, "remote": factors(transfer_mode="push")},
            }
        ],
    }


def test_factors_given_by_hand_are_enough() -> None:
    result = run(explain, message(), *BY_HAND)

    assert result.exit_code == 1
    assert 'transfer_mode is "pull" on local and "push" on remote (recovered)' in result.stdout


def test_equal_digests_need_no_explanation() -> None:
    result = run(explain, "--local", PULL, "--remote", PULL, "--search-seconds", 0)

    assert result.exit_code == 0
    assert "the digests are equal" in result.stdout


def test_what_is_not_found_is_said(tmp_path: Path) -> None:
    """And which of the two is missing."""
    strange = digest(factors(model="nobody/knows"))

    nothing = run(explain, message(), "--search-seconds", 0)
    half = run(explain, message(PULL, strange), "--like", saved(tmp_path), "--search-seconds", 0.2)

    assert (nothing.exit_code, half.exit_code) == (2, 2)
    assert "no known values give either digest, and there was nothing to start a search from; --like" in nothing.stdout
    assert "the remote digest, and the 0.2 s of search ran out (more: --search-seconds); --like" in half.stdout


def test_a_model_that_is_said_explains_a_model_that_differs(tmp_path: Path) -> None:
    other = digest(factors(model="nobody/knows", transfer_mode="push"))

    found = output(
        run(explain, message(PULL, other), "--like", saved(tmp_path), "--factor", "model=nobody/knows", "--json"), 1
    )

    assert [one["factor"] for one in found["explanations"][0]["differences"]] == ["transfer_mode", "model"]


@pytest.mark.parametrize("style", ["logfmt", "json"])
def test_what_an_instance_logged_of_itself_explains_its_peer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, style: Literal["logfmt", "json"]
) -> None:
    known = factors(model='a "model"/x y', transfer_mode="pull")
    attributes: dict[str, AttributeValue] = {"nixl.compat.hash": digest(known), "nixl.compat.enforced": True}
    attributes |= {f"nixl.compat.factor.{name}": factor_attribute(value) for name, value in known.items()}
    with caplog.at_level(logging.INFO):
        LogWriter({}, style).write(LogLine(EventName.COMPAT_HASH_COMPUTED, logging.INFO, attributes), None)
    log = tmp_path / "decode.log"
    equal, other = message(PULL, PULL), digest({**known, "transfer_mode": "push"})
    log.write_text(f"(Worker pid=8) INFO {caplog.messages[-1]}\n{equal}\n{message(digest(known), other)}\n")

    (one,) = output(run(explain, "--file", log, "--json"), 1)["explanations"]
    assert one["known"] == {"local": "exchanged", "remote": "recovered"}
    assert [difference["factor"] for difference in one["differences"]] == ["transfer_mode"]


def test_logged_factors_have_to_give_the_hash() -> None:
    line = f"event=nixl.compat_hash.computed nixl.compat.hash={PULL} nixl.compat.factor."

    assert told_in(f"{line}model=x\n{line}unknown=x\n{line}num_kv_heads=x") == []


# --------------------------------------------------------------------------------------------------------------- Inputs


def test_a_file_is_no_text(tmp_path: Path) -> None:
    log = saved(tmp_path)

    assert refused(run(explain, log)) == f"error: {log} is a file: use --file {log}"


def test_a_text_from_a_file_or_standard_input(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"\xff\xfe noise\n" + message().encode())
    like = saved(tmp_path)

    for arguments, stdin in ((["--file", log], None), (["-"], message()), ([], message())):
        assert run(explain, *arguments, "--like", like, stdin=stdin).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing in here"], "paste the whole line, with both digests"),
        (["x" * 10_000], "paste the whole line, with both digests"),
        ([message(PULL[:12] + "...", PUSH[:12] + "...")], "the digests are shortened; all 64 hex digits"),
        (["--local", PULL], "go together"),
        (["--local", PULL, "--remote", PUSH, "text"], "instead of a text"),
        (["--local", PULL, "--remote", "abc"], "--remote 'abc' is no digest"),
        (["--local", PULL.upper(), "--remote", PUSH], "in lower case"),
        (["text", "--file", "log"], "two sources"),
        (["--file", "no/such/log"], "no/such/log cannot be read"),
        ([message(), "--like", "no/such.json"], "there is no such file"),
        ([message(), "--like", "127.0.0.1:{port}"], "refused the connection"),
        ([message(), "--factor", "dtyp=x"], "there is no factor 'dtyp'"),
        ([message(), "--factor", "nixl_connector_version=[14]"], "vLLM hashes a number there"),
    ],
)
def test_errors_are_one_line(arguments: list[str], said: str) -> None:
    assert said in refused(run(explain, *(argument.replace("{port}", str(free_port())) for argument in arguments)))
