# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
"""The variables at the top of each board, and the matchers that make a query obey them."""

from typing import Final

from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import common, dashboard as models

DATA_SOURCE: Final = common.DataSourceRef(type_val="prometheus", uid="${datasource}")

TARGETS: Final = 'job=~"$job", instance=~"$instance"'
"""For metrics that Prometheus makes itself, such as `up`."""
SELECTED: Final = f'{TARGETS}, model_name=~"$model", transfer_mode=~"$mode", connector_version=~"$version"'
"""For metrics of vLLM and of the suite."""

# Stock instances have vLLM's metrics only, and some fleets have no stock instances: either shows up.
_INSTANCES: Final = '{__name__=~"nixl_connector_info|vllm:nixl_bytes_transferred_count", %s}'
_ALL: Final = models.VariableOption(selected=True, text="All", value="$__all")


def _labels(name: str, label: str, of: str, title: str, *, all_value: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(title)
        .datasource(DATA_SOURCE)
        .query(f"label_values({of}, {label})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(all_value)
        .current(_ALL)
    )


def variables() -> list[Builder[models.VariableModel]]:
    """Each narrows the choice of the next. With `All`, mode and version match instances that tell none: stock ones."""
    info = f"nixl_connector_info{{{TARGETS}}}"
    return [
        builders.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        _labels("job", "job", _INSTANCES % 'job=~".+"', "Job", all_value=".+"),
        _labels("instance", "instance", _INSTANCES % 'job=~"$job"', "Instance", all_value=".+"),
        _labels("model", "model_name", _INSTANCES % TARGETS, "Model", all_value=".+"),
        _labels("mode", "transfer_mode", info, "Transfer mode", all_value=".*"),
        _labels("version", "connector_version", info, "Connector version", all_value=".*"),
        builders.DatasourceVariable("trace").label("Traces").type("tempo"),
    ]
