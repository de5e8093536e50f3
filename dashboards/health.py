# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""Whether the other boards can be believed."""

from dashboards import config, house
from dashboards.house import Panel, merge, organize, stat, table, timeseries, traces
from dashboards.queries import OF_NIXL, Query, events, rates, targets


def board() -> house.Board:
    """The board about the telemetry itself."""
    return house.board(
        config.HEALTH,
        "Telemetry health",
        "Whether the suite works: its own errors, what it dropped, and what is scraped.",
        {
            "Can the other boards be believed": _summary(),
            "Errors and drops": _errors(),
            "Scraping": _scraping(),
        },
        about="""
            Telemetry never stops serving: what fails or does not fit is counted here instead.
            Metrics travel with the output of engine steps, so a value is as old as the last step, and an idle engine
            tells nothing new.
            """,
    )


def _summary() -> list[Panel]:
    return [
        stat(
            "Errors",
            "Failures inside the telemetry in the time shown; serving went on without it.",
            "short",
            events("nixl_telemetry_errors_total{SELECTED}"),
            steps={1: config.ATTENTION},
            whole=True,
            runbooks=["NixlTelemetryErrors"],
        ),
        stat(
            "Dropped",
            "Records in the time shown that did not fit into a bounded queue or table.",
            "short",
            events("nixl_telemetry_dropped_total{SELECTED}"),
            steps={1: config.ATTENTION},
            whole=True,
            runbooks=["NixlTelemetryDropping"],
        ),
        stat(
            "Audit records",
            "Records that were written to the audit trail in the time shown; 0 where it is off.",
            "short",
            events("nixl_audit_records_total{SELECTED}"),
            whole=True,
        ),
        stat(
            "Engines with the suite",
            "Engines whose connector is instrumented.",
            "short",
            "count(nixl_connector_info{SELECTED}) or vector(0)",
        ),
        stat(
            "Stock engines",
            "Engines with a NIXL connector and without the suite: the other boards know little of them.",
            "short",
            'count(vllm:nixl_bytes_transferred_count{SELECTED, transfer_mode=""}) or vector(0)',
        ),
        stat(
            "Instances down",
            "Instances that Prometheus cannot scrape, of jobs in which there was a NIXL connector.",
            "short",
            targets(up=0),
            steps={1: config.BAD},
            runbooks=["NixlTargetDown", "NixlMetricsAbsent"],
        ),
    ]


def _errors() -> list[Panel]:
    return [
        timeseries(
            "Errors, by signal",
            "What part of the suite failed. The log of the instance has one line for each cause.",
            "ops",
            rates("nixl_telemetry_errors_total{SELECTED}", by="signal"),
            colours=config.of_values("nixl_telemetry_errors_total", "signal"),
            many=True,
            span=12,
            runbooks=["NixlTelemetryErrors"],
        ),
        timeseries(
            "Dropped, by signal",
            "`metrics`: gauges may be off until a restart; `spans`: the collector is too slow, or away.",
            "ops",
            rates("nixl_telemetry_dropped_total{SELECTED}", by="signal"),
            colours=config.of_values("nixl_telemetry_dropped_total", "signal"),
            many=True,
            span=12,
            runbooks=["NixlTelemetryDropping"],
            links=[traces("Spans that arrived", '{ instrumentation:name = "nixl_telemetry" }')],
        ),
        table(
            "Errors and drops, by instance",
            "In the time shown.",
            "sum by (instance) (increase(nixl_telemetry_errors_total{SELECTED}[$__range]))",
            "sum by (instance) (increase(nixl_telemetry_dropped_total{SELECTED}[$__range]))",
            "sum by (instance) (increase(nixl_audit_records_total{SELECTED}[$__range]))",
            steps=[
                merge(),
                organize(
                    instance="Instance",
                    **{"Value #A": "Errors", "Value #B": "Dropped", "Value #C": "Audit records"},
                    hidden=["Time"],
                ),
            ],
            columns={"/.*/": {"decimals": 0}},
            sort="Errors",
            descending=True,
            span=12,
            height=10,
            runbooks=["NixlTelemetryErrors", "NixlTelemetryDropping"],
        ),
        timeseries(
            "Audit records, by instance",
            "Records that were written to the audit trail; 0 where it is off.",
            "ops",
            rates("nixl_audit_records_total{SELECTED}", by="instance"),
            many=True,
            span=12,
            height=10,
        ),
    ]


def _scraping() -> list[Panel]:
    return [
        timeseries(
            "Instances up and down",
            "By whether Prometheus could scrape them; of jobs in which there was a NIXL connector.",
            "short",
            Query(targets(up=1), "up"),
            Query(targets(up=0), "down"),
            stack=True,
            colours={"up": config.GOOD, "down": config.BAD},
            runbooks=["NixlTargetDown", "NixlMetricsAbsent"],
        ),
        timeseries(
            "Time of a scrape, the longest",
            "vLLM's API server answers between requests: a slow answer is a busy server.",
            "s",
            Query(f"topk(5, scrape_duration_seconds{{TARGETS}} {OF_NIXL})", "{{instance}}"),
            many=True,
        ),
        timeseries(
            "Samples of a scrape, the most",
            "All metrics of vLLM. It does not grow with traffic.",
            "short",
            Query(f"topk(5, scrape_samples_scraped{{TARGETS}} {OF_NIXL})", "{{instance}}"),
            many=True,
        ),
    ]
