// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: Copyright contributors to the nixl_telemetry project
import { PanelProps } from '@grafana/data';
import { TimeSeries } from '@grafana/ui';

import { Empty, record } from './common';

const LEGEND = { calcs: [], showLegend: true, displayMode: 'list', placement: 'bottom' };

export function TimeSeriesPanel(props: PanelProps<any>) {
  record('timeseries', props);
  const { data, width, height, timeRange, timeZone, options } = props;
  if (!data.series.length) {
    return <Empty {...props} />;
  }
  const legend: any = { ...LEGEND, ...options.legend };
  return <TimeSeries {...{ width, height, timeRange, timeZone, options, legend }} frames={data.series} />;
}
