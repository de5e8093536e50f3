# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""``nixl-telemetry explain``: which factor is behind two digests in a log."""

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from nixl_telemetry.cli import options
from nixl_telemetry.cli.instances import STDIN, Patience, load_likes
from nixl_telemetry.cli.knowledge import FactorError, Knowledge, parse_factors
from nixl_telemetry.cli.output import CommandError, Exit, Printer, failing, print_json, short
from nixl_telemetry.cli.pairs import told
from nixl_telemetry.compat.factors import Difference, differences, digest
from nixl_telemetry.compat.instance import Instance, Origin
from nixl_telemetry.signals import semconv

FORMAT: Final = "nixl_telemetry.explanation/1"
_TEXT_LIMIT: Final = 64 * 2**20
_PAIRS_LIMIT: Final = 32
_SIDES: Final = ("local", "remote")

# Colours, and the frame of a traceback.
_ORNAMENTS: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[│┃]")
# What is put in front of each line: by docker compose and kubectl --prefix, and by vLLM for each of its processes.
_PREFIXES: Final = re.compile(
    r"^[ \t]*(?:[\w./\[\]-]+[ \t]*\|[ \t]?|\[[\w./-]+\][ \t])?(?:\([^()\n]*pid=\d+\)[ \t]?)?", re.MULTILINE
)
_DIGEST: Final = r"((?:[0-9a-f]\s*){63}[0-9a-f])(?![0-9a-f])"
_SHORTENED: Final = re.compile(r"(?:Local|Remote)\W+[0-9a-f]{1,63}(?:\.\.|…)|(?:Local|Remote):\s*(?:\.\.|…)")
_MESSAGES: Final = (
    # vLLM's, which the terminal or a log shipper may have wrapped anywhere.
    re.compile(rf"L\s*o\s*c\s*a\s*l\s*:\s*{_DIGEST}\s*,\s*R\s*e\s*m\s*o\s*t\s*e\s*:\s*{_DIGEST}"),
    # Ours, as logfmt and as JSON.
    re.compile(
        r'nixl\.compat\.hash"?[=:]\s*"?([0-9a-f]{64})\b.*?nixl\.remote\.compat\.hash"?[=:]\s*"?([0-9a-f]{64})\b'
    ),
)
# A field of the line in which an instance tells its hash and factors, as logfmt and as JSON.
_FIELD: Final = re.compile(
    r'\bnixl\.compat\.(?:factor\.)?(\w+)(?:="?|":\s*"?)(?:(?<=")((?:[^"\\]|\\.)*)"|(?<==)([^\s"\\]*)|([\w.+-]+))'
)
_HELP: Final = (
    "no known values give {missing} digest, and {outcome}; --like an instance whose factors are known (HOST:PORT or a "
    "file) helps, or --factor NAME=VALUE for one side: model, attn_backend_name, num_kv_heads, head_size and "
    "num_hidden_layers usually have to be given"
)


class Mismatch(NamedTuple):
    """Two digests that a handshake compared."""

    local: str
    remote: str


class Finding(NamedTuple):
    """What is known of the two sides of a mismatch."""

    local: Instance
    remote: Instance

    @property
    def is_same(self) -> bool:
        """Whether there is nothing to explain."""
        return self.local.compat_hash == self.remote.compat_hash

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The factors that differ; none where they are not known."""
        if self.local.factors is None or self.remote.factors is None:
            return ()
        return differences(self.local.factors, self.remote.factors)

    def as_json(self) -> dict[str, Any]:
        """All of it, for a program."""
        return {
            "local": self.local.compat_hash,
            "remote": self.remote.compat_hash,
            "differences": [
                {"factor": factor, "local": local, "remote": remote} for factor, local, remote in self.differences
            ],
            "known": {side: instance.origin for side, instance in zip(_SIDES, self, strict=True)},
            "factors": {side: instance.factors for side, instance in zip(_SIDES, self, strict=True)},
        }


def explain(
    text: Annotated[
        str | None,
        typer.Argument(metavar="TEXT", help="What vLLM logged, or - for standard input.", show_default=False),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A log in which to look for it.")] = None,
    local: Annotated[str | None, typer.Option(metavar="HEX", help="The digest of the side that complains.")] = None,
    remote: Annotated[str | None, typer.Option(metavar="HEX", help="The digest of its peer.")] = None,
    like: options.Likes = None,
    factor: options.Factors = None,
    timeout: options.Timeout = 5,
    search_seconds: options.SearchSeconds = 5,
    as_json: options.AsJson = False,
) -> None:
    """Say which factor differs between two sides of which only the digests are known.

    Finds "NIXL compatibility hash mismatch. Local: ..., Remote: ..."
    anywhere in a text, and what an instance with the suite logged of its
    factors.

    Exits with 0 if the digests are equal, with 1 if it is known what
    differs, and with 2 if it is not, if only of one of several pairs.
    """
    with failing():
        given = parse_factors(factor or [])
        mismatches, logged = _mismatches(text, file, local, remote)
        likes = [*load_likes(like or [], Patience(timeout)), *logged]
        knowledge = Knowledge(search_seconds, likes, given)
        findings = _findings(mismatches, likes, knowledge)
        if as_json:
            print_json({"format": FORMAT, "explanations": [finding.as_json() for finding in findings]})
        else:
            for finding in findings:
                _show(Printer(), finding, knowledge.outcome)
    if not all(finding.is_same or finding.differences for finding in findings):
        raise typer.Exit(Exit.UNKNOWN)
    if not all(finding.is_same for finding in findings):
        raise typer.Exit(Exit.INCOMPATIBLE)


def _mismatches(
    text: str | None, file: Path | None, local: str | None, remote: str | None
) -> tuple[list[Mismatch], list[Instance]]:
    """The digests to explain, and the instances that told their factors beside them.

    Raises:
        CommandError: There are none, or they are given in two ways.
    """
    if local is not None or remote is not None:
        if local is None or remote is None or text is not None or file is not None:
            raise CommandError("--local and --remote go together, and instead of a text")
        for name, value in zip(_SIDES, (local, remote), strict=True):
            if not re.fullmatch("[0-9a-f]{64}", value):
                raise CommandError(f"--{name} {value!r} is no digest: 64 hexadecimal digits in lower case")
        return [Mismatch(local, remote)], []
    if text is not None and file is not None:
        raise CommandError("a text and --file are two sources; give one")
    content = _text(text, file)
    found = find(content)
    if not found:
        raise CommandError(_nothing(content, text))
    different = [mismatch for mismatch in found if mismatch.local != mismatch.remote]
    return (different or found)[:_PAIRS_LIMIT], told_in(content)


def _nothing(content: str, text: str | None) -> str:
    """Why there is no mismatch in a text."""
    with contextlib.suppress(OSError, ValueError):  # too long for a name, or no name at all
        if text and Path(text).is_file():
            return f"{text} is a file: use --file {text}"
    advice = "paste the whole line, with both digests"
    if _SHORTENED.search(content):
        advice = "the digests are shortened; all 64 hex digits of both are needed"
    return (
        f'there is no "NIXL compatibility hash mismatch. Local: ..., Remote: ..." in the text; {advice}, or give them '
        "with --local and --remote"
    )


def _text(text: str | None, file: Path | None) -> str:
    if file is not None:
        try:
            with file.open("rb") as stream:
                return stream.read(_TEXT_LIMIT).decode(errors="replace")
        except OSError as error:
            raise CommandError(f"{file} cannot be read: {error.strerror}") from None
    if text in {None, STDIN}:
        if text is None and sys.stdin.isatty():
            raise CommandError("there is no text to explain; give it as an argument, by --file or on standard input")
        return sys.stdin.buffer.read(_TEXT_LIMIT).decode(errors="replace")
    return text or ""


def find(text: str) -> list[Mismatch]:
    """Every mismatch in a text, each once, in order."""
    clean = _PREFIXES.sub("", _ORNAMENTS.sub("", text).replace("\\n", "\n"))
    found = sorted((match.start(), match.groups()) for message in _MESSAGES for match in message.finditer(clean))
    pairs = (Mismatch(*("".join(digest.split()) for digest in digests)) for _, digests in found)
    return list(dict.fromkeys(pairs))


def told_in(text: str) -> list[Instance]:
    """The instances that logged their factors in a text; only factors that give the digest beside them."""
    told: dict[str, Instance] = {}
    for line in _ORNAMENTS.sub("", text).splitlines():
        if semconv.EventName.COMPAT_HASH_COMPUTED in line:
            fields = {name: _unquoted(quoted) or bare or number for name, quoted, bare, number in _FIELD.findall(line)}
            compat_hash = fields.pop("hash", "")
            fields.pop("enforced", None)
            with contextlib.suppress(FactorError):
                factors = parse_factors([f"{name}={value}" for name, value in fields.items()])
                if digest(factors) == compat_hash:
                    told[compat_hash] = Instance(
                        name=compat_hash, compat_hash=compat_hash, origin=Origin.EXCHANGED, factors=factors
                    )
    return list(told.values())


def _unquoted(value: str) -> str:
    try:
        return str(json.loads(f'"{value}"'))
    except ValueError:
        return value


def _findings(mismatches: Sequence[Mismatch], likes: Sequence[Instance], knowledge: Knowledge) -> list[Finding]:
    known = {like.compat_hash: like for like in likes if like.factors is not None}
    digests = list(dict.fromkeys(digest for mismatch in mismatches for digest in mismatch))
    sides = [known.get(digest) or Instance(name=digest, compat_hash=digest) for digest in digests]
    completed = dict(zip(digests, knowledge.complete(sides), strict=True))
    return [Finding(completed[local], completed[remote]) for local, remote in mismatches]


def _show(out: Printer, finding: Finding, outcome: str) -> None:
    out.line(
        f"local {short(finding.local.compat_hash)}, remote {short(finding.remote.compat_hash)}  ",
        *_verdict(finding, outcome),
    )


def _verdict(finding: Finding, outcome: str) -> tuple[str | tuple[str, str], ...]:
    if finding.is_same:
        return (("compatible", "green"), ": the digests are equal")
    if finding.differences:
        text = told(finding.differences, ("local", "remote"), (finding.local, finding.remote))
        return (("incompatible", "bold red"), f": {text}")
    known = [side for side, instance in zip(_SIDES, finding, strict=True) if instance.factors is not None]
    missing = {0: "either", 1: "the remote" if known == ["local"] else "the local"}[len(known)]
    return (("not explained", "yellow"), f": {_HELP.format(missing=missing, outcome=outcome)}")
