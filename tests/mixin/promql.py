# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""What a query asks for, read from its syntax tree, and the metrics that there are to ask for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import promql_parser

from nixl_telemetry.signals.catalogue import ADDED_LABELS, CATALOGUE, COMMON_LABELS, Kind

TARGET_LABELS: Final = frozenset({"job", "instance"})
"""On every series that Prometheus scraped."""
_VLLM_LABELS: Final = frozenset(COMMON_LABELS) - frozenset(ADDED_LABELS)

_VLLM: Final[Mapping[str, tuple[Kind, tuple[str, ...]]]] = {
    "vllm:request_success_total": (Kind.COUNTER, ("finished_reason",)),
    "vllm:num_requests_running": (Kind.STATE, ()),
    "vllm:num_requests_waiting": (Kind.STATE, ()),
    # A stock instance has these without the labels that the suite adds.
    "vllm:nixl_xfer_time_seconds": (Kind.HISTOGRAM, tuple(ADDED_LABELS)),
    "vllm:nixl_post_time_seconds": (Kind.HISTOGRAM, tuple(ADDED_LABELS)),
    "vllm:nixl_bytes_transferred": (Kind.HISTOGRAM, tuple(ADDED_LABELS)),
    "vllm:nixl_num_descriptors": (Kind.HISTOGRAM, tuple(ADDED_LABELS)),
    "vllm:nixl_num_failed_transfers_total": (Kind.COUNTER, tuple(ADDED_LABELS)),
    "vllm:nixl_num_failed_notifications_total": (Kind.COUNTER, tuple(ADDED_LABELS)),
    "vllm:nixl_num_kv_expired_reqs_total": (Kind.COUNTER, tuple(ADDED_LABELS)),
    "vllm:nixl_num_notifications_after_expiry_total": (Kind.COUNTER, tuple(ADDED_LABELS)),
}
"""Metrics of vLLM's that alerts and boards may use, with the labels that they have beside model and engine."""


def _series(name: str, kind: Kind, labels: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    if kind is not Kind.HISTOGRAM:
        yield name, labels
        return
    yield f"{name}_bucket", labels | {"le"}
    yield f"{name}_count", labels
    yield f"{name}_sum", labels


KNOWN: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("up", "scrape_duration_seconds", "scrape_samples_scraped"), TARGET_LABELS),
    "process_start_time_seconds": TARGET_LABELS,
    **{
        name: labels | TARGET_LABELS
        for metric in CATALOGUE.values()
        for name, labels in _series(metric.name, metric.kind, frozenset((*COMMON_LABELS, *metric.label_names)))
    },
    **{
        name: labels | TARGET_LABELS
        for base, (kind, own) in _VLLM.items()
        for name, labels in _series(base, kind, _VLLM_LABELS | frozenset(own))
    },
}
"""Labels of every series that a query may name, by its name on ``/metrics``."""


@dataclass(frozen=True)
class Selector:
    """A metric that a query selects."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]
    """Label, operator and value of each."""
    within: tuple[str, ...]
    """Functions and aggregations around it, the innermost last."""
    labels: frozenset[str]
    """Labels that it is grouped, joined and matched by; those of another side of an operator are not here."""

    @property
    def unknown(self) -> frozenset[str]:
        """Labels that the metric does not have; the name itself if it is not known at all."""
        known = KNOWN.get(self.metric)
        return frozenset({self.metric}) if known is None else self.labels - known


_OPERATORS: Final = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}


def selectors(expr: str) -> list[Selector]:
    """Every selector of a query, which must parse; variables of a board have to be replaced before."""
    return list(_walk(promql_parser.parse(expr), (), frozenset()))


def _walk(node: Any, within: tuple[str, ...], labels: frozenset[str]) -> Iterator[Selector]:
    match node:
        case promql_parser.VectorSelector():
            matchers = tuple(
                (each.name, _OPERATORS[str(each.op).removeprefix("MatchOp.")], each.value)
                for each in node.matchers.matchers
            )
            name = node.name or next(value for label, _, value in matchers if label == "__name__")
            own = {label for label, _, _ in matchers} - {"__name__"}
            yield Selector(name, matchers, within, labels | own)
        case promql_parser.MatrixSelector():
            yield from _walk(node.vector_selector, within, labels)
        case promql_parser.AggregateExpr():
            by = frozenset(node.modifier.labels) if node.modifier else frozenset()
            yield from _walk(node.expr, (*within, str(node).split("(")[0].split()[0]), (labels - _made(node)) | by)
        case promql_parser.Call():
            for argument in node.args:
                yield from _walk(argument, (*within, node.func.name), labels - _made(node))
        case promql_parser.BinaryExpr():
            left, right = _of_both_sides(str(node.op), node.modifier, labels)
            yield from _walk(node.lhs, within, left)
            yield from _walk(node.rhs, within, right)
        case promql_parser.UnaryExpr() | promql_parser.ParenExpr() | promql_parser.SubqueryExpr():
            yield from _walk(node.expr, within, labels)
        case promql_parser.NumberLiteral() | promql_parser.StringLiteral():
            return
        case _:
            raise TypeError(f"a query may hold a {type(node).__name__}, which this does not read")


def _made(node: Any) -> frozenset[str]:
    """Labels that a function or an aggregation makes, and that what is in it need not have."""
    match node:
        case promql_parser.Call() if node.func.name in {"label_replace", "label_join"}:
            made: Any = node.args[1]
        case promql_parser.AggregateExpr(param=promql_parser.StringLiteral()):  # that of count_values
            made = node.param
        case _:
            return frozenset()
    return frozenset({made.val})


def _of_both_sides(operator: str, modifier: Any, labels: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Labels that the sides of an operator need to have, if its result is to have ``labels``."""
    matching = modifier and modifier.matching
    listed = frozenset(matching.labels if matching else ())
    # A label that is ignored is one that the left side has and the right one has not.
    on, ignored = (frozenset(), listed) if str(matching).startswith("ignoring") else (listed, frozenset())
    if operator in {"and", "unless"}:  # what is on the right only decides
        return labels | on | ignored, on
    if modifier is None:
        return labels, labels
    copied = frozenset(modifier.group_labels or ())
    many, one = (labels - copied) | on, copied | on
    match str(modifier.card).split(".")[-1]:
        case "ManyToOne":
            return many, one
        case "OneToMany":
            return one, many
        case _:
            return labels | on, labels | on
