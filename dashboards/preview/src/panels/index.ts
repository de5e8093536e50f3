// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
// The panel types that are drawn here, around the components that Grafana's own panels are made of.

import { FieldColorModeId, FieldConfigProperty, identityOverrideProcessor, PanelPlugin, PanelProps } from '@grafana/data';
import { ComponentType } from 'react';

import { HeatmapPanel } from './heatmap';
import { StatPanel } from './stat';
import { TablePanel } from './table';
import { TextPanel } from './text';
import { TimeSeriesPanel } from './timeseries';

/** Options of a field by their defaults; Grafana drops those that a plugin does not name. */
type Options = Record<string, unknown>;

const TIME_SERIES: Options = {
  ...{ drawStyle: 'line', lineInterpolation: 'linear', lineWidth: 1, lineStyle: undefined, lineColor: undefined },
  ...{ fillOpacity: 0, fillBelowTo: undefined, fillColor: undefined, gradientMode: 'none' },
  ...{ showPoints: 'auto', pointSize: 5, pointColor: undefined, spanNulls: false, insertNulls: false },
  ...{ stacking: { mode: 'none', group: 'A' }, transform: undefined, barAlignment: 0, barWidthFactor: 0.6 },
  ...{ axisPlacement: 'auto', axisLabel: '', axisColorMode: 'text', axisCenteredZero: false, axisWidth: undefined },
  ...{ axisSoftMin: undefined, axisSoftMax: undefined, axisGridShow: undefined, axisBorderShow: undefined },
  ...{ scaleDistribution: { type: 'linear' }, thresholdsStyle: { mode: 'off' } },
  hideFrom: { tooltip: false, viz: false, legend: false },
};
const TABLE: Options = {
  ...{ align: 'auto', cellOptions: { type: 'auto' }, inspect: false, filterable: false, hideFrom: undefined },
  ...{ width: undefined, minWidth: undefined, wrapText: false, wrapHeaderText: false },
};
const HEATMAP: Options = { hideFrom: undefined, scaleDistribution: undefined };

export const plugins: Record<string, PanelPlugin> = Object.fromEntries(
  [
    pluginOf('timeseries', TimeSeriesPanel, TIME_SERIES, FieldColorModeId.PaletteClassic),
    pluginOf('stat', StatPanel),
    pluginOf('table', TablePanel, TABLE),
    pluginOf('heatmap', HeatmapPanel, HEATMAP),
    pluginOf('text', TextPanel),
  ].map((plugin) => [plugin.meta.id, plugin])
);

function pluginOf(
  id: string,
  component: ComponentType<PanelProps<any>>,
  options: Options = {},
  color: FieldColorModeId = FieldColorModeId.Thresholds
): PanelPlugin {
  const plugin = new PanelPlugin<any, any>(component).useFieldConfig({
    standardOptions: { [FieldConfigProperty.Color]: { defaultValue: { mode: color } } } as any,
    useCustomConfig: (builder) => {
      for (const [name, defaultValue] of Object.entries(options)) {
        builder.addCustomEditor({
          ...{ id: name, path: name, name, defaultValue, process: identityOverrideProcessor },
          ...{ editor: () => null, override: () => null, shouldApply: () => true },
        } as any);
      }
    },
  });
  plugin.meta = { id, name: id, type: 'panel', sort: 0, module: '', baseUrl: '', info: { logos: {} } } as any;
  return plugin;
}
