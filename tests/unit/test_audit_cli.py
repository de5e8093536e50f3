# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""`nixl-telemetry audit`: what it prints, how it exits, and what hostile logs cannot do to it."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner, Result

from nixl_telemetry.audit.chain import Entry, Record, Value
from nixl_telemetry.cli import audit
from tests.support.audit_logs import KEY, new_log, write_log

ROOT: Final = Path(__file__).resolve().parents[2]
NOON: Final = int(datetime(2024, 1, 31, 12, tzinfo=UTC).timestamp()) * 10**9
SECOND: Final = 10**9


def run(*arguments: object) -> Result:
    return CliRunner().invoke(audit.app, [str(argument) for argument in arguments])


def handshake(decision: str, host: str, at: int = 0) -> Entry:
    attributes: dict[str, Value] = {
        "decision": decision,
        "server.address": host,
        "server.port": 5600,
        "nixl.remote.engine.id": f"e-{host}",
    }
    return Entry.of(NOON + at * SECOND, Record("handshake", attributes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two processes whose records interleave."""
    folder = tmp_path / "audit"
    for name, entries in {
        "one": [handshake("accepted", "alpha", 0), handshake("rejected", "beta", 2)],
        "two": [
            Entry.of(NOON + SECOND, Record("transfer", {"server.address": "gamma", "server.port": 1, "blocks": 7}))
        ],
    }.items():
        log = new_log(folder, engine_id=name)
        log.write(entries)
        log.close()
    return folder


# ---------------------------------------------------------------------------------------------------------------- Show


def test_show_prints_in_the_order_of_time(folder: Path) -> None:
    """Over all processes, one line each, with everything but the links."""
    result = run("show", folder, "--event", "handshake", "--event", "transfer")

    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert [line.split("  ")[1].split(" ")[0] for line in lines] == ["handshake", "transfer", "handshake"]
    assert lines[0].startswith("2024-01-31T12:00:00.000000Z  handshake decision=accepted server.address=alpha")
    assert "#2 nixl-audit-one-worker-0-" in lines[0]
    assert "server.address=gamma server.port=1 blocks=7" in lines[1]
    assert "hash" not in result.output


def test_show_quotes_what_is_no_word(tmp_path: Path) -> None:
    """So that no value passes for another key."""
    log = new_log(tmp_path)
    log.write([Entry.of(NOON, Record("handshake", {"a": "b c=d", "e": 'f"', "g": None, "h": {"i": [1]}}))])
    log.close()

    output = run("show", tmp_path, "--event", "handshake").output
    assert r"""handshake a="b c=d" e="f\"" g=null h={"i": [1]}  #2""" in output


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (["--peer", "beta"], ["rejected"]),
        (["--peer", "alpha:5600"], ["accepted"]),
        (["--peer", "e-alpha"], ["accepted"]),
        (["--peer", "gamma"], [None]),
        (["--peer", "nobody"], []),
        (["--event", "handshake"], ["accepted", "rejected"]),
        (["--event", "transfer", "--since", "2024-01-31T12:00:01Z"], [None]),
        (["--event", "transfer", "--since", "2024-01-31T13:00:02+01:00"], []),
        (["--event", "handshake", "--since", "2024-01-31T12:00:02"], ["rejected"]),
    ],
)
def test_show_filters(folder: Path, filters: list[str], expected: list[str | None]) -> None:
    """By event, by what is known of the peer, and by time; a time without a zone is UTC."""
    result = run("show", folder, "--json", *filters)

    assert [json.loads(line).get("decision") for line in result.output.splitlines()] == expected


def test_show_since_a_while_ago(folder: Path) -> None:
    """Only what was written just now: the last record of each."""
    result = run("show", folder, "--json", "--since", "15m")

    assert [json.loads(line)["event"] for line in result.output.splitlines()] == ["audit.closed"] * 2


def test_show_says_what_it_cannot_read(folder: Path) -> None:
    """It goes on, and sends to `verify`."""
    path = min(folder.glob("*one*.jsonl"))
    path.write_bytes(path.read_bytes() + b"graffiti \x1b[31m\n")

    result = run("show", folder)
    assert result.exit_code == 0
    assert f"{path}:5 is no record: graffiti \\u001b[31m\\n" in result.output
    assert "1 line is no record: `nixl-telemetry audit verify` says why" in result.output
    assert "rejected" in result.output


# -------------------------------------------------------------------------------------------------------------- Verify


def test_verify_an_untouched_log(folder: Path) -> None:
    """Exit status 0, and what was looked at."""
    result = run("verify", folder, "--records", 7)

    assert result.exit_code == 0
    assert result.output.splitlines()[-1] == "2 streams, 7 records: nothing was changed, and nothing is missing."
    assert "1 file, 4 records, " in result.output
    assert "no key, closed" in result.output


def test_verify_a_changed_log(folder: Path) -> None:
    """Exit status 1, the place, what is wrong and what to do."""
    path = min(folder.glob("*one*.jsonl"))
    path.write_bytes(path.read_bytes().replace(b"beta", b"zeta"))

    result = run("verify", path)
    assert result.exit_code == 1
    assert f"  error changed  {path.name}:3  Record 3 is not as it was written. Compare with a copy" in result.output
    assert result.output.splitlines()[-1] == "1 stream, 4 records: 1 problem."


def test_verify_notes_are_no_failure(tmp_path: Path) -> None:
    """A process that was killed."""
    write_log(tmp_path, 3, close=False)

    result = run("verify", tmp_path)
    assert result.exit_code == 0
    assert "note  not_closed" in result.output


def test_verify_as_json(folder: Path) -> None:
    """All that is known, for a machine."""
    path = min(folder.glob("*two*.jsonl"))
    path.write_bytes(b"")

    result = run("verify", folder, "--json")
    assert result.exit_code == 1
    report = json.loads(result.output)
    assert report["ok"] is False
    assert [stream["records"] for stream in report["streams"]] == [4, 0]
    (finding,) = report["findings"]
    assert (finding["kind"], finding["file"], finding["seq"], finding["records"]) == ("cut_off", str(path), 1, 3)
    assert finding["note"] is False
    assert finding["advice"]


@pytest.mark.parametrize(
    ("log_key", "given", "status", "says"),
    [
        (KEY, KEY, 0, "nothing was changed"),
        (KEY, None, 2, "key_missing"),
        (KEY, KEY[::-1], 1, "key_wrong"),
        (None, KEY, 1, "key_unused"),
    ],
)
def test_verify_with_keys(tmp_path: Path, log_key: bytes | None, given: bytes | None, status: int, says: str) -> None:
    """A log whose key was not given is not verified, which is not the same as changed."""
    write_log(tmp_path / "log", 3, key=log_key)
    key_file = tmp_path / "key"
    key_file.write_bytes(given or b"")

    result = run("verify", tmp_path / "log", *(["--key-file", key_file] if given else []))
    assert result.exit_code == status
    assert says in result.output


@pytest.mark.parametrize("counted", [8, 6])
def test_verify_against_the_count(folder: Path, counted: int) -> None:
    """Fewer records than counted fail; more are a note."""
    result = run("verify", folder, "--records", counted)

    assert result.exit_code == (1 if counted > 7 else 0)
    assert f"There are 7 records, and {counted} were counted on /metrics." in result.output


def test_many_findings_are_cut_short_for_a_person(tmp_path: Path) -> None:
    """A machine gets all of them."""
    stream = write_log(tmp_path, 300)
    for path in stream.files.values():
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(line if index % 2 else b"x" + line for index, line in enumerate(lines)))

    found = json.loads(run("verify", tmp_path, "--json").output)["findings"]
    assert len(found) > 100
    assert f"  and {len(found) - 50} more; --json has all" in run("verify", tmp_path).output


# -------------------------------------------------------------------------------------------------------------- Errors


@pytest.mark.parametrize("command", ["show", "verify"])
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gone", "gone does not exist."),
        ("empty", "its files are called nixl-audit-<engine id>-<process>-<pid>-<start>.000001.jsonl. "),
        ("other.jsonl", "is not named like an audit log"),
    ],
)
def test_paths_that_hold_no_log(tmp_path: Path, command: str, name: str, says: str) -> None:
    """Exit status 2, and a sentence on the error stream."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.jsonl").write_text("{}")

    result = run(command, tmp_path / name)
    assert result.exit_code == 2
    assert str(tmp_path / name) in result.stderr
    assert says in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verify", "--key-file", "short"], "short has 3 bytes; a key has 16 to 4,096"),
        (["verify", "--key-file", "gone"], "gone cannot be read: No such file or directory."),
        (["show", "--since", "yesterday"], "--since is 'yesterday': give a time as"),
        (["show", "--since", "1e9d"], "--since is '1e9d'"),
    ],
)
def test_options_that_cannot_be_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    """The same."""
    monkeypatch.chdir(folder.parent)
    Path("short").write_text("abc")

    result = run(*arguments, folder)
    assert result.exit_code == 2
    assert says in result.stderr


# ------------------------------------------------------------------------------------------------------------- Hostile


@pytest.mark.parametrize("command", [["show"], ["show", "--json"], ["verify"], ["verify", "--json"]], ids=" ".join)
def test_nothing_hostile_reaches_the_terminal(tmp_path: Path, command: list[str]) -> None:
    """Neither as a record, nor beside it, nor as a file name."""
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e\u2066\ud800[bold red]x[/]"
    log = new_log(tmp_path, max_file_bytes=1 << 20)
    log.write(
        [Entry.of(NOON, Record("handshake", {"peer": evil, evil: {evil: [evil]}, "decision": evil, "process": 1}))]
    )
    # Valid to the last digit, and not of our encoder's making.
    raw = Entry("2024-01-31T12:00:00.000000Z", "transfer", ',"a":"' + "\\u001b[2J" * 10 + '"')
    log.write([raw, Entry(raw.time, "transfer", ',"deep":' + "[" * 400 + "]" * 400)])
    log.write([Entry(raw.time, "transfer", f',"deep":{"[" * depth}{"]" * depth}') for depth in range(700, 1000, 7)])
    log.close()
    (path,) = tmp_path.glob("*.jsonl")
    for junk in (evil.encode("utf-8", "surrogatepass"), b"\0" * 200_000, b"\xff\x9b2J", b"[" * 100_000):
        path.write_bytes(path.read_bytes() + junk + b"\n")
    (tmp_path / "nixl-audit-\x1b[2J\n\u202e.000001.jsonl").write_bytes(b"x\n")

    result = run(*command, tmp_path)

    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert result.exit_code == (1 if command[0] == "verify" else 0)
    assert set(result.output) <= {*map(chr, range(32, 127)), "\n"}
    assert "[bold red]" in result.output or command[0] == "verify"


def test_whoever_reads_may_have_seen_enough(tmp_path: Path) -> None:
    """`| head`: no complaint."""
    write_log(tmp_path, 2000)
    code = "import sys; from nixl_telemetry.cli.audit import app; app(['show', sys.argv[1]])"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_commands_work_without_vllm_and_opentelemetry() -> None:
    """On a laptop, or beside the logs: neither is imported."""
    code = "import sys, nixl_telemetry.cli.audit; print(*{'vllm', 'torch', 'nixl', 'opentelemetry'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    assert out.split() == []


def test_many_streams_are_shown_at_once(tmp_path: Path) -> None:
    """Each holds a file open: a shell allows 1,024 by default."""
    for number in range(8):
        write_log(tmp_path, 1, engine_id=f"e{number}")
    code = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (8, 256))\n"
        "from nixl_telemetry.cli.audit import app; app(['show', sys.argv[1]])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, check=False, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 24
