# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Waterfalls as one HTML page that needs nothing else: no script, and nothing from the network.

Names, ids and messages come from anybody: all of them are escaped, and the page's policy forbids what they could load.
"""

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from nixl_telemetry.audit.chain import timestamp
from nixl_telemetry.cli.trace.reading import Attributes, Span
from nixl_telemetry.cli.trace.waterfall import CLOCKS, Bar, Figure, Row, Waterfall, about, counted, milliseconds
from nixl_telemetry.signals import semconv
from nixl_telemetry.signals.text import printable

BEGIN: Final = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">\n"""
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    "<title>NIXL traces</title>\n"
)
"""How a page begins: what tells one from other files."""

_DEEPEST: Final = 16
_BLOCK_COLUMNS: Final = (
    ("group", semconv.BLOCK_GROUP),
    ("region", semconv.BLOCK_REGION),
    ("local id", semconv.BLOCK_LOCAL_ID),
    ("remote id", semconv.BLOCK_REMOTE_ID),
    ("count", semconv.BLOCK_COUNT),
    ("bytes", semconv.BLOCK_SIZE),
    ("error", semconv.ERROR_TYPE),
)
_STYLE: Final = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --soft: #687076; --line: #e3e6e8; --lane: #f4f5f6;
  --read: #0b7fab; --write: #a23b9c; --handshake: #b98900; --lease: #3f63c8; --receive: #2b8a3e; --block: #63b3cf;
  --other: #8b949e; --failed: #d1242f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6e8; --paper: #15181b; --soft: #9aa4ac; --line: #2c3237;
  --lane: #1d2125; --read: #3fb5de; --write: #d67ad1; --handshake: #e0b33c; --lease: #7f9df2; --receive: #57c26d;
  --block: #2f7f9c; --other: #768390; --failed: #ff6b6b; } }
body { margin: 2rem auto; max-width: 82rem; padding: 0 1rem; color: var(--ink); background: var(--paper);
  font: 14px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 2.2rem 0 .3rem; overflow-wrap: anywhere; }
p, ul { margin: .2rem 0; color: var(--soft); } ul { padding-left: 1.2rem; }
code, td, .took { font-variant-numeric: tabular-nums; } code { font-size: .92em; overflow-wrap: anywhere; }
.rows { border: 1px solid var(--line); border-radius: 6px; margin-top: .6rem; overflow: hidden; }
.row { display: grid; grid-template-columns: minmax(12rem, 26%) 8rem 1fr 7rem; gap: .8rem; padding: .22rem .7rem;
  align-items: center; }
.rows > * + * { border-top: 1px solid var(--line); }
summary { cursor: pointer; list-style: none; } summary:hover { background: var(--lane); }
summary:focus-visible { outline: 2px solid var(--read); outline-offset: -2px; }
.name, .place { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; } .place { color: var(--soft); }
.whole { grid-column: 1 / -1; }
.took { text-align: right; } .lane { position: relative; height: .95rem; background: var(--lane); border-radius: 3px; }
.bar { position: absolute; top: 0; bottom: 0; min-width: 3px; border-radius: 3px; background: var(--other); }
.read { background: var(--read); } .write { background: var(--write); } .handshake { background: var(--handshake); }
.lease { background: var(--lease); } .receive { background: var(--receive); } .block { background: var(--block); }
.bar.failed { background: repeating-linear-gradient(45deg, var(--failed) 0 6px, transparent 6px 9px) var(--lane);
  outline: 1px solid var(--failed); }
.name.failed, .note.failed { color: var(--failed); font-weight: 600; }
.note { display: block; padding: 0 .7rem .25rem 1.6rem; color: var(--soft); overflow-wrap: anywhere; }
.more { padding: .3rem .7rem .8rem 1.6rem; overflow-x: auto; max-height: 32rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .1rem .9rem .1rem 0; vertical-align: top;
  overflow-wrap: anywhere; } th { color: var(--soft); font-weight: 500; }
@media (max-width: 50rem) { .row { grid-template-columns: 1fr 5rem 6rem; gap: .2rem .8rem; }
  .lane { grid-column: 1 / -1; grid-row: 2; } }
"""


def page(figures: Sequence[Figure], remarks: Sequence[str]) -> Iterator[str]:
    """The page, in pieces.

    Args:
        figures: What to draw, from top to bottom.
        remarks: What else a reader has to know, a paragraph each.
    """
    yield f"{BEGIN}<style>{_STYLE}</style>\n</head>\n<body>\n<h1>NIXL traces</h1>\n"
    if any(figure.drawn.processes > 1 for figure in figures):
        remarks = [CLOCKS, *remarks]
    yield from (f"<p>{_text(remark)}</p>\n" for remark in remarks)
    for title, drawn in figures:
        yield from _section(title, drawn)
    yield "</body>\n</html>\n"


def _section(title: str, drawn: Waterfall) -> Iterator[str]:
    yield f"<section>\n<h2>{_text(title)} <code>{_text(drawn.trace_id)}</code></h2>\n"
    yield f"<p>{_text(', '.join(about(drawn)))}; the axis is {milliseconds(drawn.duration_ns)} long</p>\n<ul>\n"
    for instance in drawn.instances:
        engine = f"engine <code>{_text(instance.engine_id)}</code>" if instance.engine_id else ""
        said = ", ".join(filter(None, [engine, _text(instance.where)]))
        yield f"<li><b>{_text(instance.label)}</b> {said}</li>\n"
    yield '</ul>\n<div class="rows">\n'
    for row in drawn.rows:
        yield from _row(row, drawn.start_ns)
    yield "</div>\n</section>\n"


def _row(row: Row, axis_ns: int) -> Iterator[str]:
    indent = f"padding-left:{min(row.depth, _DEEPEST) * 1.1:.1f}rem"
    failed = " failed" if row.is_failed else ""
    if row.bar is None:
        yield f'<div class="row"><span class="place whole" style="{indent}">{_text(row.name)}</span></div>\n'
        return
    yield (
        f'<details>\n<summary><span class="row"><span class="name{failed}" style="{indent}">{_text(row.name)}</span>'
        f'<span class="place">{_text(row.place)}</span>{_lane(row.bar, f"{row.kind}{failed}")}'
        f'<span class="took">{milliseconds(row.duration_ns)}</span></span>\n'
    )
    for note in row.notes:
        yield f'<span class="note{failed}">{_text(note)}</span>\n'
    yield '</summary>\n<div class="more">\n'
    if row.span is not None:
        yield from _details(row.span, axis_ns)
    if row.blocks:
        yield from _blocks(row.blocks)
    yield "</div>\n</details>\n"


def _lane(bar: Bar, kind: str) -> str:
    left = min(bar.begin * 100, 99.7)
    width = min(bar.length * 100, 100 - left)
    return f'<span class="lane"><span class="bar {kind}" style="left:{left:.3f}%;width:{width:.3f}%"></span></span>'


def _details(span: Span, axis_ns: int) -> Iterator[str]:
    facts: dict[str, object] = {
        "span id": span.span_id,
        "parent": span.parent_id or "none",
        "start": f"{timestamp(span.start_ns)}, {(span.start_ns - axis_ns) / 1e6:,.3f} ms after the axis begins",
    }
    if span.message:
        facts["status"] = span.message
    if span.links:
        facts["linked traces"] = ", ".join(span.links)
    yield from _table({**facts, **_readable(span.attributes)})
    for event in span.events:
        at = "" if event.time_ns is None else f", {(event.time_ns - axis_ns) / 1e6:,.3f} ms after the axis begins"
        yield f"<p>event <code>{_text(event.name)}</code>{at}</p>\n"
        yield from _table(_readable(event.attributes))


def _readable(attributes: Attributes) -> dict[str, object]:
    return {
        name: ", ".join(map(str, value)) if isinstance(value, tuple) else value for name, value in attributes.items()
    }


def _table(facts: Mapping[str, object]) -> Iterator[str]:
    yield "<table>\n"
    for name, value in facts.items():
        yield f"<tr><th>{_text(name)}</th><td>{_text(str(value))}</td></tr>\n"
    yield "</table>\n"


def _blocks(blocks: Sequence[Span]) -> Iterator[str]:
    columns = [(title, name) for title, name in _BLOCK_COLUMNS if any(name in block.attributes for block in blocks)]
    yield f"<p>{counted(len(blocks), 'block span')}</p>\n<table>\n<tr>"
    yield from (f"<th>{title}</th>" for title, _ in columns)
    yield "</tr>\n"
    for block in blocks:
        yield f"<tr>{''.join(f'<td>{_text(block.text(name))}</td>' for _, name in columns)}</tr>\n"
    yield "</table>\n"


def _text(text: str) -> str:
    return html.escape(printable(text))
