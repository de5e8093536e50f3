# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The house style, once: a board's module says what is shown, and here is how."""

import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import quote

from grafana_foundation_sdk.builders import (
    common as parts,
    dashboard as builders,
    heatmap as heatmaps,
    prometheus,
    stat as stats,
    table as tables,
    text as texts,
    timeseries as lines,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import (
    common,
    dashboard as models,
    heatmap as heatmap_models,
    prometheus as prometheus_models,
    text as text_models,
)
from grafana_foundation_sdk.models.dashboard import DataTransformerConfig, DynamicConfigValue

from dashboards import config
from dashboards.queries import OF_NIXL, Query
from dashboards.variables import DATA_SOURCE, variables
from nixl_telemetry.mixin.boards import TITLE_PREFIX, threshold

Charted = TypeVar("Charted", lines.Panel, stats.Panel, tables.Panel, heatmaps.Panel)
Link = builders.DashboardLink


@dataclass(frozen=True)
class Panel:
    """A panel, and the settings of the alerts that are steps of its thresholds."""

    builder: lines.Panel | stats.Panel | tables.Panel | heatmaps.Panel | texts.Panel
    knobs: tuple[str | None, ...] = ()
    """One for each step, ``None`` for a step that has a number of its own."""


@dataclass(frozen=True)
class Board:
    """A board, and the settings of its panels that have some, by their ids."""

    dashboard: models.Dashboard
    knobs: Mapping[str, tuple[str | None, ...]]


NOTHING: Final = "nothing from these instances in this time"
"""What a panel says that has no values."""
_TOP: Final = {"ops": 0.01, "short": 1, "percentunit": 0.1, "s": 0.001, "Bps": 1000, "bytes": 1000}
"""Where an axis ends at least, by unit: Grafana's own for nothing but zeros is 100, and 10,000 %."""


def traces(title: str, traceql: str) -> Link:
    """A link to the spans behind a panel's values, in the trace store that the board's variable names."""
    query = {"refId": "A", "queryType": "traceql", "query": traceql, "datasource": {"uid": "${trace}"}}
    pane = {"datasource": "${trace}", "queries": [query], "range": {"from": "${__from}", "to": "${__to}"}}
    panes = quote(json.dumps({"nixl": pane}), safe="${}")  # Grafana sees its variables only as they are written
    return _link(title, f"/explore?schemaVersion=1&panes={panes}")


def board_link(title: str, uid: str) -> Link:
    """A link to another board, for the same time and the same choice of instances."""
    return _link(title, f"/d/{uid}?${{__url_time_range}}&${{__all_variables}}", blank=False)


def timeseries(
    title: str,
    description: str,
    unit: str,
    *queries: Query,
    span: int = 8,
    height: int = 8,
    stack: bool = False,
    many: bool = False,
    limit: str | None = None,
    colours: Mapping[str, str] | None = None,
    runbooks: Sequence[str] = (),
    links: Sequence[Link] = (),
) -> Panel:
    """Lines from 0 up; the lower quantile is dashed.

    Args:
        title: what is shown.
        description: how it is measured, and what to make of it.
        unit: Grafana's name of the unit.
        queries: what to draw.
        span: width, of 24.
        height: height in grid units.
        stack: whether the values add up to something.
        many: whether there are many lines: then the legend is a table, the greatest first.
        limit: the setting that says where an alert begins, drawn as a dashed line.
        colours: by name of a line, or a pattern between slashes.
        runbooks: alerts that are about this.
        links: where a click on a line leads.
    """
    legend = parts.VizLegendOptions().show_legend(True)
    if many:
        legend = legend.display_mode(common.LegendDisplayMode.TABLE).placement(common.LegendPlacement.RIGHT)
        legend = legend.calcs(["max"]).sort_by("Max").sort_desc(True)
    else:
        legend = legend.display_mode(common.LegendDisplayMode.LIST).placement(common.LegendPlacement.BOTTOM).calcs([])
    panel = (
        _common(lines.Panel(), title, description, span, height, queries, runbooks, instant=False)
        .unit(unit)
        .min(0)
        .axis_soft_max(_TOP[unit])
        .no_value(NOTHING)
        .legend(legend)
        .tooltip(parts.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING))
        .line_width(0 if stack else 1)  # the line of a 0 would be on top of the stack
        .fill_opacity(60 if stack else 10)
        .show_points(common.VisibilityMode.AUTO)
        .color_scheme(builders.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC))
        .data_links(list(links))
    )
    if stack:
        panel.stacking(parts.StackingConfig().mode(common.StackingMode.NORMAL).group("A"))
    if limit is not None:
        panel.thresholds(_steps({limit: config.BAD}, "transparent"))
        panel.thresholds_style(parts.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED))
    if colours is None and any(query.legend.startswith("p50") for query in queries):
        colours = {"/^p/": "blue"}
    for name, colour in (colours or {}).items():
        override = panel.override_by_regexp if name.startswith("/") else panel.override_by_name
        override(name, [DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})])
    if any(query.legend.startswith("p50") for query in queries):
        panel.override_by_regexp("/^p50/", [DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [6, 4]})])
    return Panel(panel, (limit,) if limit else ())


def stat(
    title: str,
    description: str,
    unit: str,
    query: str,
    *,
    steps: Mapping[float | str, str] | None = None,
    whole: bool = False,
    span: int = 4,
    runbooks: Sequence[str] = (),
    links: Sequence[Link] = (),
) -> Panel:
    """One number, and a line of its past unless it is about the `whole` time.

    `steps` judge it, by numbers or by settings of the alerts: it is green below them.
    """
    panel = (
        _common(stats.Panel(), title, description, span, 4, [Query(query, title)], runbooks, instant=whole)
        .unit(unit)
        .no_value("no data")
        .reduce_options(parts.ReduceDataOptions().calcs(["lastNotNull"]))
        .graph_mode(common.BigValueGraphMode.NONE if whole else common.BigValueGraphMode.AREA)
        .color_mode(common.BigValueColorMode.BACKGROUND_SOLID if steps else common.BigValueColorMode.VALUE)
        .thresholds(_steps(steps or {}, config.GOOD if steps else "blue"))
        .data_links(list(links))
    )
    return Panel(panel, tuple(step if isinstance(step, str) else None for step in steps or ()))


def heatmap(title: str, description: str, unit: str, histogram: str, *, span: int = 8) -> Panel:
    """How often each range of a histogram was met over time; `unit` is that of the ranges."""
    query = Query(f"sum by (le) (rate({histogram}[$__rate_interval]))", "{{le}}")
    return Panel(
        _common(heatmaps.Panel(), title, description, span, 8, [query], (), instant=False, form="heatmap")
        .unit(unit)
        .no_value(NOTHING)
        .calculate(False)
        .y_axis(heatmaps.YAxisConfig().unit(unit))
        .cell_values(heatmaps.CellValues().unit("ops"))
        .cell_gap(1)
        .color(
            heatmaps.HeatmapColorOptions()
            .mode(heatmap_models.HeatmapColorMode.SCHEME)
            .scheme("Oranges")
            .exponent(0.5)
            .steps(64)
        )
        .tooltip(heatmaps.HeatmapTooltip().mode(common.TooltipDisplayMode.SINGLE).y_histogram(True))
        .show_legend()
    )


def table(
    title: str,
    description: str,
    *queries: str,
    unit: str = "none",
    steps: Sequence[DataTransformerConfig] = (),
    columns: Mapping[str, Mapping[str, Any]] | None = None,
    sort: str | None = None,
    descending: bool = False,
    none: str = NOTHING,
    span: int = 24,
    height: int = 8,
    runbooks: Sequence[str] = (),
) -> Panel:
    """Rows as they are now.

    Args:
        title: what is shown.
        description: what to make of it.
        queries: each gives rows of labels and a value.
        unit: of numbers in columns that have none of their own.
        steps: what Grafana does with them.
        columns: settings of columns by name, such as `unit`.
        sort: the column to sort by.
        descending: whether the greatest is first.
        none: what an empty cell says.
        span: width, of 24.
        height: height in grid units.
        runbooks: alerts that are about this.
    """
    asked = [Query(query) for query in queries]
    panel = _common(tables.Panel(), title, description, span, height, asked, runbooks, instant=True, form="table")
    panel.unit(unit).no_value(none).min_width(80).show_header(True).cell_height(common.TableCellHeight.SM)
    panel.thresholds(_steps({}, "transparent")).transformations(list(steps))
    if sort:
        panel.sort_by([parts.TableSortByFieldState().display_name(sort).desc(descending)])
    for name, settings in (columns or {}).items():
        override = panel.override_by_regexp if name.startswith("/") else panel.override_by_name
        override(name, [DynamicConfigValue(key, value) for key, value in settings.items()])
    return Panel(panel)


def organize(*, hidden: Sequence[str] = (), **titles: str) -> DataTransformerConfig:
    """The columns of a table in order, by their labels' names, and what is not shown."""
    order = {name: index for index, name in enumerate(titles)}
    excluded = dict.fromkeys(hidden, True)
    return transform("organize", excludeByName=excluded, indexByName=order, renameByName=titles)


def merge() -> DataTransformerConfig:
    """One table of several queries: rows with the same labels become one."""
    return transform("merge")


def matrix(rows: str, columns: str, cells: str, title: str) -> list[DataTransformerConfig]:
    """A table of two labels, in the order of the label `order`; `title` is that of the first column."""
    return [
        transform("sortBy", fields={}, sort=[{"field": "order"}]),
        transform("groupingToMatrix", rowField=rows, columnField=columns, valueField=cells, emptyValue="null"),
        organize(**{f"{rows}\\{columns}": title}),
    ]


def transform(name: str, **options: object) -> DataTransformerConfig:
    """What Grafana does with a table, by its name and options."""
    return DataTransformerConfig(name, options=options)


def coloured_text(colours: Mapping[str, str]) -> dict[str, object]:
    """Settings of a column whose texts have colours."""
    mapped = {text: {"color": colour, "text": text} for text, colour in colours.items()}
    return {"custom.cellOptions": {"type": "color-text"}, "mappings": [{"type": "value", "options": mapped}]}


def board(uid: str, title: str, description: str, rows: Mapping[str, Sequence[Panel]], *, about: str) -> Board:
    """A board of rows of panels, in order; panels are numbered in order, too, and the last one says what to know."""
    made = (
        builders.Dashboard(f"{TITLE_PREFIX}{title}")
        .uid(uid)
        .description(description)
        .tags([config.TAG])
        .readonly()
        .timezone("utc")
        .time(config.TIME_FROM, "now")
        .refresh(config.REFRESH)
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .variables(variables())
        .annotations(_annotations())
        .link(
            builders.DashboardLink("NIXL boards")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags([config.TAG])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
    )
    number = itertools.count(1)
    knobs = {}
    for row, panels in {**rows, "About": [_about(about)]}.items():
        made.with_row(builders.Row(row).id(next(number)))
        for panel in panels:
            made.with_panel(panel.builder.id(id_ := next(number)))
            if any(panel.knobs):
                knobs[str(id_)] = panel.knobs
    return Board(made.build(), knobs)


# ----------------------------------------------------------------------------------------------------------- Underneath


def _common(
    panel: Charted,
    title: str,
    description: str,
    span: int,
    height: int,
    queries: Sequence[Query],
    runbooks: Sequence[str],
    *,
    instant: bool,
    form: str = "time_series",
) -> Charted:
    panel = panel.title(title).description(description).span(span).height(height).datasource(DATA_SOURCE)
    panel = panel.links([_link(f"Runbook: {alert}", config.runbook(alert)) for alert in runbooks])
    for ref_id, query in zip("ABCDEFGHIJ", queries, strict=False):
        target = prometheus.Dataquery().ref_id(ref_id).datasource(DATA_SOURCE).expr(query.promql())
        target = target.legend_format(query.legend).format(prometheus_models.PromQueryFormat(form))
        panel = panel.with_target(target.instant() if instant else target.range())
    return panel


def _about(markdown: str) -> Panel:
    panel = texts.Panel().title("About this board").description("What the board is for, and what it cannot show.")
    panel.mode(text_models.TextMode.MARKDOWN).content(inspect.cleandoc(markdown))
    return Panel(panel.span(24).height(4))


def _annotations() -> list[Builder[models.AnnotationQuery]]:
    def annotation(name: str, colour: str, expr: str, text: str) -> builders.AnnotationQuery:
        made = builders.AnnotationQuery().name(name).icon_color(colour).datasource(DATA_SOURCE).enable(True)
        return made.expr(Query(expr).promql()).title_format(name).text_format(text)

    versions = "count by (vllm_version, connector_version) (nixl_connector_info{SELECTED}%s)"
    return [
        # The value is when the process started: exact, and drawn once however often it is scraped.
        annotation("Restarts", "yellow", f"process_start_time_seconds{{TARGETS}} * 1000 {OF_NIXL}", "{{instance}}")
        .step("60s")
        .use_value_for_time(True),
        annotation(
            "Version changes",
            "blue",
            f"{versions % ''} unless {versions % ' offset 1m'}",
            "vLLM {{vllm_version}}, connector version {{connector_version}}",
        ).step("60s"),
    ]


def _link(title: str, url: str, *, blank: bool = True) -> Link:
    return builders.DashboardLink(title).type(models.DashboardLinkType.LINK).url(url).target_blank(blank)


def _steps(colours: Mapping[Any, str], below: str) -> builders.ThresholdsConfig:
    steps = [models.Threshold(color=below)]
    for step, colour in colours.items():
        value = threshold(config.ALERTS, step) if isinstance(step, str) else step
        steps.append(models.Threshold(value=value, color=colour))
    return builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps)
